"""Pictures of a queue, in the style of a job's report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_dlrover.colocate.journal import Added, Ended, Opened, Record
from lightning_dlrover.report.pictures import INK, WIDTH_INCHES, in_our_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PHASE_COLOURS", "gantt_figure"]

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
    with in_our_style():
        return _gantt(records)


def _gantt(records: Sequence[Record]) -> Figure | None:
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
