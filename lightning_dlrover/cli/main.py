"""The `dlrover` command: parses the arguments, then imports the module of the given command and runs it."""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UsageError, quiet_start
from lightning_dlrover.cli.options import flag
from lightning_dlrover.cli.parser import build_parser, completions
from lightning_dlrover.cli.plugins import Command
from lightning_dlrover.components import ESCAPED
from lightning_dlrover.files import give_home
from lightning_dlrover.output import complain, escape_what_cannot_be_encoded, flush, lacks_matplotlib
from lightning_dlrover.plugins import PluginError

_MODULES = {
    "run": "run",
    "init": "init",
    "doctor": "doctor",
    "data": "data",
    **dict.fromkeys(("scale", "drain", "cancel"), "control"),
    **dict.fromkeys(("status", "list", "logs", "stacks"), "show"),
    **dict.fromkeys(("report", "explain", "history"), "reports"),
}
"""Module of each built-in command. Its function is named after the command, with the suffix `_command`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit code."""
    escape_what_cannot_be_encoded()
    with quiet_start() as started:
        result = _main(list(sys.argv[1:] if arguments is None else arguments), started)
    problem = flush()
    if problem is not None and problem.errno != errno.EPIPE and result == EXIT_OK:
        complain(f"standard output cannot be written: {problem.strerror}")
        return EXIT_FAILED
    return result


def _main(given: list[str], started: Callable[[], None]) -> int:
    if given[:2] == ["run", ESCAPED]:
        given[1:] = map(unquote, given[2:])
    if given[:1] == ["--complete"] and "COMP_LINE" in os.environ:  # by bash, see docs/start/running.md
        for name in completions(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]):
            print(name)
        return EXIT_OK
    try:
        options = build_parser(given).parse_args(given)
    except PluginError as error:
        complain(str(error))
        return EXIT_USAGE
    _log_to_stderr(options.verbose)
    try:
        give_home()
        plugin: Command | None = getattr(options, "plugin", None)
        command = plugin.run if plugin is not None else command_function(options.command)
        if options.command != "run":  # its start takes longer, and then it installs handlers of its own
            started()
        return command(options)
    except BrokenPipeError:
        return EXIT_OK
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if text := lacks_matplotlib(error):
            complain(text)
            return EXIT_USAGE
        if not isinstance(error, _refusals()):  # only now, as their imports take longer than those of most commands
            raise
        complain(_text(error, options))
        return EXIT_USAGE


class _PlainLines(logging.Formatter):
    """Writes `warning: MESSAGE`. The name of the module that logs it helps no user."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def _log_to_stderr(verbose: bool) -> None:
    """Print warnings as plain lines; with `verbose`, print information too, with the names of modules."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s") if verbose else _PlainLines())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def _text(error: Exception, options: argparse.Namespace) -> str:
    """Return an error's message. That of a file's error names the option with the file."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str) or not error.strerror:
        return str(error)
    file = Path(error.filename)
    for name in ("out", "output", "run_dir"):
        given = getattr(options, name, None)
        # A file is written under another name first, in the same folder.
        is_there = isinstance(given, Path) and (file.is_relative_to(given) or given.is_relative_to(file))
        if isinstance(given, Path) and (is_there or f".{given.name}." in file.name):
            return f"{flag(name)} {given} cannot be written: {error.strerror}; choose another {flag(name)}"
    return f"{error.filename} cannot be used: {error.strerror}"


def command_function(command: str) -> Callable[[argparse.Namespace], int]:
    """Import the module of a built-in command, and return the function that runs the command."""
    module = importlib.import_module(f"lightning_dlrover.cli.{_MODULES[command]}")
    function: Callable[[argparse.Namespace], int] = getattr(module, f"{command}_command")
    return function


def _refusals() -> tuple[type[Exception], ...]:
    """Return the types of errors that are shown to the user without a traceback."""
    from lightning_dlrover.codec import RecordError
    from lightning_dlrover.components.control.nodes import ControllerBusyError
    from lightning_dlrover.components.targets.target import TargetError
    from lightning_dlrover.rdzv.etcd.server import EtcdServerError
    from lightning_dlrover.rdzv.etcd.types import EtcdError
    from lightning_dlrover.report.metrics import MetricsError
    from lightning_dlrover.report.status import JobNotFoundError
    from lightning_dlrover.tuning.history import HistoryError

    ours = (
        UsageError,
        HistoryError,
        JobNotFoundError,
        ControllerBusyError,
        EtcdError,
        EtcdServerError,
        MetricsError,
        RecordError,
        TargetError,
    )
    return (*ours, ValueError, OSError)
