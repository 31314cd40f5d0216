"""The request for a plan, the suggestion of earlier jobs, and the predicted candidates. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.tuning.memory import MemoryModel, node_memory_bytes
from lightning_dlrover.tuning.plan import (
    Candidate,
    Decision,
    Limits,
    Objective,
    Settings,
    all_settings,
    configuration,
    pareto_front,
    resources_of,
    settings_of,
    why_not,
)
from lightning_dlrover.tuning.samples import (
    AGENT_BYTES,
    NORMAL_WIDTH,
    Configuration,
    Floats,
    StepProfile,
    configuration_of,
    noise_of,
)
from lightning_dlrover.tuning.step_time import Prediction

# Initial settings for a job, from the final settings of similar jobs.
#
# DLRover-RM's warm start (Wang et al., PVLDB 17(12), 2024) takes the k most similar jobs and smooths their final settings
# exponentially, the newest last. Pure: the jobs come from `tuning/history.py`.

NUM_NEIGHBOURS = 5
MAX_DISTANCE = 1.0  # mean of log factors: a job of nearly three times the size gives no evidence
SMOOTHING = 0.5  # weight of the newest of the nearest jobs; the older ones share the rest
FASTEST = Objective()
HALF_LIFE_S = 30 * 86400.0  # decay of a job's weight, which halves with each month: code and machines change


@dataclass(frozen=True)
class Descriptor:
    """A job's properties, independent of the machines it runs on; unknown figures are 0."""

    dense_flops: float  # per sample
    dense_bytes: float
    embedding_bytes: float
    lookups_per_sample: float
    global_batch: float
    device: str
    node_cores: float


@dataclass(frozen=True)
class PastJob:
    """A job of the history, with its windows; those of the best settings are among them."""

    job: str
    at: float  # seconds since the epoch at its end
    descriptor: Descriptor
    windows: tuple[StepProfile, ...]

    def best_within(self, limits: Limits, objective: Objective = FASTEST) -> Settings | None:
        """Return the settings that `objective` would have chosen among those measured with the job's last global batch.

        The job's first settings stay the best unless others were better than in each of their windows. Later jobs copy the
        result and then count as evidence for it, so one noisy trial would be confirmed for ever.
        """
        losses = {settings: loss for settings, loss in self.losses(objective).items() if limits.allows(settings)}
        best = min(losses, key=lambda settings: (losses[settings], settings), default=None)
        first = next(w for w in self.windows if w.global_batch == self.windows[-1].global_batch)
        if best is None or (began := settings_of(first)) not in losses:
            return best
        times_s = [w.step_time_s for w in self.windows if settings_of(w) == began and w.global_batch == first.global_batch]
        least = losses[began] * min(times_s) / self.step_times_s()[began]
        return best if losses[best] < least else began

    def losses(self, objective: Objective) -> dict[Settings, float]:
        """Return the loss that `objective` minimises, in its own unit: median step times, scaled up for dearer settings."""
        rates = {settings_of(window): self._rate(window, objective) for window in self.windows}
        return {s: time_s * rates[s] ** objective.elasticity for s, time_s in self.step_times_s().items()}

    def _rate(self, window: StepProfile, objective: Objective) -> float:
        used = resources_of(configuration_of(window, self.descriptor.node_cores), window.peak_memory_bytes)
        price = objective.prices.per_hour(used)
        return max(1e-9, used.scalar if price is None else price)

    def step_times_s(self) -> dict[Settings, float]:
        """Return the median step time of each settings."""
        batch = self.windows[-1].global_batch
        found: dict[Settings, list[float]] = {}
        for window in self.windows:
            if window.global_batch == batch:
                found.setdefault(settings_of(window), []).append(window.step_time_s)
        return {settings: sorted(times)[len(times) // 2] for settings, times in found.items()}


@dataclass(frozen=True)
class Suggestion:
    """Initial settings for a job."""

    settings: Settings
    speedup: float  # speed relative to the present settings in those jobs; 1 where they give no comparison
    gain: float  # the same ratio of the objective's loss
    jobs: tuple[str, ...]
    reason: str


def descriptor_of(profile: StepProfile, node_cores: float) -> Descriptor:
    figures = {f.name: float(getattr(profile, f.name)) for f in fields(Descriptor) if f.name not in ("device", "node_cores")}
    return Descriptor(**figures, device=profile.device, node_cores=node_cores)


def distance(one: Descriptor, other: Descriptor) -> float:
    """Return the mean of the absolute log ratios of the figures known for both; infinite between kinds of devices.

    A figure that only one of them has, such as tables, counts as a factor of a hundred.
    """
    if one.device != other.device:
        return math.inf
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(Descriptor) if f.name != "device"]
    logs = [abs(math.log(a / b)) if a > 0 and b > 0 else math.log(100.0) for a, b in pairs if a > 0 or b > 0]
    return sum(logs) / len(logs) if logs else math.inf


def nearest(descriptor: Descriptor, jobs: Sequence[PastJob]) -> list[PastJob]:
    """Return at most five jobs that are similar enough to learn from, the most similar first."""
    near = [(d, -job.at, job) for job in jobs if (d := distance(descriptor, job.descriptor)) <= MAX_DISTANCE]
    return [job for *_, job in sorted(near, key=lambda item: item[:2])][:NUM_NEIGHBOURS]


def suggest(
    current: StepProfile,
    neighbours: Sequence[PastJob],
    limits: Limits,
    *,
    node_cores: float,
    at: float,
    objective: Objective = FASTEST,
) -> Suggestion | None:
    """Return the settings that similar jobs found best, smoothed by age and similarity; None without such jobs.

    The smoothed figures belong to no job, so the nearest settings among the neighbours' best ones are taken.
    Args:
        limits: a neighbour's settings with more or fewer workers do not count.
        at: now, seconds since the epoch.
    """
    able = [(job, best) for job in neighbours if (best := job.best_within(limits, objective)) is not None]
    if not able:
        return None
    here = descriptor_of(current, node_cores)
    smoothed: list[float] = []
    for job, best in sorted(able, key=lambda pair: pair[0].at):
        share = SMOOTHING * 0.5 ** (max(0.0, at - job.at) / HALF_LIFE_S) * math.exp(-distance(here, job.descriptor))
        figures = [math.log1p(figure) for figure in _figures(best)]
        smoothed = figures if not smoothed else [(1 - share) * s + share * f for s, f in zip(smoothed, figures, strict=True)]
    settings = min(
        (best for _, best in able),
        key=lambda s: sum((math.log1p(f) - m) ** 2 for f, m in zip(_figures(s), smoothed, strict=True)),
    )
    followed = [job for job, best in able if best == settings]
    compared = [(job, near) for job in followed if (near := _nearest(settings_of(current), job.step_times_s())) != settings]
    speedup, gain = (
        math.exp(sum(math.log(of(job)[near] / of(job)[settings]) for job, near in compared) / max(1, len(compared)))
        for of in (PastJob.step_times_s, lambda job: job.losses(objective))
    )
    names = ", ".join(job.job for job in followed[:3])
    reason = f"{len(followed)} of the {len(able)} most similar past jobs ({names}) ran best with these settings"
    if compared:
        reason += f", {speedup:.2f} times as fast as with what runs now"
    return Suggestion(settings, speedup, gain, tuple(job.job for job, _ in able), reason)


def _figures(settings: Settings) -> tuple[int, ...]:
    return settings.num_workers, settings.loader_workers, settings.intra_op_threads, settings.prefetch_factor


def _nearest(now: Settings, measured: Iterable[Settings]) -> Settings:
    return min(
        measured, key=lambda s: sum(abs(math.log((1 + a) / (1 + b))) for a, b in zip(_figures(s), _figures(now), strict=True))
    )


# The basis of a decision: the state of a running job, the model of its steps, and the rules.


class Model(Protocol):
    """A predictor of step times: `StepTimeModel`, or another one it is compared with."""

    def predict_many(self, configurations: Sequence[Configuration]) -> Sequence[Prediction]: ...


@dataclass(frozen=True)
class PlanRequest:
    """The state of a running job.

    Example:
        >>> request = PlanRequest(windows, node_cores=4, remaining_samples=1e6)  # `windows`: step profiles of one job
        >>> request.current.num_workers
        2
    """

    windows: Sequence[StepProfile]  # windows of rank 0, oldest first; the last one shows the present settings
    node_cores: float = 0.0  # cores of one node, all its workers together; 0: unknown
    remaining_samples: float | None = None  # samples that the whole job has still to train on; None: unknown
    resize_cost_s: float = 0.5  # seconds that the whole job pauses when workers change, as measured
    retune_cost_s: float = 0.1  # seconds that it pauses when the other settings change, as measured
    resizes_in_place: bool = False  # nodes get more cores and memory without new workers
    age_s: float = 0.0  # seconds since the job's start
    spent: float | None = None  # money spent so far; None: unknown
    past: Sequence[Decision] = ()  # earlier decisions of this job, in any order: they prevent oscillation
    suggestion: Suggestion | None = None  # final settings of similar jobs; None: there were none

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("cannot plan without a window of the job; wait for its first profile")
        left = self.remaining_samples
        if left is not None and not 0 <= left < math.inf:
            raise ValueError(f"remaining_samples is {left!r}; pass None if the number is unknown")
        for name in ("resize_cost_s", "retune_cost_s", "age_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a finite time of 0 s or more")

    @property
    def current(self) -> StepProfile:
        return self.windows[-1]


@dataclass(frozen=True)
class Rules:
    """Thresholds of the planner. Shares are of the remaining time or cost.

    Example:
        >>> Rules(max_trials=0).max_trials  # never try settings that were not measured
        0
    """

    min_gain: float = 0.02  # minimum gain of a change; doubles with each time that the planner itself left those settings
    min_explore_gain: float = 0.005  # minimum expected improvement of untried settings
    max_explore_cost: float = 0.05  # maximum cost of a trial
    max_trials: int = 5
    max_stretch: float = 4.0  # maximum ratio of untried to tried numbers of workers, in either direction
    trial_s: float = 10.0  # time until untried settings are judged
    horizon_s: float = 3600.0  # remaining time assumed when the job's end is unknown


DEFAULT_RULES = Rules()


# All settings that a running job may have, with the expected gain and cost of each.

NUM_NEWEST_WINDOWS = 20  # windows per configuration that determine its measured step time
STRETCH_WINDOWS = 4  # windows per stretch of time; their means show how a machine's speed drifts
MIN_DRIFT = 0.02  # relative difference between the same settings at two times, because others use the machine, too
MAX_MODEL_SIGMA = 0.5  # limit of the model's uncertainty, so that ignorance alone does not attract a trial
MIN_MODEL_SIGMA = 0.08  # deviation of a log step time that was never measured, however certain the model is
LENGTH = 0.8  # distance in log settings over which model errors correlate: a bit more than a factor of two in one setting
PASS_COST = 0.08  # fraction by which each further part of a share makes a step longer, see benchmarks/parts.py
PREFETCH_WEIGHT = 0.3  # prefetched batches smooth the supply and are seldom decisive
MAX_KEPT_CANDIDATES = 16  # candidates stored with a decision, because its record is in etcd


@dataclass(frozen=True)
class CandidateTable:
    """All settings considered, with their expected gain and cost; arrays of shape ``(num_settings,)``."""

    settings: Sequence[Settings]
    now: int  # index of the present settings
    step_s: Floats
    low_s: Floats
    high_s: Floats
    sigma: Floats  # standard deviation of log `step_s`
    loss: Floats  # the quantity to minimise: step time, scaled up for dearer settings; equals `step_s` for the present ones
    bound_s: Floats  # longer step times miss the deadline or exceed the budget
    measured: NDArray[np.bool_]
    num_windows: Sequence[int]  # newest measured windows that count
    noise: float  # standard deviation of the log of a window's step time, within one stretch of time
    drift: float  # standard deviation of the mean of that log between stretches of time
    notes: Sequence[str]  # reason why the settings are infeasible; empty where feasible
    node_cores: Floats  # cores of each worker, on a larger node if the settings need one
    node_memory_bytes: Sequence[int]  # memory that a worker's node needs, where that is more than now; else 0
    cores: Floats
    gpus: Floats
    cost_per_hour: Sequence[float | None]
    left_s: float  # remaining seconds of work at the present settings
    steps_left: float
    global_batch: int
    request: PlanRequest

    @classmethod
    def of(
        cls,
        request: PlanRequest,
        model: Model,
        limits: Limits,
        objective: Objective,
        memory: MemoryModel | None,
        rules: Rules,
        gpu_memory: MemoryModel | None = None,
    ) -> CandidateTable:
        current = request.current
        runs = settings_of(current)
        visits = _visits(request.windows, current.global_batch)
        measured = {settings: np.concatenate(of_settings)[-NUM_NEWEST_WINDOWS:] for settings, of_settings in visits.items()}
        noise = noise_of([log_s for of_settings in visits.values() for log_s in of_settings])

        settings = sorted({*all_settings(limits, runs), *measured})
        now = settings.index(runs)
        where = [configuration(s, current, limits, request.node_cores) for s in settings]
        step_s, low_s, high_s = _step_times(model.predict_many(where), settings, measured, noise)
        peaks = [memory.predict(c) for c in where] if memory is not None else []
        used = [resources_of(c, peaks[i].peak_bytes if peaks else 0.0) for i, c in enumerate(where)]
        notes = [why_not(s, where[now], c, current.global_batch, limits) for s, c in zip(settings, where, strict=True)]
        limit = current.memory_limit_bytes
        spare = request.windows[-1].spare_bytes if request.windows else 0
        most = max(limit, limits.max_memory_bytes - AGENT_BYTES - spare)
        node_bytes = [0] * len(settings)
        for index, peak in enumerate(peaks):
            if not limit or peak.high_bytes <= limit or settings[index] in measured:
                continue
            if limits.max_memory_bytes:
                node_bytes[index] = node_memory_bytes(peak.high_bytes, limits.max_memory_bytes, spare)
            if peak.high_bytes > most and not notes[index]:
                notes[index] = f"needs up to {peak.high_bytes / 2**20:,.0f} MiB of {most / 2**20:,.0f} MiB of memory"
        for index, passes in enumerate(_numbers_of_passes(where, current, gpu_memory)):
            if settings[index] in measured:
                continue
            if not passes and not notes[index]:
                notes[index] = f"a share needs more than the {current.gpu_limit_bytes / 2**20:,.0f} MiB of a worker's GPU"
            for seconds in (step_s, low_s, high_s):
                seconds[index] *= 1 + PASS_COST * max(0, passes - 1)
        steps_left = rules.horizon_s / step_s[now]
        if request.remaining_samples is not None:
            steps_left = request.remaining_samples / current.global_batch
        prices = [objective.prices.per_hour(u) for u in used]
        is_priced = prices[now] is not None
        cost = np.array([price or 0.0 if is_priced else u.scalar for u, price in zip(used, prices, strict=True)])
        rate = np.maximum(cost, 1e-9 * max(cost.max(), 1e-9))  # per time: money if prices are known, else resources
        bound_s = _bound_s(request, objective, steps_left, rate, is_priced=is_priced)
        return cls(
            settings=settings,
            now=now,
            step_s=step_s,
            low_s=low_s,
            high_s=high_s,
            sigma=_sigma(np.log(high_s / low_s) / (2 * NORMAL_WIDTH), noise, settings, list(measured)),
            loss=step_s * (rate / rate[now]) ** objective.elasticity,
            bound_s=bound_s,
            measured=np.array([s in measured for s in settings]),
            num_windows=[len(measured.get(s, ())) for s in settings],
            noise=noise,
            drift=_drift(visits, noise),
            notes=notes,
            node_cores=np.array([c.cores for c in where]),
            node_memory_bytes=node_bytes,
            cores=np.array([u.cores for u in used]),
            gpus=np.array([u.gpus for u in used]),
            cost_per_hour=prices,
            left_s=float(steps_left * step_s[now]),
            steps_left=float(steps_left),
            global_batch=current.global_batch,
            request=request,
        )

    def change_cost_s(self, here: int, there: int) -> float:
        if here == there:
            return 0.0
        more_cores = self.node_cores[there] > self.node_cores[here]
        more_memory = self.node_memory_bytes[there] > self.node_memory_bytes[here]
        if (more_cores or more_memory) and not self.request.resizes_in_place:
            return self.request.resize_cost_s * self.settings[there].num_workers  # nodes are replaced one at a time
        resized = self.settings[here].num_workers != self.settings[there].num_workers
        return self.request.resize_cost_s if resized else self.request.retune_cost_s

    def worth_s(self, index: int) -> float:
        faster = 1 - float(self.step_s[index] / self.step_s[self.now])
        return self.left_s * faster - self.change_cost_s(self.now, index)

    def cost_to_end(self, index: int) -> float | None:
        """Return the money for the rest of the job; None while the remaining work or the price is unknown."""
        price = self.cost_per_hour[index]
        if price is None or self.request.remaining_samples is None:
            return None
        return price * (self.steps_left * float(self.step_s[index]) + self.change_cost_s(self.now, index)) / 3600

    @property
    def front(self) -> list[int]:
        """The exact Pareto front of throughput and cost among feasible settings, ascending in cost."""
        able = [i for i, note in enumerate(self.notes) if not note]
        cost = self.cores + 1e6 * self.gpus
        if all(self.cost_per_hour[i] is not None for i in able):
            cost = np.array([price or 0.0 for price in self.cost_per_hour])
        return [able[i] for i in pareto_front(1 / self.step_s[able], cost[able])]

    def candidates(self, keep: Sequence[int]) -> tuple[Candidate, ...]:
        """Return the candidates for a decision's record: present, chosen, best measured, the front, and the next best."""
        front = self.front
        chosen = dict.fromkeys(keep)
        by_loss = sorted(range(len(self.settings)), key=lambda i: (bool(self.notes[i]), self.loss[i]))
        measured = [i for i in by_loss if self.measured[i]]
        spread = [front[round(k * (len(front) - 1) / 5)] for k in range(6)] if len(front) > 6 else front
        for index in (*measured[:6], *spread, *by_loss):
            if len(chosen) < MAX_KEPT_CANDIDATES:
                chosen[index] = None
        return tuple(self._candidate(i, i in front) for i in sorted(chosen))

    def _candidate(self, index: int, on_front: bool) -> Candidate:
        note = self.notes[index]
        if index == self.now:
            note = f"runs now{'; ' if note else ''}{note}"
        return Candidate(
            settings=self.settings[index],
            step_time_s=float(self.step_s[index]),
            low_s=float(self.low_s[index]),
            high_s=float(self.high_s[index]),
            samples_per_s=self.global_batch / float(self.step_s[index]),
            worth_s=self.worth_s(index),
            measured=bool(self.measured[index]),
            feasible=not self.notes[index],
            note=note,
            on_front=on_front,
            cores=float(self.cores[index]),
            gpus=int(self.gpus[index]),
            cost_per_hour=self.cost_per_hour[index],
            cost_to_end=self.cost_to_end(index),
        )


def _visits(windows: Sequence[StepProfile], global_batch: int) -> Mapping[Settings, Sequence[Floats]]:
    """Return log step times of the windows with this batch, by settings and by stretches of time without a change."""
    visits: dict[Settings, list[Floats]] = {}
    for (settings, batch), visit in groupby(windows, key=lambda window: (settings_of(window), window.global_batch)):
        if batch == global_batch:
            visits.setdefault(settings, []).append(np.log([window.step_time_s for window in visit]))
    return visits


def _sigma(of_window: Floats, noise: float, settings: Sequence[Settings], measured: Sequence[Settings]) -> Floats:
    """Return the part of the deviation of the log of each settings' true step time that a trial can reduce.

    A window's noise is not part of it. Settings near measured ones share their error. The rest is the deviation of a Gaussian
    process given its nearest neighbour, so that trials are spread (Rasmussen and Williams, 2006, equation 2.24).
    """
    figures = np.log1p(np.array([[s.num_workers, s.loader_workers, s.intra_op_threads, s.prefetch_factor] for s in settings]))
    figures[:, 3] *= PREFETCH_WEIGHT
    known = [settings.index(s) for s in measured]
    squares = ((figures[:, None, :] - figures[None, known, :]) ** 2).sum(axis=2).min(axis=1)
    own = np.sqrt(np.clip(of_window**2 - noise**2, MIN_MODEL_SIGMA**2, MAX_MODEL_SIGMA**2))
    result: Floats = np.maximum(own * np.sqrt(1 - np.exp(-squares / LENGTH**2)), 1e-3)
    return result


def _drift(visits: Mapping[Settings, Sequence[Floats]], noise: float) -> float:
    """Return the standard deviation of the log of the same settings' step time between stretches of time."""
    squares, degrees = 0.0, 0
    for of_settings in visits.values():
        parts = [part for log_s in of_settings for part in np.array_split(log_s, math.ceil(len(log_s) / STRETCH_WINDOWS))]
        means = np.array([part.mean() for part in parts])
        by_chance = noise**2 * float(np.mean([1 / len(part) for part in parts]))
        squares += float(((means - means.mean()) ** 2).sum()) - (len(means) - 1) * by_chance
        degrees += len(means) - 1
    return max(MIN_DRIFT, math.sqrt(max(0.0, squares + MIN_DRIFT**2) / (degrees + 1)))


def _numbers_of_passes(where: Sequence[Configuration], current: StepProfile, gpu_memory: MemoryModel | None) -> list[int]:
    """Return in how many parts a worker computes its share in each configuration; 0: it does not fit into its GPU."""

    @cache
    def passes_of(asked: Configuration) -> int:
        passes = math.ceil(asked.local_batch / current.pass_limit) if current.pass_limit else 1
        if gpu_memory is None or not current.gpu_limit_bytes:
            return passes
        while True:
            at_once = math.ceil(asked.local_batch / passes)
            if gpu_memory.predict(replace(asked, local_batch=at_once)).high_bytes <= current.gpu_limit_bytes:
                return passes
            if at_once == 1 or not current.pass_limit:
                return 0
            passes = min(2 * passes, asked.local_batch)

    # Loader workers and threads make no difference to a GPU.
    return [passes_of(replace(c, loader_workers=0, intra_op_threads=0, prefetch_factor=0)) for c in where]


def _step_times(
    predictions: Sequence[Prediction], settings: Sequence[Settings], measured: Mapping[Settings, Floats], noise: float
) -> tuple[Floats, Floats, Floats]:
    """Return step times of the settings and the ends of their intervals, measured where possible, otherwise predicted."""
    step_s, low_s, high_s = (np.array([getattr(p, n) for p in predictions]) for n in ("step_time_s", "low_s", "high_s"))
    for index, each in enumerate(settings):
        if (windows := measured.get(each)) is not None:
            # Measured settings need no model. The interval is that of the next window.
            spread = NORMAL_WIDTH * noise * math.sqrt(1 + 1 / len(windows))
            step_s[index] = math.exp(windows.mean())
            low_s[index], high_s[index] = step_s[index] * math.exp(-spread), step_s[index] * math.exp(spread)
    return step_s, low_s, high_s


def _bound_s(request: PlanRequest, objective: Objective, steps_left: float, rate: Floats, is_priced: bool) -> Floats:
    """Return the longest step with which each of the settings keeps the deadline and the budget."""
    bound_s = np.full(len(rate), math.inf)
    if objective.deadline_s is not None and steps_left > 0:
        bound_s = np.minimum(bound_s, max(1e-9, objective.deadline_s - request.age_s) / steps_left)
    if objective.budget is not None and steps_left > 0 and is_priced:
        money = max(1e-9, objective.budget - (request.spent or 0.0))
        bound_s = np.minimum(bound_s, money / (rate / 3600) / steps_left)
    return bound_s
