"""Elastic jobs of a workload: which sizes each can have, how much work it has, and how fast it really is.

All jobs of one application with one global batch are a family. A job runs on any number of devices that leaves each of them a
local batch that was measured; its global batch never changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from lightning_dlrover.planner.cluster.jobs import Device, Job, Profile
from lightning_dlrover.planner.cluster.measured_speeds import MeasuredApplication, Placement, even_placement
from lightning_dlrover.planner.cluster.simulator import Arrival
from lightning_dlrover.planner.cluster.work import SAMPLES, USUAL_BATCHES
from lightning_dlrover.planner.cluster.workloads import Submission, WorkloadError

__all__ = [
    "GUESS_STEPS_PER_S",
    "Cluster",
    "ElasticTruth",
    "ElasticWorkload",
    "Family",
    "Lengths",
    "elastic_workload",
    "placement_of",
]

KIND = "gpu"

LENGTH_SPREAD = math.log(2)
"""Deviation of the logarithm of a wrong length: a third of all jobs are more than a factor of 2 off."""

GUESS_STEPS_PER_S = 1.0
"""Assumed steps/s of one device for a family of which nothing has been measured."""


Lengths: TypeAlias = Literal["known", "unknown", "wrong"]
"""What policies know of the steps of a job: all, nothing, or the steps times a random factor (log-normal, `LENGTH_SPREAD`)."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equal devices."""

    num_nodes: int
    per_node: int

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.per_node < 1:
            raise ValueError(f"a cluster has {self.num_nodes} nodes with {self.per_node} devices each; give both above 0")

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node

    def devices(self) -> tuple[Device, ...]:
        width = len(str(self.num_nodes - 1))
        return tuple(
            Device(f"n{node:0{width}}g{gpu}", KIND, f"n{node:0{width}}", memory_bytes=16 << 30, places=1)
            for node in range(self.num_nodes)
            for gpu in range(self.per_node)
        )

    def packed(self, num_devices: int) -> Placement:
        """Return the placement on as few nodes as can be."""
        return even_placement(num_devices, math.ceil(num_devices / self.per_node))


@dataclass(frozen=True)
class Family:
    """Jobs of one application with one global batch."""

    application: MeasuredApplication
    global_batch: int  # samples per step, all devices together
    max_devices: int  # limited by the smallest measured local batch and the cluster

    @property
    def name(self) -> str:
        return f"{self.application.name}/{self.global_batch}"

    def steps_per_s(self, placement: Placement) -> float:
        return self.application.steps_per_s(placement, self.global_batch)


@dataclass(frozen=True)
class ElasticWorkload:
    """Arrivals of elastic jobs, and the families of their jobs by `Job.family`."""

    arrivals: tuple[Arrival, ...]
    families: Mapping[str, Family]
    cluster: Cluster


@dataclass(frozen=True)
class ElasticTruth:
    """Real steps/s of elastic jobs; a `Truth` of the simulator."""

    families: Mapping[str, Family]

    def __call__(self, job: Job, devices: Sequence[Device], beside: Mapping[str, Sequence[Job]]) -> float:
        return self.families[job.family].steps_per_s(placement_of(devices))


def placement_of(devices: Sequence[Device]) -> Placement:
    """Return the number of devices on each node, in the order of the nodes' first devices."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.node] = counts.get(device.node, 0) + 1
    return tuple(counts.values())


def elastic_workload(
    submissions: Sequence[Submission],
    applications: Mapping[str, MeasuredApplication],
    cluster: Cluster,
    *,
    start_s: float | Mapping[str, float] = 30.0,
    change_s: float | Mapping[str, float] = 30.0,
    joins: bool = False,
    lengths: Lengths = "known",
    samples: Mapping[str, int] = SAMPLES,
    seed: int = 0,
) -> ElasticWorkload:
    """Return the arrivals of submitted jobs, each with its work in steps.

    A submission that names no application gets one of those with a usual batch that splits over its devices, drawn by its
    name and the seed. Its work is the number of steps that it made in its duration on the devices that it had.

    Args:
        start_s: seconds without a step when a job starts; one figure for all, or by application.
        change_s: the same when its devices change.
        joins: a running job makes steps until the workers on its new devices have started, which takes `start_s`.
        lengths: what policies know of them, see `Lengths`.
        samples: work by application.
        seed: of drawn applications and lengths.
    Raises:
        WorkloadError: a job's batch is too small for its devices, its work is not known, or nodes are larger than measured.
    """
    families: dict[str, Family] = {}
    arrivals = []
    for submission in submissions:
        job = submission if submission.application else _drawn(submission, applications, seed)
        application = applications[job.application]
        if cluster.per_node > application.max_on_node:
            raise WorkloadError(
                f"{application.name} was measured on at most {application.max_on_node} devices of a node, "
                f"the cluster has {cluster.per_node}; give smaller nodes"
            )
        most = min(application.most_devices(job.batch_size), cluster.num_devices)
        if job.num_devices > most:
            raise WorkloadError(
                f"{job.where}: {job.num_devices} devices share {job.batch_size} samples; {application.name} was measured with "
                f"{application.min_local_batch} samples per device and more, on at most {application.max_devices} devices, "
                f"so that {most} devices are the most"
            )
        family = Family(application, job.batch_size, most)
        family = families.setdefault(family.name, family)
        begin_s = start_s if isinstance(start_s, float | int) else _looked_up(start_s, job, "the cost of a start")
        cost_s = change_s if isinstance(change_s, float | int) else _looked_up(change_s, job, "the cost of a change")
        costs = _Costs(float(begin_s), float(cost_s), float(begin_s) if joins else 0.0)
        steps = _steps(job, family, cluster, samples)
        told = random.Random(f"{seed}/length/{job.name}").lognormvariate(0, LENGTH_SPREAD) if lengths == "wrong" else 1.0
        known = None if lengths == "unknown" else steps * told
        arrivals.append(Arrival(_job(job, family, costs, known), steps, told=told))
    return ElasticWorkload(tuple(arrivals), families, cluster)


class _Costs(NamedTuple):
    start_s: float
    change_s: float
    join_s: float


def _job(submission: Submission, family: Family, costs: _Costs, steps: float | None) -> Job:
    return Job(
        submission.name,
        {KIND: Profile(0, GUESS_STEPS_PER_S)},
        steps_left=steps,
        submitted_s=submission.at_s,
        num_devices=submission.num_devices,
        min_devices=1,
        max_devices=family.max_devices,
        family=family.name,
        batch_size=family.global_batch / submission.num_devices,
        start_s=costs.start_s,
        change_s=costs.change_s,
        join_s=costs.join_s,
    )


def _steps(job: Submission, family: Family, cluster: Cluster, samples: Mapping[str, int]) -> float:
    if job.duration_s is not None:
        return max(1.0, job.duration_s * family.steps_per_s(cluster.packed(job.num_devices)))
    return float(math.ceil(_looked_up(samples, job, "the work") / job.batch_size))


def _looked_up(figures: Mapping[str, float], job: Submission, what: str) -> float:
    if job.application not in figures:
        raise WorkloadError(
            f"{job.where}: {what} of {job.application!r} is unknown; known are {', '.join(sorted(figures))}: add it to --work"
        )
    return figures[job.application]


def _drawn(job: Submission, applications: Mapping[str, MeasuredApplication], seed: int) -> Submission:
    """Return the submission with an application and a batch, drawn evenly among those that can use its devices."""
    suitable = [
        (name, batch)
        for name in sorted(applications)
        for batch in USUAL_BATCHES.get(name, ())
        if applications[name].most_devices(batch) >= job.num_devices
    ]
    if not suitable:
        raise WorkloadError(f"{job.where}: no application with a usual batch was measured on {job.num_devices} devices")
    application, batch = random.Random(f"{seed}/{job.name}").choice(suitable)
    return Submission(job.name, application, job.at_s, job.num_devices, batch, job.duration_s, job.where)
