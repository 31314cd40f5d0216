"""Write a job's report: one HTML file with pictures, and a text that fits one screen.

`report/story.py` interprets the events and `report/pictures.py` draws them; this module arranges both. All text from the job is
escaped. Only recorded data is shown, and missing data is named.
"""

from __future__ import annotations

import html
import os
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.explain import cost_text
from lightning_dlrover.report.story import (
    JobStory,
    outcome_of,
    tell,
)

__all__ = ["summary_text", "write_report"]

MAX_COLUMNS = 80
MAX_LINES = 24
MAX_TABLE_ROWS = 200


def write_report(run_id: str, events: Sequence[EventRecord], path: Path) -> None:
    """Write the report of one job to `path`, whole or not at all. Create the folder if it is missing.

    Raises:
        OSError: `path` cannot be written.
    """
    page = _page(tell(run_id, events))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def summary_text(run_id: str, events: Sequence[EventRecord]) -> str:
    """Summarize a job in at most 24 lines of 80 columns."""
    story = tell(run_id, events)
    lines = [_clip(f"job {_one_line(run_id)}")]
    for fact in _facts(story):
        remark = f" ({fact.remark})" if fact.remark else ""
        lines.append(f"  {fact.name:<16}  {fact.value}{remark}")
    rounds = [f"  {'round':>5} {'time':>8} {'kind':<8} {'workers':>7} {'stall':>8}  reason"]
    for r in story.rounds:
        stall = _ms(r.stall_s)
        at = _clock(r.at - story.started_at)
        row = f"  {r.number:>5} {at:>8} {_one_line(r.kind):<8.8} {r.num_workers:>7} {stall:>8}  "
        rounds.append(_clip(row + _one_line(r.reason)))
    notes = [f"  {line}" for sentence in _remarks(story) for line in textwrap.wrap(sentence, MAX_COLUMNS - 2)]
    notes = notes[:6]
    room = MAX_LINES - len(lines) - len(notes) - 1
    if len(rounds) > room:
        # At the end of a job, its newest rounds matter most.
        left_out = len(rounds) - room
        rounds = [rounds[0], f"  ... {left_out + 1} earlier rounds", *rounds[left_out + 2 :]]
    if story.rounds:
        lines += rounds
    return "\n".join([*lines, *notes])


@dataclass(frozen=True)
class _Fact:
    name: str
    value: str
    remark: str = ""


def _facts(story: JobStory) -> list[_Fact]:
    sizes = [r.num_workers for r in story.rounds]
    seconds = sum(p.num_steps * p.step_time_s for p in story.profiles)
    num_stalls = sum(r.stall_s is not None and r.kind != "start" for r in story.rounds)
    if num_stalls:
        stall = _Fact("total stall", _ms(story.total_stall_s), f"in {num_stalls} change{'s' if num_stalls > 1 else ''}")
    else:
        stall = _Fact("total stall", "not measured" if story.num_resizes else "none")
    return [
        _Fact(
            "duration",
            _clock(story.duration_s),
            "finished" if story.finished_step is not None else "not finished",
        ),
        _Fact("steps", f"{story.num_steps:,}"),
        _Fact(
            "samples profiled",
            f"{story.num_profiled_samples:,}",
            f"{story.num_profiled_samples / seconds:,.0f}/s in steps" if seconds else "",
        ),
        _Fact("rounds", str(len(story.rounds)), f"{story.num_resizes} after the first"),
        _Fact(
            "workers",
            " to ".join(str(n) for n in sorted({min(sizes), max(sizes)})) if sizes else "unknown",
        ),
        _Fact("workers lost", str(story.num_losses)),
        stall,
    ]


def _remarks(story: JobStory) -> list[str]:
    remarks = list(story.missing)
    if story.errors:
        last_line = (story.errors[-1].text.strip().splitlines() or ["(no text)"])[-1]
        remarks.append(_clip(f"last of {len(story.errors)} errors: {_one_line(last_line)}", MAX_COLUMNS - 2))
    if story.num_skipped:
        remarks.append(f"{story.num_skipped} events could not be read and were left out.")
    return remarks


CSS = """
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #23262b; --soft: #666c76; --line: #dfe1e5; }
@media (prefers-color-scheme: dark) {
  :root { --page: #17191d; --card: #1f2227; --ink: #e4e6ea; --soft: #9aa1ac; --line: #363a42; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 8px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: 10px;
  margin: 20px 0 8px; }
.figures div { padding: 10px 14px; }
.figures dt { color: var(--soft); font-size: 12.5px; }
.figures dd { margin: 0; font-size: 17px; font-weight: 600; }
.figures dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); }
figure, pre, .wide, .figures div {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { margin: 0; padding: 14px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { color: var(--soft); font-size: 13.5px; margin-top: 8px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { overflow-wrap: anywhere; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.kind { white-space: nowrap; }
.kind i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 7px; }
.empty { border: 1px dashed var(--line); border-radius: 8px; padding: 18px; color: var(--soft); }
pre { overflow: auto; max-height: 420px; padding: 12px; font-size: 12.5px; }
"""


def _drawn(story: JobStory) -> tuple[str | None, str | None, str | None, str | None]:
    """Return pictures of throughput, of a step's parts, of predictions and of plans; None where nothing was recorded."""
    # Imported here: matplotlib takes a second to import, and the text does not need it.
    from lightning_dlrover.report.pictures import (
        plans_picture,
        prediction_picture,
        step_parts_picture,
        throughput_picture,
        to_svg,
    )

    profiled = bool(story.profiles)
    throughput = parts = predicted = plans = None
    if profiled or story.rounds:
        throughput = to_svg(throughput_picture(story), "throughput")
    if profiled:
        parts = to_svg(step_parts_picture(story), "parts")
    if profiled or story.decisions:
        predicted = to_svg(prediction_picture(story), "prediction")
    if story.decisions:
        plans = to_svg(plans_picture(story), "plans")
    return throughput, parts, predicted, plans


def _page(story: JobStory) -> str:
    throughput, parts, predicted, plans = _drawn(story)
    sections = [
        _heading(story),
        _picture(
            "Throughput",
            throughput,
            "Samples per second of the whole job, one point per profile window. Dashed lines "
            "are rounds, with their numbers; the shade after a line is the time in which no survivor made a step.",
            "Neither rounds nor profiles were recorded.",
        ),
        _picture(
            "Where a step's time goes",
            parts,
            "Rank 0's steps. Backward is without the communication that is not hidden behind it.",
            "No step profile was recorded.",
        ),
        _picture(
            "Predicted and measured step time",
            predicted,
            "Points are measured windows; lines and diamonds are the planner's prediction, shades and bars its interval.",
            "Neither decisions nor profiles were recorded.",
        ),
        "<h2>Rounds</h2>" + _rounds_table(story),
        _picture(
            "Plans",
            plans,
            "Settings are written workers x threads + loader workers each. A point is the mean of all windows in the settings "
            "that a plan chose; it is red where it lies outside of the plan's interval. "
            + html.escape(cost_text(story).capitalize())
            + ".",
            "The planner recorded no decision.",
        ),
        "<h2>Decisions</h2>" + _decisions_table(story),
        _notes(story),
    ]
    title = html.escape(f"Job {story.run_id}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page loads no external resource and runs no script, whatever its text contains.
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{title}</title><style>{CSS}</style></head>\n<body><main>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _heading(story: JobStory) -> str:
    tiles = []
    for fact in _facts(story):
        remark = f"<small>{html.escape(fact.remark)}</small>" if fact.remark else ""
        tiles.append(f"<div><dt>{fact.name.capitalize()}</dt><dd>{html.escape(fact.value)}{remark}</dd></div>")
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(story.started_at))
    when = f"First event {began}. " if story.num_events else ""
    missing = " ".join(html.escape(sentence) for sentence in story.missing)
    return (
        f'<h1>Job {html.escape(story.run_id)}</h1><p class="soft">{when}{missing}</p><dl class="figures">{"".join(tiles)}</dl>'
    )


def _picture(title: str, svg: str | None, caption: str, otherwise: str) -> str:
    if svg is None:
        return f'<h2>{title}</h2><div class="empty">{otherwise}</div>'
    return f"<h2>{title}</h2><figure>{svg}<figcaption>{caption}</figcaption></figure>"


def _rounds_table(story: JobStory) -> str:
    from lightning_dlrover.report.pictures import KIND_COLOURS

    rows = []
    for r in story.rounds:
        colour = KIND_COLOURS.get(r.kind, "#8a8a8a")
        rows.append(
            f'<tr><td class="n">{r.number}</td><td class="n">{_clock(r.at - story.started_at)}</td>'
            f'<td class="kind"><i style="background:{colour}"></i>{html.escape(r.kind)}</td>'
            f'<td class="n">{r.num_workers}</td><td class="n">{_ms(r.stall_s)}</td>'
            f"<td>{html.escape(r.reason)}</td></tr>"
        )
    return _table(("!Round", "!Time", "Kind", "!Workers", "!Stall", "Reason"), rows, "No round was recorded.")


def _decisions_table(story: JobStory) -> str:
    rows = []
    for d in story.decisions:
        found = outcome_of(story, d)
        measured = found.observed_step_time_s if found is not None else None
        error = f"{100 * (d.predicted_step_time_s / measured - 1):+.0f} %" if measured else ""
        change = f"{d.current.short} → {d.chosen.short}" if d.is_change else d.chosen.short
        rows.append(
            f'<tr><td class="n">{d.decision_id}</td><td class="n">{_clock(d.at - story.started_at)}</td>'
            f'<td class="n">{change}</td><td>{html.escape(d.reason)}</td>'
            f'<td class="n">{_ms(d.observed_step_time_s)}</td>'
            f'<td class="n">{_ms(d.predicted_step_time_s)}</td>'
            f'<td class="n">{_ms(measured)}</td><td class="n">{error}</td></tr>'
        )
    headers = (
        "!No.",
        "!Time",
        "!Settings",
        "Reason",
        "!Step before",
        "!Predicted",
        "!Measured after",
        "!Error",
    )
    return _table(headers, rows, "The planner recorded no decision.")


def _table(headers: Iterable[str], rows: list[str], otherwise: str) -> str:
    """Return a table. A header that begins with ! marks a numeric column."""
    if not rows:
        return f'<div class="empty">{otherwise}</div>'
    head = "".join(f'<th class="n">{h[1:]}</th>' if h.startswith("!") else f"<th>{h}</th>" for h in headers)
    note = ""
    if len(rows) > MAX_TABLE_ROWS:
        note = f'<p class="soft">The newest {MAX_TABLE_ROWS} of {len(rows)} are shown.</p>'
        rows = rows[-MAX_TABLE_ROWS:]
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'{note}<div class="wide">{table}</div>'


def _notes(story: JobStory) -> str:
    parts = []
    others = sorted((*story.losses, *story.notes), key=lambda note: note.at)
    if others:
        rows = [f'<tr><td class="n">{_clock(n.at - story.started_at)}</td><td>{html.escape(n.text)}</td></tr>' for n in others]
        parts.append("<h2>Losses, requests and other events</h2>" + _table(("!Time", "Event"), rows, ""))
    if story.errors:
        parts.append("<h2>Errors</h2>")
        parts += [f"<pre>{html.escape(note.text)}</pre>" for note in story.errors[-10:]]
    skipped = f" {story.num_skipped} events could not be read and were left out." if story.num_skipped else ""
    parts.append(f'<p class="soft">Written by lightning-dlrover from {story.num_events} events.{skipped}</p>')
    return "\n".join(parts)


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
