"""Learn from windows of steps and plan, in a background thread beside training.

Every worker's thread publishes its windows. Rank 0's thread also

- keeps the job's memory of windows and decisions,
- fits the models and runs the planner,
- writes the plan and later its outcome,
- updates the job history.

The controller that starts and ends nodes reads the plan from etcd. Without one, its number of workers is a recommendation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from lightning_dlrover.learn.allowance import PROGRESS, Allowance, stored_bytes
from lightning_dlrover.learn.decision_log import DecisionLog
from lightning_dlrover.learn.history_access import HistoryAccess
from lightning_dlrover.learn.job_memory import JobMemory
from lightning_dlrover.learn.profile_log import DIGITS, PublishedProfile, WindowLog, rounded
from lightning_dlrover.observe.resources import MachineLoad
from lightning_dlrover.perf import MemoryModel, StepTimeModel
from lightning_dlrover.perf.memory_model import GPU_TERMS, on_gpu
from lightning_dlrover.perf.samples import STEP_PARTS, StepProfile
from lightning_dlrover.planner.autoscale import plan
from lightning_dlrover.planner.memory_growth import least_workers
from lightning_dlrover.planner.objective import Objective
from lightning_dlrover.planner.plan import Candidate, Decision, Settings, outcome
from lightning_dlrover.planner.situation import Situation
from lightning_dlrover.planner.space import Limits, settings_of, tunable_axes
from lightning_dlrover.planner.trial import STEPS_OF_PROOF, has_failed, retreat
from lightning_dlrover.planner.warm_start import PastJob, Suggestion, suggest
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.job.events import (
    DecisionMade,
    MemoryShort,
    OutcomeJudged,
    SettingsApplied,
    TrainingStalled,
    WindowMeasured,
    events_of,
    record_of,
)
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, NodesRecord, PlanRecord, ProgressRecord, encode
from lightning_dlrover.rdzv.live.membership import Membership

__all__ = ["Analyst", "Intentions"]

log = logging.getLogger(__name__)

DEFAULT_RESIZE_COST_S = 0.5
DEFAULT_RETUNE_COST_S = 0.2
"""Assumed seconds of a change of settings until the job has measured one."""

MAX_EARLIER_WINDOWS_PER_SETTINGS = 5
WINDOWS_PER_DECISION = 3
PROGRESS_EVERY_S = 8.0  # minimum seconds between two records of the job's progress
WINDOWS_OF_LOAD = 5  # windows in the median of other programs' load on this machine

PATIENCE_WITH_A_PLAN_S = 120.0
"""Seconds that a plan may take to be carried out before the next one: new nodes may queue, and must start."""


@dataclass(frozen=True)
class Intentions:
    """Planning options set by the user."""

    plan_every_s: float
    objective: Objective
    history_url: str | None  # None: no history is read or written


@dataclass(frozen=True)
class _News:
    """One window, with facts that are available only to the training thread."""

    profile: StepProfile
    remaining_samples: float | None
    tunable: bool  # loader workers, threads and prefetching can be changed
    untunable: Collection[str]  # exceptions, by their names in `Settings`
    progress: ProgressRecord | None  # of the job, from rank 0


@dataclass(frozen=True)
class _Failure:
    """A trial with steps far too slow."""

    trial: Decision
    step_time_s: float


class Analyst:
    """Background thread of one worker.

    Args:
        membership: membership in a job with changing workers; None: the worker runs alone.
        node_cores: cores of one node.
        load: load on this worker's node; None: no other programs run there.
    """

    def __init__(
        self,
        membership: Membership | None,
        intentions: Intentions,
        node_cores: float,
        load: MachineLoad | None = None,
    ) -> None:
        self._load = load
        self._foreign_cores: deque[float] = deque(maxlen=WINDOWS_OF_LOAD)
        self._membership = membership
        self._intentions = intentions
        self._node_cores = node_cores
        self._memory = JobMemory()
        self._wish_seen: tuple[PlanRecord | None, float] = (None, 0.0)  # newest plan, and when this worker first saw it
        self._written: PlanRecord | None = None  # plan after this worker's newest write
        self._replaced: PlanRecord | None = None  # plan in this worker's view before that; the view follows etcd a little later
        self._published = PublishedProfile()
        self._windows = WindowLog()
        self._decisions = DecisionLog()
        self._planned_at = 0.0
        self._progress_at = -PROGRESS_EVERY_S  # time of the newest record of the job's progress, on the monotonic clock
        self._progress_allowance = Allowance(PROGRESS)
        self._place: tuple[int, Settings] | None = None  # round and settings of the newest windows
        self._num_in_place = 0
        self._history = HistoryAccess(intentions.history_url, node_cores)
        self._started_at = time.time()
        self._is_rank_0 = False
        self._num_submitted = self._num_digested = 0
        self._last: Decision | None = None
        self._trial: Decision | None = None
        self._inbox: queue.SimpleQueue[_News | _Failure | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dlrover-analyst", daemon=True)
        self._thread.start()

    @property
    def is_alone(self) -> bool:
        return self._membership is None

    @property
    def trial(self) -> Decision | None:
        """Trial whose settings this job runs with, or is about to, until its outcome is recorded; on rank 0 only."""
        return self._trial

    @property
    def is_idle(self) -> bool:
        """Whether all submitted windows have been processed."""
        return self._num_digested == self._num_submitted

    def submit(
        self,
        profile: StepProfile,
        remaining_samples: float | None,
        *,
        tunable: bool = False,
        untunable: Collection[str] = (),
        progress: ProgressRecord | None = None,
    ) -> None:
        self._num_submitted += 1
        self._inbox.put(_News(profile, remaining_samples, tunable, untunable, progress))

    def give_up(self, trial: Decision, step_time_s: float) -> None:
        """Return from a failed trial without waiting for a window or a fit, which take seconds on a busy machine."""
        self._num_submitted += 1
        self._inbox.put(_Failure(trial, step_time_s))

    def close(self, end: Literal["running", "finished", "failed"], timeout_s: float = 10.0) -> Decision | None:
        """End the thread after it has processed all submitted windows. Return the last decision.

        Args:
            end: the job's end as seen by this worker; `running` if only the worker leaves.
        """
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._is_rank_0 and not self._thread.is_alive():
            self._log(self._windows.flush())
            self._remember(end)
        return self._last

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            # Fitting must not take a core away from training.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        away = False
        while (news := self._inbox.get()) is not None:
            try:
                if isinstance(news, _Failure):
                    self._abandon(news)
                else:
                    self._digest(news)
                away = False
            except EtcdError as error:
                if not away:
                    log.warning("step profiles are not published until etcd is back: %s", error)
                away = True
            except Exception:
                # Training must go on without plans. Each failing window logs one traceback.
                log.exception("planning failed")
            self._trial = self._memory.trial if self._is_rank_0 else None
            self._num_digested += 1

    def _digest(self, news: _News) -> None:
        profile, membership = rounded(news.profile), self._membership
        if membership is not None:
            self._publish_window(membership, profile)
            self._publish_progress(membership, news.progress)
        was_rank_0, self._is_rank_0 = self._is_rank_0, profile.global_rank == 0
        if not self._is_rank_0:
            if was_rank_0:
                self._log(self._windows.flush())
            return
        if not was_rank_0:
            # Restore the state of earlier rank 0s: this worker may be the first rank 0 or the tenth.
            self._memory = self._recalled()
        if membership is not None:
            self._log(self._windows.add(profile, time.monotonic()))
            if membership.view.replacements and membership.view.plan is not None and membership.view.plan.node_cpus is not None:
                return  # nodes may have two sizes now, so a measurement fits neither
        self._memory.add(profile)
        if self._load is not None:
            workers_here = profile.fullest_node or math.ceil(profile.num_workers / profile.num_nodes)
            self._foreign_cores.append(self._load.foreign_cores(profile.cpu_percent / 100, workers_here))
        place = profile.round_number, settings_of(profile)
        self._num_in_place = self._num_in_place + 1 if place == self._place else 1
        self._place = place
        has_failed = self._num_in_place < WINDOWS_PER_DECISION and self._is_failed_trial(profile)
        if self._num_in_place == WINDOWS_PER_DECISION or has_failed:
            self._judge(place[1])
        if self._history.is_due:
            self._remember("running")
        every_s = self._intentions.plan_every_s
        waited = time.monotonic() - self._planned_at >= every_s or self._last is None
        is_time = has_failed or (waited and self._num_in_place >= WINDOWS_PER_DECISION)
        if every_s and is_time and not self._is_under_way(profile):
            self._planned_at = time.monotonic()
            self._plan(news)

    def _publish_window(self, membership: Membership, profile: StepProfile) -> None:
        payload = encode(profile)
        if self._published.is_due(profile, stored_bytes(payload), time.monotonic()):
            try:
                membership.shared.put_profile(payload)
            except EtcdError:
                self._published.was_lost()
                raise

    def _publish_progress(self, membership: Membership, progress: ProgressRecord | None) -> None:
        now = time.monotonic()
        if progress is None or now - self._progress_at < PROGRESS_EVERY_S:
            return
        payload = encode(progress)
        if self._progress_allowance.take(stored_bytes(payload), now):
            membership.shared.put_progress(payload)
            self._progress_at = now

    def _log(self, windows: Sequence[StepProfile]) -> None:
        if self._membership is not None:
            for window in windows:
                self._membership.shared.event(WindowMeasured(dataclasses.asdict(rounded(window))), "")

    def _is_failed_trial(self, profile: StepProfile) -> bool:
        last = self._memory.decisions[-1] if self._memory.decisions else None
        return last is not None and last.chosen == settings_of(profile) and has_failed(last, profile.step_time_s)

    def _is_under_way(self, profile: StepProfile) -> bool:
        """Whether the current plan is still being carried out. Judging it now would revert it."""
        wish = self._membership.view.plan if self._membership is not None else None
        if self._written is not None and wish == self._replaced:
            wish = self._written
        if wish is None or not wish.created_at:
            return False
        if wish != self._wish_seen[0]:
            self._wish_seen = wish, time.monotonic()
        # Not measured by the plan's time, because its writer's clock may differ by hours.
        if time.monotonic() - self._wish_seen[1] >= PATIENCE_WITH_A_PLAN_S:
            return False
        return (wish.binding and wish.num_workers != profile.num_workers) or not _is_tuned(wish, settings_of(profile))

    def _limits(
        self, news: _News, job: JobRecord | None, events: Sequence[EventRecord], nodes: NodesRecord | None, by_hand: bool
    ) -> Limits:
        """Return the bounds of the planner's choice of settings."""
        profile = news.profile
        limits = Limits(1, max(2, int(self._node_cores)))
        if job is not None:
            enough = least_workers((short.act, short.num_workers) for _, short in events_of(events, MemoryShort))
            fewest = min(job.max_workers, max(job.min_workers, enough))
            limits = Limits(fewest, job.max_workers, failed_sizes=job.sizes_not_planned)
        if nodes is not None:
            limits = replace(limits, max_cores=nodes.max_cpus, max_memory_bytes=nodes.max_memory_mb * 2**20)
        if news.tunable and not by_hand:
            axes = tunable_axes(self._node_cores, max(profile.cores, limits.max_cores)).items()
            # An axis has the name of a setting, or its plural.
            free = {axis: values for axis, values in axes if not {axis, axis[:-1]} & {*news.untunable}}
            limits = replace(limits, **free)  # type: ignore[arg-type]
        if self._foreign_cores:
            limits = replace(limits, foreign_cores=median(self._foreign_cores))
        if self.is_alone:
            # A lone worker computes with all cores, as it must not in company: workers would only be found to exceed them.
            threads = tunable_axes(self._node_cores, profile.cores)["intra_op_threads"]
            limits = replace(limits, intra_op_threads=threads)
        if "num_workers" in news.untunable:
            limits = replace(limits, min_workers=profile.num_workers, max_workers=profile.num_workers)
        return limits

    def _plan(self, news: _News) -> None:
        membership, profile = self._membership, news.profile
        events: Sequence[EventRecord] = ()
        job: JobRecord | None = None
        wish: PlanRecord | None = None
        if membership is not None:
            job, wish = membership.view.job, membership.view.plan
            if job is None:
                return
            events = membership.shared.journal.events()
        followed = membership is not None and membership.shared.has_controller()
        by_hand = wish is not None and wish.source == "user"
        nodes = membership.shared.nodes if membership is not None and followed else None
        limits = self._limits(news, job, events, nodes, by_hand)
        now = time.time()
        windows = self._memory.windows
        neighbours = self._history.similar(profile, self._job_key)
        population = self._history.population(profile, self._job_key)
        model = StepTimeModel.fit(windows, node_cores=self._node_cores, earlier=_thinned(neighbours), population=population)
        memory = MemoryModel.fit(windows) if any(w.memory_bytes or w.peak_memory_bytes for w in windows) else None
        gpu_windows = on_gpu(windows)
        gpu_memory = MemoryModel.fit(gpu_windows, GPU_TERMS) if gpu_windows else None
        situation = Situation(
            windows,
            node_cores=self._node_cores,
            # Advice to a lone worker is for its next run, so the little that is left of this one does not count.
            remaining_samples=None if self.is_alone else news.remaining_samples,
            resize_cost_s=_cost_s(events, TrainingStalled, DEFAULT_RESIZE_COST_S),
            retune_cost_s=_cost_s(events, SettingsApplied, DEFAULT_RETUNE_COST_S),
            age_s=max(0.0, now - self._began_at),
            spent=self._memory.spent(self._intentions.objective, self._node_cores),
            past=self._memory.decisions,
        )

        def decide(within: Limits, past: Sequence[Decision]) -> Decision:
            return plan(
                replace(situation, past=past, suggestion=self._suggestion(profile, neighbours, within)),
                model,
                within,
                self._intentions.objective,
                decision_id=self._memory.next_id,
                at=now,
                memory=memory,
                gpu_memory=gpu_memory,
            )

        in_pool = wish is not None and wish.source == "brain"
        if followed and not by_hand and not in_pool:
            self._publish(decide(limits, situation.past), wish, by_hand=False, followed=True)
            return
        # Recommendations are not carried out automatically, so an earlier identical one is no reason to withhold it.
        # The brain of a pool compares numbers of workers, so other settings must not fill the few candidates on record.
        advice = decide(_workers_alone(limits) if in_pool else limits, ())
        tuned = advice
        if membership is not None and not by_hand:
            here = replace(limits, min_workers=profile.num_workers, max_workers=profile.num_workers)
            tuned = decide(here, situation.past)
        if in_pool:
            tuned = _with_other_sizes(tuned, advice)  # the brain chooses from these
        if advice.chosen_workers != advice.current_workers or by_hand:
            tuned = _as_recommendation(tuned, advice, by_hand, in_pool)
        self._last = advice
        self._publish(tuned, wish, by_hand=by_hand, followed=False, advice=advice)

    def _publish(
        self,
        decision: Decision,
        wish: PlanRecord | None,
        *,
        by_hand: bool,
        followed: bool,
        advice: Decision | None = None,
        keeps_workers: bool = False,
    ) -> None:
        """Make the decision the job's plan if the planner owns the plan, and record it.

        Args:
            keeps_workers: whether the plan's number of workers stays as it is.

        Raises:
            EtcdError: the plan was not written, and nothing is recorded.
        """
        membership = self._membership
        if membership is not None and not by_hand:
            self._write_plan(membership, decision, wish, followed, advice, keeps_workers)
        self._last = advice or decision
        decision = _rounded(decision)
        event = DecisionMade(decision.to_data())
        num_bytes = stored_bytes(encode(record_of(event, decision.reason)))
        is_carried_out = decision.is_change and not by_hand
        if self._decisions.is_due(decision, num_bytes, time.monotonic(), is_carried_out=is_carried_out):
            self._memory.decide(decision)
            if membership is not None:
                membership.shared.event(event, decision.reason)

    def _write_plan(
        self,
        membership: Membership,
        decision: Decision,
        wish: PlanRecord | None,
        followed: bool,
        advice: Decision | None,
        keeps_workers: bool,
    ) -> None:
        num_workers = decision.chosen_workers if followed or advice is None else advice.chosen_workers
        chosen = decision.chosen
        proposed = PlanRecord(
            num_workers=num_workers,
            source="planner",
            reason=decision.reason,
            binding=followed,
            decision_id=decision.decision_id,
            created_at=time.time(),
            loader_workers=chosen.loader_workers,
            intra_op_threads=chosen.intra_op_threads,
            prefetch_factor=chosen.prefetch_factor,
            node_cpus=wish.node_cpus if wish is not None else None,
        )
        if decision.is_change and followed and decision.node_cores:
            proposed = replace(proposed, node_cpus=math.ceil(decision.node_cores))
        if wish is not None and wish.source == "brain":
            proposed = _within(proposed, wish)
        if wish is not None and _asked(wish) == _asked(proposed):
            return
        only_recommends = not followed and wish is not None and _asked(wish)[2:] == _asked(proposed)[2:]
        if only_recommends and not self._decisions.may_recommend(stored_bytes(encode(proposed)), time.monotonic()):
            return

        def planned(now: PlanRecord | None) -> PlanRecord | None:
            if now is not None and now.source == "user":
                return None
            # Node memory raised after a failure must not be reverted by a plan of settings.
            found_mb = (now.node_memory_mb or 0) if now is not None else 0
            wanted = proposed
            if now is not None and now.source == "brain":
                wanted = _within(proposed, now)
            elif keeps_workers and now is not None:  # more may have been planned meanwhile, because memory ran out
                wanted = replace(proposed, num_workers=now.num_workers, binding=now.binding)
            return replace(wanted, node_memory_mb=max(found_mb, math.ceil(decision.node_memory_bytes / 2**20)) or None)

        replaced = membership.view.plan
        self._written, self._replaced = membership.shared.update_plan(planned), replaced

    def _abandon(self, failure: _Failure) -> None:
        trial, membership = failure.trial, self._membership
        wish = membership.view.plan if membership is not None else None
        if membership is None or wish is None or self._memory.trial is not trial or not self._memory.windows:
            return
        if wish.source == "user" or wish.decision_id != trial.decision_id:
            return  # something else is planned already
        followed = membership.shared.has_controller()
        decision = retreat(trial, failure.step_time_s, decision_id=self._memory.next_id, at=time.time())
        advice = None if followed else self._last
        # First, as etcd may not take it. The next slow step repeats the request then.
        self._publish(decision, wish, by_hand=False, followed=followed, advice=advice, keeps_workers=True)
        window = _window_of(trial.chosen, failure.step_time_s, self._memory.windows[-1])
        self._memory.add(window)
        self._log([window])
        self._conclude(trial, failure.step_time_s)
        self._place, self._planned_at = None, time.monotonic()

    def _judge(self, settings: Settings) -> None:
        """Record the outcome of the last change, after its settings have been measured."""
        decision = next((d for d in reversed(self._memory.decisions) if d.is_change), None)
        judged = {o.decision_id for o in self._memory.outcomes}
        if decision is None or decision.chosen != settings or decision.decision_id in judged:
            return
        after = [w.step_time_s for w in self._memory.windows if settings_of(w) == settings and w.at > decision.at]
        if not after:
            return
        self._conclude(decision, math.exp(sum(map(math.log, after)) / len(after)))

    def _conclude(self, decision: Decision, step_time_s: float) -> None:
        found = outcome(decision, step_time_s)
        self._memory.outcomes.append(found)
        if self._membership is not None:
            self._membership.shared.event(OutcomeJudged(dataclasses.asdict(found)), found.text)

    # --- the history of jobs -----------------------------------------------------------------------------------------------

    @property
    def _began_at(self) -> float:
        job = self._membership.view.job if self._membership is not None else None
        return job.created_at if job is not None and job.created_at else self._started_at

    @property
    def _job_key(self) -> str:
        """Return the job's key in the history, the same for all its workers."""
        if self._membership is not None:
            return f"{self._membership.keys.run_id}@{self._began_at:.0f}"
        return f"local@{self._started_at:.0f}-{socket.gethostname()}-{os.getpid()}"

    def _recalled(self) -> JobMemory:
        """Return the state of earlier rank 0s: from the job's events, and from the history for events already deleted."""
        if self._membership is None:
            return JobMemory()
        return JobMemory.of(self._membership.shared.journal.events(), self._history.past(self._job_key))

    def _suggestion(self, profile: StepProfile, neighbours: Sequence[PastJob], limits: Limits) -> Suggestion | None:
        if any(d.is_change for d in self._memory.decisions):
            return None
        objective = self._intentions.objective
        return suggest(profile, neighbours, limits, node_cores=self._node_cores, at=time.time(), objective=objective)

    def _remember(self, end: Literal["running", "finished", "failed"]) -> None:
        self._history.record(self._job_key, self._began_at, end, self._memory)


def _window_of(settings: Settings, step_time_s: float, like: StepProfile) -> StepProfile:
    """Return a window of a few steps whose parts were not measured."""
    parts: dict[str, Any] = {f"{part}_s": 0.0 for part in STEP_PARTS}
    return replace(
        like,
        num_steps=STEPS_OF_PROOF,
        num_workers=settings.num_workers,
        local_batch=math.ceil(like.global_batch / settings.num_workers),
        loader_workers=settings.loader_workers,
        intra_op_threads=settings.intra_op_threads,
        prefetch_factor=settings.prefetch_factor,
        step_time_s=step_time_s,
        samples_per_s=like.global_batch / step_time_s,
        at=time.time(),
        **parts,
    )


def _workers_alone(limits: Limits) -> Limits:
    """Return limits that leave all settings but the number of workers as they are."""
    return replace(limits, loader_workers=(), intra_op_threads=(), prefetch_factors=())


def _within(proposed: PlanRecord, plan: PlanRecord) -> PlanRecord:
    """Return the proposed settings of each worker, with the number of workers that the brain of the job's pool has planned."""
    return replace(proposed, num_workers=plan.num_workers, binding=plan.binding, source=plan.source, reason=plan.reason)


def _as_recommendation(tuned: Decision, advice: Decision, by_hand: bool, in_pool: bool) -> Decision:
    """Return the decision about this job's settings, with the advice about its workers and why nothing follows from it."""
    why = "the settings were chosen by hand" if by_hand else "no controller starts or ends nodes"
    why = "the brain of the job's pool decides on workers" if in_pool else why
    recommended = "" if advice.reason == tuned.reason else f": {advice.reason}"
    return replace(tuned, reason=f"{tuned.reason} (a recommendation, as {why}{recommended})")


def _with_other_sizes(tuned: Decision, advice: Decision) -> Decision:
    """Return a decision for the present number of workers, with the candidates of `advice` that have other numbers."""
    others = [c for c in advice.candidates if c.num_workers != tuned.current_workers]
    return replace(tuned, candidates=tuple(sorted((*tuned.candidates, *others), key=lambda c: c.settings)))


def _asked(plan: PlanRecord) -> tuple[int | bool | None, ...]:
    """Return the settings that a plan requests."""
    settings = plan.loader_workers, plan.intra_op_threads, plan.prefetch_factor
    return plan.num_workers, plan.binding, *settings, plan.node_cpus


def _is_tuned(wish: PlanRecord, settings: Settings) -> bool:
    """Whether `settings` match the plan's settings that each worker applies by itself."""
    asked = (wish.loader_workers, wish.intra_op_threads, wish.prefetch_factor if wish.loader_workers != 0 else None)
    has = (settings.loader_workers, settings.intra_op_threads, settings.prefetch_factor)
    return all(a is None or a == h for a, h in zip(asked, has, strict=True))


def _cost_s(
    events: Sequence[EventRecord], event_type: type[TrainingStalled] | type[SettingsApplied], default_s: float
) -> float:
    """Return the median seconds of the job's own changes."""
    measured = [change.seconds for _, change in events_of(events, event_type) if change.seconds >= 0]
    return median(measured) if measured else default_s


def _thinned(jobs: Sequence[PastJob]) -> list[StepProfile]:
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


def _rounded(decision: Decision) -> Decision:
    """Return the decision with figures rounded to their precision, because its record is stored in etcd."""

    def short(value: Any) -> Any:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    def shortened(candidate: Candidate) -> Candidate:
        figures = {f.name: short(getattr(candidate, f.name)) for f in dataclasses.fields(candidate)}
        return Candidate(**figures)

    return replace(decision, candidates=tuple(map(shortened, decision.candidates)))
