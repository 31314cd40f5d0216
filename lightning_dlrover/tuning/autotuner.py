"""Turn the windows of a job's rank 0 into decisions: windows in, decision out.

Keeps the job's memory, judges each change once its settings are measured, chooses the time of the next decision, and makes it
with the models and the planner. The caller (`analyst.py`) reads the job's records and history beforehand, and carries the
decision out. Pure: no clock, no connection, no thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lightning_dlrover.rdzv.job.events import MemoryShort, SettingsApplied, TrainingStalled, events_of
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, NodesRecord, PlanRecord
from lightning_dlrover.tuning.autoscale import STEPS_OF_PROOF, has_failed, plan, retreat
from lightning_dlrover.tuning.candidates import PastJob, PlanRequest, Suggestion, suggest
from lightning_dlrover.tuning.history import JobMemory
from lightning_dlrover.tuning.memory import GPU_TERMS, MemoryModel, least_workers, on_gpu
from lightning_dlrover.tuning.plan import Decision, Limits, Objective, Outcome, Settings, outcome, settings_of, tunable_axes
from lightning_dlrover.tuning.population import Population
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile
from lightning_dlrover.tuning.step_time import StepTimeModel

# Seconds of a change that are assumed until the job has measured one.
DEFAULT_RESIZE_COST_S = 0.5
DEFAULT_RETUNE_COST_S = 0.2

MAX_EARLIER_WINDOWS_PER_SETTINGS = 5
WINDOWS_PER_DECISION = 3
WINDOWS_OF_LOAD = 5  # windows in the median of other programs' load on this machine


@dataclass(frozen=True)
class TuningConfig:
    """Planning options set by the user."""

    plan_every_s: float  # 0: no plans
    objective: Objective
    history_url: str | None  # None: no history is read or written


@dataclass(frozen=True)
class JobFacts:
    """A job's records and history at the time of a decision."""

    job: JobRecord | None = None  # None: the worker trains alone, without a job whose workers can change
    plan: PlanRecord | None = None  # the job's present plan
    nodes: NodesRecord | None = None  # the limits of the job's nodes; None unless a controller starts and ends them
    has_controller: bool = False  # whether a controller carries out plans
    events: Sequence[EventRecord] = ()  # the job's events, oldest first
    age_s: float = 0.0  # seconds since the job's start
    similar: Sequence[PastJob] = ()  # earlier jobs like this one
    population: Population | None = None  # common properties of other jobs on this hardware

    @property
    def is_by_hand(self) -> bool:
        return self.plan is not None and self.plan.owner == "user"

    @property
    def is_pooled(self) -> bool:
        return self.plan is not None and self.plan.owner == "pool"


@dataclass(frozen=True)
class Proposal:
    """A decision to carry out."""

    decision: Decision  # the settings that the planner may choose now, and why
    advice: Decision  # the best settings if the planner chose all of them; the plan takes its number of workers
    is_binding: bool  # whether the planner decides on workers and nodes, and a controller carries that out
    keeps_workers: bool = False  # whether the plan's number of workers stays as it is


class Autotuner:
    """Rank 0's tuner of one job.

    Args:
        node_cores: cores of one node.
        memory: measurements and decisions of the job's earlier rank 0s.

    Attributes:
        advice: the newest decision that took effect, as it would be if the planner chose all settings. The caller sets it.
    """

    def __init__(self, config: TuningConfig, node_cores: float, memory: JobMemory) -> None:
        self.memory = memory
        self._config = config
        self._node_cores = node_cores
        self._foreign_cores: deque[float] = deque(maxlen=WINDOWS_OF_LOAD)
        self._measured: tuple[int, Settings] | None = None  # round and settings of the newest windows
        self._num_measured = 0
        self._has_failed = False  # the present settings are a trial whose newest window is far too slow
        self._planned_at: float | None = None  # time of the newest decision
        self.advice: Decision | None = None

    def add(self, window: StepProfile, foreign_cores: float | None = None) -> Outcome | None:
        """Take the newest window. Return the outcome of the last change, if this window completes its measurement.

        Args:
            foreign_cores: cores of this worker's node that other programs keep busy; None: unknown.
        """
        self.memory.add(window)
        if foreign_cores is not None:
            self._foreign_cores.append(foreign_cores)
        settings = settings_of(window)
        measured = window.round_number, settings
        self._num_measured = self._num_measured + 1 if measured == self._measured else 1
        self._measured = measured
        last = self.memory.decisions[-1] if self.memory.decisions else None
        is_trial = last is not None and last.chosen == settings and self._num_measured < WINDOWS_PER_DECISION
        self._has_failed = is_trial and last is not None and has_failed(last, window.step_time_s)
        return self._judge(settings) if self._num_measured == WINDOWS_PER_DECISION or self._has_failed else None

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next decision.

        Args:
            now: seconds of a monotonic clock.
        """
        every_s = self._config.plan_every_s
        if not every_s:
            return False
        waited = self.advice is None or self._planned_at is None or now - self._planned_at >= every_s
        return self._has_failed or (waited and self._num_measured >= WINDOWS_PER_DECISION)

    def propose(
        self,
        facts: JobFacts,
        *,
        now: float,
        at: float,
        remaining_samples: float | None,
        tunable: bool = False,
        untunable: Collection[str] = (),
    ) -> Proposal:
        """Decide on the settings of the job, whose newest window was added last.

        Args:
            now: seconds of a monotonic clock.
            at: seconds since the epoch.
            remaining_samples: samples that the whole job has still to train on; None: unknown.
            tunable: whether loader workers, threads and prefetching can be changed.
            untunable: exceptions, by their names in `Settings`.
        """
        self._planned_at = now
        windows = self.memory.windows
        profile = windows[-1]
        limits = self._limits(profile, facts, tunable and not facts.is_by_hand, untunable)
        model = StepTimeModel.fit(
            windows, node_cores=self._node_cores, earlier=_newest_of_settings(facts.similar), population=facts.population
        )
        memory = MemoryModel.fit(windows) if any(w.memory_bytes or w.peak_memory_bytes for w in windows) else None
        gpu_windows = on_gpu(windows)
        gpu_memory = MemoryModel.fit(gpu_windows, GPU_TERMS) if gpu_windows else None
        request = PlanRequest(
            windows,
            node_cores=self._node_cores,
            # Advice to a lone worker is for its next run, so the little that is left of this one does not count.
            remaining_samples=None if facts.job is None else remaining_samples,
            resize_cost_s=_cost_s(facts.events, TrainingStalled, DEFAULT_RESIZE_COST_S),
            retune_cost_s=_cost_s(facts.events, SettingsApplied, DEFAULT_RETUNE_COST_S),
            resizes_in_place=facts.nodes is not None and facts.nodes.in_place,
            age_s=max(0.0, facts.age_s),
            spent=self.memory.spent(self._config.objective, self._node_cores),
            past=self.memory.decisions,
        )

        def decide(within: Limits, past: Sequence[Decision]) -> Decision:
            return plan(
                replace(request, past=past, suggestion=self._suggestion(profile, facts.similar, within, at)),
                model,
                within,
                self._config.objective,
                decision_id=self.memory.next_id,
                at=at,
                memory=memory,
                gpu_memory=gpu_memory,
            )

        if facts.has_controller and not facts.is_by_hand and not facts.is_pooled:
            decision = decide(limits, request.past)
            return Proposal(decision, decision, is_binding=True)
        # Recommendations are not carried out automatically, so an identical one is repeated.
        # A pool compares numbers of workers, so other settings must not fill the few candidates of a decision's record.
        workers_only = replace(limits, loader_workers=(), intra_op_threads=(), prefetch_factors=())
        advice = decide(workers_only if facts.is_pooled else limits, ())
        tuned = advice
        if facts.job is not None and not facts.is_by_hand:
            here = replace(limits, min_workers=profile.num_workers, max_workers=profile.num_workers, listed_sizes=())
            tuned = decide(here, request.past)
        if facts.is_pooled:  # the pool chooses from the candidates with other numbers of workers
            others = [c for c in advice.candidates if c.num_workers != tuned.current_workers]
            tuned = replace(tuned, candidates=tuple(sorted((*tuned.candidates, *others), key=lambda c: c.settings)))
        if advice.chosen_workers != advice.current_workers or facts.is_by_hand:
            tuned = _as_recommendation(tuned, advice, facts)
        return Proposal(tuned, advice, is_binding=False)

    def retreat(self, trial: Decision, step_time_s: float, *, at: float, has_controller: bool) -> Proposal | None:
        """Return the way back from a failed trial; None if `trial` is not the present one.

        Takes neither a window nor a fit, which take seconds on a busy machine.
        """
        if self.memory.trial is not trial or not self.memory.windows:
            return None
        decision = retreat(trial, step_time_s, decision_id=self.memory.next_id, at=at)
        advice = decision if has_controller or self.advice is None else self.advice
        return Proposal(decision, advice, is_binding=has_controller, keeps_workers=True)

    def abandon(self, trial: Decision, step_time_s: float, *, now: float, at: float) -> tuple[StepProfile, Outcome]:
        """Close a failed trial, whose retreat took effect. Return the window that shows its failure, and its outcome."""
        window = _window_of(trial.chosen, step_time_s, self.memory.windows[-1], at)
        self.memory.add(window)
        self._measured, self._num_measured, self._planned_at = None, 0, now
        return window, self._conclude(trial, step_time_s)

    def _judge(self, settings: Settings) -> Outcome | None:
        """Return the outcome of the last change, after its settings have been measured."""
        decision = next((d for d in reversed(self.memory.decisions) if d.is_change), None)
        judged = {o.decision_id for o in self.memory.outcomes}
        if decision is None or decision.chosen != settings or decision.decision_id in judged:
            return None
        after = [w.step_time_s for w in self.memory.windows if settings_of(w) == settings and w.at > decision.at]
        return self._conclude(decision, math.exp(sum(map(math.log, after)) / len(after))) if after else None

    def _conclude(self, decision: Decision, step_time_s: float) -> Outcome:
        found = outcome(decision, step_time_s)
        self.memory.outcomes.append(found)
        return found

    def _limits(self, profile: StepProfile, facts: JobFacts, tunable: bool, untunable: Collection[str]) -> Limits:
        """Return the bounds of the planner's choice of settings."""
        limits = Limits(1, max(2, int(self._node_cores)))
        if (job := facts.job) is not None:
            enough = least_workers((short.act, short.num_workers) for _, short in events_of(facts.events, MemoryShort))
            fewest = min(job.world_sizes.at_most(job.max_workers), max(job.min_workers, enough))
            limits = Limits(fewest, job.max_workers, failed_sizes=job.sizes_not_planned, listed_sizes=tuple(job.sizes))
        if (nodes := facts.nodes) is not None:
            limits = replace(limits, max_cores=nodes.max_cpus, max_memory_bytes=nodes.max_memory_mb * 2**20)
        if tunable:
            axes = tunable_axes(self._node_cores, max(profile.cores, limits.max_cores)).items()
            # An axis has the name of a setting, or its plural.
            free = {axis: values for axis, values in axes if not {axis, axis[:-1]} & {*untunable}}
            limits = replace(limits, **free)  # type: ignore[arg-type]
        if self._foreign_cores:
            limits = replace(limits, foreign_cores=median(self._foreign_cores))
        if facts.job is None:
            # Advice for a lone worker may use all cores, unlike in a job: several workers would be refused for exceeding them.
            threads = tunable_axes(self._node_cores, profile.cores)["intra_op_threads"]
            limits = replace(limits, intra_op_threads=threads)
        if "num_workers" in untunable:
            limits = replace(limits, min_workers=profile.num_workers, max_workers=profile.num_workers, listed_sizes=())
        return limits

    def _suggestion(self, profile: StepProfile, similar: Sequence[PastJob], limits: Limits, at: float) -> Suggestion | None:
        if any(d.is_change for d in self.memory.decisions):
            return None
        return suggest(profile, similar, limits, node_cores=self._node_cores, at=at, objective=self._config.objective)


def _window_of(settings: Settings, step_time_s: float, like: StepProfile, at: float) -> StepProfile:
    """Return a window of a few steps whose parts were not measured."""
    parts: dict[str, Any] = {f"{part}_s": 0.0 for part in STEP_PARTS}
    return replace(
        like,
        **vars(settings),
        num_steps=STEPS_OF_PROOF,
        local_batch=math.ceil(like.global_batch / settings.num_workers),
        step_time_s=step_time_s,
        samples_per_s=like.global_batch / step_time_s,
        at=at,
        **parts,
    )


def _as_recommendation(tuned: Decision, advice: Decision, facts: JobFacts) -> Decision:
    """Return the decision on this job's settings, with the advice on its workers and the reason why nothing carries it out."""
    why = "the settings were chosen by hand" if facts.is_by_hand else "no controller starts or ends nodes"
    why = "the job's pool decides on workers" if facts.is_pooled else why
    recommended = "" if advice.reason == tuned.reason else f": {advice.reason}"
    return replace(tuned, reason=f"{tuned.reason} (a recommendation, as {why}{recommended})")


def _cost_s(
    events: Sequence[EventRecord], event_type: type[TrainingStalled] | type[SettingsApplied], default_s: float
) -> float:
    """Return the median seconds of the job's own changes."""
    measured = [change.seconds for _, change in events_of(events, event_type) if change.seconds >= 0]
    return median(measured) if measured else default_s


def _newest_of_settings(jobs: Sequence[PastJob]) -> list[StepProfile]:
    """Return the newest few windows of each settings of each job."""
    kept = []
    for job in jobs:
        counts: dict[Settings, int] = {}
        for window in reversed(job.windows):
            settings = settings_of(window)
            counts[settings] = counts.get(settings, 0) + 1
            if counts[settings] <= MAX_EARLIER_WINDOWS_PER_SETTINGS:
                kept.append(window)
    return kept
