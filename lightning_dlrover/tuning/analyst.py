"""Learn from windows of steps and plan, in a background thread, while the job trains.

Every worker's thread publishes its windows (`publisher.py`). Rank 0's thread also lets the autotuner decide (`autotuner.py`),
writes the plan (`plan_writer.py`) and later its outcome, and updates the job history.
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
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from lightning_dlrover.learn.autotuner import Autotuner, JobFacts, Proposal, TuningConfig
from lightning_dlrover.learn.history_access import HistoryAccess
from lightning_dlrover.learn.job_memory import JobMemory
from lightning_dlrover.learn.plan_writer import PlanWriter
from lightning_dlrover.learn.profile_log import rounded
from lightning_dlrover.learn.publisher import Publisher
from lightning_dlrover.observe.resources import MachineLoad
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.plan import Decision
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.job.records import PlanRecord, ProgressRecord
from lightning_dlrover.rdzv.live.membership import Membership

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _WindowReport:
    """One window, with facts that are available only to the training thread."""

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

    Args:
        membership: membership in a job with changing workers; None: the worker runs alone.
        node_cores: cores of one node.
        load: load on this worker's node; None: no other programs run there.
    """

    def __init__(
        self,
        membership: Membership | None,
        config: TuningConfig,
        node_cores: float,
        load: MachineLoad | None = None,
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
                # Training must go on without plans. Each failing window logs one traceback.
                log.exception("planning failed")
            self._trial = self._tuner.memory.trial if self._is_rank_0 else None
            self._num_digested += 1

    def _digest(self, report: _WindowReport) -> None:
        profile = rounded(report.profile)
        self._publisher.publish(profile, report.progress, time.monotonic())
        if profile.global_rank != 0:
            self._retire()
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
        # First, as etcd may not take it. The next slow step repeats the request then.
        self._carry_out(proposal, plan)
        window, outcome = self._tuner.abandon(trial, step_time_s, now=time.monotonic(), at=time.time())
        self._publisher.log_singly(window)
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
        self._tuner.took_effect(proposal)
        is_by_hand = plan is not None and plan.owner == "user"
        is_carried_out = proposal.decision.is_change and not is_by_hand
        recorded = self._publisher.log_decision(proposal.decision, now, is_carried_out=is_carried_out)
        if recorded is not None:
            self._tuner.memory.decide(recorded)

    def _retire(self) -> None:
        """End this worker's time as rank 0."""
        if self._is_rank_0:
            self._is_rank_0 = False
            self._publisher.flush()

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
        return JobMemory.of(self._membership.shared.journal.events(), self._history.past(self._job_key))

    def _remember(self, end: Literal["running", "finished", "failed"]) -> None:
        self._history.record(self._job_key, self._began_at, end, self._tuner.memory)
