"""Reports of a characterization, of one machine or of two side by side, with their figures."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dlrover.files import atomic_write
from lightning_dlrover.lab.characterize.findings import Finding
from lightning_dlrover.lab.characterize.measure import LIMITS
from lightning_dlrover.lab.characterize.points import PARTS, Point, Scope, Study, Visit, all_studies, lookup_bytes, step_flops
from lightning_dlrover.lab.characterize.results import Measurements, Result, agreement, limit_values, results_of
from lightning_dlrover.output import counted, text_table
from lightning_dlrover.report.page import INK, WIDTH_INCHES, in_our_style, render_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = {
    "data": "#e69f00",
    "embedding": "#0072b2",
    "bottom_mlp": "#56b4e9",
    "interaction": "#8566d0",
    "top_mlp": "#009e73",
    "communication": "#d55e00",
    "optimizer": "#cc79a7",
    "forward": "#56b4e9",
    "backward": "#0072b2",
}
LINES = ("#0072b2", "#d55e00", "#009e73", "#8566d0", "#e69f00", "#cc79a7", "#56b4e9", "#9a9a9a")
WORDS = {
    "num_dense": "dense features",
    "num_sparse": "tables",
    "batch": "batch (samples per step)",
    "rows": "rows per table",
    "width": "units per hidden layer",
    "depth": "hidden layers",
    "lookups": "lookups per table and sample",
    "skew": "skew",
    "placement": "placement of the tables",
    "workload": "model",
    "num_workers": "workers",
    "threads": "threads",
    "loader_workers": "loader workers",
    "data": "input",
    "device": "device",
    "learning_rate": "learning rate",
}
MAX_BARS = 24


def _new_figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height), layout="constrained")


def _study_figure(study: Study, results: Mapping[Point, Result]) -> Figure | None:
    """Plot throughput over the sweep, next to the parts of a step; None for fewer than two points, which make no line."""
    found = [results[p] for p in study.points if p in results and not p.measures_loss]
    if len(found) < 2:
        return None
    shown = found[:: 1 + (len(found) - 1) // MAX_BARS]
    figure = _new_figure(4.2 + 0.02 * len(shown))
    rates, parts = figure.subplots(1, 2, width_ratios=[1, 1.25])
    _draw_rates(rates, study, found)
    _draw_parts(parts, study, shown)
    return figure


def _draw_rates(axes: Axes, study: Study, found: Sequence[Result]) -> None:
    from matplotlib.ticker import LogLocator

    lines: dict[tuple[object, ...], list[Result]] = {}
    for result in found:
        lines.setdefault(tuple(getattr(result.point, name) for name in study.series), []).append(result)
    values = [getattr(r.point, study.x) for r in found]
    is_number = all(isinstance(value, int | float) for value in values)
    spots = {value: i for i, value in enumerate(dict.fromkeys(sorted(values) if is_number else values))}
    style: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.5, "elinewidth": 0.9, "capsize": 2.5}
    for number, (key, line) in enumerate(lines.items()):
        line.sort(key=lambda r: spots[getattr(r.point, study.x)])
        offset = 0.0 if is_number else 0.16 * (number - (len(lines) - 1) / 2)
        xs = [spots[getattr(r.point, study.x)] + offset for r in line]
        ys = [r.samples_per_s for r in line]
        errors = [
            [y - r.point.batch / r.high for y, r in zip(ys, line, strict=True)],
            [r.point.batch / r.low - y for y, r in zip(ys, line, strict=True)],
        ]
        label = ", ".join(_value(name, value) for name, value in zip(study.series, key, strict=True))
        colour = LINES[number % len(LINES)]
        axes.errorbar(xs, ys, yerr=errors, fmt="o-" if is_number else "o", color=colour, label=label or None, **style)
    axes.set_xticks(
        range(len(spots)), [_tick(value) for value in spots], rotation=25 if len(spots) > 4 and not is_number else 0
    )
    axes.set_xlim(-0.4, len(spots) - 0.6)
    axes.set_xlabel(WORDS[study.x])
    axes.set_ylabel("throughput (samples/s)")
    highest = max(r.point.batch / r.low for r in found)  # the bars must fit, too
    lowest = min(r.point.batch / r.high for r in found)
    if highest > 12 * lowest:
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_ylim(0, 1.06 * highest)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y")
    axes.set_title("throughput, with its interval")
    if any(study.series) and len(lines) > 1:
        # Beneath the axes, where it hides no interval.
        axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.17), fontsize=7.5, ncols=2 if len(lines) > 5 else 1)


def _draw_parts(axes: Axes, study: Study, found: Sequence[Result]) -> None:
    """Plot each point's step as a bar of its parts, in percent, labelled with its milliseconds."""
    from matplotlib.patches import Patch

    names = [part for part in (*PARTS, "forward", "backward") if any(result.part_s.get(part) for result in found)]
    for place, result in enumerate(found):
        left = 0.0
        for part in names:
            share = 100 * result.share(part)
            axes.barh(place, share, left=left, height=0.72, color=PART_COLOURS[part], linewidth=0)
            left += share
        axes.annotate(f"{1e3 * result.median:.3g} ms", (101, place), va="center", fontsize=7.5)
    fields = [*study.series, study.x]
    labels = [", ".join(_value(name, getattr(r.point, name)) for name in fields) for r in found]
    axes.set_yticks(range(len(found)), labels, fontsize=7.5 if len(found) < 18 else 6.5)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 120)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("percent of a step")
    axes.set_title("parts of a step, and its time")
    labels = [part.replace("_", " ").replace("mlp", "MLP") for part in names]
    handles = [Patch(color=PART_COLOURS[part], label=label, linewidth=0) for part, label in zip(names, labels, strict=True)]
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=handles, loc="outside upper center", ncols=len(names), fontsize=8.5)


def _loss_figure(losses: Sequence[Result]) -> Figure | None:
    """Plot the normalized entropy over the batch: with one learning rate, and with the best of those tried."""
    if len(losses) < 2:
        return None
    figure = _new_figure(2.8)
    axes = figure.subplots()
    smallest = min(losses, key=lambda r: r.point.batch)
    batches = sorted({r.point.batch for r in losses})
    kept = [r for r in losses if r.point.learning_rate == smallest.point.learning_rate]
    best = [min((r for r in losses if r.point.batch == b), key=lambda r: r.median) for b in batches]
    for line, colour, label in ((kept, LINES[1], "same learning rate"), (best, LINES[0], "best learning rate tried")):
        line = sorted(line, key=lambda r: r.point.batch)
        ys = [r.median for r in line]
        errors = [[r.median - r.low for r in line], [r.high - r.median for r in line]]
        axes.errorbar(
            [batches.index(r.point.batch) for r in line], ys, yerr=errors, fmt="o-", color=colour, capsize=3, label=label
        )
    axes.set_xticks(range(len(batches)), [_tick(b) for b in batches])
    axes.set_xlabel(WORDS["batch"])
    axes.set_ylabel("normalized entropy")
    axes.grid(axis="y")
    axes.legend()
    axes.set_title("loss on planted data, with the range over seeds")
    return figure


def _roofline_figure(results: Sequence[Result], limits: Mapping[tuple[str, int], float], cores: int) -> Figure | None:
    """Plot FLOP/s over FLOPs per byte of rows, under the roofs of memory and of matrix multiply."""
    reads, multiply = limits.get(("rows", cores)), limits.get(("multiply", cores))
    shown = [
        r
        for r in results
        if r.point.num_sparse and r.point.num_workers == 1 and r.point.device == "cpu" and r.lookup_bytes_per_s
    ]
    if len(shown) < 2 or reads is None or multiply is None:
        return None
    import numpy as np

    figure = _new_figure(3.8)
    axes = figure.subplots()
    intensity = [step_flops(r.point) / lookup_bytes(r.point) for r in shown]
    roof = np.logspace(np.log10(min(intensity) / 3), np.log10(max(intensity) * 3), 100)
    random_rows = f"random rows, {reads:.3g} GB/s"
    axes.plot(roof, np.minimum(multiply, reads * roof), color=INK, linewidth=1.6, label=random_rows)
    if (copy := limits.get(("copy", cores))) is not None:
        axes.plot(
            roof, np.minimum(multiply, copy * roof), color=INK, linewidth=0.9, linestyle=":", label=f"copy, {copy:.3g} GB/s"
        )
    for number, workload in enumerate(dict.fromkeys(r.point.workload for r in shown)):
        chosen = [i for i, r in enumerate(shown) if r.point.workload == workload]
        xs, ys = [intensity[i] for i in chosen], [shown[i].flops_per_s / 1e9 for i in chosen]
        axes.plot(xs, ys, "o", markersize=5, alpha=0.75, color=LINES[number % len(LINES)], label=workload)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte of table rows moved")
    axes.set_ylabel("GFLOP/s of whole steps")
    axes.annotate(f"matrix multiply, {multiply:.0f} GFLOP/s", (roof[-1], multiply), ha="right", va="bottom", fontsize=9)
    axes.grid(which="major", axis="both")
    axes.legend()
    return figure


def _value(name: str, value: object) -> str:
    text = _tick(value)
    if name in ("placement", "workload", "data", "device"):
        return text
    if name in ("skew", "batch"):
        return f"{name} {text}"
    words = WORDS[name].partition(" per ")[0]
    return f"{text} {words.removesuffix('s') if value == 1 else words}"


def _tick(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        for unit, size in (("M", 1_000_000), ("k", 1000)):
            if value >= 10 * size or (value >= size and value % size == 0):
                return f"{value / size:g}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value).replace("_", "-")


Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Comparison:
    """Limits and throughput of two machines, with the ratio of the second to the first."""

    limits: Rows  # limit, threads, A, B, B/A, unit
    points: Rows  # model, configuration, A, B, B/A, unit; only points that both have
    summary: str


def compare_text(one: Measurements, other: Measurements) -> str:
    """Return the comparison as text."""
    machines = [
        f"{m.processor}{' + ' + m.gpu if m.gpu else ''}, {m.cores:g} cores" for m in (one.header.machine, other.header.machine)
    ]
    found = compared(one, other)
    lines = [f"A: {machines[0]}", f"B: {machines[1]}", ""]
    lines += [*text_table("<>>>><", [("limit", "threads", "A", "B", "B/A", ""), *found.limits]), ""]
    if found.points:
        lines += [*text_table("<<>>><", [("point", "", "A", "B", "B/A", ""), *found.points]), ""]
    return "\n".join([*lines, found.summary])


def compared(one: Measurements, other: Measurements) -> Comparison:
    """Compare two machines, or two runs on one."""
    results = results_of(one.visits), results_of(other.visits)
    both = [point for point in results[0] if point in results[1]]
    limits = _limit_rows(one, other)
    if not both:
        summary = "no point was measured on both: sweeps depend on the number of cores and on --quick or --full"
        return Comparison(limits, [], summary)
    ratios = [results[1][p].samples_per_s / results[0][p].samples_per_s for p in both if not p.measures_loss]
    agreeing, count = agreement(*results)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
    summary = (
        f"B is {mean:.2f} times as fast as A (geometric mean of {len(ratios)} points); "
        f"{agreeing} of {count} points agree within their own intervals"
    )
    return Comparison(limits, [_point_row(results[0][point], results[1][point]) for point in both], summary)


def _limit_rows(one: Measurements, other: Measurements) -> Rows:
    limits = limit_values(one.limits), limit_values(other.limits)
    rows: Rows = []
    for name, (text, unit) in LIMITS.items():
        # Each machine's own limit is with all of its cores.
        best_a, best_b = _widest(limits[0], name), _widest(limits[1], name)
        if best_a is not None and best_b is not None:
            (threads_a, value_a), (threads_b, value_b) = best_a, best_b
            rows.append(
                (text, f"{threads_a}, {threads_b}", f"{value_a:.3g}", f"{value_b:.3g}", f"{value_b / value_a:.2f}", unit)
            )
    return rows


def _point_row(a: Result, b: Result) -> tuple[str, ...]:
    names = a.point.workload, differences(a.point)
    if a.point.measures_loss:
        return *names, f"{a.median:.4f}", f"{b.median:.4f}", f"{b.median / a.median:.3f}", "entropy"
    rates = a.samples_per_s, b.samples_per_s
    return *names, f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[1] / rates[0]:.2f}", "samples/s"


def _widest(found: Mapping[tuple[str, int], float], name: str) -> tuple[int, float] | None:
    return max(((threads, value) for (n, threads), value in found.items() if n == name), default=None)


def differences(point: Point) -> str:
    """Return the fields that distinguish a point from others, without those at their defaults."""
    fields = {f.name: f.default for f in dataclasses.fields(Point) if f.name != "workload"}
    return " ".join(f"{name}={getattr(point, name)}" for name, default in fields.items() if getattr(point, name) != default)


@dataclass(frozen=True)
class _Pair:
    title: str
    figures: tuple[str | None, str | None]


def write_comparison(path: Path, one: Measurements, other: Measurements) -> None:
    """Write the report of two machines to `path`, whole or not at all: limits and figures side by side, in one HTML file.

    Raises:
        OSError: `path` cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found = compared(one, other)
    page = render_page(
        "lab/characterize",
        "compare_page.html.j2",
        machines=(one.header.machine, other.header.machine),
        summary=found.summary,
        limits=found.limits,
        points=found.points,
        pairs=_pairs(one, other),
    )
    atomic_write(path, page)


def _pairs(one: Measurements, other: Measurements) -> list[_Pair]:
    """Return the figures of both machines by study. A study that neither has is skipped."""
    sides = [(side, results_of(side.visits)) for side in (one, other)]
    titles = {"roofline": "Achieved and attainable"}
    with in_our_style():
        roofs = [_roofline_figure([*results.values()], limit_values(side.limits), _cores(side)) for side, results in sides]
        drawn = {"roofline": roofs}
        for side, results in sides:
            for study in _studies(side, results):
                titles.setdefault(study.name, study.title)
                drawn.setdefault(study.name, []).append(_study_figure(study, results))
    return [
        _Pair(titles[name], (_svg(figures[0], f"{name}-a"), _svg(figures[1], f"{name}-b")))
        for name, figures in drawn.items()
        if any(figure is not None for figure in figures)
    ]


def _svg(figure: Figure | None, name: str) -> str | None:
    from lightning_dlrover.report.page import to_svg

    return to_svg(figure, name) if figure is not None else None


def _cores(side: Measurements) -> int:
    return max(1, int(side.header.machine.cores))


def _studies(side: Measurements, results: dict[Point, Result]) -> list[Study]:
    """Return the studies of the size, quick or full, that covers more of the measured points."""
    machine = side.header.machine
    quick = Scope(
        size="quick",
        device="cuda" if machine.gpu else "cpu",
        cores=_cores(side),
        memory_bytes=machine.memory_gib << 30,
        has_torchrec=True,
        has_pyarrow=True,
        users_model=min({point.model for point in results} - {""}, default=""),
    )
    return max(
        (all_studies(scope) for scope in (quick, dataclasses.replace(quick, size="full"))),
        key=lambda made: len({point for study in made for point in study.points} & results.keys()),
    )


@dataclass(frozen=True)
class _Section:
    title: str
    skipped: tuple[str, ...]
    figure: str | None
    loss: str | None
    caption: str
    rows: list[tuple[str, ...]]
    files: str
    problems: list[str]


def write_page(path: Path, measured: Measurements, studies: Sequence[Study], found: Sequence[Finding], scope: Scope) -> None:
    """Write the report of a characterization to `path`, whole or not at all: one HTML file.

    Raises:
        OSError: `path` cannot be written.
    """
    results, limits = results_of(measured.visits), limit_values(measured.limits)
    shown = {point: results[point] for study in studies for point in study.points if point in results}
    with in_our_style():
        roofline = _roofline_figure(list(shown.values()), limits, scope.cores)
        sections = [_section(study, results, measured.visits) for study in studies]
    times = [*(visit.at for visit in measured.visits), *(limit.at for limit in measured.limits)]
    page = render_page(
        "lab/characterize",
        "page.html.j2",
        machine=measured.header.machine,
        version=measured.header.version,
        began=_date(min(times)),
        ended=_date(max(times)),
        size=scope.size,
        facts=_facts(shown, limits, scope),
        found=found,
        limits=_rows_of_limits(measured, limits),
        roofline=_svg(roofline, "roofline"),
        studies=sections,
        num_visits=len(measured.visits),
    )
    atomic_write(path, page)


def _facts(
    results: Mapping[Point, Result], limits: Mapping[tuple[str, int], float], scope: Scope
) -> list[tuple[str, str, str]]:
    timed = [r for r in results.values() if r.parts_s]
    facts = [("Points", str(len(results)), counted(sum(r.num_visits for r in results.values()), "visit"))]
    for name, label in (
        ("copy", "Memory copy"),
        ("rows", "Random rows"),
        ("multiply", "Matrix multiply"),
        ("all_reduce", "All-reduce"),
        ("gpu_copy", "GPU memory copy"),
        ("gpu_rows", "GPU random rows"),
        ("gpu_multiply", "GPU matrix multiply"),
    ):
        if (value := limits.get((name, scope.cores))) is not None:
            facts.append((label, f"{value:.3g} {LIMITS[name][1]}", ""))
    if timed:
        errors = sorted(abs(r.parts_s / r.median - 1) for r in timed)
        facts.append(("Parts against steps", f"{errors[len(errors) // 2]:.1%}", "median difference"))
        spreads = sorted(r.spread for r in timed)
        is_known = any(r.num_visits > 1 for r in timed)  # one visit does not show how much a second would differ
        interval = f"{100 * spreads[len(spreads) // 2]:.0f} % wide" if is_known else "unknown"
        facts.append(("Interval of a second run", interval, "90 %, median over points" if is_known else "one visit each"))
    if any(r.joules_per_step is not None for r in results.values()):
        return [*facts, ("Energy", "measured", "")]
    return [*facts, ("Energy", "not measured", "neither RAPL nor NVML can be read")]


def _rows_of_limits(measured: Measurements, best: Mapping[tuple[str, int], float]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for limit in {(limit.name, limit.threads): limit for limit in measured.limits}.values():
        text = LIMITS.get(limit.name, (limit.name, ""))[0]
        if not limit.blocks:
            rows.append((text, str(limit.threads), "-", limit.problem, limit.unit))
            continue
        ordered = sorted(
            b for other in measured.limits if (other.name, other.threads) == (limit.name, limit.threads) for b in other.blocks
        )
        cells = f"{best[limit.name, limit.threads]:.3g}", f"{ordered[0]:.3g} to {ordered[-1]:.3g}"
        rows.append((text, str(limit.threads), *cells, limit.unit))
    return rows


def _section(study: Study, results: Mapping[Point, Result], visits: Sequence[Visit]) -> _Section:
    losses = [results[point] for point in study.points if point in results and point.measures_loss]
    failed = {visit.point: visit.problem for visit in visits if visit.problem and visit.point not in results}
    missing = sum(point not in results and point not in failed for point in study.points)
    problems = [f"{differences(point)}: {failed[point]}" for point in study.points if point in failed]
    if missing:
        problems.append(f"{counted(missing, 'point')} not reached: the same command continues, or give a larger --budget.")
    return _Section(
        title=study.title,
        skipped=study.skipped,
        figure=_svg(_study_figure(study, results), study.name),
        loss=_svg(_loss_figure(losses), f"{study.name}-loss"),
        caption="A bar is the 90 % interval of a second run under the same load. Parts are timed in steps of their own, cut "
        "at the parts' borders; each part holds its forward and its backward pass.",
        rows=[_row(results[point]) for point in study.points if point in results],
        files=f"{study.name}.csv",
        problems=problems,
    )


def _row(r: Result) -> tuple[str, ...]:
    if r.point.measures_loss:
        interval = f"{r.low:.4f} to {r.high:.4f}"
        return differences(r.point), "-", f"{r.median:.4f}", interval, str(r.num_blocks), *["-"] * 6
    return (
        f"{r.point.workload} {differences(r.point)}",
        f"{r.samples_per_s:,.0f}",
        f"{1e3 * r.median:.3g} ms",
        f"{1e3 * r.low:.3g} to {1e3 * r.high:.3g}",
        str(r.num_blocks),
        f"{r.parts_s / r.median:.3f}",
        f"{r.cpu_percent:.0f} %",
        f"{r.peak_memory_bytes / 2**30:.2f} GiB",
        _rate(r.mlp_flops_per_s, "GFLOP/s"),
        _rate(r.lookup_bytes_per_s, "GB/s"),
        "-" if r.joules_per_step is None else f"{1e3 * r.joules_per_step / r.point.batch:.3g} mJ/sample",
    )


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value / 1e9:.3g} {unit}"


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
