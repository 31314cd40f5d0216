"""Resources available to this worker and its loader workers, and their use, from `/proc` and control groups of Linux."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_dlrover import variables
from lightning_dlrover.host import CGROUPS, PROC, cgroup_folders, is_of_one_node
from lightning_dlrover.tuning.samples import AGENT_BYTES

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
    peak_bytes: int  # peak since the last call


def cpu_use(children: Iterable[int] = ()) -> CpuUse:
    """Return CPU time of this process and of others, without a search for processes: cheap enough for the training thread.

    Args:
        children: process ids, such as `MemoryWatch.children`.
    """
    own = os.times()
    cpu_s = own.user + own.system
    for process_id in children:
        with suppress(OSError, ValueError, IndexError):  # the process has ended since it was listed
            # The name in parentheses may hold anything; the user and system time are the 12th and 13th field after it.
            fields = (PROC / f"{process_id}/stat").read_text().rpartition(")")[2].split()
            cpu_s += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    return CpuUse(cpu_s, time.perf_counter())


class MachineLoad:
    """Cores of this worker that other programs keep busy, since the last call.

    Args:
        busy_s: CPU time so far of these cores, and of the control group with the quota that limits this worker (0.0: no
            such group).
        num_cores: cores that this process is bound to.
        cores: number of them that its control group allows.
        is_bound: whether its machine has more cores.
        num_local_workers: workers of this worker's agent, which are bound to the same cores.
    """

    def __init__(
        self,
        busy_s: Callable[[], tuple[float, float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        num_cores: int | None = None,
        cores: float | None = None,
        is_bound: bool | None = None,
        num_local_workers: int | None = None,
    ) -> None:
        bound_to = os.sched_getaffinity(0)
        self._seen = bound_to, available_cores()
        self._busy_s = busy_s or _BusyTimes(bound_to)
        self._clock = clock
        self._num_cores = len(bound_to) if num_cores is None else num_cores
        self._cores = self._seen[1] if cores is None else cores
        self._is_bound = len(bound_to) < (os.cpu_count() or 1) if is_bound is None else is_bound
        self._num_local_workers = num_local_workers or variables.workers_here(os.environ)
        self._before = clock(), self._busy_s()

    @property
    def is_outdated(self) -> bool:
        """Whether this process may use other cores since this object was made. Make another one in its place."""
        return self._seen != (os.sched_getaffinity(0), available_cores())

    def foreign_cores(self, own_cores: float, num_workers: int = 1) -> float:
        """Return the cores that other programs take away from this job.

        Args:
            own_cores: cores that one worker has kept busy since the last call.
            num_workers: workers of this job on this machine.
        """
        (then, (busy_then, group_then)), self._before = self._before, (self._clock(), self._busy_s())
        now, (busy_now, group_now) = self._before
        elapsed_s = max(1e-3, now - then)
        # A worker with cores of its own does not share them with the job's other workers, so their load is not in the figures.
        own = own_cores * (self._num_local_workers if self._is_bound else num_workers)
        # With a quota below its cores, a worker loses none while others leave it that many.
        on_cores = (busy_now - busy_then) / elapsed_s - own - (self._num_cores - self._cores)
        in_group = (group_now - group_then) / elapsed_s - own
        return max(0.0, on_cores, in_group)


class _BusyTimes:
    """CPU time of some cores that were neither idle nor waiting for a disk, and that of the group with the smallest quota."""

    def __init__(self, bound_to: Set[int], proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._bound_to = bound_to
        quotas = _quotas(proc, cgroups)
        self._group = min(quotas)[1] if quotas else None

    def __call__(self) -> tuple[float, float]:
        every = psutil.cpu_times(percpu=True)
        # Some containers show fewer cores than there are. Then none can be distinguished from the others.
        mine = [every[core] for core in self._bound_to] if max(self._bound_to) < len(every) else every
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        return sum(getattr(core, name, 0.0) for core in mine for name in names), self._of_group_s()

    def _of_group_s(self) -> float:
        if self._group is not None:
            with suppress(OSError, ValueError, StopIteration):  # version 1 keeps it elsewhere
                lines = (self._group / "cpu.stat").read_text().splitlines()
                return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec ")) / 1e6
        return 0.0


def available_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Return the cores that this process may use: those it is bound to, or fewer under a quota of CPU time."""
    quotas = (quota for quota, _ in _quotas(proc, cgroups))
    return max(min([float(len(os.sched_getaffinity(0))), *quotas]), 0.01)


CORES_S = 0.5
"""Minimum seconds between two looks at the cores of this worker."""


class OwnCores:
    """The cores that this worker may use. They change where its node gets another size in place.

    Attributes:
        number: cores at the last look.
        threads_per_core: threads for each of them where no plan sets their number; 0: as many as the user has chosen.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        read: Callable[[], float] = available_cores,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._next_at = clock() + CORES_S
        self.number = read()
        follows = variables.THREADS_PER_CORE in environ
        self.threads_per_core = 1 / variables.workers_here(environ) if follows else 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time for another look. Costs nothing, unlike the look."""
        return self._clock() >= self._next_at

    def look(self, planned: int | None = None) -> float | None:
        """Return the number of cores if it has changed.

        Args:
            planned: cores that the node will soon be limited to; None or 0: it keeps those that it has.
        """
        self._next_at = self._clock() + CORES_S
        number = min(self._read(), planned or math.inf)
        if number == self.number:
            return None
        self.number = number
        return number


def _quotas(proc: Path, cgroups: Path) -> list[tuple[float, Path]]:
    """Return the quotas of CPU time that hold for this process, in cores, with the groups that have them."""
    return [(quota, folder) for folder in cgroup_folders("cpu", proc, cgroups) if (quota := _quota(folder))]


def _quota(folder: Path) -> float:
    """Return the quota of a control group in cores, at least 0.01; 0 if it has no limit of its own."""
    with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return max(0.01, int(quota) / int(period))
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota_us, period_us = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return max(0.01, quota_us / period_us) if quota_us > 0 else 0.0
    return 0.0


def memory_limit_bytes(environ: Mapping[str, str], proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the limit shared with other processes: the machine's RAM, or the smallest limit of its control groups.

    Groups of a single node do not count.
    """
    folders = [f for f in cgroup_folders("memory", proc, cgroups) if not is_of_one_node(f, environ)]
    total: int = psutil.virtual_memory().total
    return min([total, *_limits_bytes(folders)])


def own_memory_limit_bytes(environ: Mapping[str, str], proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the limit of this worker alone, without its agent's part; 0 if unknown.

    Slurm limits each node of a job. On this machine our controller does so, by the node's control group.
    """
    of_node = _limits_bytes(f for f in cgroup_folders("memory", proc, cgroups) if is_of_one_node(f, environ))
    for names in (("SLURM_MEM_PER_NODE",), ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")):  # --mem, --mem-per-cpu
        with suppress(KeyError, ValueError):
            of_node.append(math.prod(int(environ[n]) for n in names) * 2**20)
            break
    return max(0, min(of_node, default=0) - AGENT_BYTES) // max(1, variables.workers_here(environ))


def _limits_bytes(folders: Iterable[Path]) -> list[int]:
    limits = []
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # another version of control groups, or no limit
                limits.append(int((folder / name).read_text()))
    return limits


class MemoryWatch:
    """Background thread that samples the memory of this process and of its children.

    The kernel keeps this process's own peak, so none is missed. Of the children only the memory that they do not share with it
    counts, at the moments of the samples. Use as a context manager, or `close` it.
    """

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self._sample_s = sample_s
        self.children: Sequence[int] = ()
        """Process ids at the last sample."""
        self._of_children = self._peak_of_children = 0
        self._parents: dict[int, int] = {}
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
        """Return the memory used now, and its peak since the last call."""
        own = {"VmRSS": 0, "VmHWM": 0}
        with suppress(OSError):
            own |= status_bytes("VmRSS", "VmHWM")
        peak = own["VmHWM"] + max(self._peak_of_children, self._of_children)
        self._peak_of_children = 0
        self._forget_peak()
        return MemoryUse(own["VmRSS"] + self._of_children, peak)

    def _run(self) -> None:
        while not self._closing.is_set():
            # This walks the page tables of the children, so it must not run where training would wait for it.
            self.children = _children(self._parents)
            self._of_children = sum(map(_private_bytes, self.children))
            self._peak_of_children = max(self._peak_of_children, self._of_children)
            self._closing.wait(self._sample_s)

    @staticmethod
    def _forget_peak() -> None:
        with suppress(OSError):  # forbidden in some containers; the peak then covers the process's whole life
            forget_peak()


def forget_peak() -> None:
    """Set this process's peak to its resident memory of now.

    Raises:
        OSError: the system forbids it.
    """
    (PROC / "self/clear_refs").write_text("5")


def status_bytes(*names: str, process: int | str = "self") -> dict[str, int]:
    """Return those sizes from a process's status (proc(5)) that the kernel reports.

    Raises:
        OSError: the process has ended.
    """
    found = {}
    for line in (PROC / str(process) / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[name] = 1024 * int(value.split()[0])
    return found


def _children(parents: dict[int, int]) -> list[int]:
    """Return the ids of this process's children.

    Args:
        parents: parent of each process of the machine by id, as the last call has left it. Empty at first.
    """
    # Only the main thread starts loader workers.
    with suppress(OSError):  # some kernels are built without it
        return [int(pid) for pid in (PROC / f"self/task/{os.getpid()}/children").read_text().split()]
    # psutil would read the status of all processes of the machine each time, which takes milliseconds on a large one.
    present = {int(name) for name in os.listdir(PROC) if name.isdigit()}
    for pid in parents.keys() - present:
        del parents[pid]
    for pid in present - parents.keys():
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            parents[pid] = int((PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parent == os.getpid()]


def _private_bytes(pid: int) -> int:
    with suppress(OSError):  # the process has ended
        lines = (PROC / f"{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the memory that this process may still take, within the machine and all of its control groups."""
    available: int = psutil.virtual_memory().available
    for folder in cgroup_folders("memory", proc, cgroups):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):  # no limit, or another version of control groups
                limit, used = (int((folder / name).read_text()) for name in names)
                available = min(available, limit - used)
    return available
