"""The discipline of every queue of jobs: the order of turns, and the bound on waiting.

Policies that place, policies that size, pools and `dlrover colocate` share it. What fits, they decide each for itself.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Queued", "is_overdue", "turn_of"]


class Queued(Protocol):
    """A job in a queue."""

    @property
    def name(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def submitted_s(self) -> float: ...


def turn_of(job: Queued) -> tuple[int, float, str]:
    """Return the key that sorts jobs by priority, then by submission; names break ties, so no order depends on the caller's."""
    return -job.priority, job.submitted_s, job.name


def is_overdue(waits_since_s: float, now_s: float, max_wait_s: float) -> bool:
    """Return whether a job has waited for longer than the bound."""
    return now_s - waits_since_s > max_wait_s
