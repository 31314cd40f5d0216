"""Options that several commands share, and the types of their values. Loads nothing slow."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_dlrover.cli.plugins import add_renamed_option
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.folders import DEFAULT_RUN_DIR

# The types of values: each parses a text into a value, or refuses it.

MAX_COUNT = 999_999
"""Largest count of anything: more is a typo."""

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


def moment(text: str) -> float:
    """Seconds since the epoch, from `+90`, `+5m`, the next `14:30` or `14:30:05`, or `2026-01-31T14:30:00Z`.

    A time without a zone is that of this machine.
    """
    if match := re.fullmatch(r"\+(\d+(?:\.\d+)?)([smhd]?)", text):
        from_now_s = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
        if from_now_s <= MAX_AMOUNT:
            return time.time() + from_now_s
    elif re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
        with contextlib.suppress(ValueError):
            clock, now = datetime.time.fromisoformat(text.rjust(5 if text.count(":") == 1 else 8, "0")), datetime.datetime.now()
            today = datetime.datetime.combine(now.date(), clock)
            return (today if today > now else today + datetime.timedelta(days=1)).timestamp()
    elif re.match(r"\d{4}-\d\d-\d\d[T ]", text):
        with contextlib.suppress(ValueError, OverflowError, OSError):
            at = datetime.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text)).timestamp()
            if at > time.time():
                return at
            raise argparse.ArgumentTypeError(f"{text!r} has passed")
    raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as +90, +5m, 14:30 or 2026-01-31T14:30:00Z")


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


def _whole(text: str, low: int, high: int, meaning: str = "a whole number") -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {meaning} from {low} to {high}")
    return int(text)


def count(text: str) -> int:
    """A whole number above 0."""
    return _whole(text, 1, MAX_COUNT)


def processes(text: str) -> int:
    """A number of processes that run at once on this machine."""
    return _whole(text, 1, 1024)


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
    return _whole(text, 1, 10**12, "a step: give a whole number")


def row(text: str) -> tuple[str, int]:
    """A file and the number of a row in it, from `FILE:ROW`."""
    file, _, number = text.rpartition(":")
    if not file or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:ROW, such as part-0001.parquet:17; the first row has number 0")
    return file, int(number)


def setting(text: str) -> int:
    """A setting of a plan, within the range of the plan's record."""
    from lightning_dlrover.rdzv.job.records import MAX_SETTING

    return _whole(text, 0, MAX_SETTING, "a number")


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


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of workers, from `1,2,4,8` or `pow2`."""
    from lightning_dlrover.rdzv.job.sizes import parse_sizes

    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def workers_per_node(text: str) -> int:
    """Workers of a node; 0 for `gpu`, one for each of its GPUs."""
    return 0 if text == "gpu" else _whole(text, 1, 1024, "`gpu`, nor a number of workers")


def positive(text: str, meaning: str = "a number") -> float:
    """A number above 0; `meaning` names it in the error."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) <= MAX_AMOUNT:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not {meaning} above 0 and up to {MAX_AMOUNT:,.0f}")


def listen_address(text: str) -> tuple[str, int]:
    """Host and port to listen at, from `9400`, `0.0.0.0:9400` or `[::]:9400`. Loopback without a host; port 0: any free one."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or not 0 <= int(port) <= 65535 or (colon and not host):
        raise argparse.ArgumentTypeError(f"{text!r} is not PORT or ADDRESS:PORT, such as 9400 or 0.0.0.0:9400")
    return host or "127.0.0.1", int(port)


# Groups of options that several commands share, and the options of each target.

TARGETS = ("local", "slurm", "kubernetes")

TIMEOUTS = {
    "join_timeout": "time that a node waits for room in the job after the controller has gone, such as 1h (default 10m)",
    "wait_timeout": "time that workers wait for the minimum of --workers after the controller has gone (default 10m)",
    "lease_ttl": "silence after which a node or worker counts as lost (default 5s), and after twice as long a run with --pool",
}
"""Timeouts of nodes and workers, by their keys in --rdzv-conf."""

SETTINGS = {
    "loader_workers": ("loader workers", "per worker; 0: the training process prepares its own batches"),
    "intra_op_threads": ("threads", "per worker; 0: one per core"),
    "prefetch_factor": ("batches ahead", "per loader worker"),
}
"""Fields of a plan that every worker carries out on its own: unit and help text."""

COUNTED = {name: texts[0] for name, texts in SETTINGS.items()} | {"node_cpus": "cores", "node_memory_mb": "MiB of memory"}
"""Units of a plan's fields for each worker and its node."""


def counted_field(name: str, value: int) -> str:
    """Return the value of a plan's field with its unit."""
    unit = COUNTED[name]
    return counted(value, unit.removesuffix("s")) if unit.endswith("s") else f"{value} {unit}"


NODE_OPTIONS = {
    "gpus": (
        "[TYPE:]N",
        "GPUs per node. TYPE names the resource on Kubernetes (default nvidia.com/gpu); --target local: N only",
    ),
    "work_dir": (
        "DIR",
        "working directory of the script. Default: the current folder (Slurm), the image's (Kubernetes). "
        "Only with --target slurm or kubernetes",
    ),
}
"""Options of each node that apply to any scheduler."""

SLURM_OPTIONS = {
    "partition": ("NAME", "partition of the nodes"),
    "account": ("NAME", "account charged for the nodes"),
    "qos": ("NAME", "quality of service of the nodes"),
    "time": ("LIMIT", "time limit of each node, such as 90 (minutes), 12:00:00 or 2-00"),
    "constraint": ("LIST", "required features of a node's host"),
    "nodelist": ("HOSTS", "hosts that nodes may use"),
    "exclude": ("HOSTS", "hosts that nodes must not use"),
    "gres": ("LIST", "generic resources of each node"),
    "setup": ("LINE", "shell commands to run before the script, such as 'module load cuda'"),
}
"""Fields of `SlurmOptions` that are passed on unchanged."""

KUBERNETES_OPTIONS = {
    "image": ("IMAGE", "container image of the nodes, with this package, and with the script unless a volume provides it"),
    "namespace": ("NAME", "namespace of the nodes (default: kubectl's current one)"),
    "service_account": ("NAME", "service account of the nodes"),
    "secret": ("NAME", "Secret with the files for etcd's authentication: password, ca.crt, tls.crt, tls.key"),
    "image_pull_secret": ("NAME", "Secret with the image registry's credentials"),
    "pod_endpoint": ("HOST:PORT", "address at which pods reach etcd (default: --endpoint)"),
    "pod_template": ("FILE", "YAML file with a pod template, for fields without an option here, such as tolerations"),
    "python": ("PROGRAM", "Python interpreter of the image (default python)"),
    "run_as": (
        "UID[:GID]",
        "user and group of the nodes' processes (default: the image's user, which must not be root); or root",
    ),
    "queue": ("NAME", "queue in which nodes wait: Volcano's (default: default), or Kueue's for plain Jobs (default: none)"),
}

REPEATED_OPTIONS = {
    "node_selector": ("LABEL=VALUE", "required label of a node's host"),
    "job_label": ("NAME=VALUE", "further label of each node's Job, such as kueue.x-k8s.io/priority-class=low"),
    "job_annotation": ("NAME=VALUE", "further annotation of each node's Job"),
    "mount": ("CLAIM:PATH[:ro]", "persistent volume claim and its mount path in the nodes"),
}
"""Kubernetes options that may be repeated."""


def flag(name: str) -> str:
    """Return the option that is parsed into this name."""
    return f"--{name.replace('_', '-')}"


def option_of(setting: str) -> str:
    """Return the option of `dlrover scale` that sets a field of a plan, without its dashes."""
    options = {"intra_op_threads": "threads", "prefetch_factor": "prefetch", "node_cpus": "cpus", "node_memory_mb": "mem"}
    return options.get(setting, setting.replace("_", "-"))


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate a job: its etcd and the folder of run folders."""
    add_etcd_options(parser)
    parser.add_argument(
        "--run-dir", type=Path, default=DEFAULT_RUN_DIR, metavar="DIR", help="parent of the jobs' run folders (default runs)"
    )


def add_etcd_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate etcd and the jobs in it."""
    text = "etcd v3 (default: DLROVER_ENDPOINT, else the job's own server)"
    parser.add_argument("--endpoint", type=given, metavar="HOST:PORT", help=text)
    text = "Default: the job's own settings, then DLROVER_USER, DLROVER_PASSWORD_FILE and so on."
    access = parser.add_argument_group("etcd authentication", text)
    access.add_argument("--user", metavar="NAME", help="etcd user")
    access.add_argument("--password-file", metavar="FILE", help="file whose first line is the user's password")
    text = "PEM file of the authority that signed etcd's certificate; enables TLS"
    access.add_argument("--ca-cert", metavar="FILE", help=text)
    access.add_argument("--cert", metavar="FILE", help="PEM file of the client certificate")
    access.add_argument("--cert-key", metavar="FILE", help="PEM file of the client certificate's key")
    parser.add_argument("--key-prefix", metavar="PREFIX", help="prefix of all jobs' keys in etcd (default /dlrover)")


def add_metrics_option(parser: argparse.ArgumentParser) -> None:
    """Add the address at which a long command answers Prometheus."""
    text = "serve metrics for Prometheus at http://127.0.0.1:PORT/metrics, or at another address of this host (default: none)"
    parser.add_argument("--metrics", type=listen_address, metavar="[ADDRESS:]PORT", help=text)


def add_notify_option(parser: Any) -> None:
    """Add the option for notifications of what happens to jobs."""
    text = "post a JSON document to URL for each event such as a lost worker or the end, or pass it to COMMAND on its standard "
    text += "input; @FILE: take either from the first line of FILE, which hides it from `ps`. Repeatable"
    parser.add_argument("--notify", action="append", default=[], metavar="URL|COMMAND", help=text)


def add_objective_options(parser: argparse.ArgumentParser) -> None:
    """Add the planner's objective, and the job history that it starts from."""
    group = parser.add_argument_group("planner", "Ignored where the script's DLRoverCallback sets the same.")
    group.add_argument(
        "--objective", choices=("fastest", "cheapest", "efficient"), help="what the planner optimizes (default fastest)"
    )
    text = "time limit of the whole job, counted from its start, such as 90m or 2h"
    group.add_argument("--deadline", type=duration, metavar="TIME", help=text)
    group.add_argument("--budget", type=float, metavar="MONEY", help="cost limit of the whole job; needs --prices")
    group.add_argument("--prices", metavar="LIST", help="prices per hour, such as core_hour=0.04,gpu_hour=2.5,gib_hour=0.005")
    group.add_argument("--history", metavar="PLACE", help="job history: a path, a SQLAlchemy URL, or off")


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the resources of each node, for any target."""
    text = "Default: the cluster's. With --target local, nodes share the whole machine (docs/start/local.md)."
    group = parser.add_argument_group("resources of each node", text)
    _add_texts(group, NODE_OPTIONS)
    text = "cores per node (default 1; --target local: all, shared); "
    text += "with MAX, a plan may raise it up to MAX and replaces smaller nodes one at a time"
    group.add_argument("--cpus", type=cpus, metavar="N[:MAX]", help=text)
    text = "memory per node, such as 16G or 16G:64G; MAX as for --cpus"
    group.add_argument("--mem", type=memory_range, metavar="SIZE[:MAX]", help=text)
    group.add_argument("--etcd-host", metavar="HOST", help="address of this host at which nodes reach the embedded etcd")
    text = "seconds of warning before a node is taken away (default 120). Slurm: also sent this long before the time limit, "
    text += "so that a replacement can start; 0 disables it. Kubernetes: the pod's termination grace period. "
    text += "Only with --target slurm or kubernetes"
    add_renamed_option(group, "--preemption-notice", "--notice", type=int, metavar="S", help=text)
    text = "time between two queries to the scheduler, and between two reads of the nodes' output (default 2s). While "
    text += "nothing changes, Slurm is queried at five times this interval. Only with --target slurm or kubernetes"
    group.add_argument("--poll-interval", type=duration, metavar="TIME", help=text)


def add_slurm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Slurm alone."""
    group = parser.add_argument_group("Slurm", "Only with --target slurm; see docs/start/slurm.md.")
    _add_texts(group, SLURM_OPTIONS)
    text = "further option of sbatch, such as --sbatch-arg=--exclusive; repeatable"
    group.add_argument("--sbatch-arg", action="append", default=[], metavar="ARG", help=text)


def add_kubernetes_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Kubernetes alone."""
    group = parser.add_argument_group("Kubernetes", "Only with --target kubernetes; see docs/start/kubernetes.md.")
    _add_texts(group, KUBERNETES_OPTIONS)
    for name, (value, text) in REPEATED_OPTIONS.items():
        group.add_argument(flag(name), action="append", default=[], metavar=value, help=f"{text}; repeatable")
    text = "create plain Jobs even where the cluster has Volcano (default: Volcano Jobs there)"
    group.add_argument("--plain-jobs", action="store_const", const=True, help=text)
    text = "create no PodDisruptionBudget (default: one that keeps MIN workers from drains)"
    group.add_argument("--no-disruption-budget", action="store_const", const=True, help=text)


def _add_texts(group: Any, options: Mapping[str, tuple[str, str]]) -> None:
    for name, (metavar, text) in options.items():
        group.add_argument(flag(name), default="", metavar=metavar, help=text)
