"""Resources in use by a job's processes, from `/proc`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from lightning_dlrover.observe.cgroups import PROC
from lightning_dlrover.observe.resources import CLOCK_TICKS_PER_S, status_bytes

__all__ = ["Families", "TreeUse", "families", "is_program", "marked", "tree_use"]

AGAIN_S = 0.25
"""Least seconds between two passes over all processes of the machine, unless a root is new."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STAT_BYTES = 1024
"""Longer than any first fields of a process's `stat`."""


@dataclass(frozen=True)
class TreeUse:
    """Use of all living processes of a job; the sums of those that have ended are gone."""

    cpu_s: float
    resident_bytes: int  # pages that several processes share count once
    peak_bytes: int  # largest peak of one process, which the kernel keeps, or the sum now if that is more
    num_processes: int


def families(roots: Iterable[int]) -> dict[int, list[int]]:
    """Return the ids of all processes below each root, by one pass over all processes of the machine."""
    children: dict[int, list[int]] = {}
    proc = str(PROC)  # a Path for each process would take as long as reading its file
    for name in os.listdir(proc):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError), open(f"{proc}/{name}/stat", "rb", buffering=0) as stream:
                fields = stream.read(STAT_BYTES).rpartition(b")")[2].split(None, 2)
                children.setdefault(int(fields[1]), []).append(int(name))
    found = {}
    for root in roots:
        below: list[int] = []
        to_visit = [root]
        while to_visit:
            new = children.get(to_visit.pop(), [])
            below += new
            to_visit += new
        found[root] = below
    return found


class Families:
    """The processes below some roots, looked up a few times a second."""

    def __init__(self) -> None:
        self._found: dict[int, list[int]] = {}
        self._at_s = float("-inf")

    def below(self, roots: Collection[int], now: float) -> dict[int, list[int]]:
        """Return the ids of all processes below each root."""
        if now - self._at_s >= AGAIN_S or not self._found.keys() >= set(roots):
            self._found, self._at_s = families(roots), now
        return self._found


def tree_use(pids: Iterable[int]) -> TreeUse:
    """Return the use of processes. Those that end meanwhile are left out."""
    cpu_s, resident, largest, number = 0.0, 0, 0, 0
    pids = list(pids)
    for pid in pids:
        with suppress(OSError, IndexError, ValueError):
            fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            # User and system time, of this process and of the children that it has waited for.
            cpu_s += sum(map(int, fields[11:15])) / CLOCK_TICKS_PER_S
            number += 1
            resident += _resident_bytes(pid, int(fields[21]) * PAGE_BYTES, len(pids) > 1)
            largest = max(largest, status_bytes("VmHWM", process=pid).get("VmHWM", 0))
    return TreeUse(cpu_s, resident, max(largest, resident), number)


def _resident_bytes(pid: int, resident: int, shares: bool) -> int:
    """Return a process's resident bytes; of pages that processes share, its part."""
    if shares:
        with suppress(OSError):
            for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    return 1024 * int(line.split()[1])
    return resident


def is_program(pid: int, file: str) -> bool:
    """Whether a process was started with this file among its arguments."""
    with suppress(OSError):
        return file.encode() in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    return False


def marked(variable: str, value: str) -> list[int]:
    """Return the ids of this user's processes with a variable of this value in their environment."""
    wanted = f"{variable}={value}".encode()
    found = []
    for name in os.listdir(PROC):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if wanted in (PROC / name / "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found
