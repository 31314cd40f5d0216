"""Start, follow, report and end processes of tests and benchmarks. `waiting.eventually` waits for them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import psutil

T = TypeVar("T")


def start_logged(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that adds its output and errors to `log`, and leads a session: Ctrl-C reaches this process alone.

    Args:
        env: its whole environment; None: this process's own.
        folder: its working directory.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """Return the processes that this one has started; none if it has ended."""
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []
    return found


class Parent(Protocol):
    """A process of `subprocess` or `warm_process`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def kill_all(parents: Iterable[Parent], timeout_s: float = 10.0) -> None:
    """Kill processes with all that they have started, at once: parents first, because they would restart killed children."""
    parents = list(parents)
    doomed: dict[int, psutil.Process] = {}
    for parent in parents:
        doomed.update({child.pid: child for child in children(parent.pid, recursive=True)})
        if parent.poll() is None:
            parent.kill()
    for process in doomed.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # checks that the pid is still the same process
    for parent in parents:
        parent.wait(timeout_s)
    psutil.wait_procs(list(doomed.values()), timeout=timeout_s)


def ends_of_logs(folder: Path, num_lines: int = 15) -> str:
    """Return the last lines of each log in a folder, with its name."""
    files = sorted(folder.glob("*.log"))
    return "\n".join(
        f"{file.stem}: {line}" for file in files for line in file.read_text(errors="replace").splitlines()[-num_lines:]
    )


class JsonLines(Generic[T]):
    """The lines of a file that another process writes, read while it does."""

    def __init__(self, path: Path, decode: Callable[[dict[str, Any]], T]) -> None:
        self._path = path
        self._decode = decode
        self._read: list[T] = []
        self._offset = 0

    def read(self) -> list[T]:
        """Return all complete lines so far: the writer may be killed, or interrupted, in mid-line."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._read.append(self._decode(json.loads(line)))
        return self._read


@contextlib.contextmanager
def environment(changed: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start inside the block."""
    saved = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
