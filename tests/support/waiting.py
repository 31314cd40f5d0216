"""Waits for events outside the test's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


class TooLateError(AssertionError):
    """An awaited event did not happen in time, or cannot happen any more."""


def eventually(
    found: Callable[[], T | None],
    what: str,
    timeout_s: float = 30.0,
    poll_s: float = POLL_S,
    *,
    ended: Callable[[], str] | None = None,
    report: Callable[[], str] | None = None,
    error: type[Exception] = TooLateError,
) -> T:
    """Poll `found` and return its first true result.

    Args:
        poll_s: seconds between looks; a costly look needs more than the default.
        ended: returns why the event cannot happen any more, or "". The last action of an ended process may be the event itself,
            so `found` has one more look.
        report: returns additional text for the error, such as logs.
        error: type of the error.
    """
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        if over := ended() if ended is not None else "":
            if result := found():
                break
        elif time.monotonic() > deadline:
            over = f"waited {timeout_s:g} s in vain"
        if over:
            raise error(f"{over}: {what}" + (f"\n{report()}" if report is not None else ""))
        time.sleep(poll_s)
    return result


def run_until(step: Callable[[], object], found: Callable[[], object], what: str, timeout_s: float) -> None:
    """Take steps until `found` is true."""
    deadline = time.monotonic() + timeout_s
    while not found():
        if time.monotonic() > deadline:
            raise TooLateError(f"waited {timeout_s:g} s in vain: {what}")
        step()
