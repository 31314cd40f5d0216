"""Measure how fast jobs run alone and side by side, and choose the jobs that run now.

`InterferenceMeter` measures, `Knowledge` keeps the measurements of kinds of jobs, and `Scheduler` asks a policy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeAlias

import numpy as np

from lightning_dlrover.colocate.journal import Added, Ended, JobSpec, Profiled, Rates, Record
from lightning_dlrover.colocate.packing import with_bounded_wait
from lightning_dlrover.colocate.policies import make_policy, turns
from lightning_dlrover.colocate.running import Moment
from lightning_dlrover.colocate.slowdown import (
    LEAST_IDLE,
    CoreSpeeds,
    CoreUse,
    Expected,
    Left,
    Observation,
    Shares,
    SlowdownModel,
    equal_shares,
    expected,
    factor_of,
    for_cores,
    speed_on_cores,
    speed_on_gpu,
    thread_shares,
)
from lightning_dlrover.colocate.tenants import (
    CPU,
    GROWTH,
    MEMORIES,
    START_BYTES,
    Action,
    LocalDevice,
    Memory,
    Pause,
    Resume,
    Sizes,
    Start,
    Tenant,
    Waiting,
    Where,
    free_bytes,
)
from lightning_dlrover.tuning.cluster import (
    Allocation,
    Device,
    Floats,
    Job,
    PolicySettings,
    Profile,
    Running,
    SpeedPredictor,
    State,
    is_overdue,
    turn_of,
)
from lightning_dlrover.tuning.memory import MemoryMargin

SETTLE_S = 0.3
"""Caches and threads of the former set have gone by then."""
GPU_SETTLE_S = 1.2
"""A GPU's busy time is that of up to a second before (NVML, `nvmlDeviceGetUtilizationRates`)."""
ALONE_S = 1.0
TOGETHER_S = 4.0
LEAST_S = 0.8
LEAST_STEPS = 3
MOST = 1e15
"""Larger figures are nonsense that a job has reported."""
WARMUP_STEPS = 2
"""First steps allocate memory and compile; their times differ from those of later ones."""


@dataclass(frozen=True)
class CoRunner:
    """A job that runs, as seen at one look."""

    name: str
    kind: str
    moment: Moment
    step_bytes: int = 0  # memory that a step reads and writes; 0: unknown
    reports: bool = True  # a command that reports no steps is measured by its CPU time

    @property
    def is_warm(self) -> bool:
        return not self.reports or self.moment.num_steps >= WARMUP_STEPS


Alone: TypeAlias = Mapping[tuple[str, bool], float]
"""Speed alone by kind, and whether it is in steps: in steps per second, or in cores of a command that reports no steps."""


# A window begins once the set of running jobs on a device has been the same for a moment. It ends when it is long enough
# and each job has made some steps in it, or when the set changes. Alone, a window gives the job's profile. Side by side, it
# gives each job's speed relative to alone. A job's part of a window lasts from the end of one step to the end of another,
# so that a few long steps give a speed as well as many short ones.
class InterferenceMeter:
    """Measures how fast the jobs of one device run, alone and side by side.

    Args:
        device: the device's name.
        device_kind: key of the profiles. Devices of one kind are equally fast.
    """

    def __init__(self, device: str, device_kind: str) -> None:
        self._device, self._device_kind = device, device_kind
        self._settle_s = SETTLE_S if device_kind == CPU else GPU_SETTLE_S
        self._members: tuple[str, ...] = ()
        self._since_s = 0.0
        self._first: dict[str, Moment] = {}  # keyed by job name; a job is absent until its part of the window has begun
        self._newest: Mapping[str, CoRunner] = {}

    def look(self, now: float, running: Sequence[CoRunner], alone: Alone) -> list[Profiled | Rates]:
        """Return the results of the windows that end with this look.

        Args:
            running: all jobs that run on the device, those that start included.
            alone: known speeds alone.
        """
        found: list[Profiled | Rates] = []
        members = tuple(sorted(co_runner.name for co_runner in running))
        if members != self._members:
            found = self._close(alone)
            self._members, self._since_s, self._first = members, now, {}
        self._newest = {co_runner.name: co_runner for co_runner in running}
        if now - self._since_s >= self._settle_s and all(co_runner.is_warm for co_runner in running):
            for co_runner in running:
                # An older report describes a step that ran, or was paused, next to the former set.
                if co_runner.moment.at_s >= self._since_s:
                    self._first.setdefault(co_runner.name, co_runner.moment)
        if members and self._has_measured(ALONE_S if len(members) == 1 else TOGETHER_S):
            found += self._close(alone)
        return found

    def _has_measured(self, least_s: float) -> bool:
        """Whether every job has made enough steps in a window of this length."""
        return len(self._first) == len(self._members) and all(
            now.moment.at_s - then.at_s >= least_s and (not now.reports or now.moment.num_steps - then.num_steps >= LEAST_STEPS)
            for now, then in ((self._newest[name], then) for name, then in self._first.items())
        )

    def _close(self, alone: Alone) -> list[Profiled | Rates]:
        """End the window; return its results, none if it was too short."""
        is_measured = bool(self._first) and self._has_measured(LEAST_S)
        pairs = [(self._newest[name], then) for name, then in self._first.items()]
        self._first = {}
        if not is_measured:
            return []
        if len(pairs) == 1:
            return [self._profile(*pairs[0])]
        if any(not alone.get((now.kind, now.reports)) for now, _ in pairs):
            return []
        speeds = defaultdict(list)
        for now, then in pairs:
            speeds[now.kind].append(_speed(now, then) / alone[now.kind, now.reports])
        seconds = min(now.moment.at_s - then.at_s for now, then in pairs)
        means = {kind: sum(each) / len(each) for kind, each in speeds.items()}
        return [Rates(self._device, means, tuple(sorted(now.kind for now, _ in pairs)), seconds, self._device_kind)]

    def _profile(self, now: CoRunner, then: Moment) -> Profiled:
        moment = now.moment
        seconds = max(1e-3, moment.measured_s - then.measured_s)
        step_s = moment.step_s - then.step_s
        speed = _speed(now, then)
        use = {
            "cores": (moment.cpu_s - then.cpu_s) / seconds,
            "input": (moment.data_wait_s - then.data_wait_s) / step_s if step_s > 0 else 0.0,
            "memory_bandwidth": now.step_bytes * speed if now.reports else 0.0,
            **moment.gpu.rates_since(then.gpu),
        }
        return Profiled(
            now.kind, self._device_kind, {name: min(max(0.0, amount), MOST) for name, amount in use.items()}, speed, now.reports
        )


def _speed(now: CoRunner, then: Moment) -> float:
    """Return steps per second, or the cores in use of a command that reports no steps."""
    moment = now.moment
    if now.reports:
        return min(MOST, max(1e-9, (moment.num_steps - then.num_steps) / max(1e-3, moment.at_s - then.at_s)))
    return max(1e-9, (moment.cpu_s - then.cpu_s) / max(1e-3, moment.measured_s - then.measured_s))


SPREAD = 1.05
"""Peaks of two runs of one command differ by less."""
MAX_OBSERVATIONS = 400
MAX_ALONE = 8
"""Number of windows alone that a profile averages."""
ALIKE, LEAST_ALIKE = 1.2, 2
"""Factor and number: if at least that many kin differ by less than the factor in use and speed, they represent the rest."""

_OfMemory: TypeAlias = tuple[str, Where, Memory]
"""A kind of job, a type of device, and a memory there: on the host, a job on a GPU has other needs than one on cores."""


# Measurements of kinds of jobs: their use and speed alone, their speeds side by side, their peak memory.
#
# It comes from the queue's own journal and from those of earlier queues. Jobs of one declared kind, or with the same
# command, folder and variables, are of one kind. Kinds with the same script are kin: unknown figures of one are guessed
# from the others. Side by side, jobs on cores are predicted by `CoreSpeeds`, and those on a GPU by `SlowdownModel`.
class Knowledge:
    """Collects records, and predicts from them. A `SpeedPredictor` of policies.

    Args:
        shares: threads of jobs side by side.
        device_kinds: kind of each device by its name; one that is absent has no GPU.
    """

    def __init__(self, shares: Shares = thread_shares, device_kinds: Mapping[str, str] | None = None) -> None:
        self._shares = shares
        self._device_kinds = dict(device_kinds or {})
        self._specs: dict[str, JobSpec] = {}
        self._kin: dict[str, str] = {}  # key: kind
        self._alone: dict[tuple[str, str], list[Profiled]] = {}  # key: kind and kind of device
        self._profiles: dict[tuple[str, str], Profiled] = {}  # the means of those
        self._steps: dict[str, int] = {}  # key: kind; of the newest job that is done
        self._starts_s: dict[str, float] = {}  # key: kind; the shortest time from a start to its request for memory
        self._peaks: dict[_OfMemory, int] = {}  # jobs that are done
        self._wanted: dict[_OfMemory, int] = {}  # jobs that were evicted
        # Each with the measured peak, oldest first.
        self._estimates: dict[Memory, list[tuple[int, int]]] = {memory: [] for memory in MEMORIES}
        self._rates: list[Rates] = []
        self._num_rates = 0
        self._models: dict[str, tuple[int, SpeedPredictor]] = {}  # key: device; with the number of rates that it has learned

    def recall(self, records: Iterable[Record]) -> None:
        """Learn from records of a journal."""
        for record in records:
            if isinstance(record, Added):
                self.meet(record.spec)
            elif isinstance(record, Ended) and record.job in self._specs:
                self.learn_end(self._specs[record.job], record)
            elif isinstance(record, Profiled | Rates):
                self.learn(record)

    def meet(self, spec: JobSpec) -> None:
        """Take note of a job of a queue."""
        self._specs[spec.name] = spec
        self._kin[spec.kind] = spec.kin

    # --- speeds --------------------------------------------------------------------------------------------------------------

    def learn(self, record: Profiled | Rates) -> bool:
        """Take a measurement; return whether it is new."""
        if isinstance(record, Rates):
            self._rates = [*self._rates, record][-MAX_OBSERVATIONS:]
            self._num_rates += 1
            return True
        key = record.job_kind, record.device_kind
        alone = self._alone.setdefault(key, [])
        if len(alone) >= MAX_ALONE or any(known.reports != record.reports for known in alone):
            return False
        alone.append(record)
        speed = fmean(each.steps_per_s for each in alone)
        self._profiles[key] = replace(alone[0], use=_mean_use(alone), steps_per_s=speed)
        return True

    @property
    def num_profiles(self) -> int:
        """Kinds that were measured alone, on each kind of device."""
        return len(self._profiles)

    def is_profiled(self, kind: str, device_kind: str) -> bool:
        return (kind, device_kind) in self._profiles

    def profile(self, kind: str, device_kind: str) -> Profile | None:
        """Return the needs of a kind of job alone, without its memory; None if it was never measured alone."""
        known = self._profiles.get((kind, device_kind))
        return _as_profile(known) if known is not None else None

    def use(self, kind: str, device_kind: str) -> dict[str, float]:
        """Return a kind's use of a kind of device alone: as measured, or the mean of its kin, or of all kinds; may be empty."""
        if (known := self._profiles.get((kind, device_kind))) is not None:
            return known.use
        kin = self._measured_kin(kind, device_kind)
        return _mean_use(kin or [each for (_, where), each in self._profiles.items() if where == device_kind])

    def speed(self, kind: str, device_kind: str) -> float:
        """Return a kind's steps/s alone: as measured, or the mean of its kin, or as expected from another kind of device.

        Where nothing was measured, it is 1 on cores and larger on a GPU.
        """
        known = self._profiles.get((kind, device_kind))
        alike = [known] if known is not None else self._measured_kin(kind, device_kind)
        if alike:
            return fmean(each.steps_per_s for each in alike)
        factor = factor_of(
            [
                (_as_profile(each), _as_profile(self._profiles[of, CPU]))
                for (of, where), each in self._profiles.items()
                if where != CPU and (of, CPU) in self._profiles
            ]
        )
        elsewhere = [(where, _as_profile(each)) for (of, where), each in self._profiles.items() if of == kind]
        if not elsewhere:
            return 1.0 if device_kind == CPU else factor
        where, profile = elsewhere[0]
        if (where == CPU) == (device_kind == CPU):
            return profile.steps_per_s
        return speed_on_cores(profile, factor) if device_kind == CPU else speed_on_gpu(profile, factor)

    def has_speed(self, kind: str) -> bool:
        """Whether a kind or its kin were measured on any device."""
        kin = self._kin.get(kind)
        return any(of == kind or (kin and self._kin.get(of) == kin) for of, _ in self._profiles)

    def num_steps(self, kind: str) -> int:
        """Return the steps of the newest job of a kind that is done; 0: unknown."""
        return self._steps.get(kind, 0)

    def is_as_its_kin(self, kind: str, device_kind: str) -> bool:
        """Whether a kind that was not measured has kin enough that were, all of them with much the same use and speed."""
        kin = self._measured_kin(kind, device_kind)
        amounts = [[each.steps_per_s, *(each.use.get(name, 0.0) + 0.1 for name in ("cores", "input", "gpu"))] for each in kin]
        return len(kin) >= LEAST_ALIKE and all(max(column) < ALIKE * min(column) for column in zip(*amounts, strict=True))

    def _measured_kin(self, kind: str, device_kind: str) -> list[Profiled]:
        kin = self._kin.get(kind)
        return [
            known for (of, where), known in self._profiles.items() if where == device_kind and kin and self._kin.get(of) == kin
        ]

    def alone(self, device_kind: str) -> Alone:
        """Return the speed of each kind alone."""
        return {
            (kind, known.reports): known.steps_per_s for (kind, where), known in self._profiles.items() if where == device_kind
        }

    def reports(self, kind: str) -> bool:
        """Whether jobs of this kind are known to report their steps."""
        return any(known.reports for (of, _), known in self._profiles.items() if of == kind)

    def idle_s(self, kind: str, device_kind: str, limits: Mapping[str, float]) -> float:
        """Return the time that a job of a kind would leave its device idle if it ran alone, its start included.

        The resource that the job uses most counts. It is infinite where unknown, so that unknown kinds become known early.

        Args:
            limits: largest use of each resource of the device.
        """
        known, steps = self._profiles.get((kind, device_kind)), self._steps.get(kind, 0)
        if known is None or not known.reports or not steps:
            return math.inf
        used = max(known.use.get(resource, 0.0) / limit for resource, limit in limits.items())
        starting = max(0.0, 1.0 - 1.0 / limits["cores"]) * self._starts_s.get(kind, 0.0)
        return max(0.0, 1.0 - used) * steps / known.steps_per_s + starting

    def is_familiar(self, kind: str, device_kind: str) -> bool:
        """Whether both the peak of a kind of job and its needs alone were measured on a kind of device."""
        of: _OfMemory = (kind, "cpu", "host") if device_kind == CPU else (kind, "gpu", "gpu")
        return self._peaks.get(of, 0) > 0 and (kind, device_kind) in self._profiles

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return predicted speeds over those alone; see `SpeedPredictor`."""
        known = self._models.get(device.name)
        device_kind = self._device_kinds.get(device.name, CPU)
        if known is None or known[0] != self._num_rates:
            seen = self._observations(device, device_kind)
            model: SpeedPredictor = CoreSpeeds.fit(seen, self._shares) if device_kind == CPU else SlowdownModel.fit(seen)
            known = self._models[device.name] = self._num_rates, model
        # A policy may have been given less: the demand of a job next to others.
        measured = {job.name: self._as_measured(job, device, device_kind) for group in groups for job in group}
        return known[1].relative_speeds([[measured[job.name] for job in group] for group in groups], device)

    def _as_measured(self, job: Job, device: Device, device_kind: str) -> Job:
        profile = self.profile(job.family, device_kind)
        return job if profile is None else replace(job, profiles={device.kind: profile})

    def _observations(self, device: Device, device_kind: str) -> list[Observation]:
        found = []
        for rates in self._rates:
            profiles = [profile for kind in rates.kinds if (profile := self.profile(kind, device_kind)) is not None]
            if rates.device_kind == device_kind and len(profiles) == len(rates.kinds):
                jobs = tuple(
                    Job(f"{kind}-{number}", {device.kind: profile}, family=kind)
                    for number, (kind, profile) in enumerate(zip(rates.kinds, profiles, strict=True))
                )
                speeds = tuple(float(np.clip(rates.speeds[kind], 0.01, 1.5)) for kind in rates.kinds)
                found.append(Observation(device, jobs, speeds))
        return found

    # --- memory --------------------------------------------------------------------------------------------------------------

    def learn_end(self, spec: JobSpec, ended: Ended) -> None:
        """Take the peaks of a job that has ended."""
        peaks: Sizes = {"host": ended.peak_bytes, "gpu": ended.gpu_peak_bytes}
        estimates: Sizes = {"host": ended.estimate_bytes, "gpu": ended.gpu_estimate_bytes}
        for memory, peak in peaks.items():
            of = spec.kind, ended.where, memory
            if ended.result == "done":
                self._peaks[of] = max(self._peaks.get(of, 0), peak)
                if estimates[memory]:
                    self._estimates[memory].append((estimates[memory], max(1, peak)))
            elif ended.result == "evicted":
                self._wanted[of] = max(self._wanted.get(of, 0), int(GROWTH * peak))
        if ended.result == "done":
            self._steps[spec.kind] = ended.num_steps
            for start_s in [span.ended - span.began for span in ended.spans if span.phase == "starting"][:1]:
                self._starts_s[spec.kind] = min(start_s, self._starts_s.get(spec.kind, start_s))

    def expected(self, spec: JobSpec, where: Where) -> Sizes:
        """Return the peaks of a job that has not started, with margins; 0: unknown."""
        return {memory: self._expected_bytes(spec, where, memory) for memory in MEMORIES}

    def _expected_bytes(self, spec: JobSpec, where: Where, memory: Memory) -> int:
        wanted = self._wanted.get((spec.kind, where, memory), 0)
        if (peak := self._peaks.get((spec.kind, where, memory), 0)) > 0:
            return max(int(SPREAD * peak), wanted)
        return max(spec.gpu_memory_bytes if memory == "gpu" else spec.memory_bytes, wanted)

    def has_gpu_peak(self, spec: JobSpec) -> bool:
        """Whether the peak of a job on a GPU is known, from earlier ones or its owner."""
        return self._expected_bytes(spec, "gpu", "gpu") > 0

    def need_bytes(
        self, spec: JobSpec, where: Where, memory: Memory, estimate: tuple[int, int], resident_bytes: int, device_bytes: int
    ) -> int:
        """Return the charge of a job that asks: its own estimate with a margin, or the peak of earlier jobs of its kind.

        Args:
            estimate: the job's own, and its margin; zeros: it has none.
            device_bytes: memory of the device that the job is on.
        """
        # The memory that a job had here when it was evicted has fitted, and so does one that exceeds the device only by a
        # margin.
        wanted = min(self._wanted.get((spec.kind, where, memory), 0), device_bytes)
        if (peak := self._peaks.get((spec.kind, where, memory), 0)) > 0:
            needed = max(int(SPREAD * peak), wanted)
            return min(needed, device_bytes) if peak <= device_bytes else needed
        estimate_bytes, margin_bytes = estimate
        if not estimate_bytes:
            return max(min(self._expected_bytes(spec, where, memory), device_bytes), int(GROWTH * resident_bytes))
        learned = MemoryMargin.of(self._estimates[memory])
        # The job has only the default margin; this process has the errors of earlier estimates.
        margin_bytes = learned.bytes_for(estimate_bytes) if learned.num_records else margin_bytes
        needed = max(wanted, estimate_bytes + margin_bytes)
        return min(needed, device_bytes) if estimate_bytes <= device_bytes else needed

    def probed_bytes(self, spec: JobSpec, where: Where, memory: Memory, peak_bytes: int) -> int:
        """Return the expected peak of a command after its probe."""
        return max(self._expected_bytes(spec, where, memory), int(GROWTH * peak_bytes))


def _as_profile(known: Profiled) -> Profile:
    return Profile(0, known.steps_per_s, known.use)


def _mean_use(known: Sequence[Profiled]) -> dict[str, float]:
    names = dict.fromkeys(name for each in known for name in each.use)
    return {name: fmean(each.use.get(name, 0.0) for each in known) for name in names}


AHEAD = 4
"""Jobs that are started beyond those that run."""
ALONE_LIMIT_S, STEP_LIMIT_S = 90.0, 30.0
"""A job that has not been measured alone within this time, or has made no step for the second, is not measured."""
QUANTUM_S = 30.0
"""Jobs that run stay together for this long, unless one comes or goes."""
LAST_QUANTUM_S = 1.0
"""The same once all jobs have started, if their priorities are equal. They take turns, so that they end together."""
MOST_TOGETHER = 6
PAUSING = ("complementary",)
"""Policies that may pause jobs."""
START = {"cores": 1.0}
"""Use of a job that still starts."""
USUAL_S = 60.0
"""Time of a job on a GPU where no job's time is known. Then only the number of remaining jobs matters."""
UNKNOWN_PART = 0.5
"""Part of a device's cores that a job uses where no kind was measured. On a GPU, such a job keeps that busy, too."""


def jobs_per_core(policy: str) -> int:
    """Return the maximum number of concurrent jobs per core: more if the policy sees which ones wait for data."""
    return 4 if policy in PAUSING else 2


@dataclass
class _Alone:
    """The job that a device belongs to while it is measured."""

    job: str
    kind: str
    since_s: float
    num_steps: int
    moved_s: float  # moment of its last step


@dataclass
class _Chosen:
    """The jobs chosen to run on all devices, and the candidates."""

    jobs: Allocation
    among: tuple[object, ...]
    since_s: float


# Asks a policy (`policies.py`), and turns its answer into starts, pauses and resumptions.
#
# A policy that may pause jobs (`complementary`) has more of them to choose from: a few beyond those that run are started
# ahead, and then wait with their processes stopped. Each kind of job runs alone for a few steps, once. Jobs that would
# leave most of the machine idle at the end of the queue start first.
class Scheduler:
    """Choose the jobs that run now, by a policy.

    Args:
        policy: name of the policy.
        knowledge: measurements of earlier jobs.
        seed: seed of a policy that chooses at random.
        wait_s: seconds of waiting after which a job goes before all others.
        most_together: maximum number of concurrent jobs per device.

    Raises:
        ValueError: the policy is unknown.
    """

    def __init__(
        self, policy: str, knowledge: Knowledge, seed: int = 0, wait_s: float = 3600.0, most_together: int = MOST_TOGETHER
    ) -> None:
        self.policy_name = policy
        self._knowledge = knowledge
        self._may_pause = policy in PAUSING
        self._shares = thread_shares if self._may_pause else equal_shares
        settings = PolicySettings(knowledge, wait_s, seed, most_together)
        if self._may_pause:
            self._policy, self._policy_at_end = (with_bounded_wait(turns(settings, last), wait_s) for last in (False, True))
        else:
            self._policy = self._policy_at_end = make_policy(policy, settings)
        self._wait_s = wait_s
        self._chosen: _Chosen | None = None
        self._side_by_side = 1.0  # maximum cores of a job next to others
        self._alone: dict[str, _Alone] = {}
        self._given_up: set[str] = set()  # kinds that could not be measured alone

    def threads(self, device: LocalDevice) -> int:
        """Return the threads of each process of a job before its first step: half of the cores, or all if it runs alone."""
        return max(1, round(device.num_cores / (1 if self.policy_name == "sequential" else 2)))

    def thread_shares(self, device: LocalDevice, kinds: Sequence[str]) -> list[int]:
        """Return the threads of each process of jobs that run side by side, by their measured use or in equal parts.

        Args:
            kinds: kinds of the jobs; "" for a job that is still starting.
        """
        cores = [self._use(kind, device)["cores"] if kind else START["cores"] for kind in kinds]
        return self._shares(cores, device.num_cores)

    def _use(self, kind: str, device: LocalDevice) -> Mapping[str, float]:
        """Return the use of a device by a kind of job alone: measured, else that of its kin or of a usual job."""
        if known := self._knowledge.use(kind, device.kind):
            return {"cores": 1.0, **known}
        return {"cores": max(1.0, UNKNOWN_PART * device.num_cores), **({} if device.gpu is None else {"gpu": 1.0})}

    def actions(
        self, now: float, devices: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant]
    ) -> list[Action]:
        """Return the starts, pauses and resumptions that are due."""
        self._side_by_side = float(max((self.threads(device) for device in devices), default=1))
        able = [job for job in waiting if job.not_before_s <= now]
        wanted = self._wanted(now, devices, able, tenants, are_last=not waiting)
        suitable = {job.name: _suitable(job, devices) for job in able}
        actions: list[Action] = []
        for device in sorted(devices, key=lambda device: device.gpu is None):  # the GPUs have the first choice
            here = [tenant for tenant in tenants if tenant.device == device.name]
            changes = self._of_tenants(now, device, here, {name for name, where in wanted.items() if device.name in where})
            actions += changes
            if device.name not in self._alone:
                started = {action.job for action in actions if isinstance(action, Start)}
                for_here = [job for job in able if device in suitable[job.name] and job.name not in started]
                if self._may_pause:
                    chosen = self._ahead(now, device, devices, for_here, tenants)
                else:
                    wanted_here = [job for job in for_here if device.name in wanted.get(job.name, ())]
                    chosen = sorted(wanted_here, key=turn_of)
                # Jobs that start count, because a command without the callback trains before the dispatcher can tell.
                num_active = sum(tenant.phase in ("starting", "asks", "running") for tenant in here)
                num_active += sum(isinstance(change, Resume) for change in changes)
                actions += _starts(device, here, chosen[: max(0, device.most_jobs - num_active)])
        first: dict[str, Action] = {}
        for action in actions:
            first.setdefault(action.job, action)
        return [*first.values()]

    def _wanted(
        self, now: float, devices: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant], are_last: bool
    ) -> Allocation:
        """Return the policy's answer. One that may pause jobs is asked only when its choice has changed, or is old."""
        if not self._may_pause:
            return self._policy(self._state(now, devices, waiting, tenants))
        able = [tenant for tenant in tenants if tenant.is_admitted and not tenant.paused_for_memory]
        starting = [tenant for tenant in tenants if tenant.phase == "starting"]
        names = (tuple(sorted(tenant.name for tenant in each)) for each in (able, starting))
        among = (*names, self._knowledge.num_profiles, are_last)
        # A low-priority job that has waited too long keeps its turn for longer, because it has few turns.
        are_equal = len({tenant.priority for tenant in able}) <= 1
        quantum_s = LAST_QUANTUM_S if are_last and are_equal else QUANTUM_S
        is_old = self._chosen is None or self._chosen.among != among or now - self._chosen.since_s > quantum_s
        # A job that has waited too long and now runs is not overdue any more. It keeps its turn for the quantum.
        overdue = {t.name for t in able if t.phase == "paused" and is_overdue(t.since_s, now, self._wait_s)}
        if self._chosen is None or is_old or not overdue <= self._chosen.jobs.keys():
            policy = self._policy_at_end if are_last else self._policy
            self._chosen = _Chosen(policy(self._state_of_able(now, devices, able, starting)), among, now)
        return self._chosen.jobs

    def _of_tenants(self, now: float, device: LocalDevice, tenants: Sequence[Tenant], wanted: set[str]) -> list[Action]:
        """Return the pauses and resumptions of a device's jobs."""
        if not self._may_pause:
            return []
        alone = self._measured_alone(now, device, tenants)
        actions: list[Action] = []
        for tenant in tenants:
            is_chosen = tenant.name in wanted or not tenant.is_admitted
            # A job that shows its peak holds all memory that is free. The sooner it has made its first steps, the better.
            shows_peak = any(holding.is_guess for holding in tenant.holdings.values())
            runs = shows_peak or (is_chosen if alone is None else tenant.name == alone)
            if tenant.phase in ("running", "starting") and not runs:
                actions.append(Pause(tenant.name, "others run" if alone is None else f"{alone} is measured alone"))
            elif tenant.phase == "paused" and not tenant.paused_for_memory and runs:
                actions.append(Resume(tenant.name))
        return actions

    def _measured_alone(self, now: float, device: LocalDevice, tenants: Sequence[Tenant]) -> str | None:
        """Return the job that has the device to itself at the moment, to be measured; None if none has."""
        if (current := self._alone.get(device.name)) is not None:
            job = next((tenant for tenant in tenants if tenant.name == current.job and tenant.phase != "ending"), None)
            is_measured = self._knowledge.is_profiled(current.kind, device.kind)
            if job is not None and job.num_steps > current.num_steps:
                current.num_steps, current.moved_s = job.num_steps, now
            is_late = now - current.since_s > ALONE_LIMIT_S or now - current.moved_s > STEP_LIMIT_S
            if job is not None and not is_measured and not is_late:
                return current.job
            if not is_measured:
                self._given_up.add(current.kind)  # too short to be measured, or without steps
            del self._alone[device.name]
        for tenant in tenants if len(tenants) > 1 else ():
            is_able = tenant.is_admitted and not tenant.paused_for_memory
            is_known = tenant.kind in self._given_up or self._knows(tenant.kind, device)
            if is_able and not is_known:
                self._alone[device.name] = _Alone(tenant.name, tenant.kind, now, tenant.num_steps, now)
                return tenant.name
        return None

    def _knows(self, kind: str, device: LocalDevice) -> bool:
        """Whether a kind need not be measured alone on a device."""
        return self._knowledge.is_profiled(kind, device.kind) or self._knowledge.is_as_its_kin(kind, device.kind)

    def _ahead(
        self,
        now: float,
        device: LocalDevice,
        devices: Sequence[LocalDevice],
        waiting: Sequence[Waiting],
        tenants: Sequence[Tenant],
    ) -> list[Waiting]:
        """Return the job that starts next, so that a policy has a choice; none with enough of them, or without a free core."""
        here = [tenant for tenant in tenants if tenant.device == device.name]
        num_paused = sum(tenant.phase == "paused" and not tenant.paused_for_memory for tenant in here)
        num_starting = sum(tenant.phase in ("starting", "asks") for tenant in here)
        # A start keeps one core busy. One is always under way.
        busy = num_starting + sum(self._cores_among_others(self._use(t.kind, device)) for t in here if t.phase == "running")
        overdue = [job for job in waiting if is_overdue(job.submitted_s, now, self._wait_s)]
        if num_starting and busy + LEAST_IDLE > device.num_cores:
            return []
        if len(here) >= device.most_jobs + AHEAD or (num_paused >= AHEAD and not overdue):
            return []
        if overdue:
            return sorted(overdue, key=turn_of)[:1]
        ranks = self._ranks(device, devices, waiting, tenants)
        able = [job for job in waiting if job.name in ranks]
        return sorted(able, key=lambda job: (-job.priority, ranks[job.name], job.submitted_s, job.name))[:1]

    def _ranks(
        self, device: LocalDevice, devices: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant]
    ) -> dict[str, float]:
        """Return the order in which jobs start on a device, lowest rank first. Jobs that should not start are absent.

        Where jobs have a choice, cores take those that they are good at, and only while these end before the GPUs are idle.
        Elsewhere, those start first that would leave most of the device idle at the end.
        """
        gpus, cores = [each for each in devices if each.gpu is not None], [each for each in devices if each.gpu is None]
        free = [job for job in waiting if len(job.expected) > 1]
        if not (gpus and cores and free):
            idle_s = {job.kind: self._knowledge.idle_s(job.kind, device.kind, device.limits) for job in waiting}
            return {job.name: -idle_s[job.kind] for job in waiting}
        pair = gpus[0], device if device.gpu is None else cores[0]
        kinds = {*(job.kind for job in waiting), *(each.kind for each in tenants)}
        steps = {kind: self._knowledge.num_steps(kind) for kind in kinds}
        steps |= {each.kind: each.num_steps + each.steps_left for each in tenants if each.steps_left is not None}
        known_s = [found for kind, number in steps.items() if (found := self._seconds(kind, number, pair[0])) is not None]
        usual_s = fmean(known_s) if known_s else USUAL_S
        left = {job.name: self._left(job.kind, steps[job.kind], *pair, usual_s) for job in waiting}
        if device.gpu is not None:
            return {name: -each.price for name, each in left.items()}
        there = {
            each.name: self._left(each.kind, steps[each.kind] if each.steps_left is None else each.steps_left, *pair, usual_s)
            for each in tenants
        }
        on_gpus = [there[each.name] for each in tenants if each.device in {gpu.name for gpu in gpus}]
        on_cores = [there[each.name] for each in tenants if each.device == device.name]
        at_once = sum(gpu.most_jobs for gpu in gpus)
        chosen = for_cores([left[job.name] for job in free], on_gpus, on_cores, at_once, len(gpus), device.num_cores)
        only = {job.name: left[job.name].price for job in waiting if len(job.expected) == 1}
        return only | {free[index].name: left[free[index].name].price for index in chosen}

    def _left(self, kind: str, steps: int, gpu: LocalDevice, cores: LocalDevice, usual_s: float) -> Left:
        """Return the remaining work of a job, on a GPU and on cores.

        Args:
            steps: 0: unknown.
            usual_s: time of a job on a GPU where its own is unknown.
        """
        speed = self._knowledge.speed(kind, gpu.kind)
        gpu_s = usual_s if (found := self._seconds(kind, steps, gpu)) is None else found
        busy = min(1.0, self._use(kind, gpu).get("gpu", 1.0))
        among_others = self._among_others(self._use(kind, cores))
        cores_s = gpu_s * speed / self._knowledge.speed(kind, cores.kind) / float(among_others.speeds[0])
        return Left(gpu_s, busy, cores_s, float(among_others.use[0]))

    def _seconds(self, kind: str, steps: int, gpu: LocalDevice) -> float | None:
        """Return the time of steps alone on a GPU; None where their number or speed is unknown."""
        return steps / self._knowledge.speed(kind, gpu.kind) if steps and self._knowledge.has_speed(kind) else None

    def _cores_among_others(self, use: Mapping[str, float]) -> float:
        """Return the cores that a job keeps busy if no other takes them. Alone it may have had more threads."""
        return float(self._among_others(use).use[0])

    def _among_others(self, use: Mapping[str, float]) -> Expected:
        """Return the use and speed of a job with as many threads as each of two has."""
        alone = CoreUse("", use["cores"], use.get("input", 0.0))
        return expected([alone], [max(1, round(self._side_by_side))], alone.cores)

    # --- as policies see it --------------------------------------------------------------------------------------------------

    def _state(
        self, now: float, devices: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant]
    ) -> State:
        """Return the state for a policy that starts jobs and lets them run to their ends."""
        by_name = {device.name: device for device in devices}
        jobs = tuple(
            self._job(job, {device.kind: (device, _charges(job, device)) for device in _suitable(job, devices)})
            for job in waiting
        )
        running = []
        for tenant in tenants:
            device = by_name[tenant.device]
            held = {memory: holding.held_bytes for memory, holding in tenant.holdings.items()}
            running.append(Running(self._job(tenant, {device.kind: (device, held)}), (tenant.device,), tenant.started_s))
        return State(now, tuple(map(_device, devices)), jobs, tuple(running))

    def _state_of_able(
        self, now: float, devices: Sequence[LocalDevice], able: Sequence[Tenant], starting: Sequence[Tenant]
    ) -> State:
        """Return the state for a policy that chooses among jobs that could all run at once: each has its memory.

        Those that start run in any case. Each keeps one core busy.
        """
        # Jobs that run do not wait. The longer one has run, the later is its turn.
        by_name = {device.name: device for device in devices}
        jobs = tuple(
            self._job(
                tenant,
                {tenant.device: (by_name[tenant.device], {})},
                tenant.since_s if tenant.phase == "paused" else 2 * now - tenant.since_s,
            )
            for tenant in able
        )
        running = tuple(
            Running(Job(tenant.name, {tenant.device: Profile(0, 1.0, START)}), (tenant.device,), tenant.started_s)
            for tenant in starting
        )
        return State(now, tuple(replace(_device(device), kind=device.name) for device in devices), jobs, running)

    def _job(
        self, of: Waiting | Tenant, needs: Mapping[str, tuple[LocalDevice, Sizes]], waiting_since_s: float | None = None
    ) -> Job:
        """Return a job as policies see it.

        Args:
            needs: for each kind of device that the policy sees, a device, and the memory that the job takes there; empty: it
                has it already.
        """
        profiles = {}
        for kind, (device, charge) in needs.items():
            use = self._use(of.kind, device)
            use = {**use, "cores": self._cores_among_others(use)}
            host_bytes = charge.get("host", 0)
            own_bytes, on_host_bytes = (host_bytes, 0) if device.gpu is None else (charge.get("gpu", 0), host_bytes)
            profiles[kind] = Profile(own_bytes, self._knowledge.speed(of.kind, device.kind), use, on_host_bytes)
        are_known = all(self._knows(of.kind, device) for device, _ in needs.values())
        return Job(
            of.name,
            profiles,
            steps_left=of.steps_left if isinstance(of, Tenant) and are_known else None,
            submitted_s=of.submitted_s,
            waiting_since_s=waiting_since_s,
            priority=of.priority,
            owner=of.owner,
            family=of.kind,
        )


def _device(device: LocalDevice) -> Device:
    memory_bytes = device.memory_bytes if device.gpu is None else device.gpu_bytes
    return Device(device.name, device.kind, device.name, memory_bytes, device.limits, device.most_jobs)


def _suitable(job: Waiting, devices: Sequence[LocalDevice]) -> list[LocalDevice]:
    """Return the devices that a job may start on: those large enough, or all if none is. It then fails with the reason."""
    able = [device for device in devices if device.where in job.expected]
    large = [
        device
        for device in able
        if all(job.expected[device.where].get(memory, 0) <= size for memory, size in device.sizes.items())
    ]
    return large or able


def _charges(job: Waiting, device: LocalDevice) -> dict[Memory, int]:
    """Return the memory reserved for a starting job."""
    expected = job.expected[device.where]
    return {memory: min(expected.get(memory, 0) or START_BYTES[memory], size) for memory, size in device.sizes.items()}


def _starts(device: LocalDevice, tenants: Sequence[Tenant], chosen: Sequence[Waiting]) -> list[Action]:
    """Return the starts of jobs that a device has memory for, in their order."""
    free = {memory: free_bytes(memory, size, tenants) for memory, size in device.sizes.items()}
    actions: list[Action] = []
    for job in chosen:
        charges = _charges(job, device)
        if any(charge > free[memory] for memory, charge in charges.items()):
            # Nothing overtakes a job that waits for memory, else it might wait forever.
            break
        free = {memory: free[memory] - charge for memory, charge in charges.items()}
        actions.append(Start(job.name, device.name, charges))
    return actions
