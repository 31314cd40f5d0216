from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from lightning_dlrover.rdzv.etcd.client import KEYS_PER_PAGE, MOST_RANGES, EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import (
    Delete,
    DeletePrefix,
    EtcdConfig,
    EtcdFullError,
    Get,
    KeyValue,
    LeaseLostError,
    Put,
    absent,
    created,
    exists,
    modified,
    none_under,
)
from lightning_dlrover.rdzv.job.records import Keys
from tests.rdzv.present import present
from tests.support.counted_requests import counted
from tests.support.full_etcd import full
from tests.support.waiting import eventually

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
        ([none_under(keys.root)], False),
        ([none_under(other)], True),
    ]:
        result = client.txn(conditions, [Get(key)], [Get(other)])
        assert result.succeeded == holds
        assert [kv.value for kv in result.values] == ([b"1"] if holds else [])
    done = client.txn([exists(key)], [Put(other, b"new"), Delete(key)])
    assert done.succeeded
    assert client.get(key) is None
    assert client.get(other) == KeyValue(other, b"new", done.revision, done.revision, 1, 0)


def test_exactly_one_of_many_compare_and_swaps_wins(client: EtcdClient, keys: Keys) -> None:
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
    assert present(client.get(key)).value == b"40"


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

    stub = client.caller.connections.current()._stubs["KV"]
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


def test_transaction_with_a_lost_answer_is_not_reported_as_failed(
    client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.root + "election"
    client.check()
    with one_lost_answer(client, monkeypatch):
        assert client.txn([absent(key)], [Put(key, b"me")]).succeeded
    assert present(client.get(key)).version == 1


def test_deletion_of_a_prefix_with_a_lost_answer_is_not_reported_as_failed(
    client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.root + "a/1"
    client.put(key, b"1")
    with one_lost_answer(client, monkeypatch):
        assert client.txn([exists(key)], [DeletePrefix(keys.root + "a/")]).succeeded
    assert client.get(key) is None


def test_lost_answer_does_not_hide_that_another_writer_was_first(
    client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.root + "election"
    client.put(key, b"somebody else")
    with one_lost_answer(client, monkeypatch):
        assert not client.txn([absent(key)], [Put(key, b"me")]).succeeded


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
    client.leases.revoke(lease.id)
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


def test_prefix_is_trimmed_from_its_beginning(client: EtcdClient, keys: Keys) -> None:
    for number in range(7):
        client.put(f"{keys.events}{number}", b"")
    client.put(keys.job, b"")
    assert client.trim_prefix(keys.events, 3) == 4
    assert [kv.key[-1] for kv in client.get_prefix(keys.events)[1]] == ["4", "5", "6"]
    assert client.trim_prefix(keys.events, 3) == 0
    assert client.get(keys.job) is not None


def test_many_prefixes_are_read_at_one_revision_in_one_request(client: EtcdClient, run_id: str) -> None:
    folders = {f"/{run_id}/{number:03}/": number for number in range(MOST_RANGES)}
    for folder, number in folders.items():
        client.put(f"{folder}old", str(number).encode())
    revision = client.put(f"/{run_id}/007/new", b"news")
    with counted(client) as requests:
        found = client.read_prefixes(dict.fromkeys(folders, 0))
        news = client.read_prefixes(dict.fromkeys(folders, revision - 1))
    assert requests == ["Txn", "Txn"]
    assert {seen for seen, _ in found.values()} == {revision}
    assert [kv.value for kv in found[f"/{run_id}/007/"][1]] == [b"news", b"7"]
    assert {folder for folder, (_, kvs) in news.items() if kvs} == {f"/{run_id}/007/"}
    with counted(client) as requests:
        assert len(client.read_prefixes(dict.fromkeys([*folders, f"/{run_id}/absent/"], 0))) == MOST_RANGES + 1
        assert client.read_prefixes({}) == {}
    assert requests == ["Txn", "Txn"]


def test_folders_of_few_keys_are_listed_in_one_request_and_large_ones_are_skipped(client: EtcdClient, run_id: str) -> None:
    for number in range(20):
        client.put(f"/{run_id}/small{number:02}/key", b"1")
    with counted(client) as requests:
        assert len(client.folders(f"/{run_id}/")) == 20
    assert len(requests) == 2  # the last one finds nothing
    for number in range(3 * KEYS_PER_PAGE):
        client.put(f"/{run_id}/large/{number}", b"1")
    with counted(client) as requests:
        assert len(client.folders(f"/{run_id}/")) == 21
    assert len(requests) == 3


def test_folders_are_listed_once_each_and_from_any_name_on(client: EtcdClient, run_id: str) -> None:
    names = ["a", "a-b", "a0", "b", "é"]
    for name in names:
        for key in ("x", "y/z"):
            client.put(f"/{run_id}/{name}/{key}", b"1")
    client.put(f"/{run_id}/file", b"1")
    found = client.folders(f"/{run_id}/")
    assert sorted(found) == sorted(names)
    for number, name in enumerate(found):
        assert client.folders(f"/{run_id}/", after=name) == found[number + 1 :]
        assert client.folders(f"/{run_id}/", after=name, most=1) == found[number + 1 : number + 2]
    assert client.folders(f"/{run_id}-absent/") == []
