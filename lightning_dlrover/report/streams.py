"""Read from a job's history its streams, their progress, and the rows that were skipped."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_dlrover.codec import RecordError, from_fields
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.events import FitFinished, IterableOpened, RowsSkipped, StreamOpened, WindowMeasured, events_of
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.tuning.samples import StepProfile

MAX_SHOWN_RANGES = 3  # ranges of rows, in one readable line

Ranges = Sequence[tuple[int, int]]  # half-open ranges of rows


@dataclass(frozen=True)
class SkippedFile:
    """Skipped rows of one file or partition."""

    file: str
    ranges: tuple[tuple[int, int], ...]  # ascending, apart from each other
    reason: str  # reason of the rows that were found first

    @property
    def num_rows(self) -> int:
        return sum(stop - first for first, stop in self.ranges)


@dataclass(frozen=True)
class SkippedRows:
    """Skipped rows of a stream."""

    files: tuple[SkippedFile, ...] = ()
    is_complete: bool = True  # whether all of them were recorded

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
    """Return the recorded rows that the batches of a stream skip in its fit."""
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
    """Return the number of skipped rows, in one line; empty without any."""
    if not skipped.files:
        return ""
    least = "" if skipped.is_complete else "at least "
    where = f"in {len(skipped.files)} files" if len(skipped.files) > 1 else f"in {skipped.files[0].file}"
    return f"{least}{counted(skipped.num_rows, 'row')} skipped {where}"


def shown_ranges(ranges: Ranges) -> str:
    """Return ranges of rows in readable form, with both ends included."""
    shown = [f"{first} to {stop - 1}" if stop - first > 1 else str(first) for first, stop in ranges[:MAX_SHOWN_RANGES]]
    more = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


@dataclass(frozen=True)
class ReadStreams:
    """The streams of a job's newest fit."""

    streams: tuple[StreamOpened, ...]
    at: float  # begin of the fit, seconds since the epoch
    finished_step: int | None = None  # optimizer updates at the end of the fit; None: it has not finished
    windows: tuple[tuple[StreamOpened, ...], ...] = ()  # of each stream, its records by epoch; more than one if it grows

    def window_of(self, stream: StreamOpened, step: int) -> StreamOpened:
        """Return the record that an optimizer update, or a batch where updates vary, belongs to."""
        windows = next((each for each in self.windows if stream in each), (stream,))
        found = [each for each in windows if step > (each.steps_before if each.accumulate else each.batches_before)]
        return found[-1] if found else windows[0]


@dataclass(frozen=True)
class Skew:
    """How differently the workers of a round wait for data, in seconds of each step."""

    longest_s: float
    worker_id: str  # the worker that waits longest
    median_s: float
    num_workers: int  # number of workers that were measured


@dataclass(frozen=True)
class Standing:
    """A fit's position."""

    batches: int  # global batches since the beginning of the epoch in which the fit began
    age_s: float  # seconds since it was measured
    batches_per_s: float | None = None  # None: unknown
    skew: Skew | None = None  # None: fewer than two workers were measured, or the fit has finished


def read_streams(events: Sequence[EventRecord]) -> ReadStreams | None:
    """Return the streams of the newest fit; None if it has none."""
    found = [(record.at, opened) for record, opened in events_of(events, StreamOpened)]
    if not found:
        return None
    fit = max(found, key=lambda each: each[0])[1].fit
    by_number: dict[int, list[tuple[float, StreamOpened]]] = {}
    for at, opened in sorted(found, key=lambda each: each[0], reverse=True):
        if opened.fit == fit:
            by_number.setdefault(opened.number, []).append((at, opened))
    # Workers that restart the fit after the loss of all write the records again, counted from their checkpoint.
    oldest = {number: _oldest_equal(newest_first) for number, newest_first in by_number.items()}
    windows = tuple(_windows(by_number[number]) for number in sorted(by_number))
    first = min(at for at, _ in oldest.values())
    finished = [done.global_step for record, done in events_of(events, FitFinished) if record.at >= first]
    streams = tuple(oldest[number][1] for number in sorted(oldest))
    return ReadStreams(streams, first, finished[-1] if finished else None, windows)


def _windows(newest_first: Sequence[tuple[float, StreamOpened]]) -> tuple[StreamOpened, ...]:
    """Return the records of a stream by epoch. A job that restarted from a checkpoint has written some again."""
    newest = newest_first[0][1]
    if not newest.grows:
        return (newest,)
    found: dict[int, StreamOpened] = {}
    for _, opened in newest_first:
        if not found or opened.epoch < min(found):
            found[opened.epoch] = opened
    return tuple(found[epoch] for epoch in sorted(found))


def _oldest_equal(newest_first: Sequence[tuple[float, StreamOpened]]) -> tuple[float, StreamOpened]:
    """Return the oldest record that agrees with the newest one on the rows of each step."""
    _, newest = oldest = newest_first[0]
    if newest.grows:
        return oldest
    for at, older in newest_first[1:]:
        epochs = newest.epoch - older.epoch
        batches_before = newest.batches_before - epochs * newest.epoch_batches
        steps_before = newest.steps_before - epochs * steps_per_epoch(newest)
        if older != replace(newest, epoch=older.epoch, batches_before=batches_before, steps_before=steps_before):
            break
        oldest = at, older
    return oldest


def steps_per_epoch(stream: StreamOpened) -> int:
    """Return the optimizer updates of an epoch; its batches, if their number per update varies."""
    return -(-stream.epoch_batches // max(1, stream.accumulate))


def standing(
    found: ReadStreams, profiles: Iterable[StepProfile], events: Sequence[EventRecord], now: float, is_training: bool
) -> Standing | None:
    """Return how far the fit is; None if nothing has measured it.

    While nothing changes, windows of steps are published every few minutes only. A job that trains is assumed to continue at
    the pace of the newest one.

    Args:
        profiles: newest windows of the workers.
        now: seconds since the epoch.
    """
    stream, profiles = found.streams[0], list(profiles)
    windows = [window for window in (*profiles, *_logged(events)) if window.at >= found.at and window.global_rank == 0]
    newest = max(windows, key=lambda window: window.at, default=None)
    rate = 1 / newest.step_time_s if newest is not None and newest.step_time_s > 0 else None
    if found.finished_step is not None and stream.accumulate:
        epochs, steps = divmod(found.finished_step - stream.steps_before, steps_per_epoch(stream))
        return Standing(epochs * stream.epoch_batches + steps * stream.accumulate, 0.0, rate)
    if newest is None:
        return None
    measured = max(0, newest.first_step + newest.num_steps - stream.batches_before)
    age_s = max(0.0, now - newest.at)
    batches = measured + int(age_s * rate if is_training and rate is not None else 0)
    return Standing(batches, age_s, rate, _skew([window for window in profiles if window.at >= found.at]))


def _skew(profiles: Sequence[StepProfile]) -> Skew | None:
    """Compare the workers of the newest round."""
    newest = max((window.round_number for window in profiles), default=0)
    windows = [window for window in profiles if window.round_number == newest]
    if len(windows) < 2:
        return None
    slowest = max(windows, key=lambda window: window.data_wait_s)
    median_s = statistics.median(window.data_wait_s for window in windows)
    return Skew(slowest.data_wait_s, slowest.worker_id, median_s, len(windows))


def _logged(events: Sequence[EventRecord]) -> Iterable[StepProfile]:
    for _, measured in events_of(events, WindowMeasured):
        try:
            yield from_fields(StepProfile, measured.document, "a window")
        except RecordError:
            continue


def guarantee(stream: StreamOpened) -> str:
    """Return how often an epoch trains each row of a stream."""
    used = min(stream.num_rows, min(stream.epoch_batches, stream.own_batches) * stream.batch_size)
    if stream.cycles and stream.epoch_batches > stream.own_batches:
        return "each row at least once, as the rows begin again within an epoch"
    if used < stream.num_rows:
        return f"each row at most once, {stream.num_rows - used} left out of each epoch"
    return "each row exactly once"


def described(stream: StreamOpened) -> str:
    """Return a stream in one line."""
    kind = "file" if stream.ranges is None else "partition"
    files = counted(stream.num_shards, kind)
    where = f" in the window of epoch {stream.epoch}" if stream.grows else ""
    return f"{stream.source:.100}, {files}, {counted(stream.num_rows, 'row')}{where}: {guarantee(stream)}"


def read_iterables(events: Sequence[EventRecord]) -> list[IterableOpened]:
    """Return the loaders of an `IterableDataset` in the newest fit that has any."""
    found = [opened for _, opened in events_of(events, IterableOpened)]
    newest = max((opened.fit for opened in found), default=0)
    by_number = {opened.number: opened for opened in found if opened.fit == newest}
    return [by_number[number] for number in sorted(by_number)]


def described_iterable(opened: IterableOpened) -> str:
    """Return the guarantee for an `IterableDataset` in one line."""
    if opened.is_stateful:
        how = "stateful: joiners and checkpoints get its state"
    else:
        how = (
            "opaque: a joiner reads an epoch from its first row up to the others, which wait; it is refused if that takes "
            f"longer than {opened.max_catch_up_s:g} s"
        )
    return f"{opened.dataset}, an IterableDataset, each row exactly once; {how}"
