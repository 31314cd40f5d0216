"""Process groups of rounds, without Lightning, as any PyTorch loop could use them. Several workers: see tests/e2e."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.records import AgentRecord, ControllerRecord, DrainRecord, JobRecord, Keys, decode, encode
from lightning_dlrover.rdzv.membership.member import TooLateError
from lightning_dlrover.rdzv.transport.process_groups import RoundEnd
from tests.rdzv.present import present
from tests.support.full_etcd import full
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, run_code

pytestmark = pytest.mark.usefixtures("fork_server")

WorldOf = Callable[..., World]


@pytest.fixture
def world_of(etcd: EmbeddedEtcd, keys: Keys) -> Iterator[WorldOf]:
    """A worker's world in this process."""
    made: list[World] = []

    def make(min_workers: int = 1, **config: Any) -> World:
        place = WorldConfig(
            *(keys.run_id, keys.prefix, "agent", 0, min_workers, 4, "1"), etcd=EtcdConfig(etcd.endpoint), **config
        )
        made.append(World(place))
        return made[-1]

    yield make
    for world in made:
        world.leave()
        world._groups._are_unused.set()  # a process that ends would keep the groups of its last round


def test_workers_lease_has_the_length_that_was_set(world_of: WorldOf) -> None:
    assert world_of(lease_ttl_s=9.0).membership.own.lease.ttl_s == 9.0


@pytest.mark.parametrize("given", ["mpi", "cpu:mpi,cuda:nccl"])
def test_unknown_backend_is_refused(given: str, world_of: WorldOf) -> None:
    with pytest.raises(ValueError, match=f"{given}.*nothing is known of 'mpi'.*gloo, nccl"):
        World(world_of().config, given)


def test_worker_leaves_after_its_groups_have_been_aborted(world_of: WorldOf) -> None:
    world, ended = world_of(), threading.Event()

    class Group:
        def abort(self) -> None:
            time.sleep(0.5)  # inside of torch, which aborts a process that ends before this returns
            ended.set()

    end = RoundEnd(lambda: [Group()], "round 1", world.report_error)
    end.abort()
    world._forming.ended(end)
    world.leave()
    assert ended.is_set()


# --- too few workers ----------------------------------------------------------------------------------------------------------


def test_worker_gives_up_without_a_controller(world_of: WorldOf) -> None:
    with pytest.raises(TooLateError, match="the first round"):
        world_of(min_workers=2, wait_timeout_s=0.3).start()


def test_worker_waits_while_a_controller_is_there(world_of: WorldOf, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.controller, encode(ControllerRecord("host", 1, "local")))
    leaves = threading.Timer(1.0, client.delete, [keys.controller])
    leaves.start()
    began = time.monotonic()
    with pytest.raises(TooLateError, match="the first round"):
        world_of(min_workers=2, wait_timeout_s=0.3).start()
    assert time.monotonic() - began > 1.0
    leaves.join()


# --- the first step -----------------------------------------------------------------------------------------------------------


def test_job_has_stepped_from_its_first_step_on(world_of: WorldOf, client: EtcdClient, keys: Keys) -> None:
    found = []
    for step in world_of().steps(2):
        with step:
            found.append(decode(JobRecord, present(client.get(keys.job)).value, keys.job).has_stepped)
    assert found == [False, True]


# --- notices ------------------------------------------------------------------------------------------------------------------


def test_worker_learns_when_its_node_will_be_taken_away(world_of: WorldOf, client: EtcdClient, keys: Keys) -> None:
    world = world_of()
    for step in world.steps(1):
        with step:
            assert world.notice is None
            record = DrainRecord(world.worker_id, "spot", once_replaced=True, source="aws", taken_at=4e9)
            client.put(keys.drains + world.worker_id, encode(record))
            eventually(lambda: world.notice == 4e9, "the deadline")
            world.membership.own.drain("the worker received SIGTERM")
            eventually(lambda: world.worker_id in world.view.drains, "the request to leave")
            assert world.notice == 4e9
    kept = decode(DrainRecord, present(client.get(keys.drains + world.worker_id)).value, keys.drains)
    assert (kept.once_replaced, kept.source, kept.taken_at) == (False, "aws", 4e9)


# --- the end ------------------------------------------------------------------------------------------------------------------


def test_finished_job_is_noticed_before_the_view_changes(world_of: WorldOf) -> None:
    world = world_of()
    world.start()
    with world.membership._changed:  # blocks the thread that refreshes the view
        assert not world.has_finished
        world.finish(5)
        assert world.membership.view.job is not None
        assert world.membership.view.job.phase != "finished"
        assert world.has_finished


def test_leaver_asks_etcd_whether_the_job_has_finished(world_of: WorldOf) -> None:
    leaver, other = world_of(), world_of()
    leaver.start()
    assert not leaver.standing.ask_whether_finished()
    with leaver.membership._changed:
        other.membership.shared.update_job(lambda job: dataclasses.replace(job, phase="finished"))
        assert not leaver.has_finished
        assert leaver.standing.ask_whether_finished()


def test_job_with_a_later_fit_under_way_has_not_ended(world_of: WorldOf) -> None:
    world, leaver = world_of(), world_of()
    world.start()
    world.finish(5)
    assert world.standing.ask_whether_finished()
    world.standing.begin_fit(2)
    for each in (world, leaver):
        assert not each.standing.ask_whether_finished()
    assert world.has_finished
    world.finish(10, 2)
    for each in (world, leaver):
        assert each.standing.ask_whether_finished()


# --- a round that cannot be completed --------------------------------------------------------------------------------------

MEMBER = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from lightning_dlrover.live.order import Position, can_meet
from lightning_dlrover.rdzv import World, WorldConfig
from lightning_dlrover.rdzv.transport import torch_names

connect = torch_names.gloo

def die_while_connecting(*args):
    threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return connect(*args)

initialise = dist.init_process_group

def fail_after_the_others_have_formed(*args, **kwargs):
    dist.init_process_group = initialise
    initialise(*args, **kwargs)
    raise RuntimeError("the last answer of the store was lost")

set_in_store = dist.PrefixStore.set

def set_garbage(store, key, value):
    if key.startswith("hello/"):
        dist.PrefixStore.set = set_in_store
        value = "garbage"
    set_in_store(store, key, value)

match sys.argv[1:]:
    case ["die"] | ["report"]:
        pass
    case ["garbage"]:
        dist.PrefixStore.set = set_garbage
    case ["fail"]:
        dist.init_process_group = fail_after_the_others_have_formed
    case [_]:
        torch_names.gloo = die_while_connecting
config = WorldConfig.from_environment(os.environ, "1")
world = World(config, can_meet=can_meet)
formation = world.start()
print("FORMED", formation.round.number, formation.size, flush=True)
hello = Position(1, 1, False, 0, 0, True).encode()
while (formation.round.number, formation.size) == (1, 3):
    try:
        dist.barrier()
        time.sleep(0.01)
        if sys.argv[1:] == ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        if sys.argv[1:] == ["report"]:
            world.report_error(error)
            raise
        formation = world.recover(hello)
        print("FORMED", formation.round.number, formation.size, flush=True)
dist.barrier()
world.leave()
print("DONE", flush=True)
"""


def test_loss_while_etcd_is_full_waits_for_room(private_etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as client:
        members = start_members([[], [], []], private_etcd, client, keys, tmp_path)
        try:
            outputs = [tmp_path / f"{number}.out" for number in range(3)]
            eventually(lambda: all("FORMED 1 3" in output.read_text() for output in outputs), "the first round has formed", 60)
            with full(client):
                members[2].kill()
                eventually(
                    lambda: all("is full" in output.read_text() for output in outputs[:2]), "both have tried to write", 30
                )
            codes = [member.wait(60) for member in members]
        finally:
            end(members)
    assert codes == [0, 0, -9], "\n".join(output.read_text() for output in outputs)
    assert all("FORMED 2 2" in output.read_text() for output in outputs[:2])


def test_bytes_that_are_no_position_cost_a_round(etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    """Another program may write into the store of a round, which has no protection but its port."""
    outputs = run_members([[], ["garbage"], []], etcd, client, keys, tmp_path)
    assert [output.splitlines()[0] for output in outputs] == ["0", "0", "0"], "\n".join(outputs)
    assert all("FORMED 2 3\nDONE" in output for output in outputs), "\n".join(outputs)
    # One output suffices: when a worker leaves, the others may lose the round's store before they read the bytes themselves.
    assert any("round 1 is given up: Expecting value" in output for output in outputs), "\n".join(outputs)


def test_error_of_a_survivor_names_the_lost_worker(etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    reporting, dead, _ = run_members([["report"], ["die"], []], etcd, client, keys, tmp_path)
    assert dead.startswith("-9")
    assert reporting.startswith("1")
    assert re.search(r"This worker failed because the job has lost \S+-\d+-\w+ in the middle of a collective", reporting), (
        reporting
    )


def start_members(
    arguments: list[list[str]], etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, folder: Path
) -> list[WarmProcess]:
    """Start three workers of one job. Their output goes to `0.out` to `2.out`."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DLROVER_RUN_ID": keys.run_id,
        "DLROVER_ENDPOINT": etcd.endpoint,
        "DLROVER_MIN_NODES": "1",
        "DLROVER_MAX_NODES": "3",
    }
    for number in range(3):  # announced, so that the first round waits for all three
        client.put(f"{keys.agents}a{number}", encode(AgentRecord(f"a{number}", "host", 1, 1, "running")))
    processes = []
    for number, own in enumerate(arguments):
        environment = {**environ, "DLROVER_AGENT_ID": f"a{number}"}
        processes.append(WarmProcess(run_code, [MEMBER, *own], environment, folder / f"{number}.out"))
    return processes


def end(processes: list[WarmProcess]) -> None:
    for process in processes:
        process.kill()
        process.wait(10)


def run_members(arguments: list[list[str]], etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, folder: Path) -> list[str]:
    """Output of each of three workers of one job, preceded by its exit code."""
    processes = start_members(arguments, etcd, client, keys, folder)
    try:
        deadline = time.monotonic() + 60
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        end(processes)
    return [f"{code}\n{(folder / f'{number}.out').read_text()}" for number, code in enumerate(codes)]


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.003])
def test_death_while_others_connect_costs_no_timeout(
    after_s: float, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    """Gloo would wait for it five times the timeout of a collective."""
    outputs = run_members([[], [], [str(after_s)]], etcd, client, keys, tmp_path)
    assert [output.splitlines()[0] for output in outputs] == ["0", "0", "-9"], "\n".join(outputs)
    assert all("DONE" in output for output in outputs[:2])


def test_failure_of_one_member_does_not_delay_the_formed_round(
    etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    outputs = run_members([[], [], ["fail"]], etcd, client, keys, tmp_path)
    assert [output.splitlines()[0] for output in outputs] == ["0", "0", "0"], "\n".join(outputs)
    assert all(output.endswith("FORMED 2 3\nDONE\n") for output in outputs), "\n".join(outputs)
