"""A stock torchrun process under test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import kill_all
from tests.support.warm_process import WarmProcess


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
        kill_all([self.process])


StartAgent = Callable[..., Agent]
