"""Resources that a test must give back when it ends: threads, processes, variables and files of this package."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0
"""Grace period in seconds for threads and processes to end on their own after a test."""

SHARED_PROCESSES = ("resource_tracker", "forkserver", "compile_worker", "elastic_agents", "warm_tree import serve")
"""Parts of the command lines of helpers that this process starts once and keeps. Processes forked from them belong to tests."""

STARTED_BY = "TEST_PROCESS"
"""Environment variable that marks descendants of this process, also orphans."""

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "socket.sendmsg")
"""Audit events after which this process may have new descendants. With the last one a helper is asked to fork."""

_may_be_new = threading.Event()
_may_be_new.set()
_descendants: set[int] = set()


@dataclass(frozen=True)
class Held:
    """Resources of this process at one moment."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    variables: frozenset[tuple[str, str]]
    files: frozenset[str]

    @staticmethod
    def now() -> Held:
        return Held(
            frozenset(thread for thread in threading.enumerate() if thread.name.startswith("dlrover-")),
            frozenset(_processes()),
            frozenset(item for item in os.environ.items() if item[0].startswith("DLROVER_")),
            frozenset(_open_files()),
        )

    def since(self, before: Held) -> list[str]:
        """Each resource that is new since `before`, or missing in the case of variables."""
        return [
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"process {pid}: {command}" for pid in self.processes - before.processes if (command := _command(pid))),
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


def mark_descendants() -> None:
    """Set the variable that marks processes started by this one, and note whenever it may start one."""
    os.environ[STARTED_BY] = str(os.getpid())
    sys.addaudithook(_note)


def _note(event: str, _arguments: object) -> None:
    if event in STARTS:
        _may_be_new.set()


def _processes() -> set[int]:
    """Children and marked descendants of this process, without the helpers."""
    global _descendants
    if _may_be_new.is_set():
        _may_be_new.clear()
        _descendants = _marked()
    children = set(_children())
    helpers = {pid for pid in children if any(part in _command(pid) for part in SHARED_PROCESSES)}
    return (children | _descendants) - helpers - {os.getpid()}


def _marked() -> set[int]:
    """Processes with the mark. Reading the environments of all processes takes milliseconds."""
    mark = f"\0{STARTED_BY}={os.getpid()}\0".encode()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if mark in b"\0" + Path("/proc", name, "environ").read_bytes():
                    found.add(int(name))
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


def _command(pid: int) -> str:
    """Command line of a process; empty once it has ended, even if its parent has not waited for it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""
