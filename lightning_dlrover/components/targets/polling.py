"""When a target lists its nodes, and what the newest list is good for.

A failed request never means that a node has ended. It is repeated with growing pauses, and the last list holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_dlrover.components.targets.target import TargetError

__all__ = ["Polling"]

T = TypeVar("T")

_MAX_BACKOFF_S = 60.0
_STEADY_AFTER_S = 60.0
"""Seconds without a change after which lists are requested less often."""

_SOON_S = 0.5
"""Maximum seconds until the next list after a change that was requested."""


class Polling(Generic[T]):
    """The newest list of a job's nodes.

    Args:
        request: lists the nodes; raises TargetError.
        newest: list that holds before the first answer.
        poll_s: minimum interval between requests. It doubles with every failure in a row, up to a minute.
        steady_s: interval once nothing has changed for a minute; default: `poll_s`.
    """

    def __init__(
        self,
        request: Callable[[], T],
        newest: T,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
        steady_s: float = 0.0,
    ) -> None:
        self._request = request
        self._poll_s = poll_s
        self._steady_s = max(poll_s, steady_s)
        self._clock = clock
        self._changed_at = clock()
        self._trouble: TargetError | None = None
        self._num_failures = 0  # consecutive ones
        self._next_at = -float("inf")
        self._started_at: dict[str, float] = {}
        self.newest = newest
        self.asked_at = -float("inf")  # request time of the newest list

    def refresh(self) -> bool:
        """List the nodes if a request is due. Return whether there is a new list."""
        now = self._clock()
        if now < self._next_at:
            return False
        try:
            found = self._request()
        except TargetError as error:
            self._trouble, self._num_failures = error, self._num_failures + 1
            pause_s = max(self._poll_s * 2.0 ** min(10, self._num_failures), error.retry_after_s)
            self._next_at = self._clock() + min(_MAX_BACKOFF_S, pause_s)
            return False
        if found != self.newest or self._num_failures:
            self._changed_at = now
        self.newest = found
        self._trouble, self._num_failures, self.asked_at = None, 0, now
        self._next_at = now + (self._steady_s if now - self._changed_at > _STEADY_AFTER_S else self._poll_s)
        return True

    def hasten(self) -> None:
        """List the nodes soon, because a change was requested."""
        self._expect_change(min(_SOON_S, self._poll_s))

    def raise_trouble(self) -> None:
        """
        Raises:
            TargetError: the newest request failed.
        """
        if self._trouble is not None:
            raise self._trouble

    def note_start(self, node: str) -> None:
        self._started_at[node] = self._clock()
        if self._trouble is None:
            self._expect_change(self._poll_s)

    def _expect_change(self, within_s: float) -> None:
        self._changed_at = self._clock()
        self._next_at = min(self._next_at, self._changed_at + within_s)

    def has_started(self, node: str) -> bool:
        """Whether this process has started the node."""
        return node in self._started_at

    def covers(self, node: str) -> bool:
        """Whether the scheduler would have listed the node if it had it: in a list from after the node's start."""
        return self._trouble is None and self.asked_at > self._started_at.get(node, -float("inf"))
