"""Tell where the threads of this process stand, in a few kilobytes. Decides nothing."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
import traceback
from types import FrameType

__all__ = ["innermost_user_place", "is_in_debugger", "stacks"]

MAX_FRAMES = 40  # of a thread
MAX_CHARACTERS = 8000  # of all threads together

_DEBUGGERS = ("pdb", "bdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy")
_LIBRARIES = tuple({sysconfig.get_paths()["stdlib"], *site.getsitepackages(), os.path.dirname(os.path.dirname(__file__))})


def stacks() -> str:
    """Stack traces of all Python threads but ours, the main one first, innermost call last, shortened if they are long."""
    frames = sys._current_frames()
    main = threading.main_thread()
    others = [t for t in threading.enumerate() if t is not main and not _is_idle_service(t, frames.get(t.ident or 0))]
    texts = [_of_thread(thread.name, frames[thread.ident]) for thread in (main, *others) if thread.ident in frames]
    text = "\n".join(texts)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 20] + "\n... (shortened)"


def innermost_user_place() -> str:
    """Where the main thread stands, FILE:LINE in FUNCTION: the innermost call of code that is no installed library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}" if found is not None else "unknown"


def is_in_debugger() -> bool:
    """Whether somebody holds this process: with a Python debugger, or from outside as gdb does."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    try:
        with open("/proc/self/status") as file:
            return any(line.startswith("TracerPid:") and int(line.split()[1]) > 0 for line in file)
    except (OSError, ValueError):
        return False


def _is_idle_service(thread: threading.Thread, frame: FrameType | None) -> bool:
    """A thread of ours, or of the client of etcd: no news, whatever the workers hang in."""
    if thread.name.startswith("dlrover-") or frame is None:
        return True
    names = set()
    walked: FrameType | None = frame
    while walked is not None:
        names.add(str(walked.f_globals.get("__name__", "")).partition(".")[0])
        walked = walked.f_back
    return bool(names & {"grpc", "pyetcd"})


def _of_thread(name: str, frame: FrameType) -> str:
    summary = traceback.extract_stack(frame)
    left_out = len(summary) - MAX_FRAMES
    lines = [f"thread {name}:"]
    if left_out > 0:
        # What called the training is of less interest than what the training calls.
        summary = traceback.StackSummary.from_list(summary[left_out:])
        lines.append(f"  ... {left_out} calls left out")
    for entry in summary:
        lines.append(f"  {entry.filename}:{entry.lineno} in {entry.name}")
        if entry.line:
            lines.append(f"    {entry.line}")
    return "\n".join(lines)
