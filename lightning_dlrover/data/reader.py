"""Read the rows of a batch from their shards, ahead of the step that needs them."""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_dlrover.data.lane_plan import BLOCK_BYTES, LanePlan, Piece
from lightning_dlrover.data.rows import Block, Rows, own_copies
from lightning_dlrover.data.source import DataError, Shard, Skipped, SkippedRange, Source

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCKS_PER_THREAD = 2
"""Approximate number of blocks that are read ahead for each thread: one may be awaited while another is not needed yet."""

MAX_WAIT_BEFORE_FORK_S = 1.0
"""Seconds that a fork waits for reads to end, so that the new process finds no lock held by a thread that it lacks."""


class ReadingThreads:
    """Threads of one process that read blocks of lanes ahead. They start with the first read."""

    def __init__(self, number: int) -> None:
        self._pool = ThreadPoolExecutor(number, thread_name_prefix="stream")
        self._max_ahead = BLOCKS_PER_THREAD * number
        self._reads: weakref.WeakSet[Future[object]] = weakref.WeakSet()
        _all_threads().add(self)

    def is_due(self, rows_left: int, block_rows: int, num_lanes: int) -> bool:
        """Return whether a lane's next block should be read now.

        `num_lanes` are read in turn, so they also end their blocks in turn, and the next blocks belong to the lanes with the
        fewest rows left.
        """
        return rows_left * num_lanes <= self._max_ahead * block_rows

    def submit(self, read: Callable[[], T]) -> Future[T]:
        future = self._pool.submit(read)
        self._reads.add(future)  # type: ignore[arg-type]  # its result is never looked at here
        return future

    def wait(self, timeout_s: float) -> None:
        """Wait for the reads under way."""
        wait(list(self._reads), timeout_s)


@cache
def _all_threads() -> weakref.WeakSet[ReadingThreads]:
    threads: weakref.WeakSet[ReadingThreads] = weakref.WeakSet()

    def before_fork() -> None:
        for each in list(threads):
            each.wait(MAX_WAIT_BEFORE_FORK_S)

    os.register_at_fork(before=before_fork)
    return threads


# Read the rows of lanes in one process: each lane by blocks, from where its last read ended.
#
# A process holds one block of each lane that it reads, and a cursor of the source behind that block. At most `max_open`
# lanes are held; the least recently used one is closed for another. With threads, the next blocks are in memory as well.

MAX_NAMED = 100
"""Maximum number of skipped ranges that are named for one block. They travel with each batch."""

MAX_BYTES = 2**30
"""Bytes of all lanes of a process beyond which cursors that hold much are closed, and opened for the next block."""

MAX_OPEN_LANES = 256
"""Maximum number of lanes that a process holds open."""


class _Cursor:
    """One shard, read from a row on."""

    def __init__(self, source: Source, shard: Shard, row: int) -> None:
        self.shard = shard
        self.row = row
        self._items = source.read(shard, row)
        self._left: Any = None  # rest of a record batch, or of skipped rows

    def take(self, num_rows: int) -> Iterator[Any]:
        """Yield items with exactly `num_rows` rows in all."""
        while num_rows:
            item, self._left = (self._left if self._left is not None else self._next()), None
            if (length := _length(item)) > num_rows:
                (item, self._left), length = _split(item, num_rows), num_rows
            num_rows -= length
            self.row += length
            if length:
                yield item

    def _next(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise DataError(
                f"{self.shard.key} ended after {self.row} rows, but had {self.shard.rows} when the job counted them: it has "
                "changed since, or its source's read() drops rows. A transform cannot drop rows either: they are counted "
                "before they are read, so give them weight 0 instead"
            ) from None

    def close(self) -> None:
        if hasattr(self._items, "close"):
            self._items.close()


@dataclass(frozen=True)
class _Loaded:
    """A block in memory."""

    rows: Block | list[Any]
    starts: npt.NDArray[np.int64] | None = None  # where each row of the block is in `rows`; None: nothing was skipped
    skipped: tuple[SkippedRange, ...] = ()  # rows of the block that could not be read


class _Lane:
    def __init__(self) -> None:
        self.number = -1  # number of the block
        self.loaded = _Loaded([])
        self.num_given = 0  # rows of the block up to the last one that was handed out without a copy
        self.ahead: tuple[int, Future[_Loaded]] | None = None  # number of a block that a thread reads with the cursor
        self.turn = 0  # the reader's count of pieces when this lane was last used
        self.cursor: _Cursor | None = None

    def take_ahead(self, number: int) -> _Loaded | None:
        """Return a block that a thread reads, once it is there; None: no thread reads it, nor uses the cursor any longer."""
        if self.ahead is None:
            return None
        (read, future), self.ahead = self.ahead, None
        if read == number:
            return future.result()
        if not future.cancel():
            wait([future])
        return None

    def close(self) -> None:
        self.take_ahead(-1)
        self.close_cursor()

    def close_cursor(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
            self.cursor = None


class LaneReader:
    """The lanes of one epoch that a process reads.

    Args:
        threads: read blocks ahead; None: a block is read when its first row is asked for.

    Attributes:
        skipped: skipped rows of the blocks that `read` has taken rows from. The caller clears it.
    """

    def __init__(
        self,
        source: Source,
        shards: Sequence[Shard],
        plan: LanePlan,
        max_open: int = MAX_OPEN_LANES,
        threads: ReadingThreads | None = None,
    ) -> None:
        self.plan = plan
        self._threads = threads
        self._turn = 0  # pieces that were read so far
        self._num_lanes = 0  # about how many lanes this process reads
        # Bytes that a cursor holds behind its block, for sources that can read them again.
        self._held_bytes: Callable[[Shard], int] = getattr(source, "held_bytes", lambda _: 0)
        self.skipped: dict[SkippedRange, None] = {}
        self._num_skipped: Counter[tuple[str, bool]] = Counter()  # by shard and whether these numbers have rows
        self._source = source
        self._shards = shards
        self._max_open = max_open
        self._lanes: OrderedDict[int, _Lane] = OrderedDict()

    def read(self, pieces: Sequence[Piece]) -> Rows | list[Any]:
        """Return the rows of these pieces: columns if the source yields record batches, else a list of its items.

        Raises `DataError` if a shard has changed since it was counted, as `open` does.
        """
        parts: list[tuple[Block, int, int]] = []
        rows: list[Any] = []
        self._num_lanes = max(self._num_lanes, len({piece.lane for piece in pieces}) * self.plan.layout.cycle)
        for piece in pieces:
            first = piece.first
            while first < piece.stop:
                number = self.plan.block_of(piece.lane, first)
                begin, end = self.plan.block(piece.lane, number)
                lane = self._at(piece.lane, number)
                stop = min(piece.stop, end)
                a, b = first - begin, stop - begin
                loaded = lane.loaded
                self.skipped.update(dict.fromkeys(loaded.skipped))
                if loaded.starts is not None:
                    a, b = int(loaded.starts[a]), int(loaded.starts[b])
                if isinstance(loaded.rows, Block):
                    parts.append((loaded.rows, a, b))
                else:
                    rows += self._handed_out(piece.lane, number, a, b)
                first = stop
                if self._threads is not None:
                    self._read_ahead(self._threads, piece.lane, lane, end - stop)
        return rows if rows else Rows(parts)

    def _handed_out(self, number: int, block: int, a: int, b: int) -> list[Any]:
        """Return rows of a lane's block to a caller who may change them. They may be asked for again."""
        lane = self._lanes[number]
        if a < lane.num_given:
            lane.number = -1
            lane = self._at(number, block)
        assert isinstance(lane.loaded.rows, list)
        rows = lane.loaded.rows[a:b]
        copies = own_copies(rows)
        if copies is None:
            lane.num_given = b
            return rows
        return copies

    def _read_ahead(self, threads: ReadingThreads, number: int, lane: _Lane, rows_left: int) -> None:
        """Let a thread read the lane's next block if it is due."""
        self._turn += 1
        num_lanes, lane.turn = self._turn - lane.turn, self._turn  # lanes are read in turn
        first, _ = self.plan.block(number, lane.number + 1)
        if lane.ahead is not None or first >= self.plan.lane_length(number):
            return
        if threads.is_due(rows_left, self.plan.layout.block_rows, num_lanes):
            read = partial(self._loaded, lane, number, lane.number + 1)
            lane.ahead = lane.number + 1, threads.submit(read)

    def open(self, pieces: Sequence[Piece]) -> None:
        """Read the blocks in which these pieces begin, unless another lane would have to be closed."""
        for piece in pieces:
            if piece.lane in self._lanes or len(self._lanes) < self._max_open:
                self._at(piece.lane, self.plan.block_of(piece.lane, piece.first))

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _at(self, number: int, block: int) -> _Lane:
        lane = self._lanes.get(number)
        if lane is None:
            if len(self._lanes) >= self._max_open:
                self._lanes.popitem(last=False)[1].close()
            lane = self._lanes[number] = _Lane()
        self._lanes.move_to_end(number)
        if lane.number != block:
            lane.number = -1  # loading may fail
            lane.loaded = lane.take_ahead(block) or self._loaded(lane, number, block)
            lane.number, lane.num_given = block, 0
        return lane

    def _loaded(self, lane: _Lane, number: int, block: int) -> _Loaded:
        """Read a block. One thread at a time does so for a lane."""
        first, stop = self.plan.block(number, block)
        num_skipped: Counter[tuple[str, bool]] = Counter()  # rows, by shard and whether these numbers have rows
        reasons: dict[tuple[str, bool], str] = {}  # of the first ones: those of messages may all differ
        skipped: list[SkippedRange] = []
        is_there: list[npt.NDArray[np.bool_]] = []  # flags of the rows that could be read
        parts = _Parts(stop - first)
        for shard, row, item in self._items(lane, number, first, stop):
            is_skipped = isinstance(item, Skipped)
            is_there.append(np.full(_length(item), not is_skipped))
            if is_skipped:
                kind = self._shards[shard].key, item.are_rows
                num_skipped[kind] += item.rows
                reasons.setdefault(kind, item.reason)
                if item.are_rows:
                    self._name(skipped, shard, row, item)
            else:
                parts.add(self._shards[shard], item)
        for kind, num_rows in num_skipped.items():
            before = self._num_skipped[kind]
            self._num_skipped[kind] = found = before + num_rows
            if found.bit_length() > before.bit_length():  # whenever the number has doubled: blocks may be small
                log.warning("%s: %d rows are skipped so far: %s", kind[0], found, reasons[kind])
        held = self._held_bytes(lane.cursor.shard) if lane.cursor is not None else 0
        if held and max(self._num_lanes, len(self._lanes)) * (BLOCK_BYTES + held) > MAX_BYTES:
            lane.close_cursor()
        order, starts = self.plan.order(number, block), None
        if num_skipped:
            starts, order = _without_skipped(np.concatenate(is_there), order)
        return _Loaded(parts.joined(order), starts, tuple(skipped))

    def _name(self, skipped: list[SkippedRange], number: int, row: int, item: Skipped) -> None:
        """Add rows of a shard that come after those in the list."""
        shard, last = self._shards[number], skipped[-1] if skipped else None
        first = shard.number_of_first_row + row
        if last is not None and (last.shard, last.stop) == (number, first):
            skipped[-1] = last._replace(stop=first + item.rows)
        elif len(skipped) <= MAX_NAMED:
            stop = first + item.rows if len(skipped) < MAX_NAMED else first  # the one beyond names none, see `is_cut_short`
            skipped.append(SkippedRange(number, shard.key, first, stop, item.reason))

    def _items(self, lane: _Lane, number: int, first: int, stop: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the source's items for these rows of a lane: number of the shard, number of the first row in it, item."""
        for shard_number, begin, end in self.plan.intervals(number, first, stop):
            shard, cursor = self._shards[shard_number], lane.cursor
            if cursor is None or cursor.shard is not shard or cursor.row != begin:
                lane.close_cursor()
                cursor = _Cursor(self._source, shard, begin)
            lane.cursor = None  # after an error its generator is over
            row = begin
            for item in cursor.take(end - begin):
                yield shard_number, row, item
                row += _length(item)
            lane.cursor = cursor


def _without_skipped(
    is_there: npt.NDArray[np.bool_], order: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Return where each row of a block is among those that could be read, and the order of these."""
    if order is None:
        return np.concatenate(([0], np.cumsum(is_there))), None
    number = np.cumsum(is_there) - 1  # a row's number among those that could be read
    kept = is_there[order]
    return np.concatenate(([0], np.cumsum(kept))), number[order[kept]]


class _Parts:
    """The items of a block of `num_rows` rows: all of them record batches, or all single rows."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: list[Any] = []
        self._block: Block | None = None
        self._first: tuple[Shard, Any] | None = None  # shard and columns of the first record batch

    def add(self, shard: Shard, item: Any) -> None:
        """Add an item. Raises `DataError` if it does not fit those before."""
        if not _is_columnar(item):
            if self._block is not None:
                raise DataError(f"{shard.key}: its source yields a {type(item).__name__} among record batches")
            self._rows.append(item)
            return
        if self._rows:
            raise DataError(f"{shard.key}: its source yields record batches among items of {type(self._rows[0]).__name__}")
        if self._first is None:
            name, times = Counter(item.schema.names).most_common(1)[0] if item.schema.names else ("", 1)
            if times > 1:
                raise DataError(f"{shard.key} has {times} columns with the name {name!r}: a row can only hold one of them")
            self._first, self._block = (shard, item.schema), Block(item.schema, self._num_rows)
        before, schema = self._first
        if not (item.schema.equals(schema) or (item.schema.names == schema.names and item.schema.types == schema.types)):
            raise DataError(f"{shard.key} has the columns {_columns(item.schema)}, and {before.key} has {_columns(schema)}")
        assert self._block is not None
        self._block.add(item)

    def joined(self, order: npt.NDArray[np.int64] | None) -> Block | list[Any]:
        """Return all rows in this order."""
        if self._block is not None:
            return self._block.finish(order)
        return self._rows if order is None else [self._rows[i] for i in order]


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _is_columnar(item: Any) -> bool:
    return hasattr(item, "num_rows") and hasattr(item, "schema")


def _length(item: Any) -> int:
    if isinstance(item, Skipped):
        return item.rows
    return int(item.num_rows) if _is_columnar(item) else 1


def _split(item: Any, num_rows: int) -> tuple[Any, Any]:
    """Return the first rows of an item, and the rest."""
    if isinstance(item, Skipped):
        return replace(item, rows=num_rows), replace(item, rows=item.rows - num_rows)
    return item.slice(0, num_rows), item.slice(num_rows)
