"""A mirror shows etcd's records, whatever happens to its watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, EtcdUnavailableError, KeyValue, Put
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.waiting import eventually


def test_mirror_shows_existing_and_later_keys(client: EtcdClient, keys: Keys) -> None:
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


def test_thread_of_a_mirror_sleeps_until_there_is_a_change(client: EtcdClient, keys: Keys) -> None:
    with Mirror(client, keys.root, check_interval_s=60) as mirror:
        client.put(keys.root + "k", b"1")
        mirror.wait_for(lambda found: found.get(keys.root + "k"), 5)
        task = Path(f"/proc/self/task/{mirror._threads[0].native_id}/status")

        def num_wakes() -> int:
            [line] = [line for line in task.read_text().splitlines() if line.startswith("voluntary_ctxt_switches")]
            return int(line.split()[1])

        # A thread that has just seen a change still goes back to its wait.
        eventually(lambda: "(sleeping)" in task.read_text() or None, "the thread to sleep", 5)
        before = num_wakes()
        assert not threading.Event().wait(1.0)
        assert num_wakes() - before <= 2  # gRPC's own wait wakes up ten times


def test_a_transaction_of_several_keys_is_seen_at_once_or_not_at_all(client: EtcdClient, keys: Keys) -> None:
    torn: list[Mapping[str, KeyValue]] = []
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


def test_mirror_whose_watch_died_silently_reads_again(client: EtcdClient, keys: Keys) -> None:
    with Mirror(client, keys.root, check_interval_s=0.2) as mirror:
        # Simulate a half-open connection: the stream stays, but delivers nothing any more.
        mirror._apply = lambda events: None  # type: ignore[method-assign]
        client.put(keys.root + "k", b"1")
        mirror.wait_for(lambda found: found.get(keys.root + "k"), 5)


def test_a_mirror_survives_that_its_revision_was_compacted(
    etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = client.caller.watch
    first_revision = client.put(keys.root + "k", b"0")
    starts = iter([first_revision])  # the first watch starts at a compacted revision
    monkeypatch.setattr(client.caller, "watch", lambda prefix, start: watch(prefix, next(starts, start)))
    newest = client.put(keys.root + "k", b"1")
    client.caller.connections.current()
    etcdrpc.KVStub(client.caller.connections.current().channel).Compact(etcdrpc.CompactionRequest(revision=newest))
    with Mirror(client, keys.root) as mirror:
        client.put(keys.root + "k", b"2")
        mirror.wait_for(lambda found: found[keys.root + "k"].value == b"2" or None, 5)


def test_wait_that_times_out_names_the_prefix_and_the_seconds(client: EtcdClient, keys: Keys) -> None:
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


# --- catching up ------------------------------------------------------------------------------------------------------------


@contextmanager
def late_mirror(client: EtcdClient, keys: Keys) -> Iterator[tuple[Mirror, threading.Event]]:
    """A mirror that applies no change before the event is set."""
    arrives = threading.Event()
    with Mirror(client, keys.root, check_interval_s=60) as mirror:
        apply = mirror._apply

        def apply_late(events: Sequence[Any]) -> None:
            assert arrives.wait(20)
            apply(events)

        mirror._apply = apply_late  # type: ignore[method-assign]
        try:
            yield mirror, arrives
        finally:
            arrives.set()


@pytest.mark.parametrize("write", ["put", "delete"])
def test_caught_up_mirror_shows_writes_that_came_before(client: EtcdClient, keys: Keys, write: str) -> None:
    key = keys.root + "k"
    client.put(keys.root + "other", b"")
    if write == "delete":
        client.put(key, b"1")
    with late_mirror(client, keys) as (mirror, arrives), ThreadPoolExecutor(1) as pool:
        if write == "delete":
            client.delete(key)
        else:
            client.put(key, b"1")
        catching_up = pool.submit(mirror.catch_up, 15)
        with pytest.raises(TimeoutError):
            catching_up.result(0.5)
        assert (mirror.get(key) is None) == (write == "put")  # still as it was
        arrives.set()
        catching_up.result(10)
        assert (mirror.get(key) is None) == (write == "delete")


def test_mirror_that_misses_nothing_of_its_prefix_has_caught_up(client: EtcdClient, keys: Keys) -> None:
    client.put(keys.root + "k", b"1")
    with late_mirror(client, keys) as (mirror, _):
        mirror.catch_up(5)
        revision = client.put(f"{keys.prefix}/{keys.run_id}-other/k", b"1")  # its revision is newer than the copy's
        mirror.catch_up(5)
        assert mirror.revision < revision
        client.put(keys.root + "new", b"1")
        client.delete(keys.root + "new")  # the copy never shows it, and is right
        mirror.catch_up(5)


def test_catching_up_too_late_names_the_prefix_and_the_seconds(client: EtcdClient, keys: Keys) -> None:
    with late_mirror(client, keys) as (mirror, _):
        client.put(keys.root + "k", b"1")
        with pytest.raises(TimeoutError, match=rf"0\.2 s.*{keys.root}"):
            mirror.catch_up(0.2)


def test_closed_mirror_ends_catching_up(client: EtcdClient, keys: Keys) -> None:
    with late_mirror(client, keys) as (mirror, arrives), ThreadPoolExecutor(1) as pool:
        client.put(keys.root + "k", b"1")
        catching_up = pool.submit(mirror.catch_up, 15)
        with pytest.raises(TimeoutError):
            catching_up.result(0.3)
        mirror.close(timeout_s=0.1)
        with pytest.raises(EtcdError, match="was closed"):
            catching_up.result(10)
        arrives.set()


@pytest.mark.slow
def test_catching_up_without_etcd_is_an_error(private_etcd: EmbeddedEtcd, keys: Keys) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as client, Mirror(client, keys.root, check_interval_s=60) as mirror:
        private_etcd.kill()
        began = time.monotonic()
        with pytest.raises(EtcdUnavailableError):
            mirror.catch_up(1.0)
        assert time.monotonic() - began < 5
