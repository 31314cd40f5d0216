"""Send parts of tables from the workers that hold them to those that need them, in place and in bounded pieces.

Every worker computes the same list of moves (`layout.plan_moves`) and carries out its own part of it. Rows that stay are left
in place. If their columns are cut differently, they are copied while others are on the wire. Memory of rows that a source has
sent away is freed at once, so a worker hardly needs more memory than the larger of its old and new shards.

A value of a row-wise optimizer state belongs to a row and the columns of one shard. Where columns are cut differently, a row's
value is the mean of its source shards' values, weighted by width. That is exact for merged shards, because the state is a mean
over columns, as in row-wise Adagrad. After a split, each part starts with the value of the whole.

gloo sends from the host's memory. Values on a GPU are copied there piece by piece, so either end of a move may be on any
device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.group import waits
from lightning_dlrover.tables.block import Block, part_of
from lightning_dlrover.tables.layout import LayoutError, Move, Region

__all__ = ["ExchangeStats", "exchange"]

CHUNK_BYTES = 4 << 20
"""Bytes per message on the wire: gloo reaches its full speed from this size on."""

WINDOW = 8
"""Messages under way per peer and direction."""

STALL_S = 10.0
"""Seconds until a message fails. gloo reports a lost peer, except to a worker that waits for the rest of a begun message."""


@dataclass
class ExchangeStats:
    """Statistics of one worker in an exchange."""

    sent_bytes: int = 0
    received_bytes: int = 0
    copied_bytes: int = 0  # bytes copied in memory
    began_s: float = 0.0  # monotonic clock
    seconds: float = 0.0


@dataclass
class _Message:
    """A message in `wire`, to be sent or received, and the action on its completion."""

    wire: torch.Tensor
    done: Callable[[], object]


def exchange(
    group: dist.ProcessGroup | dist.ProcessGroupGloo | None,
    members: Sequence[str],
    me: str,
    moves: Sequence[Move],
    old: Sequence[Block],
    new: Sequence[Block],
    release: Callable[[torch.Tensor], None] = lambda values: None,
) -> ExchangeStats:
    """Fill the blocks of `new` from the workers' blocks of `old`. Rows that have the same place in both stay there.

    Args:
        group: process group with `members` as its ranks: all workers that give or take. None if nothing is sent.
        moves: the same on all of them.
        old: this worker's present blocks, including the sources of its moves.
        new: this worker's future blocks.
        release: called with unneeded parts of `old`, if this worker takes memory for other rows meanwhile.

    Raises:
        RuntimeError: a peer is lost; `new` is then incomplete.
        LayoutError: this worker does not have a shard that a move names.
    """
    part = _OwnPart(me, moves, old, new, release)
    lanes: dict[tuple[str, str], Iterator[_Message]] = {}
    for peer in part.peers():
        lanes[peer, "send"], lanes[peer, "recv"] = part.sends(peer), part.receives(peer)
    kept = part.keeps()
    queues: dict[tuple[str, str], deque[tuple[dist.Work, _Message]]] = {lane: deque() for lane in lanes}

    def post(lane: tuple[str, str]) -> None:
        message = next(lanes[lane], None)
        if message is not None:
            assert group is not None
            peer, direction = lane
            queues[lane].append((getattr(group, direction)([message.wire], members.index(peer), 0), message))

    part.begin_sums()
    if group is not None:
        gloo: Any = group  # its stubs contain few of its methods
        # Workers take different times to build their tables; from here on a silent peer is dead. A barrier would use NCCL if
        # the group has it.
        waits.wait_for(gloo.allreduce([torch.zeros(1)]))
    part.stats.began_s = time.monotonic()
    for lane in lanes:
        for _ in range(WINDOW):
            post(lane)
    # One message of every lane in turn. All workers use the same order, so no two of them wait for each other.
    while any(queues.values()):
        next(kept, None)
        for lane, queue in queues.items():
            if queue:
                work, message = queue.popleft()
                work.wait(timedelta(seconds=STALL_S))
                message.done()
                post(lane)
    for _ in kept:
        pass
    part.stats.seconds = time.monotonic() - part.stats.began_s
    return part.stats


class _OwnPart:
    """The rows that one worker gives, takes and keeps in an exchange, message by message. Arguments as for `exchange`."""

    def __init__(
        self,
        me: str,
        moves: Sequence[Move],
        old: Sequence[Block],
        new: Sequence[Block],
        release: Callable[[torch.Tensor], None],
    ) -> None:
        self.stats = ExchangeStats()
        self._me = me
        self._release = release
        self._sources, self._targets = _by_table(old), _by_table(new)
        self._moves = [m for m in moves if me in (m.source, m.target)]
        self._shared = _given_twice([m for m in self._moves if m.source == me], self._sources)
        self._needs_memory = any(m.target == me and _is_new(m, me, self._sources, self._targets) for m in self._moves)

    def peers(self) -> list[str]:
        return sorted({w for m in self._moves for w in (m.source, m.target)} - {self._me})

    def begin_sums(self) -> None:
        """Set values combined from several shards to 0, because their messages are added up there."""
        for move in (m for m in self._moves if m.target == self._me):
            for block in _target(self._targets, move):
                if _share(block, move) != 1.0:
                    part_of(block, move.region).zero_()

    def sends(self, peer: str) -> Iterator[_Message]:
        for move in (m for m in self._moves if m.source == self._me and m.target == peer):
            for block in _source(self._sources, move):
                for chunk in _chunks(block, move.region):
                    values = part_of(block, chunk)
                    self.stats.sent_bytes += values.nbytes
                    wire = values.contiguous().view(-1)
                    done = partial(self._give_away, move, values)
                    yield _Message(wire if _is_on_host(wire) else wire.to("cpu", copy=True), done)

    def receives(self, peer: str) -> Iterator[_Message]:
        for move in (m for m in self._moves if m.source == peer and m.target == self._me):
            for block in _target(self._targets, move):
                for chunk in _chunks(block, move.region):
                    values = part_of(block, chunk)
                    self.stats.received_bytes += values.nbytes
                    if _is_on_host(values) and values.is_contiguous() and _share(block, move) == 1.0:
                        yield _Message(values.view(-1), lambda: None)
                    else:
                        arrived = torch.empty(values.shape, dtype=values.dtype)
                        yield _Message(arrived.view(-1), partial(_put, values, arrived, _share(block, move)))

    def keeps(self) -> Iterator[None]:
        """Copy rows that stay with this worker to other addresses, some at a time."""
        for move in (m for m in self._moves if m.source == self._me == m.target):
            for source, target in zip(_source(self._sources, move), _target(self._targets, move), strict=True):
                if _is_in_place(source, target, move):
                    continue
                for chunk in _chunks(target, move.region):
                    values = part_of(source, chunk)
                    self.stats.copied_bytes += values.nbytes
                    _put(part_of(target, chunk), values, _share(target, move))
                    self._give_away(move, values)
                    yield

    def _give_away(self, move: Move, values: torch.Tensor) -> None:
        if self._needs_memory and move not in self._shared:
            self._release(values)


def _is_on_host(values: torch.Tensor) -> bool:
    return values.device.type == "cpu"


def _is_in_place(source: Block, target: Block, move: Move) -> bool:
    return part_of(source, move.region).data_ptr() == part_of(target, move.region).data_ptr()


def _is_new(move: Move, me: str, sources: Mapping[str, Sequence[Block]], targets: Mapping[str, Sequence[Block]]) -> bool:
    """Return whether a move's target takes memory that this worker does not have yet."""
    return move.source != me or not _is_in_place(_source(sources, move)[0], _target(targets, move)[0], move)


def _by_table(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.table, []).append(block)
    return found


def _given_twice(moves: Sequence[Move], sources: Mapping[str, Sequence[Block]]) -> set[Move]:
    """Return moves that share rows of one source shard with another move, even in other columns: both need a row-wise state."""
    by_shard: dict[tuple[str, Region], list[Move]] = {}
    for move in moves:
        by_shard.setdefault((move.table, _source(sources, move)[0].region), []).append(move)
    return {
        a
        for group in by_shard.values()
        for a in group
        for b in group
        if a is not b and max(a.region.row0, b.region.row0) < min(a.region.row1, b.region.row1)
    }


def _source(blocks: Mapping[str, Sequence[Block]], move: Move) -> list[Block]:
    """Return weights and states of one of this worker's shards that contains all of a move's region."""
    found = [b for b in blocks.get(move.table, ()) if b.region.overlap(move.region) == move.region]
    if not found:
        raise LayoutError(f"table {move.table!r}: this worker does not have {move.region}, which a move names")
    # Parts of a snapshot may contain two copies of a shard.
    return list({b.what: b for b in reversed(found) if b.region == found[0].region}.values())[::-1]


def _target(blocks: Mapping[str, Sequence[Block]], move: Move) -> list[Block]:
    found = [b for b in blocks.get(move.table, ()) if b.region == move.into]
    if not found:
        raise LayoutError(f"table {move.table!r}: this worker has no shard {move.into}, which a move names")
    return found


def _chunks(block: Block, region: Region) -> Iterator[Region]:
    """Yield the region in slices of rows of about `CHUNK_BYTES`."""
    width = 1 if block.values.dim() == 1 else region.num_cols
    rows = max(1, CHUNK_BYTES // (width * block.values.element_size()))
    for first in range(region.row0, region.row1, rows):
        yield Region(first, min(first + rows, region.row1), region.col0, region.col1)


def _share(target: Block, move: Move) -> float:
    """Return a source's weight in the target's value: below 1 for a row-wise state combined from several shards."""
    return 1.0 if target.values.dim() > 1 else move.region.num_cols / move.into.num_cols


def _put(target: torch.Tensor, values: torch.Tensor, share: float) -> None:
    if share == 1.0:
        target.copy_(values)
    else:
        target.add_(values.to(target.device), alpha=share)
