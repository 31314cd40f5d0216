"""The commands of pools and their options, without slow imports."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from lightning_dlrover.cli import values
from lightning_dlrover.cli.former_names import FormerCommand, add_renamed_option, todays_policy, warn_of_former_name
from lightning_dlrover.cli.options import add_etcd_options, add_place_options
from lightning_dlrover.cli.plugin_commands import CommandGroup

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
        command.add_argument(
            "--budget",
            required=True,
            type=pool_budget,
            metavar="LIST",
            help="resources of all jobs together, such as cores=64,gpus=8,memory=256G; those left out are not limited",
        )
        _add_pool(command)
        command.add_argument(
            "--policy",
            type=pool_policy(POOL_POLICIES),
            default=POOL_POLICIES[0],
            metavar="NAME",
            help=f"how the budget is divided: {', '.join(POOL_POLICIES)} (default {POOL_POLICIES[0]})",
        )
        add_renamed_option(
            command,
            "--interval",
            "--every",
            type=values.duration,
            default=2.0,
            metavar="TIME",
            help="time between two looks while nothing changes (default 2s)",
        )
        add_renamed_option(
            command,
            "--max-wait",
            "--longest-wait",
            type=values.duration,
            default=3600.0,
            metavar="TIME",
            help="a job that waits longer goes before all others (default 1h)",
        )
        command.add_argument(
            "--lease-ttl",
            type=values.lease,
            default=5.0,
            metavar="TIME",
            help="silence after which this process counts as lost, and another one decides (default 5s); at least the longest "
            "--lease-ttl of the pool's jobs",
        )
        command.add_argument(
            "--owner-weight",
            action="append",
            default=[],
            type=owner_weight,
            metavar="OWNER=X",
            help="weight of an owner's part of the pool, which its jobs share; repeatable (default: 1 each)",
        )
        command.add_argument(
            "--quota",
            action="append",
            default=[],
            type=quota,
            metavar="OWNER=LIST",
            help="most resources of all jobs of an owner together, such as ads=cores=16,memory=64G; repeatable (default: none)",
        )
        add_renamed_option(
            command,
            "--ignore-unmanaged",
            "--pool-only",
            action="store_true",
            help="do not count jobs that are in no pool (default: they are charged to the budget, but never resized)",
        )
        add_etcd_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.cli.brain import brain_command

        return brain_command(options)


class QueueCommand:
    """`dlrover pool status`."""

    summary = "show the jobs of a pool: who runs with how much, who waits and why"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        _add_pool(command)
        command.add_argument("--json", action="store_true", help="print JSON")
        add_etcd_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.cli.brain import queue_command

        return queue_command(options)


class WhatIfCommand:
    """`dlrover pool what-if`."""

    summary = "predict time and money with another size, another budget, or without a job, and change nothing"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        command.add_argument("job", metavar="JOB", help="the job's --rdzv-id")
        command.add_argument("--workers", type=values.setting, metavar="N", help="another number of workers of the job")
        command.add_argument(
            "--add",
            type=budget_change,
            metavar="LIST",
            help="resources to add to the pool's budget, such as cores=16,memory=64G, or to take away, such as gpus=-2",
        )
        command.add_argument(
            "--cluster", action=_FormerClusterOption, nargs=2, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        command.add_argument("--without", metavar="JOB2", help="leave this job of the pool out")
        _add_pool(command)
        add_place_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.cli.what_if import what_if_command

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
        from lightning_dlrover.cli.divide import divide_command

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
        "--pool", type=values.given, default=DEFAULT_POOL, metavar="NAME", help=f"name of the pool (default {DEFAULT_POOL})"
    )


# --- types of arguments ---


def budget(text: str) -> float:
    """A number of cores or GPUs above 0."""
    return values.positive(text, "a number of cores or GPUs")


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
    return owner, values.positive(weight)


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
    return dict.fromkeys(("cores", "gpus", "memory_mb"), math.inf) | _amounts(text, budget, values.memory)


def budget_change(text: str) -> dict[str, float]:
    """Amounts of `Resources` by name to add to a budget, from `cores=16,gpus=-2,memory=64G`; those left out are 0."""

    def signed(read: Callable[[str], float]) -> Callable[[str], float]:
        return lambda amount: -read(amount[1:]) if amount.startswith("-") else read(amount.removeprefix("+"))

    return dict.fromkeys(("cores", "gpus", "memory_mb"), 0.0) | _amounts(text, signed(budget), signed(values.memory))


def _amounts(text: str, number: Callable[[str], float], memory: Callable[[str], float]) -> dict[str, float]:
    """Return amounts by name from `cores=...,gpus=...,memory=...`.

    Args:
        number, memory: read an amount.
    """
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
