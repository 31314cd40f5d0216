"""`dlrover lab simulate`: replay traces of jobs on a simulated cluster, under one policy after the other."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.output import complain, show
from lightning_dlrover.planner.cluster.elastic_jobs import Cluster
from lightning_dlrover.planner.cluster.work import SAMPLES, read_work
from lightning_dlrover.simulate.page import REPORT, write_report
from lightning_dlrover.simulate.records import Results, Simulated
from lightning_dlrover.simulate.run import run_study
from lightning_dlrover.simulate.study import questions, read_inputs
from lightning_dlrover.simulate.summary import summarize, table_text


def simulate_command(options: argparse.Namespace) -> int:
    """Run the simulations that are not on record, print their figures and write the report."""
    work = read_work(options.work) if options.work is not None else {}
    inputs, traces = read_inputs(
        options.traces,
        options.speeds,
        Cluster(*options.nodes),
        samples={**SAMPLES, **work},
        every_s=options.interval,
        oracle=options.oracle,
        start_cost=options.start_cost,
        lengths=options.lengths,
    )
    if unknown := sorted({*work} - {*inputs.applications}):
        known = ", ".join(sorted(inputs.applications))
        raise UsageError(f"--work {options.work}: {options.speeds} has no speeds of {', '.join(unknown)}, only of {known}")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    asked = questions(traces, options.policy, options.resize_cost, seeds)
    keys = {question.key(inputs) for question in asked}
    try:
        with Results(options.out) as results, _progress(len(asked), len(keys & set(results.by_key))) as ended:
            simulations = run_study(inputs, asked, results, processes=options.processes, ended=ended)
    except KeyboardInterrupt:
        with Results(options.out) as results:  # read again, as the interruption may have come while one was added
            done = len(keys & set(results.by_key))
        complain(f"interrupted; {done} of {len(asked)} simulations are recorded, and the same command continues with the rest")
        return 128 + signal.SIGINT
    report = options.out / REPORT
    write_report(report, inputs, simulations)
    show(table_text(summarize(simulations), shutil.get_terminal_size((120, 24)).columns))
    show(f"report: {report}")
    return EXIT_OK


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[Simulated], None]]:
    """Show a progress bar on a terminal; yield a function to call after each simulation."""
    if not sys.stderr.isatty():
        yield lambda simulated: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulations", total=total, completed=done)

        def ended(simulated: Simulated) -> None:
            bar.update(task, advance=1, description=f"{simulated.trace}, {simulated.policy}")

        yield ended
