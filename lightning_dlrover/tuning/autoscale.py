"""Decide the next plan of a job: change, try or stay. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import numpy as np

from lightning_dlrover.output import counted
from lightning_dlrover.tuning.candidates import DEFAULT_RULES, CandidateTable, Model, PlanRequest, Rules
from lightning_dlrover.tuning.memory import MemoryModel
from lightning_dlrover.tuning.plan import Decision, Limits, Objective, Settings, not_listed, seconds_text, step_text
from lightning_dlrover.tuning.samples import NORMAL_WIDTH, Floats

# When a trial is given up, and where the job goes then. On shared cores a step may take a hundred times longer.

FAR_OUT = 2.0  # slowdown at which a trial has failed, relative to steps that would be no worse than those before it

STEPS_OF_PROOF = 3
PROOF_S = 1.5
"""Minimum number and minimum duration of the newest steps whose median shows whether a trial has failed.

On a shared core a step of any settings is slow now and then. Two slow steps are the median of three, whatever the third one.
Other programs also take a core away for most of a second, which is many short steps. These limits and `FAR_OUT` were chosen on
recorded steps; the planner's page of the documentation has the figures.
"""

ROUND_SETTLES = 2  # first steps of a round that do not count: the pause before it, and the step that refills the loaders


def has_failed(decision: Decision, step_time_s: float) -> bool:
    """Return whether a trial's steps are so slow that a few of them are enough to abandon it."""
    return step_time_s > give_up_above_s(decision)


def give_up_above_s(decision: Decision) -> float:
    """Return the step time above which a trial has failed; infinite unless `decision` is a trial."""
    if not decision.explored or not decision.is_change:
        return math.inf
    # The interval of a prediction may be wide. A trial as slow as its upper end is of no use either.
    usual_s = decision.break_even_s or max(decision.choice.high_s, decision.observed_step_time_s)
    return FAR_OUT * usual_s


class TrialWatch:
    """Detects a failed trial of more threads from single steps, where a window of them would take too long.

    Steps count from the first one with the new threads, though loader workers of the same trial may still be on their way.
    Windows judge all other trials: new workers and loader workers need some steps until they are at full speed.
    """

    def __init__(self, min_steps: int = STEPS_OF_PROOF, min_s: float = PROOF_S) -> None:
        self._min_steps, self._min_s = min_steps, min_s
        self._trial: Decision | None = None
        self._limit_s = math.inf  # minimum step time of a failed trial
        self._newest_s: deque[float] = deque()
        # Steps may take a fraction of a millisecond, so each one costs a comparison, and no median of some thousand.
        self._span_s = 0.0
        self._num_slow = 0
        self._round: int | None = None
        self._num_to_skip = 0

    def step_ended(self, trial: Decision, settings: Settings, step_s: float, round_number: int = 0) -> float | None:
        """Return the usual time of the newest steps, if it shows that the trial has failed."""
        if round_number != self._round:
            self._num_to_skip = ROUND_SETTLES if self._round is not None else 0
            self._round = round_number
            self._forget()
        if trial is not self._trial:
            self._trial, self._limit_s = trial, give_up_above_s(trial)
            self._forget()
        chosen = trial.chosen
        # Steps of other numbers of workers, as after a loss, do not measure the trial.
        is_run = (settings.num_workers, settings.intra_op_threads) == (chosen.num_workers, chosen.intra_op_threads)
        if chosen.intra_op_threads <= trial.current.intra_op_threads or not is_run:
            self._forget()
            return None
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        self._add(step_s)
        num_steps = max(len(self._newest_s), self._min_steps)
        if self._span_s < self._min_s or 2 * self._num_slow < num_steps:
            return None
        usual_s = median([*[0.0] * (num_steps - len(self._newest_s)), *self._newest_s])
        return usual_s if usual_s > self._limit_s else None

    def _add(self, step_s: float) -> None:
        newest_s = self._newest_s
        newest_s.append(step_s)
        self._span_s += step_s
        self._num_slow += step_s > self._limit_s
        while len(newest_s) > self._min_steps and self._span_s - newest_s[0] >= self._min_s:
            oldest_s = newest_s.popleft()
            self._span_s -= oldest_s
            self._num_slow -= oldest_s > self._limit_s

    def _forget(self) -> None:
        self._newest_s.clear()
        self._span_s, self._num_slow = 0.0, 0


def retreat(trial: Decision, step_time_s: float, *, decision_id: int, at: float) -> Decision:
    """Return from a failed trial to the best settings measured before it.

    Needs no model: a fit takes seconds on a busy machine, while the trial's slow steps continue.
    """
    known = {candidate.settings: candidate for candidate in trial.candidates}
    home = known[trial.home]
    left_s = trial.left_s / trial.observed_step_time_s * step_time_s if trial.left_s is not None else None
    failed = replace(
        trial.choice,
        step_time_s=step_time_s,
        low_s=step_time_s,
        high_s=step_time_s,
        samples_per_s=home.samples_per_s * home.step_time_s / step_time_s,
        worth_s=0.0,
        measured=True,
        note="runs now",
        on_front=False,
    )
    reason = (
        f"back to {trial.home.short}: {trial.chosen.short} was given up after a few steps of {step_text(step_time_s)}; "
        f"{step_text(trial.choice.step_time_s)} were predicted ({step_text(trial.choice.low_s)} to "
        f"{step_text(trial.choice.high_s)}), and {step_text(trial.observed_step_time_s)} measured before"
    )
    return replace(
        trial,
        decision_id=decision_id,
        at=at,
        current=trial.chosen,
        chosen=trial.home,
        reason=reason,
        candidates=tuple(sorted((home, failed), key=lambda candidate: candidate.settings)),
        observed_step_time_s=step_time_s,
        predicted_step_time_s=home.step_time_s,
        explored=False,
        num_considered=2,
        left_s=left_s,
        node_cores=0.0,
        node_memory_bytes=0,
        break_even_s=None,
        fallback=None,
    )


# Choose the settings that a running job should have. The caller decides when to plan, and carries the decision out. Nothing is
# kept between calls: earlier trials are in the windows and the past decisions passed in.


def plan(
    request: PlanRequest,
    model: Model,
    limits: Limits,
    objective: Objective,
    *,
    decision_id: int,
    at: float,
    memory: MemoryModel | None = None,
    gpu_memory: MemoryModel | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Decision:
    """Return the settings that serve `objective` best, with a constant global batch.

    Measured settings are judged by their windows. Among the others, the planner tries those with the largest expected
    improvement over the best measured ones (Jones, Schonlau and Welch, J. Global Optimization 13, 1998). It does so while the
    expected gain over the remaining work exceeds the cost of the trial. Once measured, settings are either better or never
    tried again. The first trial of a job uses the final settings of similar jobs, if there were any.

    Args:
        model: fitted to all windows of this job so far.
        at: seconds since the epoch, recorded only.
        memory: excludes settings with an upper bound above the worker's limit; None excludes nothing.
        gpu_memory: the same for the worker's GPU, where shares are not computed in parts. Else more parts take longer.

    Example:
        >>> from lightning_dlrover.tuning import StepTimeModel
        >>> request = PlanRequest(windows, node_cores=4, remaining_samples=1e6)  # `windows`: step profiles of one job
        >>> decision = plan(request, StepTimeModel.fit(windows), Limits(1, 4), Objective(), decision_id=1, at=0.0)
        >>> 1 <= decision.chosen_workers <= 4
        True
    """
    table = CandidateTable.of(request, model, limits, objective, memory, rules, gpu_memory)
    search = _Search(request, limits, objective, rules, table)
    index, explored, reason = search.choose()
    reason += search.price_of_list(index)
    home = search.best_measured() if explored else table.now
    now_s = max(request.current.step_time_s, float(table.step_s[table.now]))
    if objective.budget is not None and table.cost_per_hour[table.now] is None:
        reason += f"; the budget of {objective.budget:g} cannot be kept: the price of a GPU is unknown (gpu_hour)"
    return Decision(
        decision_id=decision_id,
        at=at,
        current=table.settings[table.now],
        chosen=table.settings[index],
        reason=reason,
        candidates=table.candidates(keep=(table.now, index, home)),
        observed_step_time_s=request.current.step_time_s,
        predicted_step_time_s=float(table.step_s[index]),
        explored=explored,
        objective=objective.describe(),
        num_considered=len(table.settings),
        num_windows=len(request.windows),
        left_s=None if request.remaining_samples is None else table.left_s,
        change_cost_s=table.change_cost_s(table.now, index),
        spent=request.spent,
        node_cores=float(table.node_cores[index]) if table.node_cores[index] > table.node_cores[table.now] else 0.0,
        node_memory_bytes=table.node_memory_bytes[index],
        # Longer steps break even where the settings cost less.
        break_even_s=now_s * max(1.0, float(table.step_s[index] / table.loss[index])) if explored else None,
        fallback=table.settings[home] if explored else None,
    )


@dataclass(frozen=True)
class _Search:
    """The choice among all settings. Each rule is one method and works on indices."""

    request: PlanRequest
    limits: Limits
    objective: Objective
    rules: Rules
    table: CandidateTable

    def choose(self) -> tuple[int, bool, str]:
        """Return the index of the settings, whether they are an experiment, and the reason."""
        table, now = self.table, self.table.now
        allowed = self._allowed
        if not allowed:
            return now, False, f"{self._stay}: no settings within the limits can be run ({table.notes[now] or 'see the notes'})"
        if not self.limits.allows(table.settings[now]):
            return self._nearest(allowed), False, self._reason_to_return(self._nearest(allowed))
        if table.left_s <= self.request.retune_cost_s:
            reason = f"{seconds_text(table.left_s)} of work are left, a change costs {seconds_text(self.request.retune_cost_s)}"
            return now, False, f"{self._stay}: {reason}"
        if (warm := self._suggested(allowed)) is not None:
            return warm, True, self._reason_to_follow(warm)
        loss, promise = self._scale()
        best = self.best_measured()
        # A failed trial is left first, before another one starts.
        fled = best != now and self._has_failed()
        trial, worth_s = self._trial(allowed, best, loss, promise) if not fled else (None, 0.0)
        if trial is not None:
            return trial, True, self._reason_to_try(trial, best, worth_s)
        if best != now and self._is_worth_moving(best, loss):
            return best, False, self._reason_to_move(best)
        return now, False, self._reason_to_stay(allowed, best)

    @cached_property
    def _allowed(self) -> Sequence[int]:
        return [i for i, s in enumerate(self.table.settings) if not self.table.notes[i] and self.limits.allows(s)]

    # --- rules -----------------------------------------------------------------------------------------------------------

    def _nearest(self, allowed: Sequence[int]) -> int:
        """Return the settings within the limits with the nearest number of workers.

        Only a loss leads to a number between two of the job's sizes. The workers that are left train on with their settings
        until it is made up for.
        """
        table, now = self.table, self.table.settings[self.table.now]
        workers, limits = now.num_workers, self.limits
        is_loss = limits.min_workers <= workers <= limits.max_workers and not limits.lists(workers)

        def key(index: int) -> tuple[bool, int, bool, float]:
            there = table.settings[index]
            is_other = replace(there, num_workers=workers) != now
            more = there.num_workers - workers
            return is_loss and more < 0, abs(more), is_loss and is_other, float(table.loss[index])

        return min(allowed, key=key)

    def price_of_list(self, chosen: int) -> str:
        """Return what would be better than the chosen settings if the job's sizes allowed it, as the end of a reason."""
        table, note = self.table, not_listed(self.limits)
        loss, _ = self._scale()
        others = [i for i, why in enumerate(table.notes) if self.limits.listed_sizes and why == note]
        best = min(others, key=lambda i: float(loss[i]), default=chosen)
        if not loss[best] < (1 - self.rules.min_gain) * loss[chosen]:
            return ""
        known = "measured" if table.measured[best] else "predicted"
        return f"; {table.settings[best].short} would take {step_text(table.step_s[best])} ({known}), but {note}"

    def _suggested(self, allowed: Sequence[int]) -> int | None:
        """Return the settings that similar jobs ended with.

        None after this job's own experiments, or if the change does not pay.
        """
        suggestion, table = self.request.suggestion, self.table
        if suggestion is None or any(d.explored for d in self.request.past):
            return None
        fits = [i for i in allowed if table.settings[i] == suggestion.settings]
        if not fits or table.measured[fits[0]]:
            return None
        if table.step_s[table.now] <= table.bound_s[table.now] and table.step_s[fits[0]] > table.bound_s[fits[0]]:
            return None  # predicted to miss the deadline or the budget, which the present settings keep
        gain_s = table.left_s * (1 - 1 / suggestion.gain)
        return fits[0] if gain_s > table.change_cost_s(table.now, fits[0]) + self.rules.min_gain * table.left_s else None

    def _has_failed(self) -> bool:
        """Return whether the present settings are a trial far outside its prediction."""
        last = max(self.request.past, key=lambda d: d.decision_id, default=None)
        runs = self.table.settings[self.table.now]
        return last is not None and last.chosen == runs and has_failed(last, self.request.current.step_time_s)

    def _scale(self) -> tuple[Floats, Floats]:
        """Return the loss to minimise, and the step time above which settings do not count.

        While no measured settings keep the deadline or the budget, the loss is the extent by which they miss it.
        """
        table = self.table
        able = table.measured & np.array([not note for note in table.notes])
        if np.isinf(table.bound_s).all() or (table.step_s[able] <= table.bound_s[able]).any():
            return np.where(table.step_s <= table.bound_s, table.loss, math.inf), table.bound_s
        missed = table.step_s / table.bound_s
        return missed * table.loss[table.now] / missed[table.now], np.full(len(missed), math.inf)

    def best_measured(self) -> int:
        """Return the measured settings with the smallest loss."""
        loss, _ = self._scale()
        measured = [i for i in self._allowed if self.table.measured[i]]
        return min(measured, key=lambda i: (loss[i], i != self.table.now), default=self.table.now)

    def _trial(self, allowed: Sequence[int], best: int, loss: Floats, bound_s: Floats) -> tuple[int | None, float]:
        """Return the untried settings with the largest worth, and that worth in seconds; None if no trial pays."""
        table, rules = self.table, self.rules
        explored = [d.chosen for d in self.request.past if d.explored]
        if len(explored) >= rules.max_trials or not math.isfinite(loss[best]):
            return None, 0.0
        workers = {s.num_workers for s, known in zip(table.settings, table.measured, strict=True) if known}
        able = [
            i
            for i in allowed
            if not table.measured[i]
            and table.settings[i] not in explored
            and any(1 / rules.max_stretch <= table.settings[i].num_workers / w <= rules.max_stretch for w in workers)
        ]
        if not able:
            return None, 0.0
        at = np.array(able)
        factor = np.where(np.isfinite(loss[at]), loss[at], table.loss[at]) / table.step_s[at]  # of a loss to a step time
        gain = expected_improvement(table.step_s[at], table.sigma[at], factor, float(loss[best]), bound_s[at])
        gain_s = table.left_s * gain / loss[table.now]
        cost_s = np.array([self._trial_cost_s(i, best) for i in able])
        promising = gain >= rules.min_explore_gain * loss[best]
        promising &= cost_s <= rules.max_explore_cost * table.left_s
        worth_s = np.where(promising, gain_s - cost_s, -math.inf)
        top = int(np.argmax(worth_s))
        return (able[top], float(worth_s[top])) if worth_s[top] > 0 else (None, 0.0)

    def _trial_cost_s(self, index: int, best: int) -> float:
        """Return the seconds lost if the settings are as bad as their interval allows and are left again."""
        table = self.table
        slower = max(0.0, 1 - float(table.step_s[table.now] / table.high_s[index]))
        return table.change_cost_s(table.now, index) + table.change_cost_s(index, best) + self.rules.trial_s * slower

    def _is_worth_moving(self, best: int, loss: Floats) -> bool:
        table = self.table
        # A lost worker and a trial are not reversals of an earlier decision.
        left = sum(d.current == table.settings[best] and d.is_change and not d.explored for d in self.request.past)
        gain = 1 - float(loss[best] / loss[table.now]) if math.isfinite(loss[table.now]) else 1.0
        enough = gain >= max(self.rules.min_gain * 2**left, self._gain_by_chance(best))
        return enough and gain * table.left_s > 2 * table.change_cost_s(table.now, best)

    def _gain_by_chance(self, best: int) -> float:
        """Return the gain that noise alone exceeds once in twenty times; 0 on the return from a trial, to any settings."""
        past = max(self.request.past, key=lambda d: d.decision_id, default=None)
        table = self.table
        if past is None or (past.explored and past.chosen == table.settings[table.now]):
            return 0.0
        of_windows = table.noise**2 * sum(1 / max(1, table.num_windows[i]) for i in (best, table.now))
        return NORMAL_WIDTH * math.sqrt(of_windows + 2 * table.drift**2)

    # --- reasons ---------------------------------------------------------------------------------------------------------

    @property
    def _stay(self) -> str:
        return f"stay at {counted(self.table.settings[self.table.now].num_workers, 'worker')}"

    def _move(self, to: int) -> str:
        return describe_change(self.table.settings[self.table.now], self.table.settings[to])

    def _times(self, to: int) -> str:
        return f"{step_text(self.table.step_s[to])} instead of {step_text(self.table.step_s[self.table.now])} a step"

    def _interval(self, of: int) -> str:
        return f"{step_text(self.table.low_s[of])} to {step_text(self.table.high_s[of])}"

    def _left(self) -> str:
        known = self.request.remaining_samples is not None
        return f"{seconds_text(self.table.left_s)} left" if known else f"{seconds_text(self.table.left_s)} assumed to be left"

    def _reason_to_return(self, to: int) -> str:
        workers = self.table.settings[self.table.now].num_workers
        if not self.limits.lists(workers):
            return f"{self._move(to)}: {not_listed(self.limits)}"
        limits = f"{self.limits.min_workers} to {self.limits.max_workers} workers"
        return f"{self._move(to)}: {workers} is outside the limits of {limits}"

    def _reason_to_follow(self, warm: int) -> str:
        suggestion = self.request.suggestion
        assert suggestion is not None
        table = self.table
        predicted = f"{step_text(table.step_s[warm])} ({self._interval(warm)})"
        return f"{self._move(warm)}: {suggestion.reason}; predicted here: {predicted}"

    def _reason_to_try(self, trial: int, best: int, worth_s: float) -> str:
        table = self.table
        so_far = "" if best == table.now else f", best so far {step_text(table.step_s[best])}"
        return (
            f"{self._move(trial)}: never tried; {self._times(trial)} predicted ({self._interval(trial)}{so_far}); "
            f"trying costs at most {seconds_text(self._trial_cost_s(trial, best))} of the {self._left()} and "
            f"is expected to save {seconds_text(worth_s)}"
        )

    def _reason_to_move(self, best: int) -> str:
        table = self.table
        saved_s = float(table.step_s[table.now] - table.step_s[best])
        if saved_s <= 0:
            cheaper = f"{table.cores[table.now]:g} -> {table.cores[best]:g} cores"
            return f"{self._move(best)}: {self._times(best)}, {cheaper}; {self.objective.describe()}"
        steps = math.ceil(table.change_cost_s(table.now, best) / saved_s)
        return (
            f"{self._move(best)}: {self._times(best)}, both measured; ends {seconds_text(table.worth_s(best))} sooner of "
            f"{self._left()}; the change is repaid after {steps} steps"
        )

    def _reason_to_stay(self, allowed: Sequence[int], best: int) -> str:
        table = self.table
        if len(allowed) == 1:
            return f"{self._stay}: no other settings are allowed"
        if best != table.now:
            worth_s = table.worth_s(best)
            gain = f"gain {seconds_text(worth_s)} of {self._left()}, too little" if worth_s > 0 else "cost more than it gains"
            return f"{self._stay}: {self._move(best)} would {gain}" + (" for a change" if worth_s > 0 else "")
        others = [i for i in allowed if i != table.now]
        next_best = min(others, key=lambda i: float(table.loss[i]))
        known = "measured" if table.measured[next_best] else "predicted"
        return (
            f"{self._stay}: {step_text(table.step_s[table.now])} a step; the next best ({self._move(next_best)}) takes "
            f"{step_text(table.step_s[next_best])} ({known}, {self._interval(next_best)}), "
            f"which is not worth a trial or a change with {self._left()}"
        )


def expected_improvement(step_s: Floats, sigma: Floats, factor: Floats, best: float, bound_s: Floats) -> Floats:
    """Return the mean of max(0, best - factor * s) for log-normal step times s; only times up to ``bound_s`` count.

    Args:
        step_s: medians, shape ``(n,)``; sigma: standard deviations of the log.
        best: the smallest measured loss.
    """
    from scipy.special import ndtr

    mean_s = step_s * np.exp(sigma**2 / 2)
    top = np.minimum(best / factor, bound_s)
    z = (np.log(top) - np.log(step_s)) / sigma
    gain: Floats = best * ndtr(z) - factor * mean_s * ndtr(z - sigma)
    return np.maximum(gain, 0.0)


def describe_change(now: Settings, then: Settings) -> str:
    """Describe a change in words: `1 -> 2 workers, 0 -> 1 loader worker each`."""
    names = {
        "num_workers": ("worker", "workers"),
        "loader_workers": ("loader worker each", "loader workers each"),
        "intra_op_threads": ("thread each", "threads each"),
        "prefetch_factor": ("batch prefetched", "batches prefetched"),
    }
    changed = [
        f"{getattr(now, name)} -> {counted(getattr(then, name), one, more)}"
        for name, (one, more) in names.items()
        if getattr(now, name) != getattr(then, name)
    ]
    return ", ".join(changed) or f"{counted(now.num_workers, 'worker')} as now"
