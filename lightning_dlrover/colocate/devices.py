"""Devices and their use: the GPUs of this machine with their memory by process, and the resources of a job's processes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_dlrover.host import PROC
from lightning_dlrover.tuning.nvml import known
from lightning_dlrover.tuning.resources import CLOCK_TICKS_PER_S, status_bytes

log = logging.getLogger(__name__)

SAMPLE_S = 0.2
END_S = 5.0
"""Deadline, in seconds, for the thread to end."""
WAIT_S = 1.0
"""Seconds to wait for a call of NVML in the other thread."""
PCIE_BYTES_PER_LANE_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One direction of a lane, by generation of the link (PCI-SIG)."""
VISIBLE, ORDER, BY_BUS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


@dataclass(frozen=True)
class Gpu:
    """A GPU that jobs may share.

    Args:
        index: as `nvidia-smi` counts.
        uuid: its name in `CUDA_VISIBLE_DEVICES`; CUDA numbers GPUs in another order.
        free_bytes: memory that no process has now.
        limits: largest use of each resource that NVML reports, by names in `tuning/cluster.py`.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuSums:
    """Use of a GPU up to a moment. Two of them give the rates between them."""

    at_s: float = 0.0
    busy_s: float = 0.0  # time that a kernel was running
    pcie_bytes: float = 0.0  # both directions together

    def rates_since(self, then: GpuSums) -> dict[str, float]:
        """Return the mean use of each resource since then; nothing where no time has passed."""
        seconds = self.at_s - then.at_s
        if seconds <= 0:
            return {}
        return {"gpu": (self.busy_s - then.busy_s) / seconds, "pcie": (self.pcie_bytes - then.pcie_bytes) / seconds}


@dataclass(frozen=True)
class GpuUse:
    """The newest measurement of a GPU.

    Args:
        used_bytes: memory of all processes.
        of_processes: memory by process id, where NVML reports it.
        read_s: moment before the memory was read (`time.monotonic`).
    """

    sums: GpuSums = field(default_factory=GpuSums)
    used_bytes: int = 0
    of_processes: Mapping[int, int] = field(default_factory=dict)
    read_s: float = 0.0


def find_gpus(nvml: Any, wanted: Collection[int], visible: str | None = None) -> dict[int, Gpu]:
    """Return the GPUs that this process may use, by index.

    Args:
        wanted: indices of those that must be usable. Other unusable ones are skipped.
        visible: numbers or UUIDs that `CUDA_VISIBLE_DEVICES` allows. None: this process's own variable, or all.

    Raises:
        ValueError: a wanted GPU cannot be read, or is divided by MIG; or the visible GPUs cannot be determined.
    """
    visible = os.environ.get(VISIBLE) if visible is None else visible
    found: dict[int, Gpu] = {}
    try:
        number = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise ValueError(f"GPUs cannot be counted: {error}; see whether `nvidia-smi` shows them") from error
    for index in range(number):
        try:
            found[index] = _read(nvml, index)
        except (nvml.NVMLError, ValueError) as error:
            if index in wanted:
                raise ValueError(f"gpu:{index} cannot be shared: {error}; leave it out of --devices") from error
    return found if visible is None else {index: found[index] for index in _visible(found, visible)}


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    if known(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0]):
        raise ValueError("it is divided by MIG")
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(index, uuid, name, int(memory.total), int(memory.free), _limits(nvml, handle))


def _visible(gpus: Mapping[int, Gpu], entries: str) -> list[int]:
    """Return the indices that `CUDA_VISIBLE_DEVICES` allows. As CUDA does, it stops at the first entry that names no GPU."""
    found = []
    for entry in (part.strip() for part in entries.split(",")):
        named = [index for index, gpu in gpus.items() if entry and (entry == str(index) or gpu.uuid.startswith(entry))]
        if not named:
            break
        if entry.isdigit() and len({gpu.name for gpu in gpus.values()}) > 1 and os.environ.get(ORDER) != BY_BUS:
            raise ValueError(
                f"{VISIBLE} is {entries!r}, and CUDA counts GPUs of different models in another order than NVML; "
                f"set {ORDER}={BY_BUS}, or name GPUs by their UUIDs"
            )
        found.append(named[0])
    return found


@dataclass(frozen=True)
class JobOnGpu:
    """Reports of a job's memory on a GPU.

    Args:
        pids: its processes.
        reported_bytes: None: it reports nothing.
        charge_bytes: memory that is set aside for it.
    """

    pids: Collection[int]
    reported_bytes: int | None
    charge_bytes: int = 0


def bytes_of_jobs(use: GpuUse, used_before: int, jobs: Sequence[JobOnGpu]) -> list[int]:
    """Return the memory of each job on one GPU: as NVML has it or as the job reports it, whichever is more.

    Jobs with neither known share the rest equally: all that exceeds the charges of the others. Reports of those may be
    late, so this is too little rather than too much. All that is held still covers all that is used.

    Args:
        used_before: bytes that other programs had before the first job.
    """
    found = [sum(use.of_processes.get(pid, 0) for pid in job.pids) for job in jobs]
    # A measurement may be older than a report, and a report older than a measurement.
    known = [
        None if not size and job.reported_bytes is None else max(size, job.reported_bytes or 0)
        for size, job in zip(found, jobs, strict=True)
    ]
    held = sum(max(size, job.charge_bytes) for size, job in zip(known, jobs, strict=True) if size is not None)
    rest = max(0, use.used_bytes - used_before - held) // max(1, known.count(None))
    return [rest if size is None else size for size in known]


# NVML reports how busy a GPU is, not which process keeps it busy. So these figures describe a job only while it runs alone.
# In a container, NVML may use other process ids than the container does. A job's memory is then its own report, or
# the rest that no other job accounts for.
class GpuWatch:
    """Measures GPUs by NVML a few times a second, in a thread. Use as a context manager."""

    def __init__(self, nvml: Any, gpus: Collection[Gpu]) -> None:
        self._nvml = nvml
        self._handles = {gpu.index: nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus}
        self._has_pcie = {gpu.index: "pcie" in gpu.limits for gpu in gpus}
        self.used_before = {gpu.index: gpu.total_bytes - gpu.free_bytes for gpu in gpus}
        self._uses = {gpu.index: GpuUse(GpuSums(time.monotonic())) for gpu in gpus}
        self._has_failed: set[int] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)

    def __enter__(self) -> GpuWatch:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(END_S)

    def use(self, index: int, since_s: float = 0.0) -> GpuUse:
        """Return the newest measurement of a GPU, if possible with its memory read after a moment (`time.monotonic`)."""
        if self._uses[index].read_s < since_s and index not in self._has_failed:
            self._try(index, self._memory)
        return self._uses[index]

    def sample(self) -> None:
        """Measure all GPUs. One that cannot be read keeps its last measurement."""
        for index in self._handles:
            self._try(index, self._measured)

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.sample()

    def _try(self, index: int, measured: Callable[[int], GpuUse]) -> None:
        if not self._lock.acquire(timeout=WAIT_S):
            return  # NVML hangs; the thread that called it waits
        try:
            self._uses[index] = measured(index)
            self._has_failed.discard(index)
        except self._nvml.NVMLError as error:
            if index not in self._has_failed:
                log.warning("gpu:%d is not measured: %s", index, error)
            self._has_failed.add(index)
        finally:
            self._lock.release()

    def _memory(self, index: int) -> GpuUse:
        """Read a GPU's memory, in less than a millisecond."""
        nvml, handle, now = self._nvml, self._handles[index], time.monotonic()
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        processes = known(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        sizes = {process.pid: int(process.usedGpuMemory or 0) for process in processes}
        return GpuUse(self._uses[index].sums, used, sizes, now)

    def _measured(self, index: int) -> GpuUse:
        """Read a GPU's memory and how busy it is. The counters of its link take 40 ms."""
        nvml, handle, then = self._nvml, self._handles[index], self._uses[index].sums
        rates = known(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        busy = rates.gpu / 100 if rates is not None else 0.0
        pcie = known(nvml, lambda: _pcie_bytes_per_s(nvml, handle)) if self._has_pcie[index] else None
        now = time.monotonic()
        passed = now - then.at_s
        sums = GpuSums(now, then.busy_s + passed * busy, then.pcie_bytes + passed * (pcie or 0.0))
        return replace(self._memory(index), sums=sums)


def _limits(nvml: Any, handle: Any) -> dict[str, float]:
    """Return the largest possible use of each resource: all of the time, and the bytes/s of its link if NVML reports them."""
    found = {"gpu": 1.0}
    generation = known(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    lanes = known(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    if lanes and generation in PCIE_BYTES_PER_LANE_S and known(nvml, lambda: _pcie_bytes_per_s(nvml, handle)) is not None:
        found["pcie"] = 2 * lanes * PCIE_BYTES_PER_LANE_S[generation]
    return found


def _pcie_bytes_per_s(nvml: Any, handle: Any) -> float:
    counters = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
    return 1e3 * sum(int(nvml.nvmlDeviceGetPcieThroughput(handle, counter)) for counter in counters)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


AGAIN_S = 0.25
"""Minimum seconds between two passes over all processes of the machine, unless a root is new."""
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
    """Return the use of processes. Those that end during the call are skipped."""
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
