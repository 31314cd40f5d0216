"""Describe the position of this process's threads, in a few kilobytes. Decides nothing."""

from __future__ import annotations

import os
import site
import sysconfig
import threading
import traceback
from types import FrameType

from lightning_dlrover.frames import current_frames, main_thread_frame

__all__ = ["innermost_user_place", "is_in_debugger", "stacks"]

MAX_FRAMES = (40, 20, 10, 5)
"""Frames per thread: the largest number with which all threads fit."""

MAX_CHARACTERS = 8000  # characters of all threads together

_DEBUGGERS = ("pdb", "bdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy")
_LIBRARIES = tuple({sysconfig.get_paths()["stdlib"], *site.getsitepackages(), os.path.dirname(os.path.dirname(__file__))})


def stacks() -> str:
    """Return stack traces of all Python threads but ours: main thread first, innermost call last, shortened if long."""
    frames = current_frames()
    main = threading.main_thread()
    others = [t for t in threading.enumerate() if t is not main and not _is_idle_service(t, frames.get(t.ident or 0))]
    shown = [(thread.name, frames[thread.ident]) for thread in (main, *others) if thread.ident in frames]
    text = ""
    for max_frames in MAX_FRAMES:
        text = "\n".join(_of_thread(name, frame, max_frames) for name, frame in shown)
        if len(text) <= MAX_CHARACTERS:
            return text
    return text[: MAX_CHARACTERS - 20] + "\n... (shortened)"


def innermost_user_place() -> str:
    """Return the main thread's FILE:LINE in FUNCTION at the innermost call of code outside of installed libraries."""
    frame = main_thread_frame()
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}" if found is not None else "unknown"


def is_in_debugger() -> bool:
    """Return whether this process is held by a Python debugger, or from outside by one such as gdb."""
    frame = main_thread_frame()
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
    """Return whether this is a thread of ours or of etcd's client, which gives no evidence of the cause of a hang."""
    if thread.name.startswith("dlrover-") or frame is None:
        return True
    names = set()
    walked: FrameType | None = frame
    while walked is not None:
        names.add(str(walked.f_globals.get("__name__", "")).partition(".")[0])
        walked = walked.f_back
    return bool(names & {"grpc", "pyetcd"})


def _of_thread(name: str, frame: FrameType, max_frames: int) -> str:
    summary = traceback.extract_stack(frame)
    left_out = len(summary) - max_frames
    lines = [f"thread {name}:"]
    if left_out > 0:
        # The innermost calls matter more than the callers of the training.
        summary = traceback.StackSummary.from_list(summary[left_out:])
        lines.append(f"  ... {left_out} calls left out")
    for entry in summary:
        lines.append(f"  {entry.filename}:{entry.lineno} in {entry.name}")
        if entry.line:
            lines.append(f"    {entry.line}")
    return "\n".join(lines)
