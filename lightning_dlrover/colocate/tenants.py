"""Where jobs run: cores of this machine with a part of its memory, and perhaps a GPU."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from lightning_dlrover.colocate.gpus import VISIBLE, Gpu
from lightning_dlrover.colocate.memory import START_BYTES
from lightning_dlrover.colocate.tenants import Sizes, Where
from lightning_dlrover.observe.resources import available_bytes, available_cores

__all__ = ["CPU", "LocalDevice", "gpus_of", "places_of"]

CPU = "cpu"
"""Kind of all devices without a GPU. To a policy, each device is a kind of its own, as jobs stay where they are."""
RESERVE = 0.1
"""Part of the available memory that no job gets: room for the page cache, and for growth between two looks."""
MOST_ON_GPU = 4
"""Most jobs that share a GPU for each one that would share a core: each takes half a gigabyte for its context alone."""
FORMS = "`cpu`, `cpu:CORES` such as cpu:0-3, `gpu:NUMBER`, or `gpu:NUMBER:CORES`"


@dataclass(frozen=True)
class LocalDevice:
    """One device for jobs.

    Args:
        kind: `cpu`, or the model of the GPU. Devices of one kind are equally fast.
        cores: numbers of the cores that its jobs are bound to.
        num_cores: cores that they may keep busy; fewer than `cores` under a quota.
        memory_bytes: host memory for all its jobs together.
        most_jobs: most jobs that run at once. Paused ones do not count.
        gpu: the GPU that its jobs share; None: they get none.
        gpu_bytes: memory of the GPU for all its jobs together.
    """

    name: str
    kind: str
    cores: tuple[int, ...]
    num_cores: float
    memory_bytes: int
    most_jobs: int
    gpu: Gpu | None = None
    gpu_bytes: int = 0

    @property
    def where(self) -> Where:
        """Its type."""
        return "cpu" if self.gpu is None else "gpu"

    @property
    def sizes(self) -> Sizes:
        """Bytes of each of its memories."""
        return {"host": self.memory_bytes} if self.gpu is None else {"host": self.memory_bytes, "gpu": self.gpu_bytes}

    @property
    def limits(self) -> Mapping[str, float]:
        """Largest use of each resource, as policies know it."""
        return {"cores": self.num_cores, **(self.gpu.limits if self.gpu is not None else {})}

    def environment(self, threads: int) -> Mapping[str, str]:
        """Return the variables of a job with this number of threads for each process."""
        return {
            "OMP_NUM_THREADS": str(threads),
            # Threads that spin while they wait for others take the cores of the jobs beside them.
            "OMP_WAIT_POLICY": "passive",
            "KMP_BLOCKTIME": "0",
            VISIBLE: "" if self.gpu is None else self.gpu.uuid,
        }


def gpus_of(devices: Sequence[str]) -> list[int]:
    """Return the numbers of the GPUs that a command line names.

    Raises:
        ValueError: a device is unknown.
    """
    return [asked.gpu for asked in map(_Asked.of, devices) if asked.gpu is not None]


def places_of(
    devices: Sequence[str],
    memory_bytes: int = 0,
    most_jobs: int = 0,
    jobs_per_core: int = 2,
    usable: Set[int] | None = None,
    num_cores: float | None = None,
    available: int | None = None,
    gpus: Mapping[int, Gpu] | None = None,
) -> list[LocalDevice]:
    """Return the places that a command line names: `cpu` for all cores of this process, `cpu:0-3` for some, `gpu:0` for a GPU.

    A GPU has cores, too, for its jobs' own code and input. Devices that name no cores share those that no other names.

    Args:
        memory_bytes: host memory for the jobs of all places; 0: the memory that is available now, less a reserve.
        most_jobs: most jobs of one place that run at once; 0: `jobs_per_core` times its cores, and no more than four times
            `jobs_per_core` on a GPU.
        usable: cores of this process. None: ask the system; also for `num_cores` and `available`.
        gpus: GPUs of this machine, by their numbers.

    Raises:
        ValueError: a device is unknown, has a core that this process may not use, or shares one with another device.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    num_cores = available_cores() if num_cores is None else num_cores
    available = available_bytes() if available is None else available
    if memory_bytes > available:
        raise ValueError(f"--memory is {memory_bytes >> 20} MiB, and {available >> 20} MiB are available; give less")
    memory_bytes = memory_bytes or int((1 - RESERVE) * available)
    cores_of = _divided([_Asked.of(device) for device in devices], usable)
    total = sum(map(len, cores_of.values()))
    share = min(1.0, num_cores / total)
    places: list[LocalDevice] = []
    for asked, cores in cores_of.items():
        gpu = _gpu(asked, gpus or {})
        gpu_bytes = 0 if gpu is None else int((1 - RESERVE) * gpu.free_bytes)
        if gpu is not None and gpu_bytes < START_BYTES["gpu"]:
            raise ValueError(
                f"--devices: gpu:{gpu.index} has only {gpu.free_bytes >> 20} MiB free; end what uses it, or leave it out"
            )
        most = jobs_per_core * math.ceil(share * len(cores))
        places.append(
            LocalDevice(
                name=asked.name,
                kind=CPU if gpu is None else gpu.name,
                cores=cores,
                num_cores=share * len(cores),
                memory_bytes=memory_bytes * len(cores) // total,
                most_jobs=most_jobs or (most if gpu is None else min(most, MOST_ON_GPU * jobs_per_core)),
                gpu=gpu,
                gpu_bytes=gpu_bytes,
            )
        )
    return places


@dataclass(frozen=True)
class _Asked:
    """A device as the command line has it.

    Args:
        cores: empty: none are named.
    """

    name: str
    gpu: int | None
    cores: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, device: str) -> _Asked:
        kind, _, rest = device.partition(":")
        if kind == "cpu":
            if ":" in device and not rest:
                raise ValueError(f"--devices: {device!r} names no cores; give some, such as cpu:0-3")
            return cls(device, None, _cores(device, rest))
        number, colon, cores = rest.partition(":")
        if kind != "gpu" or not re.fullmatch(r"\d{1,3}", number) or (colon and not cores):
            raise ValueError(f"--devices: {device!r} is not {FORMS}")
        return cls(f"gpu:{int(number)}", int(number), _cores(device, cores))


def _divided(asked: Sequence[_Asked], usable: Set[int]) -> dict[_Asked, tuple[int, ...]]:
    """Return the cores of each device: those that it names, or an equal part of the rest."""
    taken: dict[int, str] = {}
    names = [device.name for device in asked]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--devices: {twice[0]} is named twice; name each device once")
    for device in asked:
        if wrong := sorted(device.cores - usable):
            raise ValueError(
                f"--devices: {device.name!r}: this process may use the cores {_ranges(sorted(usable))}, not {_ranges(wrong)}"
            )
        for core in device.cores:
            if core in taken:
                raise ValueError(f"--devices: {device.name} and {taken[core]} share core {core}; give each core to one device")
            taken[core] = device.name
    without = [device for device in asked if not device.cores]
    rest = sorted(usable - taken.keys())
    if len(rest) < len(without):
        left = ", ".join(device.name for device in without)
        raise ValueError(f"--devices: {len(rest)} of {len(usable)} cores are left for {left}; each needs at least one")
    found = {device: tuple(sorted(device.cores)) for device in asked}
    for number, device in enumerate(without):
        found[device] = tuple(rest[number * len(rest) // len(without) : (number + 1) * len(rest) // len(without)])
    return found


def _ranges(cores: Sequence[int]) -> str:
    """Return `0, 2 to 99` for ascending numbers of cores."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in runs)


def _gpu(asked: _Asked, gpus: Mapping[int, Gpu]) -> Gpu | None:
    if asked.gpu is None:
        return None
    if asked.gpu not in gpus:
        known = ", ".join(f"gpu:{index} ({gpu.name})" for index, gpu in sorted(gpus.items())) or "none"
        raise ValueError(f"--devices: there is no gpu:{asked.gpu} that this process may use; there are: {known}")
    return gpus[asked.gpu]


def _cores(device: str, numbers: str) -> frozenset[int]:
    found: set[int] = set()
    for part in numbers.split(",") if numbers else ():
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--devices: {device!r}: {part!r} is not a core or range of cores, such as 2 or 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
