"""Resident memory of this process, from `/proc/self/status` (proc(5))."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dlrover.observe.resources import status_bytes

__all__ = ["Resident", "resident"]


@dataclass(frozen=True)
class Resident:
    """Bytes in physical memory."""

    now_bytes: int
    peak_bytes: int  # since the start, or the last `forget_peak`
    anonymous_bytes: int  # heap, stacks and private pages, without those of files
    data_bytes: int  # address space that RLIMIT_DATA counts

    @property
    def peak_anonymous_bytes(self) -> int:
        """Peak without the pages of files, which are as many as now: libraries stay in memory once they are read."""
        return self.peak_bytes - (self.now_bytes - self.anonymous_bytes)


def resident() -> Resident:
    """Return the figures of this process."""
    found = status_bytes("VmRSS", "VmHWM", "RssAnon", "VmData")
    return Resident(found["VmRSS"], found["VmHWM"], found["RssAnon"], found["VmData"])
