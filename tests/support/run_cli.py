"""Run the `dlrover` command within a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.cli.main import main
from lightning_dlrover.rdzv.job.records import EventRecord, encode
from lightning_dlrover.report.status import JobPlace


class RunCli:
    """Runs a command in this process; returns its exit code, output and errors."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(str(end.code))
        output = self._capsys.readouterr()
        return code, output.out, output.err

    def output(self, *arguments: object) -> str:
        """Run a command that succeeds; return its output."""
        code, output, errors = self(*arguments)
        assert code == 0, errors
        return output

    def refused(self, *arguments: object) -> str:
        """Run a command that is refused; return its errors."""
        code, _, errors = self(*arguments)
        assert code == 2, errors
        assert "Traceback" not in errors
        return errors


def left_folder(*events: EventRecord, endpoint: str = "127.0.0.1:1") -> Path:
    """Write the run folder of the job `job`, as a `dlrover run` leaves it; return it."""
    folder = Path("runs/job")
    folder.mkdir(parents=True)
    JobPlace("job", endpoint).write(folder)
    if events:
        (folder / "events.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in events))
    return folder
