"""Plugins of the command line, found by entry points: commands, their former names, and hooks of `dlrover run`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.output import complain
from lightning_dlrover.plugins import Plugin, PluginError, plugins

if TYPE_CHECKING:
    from lightning_dlrover.components.targets.machine import Claims
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.rdzv.job.records import Keys

COMMANDS = "dlrover.commands"
"""Group of the entry points of commands. The name of each is that of its command."""


@runtime_checkable
class Command(Protocol):
    """A command of another package. Its module is imported for `dlrover --help`, too, so it should import little."""

    summary: str
    """The command's line in `dlrover --help`; empty: it is not listed there."""

    def add_options(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the command's options to its parser."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return the process's exit code.

        Raises:
            UsageError: it was refused; the message is shown without a traceback.
        """
        ...


class CommandGroup:
    """A command with subcommands, by name, such as `dlrover pool run`."""

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
    """Return the commands of other packages, without importing them. `taken`: names of the built-in commands."""
    return plugins(COMMANDS, taken)


def add_plugin_options(plugin: Plugin, plugged: Command | RunHook, parser: argparse.ArgumentParser) -> None:
    """Add the options of a plug-in's object. Raise PluginError for any error of it, such as an option that exists."""
    try:
        plugged.add_options(parser)
    except Exception as error:
        raise plugin.error(f"its options: {type(error).__name__}: {error}") from error


# Names of commands, options and policies before 0.1, which are accepted until 0.2 with one line on stderr.

FORMER_POLICIES = {"ours": "jct"}
"""Former names of policies that divide a cluster, and today's."""


def add_renamed_option(parser: Any, name: str, former: str, **given: Any) -> None:
    """Add an option that had another name. `given` holds the other arguments of `add_argument`."""
    added = parser.add_argument(name, **given)
    kind: Any = type(added)

    class _Former(kind):  # type: ignore[misc]
        def __call__(self, *given: Any, **others: Any) -> None:
            warn_of_former_name(former, name)
            super().__call__(*given, **others)

    same = {key: value for key, value in given.items() if key not in ("action", "dest", "default", "help", "required")}
    hidden = {"dest": added.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument(former, action=_Former, **same, **hidden)


class FormerCommand:
    """A command under its former name, such as `brain` for `pool run`. It is not listed in `dlrover --help`."""

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


RUN_HOOKS = "dlrover.run"
"""Group of the entry points of hooks. A hook decides when a job may start its first node."""


class Ticket(Protocol):
    """The permission of a job to run. Leaving the context releases it; all nodes have ended by then."""

    @property
    def gpus(self) -> Claims | None:
        """GPUs of this machine that the job may use; None: all that it sees."""
        ...

    def __enter__(self) -> Ticket: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def keep(self) -> None:
        """Renew the permission. Called several times a second while the job runs; must neither wait nor raise."""


class TicketRequest(Protocol):
    """A job's request to run, as its options describe it."""

    @property
    def surplus_s(self) -> float:
        """Seconds that a node may outlast its place in the job, because others wait for its resources."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the job's nodes."""
        ...

    def wait(self, client: EtcdClient, keys: Keys) -> Ticket:
        """Wait until the job may run.

        Raises:
            UsageError: it may not run, or did not get the permission in time.
        """
        ...


@runtime_checkable
class RunHook(Protocol):
    """Lets another package decide when jobs of `dlrover run` may start."""

    def add_options(self, run: argparse.ArgumentParser, /) -> None:
        """Add the hook's options to those of `dlrover run`."""

    def request(self, options: argparse.Namespace, endpoint: str | None, prefix: str) -> TicketRequest | None:
        """Return the job's request; None if its options do not ask for one.

        Args:
            options: all options of `dlrover run`, checked.
            endpoint: the job's etcd; None: it starts its own.
            prefix: of all jobs' keys in etcd.

        Raises:
            UsageError: the options contradict each other.
        """
        ...

    def ticket_key(self, client: EtcdClient, keys: Keys) -> str | None:
        """Return the key in etcd that exists while a job's `dlrover run` waits for its permission, or has it."""
        ...


def add_hook_options(run: argparse.ArgumentParser) -> None:
    """Add the options of all hooks. A hook that cannot be used is named on stderr, and skipped."""
    for plugin in plugins(RUN_HOOKS):
        try:
            add_plugin_options(plugin, plugin.load(RunHook), run)  # type: ignore[type-abstract]
        except PluginError as error:
            complain(str(error))


def requested_ticket(options: argparse.Namespace, endpoint: str | None, prefix: str) -> TicketRequest | None:
    """Return the request of the hook that the options of `dlrover run` ask for. Raise UsageError if there are several."""
    found = {name: asked for name, hook in _hooks().items() if (asked := hook.request(options, endpoint, prefix)) is not None}
    if len(found) > 1:
        raise UsageError(f"the options ask for {' and '.join(found)}; a job can wait for one of them only")
    return next(iter(found.values()), None)


def ticket_key(client: EtcdClient, keys: Keys) -> str | None:
    """Return the key in etcd that exists while a job's `dlrover run` waits for its permission, or has it."""
    return next((key for hook in _hooks().values() if (key := hook.ticket_key(client, keys)) is not None), None)


def _hooks() -> dict[str, RunHook]:
    """Return the hooks that can be used; `add_hook_options` names the others."""
    found = {}
    for plugin in plugins(RUN_HOOKS):
        with contextlib.suppress(PluginError):
            found[plugin.name] = plugin.load(RunHook)  # type: ignore[type-abstract]
    return found
