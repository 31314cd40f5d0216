"""Bound what a job writes to etcd while nothing but its measurements changes. Pure: no clock, no connection.

etcd keeps each superseded value until it is compacted, and refuses all writes once it is full. So each kind of record that
noise can cause has a budget. Rank 0 writes all five kinds, 3 MB a day at most, and every other worker its profiles alone.
Beyond that only real changes cost bytes: rounds, losses, checkpoints, plans that are carried out.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DECISIONS", "FIRST_WINDOWS", "PROFILES", "PROGRESS", "WINDOWS", "Rate", "WriteBudget", "stored_bytes"]

OVERHEAD_BYTES = 300
"""Bytes of a key, its revision and its lease in etcd's database, and of the entry that marks the removal of the key."""

DAY_S = 86_400.0


@dataclass(frozen=True)
class Rate:
    """Bytes that may be written in any time: `burst_bytes`, and `bytes_per_day` for each day of it."""

    bytes_per_day: int
    burst_bytes: int

    def within(self, seconds: float) -> float:
        """Return the maximum bytes in so many seconds."""
        return self.burst_bytes + self.bytes_per_day * seconds / DAY_S


PROFILES = Rate(bytes_per_day=400_000, burst_bytes=3_500)
"""A worker's profiles, each a kilobyte, apart from the first one of each round and setting."""

WINDOWS = Rate(bytes_per_day=800_000, burst_bytes=3_500)
"""Rank 0's windows in the history, apart from the first ones and the last one of each round and setting."""

FIRST_WINDOWS = Rate(bytes_per_day=200_000, burst_bytes=60_000)
"""Rank 0's first windows of each round and setting that are logged singly."""

DECISIONS = Rate(bytes_per_day=400_000, burst_bytes=40_000)
"""Rank 0's decisions, each six kilobytes, that change nothing, and plans that are only recommended."""

PROGRESS = Rate(bytes_per_day=1_000_000, burst_bytes=150_000)
"""Rank 0's records of the job's progress, each half a kilobyte: every 8 s for the first 45 minutes, then every 40 s."""


class WriteBudget:
    """A token bucket of bytes, full at first."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left = float(rate.burst_bytes)
        self._at: float | None = None

    def take(self, num_bytes: int, now: float) -> bool:
        """Return whether so many bytes may be written. If so, they count as written.

        Args:
            now: seconds of a monotonic clock.
        """
        self._refill(now)
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

    def charge(self, num_bytes: int, now: float) -> None:
        """Count bytes that are written in any case. They leave less for others, but never a debt."""
        self._refill(now)
        self._left = max(0.0, self._left - num_bytes)

    def _refill(self, now: float) -> None:
        passed_s = max(0.0, now - self._at) if self._at is not None else 0.0
        self._at = now
        self._left = min(float(self._rate.burst_bytes), self._left + self._rate.bytes_per_day * passed_s / DAY_S)


def stored_bytes(payload: bytes) -> int:
    """Return the bytes that a value takes in etcd until it is compacted."""
    return len(payload) + OVERHEAD_BYTES
