"""What this worker and its loader workers may use of their machine, and what they use: `/proc` and control groups of Linux."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_dlrover.components.control_groups import CGROUPS, PROC, cgroup_folders, is_of_one_node
from lightning_dlrover.perf.samples import AGENT_BYTES

__all__ = [
    "CpuUse",
    "MachineLoad",
    "MemoryUse",
    "MemoryWatch",
    "available_cores",
    "cpu_use",
    "memory_limit_bytes",
    "own_memory_limit_bytes",
]

SAMPLE_S = 0.5

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuUse:
    """CPU time of a worker and its loader workers so far."""

    cpu_s: float
    at: float


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a worker and its loader workers; pages that they share count once."""

    resident_bytes: int
    peak_bytes: int  # since it was asked for last


def cpu_use(children: Iterable[int] = ()) -> CpuUse:
    """CPU time of this process and of others, cheap enough for the training thread: nobody is searched for.

    Args:
        children: process ids, as of `MemoryWatch.children`.
    """
    own = os.times()
    cpu_s = own.user + own.system
    for process_id in children:
        with suppress(OSError, ValueError, IndexError):  # it has ended since it was listed
            # The name in parentheses may hold anything; the user and system time are the 12th and 13th field after it.
            fields = (PROC / f"{process_id}/stat").read_text().rpartition(")")[2].split()
            cpu_s += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    return CpuUse(cpu_s, time.perf_counter())


class MachineLoad:
    """Cores of this machine that are busy, since it was asked for last."""

    def __init__(self, busy_s: Callable[[], float] | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._busy_s = busy_s or _busy_s
        self._clock = clock
        self._before = clock(), self._busy_s()

    def foreign_cores(self, own_cores: float) -> float:
        """Cores that other programs keep busy.

        Args:
            own_cores: that this job has kept busy on this machine meanwhile.
        """
        (then, busy_then), self._before = self._before, (self._clock(), self._busy_s())
        now, busy_now = self._before
        return max(0.0, (busy_now - busy_then) / max(1e-3, now - then) - own_cores)


def _busy_s() -> float:
    """CPU time of this machine in which it was not idle, also not waiting for a disk."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def available_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Cores that this process may use: those it is bound to, or fewer if its control group has a quota of CPU time."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in cgroup_folders("cpu", proc, cgroups):
        with suppress(OSError, ValueError, IndexError):
            quota, period = (folder / "cpu.max").read_text().split()[:2]
            cores = min(cores, int(quota) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota_us, period_us = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota_us > 0:
                cores = min(cores, quota_us / period_us)
    return max(cores, 0.01)


def memory_limit_bytes(environ: Mapping[str, str], proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What this process and others must stay below together: the machine's RAM, or the least limit of its control groups.

    Those that are one node's do not count.
    """
    folders = [f for f in cgroup_folders("memory", proc, cgroups) if not is_of_one_node(f, environ)]
    total: int = psutil.virtual_memory().total
    return min([total, *_limits_bytes(folders)])


def own_memory_limit_bytes(environ: Mapping[str, str], proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What this worker must stay below on its own; 0 if nothing is known.

    Slurm enforces a limit on each of a job's nodes, and so do we on this machine, in the node's control group. The node's agent
    takes its part of that.
    """
    of_node = _limits_bytes(f for f in cgroup_folders("memory", proc, cgroups) if is_of_one_node(f, environ))
    for names in (("SLURM_MEM_PER_NODE",), ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")):  # --mem, --mem-per-cpu
        with suppress(KeyError, ValueError):
            of_node.append(math.prod(int(environ[n]) for n in names) * 2**20)
            break
    return max(0, min(of_node, default=0) - AGENT_BYTES) // max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))


def _limits_bytes(folders: Iterable[Path]) -> list[int]:
    limits = []
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # another version of control groups, or no limit
                limits.append(int((folder / name).read_text()))
    return limits


class MemoryWatch:
    """Background thread that samples the memory of this process and of its children.

    The kernel keeps this process's own peak, so none is missed; of the children only what they do not share with it counts,
    at the moments of the samples. Use as a context manager, or `close` it.
    """

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self._sample_s = sample_s
        self.children: Sequence[int] = ()
        """Process ids, as they were at the last sample."""
        self._resident = self._of_children = self._peak_of_children = 0
        self._closing = threading.Event()
        self._forget_peak()
        self._thread = threading.Thread(target=self._run, name="dlrover-memory", daemon=True)
        self._thread.start()

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def take(self) -> MemoryUse:
        """Memory used now, and its peak since the last call."""
        own = _status_bytes("VmRSS", "VmHWM")
        peak = own["VmHWM"] + max(self._peak_of_children, self._of_children)
        self._peak_of_children = 0
        self._forget_peak()
        return MemoryUse(own["VmRSS"] + self._of_children, peak)

    def _run(self) -> None:
        while not self._closing.is_set():
            # It walks the page tables of the children, so it is not done where training would wait for it.
            self.children = _children()
            self._of_children = sum(map(_private_bytes, self.children))
            self._peak_of_children = max(self._peak_of_children, self._of_children)
            self._closing.wait(self._sample_s)

    @staticmethod
    def _forget_peak() -> None:
        with suppress(OSError):  # not allowed in some containers: then it is the peak of the process's whole life
            (PROC / "self/clear_refs").write_text("5")


def _status_bytes(*names: str) -> dict[str, int]:
    found = dict.fromkeys(names, 0)
    with suppress(OSError):
        for line in (PROC / "self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = 1024 * int(value.split()[0])
    return found


def _children() -> list[int]:
    # Only the main thread starts loader workers. Asking psutil means reading the status of all processes of the machine.
    try:
        return [int(pid) for pid in (PROC / f"self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # a kernel may be built without it
        return [child.pid for child in psutil.Process().children()]


def _private_bytes(pid: int) -> int:
    with suppress(OSError):  # it has ended
        lines = (PROC / f"{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0
