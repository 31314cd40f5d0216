"""Tools of the workers of `elastic_agents.py`: their identity, gates to wait at, and marks that they leave."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import eventually

GATE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Worker:
    """One started worker. Without torch: a script that uses it starts in milliseconds."""

    folder: Path  # folder of the job
    agent: int  # index in the test's order of starts
    rank: int
    world_size: int
    restart: int
    master_port: str

    @staticmethod
    def started() -> Worker:
        """Return this process as a worker, and record its environment."""
        environ = os.environ
        worker = Worker(
            Path(environ["CONTRACT_FOLDER"]),
            int(environ["CONTRACT_AGENT"]),
            int(environ["RANK"]),
            int(environ["WORLD_SIZE"]),
            int(environ["TORCHELASTIC_RESTART_COUNT"]),
            environ["MASTER_PORT"],
        )
        name = f"started-{time.monotonic_ns():020d}-{worker.master_port}-{os.getpid()}"
        worker.leave(name, json.dumps({**environ, "PID": os.getpid()}))
        return worker

    def leave(self, mark: str, text: str = "") -> None:
        """Write a file that the test, and other workers, find complete or not at all."""
        unfinished = self.folder / f"unfinished-{mark}-{os.getpid()}"
        unfinished.write_text(text)
        unfinished.rename(self.folder / mark)

    def has(self, mark: str) -> bool:
        return (self.folder / mark).exists()

    def wait_for(self, mark: str) -> None:
        eventually(lambda: self.has(mark), f"{mark!r}", GATE_TIMEOUT_S)

    def wait_for_all(self) -> None:
        """Wait until all workers of this round have started: when one fails, an agent also ends those that have not."""
        started = f"started-*-{self.master_port}-*"
        eventually(lambda: len(list(self.folder.glob(started))) >= self.world_size, "all workers of this round", GATE_TIMEOUT_S)
