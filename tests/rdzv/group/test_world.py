"""Process groups of rounds, without Lightning: what any PyTorch loop could use. Several workers: see tests/e2e."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_etcd import full
from waiting import eventually

from lightning_dlrover.rdzv.etcd.client import (
    EtcdClient,
    EtcdConfig,
)
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.group.world import (
    MismatchError,
    World,
    WorldConfig,
    _inet_sockets,
    _shut_down,
    _with_gloo,
    is_group_failure,
)
from lightning_dlrover.rdzv.job.records import (
    DEFAULT_PREFIX,
    AgentRecord,
    ControllerRecord,
    Keys,
    encode,
)
from lightning_dlrover.rdzv.live.member import TooLateError
from lightning_dlrover.rdzv.timeouts import Timeouts

JOB = {"DLROVER_RUN_ID": "job", "DLROVER_ENDPOINT": "localhost:2379", "DLROVER_AGENT_ID": "agent"}


WorldOf = Callable[..., World]


@pytest.fixture
def world_of(etcd: EmbeddedEtcd, keys: Keys) -> Iterator[WorldOf]:
    """A worker's world in this process."""
    made: list[World] = []

    def make(min_workers: int = 1, **config: Any) -> World:
        place = WorldConfig(EtcdConfig(etcd.endpoint), keys.run_id, keys.prefix, "agent", 0, min_workers, 4, "1", **config)
        made.append(World(place))
        return made[-1]

    yield make
    for world in made:
        world.leave()


# --- configuration ------------------------------------------------------------------------------------------------------------


def test_outside_of_a_job_there_is_no_configuration() -> None:
    assert WorldConfig.from_environment({"RANK": "0", "WORLD_SIZE": "2"}, "1") is None


def test_limits_are_counted_in_workers_not_nodes() -> None:
    environ = {**JOB, "DLROVER_MIN_NODES": "2", "DLROVER_MAX_NODES": "3", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    config = WorldConfig.from_environment(environ, "1")
    assert config is not None
    assert (config.min_workers, config.max_workers, config.local_rank) == (8, 12, 1)
    assert config.prefix == DEFAULT_PREFIX


@pytest.mark.parametrize("missing", ["DLROVER_ENDPOINT", "DLROVER_AGENT_ID"])
def test_a_missing_variable_is_named_with_what_to_do(missing: str) -> None:
    environ = {name: value for name, value in JOB.items() if name != missing}
    with pytest.raises(ValueError, match=f"{missing}.*torchrun --rdzv-backend=etcd-v3"):
        WorldConfig.from_environment(environ, "1")


def test_a_worker_learns_from_its_agent_who_it_is_to_etcd() -> None:
    config = WorldConfig.from_environment({**JOB, "DLROVER_USER": "me", "DLROVER_PASSWORD_FILE": "/secret"}, "1")
    assert config is not None
    assert config.etcd.access == {"user": "me", "password_file": "/secret"}


def test_timeouts_of_the_agent_reach_its_workers() -> None:
    timeouts = Timeouts(*(float(number) for number in range(11, 18)))
    config = WorldConfig.from_environment(JOB | timeouts.to_environment(), "1")
    assert config is not None
    assert config.etcd.timeout_s == timeouts.etcd_timeout_s
    assert {name: getattr(config, name) for name in vars(timeouts) if name != "etcd_timeout_s"} == {
        name: value for name, value in vars(timeouts).items() if name != "etcd_timeout_s"
    }


@pytest.mark.parametrize("value", ["10m", "0", "-1", "nan", "inf"])
def test_malformed_timeout_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=f"DLROVER_WAIT_TIMEOUT_S='{value}' cannot be used: it must be a number of seconds"):
        WorldConfig.from_environment(JOB | {"DLROVER_WAIT_TIMEOUT_S": value}, "1")


def test_workers_lease_has_the_length_that_was_set(world_of: WorldOf) -> None:
    assert world_of(lease_ttl_s=9.0).membership._lease.ttl_s == 9.0


@pytest.mark.parametrize(
    "given, used",
    [
        ("gloo", "gloo"),
        ("nccl", "cpu:gloo,cuda:nccl"),  # as scripts have it that were written for stock DDP
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:gloo"),
    ],
)
def test_every_backend_has_gloo_for_the_cpu(given: str, used: str) -> None:
    assert _with_gloo(given) == used


@pytest.mark.parametrize("given", ["mpi", "cuda:nccl", "cpu:mpi,cuda:nccl"])
def test_backend_without_gloo_is_refused(given: str, world_of: WorldOf) -> None:
    with pytest.raises(ValueError, match=f"{given}.*use 'gloo'"):
        World(world_of().config, given)


# --- too few workers ----------------------------------------------------------------------------------------------------------


def test_worker_gives_up_without_a_controller(world_of: WorldOf) -> None:
    with pytest.raises(TooLateError, match="the first round"):
        world_of(min_workers=2, wait_timeout_s=0.3).start()


def test_worker_waits_while_a_controller_is_there(world_of: WorldOf, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.controller, encode(ControllerRecord("host", 1, "local")))
    leaves = threading.Timer(2.0, client.delete, [keys.controller])
    leaves.start()
    began = time.monotonic()
    with pytest.raises(TooLateError, match="the first round"):
        world_of(min_workers=2, wait_timeout_s=0.3).start()
    assert time.monotonic() - began > 2.0
    leaves.join()


# --- the end ------------------------------------------------------------------------------------------------------------------


def test_finished_job_is_noticed_before_the_view_changes(world_of: WorldOf) -> None:
    world = world_of()
    world.start()
    with world.membership._changed:  # the thread that renews the view has to wait
        assert not world.has_finished
        world.finish(5)
        assert world.membership.view.job is not None
        assert world.membership.view.job.phase != "finished"
        assert world.has_finished


def test_leaver_asks_etcd_whether_the_job_has_finished(world_of: WorldOf) -> None:
    leaver, other = world_of(), world_of()
    leaver.start()
    assert not leaver.ask_whether_finished()
    with leaver.membership._changed:
        other.membership.update_job(lambda job: dataclasses.replace(job, phase="finished"))
        assert not leaver.has_finished
        assert leaver.ask_whether_finished()


# --- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv"), True),
        (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("NCCL error: ncclInvalidUsage: Last error: Duplicate GPU detected : rank 1 and rank 0"), False),
        (
            dist.DistBackendError("NCCL error: unhandled cuda error, ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
            False,
        ),
        (RuntimeError("Distributed package doesn't have NCCL built in"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), False),
        (ValueError("Connection closed by peer"), False),
        (KeyError("gloo/transport"), False),
    ],
)
def test_a_lost_peer_is_told_from_a_mistake_of_the_users(error: Exception, expected: bool) -> None:
    assert is_group_failure(error) is expected


# --- sockets ------------------------------------------------------------------------------------------------------------------


def connected_pair(port: int = 0) -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", port))
    client = socket.create_connection(listener.getsockname())
    return listener, client, listener.accept()[0]


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.2)
    try:
        return sock.recv(1) != b""
    except TimeoutError:
        return True


def test_a_connection_is_shut_down_so_that_both_ends_notice() -> None:
    listener, client, accepted = connected_pair()
    with listener, client, accepted:
        fd = client.fileno()
        _shut_down(fd, _inet_sockets()[fd], set(), 0)
        assert not is_open(client)
        assert not is_open(accepted)


def test_a_descriptor_that_belongs_to_another_socket_by_now_is_left_alone() -> None:
    listener, client, accepted = connected_pair()
    with listener, client, accepted:
        _shut_down(client.fileno(), _inet_sockets()[client.fileno()] + 1, set(), 0)
        assert is_open(client)


def test_connections_to_etcd_and_to_the_own_store_are_spared() -> None:
    """Others may be connected to our store for a newer round than the one that is cut off."""
    listener, client, accepted = connected_pair()
    with listener, client, accepted:
        port = listener.getsockname()[1]
        inodes = _inet_sockets()
        _shut_down(client.fileno(), inodes[client.fileno()], {port}, 0)
        _shut_down(accepted.fileno(), inodes[accepted.fileno()], set(), port)
        _shut_down(listener.fileno(), inodes[listener.fileno()], set(), 0)
        assert is_open(client)
        assert is_open(accepted)
        socket.create_connection(listener.getsockname()).close()


# --- a round that cannot be completed --------------------------------------------------------------------------------------

MEMBER = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from lightning_dlrover.live.training import Position, can_meet
from lightning_dlrover.rdzv.group.world import World, WorldConfig

connect = dist.ProcessGroupGloo

def die_while_connecting(store, rank, size, timeout):
    threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return connect(store, rank, size, timeout)

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
        dist.ProcessGroupGloo = die_while_connecting
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
    """As when another program writes into the store of a round, which only the port guards."""
    outputs = run_members([[], ["garbage"], []], etcd, client, keys, tmp_path)
    assert [output.splitlines()[0] for output in outputs] == ["0", "0", "0"], "\n".join(outputs)
    assert all("FORMED 2 3\nDONE" in output for output in outputs), "\n".join(outputs)
    # One is enough: when it leaves, the others may lose the round's store before they read the bytes themselves.
    assert any("round 1 is given up: Expecting value" in output for output in outputs), "\n".join(outputs)


def test_error_of_a_survivor_names_the_lost_worker(etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    reporting, dead, _ = run_members([["report"], ["die"], []], etcd, client, keys, tmp_path)
    assert dead.startswith("-9")
    assert reporting.startswith("1")
    assert re.search(r"This worker failed because the job has lost \S+-\d+-\w+, in whose collective it was", reporting), (
        reporting
    )


def start_members(
    arguments: list[list[str]], etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, folder: Path
) -> list[subprocess.Popen[bytes]]:
    """Three workers of one job; what they print goes to `0.out` to `2.out`."""
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
        with (folder / f"{number}.out").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", MEMBER, *own],
                    env={**environ, "DLROVER_AGENT_ID": f"a{number}"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait(10)


def run_members(arguments: list[list[str]], etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, folder: Path) -> list[str]:
    """What each of three workers of one job printed, with its exit code in front."""
    processes = start_members(arguments, etcd, client, keys, folder)
    try:
        deadline = time.monotonic() + 60
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        end(processes)
    return [f"{code}\n{(folder / f'{number}.out').read_text()}" for number, code in enumerate(codes)]


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.003])
def test_a_member_that_dies_while_the_others_connect_to_it_costs_no_timeout(
    after_s: float, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    """Gloo would wait for it five times the timeout of a collective."""
    outputs = run_members([[], [], [str(after_s)]], etcd, client, keys, tmp_path)
    assert [output.splitlines()[0] for output in outputs] == ["0", "0", "-9"], "\n".join(outputs)
    assert all("DONE" in output for output in outputs[:2])


def test_a_member_that_fails_to_form_a_round_does_not_hold_up_those_who_have_formed_it(
    etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    outputs = run_members([[], [], ["fail"]], etcd, client, keys, tmp_path)
    assert [output.splitlines()[0] for output in outputs] == ["0", "0", "0"], "\n".join(outputs)
    assert all(output.endswith("FORMED 2 3\nDONE\n") for output in outputs), "\n".join(outputs)


# --- what is recovered from ---------------------------------------------------------------------------------------------------


def world_of_a_round(is_broken: bool) -> World:
    """Enough of a world to judge errors; it has no group, socket or thread."""
    world = World.__new__(World)
    world._severed = is_broken
    world._meeting = world._mismatch = None
    world._last_failure = ""
    return world


def missing_group() -> Exception:
    """What torch raises once the default group was aborted."""
    with pytest.raises(ValueError, match="Default process group has not been initialized") as raised:
        dist.all_reduce(torch.ones(1))
    return raised.value


def test_missing_group_is_a_loss_in_a_broken_round_only() -> None:
    assert world_of_a_round(is_broken=True).is_failure(missing_group())
    assert not world_of_a_round(is_broken=False).is_failure(missing_group())
    assert not world_of_a_round(is_broken=True).is_failure(ValueError("a mistake of the user's"))


def test_mismatch_is_no_loss_though_the_round_is_broken() -> None:
    assert not world_of_a_round(is_broken=True).is_failure(MismatchError("rank 0 is here, rank 1 there"))


def test_consequence_of_a_mismatch_is_raised_as_the_mismatch() -> None:
    world = world_of_a_round(is_broken=True)
    world._mismatch = MismatchError("rank 0 is here, rank 1 there")
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(MismatchError, match="rank 0 is here") as raised:
        world.is_failure(closed)
    assert raised.value.__cause__ is closed
