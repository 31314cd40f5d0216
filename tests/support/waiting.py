"""Waiting for what happens beside a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["TooLateError", "eventually", "run_until"]

T = TypeVar("T")

POLL_S = 0.01


class TooLateError(AssertionError):
    """What a test waited for did not happen in time."""


def eventually(found: Callable[[], T | None], what: str, timeout_s: float = 30.0) -> T:
    """The first true result of `found`."""
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        if time.monotonic() > deadline:
            raise TooLateError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(POLL_S)
    return result


def run_until(step: Callable[[], object], found: Callable[[], object], what: str, timeout_s: float) -> None:
    """Take steps until `found` is true."""
    deadline = time.monotonic() + timeout_s
    while not found():
        if time.monotonic() > deadline:
            raise TooLateError(f"waited {timeout_s:g} s in vain: {what}")
        step()
