"""Put on record which rows of streams this worker's batches leave out."""

from __future__ import annotations

import time

from lightning_dlrover.live.ports import Batches, Job
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.rdzv.job.events import RowsSkipped
from lightning_dlrover.report.skipped import shown_ranges

__all__ = ["SkippedReports"]

PUBLISH_EVERY_S = 2.0
"""Minimum seconds between two records, unless a fit ends: each corrupt row group is news."""


class SkippedReports:
    """Puts rows that the training loaders of a fit leave out on record."""

    def __init__(self, job: Job, batches: Batches, position: FitPosition) -> None:
        self._job = job
        self._batches = batches
        self._position = position
        self._next_at = 0.0

    def publish(self, is_last: bool = False) -> None:
        """Put news on record, unless there was a record a moment ago. Never waits for etcd.

        Args:
            is_last: whether the fit ends, so that nothing may be left for a later call.
        """
        loaders = self._batches.all if self._batches.are_made else []
        now = time.monotonic()
        if not any(loader.skipped.has_news for loader in loaders) or (now < self._next_at and not is_last):
            return
        self._next_at = now + PUBLISH_EVERY_S
        for number, loader in enumerate(loaders):
            for skipped in loader.skipped.take_news(self._position.fit, number):
                self._job.event(skipped, _sentence(skipped))


def _sentence(skipped: RowsSkipped) -> str:
    if not skipped.ranges:
        return f"leaves out more rows of {skipped.file} and other files than are listed here"
    ranges = [(first, stop) for first, stop in skipped.ranges]
    num_rows = sum(stop - first for first, stop in ranges)
    return f"leaves out {num_rows} rows of {skipped.file} (rows {shown_ranges(ranges)}): {skipped.reason}"
