"""The background thread of rank 0, with windows of a simulated job: real etcd, real history, no training."""

from __future__ import annotations

import dataclasses
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import ControllerRecord, EventRecord, JobRecord, Keys, PlanRecord, encode
from lightning_dlrover.rdzv.membership.membership import Membership, MembershipConfig
from lightning_dlrover.tuning import StepTimeModel
from lightning_dlrover.tuning.analyst import PATIENCE_WITH_A_PLAN_S, Analyst
from lightning_dlrover.tuning.autotuner import WINDOWS_PER_DECISION, TuningConfig
from lightning_dlrover.tuning.plan import Decision, Objective, Prices, Settings
from tests.support.simulated_jobs import Truth, input_bound, settings_under, window
from tests.support.waiting import eventually

START = Settings(1, 0, 1, 0)
TRUTH = input_bound(4)


class RunningJob:
    """Simulates workers and controller: it runs with the planned settings, and publishes windows of them."""

    def __init__(self, client: EtcdClient, keys: Keys, history: str | None, membership: Membership) -> None:
        self._client, self._keys = client, keys
        self.membership = membership
        self.settings = START
        self.cores = float(TRUTH.node_cores)
        self.analyst = Analyst(membership, TuningConfig(0.001, Objective(prices=Prices(core_hour=1.0)), history), 4.0)
        self._rng = random.Random(1)
        self._at = time.time()

    def run(self, num_windows: int, truth: Truth = TRUTH, rank: int = 0) -> None:
        for _ in range(num_windows):
            profile = window(truth, self.settings, self._rng, 0.03, at=time.time())
            self.analyst.submit(dataclasses.replace(profile, global_rank=rank, cores=self.cores), 1e9, tunable=True)
            self.digest()
            plan = self.membership.view.plan
            if plan is not None:
                self.cores = max(self.cores, float(plan.node_cpus or 0))
                self.settings = settings_under(plan, self.settings)

    def run_until_trial(self) -> Decision:
        while self.settings == START:
            self.run(1)
        trial = self.analyst.trial
        assert trial is not None
        return trial

    def digest(self) -> None:
        """Wait until the analyst has processed all windows, and write its events."""
        eventually(lambda: self.analyst.is_idle and self._mirror_is_new(), "a window to be processed", 20.0, 0.005)
        self.membership.shared.outbox.write()

    def _mirror_is_new(self) -> bool:
        entry = self._client.get(self._keys.plan)
        plan = self.membership.view.plan
        return entry is None or (plan is not None and encode(plan) == entry.value)

    def events(self, kind: str) -> list[EventRecord]:
        return [event for event in self.membership.shared.journal.events() if event.kind == kind]

    def decisions(self) -> list[Decision]:
        return [Decision.from_data(event.data) for event in self.events("decision")]


StartJob = Callable[..., RunningJob]


@pytest.fixture
def start(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> Iterator[StartJob]:
    """A job of 1 to 4 workers with a controller, and its own history."""
    with ExitStack() as stack:

        def make(
            with_controller: bool = True, history: str | None = f"sqlite:///{tmp_path / 'h.sqlite'}", name: str = ""
        ) -> RunningJob:
            own = Keys(name) if name else keys
            client = stack.enter_context(EtcdClient(EtcdConfig(etcd.endpoint)))
            if client.get(own.job) is None:
                client.put(own.job, encode(JobRecord("training", True, 1, 4, "1", created_at=time.time() - 10)))
            if with_controller:
                client.put(own.controller, encode(ControllerRecord("host", 1, "local")))
                client.put(own.plan, encode(PlanRecord(1, "initial", "start with 1 workers", True)))
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            config = MembershipConfig(
                run_id=own.run_id,
                prefix=own.prefix,
                agent_id=f"agent-{port.getsockname()[1]}",
                local_rank=0,
                min_workers=1,
                max_workers=4,
                version="1",
                address="127.0.0.1",
                port=port.getsockname()[1],
            )
            membership = Membership(client, config)
            stack.callback(membership.close)
            membership.register()
            membership.wait_for(lambda view: view.job, 15.0, "the job's record")
            if with_controller:
                membership.wait_for(lambda _: membership.shared.has_controller() or None, 15.0, "the controller's record")
            job = RunningJob(client, own, history, membership)
            stack.callback(job.analyst.close, "running")
            return job

        yield make


def test_a_job_is_tuned_recorded_judged_and_the_start_of_the_next_one(start: StartJob, run_id: str) -> None:
    job = start()
    job.run(40)
    decisions = job.decisions()
    changes = [d for d in decisions if d.is_change]
    assert 1 <= len(changes) <= 8
    assert TRUTH.parts(job.settings).step_s < 0.6 * TRUTH.parts(START).step_s
    assert [d.decision_id for d in decisions] == list(range(1, len(decisions) + 1))
    outcomes = [event.data["decision_id"] for event in job.events("outcome")]
    assert outcomes == [d.decision_id for d in changes]
    assert all(len(encode(event)) < 8000 for event in job.events("decision"))
    assert decisions[-1].spent is not None
    assert decisions[-1].spent >= decisions[0].spent >= 0  # type: ignore[operator]

    job.analyst.close("finished")
    history = job.analyst._history._history
    assert history is not None
    (entry,) = history.jobs()
    assert entry.outcome == "finished"
    assert entry.num_settings == len({d.chosen for d in changes} | {START})
    assert history.decisions(entry.key) == decisions
    assert [o.decision_id for o in history.outcomes(entry.key)] == outcomes

    following = start(name=f"{run_id}-again")
    following.run(WINDOWS_PER_DECISION)
    (decision,) = following.decisions()
    assert "most similar past jobs" in decision.reason
    assert TRUTH.parts(decision.chosen).step_s <= 1.1 * TRUTH.parts(job.settings).step_s


def test_new_rank_0_reads_earlier_trials_from_events_or_from_the_history(start: StartJob) -> None:
    first = start()
    first.run(30)
    decisions = first.decisions()
    tried = {d.chosen for d in decisions if d.explored}
    assert tried
    first.analyst.close("running")
    second = start(history=None)  # has the events alone
    second.settings = first.settings
    second.run(12)
    later = second.decisions()[len(decisions) :]
    assert not [d for d in later if d.explored and d.chosen in tried]

    second.analyst.close("running")
    first.membership._client.delete_prefix(first.membership.keys.events)
    third = start()  # has the history alone
    third.settings = first.settings
    third.run(9)
    memory = third.analyst._tuner.memory
    assert memory.decisions[: len(decisions)] == decisions
    assert memory.outcomes
    numbers = [d.decision_id for d in third.decisions()]
    assert min(numbers, default=len(decisions) + 1) > len(decisions), "a number was given twice"
    assert not [d for d in third.decisions() if d.explored and d.chosen in tried]


def test_planner_of_a_pooled_job_tunes_workers_but_leaves_their_number_to_the_brain(
    start: StartJob, client: EtcdClient, keys: Keys
) -> None:
    job = start()
    client.put(keys.plan, encode(PlanRecord(2, "brain", "pool p: starts with 2 workers", True)))
    job.membership.wait_for(lambda view: (view.plan and view.plan.source == "brain") or None, 15.0, "the brain's plan")
    job.settings = Settings(2, 0, 1, 0)
    job.run(24)
    plan = job.membership.view.plan
    assert plan is not None
    assert (plan.source, plan.num_workers, plan.binding) == ("brain", 2, True)
    assert plan.loader_workers  # an input-bound job is faster with some
    newest = job.decisions()[-1]
    assert {c.num_workers for c in newest.candidates} == {1, 2, 3, 4}
    assert newest.current_workers == newest.chosen_workers == 2
    assert "the job's pool decides on workers" in " ".join(d.reason for d in job.decisions())


def test_broken_history_is_reported_once_and_planning_continues(
    start: StartJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"no database at all" * 100)
    with caplog.at_level(logging.WARNING):
        job = start(history=f"sqlite:///{broken}")
        job.run(12)
        job.analyst.close("finished")
    warnings = [r.getMessage() for r in caplog.records if "history" in r.getMessage()]
    assert len(warnings) == 1
    assert str(broken) in warnings[0]
    assert "training continues" in warnings[0]
    assert job.settings != START
    assert broken.read_bytes().startswith(b"no database")


@pytest.mark.parametrize("clock_ahead_s", [-86400.0, 86400.0])
def test_patience_with_a_plan_does_not_follow_its_writers_clock(
    clock_ahead_s: float, start: StartJob, client: EtcdClient, keys: Keys
) -> None:
    job = start()
    plan = PlanRecord(3, "planner", "more", True, created_at=time.time() + clock_ahead_s)
    client.put(keys.plan, encode(plan))
    job.membership.wait_for(lambda view: view.plan == plan or None, 15.0, "the plan")
    profile = window(TRUTH, START, random.Random(1), 0.0, at=time.time())
    writer = job.analyst._plan_writer
    assert writer is not None
    assert writer.is_under_way(profile, 1000.0)
    assert writer.is_under_way(profile, 1000.0 + PATIENCE_WITH_A_PLAN_S - 1.0)
    assert not writer.is_under_way(profile, 1000.0 + PATIENCE_WITH_A_PLAN_S)


def test_own_plan_is_not_judged_before_the_view_shows_it(start: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start()
    behind = job.membership.view
    monkeypatch.setattr(Membership, "view", property(lambda _: behind))
    for number in range(4 * WINDOWS_PER_DECISION):
        profile = window(TRUTH, START, random.Random(number), 0.03, at=time.time())
        job.analyst.submit(dataclasses.replace(profile, cores=job.cores), 1e9, tunable=True)
    eventually(lambda: job.analyst.is_idle, "all windows to be digested", 60.0)
    job.membership.shared.outbox.write()
    (decision,) = job.decisions()
    assert decision.is_change
    plan = job.membership.shared.journal.get(PlanRecord, job.membership.keys.plan).record
    assert plan is not None
    assert plan.decision_id == decision.decision_id


def test_other_ranks_only_publish(start: StartJob) -> None:
    job = start()
    job.run(6, rank=1)
    assert not job.events("profile")
    assert not job.events("decision")
    job.analyst.close("finished")
    history = job.analyst._history._history
    assert history is not None
    assert history.jobs() == []


def test_failed_trial_is_left_without_a_window_or_a_fit(start: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(with_controller=False)  # workers stay
    trial = job.run_until_trial()
    assert trial.chosen == job.settings

    def fit(*_: object, **__: object) -> StepTimeModel:
        raise AssertionError("a fit takes seconds on a busy machine")

    monkeypatch.setattr(StepTimeModel, "fit", fit)
    num_windows = len(job.events("profile"))
    for _ in range(3):
        job.analyst.give_up(trial, 9.0)  # three slow steps in a row
    job.digest()
    plan = job.membership.view.plan
    assert plan is not None
    assert (plan.loader_workers, plan.intra_op_threads) == (START.loader_workers, START.intra_op_threads)
    assert job.analyst.trial is None
    assert "given up" in job.decisions()[-1].reason
    # Its step time is known from now on, to later rank 0s, too.
    assert [e.data["observed_step_time_s"] for e in job.events("outcome")] == [9.0]
    [failed] = job.events("profile")[num_windows:]
    assert (failed.data["step_time_s"], failed.data["intra_op_threads"]) == (9.0, trial.chosen.intra_op_threads)
    job.analyst.give_up(trial, 9.0)
    job.digest()
    assert len(job.events("outcome")) == 1


def test_manual_plan_is_not_overruled_by_a_failed_trial(start: StartJob, client: EtcdClient, keys: Keys) -> None:
    job = start(with_controller=False)
    trial = job.run_until_trial()
    by_hand = PlanRecord(1, "user", "by hand", binding=True, created_at=time.time(), loader_workers=3)
    client.put(keys.plan, encode(by_hand))
    job.membership.wait_for(lambda view: view.plan == by_hand or None, 15.0, "the plan")
    job.analyst.give_up(trial, 9.0)
    job.digest()
    assert job.membership.view.plan == by_hand


def test_worker_that_trains_alone_with_all_cores_learns_that_more_would_be_faster() -> None:
    alone, rng = Analyst(None, TuningConfig(0.001, Objective(), None), float(TRUTH.node_cores)), random.Random(1)
    for at in range(2 * WINDOWS_PER_DECISION):
        profile = window(TRUTH, Settings(1, 0, TRUTH.node_cores, 0), rng, 0.03, at=float(at))
        remaining_samples = 0.0  # the last decision is made at the end of the run
        alone.submit(dataclasses.replace(profile, global_rank=0), remaining_samples)
    decision = alone.close("finished")
    assert decision is not None
    assert decision.chosen_workers > 1
    assert decision.chosen_workers * decision.chosen.intra_op_threads <= TRUTH.node_cores
