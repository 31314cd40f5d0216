"""Jobs, devices and the state of a cluster, as data that policies decide on.

Two scopes of a resource: those of `HOST_RESOURCES` belong to a node, and all jobs on any device of it share them;
the others belong to one device. Memory is hard: an allocation never exceeds it. Limits of other resources are soft:
exceeding them slows jobs down, and a policy may refuse to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_dlrover.planner.cluster.scaling import Scaling

__all__ = ["HOST_RESOURCES", "RESOURCES", "Allocation", "Device", "Job", "Profile", "Running", "State"]

HOST_RESOURCES = ("cores", "memory_bandwidth", "input")
"""Resources that all devices of a node share. A device of the node that lists a limit states the node's limit."""

RESOURCES = (*HOST_RESOURCES, "gpu", "pcie")
"""Measured resources: cores in cores, "memory_bandwidth" and "pcie" in bytes/s, the others in fractions of the time.

"gpu" is the time in which a kernel runs. The bandwidth of a GPU's memory is no resource here, as nothing measures it: NVML's
percentage is the time in which that memory is read or written, however few bytes these are.
"""

Allocation = Mapping[str, tuple[str, ...]]
"""Device names by job name, all running jobs included.

A job that is absent waits, or is paused. A device named twice holds two workers of that job.
"""


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU of a node: where workers run, several at once.

    Args:
        kind: devices of one kind are as fast as each other; profiles are measured for each kind. Names that begin with
            "cpu" are for the CPUs of a node.
        memory_bytes: memory of a GPU, or of the whole node for its CPU.
        limits: largest total use, by name of the resource; a resource that is absent is not limited.
        places: most workers at once.
    """

    name: str
    kind: str
    node: str
    memory_bytes: int
    limits: Mapping[str, float] = field(default_factory=dict)
    places: int = 4

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0 or self.places < 1:
            raise ValueError(f"device {self.name!r} has {self.memory_bytes} bytes and {self.places} places; it needs both")
        _check_resources(f"the limits of device {self.name!r}", self.limits)

    @property
    def is_host(self) -> bool:
        """Whether this is the CPU of its node, with the node's memory."""
        return self.kind.startswith("cpu")


@dataclass(frozen=True)
class Profile:
    """Needs of one worker of a job on a kind of device, and its speed there alone.

    Args:
        memory_bytes: peak on the device, with the margin that admission shall keep.
        use: amount of each resource used alone, mean over a step, in units of the device's limits.
        host_memory_bytes: peak on the host of a worker that has a GPU; 0 for a worker on a CPU.
    """

    memory_bytes: int
    steps_per_s: float
    use: Mapping[str, float] = field(default_factory=dict)
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.steps_per_s) and self.steps_per_s > 0):
            raise ValueError(f"a profile has {self.steps_per_s} steps/s; measure the job alone first")
        if self.memory_bytes < 0 or self.host_memory_bytes < 0:
            raise ValueError(f"a profile has {self.memory_bytes} and {self.host_memory_bytes} bytes; neither can be negative")
        _check_resources("a profile's use", self.use)


@dataclass(frozen=True)
class Job:
    """A job as policies see it.

    Args:
        profiles: by kind of device; the job runs on no other kinds.
        steps_left: None where the end is unknown.
        submitted_s: on the clock of `State.now_s`.
        waiting_since_s: when it was last put to wait; None: since it was submitted.
        priority: higher ones start first.
        weight: importance of its speed beside that of others of its priority.
        num_devices: as its user asked.
        min_devices: fewest and most devices of an elastic job; 0: `num_devices`.
        served_device_s: seconds times devices that it has had.
        restarts: times that it was put back to wait, or got other devices while it ran.
        family: jobs with the same model, such as its name; "" where unknown. Only a hint for predictions.
        batch_size: samples per worker and step; 0 where unknown. Only a hint for predictions.
        exclusive: shares its devices with no other job.
        scaling: speed by number of devices as far as it is known; None for a job that is not elastic.
        start_s: expected time without a step when the job starts, or starts again after a pause.
        change_s: expected time without a step when its devices change while it runs.
        join_s: further time until devices that are added to a running job make steps; the others make steps until then. A
            job that keeps none of its devices makes none. 0: the job stops for `change_s`, as for a restart.
        deadline_s: time by which it should have ended, on the clock of `State.now_s`; None: any.
    """

    name: str
    profiles: Mapping[str, Profile]
    steps_left: float | None = None
    submitted_s: float = 0.0
    waiting_since_s: float | None = None
    priority: int = 0
    weight: float = 1.0
    owner: str = ""
    num_devices: int = 1
    min_devices: int = 0
    max_devices: int = 0
    served_device_s: float = 0.0
    restarts: int = 0
    family: str = ""
    batch_size: float = 0.0
    exclusive: bool = False
    scaling: Scaling | None = None
    start_s: float = 0.0
    change_s: float = 0.0
    join_s: float = 0.0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError(f"job {self.name!r} has no profile for any kind of device, so it could never start")
        if self.num_devices < 1 or not self.weight > 0:
            raise ValueError(f"job {self.name!r} asks for {self.num_devices} devices with weight {self.weight}; give it both")
        if not self.fewest_devices <= self.num_devices <= self.most_devices:
            raise ValueError(
                f"job {self.name!r} asks for {self.num_devices} devices, "
                f"which is outside of its own limits, {self.fewest_devices} to {self.most_devices}"
            )

    @property
    def fewest_devices(self) -> int:
        return self.min_devices or self.num_devices

    @property
    def most_devices(self) -> int:
        return self.max_devices or self.num_devices

    @property
    def waits_since_s(self) -> float:
        return self.submitted_s if self.waiting_since_s is None else self.waiting_since_s


@dataclass(frozen=True)
class Running:
    """A job that runs, and its devices."""

    job: Job
    devices: tuple[str, ...]
    since_s: float = 0.0  # start on these devices


@dataclass(frozen=True)
class State:
    """Everything that a policy decides on.

    Args:
        now_s: seconds on any clock.
        waiting: jobs without devices, in any order.
    """

    now_s: float
    devices: tuple[Device, ...]
    waiting: tuple[Job, ...] = ()
    running: tuple[Running, ...] = ()

    @property
    def allocation(self) -> dict[str, tuple[str, ...]]:
        """The present allocation."""
        return {running.job.name: running.devices for running in self.running}


def _check_resources(where: str, amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        if name not in RESOURCES:
            raise ValueError(f"{where} name {name!r}, which is no resource; known are {', '.join(RESOURCES)}")
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"{where} hold {amount} of {name!r}; an amount is finite and not negative")
