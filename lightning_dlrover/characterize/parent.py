"""Processes that end with their parent, whatever kills it."""

from __future__ import annotations

import ctypes
import signal

__all__ = ["die_with_parent"]


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
