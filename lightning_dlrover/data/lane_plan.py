"""Decide which rows are in each global batch of an epoch, at a cost independent of the number of rows. Pure.

The rows of all shards, in the epoch's order of shards, are cut into *lanes*: intervals that are read side by side.
A global batch takes rows from a few lanes, its *slots*. The next batch takes them from the next few, and after a *cycle* of
batches the first lanes are used again. So a batch depends neither on workers nor on loader workers. Yet each of them has lanes
of its own: a worker's share lies in the same slots of every batch, and one of n loader workers prepares every n-th batch. If n
divides the cycle, no two of them read the same lane.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

CYCLE = 12
"""Batches until a lane is used again. 1, 2, 3, 4, 6 and 12 loader workers divide it."""

CYCLES = (CYCLE, 6, 4, 2, 1)
"""Cycles for ever smaller data."""

MIN_SLOTS = 4
"""Minimum number of lanes that a batch takes rows from."""

BLOCK_ROWS = 8192
"""Rows of a lane that are read together, if they are columns of numbers or short strings."""

BLOCK_BYTES = 16 * 2**20
"""Stored bytes of a lane that are read together. 48 lanes of a worker hold 768 MiB."""

MIN_BLOCK_ROWS = 8
"""Minimum number of rows that are read together, however large they are."""

STRIDE_OF_LAPS = 1_000_003
"""Added to an order's seed whenever a loader begins again within an epoch."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Assignment of rows to batches. A job keeps its layout, since in another one the same position is another row."""

    batch_size: int  # rows of a global batch
    slots: int = MIN_SLOTS  # lanes in one batch
    cycle: int = CYCLE
    block_rows: int = BLOCK_ROWS  # rows of a lane that are read, and shuffled, together

    def __post_init__(self) -> None:
        for name in ("batch_size", "slots", "cycle", "block_rows"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of a layout of rows is {value!r}, not a positive integer")

    @property
    def num_lanes(self) -> int:
        return self.slots * self.cycle


def rows_of_block(num_rows: int, num_bytes: int, most: int = BLOCK_ROWS) -> int:
    """Return how many rows of files of this size are read together: a power of two within `BLOCK_BYTES` and `most`.

    It does not change with a few more rows, so workers agree on it.
    """
    fit = BLOCK_BYTES * num_rows // max(1, num_bytes)
    return most if fit >= most else max(MIN_BLOCK_ROWS, 1 << max(1, fit).bit_length() - 1)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a lane, ``first`` to ``stop`` in its shuffled order."""

    lane: int
    first: int
    stop: int


@dataclass(frozen=True)
class BatchPosition:
    """A row's place in an epoch."""

    batch: int  # number of the global batch
    offset: int  # position in that batch


def share(num_samples: int, global_rank: int, world_size: int, speeds: Sequence[int] = ()) -> tuple[int, int]:
    """Return the half-open range of a global batch that one worker processes.

    Ranges of all ranks are contiguous and cover the batch.

    Args:
        speeds: relative length of each rank's range, all above 0, to be rounded to whole samples; empty: lengths differ by at
            most one sample.
    """
    if speeds:
        whole, before = sum(speeds), sum(speeds[:global_rank])
        start, stop = ((2 * num_samples * speed + whole) // (2 * whole) for speed in (before, before + speeds[global_rank]))
        return start, stop
    base, extra = divmod(num_samples, world_size)
    start = global_rank * base + min(global_rank, extra)
    return start, start + base + (1 if global_rank < extra else 0)


def speeds_for(speeds: tuple[int, ...], num_samples: int, batch_size: int) -> tuple[int, ...]:
    """Return the speeds by which a batch is split: an epoch's last one, if it is smaller, is split equally.

    A slow worker could otherwise be left with a single sample of it, or none.
    """
    return speeds if num_samples == batch_size else ()


class LanePlan:
    """The order of one epoch's rows.

    Args:
        shard_rows: rows of each shard, shape ``(num_shards,)``.
        seed: seed of the order of shards, and of rows within blocks; None: rows stay in the order of the shards.
    """

    def __init__(self, shard_rows: Sequence[int] | Integers, seed: int | None, layout: Layout) -> None:
        rows = np.asarray(shard_rows, dtype=np.int64)
        self.layout = layout
        self.seed = seed
        self.num_rows = int(rows.sum())
        self.shards: Integers = np.arange(len(rows)) if seed is None else _generator(seed).permutation(len(rows))
        self._shard_starts = np.concatenate(([0], np.cumsum(rows[self.shards])))

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.layout.batch_size)

    @cached_property
    def _slot_starts(self) -> Integers:
        """Position in a batch at which each slot begins; the last entry is the batch size."""
        size, slots = self.layout.batch_size, self.layout.slots
        return np.array([0, *(share(size, slot, slots)[1] for slot in range(slots))])

    @cached_property
    def _slot_bounds(self) -> list[int]:
        bounds: list[int] = self._slot_starts.tolist()  # faster to search than an array
        return bounds

    @cached_property
    def _lane_starts(self) -> Integers:
        """First row of each lane, counted over all shards; the last entry is the number of rows."""
        return np.concatenate(([0], np.cumsum(self._lengths(self.num_rows))))

    def _lengths(self, num_rows: int) -> Integers:
        """Return how many of the epoch's first rows are in each lane, shape ``(num_lanes,)``."""
        layout = self.layout
        full, rest = divmod(num_rows, layout.batch_size)
        widths = np.diff(self._slot_starts)
        in_rest = np.clip(rest - self._slot_starts[:-1], 0, widths)
        turn = np.arange(layout.cycle)[:, None]
        lengths = (full - turn + layout.cycle - 1) // layout.cycle * widths
        lengths = np.maximum(lengths, 0) + (turn == full % layout.cycle) * in_rest
        found: Integers = lengths.ravel()
        return found

    def lane_length(self, lane: int) -> int:
        return int(self._lane_starts[lane + 1] - self._lane_starts[lane])

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield, in order, the pieces of lanes at the epoch's positions from `start` to `stop`, or raise `IndexError`."""
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of an epoch with {self.num_rows} rows")
        layout, bounds = self.layout, self._slot_bounds
        while start < stop:
            batch, offset = divmod(start, layout.batch_size)
            end = min(stop - batch * layout.batch_size, layout.batch_size)
            turn, phase = divmod(batch, layout.cycle)
            slot = bisect_right(bounds, offset) - 1
            while offset < end:
                begin, after = bounds[slot], bounds[slot + 1]
                upto = min(after, end)
                if offset < upto:
                    before = turn * (after - begin) - begin
                    yield Piece(phase * layout.slots + slot, before + offset, before + upto)
                    offset = upto
                slot += 1
            start = batch * layout.batch_size + end

    # --- blocks: the unit in which a lane is read and shuffled ----------------------------------------------------------------

    def _head_start(self, lane: int) -> int:
        """Rows by which a lane's first block is shorter, lest all lanes begin a block in the same few batches."""
        phase, slot = divmod(lane, self.layout.slots)
        return (slot * self.layout.cycle + phase) * self.layout.block_rows // self.layout.num_lanes

    def block_of(self, lane: int, row: int) -> int:
        return (row + self._head_start(lane)) // self.layout.block_rows

    def block(self, lane: int, number: int) -> tuple[int, int]:
        """Return the first row of the lane in a block, and the row after the last."""
        first = number * self.layout.block_rows - self._head_start(lane)
        return max(0, first), min(first + self.layout.block_rows, self.lane_length(lane))

    def order(self, lane: int, number: int) -> Integers | None:
        """Return the shuffled order of a block's rows, shape ``(rows in the block,)``; None: as they are."""
        if self.seed is None:
            return None
        first, stop = self.block(lane, number)
        return _generator(self.seed, lane, number).permutation(stop - first)

    # --- rows of shards ------------------------------------------------------------------------------------------------------

    def intervals(self, lane: int, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the places of unshuffled rows of a lane: number of the shard, first row, and the row after the last."""
        row, end = int(self._lane_starts[lane]) + first, int(self._lane_starts[lane]) + stop
        place = int(np.searchsorted(self._shard_starts, row, side="right")) - 1
        while row < end:
            begin, after = int(self._shard_starts[place]), int(self._shard_starts[place + 1])
            upto = min(after, end)
            if row < upto:
                yield int(self.shards[place]), row - begin, upto - begin
                row = upto
            place += 1

    def rows_between(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Return the shards and the rows at the epoch's positions from `start` to `stop`, shape ``(stop - start,)`` each."""
        found = [np.empty(0, dtype=np.int64)]
        for piece in self.pieces(start, stop):
            first = piece.first
            while first < piece.stop:
                number = self.block_of(piece.lane, first)
                begin, end = self.block(piece.lane, number)
                order, upto = self.order(piece.lane, number), min(piece.stop, end)
                in_lane = np.arange(first, upto) if order is None else begin + order[first - begin : upto - begin]
                found.append(int(self._lane_starts[piece.lane]) + in_lane)
                first = upto
        absolute = np.concatenate(found)
        places = np.searchsorted(self._shard_starts, absolute, side="right") - 1
        return self.shards[places], absolute - self._shard_starts[places]

    def rows_used(self, num_batches: int) -> tuple[Integers, Integers]:
        """Return how many rows of each shard the epoch's first batches have used for certain, and at most, shape ``(shards,)``.

        In a shuffled block that is in use, no single row is certain, only their number.
        """
        lengths = self._lengths(self.num_rows)
        used = self._lengths(min(num_batches * self.layout.batch_size, self.num_rows))
        certain = possible = used
        if self.seed is not None:
            block_rows = self.layout.block_rows
            heads = np.array([self._head_start(lane) for lane in range(self.layout.num_lanes)])
            begins = np.maximum(0, (used + heads) // block_rows * block_rows - heads)
            ends = np.minimum(-(-(used + heads) // block_rows) * block_rows - heads, lengths)
            certain = np.where(used == lengths, lengths, begins)
            possible = np.where(used == 0, 0, ends)
        return self._by_shard(certain), self._by_shard(possible)

    def _by_shard(self, in_lanes: Integers) -> Integers:
        """Return how many rows of each shard are among the first rows of the lanes."""
        before = np.concatenate(([0], np.cumsum(in_lanes)))
        lane = np.clip(np.searchsorted(self._lane_starts, self._shard_starts, side="right") - 1, 0, self.layout.num_lanes - 1)
        upto = before[lane] + np.minimum(self._shard_starts - self._lane_starts[lane], in_lanes[lane])
        found = np.empty(len(self.shards), dtype=np.int64)
        found[self.shards] = np.diff(upto)
        return found

    def place_of(self, shard: int, row: int) -> BatchPosition:
        """Return where in the epoch a row of a shard is, the inverse of `rows_between`."""
        (at,) = np.flatnonzero(self.shards == shard)
        if not 0 <= row < self._shard_starts[at + 1] - self._shard_starts[at]:
            raise IndexError(f"row {row} of a shard with {self._shard_starts[at + 1] - self._shard_starts[at]} rows")
        absolute = int(self._shard_starts[at]) + row
        lane = int(np.searchsorted(self._lane_starts, absolute, side="right")) - 1
        in_lane = absolute - int(self._lane_starts[lane])
        number = self.block_of(lane, in_lane)
        order = self.order(lane, number)
        if order is not None:
            first, _ = self.block(lane, number)
            in_lane = first + int(np.flatnonzero(order == in_lane - first)[0])
        phase, slot = divmod(lane, self.layout.slots)
        begin, after = self._slot_bounds[slot : slot + 2]
        turn, offset = divmod(in_lane, after - begin)
        return BatchPosition(turn * self.layout.cycle + phase, begin + offset)


def _generator(seed: int, *numbers: int) -> np.random.RandomState:
    # RandomState: its numbers are the same in every release of numpy, and a job may outlive one.
    words = [(seed >> shift) & 0xFFFFFFFF for shift in (0, 32)]
    return np.random.RandomState([*words, *numbers])
