"""Predict how jobs on one device slow each other down, on shared and on own cores. Pure.

`SlowdownModel` predicts jobs on one device, `CoreSpeeds` jobs on the cores of one machine, and `for_cores` chooses jobs that
leave the GPUs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightning_dlrover.tuning.cluster import RESOURCES, Device, Floats, Job, Profile

# A GPU runs a part of a step, its kernels, many times as fast as cores do, and leaves the rest as it is: waits for input,
# and the job's own code. So a job that keeps a GPU busy for a fraction `busy` of its step takes `1 + busy (factor - 1)`
# times as long on cores. The factor is learned from kinds that were measured on both.

FACTOR = 16.0
"""Times that a GPU runs kernels as fast as cores, where no job was measured on both."""

SLACK = 1.2
"""Safety factor on the time of jobs on cores: they take up to this times as long as alone, due to shared caches."""


def factor_of(measured: Sequence[tuple[Profile, Profile]]) -> float:
    """Return how many times as fast as cores a GPU runs kernels; `FACTOR` counts as much as a kind that is all kernels.

    Args:
        measured: profiles of kinds of jobs on a GPU and on cores.
    """
    longer = sum(on_gpu.steps_per_s / on_cores.steps_per_s - 1 for on_gpu, on_cores in measured)
    return max(1.0, 1 + (longer + FACTOR - 1) / (sum(_busy(on_gpu) for on_gpu, _ in measured) + 1))


def speed_on_cores(on_gpu: Profile, factor: float) -> float:
    """Return the steps/s to expect on cores of a job that was measured on a GPU."""
    return on_gpu.steps_per_s / (1 + _busy(on_gpu) * (factor - 1))


def speed_on_gpu(on_cores: Profile, factor: float) -> float:
    """Return the steps/s to expect on a GPU of a job that was measured on cores; all but its wait for input becomes faster."""
    wait = min(on_cores.use.get("input", 0.0), 1.0)
    return on_cores.steps_per_s / (wait + (1 - wait) / factor)


def _busy(on_gpu: Profile) -> float:
    return min(on_gpu.use.get("gpu", 1.0), 1.0)


@dataclass(frozen=True)
class Left:
    """The remaining work of a job.

    Args:
        gpu_s: time alone on a GPU.
        busy: fraction of that time that its kernels run.
        cores_s: time alone on cores.
        cores: cores that it then keeps busy.
    """

    gpu_s: float
    busy: float
    cores_s: float
    cores: float

    @property
    def price(self) -> float:
        """Seconds of cores for each second that the GPU is relieved of."""
        return self.cores_s * self.cores / max(self.gpu_s * self.busy, 1e-9)


def for_cores(
    jobs: Sequence[Left], on_gpus: Sequence[Left], on_cores: Sequence[Left], at_once: int, num_gpus: int, num_cores: float
) -> list[int]:
    """Return which of the jobs that wait should start on cores, the one of the lowest price first.

    A job stays on the GPUs if these would finish all remaining work before the cores could finish this job. So no job runs on
    cores alone in the end.

    Args:
        jobs: those that wait, and could run on either.
        on_gpus: those that the GPUs have.
        on_cores: those that the cores have.
        at_once: most jobs of all GPUs that run at once.
    """
    gpu_jobs = [*jobs, *on_gpus]
    # The GPUs end no sooner, however well their jobs share them.
    gpus_end_s = max(sum(job.gpu_s * job.busy for job in gpu_jobs) / num_gpus, sum(job.gpu_s for job in gpu_jobs) / at_once)
    before_s = sum(job.cores_s * job.cores for job in on_cores)
    ends_s = [max(job.cores_s, (before_s + job.cores_s * job.cores) / num_cores) for job in jobs]
    able = [index for index, end_s in enumerate(ends_s) if SLACK * end_s < gpus_end_s or math.isinf(jobs[index].gpu_s)]
    return sorted(able, key=lambda index: jobs[index].price)


UNKNOWN_TOTAL = 1.1
"""Expected sum of the relative speeds of two jobs with an unknown use of resources."""
LEAST_SPEED, MOST_SPEED = 0.01, 1.5
"""Lowest and highest relative speed that is predicted."""
PRIOR = 1.0
"""Observations that an expectation counts for."""
MOST_KEPT = 10_000
"""Number of jobs with a use that is kept from one decision to the next."""


@dataclass(frozen=True)
class Observation:
    """Speeds measured while a group of jobs shared a device.

    Args:
        group: the jobs, each with a profile for the device's kind.
        relative_speeds: speed of each over its speed alone, in the order of `group`.
    """

    device: Device
    group: tuple[Job, ...]
    relative_speeds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.group) != len(self.relative_speeds):
            raise ValueError(f"{len(self.group)} jobs on {self.device.name!r} have {len(self.relative_speeds)} speeds")
        if any(not speed > 0 for speed in self.relative_speeds):
            raise ValueError(
                f"the speeds {self.relative_speeds} on {self.device.name!r} are not all above 0; "
                "leave out groups with a job that made no step"
            )


@dataclass(frozen=True)
class _Use:
    """Inputs of a prediction; jobs with equal ones are taken for equal.

    Args:
        shares: used fraction of each limit, in the order of `RESOURCES`; 0 where either is unknown.
    """

    device_kind: str
    family: str
    batch_size: float
    shares: tuple[float, ...]


@dataclass
class _Seen:
    """Sum of the logs of observed speeds over expected ones, and their number."""

    total: float = 0.0
    number: int = 0

    def mean(self, prior: float) -> float:
        return (self.total + PRIOR * prior) / (self.number + PRIOR)


# Everything is reduced to pairs. A resource that two jobs want beyond its limit stretches the part of a step that uses it
# by the excess. That expectation is corrected by the mean of the observations of the pair, and of pairs of the same
# families. A job's excess in a group, its slowdown less 1, is the sum of its excesses with each member.
#
# A Gaussian process and trees over pairs predict single pairs better, but jobs in a simulated cluster ended no sooner with
# them (docs/colocate/policies.md).
class SlowdownModel:
    """Predicts the speeds of jobs that share one device, relative to their speeds alone. A `SpeedPredictor`.

    It learns from observed groups. Without observations it predicts from uses and limits alone.

        model = SlowdownModel.fit([Observation(gpu, (dlrm, bert), (0.71, 0.62))])
        model.relative_speeds([(dlrm, resnet)], gpu)

    Args:
        seen: by the two jobs' kind of device, families and batch sizes, and by their kind of device and families.
    """

    def __init__(self, seen: Mapping[tuple[object, ...], _Seen] | None = None) -> None:
        self._seen = dict(seen or {})
        # Uses by their sources. The objects are kept, so that their ids are not used again.
        self._uses: dict[tuple[str, str, float, int, int], tuple[_Use, object, object]] = {}
        self._excess: dict[tuple[_Use, _Use], float] = {}

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> SlowdownModel:
        """Fit to everything observed so far."""
        seen: defaultdict[tuple[object, ...], _Seen] = defaultdict(_Seen)
        for observation in observations:
            uses = [_use_of(job, observation.device) for job in observation.group]
            for i, (use, speed) in enumerate(zip(uses, observation.relative_speeds, strict=True)):
                others = [other for j, other in enumerate(uses) if j != i]
                expected = [1 / _expected_speed(use, other) - 1 for other in others]
                # Each neighbour has a part of the excess, in proportion to the expectations.
                weights = np.array(expected) + 0.05
                for other, before, part in zip(others, expected, (weights / weights.sum()).tolist(), strict=True):
                    change = float(np.log((1 + before) / max(1 + (1 / speed - 1) * part, 1 / MOST_SPEED)))
                    for key in _keys(use, other):
                        seen[key].total += change
                        seen[key].number += 1
        return cls(seen)

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the predictions; see `SpeedPredictor`."""
        found = []
        for group in groups:
            uses = [self._use(job, device) for job in group]
            excess = [sum(self._beside(use, other) for j, other in enumerate(uses) if j != i) for i, use in enumerate(uses)]
            found.append(1 / (1 + np.maximum(np.array(excess, dtype=np.float64), -0.5)))
        return found

    def _use(self, job: Job, device: Device) -> _Use:
        key = (job.name, job.family, job.batch_size, id(job.profiles), id(device.limits))
        known = self._uses.get(key)
        if known is None:
            if len(self._uses) >= MOST_KEPT:
                self._uses.clear()
                self._excess.clear()
            known = self._uses[key] = _use_of(job, device), job.profiles, device.limits
        return known[0]

    def _beside(self, one: _Use, other: _Use) -> float:
        """Return the excess of a job that shares the device with another."""
        excess = self._excess.get((one, other))
        if excess is None:
            pair, families = (self._seen.get(key, _Seen()) for key in _keys(one, other))
            speed = _expected_speed(one, other) * float(np.exp(pair.mean(families.mean(0.0))))
            excess = self._excess[one, other] = 1 / min(max(speed, LEAST_SPEED), MOST_SPEED) - 1
        return excess


def _keys(one: _Use, other: _Use) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return the keys of a pair of jobs, and of their families."""
    families = (one.device_kind, one.family, other.family)
    return (*families, one.batch_size, other.batch_size), families


def _use_of(job: Job, device: Device) -> _Use:
    """Return the use of a job on a kind of device; a job without a family is one of its own."""
    use, limits = job.profiles[device.kind].use, device.limits
    shares = tuple(use.get(r, 0.0) / limits[r] if limits.get(r) else 0.0 for r in RESOURCES)
    return _Use(device.kind, job.family or job.name, job.batch_size, shares)


def _expected_speed(one: _Use, other: _Use) -> float:
    """Return the relative speed to expect of the first job before the pair was observed."""
    if not any(one.shares) or not any(other.shares):
        return UNKNOWN_TOTAL / 2
    excess = [max(a + b - 1.0, 0.0) for a, b in zip(one.shares, other.shares, strict=True)]
    return 1 / (1 + sum(min(share, 1.0) * e for share, e in zip(one.shares, excess, strict=True)))


Shares: TypeAlias = Callable[[Sequence[float], float], list[int]]
"""Returns the threads of each job's processes, given the busy cores of each alone and the number of cores."""

LEAST_USED = 0.1
"""Cores that a job must be able to use more for another thread."""
LEAST_IDLE = 0.5
"""Cores that must be idle for another thread."""
LEAST_CORES = 1e-3
SYNC = 0.06
"""Part of a job's work with several threads that only keeps them in step: 5 to 7 % of the CPU time of small MLPs and tables."""


# A job's step alone is a wait for input, a fraction `wait` of it, and work of `cores` core-seconds for each second of the
# step. With fewer threads than that work could use, the working part takes longer. Where all jobs together want more cores
# than exist, each receives what it wants or an equal share, whichever is less (max-min fairness), as the kernel divides
# them.
@dataclass(frozen=True, order=True)
class CoreUse:
    """Needs of a job alone, when it may use all cores.

    Args:
        family: name shared by similar jobs.
        cores: busy cores, mean over a step.
        wait: fraction of a step spent waiting for input.
    """

    family: str
    cores: float
    wait: float = 0.0


def thread_shares(cores: Sequence[float], num_cores: float) -> list[int]:
    """Return the threads of each job's processes: one, and more for jobs that can use them while cores are idle.

    Args:
        cores: busy cores of each job alone. A job alone on the machine uses all.
    """
    if len(cores) == 1:
        return [max(1, round(num_cores))]
    threads = [1] * len(cores)
    idle = num_cores - sum(min(each, 1.0) for each in cores)
    while idle >= LEAST_IDLE:
        wants = [each - number for each, number in zip(cores, threads, strict=True)]
        most = max(range(len(wants)), key=lambda index: wants[index], default=None)
        if most is None or wants[most] < LEAST_USED:
            break
        threads[most] += 1
        idle -= min(1.0, wants[most])
    return threads


def equal_shares(cores: Sequence[float], num_cores: float) -> list[int]:
    """Return the threads of each job's processes: equal shares, and at least one."""
    return [max(1, round(num_cores / max(1, len(cores))))] * len(cores)


@dataclass(frozen=True)
class Expected:
    """Expected figures of jobs that run together, each of shape ``(num_jobs,)``."""

    use: Floats  # busy cores
    speeds: Floats  # over those alone
    threaded: Floats  # speeds if the cores were enough, with the jobs' threads


def expected(jobs: Sequence[CoreUse], threads: Sequence[int], num_cores: float) -> Expected:
    """Return the use and speeds of jobs side by side."""
    cores = np.maximum(np.array([job.cores for job in jobs]), LEAST_CORES)
    work = np.where(cores > np.asarray(threads), (1 - SYNC) * cores, cores)
    wait = np.clip([job.wait for job in jobs], 0.0, 1.0)
    step = wait + np.maximum(1.0 - wait, work / np.asarray(threads))
    use = np.minimum(work / step, _level(work / step, num_cores))
    return Expected(use, use / work, 1 / step)


def _level(wanted: Floats, num_cores: float) -> float:
    """Return the share that no job exceeds, so that all together have the cores; infinity if the cores suffice."""
    rest = num_cores
    for position, amount in enumerate(sorted(wanted.tolist())):
        share = rest / (len(wanted) - position)
        if share <= amount:
            return share
        rest -= amount
    return float("inf")


Group = tuple[CoreUse, ...]

DEVIATIONS = {"threads": 0.3, "wake": 0.1, "pressure": 0.2, "pair": 0.1}
"""Standard deviations of the corrections before anything was observed: a, c, d, h."""
LEAST_REST = 0.5
"""Cores of other jobs that count for a job on a single core: they leave their data in its cache."""
NOISE = 0.08
"""Standard deviation of the log of an observed speed."""


@dataclass(frozen=True)
class _Corrections:
    """Corrections of all families that were observed, one number for each column."""

    columns: Mapping[tuple[str, ...], int]
    values: Floats


# Most of a slowdown follows from the division of cores (above). The rest is learned from observed groups, as
# corrections of the log of the expected speed e of a job i of family f next to jobs j of families g. Each of those keeps
# a fraction b of the machine's cores busy while the job has one:
#
# log speed = log e + a_f log t + c_f + sum over j of b_j (d_g + h_fg)
#
# t is the speed with the job's threads if the cores were enough. a is the gain of a job from fewer threads, c the cost of
# waking up late, d a job's pressure on caches and memory, h the interference of this pair alone. All are small before
# anything is observed (a Bayesian linear regression).
class CoreSpeeds:
    """Predicts the speeds of jobs that share the cores of one machine, relative to their speeds alone. A `SpeedPredictor`.

    It learns from observed groups. The limit "cores" of a device is its number of cores. Equal observations give equal
    predictions. Jobs of unknown use are taken to keep one core busy.

    Args:
        shares: threads of jobs side by side.
    """

    def __init__(self, corrections: _Corrections | None = None, shares: Shares = thread_shares) -> None:
        self._corrections, self._shares = corrections, shares
        self._known: dict[tuple[Group, float], Floats] = {}

    @classmethod
    def fit(cls, observations: Sequence[Observation], shares: Shares = thread_shares) -> CoreSpeeds:
        """Fit to everything observed so far."""
        rows: list[dict[tuple[str, ...], float]] = []
        targets: list[float] = []
        for observation in observations:
            group = tuple(_core_use_of(job, observation.device) for job in observation.group)
            speeds, of_group = _terms(group, _num_cores(observation.device), shares)
            rows += of_group
            targets += [float(np.log(speed / e)) for speed, e in zip(observation.relative_speeds, speeds, strict=True)]
        columns = {name: index for index, name in enumerate(sorted({name for row in rows for name in row}))}
        if not columns:
            return cls(None, shares)
        table = np.array([_row(row, columns) for row in rows])
        precision = np.diag([DEVIATIONS[name[0]] ** -2 for name in columns]) + table.T @ table / NOISE**2
        values = np.linalg.solve(precision, table.T @ np.array(targets) / NOISE**2)
        return cls(_Corrections(columns, values), shares)

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the mean predictions; see `SpeedPredictor`."""
        found = []
        for group in groups:
            uses = [_core_use_of(job, device) for job in group]
            order = sorted(range(len(uses)), key=lambda index: uses[index])
            speeds = np.empty(len(uses))
            speeds[order] = self._speeds(tuple(uses[index] for index in order), _num_cores(device))
            found.append(speeds)
        return found

    def _speeds(self, group: Group, num_cores: float) -> Floats:
        known = self._known.get((group, num_cores))
        if known is None:
            known, rows = _terms(group, num_cores, self._shares)
            if self._corrections is not None and len(group) > 1:
                columns, values = self._corrections.columns, self._corrections.values
                known = known * np.exp(np.array([_row(row, columns) for row in rows]) @ values)
            known = self._known[group, num_cores] = np.maximum(known, LEAST_SPEED)
        return known


def _terms(group: Group, num_cores: float, shares: Shares) -> tuple[Floats, list[dict[tuple[str, ...], float]]]:
    """Return expected speeds, and for each job the weights of the corrections that concern it."""
    if len(group) == 1:
        return np.ones(1), [{}]
    found = expected(group, shares([job.cores for job in group], num_cores), num_cores)
    rows = []
    for i, job in enumerate(group):
        # While a job has a core, the others have the rest.
        others = float(found.use.sum() - found.use[i])
        at_once = min(1.0, max(num_cores - 1.0, LEAST_REST) / others) if others else 0.0
        row: dict[tuple[str, ...], float] = {
            ("threads", job.family): float(np.log(found.threaded[i])),
            ("wake", job.family): 1.0,
        }
        for j, other in enumerate(group):
            if j != i:
                for name in (("pressure", other.family), ("pair", job.family, other.family)):
                    row[name] = row.get(name, 0.0) + at_once * float(found.use[j]) / num_cores
        rows.append(row)
    return found.speeds, rows


def _row(row: Mapping[tuple[str, ...], float], columns: Mapping[tuple[str, ...], int]) -> Floats:
    values = np.zeros(len(columns))
    for name, amount in row.items():
        if name in columns:
            values[columns[name]] = amount
    return values


def _num_cores(device: Device) -> float:
    return device.limits.get("cores", 1.0)


def _core_use_of(job: Job, device: Device) -> CoreUse:
    use = job.profiles[device.kind].use
    return CoreUse(job.family or job.name, use.get("cores", 1.0), use.get("input", 0.0))
