"""Elections, rounds and evictions as transactions: their guards, and the state that a death between two of them leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dlrover.rdzv.etcd.types import Compare, Delete, KeyValue, Op, Put
from lightning_dlrover.rdzv.job.records import (
    AddressRecord,
    DrainRecord,
    JobRecord,
    Keys,
    Notice,
    RoundRecord,
    WorkerRecord,
    WorkerState,
    decode,
    encode,
)
from lightning_dlrover.rdzv.membership.coordinator import Coordinator, Write, eviction
from lightning_dlrover.rdzv.membership.rounds import Answer, Decoder, JobView, RoundTimeouts, read_view
from tests.rdzv.present import present

KEYS = Keys("job", "/test")
TIMEOUTS = RoundTimeouts(start_s=60.0, regroup_s=120.0, return_s=10.0)


class Records:
    """etcd, reduced to transactions on a dict."""

    def __init__(self) -> None:
        self.entries: dict[str, KeyValue] = {}
        self.revision = 0
        self.put(KEYS.job, encode(JobRecord("training", True, 1, 4, "1")))

    def put(self, key: str, value: bytes, lease_id: int = 0) -> None:
        self.apply((), (Put(key, value, lease_id),))

    def worker(self, worker_id: str, state: WorkerState = "ready", number: int = 0) -> None:
        record = WorkerRecord(worker_id, f"agent-{worker_id}", "host", 1, 0, "address", 1, state, number)
        self.put(KEYS.workers + worker_id, encode(record), lease_id=1)

    def address(self, worker_id: str) -> None:
        self.put(KEYS.addresses + worker_id, encode(AddressRecord(worker_id, f"agent-{worker_id}", "host", "address", 1)))

    def expire(self, worker_id: str) -> None:
        """End a worker's lease."""
        self.apply((), (Delete(KEYS.workers + worker_id),))

    def apply(self, compare: tuple[Compare, ...], ops: tuple[Op, ...]) -> bool:
        if not Write("round", compare, ops).may_succeed(self.entries):
            return False
        self.revision += 1
        for op in ops:
            old = self.entries.get(op.key)
            if isinstance(op, Put):
                first = old.create_revision if old else self.revision
                self.entries[op.key] = KeyValue(op.key, op.value, first, self.revision, 1, op.lease_id)
            else:
                self.entries.pop(op.key, None)
        return True

    def run(self, write: Write | None) -> bool:
        return write is not None and self.apply(write.compare, write.ops)

    @property
    def view(self) -> JobView:
        return read_view(self.entries, KEYS)

    @property
    def round(self) -> RoundRecord:
        return decode(RoundRecord, self.entries[KEYS.round].value, KEYS.round)


def next_write(coordinator: Coordinator, records: Records, now_s: float = 0.0) -> Write | None:
    """The worker's next write if no other worker writes: its candidacy, or its decision in office."""
    entries = dict(records.entries)
    if coordinator.is_in_office(entries):
        return coordinator.next_write(entries, records.view, now_s)
    election = entries.get(KEYS.coordinator)
    return coordinator.candidacy(entries, election is not None and KEYS.workers + election.value.decode() not in entries)


def next_round_of(coordinator: Coordinator, records: Records, now_s: float = 0.0) -> Write | None:
    """Write notices until the coordinator has nothing to write, or writes something else."""
    while (write := next_write(coordinator, records, now_s)) is not None and write.purpose == "notice":
        assert records.run(write)
    return write


def due(coordinator: Coordinator, records: Records, purpose: str) -> Write:
    """The worker's next write, which has this purpose."""
    write = present(next_write(coordinator, records))
    assert write.purpose == purpose
    return write


def evictions(records: Records, worker_id: str) -> list[Write]:
    return eviction(records.entries[KEYS.workers + worker_id], records.entries.get(KEYS.coordinator), KEYS)


def elected(records: Records, worker_id: str) -> Coordinator:
    coordinator = Coordinator(KEYS, worker_id, 7, TIMEOUTS)
    assert records.run(due(coordinator, records, "elect"))
    return coordinator


def job_of(*workers: str) -> tuple[Records, Coordinator]:
    """A job with a first worker that coordinates and has formed round 1 with the others."""
    records = Records()
    for worker in workers:
        records.worker(worker)
    coordinator = elected(records, workers[0])
    assert records.run(next_write(coordinator, records))
    assert records.round.members == list(workers)
    for worker in workers:
        records.worker(worker, "active", 1)
    return records, coordinator


def test_election_key_has_one_holder_and_ends_with_its_lease() -> None:
    records = Records()
    records.worker("a")
    first, second = (Coordinator(KEYS, name, lease, TIMEOUTS) for name, lease in (("a", 7), ("b", 8)))
    writes = [next_write(c, records) for c in (first, second)]
    assert [records.run(w) for w in writes] == [True, False]
    assert records.entries[KEYS.coordinator].lease_id == 7


def test_coordinator_needs_records_that_show_its_election() -> None:
    records = Records()
    records.worker("a")
    coordinator = Coordinator(KEYS, "a", 7, TIMEOUTS)
    before, view = dict(records.entries), records.view
    assert records.run(next_write(coordinator, records))
    assert coordinator.next_write(before, view, 0.0) is None
    due(coordinator, records, "round")


def test_former_coordinator_writes_no_round() -> None:
    records, coordinator = job_of("a", "b")
    records.worker("c")
    late = present(next_write(coordinator, records))
    assert late.round is not None
    assert sorted(late.round.members) == ["a", "b", "c"]
    records.apply((), (Delete(KEYS.coordinator),))
    successor = elected(records, "b")
    assert not records.run(late)
    assert records.run(next_write(successor, records))
    assert records.round.number == 2
    # Even in office again, the coordinator cannot write an old decision: the round that it follows is gone.
    assert not records.run(replace(late, compare=late.compare[1:]))


def test_round_with_a_lost_answer_is_not_written_twice() -> None:
    records, coordinator = job_of("a", "b")
    records.worker("c")
    old, view = dict(records.entries), records.view
    assert records.run(coordinator.next_write(old, view, 0.0))
    assert not records.run(coordinator.next_write(old, view, 1.0))
    assert next_round_of(coordinator, records) is None
    assert records.round.number == 2


def test_office_of_a_holder_without_record_is_revoked() -> None:
    records, _ = job_of("a", "b")
    records.apply((), (Delete(KEYS.workers + "a"),))
    other = Coordinator(KEYS, "b", 8, TIMEOUTS)
    write = due(other, records, "unseat")
    assert records.run(write)
    assert not records.run(write)
    assert KEYS.coordinator not in records.entries


def test_death_in_any_step_of_an_eviction_does_not_stop_the_job() -> None:
    for num_writes in range(3):
        records, _ = job_of("a", "b")
        records.put(KEYS.drains + "a", encode(DrainRecord("a", "because")))
        for write in evictions(records, "a")[:num_writes]:
            assert records.run(write)
        if num_writes == 0:
            records.apply((), (Delete(KEYS.workers + "a"),))  # its lease expires
        survivor = Coordinator(KEYS, "b", 8, TIMEOUTS)
        for _ in range(4):
            records.run(next_write(survivor, records))
        assert (records.round.number, records.round.members, records.round.convener) == (2, ["b"], "b")


def test_an_eviction_ends_only_the_registration_that_was_seen() -> None:
    records, _ = job_of("a", "b")
    writes = evictions(records, "b")
    records.apply((), (Delete(KEYS.workers + "b"),))
    records.worker("b")
    assert [records.run(write) for write in writes] == [False]


def test_patience_restarts_for_each_situation() -> None:
    records, coordinator = job_of("a", "b", "c")
    records.worker("a", "reforming", 1)
    assert next_round_of(coordinator, records, 1000.0) is None
    records.worker("c", "reforming", 1)
    assert next_round_of(coordinator, records, 1110.0) is None
    assert next_round_of(coordinator, records, 1229.0) is None
    coordinator.interrupt()
    assert next_round_of(coordinator, records, 1231.0) is None
    write = present(next_round_of(coordinator, records, 1352.0))
    assert write.round is not None
    assert (write.round.members, write.round.kind) == (["a", "c"], "loss")


def test_round_and_its_notice_appear_together() -> None:
    records, coordinator = job_of("a", "b")
    records.put(KEYS.drains + "b", encode(DrainRecord("b", "because")))
    records.worker("c")
    assert records.run(due(coordinator, records, "round"))
    assert records.round.members == ["a", "c"]
    notice = decode(Notice, records.entries[KEYS.notice].value, KEYS.notice)
    assert (notice.round_number, notice.drains, notice.leavers) == (2, ["b"], ["b"])


def test_notice_of_a_nodes_end_reaches_every_worker() -> None:
    records, coordinator = job_of("a", "b")
    known = DrainRecord("b", "spot", once_replaced=True, source="aws", taken_at=1e9)
    records.put(KEYS.drains + "b", encode(known))
    records.put(KEYS.drains + "a", encode(DrainRecord("a", "soon", once_replaced=True, source="aws")))
    assert records.run(due(coordinator, records, "notice"))
    seen = Decoder(KEYS, lambda *_: None).worker_view(records.entries)
    assert (seen.taken_at, seen.drains, seen.replacements) == ({"b": 1e9}, frozenset(), {"a", "b"})
    records.put(KEYS.drains + "b", encode(replace(known, once_replaced=False)))
    assert records.run(due(coordinator, records, "round"))
    assert Decoder(KEYS, lambda *_: None).worker_view(records.entries).taken_at == {"b": 1e9}


def test_notice_names_members_that_gave_the_round_up_and_those_that_are_gone() -> None:
    records, coordinator = job_of("a", "b", "c")
    while records.run(next_write(coordinator, records)):
        pass
    records.worker("b", "reforming", 1)
    assert records.run(due(coordinator, records, "notice"))
    worker_view = Decoder(KEYS, lambda *_: None).worker_view(records.entries)
    assert (worker_view.given_up, worker_view.lost, worker_view.keepers) == (["b"], [], ["b"])
    assert next_write(coordinator, records) is None


def test_notice_of_an_earlier_coordinator_is_replaced() -> None:
    records, coordinator = job_of("a", "b")
    while records.run(next_write(coordinator, records)):
        pass
    records.apply((), (Delete(KEYS.coordinator),))
    successor = elected(records, "b")
    write = due(successor, records, "notice")
    assert not records.run(next_write(coordinator, records))  # no longer in office
    assert records.run(write)


# --- members whose lease has ended, but perhaps not their process -------------------------------------------------------------


def job_with_addresses(*workers: str) -> tuple[Records, Coordinator]:
    records, coordinator = job_of(*workers)
    for worker in workers:
        records.address(worker)
    assert next_round_of(coordinator, records) is None
    return records, coordinator


def purpose_after(coordinator: Coordinator, records: Records, now_s: float) -> str:
    write = next_round_of(coordinator, records, now_s)
    return write.purpose if write is not None else ""


@pytest.mark.parametrize(("answer", "waits_s"), [("accepts", 10.0), ("silent", 0.0)])
def test_member_without_a_lease_is_awaited_while_its_port_accepts(answer: Answer, waits_s: float) -> None:
    records, coordinator = job_with_addresses("a", "b")
    records.expire("b")
    coordinator.note_answers({"b": answer})
    if waits_s:
        assert purpose_after(coordinator, records, 100.0) == ""
        assert purpose_after(coordinator, records, 99.9 + waits_s) == ""
    assert purpose_after(coordinator, records, 100.0 + waits_s) == "round"


def test_port_that_refuses_ends_the_wait_for_a_member() -> None:
    records, coordinator = job_with_addresses("a", "b")
    records.expire("b")
    assert purpose_after(coordinator, records, 0.0) == ""  # nobody has knocked yet
    coordinator.note_answers({"b": "refuses"})
    assert records.run(due(coordinator, records, "evict"))
    assert purpose_after(coordinator, records, 1.0) == "round"


def test_member_that_has_returned_is_not_evicted() -> None:
    records, coordinator = job_with_addresses("a", "b")
    records.expire("b")
    coordinator.note_answers({"b": "refuses"})
    evicting = next_round_of(coordinator, records)
    records.worker("b", "active", 1)
    assert not records.run(evicting)
    assert purpose_after(coordinator, records, 0.0) == ""


@pytest.mark.parametrize("answer", ["accepts", "silent"])
def test_job_starts_over_only_when_the_wait_for_all_its_members_is_over(answer: Answer) -> None:
    records, _ = job_with_addresses("a", "b")
    records.worker("spare")
    for worker in ("a", "b"):
        records.expire(worker)
    records.apply((), (Delete(KEYS.coordinator),))
    spare = elected(records, "spare")
    spare.note_answers({"a": answer, "b": answer})
    assert purpose_after(spare, records, 0.0) == ""
    assert purpose_after(spare, records, 59.9) == ""
    write = present(next_round_of(spare, records, 60.0))
    assert write.round is not None
    assert (write.round.kind, write.round.members) == ("start", ["spare"])


def test_first_member_that_returns_gives_the_others_more_time() -> None:
    records, coordinator = job_with_addresses("a", "b", "c")
    for worker in ("b", "c"):
        records.expire(worker)
    coordinator.note_answers({"b": "accepts", "c": "accepts"})
    assert purpose_after(coordinator, records, 0.0) == ""
    records.worker("b", "active", 1)
    assert purpose_after(coordinator, records, 9.0) == ""
    assert purpose_after(coordinator, records, 18.9) == ""
    assert purpose_after(coordinator, records, 19.0) == "round"


def test_member_with_repeated_cuts_does_not_delay_the_loss_of_another() -> None:
    records, coordinator = job_with_addresses("a", "b", "c")
    records.expire("b")
    coordinator.note_answers({"b": "accepts"})  # its process is stopped
    written_at = None
    for second in range(0, 60, 3):
        if second % 2:
            records.expire("c")
            coordinator.note_answers({"c": "accepts"})
        else:
            records.worker("c", "active", 1)
        if purpose_after(coordinator, records, float(second)) == "round":
            written_at = second
            break
    assert written_at is not None
    assert written_at <= 2 * TIMEOUTS.return_s + 6


@pytest.mark.parametrize("answer", ["refuses", "silent"])
def test_garbage_in_place_of_a_lost_member_delays_no_round(answer: Answer) -> None:
    records, coordinator = job_with_addresses("a", "b")
    records.expire("b")
    records.put(KEYS.workers + "b", b"garbage")
    coordinator.note_answers({"b": answer})
    for _ in range(2):
        write = next_round_of(coordinator, records)
        assert records.run(write)
        if write is not None and write.purpose == "round":
            break
    assert records.round.members == ["a"]


def test_addresses_of_workers_that_are_gone_for_good_are_removed() -> None:
    records, coordinator = job_with_addresses("a", "b")
    records.expire("b")
    coordinator.note_answers({"b": "silent"})
    assert records.run(next_round_of(coordinator, records))
    records.worker("a", "active", 2)
    assert records.run(next_round_of(coordinator, records))
    assert [key for key in records.entries if key.startswith(KEYS.addresses)] == [KEYS.addresses + "a"]
    assert next_round_of(coordinator, records) is None


@pytest.mark.parametrize("is_cut_off_again", [False, True])
def test_round_without_missing_members_fails_once_one_has_returned(is_cut_off_again: bool) -> None:
    records, coordinator = job_with_addresses("a", "b")
    records.expire("b")
    coordinator.note_answers({"b": "silent"})
    write = due(coordinator, records, "round")
    records.worker("b", "active", 1)  # the coordinator's copy is late
    records.address("b")
    if is_cut_off_again:
        records.expire("b")
    assert not records.run(write)
