"""Figures of the studies, in the style of a job's report."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_dlrover.characterize.point import PARTS, Point
from lightning_dlrover.characterize.results import Result
from lightning_dlrover.characterize.studies import Study
from lightning_dlrover.characterize.work import step_flops
from lightning_dlrover.report.pictures import INK, WIDTH_INCHES, in_our_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PART_COLOURS", "loss_figure", "roofline_figure", "study_figure"]

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
Drawn = TypeVar("Drawn", bound=Callable[..., Any])


def _styled(draw: Drawn) -> Drawn:
    @functools.wraps(draw)
    def drawn(*arguments: Any) -> Any:
        with in_our_style():
            return draw(*arguments)

    return drawn  # type: ignore[return-value]


@_styled
def study_figure(study: Study, results: Mapping[Point, Result]) -> Figure | None:
    """Plot throughput over the sweep, above the parts of a step; None without measurements."""
    found = [results[p] for p in study.points if p in results and not p.measures_loss]
    if not found:
        return None
    from matplotlib.figure import Figure as NewFigure

    shown = found[:: 1 + (len(found) - 1) // MAX_BARS]
    figure = NewFigure(figsize=(WIDTH_INCHES, 4.2 + 0.02 * len(shown)), layout="constrained")
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
    spots = {value: i for i, value in enumerate(dict.fromkeys(values if not is_number else sorted(values)))}
    colours, dashes = itertools.cycle(LINES), itertools.cycle(["-", "--", ":"])
    is_bar = not is_number
    for number, (key, line) in enumerate(lines.items()):
        line.sort(key=lambda r: spots[getattr(r.point, study.x)])
        offset = 0.16 * (number - (len(lines) - 1) / 2) if is_bar else 0.0
        xs = [spots[getattr(r.point, study.x)] + offset for r in line]
        ys = [r.samples_per_s for r in line]
        errors = [
            [y - r.point.batch / r.high for y, r in zip(ys, line, strict=True)],
            [r.point.batch / r.low - y for y, r in zip(ys, line, strict=True)],
        ]
        label = ", ".join(_value(name, value) for name, value in zip(study.series, key, strict=True))
        if number and number % len(LINES) == 0:
            next(dashes)
        style = "o" if is_bar else "o-"
        axes.errorbar(
            xs,
            ys,
            yerr=errors,
            fmt=style,
            color=next(colours),
            markersize=4.5,
            linewidth=1.5,
            elinewidth=0.9,
            capsize=2.5,
            label=label or None,
        )
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
    """Plot each point's step as a bar of its parts, in percent, with its milliseconds beside it."""
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
    handles = [_patch(PART_COLOURS[part], part.replace("_", " ").replace("mlp", "MLP")) for part in names]
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=handles, loc="outside upper center", ncols=len(names), fontsize=8.5)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label, linewidth=0)


@_styled
def loss_figure(losses: Sequence[Result]) -> Figure | None:
    """Plot the normalized entropy over the batch: with one learning rate, and with the best of those tried."""
    if len(losses) < 2:
        return None
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(WIDTH_INCHES, 2.8), layout="constrained")
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


@_styled
def roofline_figure(results: Sequence[Result], limits: Mapping[tuple[str, int], float], cores: int) -> Figure | None:
    """Plot FLOP/s over FLOPs per byte of rows, under the roofs of memory and of matrix multiply."""
    reads, multiply = limits.get(("rows", cores)), limits.get(("multiply", cores))
    shown = [
        r
        for r in results
        if r.point.num_sparse and r.point.num_workers == 1 and r.point.device == "cpu" and r.lookup_bytes_per_s
    ]
    if not shown or reads is None or multiply is None:
        return None
    import numpy as np
    from matplotlib.figure import Figure as NewFigure

    from lightning_dlrover.characterize.work import lookup_bytes

    figure = NewFigure(figsize=(WIDTH_INCHES, 3.8), layout="constrained")
    axes = figure.subplots()
    intensity = [step_flops(r.point) / lookup_bytes(r.point) for r in shown]
    roof = np.logspace(np.log10(min(intensity) / 3), np.log10(max(intensity) * 3), 100)
    random_rows = f"random rows, {reads:.3g} GB/s"
    axes.plot(roof, np.minimum(multiply, reads * roof), color=INK, linewidth=1.6, label=random_rows)
    if (copy := limits.get(("copy", cores))) is not None:
        axes.plot(
            roof, np.minimum(multiply, copy * roof), color=INK, linewidth=0.9, linestyle=":", label=f"copy, {copy:.3g} GB/s"
        )
    for place, workload in enumerate(dict.fromkeys(r.point.workload for r in shown)):
        chosen = [i for i, r in enumerate(shown) if r.point.workload == workload]
        rates = [shown[i].flops_per_s / 1e9 for i in chosen]
        axes.plot(
            [intensity[i] for i in chosen],
            rates,
            "o",
            markersize=5,
            alpha=0.75,
            color=LINES[place % len(LINES)],
            label=workload,
        )
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
