"""A controller that is killed anywhere: the next one continues, no node is leaked and none is started twice.

Controllers are killed before and after every request to etcd and to the scheduler, while a job adds, drains, replaces, loses
and cancels nodes. The scheduler also fails at each of them. It keeps its state here and outlives the controllers. Its nodes
behave like an agent with one worker.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from lightning_dlrover.components.control.controller import Controller
from lightning_dlrover.components.control.reconcile import CancelNode, FailurePolicy, FinishJob, Limits
from lightning_dlrover.components.targets.target import NodeSize, TargetError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdUnavailableError
from lightning_dlrover.rdzv.job.records import (
    AgentRecord,
    DrainRecord,
    EndNotice,
    JobRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    PlanRecord,
    RoundRecord,
    WorkerRecord,
    decode,
    encode,
)
from tests.support.fake_target import FakeTarget
from tests.support.stored import entry_at, stored
from tests.support.waiting import TooLateError, run_until

QUICK = FailurePolicy(
    first_backoff_s=0.01,
    max_backoff_s=0.02,
    max_long_backoff_s=0.02,
    first_refusal_s=0.01,
    max_refusal_s=0.02,
    exit_s=5.0,
    surplus_s=5.0,
    settle_s=0.1,
    submit_s=0.1,
    first_cancel_s=0.1,
    cancel_s=0.5,
)
SIZE = NodeSize(1, 1024)
EVERY = 1 if os.environ.get("DLROVER_ALL_FAULTS") else 3
# Interval between the tested requests of lives that take more than a second.
EVERY_LONG = 1 if os.environ.get("DLROVER_ALL_FAULTS") else 20


class Killed(BaseException):
    """Simulates `kill -9`, as the killed code experiences it."""


@dataclass
class Fault:
    """Kills, or fails, at the n-th request, before or after its execution."""

    at: int = 0
    num_requests: int = 0
    error: type[BaseException] = Killed

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._count()
            result = function(*arguments, **options)
            self._count()
            return result

        return call

    def _count(self) -> None:
        self.num_requests += 1
        if self.num_requests == self.at:
            raise self.error(f"at request {self.at}")


class Job:
    """A job with controllers that may be killed; the test writes the records of its nodes and workers."""

    def __init__(self, etcd: EmbeddedEtcd, keys: Keys, fault: Fault, folder: Path) -> None:
        self.etcd, self.keys, self.fault = etcd, keys, fault
        self.policy = QUICK
        self.silent: set[str] = set()  # nodes without started workers
        self.registers = True  # whether new nodes' workers register
        self.hand = EtcdClient(EtcdConfig(etcd.endpoint))
        # The scheduler is a separate process, like Slurm's, and keeps its nodes when a controller is killed.
        self.target = FakeTarget(folder, outlives_controller=True)
        self.target.start = fault.around(self.target.start)  # type: ignore[method-assign]
        self.target.cancel = fault.around(self.target.cancel)  # type: ignore[method-assign]
        self.controller: Controller | None = None
        self.client: EtcdClient | None = None
        self.end: FinishJob | None = None
        self.num_kills = 0
        self.registered: set[str] = set()
        self.members: list[str] = []
        self.round_number = 0

    def close(self) -> None:
        self.fault.at = 0
        if self.controller is not None:
            self.controller.close()
        if self.client is not None:
            self.client.close()
        self.hand.close()

    def step(self) -> None:
        """Make one step of a controller, or of its successor if it is killed."""
        try:
            if self.controller is None:
                self.client = EtcdClient(EtcdConfig(self.etcd.endpoint))
                for request in ("txn", "put") if self.fault.error is Killed else ():
                    setattr(self.client, request, self.fault.around(getattr(self.client, request)))
                limits = Limits(1, 3, SIZE, NodeSize(1, 8 * SIZE.memory_mb))
                self.controller = Controller(self.client, self.keys, self.target, limits, show=print, policy=self.policy)
            self.end = self.controller.step()
            self.controller.wait(0.003)
        except Killed:
            self.bury()
            self.num_kills += 1

    def bury(self) -> None:
        """Remove the records of a killed controller, as the expiry of its lease would."""
        if self.controller is not None:
            self.controller._mirror.close()
            self.controller._tenure.lease.close()
        if self.client is not None:
            self.client.close()
        self.hand.delete(self.keys.controller)
        self.controller = self.client = None

    def run_until(self, what: str, found: Callable[[], object], timeout_s: float = 10.0) -> None:
        def step() -> None:
            self.live()
            self.step()
            names = self.target.submissions
            assert len(set(names)) == len(names), f"a node was started twice: {names}"

        try:
            run_until(step, found, what, timeout_s)
        except TooLateError as error:
            raise AssertionError(f"{error}: {self.target.nodes}, {self.members}") from None

    def training(self, num_workers: int = 1) -> Job:
        """Plan this many workers, and wait until they train; return the job."""
        if num_workers > 1:
            self.plan(num_workers)
        self.run_until(f"{num_workers} workers", self.trains_with(num_workers))
        return self

    def run_to_its_end(self) -> FinishJob:
        self.run_until("the end", lambda: self.end is not None)
        assert self.end is not None
        return self.end

    def disown(self) -> Controller:
        """Let the controller's lease expire in etcd without its knowledge. The next step starts a successor."""
        former, self.controller = self.controller, None
        assert former is not None
        former._tenure.lease.revoke()
        return former

    def live(self) -> None:
        """Act as the workers: register, form rounds as the plan requires, leave."""
        running = self.target.living
        if not self.registers:
            self.silent |= set(running) - self.registered
        living = [node for node in running if node not in self.silent]
        for node in [node for node in living if node not in self.registered]:
            agent = AgentRecord(f"agent-{node}", "h", 1, 1, "running", {"node": node})
            worker = WorkerRecord(f"worker-{node}", agent.agent_id, "h", 1, 0, "127.0.0.1", 1, "active", 1)
            self.hand.put(self.keys.agents + agent.agent_id, encode(agent))
            self.hand.put(self.keys.workers + worker.worker_id, encode(worker))
            self.registered.add(node)
        for node in [node for node in self.registered if node not in living]:
            self.hand.delete(f"{self.keys.workers}worker-{node}")
            self.hand.delete(f"{self.keys.agents}agent-{node}")
            self.registered.discard(node)
        entries = {e.key.removeprefix(self.keys.drains + "worker-"): e for e in self.hand.get_prefix(self.keys.drains)[1]}
        drains = {node: decode(DrainRecord, entry.value, entry.key) for node, entry in entries.items()}
        entry = self.hand.get(self.keys.plan)
        wanted = decode(PlanRecord, entry.value, entry.key).num_workers if entry else 1
        stay = [node for node in living if node not in drains]
        waiting = [node for node, drain in drains.items() if drain.once_replaced and node in living and len(stay) < wanted]
        members = [*stay[:wanted], *waiting]
        for node in living:
            if node not in members and (node in self.members or node in drains):
                self.leave(node)
        if members and members != self.members:
            self.round_number += 1
            record = RoundRecord(self.round_number, [f"worker-{node}" for node in members], "", "grow", True)
            self.hand.put(self.keys.round, encode(record))
            self.hand.put(self.keys.job, encode(JobRecord("training", True, 1, 3, "0")))
            self.members = members

    def leave(self, node: str, node_ends: bool = True) -> None:
        self.hand.delete(f"{self.keys.workers}worker-{node}")
        self.hand.delete(f"{self.keys.drains}worker-{node}")
        self.hand.delete(f"{self.keys.agents}agent-{node}")
        self.registered.discard(node)
        if node_ends:
            self.target.nodes[node] = "succeeded"
        else:
            self.silent.add(node)

    def plan(self, num_workers: int) -> None:
        self.hand.put(self.keys.plan, encode(PlanRecord(num_workers, "user", "", True)))

    def stop(self, why: str) -> None:
        """Stop the job as `dlrover cancel` does."""
        nodes = dataclasses.replace(stored(self.hand, NodesRecord, self.keys.nodes), stop=why)
        self.hand.put(self.keys.nodes, encode(nodes))

    def drain(self, node: str, once_replaced: bool) -> None:
        self.hand.put(f"{self.keys.drains}worker-{node}", encode(DrainRecord(f"worker-{node}", "", once_replaced)))

    def trains_with(self, num_workers: int, without: str = "") -> Callable[[], bool]:
        def look() -> bool:
            return len(self.members) == len(self.target.living) == num_workers and without not in self.members

        return look

    def records(self) -> dict[str, NodeRecord]:
        _, entries = self.hand.get_prefix(self.keys.each_node)
        return {e.key.removeprefix(self.keys.each_node): decode(NodeRecord, e.value, e.key) for e in entries}


def add_drain_replace_and_lose(job: Job) -> None:
    """A job's whole life, after which no node is left."""
    job.run_until("a worker", job.trains_with(1))
    job.training(2)
    drained = job.members[1]
    job.drain(drained, once_replaced=False)
    job.run_until("another one in place of the drained", job.trains_with(2, without=drained))
    replaced = job.members[0]
    job.drain(replaced, once_replaced=True)
    job.run_until("another one in place of the replaced", job.trains_with(2, without=replaced))
    killed = job.members[1]
    job.target.nodes[killed] = "failed"
    job.run_until("another one in place of the killed", job.trains_with(2, without=killed))
    starved = job.members[0]
    job.target.out_of_memory.add(starved)
    job.target.nodes[starved] = "failed"

    def all_are_larger() -> bool:
        sizes = [job.target.sizes[node].memory_mb for node in job.members]
        return sizes == [2 * SIZE.memory_mb] * 2

    job.run_until("two larger nodes", lambda: job.trains_with(2)() and all_are_larger())
    job.plan(1)
    job.run_until("one worker", job.trains_with(1))
    job.hand.put(job.keys.job, encode(JobRecord("finished", True, 1, 3, "0")))
    job.leave(job.members[0])
    assert job.run_to_its_end().exit_code == 0
    assert job.controller is not None
    job.controller.close()
    assert job.target.living == []


def cancel_what_is_not_wanted(job: Job) -> None:
    """A job with nodes that do not end by themselves. Afterwards no node may be left."""
    job.policy = dataclasses.replace(QUICK, exit_s=0.4, surplus_s=0.4, come_s=1.0)
    job.training(2)
    wanted_back = job.members[0]
    job.target.notices = {wanted_back: EndNotice("fake")}
    job.run_until("another one in place of the one that is wanted back", job.trains_with(2, without=wanted_back))
    hung = job.members[1]
    job.leave(hung, node_ends=False)
    job.run_until("another one in place of the one that hangs", job.trains_with(2, without=hung))
    job.registers = False
    job.plan(3)
    job.run_until("a third node", lambda: len(job.target.living) == 3)
    job.registers = True
    job.plan(2)
    job.run_until("the end of the one that there is no room for", job.trains_with(2))
    job.target.submit("node90")
    job.run_until("the end of the one that nobody has asked for", job.trains_with(2, without="node90"))
    job.stop("enough")
    assert job.run_to_its_end() == FinishJob(1, "enough")
    assert job.target.living == []


@pytest.fixture
def make_job(etcd: EmbeddedEtcd, run_id: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Job]:
    def make(kill_at: int = 0, error: type[BaseException] = Killed) -> Job:
        job = Job(etcd, Keys(f"{run_id}-{kill_at}"), Fault(kill_at, error=error), tmp_path)
        request.addfinalizer(job.close)
        return job

    return make


MakeJob = Callable[..., Job]


@pytest.mark.timeout(600 if EVERY == 1 else 180)
@pytest.mark.parametrize(
    "life, num_nodes, every", [(add_drain_replace_and_lose, 7, EVERY), (cancel_what_is_not_wanted, 6, EVERY_LONG)]
)
def test_a_controller_may_be_killed_before_and_after_every_request(
    make_job: MakeJob, life: Callable[[Job], None], num_nodes: int, every: int
) -> None:
    whole = make_job()
    life(whole)
    num_requests = whole.fault.num_requests
    assert len(whole.target.nodes) == num_nodes
    assert num_requests > 40
    for kill_at in range(1, num_requests, every):
        job = make_job(kill_at)
        life(job)
        # One name may be lost between its record and its request.
        assert len(job.target.nodes) == num_nodes, f"killed at request {kill_at} of {num_requests}"
        assert job.num_kills == 1


@pytest.mark.timeout(600 if EVERY == 1 else 180)
@pytest.mark.parametrize("life, every", [(add_drain_replace_and_lose, EVERY), (cancel_what_is_not_wanted, min(EVERY_LONG, 7))])
def test_a_scheduler_may_give_no_answer_before_and_after_every_request(
    make_job: MakeJob, life: Callable[[Job], None], every: int
) -> None:
    whole = make_job(error=TargetError)
    life(whole)
    num_requests = whole.fault.num_requests
    assert num_requests >= 10
    for fail_at in range(1, num_requests + 1, every):
        life(make_job(fail_at, TargetError))


def test_next_controller_takes_over_the_nodes_of_a_killed_one(make_job: MakeJob) -> None:
    job = make_job().training(2)
    job.bury()
    for _ in range(20):
        job.live()
        job.step()
    assert sorted(job.target.nodes) == ["node1", "node2"]
    assert job.trains_with(2)()


def test_node_whose_start_was_never_confirmed_is_found(make_job: MakeJob) -> None:
    job = make_job()
    job.target.loses_requests = True
    job.run_until("a lost request", lambda: job.target.late)
    job.target.deliver()
    job.run_until("a worker", job.trains_with(1))
    assert list(job.target.nodes) == ["node1"]
    assert job.records()["node1"].handle == "1/node1"


def test_a_node_that_comes_after_it_was_given_up_is_ended(make_job: MakeJob) -> None:
    job = make_job()
    job.target.loses_requests = True
    job.run_until("a lost request", lambda: job.target.late)
    job.target.loses_requests = False
    job.run_until("another node", job.trains_with(1))
    assert job.members == ["node2"]
    job.target.deliver()
    job.run_until("the end of the late one", lambda: job.target.nodes["node1"] == "failed")
    job.run_until("calm", job.trains_with(1))
    assert job.members == ["node2"]


def test_a_node_that_was_to_end_when_the_controller_was_killed_ends(make_job: MakeJob) -> None:
    job = make_job().training()
    job.target.answers = False
    assert job.controller is not None
    job.controller._cancellations.cancel(["node1"])
    job.bury()
    assert job.records()["node1"].cancelled
    assert job.target.living == ["node1"]
    job.target.answers = True
    job.run_until("its end, and another one", job.trains_with(1, without="node1"))


def test_reclaimed_node_is_replaced_before_it_leaves(make_job: MakeJob) -> None:
    job = make_job().training()
    job.target.notices = {"node1": EndNotice("fake")}
    rounds = job.round_number
    job.run_until("another one in its place", job.trains_with(1, without="node1"))
    assert job.members == ["node2"]
    assert job.target.nodes["node1"] == "succeeded"
    assert job.round_number == rounds + 1


@pytest.mark.parametrize("change", ["replace", "shrink", "finish"])
def test_no_node_is_added_for_one_whose_planned_end_etcd_shows_late(make_job: MakeJob, change: str) -> None:
    """The scheduler reports the node's end while the controller's mirror still shows the worker, the plan and the job."""
    job = make_job().training(2)
    if change == "replace":
        job.drain("node1", once_replaced=True)
        job.run_until("a third node", lambda: len(job.target.living) == 3)
    assert job.controller is not None
    mirror = job.controller._mirror
    apply, may_apply = mirror._apply, threading.Event()
    mirror._apply = lambda events: (may_apply.wait(), apply(events))[1]  # type: ignore[method-assign]
    num_nodes = len(job.target.nodes)
    if change == "shrink":
        job.plan(1)
    if change == "finish":
        job.hand.put(job.keys.job, encode(JobRecord("finished", True, 1, 3, "0")))
        for node in job.members:
            job.leave(node)
    else:
        job.live()
    began = time.monotonic()
    while time.monotonic() - began < 4 * QUICK.settle_s:
        job.step()
    assert job.end is None
    assert len(job.target.nodes) == num_nodes
    may_apply.set()
    if change == "finish":
        assert job.run_to_its_end() == FinishJob(0, "the job has finished", is_trained=True)
    else:
        job.run_until("calm", job.trains_with(1 if change == "shrink" else 2, without="node1" if change == "replace" else ""))
    assert len(job.target.nodes) == num_nodes


def test_nodes_are_left_as_they_are_while_the_scheduler_does_not_answer(make_job: MakeJob) -> None:
    job = make_job().training(2)
    job.target.answers = False
    for _ in range(20):
        job.step()
    job.target.answers = True
    for _ in range(20):
        job.step()
    assert len(job.target.nodes) == 2


def test_full_scheduler_is_asked_again_while_others_train(make_job: MakeJob) -> None:
    job = make_job().training()
    job.target.refuses = "quota exceeded"
    job.plan(2)
    for _ in range(30):
        job.live()
        job.step()
    assert job.end is None
    job.target.refuses = ""
    job.run_until("the second worker", job.trains_with(2))


def test_refused_cancellation_is_repeated_ever_more_rarely_and_reported_once(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job()
    job.policy = dataclasses.replace(QUICK, first_cancel_s=0.1, cancel_s=60.0)
    job.run_until("a worker", job.trains_with(1))
    job.target.answers = False
    assert job.controller is not None
    job.target.num_cancels = 0
    job.controller._cancellations.cancel(["node1"])
    began = time.monotonic()
    while time.monotonic() - began < 0.6:
        job.controller._cancellations.repeat()
        time.sleep(0.001)
    assert job.target.num_cancels == 3  # after 0, 0.1 and 0.3 s; the next one after 0.7 s
    assert caplog.text.count("node1 could not be ended") == 1
    job.target.answers = True
    job.run_until("its end, and another one", job.trains_with(1, without="node1"))


MALFORMED = ("", "/", "x", "--user=me/node1", "1/node2", "7", "1/node1/", "../../1/node1", "1 2/node1")


@pytest.mark.parametrize("state", ["asked", "started", "ended"])
def test_malformed_handle_in_a_record_is_ignored(
    make_job: MakeJob, state: Literal["asked", "started", "ended"], caplog: pytest.LogCaptureFixture
) -> None:
    jobs = {handle: make_job(-number) for number, handle in enumerate(MALFORMED)}  # jobs of their own names, without a fault
    with ThreadPoolExecutor(len(MALFORMED)) as pool:  # they mostly wait
        for ended in [pool.submit(ignore_malformed_handle, job, handle, state) for handle, job in jobs.items()]:
            ended.result()
    for handle, job in jobs.items():
        told = [line for line in caplog.messages if job.keys.run_id in line and "ignored" in line]
        assert any(repr(handle) in line for line in told) == bool(handle), f"{handle!r}: {told}"


def ignore_malformed_handle(job: Job, handle: str, state: Literal["asked", "started", "ended"]) -> None:
    """Give a job's nodes records with this handle. The next controller finds the living one by its name."""
    job.run_until("a worker", job.trains_with(1))
    job.bury()
    record = dataclasses.replace(job.records()["node1"], handle=handle, state=state)
    job.hand.put(job.keys.each_node + "node1", encode(record))
    job.hand.put(job.keys.each_node + "../node2", encode(record))
    ended = dataclasses.replace(record, state="ended", outcome="failed", ended_at=time.time())
    job.hand.put(job.keys.each_node + "node3", encode(ended))
    job.training(2)
    if state != "ended":
        assert job.members[0] == "node1"


def test_replaced_controller_leaves_the_nodes_alone(make_job: MakeJob) -> None:
    job = make_job().training()
    former = job.disown()
    former._tenure.lease.lost.set()
    job.run_until("the next controller's first step", lambda: job.controller is not None)
    job.plan(3)
    former._act([], SIZE)
    assert not former._add(SIZE)  # the former controller would not have noticed yet
    former.end_nodes()
    former.close()
    job.run_until("three workers", job.trains_with(3))
    assert sorted(job.target.nodes) == ["node1", "node2", "node3"]


def test_resumed_old_controller_ends_no_node_of_its_successor(make_job: MakeJob) -> None:
    job = make_job().training()
    former = job.disown()
    job.training(2)
    assert not former._tenure.lease.lost.is_set()
    for _ in range(3):
        former.step()  # detects a node that it has not requested
        time.sleep(0.05)
    former._act([CancelNode("node1", "it would not know better")], SIZE)
    former.end_nodes()
    former.close()
    assert job.trains_with(2)()


def test_resumed_old_controller_does_not_fail_its_successors_job(make_job: MakeJob) -> None:
    job = make_job().training()
    former = job.disown()
    job.run_until("the next controller's first step", lambda: job.controller is not None)
    assert former._act([FinishJob(1, "all nodes seemed to have failed")], SIZE) is None
    assert stored(job.hand, JobRecord, job.keys.job).phase == "training"
    assert job.hand.get_prefix(job.keys.events)[1] == []
    former.close()
    assert job.controller is not None
    assert job.controller._act([FinishJob(1, "all nodes have failed")], SIZE) == FinishJob(1, "all nodes have failed")
    assert stored(job.hand, JobRecord, job.keys.job).phase == "failed"


@pytest.mark.parametrize("lost", [("txn",), ("get",), ("get", "revoke")])
def test_controller_acts_again_after_lost_answers_about_its_key(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    job = make_job().training()
    controller, client = job.controller, job.client
    assert controller is not None
    assert client is not None
    controller._tenure.lease.revoke()
    controller._tenure.lease.lost.set()
    for name in lost:
        lose_one_answer(client, name, job.keys.controller, monkeypatch)
    job.training(2)
    assert controller is job.controller
    entry = entry_at(job.hand, job.keys.controller)
    assert entry.lease_id == controller._tenure.lease.id


def lose_one_answer(client: EtcdClient, name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the first request to etcd after the key exists. A transaction is executed all the same."""
    owner: Any = client.leases if name == "revoke" else client
    request, get = getattr(owner, name), client.get
    is_lost = False

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal is_lost
        result = request(*arguments, **options) if name == "txn" else None
        if not is_lost and get(key) is not None:
            is_lost = True
            raise EtcdUnavailableError("no answer")
        return result if name == "txn" else request(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def test_job_does_not_change_its_target_while_nodes_may_live(make_job: MakeJob) -> None:
    job = make_job().training()
    job.bury()
    other = job.target.successor()
    other.name = "other"
    with pytest.raises(ValueError, match=r"has nodes on fake \(node1\); continue it there \(--target fake, and what"):
        Controller(job.hand, job.keys, other, Limits(1, 3))
    assert job.hand.get(job.keys.controller) is None


def test_cancelled_job_ends_with_all_its_nodes(make_job: MakeJob) -> None:
    job = make_job().training(2)
    job.stop("enough")
    assert job.run_to_its_end() == FinishJob(1, "enough")
    assert job.target.living == []


def test_a_job_has_not_failed_before_its_nodes_have_ended(make_job: MakeJob) -> None:
    """In a failed job no worker can hand over and leave."""
    job = make_job().training()
    job.target.ends_at_once = False
    job.stop("enough")
    job.run_until("the node's cancellation", lambda: job.records()["node1"].cancelled)
    for _ in range(10):
        job.step()
    assert job.end is None
    job.leave("node1")
    job.run_to_its_end()
