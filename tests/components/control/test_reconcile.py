"""The controller's decisions, as a table and as invariants over any situation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.components.control.reconcile import (
    Action,
    AddNode,
    CancelNode,
    ControllerView,
    EnlargeNodes,
    FailurePolicy,
    FinishJob,
    Limits,
    Node,
    ReplaceWorker,
    Warn,
    WithdrawNode,
    enlargements,
    reconcile,
    why_none_is_added,
)
from lightning_dlrover.components.targets.target import NodeSize
from lightning_dlrover.rdzv.job.records import AgentRecord, EndNotice, JobRecord, PlanRecord, RoundRecord, WorkerRecord
from lightning_dlrover.rdzv.membership.rounds import JobView

POLICY = FailurePolicy()
LATE_S = 10_000.0
SOON = EndNotice("slurm")


def member(name: str = "a") -> Node:
    return Node(name, "running", True, workers=(f"worker-{name}",), num_members=1, age_s=100.0, asked_s=LATE_S)


def joining(name: str = "b", idle_s: float = 1.0) -> Node:
    return Node(name, "running", agent_seen=True, idle_s=idle_s, age_s=idle_s, asked_s=LATE_S)


def killed(name: str = "k", ended_s: float = 60.0) -> Node:
    return Node(name, "failed", ended_s=ended_s, asked_s=LATE_S)


def faulty(name: str = "f", ended_s: float = 60.0, error: str = "ValueError: bad", stopped_job: bool = True) -> Node:
    return Node(name, "failed", ended_s=ended_s, asked_s=LATE_S, error=error, stopped_job=stopped_job)


def ended(name: str = "e", ended_s: float = 60.0) -> Node:
    return Node(name, "succeeded", ended_s=ended_s)


def stopped_by_kill(trained_s: float = 0.0) -> Node:
    return Node("k", "failed", ended_s=60.0, stopped_job=True, trained_s=trained_s)


def refused(count: int, ended_s: float = 10.0) -> list[Node]:
    asked_s = [ended_s + 10.0 * i for i in range(count)]
    return [Node("r", "failed", ended_s=s, asked_s=s, error="quota exceeded", refused=True) for s in asked_s]


def newest_refused(count: int, of: int) -> list[Node]:
    *others, last = reversed(refused(count, ended_s=59.0))
    return [*others, replace(last, refusals_in_a_row=of)]


def not_started() -> Node:
    return Node("n", "failed", ended_s=9.0, error="its command could not start: no such file", could_not_start=True)


def unregistered(idle_s: float, warned: bool = False) -> Node:
    return Node("b", "running", idle_s=idle_s, age_s=idle_s, warned=warned)


def saved(node: Node, step: int) -> Node:
    return replace(node, checkpoint_step=step)


def old(node: Node, asked_s: float) -> Node:
    """A node that has been useful since."""
    return replace(node, asked_s=asked_s, trained_s=400.0)


def test_job_lost_in_a_later_fit_ends_with_1() -> None:
    found = reconcile(ControllerView("finished", 2, [killed()], unfinished_fit=2))
    assert [type(action) for action in found] == [FinishJob]
    assert isinstance(found[0], FinishJob)
    assert found[0].exit_code == 1


def training(wanted: int, *nodes: Node, failures: int = 0, since_s: float = LATE_S) -> ControllerView:
    return ControllerView("training", wanted, nodes, failures_in_a_row=failures, since_failure_s=since_s)


def stopped_at(step: int, *nodes: Node) -> ControllerView:
    return replace(training(1, *nodes), checkpoint_step=step)


def starting(*nodes: Node, wanted: int = 2, failures: int = 2, since_s: float = LATE_S) -> ControllerView:
    return ControllerView("starting", wanted, nodes, failures_in_a_row=failures, since_failure_s=since_s)


def alike(count: int, **changes: Any) -> list[Node]:
    """Nodes that failed with one error while others trained."""
    return [replace(faulty(stopped_job=False), **changes)] * count


def growing(*nodes: Node, wanted: int = 2, since_s: float = LATE_S) -> ControllerView:
    """A job that trains with node a, and is to grow."""
    return training(wanted, member("a"), *nodes, failures=1, since_s=since_s)


KILLED_JOINERS = [killed(f"k{i}") for i in range(11)]
OLD_PAIR = [old(member("a"), 70.0), old(member("b"), 70.0)]
OUT_OF_PLACE = replace(joining("b"), workerless_s=31.0)  # its worker has left


@pytest.mark.parametrize(
    "situation, view, kinds",
    [
        ("nothing was started yet", ControllerView("none", 2, []), [AddNode, AddNode]),
        ("a node that joins and fails again and again is started ever more rarely", growing(*alike(7), since_s=20.0), []),
        ("even before its growth is given up", growing(*alike(2), since_s=0.9), []),
        ("but not never", growing(*alike(2), since_s=1.1), [AddNode]),
        ("three nodes that joined have failed alike", growing(*alike(3)), []),
        ("and a user has requested another plan since", growing(*alike(3, forgiven=True)), [AddNode]),
        ("they have failed in three ways", growing(*(faulty(error=e, stopped_job=False) for e in "xyz")), [AddNode]),
        ("they had trained for long", growing(*alike(3, trained_s=301.0)), [AddNode]),
        ("one that came after them is of use", growing(old(member("b"), 50.0), *alike(3), wanted=3), [AddNode]),
        ("the others were of use before", training(3, *OLD_PAIR, *alike(3), failures=1), []),
        ("there are fewer workers than the job needs", replace(growing(*alike(3)), fewest=2), [AddNode]),
        ("joiners are killed again and again", training(2, member("a"), *KILLED_JOINERS, since_s=290.0), []),
        ("and another one is tried", training(2, member("a"), *KILLED_JOINERS, since_s=301.0), [AddNode]),
        ("a node is refused while others train", training(2, member("a"), *refused(1, ended_s=1.9)), []),
        ("it is tried again", training(2, member("a"), *refused(1, ended_s=2.1)), [AddNode]),
        ("ever more rarely", training(2, member("a"), *refused(12, ended_s=59.0)), []),
        ("forever", training(2, member("a"), *refused(12, ended_s=61.0)), [AddNode]),
        ("though the oldest are forgotten", training(2, member("a"), *newest_refused(8, of=11)), []),
        ("before the first start, too", ControllerView("none", 2, [joining(), *refused(12, ended_s=61.0)]), [AddNode]),
        ("one could not start, maybe by its host", ControllerView("none", 1, [not_started()], since_failure_s=9.0), [AddNode]),
        ("two could not start", ControllerView("none", 1, [not_started(), not_started()]), [FinishJob]),
        ("all are refused at the first start", ControllerView("none", 2, refused(1)), [FinishJob]),
        ("the last one is lost, and no other is accepted", training(1, killed(ended_s=400.0), *refused(8)), [FinishJob]),
        ("all is as planned", training(2, member("a"), member("b")), []),
        ("the plan has grown", training(3, member("a")), [AddNode, AddNode]),
        ("the one it grew by is joining", training(2, member("a"), joining("b")), []),
        ("the plan has shrunk: the coordinator chooses who leaves", training(1, member("a"), member("b")), []),
        ("a node came that the plan has no more room for", training(1, member("a"), joining("b", 5.0)), []),
        ("and it does not end by itself", training(1, member("a"), joining("b", 61.0)), [CancelNode]),
        ("a joiner takes its time", training(2, member("a"), joining("b", LATE_S)), []),
        ("but has not even reached etcd", training(2, member("a"), unregistered(LATE_S, warned=True)), [CancelNode]),
        ("a worker has left but its node does not end", training(1, member("a"), OUT_OF_PLACE), [CancelNode]),
        (
            "and its agent was not seen since an earlier controller's time",
            training(1, member("a"), replace(OUT_OF_PLACE, agent_seen=False, age_s=LATE_S, warned=True)),
            [CancelNode],
        ),
        (
            "a worker has left, and its node ends while another one takes long to come",
            training(2, member("a"), replace(joining("b"), workerless_s=5.0), joining("c", 61.0)),
            [],
        ),
        ("it is replaced once it has ended", training(2, member("a"), ended("b")), [AddNode]),
        ("a node was killed: it is replaced after a moment", growing(killed()), [AddNode]),
        ("but not before", growing(killed(), since_s=0.1), []),
        ("and later each time", training(2, member("a"), killed(), failures=4, since_s=3.9), []),
        ("many were killed, nothing trains", training(2, *[killed()] * 8, failures=8), [FinishJob]),
        ("many were killed, but others train", training(2, member("a"), *[killed()] * 8, failures=8), [AddNode]),
        ("the same error stopped the job twice", training(1, faulty("f"), faulty("g")), [AddNode]),
        ("and once more", training(1, *[faulty()] * 3), [FinishJob]),
        ("with another process id in it", training(1, *(faulty(error=f"pid {n} died") for n in (7, 8, 9))), [FinishJob]),
        ("with a checkpoint in between", stopped_at(5, faulty(), *[saved(faulty(), 5)] * 2), [AddNode]),
        ("with none since", stopped_at(5, *[saved(faulty(), 5)] * 3), [FinishJob]),
        ("with a node that was killed", training(1, *[faulty()] * 3, killed(ended_s=65.0)), [AddNode]),
        ("it was killed again and again", training(1, *[stopped_by_kill()] * 19), [AddNode]),
        ("and once more, though rounds were formed", training(1, *[stopped_by_kill()] * 20, failures=1), [FinishJob]),
        ("though one of them trained for long", training(1, *[stopped_by_kill()] * 19, stopped_by_kill(901.0)), [AddNode]),
        ("and once more, with nodes left", training(2, joining("b"), *[faulty()] * 3), [CancelNode]),
        ("three different errors stopped it", training(1, *(faulty(error=e) for e in "xyz")), [AddNode]),
        ("three nodes failed while others trained", training(1, *alike(3)), [AddNode]),
        ("three equal errors in as many hours", training(1, *(faulty(ended_s=h * 3600.0) for h in (1, 2, 3))), [FinishJob]),
        ("after an hour of training each", training(1, *[replace(faulty(), trained_s=3600.0)] * 3), [AddNode]),
        ("all left, although training has not finished", training(1, ended()), [FinishJob]),
        ("all left a moment ago: perhaps it is done", training(1, ended(ended_s=0.5)), []),
        ("the script fails before it trains", ControllerView("none", 2, [faulty(), joining()]), [CancelNode]),
        ("and nothing is left", ControllerView("starting", 1, [faulty()]), [FinishJob]),
        ("because another node was killed", starting(killed(ended_s=61.0), faulty(), since_s=60.0), [AddNode, AddNode]),
        ("it would fail without that", starting(killed(ended_s=99.0), faulty()), [FinishJob]),
        (
            "a node is killed before it trains",
            replace(starting(killed(), wanted=1, failures=1, since_s=9.0), phase="none"),
            [AddNode],
        ),
        ("a script that trains nothing has ended", ControllerView("none", 2, [ended("a"), ended("b")]), [FinishJob]),
        ("on one of two nodes", ControllerView("none", 2, [ended("a"), joining("b")]), []),
        ("and the other one was killed", ControllerView("none", 2, [ended("a", 99.0), killed("b")]), [FinishJob]),
        ("finished, and the workers run what follows `fit`", ControllerView("finished", 2, [member("a")]), []),
        ("finished, and a joiner does not end", ControllerView("finished", 2, [member("a"), joining("b", 31.0)]), [CancelNode]),
        ("finished, all have ended", ControllerView("finished", 2, [ended("a"), killed("b")]), [FinishJob]),
        ("failed, as another controller found", ControllerView("failed", 1, [member("a")]), [CancelNode]),
        ("a user ends it", ControllerView("training", 2, [member("a"), joining("b")], stop="x"), [CancelNode, CancelNode]),
        ("and all nodes have ended", ControllerView("training", 2, [killed("a")], stop="enough"), [FinishJob]),
        ("a user ends what follows `fit`", ControllerView("finished", 1, [member("a")], stop="enough"), [CancelNode]),
        ("a node waits in the queue", training(1, Node("a", "pending", idle_s=999.0)), []),
        ("a node does not reach etcd", training(1, unregistered(61.0)), [Warn]),
        ("which was logged already", training(1, unregistered(99.0, warned=True)), []),
    ],
)
def test_each_situation_has_its_answer(situation: str, view: ControllerView, kinds: list[type[Action]]) -> None:
    assert [type(action) for action in reconcile(view)] == kinds, situation


@pytest.mark.parametrize(
    ("view", "exit_code"),
    [
        (ControllerView("finished", 1, [ended()]), 0),
        (ControllerView("finished", 2, [ended("a"), killed("b")]), 0),
        (ControllerView("finished", 2, [ended("a"), faulty("b")]), 0),
        (ControllerView("finished", 2, [ended("a"), replace(faulty("b"), after_training=True)]), 1),
        (ControllerView("finished", 2, [ended("a"), replace(killed("b"), after_training=True)]), 1),
        (ControllerView("none", 1, [ended()]), 0),
        (ControllerView("failed", 1, [ended()]), 1),
        (ControllerView("none", 1, [], stop="enough"), 1),
        (ControllerView("finished", 1, [ended()], stop="enough"), 0),
        (training(1, *[faulty()] * 3), 1),
        (training(1, ended()), 1),
        (ControllerView("starting", 1, [faulty()]), 1),
        (ControllerView("training", 1, [faulty()], has_stepped=False), 1),
    ],
)
def test_exit_code_is_zero_only_if_the_script_has_ended_well(view: ControllerView, exit_code: int) -> None:
    (give,) = reconcile(view)
    assert isinstance(give, FinishJob)
    assert give.exit_code == exit_code
    assert give.reason


@pytest.mark.parametrize(
    ("nodes", "away_s", "gives_up"),
    [
        ([ended()], 0.0, False),
        ([ended("a", 121.0), killed("b", 130.0)], 125.0, True),
        ([ended("a", 500.0)], 119.0, False),
        ([ended("a", 119.0)], 500.0, False),  # etcd's recovery may have taken longer than any node lived
        ([ended("a", 500.0), member("b")], 500.0, False),
        ([], 500.0, False),
    ],
)
def test_job_without_etcd_ends_after_its_nodes_and_a_pause(nodes: list[Node], away_s: float, gives_up: bool) -> None:
    actions = reconcile(ControllerView("training", 1, nodes, may_act=False, etcd_away_s=away_s))
    assert [type(action) for action in actions] == ([FinishJob] if gives_up else [])


def test_the_reason_for_giving_up_names_the_error() -> None:
    (give,) = reconcile(training(1, *[faulty(error="KeyError: 'label'")] * 3))
    assert isinstance(give, FinishJob)
    assert "KeyError: 'label'" in give.reason


def left_too_few(ended_s: float, error: str = "ValueError: bad", place: str = "") -> Node:
    return replace(faulty(ended_s=ended_s, error=error, stopped_job=False), left_too_few=True, place=place)


STARVED = [left_too_few(90.0), left_too_few(60.0), left_too_few(40.0)]
AT_ONE_PLACE = [left_too_few(10.0 * i, f"KeyError: {name!r}", "data.py:7 (get)") for i, name in enumerate("xyz")]


@pytest.mark.parametrize(
    ("nodes", "gives_up"),
    [
        (STARVED, True),
        (STARVED[1:], False),
        ([*STARVED, old(member("b"), 100.0)], True),  # of use before the error came
        ([*STARVED, old(member("b"), 70.0)], False),
        (AT_ONE_PLACE, True),
        ([replace(node, place="") for node in AT_ONE_PLACE], False),
        ([replace(AT_ONE_PLACE[0], place="data.py:8 (get)"), *AT_ONE_PLACE[1:]], False),
        ([replace(AT_ONE_PLACE[0], error="OSError: 'x'"), *AT_ONE_PLACE[1:]], False),
        ([replace(node, forgiven=True) for node in STARVED], False),
        ([*STARVED, killed(ended_s=50.0)], False),  # their errors may be its consequences
    ],
)
def test_error_that_leaves_too_few_members_three_times_ends_the_job(nodes: list[Node], gives_up: bool) -> None:
    actions = reconcile(replace(training(2, member("a"), *nodes), fewest=2))
    assert (CancelNode("a", "the job has failed") in actions) == gives_up


seconds = st.floats(0, 1000)
nodes = st.builds(
    Node,
    name=st.just(""),
    status=st.sampled_from(["pending", "running", "succeeded", "failed", "cancelled", "gone"]),
    agent_seen=st.booleans(),
    workers=st.sampled_from([(), ("worker",)]),
    num_members=st.integers(0, 1),
    workerless_s=seconds,
    idle_s=seconds,
    age_s=seconds,
    asked_s=seconds,
    ended_s=seconds,
    trained_s=seconds,
    error=st.sampled_from(["", "ValueError: x"]),
    refused=st.booleans(),
    stopped_job=st.booleans(),
    left_too_few=st.booleans(),
    checkpoint_step=st.integers(0, 2),
    forgiven=st.booleans(),
    warned=st.booleans(),
)
views = st.builds(
    ControllerView,
    phase=st.sampled_from(["none", "starting", "training", "finished", "failed"]),
    wanted=st.integers(1, 5),
    nodes=st.lists(nodes, max_size=8).map(lambda found: [replace(n, name=f"node{i}") for i, n in enumerate(found)]),
    may_act=st.booleans(),
    failures_in_a_row=st.integers(0, 10),
    since_failure_s=seconds,
    has_stepped=st.booleans(),
    fewest=st.integers(1, 3),
    checkpoint_step=st.integers(0, 2),
)


@given(views)
def test_there_are_never_more_nodes_than_planned_because_of_us(view: ControllerView) -> None:
    living = [node for node in view.nodes if node.is_living]
    added = sum(isinstance(action, AddNode) for action in reconcile(view))
    assert added == 0 or len(living) + added <= view.wanted


@given(views)
def test_missing_nodes_are_added_or_the_reason_is_given(view: ControllerView) -> None:
    living = [node for node in view.nodes if node.is_living]
    policy = FailurePolicy(max_backoff_s=0.0, max_long_backoff_s=0.0, settle_s=0.0)
    actions = reconcile(view, policy)
    if view.may_act and view.phase == "training" and len(living) < view.wanted and not actions:
        assert why_none_is_added(view, policy) or (not living and any(node.ended_s == 0.0 for node in view.nodes))


@given(views)
def test_nothing_is_done_without_the_right_to_act(view: ControllerView) -> None:
    assert reconcile(replace(view, may_act=False)) == []


@given(views)
def test_only_living_nodes_are_ended_and_each_once(view: ControllerView) -> None:
    living = {node.name for node in view.nodes if node.is_living}
    names = [action.name for action in reconcile(view) if isinstance(action, CancelNode)]
    assert set(names) <= living
    assert len(names) == len(set(names))


@given(views)
def test_a_training_worker_is_never_ended_while_the_job_goes_on(view: ControllerView) -> None:
    busy = {node.name for node in view.nodes if node.is_member and node.workers}
    actions = reconcile(view)
    names = {action.name for action in actions if isinstance(action, CancelNode)}
    gives_up = names == {node.name for node in view.nodes if node.is_living}
    assert gives_up or not names & busy


@given(views)
def test_the_job_is_given_up_only_when_no_node_is_left(view: ControllerView) -> None:
    actions = reconcile(view)
    if any(isinstance(action, FinishJob) for action in actions):
        assert len(actions) == 1
        assert not any(node.is_living for node in view.nodes)


@given(views)
def test_a_job_that_is_over_gets_no_new_node(view: ControllerView) -> None:
    if view.phase in ("finished", "failed"):
        assert not any(isinstance(action, AddNode) for action in reconcile(view))


@given(st.integers(1, 30))
def test_the_pause_before_a_replacement_grows_but_has_a_limit(failures: int) -> None:
    policy = FailurePolicy(max_failures=100)
    views_ = [training(1, killed(), failures=n, since_s=29.9) for n in (failures, failures + 1)]
    now, later = (bool(reconcile(view, policy)) for view in views_)
    assert now or not later
    assert reconcile(training(1, killed(), failures=failures, since_s=30.0), policy) == [AddNode()]


def test_failure_after_training_is_named() -> None:
    first, second = (replace(faulty(name, ended_s=s), after_training=True) for name, s in (("a", 9.0), ("b", 5.0)))
    [end] = reconcile(ControllerView("finished", 2, [second, first]))
    assert end == FinishJob(1, f"training has finished, but a failed after it: {first.error}", is_trained=True)


@pytest.mark.parametrize(("phase", "reason"), [("none", "no worker joined"), ("starting", "no Trainer reached")])
def test_end_without_training_is_reported(phase: Any, reason: str) -> None:
    [end] = reconcile(ControllerView(phase, 1, [ended()]))
    assert isinstance(end, FinishJob)
    assert (end.exit_code, end.is_trained) == (0, False)
    assert f"the script ended without training: {reason}" in end.reason


SMALL, LARGE = NodeSize(1, 1024), NodeSize(1, 2048)


def sized(node: Node, size: NodeSize) -> Node:
    return replace(node, size=size, workers=(f"worker-{node.name}",) if node.workers else (), is_accepted=True)


def planned(size: NodeSize, wanted: int, *nodes: Node) -> ControllerView:
    """A job that trains with all members among `nodes`, in this order."""
    members = {worker: node.name for node in nodes if node.is_member for worker in node.workers}
    return replace(training(wanted, *nodes), size=size, members=members)


def waiting(name: str, size: NodeSize) -> Node:
    return sized(Node(name, "pending", idle_s=1.0, asked_s=1.0), size)


def test_oversized_pending_node_is_withdrawn_before_another_is_added() -> None:
    view = planned(SMALL, 2, sized(member("a"), SMALL), waiting("b", LARGE))
    assert reconcile(view) == [WithdrawNode("b"), AddNode()]


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(waiting("b", SMALL), id="of-the-planned-size"),
        pytest.param(replace(waiting("b", LARGE), is_accepted=False), id="of-unknown-fate"),
        pytest.param(sized(joining("b"), LARGE), id="that-runs"),
    ],
)
def test_other_nodes_are_not_withdrawn(node: Node) -> None:
    assert reconcile(planned(SMALL, 2, sized(member("a"), SMALL), node)) == []


def test_withdrawn_node_counts_as_missing_for_people() -> None:
    view = planned(SMALL, 2, sized(member("a"), SMALL), waiting("b", LARGE), *[faulty(stopped_job=False)] * 3)
    assert "no more nodes are added" in why_none_is_added(view)


def test_first_of_the_members_with_small_nodes_is_replaced() -> None:
    view = planned(LARGE, 3, sized(member("a"), LARGE), sized(member("b"), SMALL), sized(member("c"), SMALL))
    assert reconcile(view) == [ReplaceWorker("worker-b", f"a node of {LARGE} instead of {SMALL}")]


def test_small_node_stays_while_the_job_changes() -> None:
    view = planned(LARGE, 2, sized(member("a"), SMALL), sized(member("b"), SMALL))
    assert reconcile(replace(view, leaving={"worker-b"})) == []
    assert reconcile(replace(view, nodes=[*view.nodes, sized(joining("c"), LARGE)], wanted=3)) == []
    assert reconcile(replace(view, phase="starting")) == []


def test_member_on_a_reclaimed_node_is_replaced_once() -> None:
    node = replace(sized(member("a"), SMALL), notice=SOON)
    view = planned(SMALL, 1, node)
    asked = ReplaceWorker("worker-a", "a will be taken away soon (slurm)", SOON)
    assert reconcile(view) == [asked]
    assert reconcile(replace(view, leaving={"worker-a"}, notices={"worker-a": SOON})) == []
    assert reconcile(replace(view, leaving={"worker-a"})) == [asked]  # asked to leave for another reason


def test_deadline_of_a_node_follows_its_first_notice() -> None:
    later = EndNotice("slurm", 5e9)
    view = planned(SMALL, 1, replace(sized(member("a"), SMALL), notice=later))
    known = replace(view, leaving={"worker-a"}, notices={"worker-a": SOON})
    assert [(action.worker, action.notice) for action in reconcile(known)] == [("worker-a", later)]  # type: ignore[union-attr]
    assert reconcile(replace(known, notices={"worker-a": later})) == []


def test_node_killed_for_want_of_memory_asks_for_more() -> None:
    nodes = [sized(member("a"), SMALL), replace(sized(killed("b"), SMALL), lacks_memory=True)]
    assert enlargements(nodes) == [EnlargeNodes("b", SMALL, 2048)]


def test_plan_is_kept_within_the_limits() -> None:
    limits = Limits(2, 4, NodeSize(1, 1024), NodeSize(4, 4096))
    wanted = [ControllerView.of(JobView(plan=PlanRecord(n, "user", "", True)), limits, []).wanted for n in (1, 3, 9)]
    assert wanted == [2, 3, 4]
    recommended = ControllerView.of(JobView(plan=PlanRecord(3, "user", "", False, node_cpus=2)), limits, [])
    assert (recommended.wanted, recommended.size) == (2, NodeSize(2, 1024))


def test_worker_to_be_replaced_is_counted_until_it_leaves() -> None:
    def worker(name: str) -> WorkerRecord:
        return WorkerRecord(f"worker-{name}", f"agent-{name}", "h", 1, 0, "127.0.0.1", 1, "active", 1)

    view = JobView(
        round=RoundRecord(1, ["worker-b", "worker-a", "worker-gone"], "", "start", True),
        workers={"worker-a": worker("a"), "worker-b": worker("b")},
        agents={f"agent-{n}": AgentRecord(f"agent-{n}", "h", 1, 1, "running", {"node": n}) for n in "ab"},
        drains={"worker-gone"},
        replacements={"worker-a"},
    )
    found = ControllerView.of(view, Limits(2, 2), [])
    assert found.wanted == 3
    # It has asked to leave because its node's end is near, and the job still needs it.
    noticed = replace(view, drains={"worker-a"}, replacements=frozenset(), notices={"worker-a": SOON})
    assert ControllerView.of(noticed, Limits(2, 2), []).wanted == 3
    assert list(found.members.items()) == [("worker-b", "b"), ("worker-a", "a")]
    assert found.leaving == {"worker-a"}


sizes = st.sampled_from([SMALL, LARGE])


@given(views, st.lists(st.tuples(sizes, st.booleans(), st.booleans()), min_size=8, max_size=8), sizes)
def test_no_node_is_ended_twice_and_at_most_one_is_too_small(
    view: ControllerView, facts: list[tuple[NodeSize, bool, bool]], size: NodeSize
) -> None:
    nodes_ = [
        replace(sized(node, own), is_accepted=taken, notice=SOON if node.workers and is_noticed else None)
        for node, (own, taken, is_noticed) in zip(view.nodes, facts, strict=False)
    ]
    members = {worker: node.name for node in nodes_ if node.is_member for worker in node.workers}
    view = replace(view, nodes=nodes_, size=size, members=members, may_act=True)
    actions = reconcile(view)
    ended_ = [action.name for action in actions if isinstance(action, CancelNode | WithdrawNode)]
    assert len(ended_) == len(set(ended_))
    living = sum(node.is_living for node in nodes_)
    added = sum(isinstance(action, AddNode) for action in actions)
    withdrawn = sum(isinstance(action, WithdrawNode) for action in actions)
    assert added == 0 or living - withdrawn + added <= view.wanted
    replaced = [action for action in actions if isinstance(action, ReplaceWorker)]
    assert sum("instead of" in action.reason for action in replaced) <= 1


def pair(name: str, num_members: int = 2, **changes: Any) -> Node:
    """A node with two workers."""
    return replace(member(name), num_members=num_members, workers=(f"{name}-0", f"{name}-1"), **changes)


def view_of_pairs(num_planned: int, members: str, replacements: frozenset[str] = frozenset()) -> JobView:
    """Workers a0, a1, b0 and so on: two on each of the nodes a, b, ..."""
    workers = members.split()
    return JobView(
        plan=PlanRecord(num_planned, "user", "", True),
        round=RoundRecord(1, workers, "", "start", True),
        workers={w: WorkerRecord(w, f"agent-{w}", "h", 1, 0, "127.0.0.1", 1, "active", 1) for w in workers},
        agents={f"agent-{w}": AgentRecord(f"agent-{w}", "h", 1, 1, "running", {"node": w[0]}) for w in workers},
        replacements=replacements,
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 40))
def test_no_plan_starts_a_node_that_it_would_not_fill(each: int, low: int, more: int, num_planned: int) -> None:
    limits = Limits(low * each, (low + more) * each, workers_per_node=each)
    wanted = ControllerView.of(JobView(plan=PlanRecord(num_planned, "user", "", True)), limits, []).wanted
    assert low <= wanted <= low + more
    if limits.min_workers <= num_planned <= limits.max_workers:
        assert 0 <= num_planned - wanted * each < each


@pytest.mark.parametrize(
    ("num_planned", "wanted"), [(None, 2), (1, 2), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (9, 8), (100, 8)]
)
def test_plan_between_two_sizes_is_rounded_down(num_planned: int | None, wanted: int) -> None:
    limits = Limits(1, 9, sizes=(2, 4, 8))
    plan = PlanRecord(num_planned, "user", "", True) if num_planned is not None else None
    assert ControllerView.of(JobView(plan=plan), limits, []).wanted == wanted


@pytest.mark.parametrize(("low", "high"), [(1, 2), (2, 3)])
def test_limits_that_do_not_fill_nodes_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"{low} to {high} workers do not fill nodes of 2"):
        Limits(low, high, workers_per_node=2)


def test_replaced_workers_of_one_node_cost_one_more_node() -> None:
    limits = Limits(2, 8, workers_per_node=2)
    assert ControllerView.of(view_of_pairs(4, "a0 a1 b0 b1"), limits, []).wanted == 2
    assert ControllerView.of(view_of_pairs(4, "a0 a1 b0 b1", frozenset({"a0", "a1"})), limits, []).wanted == 3
    assert ControllerView.of(view_of_pairs(4, "a0 a1 b0 b1", frozenset({"a0", "b1"})), limits, []).wanted == 4


def test_successor_of_a_node_that_is_given_back_is_started_before_its_end() -> None:
    limits = Limits(4, 8, workers_per_node=2)
    job = JobRecord("training", True, 4, 8, "1", workers_per_node=2)
    view = replace(view_of_pairs(4, "a0 b0 b1"), job=job)
    assert ControllerView.of(view, limits, []).wanted == 2  # its other worker is being started again
    assert ControllerView.of(replace(view, drains=frozenset({"a0"})), limits, []).wanted == 3
    drained = replace(view_of_pairs(4, "a0 a1 b0 b1"), job=job, drains=frozenset({"a0", "a1"}))
    assert ControllerView.of(drained, limits, []).wanted == 2  # asked for by `dlrover drain`


def test_all_workers_of_a_reclaimed_node_are_replaced() -> None:
    view = training(2, pair("a"), pair("b", notice=SOON))
    asked = [ReplaceWorker(f"b-{i}", "b will be taken away soon (slurm)", SOON) for i in (0, 1)]
    assert reconcile(view) == asked
    assert reconcile(replace(view, leaving={"b-0"}, notices={"b-0": SOON})) == asked[1:]
    assert reconcile(replace(view, leaving={"b-0", "b-1"}, notices={"b-0": SOON, "b-1": SOON})) == []


def test_death_of_a_worker_replaces_no_node_while_its_agent_restarts_it() -> None:
    assert reconcile(training(2, pair("a"), pair("b", num_members=1, agentless_s=0.0))) == []


@pytest.mark.parametrize(("agentless_s", "is_replaced"), [(POLICY.whole_s, False), (POLICY.whole_s + 1.0, True)])
def test_node_without_one_of_its_agents_is_replaced_after_a_while(agentless_s: float, is_replaced: bool) -> None:
    node = replace(pair("b", num_members=1, agentless_s=agentless_s), workers=("b-0",))
    found = reconcile(training(2, pair("a"), node))
    assert [type(action) for action in found] == [ReplaceWorker] * is_replaced


def test_members_of_all_nodes_count_towards_the_fewest_workers() -> None:
    failed = [faulty(f"f{i}", stopped_job=False) for i in range(3)]
    few = replace(training(2, pair("a", num_members=1), *failed, failures=1), fewest=2)
    assert reconcile(few) == [AddNode()]
    assert reconcile(replace(few, nodes=[pair("a"), *failed])) == []  # growth by nodes that fail alike is given up


def test_undersized_node_is_replaced_with_all_its_workers() -> None:
    view = planned(LARGE, 2, replace(pair("a"), size=LARGE), replace(pair("b"), size=SMALL))
    assert [action.worker for action in reconcile(view) if isinstance(action, ReplaceWorker)] == ["b-0", "b-1"]
