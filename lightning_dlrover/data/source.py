"""Sources of rows: shards that can be read from any row on, skipped rows, and the windows of a stream without end."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import get_worker_info

Ranges = dict[str, tuple[int, int]]
"""Rows of each shard in a window, by its key: number of the first row, and of the one after the last."""


class DataError(RuntimeError):
    """Data cannot be read, or have changed since the job began.

    Example:
        >>> Shard("part-0.parquet", rows=-1)
        Traceback (most recent call last):
        lightning_dlrover.data.source.DataError: shard 'part-0.parquet' has -1 rows: a stream needs the number of rows ...
    """


def check_extra() -> None:
    """Raise `ModuleNotFoundError` unless the packages that read files are installed."""
    missing = [name for name in ("pyarrow", "tqdm") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"streams of files need {' and '.join(missing)}: pip install 'lightning-dlrover[data]'", name=missing[0]
        )


@dataclass(frozen=True)
class Shard:
    """A part of a source that is read from its first row to its last, such as a file.

    Example:
        >>> Shard("part-0", rows=1000, version="etag-1")
        Shard(key='part-0', rows=1000, version='etag-1')
    """

    key: str  # names it in errors and records; unique in its source
    rows: int
    version: str = ""  # changes with its content, for example size and time of modification

    @property
    def number_of_first_row(self) -> int:
        """Number of its first row in records and messages."""
        return 0

    @property
    def identity(self) -> str:
        """What workers compare, with the number of rows. The folder of a file may differ from host to host."""
        return PurePath(self.key).name

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 0:
            raise DataError(
                f"shard {self.key!r} has {self.rows!r} rows: a stream needs the number of rows of each shard, 0 or more, "
                "before it reads one. Count them once and keep the numbers with the data"
            )


@dataclass(frozen=True)
class Skipped:
    """Rows that cannot be read; `read` yields this in their place.

    Example:
        >>> def read(lines):
        ...     for number, line in enumerate(lines):
        ...         yield float(line) if line else Skipped(1, f"line {number} is empty")
        >>> list(read(["1.5", ""]))
        [1.5, Skipped(rows=1, reason='line 1 is empty', are_rows=True)]
    """

    rows: int
    reason: str
    are_rows: bool = True  # False: no data have these numbers, as in a compacted topic


@runtime_checkable
class Source(Protocol):
    """Where rows come from. A user's own source has these two methods and can be pickled.

    With an attribute ``reads_in_threads = True``, `read` may run in several threads at once, each for another place.
    An attribute ``block_rows`` is the number of rows of a lane that a process keeps in memory, if they are not shuffled.

    Example:
        >>> class Squares:
        ...     def shards(self):
        ...         return [Shard("squares", rows=100)]
        ...
        ...     def read(self, shard, row):
        ...         yield from (number * number for number in range(row, shard.rows))
        >>> isinstance(Squares(), Source)
        True
    """

    def shards(self) -> Sequence[Shard]:
        """Return all shards, the same in every process of the job."""

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        """Yield the shard's rows from number `row` on, the same ones each time.

        An item is one row of any kind, a `pyarrow.RecordBatch` of rows, or `Skipped`.
        """


@runtime_checkable
class WindowedSource(Source, Protocol):
    """A source whose rows come and go while a job runs. The job decides once for all workers which of them make a window.

    Attributes:
        grows: whether each epoch is a window of its own. Otherwise one window serves all epochs.
        dry_s: seconds without new rows after which a growing source counts as ended.
    """

    grows: bool
    dry_s: float

    def window(self, after: Mapping[str, int] | None) -> Ranges:
        """Return the present rows after those rows at which each shard continues; None: from the source's start."""

    def shards_in(self, ranges: Ranges) -> Sequence[Shard]:
        """Return the shards of a window."""


# Rows that could not be read, on their way from the process that reads them to the one that trains.
#
# They travel with each batch that takes rows from their block. So if a batch is discarded when workers change, the batch in
# its place names them again.


class SkippedRange(NamedTuple):
    """Consecutive rows of a shard that are skipped."""

    shard: int  # number of the shard
    key: str  # its name
    first: int  # number of the first row; in a Kafka topic its offset
    stop: int  # number of the row after the last one; `first`: further rows of the block are not named
    reason: str  # of the first row

    @property
    def is_cut_short(self) -> bool:
        return self.first == self.stop


class WithSkipped(NamedTuple):
    """A batch, and the skipped rows of its blocks. A named tuple, as a DataLoader pins the memory of its parts."""

    batch: Any
    skipped: tuple[SkippedRange, ...]


# Fix the rows of each window of a source, once for all its readers.
#
# A source that grows has a window for each epoch, which begins where the window before ended. Any other source has a single
# window. The process that needs a window first proposes it. In a live job a record in etcd fixes it for all workers.

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks for new rows; longer if a look takes long."""

WARN_AFTER_S = 5.0
"""Seconds without new rows after which the wait is logged."""

NUM_KEPT = 4
"""Newest windows that a process remembers. A rollback may lead back to the one before."""


def num_rows(ranges: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of rows in a window."""
    return sum(stop - first for first, stop in ranges.values())


class WindowKeeper:
    """Where the windows of a source are fixed. This one is for a process that has the source for itself."""

    def read(self, epoch: int, after: Mapping[str, int] | None) -> Ranges | None:
        """Return a window that was fixed and begins where the one before ended; None: there is none."""
        return None

    def fix(self, epoch: int, after: Mapping[str, int] | None, ranges: Ranges) -> Ranges:
        """Fix a window, unless another process was faster. Return the one that counts."""
        return ranges

    def pause(self, seconds: float) -> None:
        """Wait before the next look for new rows. May raise what ends the wait."""
        time.sleep(seconds)


class _SharedText:
    """A text in memory that is shared with processes that are forked later."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("dlrover-windows"), "r+b", buffering=0)  # noqa: SIM115  # closed with this object

    def write(self, text: str) -> None:
        data = text.encode()
        os.pwrite(self._file.fileno(), data, 0)
        self._file.truncate(len(data))

    def read(self) -> str:
        fd = self._file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode()


class Windows:
    """The windows of one source, by epoch. A source that does not grow has the same window in each epoch."""

    def __init__(self, source: WindowedSource) -> None:
        self._source = source
        self._known: dict[int, Ranges] = {}
        self._start: dict[str, int] | None = None  # first row of each shard in epoch 0; None: the source's own start
        self.keeper = WindowKeeper()
        self._shared = _SharedText()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keeper": WindowKeeper(), "_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared = _SharedText()

    @property
    def grows(self) -> bool:
        return self._source.grows

    @property
    def is_continued(self) -> bool:
        """Whether epoch 0 begins where an earlier fit ended."""
        return self._start is not None

    def of(self, epoch: int) -> Ranges:
        """Return the window of an epoch; without rows in it, a growing source has ended before that epoch.

        Raises `DataError` if the window before is not known, or the source cannot be read.
        """
        epoch = epoch if self.grows else 0
        if epoch not in self._known:
            self.take(epoch, self._decided(epoch))
        return self._known[epoch]

    def take(self, epoch: int, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Adopt a window that was fixed earlier or by another process, and forget later ones."""
        epoch = epoch if self.grows else 0
        ranges = {key: (int(first), int(stop)) for key, (first, stop) in ranges.items()}
        if self._known.get(epoch) == ranges:
            return
        self._known = {e: known for e, known in self._known.items() if epoch - NUM_KEPT < e < epoch} | {epoch: ranges}
        self._shared.write(json.dumps(self._known))

    def unknown(self) -> Windows:
        """Return the windows of the same source, none of them known."""
        return Windows(self._source)

    def begin_again(self) -> None:
        """Count epochs from 0 again, for another fit. A source that grows continues where the newest window ended."""
        if self.grows and self._known:
            self._start = _stops(self._known[max(self._known)])
            self._known = {}

    def decide_again_from(self, epoch: int, ranges: Mapping[str, Sequence[int]]) -> None:
        """Decide an epoch again, from where a window without rows begins."""
        if epoch:
            self._known.pop(epoch, None)
            self.take(epoch - 1, {key: (first, first) for key, (first, _) in ranges.items()})
        else:
            self._known, self._start = {}, {key: int(first) for key, (first, _) in ranges.items()}

    def look_again(self, epoch: int) -> None:
        """Decide an epoch again if it had no rows."""
        ranges = self._known.get(epoch)
        if self.grows and ranges is not None and not num_rows(ranges):
            self.decide_again_from(epoch, ranges)

    def _decided(self, epoch: int) -> Ranges:
        if get_worker_info() is not None:  # each process would decide differently
            shared = json.loads(self._shared.read() or "{}")
            if str(epoch) in shared:
                return {key: (first, stop) for key, (first, stop) in shared[str(epoch)].items()}
            raise DataError(
                f"{self._source!r:.120} has rows that come and go, and a loader worker was started before those of epoch "
                f"{epoch} were known: call len() of the stream before the loader's iterator is made"
            )
        begin = after = self._stops_before(epoch)
        began = time.monotonic()
        has_warned = False
        while (fixed := self.keeper.read(epoch, after)) is None:
            looked = time.monotonic()
            ranges = self._source.window(begin)
            begin = {key: first for key, (first, _) in ranges.items()}  # the newest row may be another one at the next look
            now = time.monotonic()
            if num_rows(ranges) or not self.grows or now - began >= self._source.dry_s:
                return self.keeper.fix(epoch, after, ranges)
            if now - began > WARN_AFTER_S and not has_warned:
                has_warned = True
                log.warning("%.120r has no new rows; training ends after %g s without any", self._source, self._source.dry_s)
            left_s = max(0.0, self._source.dry_s - (now - began))
            self.keeper.pause(min(max(POLL_S, 10 * (now - looked)), left_s))
        return fixed

    def _stops_before(self, epoch: int) -> dict[str, int] | None:
        if not epoch:
            return self._start
        if epoch - 1 not in self._known:
            raise DataError(
                f"{self._source!r:.120} grows, and it is not known where it was before epoch {epoch}: begin with epoch 0, or "
                "continue from a checkpoint of a live job (rows.resume_from(checkpoint) without one)"
            )
        return _stops(self._known[epoch - 1])


def _stops(ranges: Ranges) -> dict[str, int]:
    return {key: stop for key, (_, stop) in ranges.items()}
