"""Elastic jobs with speeds by formula, on clusters of equal nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.tuning.cluster import Allocation, Device, Job, Profile, Running, Speeds, State

GB = 10**9


@dataclass(frozen=True)
class Amdahl:
    """Speed by Amdahl's law; a step takes `node_s` longer for each node beyond the first."""

    steps_per_s: float = 1.0
    serial: float = 0.1
    node_s: float = 0.0
    spread: float = 0.0

    def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
        step_s = (self.serial + (1 - self.serial) / num_devices) / self.steps_per_s + self.node_s * (num_nodes - 1)
        return Speeds(1 / step_s, np.full(len(num_devices), self.spread))

    def at(self, num_devices: int, num_nodes: int) -> float:
        return float(self.speeds(np.array([num_devices]), np.array([num_nodes])).steps_per_s[0])


@dataclass(frozen=True)
class Table:
    """Speeds by number of devices, from 1 on, whatever the nodes."""

    steps_per_s: tuple[float, ...]
    spreads: tuple[float, ...] = field(default=())

    def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
        spreads = self.spreads or (0.0,) * len(self.steps_per_s)
        return Speeds(np.array(self.steps_per_s)[num_devices - 1], np.array(spreads)[num_devices - 1])


def cluster(num_nodes: int, per_node: int = 4, kind: str = "gpu") -> tuple[Device, ...]:
    return tuple(
        Device(f"{kind}{node}-{index}", kind, f"node{node}", 16 * GB, places=1)
        for node in range(num_nodes)
        for index in range(per_node)
    )


def job(name: str, **fields: Any) -> Job:
    """An elastic job of 1 to 8 devices, unless the fields differ."""
    values: dict[str, Any] = {
        "profiles": {"gpu": Profile(GB, 1.0)},
        "steps_left": 1000.0,
        "num_devices": 2,
        "min_devices": 1,
        "max_devices": 8,
        "scaling": Amdahl(),
    }
    return Job(name, **{**values, **fields})


def running(one: Job, devices: Sequence[str], since_s: float = 0.0) -> Running:
    return Running(one, tuple(devices), since_s)


def numbers(allocation: Allocation) -> dict[str, int]:
    """Number of devices of each job."""
    return {name: len(devices) for name, devices in allocation.items() if devices}


def check_allocation(state: State, allocation: Allocation) -> None:
    """Assert all that holds for every allocation: known jobs, sizes within limits, and no device twice."""
    jobs = {one.name: one for one in (*state.waiting, *(run.job for run in state.running))}
    devices = {device.name: device for device in state.devices}
    taken = Counter(name for names in allocation.values() for name in names)
    assert all(count == 1 for count in taken.values()), taken
    for name, names in allocation.items():
        one = jobs[name]
        assert one.fewest_devices <= len(names) <= one.most_devices, (name, names)
        assert len({devices[device].kind for device in names}) == 1
        assert all(devices[d].memory_bytes >= one.profiles[devices[d].kind].memory_bytes for d in names)


def spread_speed(one: Job, devices: Sequence[Device], others: Mapping[str, Sequence[Job]]) -> float:
    """The real speed of a job: that of its scaling on the nodes that it has. A `Truth` of the simulator."""
    assert one.scaling is not None
    count, nodes = len(devices), len({device.node for device in devices})
    return float(one.scaling.speeds(np.array([count]), np.array([nodes])).steps_per_s[0])
