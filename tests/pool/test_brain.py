"""A brain and jobs that are only records: their sizes, and kills of a brain at any point."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_dlrover.pool import view as outsiders
from lightning_dlrover.pool.brain import Brain, BrainBusyError, PoolTimeouts, run_brain, snapshot_of
from lightning_dlrover.pool.budget import Resources
from lightning_dlrover.pool.decisions import Rules
from lightning_dlrover.pool.view import PoolKeys, Watch
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdUnavailableError
from lightning_dlrover.rdzv.job.events import DecisionMade, SizeGiven, events_of, record_of
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import AgentRecord, JobRecord, PlanRecord, encode
from lightning_dlrover.report.notify import destination
from tests.support.counted_requests import counted
from tests.support.http_receiver import Receiver
from tests.support.pool_jobs import PooledJobs, decision
from tests.support.waiting import run_until

QUICK = PoolTimeouts(lease_s=5.0, settle_s=0.05, gone_s=0.1)
CORES = 4
RULES = Rules(Resources(float(CORES)))
CURVED = [10.0, 14.0, 16.0, 17.0]
EVERY = 1 if os.environ.get("DLROVER_ALL_FAULTS") else 12
"""Interval between the requests that go wrong."""


@pytest.fixture
def jobs(client: EtcdClient, run_id: str) -> PooledJobs:
    return PooledJobs(client, PoolKeys(run_id, prefix=f"/{run_id}"), CORES)  # without the jobs of other tests


@pytest.fixture
def brain(jobs: PooledJobs, etcd: EmbeddedEtcd) -> Iterator[Brain]:
    with EtcdClient(EtcdConfig(etcd.endpoint)) as client, Brain(client, jobs.pool, RULES, print, QUICK) as made:
        yield made


def live(jobs: PooledJobs, step: Callable[[], object], what: str, found: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Let the brain and all jobs go on until `found` is true."""

    def turn() -> None:
        step()
        jobs.follow()

    run_until(turn, found, what, timeout_s)


def test_first_job_gets_all_and_makes_room_for_the_second(jobs: PooledJobs, brain: Brain) -> None:
    jobs.submit("a", (1, 4))
    live(jobs, brain.step, "a with all cores", lambda: jobs.sizes == {"a": 4})
    jobs.decide("a", CURVED, left_s=100.0)
    jobs.submit("b", (1, 4))
    live(jobs, brain.step, "both", lambda: jobs.sizes["b"] and sum(jobs.sizes.values()) == 4)
    jobs.decide("b", CURVED)
    jobs.end("a")
    live(jobs, brain.step, "b with all cores", lambda: jobs.sizes == {"b": 4})
    plan = jobs.planned("b")
    assert (plan.source, plan.num_workers, plan.binding) == ("brain", 4, True)


def test_growth_waits_until_the_workers_of_others_have_ended(jobs: PooledJobs, brain: Brain) -> None:
    jobs.submit("a", (1, 4))
    live(jobs, brain.step, "a with all cores", lambda: jobs.sizes == {"a": 4})
    jobs.decide("a", CURVED)
    jobs.submit("b", (2, 2))
    for _ in range(5):
        brain.step()
    plan, waits = jobs.plan("a"), jobs.grant("b")
    assert plan is not None
    assert plan.num_workers == 2
    assert waits is not None
    assert (waits.state, waits.place, waits.queued) == ("waiting", 1, 1)
    jobs.follow("a")
    brain.step()
    assert (jobs.sizes["a"], jobs.grant("b")) == (3, waits)
    jobs.follow("a")
    brain.step()
    granted = jobs.granted("b")
    assert (granted.state, granted.num_workers) == ("granted", 2)


def test_size_by_hand_is_kept_and_counted_though_it_exceeds_the_budget(jobs: PooledJobs, brain: Brain) -> None:
    jobs.submit("a", (1, 4))
    live(jobs, brain.step, "a", lambda: jobs.sizes["a"] == 4)
    jobs.set_by_hand("a", 3)
    jobs.submit("b", (1, 4))
    live(jobs, brain.step, "b beside a", lambda: jobs.sizes == {"a": 3, "b": 1})
    jobs.set_by_hand("a", 6)
    jobs.submit("c")
    for _ in range(8):
        brain.step()
        jobs.follow()
    assert jobs.sizes == {"a": 6, "b": 1, "c": 0}
    plan = jobs.planned("a")
    assert plan.source == "user"


def test_job_whose_training_has_ended_is_shown_so_until_its_nodes_have_ended(jobs: PooledJobs, brain: Brain) -> None:
    jobs.submit("a", (1, 2))
    live(jobs, brain.step, "a", lambda: jobs.sizes == {"a": 2})
    jobs.client.put(jobs.keys("a").job, encode(JobRecord("finished", True, 1, 2, "1")))
    [shown] = snapshot_of(Watch(jobs.client, jobs.pool).look(time.time()), time.time())["jobs"]
    assert (shown["workers"], shown["state"]) == (2, "has finished, its nodes end")


def test_job_outside_of_all_pools_takes_part_of_the_budget_and_is_left_alone(jobs: PooledJobs, brain: Brain) -> None:
    outside = jobs.keys("outside")
    plan = PlanRecord(2, "planner", "two", True, node_memory_mb=512)
    jobs.client.put(outside.plan, encode(plan))
    jobs.client.put(outside.agents + "one", encode(AgentRecord("one", "host", 1, 2, "running")))
    jobs.submit("a", (1, 4))
    live(jobs, brain.step, "a beside it", lambda: jobs.sizes == {"a": 2})
    for _ in range(3):
        brain.step()
        jobs.follow()
    assert jobs.sizes == {"a": 2}
    assert readable(PlanRecord, jobs.client.get(outside.plan)) == plan
    snapshot = snapshot_of(Watch(jobs.client, jobs.pool).look(time.time()), time.time())
    shown = {job["job"]: (job["workers"], job["has"], job["state"]) for job in snapshot["jobs"]}
    assert shown[outside.run_id] == (2, "2 cores, 0.5 GiB", "runs outside of all pools")
    assert snapshot["used"] == "4 cores, 0.5 GiB"
    jobs.client.delete_prefix(outside.root)
    jobs.decide("a", CURVED)
    live(jobs, brain.step, "a with all cores", lambda: jobs.sizes == {"a": 4})


def test_jobs_of_other_pools_and_with_the_pool_only_all_others_are_not_counted(jobs: PooledJobs) -> None:
    other = PooledJobs(jobs.client, PoolKeys("other", jobs.pool.prefix), CORES)
    other.submit("b", (1, 2))
    jobs.client.put(other.keys("b").agents + "one", encode(AgentRecord("one", "host", 1, 2, "running")))
    outside = jobs.keys("outside")
    jobs.client.put(outside.agents + "one", encode(AgentRecord("one", "host", 1, 1, "running")))
    assert set(Watch(jobs.client, jobs.pool, counts_others=True).look(time.time()).jobs) == {outside.run_id}
    assert not Watch(jobs.client, jobs.pool, counts_others=False).look(time.time()).jobs


def test_new_job_outside_is_found_though_many_have_ended(jobs: PooledJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outsiders, "FOLDERS_PER_LOOK", 5)
    for number in range(23):
        jobs.client.put(jobs.keys(f"ended{number:02}").events + "1", b"{}")
    watch = Watch(jobs.client, jobs.pool, counts_others=True)
    assert not watch.look(time.time()).jobs
    for name in ("ended03", "ended22"):
        jobs.client.put(jobs.keys(name).agents + "one", encode(AgentRecord("one", "host", 1, 1, "running")))
    for _ in range(6):
        view = watch.look(time.time())
    assert set(view.jobs) == {jobs.keys("ended03").run_id, jobs.keys("ended22").run_id}


def test_look_at_many_jobs_costs_as_many_requests_as_one_at_few(jobs: PooledJobs) -> None:
    def fill(kind: str, first: int, end: int) -> None:
        for number in range(first, end):
            name = f"{kind}{number:03}"
            if kind == "in":
                jobs.submit(name)
            jobs.client.put(jobs.keys(name).agents + "one", encode(AgentRecord("one", "host", 1, 1, "running")))
            Journal(jobs.client, jobs.keys(name)).append(record_of(DecisionMade(decision(CURVED).to_data()), ""), "test")

    counts = []
    for first, end in ((0, 2), (2, 40)):
        fill("in", first, end)
        fill("outside", first, end)
        with counted(jobs.client) as requests:
            view = Watch(jobs.client, jobs.pool, counts_others=True).look(time.time())
        counts.append(len(requests))
        assert len(view.jobs) == 2 * end
        assert all(seen.job.alive == 1 and len(seen.job.rates) == len(CURVED) for seen in view.jobs.values())
    # The pool, live keys and events of both kinds, and the list of folders: two requests, the last of which finds nothing.
    assert counts == [7, 7]


def test_job_that_can_never_start_is_refused_and_passed(jobs: PooledJobs, brain: Brain) -> None:
    jobs.submit("large", (5, 8))
    jobs.submit("small")
    live(jobs, brain.step, "the small one", lambda: jobs.sizes["small"])
    grant = jobs.granted("large")
    assert (grant.state, grant.reason) == ("refused", "its 5 workers need 5 cores, and the whole pool has 4 cores")


def test_place_of_a_killed_run_is_free_only_when_its_agents_are_gone(jobs: PooledJobs, brain: Brain) -> None:
    jobs.submit("a", (4, 4))
    live(jobs, brain.step, "a", lambda: jobs.sizes["a"] == 4)
    jobs.submit("b")
    jobs.kill("a")
    deadline = time.monotonic() + 5 * QUICK.gone_s
    while time.monotonic() < deadline:
        brain.step()
        jobs.follow("b")
    assert jobs.sizes == {"a": 4, "b": 0}
    jobs.lose_agents("a")
    del jobs.agents["a"]
    live(jobs, brain.step, "b", lambda: jobs.sizes["b"])


def test_planner_of_a_job_cannot_keep_a_size_of_its_own(jobs: PooledJobs, brain: Brain, client: EtcdClient) -> None:
    jobs.submit("a", (1, 2))
    live(jobs, brain.step, "a", lambda: jobs.sizes["a"] == 2)
    client.put(jobs.keys("a").plan, encode(PlanRecord(1, "planner", "1 would do", True, loader_workers=3)))
    brain.step()
    plan = jobs.planned("a")
    assert (plan.num_workers, plan.source, plan.loader_workers) == (2, "brain", 3)


def test_each_change_is_on_record_with_its_prediction(jobs: PooledJobs, brain: Brain, client: EtcdClient) -> None:
    jobs.submit("a", (1, 4))
    live(jobs, brain.step, "a", lambda: jobs.sizes["a"] == 4)
    jobs.decide("a", CURVED)
    jobs.submit("b", (3, 3))
    live(jobs, brain.step, "b", lambda: jobs.sizes["b"] == 3)
    [(record, given)] = events_of(Journal(client, jobs.keys("a")).events(), SizeGiven)
    assert (given.workers_before, given.workers_after, given.others) == (4, 1, {jobs.keys("b").run_id: [0, 3]})
    assert (given.samples_per_s_before, given.samples_per_s_after) == (17.0, 10.0)
    assert "4 -> 1 workers: 0.59 times the throughput" in record.text


def test_second_brain_is_refused_and_a_deposed_one_changes_nothing(
    jobs: PooledJobs, brain: Brain, etcd: EmbeddedEtcd, client: EtcdClient
) -> None:
    with EtcdClient(EtcdConfig(etcd.endpoint)) as other:
        with pytest.raises(BrainBusyError, match="decides on pool"):
            Brain(other, jobs.pool, RULES, print, QUICK)
        jobs.submit("a")
        client.delete(jobs.pool.brain)  # like the expiry of its lease does
        with Brain(other, jobs.pool, RULES, print, QUICK) as successor:
            brain.step()
            assert jobs.grant("a") is None
            successor.step()
            assert jobs.grant("a") is not None


class Killed(BaseException):
    """Simulates `kill -9`, as the killed code experiences it."""


class Faulty:
    """Brains of one pool; requests to etcd are numbered over all of them, and one of them goes wrong.

    Args:
        at: number of that request, counted twice: before it is carried out, and afterwards.
        error: `Killed`, or an etcd that does not answer.
        is_late: the request is carried out only after the next write of the pool, if it is still allowed then.
    """

    def __init__(self, etcd: EmbeddedEtcd, pool: PoolKeys, at: int, error: type[BaseException], is_late: bool = False) -> None:
        self.etcd, self.pool, self.at, self.error, self.is_late = etcd, pool, at, error, is_late
        self.num_requests = 0
        self.has_failed = False
        self.late: Callable[[], object] | None = None
        self.client: EtcdClient | None = None
        self.brain: Brain | None = None

    def step(self) -> None:
        try:
            if self.brain is None:
                self.client = EtcdClient(EtcdConfig(self.etcd.endpoint))
                self.client.txn = self._around(self.client.txn)  # type: ignore[method-assign]
                self.client.get_prefix = self._around(self.client.get_prefix)  # type: ignore[method-assign]
                self.client.read_prefixes = self._around(self.client.read_prefixes)  # type: ignore[method-assign]
                self.brain = Brain(self.client, self.pool, RULES, print, QUICK)
            self.brain.step()
        except Killed:
            self.bury()
        except EtcdUnavailableError:
            if self.brain is not None:
                self.brain.was_cut_off()

    def bury(self) -> None:
        """Remove the key of a killed brain, as the expiry of its lease does."""
        if self.client is not None:
            self.client.close()
        with EtcdClient(EtcdConfig(self.etcd.endpoint)) as hand:
            hand.delete(self.pool.brain)
        self.client = self.brain = None

    def close(self) -> None:
        self.at = 0
        if self.brain is not None:
            self.brain.close()
        if self.client is not None:
            self.client.close()

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.late is not None and function.__name__ == "txn":
                late, self.late = self.late, None
                result = function(*arguments, **options)
                late()
                return result
            self._count(lambda: function(*arguments, **options))
            result = function(*arguments, **options)
            self._count(lambda: None)
            return result

        return call

    def _count(self, request: Callable[[], object]) -> None:
        self.num_requests += 1
        if self.num_requests == self.at:
            self.has_failed = True
            if self.is_late:
                self.late = request
            raise self.error(f"at request {self.at}")


def life(jobs: PooledJobs, step: Callable[[], object]) -> None:
    """Jobs come, learn, are resized by hand, are killed and end; the budget is checked at each change."""
    jobs.submit("a", (1, 4))
    live(jobs, step, "a", lambda: jobs.sizes["a"] == 4)
    jobs.decide("a", CURVED)
    jobs.submit("b", (2, 4))
    live(jobs, step, "b", lambda: jobs.sizes["b"] >= 2 and sum(jobs.sizes.values()) == 4)
    jobs.decide("b", [10.0, 12.0, 13.0, 14.0])
    jobs.submit("c", (1, 1))
    live(jobs, step, "c", lambda: jobs.sizes["c"] == 1)
    jobs.kill("b")
    jobs.lose_agents("b")
    del jobs.agents["b"]
    live(jobs, step, "a with what b had", lambda: jobs.sizes == {"a": 3, "c": 1})
    jobs.end("a")
    jobs.submit("d", (3, 3))
    live(jobs, step, "d", lambda: jobs.sizes == {"c": 1, "d": 3})
    jobs.end("d")
    jobs.end("c")
    live(jobs, step, "an empty pool", lambda: not jobs.client.get_prefix(jobs.pool.grants)[1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["killed", "no answer", "late"])
def test_budget_is_kept_and_every_job_served_whichever_request_goes_wrong(
    etcd: EmbeddedEtcd, client: EtcdClient, run_id: str, kind: str
) -> None:
    error = Killed if kind == "killed" else EtcdUnavailableError
    at, num_requests = 0, 1
    while at <= num_requests:
        pool = PoolKeys(f"{run_id}-{at}", prefix=f"/{run_id}-{at}")
        brains = Faulty(etcd, pool, at, error, is_late=kind == "late")
        try:
            life(PooledJobs(client, pool, CORES), brains.step)
        finally:
            brains.close()
        assert brains.has_failed or not at or at > brains.num_requests
        num_requests = min(num_requests, brains.num_requests) if at else brains.num_requests
        at += EVERY if at else 1


def test_changes_of_a_pool_are_notified_by_whichever_brain_decides(jobs: PooledJobs, etcd: EmbeddedEtcd) -> None:
    with Receiver() as receiver, EtcdClient(EtcdConfig(etcd.endpoint)) as client:
        to = [destination(receiver.url)]

        def until(what: str, found: Callable[[], object]) -> None:
            stop = threading.Event()
            arguments = (client, jobs.pool, RULES, 0.05, print, stop, QUICK, to)
            brain = threading.Thread(target=run_brain, args=arguments, daemon=True)
            brain.start()
            try:
                run_until(jobs.follow, found, what, 20.0)
            finally:
                stop.set()
                brain.join(20.0)

        jobs.submit("a", (1, 4))
        jobs.submit("huge", (9, 9))
        until("two notifications", lambda: len(receiver.documents) == 2)
        jobs.decide("a", CURVED, left_s=100.0)
        jobs.submit("b", (1, 4))
        until("both jobs", lambda: jobs.sizes["b"] and sum(jobs.sizes.values()) == 4 and len(receiver.documents) > 3)
        jobs.end("a")
        until("the end of a", lambda: "-a was stopped: it was stopped" in texts(receiver))
        found = [
            (each["job"].rpartition("-")[2], each["event"], each["workers_before"], each["workers"])
            for each in receiver.documents
        ]
    assert sorted(found[:2]) == [("a", "started", 0, 4), ("huge", "refused", 0, 0)]
    [smaller] = [after for job, event, _, after in found if (job, event) == ("a", "shrunk")]
    assert smaller is not None
    assert ("b", "started", 0, 4 - smaller) in found
    assert {each["source"] for each in receiver.documents} == {"pool"}
    assert len({each["id"] for each in receiver.documents}) == len(receiver.documents)


def texts(receiver: Receiver) -> str:
    return "\n".join(each["text"] for each in receiver.documents)


def test_without_notifications_a_pool_has_no_history(jobs: PooledJobs, brain: Brain, client: EtcdClient) -> None:
    jobs.submit("a", (1, 4))
    live(jobs, brain.step, "a with all cores", lambda: jobs.sizes == {"a": 4})
    assert client.get_prefix(jobs.pool.events)[1] == []
