"""TorchElastic's contract under its stock agent, with a real etcd and scripts that do not use our package.

These tests cover for our backend the ground of torch's own tests of its agent, rendezvous and launcher: ranks, failures and
restarts, workers that end at different times, nodes that come, go and are refused, closing, timeouts, logs and return values.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
)

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import Keys
from tests.support import elastic_functions
from tests.support.elastic_agents import ElasticAgents, Node, Nursery, Outcome, RunningAgent, Started
from tests.support.waiting import eventually

SOON_S = 30.0
"""Seconds: far longer than an immediate event takes under load, far shorter than a timeout that must not be awaited."""


def succeeded(agents: Sequence[RunningAgent], timeout_s: float = 60.0) -> list[Outcome]:
    """Outcomes of agents, all of which must succeed."""
    outcomes = [agent.wait(timeout_s) for agent in agents]
    for agent, outcome in zip(agents, outcomes, strict=True):
        assert outcome.state == "SUCCEEDED", f"{agent}: {outcome}; its output:\n{agent.output}"
    return outcomes


def assert_ranks(starts: Sequence[Started]) -> None:
    """Assert the numbering of a round: agents by group rank, an agent's workers by local rank, both in all and per role."""
    assert len({start.master for start in starts}) == 1
    first_rank = 0
    first_role_rank = Counter[str]()
    role_sizes = Counter(start.role for start in starts)
    by_group: dict[int, list[Started]] = defaultdict(list)
    for start in starts:
        by_group[start.group_rank].append(start)
    assert sorted(by_group) == list(range(len(by_group)))
    for _, group in sorted(by_group.items()):
        for local_rank, start in enumerate(sorted(group, key=lambda start: start.local_rank)):
            assert start.agent == group[0].agent
            assert (start.local_rank, start.local_world_size) == (local_rank, len(group))
            assert (start.rank, start.world_size) == (first_rank + local_rank, len(starts))
            assert start.role_rank == first_role_rank[start.role] + local_rank
            assert (start.role_world_size, start.group_world_size) == (role_sizes[start.role], len(by_group))
        first_rank += len(group)
        first_role_rank[group[0].role] += len(group)


# -- ranks and environment


@pytest.mark.parametrize(
    "nodes",
    [
        [("default", 3)],
        [("default", 1)] * 4,
        [("default", 2)] * 3,
        [("default", 1), ("default", 2), ("default", 3)],
        [("master", 3), *[("trainer", 2)] * 2, *[("ps", 1)] * 2],
        [("master", 4), ("trainer", 1), ("trainer", 2), ("trainer", 3), ("ps", 2), ("ps", 1)],
    ],
    ids=["one agent", "one worker each", "homogeneous", "heterogeneous", "roles", "heterogeneous roles"],
)
def test_every_worker_gets_the_ranks_of_its_agent_and_role(agents: ElasticAgents, nodes: list[tuple[str, int]]) -> None:
    running = [
        agents.start_one(Node("", min_nodes=len(nodes), max_nodes=len(nodes), role=role, nproc=nproc)) for role, nproc in nodes
    ]
    outcomes = succeeded(running)
    starts = agents.starts()
    assert_ranks(starts)
    assert Counter((start.agent, start.role) for start in starts) == {
        (number, role): nproc for number, (role, nproc) in enumerate(nodes)
    }
    ranks = [rank for outcome in outcomes for rank in outcome.return_values]
    assert sorted(ranks) == list(range(len(starts)))


def test_identical_agents_get_the_same_ranks(agents: ElasticAgents) -> None:
    node = Node("", min_nodes=2, max_nodes=2, nproc=2, environ={"TORCH_ELASTIC_WORKER_IDENTICAL": "1"})
    succeeded(agents.start(node, 2))
    assert_ranks(agents.starts())


def test_a_worker_gets_the_whole_environment_of_torchelastic(agents: ElasticAgents, run_id: str) -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    succeeded([agents.start_one(Node("", max_restarts=5, role="trainer", environ=environ))])
    (start,) = agents.starts()
    expected = {
        "ROLE_NAME": "trainer",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # every round has its own store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "OMP_NUM_THREADS": "1",
    }
    assert {name: start.environ.get(name) for name in expected} == expected
    assert "TORCHELASTIC_TIMER_FILE" not in start.environ or start.environ["TORCHELASTIC_TIMER_FILE"]


def test_workers_meet_at_the_address_of_the_first_node(agents: ElasticAgents) -> None:
    running = [agents.start_one(Node("", min_nodes=2, max_nodes=2, local_addr=f"127.0.0.{host}")) for host in (2, 3)]
    succeeded(running)
    first, second = sorted(agents.starts(), key=lambda start: start.rank)
    assert first.master == second.master
    assert first.environ["MASTER_ADDR"] == f"127.0.0.{first.agent + 2}"


def test_a_master_that_the_user_has_chosen_is_kept(agents: ElasticAgents) -> None:
    succeeded([agents.start_one(Node("", master_addr="10.1.2.3", master_port=1234))])
    (start,) = agents.starts()
    assert start.master == "10.1.2.3:1234"


# -- functions, tensors, process groups


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_return_values_of_functions_come_back_by_global_rank(agents: ElasticAgents, start_method: str) -> None:
    node = Node(elastic_functions.square_of_rank, (3,), min_nodes=2, max_nodes=2, start_method=start_method)
    values: dict[int, Any] = {}
    for outcome in succeeded(agents.start(node, 2)):
        values.update(outcome.return_values)
    assert sorted(values) == [0, 1]
    assert values[0] is None
    assert torch.equal(values[1], torch.full((2, 3), 3.0))


def test_the_message_of_a_function_that_raised_comes_back(agents: ElasticAgents) -> None:
    outcome = agents.start_one(Node(elastic_functions.fail_with_a_reason, start_method="fork")).wait()
    assert (outcome.state, outcome.exit_codes) == ("FAILED", {0: 1})
    assert "ValueError: rank 0 does not feel well" in str(outcome.messages[0])


def test_workers_of_several_agents_sum_up_their_ranks_with_gloo(agents: ElasticAgents) -> None:
    nodes = [
        Node(elastic_functions.sum_of_ranks, min_nodes=3, max_nodes=3, nproc=nproc, start_method="fork") for nproc in (1, 2, 3)
    ]
    outcomes = succeeded([agents.start_one(node) for node in nodes])
    assert [list(outcome.return_values.values()) for outcome in outcomes] == [[15.0], [15.0] * 2, [15.0] * 3]
    assert_ranks(agents.starts())


def test_workers_of_two_roles_call_each_other(agents: ElasticAgents) -> None:
    nodes = [
        Node(elastic_functions.ask_the_worker, min_nodes=2, max_nodes=2, role=role, start_method="fork")
        for role in ("master", "worker")
    ]
    outcomes = succeeded([agents.start_one(node) for node in nodes])
    assert [list(outcome.return_values.values()) for outcome in outcomes] == [["HELLO"], [""]]


@pytest.mark.parametrize("_attempt", range(3))
def test_gloo_job_with_a_killed_worker_finishes(agents: ElasticAgents, _attempt: int) -> None:
    node = Node(elastic_functions.step_with_one_killed, min_nodes=2, max_nodes=2, nproc=2, max_restarts=1, start_method="fork")
    outcomes = succeeded(agents.start(node, 2), timeout_s=90)
    assert sorted(rank for outcome in outcomes for rank in outcome.return_values) == [0, 1, 2, 3]
    assert_ranks(agents.starts()[4:])


def test_gloo_job_takes_a_late_node_and_goes_on_when_it_is_lost(agents: ElasticAgents) -> None:
    node = Node(elastic_functions.step_until_done, min_nodes=1, max_nodes=2, max_restarts=1, start_method="fork")
    first = agents.start_one(node)
    agents.wait_for_starts(1, world_size=1)
    late = agents.start_one(node)
    starts = agents.wait_for_starts(2, world_size=2)
    assert {start.agent: start.rank for start in starts} == {0: 0, 1: 1}  # the first node keeps its rank
    assert {start.restart for start in agents.starts()} == {0}  # a change of membership is not a failure
    eventually(lambda: agents.has("stepped-in-2"), "both have made a step together", 60)
    agents.kill_node(late)
    assert [start.agent for start in agents.wait_for_starts(2, world_size=1)] == [0, 0]
    agents.leave("done")
    (outcome,) = succeeded([first])
    assert (outcome.return_values, outcome.restarts_left) == ({0: 1}, 0)


# -- failures and restarts


def test_failing_worker_restarts_its_group_as_often_as_allowed(agents: ElasticAgents) -> None:
    source = "(me.wait_for_all(), sys.exit(7)) if me.rank == 1 else me.wait_for('never')"
    node = Node(source, nproc=2, max_restarts=2)
    outcome = agents.start_one(node).wait()
    assert (outcome.state, outcome.exit_codes[1], outcome.restarts_left) == ("FAILED", 7, 0)
    by_round = defaultdict(list)
    for start in agents.starts():
        by_round[start.restart].append(start)
    assert sorted(by_round) == [0, 1, 2]
    for starts in by_round.values():
        assert_ranks(starts)
    assert len({start.master for start in agents.starts()}) == 3  # a round never meets keys of an earlier one
    assert not any(psutil.pid_exists(start.pid) for start in agents.starts())


def test_a_group_that_succeeds_after_a_restart_has_succeeded(agents: ElasticAgents) -> None:
    source = "os.kill(os.getpid(), signal.SIGKILL) if me.rank == 1 and me.restart == 0 else None"
    (outcome,) = succeeded([agents.start_one(Node(source, nproc=2, max_restarts=3))])
    assert outcome.restarts_left == 2
    assert sorted(outcome.return_values) == [0, 1]


def test_failure_on_one_agent_costs_only_that_agent_a_restart(agents: ElasticAgents) -> None:
    source = """
me.wait_for_all()
if me.rank == 2 and not me.has("failed"):
    me.leave("failed")
    sys.exit(1)
me.wait_for("done")
"""
    running = agents.start(Node(source, min_nodes=2, max_nodes=2, nproc=2, max_restarts=3), 2)
    starts = agents.wait_for_starts(8)
    agents.leave("done")
    outcomes = succeeded(running)
    for round_ in (starts[:4], starts[4:]):
        assert_ranks(round_)
    failed = next(start.agent for start in starts[:4] if start.rank == 2)
    assert [outcome.restarts_left for outcome in outcomes] == [2 if number == failed else 3 for number in (0, 1)]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_signal_that_ended_a_worker_is_named(agents: ElasticAgents, how: signal.Signals) -> None:
    source = f"(me.wait_for_all(), os.kill(os.getpid(), {int(how)})) if me.rank == 0 else me.wait_for('never')"
    outcome = agents.start_one(Node(source, nproc=2)).wait()
    assert outcome.state == "FAILED"
    assert outcome.exit_codes == {0: -how, 1: -signal.SIGTERM}  # the agent ended the other worker


def test_final_failure_is_not_delayed_by_the_exit_barrier(agents: ElasticAgents) -> None:
    source = "sys.exit(1) if me.rank % 2 else me.wait_for('never')"
    running = agents.start(Node(source, min_nodes=2, max_nodes=2, nproc=2, exit_barrier_timeout_s=300), 2)
    assert [agent.wait(SOON_S).state for agent in running] == ["FAILED", "FAILED"]


def test_agent_below_the_minimum_waits_and_names_the_missing(agents: ElasticAgents) -> None:
    # Agent 0 may fail only once. The other one is then alone.
    source = "me.wait_for('started'); sys.exit(1)"
    conf = {"join_timeout": "3"}
    running = [agents.start_one(Node(source, min_nodes=2, max_nodes=2, max_restarts=n, conf=conf)) for n in (0, 1)]
    agents.wait_for_starts(2)
    agents.leave("started")
    assert running[0].wait().state == "FAILED"
    assert "only 1 of at least 2 nodes joined" in running[1].wait().error
    assert running[1].wait().error.startswith("RendezvousTimeoutError")


# -- workers that end at different times


def test_agent_killed_alone_does_not_hold_up_the_exit_of_the_others(agents: ElasticAgents) -> None:
    running = agents.start(Node("me.wait_for('done')", min_nodes=2, max_nodes=2, exit_barrier_timeout_s=300), 2)
    agents.wait_for_starts(2)
    running[0].kill()  # its worker continues as an orphan, and finishes
    agents.leave("done")
    succeeded([running[1]], SOON_S)
    assert len(agents.starts()) == 2


def test_agent_with_finished_workers_waits_for_the_others(agents: ElasticAgents) -> None:
    running = agents.start(Node("me.wait_for('slow') if me.rank else None", min_nodes=2, max_nodes=2), 2)
    first = min(agents.wait_for_starts(2), key=lambda start: start.rank)
    eventually(lambda: not psutil.pid_exists(first.pid), "the first worker is done")
    time.sleep(0.5)  # time for an agent to end early, if it does not wait
    assert all(agent.is_running for agent in running)
    agents.leave("slow")
    succeeded(running, SOON_S)
    assert len(agents.starts()) == 2


def test_early_end_of_an_agent_neither_stops_nor_restarts_others(agents: ElasticAgents) -> None:
    node = Node("me.wait_for('slow') if me.rank else None", min_nodes=2, max_nodes=2, exit_barrier_timeout_s=0.1)
    running = agents.start(node, 2)
    first = min(agents.wait_for_starts(2), key=lambda start: start.rank)
    succeeded([running[first.agent]], SOON_S)
    time.sleep(0.5)  # time for the other agent to restart, if it does
    agents.leave("slow")
    succeeded(running, SOON_S)
    assert len(agents.starts()) == 2


@pytest.mark.parametrize("exit_barrier_timeout_s", [0.1, 60.0], ids=["it has gone", "it waits for the others"])
def test_worker_that_fails_late_restarts_without_finished_agents(agents: ElasticAgents, exit_barrier_timeout_s: float) -> None:
    source = "(me.wait_for('fail'), sys.exit(1)) if me.rank else None"
    node = Node(source, min_nodes=1, max_nodes=2, max_restarts=1, exit_barrier_timeout_s=exit_barrier_timeout_s)
    running = agents.start(node, 2)
    first = min(agents.wait_for_starts(2, world_size=2), key=lambda start: start.rank)
    eventually(lambda: not psutil.pid_exists(first.pid), "the first worker is done")
    if exit_barrier_timeout_s < 1:
        succeeded([running[first.agent]], SOON_S)
    agents.leave("fail")
    succeeded(running, SOON_S)
    (again,) = agents.starts()[2:]
    assert (again.agent, again.world_size, again.restart) == (1 - first.agent, 1, 1)


def test_workers_of_one_agent_may_end_at_different_times(agents: ElasticAgents) -> None:
    agent = agents.start_one(Node("me.wait_for('slow') if me.rank == 1 else None", nproc=3))
    starts = agents.wait_for_starts(3)
    eventually(lambda: sum(psutil.pid_exists(start.pid) for start in starts) == 1, "two workers are done")
    agents.leave("slow")
    (outcome,) = succeeded([agent], SOON_S)
    assert sorted(outcome.return_values) == [0, 1, 2]


def test_a_worker_that_fails_late_fails_its_finished_siblings_with_it(agents: ElasticAgents) -> None:
    agent = agents.start_one(Node("(me.wait_for('slow'), sys.exit(5)) if me.rank == 1 else None", nproc=2))
    agents.wait_for_starts(2)
    agents.leave("slow")
    outcome = agent.wait(SOON_S)
    assert (outcome.state, outcome.exit_codes) == ("FAILED", {1: 5})


def test_dead_etcd_at_the_end_does_not_fail_successful_workers(
    nursery: Nursery, private_etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    agents = ElasticAgents(nursery, private_etcd.endpoint, run_id, tmp_path / "job")
    try:
        agent = agents.start_one(Node("me.wait_for('done')", conf={"etcd_timeout": "1"}, exit_barrier_timeout_s=3))
        agents.wait_for_starts(1)
        private_etcd.kill()
        agents.leave("done")
        succeeded([agent])
    finally:
        agents.close()


# -- nodes that come and go


def test_a_node_below_the_minimum_waits_for_another(agents: ElasticAgents, client: EtcdClient, keys: Keys) -> None:
    node = Node("", min_nodes=2, max_nodes=2)
    first = agents.start_one(node)
    eventually(lambda: client.get_prefix(keys.agents)[1], "the first node waits")
    time.sleep(0.5)  # time for a node to show that it does not wait
    assert not agents.starts()
    succeeded([first, agents.start_one(node)])
    assert_ranks(agents.starts())


def test_a_round_with_room_is_held_open_for_the_last_call(agents: ElasticAgents) -> None:
    node = Node("", min_nodes=1, max_nodes=3, conf={"last_call_timeout": "3"})
    running = [agents.start_one(node)]
    time.sleep(0.7)
    assert not agents.starts()
    running.append(agents.start_one(node))
    succeeded(running)
    assert_ranks(agents.starts())
    assert len(agents.starts()) == 2


def test_a_full_round_does_not_wait_for_the_last_call(agents: ElasticAgents) -> None:
    node = Node("", min_nodes=1, max_nodes=2, conf={"last_call_timeout": "300"})
    succeeded(agents.start(node, 2))
    assert len(agents.starts()) == 2


@pytest.mark.parametrize("with_workers", [True, False], ids=["with its workers", "alone"])
def test_another_node_takes_the_place_of_one_that_was_lost(agents: ElasticAgents, with_workers: bool) -> None:
    node = Node("me.wait_for('done')", min_nodes=2, max_nodes=2, max_restarts=2)
    survivor, lost = agents.start(node, 2)
    agents.wait_for_starts(2)
    if with_workers:
        agents.kill_node(lost)
    else:
        lost.kill()
    replacement = agents.start_one(node)
    starts = agents.wait_for_starts(4)[2:]
    assert_ranks(starts)
    assert {start.agent for start in starts} == {survivor.number, replacement.number}
    agents.leave("done")
    outcomes = succeeded([survivor, replacement])
    assert [outcome.restarts_left for outcome in outcomes] == [2, 2]  # a change of membership is not a failure


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.4])
def test_an_agent_killed_at_any_moment_of_the_start_is_replaced(agents: ElasticAgents, delay_s: float) -> None:
    node = Node("me.wait_for('done')", min_nodes=2, max_nodes=2, max_restarts=2)
    survivor, lost = agents.start(node, 2)
    time.sleep(delay_s)
    lost.kill()
    replacement = agents.start_one(node)

    def together() -> bool:
        masters = {start.agent: start.master for start in agents.starts()}
        return replacement.number in masters and masters[replacement.number] == masters.get(survivor.number)

    eventually(together, "the survivor and the replacement have met", 60)
    agents.leave("done")
    succeeded([survivor, replacement])


def test_a_job_grows_to_its_maximum_and_goes_on_with_those_that_are_left(agents: ElasticAgents) -> None:
    # Workers fail when a peer is lost, as those of a process group do. Only then are the others restarted.
    source = """
while not me.has("done"):
    if me.world_size == 3 and me.has("lost"):
        sys.exit(1)
    time.sleep(0.01)
"""
    node = Node(source, min_nodes=1, max_nodes=3, max_restarts=1)
    running = []
    for size in (1, 2, 3):
        running.append(agents.start_one(node))
        starts = agents.wait_for_starts(size, world_size=size)
        assert_ranks(starts)
    assert {start.restart for start in agents.starts()} == {0}
    agents.kill_node(running[1])
    agents.leave("lost")
    starts = agents.wait_for_starts(4, world_size=2)[2:]
    assert_ranks(starts)
    assert {start.agent: start.group_rank for start in starts} == {0: 0, 2: 1}  # remaining nodes keep their order
    agents.leave("done")
    left = [outcome.restarts_left for outcome in succeeded([running[0], running[2]])]
    # torch's agent does not count a restart for a new round, and one may see the other's before its own worker has failed.
    assert sorted(left) in ([0, 0], [0, 1])


def test_nodes_continue_without_a_silent_one_and_take_it_back(agents: ElasticAgents) -> None:
    running = agents.start(Node("me.wait_for('done')", min_nodes=1, max_nodes=2), 2)
    agents.wait_for_starts(2, world_size=2)
    running[1].signal(signal.SIGSTOP)
    assert agents.wait_for_starts(1, world_size=1)[0].agent == 0
    running[1].signal(signal.SIGCONT)
    starts = agents.wait_for_starts(4, world_size=2)[2:]
    assert_ranks(starts)
    assert {start.agent: start.group_rank for start in starts} == {0: 0, 1: 1}
    agents.leave("done")
    succeeded(running)


def test_node_beyond_the_maximum_is_admitted_when_one_leaves(agents: ElasticAgents, client: EtcdClient, keys: Keys) -> None:
    node = Node("me.wait_for('done')", min_nodes=1, max_nodes=2, max_restarts=1)
    running = agents.start(node, 2)
    agents.wait_for_starts(2, world_size=2)
    spare = agents.start_one(node)
    eventually(lambda: len(client.get_prefix(keys.agents)[1]) == 3, "the spare waits")
    time.sleep(0.5)  # time for the others to be disturbed, if they are
    assert len(agents.starts()) == 2
    running[0].signal(signal.SIGTERM)  # a clean exit: no lease has to expire
    assert "SIGTERM" in running[0].wait(SOON_S).error or "Signal" in running[0].wait().error
    starts = agents.wait_for_starts(4, timeout_s=SOON_S)[2:]
    assert_ranks(starts)
    assert {start.agent for start in starts} == {1, spare.number}
    agents.leave("done")
    succeeded([running[1], spare])


def test_a_spare_node_does_not_run_the_script_of_a_job_that_has_finished(
    agents: ElasticAgents, client: EtcdClient, keys: Keys
) -> None:
    node = Node("me.wait_for('done')")
    running = agents.start_one(node)
    agents.wait_for_starts(1)
    spare = agents.start_one(node)
    eventually(lambda: len(client.get_prefix(keys.agents)[1]) == 2, "the spare waits")
    agents.leave("done")
    succeeded([running])
    outcome = spare.wait(SOON_S)
    assert outcome.error.startswith("RunIsOverError")
    assert "another --rdzv-id" in outcome.error
    assert len(agents.starts()) == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_an_agent_reaches_its_workers_and_only_those(agents: ElasticAgents, how: signal.Signals) -> None:
    source = f"""
signal.signal({int(how)}, lambda *_: (me.leave(f"told-{{me.agent}}"), sys.exit(0)))
me.wait_for("done")
"""
    running = agents.start(Node(source, min_nodes=1, max_nodes=2), 2)
    agents.wait_for_starts(2, world_size=2)
    running[0].signal(how)
    assert "SignalException" in running[0].wait(SOON_S).error
    assert (agents.folder / "told-0").exists()
    agents.leave("done")
    succeeded([running[1]], SOON_S)
    assert not (agents.folder / "told-1").exists()
    assert len(agents.starts()) == 2


# -- closing


MakeHandler = Callable[..., RendezvousHandler]


def test_workers_of_a_closed_run_go_on_and_are_not_started_again(agents: ElasticAgents, make_handler: MakeHandler) -> None:
    source = "me.wait_for('end'); sys.exit(me.agent)"
    running = agents.start(Node(source, min_nodes=2, max_nodes=2, max_restarts=3), 2)
    agents.wait_for_starts(2)
    handler = make_handler(2, 2)
    assert not handler.is_closed()
    handler.set_closed()  # type: ignore[no-untyped-call]
    handler.set_closed()  # type: ignore[no-untyped-call]  # is no error
    assert handler.is_closed()
    agents.leave("end")
    succeeded([running[0]], SOON_S)
    outcome = running[1].wait(SOON_S)
    assert outcome.error.startswith("RunIsOverError")
    assert "is closed" in outcome.error
    assert len(agents.starts()) == 2


def test_run_that_cannot_be_closed_reports_it_within_its_timeout(private_etcd: EmbeddedEtcd, make_handler: MakeHandler) -> None:
    handler = make_handler(server=private_etcd, etcd_timeout="0.5", close_timeout="1")
    private_etcd.kill()
    begun = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=private_etcd.endpoint):
        handler.set_closed()  # type: ignore[no-untyped-call]
    with pytest.raises(RendezvousConnectionError, match=private_etcd.endpoint):
        handler.is_closed()
    assert time.monotonic() - begun < SOON_S


# -- logs


def test_output_of_workers_goes_to_its_given_place(agents: ElasticAgents) -> None:
    source = """
me.wait_for_all()
print("to stdout", me.rank, me.restart)
print("to stderr", me.rank, me.restart, file=sys.stderr)
me.leave(f"printed-{me.rank}-{me.restart}")
if me.restart == 0:
    me.wait_for(f"printed-{1 - me.rank}-0")
    sys.exit(1)
"""
    template = "[${role_name}-${local_rank}-${rank}]:"
    node = Node(source, nproc=2, role="loud", max_restarts=1, redirects=Std.OUT, tee=Std.ERR, log_line_prefix_template=template)
    agent = agents.start_one(node)
    succeeded([agent])
    logs = {
        (file.parent.parent.name, file.parent.name, file.name): file.read_text()
        for file in (agents.folder / "agent-0" / "logs").rglob("*.log")
    }
    for attempt, rank in itertools.product((0, 1), (0, 1)):
        for stream in ("stdout", "stderr"):
            assert logs[f"attempt_{attempt}", str(rank), f"{stream}.log"] == f"to {stream} {rank} {attempt}\n"
    assert "[loud-1-1]:to stderr 1 1" in agent.output
    assert "to stdout" not in agent.output


# -- the launcher


def test_torchrun_takes_its_other_options_with_our_backend(etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> None:
    """Run a command that is not a Python script, with a role, a local address, log files and a shown rank."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={etcd.endpoint}",
        f"--rdzv-id={run_id}",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--role=shell",
        "--local-addr=127.0.0.5",
        f"--log-dir={tmp_path}",
        "--redirects=1:3",
        "--tee=0:1",
        "--no-python",
        *("sh", "-c", 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR as $ROLE_NAME"'),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[shell0]:0 of 2 at 127.0.0.5 as shell"]
    (log,) = tmp_path.glob("*/attempt_0/1/stdout.log")
    assert log.read_text() == "1 of 2 at 127.0.0.5 as shell\n"
