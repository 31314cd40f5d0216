"""The commands and options of pools, without slow imports."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

from lightning_dlrover.cli import values
from lightning_dlrover.cli.options import add_etcd_options, add_place_options

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_POOL = "default"

POOL_POLICIES = ("ours", "sia", "as-requested")
"""Policies of `dlrover brain`, the default first. `dlrover simulate` has those that are only there to be compared with."""


def add_place_in_pool(run: argparse.ArgumentParser) -> None:
    """Add the options with which a job asks for a place in a pool."""
    group = run.add_argument_group(
        "pool", "Only with --pool: the job waits for a place in a budget that `dlrover brain` divides."
    )
    group.add_argument("--pool", metavar="NAME", help="pool to run in; needs an etcd that its jobs share (--endpoint)")
    group.add_argument(
        "--priority",
        type=values.setting,
        metavar="N",
        help="jobs of an owner with a higher one start first (default 0)",
    )
    group.add_argument(
        "--weight",
        type=values.positive,
        metavar="X",
        help="importance of this job's speed among its owner's jobs (default 1)",
    )
    group.add_argument("--owner", metavar="NAME", help="user or team that the job counts for (default: the current user)")
    group.add_argument(
        "--place-timeout", type=values.duration, metavar="TIME", help="longest time to wait for a place (default 7d)"
    )


def add_brain(commands: Commands) -> None:
    """Add `dlrover brain`."""
    brain = commands.add_parser("brain", help="divide a budget of cores, GPUs and memory among the jobs of a pool")
    brain.description = (
        "Size the jobs of a pool continuously within a budget. Jobs join with `dlrover run --pool`. One process decides; "
        "others stand by and take over. Without any, jobs keep their sizes. Ends with Ctrl-C."
    )
    brain.add_argument(
        "--budget",
        required=True,
        type=values.pool_budget,
        metavar="LIST",
        help="resources of all jobs together, such as cores=64,gpus=8,memory=256G; those left out are not limited",
    )
    _add_pool(brain)
    brain.add_argument(
        "--policy",
        type=values.pool_policy(POOL_POLICIES),
        default=POOL_POLICIES[0],
        metavar="NAME",
        help=f"how the budget is divided: {', '.join(POOL_POLICIES)} (default {POOL_POLICIES[0]})",
    )
    brain.add_argument(
        "--every",
        type=values.duration,
        default=2.0,
        metavar="TIME",
        help="time between two looks while nothing changes (default 2s)",
    )
    brain.add_argument(
        "--longest-wait",
        type=values.duration,
        default=3600.0,
        metavar="TIME",
        help="a job that waits longer goes before all others (default 1h)",
    )
    brain.add_argument(
        "--lease-ttl",
        type=values.lease,
        default=5.0,
        metavar="TIME",
        help="silence after which this process counts as lost, and another one decides (default 5s); at least the longest "
        "--lease-ttl of the pool's jobs",
    )
    brain.add_argument(
        "--owner-weight",
        action="append",
        default=[],
        type=values.owner_weight,
        metavar="OWNER=X",
        help="weight of an owner's part of the pool, which its jobs share; repeatable (default: 1 each)",
    )
    brain.add_argument(
        "--quota",
        action="append",
        default=[],
        type=values.quota,
        metavar="OWNER=LIST",
        help="most resources of all jobs of an owner together, such as ads=cores=16,memory=64G; repeatable (default: none)",
    )
    brain.add_argument(
        "--pool-only",
        action="store_true",
        help="do not count jobs that are in no pool (default: they are charged to the budget, but never resized)",
    )
    add_etcd_options(brain)


def add_queue(commands: Commands) -> None:
    """Add `dlrover queue`."""
    text = "show the jobs of a pool: who runs with how much, who waits and why"
    queue = commands.add_parser("queue", help=text, description=text)
    _add_pool(queue)
    queue.add_argument("--json", action="store_true", help="print JSON")
    add_etcd_options(queue)


def add_what_if(commands: Commands) -> None:
    """Add `dlrover what-if`."""
    text = "predict time and money with another size, another budget, or without a job, and change nothing"
    command = commands.add_parser("what-if", help=text, description=text)
    command.add_argument("job", metavar="JOB", help="the job's --rdzv-id")
    command.add_argument("--workers", type=values.setting, metavar="N", help="another number of workers of the job")
    command.add_argument(
        "--cluster",
        nargs=2,
        metavar=("CHANGE", "UNIT"),
        help="another budget of the pool: +16 cores, -2 gpus, +64G memory",
    )
    command.add_argument("--without", metavar="JOB2", help="leave this job of the pool out")
    _add_pool(command)
    add_place_options(command)


def _add_pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pool", type=values.given, default=DEFAULT_POOL, metavar="NAME", help=f"name of the pool (default {DEFAULT_POOL})"
    )
