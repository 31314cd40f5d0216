"""Choose how many workers a running job should have.

Reads a fitted model, what runs now, limits and the work that is left; returns a `Decision`. Whoever calls
this decides when, and carries it out. The memory of what was tried lives in the model's samples and in the
past decisions that are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dlrover.perf.model import StepTimeModel
from lightning_dlrover.perf.prior import Configuration, configuration_of
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.plan import Candidate, Decision, Settings

__all__ = ["Limits", "plan_workers"]

MAX_STRETCH = 2  # an untried size is at most twice, and at least half, a size that was tried


@dataclass(frozen=True)
class Limits:
    """What the planner may do, and for how much it moves."""

    min_workers: int
    max_workers: int
    workers_per_node: int = 0  # that a new node starts; 0: all workers stay on the nodes there are
    min_gain: float = 0.05  # of the time left, or a change is not worth the trouble; doubles with every return to a size
    min_marginal: float = 0.2  # an added worker brings at least this share of what a worker brings now; 0: speed only
    min_explore_gain: float = 0.1  # of the time left, that an untried size has to promise at its best
    max_explore_cost: float = 0.05  # of the time left, that going there and back may cost
    trial_steps: int = 50  # steps until an untried size is judged
    horizon_s: float = 3600.0  # time left that is assumed when nobody knows when the job ends

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"cannot plan between {self.min_workers} and {self.max_workers} workers: "
                "min_workers must be at least 1 and at most max_workers"
            )
        if self.workers_per_node < 0 or self.trial_steps < 0 or not self.horizon_s > 0:
            raise ValueError(f"cannot plan with a negative number of workers, steps or seconds: {self}")
        for name in ("min_gain", "min_marginal", "min_explore_gain", "max_explore_cost"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a share from 0 to below 1, not {getattr(self, name)!r}")


def plan_workers(
    model: StepTimeModel,
    current: StepProfile,
    limits: Limits,
    *,
    remaining_samples: float | None,
    resize_cost_s: float,
    decision_id: int,
    at: float,
    past: Sequence[Decision] = (),
) -> Decision:
    """The world size that ends the job soonest without wasting workers, the global batch kept constant.

    A size that was measured is judged by its prediction, which follows its windows. A size that was not is
    tried once, if its optimistic bound promises enough and going there and back costs little; measured, it is
    either better or left for good.

    Args:
        model: fitted to all windows of this job so far, those of `current` included.
        current: a recent window.
        remaining_samples: that the whole job has still to train on; None if nobody knows.
        resize_cost_s: seconds the whole job stands still, as measured by its last resize.
        at: seconds since the epoch, recorded only.
        past: earlier decisions of this job, in any order; they keep the planner from going back and forth.
    Raises:
        ValueError: a cost or an amount of work is negative or not finite.
    """
    if remaining_samples is not None and not 0 <= remaining_samples < math.inf:
        raise ValueError(f"remaining_samples is {remaining_samples!r}; pass None if nobody knows how many are left")
    if not 0 <= resize_cost_s < math.inf:
        raise ValueError(f"resize_cost_s is {resize_cost_s!r}, not a finite time of 0 s or more")
    now = _candidate_now(model, current)
    left_s = limits.horizon_s
    if remaining_samples is not None:
        left_s = remaining_samples / current.global_batch * now.step_time_s
    sizes = sorted({*range(limits.min_workers, limits.max_workers + 1), current.num_workers})
    candidates = [
        now if size == current.num_workers else _candidate(model, current, limits, size, now, left_s, resize_cost_s)
        for size in sizes
    ]
    search = _Search(limits, now, candidates, left_s, resize_cost_s, tuple(d for d in past if d.is_change))
    chosen, explored, reason = search.choose()
    return Decision(
        decision_id=decision_id,
        at=at,
        current=now.settings,
        chosen=chosen.settings,
        reason=reason,
        candidates=tuple(candidates),
        observed_step_time_s=current.step_time_s,
        predicted_step_time_s=chosen.step_time_s,
        explored=explored,
    )


def _candidate_now(model: StepTimeModel, current: StepProfile) -> Candidate:
    """What runs now, judged by all its windows: a single slow one is no reason to leave."""
    prediction = model.predict(configuration_of(current, model.node_cores))
    return Candidate(
        settings=_settings_now(current),
        step_time_s=prediction.step_time_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        samples_per_s=current.global_batch / prediction.step_time_s,
        worth_s=0.0,
        measured=True,
        feasible=True,
        note="runs now",
    )


def _settings_now(current: StepProfile) -> Settings:
    prefetch_factor = getattr(current, "prefetch_factor", 2 if current.loader_workers else 0)
    return Settings(current.num_workers, current.loader_workers, current.intra_op_threads, prefetch_factor)


def _candidate(
    model: StepTimeModel,
    current: StepProfile,
    limits: Limits,
    num_workers: int,
    now: Candidate,
    left_s: float,
    resize_cost_s: float,
) -> Candidate:
    local_batch = math.ceil(current.global_batch / num_workers)
    tried = model.measured(num_workers, local_batch)
    prediction = model.predict(tried or _placed(model, current, limits, num_workers, local_batch))
    feasible = num_workers <= current.global_batch
    note = "" if feasible else f"a global batch of {current.global_batch} leaves workers without a sample"
    return Candidate(
        settings=replace(now.settings, num_workers=num_workers),
        step_time_s=prediction.step_time_s,
        low_s=prediction.low_s,
        high_s=prediction.high_s,
        samples_per_s=current.global_batch / prediction.step_time_s,
        worth_s=left_s * (1 - prediction.step_time_s / now.step_time_s) - resize_cost_s,
        measured=tried is not None,
        feasible=feasible,
        note=note,
    )


def _placed(model: StepTimeModel, current: StepProfile, limits: Limits, num_workers: int, local_batch: int) -> Configuration:
    """The current configuration with another number of workers."""
    num_nodes = min(current.num_nodes, num_workers)
    if limits.workers_per_node:
        num_nodes = math.ceil(num_workers / limits.workers_per_node)
    return replace(
        configuration_of(current, model.node_cores),
        num_workers=num_workers,
        num_nodes=num_nodes,
        local_batch=local_batch,
    )


@dataclass(frozen=True)
class _Search:
    """The choice among candidates; every rule is one method."""

    limits: Limits
    now: Candidate
    candidates: Sequence[Candidate]
    left_s: float  # at the current size
    resize_cost_s: float
    past: Sequence[Decision]

    def choose(self) -> tuple[Candidate, bool, str]:
        """The candidate, whether it is an experiment, and why."""
        allowed = [c for c in self.candidates if c.feasible and self._within_limits(c)]
        if not allowed:
            return (
                self.now,
                False,
                f"stay at {self.now.num_workers}: no allowed number of workers has enough samples",
            )
        if not self._within_limits(self.now):
            nearest = min(allowed, key=lambda c: abs(c.num_workers - self.now.num_workers))
            reason = (
                f"{self._move(nearest)}: {self.now.num_workers} is outside the limits of "
                f"{self.limits.min_workers} to {self.limits.max_workers} workers"
            )
            return nearest, False, reason
        if self.left_s <= self.resize_cost_s:
            reason = (
                f"stay at {self.now.num_workers}: {_seconds(self.left_s)} of work are left, a resize costs "
                f"{_seconds(self.resize_cost_s)}"
            )
            return self.now, False, reason
        best = self._best_measured(allowed)
        trial = self._trial(allowed, best)
        if trial is not None:
            return trial, True, self._reason_to_try(trial, best)
        if best is not self.now and self._is_worth_moving(best):
            return best, False, self._reason_to_move(best)
        return self.now, False, self._reason_to_stay(allowed, best)

    def _within_limits(self, candidate: Candidate) -> bool:
        return self.limits.min_workers <= candidate.num_workers <= self.limits.max_workers

    def _best_measured(self, allowed: Sequence[Candidate]) -> Candidate:
        """The largest measured size whose workers all earn their keep, seen from the smaller ones."""
        measured = [c for c in allowed if c.measured]
        best = measured[0]
        for candidate in measured[1:]:
            marginal = _marginal(best, candidate, candidate.step_time_s)
            if marginal > 0 and marginal >= self._needed_marginal(candidate):
                best = candidate
        return best

    def _needed_marginal(self, candidate: Candidate) -> float:
        """Half as much for what runs now: what is kept at 15 % was added at 20 %, and does not flap."""
        needed = self.limits.min_marginal
        return needed / 2 if candidate is self.now else needed

    def _trial(self, allowed: Sequence[Candidate], best: Candidate) -> Candidate | None:
        """The untried size with the best chance to beat what was measured, None if nothing can be learnt."""
        tried = [c.num_workers for c in allowed if c.measured]
        explored = {d.chosen_workers for d in self.past if d.explored}
        promising = [
            c
            for c in allowed
            if not c.measured
            and c.num_workers not in explored
            and any(1 / MAX_STRETCH <= c.num_workers / size <= MAX_STRETCH for size in tried)
            and self._promises_enough(c, best, tried)
            and self._trial_cost_s(c) <= self.limits.max_explore_cost * self.left_s
        ]
        return min(promising, key=lambda c: (c.step_time_s, c.num_workers), default=None)

    def _promises_enough(self, untried: Candidate, best: Candidate, tried: Sequence[int]) -> bool:
        hoped_s = _hoped_step_time_s(untried, best, tried)
        faster = 1 - hoped_s / best.step_time_s >= self.limits.min_explore_gain
        if untried.num_workers > best.num_workers:
            return faster and _marginal(best, untried, hoped_s) >= self.limits.min_marginal
        # Far fewer workers that are expected to do with hardly any loss are worth a trial, too.
        spare = _marginal(untried, best, best.step_time_s) < self.limits.min_marginal / 2
        return faster or (spare and untried.num_workers <= best.num_workers * 3 / 4)

    def _trial_cost_s(self, untried: Candidate) -> float:
        """Seconds lost if the size is as bad as its interval allows, and is left again."""
        slower_s = max(0.0, untried.high_s - self.now.step_time_s)
        return 2 * self.resize_cost_s + self.limits.trial_steps * slower_s

    def _is_worth_moving(self, best: Candidate) -> bool:
        returns = sum(d.chosen_workers == best.num_workers for d in self.past if not d.explored)
        if best.worth_s >= self.limits.min_gain * 2**returns * self.left_s:
            return True
        # Slower by little with fewer workers: gives back workers that bring next to nothing.
        gives_back = (
            best.num_workers < self.now.num_workers
            and _marginal(best, self.now, self.now.step_time_s) < self.limits.min_marginal / 2
        )
        return gives_back and returns == 0 and self.resize_cost_s <= self.limits.max_explore_cost * self.left_s

    def _move(self, to: Candidate) -> str:
        return f"{self.now.num_workers} -> {to.num_workers} workers"

    def _reason_to_try(self, trial: Candidate, best: Candidate) -> str:
        return (
            f"{self._move(trial)}: never tried; {_ms(trial.step_time_s)} instead of "
            f"{_ms(self.now.step_time_s)} a step predicted ({_ms(trial.low_s)} to {_ms(trial.high_s)}, "
            f"best so far {_ms(best.step_time_s)} with {best.num_workers}); "
            f"trying costs at most {_seconds(self._trial_cost_s(trial))} of the {_seconds(self.left_s)} left"
            f"{self._repaid(trial)}"
        )

    def _reason_to_move(self, best: Candidate) -> str:
        if best.step_time_s >= self.now.step_time_s or best.worth_s <= 0:
            return (
                f"{self._move(best)}: {self.now.num_workers - best.num_workers} workers fewer cost little, "
                f"{_ms(best.step_time_s)} instead of {_ms(self.now.step_time_s)} a step"
            )
        return (
            f"{self._move(best)}: {_ms(best.step_time_s)} instead of {_ms(self.now.step_time_s)} a step, "
            f"both measured; ends {_seconds(best.worth_s)} sooner of {_seconds(self.left_s)} left"
            f"{self._repaid(best)}"
        )

    def _repaid(self, to: Candidate) -> str:
        saved_s = self.now.step_time_s - to.step_time_s
        if saved_s <= 0:
            return ""
        steps = math.ceil(self.resize_cost_s / saved_s)
        return f"; a resize of {_seconds(self.resize_cost_s)} is repaid after {steps} steps"

    def _reason_to_stay(self, allowed: Sequence[Candidate], best: Candidate) -> str:
        stay = f"stay at {self.now.num_workers}: "
        if len(allowed) == 1:
            return stay + "no other number of workers is allowed"
        if best is not self.now:
            return stay + (
                f"{best.num_workers} workers would gain {_seconds(best.worth_s)} of {_seconds(self.left_s)} "
                "left, too little for a resize"
            )
        others = [c for c in allowed if c is not self.now]
        fastest = min(others, key=lambda c: (c.step_time_s, c.num_workers))
        known = "measured" if fastest.measured else "predicted"
        return stay + (
            f"{_ms(self.now.step_time_s)} a step; the next best, {fastest.num_workers} workers, takes "
            f"{_ms(fastest.step_time_s)} ({known}, {_ms(fastest.low_s)} to {_ms(fastest.high_s)}), "
            "which is not worth its workers, its trial or its resize"
        )


def _marginal(small: Candidate, large: Candidate, large_step_time_s: float) -> float:
    """Throughput that each added worker brings, as a share of what a worker of `small` brings."""
    added = large.num_workers - small.num_workers
    return (small.step_time_s / large_step_time_s - 1) * small.num_workers / added


def _hoped_step_time_s(untried: Candidate, best: Candidate, tried: Sequence[int]) -> float:
    """What an untried size may be credited with.

    Compute shrinks and communication grows with the workers, so throughput rarely has two peaks: past a size that
    was worse than the best, only the prediction counts; between two that were measured, half of the hope; beyond
    the best, all of it.
    """
    low, high = sorted((untried.num_workers, best.num_workers))
    if any(low < size < high for size in tried):
        return untried.step_time_s
    if min(tried) < untried.num_workers < max(tried):
        return math.sqrt(untried.low_s * untried.step_time_s)
    return untried.low_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _seconds(seconds: float) -> str:
    if abs(seconds) >= 7200:
        return f"{seconds / 3600:.1f} h"
    if abs(seconds) >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.2g} s"
