"""How well the resource-performance model predicts: `python -m lightning_dlrover.perf evaluate --train A.csv --test B.csv`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dlrover.perf.evaluation import evaluate
from lightning_dlrover.perf.hardware import population_of
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.traces import TraceError, read_trace

MAX_REMARKS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lightning_dlrover.perf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "evaluate",
        help="fit to some files, predict others, print the errors in percent",
        description="Fits the model, its prior alone and boosted trees alone to the --train files, predicts the --test files, "
        "and prints mean absolute percentage errors of the step time and the share of samples inside of the 90 %% interval.",
    )
    for name, text in (("--train", "measured windows to learn from"), ("--test", "measured windows to predict")):
        command.add_argument(
            name, type=Path, action="append", required=True, metavar="FILE", help=f"{text}: CSV or JSON lines; may be repeated"
        )
    command.add_argument(
        "--history",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="measured windows of other jobs on the same hardware, one file a job: the model learns the hardware's share of a "
        "step from them; default: none",
    )
    options = parser.parse_args(arguments)
    try:
        train, test = _read(options.train), _read(options.test)
        history = [_read([path]) for path in options.history]
        print(f"{len(train)} samples to learn from, {len(test)} to predict")
        population = population_of(history)
        if history:
            print(f"{len(history)} other jobs with {sum(map(len, history))} samples", end="")
            print("" if population else ": none has enough configurations, so they are not used")
        print(evaluate(train, test, population))
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _read(paths: Sequence[Path]) -> list[StepProfile]:
    samples: list[StepProfile] = []
    for path in paths:
        trace = read_trace(path)
        for remark in trace.remarks[:MAX_REMARKS]:
            print(f"warning: {remark}", file=sys.stderr)
        if len(trace.remarks) > MAX_REMARKS:
            print(f"warning: {path}: {len(trace.remarks) - MAX_REMARKS} more remarks like these", file=sys.stderr)
        samples.extend(trace.samples)
    return samples


if __name__ == "__main__":
    raise SystemExit(main())
