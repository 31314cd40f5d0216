from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.client import Election, EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import (
    Compare,
    EtcdConfig,
    EtcdFullError,
    EtcdUnavailableError,
    Op,
    Txn,
    absent,
    created,
    exists,
    modified,
)
from lightning_dlrover.rdzv.job import journal as journal_module
from lightning_dlrover.rdzv.job.journal import ContentionError, FenceLostError, Found, Journal, readable
from lightning_dlrover.rdzv.job.records import CheckpointRequest, EventRecord, Keys, PlanRecord, encode
from tests.support.counted_requests import counted
from tests.support.full_etcd import full


def next_request(now: CheckpointRequest | None) -> CheckpointRequest:
    return CheckpointRequest(now.number + 1 if now is not None else 1, "a test")


class DoubtfulClient(EtcdClient):
    """A client whose next transactions get no answer, though etcd carries them out: before the call returns, or later."""

    lost = 0
    late = 0

    def txn(self, compare: list[Compare], success: list[Op], failure: list[Op] | tuple[Op, ...] = ()) -> Txn:  # type: ignore[override]
        if self.lost:
            self.lost -= 1
            super().txn(compare, success, failure)
            raise EtcdUnavailableError("the answer was lost")
        if self.late:
            self.late -= 1
            self._delayed = compare, success
            raise EtcdUnavailableError("the request is late")
        if (delayed := self.__dict__.pop("_delayed", None)) is not None:
            super().txn(*delayed)
        return super().txn(compare, success, failure)


@pytest.fixture
def doubtful(etcd: EmbeddedEtcd) -> Iterator[DoubtfulClient]:
    with DoubtfulClient(EtcdConfig(etcd.endpoint)) as client:
        assert isinstance(client, DoubtfulClient)
        yield client


@pytest.fixture
def journal(client: EtcdClient, keys: Keys) -> Journal:
    return Journal(client, keys)


@pytest.fixture
def key(keys: Keys) -> str:
    return keys.checkpoint_request


# -- reading


def test_a_record_is_found_with_the_revision_of_its_last_write(journal: Journal, key: str) -> None:
    assert journal.get(CheckpointRequest, key) == Found(None, 0)
    revision = journal.client.put(key, encode(next_request(None)))
    assert journal.get(CheckpointRequest, key) == Found(next_request(None), revision)


def test_garbage_is_an_error_unless_the_reader_leaves_it_out(journal: Journal, key: str) -> None:
    revision = journal.client.put(key, b"garbage")
    with pytest.raises(RecordError, match=key):
        journal.get(CheckpointRequest, key)
    with pytest.raises(RecordError, match=key):
        journal.swap(CheckpointRequest, key, next_request)
    assert journal.get(CheckpointRequest, key, readable) == Found(None, revision)
    journal.swap(CheckpointRequest, key, next_request, read=readable)
    assert journal.get(CheckpointRequest, key).record == next_request(None)


# -- compare-and-swap


def test_each_of_many_concurrent_changes_counts_once(journal: Journal, key: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: journal.swap(CheckpointRequest, key, next_request), range(40)))
    assert sorted(each.record.number for each in found if each.record) == list(range(1, 41))
    newest = max(found, key=lambda each: each.revision)
    assert journal.get(CheckpointRequest, key) == newest


@pytest.mark.parametrize("change", [lambda now: None, lambda now: now], ids=["none", "equal"])
def test_an_unchanged_record_is_not_written(
    journal: Journal, key: str, change: Callable[[CheckpointRequest | None], CheckpointRequest | None]
) -> None:
    assert journal.swap(CheckpointRequest, key, change) == Found(None, 0)
    before = journal.swap(CheckpointRequest, key, next_request)
    assert journal.swap(CheckpointRequest, key, change) == before


def test_endless_contention_ends_with_an_error_that_names_the_key(journal: Journal, key: str) -> None:
    def overtaken(now: CheckpointRequest | None) -> CheckpointRequest:
        journal.client.put(key, encode(next_request(now)))
        return next_request(now)

    with pytest.raises(ContentionError, match=f"'{key}' was not written: others have changed it for 0.3 s"):
        journal.swap(CheckpointRequest, key, overtaken, timeout_s=0.3)


def test_nothing_is_swapped_once_the_fence_is_lost(journal: Journal, key: str) -> None:
    office = journal.keys.controller
    fence = [created(office) == journal.client.put(office, b"we")]
    written = journal.swap(CheckpointRequest, key, next_request, fence)

    def taken_over(now: CheckpointRequest | None) -> CheckpointRequest:
        journal.client.delete(office)
        journal.client.put(office, b"another controller")
        return next_request(now)

    with pytest.raises(FenceLostError, match=key):
        journal.swap(CheckpointRequest, key, taken_over, fence)
    assert journal.get(CheckpointRequest, key) == written


def test_another_writer_does_not_look_like_a_lost_fence(journal: Journal, key: str) -> None:
    office = journal.keys.controller
    fence = [created(office) == journal.client.put(office, b"we")]
    rivals = iter([7])

    def rivalled(now: CheckpointRequest | None) -> CheckpointRequest:
        for number in rivals:
            journal.client.put(key, encode(CheckpointRequest(number, "a rival")))
        return next_request(now)

    assert journal.swap(CheckpointRequest, key, rivalled, fence).record == CheckpointRequest(8, "a test")


# -- answers in doubt, and an unreachable etcd


@pytest.mark.parametrize("kind", ["lost", "late"])
def test_write_without_an_answer_is_applied_once(kind: str, doubtful: DoubtfulClient, keys: Keys, key: str) -> None:
    journal = Journal(doubtful, keys)
    setattr(doubtful, kind, 1)
    assert journal.swap(CheckpointRequest, key, next_request, timeout_s=5.0).record == next_request(None)
    assert journal.get(CheckpointRequest, key).record == next_request(None)


def test_a_write_without_an_answer_is_an_error_at_once_without_a_timeout(
    doubtful: DoubtfulClient, keys: Keys, key: str
) -> None:
    doubtful.lost = 1
    with pytest.raises(EtcdUnavailableError, match="the answer was lost"):
        Journal(doubtful, keys).swap(CheckpointRequest, key, next_request)


def test_an_equal_record_of_another_writer_is_not_taken_for_our_own(journal: Journal, key: str) -> None:
    rivals = iter([1])

    def rivalled(now: CheckpointRequest | None) -> CheckpointRequest:
        for _ in rivals:
            journal.client.put(key, encode(next_request(None)))
        return next_request(now)

    assert journal.swap(CheckpointRequest, key, rivalled).record == CheckpointRequest(2, "a test")


def test_a_swap_waits_for_etcd_until_its_deadline_only(private_etcd: EmbeddedEtcd, keys: Keys, key: str) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint, timeout_s=0.2)) as client:
        journal = Journal(client, keys)
        journal.swap(CheckpointRequest, key, next_request)
        private_etcd.kill()
        began = time.monotonic()
        with pytest.raises(EtcdUnavailableError, match=key):
            journal.swap(CheckpointRequest, key, next_request, timeout_s=0.6)
        assert 0.6 <= time.monotonic() - began < 5.0
        with ThreadPoolExecutor(1) as pool:
            patient = pool.submit(journal.swap, CheckpointRequest, key, next_request, timeout_s=20.0)
            private_etcd.start()
            assert patient.result().record == CheckpointRequest(2, "a test")


def test_a_full_etcd_holds_up_only_callers_that_have_time(private_etcd: EmbeddedEtcd, keys: Keys, key: str) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as client:
        journal = Journal(client, keys)
        with full(client):
            began = time.monotonic()
            with pytest.raises(EtcdFullError):
                journal.swap(CheckpointRequest, key, next_request)
            assert time.monotonic() - began < 1.0
            with pytest.raises(EtcdFullError):
                journal.swap(CheckpointRequest, key, next_request, timeout_s=0.3)
        assert journal.swap(CheckpointRequest, key, next_request, timeout_s=0.3).record == next_request(None)


# -- fenced writes and elections


def test_a_fenced_write_is_all_or_nothing(journal: Journal, keys: Keys, key: str) -> None:
    plan = PlanRecord(2, "user", "a test", binding=False)
    both = {key: next_request(None), keys.plan: plan}
    assert not journal.fenced_write(both, [exists(keys.controller)])
    assert (journal.client.get(key), journal.client.get(keys.plan)) == (None, None)
    assert journal.fenced_write(both, [absent(keys.controller)])
    found = journal.get(PlanRecord, keys.plan)
    assert found.record == plan
    assert not journal.fenced_write({keys.plan: plan}, [modified(keys.plan) == found.revision - 1])
    assert journal.fenced_write({keys.plan: plan}, [modified(keys.plan) == found.revision])


def test_one_of_many_candidates_holds_an_election_key(journal: Journal, keys: Keys) -> None:
    leases = [journal.client.lease(30.0) for _ in range(4)]

    def stand(lease_id: int) -> int:
        return Election(keys.coordinator).claim(journal.client, str(lease_id).encode(), lease_id)

    with ThreadPoolExecutor(4) as pool:
        terms = list(pool.map(stand, [lease.id for lease in leases]))
    entry = journal.client.get(keys.coordinator)
    assert entry is not None
    won = [lease.id for lease, term in zip(leases, terms, strict=True) if term]
    assert won == [entry.lease_id]
    assert max(terms) == entry.create_revision
    assert stand(won[0]) == entry.create_revision  # its answer may have been lost


# -- the history


def event(text: str) -> EventRecord:
    return EventRecord("test", 1.0, text)


def test_lines_of_several_writers_are_read_in_their_order(journal: Journal, client: EtcdClient, keys: Keys) -> None:
    other = Journal(client, keys)
    for number in range(6):
        (journal if number % 2 else other).append(event(str(number)), f"writer-{number % 2}")
    client.put(keys.events + "9-foreign", b"garbage")
    assert [each.text for each in journal.events()] == list("012345")


def test_a_long_history_is_read_in_answers_of_a_limited_size(journal: Journal, client: EtcdClient, keys: Keys) -> None:
    for first in range(0, 1200, 100):
        journal.append_all(journal.puts([event(str(first + n)) for n in range(100)], "writer"))
    with counted(client) as requests:
        assert [each.text for each in journal.events()] == [str(n) for n in range(1200)]
        assert requests == ["Range"] * 3
        journal.append(event("newest"), "writer")
        del requests[:]
        assert journal.events()[-1].text == "newest"
        assert requests == ["Range"]


def test_lines_written_after_etcd_was_restored_from_a_backup_are_read(tmp_path: Path, keys: Keys) -> None:
    with EmbeddedEtcd(tmp_path / "lost") as lost, EtcdClient(EtcdConfig(lost.endpoint)) as client:
        journal = Journal(client, keys)
        for number in range(20):
            journal.append(event(str(number)), "writer")
        assert len(journal.events()) == 20
        lost.stop()
        with EmbeddedEtcd(tmp_path / "restored", port=lost.port):  # from a backup that is older than the job
            journal.append(event("new"), "writer")
            assert [each.text for each in journal.events()] == ["new"]


def test_a_line_is_not_added_once_the_fence_is_lost(journal: Journal, keys: Keys) -> None:
    assert not journal.append(event("late"), "controller", [exists(keys.controller)])
    assert journal.events() == []


def test_every_writer_bounds_the_history_with_its_first_line(
    journal: Journal, client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_EVENTS", 5)
    for number in range(9):
        client.put(f"{keys.events}{number:020d}-gone", encode(dataclasses.replace(event(str(number)), at=float(number))))
    journal.append(event("newest"), "command")
    assert [each.text for each in journal.events()] == ["5", "6", "7", "8", "newest"]


def test_a_line_is_added_once_though_the_history_cannot_be_trimmed(
    etcd: EmbeddedEtcd, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> int:
        raise EtcdUnavailableError("etcd is away")

    with EtcdClient(EtcdConfig(etcd.endpoint)) as client:
        monkeypatch.setattr(client, "trim_prefix", unreachable)
        journal = Journal(client, keys)
        assert journal.append(event("one"), "worker")
        assert [each.text for each in journal.events()] == ["one"]
