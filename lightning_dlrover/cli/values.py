"""Argument types of the command line: each parses a text into a value, or refuses it."""

from __future__ import annotations

import argparse
import contextlib
import math
import re

MAX_COUNT = 999_999
"""Largest count of anything: more is a typing error."""

MAX_WORKERS = 100_000
"""Largest number of workers of a job."""

MAX_AMOUNT = 1e9
"""Largest number of cores, of seconds, or of any other amount."""


def cpus(text: str) -> tuple[int, int]:
    """Minimum and maximum cores of a node, from `4` or `2:8`."""
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not N or N:MAX, from 1 to 9999, such as 4 or 2:8")
    return int(match[1]), int(match[2] or match[1])


def memory(text: str) -> int:
    """MiB, from `16G`, `512Mi` or `1.5T`. Units are powers of 1024, as in Slurm."""
    from lightning_dlrover.rdzv.job.records import MAX_MEMORY_MB

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])(?:i?B?)", text, re.I)
    size = float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()] if match else 0
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of memory, such as 512M or 16G")
    if not 1 <= size <= MAX_MEMORY_MB:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1M and {MAX_MEMORY_MB >> 20}T")
    return math.ceil(size)


def memory_range(text: str) -> tuple[int, int]:
    """Minimum and maximum MiB of a node, from `16G` or `16G:64G`."""
    low, _, high = text.partition(":")
    sizes = memory(low), memory(high or low)
    if sizes[0] > sizes[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: SIZE must be at most MAX")
    return sizes


def duration(text: str) -> float:
    """Seconds, from `3600`, `90m`, `2h` or `1.5d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0, such as 3600, 90m, 2h or 1.5d")
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    if seconds > MAX_AMOUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_AMOUNT:,.0f} s")
    return seconds


def lease(text: str) -> float:
    """Seconds of a lease, as `duration`. etcd counts them as a whole, and grants at least 2 s."""
    if (ttl_s := duration(text)) < 2 or ttl_s != int(ttl_s):
        raise argparse.ArgumentTypeError(f"{text!r} is not a lease of etcd: give whole seconds, at least 2, such as 5s")
    return ttl_s


def count(text: str) -> int:
    """A whole number above 0."""
    return _whole(text, MAX_COUNT)


def processes(text: str) -> int:
    """A number of processes that run at once on this machine."""
    return _whole(text, 1024)


def _whole(text: str, most: int) -> int:
    if not text.isdecimal() or not 0 < int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
    return int(text)


def num_workers(text: str) -> int:
    """A number of workers, which may be refused later: the job has limits of its own."""
    if not text.lstrip("-").isdecimal() or not abs(int(text)) <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers from 1 to {MAX_WORKERS}")
    return int(text)


def given(text: str) -> str:
    """Any text but an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("its value is empty, perhaps an unset variable; give a value, or leave the option out")
    return text


def step(text: str) -> int:
    """The number of an optimizer update, from 1."""
    if not text.isdecimal() or not 0 < int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: give a whole number from 1 to 1000000000000")
    return int(text)


def row(text: str) -> tuple[str, int]:
    """A file and the number of a row in it, from `FILE:ROW`."""
    file, _, number = text.rpartition(":")
    if not file or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:ROW, such as part-0001.parquet:17; the first row has number 0")
    return file, int(number)


def setting(text: str) -> int:
    """A setting of a plan, within the range of the plan's record."""
    from lightning_dlrover.rdzv.job.records import MAX_SETTING

    if not text.isdecimal() or int(text) > MAX_SETTING:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MAX_SETTING}")
    return int(text)


def workers(text: str) -> tuple[int, int]:
    """Minimum and maximum workers, from `2` or `1:3`."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX, such as 1:3")
    low, high = int(match[1]), int(match[2] or match[1])
    if high > MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r}: MAX must be at most {MAX_WORKERS}")
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(
            f"{text!r}: MIN must be at least 1 and at most MAX, such as {min(low, high) or 1}:{max(low, high, 1)}"
        )
    return low, high


def workers_per_node(text: str) -> int:
    """Workers of a node; 0 for `gpu`, one for each of its GPUs."""
    if text == "gpu":
        return 0
    if not text.isdecimal() or not 0 < int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers from 1 to 1024, such as 8, and not `gpu`")
    return int(text)


def positive(text: str, meaning: str = "a number") -> float:
    """A number above 0; `meaning` names it in the error."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) <= MAX_AMOUNT:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not {meaning} above 0 and up to {MAX_AMOUNT:,.0f}")
