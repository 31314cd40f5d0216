"""Explain a job's planner as text: its observations, its candidates, its choices and their outcomes."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from lightning_dlrover.output import counted, number_text
from lightning_dlrover.planner.plan import Candidate, Decision, Settings, seconds_text, step_text
from lightning_dlrover.report.text_table import text_table
from lightning_dlrover.report.timeline import JobTimeline, outcome_of

__all__ = ["cost_text", "explain_text"]

MAX_COLUMNS = 110
MAX_STAYS = 3  # consecutive decisions without a change


def explain_text(timeline: JobTimeline, plan: int | None = None) -> str:
    """Describe every plan with its outcome, and the candidates of the changes.

    Args:
        plan: describe only this plan, with all its candidates.

    Raises:
        ValueError: the job has made no such plan.
    """
    decisions = timeline.decisions
    if plan is not None:
        decisions = tuple(d for d in decisions if d.decision_id == plan)
        if not decisions:
            known = ", ".join(str(d.decision_id) for d in timeline.decisions) or "none"
            raise ValueError(f"job {timeline.run_id} has made no plan {plan}; its plans are {known}")
    undone = [note.text for note in timeline.undone]
    if not decisions:
        return "\n".join([f"job {timeline.run_id}: the planner recorded no decision.", *undone])
    changes = sum(d.is_change for d in decisions)
    judged = [o for d in decisions if (o := outcome_of(timeline, d)) is not None]
    as_expected = sum(o.expected for o in judged)
    lines = [
        f"job {timeline.run_id}: {counted(len(decisions), 'plan')}, {counted(changes, 'change')}; "
        + (f"of {len(judged)} measured, {as_expected} came out as predicted" if judged else "none was measured"),
        f"objective: {decisions[-1].objective or 'unknown'}; settings are written "
        "workers x threads + loader workers each / batches ahead, if not 2",
        cost_text(timeline),
        *undone,
    ]
    for number, decision in enumerate(decisions):
        before, after = decisions[max(0, number - MAX_STAYS) : number], decisions[number + 1 : number + 2]
        in_a_row = plan is None and not decision.is_change and len(before) == MAX_STAYS
        if in_a_row and after and not any(d.is_change for d in (*before, *after)):
            continue  # a long row of decisions without a change is shown by its first few and its last
        lines += ["", *_told(timeline, decision, in_full=plan is not None)]
    return "\n".join(lines)


def cost_text(timeline: JobTimeline) -> str:
    """Show the cost so far, and to the end: with the current settings and with each alternative of the last decision."""
    if not timeline.decisions:
        return "cost: unknown, as the planner recorded no decision"
    last = timeline.decisions[-1]
    now = next((c for c in last.candidates if c.settings == last.current), None)
    if last.spent is None or now is None or now.cost_per_hour is None:
        return "cost: unknown, as no prices were given"
    when = time.strftime("%H:%M:%S", time.localtime(last.at))
    text = f"cost: {number_text(last.spent)} until {when}, {number_text(now.cost_per_hour)} an hour"
    if now.cost_to_end is None:
        return f"{text}; to the end unknown, as the job's end is unknown"
    planned = last.choice.cost_to_end or 0.0
    ends = f"{number_text(now.cost_to_end)} with {last.current.short}, {number_text(planned)} with {last.chosen.short}"
    return f"{text}; to the end {ends}"


def _told(timeline: JobTimeline, decision: Decision, in_full: bool) -> list[str]:
    kind = "trial" if decision.explored else "change" if decision.is_change else "no change"
    passed_s = decision.at - timeline.started_at
    head = f"plan {decision.decision_id}, {passed_s:.0f} s after the start: {kind}"
    if decision.is_change:
        head += f", {decision.current.short} -> {decision.chosen.short}"
    left = f"{seconds_text(decision.left_s)} of work left" if decision.left_s is not None else "the remaining work is unknown"
    seen = (
        f"saw {_settings(decision.current)}: {step_text(decision.observed_step_time_s)} a step; {left}; "
        f"{counted(decision.num_windows, 'window')} measured; {counted(decision.num_considered, 'setting')} considered"
    )
    lines = [head, *_wrapped(seen), *_wrapped(decision.reason)]
    found = outcome_of(timeline, decision)
    if found is not None:
        lines += _wrapped(f"came out: {found.text}")
    elif decision.is_change:
        lines += _wrapped("came out: never measured; the settings were not reached, or left too soon")
    if in_full or decision.is_change:
        lines += _table(decision, decision.candidates if in_full else _telling(decision))
    return lines


def _telling(decision: Decision) -> list[Candidate]:
    """Return the current candidate, the chosen one, and the Pareto front."""
    return [c for c in decision.candidates if c.on_front or c.settings in (decision.current, decision.chosen)]


def _table(decision: Decision, candidates: Sequence[Candidate]) -> list[str]:
    has_costs = any(c.cost_to_end is not None for c in candidates)
    costs = ("cost to the end",) if has_costs else ()
    rows: list[tuple[str, ...]] = [("settings", "step", "90 % interval", "samples/s", "cores", *costs, "")]
    for c in candidates:
        marks = [
            *(["chosen"] if c.settings == decision.chosen else []),
            "measured" if c.measured else "predicted",
            *(["on the front"] if c.on_front else []),
            *([c.note] if c.note else []),
        ]
        interval = f"{step_text(c.low_s)}-{step_text(c.high_s)}"
        if has_costs:
            costs = (number_text(c.cost_to_end) if c.cost_to_end is not None else "unknown",)
        figures = (step_text(c.step_time_s), interval, f"{c.samples_per_s:,.0f}", f"{c.cores:.3g}", *costs)
        rows.append((c.settings.short, *figures, ", ".join(marks)))
    return text_table(">" * (len(rows[0]) - 1) + "<", rows, indent=4)


def _settings(settings: Settings) -> str:
    ahead = f" ({counted(settings.prefetch_factor, 'batch', 'batches')} ahead)" if settings.loader_workers else ""
    workers, threads, loaders = (
        counted(number, word)
        for number, word in (
            (settings.num_workers, "worker"),
            (settings.intra_op_threads, "thread"),
            (settings.loader_workers, "loader worker"),
        )
    )
    return f"{workers} with {threads} and {loaders}{ahead} each"


def _wrapped(text: str) -> list[str]:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(printable, MAX_COLUMNS, initial_indent="  ", subsequent_indent="    ")
