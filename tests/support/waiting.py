"""Waits for events outside the test's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["TooLateError", "eventually", "run_until"]

T = TypeVar("T")

POLL_S = 0.01


class TooLateError(AssertionError):
    """An awaited event did not happen in time."""


def eventually(found: Callable[[], T | None], what: str, timeout_s: float = 30.0, poll_s: float = POLL_S) -> T:
    """Poll `found` and return its first true result. A costly look needs a longer `poll_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        if time.monotonic() > deadline:
            raise TooLateError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(poll_s)
    return result


def run_until(step: Callable[[], object], found: Callable[[], object], what: str, timeout_s: float) -> None:
    """Take steps until `found` is true."""
    deadline = time.monotonic() + timeout_s
    while not found():
        if time.monotonic() > deadline:
            raise TooLateError(f"waited {timeout_s:g} s in vain: {what}")
        step()
