"""Interpret a job's events in chronological order, and explain its plans and sizes as text.

`timeline_of` returns a `JobTimeline`; `page.py` draws it. `TimeLedger` divides a job's time into what counted and what was
lost.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from lightning_dlrover.output import counted, number_text, text_table
from lightning_dlrover.rdzv.job.events import (
    DecisionMade,
    Event,
    FitFinished,
    GrowthFailed,
    JobFailed,
    OutcomeJudged,
    RecordIgnored,
    RoundFormed,
    SizeGiven,
    SizeRequested,
    TrainingStalled,
    WindowMeasured,
    WorkerFailed,
    WorkerLost,
    content_of,
    events_of,
)
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.status import CANCELLED, ended_how
from lightning_dlrover.tuning.plan import Candidate, Decision, Outcome, Settings, outcome, seconds_text, step_text
from lightning_dlrover.tuning.samples import STEP_PARTS

KINDS = {
    each.KIND
    for each in (
        *(RoundFormed, TrainingStalled, WindowMeasured, DecisionMade, OutcomeJudged),
        *(WorkerLost, GrowthFailed, SizeRequested, FitFinished, WorkerFailed),
    )
}
"""Kinds of events that are drawn or counted. Others appear in the timeline with their sentence only."""

LATEST = 253_402_300_800.0  # the year 10000, the upper limit of calendars and axes
LARGEST = 1e15  # upper limit of any quantity; larger ones come from broken records

SILENT_S = 90.0
"""Seconds without a record of progress after which the time is no longer counted as training. It is written every 8 to 40 s."""


@dataclass(frozen=True)
class Round:
    number: int
    at: float
    kind: str
    num_workers: int
    reason: str
    stall_s: float | None  # longest measured stall of the survivors
    stalled_until: float = 0.0  # time of the first step after it


@dataclass(frozen=True)
class Profile:
    """Fields of a `StepProfile` that the report draws."""

    at: float
    round_number: int
    settings: Settings
    first_step: int
    num_steps: int
    global_batch: int
    step_time_s: float
    samples_per_s: float
    part_s: dict[str, float]

    @property
    def num_workers(self) -> int:
        return self.settings.num_workers


@dataclass(frozen=True)
class Note:
    """An event shown by its sentence only."""

    at: float
    text: str


@dataclass(frozen=True)
class JobTimeline:
    run_id: str
    started_at: float
    ended_at: float
    rounds: tuple[Round, ...]
    profiles: tuple[Profile, ...]
    decisions: tuple[Decision, ...]
    losses: tuple[Note, ...]
    undone: tuple[Note, ...]  # growths after which a step has failed
    notes: tuple[Note, ...]  # requested sizes, checkpoints and all other events that are neither drawn nor counted
    errors: tuple[Note, ...]
    finished_step: int | None  # None: the job has not reported its end
    end: str  # see `ended_how`
    num_events: int
    num_skipped: int

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def num_steps(self) -> int:
        if self.finished_step is not None:
            return self.finished_step
        return max((p.first_step + p.num_steps for p in self.profiles), default=0)

    @property
    def num_profiled_samples(self) -> int:
        return sum(p.num_steps * p.global_batch for p in self.profiles)

    @property
    def num_resizes(self) -> int:
        """Number of rounds that neither start nor stop the job."""
        return sum(r.kind not in ("start", "stop") for r in self.rounds)

    @property
    def num_losses(self) -> int:
        """Number of lost workers, and at least that of rounds after a loss, because the loss's own event may be missing."""
        return max(len(self.losses), sum(r.kind == "loss" for r in self.rounds))

    @property
    def total_stall_s(self) -> float:
        return sum(r.stall_s or 0.0 for r in self.rounds if r.kind != "start")

    @property
    def missing(self) -> tuple[str, ...]:
        """Describe, in sentences, the data that a complete job would have recorded and this one has not."""
        found = []
        if not self.num_events:
            return ("No events were recorded: the job has not formed a round yet, or its log is elsewhere.",)
        if not self.rounds:
            found.append("No round was recorded.")
        elif self.rounds[0].number > 1:
            found.append(f"The log begins with round {self.rounds[0].number}; earlier events were trimmed.")
        unmeasured = [r.number for r in self.rounds if r.stall_s is None and r.kind not in ("start", "stop")]
        if unmeasured:
            found.append(f"No stall was measured for round {', '.join(map(str, unmeasured))}.")
        if not self.profiles:
            found.append(
                "No step profile was recorded: the job was too short for one, trains in a loop of its own, or its Trainer has "
                "no DLRoverCallback()."
            )
        if not self.decisions:
            found.append("The planner recorded no decision.")
        if not self.end:
            found.append("The job has not reported that it finished.")
        return tuple(found)


def timeline_of(run_id: str, events: Sequence[EventRecord]) -> JobTimeline:
    """Build the timeline of one job. Events may be in any order, incomplete or broken.

    They come from etcd or from a file that may be truncated, so their `data` is always validated. An event without a required
    field is skipped and counted in `JobTimeline.num_skipped`. Data that was never recorded is listed in `missing`.
    """
    timed = sorted((e for e in events if 0 <= e.at < LATEST), key=lambda e: e.at)
    builder = _TimelineBuilder(num_skipped=len(events) - len(timed))
    for record in timed:
        if record.kind not in KINDS or (record.kind == SizeRequested.KIND and record.text):
            builder.notes.append(Note(record.at, record.text or record.kind))
            continue
        try:
            builder.add(record, content_of(record))
        except (KeyError, ValueError):
            builder.num_skipped += 1
    # A window's event is written at its end, and the first step of the job precedes it.
    started_at = min([e.at for e in timed] + [p.at - p.num_steps * p.step_time_s for p in builder.profiles], default=0.0)
    return JobTimeline(
        run_id=run_id,
        started_at=started_at,
        ended_at=max((e.at for e in timed), default=0.0),
        rounds=tuple(map(builder.measured, builder.rounds.values())),
        profiles=tuple(builder.profiles),
        decisions=tuple(builder.decisions),
        losses=tuple(builder.losses.values()),
        undone=tuple(builder.undone),
        notes=tuple(builder.notes),
        errors=tuple(error for error in builder.errors if CANCELLED not in error.text),
        finished_step=builder.finished_step,
        end=ended_how(timed),
        num_events=len(timed),
        num_skipped=builder.num_skipped,
    )


def outcome_of(timeline: JobTimeline, decision: Decision) -> Outcome | None:
    """Return the outcome of a decision: all windows with its settings until the next decision. None if there were none."""
    later = [d.at for d in timeline.decisions if d.at > decision.at]
    until = min(later, default=math.inf)
    chosen = [p for p in timeline.profiles if decision.at < p.at <= until and p.settings == decision.chosen]
    num_steps, seconds = sum(p.num_steps for p in chosen), sum(p.step_time_s * p.num_steps for p in chosen)
    return outcome(decision, seconds / num_steps) if num_steps and seconds / num_steps else None


@dataclass
class _TimelineBuilder:
    """The parts of a timeline, built while its events are read."""

    num_skipped: int
    stalls: dict[int, tuple[float, float]] = field(default_factory=dict)  # seconds and end of the longest one, by round
    rounds: dict[int, Round] = field(default_factory=dict)
    profiles: list[Profile] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    losses: dict[str, Note] = field(default_factory=dict)
    undone: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    errors: list[Note] = field(default_factory=list)
    finished_step: int | None = None

    def add(self, record: EventRecord, event: Event) -> None:
        """Add an event of one of the `KINDS`.

        Raises:
            ValueError, KeyError: a figure is impossible or missing.
        """
        at, text = record.at, record.text
        match event:
            case TrainingStalled():
                number = _whole(event.round)
                self.stalls[number] = max((_amount(event.seconds), at), self.stalls.get(number, (0.0, 0.0)))
            case RoundFormed():
                size = event.num_members or len(event.members)
                formed = Round(_whole(event.number), at, event.kind, size, event.reason or text, None)
                self.rounds.setdefault(formed.number, formed)
            case WindowMeasured():
                self.profiles.append(profile_of(at, event.document))
            case DecisionMade():
                decision = Decision.from_data(event.document)
                if not 0 < decision.predicted_step_time_s <= LARGEST:
                    raise ValueError
                self.decisions.append(decision)
            case WorkerLost():  # every survivor that detects the loss may report it
                self.losses.setdefault(event.worker_id, Note(at, text or f"worker {event.worker_id} was lost"))
            case GrowthFailed():
                self.undone.append(Note(at, text))
            case SizeRequested():
                self.notes.append(Note(at, f"{event.source} asked for {counted(event.num_workers, 'worker')}"))
            case WorkerFailed():
                self.errors.append(Note(at, event.traceback or text))
            case JobFailed() | RecordIgnored():
                self.errors.append(Note(at, text))
            case FitFinished():
                self.finished_step = _whole(event.global_step)

    def measured(self, formed: Round) -> Round:
        """Return a round with its stall, if there was one."""
        stall_s, until = self.stalls.get(formed.number, (None, 0.0))
        return replace(formed, stall_s=stall_s, stalled_until=until)


def profile_of(at: float, data: Mapping[str, Any]) -> Profile:
    """Return a measured window as the report draws it.

    Raises:
        ValueError, KeyError: a figure is impossible or missing.
    """
    return Profile(
        at=at,
        round_number=_whole(data["round_number"]),
        settings=Settings(
            _whole(data["num_workers"]),
            _whole(data.get("loader_workers", 0)),
            _whole(data.get("intra_op_threads", 0)),
            _whole(data.get("prefetch_factor", 0)) if data.get("loader_workers") else 0,
        ),
        first_step=_whole(data["first_step"]),
        num_steps=_whole(data["num_steps"]),
        global_batch=_whole(data["global_batch"]),
        step_time_s=_amount(data["step_time_s"]),
        samples_per_s=_amount(data["samples_per_s"]),
        part_s={part: _amount(data[f"{part}_s"]) for part in STEP_PARTS},
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError
    return value


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError
    return float(value)


# Explain a job's planner as text: its observations, its candidates, its choices and their outcomes.

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
        lines += ["", *_plan_lines(timeline, decision, in_full=plan is not None)]
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


def _plan_lines(timeline: JobTimeline, decision: Decision, in_full: bool) -> list[str]:
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
    if in_full:
        lines += _table(decision, decision.candidates)
    elif decision.is_change:
        shown = [c for c in decision.candidates if c.on_front or c.settings in (decision.current, decision.chosen)]
        lines += _table(decision, shown)
    return lines


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
    each = f"{counted(settings.intra_op_threads, 'thread')} and {counted(settings.loader_workers, 'loader worker')}{ahead}"
    return f"{counted(settings.num_workers, 'worker')} with {each} each"


def _wrapped(text: str) -> list[str]:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(printable, MAX_COLUMNS, initial_indent="  ", subsequent_indent="    ")


# Explain the sizes that a pool has given a job: changes of other jobs, cost, prediction and outcome.


@dataclass(frozen=True)
class GivenSize:
    """One size, and its outcome."""

    at: float  # seconds since the epoch
    given: SizeGiven
    measured_per_s: float | None  # samples/s with this size, median of the windows until the next one; None: never measured
    pause_s: float | None  # the job's pause for the change; None: not measured


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
    """Describe each size in words; empty if no pool has given any."""
    lines: list[str] = []
    for size in sizes:
        given = size.given
        lines += [
            "",
            f"size by pool {given.pool} (policy {given.policy}), {size.at - started_at:.0f} s after the start: "
            f"{given.workers_before} -> {counted(given.workers_after, 'worker')}",
            *_wrapped(_other_changes(given)),
            *_wrapped(_prediction(given)),
            *_wrapped(_outcome(size)),
        ]
    return "\n".join(lines[1:])


def _other_changes(given: SizeGiven) -> str:
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


# --- time that counted, and time that was lost -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeSplit:
    """A job's wall time since its first round. The rest, such as validation and checkpoints, has no cause of its own."""

    wall_s: float
    productive_s: float  # in steps that counted
    startup_s: float  # from the first record to the first step
    repeated_s: float  # in steps that were done again after a return to an older state

    @property
    def goodput(self) -> float:
        """Productive time over wall time, from 0 to 1; 0 before the first step."""
        return min(1.0, self.productive_s / self.wall_s) if self.wall_s > 0 else 0.0


class Window(Protocol):
    """Consecutive steps that were measured together, see `StepProfile`."""

    @property
    def at(self) -> float: ...

    @property
    def first_step(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def step_time_s(self) -> float: ...


@dataclass
class _Segment:
    """Consecutive batches with one step time."""

    first: int
    end: int
    step_s: float
    at: float  # end, seconds since the epoch

    @property
    def seconds(self) -> float:
        return (self.end - self.first) * self.step_s


class TimeLedger:
    """Accounts for a job's time by rank 0's windows, which hold the first batch and the mean step time of each stretch.

    A batch counts once: if a later window repeats it, the time of its first pass was lost.
    """

    def __init__(self) -> None:
        self.started_at = 0.0  # 0: no record yet
        self.startup_s = 0.0
        self.repeated_s = 0.0
        self.ended_at = 0.0  # 0: it has not ended
        self._finished_s = 0.0  # productive time of fits that have finished
        self._segments: list[_Segment] = []
        self._stalls: dict[int, tuple[float, float]] = {}  # longest stall of a round and its end, by round

    def begin(self, at: float) -> None:
        """Note a record of the job; the first one begins its wall time."""
        if at > 0 and (not self.started_at or at < self.started_at):
            self.started_at = at

    def measured(self, window: Window) -> None:
        """Add a window of rank 0."""
        begun_at = window.at - window.num_steps * window.step_time_s
        self.begin(begun_at)
        if window.at > self.ended_at:
            self.ended_at = 0.0  # a later fit
        first, end = window.first_step, window.first_step + window.num_steps
        while self._segments and self._segments[-1].end > first:
            last = self._segments[-1]
            kept = max(last.first, first)
            self.repeated_s += (last.end - kept) * last.step_s
            if kept > last.first:
                last.end = kept
                break
            self._segments.pop()
        before = self._segments[-1] if self._segments else None
        if before is None and not self._finished_s:
            self.startup_s = max(0.0, begun_at - self.started_at)
        elif before is not None and (gap := first - before.end) > 0:
            # Windows leave out the first steps after a change. The time between the windows bounds theirs.
            free_s = max(0.0, begun_at - before.at - self._stalled_since(before.at))
            self._segments.append(_Segment(before.end, first, min(window.step_time_s, free_s / gap), begun_at))
        self._segments.append(_Segment(first, end, window.step_time_s, window.at))

    def stalled(self, round_number: int, seconds: float, at: float) -> None:
        """Add a stall, as one of the workers has measured it."""
        self._stalls[round_number] = max((seconds, at), self._stalls.get(round_number, (0.0, 0.0)))

    def finished(self) -> None:
        """Note that a fit has finished: its batches are not repeated, and those of a later one begin again."""
        self._finished_s += sum(each.seconds for each in self._segments)
        self._segments.clear()

    def split(self, now: float, progress_at: float) -> TimeSplit:
        """Divide the time by `now`.

        Args:
            progress_at: time of the newest record of progress; 0: there is none. Windows are written less often.
        """
        if not self.started_at:
            return TimeSplit(0.0, 0.0, 0.0, self.repeated_s)
        productive_s = self._finished_s + sum(each.seconds for each in self._segments)
        seen_until = self._segments[-1].at if self._segments else self.started_at
        if self._segments and not self.ended_at and progress_at > seen_until:
            productive_s += max(0.0, progress_at - seen_until - self._stalled_since(seen_until))
            seen_until = progress_at
        until = self.ended_at or (now if now - seen_until > SILENT_S or not self._segments else seen_until)
        wall_s = max(until - self.started_at, 0.0)
        return TimeSplit(wall_s, min(productive_s, wall_s), self.startup_s, self.repeated_s)

    def _stalled_since(self, at: float) -> float:
        return sum(seconds for seconds, until in self._stalls.values() if until > at)
