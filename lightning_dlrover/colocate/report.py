"""A queue's figures from its journal, as text, pictures and one HTML page."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lightning_dlrover.colocate.journal import Added, Ended, Opened, Profiled, Rates, Record, Started
from lightning_dlrover.files import atomic_write
from lightning_dlrover.output import counted, text_table
from lightning_dlrover.report.page import INK, WIDTH_INCHES, in_our_style, render_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 40

SHORT_S = 60.0
"""Seconds of a queue below which its jobs per hour are not shown."""


@dataclass(frozen=True)
class JobRow:
    """One job of a queue.

    Args:
        waited_s: time from its arrival until its first start.
        slowdown: time with processes, pauses included, over the time that its steps would have taken alone, by the median of
            the measurements of its kind; 1 if it was no slower than the slowest of them; None: unknown.
    """

    name: str
    result: str  # empty while it has not ended
    waited_s: float | None
    run_s: float
    paused_s: float
    slowdown: float | None
    peak_bytes: int
    estimate_bytes: int
    gpu_peak_bytes: int
    gpu_estimate_bytes: int
    reason: str


@dataclass(frozen=True)
class Summary:
    """Figures of a queue.

    Args:
        makespan_s: time that a dispatcher ran, from its first start to the last end.
        utilisation: CPU time of all jobs over the cores' time.
        throughput_per_hour: finished jobs per hour.
    """

    policy: str
    jobs: tuple[JobRow, ...]
    makespan_s: float
    utilisation: float
    throughput_per_hour: float
    mean_wait_s: float
    mean_slowdown: float | None

    @property
    def throughput_text(self) -> str:
        """Finished jobs per hour; empty if the time is too short for a figure."""
        return f"{self.throughput_per_hour:.0f} jobs/h" if self.makespan_s >= SHORT_S else ""

    @property
    def num_done(self) -> int:
        return sum(job.result == "done" for job in self.jobs)


def summarize(records: Sequence[Record]) -> Summary:
    """Return a queue's figures."""
    opened = [record for record in records if isinstance(record, Opened)]
    added = {record.spec.name: record for record in records if isinstance(record, Added)}
    first_start: dict[str, float] = {}
    ends: dict[str, list[Ended]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if isinstance(record, Profiled):
            alone[record.job_kind].append(record.steps_per_s)
        elif isinstance(record, Started):
            first_start.setdefault(record.job, record.at)
        elif isinstance(record, Ended):
            ends[record.job].append(record)
    rows = []
    for name, job in added.items():
        last = ends[name][-1] if ends[name] else None
        spans = [span for ended in ends[name] for span in ended.spans]
        began = first_start.get(name)
        rows.append(
            JobRow(
                name=name,
                result=last.result if last is not None and last.result in ("done", "failed") else "",
                waited_s=began - job.at if began is not None else None,
                run_s=sum(ended.run_s for ended in ends[name]),
                paused_s=sum(span.ended - span.began for span in spans if span.phase == "paused"),
                slowdown=_slowdown(last, alone[job.spec.kind]),
                peak_bytes=max((ended.peak_bytes for ended in ends[name]), default=0),
                estimate_bytes=last.estimate_bytes + last.margin_bytes if last is not None else 0,
                gpu_peak_bytes=max((ended.gpu_peak_bytes for ended in ends[name]), default=0),
                gpu_estimate_bytes=last.gpu_estimate_bytes + last.gpu_margin_bytes if last is not None else 0,
                reason=last.reason if last is not None else "",
            )
        )
    makespan_s = _busy_s(opened, records)
    cpu_s = sum(ended.cpu_s for each in ends.values() for ended in each)
    cores = opened[-1].cores if opened else 1.0
    waits = [row.waited_s for row in rows if row.waited_s is not None]
    slowdowns = [row.slowdown for row in rows if row.slowdown is not None]
    return Summary(
        policy=opened[-1].policy if opened else "",
        jobs=tuple(rows),
        makespan_s=makespan_s,
        utilisation=cpu_s / (cores * makespan_s) if makespan_s else 0.0,
        throughput_per_hour=3600 * sum(row.result == "done" for row in rows) / makespan_s if makespan_s else 0.0,
        mean_wait_s=sum(waits) / len(waits) if waits else 0.0,
        mean_slowdown=sum(slowdowns) / len(slowdowns) if slowdowns else None,
    )


def _slowdown(ended: Ended | None, alone: Sequence[float]) -> float | None:
    if ended is None or ended.result != "done" or not alone or not min(alone) or not ended.num_steps:
        return None
    trained_s = sum(span.ended - span.began for span in ended.spans if span.phase in ("running", "paused"))
    # A speed that the kind also had alone shows no slowdown, and nothing makes a job faster than it is alone.
    if trained_s * min(alone) <= ended.num_steps:
        return 1.0
    return trained_s * median(alone) / ended.num_steps


def _busy_s(opened: Sequence[Opened], records: Sequence[Record]) -> float:
    """Return the time that a dispatcher ran: from each opening to the last record before the next one."""
    times = [record.at for record in records if isinstance(record, Started | Ended)]
    total = 0.0
    for number, each in enumerate(opened):
        until = opened[number + 1].at if number + 1 < len(opened) else float("inf")
        total += max((at - each.at for at in times if each.at <= at < until), default=0.0)
    return total


def cells(job: JobRow, unit: str = "") -> tuple[str, ...]:
    """Return a job's times, slowdown and memory as text, a GPU's memory after that of the host.

    Args:
        unit: printed after each time, in seconds.
    """
    return (
        "-" if job.waited_s is None else f"{job.waited_s:.1f}{unit}",
        f"{job.run_s:.1f}{unit}",
        f"{job.paused_s:.1f}{unit}",
        "-" if job.slowdown is None else f"{job.slowdown:.2f}",
        _sizes(job.peak_bytes, job.gpu_peak_bytes),
        _sizes(job.estimate_bytes, job.gpu_estimate_bytes),
    )


def _sizes(host_bytes: int, gpu_bytes: int) -> str:
    host = f"{host_bytes >> 20}" if host_bytes else "-"
    return f"{host}, GPU {gpu_bytes >> 20}" if gpu_bytes else host


def summary_text(summary: Summary) -> str:
    """Return the figures as text: one line for each job, and one for all."""
    rows: list[tuple[str, ...]] = [("job", "result", "waited", "ran", "paused", "slowdown", "peak MiB", "expected MiB")]
    for job in summary.jobs[-MAX_ROWS:]:
        rows.append((job.name, job.result or "waiting", *cells(job, " s")))
    slowdown = f", mean slowdown {summary.mean_slowdown:.2f}" if summary.mean_slowdown is not None else ""
    total = (
        f"{summary.num_done} of {counted(len(summary.jobs), 'job')} done in {summary.makespan_s:.1f} s with policy "
        f"{summary.policy}: {f'{each}, ' if (each := summary.throughput_text) else ''}"
        f"{100 * summary.utilisation:.0f} % of the cores used, mean wait {summary.mean_wait_s:.1f} s{slowdown}"
    )
    return "\n".join([*text_table("<<>>>>>>", rows), total])


PHASE_COLOURS = {
    "waiting": "#c9ccd1",
    "starting": "#56b4e9",
    "asks": "#e69f00",
    "running": "#009e73",
    "paused": "#f0e442",
    "ending": "#9a9a9a",
    "without steps": "#8566d0",
}
RESULT_COLOURS = {"failed": "#d55e00", "evicted": "#cc79a7", "stopped": "#7a4a1e"}
MAX_JOBS = 60


def gantt_figure(records: Sequence[Record]) -> Figure | None:
    """Draw each job's phases over time, one row for each job; None if no job has ended."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ends = [record for record in records if isinstance(record, Ended)]
    if not ends:
        return None
    added = {record.spec.name: record.at for record in records if isinstance(record, Added)}
    names = [name for name in added if any(ended.job == name for ended in ends)][-MAX_JOBS:]
    began = min(record.at for record in records if isinstance(record, Opened | Added))
    row_of = {name: len(names) - 1 - number for number, name in enumerate(names)}
    figure = Figure(figsize=(WIDTH_INCHES, 1.2 + 0.26 * len(names)), layout="constrained")
    axes = figure.subplots()
    drawn: dict[str, str] = {}
    free_since = dict(added)
    for ended in ends:
        if ended.job not in row_of or not ended.spans:
            continue
        row = row_of[ended.job]
        spans = [("waiting", free_since[ended.job], ended.spans[0].began)]
        # A command that reports no steps is in its start to the end.
        steps = any(span.phase in ("asks", "running") for span in ended.spans)
        spans += [
            ("without steps" if span.phase == "starting" and not steps else span.phase, span.began, span.ended)
            for span in ended.spans
        ]
        for phase, start, end in spans:
            colour = PHASE_COLOURS.get(phase, "#9a9a9a")
            drawn[phase] = colour
            height = 0.3 if phase == "waiting" else 0.72
            axes.barh(row, end - start, left=start - began, height=height, color=colour, linewidth=0)
        if ended.result in RESULT_COLOURS:
            drawn[ended.result] = RESULT_COLOURS[ended.result]
            axes.plot(
                ended.at - began, row, "X", color=drawn[ended.result], markersize=8, markeredgecolor=INK, markeredgewidth=0.5
            )
        free_since[ended.job] = ended.at
    axes.set_yticks([row_of[name] for name in names], names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("time (s)")
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    figure.legend(
        handles=[Patch(color=colour, label=phase) for phase, colour in drawn.items()], loc="outside upper left", ncols=8
    )
    return figure


MAX_RATES = 100


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Write the report to `path`, whole or not at all: one HTML file with a Gantt chart and tables.

    Raises:
        OSError: `path` cannot be written.
    """
    from lightning_dlrover.report.page import to_svg

    summary = summarize(records)
    opened = [record for record in records if isinstance(record, Opened)]
    names: dict[str, str] = {}  # a job's name for each kind
    for record in records:
        if isinstance(record, Added):
            names.setdefault(record.spec.kind, record.spec.name)
    with in_our_style():
        figure = gantt_figure(records)
    page = render_page(
        "colocate",
        "page.html.j2",
        summary=summary,
        began=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(opened[0].at)) if opened else "never",
        facts=_facts(summary),
        gantt=to_svg(figure, "gantt") if figure is not None else None,
        jobs=[(job.name, job.result or "not ended", *cells(job), job.reason) for job in summary.jobs],
        kinds=_kinds(records, names),
        rates=_rates(records, names),
    )
    atomic_write(path, page)


def _facts(summary: Summary) -> list[tuple[str, str, str]]:
    return [
        ("Jobs done", f"{summary.num_done} of {len(summary.jobs)}", ""),
        ("Makespan", f"{summary.makespan_s:.1f} s", ""),
        ("Throughput", summary.throughput_text or "-", "finished jobs" if summary.throughput_text else "too short to tell"),
        ("Cores used", f"{100 * summary.utilisation:.0f} %", "CPU time of all jobs"),
        ("Mean wait", f"{summary.mean_wait_s:.1f} s", "until the first start"),
        ("Mean slowdown", "-" if summary.mean_slowdown is None else f"{summary.mean_slowdown:.2f}", "against running alone"),
    ]


def _kinds(records: Sequence[Record], names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return one row for each kind of job, with the range of its measurements."""
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


def _rates(records: Sequence[Record], names: Mapping[str, str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for record in [record for record in records if isinstance(record, Rates)][-MAX_RATES:]:
        speeds = ", ".join(f"{names.get(kind, kind)} {record.speeds[kind]:.2f}" for kind in record.kinds)
        rows.append((speeds, f"{sum(record.speeds[kind] for kind in record.kinds):.2f}", f"{record.seconds:.1f}"))
    return rows
