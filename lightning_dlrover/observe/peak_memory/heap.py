"""The process's own allocator as it would serve a step: real requests, without a touch of their pages.

A heap with the holes and thresholds of this process cannot be simulated from outside. An untouched page needs no memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from lightning_dlrover.perf.allocators import Allocator

__all__ = ["OtherHeap", "OwnHeap", "own_heap"]

ALIGNMENT_BYTES = 64  # c10/core/alignment.h
OTHER_SHARE = 0.25  # share of the live bytes: holes and rounding of an allocator without figures


class _Figures(ctypes.Structure):
    """struct mallinfo2 (mallinfo(3), glibc 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


class OwnHeap:
    """glibc's malloc in this process.

    The held bytes are the live ones and the growth of the free memory in the heap. Other requests of the process do not count,
    but they fill holes, as they do in training.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, int]] = {}  # handle: address, bytes
        self._live_bytes = 0
        self._free_at_start = _free_bytes()

    @property
    def held_bytes(self) -> int:
        return max(0, self._live_bytes + _free_bytes() - self._free_at_start)

    def allocate(self, handle: int, num_bytes: int) -> None:
        address = ctypes.c_void_p()
        if _library().posix_memalign(ctypes.byref(address), ALIGNMENT_BYTES, num_bytes) or address.value is None:
            raise MemoryError(f"the system refuses {num_bytes} bytes of address space for a tensor of the step")
        self._live[handle] = address.value, num_bytes
        self._live_bytes += num_bytes

    def free(self, handle: int) -> None:
        address, num_bytes = self._live.pop(handle)
        self._live_bytes -= num_bytes
        _library().free(ctypes.c_void_p(address))


class OtherHeap:
    """An allocator without figures, such as a preloaded jemalloc: a share of the live bytes is lost."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0

    @property
    def held_bytes(self) -> int:
        return round((1 + OTHER_SHARE) * self._live_bytes)

    def allocate(self, handle: int, num_bytes: int) -> None:
        self._sizes[handle] = num_bytes
        self._live_bytes += num_bytes

    def free(self, handle: int) -> None:
        self._live_bytes -= self._sizes.pop(handle)


def own_heap() -> Allocator:
    """Return the allocator of this process, or a bound if it gives no figures."""
    library = _library()
    if not hasattr(library, "mallinfo2"):
        return OtherHeap()
    heap, before = OwnHeap(), _figures()
    heap.allocate(0, 64 << 20)
    after = _figures()
    heap.free(0)
    grew = after.arena + after.hblkhd - before.arena - before.hblkhd
    return OwnHeap() if grew >= 32 << 20 or after.uordblks - before.uordblks >= 32 << 20 else OtherHeap()


def _free_bytes() -> int:
    return int(_figures().fordblks)


def _figures() -> Any:
    return _library().mallinfo2()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _Figures
    library.free.restype = None
    return library
