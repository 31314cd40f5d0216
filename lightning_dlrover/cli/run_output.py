"""The lines that `dlrover run` prints while its job runs, and the report at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dlrover.output import complain, has_terminal, printable, say, show_transient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.job.events import (
    DecisionMade,
    FitResumed,
    HangFound,
    MemoryShort,
    ReplicaDrifted,
    RoundFormed,
    RowsSkipped,
    SequenceOpened,
    SizeRequested,
    StragglerFound,
    StreamOpened,
    ValuesLost,
    WorkerLost,
)
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.records import ProgressRecord
from lightning_dlrover.report.event_log import EVENTS_FILE, read_event_file
from lightning_dlrover.report.page import summary_text, write_report
from lightning_dlrover.report.status import progress_text

if TYPE_CHECKING:
    from lightning_dlrover.report.event_log import EventLog

SHOWN = {
    each.KIND
    for each in (
        RoundFormed,
        DecisionMade,
        SizeRequested,
        WorkerLost,
        FitResumed,
        StragglerFound,
        MemoryShort,
        HangFound,
        StreamOpened,
        SequenceOpened,
        RowsSkipped,
        ValuesLost,
        ReplicaDrifted,
    )
}
"""Kinds of events that `dlrover run` prints."""


PROGRESS_EVERY_S = 10.0
"""Seconds between two lines about the progress of training, where they cannot replace each other."""

BAR_WIDTH = 20
"""Characters of the bar of an epoch's batches."""


class Announcer:
    """Prints new events of the job. Repeated decisions to keep the same settings are printed once."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._stays_at: object = None

    def __call__(self) -> None:
        for event in self._log.new():
            if event.kind == DecisionMade.KIND:
                chosen, current = event.data.get("chosen"), event.data.get("current")
                if chosen == current == self._stays_at:
                    continue
                self._stays_at = chosen if chosen == current else None
            if event.kind in SHOWN and event.text:
                say(printable(f"[{event.kind}] {event.text}"))


class ProgressLine:
    """Shows how far the job has trained: a line at the bottom of a terminal, elsewhere a new line every ten seconds.

    Args:
        progress: mirror of the job's record of its progress.
    """

    def __init__(self, progress: Mirror) -> None:
        self._progress = progress
        self._on_terminal = has_terminal()
        self._shown: ProgressRecord | None = None
        self._shown_at = -PROGRESS_EVERY_S

    def __call__(self) -> None:
        newest = next((readable(ProgressRecord, entry) for entry in self._progress.snapshot().values()), None)
        if newest is None:
            return
        if self._on_terminal:
            show_transient(_with_bar(newest))
        elif newest != self._shown and time.monotonic() - self._shown_at >= PROGRESS_EVERY_S:
            self._shown, self._shown_at = newest, time.monotonic()
            say(f"[progress] {printable(progress_text(newest))}")

    def end(self) -> None:
        """Remove the line."""
        if self._on_terminal:
            show_transient("")


def _with_bar(progress: ProgressRecord) -> str:
    if not progress.num_batches:
        return progress_text(progress)
    filled = min(BAR_WIDTH, BAR_WIDTH * progress.batch // progress.num_batches)
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {progress_text(progress, with_batch=False)}"


def write_final_report(run_id: str, folder: Path) -> None:
    """Write the report of a job that has ended into its run folder, unless nothing was trained."""
    file = folder / EVENTS_FILE
    events = read_event_file(file) if file.exists() else []
    if not any(event.kind == RoundFormed.KIND for event in events):
        return  # nothing was trained; an empty report would only hide the error
    try:
        write_report(run_id, events, folder / "report.html")
    except Exception as error:  # the job has ended well, and matplotlib and the user's fonts may raise anything
        complain(f"no report was written: {printable(str(error) or type(error).__name__)}; see `dlrover report {run_id}`")
        say(printable(summary_text(run_id, events)))
    else:
        say(printable(summary_text(run_id, events)))
        say(f"report: {folder / 'report.html'}")
