"""Pictures of a study, in the style of a job's report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.report.pictures import INK, WIDTH_INCHES, in_our_style
from lightning_dlrover.simulate.records import Simulated
from lightning_dlrover.simulate.summary import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["completions_figure", "costs_figure", "sizes_figure", "use_figure"]

COLOURS = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8566d0", "#9a9a9a", "#b5a100", "#7a4a1e")
MOST_SIZES = 4
"""Number of policies with drawn sizes."""
TIME_BINS = 600


def completions_figure(simulations: Sequence[Simulated]) -> Figure:
    """Draw the fraction of jobs that have ended within a JCT, for each policy."""
    return _styled(_completions, simulations)


def costs_figure(simulations: Sequence[Simulated]) -> Figure | None:
    """Draw the mean JCT over the cost of a resize, for each policy; None if there is one cost only.

    Costs are compared on the traces and seeds that all of them have.
    """
    found: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for s in simulations:
        found[s.cost].add((s.trace, s.seed))
    common = set.intersection(*found.values())
    shown = [s for s in simulations if (s.trace, s.seed) in common]
    return _styled(_costs, shown) if len(found) > 1 and common else None


def use_figure(simulations: Sequence[Simulated]) -> Figure:
    """Draw the devices in use over time, of one simulation for each policy."""
    return _styled(_use, simulations)


def sizes_figure(simulations: Sequence[Simulated]) -> Figure:
    """Draw the devices of each job over time, of one simulation for each of the first policies."""
    return _styled(_sizes, simulations[:MOST_SIZES])


def _styled(draw: Callable[[Sequence[Simulated]], Figure], simulations: Sequence[Simulated]) -> Figure:
    with in_our_style():
        return draw(simulations)


def _figure(height: float, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots(rows, **options)


def _completions(simulations: Sequence[Simulated]) -> Figure:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = _figure(3.8)
    longest_s = max(float(np.max(simulated.completions_s)) for simulated in simulations)
    seconds, unit = (3600.0, "hours") if longest_s >= 7200 else (60.0, "minutes") if longest_s >= 120 else (1.0, "seconds")
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


def _costs(simulations: Sequence[Simulated]) -> Figure:
    figure, axes = _figure(3.8)
    rows = summarize(simulations)
    costs = sorted({row.cost for row in rows}, key=_cost_order)
    places = {cost: number for number, cost in enumerate(costs)}
    policies = list(dict.fromkeys(row.policy for row in rows))
    for colour, policy in zip(_colours(len(policies)), policies, strict=True):
        own = sorted((row for row in rows if row.policy == policy), key=lambda row: places[row.cost])
        x = [places[row.cost] for row in own]
        axes.plot(x, [row.mean_s / 3600 for row in own], "o-", color=colour, linewidth=1.6, markersize=4, label=policy)
    axes.set_xticks(range(len(costs)), costs)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost of a resize")
    axes.set_ylabel("mean JCT (hours)")
    axes.grid(axis="y")
    _legend(figure)
    return figure


def _use(simulations: Sequence[Simulated]) -> Figure:
    figure, axes = _figure(3.2)
    for colour, simulated in zip(_colours(len(simulations)), simulations, strict=True):
        edges, devices = _devices_over_time(simulated)
        axes.stairs(devices, edges / 3600, color=colour, linewidth=1.3, label=simulated.policy, baseline=None)
    axes.axhline(simulations[0].num_devices, color=INK, linewidth=0.7, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time (hours)")
    axes.set_ylabel("devices in use")
    axes.grid(axis="y")
    _legend(figure)
    return figure


def _sizes(simulations: Sequence[Simulated]) -> Figure:
    from matplotlib.colors import LogNorm

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
    figure.colorbar(image, ax=panels, label="devices of the job", fraction=0.03)
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
    """Return the place of a shown cost on the axis: what is no number of seconds comes last."""
    number = cost.removesuffix(" s")
    return np.inf if number == cost else float(number)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper left", ncols=6)
