"""A stock torchrun process under test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from warm_process import WarmProcess


@dataclass
class Agent:
    """One torchrun process and its workers."""

    process: WarmProcess
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
