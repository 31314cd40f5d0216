"""Choose the planner's decisions to write to etcd: every one that is carried out, and few others.

The planner decides every few seconds, mostly to stay, and a decision with its candidates is several kilobytes. Pure: no clock,
no connection.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_dlrover.learn.profile_log import DIGITS
from lightning_dlrover.learn.write_budget import DECISIONS, WriteBudget
from lightning_dlrover.planner.plan import Candidate, Decision

REPEAT_EVERY_S = 1800.0
"""Minimum seconds between records of decisions that neither are carried out nor differ from the one before."""


class DecisionLog:
    """Rank 0's decisions that become events of the job's history."""

    def __init__(self) -> None:
        self._last: Decision | None = None
        self._was_carried_out = False
        self._recorded_at = 0.0
        self._budget = WriteBudget(DECISIONS)

    def is_due(self, decision: Decision, num_bytes: int, now: float, *, is_carried_out: bool) -> bool:
        """Whether a decision is to be recorded. If so, it counts as recorded.

        Args:
            num_bytes: bytes that it takes in etcd.
            now: seconds of a monotonic clock.
            is_carried_out: whether it changes the job; otherwise it stays, or only recommends.
        """
        if is_carried_out or self._was_carried_out:  # the decision after a change ends it, for people as for the planner
            self._budget.charge(num_bytes, now)
        else:
            last = self._last
            is_repeated = last is not None and (last.current, last.chosen) == (decision.current, decision.chosen)
            if is_repeated and now - self._recorded_at < REPEAT_EVERY_S:
                return False
            if not self._budget.take(num_bytes, now):
                return False
        self._last, self._was_carried_out, self._recorded_at = decision, is_carried_out, now
        return True

    def may_recommend(self, num_bytes: int, now: float) -> bool:
        """Whether a plan may be written that only recommends. If so, it counts as written.

        With noise two numbers of workers are the better one in turn.
        """
        return self._budget.take(num_bytes, now)


def rounded_candidates(decision: Decision) -> Decision:
    """Return the decision with its candidates' figures rounded to their precision, because its record is stored in etcd."""

    def short(value: Any) -> Any:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    def shortened(candidate: Candidate) -> Candidate:
        figures = {f.name: short(getattr(candidate, f.name)) for f in dataclasses.fields(candidate)}
        return Candidate(**figures)

    return dataclasses.replace(decision, candidates=tuple(map(shortened, decision.candidates)))
