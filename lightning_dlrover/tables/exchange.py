"""The memory of tables' rows on a worker (`Arena`), and the exchange of rows that `layout.py` plans (`exchange`)."""

from __future__ import annotations

import ctypes
import json
import mmap
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.membership.member import Formation
from lightning_dlrover.rdzv.transport import transfer, waits
from lightning_dlrover.tables.layout import LayoutError, Move, Region


@dataclass(frozen=True)
class Block:
    """One worker's part of one table: weights, or one of its optimizer states."""

    table: str  # `{module}.{table}`
    what: str  # `weight`, or `state0`, `state1` in the fused optimizer's order
    region: Region  # rows and columns of the table
    values: torch.Tensor  # shape ``(rows, cols)`` of the region, or ``(rows,)`` for a row-wise state; the live memory itself


def part_of(block: Block, region: Region) -> torch.Tensor:
    """Return a view of the values of `region`, which must be inside the block; of its rows only if they are row-wise."""
    rows = block.values[region.row0 - block.region.row0 : region.row1 - block.region.row0]
    return rows if rows.dim() == 1 else rows[:, region.col0 - block.region.col0 : region.col1 - block.region.col0]


PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
PIECE = 8 << 20

# mman(2)
MAP_NORESERVE = 0x4000
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4
MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_WRITE = 4, 14, 23
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Addresses:
    """A range of addresses, aligned to huge pages, that is released with its last user."""

    def __init__(self, num_bytes: int) -> None:
        self._length = num_bytes + HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        address = _libc.mmap(None, self._length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address == FAILED:
            raise MemoryError(
                f"{num_bytes >> 20} MiB of address space cannot be reserved for tables, though almost none is memory: "
                "allow more with `ulimit -v unlimited`, and set vm.overcommit_memory to 0 or 1"
            )
        self._mapped = address
        self.start = -(-address // HUGE_PAGE) * HUGE_PAGE
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        if hasattr(self, "_mapped"):
            _libc.munmap(self._mapped, self._length)

    def values(self, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Return the range from a byte on, one-dimensional; bytes that were never written read as zeros."""
        length = self.num_bytes - start
        buffer = (ctypes.c_char * length).from_address(self.start + start)
        buffer.owner = self  # type: ignore[attr-defined]  # tensors keep the buffer
        return torch.frombuffer(buffer, dtype=dtype, count=length // dtype.itemsize)

    def use_huge_pages(self, start: int) -> None:
        """Let the kernel use huge pages from a byte on."""
        start = -(-start // HUGE_PAGE) * HUGE_PAGE
        if start < self.num_bytes:
            _libc.madvise(self.start + start, self.num_bytes - start, MADV_HUGEPAGE)

    def drop(self, start: int, end: int) -> None:
        """Return the pages entirely inside a range of bytes to the system; their values are lost."""
        start, end = _inside(start, end, PAGE)
        if end > start:
            _libc.madvise(self.start + start, end - start, MADV_DONTNEED)


@dataclass
class _Range:
    """Position of the rows of one table, or of one of its states: offsets in the arena, in bytes."""

    start: int
    size: int  # of all rows of the table
    first: int  # bytes in use now, up to `end`
    end: int


class Arena:
    """Memory for tables, in which every row of every table has an address of its own, assigned the same way on all workers.

    The cost of a change of workers is largely memory: pages touched for the first time, and rows that stay with their worker
    but are copied into its new shard. Addresses cost nothing. A shard's rows determine its address, so rows that a worker keeps
    stay in place, and only rows from other workers need pages.

    Huge pages are used where the kernel has them: with 4 KiB pages, page faults take several times as long as the transfer.
    Memory of rows that were sent away is released page by page at once, not when its module happens to be collected.

    Args:
        num_bytes: addresses, not memory: at least enough for all rows of all tables, and as much again for their replacements.
            Three times as many addresses follow for callers that choose a place themselves.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        self._addresses = Addresses(4 * self.num_bytes)
        self._former: dict[Hashable, _Range] = {}
        self._present: dict[Hashable, _Range] = {}
        self._next = 0  # nothing was placed from here on
        self._reserve: Addresses | None = None  # already touched
        self._reserve_taken = 0

    def values(self, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Return the whole arena from a byte on, one-dimensional; bytes that were never written read as zeros."""
        return self._addresses.values(dtype, start)

    def begin(self) -> None:
        """Begin a new layout while the former one still exists."""
        self.finish()
        self._former, self._present = self._present, {}

    def place(self, key: Hashable, size: int, first: int, length: int, at: int | None = None) -> int:
        """Return the offset of bytes `first` to `first + length` of the rows under `key`.

        In the next layout, the same key has its rows at the same place, with their last values.

        Args:
            size: bytes of all rows of the table, the same each time.
            at: offset of the rows, from `num_bytes` on, the same each time; None: wherever there is room.
        """
        if not size:
            return 0
        known = self._former.get(key)
        if known is not None and known.size != size:
            raise ValueError(f"{key!r} had {known.size} bytes, and is to have {size}")
        start = known.start if known is not None else self._gap(size) if at is None else at
        placed = _Range(start, size, start + first, start + first + length)
        self._present[key] = placed
        huge_start, huge_end = _inside(placed.first, placed.end, HUGE_PAGE)
        if huge_end > huge_start:
            _libc.madvise(self._addresses.start + huge_start, huge_end - huge_start, MADV_HUGEPAGE)
        missing = [(placed.first, placed.end)]
        if known is not None and known.end > known.first:
            missing = [(placed.first, min(placed.end, known.first)), (max(placed.first, known.end), placed.end)]
        for part in missing:
            self._take_reserve(*part)
        return start + first

    def _gap(self, size: int) -> int:
        """Return a free place of this size: behind all others if there is room, else the first gap that is large enough."""
        align = HUGE_PAGE if size >= HUGE_PAGE else PAGE
        start = -(-self._next // align) * align
        if start + size <= self.num_bytes:
            self._next = start + size
            return start
        taken = sorted({(r.start, r.start + r.size) for r in (*self._former.values(), *self._present.values())})
        start = 0  # places that their callers chose are behind all others
        for begins, ends in taken:
            if begins - start >= size:
                break
            start = max(start, -(-ends // align) * align)
        if start + size > self.num_bytes:
            raise MemoryError(f"{size} bytes of rows do not fit into {self.num_bytes} bytes of addresses")
        return start

    def finish(self) -> None:
        """Release all memory that the present layout does not use, and forget the former layout."""
        present = {r.start: r for r in self._present.values()}
        for former in (*self._former.values(), *self._present.values()):
            end = -(-(former.start + former.size) // PAGE) * PAGE  # nothing else is in its last page
            used = present.get(former.start)
            if used is None or used.first == used.end:
                self._addresses.drop(former.start, end)
            else:
                self._addresses.drop(former.start, used.first)
                self._addresses.drop(used.end, end)
        self._former = {}

    def release(self, tensor: torch.Tensor) -> None:
        """Return the pages entirely inside a contiguous tensor of this arena to the system; its values are lost."""
        start = tensor.data_ptr() - self._addresses.start
        if tensor.is_contiguous() and start >= 0 and start + tensor.nbytes <= self._addresses.num_bytes:
            self._addresses.drop(start, start + tensor.nbytes)

    def close(self) -> None:
        """Release all memory; remaining tensors read as zeros."""
        self.drop_reserve()
        self.begin()
        self.finish()

    # --- memory ahead of time ---------------------------------------------------------------------------------------------

    def reserve(self, num_bytes: int) -> None:
        """Touch this much memory now, for later placements."""
        self.drop_reserve()
        if num_bytes:
            self._reserve, self._reserve_taken = _touched(num_bytes), 0

    def drop_reserve(self) -> None:
        """Release the rest of the reserve."""
        self._reserve = None

    def _take_reserve(self, first: int, end: int) -> None:
        """Move huge pages of the reserve to bytes without pages."""
        first, end = _inside(first, end, HUGE_PAGE)
        if self._reserve is None or end <= first:
            return
        length = min(end - first, self._reserve.num_bytes // HUGE_PAGE * HUGE_PAGE - self._reserve_taken)
        if length <= 0:
            return
        source = self._reserve.start + self._reserve_taken
        # The source's addresses stay mapped, lest other memory be mapped there before they are released. Since Linux 5.7.
        flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
        if _libc.mremap(source, length, length, flags, self._addresses.start + first) == FAILED:
            return  # the first write then touches these pages
        self._reserve_taken += length

    def touch(self, tensor_address: int, num_bytes: int) -> None:
        """Touch the pages of some addresses of this arena before they are written."""
        start = tensor_address - self._addresses.start
        if num_bytes and start >= 0 and start + num_bytes <= self._addresses.num_bytes:
            _populate(tensor_address, num_bytes)


def warm(num_bytes: int) -> None:
    """Touch this much memory and release it: on a virtual machine, the first use of a page costs the host most."""
    if num_bytes:
        _touched(num_bytes)


def touch(mapping: mmap.mmap) -> None:
    """Touch a mapping's pages before they are used, if the kernel can."""
    _populate(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(mapping))


def _populate(address: int, num_bytes: int) -> None:
    # `mmap.madvise` would hold the GIL for seconds. Other threads cannot allocate memory during a call, hence the pieces.
    start, end = address // PAGE * PAGE, -(-(address + num_bytes) // PAGE) * PAGE
    for at in range(start, end, PIECE):
        _libc.madvise(at, min(PIECE, end - at), MADV_POPULATE_WRITE)  # since Linux 5.14


def _touched(num_bytes: int) -> Addresses:
    addresses = Addresses(num_bytes)
    _libc.madvise(addresses.start, num_bytes, MADV_HUGEPAGE)
    _populate(addresses.start, num_bytes)
    return addresses


def _inside(start: int, end: int, border: int) -> tuple[int, int]:
    """Return the part of a range between page borders."""
    return -(-start // border) * border, end // border * border


# --- collective operations of a round's members -------------------------------------------------------------------------------

SWAP_S = 300.0
"""Seconds until a message to or from a neighbour fails: gloo does not detect a peer's loss in the middle of one."""


def all_gather(formation: Formation, obj: Any) -> list[Any]:
    """Return plain data of all members, by rank."""
    if formation.size == 1:
        return [obj]
    return [json.loads(text) for text in transfer.all_gather(json.dumps(obj))]


def meet(group: Any) -> None:
    """Wait for all members. A barrier would use NCCL if the group has it."""
    if group is not None:
        waits.wait_for(group.allreduce([torch.zeros(1)]))


def largest(group: Any, values: Mapping[str, int]) -> dict[str, int]:
    """Return the largest of all workers' values by name. All must have the same names."""
    numbers = torch.tensor(list(values.values()), dtype=torch.int64)
    if group is not None and len(numbers):
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        waits.wait_for(group.allreduce([numbers], options))
    return dict(zip(values, numbers.tolist(), strict=True))


def swap(group: Any, mine: Mapping[int, torch.Tensor], theirs: Mapping[int, torch.Tensor]) -> None:
    """Send to and receive from several ranks at once."""
    work = [group.recv([values], rank, 0) for rank, values in theirs.items() if len(values)]
    work += [group.send([values], rank, 0) for rank, values in mine.items() if len(values)]
    for each in work:
        each.wait(timedelta(seconds=SWAP_S))


CHUNK_BYTES = 4 << 20
"""Bytes per message: gloo reaches its full speed from this size on."""

WINDOW = 8
"""Messages under way per peer and direction."""

STALL_S = 10.0
"""Seconds until a message fails. gloo reports a lost peer, except to a worker that waits for the rest of a begun message."""


@dataclass
class ExchangeStats:
    """One worker's part in an exchange."""

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
    """Fill the blocks of `new` from the workers' blocks of `old`, in bounded pieces.

    Every worker computes the same moves (`layout.plan_moves`) and carries out its part. Rows with the same place in both stay
    there. If their columns are cut differently, they are copied while others are sent. Memory of rows that were sent away is
    freed at once, so a worker hardly needs more memory than the larger of its old and new shards.

    A value of a row-wise optimizer state belongs to a row and the columns of one shard. Where columns are cut differently, a
    row's value is the mean of its source shards' values, weighted by width. That is exact for merged shards, because the state
    is a mean over columns, as in row-wise Adagrad. After a split, each part starts with the value of the whole.

    gloo sends from the host's memory. Values on a GPU are copied there piece by piece, so either end may be on any device.

    Args:
        group: process group with `members` as its ranks: all workers that give or take. None if nothing is sent.
        moves: the same on all of them.
        old: this worker's present blocks, including the sources of its moves.
        new: this worker's future blocks.
        release: called with unneeded parts of `old`, if this worker allocates memory for other rows in the exchange.

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
    meet(group)  # workers take different times to build their tables; from here on a silent peer is dead
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
    """The rows that one worker sends, receives and keeps in an exchange, message by message. Arguments as for `exchange`."""

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
        # Whether a move's target takes memory that this worker does not have yet.
        self._needs_memory = any(
            m.source != me or not _is_in_place(_source(self._sources, m)[0], _target(self._targets, m)[0], m)
            for m in self._moves
            if m.target == me
        )

    def peers(self) -> list[str]:
        return sorted({w for m in self._moves for w in (m.source, m.target)} - {self._me})

    def begin_sums(self) -> None:
        """Zero values that are combined from several shards, because their messages are added up."""
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
        """Copy rows that stay with this worker but change their addresses, some at a time."""
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


def _by_table(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.table, []).append(block)
    return found


def _given_twice(moves: Sequence[Move], sources: Mapping[str, Sequence[Block]]) -> set[Move]:
    """Return moves that share rows of a source shard with another move: both need a row-wise state, whatever their columns."""
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
    """Return the weights and states of a shard of this worker that contains a move's whole region."""
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
    """Return a source's weight in the target's value, below 1 for a row-wise state combined from several shards."""
    return 1.0 if target.values.dim() > 1 else move.region.num_cols / move.into.num_cols


def _put(target: torch.Tensor, values: torch.Tensor, share: float) -> None:
    if share == 1.0:
        target.copy_(values)
    else:
        target.add_(values.to(target.device), alpha=share)
