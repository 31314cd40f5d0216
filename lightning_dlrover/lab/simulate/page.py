"""`dlrover lab simulate`: the command, and the report of a study with its figures in one HTML file."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.files import atomic_write
from lightning_dlrover.lab.simulate.simulator import Cluster
from lightning_dlrover.lab.simulate.study import (
    COLUMNS,
    Inputs,
    Results,
    Simulated,
    by_trace,
    questions,
    read_inputs,
    run_study,
    summarize,
    table_text,
)
from lightning_dlrover.lab.simulate.traces import SAMPLES, read_work
from lightning_dlrover.output import complain, counted, show
from lightning_dlrover.report.page import INK, WIDTH_INCHES, in_our_style, render_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8566d0", "#9a9a9a", "#b5a100", "#7a4a1e")
MOST_SIZES = 4
"""Number of policies with drawn sizes."""
TIME_BINS = 600


def _figure(height: float, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots(rows, **options)


def _completions(simulations: Sequence[Simulated]) -> Figure:
    """Draw the fraction of jobs that have ended within a JCT, for each policy."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = _figure(3.8)
    longest_s = max(float(np.max(simulated.completions_s)) for simulated in simulations)
    seconds, unit = _unit(longest_s)
    groups: defaultdict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for simulated in simulations:
        groups[simulated.policy].append(simulated.completions_s)
    for colour, (policy, found) in zip(_colours(len(groups)), groups.items(), strict=True):
        times = np.sort(np.concatenate(found)) / seconds
        # Hundreds of points draw the curve as well as thousands.
        shown = np.unique(np.linspace(0, len(times) - 1, 400).astype(int))
        axes.plot(times[shown], (shown + 1) / len(times), color=colour, linewidth=1.6, label=policy)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"JCT ({unit})")
    axes.set_ylabel("fraction of jobs")
    axes.grid()
    _legend(figure)
    return figure


def _unit(longest_s: float) -> tuple[float, str]:
    """Return the unit of time that fits an axis: its seconds, and its name."""
    return (3600.0, "hours") if longest_s >= 7200 else (60.0, "minutes") if longest_s >= 120 else (1.0, "seconds")


def _costs(simulations: Sequence[Simulated]) -> Figure | None:
    """Draw the mean JCT over the cost of a resize, for each policy; None if there is one cost only.

    Costs are compared on the traces and seeds that all of them have.
    """
    found: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for s in simulations:
        found[s.cost].add((s.trace, s.seed))
    common = set.intersection(*found.values())
    if len(found) == 1 or not common:
        return None
    figure, axes = _figure(3.8)
    rows = summarize([s for s in simulations if (s.trace, s.seed) in common])
    seconds, unit = _unit(max(row.mean_s for row in rows))
    costs = sorted({row.cost for row in rows}, key=_cost_order)
    places = {cost: number for number, cost in enumerate(costs)}
    policies = list(dict.fromkeys(row.policy for row in rows))
    for colour, policy in zip(_colours(len(policies)), policies, strict=True):
        own = sorted((row for row in rows if row.policy == policy), key=lambda row: places[row.cost])
        x = [places[row.cost] for row in own]
        axes.plot(x, [row.mean_s / seconds for row in own], "o-", color=colour, linewidth=1.6, markersize=4, label=policy)
    axes.set_xticks(range(len(costs)), costs)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost of a resize")
    axes.set_ylabel(f"mean JCT ({unit})")
    axes.grid(axis="y")
    _legend(figure)
    return figure


def _use(simulations: Sequence[Simulated]) -> Figure:
    """Draw the devices in use over time, of one simulation for each policy."""
    figure, axes = _figure(3.2)
    for colour, simulated in zip(_colours(len(simulations)), simulations, strict=True):
        edges, devices = _devices_over_time(simulated)
        axes.stairs(devices, edges / 3600, color=colour, linewidth=1.3, label=simulated.policy, baseline=None)
    axes.axhline(simulations[0].num_devices, color=INK, linewidth=0.9, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time (hours)")
    axes.set_ylabel("devices in use")
    axes.grid(axis="y")
    _legend(figure)
    return figure


def _sizes(simulations: Sequence[Simulated]) -> Figure:
    """Draw the devices of each job over time, of one simulation for each policy."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, found = _figure(0.6 + 2.4 * len(simulations), len(simulations), sharex=True, squeeze=False)
    largest = max((span[3] for simulated in simulations for span in simulated.spans), default=2.0)
    scale = LogNorm(1, max(2.0, largest))
    begin = min(min(simulated.submitted) for simulated in simulations)
    end = max(max(simulated.ended) for simulated in simulations)
    panels: list[Axes] = [row[0] for row in found]
    for axes, simulated in zip(panels, simulations, strict=True):
        sizes = np.ma.masked_equal(_sizes_over_time(simulated, begin, end), 0)
        image = axes.imshow(
            sizes,
            aspect="auto",
            interpolation="nearest",
            norm=scale,
            cmap="viridis",
            extent=(0, (end - begin) / 3600, len(simulated.jobs), 0),
        )
        axes.set_ylabel(f"jobs, {simulated.policy}")
        axes.set_yticks([])
    panels[-1].set_xlabel("time (hours)")
    bar = figure.colorbar(image, ax=panels, label="devices of the job", fraction=0.03)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    return figure


def _sizes_over_time(simulated: Simulated, begin: float, end: float) -> NDArray[np.float64]:
    """Return the devices of each job in each bin of time, jobs in the order of their submission."""
    order = np.argsort(simulated.submitted, kind="stable")
    rows = np.empty(len(order), dtype=int)
    rows[order] = np.arange(len(order))
    sizes = np.zeros((len(order), TIME_BINS))
    for job, began, ended, devices in simulated.spans:
        first = int((began - begin) / (end - begin) * TIME_BINS)
        last = int(np.ceil((ended - begin) / (end - begin) * TIME_BINS))
        sizes[rows[int(job)], first : max(last, first + 1)] = devices
    return sizes


def _devices_over_time(simulated: Simulated) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return edges of bins in seconds since the first submission, and the mean number of devices in use in each."""
    spans = np.array(simulated.spans)
    begin = min(simulated.submitted)
    edges = np.linspace(0, max(simulated.ended) - begin, TIME_BINS // 4 + 1)
    times = np.concatenate([spans[:, 1], spans[:, 2]]) - begin
    changes = np.concatenate([spans[:, 3], -spans[:, 3]])
    order = np.argsort(times, kind="stable")
    times, present = times[order], np.cumsum(changes[order])
    used_s = np.interp(edges, times, np.concatenate([[0.0], np.cumsum(present[:-1] * np.diff(times))]))
    return edges, np.diff(used_s) / np.maximum(np.diff(edges), 1e-9)


def _cost_order(cost: str) -> float:
    """Return the place of a shown cost on the axis: costs that are not a number of seconds come last."""
    number = cost.removesuffix(" s")
    return np.inf if number == cost else float(number)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper left", ncols=6)


REPORT = "report.html"
FAVOURITE = "jct"
"""Policy that is drawn first where there is room for a few only."""


def write_report(path: Path, inputs: Inputs, simulations: Sequence[Simulated]) -> None:
    """Write the report of at least one simulation to `path`, whole or not at all: one HTML file with tables and figures.

    Raises:
        OSError: `path` cannot be written.
    """
    from lightning_dlrover.report.page import to_svg

    first = simulations[0]
    at_first_cost = [s for s in simulations if s.cost == first.cost]
    example = [s for s in at_first_cost if (s.trace, s.seed) == (first.trace, first.seed)]
    drawn = sorted(example, key=lambda s: s.policy != FAVOURITE)[:MOST_SIZES]
    with in_our_style():
        costs, completions, use, sizes = _costs(simulations), _completions(at_first_cost), _use(example), _sizes(drawn)
    page = render_page(
        "lab/simulate",
        "page.html.j2",
        facts=_facts(inputs, simulations),
        columns=COLUMNS,
        rows=[row.cells for row in summarize(simulations)],
        policies=list(dict.fromkeys(s.policy for s in simulations)),
        traces=by_trace(simulations),
        example=example[0],
        completions=to_svg(completions, "completions"),
        costs=to_svg(costs, "costs") if costs is not None else None,
        use=to_svg(use, "use"),
        sizes=to_svg(sizes, "sizes"),
        oracle=inputs.oracle,
        lengths=inputs.lengths,
        every_s=inputs.every_s,
    )
    atomic_write(path, page)


def _facts(inputs: Inputs, simulations: Sequence[Simulated]) -> list[tuple[str, str, str]]:
    jobs = {(s.trace, name) for s in simulations for name in s.jobs}
    return [
        ("Cluster", f"{inputs.cluster.num_nodes} x {inputs.cluster.per_node}", "nodes x devices"),
        ("Traces", str(len({s.trace for s in simulations})), counted(len(jobs), "job")),
        ("Seeds", str(len({s.seed for s in simulations})), "0: arrivals as in the trace"),
        ("Simulations", str(len(simulations)), ""),
    ]


def simulate_command(options: argparse.Namespace) -> int:
    """Run the simulations without a stored result, print their figures and write the report."""
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
