"""Where jobs run: cores of this machine with a part of its memory."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from lightning_dlrover.observe.resources import available_bytes, available_cores

__all__ = ["Place", "places_of"]

RESERVE = 0.1
"""Part of the available memory that no job gets: room for the page cache, and for growth between two looks."""


@dataclass(frozen=True)
class Place:
    """One device for jobs.

    Args:
        cores: numbers of the cores that its jobs are bound to.
        num_cores: cores that they may keep busy; fewer than `cores` under a quota.
        memory_bytes: memory for all its jobs together.
        most_jobs: most jobs that run at once. Paused ones do not count.
    """

    name: str
    kind: str
    cores: tuple[int, ...]
    num_cores: float
    memory_bytes: int
    most_jobs: int

    def environment(self, threads: int) -> Mapping[str, str]:
        """Return the variables of a job with this number of threads for each process."""
        return {
            "OMP_NUM_THREADS": str(threads),
            # Threads that spin while they wait for others take the cores of the jobs beside them.
            "OMP_WAIT_POLICY": "passive",
            "KMP_BLOCKTIME": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }


def places_of(
    devices: Sequence[str],
    memory_bytes: int = 0,
    most_jobs: int = 0,
    jobs_per_core: int = 2,
    usable: Set[int] | None = None,
    num_cores: float | None = None,
    available: int | None = None,
) -> list[Place]:
    """Return the places that a command line names: `cpu` for all cores of this process, or `cpu:0-3` for some.

    Args:
        memory_bytes: memory for the jobs of all places; 0: the memory that is available now, less a reserve.
        most_jobs: most jobs of one place that run at once; 0: `jobs_per_core` times its cores.
        usable: cores of this process. None: ask the system; also for `num_cores` and `available`.

    Raises:
        ValueError: a device is unknown, has a core that this process may not use, or shares one with another device.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    num_cores = available_cores() if num_cores is None else num_cores
    available = available_bytes() if available is None else available
    if memory_bytes > available:
        raise ValueError(f"--memory is {memory_bytes >> 20} MiB, and {available >> 20} MiB are available; give less")
    memory_bytes = memory_bytes or int((1 - RESERVE) * available)
    taken: dict[int, str] = {}
    cores_of: dict[str, tuple[int, ...]] = {}
    for device in devices:
        cores = _cores(device, usable)
        for core in cores:
            if core in taken:
                raise ValueError(f"--devices: {device} and {taken[core]} share core {core}; give each core to one device")
            taken[core] = device
        cores_of[device] = cores
    total = sum(map(len, cores_of.values()))
    share = min(1.0, num_cores / total)
    return [
        Place(
            name=device,
            kind="cpu",
            cores=cores,
            num_cores=share * len(cores),
            memory_bytes=memory_bytes * len(cores) // total,
            most_jobs=most_jobs or jobs_per_core * math.ceil(share * len(cores)),
        )
        for device, cores in cores_of.items()
    ]


def _cores(device: str, usable: Set[int]) -> tuple[int, ...]:
    kind, _, numbers = device.partition(":")
    if kind != "cpu":
        raise ValueError(f"--devices: {device!r} is not `cpu` or `cpu:CORES` such as cpu:0-3; GPUs cannot be shared yet")
    if not numbers:
        if ":" in device:
            raise ValueError(f"--devices: {device!r} names no cores; give some, such as cpu:0-3")
        return tuple(sorted(usable))
    found: set[int] = set()
    for part in numbers.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--devices: {device!r}: {part!r} is no core or range of cores, such as 2 or 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if wrong := sorted(found - usable):
        raise ValueError(f"--devices: {device!r}: this process may use the cores {sorted(usable)}, not {wrong}")
    return tuple(sorted(found))
