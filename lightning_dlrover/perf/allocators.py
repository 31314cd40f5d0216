"""Memory that an allocator holds while a program allocates and frees.

Live bytes alone underestimate it: an allocator rounds sizes up, and freed memory stays with the process, in holes that the next
request may not fit into.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Allocator", "CudaCache", "Event", "Footprint"]

MIB = 1 << 20

Event = tuple[int, int]
"""Handle of an allocation and its bytes; 0 bytes free it."""


class Allocator(Protocol):
    """An allocator in its current state."""

    @property
    def held_bytes(self) -> int:
        """Memory that other programs cannot use."""
        ...

    def allocate(self, handle: int, num_bytes: int) -> None: ...

    def free(self, handle: int) -> None: ...


class Footprint:
    """An allocator's peaks while it serves events, one after the other."""

    def __init__(self, allocator: Allocator) -> None:
        self.live_bytes = 0  # allocated and not yet freed
        self.peak_live_bytes = 0
        self.peak_held_bytes = 0
        self.peak_at = 0  # number of events until the peak of the live bytes, inclusive
        self._allocator = allocator
        self._sizes: dict[int, int] = {}
        self._num_events = 0

    def add(self, event: Event) -> None:
        """Serve one event.

        Raises:
            ValueError: it frees a handle that is not allocated, allocates one that is, or has a negative size.
        """
        handle, num_bytes = event
        if num_bytes < 0 or (num_bytes == 0) != (handle in self._sizes):
            raise ValueError(
                f"event {self._num_events} gives handle {handle} {num_bytes} bytes, and it is "
                f"{'' if handle in self._sizes else 'not '}allocated: allocate each handle once, with more than 0 bytes, "
                "before its free"
            )
        self._num_events += 1
        if num_bytes:
            self._sizes[handle] = num_bytes
            self.live_bytes += num_bytes
            self._allocator.allocate(handle, num_bytes)
        else:
            self.live_bytes -= self._sizes.pop(handle)
            self._allocator.free(handle)
        self.peak_held_bytes = max(self.peak_held_bytes, self._allocator.held_bytes)
        if self.live_bytes > self.peak_live_bytes:
            self.peak_live_bytes, self.peak_at = self.live_bytes, self._num_events


@dataclass
class _Space:
    """One range of addresses, used from its start, with free chunks in between."""

    used: dict[int, int] = field(default_factory=dict)  # address: bytes
    by_size: list[tuple[int, int]] = field(default_factory=list)  # free chunks: bytes, address
    starts: dict[int, int] = field(default_factory=dict)  # free chunks by address: bytes
    ends: dict[int, int] = field(default_factory=dict)  # free chunks by the address behind them: address

    def best_fit(self, num_bytes: int) -> tuple[int, int] | None:
        """Return address and bytes of the smallest free chunk of at least `num_bytes`."""
        place = bisect_left(self.by_size, (num_bytes, -1))
        return None if place == len(self.by_size) else (self.by_size[place][1], self.by_size[place][0])

    def take(self, address: int, num_bytes: int, split_above: int) -> None:
        """Use a free chunk; a rest of more than `split_above` bytes stays free."""
        size = self.remove(address)
        if size - num_bytes > split_above:
            self.add(address + num_bytes, size - num_bytes)
            size = num_bytes
        self.used[address] = size

    def give(self, address: int) -> int:
        """Free a used chunk, merge it with free neighbours, and return the address of the result."""
        size = self.used.pop(address)
        if address in self.ends:
            before = self.ends[address]
            size += self.remove(before)
            address = before
        if address + size in self.starts:
            size += self.remove(address + size)
        self.add(address, size)
        return address

    def add(self, address: int, num_bytes: int) -> None:
        insort(self.by_size, (num_bytes, address))
        self.starts[address] = num_bytes
        self.ends[address + num_bytes] = address

    def remove(self, address: int) -> int:
        size = self.starts.pop(address)
        del self.ends[address + size]
        self.by_size.pop(bisect_left(self.by_size, (size, address)))
        return size


class CudaCache:
    """torch's caching allocator with its default settings (c10/cuda/CUDACachingAllocator.cpp, torch 2.13).

    Sizes are multiples of 512 bytes. Requests up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB;
    larger ones get a segment of their own, a multiple of 2 MiB. Freed segments stay reserved.
    """

    ROUND_BYTES = 512
    SMALL_BYTES = 1 * MIB
    SMALL_SEGMENT_BYTES = 2 * MIB
    LARGE_SEGMENT_BYTES = 20 * MIB
    MIN_LARGE_BYTES = 10 * MIB
    LARGE_ROUND_BYTES = 2 * MIB

    def __init__(self) -> None:
        self._reserved = 0
        self._small, self._large = _Space(), _Space()
        self._places: dict[int, tuple[_Space, int]] = {}

    @property
    def held_bytes(self) -> int:
        return self._reserved

    def allocate(self, handle: int, num_bytes: int) -> None:
        size = -(-num_bytes // self.ROUND_BYTES) * self.ROUND_BYTES
        is_small = size <= self.SMALL_BYTES
        space = self._small if is_small else self._large
        if (found := space.best_fit(size)) is None:
            segment = self._segment_bytes(size)
            # One unused address between segments keeps their chunks apart.
            space.add(2 * self._reserved + 1, segment)
            found = (2 * self._reserved + 1, segment)
            self._reserved += segment
        space.take(found[0], size, self.ROUND_BYTES - 1 if is_small else self.SMALL_BYTES)
        self._places[handle] = (space, found[0])

    def free(self, handle: int) -> None:
        space, address = self._places.pop(handle)
        space.give(address)

    def _segment_bytes(self, size: int) -> int:
        if size <= self.SMALL_BYTES:
            return self.SMALL_SEGMENT_BYTES
        if size < self.MIN_LARGE_BYTES:
            return self.LARGE_SEGMENT_BYTES
        return -(-size // self.LARGE_ROUND_BYTES) * self.LARGE_ROUND_BYTES
