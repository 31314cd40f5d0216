"""Run the `dlrover` command within a test."""

from __future__ import annotations

import pytest

from lightning_dlrover.cli.main import main


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
