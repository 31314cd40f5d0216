"""Resources that a test must give back when it ends: threads, child processes, variables and files of this package."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GRACE_S", "Held", "left_behind"]

GRACE_S = 5.0
"""Grace period in seconds for threads and processes to end on their own after a test."""

SHARED_PROCESSES = ("resource_tracker", "forkserver", "compile_worker")
"""Parts of the command lines of helpers that Python and torch start once and keep for the whole process."""


@dataclass(frozen=True)
class Held:
    """Resources of this process at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    variables: frozenset[tuple[str, str]]
    files: frozenset[str]

    @staticmethod
    def now() -> Held:
        return Held(
            frozenset(thread for thread in threading.enumerate() if thread.name.startswith("dlrover-")),
            frozenset(_children()),
            frozenset(item for item in os.environ.items() if item[0].startswith("DLROVER_")),
            frozenset(_open_files()),
        )

    def since(self, before: Held) -> list[str]:
        """Each resource that is new since `before`, or missing in the case of variables."""
        return [
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"child process {pid}: {_command(pid)}" for pid in self.children - before.children if _is_own(pid)),
            *(f"variable {name}={value}" for name, value in self.variables - before.variables),
            *(f"variable {name} is gone or changed" for name, _ in before.variables - self.variables),
            *(f"open file {path}" for path in self.files - before.files),
        ]


def left_behind(before: Held, grace_s: float = GRACE_S) -> list[str]:
    """Resources acquired since `before` and not given back within the grace period."""
    deadline = time.monotonic() + grace_s
    found = Held.now().since(before)
    while found and time.monotonic() < deadline:
        gc.collect()  # closes files of objects in reference cycles
        time.sleep(0.02)
        found = Held.now().since(before)
    return found


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            found += map(int, (task / "children").read_text().split())
    return found


def _open_files() -> list[str]:
    """Temporary files and shared memory of this package that this process has open.

    Open files, not folders: other test processes on this machine make folders of the same names.
    """
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(("/dev/shm/dlrover-", "/tmp/dlrover-"))]


def _is_own(pid: int) -> bool:
    """Return whether a test is responsible for this process: it runs, and is not a helper of the whole process."""
    command = _command(pid)
    return bool(command) and not any(part in command for part in SHARED_PROCESSES)


def _command(pid: int) -> str:
    """Command line of a process; empty once it has ended, even if its parent has not waited for it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""
