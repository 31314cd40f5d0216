"""A queue's figures, from its journal alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_dlrover.colocate.journal import Added, Ended, Opened, Profiled, Record, Started
from lightning_dlrover.output import counted
from lightning_dlrover.report.text_table import text_table

__all__ = ["JobRow", "Summary", "cells", "summarize", "summary_text"]

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
        makespan_s: time in which a dispatcher ran, from its first start to the last end.
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
        """Finished jobs per hour; empty after a time too short to tell."""
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
    for record in records:
        if isinstance(record, Started):
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
    """Return the time in which a dispatcher ran: from each opening to the last record before the next one."""
    times = [record.at for record in records if isinstance(record, Started | Ended)]
    total = 0.0
    for number, each in enumerate(opened):
        until = opened[number + 1].at if number + 1 < len(opened) else float("inf")
        total += max((at - each.at for at in times if each.at <= at < until), default=0.0)
    return total


def cells(job: JobRow, unit: str = "") -> tuple[str, ...]:
    """Return a job's times, slowdown and memory as text; with a GPU's memory behind that of the host.

    Args:
        unit: stands behind each time, in seconds.
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
