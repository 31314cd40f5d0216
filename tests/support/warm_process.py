"""Python processes without the seconds of their imports: forked from a process that has imported torch and Lightning.

They differ from fresh interpreters in their imports and their command line alone. The fixture `fork_server` must be in use.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.warm_tree import run_program


class WarmProcess:
    """`python WHAT ARGUMENTS`, with the calls of `subprocess.Popen` that tests need."""

    def __init__(
        self,
        what: Callable[[], object],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            what: `run_script` or `run_code`, whose first argument is what to run, or `warm_tree.run_program`, which takes the
                arguments of `python`.
            output: file for the text of standard output, and of standard error unless that has a file of its own, `errors`.
            folder: working directory; that of the test by default.
        """
        for file in (output, errors or output):
            file.touch()
        start = (what, list(arguments), dict(environment), (output, errors or output), folder or Path.cwd())
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=start)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_warm(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end as a warm process, and the programs that it starts; return the outcome.

    Args:
        folder: working directory, which also receives the output.
    """
    files = folder / "warm-output", folder / "warm-errors"
    for file in files:
        file.write_bytes(b"")
    process = WarmProcess(run_program, arguments, environment, *files, folder=folder)
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess([*arguments], code, *(file.read_text() for file in files))


def run_script() -> None:
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_code() -> None:
    """Run the source that is the first argument, as `python -c` does."""
    source, sys.argv[0] = sys.argv[0], "-c"
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def _run(
    what: Callable[[], object], arguments: list[str], environment: dict[str, str], streams: tuple[Path, Path], folder: Path
) -> None:
    atexit._clear()
    for number, file in enumerate(streams, start=1):
        taken = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(taken, number)
        os.close(taken)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    try:
        what()
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves with os._exit
