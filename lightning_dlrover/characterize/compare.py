"""Two machines' results side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dlrover.characterize.limits import LIMITS
from lightning_dlrover.characterize.point import Point
from lightning_dlrover.characterize.results import Result, agreement, limit_values, results_of
from lightning_dlrover.characterize.store import Measurements
from lightning_dlrover.report.text_table import text_table

__all__ = ["Comparison", "compare_text", "compared", "differences"]


Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Comparison:
    """Limits and throughput of both machines, with the ratio of the second to the first."""

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
    """Return the fields that tell a point from others, without those that keep their defaults."""
    fields = {f.name: f.default for f in dataclasses.fields(Point) if f.name != "workload"}
    return " ".join(f"{name}={getattr(point, name)}" for name, default in fields.items() if getattr(point, name) != default)
