"""Two machines' results side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from lightning_dlrover.characterize.limits import LIMITS
from lightning_dlrover.characterize.point import Point
from lightning_dlrover.characterize.results import agreement, limit_values, results_of
from lightning_dlrover.characterize.store import Measurements
from lightning_dlrover.report.text_table import text_table

__all__ = ["compare_text", "differences"]


def compare_text(one: Measurements, other: Measurements) -> str:
    """Return limits and throughput of both, with the ratio of the second to the first."""
    machines = [
        f"{m.processor}{' + ' + m.gpu if m.gpu else ''}, {m.cores:g} cores" for m in (one.header.machine, other.header.machine)
    ]
    lines = [f"A: {machines[0]}", f"B: {machines[1]}", ""]
    limits = limit_values(one.limits), limit_values(other.limits)
    rows = [("limit", "threads", "A", "B", "B/A", "")]
    for name, (text, unit) in LIMITS.items():
        # Each machine's own limit is with all of its cores.
        best_a, best_b = _widest(limits[0], name), _widest(limits[1], name)
        if best_a is not None and best_b is not None:
            (threads_a, value_a), (threads_b, value_b) = best_a, best_b
            rows.append(
                (text, f"{threads_a}, {threads_b}", f"{value_a:.3g}", f"{value_b:.3g}", f"{value_b / value_a:.2f}", unit)
            )
    lines += [*text_table("<>>>><", rows), ""]
    results = results_of(one.visits), results_of(other.visits)
    both = [point for point in results[0] if point in results[1]]
    if not both:
        return "\n".join(
            [*lines, "no point was measured on both: sweeps depend on the number of cores and on --quick or --full"]
        )
    rows = [("point", "", "A", "B", "B/A", "")]
    ratios = []
    for point in both:
        a, b = results[0][point], results[1][point]
        if point.measures_loss:
            rows.append(
                (
                    point.workload,
                    differences(point),
                    f"{a.median:.4f}",
                    f"{b.median:.4f}",
                    f"{b.median / a.median:.3f}",
                    "entropy",
                )
            )
            continue
        ratio = b.samples_per_s / a.samples_per_s
        ratios.append(ratio)
        rows.append(
            (
                point.workload,
                differences(point),
                f"{a.samples_per_s:,.0f}",
                f"{b.samples_per_s:,.0f}",
                f"{ratio:.2f}",
                "samples/s",
            )
        )
    agreeing, count = agreement(*results)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
    lines += text_table("<<>>><", rows)
    lines += [
        "",
        f"B is {mean:.2f} times as fast as A (geometric mean of {len(ratios)} points); "
        f"{agreeing} of {count} points agree within the range of their own blocks",
    ]
    return "\n".join(lines)


def _widest(found: Mapping[tuple[str, int], float], name: str) -> tuple[int, float] | None:
    return max(((threads, value) for (n, threads), value in found.items() if n == name), default=None)


def differences(point: Point) -> str:
    """Return the fields that tell a point from others, without those that keep their defaults."""
    fields = {f.name: f.default for f in dataclasses.fields(Point) if f.name != "workload"}
    return " ".join(f"{name}={getattr(point, name)}" for name, default in fields.items() if getattr(point, name) != default)
