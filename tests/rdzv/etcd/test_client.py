from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from faulty_etcd import EtcdProxy
from full_etcd import full
from waiting import eventually

from lightning_dlrover.rdzv.etcd import client as client_module
from lightning_dlrover.rdzv.etcd.client import (
    Delete,
    EtcdClient,
    EtcdConfig,
    EtcdError,
    EtcdFullError,
    EtcdUnavailableError,
    Get,
    KeyValue,
    LeaseLostError,
    Mirror,
    Put,
    absent,
    created,
    etcdrpc,
    exists,
    modified,
    parse_endpoints,
    version_warning,
)
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import Keys

# -- configuration


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("localhost:2379", [("localhost", 2379)]),
        ("http://10.0.0.1:2379", [("10.0.0.1", 2379)]),
        ("a:1, b:65535", [("a", 1), ("b", 65535)]),
        ("[::1]:2379,https://[fe80::2]:1/", [("::1", 2379), ("fe80::2", 1)]),
    ],
)
def test_endpoints_are_read_as_host_and_port(text: str, endpoints: list[tuple[str, int]]) -> None:
    assert parse_endpoints(text) == endpoints


@pytest.mark.parametrize("text", ["", "host", "host:", ":2379", "host:0", "host:65536", "::1:2379", "a:1,,b:2", "a:1/x"])
def test_what_is_not_an_endpoint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint"):
        parse_endpoints(text)


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush\n")
    client = EtcdClient(EtcdConfig("a:1", user="u", password_file=str(file)))
    assert "hush" not in repr(client)
    assert "hush" not in repr(vars(client))


@pytest.mark.parametrize("content", [None, b"", b"\nsecond line", b"\xff\xfe"])
def test_a_file_that_holds_no_password_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(EtcdError, match=f"password_file '{file}' for etcd at a:1"):
        EtcdClient(EtcdConfig("a:1", user="u", password_file=str(file)))


@pytest.mark.parametrize("version", ["3.3.27", "3.4.43", "3.5.1", "3.5.29", "3.6.10"])
def test_a_release_that_leaks_other_users_prefixes_is_named(version: str) -> None:
    assert version in (version_warning(version) or "")


@pytest.mark.parametrize("version", ["3.4.44", "3.5.30", "3.6.11", "3.7.0", "4.0.0", "unreadable"])
def test_a_fixed_release_is_not_complained_about(version: str) -> None:
    assert version_warning(version) is None


# -- keys and transactions


def test_a_key_is_absent_then_there_then_gone(client: EtcdClient, keys: Keys) -> None:
    key = keys.root + "k"
    assert client.get(key) is None
    first = client.put(key, b"\x00\xff")
    second = client.put(key, b"2")
    assert client.get(key) == KeyValue(key, b"2", first, second, 2, 0)
    assert client.delete(key)
    assert not client.delete(key)
    assert client.get(key) is None


def test_a_prefix_holds_its_own_keys_only(client: EtcdClient, keys: Keys) -> None:
    for name in ("a/1", "a/2", "ab"):
        client.put(keys.root + name, name.encode())
    revision, found = client.get_prefix(keys.root + "a/")
    assert [kv.value for kv in found] == [b"a/1", b"a/2"]
    assert revision >= found[-1].mod_revision
    assert client.delete_prefix(keys.root + "a/") == 2
    assert client.get(keys.root + "ab") is not None


def test_a_transaction_acts_only_when_all_its_conditions_hold(client: EtcdClient, keys: Keys) -> None:
    key, other = keys.root + "k", keys.root + "other"
    revision = client.put(key, b"1")
    for conditions, holds in [
        ([absent(key)], False),
        ([exists(key), absent(other)], True),
        ([exists(key), exists(other)], False),
        ([created(key) == revision], True),
        ([created(key) == revision - 1], False),
        ([modified(key) == revision], True),
        ([modified(other) == 0], True),
    ]:
        result = client.txn(conditions, [Get(key)], [Get(other)])
        assert result.succeeded == holds
        assert [kv.value for kv in result.values] == ([b"1"] if holds else [])
    done = client.txn([exists(key)], [Put(other, b"new"), Delete(key)])
    assert done.succeeded
    assert client.get(key) is None
    assert client.get(other) == KeyValue(other, b"new", done.revision, done.revision, 1, 0)


def test_of_many_writers_that_compare_and_swap_exactly_one_wins_each_time(client: EtcdClient, keys: Keys) -> None:
    key = keys.root + "counter"

    def increase(_: int) -> None:
        while True:
            current = client.get(key)
            value = int(current.value) + 1 if current else 1
            unchanged = modified(key) == (current.mod_revision if current else 0)
            if client.txn([unchanged], [Put(key, str(value).encode())]).succeeded:
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increase, range(40)))
    found = client.get(key)
    assert found is not None
    assert found.value == b"40"


# -- lost answers


@contextmanager
def one_lost_answer(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next write reaches etcd, but its answer does not reach us."""
    import grpc  # type: ignore[import-untyped]

    class Lost(grpc.RpcError):  # type: ignore[misc]
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "the answer was lost"

    stub = client._connect()._stubs["KV"]
    original = stub.Txn
    answers = iter([True])

    class Txn:
        @staticmethod
        def future(*args: object, **kwargs: object) -> object:
            future = original.future(*args, **kwargs)
            if next(answers, False):
                future.result()
                raise Lost
            return future

    monkeypatch.setattr(stub, "Txn", Txn)
    yield


def test_a_transaction_whose_answer_got_lost_is_not_reported_as_failed(
    client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.root + "election"
    client.check()
    with one_lost_answer(client, monkeypatch):
        assert client.txn([absent(key)], [Put(key, b"me")]).succeeded
    found = client.get(key)
    assert found is not None
    assert found.version == 1


def test_a_lost_answer_does_not_hide_that_somebody_else_was_first(
    client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.root + "election"
    client.put(key, b"somebody else")
    with one_lost_answer(client, monkeypatch):
        assert not client.txn([absent(key)], [Put(key, b"me")]).succeeded


# -- unreachable or wrong endpoints


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


def test_a_closed_port_is_named_within_the_timeout() -> None:
    assert "refused" in _fails_clearly("127.0.0.1:1")


def test_a_host_that_does_not_exist_is_named_within_the_timeout() -> None:
    _fails_clearly("no-such-host.invalid:2379")


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


def test_a_dead_endpoint_beside_a_living_one_does_no_harm(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with EtcdClient(EtcdConfig(f"127.0.0.1:1,{etcd.endpoint},127.0.0.1:2")) as client:
        for i in range(5):
            client.put(keys.root + "k", str(i).encode())


# -- connections that are late


def _first_connected_to(first: str, second: str, timeout_s: float = 5.0) -> EtcdClient:
    """A client of both endpoints that uses the first one, until it has a reason not to."""
    while True:
        client = EtcdClient(EtcdConfig(f"{first},{second}", timeout_s=timeout_s))
        if client._connect().target == first:
            return client
        client.close()


def test_a_connection_that_is_only_late_keeps_its_watches(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, EtcdProxy(etcd.endpoint) as proxy:
        client = _first_connected_to(proxy.endpoint, f"127.0.0.1:{silent.getsockname()[1]}")
        with client, Mirror(client, keys.root) as mirror:
            client.put(keys.root + "k", b"1")
            mirror.wait_for(lambda found: found or None, 5)
            connection, stream = client._connection, mirror._stream
            proxy.blackhole()
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.get, keys.root + "k")
                eventually(lambda: client._spare is not None, "another connection is asked", 5)
                assert not answer.done()
                proxy.heal()
                assert answer.result(5) is not None
            assert (client._connection, client._spare) == (connection, None)
            client.put(keys.root + "k", b"2")
            mirror.wait_for(lambda found: found[keys.root + "k"].value == b"2" or None, 5)
            assert mirror._stream is stream


def test_a_half_open_connection_costs_neither_the_lease_nor_the_watch(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with (
        EtcdProxy(etcd.endpoint) as proxy,
        EtcdClient(EtcdConfig(etcd.endpoint)) as other,
        _first_connected_to(proxy.endpoint, etcd.endpoint) as client,
        Mirror(client, keys.root) as mirror,
    ):
        lease = client.lease(5).keep_alive()
        client.put(keys.root + "ours", b"", lease)
        first = client._connection
        proxy.blackhole()
        eventually(lambda: client._connection not in (None, first), "the client uses the other endpoint", 6)
        other.put(keys.root + "theirs", b"")
        mirror.wait_for(lambda found: keys.root + "theirs" in found or None, 5)
        time.sleep(5)  # the lease would have ended by now, had it not been refreshed
        assert not lease.lost.is_set()
        assert other.get(keys.root + "ours") is not None


def test_a_client_finds_its_way_between_two_endpoints_that_never_answer(etcd: EmbeddedEtcd, keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        endpoints = f"127.0.0.1:{a.getsockname()[1]},{etcd.endpoint},127.0.0.1:{b.getsockname()[1]}"
        for _ in range(3):
            with EtcdClient(EtcdConfig(endpoints)) as client:
                assert client.put(keys.root + "k", b"1") > 0


# -- leases


def test_a_key_outlives_its_ttl_while_its_lease_is_kept_alive(client: EtcdClient, keys: Keys) -> None:
    kept, forgotten = client.lease(2).keep_alive(), client.lease(2)
    client.put(keys.root + "kept", b"", kept)
    client.put(keys.root + "forgotten", b"", forgotten)
    with Mirror(client, keys.root) as mirror:
        mirror.wait_for(lambda found: keys.root + "forgotten" not in found or None, 10)
        assert keys.root + "kept" in mirror.snapshot()
    assert not kept.lost.is_set()
    kept.revoke()
    assert client.get(keys.root + "kept") is None


def test_a_lease_that_etcd_no_longer_knows_is_lost(client: EtcdClient, keys: Keys) -> None:
    lease = client.lease(2).keep_alive()
    client._revoke(lease.id)
    assert lease.lost.wait(5)
    with pytest.raises(LeaseLostError):
        client.put(keys.root + "k", b"", lease)


def test_closing_a_client_ends_all_its_threads_at_once(etcd: EmbeddedEtcd, keys: Keys) -> None:
    before = set(threading.enumerate())
    client = EtcdClient(EtcdConfig(etcd.endpoint))
    mirror, lease = Mirror(client, keys.root), client.lease(60).keep_alive()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 2
    eventually(lambda: set(threading.enumerate()) <= before, "no thread of the client is left", 2)
    assert mirror.snapshot() == {}
    assert not lease.lost.is_set()


# -- mirror


def test_a_mirror_shows_what_was_there_and_what_comes(client: EtcdClient, keys: Keys) -> None:
    client.put(keys.root + "a", b"1")
    client.put(keys.root + "b", b"1")
    changes = threading.Semaphore(0)
    with Mirror(client, keys.root, changes.release) as mirror:
        assert sorted(mirror.snapshot()) == [keys.root + "a", keys.root + "b"]
        client.delete(keys.root + "a")
        revision = client.put(keys.root + "b", b"2")
        mirror.wait_for(lambda found: found[keys.root + "b"].value == b"2" or None, 5)
        assert sorted(mirror.snapshot()) == [keys.root + "b"]
        assert mirror.revision == revision
        assert changes.acquire(timeout=1)


def test_a_mirror_reports_changes_by_watch_not_by_polling(client: EtcdClient, keys: Keys) -> None:
    seen: list[float] = []
    with Mirror(client, keys.root, lambda: seen.append(time.monotonic()), check_interval_s=60) as mirror:
        delays = []
        for i in range(30):
            began = time.monotonic()
            client.put(keys.root + "k", str(i).encode())
            eventually(lambda count=i: len(seen) > count or None, "the change was reported", 5)  # type: ignore[misc]
            delays.append(seen[-1] - began)
        assert sorted(delays)[15] < 0.1  # 0.6 ms on a quiet machine
        assert mirror.healthy


def test_a_transaction_of_several_keys_is_seen_at_once_or_not_at_all(client: EtcdClient, keys: Keys) -> None:
    torn: list[dict[str, KeyValue]] = []
    a, b = keys.root + "a", keys.root + "b"

    def look() -> None:
        found = mirror.snapshot()
        if {kv.value for kv in found.values()} not in (set(), {found[a].value}):
            torn.append(found)

    with Mirror(client, keys.root) as mirror:
        mirror._on_change = look
        for i in range(50):
            client.txn([], [Put(a, str(i).encode()), Put(b, str(i).encode())])
        mirror.wait_for(lambda found: found[a].value == b"49" or None if a in found else None, 5)
    assert not torn


def test_a_mirror_whose_watch_died_silently_reads_again(client: EtcdClient, keys: Keys) -> None:
    with Mirror(client, keys.root, check_interval_s=0.2) as mirror:
        # As a half-open connection: the stream stays, but nothing comes any more.
        mirror._apply = lambda events: None  # type: ignore[method-assign]
        client.put(keys.root + "k", b"1")
        mirror.wait_for(lambda found: found.get(keys.root + "k"), 5)


def test_a_mirror_survives_that_its_revision_was_compacted(
    etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = client._watch
    first_revision = client.put(keys.root + "k", b"0")
    starts = iter([first_revision])  # the first watch asks for a past that no longer exists
    monkeypatch.setattr(client, "_watch", lambda prefix, start: watch(prefix, next(starts, start)))
    newest = client.put(keys.root + "k", b"1")
    client._connect()
    etcdrpc.KVStub(client._connect().channel).Compact(etcdrpc.CompactionRequest(revision=newest))
    with Mirror(client, keys.root) as mirror:
        client.put(keys.root + "k", b"2")
        mirror.wait_for(lambda found: found[keys.root + "k"].value == b"2" or None, 5)


def test_waiting_in_vain_names_the_prefix_and_the_seconds(client: EtcdClient, keys: Keys) -> None:
    with Mirror(client, keys.root) as mirror, pytest.raises(TimeoutError, match=rf"0\.1 s.*{keys.root}"):
        mirror.wait_for(lambda _: None, 0.1)


def test_a_listener_that_raises_does_not_end_the_mirror(client: EtcdClient, keys: Keys) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with Mirror(client, keys.root, fail) as mirror:
        client.put(keys.root + "a", b"")
        mirror.wait_for(lambda found: found.get(keys.root + "a"), 5)
        client.put(keys.root + "b", b"")
        mirror.wait_for(lambda found: found.get(keys.root + "b"), 5)


def test_forked_loader_workers_neither_disturb_the_mirror_nor_print_anything(
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
from lightning_dlrover.rdzv.etcd.client import EtcdClient, EtcdConfig, EtcdError, Mirror
from lightning_dlrover.rdzv.agents.handler import create_backend

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


def test_forked_process_reaches_etcd_or_is_refused(etcd: EmbeddedEtcd, run_id: str) -> None:
    """Refused while its parent is connected; not after a handler that was merely dropped."""
    command = [sys.executable, "-c", FORKS, etcd.endpoint, run_id]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90)
    refused, reached = (line for line in ran.stdout.splitlines() if line.startswith("CHILD"))
    assert refused.startswith("CHILD True cannot read"), ran
    assert "was forked while its parent was connected to etcd" in refused
    assert reached == "CHILD REACHED", ran


# -- the server is full


def test_full_etcd_refuses_writes_until_there_is_room(
    private_etcd: EmbeddedEtcd, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as client:
        lease = client.lease(2).keep_alive()
        client.put(keys.job, b"1", lease)
        with full(client):
            for _ in range(2):
                with pytest.raises(EtcdFullError, match=r"NOSPACE.*etcdctl compact.*etcdctl defrag.*alarm disarm"):
                    client.put(keys.job, b"2")
            assert not lease.has_ended()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert client.put(keys.job, b"3")


def test_etcd_that_never_compacts_is_pointed_out(
    private_etcd: EmbeddedEtcd, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MANY_REVISIONS", 10)
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as client:
        client.share_lifetime(keys.root, 3600)
        for _ in range(12):
            newest = client.put(keys.job, b"")
        client.check()
        assert "--auto-compaction-retention=1h" in caplog.text
        caplog.clear()
        client._call("compact", "KV", "Compact", etcdrpc.CompactionRequest(revision=newest))
        client.check()
    assert "compaction" not in caplog.text


def test_prefix_is_trimmed_from_its_beginning(client: EtcdClient, keys: Keys) -> None:
    for number in range(7):
        client.put(f"{keys.events}{number}", b"")
    client.put(keys.job, b"")
    assert client.trim_prefix(keys.events, 3) == 4
    assert [kv.key[-1] for kv in client.get_prefix(keys.events)[1]] == ["4", "5", "6"]
    assert client.trim_prefix(keys.events, 3) == 0
    assert client.get(keys.job) is not None


# -- the server goes and comes back


def test_client_lease_and_mirror_recover_when_etcd_is_killed_and_restarted(
    private_etcd: EmbeddedEtcd,
) -> None:
    prefix = "/recover/"
    with (
        EtcdClient(EtcdConfig(private_etcd.endpoint, timeout_s=15)) as client,
        Mirror(client, prefix) as mirror,
    ):
        lease = client.lease(2).keep_alive()
        client.put(prefix + "alive", b"1", lease)
        mirror.wait_for(lambda found: found.get(prefix + "alive"), 5)

        private_etcd.kill()
        eventually(lambda: not mirror.healthy, "the mirror notices", 20)
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(client.put, prefix + "during", b"1")  # waits for etcd to come back
            private_etcd.restart()
            written.result(20)

        mirror.wait_for(lambda found: found.get(prefix + "during"), 20)
        eventually(lambda: mirror.healthy, "the mirror is well again", 10)
        client.put(prefix + "after", b"1")
        mirror.wait_for(lambda found: found.get(prefix + "after"), 5)
        ends = time.monotonic() + 2 * lease.ttl_s
        eventually(lambda: time.monotonic() > ends, "the lease would have ended", 10)
        assert not lease.lost.is_set()
        assert prefix + "alive" in mirror.snapshot()
