"""The membership protocol against a real etcd: elections, evictions and refusals."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import Delete, EtcdConfig, EtcdUnavailableError, Put
from lightning_dlrover.rdzv.job import journal
from lightning_dlrover.rdzv.job.events import UnknownEvent
from lightning_dlrover.rdzv.job.records import (
    CheckpointRecord,
    DrainRecord,
    EndNotice,
    EventRecord,
    JobRecord,
    Keys,
    RoundRecord,
    SearchRecord,
    WorkerRecord,
    decode,
    encode,
)
from lightning_dlrover.rdzv.membership import coordinator
from lightning_dlrover.rdzv.membership.member import EvictedError, MembershipError
from lightning_dlrover.rdzv.membership.membership import JobClosedError, Membership, MembershipConfig, leaves_at
from lightning_dlrover.rdzv.membership.rounds import JobView, RoundTimeouts, WorkerView, dead_workers, read_view
from lightning_dlrover.rdzv.membership.worker_records import note_end
from tests.rdzv.present import present
from tests.support.full_etcd import fill, full, small_etcd
from tests.support.waiting import eventually

T = TypeVar("T")

VERSION = "1"


class Worker:
    """A registered worker with a port that answers as long as it lives."""

    def __init__(self, client: EtcdClient, run_id: str, **config: Any) -> None:
        self.client = client
        self.port = socket.create_server(("127.0.0.1", 0))
        values: dict[str, Any] = {
            "run_id": run_id,
            "prefix": "/dlrover",
            "agent_id": f"agent-{self.port.getsockname()[1]}",
            "local_rank": 0,
            "min_workers": 1,
            "max_workers": 4,
            "version": VERSION,
            "address": "127.0.0.1",
            "port": self.port.getsockname()[1],
        }
        self._ended = False
        self.membership = Membership(client, MembershipConfig(**{**values, **config}))

    @property
    def worker_id(self) -> str:
        return self.membership.worker_id

    def evict_dead(self, worker_ids: Sequence[str]) -> None:
        self.membership.evict(dead_workers(self.membership.whose_refusal_counts(worker_ids)))

    def wait_for(self, found: Callable[[WorkerView], T | None], what: str = "something") -> T:
        return self.membership.wait_for(found, 15.0, what)

    def wait_for_records(self, found: Callable[[JobView], T | None], what: str = "something") -> T:
        """Wait for the records of all workers, which only the coordinator follows."""
        return eventually(lambda: found(self.membership.all_records()), what)

    def wait_for_round(self, number: int) -> RoundRecord:
        return self.wait_for(lambda view: view.round if view.round and view.round.number >= number else None, f"round {number}")

    def enter(self, number: int) -> RoundRecord:
        """Take part in a round as a worker that has formed it."""
        round_ = self.wait_for_round(number)
        self.membership.own.update("active", round_.number)
        return round_

    def stop(self) -> None:
        """Stop acting, but keep all records, like a stopped process, or a dead one before its lease expires."""
        self.membership._closing = True
        self.membership._thread.join()

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.membership.close()
            self.port.close()


StartWorker = Callable[..., Worker]


@pytest.fixture
def start(etcd: EmbeddedEtcd, run_id: str) -> Iterator[StartWorker]:
    """Start workers, each with its own client, as in separate processes."""
    with ExitStack() as stack:

        def make(endpoint: str = etcd.endpoint, timeout_s: float = EtcdConfig.timeout_s, **config: Any) -> Worker:
            worker = Worker(stack.enter_context(EtcdClient(EtcdConfig(endpoint, timeout_s=timeout_s))), run_id, **config)
            stack.callback(worker.end)
            return worker

        yield make


def job_of(start: StartWorker, size: int, **config: Any) -> list[Worker]:
    """Workers that train together."""
    workers = [start(min_workers=size, **config) for _ in range(size)]
    for worker in workers:
        worker.membership.register()
    for worker in workers:
        worker.enter(1)
    for worker in workers:
        worker.wait_for_records(lambda view: all(w.state == "active" for w in view.workers.values()) or None)
    return workers


def ready(start: StartWorker, **config: Any) -> Worker:
    """A worker that waits for admission."""
    worker = start(**config)
    worker.membership.register()
    worker.membership.own.update("ready")
    return worker


def coordinator_of(workers: list[Worker]) -> tuple[Worker, list[Worker]]:
    round_ = present(workers[0].membership.view.round)
    coordinator = next(worker for worker in workers if worker.worker_id == round_.convener)
    return coordinator, [worker for worker in workers if worker is not coordinator]


# --- rounds -------------------------------------------------------------------------------------------------------------------


def test_workers_that_start_together_get_one_round_with_all_of_them(start: StartWorker) -> None:
    workers = job_of(start, 3)
    rounds = [worker.membership.view.round for worker in workers]
    assert rounds[0] == rounds[1] == rounds[2]
    assert rounds[0] is not None
    assert sorted(rounds[0].members) == sorted(worker.worker_id for worker in workers)


def test_a_late_worker_stands_by_until_it_is_ready(start: StartWorker) -> None:
    (first,) = job_of(start, 1)
    late = start()
    assert late.membership.register() == "standby"
    first.wait_for_records(lambda view: view.workers.get(late.worker_id))
    assert first.membership.view.round is not None
    assert first.membership.view.round.number == 1
    late.membership.own.update("ready")
    assert first.wait_for_round(2).members == [first.worker_id, late.worker_id]


def test_a_worker_that_asks_to_leave_is_left_out_of_the_next_round(start: StartWorker) -> None:
    first, second = job_of(start, 2, max_workers=2)
    spare = ready(start, min_workers=2, max_workers=2)
    second.membership.own.drain("preemption notice")
    round_ = first.wait_for_round(2)
    assert second.worker_id not in round_.members or first.worker_id not in round_.members
    assert spare.worker_id in round_.members


def test_only_the_holder_of_the_election_key_writes_rounds(start: StartWorker) -> None:
    workers = job_of(start, 3)
    election = present(workers[0].client.get(workers[0].membership.keys.coordinator))
    assert present(workers[0].membership.view.round).convener == election.value.decode()


def test_a_coordinator_that_lost_its_key_cannot_write_a_round(
    start: StartWorker, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its view may be old, but its write is fenced on the key's create revision."""
    (coordinator,) = job_of(start, 1)
    membership, keys = coordinator.membership, coordinator.membership.keys
    coordinator.stop()
    office = membership._office
    seen = client.entries(keys.live)
    seen[keys.workers + "joiner"] = dataclasses.replace(
        seen[keys.workers + coordinator.worker_id],
        value=encode(WorkerRecord("joiner", "agent", "host", 1, 0, "127.0.0.1", 1, "ready", version=VERSION)),
    )
    client.txn([], [Delete(keys.coordinator)])
    client.txn([], [Put(keys.coordinator, b"somebody else")])
    before = client.get(keys.round)
    # A coordinator that was stopped while the others continued still sees itself in office, and a joiner.
    monkeypatch.setattr(office._shared, "snapshot", lambda: seen)
    monkeypatch.setattr(office._job_mirror, "look", lambda: (seen, read_view(seen, keys), 0.0))
    monkeypatch.setattr(office._job_mirror, "wait_for", lambda *_: pytest.fail("a round was written"))
    office.act(1)
    assert client.get(keys.round) == before


def test_election_key_without_a_holder_is_removed(
    start: StartWorker, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "CHECK_S", 0.2)
    (first,) = job_of(start, 1)
    client.put(first.membership.keys.coordinator, b"\xff nobody")
    late = ready(start)
    assert first.wait_for_round(2).members == [first.worker_id, late.worker_id]


def test_when_the_coordinator_leaves_another_worker_coordinates(start: StartWorker) -> None:
    coordinator, [other] = coordinator_of(job_of(start, 2))
    late = ready(start, min_workers=1)
    coordinator.membership.close()
    new = other.wait_for(lambda view: view.round if view.round and coordinator.worker_id not in view.round.members else None)
    assert new.convener in (other.worker_id, late.worker_id)


# --- evictions --------------------------------------------------------------------------------------------------------------


def test_loss_is_recorded_with_its_round_even_if_etcds_answer_is_lost(
    start: StartWorker, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, (lost, other) = coordinator_of(job_of(start, 3))
    keys, carry_out = coordinator.membership.keys, coordinator.client.txn

    def txn(compare: Any, success: Any, failure: Any = ()) -> Any:
        done = carry_out(compare, success, failure)
        if any(op.key == keys.round for op in success):
            raise EtcdUnavailableError("no answer")
        return done

    monkeypatch.setattr(coordinator.client, "txn", txn)
    lost.stop()
    client.delete(keys.workers + lost.worker_id)
    late = start(min_workers=3)  # the job continues once it has its minimum of three workers
    late.membership.register()
    late.membership.own.update("ready")
    assert set(other.wait_for_round(2).members) == {coordinator.worker_id, other.worker_id}
    round_ = present(client.get(keys.round))
    lines = [entry for entry in client.get_prefix(keys.events)[1] if entry.mod_revision == round_.mod_revision]
    events = [decode(EventRecord, line.value, line.key) for line in lines]
    assert [event.kind for event in events] == ["loss", "round"]
    assert events[0].data["worker_id"] == lost.worker_id


def test_a_dead_worker_is_evicted_with_all_its_records(start: StartWorker, client: EtcdClient) -> None:
    dead, [survivor] = coordinator_of(job_of(start, 2))
    keys = dead.membership.keys
    dead.membership.own.drain("about to die")
    survivor.wait_for(lambda view: True if dead.worker_id in view.drains else None)
    dead.stop()
    dead.port.close()
    survivor.evict_dead([dead.worker_id, survivor.worker_id])
    assert client.get(keys.workers + dead.worker_id) is None
    assert client.get(keys.drains + dead.worker_id) is None
    election = client.get(keys.coordinator)
    assert election is None or election.value == survivor.worker_id.encode()
    new = survivor.wait_for_records(lambda view: view.workers if dead.worker_id not in view.workers else None)
    assert survivor.worker_id in new


def test_living_worker_that_was_evicted_stops_taking_part(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    first.membership.evict([second.worker_id])
    eventually(lambda: second.membership.own.evicted, "the eviction")
    with pytest.raises(EvictedError, match="Start it again as a new worker"):
        second.membership.own.update("active", 2)
    with pytest.raises(EvictedError):
        second.wait_for(lambda view: None)
    second.membership.close()
    assert first.client.get(first.membership.keys.workers + second.worker_id) is None


def test_returned_worker_is_not_evicted_for_its_former_registration(start: StartWorker, client: EtcdClient) -> None:
    first, second = job_of(start, 2)
    key = first.membership.keys.workers + second.worker_id
    assert first.membership.workers.of([second.worker_id])
    entry = present(client.get(key))
    client.delete(key)
    client.put(key, entry.value)
    first.membership.evict([second.worker_id])
    assert client.get(key) is not None


def test_a_lease_that_ends_takes_the_worker_with_it(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    third = start(min_workers=2)  # the first worker can continue with this one
    third.membership.register()
    third.membership.own.update("ready")
    for worker in (first, second, third):
        worker.enter(2)
    with second.membership.own._write_lock:  # behaves as if stopped
        second.membership.own.lease.revoke()
        first.wait_for_round(3)
    eventually(lambda: second.membership.own.evicted, "the eviction")
    assert first.wait_for_records(lambda view: second.worker_id not in view.workers or None)


@pytest.mark.parametrize("is_replaced_first", [False, True])
def test_worker_that_must_leave_at_once_does_not_wait_for_a_replacement(is_replaced_first: bool, start: StartWorker) -> None:
    first, second = job_of(start, 2)
    if is_replaced_first:
        assert first.membership.shared.replace(second.worker_id, "slow")
    second.membership.own.drain("its host is taken away")
    if not is_replaced_first:
        assert not first.membership.shared.replace(second.worker_id, "slow")
    assert first.wait_for(lambda view: view.drains or None) == {second.worker_id}
    assert first.membership.view.replacements == frozenset()


@pytest.mark.parametrize(
    "notice_s, reserved_s", [(3600.0, 30.0), (90.0, 30.0), (30.0, 10.0), (3.0, 1.0), (0.0, 0.0), (-5.0, 0.0)]
)
def test_part_of_a_notice_is_reserved_for_leaving(notice_s: float, reserved_s: float) -> None:
    assert leaves_at(1000.0 + notice_s, 1000.0) == 1000.0 + notice_s - reserved_s


def test_worker_leaves_in_time_before_its_node_is_taken_away(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    first.membership.shared.update_job(lambda job: dataclasses.replace(job, min_workers=1))
    journal, notice = first.membership.shared.journal, EndNotice("spot", time.time() + 3.0)
    assert note_end(journal, second.worker_id, notice)
    assert second.wait_for(lambda view: view.taken_at or None) == {second.worker_id: notice.taken_at}
    assert second.membership.view.replacements == {second.worker_id}
    round_ = first.wait_for_round(2)
    assert (round_.members, round_.kind, round_.planned) == ([first.worker_id], "shrink", True)
    assert notice.taken_at - 1.1 < time.time() < notice.taken_at


def test_last_worker_of_the_minimum_stays_when_its_node_is_taken_away(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    assert note_end(first.membership.shared.journal, second.worker_id, EndNotice("spot", time.time() + 0.1))
    first.wait_for(lambda view: True if view.drains == {second.worker_id} else None)
    second.membership.own.leave()  # it is killed at its deadline
    first.wait_for(lambda view: True if view.lacks_workers else None)
    assert first.membership.view.round is not None
    assert first.membership.view.round.number == 1


SOON, LATE, EARLY = EndNotice("spot"), EndNotice("spot", 4e9), EndNotice("taint", 3e9)


@pytest.mark.parametrize(
    "notices, kept",
    [
        ((SOON, SOON), SOON),
        ((SOON, LATE, SOON), LATE),
        ((LATE, EndNotice("spot", 4e9 + 1.0)), LATE),
        ((LATE, EndNotice("spot", 5e9)), EndNotice("spot", 5e9)),
        ((LATE, EARLY), EARLY),
        ((EARLY, LATE), EARLY),
    ],
)
def test_notice_with_news_replaces_the_last_one(notices: Sequence[EndNotice], kept: EndNotice, start: StartWorker) -> None:
    (first,) = job_of(start, 1)
    journal, drain = first.membership.shared.journal, first.membership.keys.drains + first.worker_id
    known: EndNotice | None = None
    for notice in notices:
        is_written = note_end(journal, first.worker_id, notice)
        record = present(journal.get(DrainRecord, drain).record)
        assert is_written == (record.notice != known)
        known = record.notice
    assert known == kept
    texts = [event.text for event in journal.events() if event.kind == "notice"]
    assert f"{first.worker_id}: its node {kept}" in texts


def test_notice_is_recorded_although_another_request_comes_first(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = job_of(start, 1)
    journal, drain = first.membership.shared.journal, first.membership.keys.drains + first.worker_id
    get, requests = journal.client.get, [DrainRecord(first.worker_id, "slow", once_replaced=True)]

    def get_too_early(key: str) -> Any:
        entry = get(key)
        if key == drain and requests:
            journal.client.put(drain, encode(requests.pop()))
        return entry

    monkeypatch.setattr(journal.client, "get", get_too_early)
    assert note_end(journal, first.worker_id, LATE)
    assert present(journal.get(DrainRecord, drain).record).notice == LATE
    assert not note_end(journal, "gone", LATE)


def test_notice_never_delays_a_worker_that_leaves_at_once(start: StartWorker) -> None:
    (first,) = job_of(start, 1)
    journal, drain = first.membership.shared.journal, first.membership.keys.drains + first.worker_id
    first.membership.own.drain("the worker received SIGTERM")
    assert note_end(journal, first.worker_id, LATE)
    record = present(journal.get(DrainRecord, drain).record)
    assert (record.once_replaced, record.notice, record.reason) == (False, LATE, "the worker received SIGTERM")
    assert present(journal.client.get(drain)).lease_id == first.membership.own.lease.id


def test_ended_worker_does_not_block_other_replacements(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    assert first.membership.shared.replace(second.worker_id, "slow")
    first.wait_for(lambda view: True if view.replacements == {second.worker_id} else None)
    with second.membership.own._write_lock:  # its host is gone
        second.membership.own.lease.revoke()
        first.wait_for_records(lambda view: True if second.worker_id not in view.workers else None)
        assert first.wait_for(lambda view: True if not view.replacements else None)


def test_worker_with_an_expired_lease_registers_again_if_still_awaited(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    before = first.membership.view.round
    second.membership.own.drain("leave when another one is there")
    leases = [worker.membership.own.lease for worker in (first, second)]
    # Both leases, as after an outage of etcd. Neither worker decides in between that the other one is lost.
    with first.membership._changed, second.membership._changed:
        for lease in leases:
            lease.revoke()
    eventually(lambda: all(worker.membership.own.lease not in leases for worker in (first, second)), "leases of their own")
    for worker in (first, second):
        worker.wait_for_records(lambda view: True if len(view.survivors) == 2 and view.drains == {second.worker_id} else None)
        assert not worker.membership.own.evicted
        worker.membership.own.update("active", 1)
    assert first.membership.view.round == before


def test_worker_whose_lease_has_just_ended_changes_the_records_of_its_job(start: StartWorker) -> None:
    _, second = job_of(start, 2)
    second.stop()  # the thread that would register it again has no turn before the change
    second.membership.own.lease.revoke()
    second.membership.shared.update_job(lambda job: dataclasses.replace(job, started_from="a file"))
    second.membership.own.lease.revoke()
    second.membership.shared.put_search(1, SearchRecord("{}"))
    second.membership.shared.outbox.write()
    assert second.membership.shared.outbox.waiting == []
    assert second.worker_id in second.membership.all_records().workers
    assert second.client.get(second.membership.own.address_key) is not None


def test_evicted_worker_changes_no_record_of_its_job(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    second.stop()
    first.membership.evict([second.worker_id])
    with pytest.raises(EvictedError):
        second.membership.shared.update_job(lambda job: dataclasses.replace(job, started_from="a file"))
    assert second.worker_id not in first.membership.all_records().workers


def test_late_repetition_of_a_write_restores_no_old_state(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer repeats its request after a timeout, and the first one may still be on its way to etcd."""
    worker = start()
    sent = []
    carry_out = worker.client.txn

    def txn(compare: Any, success: Any) -> Any:
        sent.append((compare, success))
        return carry_out(compare, success)

    monkeypatch.setattr(worker.client, "txn", txn)
    worker.membership.register()
    worker.membership.own.update("standby")
    worker.membership.own.update("ready")
    key = worker.membership.keys.workers + worker.worker_id
    earlier = [(compare, ops) for compare, ops in sent if key in [op.key for op in ops]]
    assert len(earlier) == 3
    for compare, ops in earlier:
        assert not carry_out(compare, ops).succeeded
    assert decode(WorkerRecord, present(worker.client.get(key)).value, key).state == "ready"


def test_worker_continues_after_a_write_without_an_answer(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start()
    worker.membership.register()
    carry_out = worker.client.txn

    def txn(compare: Any, success: Any) -> Any:
        carry_out(compare, success)
        raise EtcdUnavailableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "txn", txn)
        with pytest.raises(EtcdUnavailableError):
            worker.membership.own.update("standby")
    worker.membership.own.update("standby")
    worker.membership.own.update("ready", 3)
    assert worker.wait_for_records(lambda view: view.workers[worker.worker_id].round_number or None)


# --- etcd's outages -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restart_of_etcd_costs_no_worker_and_no_round(start: StartWorker, private_etcd: EmbeddedEtcd) -> None:
    first, second = job_of(start, 2, endpoint=private_etcd.endpoint, lease_ttl_s=10)
    private_etcd.kill()
    with pytest.raises(TimeoutError):
        first.membership.wait_for(lambda view: True if view.round and view.round.number > 1 else None, 1.0, "a round")
    private_etcd.start()
    late = start(endpoint=private_etcd.endpoint, min_workers=2, lease_ttl_s=10)
    assert late.membership.register() == "standby"
    late.membership.own.update("ready")
    round_ = first.wait_for_round(2)
    assert set(round_.members) == {first.worker_id, second.worker_id, late.worker_id}
    for worker in (first, second, late):
        assert not worker.membership.own.evicted
        worker.end()  # ends while its etcd is up


def test_notice_of_a_lost_coordinator_does_not_delay_a_new_start(start: StartWorker) -> None:
    first, second = job_of(start, 2)
    first.wait_for(lambda view: view.is_past_start or None)
    for worker in (first, second):
        worker.stop()
        worker.port.close()
        worker.membership.own.lease.revoke()
    new, other = start(min_workers=2), start(min_workers=2)
    assert new.membership.register() == "starting"
    assert not new.membership.view.is_past_start
    assert other.membership.register() == "starting"
    assert set(new.wait_for_round(2).members) == {new.worker_id, other.worker_id}


# --- garbage ------------------------------------------------------------------------------------------------------------------


def pass_office_on(client: EtcdClient, holder: Worker) -> None:
    """Unseat the coordinator until another worker is elected."""

    def look() -> bool:
        election = client.get(holder.membership.keys.coordinator)
        if election is not None and election.value.decode() == holder.worker_id:
            client.delete(election.key)
        return election is not None and election.value.decode() != holder.worker_id

    eventually(look, "another coordinator")


def test_worker_writes_its_record_again_over_garbage(start: StartWorker, client: EtcdClient) -> None:
    coordinator, (victim, other) = coordinator_of(job_of(start, 3))
    key = victim.membership.keys.workers + victim.worker_id
    entry = present(client.get(key))
    client.txn([], [Put(key, b"garbage", entry.lease_id)])
    eventually(lambda: (again := client.get(key)) is not None and again.value == entry.value, "the record")
    pass_office_on(client, coordinator)
    ready(start, min_workers=3)
    assert victim.worker_id in other.wait_for_round(2).members
    assert not victim.membership.own.evicted


def test_next_coordinator_knows_the_last_readable_round(start: StartWorker, client: EtcdClient) -> None:
    workers = job_of(start, 3)
    workers[0].membership.shared.update_job(lambda job: dataclasses.replace(job, min_workers=1))
    coordinator, (one, other) = coordinator_of(workers)
    keys = coordinator.membership.keys
    client.put(keys.round, b"garbage")
    eventually(lambda: any(event.kind == "error" for event in one.membership.shared.journal.events()), "the report of garbage")
    coordinator.end()
    round_ = one.wait_for_round(2)
    assert set(round_.members) == {one.worker_id, other.worker_id}


# --- admission of joiners ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["finished", "failed"])
def test_a_job_that_has_ended_is_not_joined(phase: str, start: StartWorker, client: EtcdClient, keys: Keys) -> None:
    record = JobRecord(phase, True, 1, 4, VERSION, message="out of luck")  # type: ignore[arg-type]
    client.put(keys.job, encode(record))
    with pytest.raises(JobClosedError, match=f"has {phase}: out of luck; start a new run"):
        start().membership.register()


def test_job_lost_in_a_later_fit_is_an_error(start: StartWorker, client: EtcdClient, keys: Keys) -> None:
    client.put(keys.job, encode(JobRecord("finished", True, 1, 4, VERSION, fits_begun=2, fits_finished=1)))
    with pytest.raises(MembershipError, match="lost in fit number 2 of the script") as raised:
        start().membership.register()
    assert not isinstance(raised.value, JobClosedError)


def test_a_worker_of_another_release_is_refused(start: StartWorker) -> None:
    job_of(start, 1)
    with pytest.raises(MembershipError, match=r"is run by lightning-dlrover 1, this worker has 2: install"):
        start(version="2").membership.register()


@pytest.mark.parametrize("place", ["job", "round"])
def test_job_with_unreadable_records_is_not_joined(place: str, start: StartWorker, client: EtcdClient, keys: Keys) -> None:
    job_of(start, 1)
    client.put(keys.shared + place, b"garbage")
    with pytest.raises(MembershipError, match=f"cannot be joined: key '{keys.shared}{place}' holds 7 bytes"):
        start().membership.register()


@pytest.mark.slow
def test_joiner_outwaits_an_outage_of_etcd(start: StartWorker, private_etcd: EmbeddedEtcd) -> None:
    (first,) = job_of(start, 1, endpoint=private_etcd.endpoint, lease_ttl_s=30)
    late = start(endpoint=private_etcd.endpoint, timeout_s=1.0, lease_ttl_s=30)
    assert late.membership.register() == "standby"
    private_etcd.kill()
    assert late.membership.workers.of([first.worker_id]) == {}  # not read before, and no error
    private_etcd.start()
    assert eventually(lambda: late.membership.workers.of([first.worker_id]), "the record")
    for worker in (first, late):
        worker.end()  # ends while its etcd is up


# --- records ------------------------------------------------------------------------------------------------------------------


def test_concurrent_changes_of_the_job_are_all_kept(start: StartWorker) -> None:
    first, second = job_of(start, 2)

    def one_more(job: JobRecord) -> JobRecord:
        return dataclasses.replace(job, global_batch_size=job.global_batch_size + 1)

    for _ in range(10):
        first.membership.shared.update_job(one_more)
        second.membership.shared.update_job(one_more)
    entry = present(first.client.get(first.membership.keys.job))
    assert decode(JobRecord, entry.value, entry.key).global_batch_size == 20


def test_events_are_written_in_order(start: StartWorker) -> None:
    (worker,) = job_of(start, 1)
    for number in range(5):
        worker.membership.shared.event(UnknownEvent({}, "test"), str(number))
    worker.membership.shared.outbox.write()
    texts = [event.text for event in worker.membership.shared.journal.events() if event.kind == "test"]
    assert texts == [str(number) for number in range(5)]


def test_result_of_a_search_is_written_once_etcd_is_back(start: StartWorker, private_etcd: EmbeddedEtcd) -> None:
    (worker,) = job_of(start, 1, endpoint=private_etcd.endpoint, lease_ttl_s=10)
    private_etcd.kill()
    worker.membership.shared.put_search(1, SearchRecord("{}"))  # must not raise: training continues
    private_etcd.start()
    found = eventually(lambda: worker.membership.shared.search(1), "the search")
    assert found == SearchRecord("{}")
    worker.end()  # ends while its etcd is up


def test_events_of_many_writers_stay_bounded(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_EVENTS", 20)
    _, [other] = coordinator_of(job_of(start, 2))  # the coordinator has written events before, so it trims later
    keys = other.membership.keys
    for number in range(60):
        other.client.put(f"{keys.events}{number:020d}-gone", encode(EventRecord("test", float(number), str(number))))
    other.membership.shared.event(UnknownEvent({}, "test"), "newest")
    other.membership.shared.outbox.write()
    texts = [event.text for event in other.membership.shared.journal.events()]
    assert len(texts) <= 22  # two workers may write at the same time
    assert "newest" in texts
    assert "0" not in texts


def test_a_line_of_the_history_that_cannot_be_read_is_left_out(start: StartWorker, client: EtcdClient) -> None:
    (worker,) = job_of(start, 1)
    client.put(worker.membership.keys.events + "0", b"garbage")
    client.put(worker.membership.keys.events + "1", encode(EventRecord("test", 1.0, "kept")))
    assert "kept" in [event.text for event in worker.membership.shared.journal.events()]


def other_host(worker_id: str, address: str, port: int = 1) -> WorkerRecord:
    return WorkerRecord(worker_id, "agent", "elsewhere", 1, 0, address, port, "active", 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3"])
def test_workers_of_several_hosts_do_not_meet_over_loopback(
    address: str, start: StartWorker, client: EtcdClient, keys: Keys
) -> None:
    client.put(f"{keys.workers}far", encode(other_host("far", address)))
    with pytest.raises(MembershipError, match=r"loopback address 127.*--rdzv-endpoint=ADDRESS:PORT"):
        start().membership.register()
    assert client.get(f"{keys.workers}far") is not None


def test_refused_connection_proves_death_only_of_reached_hosts(start: StartWorker, client: EtcdClient) -> None:
    worker = start()
    worker.membership.register()
    key = worker.membership.keys.workers + "far"
    with socket.create_server(("127.0.0.1", 0)) as closed_again:
        port = closed_again.getsockname()[1]
    client.put(key, encode(other_host("far", "127.0.0.1", port)))
    worker.wait_for_records(lambda view: view.workers.get("far"))
    worker.evict_dead(["far"])
    assert client.get(key) is not None
    worker.membership.reached.add("far")
    worker.evict_dead(["far"])
    assert client.get(key) is None


# --- a full etcd --------------------------------------------------------------------------------------------------------------


def test_newest_changes_made_while_etcd_is_full_are_recorded_once_there_is_room(
    start: StartWorker, private_etcd: EmbeddedEtcd
) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as other:
        worker = start(private_etcd.endpoint)
        membership = worker.membership
        membership.register()
        with full(other):
            for step in (1, 2):
                membership.shared.put_checkpoint(CheckpointRecord(f"/checkpoints/{step}", step))
            assert not membership.shared.record("the end", lambda job: dataclasses.replace(job, phase="finished"))
            membership.deliver(0.2)
            assert membership.shared.newest_checkpoint() is None
        membership.deliver(15.0)
        found, job = membership.shared.newest_checkpoint(), membership.shared.journal.get(JobRecord, membership.keys.job).record
        assert found is not None
        assert found.global_step == 2
        assert job is not None
        assert job.phase == "finished"
        worker.end()


@pytest.mark.slow
@pytest.mark.parametrize("coordinator_is_silent", [False, True])
def test_time_to_return_begins_when_a_full_etcd_has_room(
    coordinator_is_silent: bool, start: StartWorker, private_etcd: EmbeddedEtcd
) -> None:
    return_s = 1.5
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as other:
        workers = job_of(start, 2, endpoint=private_etcd.endpoint, timeouts=RoundTimeouts(return_s=return_s))
        election = present(other.get(workers[0].membership.keys.coordinator))
        silent, remaining = sorted(
            workers, key=lambda worker: (worker.worker_id == election.value.decode()) != coordinator_is_silent
        )
        assert remaining.membership.shared.record("fewer", lambda job: dataclasses.replace(job, min_workers=1))
        with full(other):
            silent.stop()
            silent.membership.own.lease.revoke()
            eventually(lambda: remaining.client.caller._num_refused, "a refused write")
            time.sleep(return_s / 2)
        since = time.monotonic()
        lost = remaining.wait_for_round(2)
        waited_s = time.monotonic() - since
        for worker in workers:
            worker.end()
    assert lost.members == [remaining.worker_id]
    assert waited_s >= 0.9 * return_s


def test_worker_removes_its_record_from_a_full_etcd(start: StartWorker, tmp_path: Path, keys: Keys) -> None:
    """etcd before 3.5.7 refuses a transaction of deletions then, but still ends leases."""
    with small_etcd(tmp_path) as (server, others):
        worker = start(server.endpoint, lease_ttl_s=60)
        worker.membership.register()
        fill(others)
        worker.end()
        assert others.get(keys.workers + worker.worker_id) is None
