"""Names that commands, options and policies had before 0.1, which are accepted until 0.2 with one line on stderr."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_dlrover.cli.plugin_commands import Command
from lightning_dlrover.output import complain

FORMER_POLICIES = {"ours": "jct"}
"""Former names of policies that divide a cluster, and today's."""


def add_renamed_option(parser: Any, name: str, former: str, **given: Any) -> None:
    """Add an option that had another name.

    Args:
        given: the other arguments of `add_argument`.
    """
    added = parser.add_argument(name, **given)
    if not isinstance(added, argparse.Action):
        return  # a command that is not given has no options, see `parser.py`
    kind: Any = type(added)

    class _Former(kind):  # type: ignore[misc]
        def __call__(self, *given: Any, **others: Any) -> None:
            warn_of_former_name(former, name)
            super().__call__(*given, **others)

    same = {key: value for key, value in given.items() if key not in ("action", "dest", "default", "help", "required")}
    hidden = {"dest": added.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument(former, action=_Former, **same, **hidden)


class FormerCommand:
    """A command under its former name: it is not listed in `dlrover --help`.

    Args:
        former, today: names, such as `brain` and `pool run`.
    """

    summary = ""

    def __init__(self, former: str, today: str, command: Command) -> None:
        self._former, self._today = former, today
        self._command = command

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.description = self._command.summary
        self._command.add_options(parser)

    def run(self, options: argparse.Namespace) -> int:
        warn_of_former_name(f"`dlrover {self._former}`", f"`dlrover {self._today}`")
        return self._command.run(options)


def todays_policy(name: str) -> str:
    """Return today's name of a policy."""
    if (today := FORMER_POLICIES.get(name)) is None:
        return name
    warn_of_former_name(f"policy {name}", today)
    return today


def warn_of_former_name(former: str, today: str) -> None:
    complain(f"{former} is now called {today}; the former name will be gone in 0.2")
