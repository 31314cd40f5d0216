"""Windows in, decision out: a simulated job follows the autotuner's plans, without etcd, threads or a clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from lightning_dlrover.rdzv.job.records import JobRecord, NodesRecord, PlanRecord
from lightning_dlrover.tuning.analyst import merged_plan, proposed_plan
from lightning_dlrover.tuning.autotuner import WINDOWS_PER_DECISION, Autotuner, JobFacts, Proposal, TuningConfig
from lightning_dlrover.tuning.candidates import PastJob, descriptor_of
from lightning_dlrover.tuning.history import JobMemory
from lightning_dlrover.tuning.plan import Decision, Objective, Outcome, Prices, Settings
from tests.support.simulated_jobs import Truth, input_bound, settings_under, window

START = Settings(1, 0, 1, 0)
TRUTH = input_bound(4)
WINDOW_S = 2.0
CONFIG = TuningConfig(0.001, Objective(prices=Prices(core_hour=1.0)), None)
INITIAL = PlanRecord(1, "initial", "start with 1 workers", True)
IN_JOB = JobFacts(JobRecord("training", True, 1, 4, "1"), INITIAL, has_controller=True)
WITHOUT_CONTROLLER = JobFacts(IN_JOB.job)


class TunedJob:
    """Runs with the planned settings, and hands windows of them to its autotuner."""

    def __init__(self, facts: JobFacts = IN_JOB, cores: float = 4.0) -> None:
        self.tuner = Autotuner(CONFIG, 4.0, JobMemory())
        self.facts = facts
        self.settings = START
        self.cores = cores
        self.proposals: list[Proposal] = []
        self.outcomes: list[Outcome] = []
        self._rng = random.Random(1)
        self._now = 0.0

    @property
    def plan(self) -> PlanRecord:
        assert self.facts.plan is not None
        return self.facts.plan

    @property
    def decisions(self) -> list[Decision]:
        return [proposal.decision for proposal in self.proposals]

    def run(self, num_windows: int, truth: Truth = TRUTH) -> None:
        for _ in range(num_windows):
            self._now += WINDOW_S
            profile = window(truth, self.settings, self._rng, 0.03, at=self._now)
            outcome = self.tuner.add(dataclasses.replace(profile, cores=self.cores))
            self.outcomes += [outcome] if outcome is not None else []
            if self.tuner.is_due(self._now):
                self.carry_out(self.tuner.propose(self.facts, now=self._now, at=self._now, remaining_samples=1e9, tunable=True))

    def run_until_trial(self) -> Decision:
        while self.settings == START:
            self.run(1)
        trial = self.tuner.memory.trial
        assert trial is not None
        return trial

    def carry_out(self, proposal: Proposal) -> None:
        self.proposals.append(proposal)
        self.tuner.advice = proposal.advice
        self.tuner.memory.decide(proposal.decision)
        plan = merged_plan(
            proposed_plan(proposal, self.facts.plan, self._now), self.facts.plan, 0, keeps_workers=proposal.keeps_workers
        )
        if plan is None:
            return
        self.facts = dataclasses.replace(self.facts, plan=plan)
        self.cores = max(self.cores, float(plan.node_cpus or 0))
        self.settings = settings_under(plan, self.settings)


def test_same_windows_give_the_same_decisions() -> None:
    first, second = TunedJob(), TunedJob()
    first.run(20)
    second.run(20)
    assert first.decisions == second.decisions


def test_a_decision_waits_for_three_windows_of_the_present_settings() -> None:
    job = TunedJob()
    job.run(WINDOWS_PER_DECISION - 1)
    assert not job.proposals
    job.run(1)
    assert len(job.proposals) == 1


def test_job_that_resumes_after_a_day_has_not_spent_anything_in_between() -> None:
    memory, rng = JobMemory(), random.Random(1)
    core_hours = Objective(prices=Prices(core_hour=1.0))

    def train(worker_id: str, since: float) -> None:
        for number in range(1, 11):
            profile = window(TRUTH, START, rng, 0.0, at=since + 360.0 * number)  # the job validates in between
            memory.add(dataclasses.replace(profile, worker_id=worker_id))

    train("w0", 1e9)
    assert memory.spent(core_hours, 4.0) == pytest.approx(0.9, rel=0.01)
    train("w1", 1e9 + 86400.0)
    # A new rank 0 may have taken over: windows that the former one had not logged yet count, minutes at most.
    assert memory.spent(core_hours, 4.0) == pytest.approx(1.8, abs=0.07)


def test_plan_beyond_a_nodes_cores_asks_for_larger_nodes() -> None:
    nodes = NodesRecord("slurm", "mark", min_cpus=1, max_cpus=3)
    job = TunedJob(dataclasses.replace(IN_JOB, nodes=nodes), cores=1.0)
    job.run(40)
    assert job.settings.intra_op_threads + job.settings.loader_workers > 1
    assert job.plan.node_cpus == job.cores == min(3, job.settings.intra_op_threads + job.settings.loader_workers)


def test_workers_are_only_recommended_without_a_controller() -> None:
    job = TunedJob(WITHOUT_CONTROLLER)
    job.run(20)
    assert job.settings.num_workers == 1
    assert job.settings.loader_workers > 0
    assert not job.plan.binding
    assert any("no controller starts or ends nodes" in d.reason for d in job.decisions)


def test_job_without_controller_starts_with_known_loader_workers() -> None:
    rng = random.Random(1)
    fast, own = Settings(4, 4, 1, 2), Settings(1, 4, 1, 2)  # several workers were best, but no controller can start them here
    times_s = {START: 0.1, own: 0.05, fast: 0.02}
    past = [
        dataclasses.replace(window(TRUTH, s, rng, 0.0, at=float(n)), step_time_s=t) for n, (s, t) in enumerate(times_s.items())
    ]
    similar = [PastJob("past", 0.0, descriptor_of(past[0], 4.0), tuple(past))]
    job = TunedJob(dataclasses.replace(WITHOUT_CONTROLLER, similar=similar))
    job.run(WINDOWS_PER_DECISION)
    (decision,) = job.decisions
    assert decision.chosen == own
    assert "most similar past jobs" in decision.reason


def test_plan_of_a_user_stays() -> None:
    by_hand = PlanRecord(1, "user", "set by hand", True, loader_workers=0, created_at=0.0)
    job = TunedJob(dataclasses.replace(IN_JOB, plan=by_hand))
    job.run(12)
    assert job.settings == START
    assert job.plan == by_hand
    assert all("chosen by hand" in d.reason for d in job.decisions)
    # The reason appears once.
    assert not any(f": {d.reason.partition(' (a recommendation')[0]})" in d.reason for d in job.decisions)


def test_failed_trial_ends_after_one_window() -> None:
    job = TunedJob()
    trial = job.run_until_trial()
    job.run(1, dataclasses.replace(TRUTH, overhead_s=20 * trial.choice.high_s))
    assert job.settings == START
    assert [outcome.expected for outcome in job.outcomes] == [False]
    assert not job.decisions[-1].explored


def test_trial_counts_as_such_until_three_windows_have_judged_it() -> None:
    job = TunedJob()
    trial = job.run_until_trial()
    job.run(2)
    assert job.tuner.memory.trial == trial
    job.run(1)
    assert job.tuner.memory.trial != trial


def test_workers_that_were_planned_for_memory_survive_a_failed_trial() -> None:
    job = TunedJob(WITHOUT_CONTROLLER)
    trial = job.run_until_trial()
    more = dataclasses.replace(job.plan, num_workers=job.plan.num_workers + 2)  # a plan of the watchdog's
    job.facts = dataclasses.replace(job.facts, plan=more)
    retreat = job.tuner.retreat(trial, 9.0, at=0.0, has_controller=False)
    assert retreat is not None
    job.carry_out(retreat)
    assert (job.plan.num_workers, job.plan.intra_op_threads) == (more.num_workers, START.intra_op_threads)


def test_a_trial_is_abandoned_once() -> None:
    job = TunedJob()
    trial = job.run_until_trial()
    assert job.tuner.retreat(trial, 9.0, at=0.0, has_controller=True) is not None
    window_of_failure, outcome = job.tuner.abandon(trial, 9.0, now=0.0, at=0.0)
    assert (window_of_failure.step_time_s, outcome.expected) == (9.0, False)
    assert job.tuner.retreat(trial, 9.0, at=0.0, has_controller=True) is None


def _candidates(owners: Sequence[str]) -> list[PlanRecord | None]:
    return [None, *(PlanRecord(3, source, "another one", True, node_memory_mb=900) for source in owners)]  # type: ignore[arg-type]


@pytest.mark.parametrize("newest", _candidates(["initial", "planner", "brain", "user"]))
def test_newest_plan_keeps_what_its_owner_has_not_left_to_the_planner(newest: PlanRecord | None) -> None:
    wanted = PlanRecord(2, "planner", "ours", False, loader_workers=1)
    written = merged_plan(wanted, newest, 500)
    if newest is not None and newest.owner == "user":
        assert written is None
        return
    assert written is not None
    assert written.loader_workers == 1
    assert written.node_memory_mb == (500 if newest is None else 900)
    is_pools = newest is not None and newest.owner == "pool"
    assert (written.num_workers, written.binding) == ((3, True) if is_pools else (2, False))
