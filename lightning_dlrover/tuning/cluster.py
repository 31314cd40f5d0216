"""Jobs, devices and policies of a cluster, as data that pools, co-location and simulations share. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# The predicted speed of an elastic job: steps/s by number of devices and nodes, with its uncertainty.


@dataclass(frozen=True)
class Speeds:
    """Predicted speeds; arrays of shape ``(n,)``."""

    steps_per_s: Floats  # of the whole job, with its global batch; 0: it cannot run so
    spread: Floats  # standard deviation of the logarithm of each; 0: measured there, or known


class Scaling(Protocol):
    """Predicts the speed of one job. Its global batch does not depend on the number of its devices."""

    def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
        """Return the speeds with so many devices on so many nodes, spread as evenly as can be.

        Args:
            num_devices: above 0, shape ``(n,)``.
            num_nodes: from 1 to `num_devices`, shape ``(n,)``.
        """
        ...


# Jobs, devices and the state of a cluster, as data that policies decide on.
#
# Two scopes of a resource: those of `HOST_RESOURCES` belong to a node, and all jobs on any device of it share them; the
# others belong to one device. Memory is hard: an allocation never exceeds it. Limits of other resources are soft: exceeding
# them slows jobs down, and a policy may refuse to.

# Resources that all devices of a node share. A device of the node that lists a limit states the node's limit.
HOST_RESOURCES = ("cores", "memory_bandwidth", "input")

RESOURCES = (*HOST_RESOURCES, "gpu", "pcie")
"""Measured resources: cores in cores, "memory_bandwidth" and "pcie" in bytes/s, the others in fractions of the time.

"gpu" is the time in which a kernel runs. The bandwidth of a GPU's memory is left out, as nothing measures it: NVML's
percentage is the time in which that memory is read or written, however few bytes these are.
"""

# Device names by job name, all running jobs included. A job that is absent waits, or is paused. A device named twice holds two
# workers of that job.
Allocation = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU of a node: where workers run, several at once."""

    name: str
    # Devices of one kind are equally fast, and profiles are measured for each kind. "cpu..." stands for the CPUs of a node.
    kind: str
    node: str
    memory_bytes: int  # memory of a GPU, or of the whole node for its CPU
    limits: Mapping[str, float] = field(default_factory=dict)  # largest total use by resource; absent: not limited
    places: int = 4  # most workers at once

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
    """Needs of one worker of a job on a kind of device, and its speed there alone."""

    memory_bytes: int  # peak on the device, with the margin for admission
    steps_per_s: float
    # Amount of each resource used alone, mean over a step, in units of the device's limits.
    use: Mapping[str, float] = field(default_factory=dict)
    host_memory_bytes: int = 0  # peak on the host of a worker that has a GPU; 0 for a worker on a CPU

    def __post_init__(self) -> None:
        if not (math.isfinite(self.steps_per_s) and self.steps_per_s > 0):
            raise ValueError(f"a profile has {self.steps_per_s} steps/s; measure the job alone first")
        if self.memory_bytes < 0 or self.host_memory_bytes < 0:
            raise ValueError(f"a profile has {self.memory_bytes} and {self.host_memory_bytes} bytes; neither can be negative")
        _check_resources("a profile's use", self.use)


@dataclass(frozen=True)
class Job:
    """A job as policies see it; moments are on the clock of `State.now_s`."""

    name: str
    profiles: Mapping[str, Profile]  # by kind of device; the job runs on no other kinds
    steps_left: float | None = None  # None: the end is unknown
    submitted_s: float = 0.0
    waiting_since_s: float | None = None  # when it was last put back to wait; None: since it was submitted
    priority: int = 0  # higher ones start first
    weight: float = 1.0  # importance of its speed relative to that of others of its priority
    owner: str = ""
    num_devices: int = 1  # as its user asked
    min_devices: int = 0  # fewest devices of an elastic job; 0: `num_devices`
    max_devices: int = 0  # most devices, likewise
    sizes: tuple[int, ...] = ()  # numbers of devices that it may have, its limits among them; empty: any
    served_device_s: float = 0.0  # seconds times devices that it has had
    restarts: int = 0  # times that it was put back to wait, or got other devices while it ran
    family: str = ""  # jobs with the same model, such as its name; "": unknown. Only a hint for predictions
    batch_size: float = 0.0  # samples per worker and step; 0: unknown. Only a hint for predictions
    scaling: Scaling | None = None  # known speed by number of devices; None: the job is not elastic
    start_s: float = 0.0  # expected time without a step when the job starts, or starts again after a pause
    change_s: float = 0.0  # the same when its devices change while it runs
    # Further time until devices added to a running job make steps; the others make steps until then. A job that keeps none of
    # its devices makes none. 0: the job stops for `change_s`, as for a restart.
    join_s: float = 0.0
    deadline_s: float | None = None  # time by which it should have ended; None: any

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
    """Input of a policy."""

    now_s: float  # seconds on any clock
    devices: tuple[Device, ...]
    waiting: tuple[Job, ...] = ()  # jobs without devices, in any order
    running: tuple[Running, ...] = ()

    @property
    def allocation(self) -> dict[str, tuple[str, ...]]:
        """The present allocation."""
        return {running.job.name: running.devices for running in self.running}


def _check_resources(where: str, amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        if name not in RESOURCES:
            raise ValueError(f"{where} name {name!r}, which is not a resource; known are {', '.join(RESOURCES)}")
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"{where} hold {amount} of {name!r}; an amount is finite and not negative")


# The interface of a policy, and the settings of policies.


class Policy(Protocol):
    """A pure function: the same state gives the same allocation. It keeps nothing between calls."""

    def __call__(self, state: State) -> Allocation:
        """Return the devices of every job that shall run from now on."""
        ...


class SpeedPredictor(Protocol):
    """Predicts the speed of jobs that share a device. `slowdown.SlowdownModel` is one."""

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the speed of each job of each group, all on one device, over its speed alone there.

        Args:
            groups: jobs that have a profile for the device's kind; a job of several workers appears once for each.
        Returns:
            For each group an array of shape ``(len(group),)``; 1 is the speed alone.
        """
        ...


@dataclass(frozen=True)
class Undisturbed:
    """Predicts that no job disturbs another."""

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        return [np.ones(len(group)) for group in groups]


@dataclass(frozen=True)
class PolicySettings:
    """Settings of the policies in the registry; each uses those that it needs."""

    speeds: SpeedPredictor = Undisturbed()
    max_wait_s: float = 3600.0  # a job that has waited longer goes before all others, and a device is kept free for it
    seed: int = 0  # for policies that choose at random; equal seeds give equal choices
    most_together: int = 4  # most workers of different jobs on one device, where its places allow more
    owner_weights: Mapping[str, float] = field(default_factory=dict)  # importance of each owner's jobs; absent: 1
    may_pause: bool = True  # whether a running elastic job may be put back to wait; its devices may change anyway
    # A device that adds less than this fraction of a device's speed at its job's best efficiency stays free.
    least_gain: float = 0.05


# The discipline of every queue of jobs: the order of turns, and the bound on waiting. Policies that place, policies that size,
# pools and `dlrover colocate` share it, and each decides what fits.


class Queued(Protocol):
    """A job in a queue."""

    @property
    def name(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def submitted_s(self) -> float: ...


def turn_of(job: Queued) -> tuple[int, float, str]:
    """Return the key that sorts jobs by priority, then by submission; names break ties, so no order depends on the caller's."""
    return -job.priority, job.submitted_s, job.name


def is_overdue(waits_since_s: float, now_s: float, max_wait_s: float) -> bool:
    """Return whether a job has waited for longer than the bound."""
    return now_s - waits_since_s > max_wait_s
