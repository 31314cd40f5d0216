"""The frames of all threads, for reports of a worker's position."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

__all__ = ["current_frames", "main_thread_frame"]


def current_frames() -> dict[int, FrameType]:
    """Return the topmost frame of each thread by its identifier.

    Python before 3.11.8 and 3.12.2 collects garbage in this call while it holds the lock of all threads, and a finalizer that
    waits for another thread then stops the process for good (CPython issue 106883). So garbage is not collected here.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def main_thread_frame() -> FrameType | None:
    """Return the main thread's topmost frame."""
    return current_frames().get(threading.main_thread().ident or 0)
