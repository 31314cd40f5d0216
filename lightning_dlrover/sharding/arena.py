"""Memory for tables that can be given back page by page, and that comes in huge pages where the kernel has them.

What a change of the workers costs is largely page faults: 4 KiB at a time they take several times as long as the bytes do on
the wire. And the memory of a shard that was sent away must be free at once, not when its module happens to be collected.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_right

import torch

__all__ = ["Arena"]


class Arena:
    """Hands out zeroed tensors, each in a mapping of its own, and frees parts of them before the tensors themselves go."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # addresses, ascending
        self._mappings: list[tuple[int, mmap.mmap]] = []  # size in bytes, mapping; in the order of `_starts`

    def empty(self, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of shape ``(num_values,)``; its memory is not touched yet and reads as zeros."""
        nbytes = num_values * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=num_values)
        start = tensor.data_ptr()
        place = bisect_right(self._starts, start)
        self._starts.insert(place, start)
        self._mappings.insert(place, (nbytes, mapping))
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Give the pages that lie wholly inside a contiguous tensor back to the system: its values are lost.

        Does nothing for memory that is not of this arena.
        """
        if tensor.numel() == 0 or not tensor.is_contiguous():
            return
        place = bisect_right(self._starts, tensor.data_ptr()) - 1
        if place < 0:
            return
        size, mapping = self._mappings[place]
        first = tensor.data_ptr() - self._starts[place]
        if first >= size:
            return
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = first + tensor.nbytes
        end = size if end == size else end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            mapping.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Give all memory back; tensors that are still there read as zeros."""
        for size, mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED, 0, size)
        self._starts, self._mappings = [], []
