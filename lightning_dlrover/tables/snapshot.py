"""Snapshots of a job's state in the hosts' memory, which outlives the workers that wrote them.

A snapshot is the state between two batches: every worker's shards of the tables, and the rest, which is equal on all workers.
It consists of one `Part` per worker. A worker keeps its own part, and copies of its neighbours', in files of shared memory.
Each has two slots, so that the former part is valid until the next one is. A part is either complete or absent. The workers
find out together which snapshots are complete, see `newest_complete`.

The files remain when a worker is killed, so another worker on the same host finds them, even if it starts later.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dlrover.codec import from_fields, to_json
from lightning_dlrover.tables.block import Block
from lightning_dlrover.tables.layout import Region

__all__ = [
    "BufferSlot",
    "Part",
    "PartHeader",
    "PartWriter",
    "SnapshotError",
    "changes_of",
    "holders_of",
    "newest_complete",
    "newest_name",
    "part_header",
    "put_changes",
    "size_of_changes",
]

MAGIC = b"DLRSNAP1"
LARGEST = 1 << 48
PIECE_BYTES = 8 << 20
"""Bytes copied at once by a thread that may have to stop."""


class SnapshotError(RuntimeError):
    """A snapshot that cannot be taken or read."""


@dataclass(frozen=True)
class BufferSlot:
    """Position of one block's values in a part.

    Attributes:
        shape, dtype: those of the values; `region` is their place in the table.
        offset: bytes from the beginning of the part's values.
    """

    table: str
    what: str
    region: Region
    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True)
class PartHeader:
    """Description of a part, stored with it.

    Attributes:
        batch: global batches that were handed out before the snapshot.
        round: number of the round of the snapshot; with `batch`, the snapshot's name.
        members: all workers with a part in it, in rank order.
        owner: the worker of this state.
        plan: the plan of all tables, as plain data.
        blocks: the owner's shards.
        state_offset, state_bytes: position of the packed rest of the state.
        counters: the owner's `ShardedTables.counters`.
    """

    batch: int
    round: int
    members: tuple[str, ...]
    owner: str
    plan: dict[str, Any]
    blocks: tuple[BufferSlot, ...]
    state_offset: int
    state_bytes: int
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.state_offset + self.state_bytes

    @property
    def name(self) -> tuple[int, int]:
        """Name of the snapshot. Later ones are greater: a state after a rollback outranks the state that it undid."""
        return (self.round, self.batch)

    def encode(self) -> bytes:
        return to_json(self)

    @staticmethod
    def decode(data: bytes) -> PartHeader:
        """Return the header that `encode` wrote.

        Raises:
            SnapshotError: the data has another form.
        """
        try:
            header = from_fields(PartHeader, json.loads(data), "the header of a snapshot")
            ends = [b.offset + _num_bytes(b) for b in header.blocks]
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise SnapshotError(f"not the header of a snapshot: {error}") from error
        if max((header.num_bytes, *(n for b in header.blocks for n in b.shape))) >= LARGEST:
            raise SnapshotError("the header of a snapshot names more values than any memory holds")
        if max(ends, default=0) > header.num_bytes or any(b.offset % 64 for b in header.blocks):
            raise SnapshotError("the header of a snapshot names values beyond its end, or between two places")
        return header


@dataclass(frozen=True)
class Part:
    """A complete part in this host's memory or on disk."""

    header: PartHeader
    holder: str
    values: torch.Tensor  # uint8, shape (num_bytes,): the shared memory itself
    is_in_memory: bool = True

    def blocks(self) -> list[Block]:
        """Return the owner's shards as views of the part."""
        return [Block(p.table, p.what, p.region, _view(self.values, p)) for p in self.header.blocks]

    def state(self) -> torch.Tensor:
        return self.values[self.header.state_offset : self.header.num_bytes]


class PartWriter:
    """A part that is being written; not valid before `commit`.

    Attributes:
        slot: 0 or 1.
        base: name of an earlier part of the same owner in the same memory, with each value in the same place. Then only the
            changes since it need to be written. None: there is none.
    """

    def __init__(
        self, mapping: mmap.mmap, header: PartHeader, holder: str, start: int, slot: int, base: tuple[int, int] | None
    ) -> None:
        self.header = header
        self.slot = slot
        self.base = base
        self.values = torch.frombuffer(mapping, dtype=torch.uint8, count=header.num_bytes, offset=start)
        self._mapping = mapping
        self._holder = holder
        self._places = {(place.table, place.what, place.region): place for place in header.blocks}

    def put(
        self,
        blocks: Iterable[Block],
        state: bytes = b"",
        changed: Callable[[Block], torch.Tensor | None] = lambda block: None,
        each: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Copy some or all of the owner's shards, and the packed rest of its state if given.

        Args:
            changed: rows of a block that differ from the base; None: all are copied.
            each: entered for the copy of every few MiB.
        """
        for block in blocks:
            there, rows = self._there(block), changed(block)
            num_rows = len(there) if rows is None else len(rows)
            step = max(1, PIECE_BYTES // max(1, block.values.nbytes // max(1, len(there))))
            for first in range(0, num_rows, step):
                with each():
                    if rows is None:
                        _copy(there[first : first + step], block.values[first : first + step])
                    else:
                        some = rows[first : first + step]
                        values = block.values.index_select(0, some.to(block.values.device))
                        there.index_copy_(0, some, values.to(there.device))
        if state:
            part = self.values[self.header.state_offset : self.header.num_bytes]
            part.copy_(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def put_rows(self, block: Block, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write some rows of a block."""
        self._there(block).index_copy_(0, rows, values.to(self.values.device))

    def _there(self, block: Block) -> torch.Tensor:
        return _view(self.values, self._places[block.table, block.what, block.region])

    def commit(self) -> Part:
        """Mark the part as valid, also beyond this process's death."""
        self._mapping[8:16] = struct.pack("<Q", 1)
        return Part(self.header, self._holder, self.values)


def part_header(
    batch: int, round_: int, members: Sequence[str], owner: str, plan: dict[str, Any], blocks: Sequence[Block], state_bytes: int
) -> PartHeader:
    """Return the header of a part that holds `blocks` and `state_bytes` of other state."""
    places, offset = [], 0
    for b in blocks:
        places.append(
            BufferSlot(b.table, b.what, b.region, tuple(b.values.shape), str(b.values.dtype).removeprefix("torch."), offset)
        )
        offset += -(-b.values.nbytes // 64) * 64
    return PartHeader(batch, round_, tuple(members), owner, plan, tuple(places), offset, state_bytes)


# --- changes ------------------------------------------------------------------------------------------------------------------


def changes_of(part: Part, rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the changed rows of a part's blocks and its packed state, as bytes for a worker that has the base.

    Args:
        rows: changed rows of each block; None: all of it.
    """
    pieces: list[torch.Tensor] = []
    for block, changed in zip(part.blocks(), rows, strict=True):
        values = block.values if changed is None else block.values.index_select(0, changed)
        if changed is not None:
            pieces.append(changed.view(torch.uint8))
        pieces.append(values.contiguous().view(-1).view(torch.uint8))
    return torch.cat([*pieces, part.state()])


def size_of_changes(header: PartHeader, counts: Sequence[int]) -> int:
    """Return the size of `changes_of` for this many rows of each block; -1: all of it.

    Raises:
        SnapshotError: these cannot be numbers of rows.
    """
    if len(counts) != len(header.blocks) or any(
        type(n) is not int or not -1 <= n <= place.shape[0] for n, place in zip(counts, header.blocks, strict=False)
    ):
        raise SnapshotError("another worker's part comes with impossible numbers of changed rows")
    return header.state_bytes + sum(
        _num_bytes(place) if n < 0 else n * (8 + _num_bytes(place) // max(1, place.shape[0]))
        for n, place in zip(counts, header.blocks, strict=True)
    )


def put_changes(writer: PartWriter, counts: Sequence[int], changes: torch.Tensor) -> None:
    """Write the result of `changes_of` over the base."""
    at = 0

    def take(num_bytes: int) -> torch.Tensor:
        nonlocal at
        at += num_bytes
        return changes[at - num_bytes : at].clone()  # copied because values may begin at any address

    for place, n in zip(writer.header.blocks, counts, strict=True):
        there = _view(writer.values, place)
        if n < 0:
            there.copy_(take(_num_bytes(place)).view(there.dtype).view(place.shape))
        elif n:
            rows = take(8 * n).view(torch.int64)
            there.index_copy_(
                0, rows, take(n * _num_bytes(place) // place.shape[0]).view(there.dtype).view(n, *place.shape[1:])
            )
    writer.values[writer.header.state_offset :].copy_(take(writer.header.state_bytes))


def newest_name(held: Mapping[str, Iterable[PartHeader]]) -> tuple[int, int] | None:
    """Return the name of the newest snapshot with a holder for every part; None if there is none."""
    owners: dict[tuple[int, int], set[str]] = {}
    members: dict[tuple[int, int], tuple[str, ...]] = {}
    for header in (header for headers in held.values() for header in headers):
        owners.setdefault(header.name, set()).add(header.owner)
        members[header.name] = header.members
    return max((name for name in owners if owners[name] >= set(members[name])), default=None)


def newest_complete(held: Mapping[str, Iterable[PartHeader]]) -> dict[str, list[str]] | None:
    """Return the holders of the newest snapshot with a holder for every part.

    Args:
        held: headers of the parts that each worker can read.

    Returns:
        Workers, by the owner of the part that they hold; None: there is no such snapshot. See `newest_name` for its name.
    """
    name = newest_name(held)
    return holders_of(name, held) if name is not None else None


def holders_of(name: tuple[int, int], held: Mapping[str, Iterable[PartHeader]]) -> dict[str, list[str]]:
    """Return the workers that hold each part of a snapshot, by the owner of the part."""
    holders: dict[str, list[str]] = {}
    for worker, headers in held.items():
        for header in headers:
            if header.name == name:
                holders.setdefault(header.owner, []).append(worker)
    return holders


def _copy(there: torch.Tensor, here: torch.Tensor) -> None:
    """Copy values without waking the threads that train, unlike a tensor's own copy."""
    if here.device.type == "cpu" and here.is_contiguous() and there.is_contiguous():
        ctypes.memmove(there.data_ptr(), here.data_ptr(), here.nbytes)
    else:
        there.copy_(here)


def _num_bytes(place: BufferSlot) -> int:
    dtype: torch.dtype = getattr(torch, place.dtype)
    return math.prod(place.shape) * dtype.itemsize


def _view(values: torch.Tensor, place: BufferSlot) -> torch.Tensor:
    part = values[place.offset : place.offset + _num_bytes(place)]
    return part.view(getattr(torch, place.dtype)).view(place.shape)
