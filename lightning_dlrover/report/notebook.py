"""The picture of a job in a notebook: static HTML, without scripts, in which every text from records is escaped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lightning_dlrover.output import counted, number_text, time_text
from lightning_dlrover.report.view_model import Point, ShownJob
from lightning_dlrover.report.watcher import Watcher

WAIT_S = 5.0
"""Seconds to wait for the first records of a job."""

NUM_EVENTS = 8
"""Newest events in the picture."""

WIDTH, HEIGHT = 640, 120  # of the chart, in its own units


@dataclass(frozen=True)
class JobPicture:
    """A job as it was at one moment. A notebook draws it; `job` holds the figures."""

    job: ShownJob

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in _facts(self.job))

    def _repr_html_(self) -> str:
        job = self.job
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _facts(job))
        events = "".join(
            f"<tr><td>{time.strftime('%H:%M:%S', time.localtime(event.at))}</td><td>{escape(event.kind)}</td>"
            f"<td>{escape(event.text)}</td></tr>"
            for event in job.events[-NUM_EVENTS:][::-1]
        )
        return (
            f"<h3>{escape(job.run_id)}: {escape(job.state)}</h3><table>{rows}</table>{_chart(job.series)}"
            f"<table><tr><th>time</th><th>event</th><th></th></tr>{events}</table>"
        )


def show(
    job: str,
    endpoint: str | None = None,
    *,
    prefix: str | None = None,
    run_dir: str | Path = "runs",
    access: Mapping[str, str] | None = None,
) -> JobPicture:
    """Return the picture of a job as it is now, for a notebook.

    Args:
        job: its `--rdzv-id`.
        endpoint: etcd; None: that of the environment, else the one that the job's run folder names.
        prefix: of all jobs' keys in etcd.
        run_dir: parent of the jobs' run folders, as for `dlrover run`. A job that has ended is read from there.
        access: etcd user and paths of credential files: user, password_file, ca_cert, cert, cert_key.

    Raises:
        LookupError: neither etcd nor the run folder has the job.

    Example:
        >>> import lightning_dlrover
        >>> lightning_dlrover.show("my-job")  # in a notebook, the last line of a cell  # doctest: +SKIP
    """
    deadline = time.monotonic() + WAIT_S
    with Watcher(endpoint, prefix, Path(run_dir), access or {}, job) as watcher:
        version = -1
        while True:
            seen = watcher.job(job)
            if seen.job is not None:
                return JobPicture(seen.job)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LookupError(seen.source.problem or f"{watcher.place} has no job {job!r}")
            version = watcher.wait_for_change(version, min(left_s, 0.5))


def _facts(job: ShownJob) -> list[tuple[str, str]]:
    """Return the figures of a job in words. Unknown ones are left out."""
    limits = f", {job.min_workers} to {job.max_workers} allowed" if job.max_workers is not None else ""
    wanted = f" of {job.wanted_workers} wanted" if job.wanted_workers not in (None, job.num_workers) else ""
    found = [("job", f"{job.run_id}, {job.state}"), ("workers", f"{job.num_workers}{wanted}{limits}")]
    if job.message:
        found.append(("reason", job.message))
    if (progress := job.progress) is not None:
        parts = [f"epoch {progress.epoch + 1}", f"step {progress.step}"]
        parts += [f"{progress.percent:.0f} %"] if progress.percent is not None else []
        parts += [f"{time_text(progress.seconds_left)} left"] if progress.seconds_left is not None else []
        parts += [f"loss {progress.loss}"] if progress.loss else []
        found.append(("progress", ", ".join(parts)))
    if job.samples_per_s is not None:
        found.append(("throughput", f"{number_text(job.samples_per_s)} samples/s"))
    if job.goodput is not None:
        found.append(("goodput", f"{100 * job.goodput:.0f} % of the time in steps that counted"))
    found.append(("changes", f"{counted(job.num_rounds, 'round')}, {counted(job.num_losses, 'worker')} lost"))
    if job.plan is not None:
        found.append(("plan", f"{counted(job.plan.num_workers, 'worker')} by the {job.plan.owner}: {job.plan.reason}"))
    return found


def _chart(series: tuple[Point, ...]) -> str:
    """Draw the throughput over time; empty with fewer than two points."""
    if len(series) < 2:
        return ""
    first, last = series[0].at, max(series[-1].at, series[0].at + 1e-3)
    top = max(point.samples_per_s for point in series) or 1.0
    points = " ".join(
        f"{WIDTH * (point.at - first) / (last - first):.1f},{HEIGHT * (1 - point.samples_per_s / top):.1f}" for point in series
    )
    return (
        f'<svg viewBox="0 -4 {WIDTH} {HEIGHT + 8}" width="100%" style="max-width:{WIDTH}px" role="img" '
        f'aria-label="throughput over time"><polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="2"/></svg>'
        f"<p>throughput, up to {number_text(top)} samples/s, over {time_text(last - first)}</p>"
    )
