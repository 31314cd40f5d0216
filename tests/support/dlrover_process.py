"""`dlrover` as a user starts it: a process of its own, observed from outside.

All processes of a command inherit a mark in their environment, so that a test can find the ones left behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightning_dlrover.cli.main import main
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.status import read_event_file
from tests.support.processes import start_logged
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, run_warm
from tests.support.warm_tree import run_program

T = TypeVar("T")

MARK = "DLROVER_TEST_MARK"
REPOSITORY = Path(__file__).resolve().parents[2]

POLL_S = 0.1
"""Seconds between looks at a job's status or at all processes. Each costs milliseconds that the job's processes need."""


@dataclass
class Dlrover:
    """A folder for running `dlrover` commands.

    Args:
        is_warm: fork commands, nodes and workers from a process with their imports, see `warm_tree`.
    """

    folder: Path
    is_warm: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary.mkdir()

    @property
    def temporary(self) -> Path:
        """Folder for the temporary files of every process started here."""
        return self.folder / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("DLROVER_", "PET_", "TORCHELASTIC_"))}
        return {**ours, MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}

    def __call__(self, *arguments: object, timeout_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its own end, and return its outcome."""
        command = [sys.executable, "-m", "lightning_dlrover.cli", *map(str, arguments)]
        if self.is_warm:
            return run_warm(command[1:], {**self.environment, **env}, self.folder, timeout_s)
        return self.process(command, timeout_s, **env)

    def process(self, command: Sequence[str], timeout_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *arguments: object, run_id: str = "job") -> Run:
        """Start `dlrover run` in the background, with `run_id` as its name."""
        command = [sys.executable, "-m", "lightning_dlrover.cli", "run", "--rdzv-id", run_id, *map(str, arguments)]
        return self.follow(command, run_id)

    def follow(self, command: Sequence[str], run_id: str) -> Run:
        """Start a command that runs a job of this name, in the background."""
        output = self.folder / f"output-{len(self.runs)}"
        process: subprocess.Popen[bytes] | WarmProcess
        if self.is_warm and command[0] == sys.executable:
            process = WarmProcess(run_program, command[1:], self.environment, output, folder=self.folder)
        else:
            process = start_logged(command, output, self.environment, self.folder)
        self.runs.append(Run(self, run_id, process, output))
        return self.runs[-1]

    def processes(self) -> dict[int, str]:
        """Process ids and command lines of all processes that were started here and still run."""
        mark = f"{MARK}={self.mark}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if mark in (folder / "environ").read_bytes().split(b"\0"):  # empty for a zombie
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        return found

    def assert_all_ended(self, timeout_s: float = 15.0) -> None:
        """Assert that no process started here still runs, and that the folder for temporary files is empty."""
        self.wait_for_end(timeout_s)
        assert sorted(each.name for each in self.temporary.iterdir()) == []

    def wait_for_end(self, timeout_s: float = 30.0) -> None:
        """Wait until no process started here runs any more."""
        what = "the end of all processes"
        eventually(lambda: not self.processes(), what, timeout_s, POLL_S, report=lambda: f"{self.processes()}")

    def end(self) -> None:
        """End the processes left by a failed test."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for run in self.runs:
            run.process.wait(10)


@dataclass
class Run:
    """One `dlrover run`, or the command that has started it."""

    dlrover: Dlrover
    run_id: str
    process: subprocess.Popen[bytes] | WarmProcess
    output_file: Path

    @property
    def folder(self) -> Path:
        return self.dlrover.folder / "runs" / self.run_id

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    @property
    def events(self) -> list[EventRecord]:
        return read_event_file(self.folder / "events.jsonl")

    def wait_for(self, found: Callable[[], T | None], what: str, timeout_s: float = 45.0) -> T:
        """Poll `found` while the job runs, and return its first result that is not None."""

        def ended() -> str:
            code = self.process.poll()
            return f"it ended with code {code} before" if code is not None else ""

        return eventually(found, what, timeout_s, POLL_S, ended=ended, report=self._report)

    def _report(self) -> str:
        return f"{self.output[-6000:]}\nLast status: {self._last_status()}"

    def _last_status(self) -> str:
        try:
            return json.dumps(self.status(), indent=1)[:12_000]
        except AssertionError as error:
            return f"none ({error})"

    def wait_for_output(self, pattern: str, timeout_s: float = 45.0) -> re.Match[str]:
        return self.wait_for(lambda: re.search(pattern, self.output), f"{pattern!r} in the output", timeout_s)

    def status(self) -> dict[str, Any]:
        """Output of `dlrover status --json`, without a process for each look of a wait."""
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(["status", "--json", "--run-dir", str(self.folder.parent), self.run_id])
        assert code == 0, errors.getvalue()
        status: dict[str, Any] = json.loads(output.getvalue())
        return status

    def finish(self, until: Path, timeout_s: float = 60.0) -> None:
        """Make the file at which the job's script ends, and assert that the run ends well."""
        until.touch()
        assert self.wait_for_exit(timeout_s) == 0, self.output

    def wait_for_exit(self, timeout_s: float = 30.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s:.0f} s:\n{self.output[-6000:]}") from None
