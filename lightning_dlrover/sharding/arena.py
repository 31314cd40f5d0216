"""Memory for tables that can be given back page by page, and that comes in huge pages where the kernel has them.

What a change of the workers costs is largely page faults: 4 KiB at a time they take several times as long as the bytes do on
the wire. And the memory of a shard that was sent away must be free at once, not when its module happens to be collected.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_right

import torch

__all__ = ["Arena", "touch", "warm"]


class Arena:
    """Hands out zeroed tensors and frees parts of them before the tensors themselves go."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # addresses, ascending
        self._places: list[tuple[int, mmap.mmap, int]] = []  # size in bytes, mapping, offset in it; in the order of `_starts`
        self._reserve: tuple[mmap.mmap, int] | None = None  # touched already; and how much of it is taken

    def reserve(self, num_bytes: int) -> None:
        """Touch so much memory now, for what is asked for later."""
        if num_bytes:
            self._reserve = (_touched(num_bytes), 0)

    def empty(self, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of shape ``(num_values,)``, of zeros; its memory is not touched yet, unless there is some in reserve."""
        nbytes = num_values * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        mapping, offset = self._take(nbytes)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=num_values, offset=offset)
        start = tensor.data_ptr()
        place = bisect_right(self._starts, start)
        self._starts.insert(place, start)
        self._places.insert(place, (nbytes, mapping, offset))
        return tensor

    def _take(self, nbytes: int) -> tuple[mmap.mmap, int]:
        if self._reserve is not None:
            mapping, taken = self._reserve
            if taken + nbytes <= len(mapping):
                self._reserve = (mapping, -(-(taken + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
                return mapping, taken
        return _mapped(nbytes), 0

    def release(self, tensor: torch.Tensor) -> None:
        """Give the pages that lie wholly inside a contiguous tensor back to the system: its values are lost.

        Does nothing for memory that is not of this arena.
        """
        if tensor.numel() == 0 or not tensor.is_contiguous():
            return
        place = bisect_right(self._starts, tensor.data_ptr()) - 1
        if place < 0:
            return
        size, mapping, offset = self._places[place]
        first = tensor.data_ptr() - self._starts[place]
        if first >= size:
            return
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = first + tensor.nbytes
        # Nothing else is in a tensor's last page.
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE if end == size else end // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(end, len(mapping) - offset)
        if end > start:
            mapping.madvise(mmap.MADV_DONTNEED, offset + start, end - start)

    def drop_reserve(self) -> None:
        """Give back what is still in reserve."""
        if self._reserve is not None:
            mapping, taken = self._reserve
            self._reserve = None
            if taken < len(mapping):
                mapping.madvise(mmap.MADV_DONTNEED, taken, len(mapping) - taken)

    def close(self) -> None:
        """Give all memory back; tensors that are still there read as zeros."""
        self.drop_reserve()
        for size, mapping, offset in self._places:
            mapping.madvise(mmap.MADV_DONTNEED, offset, size)
        self._starts, self._places = [], []


def warm(num_bytes: int) -> None:
    """Touch so much memory and give it back at once.

    Where the system is a guest, a page that it has never used costs its host many times what it costs later on.
    """
    if num_bytes:
        _touched(num_bytes).close()


def touch(mapping: mmap.mmap) -> None:
    """Let a mapping's pages be there before they are used; does nothing where the kernel cannot."""
    # Not `mapping.madvise`: it would keep Python's lock, and all other threads from running, for the seconds that this takes.
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise(address, len(mapping), 23)  # MADV_POPULATE_WRITE, since Linux 5.14


def _touched(num_bytes: int) -> mmap.mmap:
    mapping = _mapped(num_bytes)
    touch(mapping)
    return mapping


def _mapped(num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
