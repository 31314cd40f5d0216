"""Sizes that change in place: the decision as a pure function, and the controller with a real etcd and a target of entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.components.control.reconcile import (
    Action,
    ControllerView,
    FailurePolicy,
    KeepSize,
    Limits,
    Node,
    ReplaceWorker,
    ResizeNode,
    next_size,
    reconcile,
)
from lightning_dlrover.components.targets.target import ANY_SIZE, NodeSize, Resize, TargetError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import ControllerRecord, Keys, NodeRecord, NodesRecord, PlanRecord, encode
from tests.components.control.test_controller import QUICK, Job
from tests.support.fake_target import FakeTarget
from tests.support.stored import stored
from tests.support.windows import WINDOW

POLICY = FailurePolicy()
SMALL, WIDE, TALL, LARGE = NodeSize(1, 1024), NodeSize(2, 1024), NodeSize(1, 2048), NodeSize(2, 2048)


def node(name: str = "a", size: NodeSize = SMALL, **facts: Any) -> Node:
    shared = {"num_members": 1, "is_accepted": True, "age_s": 100.0, "asked_s": 100.0}
    return Node(name, "running", True, workers=(f"worker-{name}",), size=size, **{**shared, **facts})


def decide(size: NodeSize, *nodes: Node, chosen: NodeSize | None = None, in_place: bool = True) -> list[Action]:
    members = {worker: each.name for each in nodes for worker in each.workers}
    view = ControllerView(
        "training",
        len(nodes),
        nodes,
        size=size,
        chosen_size=size if chosen is None else chosen,
        in_place=in_place,
        members=members,
    )
    return reconcile(view, POLICY)


# --- the decision -------------------------------------------------------------------------------------------------------------


def test_small_node_grows_in_place_memory_first_and_is_not_replaced() -> None:
    assert decide(LARGE, node()) == [ResizeNode("a", TALL)]
    assert decide(LARGE, node(size=TALL)) == [ResizeNode("a", LARGE)]
    assert decide(LARGE, node(size=LARGE)) == []
    assert decide(LARGE, node(), in_place=False) == [ReplaceWorker("worker-a", f"a node of {LARGE} instead of {SMALL}")]


def test_one_node_changes_at_a_time_and_one_that_waits_for_room_holds_up_no_other() -> None:
    assert decide(WIDE, node("a", wanted=WIDE, resize="asked"), node("b")) == []
    assert decide(WIDE, node("a", wanted=WIDE, resize="waiting", resize_s=9999.0), node("b")) == [ResizeNode("b", WIDE)]


def test_memory_does_not_wait_behind_cores_for_which_there_is_no_room() -> None:
    assert decide(LARGE, node(wanted=WIDE, resize="waiting")) == [ResizeNode("a", TALL)]


def test_node_shrinks_only_once_its_workers_use_less_or_have_had_time_for_it() -> None:
    large = node(size=LARGE, oversized_s=1.0)
    assert decide(SMALL, large) == []
    assert decide(SMALL, replace(large, has_let_go=True)) == [ResizeNode("a", TALL)]
    assert decide(SMALL, replace(large, oversized_s=POLICY.let_go_s + 1)) == [ResizeNode("a", TALL)]
    assert decide(SMALL, replace(large, size=TALL, has_let_go=True)) == [ResizeNode("a", SMALL)]


def test_node_shrinks_to_no_value_that_the_plan_leaves_open() -> None:
    large = node(size=LARGE, has_let_go=True)
    assert decide(SMALL, large, chosen=ANY_SIZE) == []
    assert decide(SMALL, large, chosen=NodeSize(0, 1024)) == [ResizeNode("a", WIDE)]


def test_what_grows_precedes_what_shrinks() -> None:
    assert decide(TALL, node(size=WIDE, has_let_go=True)) == [ResizeNode("a", LARGE)]
    assert decide(WIDE, node(size=TALL, has_let_go=True)) == [ResizeNode("a", LARGE)]


def test_refused_growth_ends_in_a_replacement_and_refused_shrinking_in_the_present_size() -> None:
    small = node(refused_size=NodeSize(2, 0))
    assert decide(WIDE, small) == [ReplaceWorker("worker-a", f"a node of {WIDE} instead of {SMALL}")]
    assert decide(NodeSize(3, 1024), small) == [ResizeNode("a", NodeSize(3, 1024))]
    assert decide(SMALL, node(size=TALL, has_let_go=True, refused_size=NodeSize(0, 1024))) == []


def test_change_that_takes_too_long_is_given_up_unless_it_waits_for_room_to_grow() -> None:
    grows = node(wanted=WIDE, resize="asked", resize_s=POLICY.resize_s + 1)
    assert [type(action) for action in decide(WIDE, grows)] == [KeepSize]
    assert decide(WIDE, replace(grows, resize="waiting")) == []
    shrinks = node(size=TALL, wanted=SMALL, resize="waiting", resize_s=POLICY.shrink_s + 1, has_let_go=True)
    assert [type(action) for action in decide(SMALL, shrinks)] == [KeepSize]


def test_request_is_withdrawn_once_the_plan_asks_for_the_present_size_again() -> None:
    assert decide(SMALL, node(wanted=WIDE, resize="waiting")) == [ResizeNode("a", SMALL)]
    assert decide(SMALL, node(wanted=SMALL, resize="asked")) == []


@pytest.mark.parametrize("status", ["pending", "failed", "cancelled"])
def test_only_running_nodes_change_in_place(status: Any) -> None:
    assert [a for a in decide(LARGE, replace(node(), status=status)) if isinstance(a, ResizeNode)] == []


any_size = st.builds(NodeSize, st.integers(1, 4), st.sampled_from([0, 512, 1024, 2048]))


@given(any_size, any_size, any_size)
def test_a_node_reaches_its_planned_size_in_few_steps_of_one_value_each(
    size: NodeSize, plan: NodeSize, refused: NodeSize
) -> None:
    each, seen = node(size=size, refused_size=refused), [size]
    while (step := next_size(each, plan, plan)) != each.size:
        assert (step.cpus != each.size.cpus) + (step.memory_mb != each.size.memory_mb) == 1
        each = replace(each, size=step)
        seen.append(step)
        assert len(seen) <= 3
    assert each.size.cpus in (plan.cpus, size.cpus)
    assert each.size.cpus == plan.cpus or plan.cpus == refused.cpus
    grows = plan.memory_mb > size.memory_mb
    assert each.size.memory_mb == plan.memory_mb or plan.memory_mb == refused.memory_mb or not (grows or plan.memory_mb)


# --- the controller -----------------------------------------------------------------------------------------------------------


class Sized(Job):
    """A job of one node that may have 1 to 4 cores and 1 to 4 GiB, on a target that resizes in place."""

    def record(self, name: str = "node1") -> NodeRecord:
        return stored(self.client, NodeRecord, f"{self.keys.each_node}{name}")

    def sizes(self, name: str = "node1") -> tuple[int, int]:
        return self.record(name).cpus, self.record(name).memory_mb

    def drained(self) -> list[str]:
        return [entry.key.removeprefix(self.keys.drains) for entry in self.client.get_prefix(self.keys.drains)[1]]

    def acts(self) -> list[str]:
        return [event.data["act"] for event in self.events("node_size")]

    def known(self) -> Sized:
        self.training()
        self.run_until("a member", lambda: self.controller._registry.entries["node1"].is_member)
        return self

    def put_profile(self, threads: int) -> None:
        figures = replace(WINDOW, worker_id="worker-node1", intra_op_threads=threads)
        self.client.put(f"{self.keys.profiles}worker-node1", encode(figures))


@pytest.fixture
def sized_job(client: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Any]:
    made: list[Sized] = []

    def make(target: FakeTarget | None = None, **facts: Any) -> Sized:
        target = target or FakeTarget(tmp_path, resizes_in_place=True, outlives_controller=True, **facts)
        job = Sized(client, keys, target, 1, 3, NodeSize(1, 1024), NodeSize(4, 4096), replace(QUICK, let_go_s=0.3))
        made.append(job)
        return job

    yield make
    for job in made:
        job.controller.close()


def test_running_node_gets_cores_and_memory_without_another_node(sized_job: Any, keys: Keys) -> None:
    job = sized_job().known()
    assert stored(job.client, NodesRecord, keys.nodes).in_place
    job.plan(1, node_cpus=2, node_memory_mb=2048)
    job.run_until("the new size", lambda: job.sizes() == (2, 2048))
    assert job.target.resizes == [("node1", NodeSize(1, 2048)), ("node1", NodeSize(2, 2048))]
    assert job.target.submissions == ["node1"]
    assert job.drained() == []
    job.run_until("both changes in the history", lambda: job.acts() == ["resized", "resized"])
    assert job.record().resize == ""


def test_request_is_in_etcd_before_it_is_made(sized_job: Any) -> None:
    job = sized_job().known()
    seen = []
    resize = job.target.resize

    def look(handle: str, size: NodeSize) -> Resize:
        record = job.record()
        seen.append((record.resize, record.wanted_cpus, record.cpus))
        found: Resize = resize(handle, size)
        return found

    job.target.resize = look
    job.plan(1, node_cpus=2)
    job.run_until("the new size", lambda: job.sizes()[0] == 2)
    assert seen == [("asked", 2, 1)]


@pytest.mark.parametrize("is_carried_out", [False, True], ids=["before the request", "after the request"])
def test_next_controller_continues_a_change_wherever_the_first_one_was_killed(sized_job: Any, is_carried_out: bool) -> None:
    job = sized_job().known()
    resize = job.target.resize

    class Killed(BaseException):
        pass

    def die(handle: str, size: NodeSize) -> Resize:
        if is_carried_out:
            resize(handle, size)
        raise Killed

    job.target.resize = die
    job.plan(1, node_cpus=2)
    with pytest.raises(Killed):
        job.run_until("its end", lambda: False)
    assert (job.record().resize, job.record().wanted_cpus, job.record().cpus) == ("asked", 2, 1)
    job.controller._mirror.close()
    job.controller._tenure.lease.revoke()
    job.controller._is_closed = True
    successor = job.target.successor()
    del successor.resize
    after = sized_job(successor)
    after.run_until("the new size", lambda: after.sizes()[0] == 2)
    assert after.target.sizes["node1"] == NodeSize(2, 1024)
    assert after.target.submissions == ["node1"]
    assert after.record().resize == ""


def test_change_without_room_waits_says_so_and_is_carried_out_later(sized_job: Any, keys: Keys) -> None:
    job = sized_job(no_room={"node1": "Node didn't have enough resource: cpu"}).known()
    job.plan(1, node_cpus=2)

    def states() -> dict[str, str]:
        return stored(job.client, ControllerRecord, keys.controller).resizes

    job.run_until("its wait", lambda: job.record().resize == "waiting" and states())
    assert states() == {
        "node1": "2 cores, 1024 MiB in place of 1 cores, 1024 MiB: waits for room: Node didn't have enough resource: cpu"
    }
    job.stays(lambda: job.drained() == [] and job.sizes() == (1, 1024))
    assert job.acts() == ["waits"]
    job.target.no_room.clear()
    job.run_until("room", lambda: job.sizes() == (2, 1024) and not states())
    assert job.target.submissions == ["node1"]


def test_refused_growth_is_withdrawn_and_ends_in_a_replacement(sized_job: Any) -> None:
    job = sized_job(rigid={"node1": "static CPU manager"}).known()
    job.plan(1, node_cpus=2)
    job.run_until("a replacement", lambda: job.drained() == ["worker-node1"])
    job.run_until("a larger node", lambda: "node2" in job.target.nodes)
    assert job.target.sizes["node2"] == NodeSize(2, 1024)
    assert job.target.resizes[-1] == ("node1", NodeSize(1, 1024))
    assert (job.record().cpus, job.record().refused_cpus) == (1, 2)
    assert job.acts() == ["refused"]


def test_memory_that_cannot_be_taken_back_stays_and_the_record_is_true(sized_job: Any) -> None:
    job = sized_job().known()
    job.plan(1, node_cpus=2, node_memory_mb=2048)
    job.run_until("the larger size", lambda: job.sizes() == (2, 2048))
    job.put_profile(threads=1)
    resize = job.target.resize

    def keep_memory(handle: str, size: NodeSize) -> Resize:
        return Resize("refused", "1800 MiB are in use") if size.memory_mb < 2048 else resize(handle, size)

    job.target.resize = keep_memory
    job.plan(1, node_cpus=1, node_memory_mb=1024)
    job.run_until("fewer cores", lambda: job.sizes() == (1, 2048) and job.record().refused_memory_mb == 1024)
    job.stays(lambda: job.sizes() == (1, 2048) and job.drained() == [])
    assert job.target.sizes["node1"] == NodeSize(1, 2048)


def test_cores_are_taken_back_after_the_workers_use_fewer(sized_job: Any) -> None:
    job = sized_job()
    job.controller._policy = job.controller._observer._policy = replace(QUICK, let_go_s=3600.0)
    job.known()
    job.plan(1, node_cpus=2)
    job.run_until("two cores", lambda: job.sizes()[0] == 2)
    job.put_profile(threads=2)
    job.plan(1, node_cpus=1)
    job.stays(lambda: job.sizes()[0] == 2, steps=20)
    job.put_profile(threads=1)
    job.run_until("one core", lambda: job.sizes()[0] == 1)


def test_request_without_an_answer_is_repeated(sized_job: Any) -> None:
    job = sized_job().known()
    resize, failures = job.target.resize, [TargetError("no answer"), TargetError("no answer")]

    def fail_first(handle: str, size: NodeSize) -> Resize:
        if failures:
            raise failures.pop()
        found: Resize = resize(handle, size)
        return found

    job.target.resize = fail_first
    job.plan(1, node_cpus=2)
    job.run_until("the new size", lambda: job.sizes()[0] == 2)
    assert not failures


def test_target_that_is_forbidden_to_resize_replaces_from_then_on(sized_job: Any, keys: Keys) -> None:
    job = sized_job().known()

    def forbid(handle: str, size: NodeSize) -> Resize:
        job.target.resizes_in_place = False
        return Resize("refused", "pods/resize is forbidden") if size != NodeSize(1, 1024) else Resize("done")

    job.target.resize = forbid
    job.plan(1, node_cpus=2)
    job.run_until("a replacement", lambda: job.drained() == ["worker-node1"])
    job.run_until("the planner's notice", lambda: not stored(job.client, NodesRecord, keys.nodes).in_place)


def test_a_target_that_cannot_resize_is_never_asked(sized_job: Any, tmp_path: Path) -> None:
    job = sized_job(FakeTarget(tmp_path)).known()
    job.plan(1, node_cpus=2)
    job.run_until("a larger node", lambda: "node2" in job.target.nodes)
    assert job.target.resizes == []


def test_limits_choose_only_what_the_plan_contains() -> None:
    limits = Limits(1, 2, NodeSize(1, 1024), NodeSize(4, 4096))
    plan = PlanRecord(1, "user", "", True, node_cpus=2)
    assert (limits.size(plan), limits.chosen_size(plan)) == (NodeSize(2, 1024), NodeSize(2, 0))
    assert limits.chosen_size(None) == ANY_SIZE
