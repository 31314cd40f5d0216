"""Explain the sizes that a pool has given a job: for whom, at what cost, the prediction, and the outcome."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_dlrover.output import counted, number_text
from lightning_dlrover.rdzv.job.events import SizeGiven, TrainingStalled, events_of
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.timeline import Profile

__all__ = ["GivenSize", "given_sizes", "sizes_text"]

MAX_COLUMNS = 110


@dataclass(frozen=True)
class GivenSize:
    """One size, and its outcome.

    Args:
        at: seconds since the epoch.
        measured_per_s: samples/s with this size, median of the windows until the next one; None: never measured.
        pause_s: the job's pause for the change; None: not measured.
    """

    at: float
    given: SizeGiven
    measured_per_s: float | None
    pause_s: float | None


def given_sizes(events: Sequence[EventRecord], profiles: Sequence[Profile]) -> list[GivenSize]:
    """Return the sizes that a pool has given, oldest first."""
    given = [(record.at, size) for record, size in events_of(events, SizeGiven)]
    stalls = [(record.at, stall) for record, stall in events_of(events, TrainingStalled)]
    found = []
    for number, (at, size) in enumerate(given):
        until = given[number + 1][0] if number + 1 < len(given) else float("inf")
        rates = [p.samples_per_s for p in profiles if at < p.at < until and p.num_workers == size.workers_after]
        pauses = [stall.seconds for when, stall in stalls if at < when < until and stall.workers_after == size.workers_after]
        found.append(GivenSize(at, size, median(rates) if rates else None, max(pauses, default=None)))
    return found


def sizes_text(sizes: Sequence[GivenSize], started_at: float) -> str:
    """Describe each size for people; empty if no pool has given any."""
    lines: list[str] = []
    for size in sizes:
        given = size.given
        lines += [
            "",
            f"size by pool {given.pool} (policy {given.policy}), {size.at - started_at:.0f} s after the start: "
            f"{given.workers_before} -> {counted(given.workers_after, 'worker')}",
            *_wrapped(_for_whom(given)),
            *_wrapped(_prediction(given)),
            *_wrapped(_outcome(size)),
        ]
    return "\n".join(lines[1:])


def _for_whom(given: SizeGiven) -> str:
    if not given.others:
        return "no other job changes with it"
    texts = [f"{name} {before} -> {after}" for name, (before, after) in sorted(given.others.items())]
    gains = [name for name, (before, after) in sorted(given.others.items()) if after > before]
    return f"changes in the same decision: {', '.join(texts)}" + (
        f"; {', '.join(gains)} {'gains' if len(gains) == 1 else 'gain'} workers" if gains else ""
    )


def _prediction(given: SizeGiven) -> str:
    if not given.samples_per_s_after or not given.samples_per_s_before:
        return "predicted: nothing, as the job's speed by size was not known yet"
    return (
        f"predicted: {number_text(given.samples_per_s_before)} -> {number_text(given.samples_per_s_after)} samples/s "
        f"({number_text(given.low_per_s)} to {number_text(given.high_per_s)}), at the cost of a pause of {given.cost_s:.2g} s"
    )


def _outcome(size: GivenSize) -> str:
    given, pause = size.given, f", after a pause of {size.pause_s:.2g} s" if size.pause_s is not None else ""
    if size.measured_per_s is None:
        return f"came out: never measured with {counted(given.workers_after, 'worker')}{pause}"
    text = f"came out: {number_text(size.measured_per_s)} samples/s"
    if given.samples_per_s_after:
        where = "inside" if given.low_per_s <= size.measured_per_s <= given.high_per_s else "outside"
        text += f", {size.measured_per_s / given.samples_per_s_after:.2f} times the prediction, {where} of its interval"
    return text + pause


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, MAX_COLUMNS, initial_indent="  ", subsequent_indent="    ")
