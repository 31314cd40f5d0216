"""The command of co-location and its options, without slow imports."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_dlrover.cli import options
from lightning_dlrover.cli.plugins import add_renamed_option

POLICIES = ("complementary", "fifo", "sequential", "random_sets", "rmixer", "rmixer_mixed", "muri")
"""Policies of `dlrover colocate`, as `colocate/policies.py` has them."""


class ColocateCommand:
    """`dlrover colocate`."""

    summary = "run a queue of training commands side by side on this machine"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        add = command.add_argument
        command.description = (
            "Run the jobs of a file to their ends, several at once: jobs whose needs complement each other run side by side, "
            "and their memory never exceeds the machine's. Every start and end is recorded, so the same command continues with "
            "the rest after an interruption. Exit code: 0 if all jobs are done, 1 if one has failed, 2 for wrong usage."
        )
        add("jobs", type=Path, metavar="JOBS.yaml", help="the jobs: a list `jobs` with a `command` each")
        add("--policy", choices=POLICIES, default=POLICIES[0], help=f"policy of co-location (default {POLICIES[0]})")
        add(
            "--devices",
            nargs="+",
            default=["cpu"],
            metavar="DEVICE",
            help="`cpu`, sets of cores such as cpu:0-3 cpu:4-7, or GPUs such as gpu:0 or, with cores, gpu:0:0-7 (default cpu)",
        )
        add("--memory", type=options.memory, metavar="SIZE", help="host memory for all jobs (default: most of what is free)")
        add_renamed_option(
            command,
            "--max-parallel",
            "--at-once",
            type=options.count,
            default=0,
            metavar="N",
            help="maximum of jobs at once on a device (default: twice its cores, on a GPU no more than 8; complementary: "
            "twice as many)",
        )
        add(
            "--out",
            type=Path,
            default=Path("colocation"),
            metavar="DIR",
            help="folder of the queue: journal, output, report (default colocation)",
        )
        add_renamed_option(
            command,
            "--profiles",
            "--learn-from",
            nargs="+",
            type=Path,
            default=[],
            metavar="DIR",
            help="folders of earlier queues, whose measurements count",
        )
        _add_patience(command)
        options.add_notify_option(command)
        add("--seed", type=options.setting, default=0, metavar="N", help="seed of the policy `random_sets` (default 0)")
        options.add_metrics_option(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.colocate.queue import colocate_command

        return colocate_command(options)


COLOCATE = ColocateCommand()


def _add_patience(command: argparse.ArgumentParser) -> None:
    """Add the times after which `dlrover colocate` acts."""
    add = command.add_argument
    add_renamed_option(
        command,
        "--max-wait",
        "--longest-wait",
        type=options.duration,
        default=3600.0,
        metavar="TIME",
        help="a job that waits longer goes first (default 1h)",
    )
    add(
        "--probe",
        type=options.duration,
        default=20.0,
        metavar="TIME",
        help="a command without DLRoverCallback is measured for this long (default 20s)",
    )
    add("--grace", type=options.duration, default=10.0, metavar="TIME", help="from SIGTERM to SIGKILL (default 10s)")
    add(
        "--hang-after",
        type=options.duration,
        default=600.0,
        metavar="TIME",
        help="a job that is idle for this long has failed (default 10m)",
    )
