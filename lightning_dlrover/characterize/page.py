"""Write the report of a characterization: one HTML file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover.atomic_files import atomic_write
from lightning_dlrover.characterize.compare import differences
from lightning_dlrover.characterize.figures import loss_figure, roofline_figure, study_figure
from lightning_dlrover.characterize.findings import Finding
from lightning_dlrover.characterize.limits import LIMITS
from lightning_dlrover.characterize.point import Point, Visit
from lightning_dlrover.characterize.results import Result, limit_values, results_of
from lightning_dlrover.characterize.store import Measurements
from lightning_dlrover.characterize.studies import Scope, Study
from lightning_dlrover.output import counted
from lightning_dlrover.report.page import render_page

__all__ = ["write_page"]


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
    """Write the report to `path`, whole or not at all.

    Raises:
        OSError: `path` cannot be written.
    """
    atomic_write(path, _page(measured, studies, found, scope))


def _page(measured: Measurements, studies: Sequence[Study], found: Sequence[Finding], scope: Scope) -> str:
    from lightning_dlrover.report.pictures import to_svg

    results, limits = results_of(measured.visits), limit_values(measured.limits)
    shown = {point: results[point] for study in studies for point in study.points if point in results}
    roofline = roofline_figure(list(shown.values()), limits, scope.cores)
    times = [*(visit.at for visit in measured.visits), *(limit.at for limit in measured.limits)]
    return render_page(
        "characterize",
        "page.html.j2",
        machine=measured.header.machine,
        version=measured.header.version,
        began=_date(min(times)),
        ended=_date(max(times)),
        size=scope.size,
        facts=_facts(shown, limits, scope),
        found=found,
        limits=_limit_rows(measured),
        roofline=to_svg(roofline, "roofline") if roofline is not None else None,
        studies=[_section(study, results, measured.visits) for study in studies],
        num_visits=len(measured.visits),
    )


def _facts(
    results: Mapping[Point, Result], limits: Mapping[tuple[str, int], float], scope: Scope
) -> list[tuple[str, str, str]]:
    timed = [r for r in results.values() if r.parts_s]
    facts = [("Points", str(len(results)), f"{sum(r.num_visits for r in results.values())} visits")]
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
        is_known = any(r.num_visits > 1 for r in timed)  # one visit cannot tell what a second would find
        interval = f"{100 * spreads[len(spreads) // 2]:.0f} % wide" if is_known else "unknown"
        facts.append(("Interval of a second run", interval, "90 %, median over points" if is_known else "one visit each"))
    measured = any(r.joules_per_step is not None for r in results.values())
    facts.append(
        ("Energy", "measured" if measured else "not measured", "" if measured else "neither RAPL nor NVML can be read")
    )
    return facts


def _limit_rows(measured: Measurements) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    best = limit_values(measured.limits)
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
    from lightning_dlrover.report.pictures import to_svg

    figure = study_figure(study, results)
    losses = [results[point] for point in study.points if point in results and point.measures_loss]
    loss = loss_figure(losses)
    failed = {visit.point: visit.problem for visit in visits if visit.problem and visit.point not in results}
    missing = sum(point not in results and point not in failed for point in study.points)
    problems = [f"{differences(point)}: {failed[point]}" for point in study.points if point in failed]
    if missing:
        problems.append(f"{counted(missing, 'point')} not reached: the same command continues, or give a larger --budget.")
    return _Section(
        title=study.title,
        skipped=study.skipped,
        figure=to_svg(figure, study.name) if figure is not None else None,
        loss=to_svg(loss, f"{study.name}-loss") if loss is not None else None,
        caption="A bar is the 90 % interval of a second run under the same load. Parts are timed in steps of their own, cut "
        "at the parts' borders; each part holds its forward and its backward pass.",
        rows=[_row(results[point]) for point in study.points if point in results],
        files=f"{study.name}.csv",
        problems=problems,
    )


def _row(r: Result) -> tuple[str, ...]:
    if r.point.measures_loss:
        return (
            differences(r.point),
            *("-" for _ in range(1)),
            f"{r.median:.4f}",
            f"{r.low:.4f} to {r.high:.4f}",
            str(r.num_blocks),
            *["-"] * 6,
        )
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
