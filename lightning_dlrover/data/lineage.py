"""Find the rows that a job has trained in each step, and its progress in each file, from the record of a stream.

Nothing is written while a job trains: its order follows from `StreamOpened` and the number of rows of each file. The files are
listed again, since a list of a hundred thousand is too large for etcd. A digest in the record shows whether they are still the
files of the job.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.data.file_source import files
from lightning_dlrover.data.kafka_source import Partition
from lightning_dlrover.data.lane_plan import STRIDE_OF_LAPS, LanePlan, Layout
from lightning_dlrover.data.parquet_source import parquet
from lightning_dlrover.data.source import DataError, Shard, Source
from lightning_dlrover.rdzv.job.events import StreamOpened
from lightning_dlrover.report.streams import steps_per_epoch


@dataclass(frozen=True)
class FileRows:
    """Rows of one file, as ranges with both ends included, counted from 0."""

    file: str
    ranges: list[tuple[int, int]]


@dataclass(frozen=True)
class RowPlace:
    """Where a row is trained: the epoch, its global batch from 0, and the job's optimizer update from 1."""

    epoch: int
    batch: int
    step: int | None  # None: the number of batches of an update varies


@dataclass(frozen=True)
class FilesProgress:
    """Numbers of files of which an epoch has used all rows, some, and none."""

    done: int
    in_work: int
    left: int


class Lineage:
    """A stream's rows by step. If the shards could not be listed (None), only numbers of rows are known."""

    def __init__(self, opened: StreamOpened, shards: Sequence[Shard] | None = None) -> None:
        self.opened = opened
        self._shards = shards
        self._layout = Layout(opened.batch_size, opened.slots, opened.cycle, opened.block_rows)

    def place_in_epoch(self, batches: int, is_over: bool = False) -> tuple[int, int]:
        """Return the epoch, and how many of its batches are done.

        Args:
            batches: done since the start of the epoch in which the fit began.
            is_over: whether no epoch follows a complete one.
        """
        size = max(1, self.opened.epoch_batches)
        if self.opened.grows:  # other epochs have other rows
            return self.opened.epoch, min(batches, size)
        epochs, rest = divmod(batches, size)
        if is_over and epochs and not rest:
            epochs, rest = epochs - 1, size
        return self.opened.epoch + epochs, rest

    def rows_done(self, batches_of_epoch: int) -> int:
        """Return how many rows the epoch's first batches have used, each counted once."""
        used = min(batches_of_epoch, self.opened.own_batches) * self.opened.batch_size
        return min(used, self.opened.num_rows)

    def files_progress(self, epoch: int, batches_of_epoch: int) -> FilesProgress | None:
        """Return the progress of the files; None if they are not known."""
        if self._shards is None:
            return None
        certain, possible = self._plan(epoch).rows_used(min(batches_of_epoch, self.opened.own_batches))
        lengths = np.array([shard.rows for shard in self._shards])
        done = int((certain == lengths).sum())
        left = int(((possible == 0) & (certain < lengths)).sum())
        return FilesProgress(done, len(lengths) - done - left, left)

    def batches_of_step(self, step: int) -> tuple[int, range]:
        """Return an optimizer update's epoch and global batches, or `DataError` if this fit has no such update.

        Args:
            step: from 1, counted over the whole job. It counts batches if the number of batches of an update varies.
        """
        opened = self.opened
        before = opened.steps_before if opened.accumulate else opened.batches_before
        if step <= before:
            wrong = "steps are counted from 1" if step < 1 else f"the newest fit's record begins with step {before + 1}"
            raise DataError(f"there is no step {step}: {wrong}")
        epochs, number = divmod(step - 1 - before, steps_per_epoch(opened))
        if epochs and opened.grows:
            raise DataError(f"step {step} is in an epoch whose rows are not fixed yet: the newest one is {opened.epoch}")
        first = number * max(1, opened.accumulate)
        return opened.epoch + epochs, range(first, min(first + max(1, opened.accumulate), opened.epoch_batches))

    def rows_of(self, epoch: int, batches: range) -> list[FileRows]:
        """Return the rows that made these global batches of an epoch."""
        shards = self._known_shards
        rows: dict[int, list[npt.NDArray[np.int64]]] = {}
        for batch in batches:
            lap, number = divmod(batch, max(1, self.opened.own_batches))
            if lap and not self.opened.cycles:
                continue  # this loader has ended before the others
            plan = self._plan(epoch, lap)
            start = number * self.opened.batch_size
            in_shards, numbers = plan.rows_between(start, min(start + self.opened.batch_size, plan.num_rows))
            for shard in np.unique(in_shards).tolist():
                rows.setdefault(shard, []).append(numbers[in_shards == shard])
        return [
            FileRows(shards[shard].key, _ranges(shards[shard].number_of_first_row + np.concatenate(rows[shard])))
            for shard in sorted(rows)
        ]

    def places_of(self, file: str, row: int, epochs: range) -> list[RowPlace]:
        """Return where a row is trained in each of these epochs that train it.

        Args:
            file: a file's path or URL, or its end; a partition as ``topic/0``, whose rows are numbered by offset.

        Raises:
            DataError: there is no such file or row, or several files have this name.
        """
        number = self._number_of(file)
        shard = self._known_shards[number]
        row -= shard.number_of_first_row
        if self.opened.ranges is not None and not 0 <= row < shard.rows:
            return []  # another epoch may have it
        if not 0 <= row < shard.rows:
            raise DataError(f"{shard.key} has {shard.rows} rows, numbered from 0: there is no row {row}")
        opened, found = self.opened, []
        for epoch in epochs:
            laps = -(-opened.epoch_batches // max(1, opened.own_batches)) if opened.cycles else 1
            for lap in range(laps):
                batch = self._plan(epoch, lap).place_of(number, row).batch
                whole = lap * opened.own_batches + batch
                if batch < opened.own_batches and whole < opened.epoch_batches:
                    found.append(RowPlace(epoch, whole, self._step_of(epoch, whole)))
        return found

    def is_done(self, epoch: int, batch: int, batches: int) -> bool:
        """Return whether a batch is among the `batches` done since the start of the epoch in which the fit began."""
        return (epoch - self.opened.epoch) * self.opened.epoch_batches + batch < batches

    def _step_of(self, epoch: int, batch: int) -> int | None:
        opened = self.opened
        if not opened.accumulate:
            return None
        return opened.steps_before + (epoch - opened.epoch) * steps_per_epoch(self.opened) + batch // opened.accumulate + 1

    def _number_of(self, file: str) -> int:
        shards = self._known_shards
        found = [n for n, shard in enumerate(shards) if shard.key == file]
        found = found or [n for n, shard in enumerate(shards) if shard.key.endswith("/" + file.removeprefix("./"))]
        if len(found) == 1:
            return found[0]
        if found:
            raise DataError(f"{len(found)} files are named {file}, such as {shards[found[0]].key}: give more of the path")
        example = f", but for example {shards[0].key}" if shards else ""
        raise DataError(f"{self.opened.source:.200} has no file {file}{example}")

    @property
    def _known_shards(self) -> Sequence[Shard]:
        assert self._shards is not None
        return self._shards

    def _plan(self, epoch: int, lap: int = 0) -> LanePlan:
        seed = self.opened.seed
        of_epoch = None if seed is None else seed + lap * STRIDE_OF_LAPS + epoch
        return LanePlan([shard.rows for shard in self._known_shards], of_epoch, self._layout)


def listed_shards(opened: StreamOpened, given: Sequence[str] = ()) -> Sequence[Shard]:
    """List a stream's files again.

    Args:
        given: paths in place of the recorded ones, for a host that has the files elsewhere.

    Raises:
        DataError: they cannot be listed here, or are not the files of the job.
    """
    if opened.ranges is not None:
        return [Partition(key, stop - first, first=first) for key, (first, stop) in opened.ranges.items()]
    source = _source(opened, given)
    found = Stream(source)
    if found.fingerprint != opened.digest:
        raise DataError(
            f"{source!r:.200} has {len(found.shards)} files with {len(found)} rows here, and not the {opened.num_shards} files "
            f"with {opened.num_rows} rows that the job reads, by their names and lengths. Restore the old files, or give their "
            "path on this host with --files"
        )
    return found.shards


def _source(opened: StreamOpened, given: Sequence[str]) -> Source:
    name, arguments, options = _call(opened.source)
    maker = {"parquet": parquet, "files": files}.get(name.lower())
    if maker is None:
        raise DataError(f"{opened.source:.200} is the script's own source, whose rows cannot be listed outside the job")
    if not (given or arguments):
        raise DataError(f"{opened.source:.200} has too many paths for the record: give patterns for them with --files")
    paths = list(given)
    if not paths:
        recorded = [arguments[0]] if isinstance(arguments[0], str) else map(str, arguments[0])
        paths = [path if "://" in path or path.startswith("~") else os.path.join(opened.folder, path) for path in recorded]
    source: Source = maker(paths, *arguments[1:], **options)
    return source


def _call(source: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name and arguments of a call with literal arguments, or a name alone; else an empty name."""
    try:
        call = ast.parse(source, mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, [], {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
            options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
            return call.func.id, [ast.literal_eval(each) for each in call.args], options
    except (SyntaxError, ValueError):
        pass
    return "", [], {}


def _ranges(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    rows = np.unique(rows)
    breaks = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = rows[np.concatenate(([0], breaks + 1))], rows[np.concatenate((breaks, [len(rows) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
