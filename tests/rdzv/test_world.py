"""Process groups of rounds, without Lightning: what any PyTorch loop could use. Several workers: see tests/e2e."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.client import EtcdClient
from lightning_dlrover.rdzv.records import DEFAULT_PREFIX, AgentRecord, Keys, encode
from lightning_dlrover.rdzv.server import EmbeddedEtcd
from lightning_dlrover.rdzv.world import MismatchError, World, WorldConfig, _inet_sockets, _shut_down, is_group_failure

JOB = {"DLROVER_RUN_ID": "job", "DLROVER_ENDPOINT": "localhost:2379", "DLROVER_AGENT_ID": "agent"}


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
from lightning_dlrover.rdzv.world import World, WorldConfig

connect = dist.ProcessGroupGloo

def die_while_connecting(store, rank, size, timeout):
    threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return connect(store, rank, size, timeout)

initialise = dist.init_process_group

def fail_after_the_others_have_formed(*args, **kwargs):
    dist.init_process_group = initialise
    initialise(*args, **kwargs)
    raise RuntimeError("the last answer of the store was lost")

match sys.argv[1:]:
    case ["fail"]:
        dist.init_process_group = fail_after_the_others_have_formed
    case [_]:
        dist.ProcessGroupGloo = die_while_connecting
config = WorldConfig.from_environment(os.environ, "1")
world = World(config)
formation = world.start()
print("FORMED", formation.round.number, formation.size, flush=True)
while (formation.round.number, formation.size) == (1, 3):
    try:
        dist.barrier()
        time.sleep(0.01)
    except RuntimeError:
        formation = world.recover(b"{}")
        print("FORMED", formation.round.number, formation.size, flush=True)
dist.barrier()
world.leave()
print("DONE", flush=True)
"""


def run_members(arguments: list[list[str]], etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, folder: Path) -> list[str]:
    """Three workers of one job; returns what each printed, with its exit code in front."""
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
    try:
        deadline = time.monotonic() + 60
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
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
