"""Commands of `dlrover` that other packages add by entry points of the group `dlrover.commands`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from lightning_dlrover.plugins import Plugin, plugins

COMMANDS = "dlrover.commands"
"""Group of the entry points. The name of each is that of its command."""


@runtime_checkable
class Command(Protocol):
    """A command of another package. Its module is imported for `dlrover --help`, too, so it should import little."""

    summary: str
    """The command's line in `dlrover --help`; empty: it is not listed there."""

    def add_options(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the command's options to its parser."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return the process's exit code.

        Raises:
            UsageError: it was refused; the message is shown without a traceback.
        """
        ...


class CommandGroup:
    """A command whose first argument names one of several commands, such as `dlrover pool run`.

    Args:
        commands: by their names.
    """

    def __init__(self, summary: str, commands: Mapping[str, Command]) -> None:
        self.summary = summary
        self._commands = commands

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        members = parser.add_subparsers(dest="member", required=True, metavar="COMMAND")
        for name, command in self._commands.items():
            member = members.add_parser(name, help=command.summary.replace("%", "%%"), description=command.summary)
            command.add_options(member)

    def run(self, options: argparse.Namespace) -> int:
        return self._commands[options.member].run(options)


def command_plugins(taken: Collection[str]) -> list[Plugin]:
    """Return the commands of other packages, without importing them.

    Args:
        taken: names of the built-in commands.
    """
    return plugins(COMMANDS, taken)
