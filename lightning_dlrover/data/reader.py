"""Read the rows of lanes in one process: each lane by blocks, from the place where it was left.

A process holds one block of each lane that it reads, and a cursor of the source behind that block. At most `max_open`
lanes are held; the one that was not used for the longest time is closed for another.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from lightning_dlrover.data.lane_plan import LanePlan, Piece
from lightning_dlrover.data.read_ahead import ReadAhead
from lightning_dlrover.data.rows import Block, Rows
from lightning_dlrover.data.source import DataError, Shard, Skipped, Source

__all__ = ["MAX_OPEN_LANES", "LaneReader"]

log = logging.getLogger(__name__)

MAX_OPEN_LANES = 256
"""Maximum number of lanes that a process holds open."""

BLOCKS_AHEAD = 2
"""Blocks whose rows are read ahead, counted over all lanes."""

MAX_BATCHES_AHEAD = 48
"""Maximum number of batches whose rows are read ahead."""


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
            item = self._left if self._left is not None else self._next()
            self._left = None
            length = _length(item)
            if length > num_rows:
                self._left = _after(item, num_rows)
                item, length = _before(item, num_rows), num_rows
            num_rows -= length
            self.row += length
            if length:
                yield item

    def _next(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise DataError(
                f"{self.shard.key} ended after {self.row} rows, but had {self.shard.rows} when the job counted them: it was "
                "changed meanwhile, or its source's read() leaves rows out. A transform cannot leave rows out either: they are "
                "counted before they are read, so give them weight 0 instead"
            ) from None

    def close(self) -> None:
        if hasattr(self._items, "close"):
            self._items.close()


@dataclass(frozen=True)
class _Loaded:
    """A block of a lane in memory."""

    number: int = -1
    block: Block | list[Any] = field(default_factory=list)
    starts: npt.NDArray[np.int64] | None = None  # where each row of the block is in `block`; None: nothing was skipped
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)  # rows, by shard and reason


class LaneReader:
    """The lanes of one epoch that a process reads.

    Args:
        max_open: lanes that are held at once.

    Attributes:
        num_skipped: rows that were to be read but could not be.
    """

    def __init__(self, source: Source, shards: Sequence[Shard], plan: LanePlan, max_open: int = MAX_OPEN_LANES) -> None:
        self.plan = plan
        self.num_skipped = 0
        self._source = source
        self._shards = shards
        self._max_open = max_open
        self._blocks: OrderedDict[int, _Loaded] = OrderedDict()  # by lane
        self._cursors: OrderedDict[int, _Cursor] = OrderedDict()  # by lane, used by `_decoded` alone
        reads_ahead = getattr(source, "reads_ahead", False) and get_worker_info() is None
        # The thread only decodes. It would wait for the interpreter's lock at each of the small steps that make a block.
        self._ahead = ReadAhead(lambda lane, number: list(self._decoded(lane, number))) if reads_ahead else None
        self._next = 0, 0  # positions of the next batch if batches are read one after the other
        self._ahead_upto = 0  # first position of the last batch that is read ahead

    def read(self, pieces: Sequence[Piece]) -> Rows | list[Any]:
        """Return the rows of these pieces: columns if the source yields record batches, else a list of its items.

        Raises:
            DataError: a shard has changed since it was counted.
        """
        parts: list[tuple[Block, int, int]] = []
        rows: list[Any] = []
        for piece in pieces:
            first = piece.first
            while first < piece.stop:
                number = self.plan.block_of(piece.lane, first)
                begin, end = self.plan.block(piece.lane, number)
                lane = self._at(piece.lane, number)
                stop = min(piece.stop, end)
                a, b = first - begin, stop - begin
                if lane.starts is not None:
                    a, b = int(lane.starts[a]), int(lane.starts[b])
                if isinstance(lane.block, Block):
                    parts.append((lane.block, a, b))
                else:
                    rows.extend(lane.block[a:b])
                first = stop
        return rows if rows else Rows(parts)

    def expect(self, start: int, stop: int, stride: int, goes_on: bool) -> None:
        """Load the rows of a batch on a thread, and those of the batches after it, if the source may be read there.

        Args:
            start: position of the batch's first row.
            stop: position after its last row.
            stride: positions from one batch's rows to those of the next.
            goes_on: whether those will be read next. Otherwise nothing is read ahead before two batches followed each other.
        """
        if self._ahead is None:
            return
        num_rows, follows = stop - start, (start, stop) == self._next
        depth = min(MAX_BATCHES_AHEAD, -(-BLOCKS_AHEAD * self.plan.layout.block_rows // num_rows))
        upto = start + depth * stride if follows or goes_on else start
        begin = self._ahead_upto + stride if follows else start
        self._next, self._ahead_upto = (start + stride, stop + stride), max(upto, begin - stride)
        blocks = list(self._blocks_of(range(begin, upto + 1, stride), num_rows))
        if not follows:
            self._ahead.keep(set(blocks))
        for lane, number in blocks:
            loaded = self._blocks.get(lane)
            if loaded is None or loaded.number != number:
                self._ahead.ask((lane, number))

    def _blocks_of(self, starts: range, num_rows: int) -> Iterator[tuple[int, int]]:
        """Yield lane and number of the blocks that batches need."""
        for start in starts:
            if start >= self.plan.num_rows:
                return
            for piece in self.plan.pieces(start, min(start + num_rows, self.plan.num_rows)):
                last = self.plan.block_of(piece.lane, piece.stop - 1)
                yield from ((piece.lane, n) for n in range(self.plan.block_of(piece.lane, piece.first), last + 1))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
        self._blocks.clear()

    def _at(self, lane: int, number: int) -> _Loaded:
        loaded = self._blocks.get(lane)
        if loaded is None or loaded.number != number:
            decoded = self._decoded(lane, number) if self._ahead is None else self._ahead.take((lane, number))
            loaded = self._loaded(lane, number, decoded)
            for (key, reason), num_rows in loaded.skipped.items():
                self.num_skipped += num_rows
                log.warning("%s: %d rows are skipped: %s", key, num_rows, reason)
            if len(self._blocks) >= self._max_open and lane not in self._blocks:
                self._blocks.popitem(last=False)
            self._blocks[lane] = loaded
        self._blocks.move_to_end(lane)
        return loaded

    def _loaded(self, lane: int, number: int, decoded: Iterable[tuple[Shard, Any]]) -> _Loaded:
        first, stop = self.plan.block(lane, number)
        skipped = Counter[tuple[str, str]]()
        is_there: list[npt.NDArray[np.bool_]] = []  # for each row, whether it could be read
        parts = _Parts(stop - first)
        for shard, item in decoded:
            is_skipped = isinstance(item, Skipped)
            is_there.append(np.full(_length(item), not is_skipped))
            if is_skipped:
                skipped[shard.key, item.reason] += item.rows
            else:
                parts.add(shard, item)
        order = self.plan.order(lane, number)
        if not skipped:
            return _Loaded(number, parts.joined(order))
        starts, order = _without_skipped(np.concatenate(is_there), order)
        return _Loaded(number, parts.joined(order), starts, skipped)

    def _decoded(self, lane: int, number: int) -> Iterator[tuple[Shard, Any]]:
        """Yield what the source has for a block."""
        cursor = self._cursors.pop(lane, None)
        for shard_number, begin, end in self.plan.intervals(lane, *self.plan.block(lane, number)):
            shard = self._shards[shard_number]
            if cursor is None or cursor.shard is not shard or cursor.row != begin:
                if cursor is not None:
                    cursor.close()
                cursor = _Cursor(self._source, shard, begin)
            for item in cursor.take(end - begin):  # its error ends the cursor
                yield shard, item
        if cursor is not None:
            if len(self._cursors) >= self._max_open:
                self._cursors.popitem(last=False)[1].close()
            self._cursors[lane] = cursor


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
    """What a source yields for a block: all record batches, or all single rows.

    Args:
        num_rows: rows of the block.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: list[Any] = []
        self._block: Block | None = None
        self._first: tuple[Shard, Any] | None = None  # shard and columns of the first record batch

    def add(self, shard: Shard, item: Any) -> None:
        """Add what was read.

        Raises:
            DataError: it does not fit to what was read before.
        """
        if not _is_columnar(item):
            if self._block is not None:
                raise DataError(f"{shard.key}: its source yields a {type(item).__name__} among record batches")
            self._rows.append(item)
            return
        if self._rows:
            raise DataError(
                f"{shard.key}: its source yields record batches among rows such as a {type(self._rows[0]).__name__}"
            )
        if self._first is None:
            self._first, self._block = (shard, item.schema), Block(item.schema, self._num_rows)
        before, schema = self._first
        if not _same_columns(item.schema, schema):
            raise DataError(f"{shard.key} has the columns {_columns(item.schema)}, and {before.key} has {_columns(schema)}")
        assert self._block is not None
        self._block.add(item)

    def joined(self, order: npt.NDArray[np.int64] | None) -> Block | list[Any]:
        """Return all of it, in this order."""
        if self._block is not None:
            return self._block.finish(order)
        return self._rows if order is None else [self._rows[i] for i in order]


def _same_columns(one: Any, other: Any) -> bool:
    return bool(one.equals(other)) or (one.names == other.names and one.types == other.types)


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _is_columnar(item: Any) -> bool:
    return hasattr(item, "num_rows") and hasattr(item, "schema")


def _length(item: Any) -> int:
    if isinstance(item, Skipped):
        return item.rows
    return int(item.num_rows) if _is_columnar(item) else 1


def _before(item: Any, num_rows: int) -> Any:
    return Skipped(num_rows, item.reason) if isinstance(item, Skipped) else item.slice(0, num_rows)


def _after(item: Any, num_rows: int) -> Any:
    return Skipped(item.rows - num_rows, item.reason) if isinstance(item, Skipped) else item.slice(num_rows)
