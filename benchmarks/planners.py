"""Planners that use a part of ours, to measure the value of each part. For benchmarks, not for users.

`heuristics` follows DLRover's current rules without a model (dlrover/python/master/resource/local_optimizer.py and
hyperparams/simple_strategy_generator.py of intelligent-machine-learning/dlrover). Thresholds of utilisation choose the next
addition, and an addition that brought too little is withdrawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_dlrover.tuning import (
    Columns,
    Configuration,
    PhysicalPrior,
    Prediction,
    StepProfile,
    StepTimeModel,
    configuration_of,
)
from lightning_dlrover.tuning.autoscale import describe_change, plan
from lightning_dlrover.tuning.candidates import PlanRequest
from lightning_dlrover.tuning.plan import (
    Candidate,
    Decision,
    Limits,
    Objective,
    Settings,
    configuration,
    resources_of,
    settings_of,
    why_not,
)
from lightning_dlrover.tuning.samples import NORMAL_WIDTH

Planner = Callable[[PlanRequest, Limits, Objective, int, float], Decision]
"""Function from request, limits, objective, decision id and seconds since the epoch to a decision."""

SIGMA = 0.15  # standard deviation of the log, for models without an estimate of their own

BUSY = 0.8  # busy fraction of a worker's threads above which one more worker or thread would have work
STARVING = 0.1  # fraction of a step spent waiting for data above which one more loader worker would have work
MIN_SPEEDUP_OF_DOUBLING = 1.2


@dataclass(frozen=True)
class PriorAlone:
    """The physical terms, without trees and without corrections from measurements."""

    prior: PhysicalPrior

    @classmethod
    def fit(cls, samples: Sequence[StepProfile], node_cores: float) -> PriorAlone:
        return cls(PhysicalPrior.of(samples, node_cores))

    def predict_many(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        return [
            _with_interval(s, c)
            for s, c in zip(self.prior.step_time_s(Columns.of(configurations)).tolist(), configurations, strict=True)
        ]


@dataclass(frozen=True)
class TreesAlone:
    """Boosted trees on the log of the step time, as scikit-learn ships them."""

    trees: Any

    @classmethod
    def fit(cls, samples: Sequence[StepProfile], node_cores: float) -> TreesAlone:
        from sklearn.ensemble import HistGradientBoostingRegressor

        rows = [_features(configuration_of(s, node_cores)) for s in samples]
        trees = HistGradientBoostingRegressor(min_samples_leaf=2, early_stopping=False, random_state=0)
        return cls(trees.fit(np.array(rows), np.log([s.step_time_s for s in samples])))

    def predict_many(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        log_s = self.trees.predict(np.array([_features(c) for c in configurations]))
        return [_with_interval(math.exp(value), c) for value, c in zip(log_s, configurations, strict=True)]


def _features(c: Configuration) -> tuple[float, ...]:
    return c.num_workers, c.num_nodes, c.local_batch, c.loader_workers, c.threads, c.core_share, c.prefetch_factor


def _with_interval(step_time_s: float, c: Configuration) -> Prediction:
    wide = math.exp(NORMAL_WIDTH * SIGMA)
    rate = c.num_workers * c.local_batch / step_time_s
    return Prediction(step_time_s, step_time_s / wide, step_time_s * wide, rate)


def _everything(request: PlanRequest, limits: Limits, objective: Objective, decision_id: int, at: float) -> Decision:
    model = StepTimeModel.fit(request.windows, node_cores=request.node_cores)
    return plan(request, model, limits, objective, decision_id=decision_id, at=at)


def _prior_alone(request: PlanRequest, limits: Limits, objective: Objective, decision_id: int, at: float) -> Decision:
    model = PriorAlone.fit(request.windows, request.node_cores)
    return plan(request, model, limits, objective, decision_id=decision_id, at=at)


def _trees_alone(request: PlanRequest, limits: Limits, objective: Objective, decision_id: int, at: float) -> Decision:
    model = TreesAlone.fit(request.windows, request.node_cores)
    return plan(request, model, limits, objective, decision_id=decision_id, at=at)


def _heuristics(request: PlanRequest, limits: Limits, objective: Objective, decision_id: int, at: float) -> Decision:
    current = request.current
    now = settings_of(current)
    times = _step_times_s(request)
    last = next((d for d in reversed(request.past) if d.is_change), None)
    refused = {d.chosen for d in request.past if d.is_change and _was_in_vain(d, times)}
    if last is not None and last.chosen == now and now in refused and limits.allows(last.current):
        chosen, reason = last.current, f"back: {describe_change(last.current, now)} brought too little"
    else:
        chosen, reason = _next(request, limits, refused)
    nodes = {s: configuration(s, current, limits, request.node_cores) for s in (now, chosen)}
    candidates = tuple(
        Candidate(
            settings=each,
            step_time_s=times.get(each, current.step_time_s),
            low_s=times.get(each, current.step_time_s),
            high_s=times.get(each, current.step_time_s),
            samples_per_s=current.global_batch / times.get(each, current.step_time_s),
            worth_s=0.0,
            measured=each in times,
            feasible=True,
            cores=resources_of(nodes[each]).cores,
        )
        for each in sorted({now, chosen})
    )
    return Decision(
        decision_id=decision_id,
        at=at,
        current=now,
        chosen=chosen,
        reason=reason,
        candidates=candidates,
        observed_step_time_s=current.step_time_s,
        predicted_step_time_s=times.get(chosen, current.step_time_s),
        explored=chosen not in times,
        objective="thresholds",
        num_considered=len(candidates),
        num_windows=len(request.windows),
    )


def _next(request: PlanRequest, limits: Limits, refused: set[Settings]) -> tuple[Settings, str]:
    """Settings and reason of the first threshold that asks for more."""
    current, now = request.current, settings_of(request.current)
    waiting = current.data_wait_s / current.step_time_s
    threads = max(1, now.intra_op_threads)
    busy = current.cpu_percent / 100 / threads
    wishes: list[tuple[Settings, str]] = []
    if waiting > STARVING and (more := _above(limits.loader_workers, now.loader_workers)) is not None:
        ahead = now.prefetch_factor or min(limits.prefetch_factors, default=2)
        wishes.append((replace(now, loader_workers=more, prefetch_factor=ahead), f"{100 * waiting:.0f} % of a step is waiting"))
    if busy > BUSY and now.num_workers < limits.max_workers:
        workers = min(2 * now.num_workers, limits.max_workers)
        wishes.append((replace(now, num_workers=workers), f"the worker is busy for {100 * busy:.0f} % of the time"))
    if busy > BUSY and (more := _above(limits.intra_op_threads, now.intra_op_threads)) is not None:
        wishes.append((replace(now, intra_op_threads=more), f"the threads are busy for {100 * busy:.0f} % of the time"))
    here = configuration_of(current, request.node_cores)
    for wish, why in wishes:
        there = configuration(wish, current, limits, request.node_cores)
        if wish not in refused and not why_not(wish, here, there, current.global_batch, limits):
            return wish, f"{describe_change(now, wish)}: {why}"
    return now, "stay: no threshold asks for more"


def _was_in_vain(decision: Decision, times: Mapping[Settings, float]) -> bool:
    """Return whether an addition was measured and brought too little. A step back is not an addition."""
    if decision.chosen not in times or not decision.explored:
        return False
    before_s = times.get(decision.current, decision.observed_step_time_s)
    grown = math.log2(decision.chosen_workers / decision.current_workers) or 1.0
    return before_s / times[decision.chosen] < math.pow(MIN_SPEEDUP_OF_DOUBLING, grown)


def _above(values: Sequence[int], now: int) -> int | None:
    return min((value for value in values if value > now), default=None)


def _step_times_s(request: PlanRequest) -> dict[Settings, float]:
    """Median step time of each configuration that ran with this batch."""
    found: dict[Settings, list[float]] = {}
    for window in request.windows:
        if window.global_batch == request.current.global_batch:
            found.setdefault(settings_of(window), []).append(window.step_time_s)
    return {settings: sorted(times)[len(times) // 2] for settings, times in found.items()}


PLANNERS: Mapping[str, Planner] = {
    "heuristics": _heuristics,
    "prior": _prior_alone,
    "trees": _trees_alone,
    "all": _everything,
}
