"""The choice between connections, and the cost of a lost one or of a fork."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from faulty_etcd import EtcdProxy

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import Connection, grpc
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdUnavailableError
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.waiting import eventually


def _fails_clearly(endpoint: str, timeout_s: float = 1.0) -> str:
    began = time.monotonic()
    with (
        EtcdClient(EtcdConfig(endpoint, timeout_s=timeout_s)) as client,
        pytest.raises(EtcdUnavailableError) as caught,
    ):
        client.check()
    assert time.monotonic() - began < timeout_s + 1.0
    assert endpoint in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("endpoint, cause", [("127.0.0.1:1", "refused"), ("no-such-host.invalid:2379", "")])
def test_endpoint_without_a_server_is_named_within_the_timeout(endpoint: str, cause: str) -> None:
    assert cause in _fails_clearly(endpoint)


def test_a_listener_that_never_answers_is_named_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _fails_clearly(f"127.0.0.1:{silent.getsockname()[1]}")


def test_a_web_server_is_not_taken_for_etcd() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        _fails_clearly(f"127.0.0.1:{web.server_port}")
        web.shutdown()
        thread.join(5)


def test_dead_endpoint_next_to_a_living_one_does_no_harm(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with EtcdClient(EtcdConfig(f"127.0.0.1:1,{etcd.endpoint},127.0.0.1:2")) as client:
        for i in range(5):
            client.put(keys.root + "k", str(i).encode())


def _first_connected_to(first: str, second: str, timeout_s: float = 5.0) -> EtcdClient:
    """A client of both endpoints that uses the first one until that fails."""
    while True:
        client = EtcdClient(EtcdConfig(f"{first},{second}", timeout_s=timeout_s))
        if client.caller.connections.current().target == first:
            return client
        client.close()


def test_a_connection_that_is_only_late_keeps_its_watches(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, EtcdProxy(etcd.endpoint) as proxy:
        client = _first_connected_to(proxy.endpoint, f"127.0.0.1:{silent.getsockname()[1]}")
        with client, Mirror(client, keys.root) as mirror:
            client.put(keys.root + "k", b"1")
            mirror.wait_for(lambda found: found or None, 5)
            connection, stream = client.caller.connections._connection, mirror._stream
            proxy.blackhole()
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.get, keys.root + "k")
                eventually(lambda: client.caller.connections._spare is not None, "another connection is asked", 5)
                assert not answer.done()
                proxy.heal()
                assert answer.result(5) is not None
            assert (client.caller.connections._connection, client.caller.connections._spare) == (connection, None)
            client.put(keys.root + "k", b"2")
            mirror.wait_for(lambda found: found[keys.root + "k"].value == b"2" or None, 5)
            assert mirror._stream is stream


@pytest.mark.slow
def test_a_half_open_connection_costs_neither_the_lease_nor_the_watch(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with (
        EtcdProxy(etcd.endpoint) as proxy,
        EtcdClient(EtcdConfig(etcd.endpoint)) as other,
        _first_connected_to(proxy.endpoint, etcd.endpoint) as client,
        Mirror(client, keys.root) as mirror,
    ):
        lease = client.lease(5).keep_alive()
        client.put(keys.root + "ours", b"", lease)
        first = client.caller.connections._connection
        proxy.blackhole()
        ends = time.monotonic() + 1.1 * lease.ttl_s
        eventually(lambda: client.caller.connections._connection not in (None, first), "the client uses the other endpoint", 6)
        other.put(keys.root + "theirs", b"")
        mirror.wait_for(lambda found: keys.root + "theirs" in found or None, 5)
        eventually(lambda: time.monotonic() > ends, "the lease would have ended without refreshes", 10)
        assert not lease.lost.is_set()
        assert other.get(keys.root + "ours") is not None


@pytest.mark.slow
def test_a_client_finds_its_way_between_two_endpoints_that_never_answer(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        endpoints = f"127.0.0.1:{a.getsockname()[1]},{etcd.endpoint},127.0.0.1:{b.getsockname()[1]}"

        def put(name: str) -> int:
            with EtcdClient(EtcdConfig(endpoints)) as client:
                return client.put(keys.root + name, b"1")

        with ThreadPoolExecutor(3) as pool:  # each begins with an endpoint at random
            assert all(revision > 0 for revision in pool.map(put, "abc"))


@pytest.mark.slow
def test_forked_loader_workers_leave_the_mirror_alone(
    client: EtcdClient, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    fork = multiprocessing.get_context("fork")
    with Mirror(client, keys.root, check_interval_s=0.05) as mirror:
        lease = client.lease(2).keep_alive()
        for i in range(20):
            loader_worker = fork.Process(target=sum, args=([1, 2],))
            loader_worker.start()
            client.put(keys.root + "k", str(i).encode(), lease)
            loader_worker.join(10)
            assert loader_worker.exitcode == 0
        mirror.wait_for(lambda found: found[keys.root + "k"].value == b"19" or None, 5)
        assert not lease.lost.is_set()
    assert capfd.readouterr().err == ""


FORKS = """
import gc, multiprocessing, sys, threading, time
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.agents.rendezvous import create_backend

def child():
    began = time.monotonic()
    try:
        with EtcdClient(EtcdConfig(sys.argv[1])) as client, Mirror(client, "/forked/") as mirror:
            client.put("/forked/key", b"1", client.lease(2).keep_alive())
            mirror.wait_for(lambda found: found.get("/forked/key"), 5)
            print("CHILD REACHED", flush=True)
    except EtcdError as error:
        print("CHILD", time.monotonic() - began < 1, error, flush=True)

def fork():
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)

alone = set(threading.enumerate())
handler = create_backend()(RendezvousParameters("etcd-v3", sys.argv[1], sys.argv[2], 1, 1, last_call_timeout="0"))
handler.next_rendezvous().store.close()
fork()
del handler
gc.collect()
deadline = time.monotonic() + 15
while set(threading.enumerate()) - alone and time.monotonic() < deadline:
    time.sleep(0.05)
fork()
"""


@pytest.mark.slow
def test_forked_process_reaches_etcd_or_is_refused(etcd: EmbeddedEtcd, run_id: str) -> None:
    """A fork is refused while its parent is connected, but not after a handler that was merely dropped."""
    command = [sys.executable, "-c", FORKS, etcd.endpoint, run_id]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90)
    refused, reached = (line for line in ran.stdout.splitlines() if line.startswith("CHILD"))
    assert refused.startswith("CHILD True cannot read"), ran
    assert "was forked while its parent was connected to etcd" in refused
    assert reached == "CHILD REACHED", ran


@pytest.mark.slow
def test_client_lease_and_mirror_recover_from_a_restart_of_etcd(private_etcd: EmbeddedEtcd) -> None:
    prefix = "/recover/"
    with (
        EtcdClient(EtcdConfig(private_etcd.endpoint, timeout_s=15)) as client,
        Mirror(client, prefix) as mirror,
    ):
        lease = client.lease(2).keep_alive()
        client.put(prefix + "alive", b"1", lease)
        mirror.wait_for(lambda found: found.get(prefix + "alive"), 5)
        num_threads = threading.active_count()

        private_etcd.kill()
        eventually(lambda: not mirror.healthy, "the mirror notices", 20)
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(client.put, prefix + "during", b"1")  # waits for etcd to return
            private_etcd.restart()
            written.result(20)

        mirror.wait_for(lambda found: found.get(prefix + "during"), 20)
        eventually(lambda: mirror.healthy, "the mirror is well again", 10)
        client.put(prefix + "after", b"1")
        mirror.wait_for(lambda found: found.get(prefix + "after"), 5)
        ends = time.monotonic() + 1.2 * lease.ttl_s
        eventually(lambda: time.monotonic() > ends, "the lease would have ended", 10)
        assert not lease.lost.is_set()
        assert prefix + "alive" in mirror.snapshot()
        eventually(lambda: threading.active_count() <= num_threads, "no watch that ended has left a thread", 5)


class Refused(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._answer = code, details

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]


@pytest.mark.parametrize(
    ("code", "details"),
    [(grpc.StatusCode.UNKNOWN, "raft proposal dropped"), (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")],
)
def test_passing_troubles_of_an_etcd_that_has_answered_before_end_no_request(
    etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, details: str
) -> None:
    with EtcdClient(EtcdConfig(etcd.endpoint)) as client:
        client.put("/passing/1", b"1")
        method, left = Connection.method, [Refused(code, details)] * 3

        def disturbed(self: Connection, service: str, name: str) -> Any:
            if not left:
                return method(self, service, name)
            failed: Future[Any] = Future()
            failed.set_exception(left.pop())
            return types.SimpleNamespace(future=lambda *_, **__: failed)

        monkeypatch.setattr(Connection, "method", disturbed)
        assert client.put("/passing/2", b"2")
        assert not left
