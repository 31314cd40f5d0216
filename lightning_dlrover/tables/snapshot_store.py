"""Storage of snapshots: a job's state in files of the hosts' shared memory and on disk.

A snapshot is the state between two batches: every worker's shards of the tables, and the rest, which is equal on all workers.
It consists of one `Part` per worker. A worker keeps its own part, and copies of its neighbours', in files of shared memory.
Each has two slots, so that the former part is valid until the next one is. A part is either complete or absent. The workers
determine together which snapshots are complete, see `newest_complete`.

The files remain when a worker is killed, so another worker on the same host finds them, even if it starts later.
`SnapshotStore` manages the files; `snapshots.py` decides when to take a snapshot.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from lightning_dlrover.codec import from_fields, to_json
from lightning_dlrover.rdzv.job.folders import JOB_FILE, ROOT, hold, is_held, is_private, short, users_folder
from lightning_dlrover.tables.exchange import Block, touch
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.persist import PREFIX, parts_in

MAGIC = b"DLRSNAP1"
LARGEST = 1 << 48
PIECE_BYTES = 8 << 20
"""Bytes copied at once by a thread that may have to stop."""

ALIGN = 4096

SLACK_BYTES = 8 << 20
"""Bytes that a part's memory may exceed it by, in addition to a quarter of the part."""

Name = tuple[int, int]
"""Name of a snapshot: round and batch."""

log = logging.getLogger(__name__)


class SnapshotError(RuntimeError):
    """A snapshot cannot be taken or read."""


@dataclass(frozen=True)
class BufferSlot:
    """Position of one block's values in a part."""

    table: str
    what: str
    region: Region  # place in the table
    shape: tuple[int, ...]  # of the values
    dtype: str
    offset: int  # bytes from the beginning of the part's values


@dataclass(frozen=True)
class PartHeader:
    """Description of a part, stored with it."""

    batch: int  # global batches that were handed out before the snapshot
    round: int
    members: tuple[str, ...]  # all workers with a part in the snapshot, in rank order
    owner: str  # the worker of this state
    plan: dict[str, Any]  # of all tables, as plain data
    blocks: tuple[BufferSlot, ...]  # the owner's shards
    state_offset: int  # position of the packed rest of the state
    state_bytes: int
    counters: dict[str, int] = field(default_factory=dict)  # the owner's `ShardedTables.counters`

    @property
    def num_bytes(self) -> int:
        return self.state_offset + self.state_bytes

    @property
    def name(self) -> Name:
        """Name of the snapshot. Later ones are greater: a state after a rollback outranks the state that it undid."""
        return (self.round, self.batch)

    def encode(self) -> bytes:
        return to_json(self)

    @staticmethod
    def decode(data: bytes) -> PartHeader:
        """Return the header that `encode` wrote. Raises `SnapshotError` for other data."""
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

    def __init__(self, mapping: mmap.mmap, header: PartHeader, holder: str, start: int, slot: int, base: Name | None) -> None:
        self.header = header
        self.slot = slot
        self.base = base
        self.values = torch.frombuffer(mapping, dtype=torch.uint8, count=header.num_bytes, offset=start)
        self._mapping = mapping
        self._holder = holder
        self._places = {(place.table, place.what, place.region): place for place in header.blocks}

    def put(self, blocks: Iterable[Block], state: bytes = b"") -> None:
        """Copy some or all of the owner's shards, and the packed rest of its state if given."""
        for block in blocks:
            self.put_block(block)
        if state:
            part = self.values[self.header.state_offset : self.header.num_bytes]
            part.copy_(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def put_block(
        self,
        block: Block,
        changed: torch.Tensor | None = None,
        each: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Copy a shard, or its rows that differ from the base, some MiB at a time inside `each`."""
        there = self._there(block)
        num_rows = len(there) if changed is None else len(changed)
        step = max(1, PIECE_BYTES // max(1, block.values.nbytes // max(1, len(there))))
        for first in range(0, num_rows, step):
            with each():
                if changed is None:
                    _copy(there[first : first + step], block.values[first : first + step])
                else:
                    rows = changed[first : first + step]
                    self.put_rows(block, rows, block.values.index_select(0, rows.to(block.values.device)))

    def put_rows(self, block: Block, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write some rows of a block."""
        self._there(block).index_copy_(0, rows, values.to(self.values.device))

    def _there(self, block: Block) -> torch.Tensor:
        return _view(self.values, self._places[block.table, block.what, block.region])

    def commit(self) -> Part:
        """Mark the part as valid, even after this process's death."""
        self._mapping[8:16] = struct.pack("<Q", 1)
        return Part(self.header, self._holder, self.values)


def part_header(
    batch: int,
    round_: int,
    members: Sequence[str],
    owner: str,
    plan: dict[str, Any],
    blocks: Sequence[Block],
    state_bytes: int,
    counters: Mapping[str, int] = MappingProxyType({}),
) -> PartHeader:
    """Return the header of a part that holds `blocks` and `state_bytes` of other state."""
    places, offset = [], 0
    for b in blocks:
        dtype = str(b.values.dtype).removeprefix("torch.")
        places.append(BufferSlot(b.table, b.what, b.region, tuple(b.values.shape), dtype, offset))
        offset += -(-b.values.nbytes // 64) * 64
    return PartHeader(batch, round_, tuple(members), owner, plan, tuple(places), offset, state_bytes, dict(counters))


# --- changes ------------------------------------------------------------------------------------------------------------------


def changes_of(part: Part, rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the changed rows of each block of a part (None: all) and its packed state, for a worker that has the base."""
    pieces: list[torch.Tensor] = []
    for block, changed in zip(part.blocks(), rows, strict=True):
        values = block.values if changed is None else block.values.index_select(0, changed)
        if changed is not None:
            pieces.append(changed.view(torch.uint8))
        pieces.append(values.contiguous().view(-1).view(torch.uint8))
    return torch.cat([*pieces, part.state()])


def size_of_changes(header: PartHeader, counts: Sequence[int]) -> int:
    """Return the size of `changes_of` for so many rows of each block (-1: all of it), or raise `SnapshotError`."""
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
            values = take(n * _num_bytes(place) // place.shape[0])
            there.index_copy_(0, rows, values.view(there.dtype).view(n, *place.shape[1:]))
    writer.values[writer.header.state_offset :].copy_(take(writer.header.state_bytes))


def newest_complete(held: Mapping[str, Iterable[PartHeader]]) -> Name | None:
    """Return the newest snapshot with a holder for every part, by the headers that each worker can read."""
    owners: dict[Name, set[str]] = {}
    members: dict[Name, tuple[str, ...]] = {}
    for header in (header for headers in held.values() for header in headers):
        owners.setdefault(header.name, set()).add(header.owner)
        members[header.name] = header.members
    return max((name for name in owners if owners[name] >= set(members[name])), default=None)


def holders_of(name: Name, held: Mapping[str, Iterable[PartHeader]]) -> dict[str, list[str]]:
    """Return the holders of each part of a snapshot, by the part's owner."""
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


class SnapshotStore:
    """The parts that this host's workers of one job hold.

    Args:
        job: name of the job; workers of other jobs do not see its parts.
        life: distinguishes the job from former ones of its name, whose parts are removed.
        holder: this worker.
        fit: number of the script's `fit`, from 1; parts of earlier ones are removed.
        max_bytes: limit for this worker's parts, its own and copies; None: half of the free shared memory at the start.
        disk: folder, visible to all hosts, for copies that survive the loss of all hosts' memory.

    Raises:
        SnapshotError: shared memory is missing, or another user owns the folder in it.
    """

    def __init__(
        self,
        job: str,
        holder: str,
        max_bytes: int | None = None,
        disk: Path | None = None,
        root: Path = ROOT,
        life: str = "",
        fit: int = 1,
    ) -> None:
        if not root.is_dir():
            raise SnapshotError(f"{root} is not there: this system has no shared memory to keep snapshots in")
        self._job, self._life = short(job), short(life)
        self.folder = users_folder(root) / self._name_of_fit(fit)
        self._disk = disk.absolute() / self.folder.name if disk is not None else None
        self.holder = holder
        self._mark: BinaryIO | None = None  # shows others that a worker of the job lives on this host
        self._make_folder()
        self._remove_former(fit)
        self.max_bytes = max_bytes if max_bytes is not None else shutil.disk_usage(root).free // 2
        self._mappings: dict[Path, mmap.mmap] = {}
        self._creating = threading.Lock()
        self._is_closed = False

    def begin_fit(self, number: int) -> None:
        """Switch to the snapshots of a later `fit`, and remove those of earlier ones, because each counts batches from 0."""
        self._mappings = {}
        self._mark = None
        self.folder = self.folder.with_name(self._name_of_fit(number))
        self._disk = self._disk.with_name(self.folder.name) if self._disk is not None else None
        self._remove_former(number)

    def _name_of_fit(self, number: int) -> str:
        return f"{self._job}-{self._life}" + (f"-{number}" if number > 1 else "")

    def _remove_former(self, fit: int) -> None:
        """Remove the parts of former jobs of this name and of earlier fits, not of later ones: this worker may lag behind."""
        earlier = {self._name_of_fit(number) for number in range(1, fit)}
        for parent in (self.folder.parent, *([self._disk.parent] if self._disk is not None else [])):
            for former in parent.glob(f"{self._job}-*"):
                if former.name in earlier or former.name.split("-")[1] != self._life:
                    shutil.rmtree(former, ignore_errors=True)

    def _make_folder(self) -> None:
        for folder in (self.folder.parent, self.folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not is_private(folder):
                raise SnapshotError(f"{folder} is not a private folder of this user: remove it, or switch snapshots off")
        mark = self.folder / JOB_FILE
        if self._mark is None or not mark.exists() or not os.path.samestat(os.fstat(self._mark.fileno()), mark.stat()):
            try:
                self._mark = hold(self.folder, self._disk)
            except OSError as error:
                raise SnapshotError(f"{mark} cannot be written: {error.strerror}") from error

    # --- writing -------------------------------------------------------------------------------------------------------

    def begin(self, header: PartHeader, keep: Name | None = None) -> PartWriter:
        """Make room for a part, in place of the owner's older part that this worker holds.

        Args:
            keep: name of the newest snapshot that counts; its part stays, even if there is a newer one.

        Raises:
            SnapshotError: it would take more memory than is allowed or available.
        """
        paths = [self._path(header.owner, slot) for slot in (0, 1)]
        path = min(paths, key=lambda p: ((name := self._name(p)) == keep, name))
        encoded = header.encode()
        start = -(-(PREFIX.size + len(encoded)) // ALIGN) * ALIGN
        size = start + header.num_bytes
        taken = sum(p.stat().st_size for p in self.folder.glob(f"{short(self.holder)}-*") if p != path)
        if taken + size > self.max_bytes:
            raise SnapshotError(
                f"a snapshot takes {size >> 20} MiB in addition to {taken >> 20} MiB, and {self.max_bytes >> 20} MiB are "
                "allowed (snapshot max_bytes): use fewer replicas, or a higher limit"
            )
        former = self._read(path) if path in self._mappings else None
        self._shrink(path, size)
        mapping = self._open(path, size)
        is_base = (
            former is not None
            and former.header.blocks == header.blocks
            and former.header.owner == header.owner
            and PREFIX.unpack_from(mapping)[3] == start
        )
        base = former.header.name if former is not None and is_base else None
        os.utime(path)  # a write through a mapping does not update the file's time, see `sweep`
        mapping[: PREFIX.size] = PREFIX.pack(MAGIC, 0, len(encoded), start)
        mapping[PREFIX.size : PREFIX.size + len(encoded)] = encoded
        return PartWriter(mapping, header, self.holder, start, paths.index(path), base)

    def _name(self, path: Path) -> Name:
        part = self._read(path) if path.exists() else None
        return part.header.name if part is not None else (-1, -1)

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserve and touch memory for both parts of an owner, each of `num_bytes`. Raises `SnapshotError` as `begin` does."""
        size = num_bytes + (1 << 20)  # for headers
        if 2 * size > self.max_bytes:
            raise SnapshotError(
                f"two snapshots of {size >> 20} MiB are more than the {self.max_bytes >> 20} MiB that are allowed "
                "(snapshot max_bytes)"
            )
        for slot in (0, 1):
            touch(self._open(self._path(owner, slot), size))

    def _open(self, path: Path, size: int) -> mmap.mmap:
        mapping = self._mappings.get(path)
        if mapping is not None and len(mapping) >= size and path.exists():
            return mapping
        try:
            with self._open_file(path) as file:
                # Allocated now: a failure at the first use of a page would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                mapping = self._mappings[path] = mmap.mmap(file.fileno(), max(size, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise SnapshotError(f"no shared memory for a snapshot of {size >> 20} MiB: {error.strerror}") from error
        return mapping

    def _open_file(self, path: Path) -> BinaryIO:
        with self._creating:
            if self._is_closed:
                raise SnapshotError("no more memory is allocated for snapshots: this worker's part of the job has ended")
            self._make_folder()  # the folder may have been removed
            return path.open("a+b")

    def _shrink(self, path: Path, size: int) -> None:
        """Give back the memory of a part that was much larger, such as before its worker gave rows to others."""
        with contextlib.suppress(OSError):
            if path.stat().st_size > 1.25 * size + SLACK_BYTES:
                self._mappings.pop(path, None)  # the former content has no readers left and is about to be overwritten
                os.truncate(path, size)

    def _path(self, owner: str, slot: int) -> Path:
        return self.folder / f"{short(self.holder)}-{short(owner)}-{slot}"

    # --- reading -------------------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Return all complete parts on this host, those of ended workers included; then those on disk."""
        paths = parts_in(self.folder)
        if self._disk is not None:
            paths += [path for folder in sorted(self._disk.glob("*")) for path in parts_in(folder)]
        return [part for path in paths if (part := self._read(path)) is not None]

    def part_of(self, owner: str, name: Name) -> Part | None:
        """Return the owner's own part of a snapshot, if it is in this host's memory and complete."""
        paths = (self.folder / f"{short(owner)}-{short(owner)}-{slot}" for slot in (0, 1))
        found = [part for path in paths if path.exists() and (part := self._read(path)) is not None]
        return next((part for part in found if part.header.name == name and part.header.owner == owner), None)

    def on_disk(self, name: Name) -> tuple[Path, Path] | None:
        """Return the path of this worker's own part of a snapshot, and its target on disk; None if it is missing."""
        if self._disk is None:
            return None
        path = next((p for slot in (0, 1) if self._name(p := self._path(self.holder, slot)) == name), None)
        target = self._path(self.holder, 0).name  # one name for both slots, so that older parts are found
        return (path, self._disk / f"{name[0]:08d}-{name[1]:012d}" / target) if path is not None else None

    def _read(self, path: Path) -> Part | None:
        try:
            if path in self._mappings:
                mapping = self._mappings[path]
            else:
                with path.open("rb") as file:
                    if os.fstat(file.fileno()).st_size == 0:
                        return None  # its memory is being reserved
                    mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            magic, is_complete, length, start = PREFIX.unpack_from(mapping)
            if magic != MAGIC or not is_complete:
                return None
            header = PartHeader.decode(mapping[PREFIX.size : PREFIX.size + length])
            values = torch.frombuffer(mapping, dtype=torch.uint8, count=header.num_bytes, offset=start)
        except (OSError, ValueError, OverflowError, struct.error, SnapshotError) as error:
            if path.exists():
                log.warning("ignored %s, which is not a part of a snapshot: %s", path, error)
            return None
        return Part(header, path.name.split("-")[0], values, path.parent == self.folder)

    # --- cleaning up ---------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that this worker's parts take."""
        total = 0
        for path in self.folder.glob(f"{short(self.holder)}-*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def drop_others(self, members: Sequence[str], owners: Sequence[str]) -> None:
        """Remove parts held by former members, and this worker's copies of parts of workers other than `owners`."""
        holders = {short(member) for member in members}
        wanted = {short(owner) for owner in (*owners, self.holder)}
        for path in self._files():
            holder, owner, _ = path.name.split("-")
            if holder not in holders or (holder == short(self.holder) and owner not in wanted):
                self._remove(path)

    def close(self) -> None:
        """Create no more files, not even from an abandoned thread."""
        with self._creating:
            self._is_closed = True
            self._mark = None

    def clear(self) -> None:
        """Remove everything permanently, because the job has ended."""
        self.close()
        self.clear_memory()
        if self._disk is not None:
            shutil.rmtree(self._disk, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.folder / JOB_FILE).unlink(missing_ok=True)
            self.folder.rmdir()

    def clear_memory(self) -> None:
        """Remove all parts in memory, because no worker on this host will read them."""
        for path in self._files():
            self._remove(path)

    def _files(self) -> list[Path]:
        """Return the files of all workers of this host, without foreign files."""
        return [path for path in self.folder.glob("*-*-*") if path.name.count("-") == 2]

    def _remove(self, path: Path) -> None:
        self._mappings.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def sweep(self, older_than_s: float) -> None:
        """Remove the parts of jobs that were killed long ago and never restarted.

        A job with a live worker on this host keeps its parts: it may have waited for other nodes since its last snapshot.
        """
        for folder in self.folder.parent.iterdir():
            with contextlib.suppress(OSError):
                newest = max((p.stat().st_mtime for p in (folder, *folder.iterdir())), default=0.0)
                if folder != self.folder and time.time() - newest > older_than_s and not is_held(folder):
                    shutil.rmtree(folder, ignore_errors=True)
