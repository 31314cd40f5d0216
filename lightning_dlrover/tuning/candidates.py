"""All settings that a running job may have, with the expected gain and cost of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf import Configuration, MemoryModel, MemoryPrediction, Prediction
from lightning_dlrover.perf.samples import AGENT_BYTES, StepProfile
from lightning_dlrover.planner.memory_growth import node_memory_bytes
from lightning_dlrover.planner.objective import Objective, Resources, resources_of
from lightning_dlrover.planner.plan import Candidate, Settings
from lightning_dlrover.planner.plan_request import Model, PlanRequest, Rules
from lightning_dlrover.planner.space import Limits, all_settings, configuration, pareto_front, settings_of, why_not

__all__ = ["INTERVAL_SIGMAS", "CandidateTable"]

Floats = NDArray[np.float64]

INTERVAL_SIGMAS = 1.645  # half-width of a prediction interval that holds nine values of ten
NUM_NEWEST_WINDOWS = 20  # windows per configuration that determine its measured step time
MIN_NOISE = 0.02  # relative difference of two means over a window of the same steps
STRETCH_WINDOWS = 4  # windows per stretch of time; their means show how a machine's speed drifts
MIN_DRIFT = 0.02  # relative difference between the same settings at two times, because others use the machine, too
MAX_MODEL_SIGMA = 0.5  # limit of the model's uncertainty, so that ignorance alone does not attract a trial
MIN_MODEL_SIGMA = 0.08  # deviation of a log step time that was never measured, however certain the model is
LENGTH = 0.8  # distance in log settings over which model errors stay alike: a bit more than a factor of two in one setting
PASS_COST = 0.08  # time of a step by which each further part of a share makes it longer, see benchmarks/parts.py
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
        noise = _noise(visits)

        settings = sorted({*all_settings(limits, runs), *measured})
        now = settings.index(runs)
        where = [configuration(s, current, limits, request.node_cores) for s in settings]
        step_s, low_s, high_s = _step_times(model.predict_many(where), settings, measured, noise)
        peaks = [memory.predict(c) for c in where] if memory is not None else []
        used = [resources_of(c, peaks[i].peak_bytes if peaks else 0.0) for i, c in enumerate(where)]
        notes = [why_not(s, where[now], c, current.global_batch, limits) for s, c in zip(settings, where, strict=True)]
        limit = current.memory_limit_bytes
        most = max(limit, limits.max_memory_bytes - AGENT_BYTES)
        for index, peak in enumerate(peaks):
            if limit and peak.high_bytes > most and settings[index] not in measured and not notes[index]:
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
        rate = _rate(used, prices, is_priced=prices[now] is not None)
        bound_s = _bound_s(request, objective, steps_left, rate, is_priced=prices[now] is not None)
        return cls(
            settings=settings,
            now=now,
            step_s=step_s,
            low_s=low_s,
            high_s=high_s,
            sigma=_sigma(np.log(high_s / low_s) / (2 * INTERVAL_SIGMAS), noise, settings, list(measured)),
            loss=step_s * (rate / rate[now]) ** objective.elasticity,
            bound_s=bound_s,
            measured=np.array([s in measured for s in settings]),
            num_windows=[len(measured.get(s, ())) for s in settings],
            noise=noise,
            drift=_drift(visits, noise),
            notes=notes,
            node_cores=np.array([c.cores for c in where]),
            node_memory_bytes=_larger_nodes(settings, peaks, measured, limit, limits.max_memory_bytes),
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
        if self.node_cores[there] > self.node_cores[here] or self.node_memory_bytes[there] > self.node_memory_bytes[here]:
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
    """Standard deviation of the log of each settings' true step time, as far as a trial can reduce it.

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


def _noise(visits: Mapping[Settings, Sequence[Floats]]) -> float:
    """Standard deviation of the log of a window's step time between windows."""
    each = [log_s for of_settings in visits.values() for log_s in of_settings]
    squares = sum(float(((log_s - log_s.mean()) ** 2).sum()) for log_s in each)
    degrees = sum(len(log_s) - 1 for log_s in each)
    # One imagined repetition that differs by 5 % keeps a single window from looking free of noise.
    return max(MIN_NOISE, math.sqrt((squares + 0.05**2) / (degrees + 1)))


def _drift(visits: Mapping[Settings, Sequence[Floats]], noise: float) -> float:
    """Standard deviation of the log of the same settings' step time between stretches of time."""
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
            spread = INTERVAL_SIGMAS * noise * math.sqrt(1 + 1 / len(windows))
            step_s[index] = math.exp(windows.mean())
            low_s[index], high_s[index] = step_s[index] * math.exp(-spread), step_s[index] * math.exp(spread)
    return step_s, low_s, high_s


def _rate(used: Sequence[Resources], prices: Sequence[float | None], is_priced: bool) -> Floats:
    """Return the cost per time of each of the settings: money if prices are known, else resources."""
    rate = np.array([price or 0.0 if is_priced else u.scalar for u, price in zip(used, prices, strict=True)])
    positive: Floats = np.maximum(rate, 1e-9 * max(rate.max(), 1e-9))
    return positive


def _bound_s(request: PlanRequest, objective: Objective, steps_left: float, rate: Floats, is_priced: bool) -> Floats:
    """Return the longest step with which each of the settings keeps the deadline and the budget."""
    bound_s = np.full(len(rate), math.inf)
    if objective.deadline_s is not None and steps_left > 0:
        bound_s = np.minimum(bound_s, max(1e-9, objective.deadline_s - request.age_s) / steps_left)
    if objective.budget is not None and steps_left > 0 and is_priced:
        money = max(1e-9, objective.budget - (request.spent or 0.0))
        bound_s = np.minimum(bound_s, money / (rate / 3600) / steps_left)
    return bound_s


def _larger_nodes(
    settings: Sequence[Settings],
    peaks: Sequence[MemoryPrediction],
    measured: Mapping[Settings, Floats],
    limit: float,
    max_bytes: int,
) -> list[int]:
    """Return the memory that nodes need beyond their present limit for each of the settings; 0: no more."""
    return [
        node_memory_bytes(p.high_bytes, max_bytes) if limit and max_bytes and p.high_bytes > limit and s not in measured else 0
        for s, p in zip(settings, peaks, strict=False)
    ] or [0] * len(settings)
