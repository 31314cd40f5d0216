"""Publish a worker's measurements, and rank 0's windows, decisions and outcomes, as records and events in etcd.

`profile_log.py` and `decision_log.py` choose the few that are written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_dlrover.learn.decision_log import DecisionLog, rounded_candidates
from lightning_dlrover.learn.profile_log import PublishedProfile, WindowLog, rounded
from lightning_dlrover.learn.write_budget import PROGRESS, WriteBudget, stored_bytes
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.plan import Decision, Outcome
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.job.events import DecisionMade, OutcomeJudged, WindowMeasured, record_of
from lightning_dlrover.rdzv.job.records import ProgressRecord, encode
from lightning_dlrover.rdzv.live.shared_records import SharedRecords

PROGRESS_EVERY_S = 8.0  # minimum seconds between two records of the job's progress


class Publisher:
    """The published state of one worker.

    Args:
        records: the job's shared records; None: the worker trains alone, and nothing is published.

    Attributes:
        decisions: the decisions that were recorded.
    """

    def __init__(self, records: SharedRecords | None) -> None:
        self.decisions = DecisionLog()
        self._records = records
        self._profile = PublishedProfile()
        self._windows = WindowLog()
        self._progress_at = -PROGRESS_EVERY_S  # time of the newest record of the job's progress, on the monotonic clock
        self._progress_budget = WriteBudget(PROGRESS)

    def publish(self, profile: StepProfile, progress: ProgressRecord | None, now: float) -> None:
        """Publish this worker's newest window, and the job's progress.

        Args:
            progress: from rank 0 only.
            now: seconds of a monotonic clock.

        Raises:
            EtcdError: etcd has not taken a record.
        """
        if self._records is None:
            return
        payload = encode(profile)
        if self._profile.is_due(profile, stored_bytes(payload), now):
            try:
                self._records.put_profile(payload)
            except EtcdError:
                self._profile.was_lost()
                raise
        if progress is None or now - self._progress_at < PROGRESS_EVERY_S:
            return
        payload = encode(progress)
        if self._progress_budget.take(stored_bytes(payload), now):
            self._records.put_progress(payload)
            self._progress_at = now

    def log_window(self, profile: StepProfile, now: float) -> None:
        """Log a window of rank 0 in the job's events."""
        if self._records is not None:
            self._log(self._windows.add(profile, now))

    def log_singly(self, profile: StepProfile) -> None:
        """Log a window of rank 0 at once, apart from all others."""
        self._log([profile])

    def flush(self) -> None:
        """Log the windows that were kept back: this worker's time as rank 0 ends."""
        self._log(self._windows.flush())

    def log_decision(self, decision: Decision, now: float, *, is_carried_out: bool) -> Decision | None:
        """Log a decision in the job's events, if it is one of the few to be recorded. Return it as recorded, else None."""
        decision = rounded_candidates(decision)
        event = DecisionMade(decision.to_data())
        num_bytes = stored_bytes(encode(record_of(event, decision.reason)))
        if not self.decisions.is_due(decision, num_bytes, now, is_carried_out=is_carried_out):
            return None
        if self._records is not None:
            self._records.event(event, decision.reason)
        return decision

    def log_outcome(self, outcome: Outcome) -> None:
        if self._records is not None:
            self._records.event(OutcomeJudged(dataclasses.asdict(outcome)), outcome.text)

    def _log(self, windows: Sequence[StepProfile]) -> None:
        if self._records is not None:
            for window in windows:
                self._records.event(WindowMeasured(dataclasses.asdict(rounded(window))), "")
