"""Write a job's report: one HTML file with pictures, and a text that fits one screen.

`report/timeline.py` interprets the events, `report/pictures.py` draws them, and `report/page.html.j2` arranges both. All text
from the job is escaped. Only recorded data is shown, and missing data is named.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dlrover.atomic_files import atomic_write
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.explain import cost_text
from lightning_dlrover.report.text_table import text_table
from lightning_dlrover.report.timeline import JobTimeline, outcome_of, timeline_of

__all__ = ["render_page", "summary_text", "write_report"]

MAX_COLUMNS = 80
MAX_LINES = 24
MAX_TABLE_ROWS = 200


def write_report(run_id: str, events: Sequence[EventRecord], path: Path) -> None:
    """Write the report of one job to `path`, whole or not at all. Create the folder if it is missing.

    Raises:
        OSError: `path` cannot be written.
    """
    page = _page(timeline_of(run_id, events))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, page)


def render_page(room: str, template: str, **values: Any) -> str:
    """Return an HTML page from a template of a room. All pages share the style of the job's report, and escape all text."""
    # Imported here: commands that write no page start faster without.
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader("lightning_dlrover", name) for name in dict.fromkeys((room, "report"))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"clock": _clock, "ms": _ms}
    environment.globals["counted"] = counted
    return environment.get_template(template).render(**values)


def summary_text(run_id: str, events: Sequence[EventRecord]) -> str:
    """Summarize a job in at most 24 lines of 80 columns."""
    timeline = timeline_of(run_id, events)
    facts = [(fact.name, fact.value + (f" ({fact.remark})" if fact.remark else "")) for fact in _facts(timeline)]
    lines = [_clip(f"job {_one_line(run_id)}"), *text_table("<<", facts, indent=2)]
    rows = [("round", "time", "kind", "workers", "stall", "reason")]
    for r in timeline.rounds:
        at, kind = _clock(r.at - timeline.started_at), _one_line(r.kind)[:8]
        rows.append((str(r.number), at, kind, str(r.num_workers), _ms(r.stall_s), _one_line(r.reason)))
    rounds = [_clip(line) for line in text_table(">><>><", rows, indent=2)]
    notes = [f"  {line}" for sentence in _remarks(timeline) for line in textwrap.wrap(sentence, MAX_COLUMNS - 2)]
    notes = notes[:6]
    room = MAX_LINES - len(lines) - len(notes) - 1
    if len(rounds) > room:
        # At the end of a job, its newest rounds matter most.
        left_out = len(rounds) - room
        rounds = [rounds[0], f"  ... {left_out + 1} earlier rounds", *rounds[left_out + 2 :]]
    if timeline.rounds:
        lines += rounds
    return "\n".join([*lines, *notes])


@dataclass(frozen=True)
class _Fact:
    name: str
    value: str
    remark: str = ""


def _facts(timeline: JobTimeline) -> list[_Fact]:
    sizes = [r.num_workers for r in timeline.rounds if r.kind != "stop"]
    seconds = sum(p.num_steps * p.step_time_s for p in timeline.profiles)
    num_stalls = sum(r.stall_s is not None and r.kind != "start" for r in timeline.rounds)
    if num_stalls:
        stall = _Fact("total stall", _ms(timeline.total_stall_s), f"in {counted(num_stalls, 'change')}")
    else:
        stall = _Fact("total stall", "not measured" if timeline.num_resizes else "none")
    return [
        _Fact(
            "duration",
            _clock(timeline.duration_s),
            timeline.end or "not finished",
        ),
        _Fact("steps", f"{timeline.num_steps:,}"),
        _Fact(
            "samples profiled",
            f"{timeline.num_profiled_samples:,}",
            f"{timeline.num_profiled_samples / seconds:,.0f}/s in steps" if seconds else "",
        ),
        _Fact("rounds", str(len(timeline.rounds)), f"{timeline.num_resizes} of them changes"),
        _Fact(
            "workers",
            " to ".join(str(n) for n in sorted({min(sizes), max(sizes)})) if sizes else "unknown",
        ),
        _Fact("workers lost", str(timeline.num_losses)),
        stall,
    ]


def _remarks(timeline: JobTimeline) -> list[str]:
    remarks = list(timeline.missing)
    if timeline.errors:
        last_line = (timeline.errors[-1].text.strip().splitlines() or ["(no text)"])[-1]
        remarks.append(_clip(f"last of {counted(len(timeline.errors), 'error')}: {_one_line(last_line)}", MAX_COLUMNS - 2))
    if timeline.num_skipped:
        remarks.append(f"{counted(timeline.num_skipped, 'event')} could not be read and left out.")
    return remarks


def _drawn(timeline: JobTimeline) -> tuple[str | None, str | None, str | None, str | None]:
    """Return pictures of throughput, of a step's parts, of predictions and of plans; None where nothing was recorded."""
    # Imported here: matplotlib takes a second to import, and the text does not need it.
    from lightning_dlrover.report.pictures import (
        plans_picture,
        prediction_picture,
        step_parts_picture,
        throughput_picture,
        to_svg,
    )

    profiled = bool(timeline.profiles)
    throughput = parts = predicted = plans = None
    if profiled or timeline.rounds:
        throughput = to_svg(throughput_picture(timeline), "throughput")
    if profiled:
        parts = to_svg(step_parts_picture(timeline), "parts")
    if profiled or timeline.decisions:
        predicted = to_svg(prediction_picture(timeline), "prediction")
    if timeline.decisions:
        plans = to_svg(plans_picture(timeline), "plans")
    return throughput, parts, predicted, plans


def _page(timeline: JobTimeline) -> str:
    from lightning_dlrover.report.pictures import KIND_COLOURS

    throughput, parts, predicted, plans = _drawn(timeline)
    return render_page(
        "report",
        "page.html.j2",
        timeline=timeline,
        facts=_facts(timeline),
        began=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timeline.started_at)),
        throughput=throughput,
        parts=parts,
        predicted=predicted,
        plans=plans,
        cost=cost_text(timeline),
        outcome_of=outcome_of,
        colours=KIND_COLOURS,
        max_rows=MAX_TABLE_ROWS,
    )


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _one_line(text: str) -> str:
    """Return `text` without line breaks and control characters, which could rewrite the user's terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _clip(text: str, num_columns: int = MAX_COLUMNS) -> str:
    return text if len(text) <= num_columns else text[: num_columns - 3] + "..."
