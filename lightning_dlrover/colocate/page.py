"""Write a queue's report: one HTML file with its Gantt picture and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lightning_dlrover.atomic_files import atomic_write
from lightning_dlrover.colocate.figures import gantt_figure
from lightning_dlrover.colocate.journal import Added, Opened, Profiled, Rates, Record
from lightning_dlrover.colocate.summary import Summary, cells, summarize
from lightning_dlrover.report.page import render_page

__all__ = ["write_report"]

MAX_RATES = 100


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        OSError: `path` cannot be written.
    """
    atomic_write(path, _page(records))


def _page(records: Sequence[Record]) -> str:
    from lightning_dlrover.report.pictures import to_svg

    summary = summarize(records)
    opened = [record for record in records if isinstance(record, Opened)]
    figure = gantt_figure(records)
    return render_page(
        "colocate",
        "page.html.j2",
        summary=summary,
        began=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(opened[0].at)) if opened else "never",
        facts=_facts(summary),
        gantt=to_svg(figure, "gantt") if figure is not None else None,
        jobs=[(job.name, job.result or "not ended", *cells(job), job.reason) for job in summary.jobs],
        kinds=_kinds(records),
        rates=_rates(records),
    )


def _facts(summary: Summary) -> list[tuple[str, str, str]]:
    return [
        ("Jobs done", f"{summary.num_done} of {len(summary.jobs)}", ""),
        ("Makespan", f"{summary.makespan_s:.1f} s", ""),
        ("Throughput", summary.throughput_text or "-", "finished jobs" if summary.throughput_text else "too short to tell"),
        ("Cores used", f"{100 * summary.utilisation:.0f} %", "CPU time of all jobs"),
        ("Mean wait", f"{summary.mean_wait_s:.1f} s", "until the first start"),
        ("Mean slowdown", "-" if summary.mean_slowdown is None else f"{summary.mean_slowdown:.2f}", "against running alone"),
    ]


def _names(records: Sequence[Record]) -> dict[str, str]:
    """Return a job's name for each kind."""
    names: dict[str, str] = {}
    for record in records:
        if isinstance(record, Added):
            names.setdefault(record.spec.kind, record.spec.name)
    return names


def _kinds(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return one row for each kind of job, with the range of its measurements."""
    names = _names(records)
    measured: dict[str, list[Profiled]] = {}
    for record in records:
        if isinstance(record, Profiled):
            measured.setdefault(record.job_kind, []).append(record)
    return [
        (
            names.get(kind, kind),
            _range([record.steps_per_s for record in found], "{:.3g}"),
            _range([record.use.get("cores", 0.0) for record in found], "{:.2f}"),
            _range([100 * record.use.get("input", 0.0) for record in found], "{:.0f}", " %"),
            _range([moved / 1e9 for record in found if (moved := record.use.get("memory_bandwidth"))], "{:.2f}"),
            _range([100 * record.use["gpu"] for record in found if "gpu" in record.use], "{:.0f}", " %"),
        )
        for kind, found in measured.items()
    ]


def _range(figures: Sequence[float], form: str, unit: str = "") -> str:
    """Return the smallest and the largest of some figures; one if they look the same."""
    if not figures:
        return "-"
    low, high = form.format(min(figures)), form.format(max(figures))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _rates(records: Sequence[Record]) -> list[tuple[str, ...]]:
    names = _names(records)
    rows: list[tuple[str, ...]] = []
    for record in [record for record in records if isinstance(record, Rates)][-MAX_RATES:]:
        speeds = ", ".join(f"{names.get(kind, kind)} {record.speeds[kind]:.2f}" for kind in record.kinds)
        rows.append((speeds, f"{sum(record.speeds[kind] for kind in record.kinds):.2f}", f"{record.seconds:.1f}"))
    return rows
