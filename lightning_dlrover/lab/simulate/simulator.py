"""Simulate a cluster of jobs, event by event, and record the outcome. Pure and deterministic.

`simulate` runs one policy on `Arrival`s. `elastic_workload` makes the arrivals of a trace.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np

from lightning_dlrover.colocate.packing import Packing, why_never
from lightning_dlrover.lab.simulate.traces import (
    SAMPLES,
    USUAL_BATCHES,
    MeasuredApplication,
    Placement,
    Submission,
    WorkloadError,
    even_placement,
)
from lightning_dlrover.tuning.cluster import Allocation, Device, Job, Policy, Profile, Running, Scaling, State


@dataclass(frozen=True)
class NodeLoss:
    """A node that is lost and replaced at once, such as by an eviction: the workers on it start again there."""

    at_s: float
    node: str


@dataclass(frozen=True)
class Fragility:
    """The consequences of a lost worker for its job, and of memory that grows beyond its limit.

    Args:
        checkpoint_s: seconds of steps between checkpoints, from which the job restarts; 0: no finished step is lost, as other
            workers hold the state.
        restart_s: seconds without a step after a loss.
        most_losses: the job fails at the next one.
        fails_at_steps: number of steps after which it fails.
    """

    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    most_losses: float = math.inf
    fails_at_steps: float = math.inf

    def __post_init__(self) -> None:
        if not (self.checkpoint_s >= 0 and self.restart_s >= 0 and self.most_losses >= 0 and self.fails_at_steps > 0):
            raise ValueError(f"{self} has a negative figure, or fails before its first step")


def draw_losses(nodes: Sequence[str], per_node_hour: float, rng: random.Random) -> Iterator[NodeLoss]:
    """Yield losses in order of time, without end: a Poisson process on each node.

    Args:
        per_node_hour: mean number of losses of a node in an hour.
    """
    at_s = 0.0
    while per_node_hour > 0 and nodes:
        at_s += rng.expovariate(per_node_hour * len(nodes) / 3600)
        yield NodeLoss(at_s, rng.choice(nodes))


@dataclass(frozen=True)
class Span:
    """A period that a job spent on the same devices."""

    job: str
    began_s: float
    ended_s: float
    num_devices: int


@dataclass(frozen=True)
class Finished:
    """A job that has ended, or failed."""

    job: Job
    started_s: float
    ended_s: float
    served_device_s: float
    starts: int  # 1 more than it was put back to wait
    changes: int  # times that its devices changed while it ran
    steps: float  # made for good
    is_whole: bool = True  # False: it failed before its last step

    @property
    def completion_s(self) -> float:
        """Seconds from its submission to its end: the JCT."""
        return self.ended_s - self.job.submitted_s


@dataclass(frozen=True)
class SimulationOutcome:
    """All jobs of a simulation in the order of their ends."""

    finished: tuple[Finished, ...]
    start_s: float  # first submission
    end_s: float
    num_devices: int
    busy_device_s: float
    decisions: int
    spans: tuple[Span, ...] = ()  # all jobs, in the order of their ends

    @property
    def mean_completion_s(self) -> float:
        """Mean JCT."""
        return float(np.mean([job.completion_s for job in self.finished]))

    @property
    def changes_per_job(self) -> float:
        """Changes of a running job's devices, and times that it was put back to wait."""
        return sum(job.changes + job.starts - 1 for job in self.finished) / len(self.finished)


WINDOW_S = 20.0
"""Seconds of steps that make a window. On the same devices, the next one ends when twice as many seconds have passed."""

WINDOW_STEPS = 2
"""Minimum number of steps of a window."""


class SimulationError(ValueError):
    """Jobs cannot run on the devices, or a policy exceeded a hard limit."""


@dataclass(frozen=True)
class Arrival:
    """A job that comes at `job.submitted_s`, and the work that it really has.

    Args:
        job: as the policy sees it; while it runs, `steps_left` is kept where it is known.
        steps: until the job ends.
        length_factor: steps reported to policies over the real ones. A job that has made more has an unknown end.
        fragility: the consequences of lost nodes.
    """

    job: Job
    steps: float
    fragility: Fragility = field(default_factory=Fragility)
    length_factor: float = 1.0


class Truth(Protocol):
    """The real speed of jobs."""

    def __call__(self, job: Job, devices: Sequence[Device], others: Mapping[str, Sequence[Job]], /) -> float:
        """Return a job's steps/s.

        Args:
            devices: of the job, one for each worker.
            others: the other workers on each of those devices, by the device's name.
        """
        ...


class Knowledge(Protocol):
    """The policies' knowledge of the speed of elastic jobs."""

    def ran(self, job: Job, devices: Sequence[Device], /) -> None:
        """Observe a window of steps of a job on its devices."""
        ...

    def scaling(self, job: Job, /) -> Scaling:
        """Return the present knowledge. The same object as before if nothing has been learned since."""
        ...


@dataclass
class _Run:
    """A running job: its progress up to `at_s`, and its speed from `ready_s` on.

    Args:
        kept: devices that make steps until the others have joined at `joined_s`.
    """

    job: Job
    devices: tuple[Device, ...]
    left: float
    at_s: float
    since_s: float
    ready_s: float
    names: tuple[str, ...]
    kept: tuple[Device, ...] = ()
    joined_s: float = -math.inf
    kept_per_s: float = 0.0  # steps/s until then
    steps_per_s: float = 0.0
    next_window_s: float = WINDOW_S  # seconds of steps at which the next window ends
    version: int = -1  # number of the valid entry in the heap; others were computed with another speed

    def advance(self, now_s: float) -> None:
        made = self.kept_per_s * max(min(now_s, self.joined_s) - self.at_s, 0.0)
        made += self.steps_per_s * max(now_s - max(self.at_s, self.ready_s), 0.0)
        self.left, self.at_s = max(self.left - made, 0.0), now_s

    def end_s(self) -> float:
        before = self.kept_per_s * max(self.joined_s - self.at_s, 0.0)
        if before > 0 and self.left <= before:
            return self.at_s + self.left / self.kept_per_s
        return max(self.at_s, self.ready_s) + ((self.left - before) / self.steps_per_s if self.steps_per_s > 0 else math.inf)

    def working(self, now_s: float) -> tuple[Device, ...]:
        """Return the devices that do not wait to join."""
        return self.kept if now_s < self.joined_s else self.devices


@dataclass
class _Progress:
    """Progress of a job, kept while it waits, too."""

    arrival: Arrival
    left: float  # until it ends, or fails
    beyond: float = 0.0  # steps that it will not make, as it fails before
    losses: int = 0
    started_s: float = math.nan
    served_device_s: float = 0.0
    starts: int = 0
    changes: int = 0

    def reported_left(self, left: float) -> float | None:
        """Return the steps reported to a policy, given the steps that remain until the job ends or fails."""
        if self.arrival.job.steps_left is None:
            return None
        reported = left + self.beyond + (self.arrival.length_factor - 1) * self.arrival.steps
        return reported if reported > 0 or self.arrival.length_factor == 1 else None


# Event driven and deterministic. The policy is asked when a job comes or ends, and at fixed intervals where it wants to be.
# The same function also decides on real devices. The truth gives each job's speed on its devices, given the jobs that share
# them, and may hold more than the policy sees: of an elastic job, a policy sees only `Knowledge`. A job that starts
# or changes its devices makes no step for as long as that costs. New devices of a job with `join_s` idle until they have
# joined.
def simulate(
    arrivals: Sequence[Arrival],
    devices: Sequence[Device],
    policy: Policy,
    truth: Truth,
    *,
    every_s: float | None = None,
    knowledge: Knowledge | None = None,
    losses: Iterable[NodeLoss] = (),
) -> SimulationOutcome:
    """Simulate a policy with one clock: jobs come, share devices and end.

    Args:
        every_s: seconds between decisions without a cause; None: only when jobs come and end.
        knowledge: source of `Job.scaling` for the policy; None: jobs keep the one that they came with.
        losses: lost nodes in order of time, perhaps without an end.
    Raises:
        SimulationError: a job could never run, the policy exceeds memory or places, or leaves jobs waiting forever.
    """
    return _Simulation(arrivals, tuple(devices), policy, truth, every_s, knowledge, iter(losses)).run()


@dataclass
class _Simulation:
    arrivals: Sequence[Arrival]
    devices: tuple[Device, ...]
    policy: Policy
    truth: Truth
    every_s: float | None
    knowledge: Knowledge | None
    losses: Iterator[NodeLoss]
    now_s: float = 0.0
    waiting: dict[str, Job] = field(default_factory=dict)
    running: dict[str, _Run] = field(default_factory=dict)
    ends: list[tuple[float, str, int]] = field(default_factory=list)  # a heap
    finished: list[Finished] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    version: int = 0
    busy_s: float = 0.0  # devices with a job, times seconds

    def run(self) -> SimulationOutcome:
        self._check()
        self.progress: dict[str, _Progress] = {}
        for arrival in self.arrivals:
            possible = min(arrival.steps, arrival.fragility.fails_at_steps)
            self.progress[arrival.job.name] = _Progress(arrival, possible, arrival.steps - possible)
        self.loss = next(self.losses, None)
        self.by_name = {device.name: device for device in self.devices}
        coming = sorted(self.arrivals, key=lambda a: (a.job.submitted_s, a.job.name))
        next_tick_s = math.inf if self.every_s is None or not coming else coming[0].job.submitted_s
        start_s = coming[0].job.submitted_s if coming else 0.0
        endless = "the policy lets {} wait for ever on free devices"
        position = decisions = 0
        while position < len(coming) or self.running or self.waiting:
            comes_s = coming[position].job.submitted_s if position < len(coming) else math.inf
            loss_s = self.loss.at_s if self.loss is not None and self.running else math.inf
            next_s = min(comes_s, self._next_end_s(), loss_s, next_tick_s if self.running or self.waiting else math.inf)
            if next_s == math.inf:
                raise SimulationError(endless.format(sorted(self.waiting)[:5]))
            self._advance(next_s)
            self._lose(next_s)
            while position < len(coming) and coming[position].job.submitted_s <= next_s:
                self.waiting[coming[position].job.name] = coming[position].job
                position += 1
            while self.every_s is not None and next_tick_s <= next_s:
                next_tick_s += self.every_s
            self._apply(self.policy(self._state()))
            decisions += 1
            if self.waiting and not self.running and position == len(coming) and self.every_s is None:
                raise SimulationError(endless.format(sorted(self.waiting)[:5]))
        return SimulationOutcome(
            tuple(self.finished), start_s, self.now_s, len(self.devices), self.busy_s, decisions, tuple(self.spans)
        )

    def _check(self) -> None:
        names = [arrival.job.name for arrival in self.arrivals]
        if len(set(names)) != len(names):
            raise SimulationError(f"two jobs have the name {next(n for n in names if names.count(n) > 1)!r}")
        for arrival in self.arrivals:
            why = why_never(arrival.job, self.devices)
            if why is not None:
                raise SimulationError(why)
            if not (math.isfinite(arrival.steps) and arrival.steps > 0 and math.isfinite(arrival.job.submitted_s)):
                raise SimulationError(
                    f"job {arrival.job.name!r} has {arrival.steps} steps and comes at {arrival.job.submitted_s} s; "
                    "steps must be above 0, and both finite"
                )

    def _next_end_s(self) -> float:
        while self.ends:
            end_s, name, version = self.ends[0]
            run = self.running.get(name)
            if run is not None and run.version == version:
                return end_s
            heapq.heappop(self.ends)
        return math.inf

    def _advance(self, to_s: float) -> None:
        """Go to a time, and end the jobs that end by then."""
        busy = {device.name for run in self.running.values() for device in run.devices}
        self.busy_s += len(busy) * (to_s - self.now_s)
        self.now_s = to_s
        ended: list[_Run] = []
        while self._next_end_s() <= to_s:
            run = self.running[heapq.heappop(self.ends)[1]]
            run.version = -1
            run.left = 0.0
            ended.append(run)
        changed = {device.name for run in ended for device in run.devices}
        for run in ended:
            self._end(run)
        self._set_speeds(changed)

    def _end(self, run: _Run) -> None:
        self._stop(run)
        progress = self.progress[run.job.name]
        self.finished.append(
            Finished(
                replace(run.job, scaling=progress.arrival.job.scaling),
                progress.started_s,
                self.now_s,
                progress.served_device_s,
                progress.starts,
                progress.changes,
                progress.arrival.steps - progress.beyond - progress.left,
                is_whole=not progress.beyond and not progress.left,
            )
        )

    def _lose(self, until_s: float) -> None:
        """Take the jobs on lost nodes back to their last checkpoints, and end those that have lost too often."""
        while self.loss is not None and self.loss.at_s <= until_s:
            node = self.loss.node
            self.loss = next(self.losses, None)
            hit = [run for run in self.running.values() if any(device.node == node for device in run.devices)]
            for run in hit:
                self._fall_back(run)
            self._set_speeds({device.name for run in hit for device in run.devices})

    def _fall_back(self, run: _Run) -> None:
        progress = self.progress[run.job.name]
        fragility = progress.arrival.fragility
        run.advance(self.now_s)
        progress.losses += 1
        if progress.losses > fragility.most_losses:
            self._end(run)
            return
        if fragility.checkpoint_s:
            run.left += run.steps_per_s * (max(self.now_s - run.ready_s, 0.0) % fragility.checkpoint_s)
        run.ready_s = self.now_s + fragility.restart_s

    def _state(self) -> State:
        for run in self.running.values():
            self._observe(run)
        running = []
        for run in self.running.values():
            progress = self.progress[run.job.name]
            run.advance(self.now_s)
            served = progress.served_device_s + len(run.devices) * (self.now_s - run.since_s)
            left = progress.reported_left(run.left)
            scaling = run.job.scaling if self.knowledge is None else self.knowledge.scaling(run.job)
            restarts = progress.changes + progress.starts - 1
            job = replace(run.job, steps_left=left, served_device_s=served, restarts=restarts, scaling=scaling)
            running.append(Running(job, run.names, run.since_s))
        return State(self.now_s, self.devices, self._waiting(), tuple(running))

    def _waiting(self) -> tuple[Job, ...]:
        if self.knowledge is not None:
            for name, job in self.waiting.items():
                scaling = self.knowledge.scaling(job)
                if scaling is not job.scaling:
                    self.waiting[name] = replace(job, scaling=scaling)
        return tuple(self.waiting.values())

    def _observe(self, run: _Run) -> None:
        """Let a run show a window if its steps make one."""
        if self.knowledge is None:
            return
        ran_s = self.now_s - run.ready_s
        if ran_s >= run.next_window_s and ran_s * run.steps_per_s >= WINDOW_STEPS:
            run.next_window_s = 2 * ran_s
            self.knowledge.ran(run.job, run.devices)

    def _apply(self, allocation: Allocation) -> None:
        wanted = {name: tuple(self.by_name[device] for device in names) for name, names in allocation.items() if names}
        changing = [name for name, run in self.running.items() if wanted.get(name) != run.devices]
        starting = [name for name in wanted if name in self.waiting]
        if unknown := [name for name in wanted if name not in self.waiting and name not in self.running]:
            raise SimulationError(f"the policy gives devices to {unknown}, which neither wait nor run")
        if not changing and not starting:
            return
        changed = {d.name for name in changing for d in self.running[name].devices}
        changed |= {device.name for name in (*changing, *starting) for device in wanted.get(name, ())}
        for name in changing:
            run = self.running[name]
            self._stop(run)
            if name in wanted:
                self.progress[name].changes += 1
                self._change(run, wanted[name])
            else:
                progress = self.progress[name]
                self.waiting[name] = replace(
                    run.job,
                    waiting_since_s=self.now_s,
                    served_device_s=progress.served_device_s,
                    steps_left=progress.reported_left(progress.left),
                    restarts=progress.changes + progress.starts,
                )
        for name in starting:
            self.progress[name].starts += 1
            job = self.waiting.pop(name)
            self._begin(job, wanted[name], job.start_s)
        self._check_limits(changed)
        self._set_speeds(changed)

    def _change(self, run: _Run, devices: tuple[Device, ...]) -> None:
        kept = tuple(device for device in run.working(self.now_s) if device in devices)
        join_s = run.job.join_s if len(kept) < len(devices) else 0.0
        self._begin(run.job, devices, join_s + run.job.change_s)
        if kept and join_s:
            begun = self.running[run.job.name]
            begun.kept, begun.joined_s = kept, self.now_s + join_s

    def _begin(self, job: Job, devices: tuple[Device, ...], cost_s: float) -> None:
        progress = self.progress[job.name]
        if math.isnan(progress.started_s):
            progress.started_s = self.now_s
        names = tuple(device.name for device in devices)
        self.running[job.name] = _Run(job, devices, progress.left, self.now_s, self.now_s, self.now_s + cost_s, names)

    def _stop(self, run: _Run) -> None:
        self._observe(run)
        run.advance(self.now_s)
        self.spans.append(Span(run.job.name, run.since_s, self.now_s, len(run.devices)))
        progress = self.progress[run.job.name]
        progress.left = run.left
        progress.served_device_s += len(run.devices) * (self.now_s - run.since_s)
        del self.running[run.job.name]

    def _check_limits(self, changed: set[str]) -> None:
        """Check the nodes of devices that have other workers than before; memory of a node counts on all of its devices."""
        nodes = {self.by_name[name].node for name in changed}
        there = [run for run in self.running.values() if any(device.node in nodes for device in run.devices)]
        checked = [device for device in self.devices if device.node in nodes]
        others = {d.name: d for run in there for d in run.devices if d.node not in nodes}
        running = tuple(Running(run.job, run.names) for run in there)
        packing = Packing(State(self.now_s, (*checked, *others.values()), (), running))
        for device in checked:
            if packing.free_bytes(device) < 0 or len(packing.members(device)) > device.places:
                names = [job.name for job in packing.members(device)]
                raise SimulationError(
                    f"the policy puts {names} on device {device.name!r}, which has {device.places} places "
                    f"and {-packing.free_bytes(device)} bytes too few"
                )

    def _set_speeds(self, changed: set[str]) -> None:
        """Ask the truth again for all jobs on devices with other workers than before."""
        affected = [run for run in self.running.values() if any(device.name in changed for device in run.devices)]
        workers: dict[str, list[Job]] = {device.name: [] for run in affected for device in run.devices}
        for run in self.running.values():
            for device in run.devices:
                if device.name in workers:
                    workers[device.name].append(run.job)
        for run in affected:
            run.advance(self.now_s)
            others = {d.name: [job for job in workers[d.name] if job.name != run.job.name] for d in run.devices}
            run.steps_per_s = self.truth(run.job, run.devices, others)
            run.kept_per_s = self.truth(run.job, run.kept, others) if self.now_s < run.joined_s else 0.0
            # Counted over all jobs, so that an entry of a job's earlier devices cannot be taken for one of the present.
            self.version += 1
            run.version = self.version
            heapq.heappush(self.ends, (run.end_s(), run.job.name, run.version))


KIND = "gpu"

LENGTH_SPREAD = math.log(2)
"""Deviation of the logarithm of a wrong length: a third of all jobs are more than a factor of 2 off."""

GUESS_STEPS_PER_S = 1.0
"""Assumed steps/s of one device for a family without any measurement."""


Lengths: TypeAlias = Literal["known", "unknown", "wrong"]
"""A policy's knowledge of the steps of a job: all, nothing, or them times a random factor (log-normal, `LENGTH_SPREAD`)."""


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


def placement_of(devices: Sequence[Device]) -> Placement:
    """Return the number of devices on each node, in the order of the nodes' first devices."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.node] = counts.get(device.node, 0) + 1
    return tuple(counts.values())


# Elastic jobs of a workload: which sizes each can have, how much work it has, and how fast it really is.
#
# All jobs of one application with one global batch are a family. A job runs on any number of devices that leaves each of
# them a local batch that was measured; its global batch never changes.
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

    A submission that names no application is assigned one of those with a usual batch that splits over its devices, drawn by
    its name and the seed. Its work is the number of steps that it made in its duration on the devices that it had.

    Args:
        start_s: seconds without a step when a job starts; one figure for all, or by application.
        change_s: the same when its devices change.
        joins: a running job makes steps until the workers on its new devices have started, which takes `start_s`.
        lengths: the policies' knowledge of them, see `Lengths`.
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
        steps = _steps(job, family, cluster, samples)
        factor = random.Random(f"{seed}/length/{job.name}").lognormvariate(0, LENGTH_SPREAD) if lengths == "wrong" else 1.0
        seen = Job(
            job.name,
            {KIND: Profile(0, GUESS_STEPS_PER_S)},
            steps_left=None if lengths == "unknown" else steps * factor,
            submitted_s=job.at_s,
            num_devices=job.num_devices,
            min_devices=1,
            max_devices=family.max_devices,
            family=family.name,
            batch_size=family.global_batch / job.num_devices,
            start_s=float(begin_s),
            change_s=float(cost_s),
            join_s=float(begin_s) if joins else 0.0,
        )
        arrivals.append(Arrival(seen, steps, length_factor=factor))
    return ElasticWorkload(tuple(arrivals), families, cluster)


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
    return replace(job, application=application, batch_size=batch)
