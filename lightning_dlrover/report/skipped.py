"""Read from a job's history which rows of a stream its batches leave out, each row counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.events import RowsSkipped, StreamOpened, events_of
from lightning_dlrover.rdzv.job.records import EventRecord

__all__ = ["SkippedFile", "SkippedRows", "described_skipped", "merged", "shown_ranges", "skipped_rows"]

MAX_SHOWN_RANGES = 3
"""Ranges of rows in one line for people."""

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of rows."""


@dataclass(frozen=True)
class SkippedFile:
    """Rows of one file or partition that are left out.

    Attributes:
        ranges: ascending, apart from each other.
        reason: reason of the rows that were found first.
    """

    file: str
    ranges: tuple[tuple[int, int], ...]
    reason: str

    @property
    def num_rows(self) -> int:
        return sum(stop - first for first, stop in self.ranges)


@dataclass(frozen=True)
class SkippedRows:
    """Rows of a stream that are left out.

    Attributes:
        is_complete: whether all of them are on record.
    """

    files: tuple[SkippedFile, ...] = ()
    is_complete: bool = True

    @property
    def num_rows(self) -> int:
        return sum(each.num_rows for each in self.files)


def merged(ranges: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Return half-open ranges as ascending ones that neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted((first, stop) for first, stop in ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((first, stop))
    return found


def skipped_rows(events: Sequence[EventRecord], opened: StreamOpened) -> SkippedRows:
    """Return the rows that the batches of a stream leave out in its fit, as far as they are on record."""
    by_shard: dict[int, list[RowsSkipped]] = {}
    for _, skipped in events_of(events, RowsSkipped):
        if (skipped.fit, skipped.number) == (opened.fit, opened.number):
            by_shard.setdefault(skipped.shard, []).append(skipped)
    files = tuple(
        SkippedFile(found[0].file, tuple(merged(each for one in found for each in one.ranges)), found[0].reason)
        for _, found in sorted(by_shard.items())
    )
    is_complete = all(skipped.ranges for found in by_shard.values() for skipped in found)
    return SkippedRows(tuple(each for each in files if each.ranges), is_complete)


def described_skipped(skipped: SkippedRows) -> str:
    """Return the number of rows that are left out, in one line; an empty text if there are none."""
    if not skipped.files:
        return ""
    least = "" if skipped.is_complete else "at least "
    where = f"in {len(skipped.files)} files" if len(skipped.files) > 1 else f"in {skipped.files[0].file}"
    return f"{least}{counted(skipped.num_rows, 'row')} skipped {where}"


def shown_ranges(ranges: Ranges) -> str:
    """Return ranges of rows for people, with both ends included."""
    shown = [f"{first} to {stop - 1}" if stop - first > 1 else str(first) for first, stop in ranges[:MAX_SHOWN_RANGES]]
    more = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
