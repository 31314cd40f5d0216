"""Hooks of `dlrover run` that other packages add by entry points of the group `dlrover.run`.

A hook decides when a job may start its first node, such as once its pool has room for it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.output import complain
from lightning_dlrover.plugins import PluginError, plugins

if TYPE_CHECKING:
    from lightning_dlrover.components.targets.machine.shares import Claims
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.rdzv.job.records import Keys


RUN_HOOKS = "dlrover.run"
"""Group of the entry points."""


class Ticket(Protocol):
    """The permission of a job to run. Leaving the context gives it back; all nodes have ended by then."""

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
        ...


class TicketRequest(Protocol):
    """A job's wish to run, as its options give it."""

    @property
    def surplus_s(self) -> float:
        """Seconds that a node may outlast its place in the job, as others wait for its resources."""
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
        ...

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
    """Add the options of all hooks. A hook that cannot be used is named on stderr, and left out."""
    for plugin in plugins(RUN_HOOKS):
        try:
            plugin.load(RunHook).add_options(run)  # type: ignore[type-abstract]
        except PluginError as error:
            complain(str(error))
        except Exception as error:  # of a foreign module, such as an option that there is already
            complain(str(plugin.error(f"its options: {error}")))


def requested_ticket(options: argparse.Namespace, endpoint: str | None, prefix: str) -> TicketRequest | None:
    """Return the request of the hook that the options of `dlrover run` ask for.

    Raises:
        UsageError: they ask for more than one, or contradict each other.
    """
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
