"""A stock torchrun process under test."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Agent", "Torchrun"]


class Torchrun:
    """`python -m torch.distributed.run ARGUMENTS`, forked from a process that has imported torch.

    It has the calls of `subprocess.Popen` that tests need. Its workers start as ever: as fresh processes.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.touch()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_torchrun, args=(list(arguments), dict(environment), log, os.getcwd()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("torchrun", timeout_s or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _torchrun(arguments: list[str], environment: dict[str, str], log: Path, folder: str) -> None:
    atexit._clear()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["torchrun", *arguments]
    from torch.distributed.run import main

    try:
        main(arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves with os._exit


@dataclass
class Agent:
    """One torchrun process and its workers."""

    process: Torchrun | subprocess.Popen[bytes]
    log_path: Path

    @property
    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def lines(self, prefix: str) -> list[str]:
        # Unbuffered workers write a text and its newline separately, so another worker's text may come between.
        output = self.output.replace(prefix, "\n" + prefix)
        return [line for line in output.splitlines() if line.startswith(prefix)]

    def wait(self, timeout_s: float = 60.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun still runs after {timeout_s:g} s; its output:\n{self.output}") from None

    def kill_with_workers(self) -> None:
        """Kill as if the machine lost power. torchrun starts each worker in its own session."""
        for pid in [*_children(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def _children(pid: int) -> list[int]:
    """All processes below `pid`."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_children(int(child))]
    return found
