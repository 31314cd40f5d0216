"""When a trial is given up, and where the job goes then. On shared cores a step may take a hundred times longer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median

from lightning_dlrover.planner.plan import Decision, Settings, step_text

__all__ = ["TrialWatch", "give_up_above_s", "has_failed", "retreat"]

FAR_OUT = 2.0
"""Slowdown at which a trial has failed, relative to steps that would be no worse than those before it."""

STEPS_OF_PROOF = 3
PROOF_S = 1.5
"""Minimum number and minimum duration of the newest steps whose median shows whether a trial has failed.

On a shared core a step of any settings is slow now and then. Two slow steps are the median of three, whatever the third one.
Other programs also take a core away for most of a second, which is many short steps. These limits and `FAR_OUT` were chosen on
recorded steps; the planner's page of the documentation has the figures.
"""


ROUND_SETTLES = 2
"""Number of a round's first steps that do not count: the pause before it, and the step that fills the loaders again."""


def has_failed(decision: Decision, step_time_s: float) -> bool:
    """Return whether a trial's steps are so slow that a few of them are enough to abandon it."""
    return step_time_s > give_up_above_s(decision)


def give_up_above_s(decision: Decision) -> float:
    """Return the step time above which a trial has failed; infinite unless `decision` is a trial."""
    if not decision.explored or not decision.is_change:
        return math.inf
    # The interval of a prediction may be wide. A trial that is as slow as its end is of no use either.
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

    Needs no model: a fit takes seconds on a busy machine, and the trial's slow steps would go on meanwhile.
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
