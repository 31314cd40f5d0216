"""`dlrover report` and `dlrover explain`: a job and its plans as page, text and picture."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.history import find_in_history, open_history
from lightning_dlrover.cli.lookup import find_place
from lightning_dlrover.learn.history import HistoryError
from lightning_dlrover.output import show
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.report.event_log import EVENTS_FILE, JobNotFoundError, read_event_file
from lightning_dlrover.report.explain import explain_text
from lightning_dlrover.report.page import summary_text, write_report
from lightning_dlrover.report.pictures import plans_picture
from lightning_dlrover.report.sizes import given_sizes, sizes_text
from lightning_dlrover.report.status import connect
from lightning_dlrover.report.timeline import timeline_of

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.job.records import EventRecord


def report_command(options: argparse.Namespace) -> int:
    """Write the report of a job, and show its summary."""
    folder = options.run_dir / options.job
    events = _events_of(options) or read_event_file(folder / EVENTS_FILE)  # an error of the latter names the missing file
    output = options.output or folder / "report.html"
    write_report(options.job, events, output)
    show(summary_text(options.job, events))
    show(f"report: {output}")
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
        raise UsageError(f"job {options.job!r} is neither in etcd, nor in {options.run_dir}; {error}") from error
