"""Commands of `dlrover` that other packages add by entry points of the group `dlrover.commands`."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Protocol, runtime_checkable

from lightning_dlrover.plugins import Plugin, plugins

COMMANDS = "dlrover.commands"
"""Group of the entry points. The name of each is that of its command."""


@runtime_checkable
class Command(Protocol):
    """A command of another package. Its module is imported for `dlrover --help`, too, so it should import little."""

    summary: str
    """The command's line in `dlrover --help`."""

    def add_options(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the command's options to its parser."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return the process's exit code.

        Raises:
            UsageError: it was refused; the message is shown without a traceback.
        """
        ...


def command_plugins(taken: Collection[str]) -> list[Plugin]:
    """Return the commands of other packages, without importing them.

    Args:
        taken: names of the built-in commands.
    """
    return plugins(COMMANDS, taken)
