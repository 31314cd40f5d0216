"""One job's processes, as the dispatcher holds them: a supervisor and everything below it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover.codec import from_fields
from lightning_dlrover.colocate import supervisor

__all__ = ["Outcome", "SupervisedJob", "read_outcome"]

RESULT = "result.json"
OUTPUT = "output.log"
LAST_LINES = 3
MAX_TAIL_BYTES = 8_192


@dataclass(frozen=True)
class Outcome:
    """How a job's command has ended.

    Args:
        code: exit code. None: the supervisor was killed, and the job with it.
        signal: number of the signal that ended the command; 0: none did.
        asked_to_end: an `end` had been sent.
    """

    code: int | None
    signal: int
    asked_to_end: bool
    cpu_s: float
    largest_process_bytes: int
    began_s: float = 0.0  # seconds since the epoch
    ended_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and not self.signal

    @property
    def text(self) -> str:
        """The end in words."""
        if self.code is None:
            return "its supervisor was killed"
        if self.code == supervisor.EXIT_NOT_STARTED:
            return f"exit code {self.code}, as of a command that cannot be started"
        if self.signal:
            known = {each.value: each.name for each in signal.Signals}
            return f"killed by {known.get(self.signal, f'signal {self.signal}')}"
        return f"exit code {self.code}"

    @property
    def exit_code(self) -> int:
        """The exit code as a shell states it."""
        if self.code is None:
            return 128 + signal.SIGKILL
        return 128 + self.signal if self.signal else self.code


def read_outcome(folder: Path) -> Outcome | None:
    """Return how the job of a folder has ended; None if that is not on record."""
    with suppress(OSError, ValueError):
        return from_fields(Outcome, json.loads((folder / RESULT).read_bytes()), str(folder / RESULT))
    return None


class SupervisedJob:
    """Start a command under a supervisor.

    Args:
        folder: a new folder for the job's output and result.
        working_folder: working folder of the command.
        environment: all variables of the command.
        cores: cores that all its processes are bound to.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        working_folder: str,
        environment: Mapping[str, str],
        cores: Collection[int] = (),
    ) -> None:
        self.folder = folder
        self.output = folder / OUTPUT
        self._result = folder / RESULT
        program = [sys.executable, "-I", "-S", supervisor.__file__, str(self._result), str(self.output), *command]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or before)  # children inherit it from their first instruction on
        try:
            self._supervisor = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=working_folder,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)
        self.end_descriptor: int | None = None
        """Descriptor that can be read once the supervisor has ended; None where the kernel or this Python has none."""
        with suppress(AttributeError, OSError):
            self.end_descriptor = os.pidfd_open(self._supervisor.pid)

    def close(self) -> None:
        """Close the descriptor. The job has ended."""
        if self.end_descriptor is not None:
            os.close(self.end_descriptor)
            self.end_descriptor = None

    @property
    def supervisor_pid(self) -> int:
        return self._supervisor.pid

    def pause(self) -> None:
        """Stop all processes of the job."""
        self._order(b"pause\n")

    def resume(self) -> None:
        """Continue all processes of the job."""
        self._order(b"resume\n")

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to all processes, and SIGKILL after the grace period to those that are left."""
        self._order(f"end {grace_s:g}\n".encode())

    def outcome(self) -> Outcome | None:
        """Return how the job has ended; None while a process of it may live."""
        if self._supervisor.poll() is None:
            return None
        if self._supervisor.stdin is not None:
            with suppress(OSError):
                self._supervisor.stdin.close()
        if (outcome := read_outcome(self.folder)) is not None:
            return outcome
        # A supervisor that could not write the result ends with the command's exit code.
        code = self._supervisor.returncode
        return Outcome(code if code >= 0 else None, 0, False, 0.0, 0)

    def last_words(self) -> str:
        """Return the last lines of the job's output."""
        with suppress(OSError), self.output.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MAX_TAIL_BYTES))
            lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
            return " | ".join("".join(c if c.isprintable() else " " for c in line)[:200] for line in lines[-LAST_LINES:])
        return ""

    def _order(self, order: bytes) -> None:
        assert self._supervisor.stdin is not None
        with suppress(OSError):  # the supervisor has ended; `outcome` has the reason
            self._supervisor.stdin.write(order)
            self._supervisor.stdin.flush()
