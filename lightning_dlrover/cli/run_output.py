"""The lines that `dlrover run` prints while its job runs, and the report at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dlrover.output import complain, printable, say
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
from lightning_dlrover.report.event_log import EVENTS_FILE, read_event_file
from lightning_dlrover.report.page import summary_text, write_report

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
