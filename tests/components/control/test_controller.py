"""The controller against a real etcd and nodes that are only records: each appears as a torchrun with one worker."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.components.control.controller import Controller
from lightning_dlrover.components.control.nodes import MAX_REFUSED, ControllerBusyError
from lightning_dlrover.components.control.reconcile import FailurePolicy, FinishJob, Limits
from lightning_dlrover.components.targets.target import ANY_SIZE, NodeSize, NotTakenError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdUnavailableError, KeyValue
from lightning_dlrover.rdzv.job.records import (
    AgentRecord,
    CheckpointRecord,
    ControllerRecord,
    DrainRecord,
    EventRecord,
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
from tests.support.stored import stored
from tests.support.waiting import run_until

QUICK = FailurePolicy(
    first_backoff_s=0.01,
    max_backoff_s=0.02,
    max_long_backoff_s=0.02,
    first_refusal_s=0.01,
    max_refusal_s=0.02,
    exit_s=0.3,
    surplus_s=0.3,
    register_s=0.2,
    settle_s=0.1,
)

FAILED = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
ValueError: bad
E1121 03:07:37.086000 8654 torch/distributed/elastic/multiprocessing/api.py:1002] failed
  exitcode  : 1 (pid: 7)
"""


class Job:
    """A controller, and a test that writes the records of nodes and workers."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        target: FakeTarget,
        low: int = 1,
        high: int = 3,
        least: NodeSize = ANY_SIZE,
        largest: NodeSize = ANY_SIZE,
        policy: FailurePolicy = QUICK,
        workers_per_node: int = 1,
    ) -> None:
        self.client = client
        self.keys = keys
        self.target = target
        self.shown: list[str] = []
        limits = Limits(low, high, least, largest, workers_per_node)
        self.controller = Controller(client, keys, target, limits, show=self.shown.append, policy=policy)
        self.end: FinishJob | None = None

    def run_until(self, what: str, found: Callable[[], object], timeout_s: float = 15.0) -> None:
        def step() -> None:
            assert self.end is None, f"the job ended before {what}: {self.end}"
            self.end = self.controller.step()
            self.controller.wait(0.02)

        run_until(step, found, what, timeout_s)

    def run_to_its_end(self) -> FinishJob:
        self.run_until("the end", lambda: self.end is not None)
        assert self.end is not None
        return self.end

    def started(self, num_nodes: int = 1) -> Job:
        """Wait for this many nodes; return the job."""
        self.run_until(f"{num_nodes} nodes", lambda: len(self.target.living) == num_nodes)
        return self

    def training(self, num_nodes: int = 1) -> Job:
        """Wait for this many nodes, and train with them; return the job."""
        self.started(num_nodes).train_with(*self.target.living)
        return self

    def lose_node(self, number: int, output: str = "  exitcode  : -9 (pid: 7)\n") -> None:
        """Wait for the only node, train with it in this round, and let it fail."""
        [node] = self.started().target.living
        self.train_with(node, number=number)
        self.stays(lambda: True, steps=2)
        self.fail(node, output)

    def events(self, kind: str) -> list[EventRecord]:
        found = (decode(EventRecord, entry.value, entry.key) for entry in self.client.get_prefix(self.keys.events)[1])
        return [event for event in found if event.kind == kind]

    def stays(self, found: Callable[[], bool], steps: int = 10) -> None:
        for _ in range(steps):
            assert self.controller.step() is None
            assert found()
            self.controller.wait(0.02)

    def phase(self, phase: str, has_stepped: bool = True) -> None:
        record = JobRecord(phase, True, 1, 3, "0", has_stepped=has_stepped)  # type: ignore[arg-type]
        self.client.put(self.keys.job, encode(record))

    def plan(self, num_workers: int, binding: bool = True, **size: int) -> None:
        self.client.put(self.keys.plan, encode(PlanRecord(num_workers, "user", "", binding, **size)))

    def wait_until_mirrored(self, num_workers: int) -> None:
        """Wait until the controller's mirror can contain this plan."""

        def look(entries: dict[str, KeyValue]) -> bool | None:
            plan = entries[self.keys.plan]
            return True if decode(PlanRecord, plan.value, plan.key).num_workers == num_workers else None

        self.controller._mirror.wait_for(look, 5.0)

    def register(self, *nodes: str) -> None:
        for node in nodes:
            agent = AgentRecord(f"agent-{node}", "h", 1, 1, "running", {"node": node})
            self.client.put(self.keys.agents + agent.agent_id, encode(agent))
            worker = WorkerRecord(f"worker-{node}", agent.agent_id, "h", 1, 0, "127.0.0.1", 1, "active", 1)
            self.client.put(self.keys.workers + worker.worker_id, encode(worker))

    def leave(self, node: str) -> None:
        self.client.delete(f"{self.keys.workers}worker-{node}")

    def round(self, number: int, *nodes: str) -> None:
        members = [f"worker-{node}" for node in nodes]
        self.client.put(self.keys.round, encode(RoundRecord(number, members, "", "start", True)))

    def train_with(self, *nodes: str, number: int = 1) -> None:
        self.phase("training")
        self.register(*nodes)
        self.round(number, *nodes)

    def fail(self, node: str, output: str = "") -> None:
        self.target.log(node).write_text(output)
        self.leave(node)
        self.target.nodes[node] = "failed"


@pytest.fixture
def make_job(client: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**kwargs: Any) -> Job:
        made.append(Job(client, keys, FakeTarget(tmp_path), **kwargs))
        return made[-1]

    yield make
    for job in made:
        job.controller.close()


MakeJob = Callable[..., Job]


def test_job_starts_with_the_minimum_of_workers_as_its_plan(make_job: MakeJob, keys: Keys) -> None:
    job = make_job(low=2).started(2)
    plan = stored(job.client, PlanRecord, keys.plan)
    assert (plan.num_workers, plan.source, plan.binding) == (2, "initial", True)


def test_plan_written_while_the_controller_is_busy_is_seen_at_once(make_job: MakeJob) -> None:
    job = make_job().training()
    job.run_until("calm", lambda: job.controller._registry.entries["node1"].is_member)
    start = job.target.start

    def start_slowly(node: str, size: NodeSize = ANY_SIZE) -> str:
        job.plan(3)  # between the step's reading and its end
        job.wait_until_mirrored(3)
        return start(node, size)

    job.target.start = start_slowly  # type: ignore[method-assign]
    job.plan(2)
    job.run_until("a second node", lambda: len(job.target.living) == 2)
    began = time.monotonic()
    while len(job.target.living) < 3:
        job.controller.wait(5.0)
        assert job.controller.step() is None
    assert time.monotonic() - began < 4.0


def test_a_plan_that_is_there_already_is_kept(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.plan, encode(PlanRecord(3, "user", "", True)))
    job = make_job()
    job.run_until("three nodes", lambda: len(job.target.living) == 3)


def test_nodes_follow_the_plan_within_the_limits(make_job: MakeJob) -> None:
    job = make_job().training()
    job.plan(2)
    job.run_until("two nodes", lambda: len(job.target.living) == 2)
    job.plan(99)
    job.run_until("as many nodes as allowed", lambda: len(job.target.living) == 3)
    job.stays(lambda: len(job.target.living) == 3)


def test_nodes_have_the_size_that_is_planned_within_the_limits(make_job: MakeJob, keys: Keys) -> None:
    job = make_job(least=NodeSize(1, 1024), largest=NodeSize(4, 4096)).started()
    assert job.target.sizes == {"node1": NodeSize(1, 1024)}
    job.plan(2, node_cpus=2)
    job.run_until("another node", lambda: len(job.target.living) == 2)
    job.plan(3, node_cpus=99, node_memory_mb=512)
    job.run_until("a third one", lambda: len(job.target.living) == 3)
    assert [job.target.sizes[node] for node in ("node2", "node3")] == [NodeSize(2, 1024), NodeSize(4, 1024)]
    record = stored(job.client, NodeRecord, f"{keys.each_node}node3")
    assert (record.cpus, record.memory_mb) == (4, 1024)


def test_nodes_smaller_than_planned_are_replaced_one_at_a_time(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    job = make_job(low=2, least=NodeSize(1, 1024), largest=NodeSize(2, 4096))

    def drained() -> list[str]:
        return [entry.key.removeprefix(keys.drains) for entry in client.get_prefix(keys.drains)[1]]

    job.training(2)
    job.plan(2, node_memory_mb=2048)
    job.run_until("one to be replaced", drained)
    job.run_until("a larger node", lambda: len(job.target.living) == 3)
    job.stays(lambda: drained() == ["worker-node1"] and len(job.target.living) == 3)
    job.train_with("node2", "node3", number=2)
    job.leave("node1")
    client.delete(f"{keys.drains}worker-node1")
    job.target.nodes["node1"] = "succeeded"
    job.run_until("the other one to be replaced", drained)
    assert drained() == ["worker-node2"]
    job.run_until("another larger node", lambda: "node4" in job.target.living)
    assert job.target.sizes["node3"] == job.target.sizes["node4"] == NodeSize(1, 2048)
    job.train_with("node3", "node4", number=3)
    job.leave("node2")
    client.delete(f"{keys.drains}worker-node2")
    job.target.nodes["node2"] = "succeeded"
    job.plan(2)
    job.stays(lambda: not drained() and job.target.living == ["node3", "node4"])


def test_pending_node_larger_than_planned_is_withdrawn(make_job: MakeJob) -> None:
    job = make_job(least=NodeSize(1, 1024), largest=NodeSize(1, 65536)).training()
    start = job.target.start

    def queue(node: str, size: NodeSize = ANY_SIZE) -> str:
        handle = start(node, size)
        job.target.nodes[node] = "pending"
        return handle

    job.target.start = queue  # type: ignore[method-assign]
    job.plan(1, node_memory_mb=65536)  # more than any host has
    job.run_until("a node that waits", lambda: job.target.nodes.get("node2") == "pending")
    job.stays(lambda: not job.target.cancelled)
    job.plan(1, node_memory_mb=2048)
    job.run_until("a smaller one in its place", lambda: "node3" in job.target.nodes)
    assert job.target.cancelled == ["node2"]
    assert job.target.sizes["node3"] == NodeSize(1, 2048)


def test_drain_request_of_a_lost_worker_delays_no_other(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    job = make_job(least=NodeSize(1, 1024), largest=NodeSize(1, 4096)).training()
    client.put(f"{keys.drains}worker-node0", encode(DrainRecord("worker-node0", "of a worker whose host is gone")))
    job.plan(1, node_memory_mb=2048)
    job.run_until("a larger node", lambda: "node2" in job.target.living)


def test_refused_starts_are_forgotten_once_the_training_nodes_are_gone(make_job: MakeJob) -> None:
    job = make_job(low=2).training(2)
    job.run_until("them to be known", lambda: job.controller._registry.entries["node2"].is_member)
    job.target.refuses = "no device is free"
    job.fail("node2")
    job.round(2, "node1")
    job.run_until("many refusals", lambda: job.controller._registry.nodes.num_started > QUICK.max_failures + 2)  # type: ignore[union-attr]
    job.target.refuses = ""
    job.fail("node1")
    job.run_until("a new start", lambda: job.target.living)


@pytest.mark.parametrize(("most", "given"), [(8192, 2048), (1536, 1536), (1024, 1024)])
def test_nodes_get_more_memory_after_one_ran_out_up_to_the_limit(make_job: MakeJob, most: int, given: int) -> None:
    job = make_job(low=2, least=NodeSize(1, 1024), largest=NodeSize(1, most)).training(2)
    job.run_until("them to be known", lambda: job.controller._registry.entries["node2"].is_member)
    job.target.out_of_memory.add("node2")
    job.fail("node2")
    job.round(2, "node1")
    job.run_until("another node", lambda: "node3" in job.target.living)
    assert job.target.sizes["node3"] == NodeSize(1, given)
    [event] = job.events("memory")
    assert "node2 was killed for lack of memory (1 cores, 1024 MiB)" in event.text
    assert ("they may have no more" in event.text) == (given == 1024)


def test_a_plan_that_is_only_a_recommendation_is_not_carried_out(make_job: MakeJob) -> None:
    job = make_job().started()
    job.plan(3, binding=False)
    job.stays(lambda: len(job.target.living) == 1)


def test_replacement_is_started_even_above_the_maximum(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    job = make_job(low=3, high=3)
    job.run_until("three nodes", lambda: len(job.target.living) == 3)
    job.train_with("node1", "node2", "node3")
    client.put(f"{keys.drains}worker-node2", encode(DrainRecord("worker-node2", "slow", once_replaced=True)))
    job.run_until("a fourth node", lambda: len(job.target.living) == 4)
    job.register("node4")
    job.stays(lambda: len(job.target.living) == 4)
    job.round(2, "node1", "node3", "node4")
    job.leave("node2")
    client.delete(f"{keys.drains}worker-node2")
    job.target.nodes["node2"] = "succeeded"
    job.stays(lambda: job.target.living == ["node1", "node3", "node4"])


def test_node_of_two_workers_is_replaced_once_and_only_after_its_own_end(make_job: MakeJob) -> None:
    job = make_job(low=2, high=6, workers_per_node=2)
    job.run_until("the first node", lambda: len(job.target.nodes) == 1)
    job.plan(5)
    job.run_until("the second node", lambda: len(job.target.nodes) == 2)
    # Two agents with a worker each on every node: `register` names them after what it takes for a node.
    for name in ("node1", "node2"):
        for number in (0, 1):
            agent = AgentRecord(f"agent-{name}.{number}", "h", 1, 1, "running", {"node": name})
            job.client.put(job.keys.agents + agent.agent_id, encode(agent))
            worker = WorkerRecord(f"worker-{name}.{number}", agent.agent_id, "h", 1, 0, "127.0.0.1", 1, "active", 1)
            job.client.put(job.keys.workers + worker.worker_id, encode(worker))
    job.round(1, "node1.0", "node1.1", "node2.0", "node2.1")
    job.phase("training")
    entries = job.controller._registry.entries
    job.run_until("all members", lambda: [entry.num_members for entry in entries.values()] == [2, 2])
    job.leave("node2.1")
    job.run_until("its loss", lambda: entries["node2"].num_members == 1)
    job.stays(lambda: len(job.target.nodes) == 2)
    job.leave("node2.0")
    job.fail("node2", FAILED)
    job.run_until("another node", lambda: len(job.target.nodes) == 3)
    job.stays(lambda: len(job.target.nodes) == 3)
    assert [name for name, entry in entries.items() if entry.post_mortem and entry.post_mortem.error] == ["node2"]


def test_shrinking_is_left_to_the_workers(make_job: MakeJob) -> None:
    job = make_job(low=1)
    job.plan(2)
    job.training(2)
    job.plan(1)
    job.stays(lambda: len(job.target.living) == 2)
    job.round(2, "node1")
    job.leave("node2")
    job.target.nodes["node2"] = "succeeded"
    job.stays(lambda: job.target.living == ["node1"])
    assert job.target.cancelled == []


def test_node_that_outlives_its_worker_is_ended(make_job: MakeJob) -> None:
    job = make_job(low=1)
    job.plan(2)
    job.training(2)
    job.plan(1)
    job.stays(lambda: True, steps=3)
    job.round(2, "node1")
    job.leave("node2")
    job.run_until("the end of the second node", lambda: job.target.cancelled == ["node2"])
    job.stays(lambda: job.target.living == ["node1"])


def test_a_killed_node_is_replaced_as_often_as_it_takes(make_job: MakeJob) -> None:
    job = make_job()
    for number in range(1, QUICK.max_failures + 3):
        job.lose_node(number)
    job.run_until("a node", lambda: job.target.living)


def test_nodes_that_are_killed_without_ever_training_are_given_up(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    job = make_job()
    job.phase("starting")
    client.put(f"{keys.drains}worker-node1", encode(DrainRecord("worker-node1", "of a worker that is killed")))
    while job.end is None:
        job.run_until("a node or the end", lambda: job.end or job.target.living)
        for node in job.target.living:
            job.fail(node)
    assert (job.end.exit_code, len(job.target.nodes)) == (1, QUICK.max_failures)
    record = stored(job.client, JobRecord, keys.job)
    assert record.phase == "failed"
    assert f"{QUICK.max_failures} nodes in a row" in record.message
    assert client.get(keys.plan) is None
    assert client.get_prefix(keys.drains)[1] == []


def test_node_is_killed_again_and_again_until_the_job_is_given_up(make_job: MakeJob) -> None:
    job = make_job()
    for number in range(1, QUICK.max_stops + 1):
        job.lose_node(number)
    end = job.run_to_its_end()
    assert end.exit_code == 1
    assert f"stopped {QUICK.max_stops} times without progress" in end.reason
    assert "node20: it was killed" in end.reason


def test_job_with_newer_checkpoints_is_never_given_up(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    job = make_job()
    for number in range(1, 8):
        client.put(keys.checkpoint, encode(CheckpointRecord("x.ckpt", number)))
        job.lose_node(number, FAILED)
    job.run_until("another node", lambda: job.target.living)


def test_one_error_with_changing_numbers_is_given_up(make_job: MakeJob) -> None:
    job = make_job()
    for number in range(1, QUICK.max_same_error + 1):
        job.lose_node(number, FAILED.replace("bad", f"DataLoader worker (pid(s) {number}417) exited unexpectedly"))
    assert "the same error stopped the job 3 times" in job.run_to_its_end().reason


def test_growth_by_nodes_that_always_fail_is_given_up(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    def held_up() -> str:
        entry = client.get(keys.controller)
        return decode(ControllerRecord, entry.value, entry.key).held_up if entry else ""

    job = make_job().training()
    job.plan(2)
    for number in (2, 3, 4):
        job.run_until("another node", lambda: len(job.target.living) == 2)
        job.train_with("node1", f"node{number}", number=2 * number)
        job.stays(lambda: True, steps=2)
        job.fail(f"node{number}", FAILED.replace("bad", f"bad host 10.0.0.{number}"))
        job.round(2 * number + 1, "node1")
    job.run_until("the end of growth", held_up)
    job.stays(lambda: job.target.living == ["node1"])
    assert "no more nodes are added, 3 that joined have failed with the same error: ValueError: bad host 10.0.0.4" in held_up()
    assert [event.text for event in job.events("nodes")] == [held_up()]
    job.plan(2)  # requested once more
    job.run_until("another node", lambda: job.target.living == ["node1", "node5"])
    job.run_until("no trouble", lambda: not held_up())


def test_refused_scale_up_leaves_the_job_as_it_is(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    job = make_job().training()
    job.target.refuses = "quota exceeded"
    job.plan(2)
    job.run_until("many refusals", lambda: job.controller._registry.nodes.num_started > 2 * MAX_REFUSED)  # type: ignore[union-attr]
    held_up = stored(job.client, ControllerRecord, keys.controller).held_up
    match = re.fullmatch(r"node\d+ was refused \(try (\d+) in a row; .*\): .*quota exceeded", held_up)
    assert match is not None
    assert int(match[1]) > MAX_REFUSED + 3  # forgotten refusals count as well, because the pause grows with them
    names = [e.key.removeprefix(keys.each_node) for e in client.get_prefix(keys.each_node)[1]]
    assert len(names) <= MAX_REFUSED + 1
    assert "node1" in names
    assert len(job.events("nodes")) == 1  # not one event per attempt
    job.target.refuses = ""
    job.run_until("another node", lambda: len(job.target.living) == 2)


def test_worker_killed_before_training_is_replaced(make_job: MakeJob) -> None:
    job = make_job(low=2).started(2)
    job.phase("starting")
    job.register("node1", "node2")
    job.round(1, "node1", "node2")
    job.fail("node2", "RuntimeError: Connection closed by peer".join(FAILED.split("ValueError: bad")))
    job.fail("node1", "  exitcode  : -9 (pid: 7)\n")
    job.run_until("two other nodes", lambda: job.target.living == ["node3", "node4"])


def test_an_error_before_training_is_not_tried_again(make_job: MakeJob) -> None:
    job = make_job(low=2).started(2)
    job.fail("node2", FAILED)
    end = job.run_to_its_end()
    assert end.exit_code == 1
    assert "ValueError: bad" in end.reason
    assert job.target.cancelled == ["node1"]
    assert job.controller.failure_text().endswith("ValueError: bad")


def test_an_error_in_the_first_step_is_not_tried_again(make_job: MakeJob) -> None:
    job = make_job().training()
    job.phase("training", has_stepped=False)
    job.stays(lambda: True, steps=2)
    job.fail("node1", FAILED)
    assert job.run_to_its_end().reason == "node1 failed before the first step: ValueError: bad (at train.py:1 (<module>))"
    assert [*job.target.nodes] == ["node1"]


def test_an_error_that_leaves_too_few_workers_is_tried_three_times(make_job: MakeJob) -> None:
    """Each time one worker is left, which keeps the state and waits for another."""
    job = make_job(low=2).started(2)
    for number in range(1, QUICK.max_same_error + 1):
        job.train_with(*job.target.living, number=number)
        job.stays(lambda: True, steps=2)
        job.fail(job.target.living[-1], FAILED.replace("bad", f"row {'abc'[number - 1]} is bad"))
        if number < QUICK.max_same_error:
            job.run_until("another node", lambda: len(job.target.living) == 2)
    assert "the same error stopped the job 3 times" in job.run_to_its_end().reason
    assert len(job.target.nodes) == QUICK.max_same_error + 1


def test_replacement_that_waits_does_not_hide_that_too_few_workers_were_left(make_job: MakeJob) -> None:
    """The next round has enough workers whenever the controller looks."""
    job = make_job(low=2)
    job.plan(3)
    for number in range(1, QUICK.max_same_error + 1):
        job.run_until("three nodes", lambda: len(job.target.living) == 3)
        failing, *others = job.target.living
        job.train_with(failing, others[0], number=2 * number - 1)
        job.stays(lambda: True, steps=2)
        job.fail(failing, FAILED)
        job.train_with(*others, number=2 * number)
    assert "the same error stopped the job 3 times" in job.run_to_its_end().reason
    assert len(job.target.nodes) == QUICK.max_same_error + 2


def test_an_error_that_stops_the_training_is_tried_three_times(make_job: MakeJob) -> None:
    job = make_job()
    for number in range(1, QUICK.max_same_error + 1):
        job.lose_node(number, FAILED)
    assert job.run_to_its_end().exit_code == 1
    assert len(job.target.nodes) == QUICK.max_same_error


def test_a_finished_job_waits_for_its_workers_and_ends_with_zero(make_job: MakeJob) -> None:
    job = make_job().training()
    job.plan(2)
    job.run_until("a joiner", lambda: len(job.target.living) == 2)
    job.phase("finished")
    job.run_until("the end of the joiner", lambda: job.target.cancelled == ["node2"])
    job.stays(lambda: job.target.living == ["node1"])
    job.leave("node1")
    job.target.nodes["node1"] = "succeeded"
    assert job.run_to_its_end().exit_code == 0


@pytest.mark.parametrize("has_left", [True, False])
def test_node_that_is_killed_after_its_worker_has_left_does_not_fail_a_finished_job(make_job: MakeJob, has_left: bool) -> None:
    job = make_job(low=2).training(2)
    job.stays(lambda: True, steps=2)
    if has_left:
        job.round(2, "node1")
        job.stays(lambda: True, steps=2)
    job.phase("finished")
    job.stays(lambda: True, steps=2)
    job.fail("node2", FAILED)
    job.stays(lambda: True, steps=2)
    job.leave("node1")
    job.target.nodes["node1"] = "succeeded"
    assert job.run_to_its_end().exit_code == (0 if has_left else 1)


@pytest.mark.parametrize("refusal", [NotTakenError, RuntimeError])  # TorchX may raise anything
def test_a_target_that_cannot_start_nodes_ends_the_job_with_its_reason(make_job: MakeJob, refusal: type[Exception]) -> None:
    job = make_job()
    job.target.refuses, job.target.refusal = "quota exceeded", refusal
    end = job.run_to_its_end()
    assert end.exit_code == 1
    assert "quota exceeded" in end.reason


def test_only_one_controller_acts(make_job: MakeJob, client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    job = make_job().started()
    record = stored(job.client, ControllerRecord, keys.controller)
    with pytest.raises(ControllerBusyError, match=f"already run by process {record.pid} on {record.host}"):
        Controller(client, keys, FakeTarget(tmp_path), Limits(1, 3))
    job.stays(lambda: job.target.living == ["node1"])
    job.controller.close()
    assert client.get(keys.controller) is None
    with Controller(client, keys, FakeTarget(tmp_path), Limits(1, 3)) as second:
        assert second.step() is None


def test_the_record_of_the_controller_names_its_nodes(make_job: MakeJob, keys: Keys) -> None:
    job = make_job(low=2).started(2)
    assert stored(job.client, ControllerRecord, keys.controller).apps == {"node1": "1/node1", "node2": "2/node2"}


def test_nodes_of_an_earlier_controller_keep_their_names_for_themselves(
    make_job: MakeJob, client: EtcdClient, keys: Keys
) -> None:
    client.put(f"{keys.agents}a", encode(AgentRecord("a", "h", 1, 1, "running", {"node": "node7"})))
    job = make_job()
    job.run_until("a node", lambda: job.target.living == ["node8"])


def test_a_controller_that_lost_its_lease_takes_over_again_or_yields(
    make_job: MakeJob, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    job = make_job().started()
    job.controller._tenure.lease.revoke()
    job.controller._tenure.lease.lost.set()
    job.stays(lambda: client.get(keys.controller) is not None, steps=2)
    job.controller._tenure.lease.revoke()
    job.controller._tenure.lease.lost.set()
    with Controller(client, keys, FakeTarget(tmp_path), Limits(1, 3)), pytest.raises(ControllerBusyError):
        job.controller.step()


def test_leaving_the_controller_ends_all_its_nodes(make_job: MakeJob) -> None:
    job = make_job(low=2).started(2)
    job.controller.close()
    assert job.target.cancelled == ["node1", "node2"]
    assert job.target.is_closed


def test_nodes_end_before_their_end_is_recorded_once(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(low=2).started(2)
    lived = []

    def no_answer(*_: object) -> None:
        lived.append(list(job.target.living))
        raise EtcdUnavailableError("no answer")

    monkeypatch.setattr(job.client, "txn", no_answer)
    job.controller.end_nodes()
    job.controller.close()
    assert lived == [[]]


def test_node_that_is_just_starting_does_not_delay_the_end(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(policy=replace(QUICK, submit_s=20.0, cancel_s=20.0))

    def interrupted(node: str, size: NodeSize) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(job.target, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.controller.step()
    began = time.monotonic()
    job.controller.close()
    assert time.monotonic() - began < 5.0


def test_output_that_cannot_be_read_for_a_while_is_shown_later(make_job: MakeJob) -> None:
    job = make_job().started()
    log = job.target.log("node1")
    log.unlink()
    log.mkdir()  # reading fails, even for root
    job.stays(lambda: job.shown == [], steps=2)
    log.rmdir()
    log.write_text("one\n")
    job.stays(lambda: job.shown == ["[node1] one"], steps=2)
    log.unlink()
    log.mkdir()
    job.target.nodes["node1"] = "failed"
    job.run_until("another node", lambda: job.target.living == ["node2"])
    log.rmdir()
    log.write_text("one\nlast")
    job.stays(lambda: job.shown == ["[node1] one", "[node1] last"], steps=2)


def test_output_is_shown_once_in_whole_lines_with_the_node_in_front(make_job: MakeJob) -> None:
    job = make_job().started()
    log = job.target.log("node1")
    with log.open("w") as stream:
        stream.write("one\ntw")
        stream.flush()
        job.stays(lambda: job.shown == ["[node1] one"], steps=3)
        stream.write("o\nbar 1%\rbar 2%\n\nlast")
        stream.flush()
    job.stays(lambda: job.shown == ["[node1] one", "[node1] two", "[node1] bar 2%", "[node1] "], steps=2)
    job.target.nodes["node1"] = "succeeded"
    job.run_to_its_end()
    assert job.shown[-1] == "[node1] last"
    assert len(job.shown) == 5


def test_output_is_looked_at_as_often_as_asked_and_before_nodes_end(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTarget, "log", lambda self, node: self.folder / f"stderr-{node}.log")
    job = make_job(policy=dataclasses.replace(QUICK, show_s=3600.0)).started()
    job.stays(lambda: job.shown == [], steps=2)
    job.target.log("node1").write_text("one\n")
    job.stays(lambda: job.shown == [], steps=5)
    job.controller.end_nodes()
    assert job.shown == ["[node1] one"]


def test_traceback_is_shown_once_and_its_repeats_as_one_line(make_job: MakeJob) -> None:
    job = make_job().started()
    start, frame, error, agents, _ = FAILED.splitlines()
    log = job.target.log("node1")
    again = f"[rank1]: {start}\n[rank1]: {frame}\n[rank1]: {error}, too\n"
    elsewhere = f'{start}\n{frame}\n  File "train.py", line 2, in f\n{error}\n'
    log.write_text(f"a\n{start}\n{frame}\n")
    job.stays(lambda: job.shown in ([], ["[node1] a"]), steps=2)
    log.write_text(f"a\n{start}\n{frame}\n{error}\n{agents}\n{again}{elsewhere}{start}\n  killed")
    job.target.nodes["node1"] = "failed"
    job.run_until("all output", lambda: job.shown[-1:] == ["[node1]   killed"])
    repeated = f"[rank1]: {error}, too (its traceback was shown above)"
    shown = ["a", start, frame, error, agents, repeated, *elsewhere.splitlines(), start, "  killed"]
    assert job.shown == [f"[node1] {line}" for line in shown]
    assert job.controller.has_shown(f'{start}\n  File "fit.py", line 9, in fit\n{elsewhere.removeprefix(start)}')
    assert job.controller.has_shown(f'{start}\n  File "train.py", line 2, in f\n{error}')
    assert not job.controller.has_shown(elsewhere.replace("Value", "Type"))
    assert not job.controller.has_shown(elsewhere.replace("line 2", "line 3"))
    assert not job.controller.has_shown("it was killed")


def test_refusal_by_this_package_is_shown_without_the_traceback_through_its_code(make_job: MakeJob) -> None:
    job = make_job().started()
    start, frame, *_ = FAILED.splitlines()
    reason = "this worker's data differ from the job's: " + "fix the seed, " * 20
    ours = '  File "/x/site-packages/lightning_dlrover/live/data.py", line 9, in compare'
    refusal = f"{start}\n{frame}\n{ours}\nlightning_dlrover.rdzv.membership.member.MembershipError: {reason}\n"
    torchs = "E1121 03:07:37.0 8654 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0\n"
    job.target.log("node1").write_text(refusal + torchs + refusal)
    job.target.nodes["node1"] = "failed"
    job.run_until("all output", lambda: len(job.shown) == 2)
    first, again = job.shown
    assert first.startswith(f"[node1] MembershipError: {reason}")
    assert again.startswith("[node1] MembershipError: this worker's data differ")
    assert again.endswith("... (shown above)")
    assert len(again) < 200


def test_a_broken_record_does_not_stop_the_controller(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    job = make_job().started()
    client.put(keys.plan, b"not a record")
    client.put(keys.job, b"{}")
    job.stays(lambda: len(job.target.living) == 1)


def test_nodes_are_left_as_they_are_while_etcd_is_away(private_etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint, timeout_s=0.3)) as client:
        job = Job(client, keys, FakeTarget(tmp_path))
        job.run_until("a node", lambda: job.target.living)
        job.train_with("node1")
        job.stays(lambda: True, steps=2)
        private_etcd.kill()
        job.run_until("the loss of etcd", lambda: not job.controller._mirror.healthy)
        job.target.nodes["node1"] = "failed"
        job.stays(lambda: job.target.living == [])
        private_etcd.restart()
        job.run_until("a replacement", lambda: job.target.living == ["node2"])
        job.controller.close()


@pytest.mark.slow
def test_job_without_nodes_ends_when_its_etcd_stays_away(private_etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint, timeout_s=0.3)) as client:
        job = Job(client, keys, FakeTarget(tmp_path), policy=replace(QUICK, etcd_s=0.5))
        job.run_until("a node", lambda: job.target.living)
        job.train_with("node1")
        job.stays(lambda: True, steps=2)
        private_etcd.kill()
        job.run_until("the loss of etcd", lambda: not job.controller._mirror.healthy)
        job.stays(lambda: job.target.living == ["node1"], steps=40)  # a living node may outlast any outage
        job.target.nodes["node1"] = "succeeded"
        end = job.run_to_its_end()
        assert end.exit_code == 1
        assert "etcd has not answered" in end.reason
        assert job.target.living == []
        job.controller.close()


def test_nodes_ended_by_a_controller_are_not_awaited_by_the_next(make_job: MakeJob, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.nodes, encode(NodesRecord("fake", "mark", num_started=4)))
    client.put(f"{keys.each_node}node3", encode(NodeRecord("started", "x", 1.0)))
    client.put(f"{keys.each_node}node4", encode(NodeRecord("asked")))
    job = make_job()
    job.run_until("a node", lambda: job.target.living == ["node5"])
    assert [e.key.removeprefix(keys.each_node) for e in client.get_prefix(keys.each_node)[1]] == ["node5"]


def test_node_is_in_etcd_from_before_its_start_until_after_its_end(make_job: MakeJob, keys: Keys) -> None:
    def record(node: str) -> NodeRecord:
        return stored(job.client, NodeRecord, keys.each_node + node)

    job = make_job()
    seen = []
    start = job.target.start
    job.target.start = lambda node, size: (seen.append(record(node)), start(node, size))[1]  # type: ignore[assignment, func-returns-value, method-assign, misc]
    job.run_until("a node", lambda: job.target.living)
    assert [(r.state, r.handle) for r in seen] == [("asked", "")]
    assert (record("node1").state, record("node1").handle) == ("started", "1/node1")
    job.train_with("node1")
    job.stays(lambda: True, steps=2)
    job.fail("node1", FAILED)
    job.run_until("another node", lambda: job.target.living == ["node2"])
    ended = record("node1")
    assert (ended.state, ended.outcome, ended.error, ended.stopped_job) == ("ended", "failed", "ValueError: bad", True)


def test_node_that_its_scheduler_starts_again_is_awaited_under_its_name(make_job: MakeJob) -> None:
    job = make_job().training(1)
    [node] = job.target.living
    job.stays(lambda: True, steps=3)
    job.target.nodes[node] = "pending"  # its host has failed, and it is requeued
    job.leave(node)
    job.client.delete(f"{job.keys.agents}agent-{node}")
    waited_until = time.monotonic() + 4 * QUICK.exit_s
    job.run_until("a while without the node", lambda: time.monotonic() > waited_until)
    assert job.target.cancelled == []
    assert job.target.submissions == [node]
    job.target.nodes[node] = "running"
    job.train_with(node, number=2)
    job.stays(lambda: job.target.living == [node])
    job.leave(node)  # and hangs then
    job.run_until("its end", lambda: node in job.target.cancelled)
