"""Interpret a job's events: rounds, stalls, losses, decisions and profiles, in chronological order.

Events come from etcd or from a file that may be truncated, so their `data` is always validated. An event without a required
field is counted in `JobTimeline.num_skipped` and left out. Data that was never recorded is listed in `missing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_dlrover.output import counted
from lightning_dlrover.perf.samples import STEP_PARTS
from lightning_dlrover.planner.plan import Decision, Outcome, Settings, outcome
from lightning_dlrover.rdzv.job.events import (
    DecisionMade,
    Event,
    FitFinished,
    GrowthFailed,
    JobFailed,
    OutcomeJudged,
    RecordIgnored,
    RoundFormed,
    SizeRequested,
    TrainingStalled,
    WindowMeasured,
    WorkerFailed,
    WorkerLost,
    content_of,
)
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.event_log import CANCELLED, ended_how

__all__ = ["JobTimeline", "Profile", "Round", "outcome_of", "timeline_of"]

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
        said = []
        if not self.num_events:
            return ("No events were recorded: the job has not formed a round yet, or its log is elsewhere.",)
        if not self.rounds:
            said.append("No round was recorded.")
        elif self.rounds[0].number > 1:
            said.append(f"The log begins with round {self.rounds[0].number}; earlier events were trimmed.")
        unmeasured = [r.number for r in self.rounds if r.stall_s is None and r.kind not in ("start", "stop")]
        if unmeasured:
            said.append(f"No stall was measured for round {', '.join(map(str, unmeasured))}.")
        if not self.profiles:
            said.append(
                "No step profile was recorded: the job was too short for one, trains in a loop of its own, or its Trainer has "
                "no DLRoverCallback()."
            )
        if not self.decisions:
            said.append("The planner recorded no decision.")
        if not self.end:
            said.append("The job has not reported that it finished.")
        return tuple(said)


def timeline_of(run_id: str, events: Sequence[EventRecord]) -> JobTimeline:
    """Build the timeline of one job. Events may be in any order, incomplete or broken."""
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
        rounds=tuple(
            replace(r, stall_s=builder.stalls[r.number][0], stalled_until=builder.stalls[r.number][1])
            if r.number in builder.stalls
            else r
            for r in builder.rounds.values()
        ),
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
    """The parts of a timeline, as far as its events have been read."""

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
                self.profiles.append(_profile(at, event.document))
            case DecisionMade():
                self.decisions.append(_decision(event.document))
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


def _profile(at: float, data: Mapping[str, Any]) -> Profile:
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


def _decision(data: Mapping[str, Any]) -> Decision:
    decision = Decision.from_data(data)
    if not 0 < decision.predicted_step_time_s <= LARGEST:
        raise ValueError
    return decision


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError
    return value


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError
    return float(value)
