"""Choose the settings that a running job should have.

Reads what was measured, a model, limits, the user's objective and the work that is left; returns a `Decision`. Whoever
calls this decides when, and carries it out. The memory of what was tried lives in the windows and in the past decisions
that are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf import Configuration, MemoryModel, Prediction
from lightning_dlrover.perf.samples import AGENT_BYTES, StepProfile
from lightning_dlrover.planner.memory_growth import node_memory_bytes
from lightning_dlrover.planner.objective import Objective, resources_of
from lightning_dlrover.planner.plan import Candidate, Decision, Settings, has_failed, step_text
from lightning_dlrover.planner.space import Limits, configuration, pareto_front, search, settings_of, why_not
from lightning_dlrover.planner.warm_start import Suggestion

__all__ = ["Model", "Rules", "Situation", "plan"]

Floats = NDArray[np.float64]

INTERVAL_SIGMAS = 1.645  # predictions' intervals hold nine of ten
NUM_NEWEST_WINDOWS = 20  # of one configuration, that its measured step time rests on
MIN_NOISE = 0.02  # two means over a window of the same steps differ by about this much
STRETCH_WINDOWS = 4  # by whose means it is told how a machine's speed changes with time
MIN_DRIFT = 0.02  # and so does what windows of two different times have in common: others use the machine, too
MAX_MODEL_SIGMA = 0.5  # whoever knows nothing of settings is not to be drawn there by that alone
MIN_MODEL_SIGMA = 0.08  # of a log step time that was never measured, however sure the model is
LENGTH = 0.8  # in log settings, over which errors of the model stay alike: a bit more than a factor of two in one of them
PREFETCH_WEIGHT = 0.3  # batches in stock smooth, and seldom decide
MAX_KEPT_CANDIDATES = 16  # of a decision's record, which lies in etcd


class Model(Protocol):
    """What predicts step times: `StepTimeModel`, or another one it is compared with."""

    def predict_many(self, configurations: Sequence[Configuration]) -> Sequence[Prediction]: ...


@dataclass(frozen=True)
class Situation:
    """What is known about a running job.

    Args:
        windows: of rank 0, oldest first; the last one is of what runs now.
        node_cores: cores of one node, all its workers together; 0: unknown.
        remaining_samples: that the whole job has still to train on; None if nobody knows.
        resize_cost_s: seconds the whole job stands still when workers change, as measured.
        retune_cost_s: seconds it stands still when the other settings change, as measured.
        age_s: seconds since the job's start.
        spent: money until now; None: unknown.
        past: earlier decisions of this job, in any order; they keep the planner from going back and forth.
        suggestion: where jobs like this one have ended; None: there were none.
    """

    windows: Sequence[StepProfile]
    node_cores: float = 0.0
    remaining_samples: float | None = None
    resize_cost_s: float = 0.5
    retune_cost_s: float = 0.1
    age_s: float = 0.0
    spent: float | None = None
    past: Sequence[Decision] = ()
    suggestion: Suggestion | None = None

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("cannot plan without a window of the job; wait for its first profile")
        left = self.remaining_samples
        if left is not None and not 0 <= left < math.inf:
            raise ValueError(f"remaining_samples is {left!r}; pass None if nobody knows how many are left")
        for name in ("resize_cost_s", "retune_cost_s", "age_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a finite time of 0 s or more")

    @property
    def current(self) -> StepProfile:
        return self.windows[-1]


@dataclass(frozen=True)
class Rules:
    """For how much the planner moves. Shares are of the time, or cost, that is left."""

    min_gain: float = 0.02  # that a change has to bring; doubles with each time that the planner itself left those settings
    min_explore_gain: float = 0.005  # expected improvement that untried settings have to promise
    max_explore_cost: float = 0.05  # that a trial may cost
    max_trials: int = 5
    max_stretch: float = 4.0  # untried workers are at most so many times what was tried, and at least that part of it
    trial_s: float = 10.0  # until untried settings are judged
    horizon_s: float = 3600.0  # time left that is assumed when nobody knows when the job ends


def plan(
    situation: Situation,
    model: Model,
    limits: Limits,
    objective: Objective,
    *,
    decision_id: int,
    at: float,
    memory: MemoryModel | None = None,
    rules: Rules = Rules(),
) -> Decision:
    """The settings that serve `objective` best, the global batch kept constant.

    What was measured is judged by its windows. Of what was not, the settings with the largest expected improvement over
    the best that was measured (Jones, Schonlau and Welch, J. Global Optimization 13, 1998) are tried, while that is worth
    more over the remaining work than the trial costs; measured, they are either better or left for good. The first trial
    of a job goes where similar jobs have ended, if there were any.

    Args:
        model: fitted to all windows of this job so far.
        at: seconds since the epoch, recorded only.
        memory: where it is given, settings whose upper bound exceeds the worker's limit are not considered.
    Raises:
        ImportError: the space is too large to enumerate, and pymoo is not installed.
    """
    field = _Field.of(situation, model, limits, objective, memory, rules)
    index, explored, reason = _Search(situation, limits, objective, rules, field).choose()
    if objective.budget is not None and field.cost_per_hour[field.now] is None:
        reason += f"; the budget of {objective.budget:g} cannot be kept: what a GPU costs is unknown (gpu_hour)"
    return Decision(
        decision_id=decision_id,
        at=at,
        current=field.settings[field.now],
        chosen=field.settings[index],
        reason=reason,
        candidates=field.candidates(keep=(field.now, index)),
        observed_step_time_s=situation.current.step_time_s,
        predicted_step_time_s=float(field.step_s[index]),
        explored=explored,
        objective=objective.describe(),
        num_considered=len(field.settings),
        num_windows=len(situation.windows),
        left_s=None if situation.remaining_samples is None else field.left_s,
        change_cost_s=field.change_cost_s(field.now, index),
        spent=situation.spent,
        node_cores=float(field.node_cores[index]) if field.node_cores[index] > field.node_cores[field.now] else 0.0,
        node_memory_bytes=field.node_memory_bytes[index],
    )


@dataclass(frozen=True)
class _Field:
    """All settings that are considered, with what they would bring and cost; arrays of shape ``(num_settings,)``."""

    settings: Sequence[Settings]
    now: int  # index of what runs
    step_s: Floats
    low_s: Floats
    high_s: Floats
    sigma: Floats  # of the log of step_s
    loss: Floats  # what is minimised: step time, dearer settings made longer; `step_s` of what runs now
    bound_s: Floats  # step times above it miss the deadline, or spend more than the budget
    measured: NDArray[np.bool_]
    num_windows: Sequence[int]  # that were measured, the newest ones that count
    noise: float  # standard deviation of the log of a window's step time, within one stretch of time
    drift: float  # standard deviation of its mean from one stretch of time to another, likewise
    notes: Sequence[str]  # why not; empty where feasible
    node_cores: Floats  # that each worker has, on a node that is larger than now if need be
    node_memory_bytes: Sequence[int]  # that its node needs, where that is more than now; else 0
    cores: Floats
    gpus: Floats
    cost_per_hour: Sequence[float | None]
    left_s: float  # of work, at the current settings
    steps_left: float
    global_batch: int
    situation: Situation

    @classmethod
    def of(
        cls,
        situation: Situation,
        model: Model,
        limits: Limits,
        objective: Objective,
        memory: MemoryModel | None,
        rules: Rules,
    ) -> _Field:
        current = situation.current
        runs = settings_of(current)
        visits = _visits(situation.windows, current.global_batch)
        measured = {settings: np.concatenate(of_settings)[-NUM_NEWEST_WINDOWS:] for settings, of_settings in visits.items()}
        noise = _noise(visits)

        def at(settings: Settings) -> Configuration:
            return configuration(settings, current, limits, situation.node_cores)

        def front_of(some: Sequence[Settings]) -> tuple[Floats, Floats]:
            where = [at(s) for s in some]
            gain = np.array([p.samples_per_s for p in model.predict_many(where)])
            cost = np.array([resources_of(c).scalar for c in where])
            wrong = [bool(why_not(s, at(runs), c, current.global_batch, limits)) for s, c in zip(some, where, strict=True)]
            gain[wrong], cost[wrong] = -np.inf, np.inf
            return gain, cost

        settings = search(limits, runs, front_of)
        settings = sorted({*settings, *measured})
        now = settings.index(runs)
        where = [at(s) for s in settings]
        predictions = model.predict_many(where)
        step_s, low_s, high_s = (np.array([getattr(p, n) for p in predictions]) for n in ("step_time_s", "low_s", "high_s"))
        for index, each in enumerate(settings):
            if (windows := measured.get(each)) is not None:
                # What was measured needs no model; the interval is of the next window.
                spread = INTERVAL_SIGMAS * noise * math.sqrt(1 + 1 / len(windows))
                step_s[index] = math.exp(windows.mean())
                low_s[index], high_s[index] = step_s[index] * math.exp(-spread), step_s[index] * math.exp(spread)
        peaks = [memory.predict(c) for c in where] if memory is not None else []
        used = [resources_of(c, peaks[i].peak_bytes if peaks else 0.0) for i, c in enumerate(where)]
        notes = [why_not(s, where[now], c, current.global_batch, limits) for s, c in zip(settings, where, strict=True)]
        limit = current.memory_limit_bytes
        most = max(limit, limits.max_memory_bytes - AGENT_BYTES)
        for index, peak in enumerate(peaks):
            if limit and peak.high_bytes > most and settings[index] not in measured and not notes[index]:
                notes[index] = f"needs up to {peak.high_bytes / 2**20:,.0f} MiB of {most / 2**20:,.0f} MiB of memory"

        steps_left = rules.horizon_s / step_s[now]
        if situation.remaining_samples is not None:
            steps_left = situation.remaining_samples / current.global_batch
        prices = [objective.prices.per_hour(u) for u in used]
        rate = np.array([u.scalar if prices[now] is None else price or 0.0 for u, price in zip(used, prices, strict=True)])
        rate = np.maximum(rate, 1e-9 * max(rate.max(), 1e-9))
        bound_s = np.full(len(settings), math.inf)
        if objective.deadline_s is not None and steps_left > 0:
            bound_s = np.minimum(bound_s, max(1e-9, objective.deadline_s - situation.age_s) / steps_left)
        if objective.budget is not None and steps_left > 0 and prices[now] is not None:
            money = max(1e-9, objective.budget - (situation.spent or 0.0))
            bound_s = np.minimum(bound_s, money / (rate / 3600) / steps_left)
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
            node_memory_bytes=[
                node_memory_bytes(p.high_bytes, limits.max_memory_bytes)
                if limit and limits.max_memory_bytes and p.high_bytes > limit and s not in measured
                else 0
                for s, p in zip(settings, peaks, strict=False)
            ]
            or [0] * len(settings),
            cores=np.array([u.cores for u in used]),
            gpus=np.array([u.gpus for u in used]),
            cost_per_hour=prices,
            left_s=float(steps_left * step_s[now]),
            steps_left=float(steps_left),
            global_batch=current.global_batch,
            situation=situation,
        )

    def change_cost_s(self, here: int, there: int) -> float:
        if here == there:
            return 0.0
        if self.node_cores[there] > self.node_cores[here] or self.node_memory_bytes[there] > self.node_memory_bytes[here]:
            return self.situation.resize_cost_s * self.settings[there].num_workers  # nodes are replaced one at a time
        resized = self.settings[here].num_workers != self.settings[there].num_workers
        return self.situation.resize_cost_s if resized else self.situation.retune_cost_s

    def worth_s(self, index: int) -> float:
        faster = 1 - float(self.step_s[index] / self.step_s[self.now])
        return self.left_s * faster - self.change_cost_s(self.now, index)

    def cost_to_end(self, index: int) -> float | None:
        """Money for the rest of the job; None: unknown, as nobody knows how much is left, or what it costs."""
        price = self.cost_per_hour[index]
        if price is None or self.situation.remaining_samples is None:
            return None
        return price * (self.steps_left * float(self.step_s[index]) + self.change_cost_s(self.now, index)) / 3600

    @property
    def front(self) -> list[int]:
        """The exact Pareto front of throughput and cost among what is feasible, ascending in cost."""
        able = [i for i, note in enumerate(self.notes) if not note]
        cost = self.cores + 1e6 * self.gpus
        if all(self.cost_per_hour[i] is not None for i in able):
            cost = np.array([price or 0.0 for price in self.cost_per_hour])
        return [able[i] for i in pareto_front(1 / self.step_s[able], cost[able])]

    def candidates(self, keep: Sequence[int]) -> tuple[Candidate, ...]:
        """What a record of the decision holds: what runs, what was chosen, the front, what was measured, the next best."""
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
    """Log step times of all windows of each settings that ran with this batch, by stretches of time without a change."""
    visits: dict[Settings, list[Floats]] = {}
    for (settings, batch), visit in groupby(windows, key=lambda window: (settings_of(window), window.global_batch)):
        if batch == global_batch:
            visits.setdefault(settings, []).append(np.log([window.step_time_s for window in visit]))
    return visits


def _sigma(of_window: Floats, noise: float, settings: Sequence[Settings], measured: Sequence[Settings]) -> Floats:
    """Standard deviation of the log of each settings' true step time, of which a trial can teach something.

    A window's noise is not part of it. Settings near measured ones share their error: what is left is that of a Gaussian
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
    """Standard deviation of the log of a window's step time, from window to window."""
    each = [log_s for of_settings in visits.values() for log_s in of_settings]
    squares = sum(float(((log_s - log_s.mean()) ** 2).sum()) for log_s in each)
    degrees = sum(len(log_s) - 1 for log_s in each)
    # One imagined repetition that differs by 5 % keeps a single window from looking free of noise.
    return max(MIN_NOISE, math.sqrt((squares + 0.05**2) / (degrees + 1)))


def _drift(visits: Mapping[Settings, Sequence[Floats]], noise: float) -> float:
    """Standard deviation of the log of the step time that settings have, from one stretch of time to another."""
    squares, degrees = 0.0, 0
    for of_settings in visits.values():
        parts = [part for log_s in of_settings for part in np.array_split(log_s, math.ceil(len(log_s) / STRETCH_WINDOWS))]
        means = np.array([part.mean() for part in parts])
        by_chance = noise**2 * float(np.mean([1 / len(part) for part in parts]))
        squares += float(((means - means.mean()) ** 2).sum()) - (len(means) - 1) * by_chance
        degrees += len(means) - 1
    return max(MIN_DRIFT, math.sqrt(max(0.0, squares + MIN_DRIFT**2) / (degrees + 1)))


@dataclass(frozen=True)
class _Search:
    """The choice among all settings; every rule is one method, which deals in indices."""

    situation: Situation
    limits: Limits
    objective: Objective
    rules: Rules
    field: _Field

    def choose(self) -> tuple[int, bool, str]:
        """The settings, whether they are an experiment, and why."""
        field, now = self.field, self.field.now
        allowed = [i for i, s in enumerate(field.settings) if not field.notes[i] and self.limits.allows(s)]
        if not allowed:
            return now, False, f"{self._stay}: no settings within the limits can be run ({field.notes[now] or 'see the notes'})"
        if not self.limits.allows(field.settings[now]):
            workers = field.settings[now].num_workers
            nearest = min(allowed, key=lambda i: (abs(field.settings[i].num_workers - workers), field.loss[i]))
            limits = f"{self.limits.min_workers} to {self.limits.max_workers} workers"
            return nearest, False, f"{self._move(nearest)}: {workers} is outside the limits of {limits}"
        if field.left_s <= self.situation.retune_cost_s:
            reason = f"{_seconds(field.left_s)} of work are left, a change costs {_seconds(self.situation.retune_cost_s)}"
            return now, False, f"{self._stay}: {reason}"
        if (warm := self._suggested(allowed)) is not None:
            return warm, True, self._reason_to_follow(warm)
        loss, promise = self._scale()
        best = self._best_measured(allowed, loss)
        # Whoever comes from a trial that has failed goes home first.
        fled = best != now and self._has_failed()
        trial, worth_s = self._trial(allowed, best, loss, promise) if not fled else (None, 0.0)
        if trial is not None:
            return trial, True, self._reason_to_try(trial, best, worth_s)
        if best != now and self._is_worth_moving(best, loss):
            return best, False, self._reason_to_move(best)
        return now, False, self._reason_to_stay(allowed, best)

    # --- rules -----------------------------------------------------------------------------------------------------------

    def _suggested(self, allowed: Sequence[int]) -> int | None:
        """Where similar jobs have ended, unless this job has made experiments of its own or it is not worth the change."""
        suggestion, field = self.situation.suggestion, self.field
        if suggestion is None or any(d.explored for d in self.situation.past):
            return None
        fits = [i for i in allowed if field.settings[i] == suggestion.settings]
        if not fits or field.measured[fits[0]]:
            return None
        if field.step_s[field.now] <= field.bound_s[field.now] and field.step_s[fits[0]] > field.bound_s[fits[0]]:
            return None  # it is not expected to keep the deadline or the budget, as what runs now does
        gain_s = field.left_s * (1 - 1 / suggestion.gain)
        return fits[0] if gain_s > field.change_cost_s(field.now, fits[0]) + self.rules.min_gain * field.left_s else None

    def _has_failed(self) -> bool:
        """Whether what runs now is a trial far outside of what was predicted for it."""
        last = max(self.situation.past, key=lambda d: d.decision_id, default=None)
        runs = self.field.settings[self.field.now]
        return last is not None and last.chosen == runs and has_failed(last, self.situation.current.step_time_s)

    def _scale(self) -> tuple[Floats, Floats]:
        """What is minimised, and the step time above which settings do not count.

        While nothing that was measured keeps the deadline or budget, it is by how much they are missed.
        """
        field = self.field
        able = field.measured & np.array([not note for note in field.notes])
        if np.isinf(field.bound_s).all() or (field.step_s[able] <= field.bound_s[able]).any():
            return np.where(field.step_s <= field.bound_s, field.loss, math.inf), field.bound_s
        missed = field.step_s / field.bound_s
        return missed * field.loss[field.now] / missed[field.now], np.full(len(missed), math.inf)

    def _best_measured(self, allowed: Sequence[int], loss: Floats) -> int:
        measured = [i for i in allowed if self.field.measured[i]]
        return min(measured, key=lambda i: (loss[i], i != self.field.now), default=self.field.now)

    def _trial(self, allowed: Sequence[int], best: int, loss: Floats, bound_s: Floats) -> tuple[int | None, float]:
        """The untried settings that are worth most, and how much, in seconds; None if no trial pays."""
        field, rules = self.field, self.rules
        explored = [d.chosen for d in self.situation.past if d.explored]
        if len(explored) >= rules.max_trials or not math.isfinite(loss[best]):
            return None, 0.0
        workers = {s.num_workers for s, known in zip(field.settings, field.measured, strict=True) if known}
        able = [
            i
            for i in allowed
            if not field.measured[i]
            and field.settings[i] not in explored
            and any(1 / rules.max_stretch <= field.settings[i].num_workers / w <= rules.max_stretch for w in workers)
        ]
        if not able:
            return None, 0.0
        at = np.array(able)
        factor = self._factor(at, loss)
        gain = expected_improvement(field.step_s[at], field.sigma[at], factor, float(loss[best]), bound_s[at])
        gain_s = field.left_s * gain / loss[field.now]
        cost_s = np.array([self._trial_cost_s(i, best) for i in able])
        promising = gain >= rules.min_explore_gain * loss[best]
        promising &= cost_s <= rules.max_explore_cost * field.left_s
        worth_s = np.where(promising, gain_s - cost_s, -math.inf)
        top = int(np.argmax(worth_s))
        return (able[top], float(worth_s[top])) if worth_s[top] > 0 else (None, 0.0)

    def _factor(self, at: NDArray[np.int_], loss: Floats) -> Floats:
        """What a step time is multiplied by to give the loss."""
        field = self.field
        by_cost = field.loss[at] / field.step_s[at]
        return np.where(np.isfinite(loss[at]), loss[at] / field.step_s[at], by_cost)

    def _trial_cost_s(self, index: int, best: int) -> float:
        """Seconds lost if the settings are as bad as their interval allows, and are left again."""
        field = self.field
        slower = max(0.0, 1 - float(field.step_s[field.now] / field.high_s[index]))
        return field.change_cost_s(field.now, index) + field.change_cost_s(index, best) + self.rules.trial_s * slower

    def _is_worth_moving(self, best: int, loss: Floats) -> bool:
        field = self.field
        # A worker that was lost, or a trial, is no change of mind.
        left = sum(d.current == field.settings[best] and d.is_change and not d.explored for d in self.situation.past)
        gain = 1 - float(loss[best] / loss[field.now]) if math.isfinite(loss[field.now]) else 1.0
        enough = gain >= max(self.rules.min_gain * 2**left, self._gain_by_chance(best))
        return enough and gain * field.left_s > 2 * field.change_cost_s(field.now, best)

    def _gain_by_chance(self, best: int) -> float:
        """A gain that noise alone exceeds once in twenty times; none where a job comes home from a trial, wherever home is."""
        past = max(self.situation.past, key=lambda d: d.decision_id, default=None)
        field = self.field
        if past is None or (past.explored and past.chosen == field.settings[field.now]):
            return 0.0
        of_windows = field.noise**2 * sum(1 / max(1, field.num_windows[i]) for i in (best, field.now))
        return INTERVAL_SIGMAS * math.sqrt(of_windows + 2 * field.drift**2)

    # --- words -----------------------------------------------------------------------------------------------------------

    @property
    def _stay(self) -> str:
        return f"stay at {_workers(self.field.settings[self.field.now].num_workers)}"

    def _move(self, to: int) -> str:
        return describe_change(self.field.settings[self.field.now], self.field.settings[to])

    def _times(self, to: int) -> str:
        return f"{step_text(self.field.step_s[to])} instead of {step_text(self.field.step_s[self.field.now])} a step"

    def _left(self) -> str:
        known = self.situation.remaining_samples is not None
        return f"{_seconds(self.field.left_s)} left" if known else f"{_seconds(self.field.left_s)} assumed to be left"

    def _reason_to_follow(self, warm: int) -> str:
        suggestion = self.situation.suggestion
        assert suggestion is not None
        field = self.field
        interval = f"{step_text(field.low_s[warm])} to {step_text(field.high_s[warm])}"
        return f"{self._move(warm)}: {suggestion.reason}; predicted here: {step_text(field.step_s[warm])} ({interval})"

    def _reason_to_try(self, trial: int, best: int, worth_s: float) -> str:
        field = self.field
        beside = "" if best == field.now else f", best so far {step_text(field.step_s[best])}"
        interval = f"{step_text(field.low_s[trial])} to {step_text(field.high_s[trial])}"
        return (
            f"{self._move(trial)}: never tried; {self._times(trial)} predicted ({interval}{beside}); "
            f"trying costs at most {_seconds(self._trial_cost_s(trial, best))} of the {self._left()} and "
            f"is expected to save {_seconds(worth_s)}"
        )

    def _reason_to_move(self, best: int) -> str:
        field = self.field
        saved_s = float(field.step_s[field.now] - field.step_s[best])
        if saved_s <= 0:
            cheaper = f"{field.cores[field.now]:g} -> {field.cores[best]:g} cores"
            return f"{self._move(best)}: {self._times(best)}, {cheaper}; {self.objective.describe()}"
        steps = math.ceil(field.change_cost_s(field.now, best) / saved_s)
        return (
            f"{self._move(best)}: {self._times(best)}, both measured; ends {_seconds(field.worth_s(best))} sooner of "
            f"{self._left()}; the change is repaid after {steps} steps"
        )

    def _reason_to_stay(self, allowed: Sequence[int], best: int) -> str:
        field = self.field
        if len(allowed) == 1:
            return f"{self._stay}: no other settings are allowed"
        if best != field.now:
            return (
                f"{self._stay}: {self._move(best)} would gain {_seconds(field.worth_s(best))} of {self._left()}, "
                "too little for a change"
            )
        others = [i for i in allowed if i != field.now]
        next_best = min(others, key=lambda i: float(field.loss[i]))
        known = "measured" if field.measured[next_best] else "predicted"
        interval = f"{step_text(field.low_s[next_best])} to {step_text(field.high_s[next_best])}"
        return (
            f"{self._stay}: {step_text(field.step_s[field.now])} a step; the next best ({self._move(next_best)}) takes "
            f"{step_text(field.step_s[next_best])} ({known}, {interval}), "
            "which is not worth a trial or a change"
        )


def expected_improvement(step_s: Floats, sigma: Floats, factor: Floats, best: float, bound_s: Floats) -> Floats:
    """Mean of max(0, best - factor * s) for log-normal step times s, of which only those up to ``bound_s`` count.

    Args:
        step_s: medians, shape ``(n,)``; sigma: standard deviations of the log.
        best: the least loss that was measured.
    """
    from scipy.special import ndtr

    mean_s = step_s * np.exp(sigma**2 / 2)
    top = np.minimum(best / factor, bound_s)
    z = (np.log(top) - np.log(step_s)) / sigma
    gain: Floats = best * ndtr(z) - factor * mean_s * ndtr(z - sigma)
    return np.maximum(gain, 0.0)


def describe_change(now: Settings, then: Settings) -> str:
    """What changes, in words: `1 -> 2 workers, 0 -> 1 loader workers each`."""
    names = {
        "num_workers": "workers",
        "loader_workers": "loader workers each",
        "intra_op_threads": "threads each",
        "prefetch_factor": "batches prefetched",
    }
    changed = [
        f"{getattr(now, name)} -> {getattr(then, name)} {words}"
        for name, words in names.items()
        if getattr(now, name) != getattr(then, name)
    ]
    return ", ".join(changed) or f"{_workers(now.num_workers)} as now"


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"


def _seconds(seconds: float) -> str:
    if abs(seconds) >= 7200:
        return f"{seconds / 3600:.1f} h"
    if abs(seconds) >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.2g} s"
