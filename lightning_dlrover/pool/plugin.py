"""The plug-in of pools for the command line: commands, options, and the hook of `dlrover run`. Imports nothing slow."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_dlrover import variables
from lightning_dlrover.cli import options
from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.cli.options import add_etcd_options, add_place_options, flag
from lightning_dlrover.cli.plugins import CommandGroup, FormerCommand, add_renamed_option, todays_policy, warn_of_former_name

if TYPE_CHECKING:
    from lightning_dlrover.pool.admission import PoolTicket
    from lightning_dlrover.pool.view import MemberRecord, PoolKeys
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.rdzv.job.records import Keys

DEFAULT_POOL = "default"

POOL_POLICIES = ("jct", "sia", "as-requested")
"""Policies of `dlrover pool run`, the default first. `dlrover lab simulate` has others to compare with."""


class BrainCommand:
    """`dlrover pool run`."""

    summary = "divide a budget of cores, GPUs and memory among the jobs of a pool"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        command.description = (
            "Decide, again and again, how many workers each job of a pool has, so that the budget is used best and never "
            "exceeded. Jobs join with `dlrover run --pool`. One process decides; others stand by and take over. Its jobs keep "
            "their sizes while none decides. Ends with Ctrl-C."
        )
        text = "resources of all jobs together, such as cores=64,gpus=8,memory=256G; those left out are not limited"
        command.add_argument("--budget", required=True, type=pool_budget, metavar="LIST", help=text)
        _add_pool(command)
        text = f"how the budget is divided: {', '.join(POOL_POLICIES)} (default {POOL_POLICIES[0]})"
        command.add_argument("--policy", type=pool_policy(POOL_POLICIES), default=POOL_POLICIES[0], metavar="NAME", help=text)
        text = "time between two looks while nothing changes (default 2s)"
        add_renamed_option(command, "--interval", "--every", type=options.duration, default=2.0, metavar="TIME", help=text)
        add_renamed_option(
            command,
            "--max-wait",
            "--longest-wait",
            type=options.duration,
            default=3600.0,
            metavar="TIME",
            help="a job that waits longer goes before all others (default 1h)",
        )
        text = "silence after which this process counts as lost, and another one decides (default 5s); at least the longest "
        text += "--lease-ttl of the pool's jobs"
        command.add_argument("--lease-ttl", type=options.lease, default=5.0, metavar="TIME", help=text)
        text = "weight of an owner's part of the pool, which its jobs share; repeatable (default: 1 each)"
        command.add_argument("--owner-weight", action="append", default=[], type=owner_weight, metavar="OWNER=X", help=text)
        text = "most resources of all jobs of an owner together, such as ads=cores=16,memory=64G; repeatable (default: none)"
        command.add_argument("--quota", action="append", default=[], type=quota, metavar="OWNER=LIST", help=text)
        text = "do not count jobs that are in no pool (default: they are charged to the budget, but never resized)"
        add_renamed_option(command, "--ignore-unmanaged", "--pool-only", action="store_true", help=text)
        options.add_metrics_option(command)
        options.add_notify_option(command)
        add_etcd_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.pool.commands import brain_command

        return brain_command(options)


class QueueCommand:
    """`dlrover pool status`."""

    summary = "show the jobs of a pool: who runs with how much, who waits and why"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        _add_pool(command)
        command.add_argument("--json", action="store_true", help="print JSON")
        add_etcd_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.pool.commands import queue_command

        return queue_command(options)


class WhatIfCommand:
    """`dlrover pool what-if`."""

    summary = "predict time and money with another size, another budget, or without a job, and change nothing"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        command.add_argument("job", metavar="JOB", help="the job's --rdzv-id")
        command.add_argument("--workers", type=options.setting, metavar="N", help="another number of workers of the job")
        text = "resources to add to the pool's budget, such as cores=16,memory=64G, or to take away, such as gpus=-2"
        command.add_argument("--add", type=budget_change, metavar="LIST", help=text)
        command.add_argument(
            "--cluster", action=_FormerClusterOption, nargs=2, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        command.add_argument("--without", metavar="JOB2", help="leave this job of the pool out")
        _add_pool(command)
        add_place_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.pool.commands import what_if_command

        return what_if_command(options)


class DivideCommand:
    """`dlrover pool plan`."""

    summary = "divide cores or GPUs among running jobs by their predicted gains"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        command.description = (
            "Divide a budget of cores, or of GPUs for jobs that train on GPUs, among running jobs. Each unit goes to the job "
            "with the largest gain. The gains are the latest predictions of the jobs' own planners."
        )
        command.add_argument(
            "jobs", nargs="+", type=weighted, metavar="JOB[=WEIGHT]", help="job, and the weight of its gains (default 1)"
        )
        command.add_argument("--budget", required=True, type=budget, metavar="N", help="cores or GPUs of all jobs together")
        command.add_argument("--apply", action="store_true", help="change the jobs' plans (default: print the division only)")
        add_place_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.pool.commands import divide_command

        return divide_command(options)


POOL = CommandGroup(
    "divide a budget among many jobs: decide, show the pool, predict, or share cores once",
    {"run": BrainCommand(), "status": QueueCommand(), "what-if": WhatIfCommand(), "plan": DivideCommand()},
)
BRAIN = FormerCommand("brain", "pool run", BrainCommand())
QUEUE = FormerCommand("queue", "pool status", QueueCommand())
WHAT_IF = FormerCommand("what-if", "pool what-if", WhatIfCommand())
DIVIDE = FormerCommand("divide", "pool plan", DivideCommand())


def _add_pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pool", type=options.given, default=DEFAULT_POOL, metavar="NAME", help=f"name of the pool (default {DEFAULT_POOL})"
    )


def budget(text: str) -> float:
    """A number of cores or GPUs above 0."""
    return options.positive(text, "a number of cores or GPUs")


def weighted(text: str) -> tuple[str, float]:
    """A job and the weight of its gains, from `JOB` or `JOB=WEIGHT`."""
    name, given, weight = text.rpartition("=")
    if not given:
        return text, 1.0
    try:
        return name, float(weight)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {weight!r} is not a weight, such as 2 or 0.5") from None


def owner_weight(text: str) -> tuple[str, float]:
    """An owner and the weight of its jobs, from `OWNER=WEIGHT`."""
    owner, given, weight = text.rpartition("=")
    if not given or not owner:
        raise argparse.ArgumentTypeError(f"{text!r} is not OWNER=WEIGHT, such as ads=2")
    return owner, options.positive(weight)


def pool_policy(names: Sequence[str]) -> Callable[[str], str]:
    """The name of a policy of a pool."""

    def policy(text: str) -> str:
        text = todays_policy(text)
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"{text!r} cannot divide a pool: choose {', '.join(names)}; `dlrover lab simulate --policy` has others to "
                "compare with"
            )
        return text

    return policy


def quota(text: str) -> tuple[str, dict[str, float]]:
    """An owner and the maximum of its jobs together, from `OWNER=LIST` with a list as `pool_budget` takes it."""
    owner, given, amounts = text.partition("=")
    if not given or not owner or "=" not in amounts:
        raise argparse.ArgumentTypeError(f"{text!r} is not OWNER=LIST, such as ads=cores=16,gpus=4")
    return owner, pool_budget(amounts)


def pool_budget(text: str) -> dict[str, float]:
    """Amounts of `Resources` by name, from `cores=64,gpus=8,memory=256G`; those left out are infinite."""
    return dict.fromkeys(("cores", "gpus", "memory_mb"), math.inf) | _amounts(text, budget, options.memory)


def budget_change(text: str) -> dict[str, float]:
    """Amounts of `Resources` by name to add to a budget, from `cores=16,gpus=-2,memory=64G`; those left out are 0."""

    def signed(read: Callable[[str], float]) -> Callable[[str], float]:
        return lambda amount: -read(amount[1:]) if amount.startswith("-") else read(amount.removeprefix("+"))

    return dict.fromkeys(("cores", "gpus", "memory_mb"), 0.0) | _amounts(text, signed(budget), signed(options.memory))


def _amounts(text: str, number: Callable[[str], float], memory: Callable[[str], float]) -> dict[str, float]:
    """Return amounts by name from `cores=...,gpus=...,memory=...`, as read by `number` and `memory`."""
    amounts: dict[str, float] = {}
    for part in text.split(","):
        name, given, amount = part.partition("=")
        if name not in ("cores", "gpus", "memory"):
            raise argparse.ArgumentTypeError(f"{part!r} is not part of a budget: give cores=N, gpus=N or memory=SIZE")
        if not given or not amount:
            raise argparse.ArgumentTypeError(f"{part!r} has no value: give {name}={'SIZE' if name == 'memory' else 'N'}")
        key = "memory_mb" if name == "memory" else name
        if key in amounts:
            raise argparse.ArgumentTypeError(f"{text!r} names {name} twice")
        amounts[key] = memory(amount) if name == "memory" else number(amount)
    return amounts


class _FormerClusterOption(argparse.Action):
    """`--cluster +16 cores`, the former form of `--add cores=16`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, words: Any, option: str | None = None) -> None:
        amount, unit = words
        change = f"{unit}={amount.removeprefix('+')}"
        warn_of_former_name(f"--cluster {amount} {unit}", f"--add {change}")
        try:
            namespace.add = budget_change(change)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


PLACE_TIMEOUT_S = 7 * 24 * 3600.0
"""Seconds to wait for a place in a pool, unless --place-timeout sets another limit."""

SURPLUS_IN_POOL_S = 5.0
"""Seconds that a node of a job in a pool may outlast its place there. Another job waits for its resources."""

NEED_A_POOL = ("priority", "weight", "owner", "place_timeout")
"""Options that need a pool."""


class PoolHook:
    """Asks for a place in a pool where `dlrover run` is given `--pool`."""

    def add_options(self, run: argparse.ArgumentParser) -> None:
        group = run.add_argument_group(
            "pool", "Only with --pool: the job waits for a place in a budget that `dlrover pool run` divides."
        )
        group.add_argument("--pool", metavar="NAME", help="pool to run in; needs an etcd that its jobs share (--endpoint)")
        text = "jobs of an owner with a higher one start first (default 0)"
        group.add_argument("--priority", type=options.setting, metavar="N", help=text)
        text = "importance of this job's speed among its owner's jobs (default 1)"
        group.add_argument("--weight", type=options.positive, metavar="X", help=text)
        group.add_argument("--owner", metavar="NAME", help="user or team that the job counts for (default: the current user)")
        group.add_argument(
            "--place-timeout", type=options.duration, metavar="TIME", help="longest time to wait for a place (default 7d)"
        )

    def request(self, options: argparse.Namespace, endpoint: str | None, prefix: str) -> PlaceInPool | None:
        if options.pool is None:
            if given := [name for name in NEED_A_POOL if getattr(options, name) is not None]:
                raise UsageError(f"{', '.join(map(flag, given))}: only with --pool NAME")
            return None
        if (each := options.workers_per_node) > 1:
            raise UsageError(
                f"--pool {options.pool} with --workers-per-node {each}: a pool counts single workers and cannot give whole "
                "nodes; leave one of them out"
            )
        if endpoint is None:
            raise UsageError(
                f"--pool {options.pool}: a pool is in an etcd that all its jobs share; name it with --endpoint HOST:PORT, or "
                "DLROVER_ENDPOINT"
            )
        from lightning_dlrover.pool.admission import MEMBER_LEASES, MEMBER_TTL_S
        from lightning_dlrover.pool.view import PoolKeys

        return PlaceInPool(
            PoolKeys(options.pool, prefix),
            _member(options),
            options.place_timeout or PLACE_TIMEOUT_S,
            MEMBER_LEASES * options.lease_ttl if options.lease_ttl else MEMBER_TTL_S,
        )

    def ticket_key(self, client: EtcdClient, keys: Keys) -> str | None:
        from lightning_dlrover.pool.admission import member_key

        return member_key(client, keys)


POOL_HOOK = PoolHook()


@dataclass(frozen=True)
class PlaceInPool:
    """The request for a place in a pool."""

    pool: PoolKeys
    ask: MemberRecord  # the job as the pool sees it
    timeout_s: float  # longest wait
    ttl_s: float  # seconds after which the place counts as lost if this process is killed
    surplus_s: float = SURPLUS_IN_POOL_S

    @property
    def environment(self) -> Mapping[str, str]:
        return {variables.POOL: self.pool.pool}

    def wait(self, client: EtcdClient, keys: Keys) -> PoolTicket:
        from lightning_dlrover.output import say
        from lightning_dlrover.pool.admission import PoolTicket, TicketError

        try:
            place = PoolTicket(client, self.pool, keys, self.ask, say, self.ttl_s)
            try:
                num_workers = place.wait(self.timeout_s)
            except BaseException:
                place.leave()
                raise
        except TicketError as error:
            raise UsageError(str(error)) from error
        workers = f"{num_workers} of {self.ask.max_workers} workers"
        say(f"job {keys.run_id}: has a place in pool {self.pool.pool}, and starts with {workers}")
        return place


def _member(options: argparse.Namespace) -> MemberRecord:
    from lightning_dlrover.cli.run_options import node_sizes, num_gpus
    from lightning_dlrover.pool.view import MemberRecord

    now = time.time()
    fewest, most = options.workers
    _, size = node_sizes(options)
    owner = options.owner
    if owner is None:
        with contextlib.suppress(KeyError, OSError):  # a container may have no user of this number
            owner = getpass.getuser()
    return MemberRecord(
        socket.gethostname(),
        os.getpid(),
        fewest,
        most,
        submitted_at=now,
        cores=float(max(1, size.cpus)),  # nodes on this machine share its cores, and compute with one thread each
        gpus=num_gpus(options),
        memory_mb=size.memory_mb,
        priority=options.priority or 0,
        weight=options.weight or 1.0,
        owner=owner or "",
        deadline_at=now + options.deadline if options.deadline is not None else 0.0,
        sizes=list(options.sizes),
    )
