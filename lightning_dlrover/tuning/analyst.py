"""Learn from windows of steps, plan and publish, in a background thread, while the job trains.

Each worker's measurements, and rank 0's windows, decisions and outcomes, become records and events in etcd; `profile_log.py`
chooses the few that are written.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.job.events import DecisionMade, OutcomeJudged, WindowMeasured, record_of
from lightning_dlrover.rdzv.job.records import PlanRecord, ProgressRecord, encode
from lightning_dlrover.rdzv.membership.membership import Membership
from lightning_dlrover.rdzv.membership.worker_records import SharedRecords
from lightning_dlrover.tuning.autotuner import Autotuner, JobFacts, Proposal, TuningConfig
from lightning_dlrover.tuning.history import HistoryAccess, JobMemory
from lightning_dlrover.tuning.plan import Decision, Outcome, Settings, settings_of
from lightning_dlrover.tuning.profile_log import (
    PROGRESS,
    DecisionLog,
    PublishedProfile,
    WindowLog,
    WriteBudget,
    rounded,
    rounded_candidates,
    stored_bytes,
)
from lightning_dlrover.tuning.resources import MachineLoad
from lightning_dlrover.tuning.samples import StepProfile

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 8.0  # minimum seconds between two records of the job's progress


class Publisher:
    """The published state of one worker.

    Args:
        records: the job's shared records; None: the worker trains alone, and nothing is published.

    Attributes:
        decisions: the decisions that were recorded.
    """

    def __init__(self, records: SharedRecords | None) -> None:
        self.decisions = DecisionLog()
        self._records = records
        self._profile = PublishedProfile()
        self._windows = WindowLog()
        self._progress_at = -PROGRESS_EVERY_S  # time of the newest record of the job's progress, on the monotonic clock
        self._progress_budget = WriteBudget(PROGRESS)

    def publish(self, profile: StepProfile, progress: ProgressRecord | None, now: float) -> None:
        """Publish this worker's newest window, and the job's progress.

        Args:
            progress: from rank 0 only.
            now: seconds of a monotonic clock.

        Raises:
            EtcdError: etcd has not taken a record.
        """
        if self._records is None:
            return
        payload = encode(profile)
        if self._profile.is_due(profile, stored_bytes(payload), now):
            try:
                self._records.put_profile(payload)
            except EtcdError:
                self._profile.was_lost()
                raise
        if progress is None or now - self._progress_at < PROGRESS_EVERY_S:
            return
        payload = encode(progress)
        if self._progress_budget.take(stored_bytes(payload), now):
            self._records.put_progress(payload)
            self._progress_at = now

    def log_window(self, profile: StepProfile, now: float) -> None:
        """Log a window of rank 0 in the job's events, now or merged with later ones."""
        if self._records is not None:
            self.log(self._windows.add(profile, now))

    def flush(self) -> None:
        """Log the windows that wait for later ones, as this worker's time as rank 0 ends."""
        self.log(self._windows.flush())

    def log_decision(self, decision: Decision, now: float, *, is_carried_out: bool) -> Decision | None:
        """Log a decision in the job's events, if it is one of the few to be recorded. Return it as recorded, else None."""
        decision = rounded_candidates(decision)
        event = DecisionMade(decision.to_data())
        num_bytes = stored_bytes(encode(record_of(event, decision.reason)))
        if not self.decisions.is_due(decision, num_bytes, now, is_carried_out=is_carried_out):
            return None
        if self._records is not None:
            self._records.event(event, decision.reason)
        return decision

    def log_outcome(self, outcome: Outcome) -> None:
        if self._records is not None:
            self._records.event(OutcomeJudged(asdict(outcome)), outcome.text)

    def log(self, windows: Sequence[StepProfile]) -> None:
        """Log windows of rank 0 in the job's events at once."""
        if self._records is not None:
            for window in windows:
                self._records.event(WindowMeasured(asdict(rounded(window))), "")


PATIENCE_WITH_A_PLAN_S = 120.0  # time for a plan to be carried out before the next one: new nodes may queue, and must start


class PlanWriter:
    """Writes the planner's decisions into the job's plan.

    A plan has one owner (`PlanRecord.owner`):

    - planner: it chooses all settings, and the number of workers is binding if a controller carries it out
    - pool: it chooses the number of workers, and the planner the settings of each worker
    - user: the plan was set by hand and stays as it is

    The controller that starts and ends nodes reads the plan from etcd.

    Args:
        decisions: bounds the bytes of plans that only recommend, together with those of decisions.
    """

    def __init__(self, membership: Membership, decisions: DecisionLog) -> None:
        self._membership = membership
        self._decisions = decisions
        self._first_seen: tuple[PlanRecord | None, float] = (None, 0.0)  # newest plan, and when this worker first saw it
        self._written: PlanRecord | None = None  # plan after this worker's newest write
        self._replaced: PlanRecord | None = None  # plan in this worker's view before that; the view follows etcd a little later

    def is_under_way(self, profile: StepProfile, now: float) -> bool:
        """Whether the current plan is still being carried out. Judging it now would revert it.

        Args:
            profile: the newest window.
            now: seconds of a monotonic clock.
        """
        plan = self._membership.view.plan
        if self._written is not None and plan == self._replaced:
            plan = self._written
        if plan is None or not plan.created_at:
            return False
        if plan != self._first_seen[0]:
            self._first_seen = plan, now
        # Not by the plan's own time, because its writer's clock may differ by hours.
        if now - self._first_seen[1] >= PATIENCE_WITH_A_PLAN_S:
            return False
        return (plan.binding and plan.num_workers != profile.num_workers) or not _is_tuned(plan, settings_of(profile))

    def write(self, proposal: Proposal, seen: PlanRecord | None, *, now: float, at: float) -> None:
        """Make a proposal the job's plan, unless a user owns the plan or it asks for nothing new.

        Args:
            seen: the plan that the proposal is based on.
            now: seconds of a monotonic clock.
            at: seconds since the epoch.

        Raises:
            EtcdError: the plan was not written.
        """
        if seen is not None and seen.owner == "user":
            return
        wanted = proposed_plan(proposal, seen, at)
        if seen is not None and _asked(seen) == _asked(wanted):
            return
        only_recommends = not proposal.is_binding and seen is not None and _asked(seen)[2:] == _asked(wanted)[2:]
        if only_recommends and not self._decisions.may_recommend(stored_bytes(encode(wanted)), now):
            return
        node_memory_mb = math.ceil(proposal.decision.node_memory_bytes / 2**20)

        def planned(newest: PlanRecord | None) -> PlanRecord | None:
            return merged_plan(wanted, newest, node_memory_mb, keeps_workers=proposal.keeps_workers)

        replaced = self._membership.view.plan
        self._written, self._replaced = self._membership.shared.update_plan(planned), replaced


def proposed_plan(proposal: Proposal, seen: PlanRecord | None, at: float) -> PlanRecord:
    """Return the plan that a proposal asks for, where `seen` is the present one.

    Args:
        at: seconds since the epoch.
    """
    decision, chosen = proposal.decision, proposal.decision.chosen
    node_cpus = seen.node_cpus if seen is not None else None
    if decision.is_change and proposal.is_binding and decision.node_cores:
        node_cpus = math.ceil(decision.node_cores)
    plan = PlanRecord(
        num_workers=proposal.advice.chosen_workers,
        source="planner",
        reason=decision.reason,
        binding=proposal.is_binding,
        decision_id=decision.decision_id,
        created_at=at,
        loader_workers=chosen.loader_workers,
        intra_op_threads=chosen.intra_op_threads,
        prefetch_factor=chosen.prefetch_factor,
        node_cpus=node_cpus,
    )
    return _with_workers_of(seen, plan) if seen is not None and seen.owner == "pool" else plan


def merged_plan(
    wanted: PlanRecord, newest: PlanRecord | None, node_memory_mb: int, *, keeps_workers: bool = False
) -> PlanRecord | None:
    """Return the plan to write over `newest`, which others may have written in the meantime; None: leave it as it is.

    Args:
        node_memory_mb: MiB that a node needs; 0: any.
        keeps_workers: whether the number of workers stays as `newest` has it, even if the planner owns it.
    """
    if newest is None:
        return replace(wanted, node_memory_mb=node_memory_mb or None)
    if newest.owner == "user":
        return None
    if newest.owner == "pool":
        wanted = _with_workers_of(newest, wanted)
    elif keeps_workers:  # more may have been planned because memory ran out
        wanted = replace(wanted, num_workers=newest.num_workers, binding=newest.binding)
    # Node memory raised after a failure must not be reverted by a plan of settings.
    return replace(wanted, node_memory_mb=max(newest.node_memory_mb or 0, node_memory_mb) or None)


def _with_workers_of(pools: PlanRecord, wanted: PlanRecord) -> PlanRecord:
    """Return the wanted settings of each worker, with the number of workers that the job's pool has planned."""
    return replace(wanted, num_workers=pools.num_workers, binding=pools.binding, source=pools.source, reason=pools.reason)


def _asked(plan: PlanRecord) -> tuple[int | bool | None, ...]:
    """Return the settings that a plan requests."""
    settings = plan.loader_workers, plan.intra_op_threads, plan.prefetch_factor
    return plan.num_workers, plan.binding, *settings, plan.node_cpus


def _is_tuned(plan: PlanRecord, settings: Settings) -> bool:
    """Whether `settings` match the plan's settings that each worker applies."""
    asked = (plan.loader_workers, plan.intra_op_threads, plan.prefetch_factor if plan.loader_workers != 0 else None)
    has = (settings.loader_workers, settings.intra_op_threads, settings.prefetch_factor)
    return all(a is None or a == h for a, h in zip(asked, has, strict=True))


@dataclass(frozen=True)
class _WindowReport:
    """One window, with facts that only the training thread has."""

    profile: StepProfile
    remaining_samples: float | None
    tunable: bool  # loader workers, threads and prefetching can be changed
    untunable: Collection[str]  # exceptions, by their names in `Settings`
    progress: ProgressRecord | None  # of the job, from rank 0


@dataclass(frozen=True)
class _FailedTrial:
    """A trial with steps far too slow."""

    trial: Decision
    step_time_s: float


class Analyst:
    """Background thread of one worker.

    Every worker's thread publishes its windows (`Publisher`). Rank 0's thread also lets the autotuner decide
    (`autotuner.py`), writes the plan (`PlanWriter`) and later its outcome, and updates the job history.

    Args:
        membership: membership in a job with changing workers; None: the worker runs alone.
        node_cores: cores of one node.
        load: load on this worker's node; None: no other programs run there.
    """

    def __init__(
        self, membership: Membership | None, config: TuningConfig, node_cores: float, load: MachineLoad | None = None
    ) -> None:
        self._membership = membership
        self._load = load
        self._history = HistoryAccess(config.history_url, node_cores)
        self._publisher = Publisher(membership.shared if membership is not None else None)
        self._plan_writer = PlanWriter(membership, self._publisher.decisions) if membership is not None else None
        self._tuner = Autotuner(config, node_cores, JobMemory())
        self._started_at = time.time()
        self._is_rank_0 = False
        self._trial: Decision | None = None
        self._num_submitted = self._num_digested = 0
        self._inbox: queue.SimpleQueue[_WindowReport | _FailedTrial | None] = queue.SimpleQueue()
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

    def predicted_step_time_s(self, profile: StepProfile) -> float | None:
        """Return the step time that the newest decision predicts for this window's settings; None without a prediction."""
        decision, settings = self._tuner.advice, settings_of(profile)
        found = (c.step_time_s for c in (decision.candidates if decision is not None else ()) if c.settings == settings)
        return next(found, None)

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
        self._inbox.put(_WindowReport(profile, remaining_samples, tunable, untunable, progress))

    def give_up(self, trial: Decision, step_time_s: float) -> None:
        """Return from a failed trial without waiting for a window or a fit, which take seconds on a busy machine."""
        self._num_submitted += 1
        self._inbox.put(_FailedTrial(trial, step_time_s))

    def close(self, end: Literal["running", "finished", "failed"], timeout_s: float = 10.0) -> Decision | None:
        """End the thread after it has processed all submitted windows. Return the last decision.

        Args:
            end: the job's end as seen by this worker; `running` if only the worker leaves.
        """
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._is_rank_0 and not self._thread.is_alive():
            self._publisher.flush()
            self._remember(end)
        return self._tuner.advice

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            # Fitting must not take a core away from training.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        away = False
        while (news := self._inbox.get()) is not None:
            try:
                if isinstance(news, _FailedTrial):
                    self._leave_trial(news.trial, news.step_time_s)
                else:
                    self._digest(news)
                away = False
            except EtcdError as error:
                if not away:
                    log.warning("step profiles are not published until etcd is back: %s", error)
                away = True
            except Exception:
                # Training must continue without plans. Each failing window logs one traceback.
                log.exception("planning failed")
            self._trial = self._tuner.memory.trial if self._is_rank_0 else None
            self._num_digested += 1

    def _digest(self, report: _WindowReport) -> None:
        profile = rounded(report.profile)
        self._publisher.publish(profile, report.progress, time.monotonic())
        if profile.global_rank != 0:
            if self._is_rank_0:
                self._is_rank_0 = False
                self._publisher.flush()
            return
        if not self._is_rank_0:
            # Restore the state of earlier rank 0s: this worker may be the first rank 0 or the tenth.
            self._tuner.memory = self._recalled()
            self._is_rank_0 = True
        self._publisher.log_window(profile, time.monotonic())
        if self._has_nodes_of_two_sizes():
            return  # a measurement fits neither
        if (outcome := self._tuner.add(profile, self._foreign_cores(profile))) is not None:
            self._publisher.log_outcome(outcome)
        if self._history.is_due:
            self._remember("running")
        now = time.monotonic()
        if not self._tuner.is_due(now) or (self._plan_writer is not None and self._plan_writer.is_under_way(profile, now)):
            return
        if (facts := self._facts(profile)) is not None:
            proposal = self._tuner.propose(
                facts,
                now=now,
                at=time.time(),
                remaining_samples=report.remaining_samples,
                tunable=report.tunable,
                untunable=report.untunable,
            )
            self._carry_out(proposal, facts.plan)

    def _leave_trial(self, trial: Decision, step_time_s: float) -> None:
        plan = self._membership.view.plan if self._membership is not None else None
        if self._membership is None or plan is None or plan.owner == "user" or plan.decision_id != trial.decision_id:
            return  # something else is planned already
        has_controller = self._membership.shared.has_controller()
        proposal = self._tuner.retreat(trial, step_time_s, at=time.time(), has_controller=has_controller)
        if proposal is None:
            return
        # First, as etcd may refuse it; the next slow step then repeats the request.
        self._carry_out(proposal, plan)
        window, outcome = self._tuner.abandon(trial, step_time_s, now=time.monotonic(), at=time.time())
        self._publisher.log([window])
        self._publisher.log_outcome(outcome)

    def _carry_out(self, proposal: Proposal, plan: PlanRecord | None) -> None:
        """Make a proposal the job's plan, and record its decision.

        Args:
            plan: the job's present plan.

        Raises:
            EtcdError: the plan was not written, and nothing is recorded.
        """
        now = time.monotonic()
        if self._plan_writer is not None:
            self._plan_writer.write(proposal, plan, now=now, at=time.time())
        self._tuner.advice = proposal.advice
        is_by_hand = plan is not None and plan.owner == "user"
        is_carried_out = proposal.decision.is_change and not is_by_hand
        recorded = self._publisher.log_decision(proposal.decision, now, is_carried_out=is_carried_out)
        if recorded is not None:
            self._tuner.memory.decide(recorded)

    # --- the job and its history -------------------------------------------------------------------------------------------

    def _facts(self, profile: StepProfile) -> JobFacts | None:
        """Return what a decision is based on; None: the job has no record yet."""
        membership, in_job = self._membership, JobFacts()
        if membership is not None:
            job, plan = membership.view.job, membership.view.plan
            if job is None:
                return None
            events = membership.shared.journal.events()
            has_controller = membership.shared.has_controller()
            nodes = membership.shared.nodes if has_controller else None
            in_job = JobFacts(job, plan, nodes, has_controller, events)
        return replace(
            in_job,
            age_s=time.time() - self._began_at,
            similar=self._history.similar(profile, self._job_key),
            population=self._history.population(profile, self._job_key),
        )

    def _foreign_cores(self, profile: StepProfile) -> float | None:
        if self._load is None:
            return None
        if self._load.is_outdated:  # its node has another size
            self._load = MachineLoad()
            return None
        workers_here = profile.fullest_node or math.ceil(profile.num_workers / profile.num_nodes)
        return self._load.foreign_cores(profile.cpu_percent / 100, workers_here)

    def _has_nodes_of_two_sizes(self) -> bool:
        """Whether nodes are being replaced by larger ones."""
        view = self._membership.view if self._membership is not None else None
        return view is not None and bool(view.replacements) and view.plan is not None and view.plan.node_cpus is not None

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
        return JobMemory.of(self._membership.shared.journal.events(), *self._history.past(self._job_key))

    def _remember(self, end: Literal["running", "finished", "failed"]) -> None:
        self._history.record(self._job_key, self._began_at, end, self._tuner.memory)
