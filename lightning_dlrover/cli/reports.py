"""`dlrover report`, `explain` and `history`: show a job's timeline, the reasons for its plans, and earlier jobs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
import webbrowser
from typing import TYPE_CHECKING

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import find_place
from lightning_dlrover.output import complain, counted, show, text_table
from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.report.page import plans_picture, summary_text, write_report
from lightning_dlrover.report.status import EVENTS_FILE, JobNotFoundError, connect, read_event_file, read_job
from lightning_dlrover.report.timeline import explain_text, given_sizes, sizes_text, timeline_of
from lightning_dlrover.tuning.candidates import PastJob
from lightning_dlrover.tuning.history import HistoryError, JobHistory, export_windows, history_url

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.job.records import EventRecord
    from lightning_dlrover.tuning.history import JobEntry

SILENT_S = 600.0
"""Seconds without a new measurement after which a job is not called running."""


def history_command(options: argparse.Namespace) -> int:
    """Run one of the actions of `dlrover history`."""
    actions = {"list": _list_jobs, "show": _show_job, "export": _export, "remove": _remove}
    return actions[options.action](options)


def _list_jobs(options: argparse.Namespace) -> int:
    with open_history(options) as history:
        jobs = history.jobs()
    if options.json:
        show(json.dumps([dataclasses.asdict(job) for job in jobs], indent=2))
        return EXIT_OK
    rows = []
    for job in jobs:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started_at))
        lasted = f"{job.updated_at - job.started_at:.0f} s"
        measured = counted(job.num_settings, "measured setting")
        rows.append((job.key, when, lasted, _end(job), job.descriptor.device, measured))
    show("\n".join(text_table("<<><<<", rows)) or "no jobs are recorded yet")
    return EXIT_OK


def _end(job: JobEntry) -> str:
    """Return a job's outcome. A job that was cancelled, interrupted or lost has written none."""
    return job.outcome if job.outcome != "running" or time.time() - job.updated_at < SILENT_S else "no end recorded"


def _show_job(options: argparse.Namespace) -> int:
    with open_history(options) as history:
        job = find_in_history(history, options.job)[0]
        windows, decisions, outcomes = history.windows(job.key), history.decisions(job.key), history.outcomes(job.key)
    counts = f"{counted(len(windows), 'window')}, {counted(len(decisions), 'plan')}, {len(outcomes)} of them judged"
    show(f"{job.key}: {_end(job)}, {counts}")
    facts = [(k.replace("_", " "), v if isinstance(v, str) else f"{v:,.6g}") for k, v in vars(job.descriptor).items()]
    show("\n".join(text_table("<<", facts, indent=2)))
    if windows:
        times = PastJob(job.key, job.updated_at, job.descriptor, windows).step_times_s()
        show("  settings (workers x threads + loader workers each / batches ahead) by median step time, with the newest batch:")
        medians = sorted(times.items(), key=lambda item: item[1])
        show("\n".join(text_table("<>", [(settings.short, f"{1000 * s:.3g} ms") for settings, s in medians], indent=4)))
    return EXIT_OK


def _export(options: argparse.Namespace) -> int:
    with open_history(options) as history, contextlib.ExitStack() as stack:
        jobs = [find_in_history(history, name)[0] for name in options.job] or history.jobs()
        output = stack.enter_context(options.output.open("w", newline="", encoding="utf-8")) if options.output else sys.stdout
        count = export_windows(history, jobs, options.format, output)
    where = f" in {options.output}" if options.output else ""
    print(f"{counted(count, 'window')} of {counted(len(jobs), 'job')}{where}", file=sys.stderr)
    return EXIT_OK


def _remove(options: argparse.Namespace) -> int:
    with open_history(options) as history:
        found = {name: find_in_history(history, name) for name in options.job}
        for name, jobs in found.items():
            if len(jobs) > 1:
                raise UsageError(
                    f"{name!r} is the name of {len(jobs)} jobs, none was removed; name {', '.join(job.key for job in jobs)}"
                )
        keys = [job.key for jobs in found.values() for job in jobs]
        history.remove(keys)
    show(f"removed {', '.join(keys)}; later jobs no longer start from what was measured there")
    return EXIT_OK


def open_history(options: argparse.Namespace) -> JobHistory:
    """Open the job history named by the options or the environment. Raise UsageError if it is switched off."""
    url = history_url(options.history)
    if url is None:
        raise UsageError("the job history is switched off; name one with --history, or unset DLROVER_HISTORY")
    return JobHistory(url)


def find_in_history(history: JobHistory, name: str) -> list[JobEntry]:
    """Return the jobs of this name or key, newest first. Raise UsageError if there is none."""
    found = [job for job in history.jobs() if name in (job.key, job.run_id)]
    if not found:
        raise UsageError(f"the job history has no job {name!r}; `dlrover history list` shows its jobs")
    return found


def report_command(options: argparse.Namespace) -> int:
    """Write the report of a job, and show its summary."""
    folder = options.run_dir / options.job
    events = _events_of(options) or read_event_file(folder / EVENTS_FILE)  # an error of the latter names the missing file
    output = options.output or folder / "report.html"
    write_report(options.job, events, output)
    show(summary_text(options.job, events))
    show(f"report: {output}")
    if options.open and not webbrowser.open(output.resolve().as_uri()):
        complain("no browser can be started here (BROWSER names one); the report is written")
    return EXIT_OK


def explain_command(options: argparse.Namespace) -> int:
    """Show and draw the planner's measurements, its choices and their outcomes."""
    if options.output is not None and options.output.suffix not in (".png", ".svg"):
        raise UsageError(f"--output {options.output}: a picture is written as .png or .svg")
    events = _events_of(options) or _events_of_history(options)
    timeline = timeline_of(options.job, events)
    show(explain_text(timeline, options.plan))
    if options.plan is None and (given := given_sizes(events, timeline.profiles)):
        show("\n" + sizes_text(given, timeline.started_at))
    if timeline.decisions:
        output = options.output or options.run_dir / options.job / "plans.png"
        output.parent.mkdir(parents=True, exist_ok=True)
        plans_picture(timeline).savefig(output, dpi=130)
        show(f"picture: {output}")
    return EXIT_OK


def _events_of(options: argparse.Namespace) -> list[EventRecord]:
    """Return a job's events from etcd, else from its run folder; none if neither has them."""
    try:
        place = find_place(options.job, options)
        with connect(place, timeout_s=2.0) as client:
            if events := Journal(client, place.keys).events():
                return events
    except (EtcdError, JobNotFoundError):
        if options.endpoint:
            raise
    with contextlib.suppress(JobNotFoundError):
        return read_event_file(options.run_dir / options.job / EVENTS_FILE)
    return []


def _events_of_history(options: argparse.Namespace) -> list[EventRecord]:
    try:
        with open_history(options) as history:
            return history.events(find_in_history(history, options.job)[0].key)
    except (HistoryError, UsageError) as error:
        if _is_in_etcd(options):
            raise UsageError(f"job {options.job!r} has recorded nothing yet; try again once it trains") from error
        raise UsageError(f"job {options.job!r} is neither in etcd nor in {options.run_dir}; {error}") from error


def _is_in_etcd(options: argparse.Namespace) -> bool:
    with contextlib.suppress(EtcdError, JobNotFoundError):
        place = find_place(options.job, options)
        with connect(place, timeout_s=2.0) as client:
            read_job(client, place.keys)
        return True
    return False
