"""Collect the rows that one loader's batches of a stream leave out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from lightning_dlrover.data.left_out import LeftOut
from lightning_dlrover.rdzv.job.events import RowsSkipped
from lightning_dlrover.report.skipped import merged

__all__ = ["SkippedRows"]

MAX_LISTED = 500
"""Ranges of rows that one worker puts on record for a loader. A damaged store, or a compacted topic, has any number of them."""


class SkippedRows:
    """Rows that one loader's batches leave out. Each is news once, however many batches and epochs have it."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[int, int]]] = {}  # ranges of rows by shard
        self._news: dict[int, list[LeftOut]] = {}
        self._num_listed = 0
        self._is_cut_short = False  # whether a record has told that further rows are not listed

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def add(self, found: Iterable[LeftOut]) -> None:
        for each in found:
            known = self._known.setdefault(each.shard, [])
            if not self._is_cut_short if each.is_cut_short else _added(known, each.first, each.stop):
                self._news.setdefault(each.shard, []).append(each)

    def take_news(self, fit: int, number: int) -> list[RowsSkipped]:
        """Return records of the rows found since the last call.

        Args:
            fit, number: the script's `fit`, and the loader in it.
        """
        news, self._news = self._news, {}
        found: list[RowsSkipped] = []
        for shard, rows in news.items():
            listed = [each for each in rows if not each.is_cut_short][: MAX_LISTED - self._num_listed]
            self._num_listed += len(listed)
            file, reason = rows[0].key, rows[0].reason
            if listed:
                ranges = merged((each.first, each.stop) for each in listed)
                found.append(RowsSkipped(fit, number, shard, file, list(map(list, ranges)), reason))
            if len(listed) < len(rows) and not self._is_cut_short:
                self._is_cut_short = True
                found.append(RowsSkipped(fit, number, shard, file, [], reason))
        return found


def _added(known: list[tuple[int, int]], first: int, stop: int) -> bool:
    """Add a half-open range to ascending ones that neither overlap nor touch. Return False if one of them contains it.

    Only the ranges that it touches are merged, because a damaged store has thousands, and training waits for this.
    """
    begin = bisect_left(known, first, key=lambda span: span[1])
    end = bisect_right(known, stop, key=lambda span: span[0])
    if begin < end:
        if known[begin][0] <= first and stop <= known[begin][1]:
            return False
        first, stop = min(first, known[begin][0]), max(stop, known[end - 1][1])
    known[begin:end] = [(first, stop)]
    return True
