"""The commands of studies and simulations, and their options, without slow imports."""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from pathlib import Path

from lightning_dlrover.cli import options
from lightning_dlrover.cli.plugins import CommandGroup, FormerCommand, add_renamed_option, todays_policy

MAX_COST_S = 1e6
"""Largest cost of a resize in a simulation, which decides again every minute."""

ELASTIC_POLICIES = (
    "as-requested",
    "srtf",
    "elastic-srtf",
    "las",
    "dlrover",
    "dlrover-rm",
    "autopilot",
    "optimus",
    "afs",
    "hesrpt",
    "pollux",
    "sia",
    "jct",
)
"""Policies of `dlrover lab simulate`, as `lab/simulate/baselines.py` has them."""


class CharacterizeCommand:
    """`dlrover lab characterize`."""

    summary = "measure where a DLRM's training time goes on this machine"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        add = command.add_argument
        command.description = (
            "Measure a reference DLRM on this machine in nine studies, write figures and findings, and record the samples in "
            "the job history, from which later jobs start. Each measurement is stored at once: the same command continues "
            "after an interruption. Leave the machine idle until it ends."
        )
        size = command.add_mutually_exclusive_group()
        size.add_argument(
            "--quick", dest="size", action="store_const", const="quick", help="coarse sweeps, about five minutes (default)"
        )
        size.add_argument("--full", dest="size", action="store_const", const="full", help="fine sweeps, about an hour")
        command.set_defaults(size="quick")
        add("--device", choices=("cpu", "cuda"), default="cpu", help="device of the model (default cpu)")
        add(
            "--study",
            nargs="+",
            metavar="NAME",
            help="studies to run: features, batch, rows, mlp, lookups, placement, workers, loader, devices (default: all)",
        )
        add(
            "--out",
            type=Path,
            default=Path("characterization"),
            metavar="DIR",
            help="folder of measurements, tables and report (default ./characterization)",
        )
        add(
            "--budget",
            type=float,
            metavar="MINUTES",
            help="time for measurements, spent where it brings most (default 4; with --full 60)",
        )
        add(
            "--compare",
            nargs=2,
            type=Path,
            metavar=("A", "B"),
            help="show the results of two folders side by side, write comparison.html to --out, and measure nothing",
        )
        add(
            "--model",
            metavar="MODULE:CLASS",
            help="your own LightningModule, or FILE.py:CLASS, which takes no arguments and has a train_dataloader; measured in "
            "the study devices",
        )
        add("--history", metavar="PLACE", help="job history, or off (default: DLROVER_HISTORY, else the user's own history)")

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.lab.characterize.run import characterize_command

        return characterize_command(options)


class SimulateCommand:
    """`dlrover lab simulate`."""

    summary = "replay traces of jobs on a simulated cluster, under several policies"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        add = command.add_argument
        command.description = (
            "Replay traces of elastic jobs on a simulated cluster, once for each policy, cost of a resize and seed. Jobs run "
            "at measured speeds; policies learn them from the jobs that have run. Print a table and write an HTML report with "
            "pictures. Each finished simulation is recorded, so the same command continues after an interruption. Exit code: 0 "
            "if all have ended, 2 for wrong use or a bad trace."
        )
        add(
            "traces",
            nargs="+",
            type=Path,
            metavar="TRACE",
            help="CSV file of jobs with the columns time, application, num_replicas, batch_size (Pollux's form), or job_id, "
            "submission_time, duration, num_gpu (ElasticFlow's form, whose models are drawn)",
        )
        add(
            "--speeds",
            type=Path,
            required=True,
            metavar="DIR",
            help="folder of measured step times, NAME-placements.csv and NAME-scalability.csv for each application",
        )
        add(
            "--policy",
            nargs="+",
            type=todays_policy,
            choices=ELASTIC_POLICIES,
            default=list(ELASTIC_POLICIES),
            metavar="NAME",
            help=f"how devices are divided: {', '.join(ELASTIC_POLICIES)} (default: each of them)",
        )
        _add_simulation_options(command)

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.lab.simulate.page import simulate_command

        return simulate_command(options)


class EvaluateCommand:
    """`dlrover lab evaluate`."""

    summary = "fit the step-time model to some measurements, predict others, and print the errors"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        add = command.add_argument
        command.description = (
            "Fit the step-time model, its prior alone and boosted trees alone to the --train files, predict the --test files, "
            "and print mean absolute percentage errors of the step time and the share of samples inside the 90 % interval. "
            "Exit code: 0, or 2 for a bad file."
        )
        for name, text in (("--train", "measured windows to learn from"), ("--test", "measured windows to predict")):
            add(
                name,
                type=Path,
                action="append",
                required=True,
                metavar="FILE",
                help=f"{text}: CSV or JSON lines; may be repeated",
            )
        add(
            "--history",
            type=Path,
            nargs="+",
            action="extend",
            default=[],
            metavar="FILE",
            help="measured windows of other jobs on the same hardware, one file a job: the model learns the hardware's share "
            "of a step from them (default: none)",
        )

    def run(self, options: argparse.Namespace) -> int:
        from lightning_dlrover.lab.evaluate import evaluate_command

        return evaluate_command(options)


LAB = CommandGroup(
    "studies: measure a DLRM on this machine, replay traces of jobs on a simulated cluster, or test the step-time model",
    {"characterize": CharacterizeCommand(), "simulate": SimulateCommand(), "evaluate": EvaluateCommand()},
)
CHARACTERIZE = FormerCommand("characterize", "lab characterize", CharacterizeCommand())
SIMULATE = FormerCommand("simulate", "lab simulate", SimulateCommand())


def _add_simulation_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--resize-cost",
        nargs="+",
        type=functools.partial(_cost, words=("by-model", "live")),
        default=[30.0],
        metavar="S",
        help="seconds without a step when a running job's devices change (default 30); by-model: 15 to 250 s, as restarts of "
        "each model take; live: 0.5 s, after new devices have idled for the cost of a start",
    )
    add(
        "--start-cost",
        type=functools.partial(_cost, words=("by-model",)),
        default=30.0,
        metavar="S",
        help="seconds without a step when a job starts, under every policy, or by-model (default 30)",
    )
    add("--nodes", type=cluster, default=(16, 4), metavar="NxD", help="nodes and devices of each (default 16x4)")
    add(
        "--seeds",
        type=options.count,
        default=1,
        metavar="N",
        help="simulations of each combination: the first as in the trace, the others with shaken arrivals (default 1)",
    )
    add_renamed_option(
        command,
        "--first-seed",
        "--shake",
        type=options.setting,
        default=0,
        metavar="SEED",
        help="first seed; each moves arrivals by up to a minute, seed 0 moves none (default 0)",
    )
    add_renamed_option(
        command,
        "--interval",
        "--every",
        type=options.duration,
        default=60.0,
        metavar="TIME",
        help="time between decisions; others follow each start and end of a job (default 60)",
    )
    add("--work", type=Path, metavar="FILE", help="CSV file with the columns application and samples: the work of a job")
    add(
        "--lengths",
        choices=("known", "unknown", "wrong"),
        default="known",
        help="what policies are given of the steps of a job; wrong: times a random factor, log-normal with a deviation of ln 2 "
        "(default known)",
    )
    add("--oracle", action="store_true", help="let policies know the real speeds")
    add("--processes", type=options.processes, default=1, metavar="N", help="simulations at a time (default 1)")
    add("--out", type=Path, default=Path("simulation"), metavar="DIR", help="folder of records and report (default simulation)")


def cluster(text: str) -> tuple[int, int]:
    """Return nodes and devices of each, from `16x4`."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NODESxDEVICES, such as 16x4 for 16 nodes with 4 devices each; up to 999999 nodes of 9999"
        )
    return int(match[1]), int(match[2])


def _cost(text: str, *, words: tuple[str, ...]) -> float | str:
    """Return seconds from 0 on, or one of some words."""
    if text in words:
        return text
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) <= MAX_COST_S:
            return seconds
    limit = f"{MAX_COST_S:,.0f}"
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seconds from 0 to {limit} nor {' or '.join(words)}")
