"""Memory for tables in which every row of every table has an address of its own, on every worker.

The cost of a change of workers is largely memory: pages touched for the first time, and rows that stay with their worker but
are copied into its new shard. Addresses, in contrast, cost nothing. The rows of a shard determine its address, so rows that a
worker keeps stay in place, and only rows from other workers need pages.

Huge pages are used where the kernel has them. With 4 KiB pages, page faults take several times as long as the bytes do on the
wire. Memory of rows that were sent away is given back page by page at once, not when its module happens to be collected.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Hashable
from dataclasses import dataclass

import torch

__all__ = ["Arena", "touch", "warm"]

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


class _Addresses:
    """A range of addresses, aligned to huge pages, that is given back with its last user."""

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


@dataclass
class _Range:
    """Position of the rows of one table, or of one of its states: offsets in the arena, in bytes."""

    start: int
    size: int  # bytes of all rows of the table
    first: int = 0  # bytes in use now, up to `end`
    end: int = 0


class Arena:
    """Places shards by their rows.

    Args:
        num_bytes: addresses, not memory: at least enough for all rows of all tables, and as much again for their replacements.
            Three times as many addresses follow for callers that choose a place themselves.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        self._addresses = _Addresses(4 * self.num_bytes)
        self._former: dict[Hashable, _Range] = {}
        self._present: dict[Hashable, _Range] = {}
        self._next = 0  # nothing was placed from here on
        self._reserve: _Addresses | None = None  # touched already
        self._reserve_taken = 0

    def values(self, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Return the whole arena from a byte on, of one dimension; bytes that were never written read as zeros."""
        length = self._addresses.num_bytes - start
        buffer = (ctypes.c_char * length).from_address(self._addresses.start + start)
        buffer.owner = self._addresses  # type: ignore[attr-defined]  # tensors keep the buffer
        return torch.frombuffer(buffer, dtype=dtype, count=length // dtype.itemsize)

    # --- one layout after another ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a new layout beside the former one."""
        self.finish()
        self._former, self._present = self._present, {}

    def place(self, key: Hashable, size: int, first: int, length: int, at: int | None = None) -> int:
        """Return the offset of bytes `first` to `first + length` of the rows under `key`.

        The same key has the same rows at the same place in the next layout, with their last values.

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
        """Return a free place of that size: behind all others while there is room, else the first large enough gap."""
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
        """Give back all memory that the present layout does not use. The former layout is forgotten."""
        present = {r.start: r for r in self._present.values()}
        for former in (*self._former.values(), *self._present.values()):
            end = -(-(former.start + former.size) // PAGE) * PAGE  # its last page holds nothing else
            used = present.get(former.start)
            if used is None or used.first == used.end:
                self._drop(former.start, end)
            else:
                self._drop(former.start, used.first)
                self._drop(used.end, end)
        self._former = {}

    def release(self, tensor: torch.Tensor) -> None:
        """Give the pages entirely inside a contiguous tensor back to the system; its values are lost.

        Does nothing for memory outside of this arena.
        """
        start = tensor.data_ptr() - self._addresses.start
        if tensor.is_contiguous() and start >= 0 and start + tensor.nbytes <= self._addresses.num_bytes:
            self._drop(start, start + tensor.nbytes)

    def close(self) -> None:
        """Give all memory back; remaining tensors read as zeros."""
        self.drop_reserve()
        self.begin()
        self.finish()

    def _drop(self, start: int, end: int) -> None:
        start, end = _inside(start, end, PAGE)
        if end > start:
            _libc.madvise(self._addresses.start + start, end - start, MADV_DONTNEED)

    # --- memory ahead of time ---------------------------------------------------------------------------------------------

    def reserve(self, num_bytes: int) -> None:
        """Touch this much memory now, for later placements."""
        self.drop_reserve()
        if num_bytes:
            self._reserve, self._reserve_taken = _touched(num_bytes), 0

    def drop_reserve(self) -> None:
        """Give the rest of the reserve back."""
        self._reserve = None

    def _take_reserve(self, first: int, end: int) -> None:
        """Move huge pages of the reserve to bytes that have none yet."""
        first, end = _inside(first, end, HUGE_PAGE)
        if self._reserve is None or end <= first:
            return
        length = min(end - first, self._reserve.num_bytes // HUGE_PAGE * HUGE_PAGE - self._reserve_taken)
        if length <= 0:
            return
        source = self._reserve.start + self._reserve_taken
        # The source's addresses stay ours: other memory might be mapped there before they are given back. Since Linux 5.7.
        flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
        if _libc.mremap(source, length, length, flags, self._addresses.start + first) == FAILED:
            return  # these pages are then touched by the first write
        self._reserve_taken += length

    def touch(self, tensor_address: int, num_bytes: int) -> None:
        """Touch the pages of some addresses before they are written; does nothing outside of this arena."""
        start = tensor_address - self._addresses.start
        if num_bytes and start >= 0 and start + num_bytes <= self._addresses.num_bytes:
            _populate(tensor_address, num_bytes)


def warm(num_bytes: int) -> None:
    """Touch this much memory and give it back at once.

    In a virtual machine, a page's first use costs its host many times as much as later ones.
    """
    if num_bytes:
        _touched(num_bytes)


def touch(mapping: mmap.mmap) -> None:
    """Touch a mapping's pages before they are used; does nothing if the kernel cannot."""
    _populate(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(mapping))


def _populate(address: int, num_bytes: int) -> None:
    # `mmap.madvise` would hold the GIL, and stop all other threads, for the seconds that this takes.
    # Done piece by piece, because no other thread can get memory meanwhile.
    start, end = address // PAGE * PAGE, -(-(address + num_bytes) // PAGE) * PAGE
    for at in range(start, end, PIECE):
        _libc.madvise(at, min(PIECE, end - at), MADV_POPULATE_WRITE)  # since Linux 5.14


def _touched(num_bytes: int) -> _Addresses:
    addresses = _Addresses(num_bytes)
    _libc.madvise(addresses.start, num_bytes, MADV_HUGEPAGE)
    _populate(addresses.start, num_bytes)
    return addresses


def _inside(start: int, end: int, border: int) -> tuple[int, int]:
    """Return the part of a range that begins and ends at page borders."""
    return -(-start // border) * border, end // border * border
