"""The queue of a worker's lines and changes, and the lines about a new round, against a real etcd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError, Put, absent
from lightning_dlrover.rdzv.job import journal as journal_module
from lightning_dlrover.rdzv.job.events import RoundFormed, WorkerLost, content_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, Keys, RoundRecord, WorkerRecord, encode
from lightning_dlrover.rdzv.membership.coordinator import Announcer, lines_about
from lightning_dlrover.rdzv.membership.rounds import JobView, next_round
from lightning_dlrover.rdzv.membership.worker_records import BATCH, Outbox
from tests.rdzv.present import present


@pytest.fixture
def journal(client: EtcdClient, keys: Keys) -> Journal:
    return Journal(client, keys)


def texts(journal: Journal) -> list[str]:
    return [event.text for event in journal.events()]


def test_lines_of_an_outage_are_written_in_few_transactions(journal: Journal) -> None:
    outbox = Outbox(journal, "w")
    for number in range(2 * BATCH + 1):
        outbox.add(EventRecord("note", 1.0, f"line {number}"))
    before = journal.client.get_prefix(journal.keys.events)[0]
    outbox.write(BATCH)
    assert texts(journal) == [f"line {number}" for number in range(BATCH)]
    outbox.write()
    assert texts(journal) == [f"line {number}" for number in range(2 * BATCH + 1)]
    assert journal.client.get_prefix(journal.keys.events)[0] == before + 3


@pytest.mark.parametrize("is_long", [False, True], ids=["one batch", "too long for one"])
def test_lines_whose_answer_was_lost_are_in_the_history_once(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    outbox = Outbox(journal, "w")
    lines = [f"{number}{'x' * 300_000 * is_long}" for number in range(3)]
    for line in lines:
        outbox.add(EventRecord("note", 1.0, line))
    append_all = journal.append_all

    def lost(puts: Sequence[Put]) -> None:
        monkeypatch.setattr(journal, "append_all", append_all)
        append_all(puts)
        raise EtcdUnavailableError("the answer was lost")

    monkeypatch.setattr(journal, "append_all", lost)
    with pytest.raises(EtcdUnavailableError):
        outbox.write(BATCH)
    outbox.add(EventRecord("note", 1.0, "later"))
    outbox.write(1)
    outbox.write()
    assert texts(journal) == [*lines, "later"]


def test_line_that_is_too_long_is_dropped_and_holds_up_no_other(journal: Journal) -> None:
    outbox = Outbox(journal, "w")
    for text in ("first", "x" * (1 << 20), "y" * 400_000, "z" * 400_000, "last"):
        outbox.add(EventRecord("note", 1.0, text))
    outbox.write()
    assert [len(text) for text in texts(journal)] == [5, 400_000, 400_000, 4]


def test_history_is_read_once_and_then_only_what_is_new(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox(journal, "w")
    outbox.add(EventRecord("note", 1.0, "first"))
    outbox.write()
    assert texts(journal) == ["first"]
    outbox.add(EventRecord("note", 1.0, "second"))
    outbox.write()
    read, asked = EtcdClient.get_prefix, []

    def counted(self: EtcdClient, prefix: str, newer_than: int = 0, per_answer: int = 0) -> object:
        found = read(self, prefix, newer_than, per_answer)
        asked.append(len(found[1]))
        return found

    monkeypatch.setattr(EtcdClient, "get_prefix", counted)
    assert texts(journal) == ["first", "second"]
    assert texts(journal) == ["first", "second"]
    assert asked == [1, 0]


CONVENER = "w0"


def view(num_workers: int, num_lost: int) -> JobView:
    """Workers that train, the last of which are gone."""
    names = [f"w{n}" for n in range(num_workers)]
    living = {w: WorkerRecord(w, f"agent-{w}", "host", 1, 0, "127.0.0.1", 1, "active", 1) for w in names[: -num_lost or None]}
    round_ = RoundRecord(1, names, "", "start", planned=True)
    return JobView(
        JobRecord("training", live=True, min_workers=1, max_workers=num_workers, version="1"), round_, workers=living
    )


def write_next_round(journal: Journal, outbox: Outbox, seen: JobView) -> None:
    """Write the round that follows from a view and its lines as a coordinator does."""
    announcer = Announcer(journal, outbox, CONVENER, evicted={"w1"})
    round_ = present(next_round(seen, 0.0))
    keys = journal.keys
    lines = announcer.lines(seen, round_, 0.1)
    ops = [Put(keys.round, encode(round_)), Put(keys.notice, b"{}"), *announcer.puts(lines)]
    assert journal.client.txn([absent(keys.round)], ops).succeeded
    announcer.made(round_, lines)


@pytest.mark.parametrize("num_lost", [1, 99, 100, 250])
def test_every_loss_is_recorded_once_however_many_there_are(num_lost: int, journal: Journal) -> None:
    outbox = Outbox(journal, CONVENER)
    write_next_round(journal, outbox, view(300, num_lost))
    outbox.write()
    events = [content_of(record) for record in journal.events()]
    lost = [event.worker_id for event in events if isinstance(event, WorkerLost)]
    assert sorted(lost) == sorted(f"w{n}" for n in range(300 - num_lost, 300))
    assert [event.number for event in events if isinstance(event, RoundFormed)] == [2]


def test_line_of_a_round_in_a_large_job_names_only_those_that_came_or_went() -> None:
    seen = view(1000, 1)
    formed = content_of(lines_about(seen, present(next_round(seen, 0.0)), 0.1, evicted=())[-1])
    assert isinstance(formed, RoundFormed)
    assert (formed.num_members, formed.members) == (999, [])
    assert formed.cause == {"joined": [], "lost": ["w999"], "left_out": [], "drained": [], "not_in_plan": []}


def test_losses_come_before_their_round(journal: Journal) -> None:
    write_next_round(journal, Outbox(journal, CONVENER), view(5, 3))
    assert [record.kind for record in journal.events()] == ["loss", "loss", "loss", "round"]


def test_lines_of_rounds_are_bounded_as_all_others(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_EVENTS", 5)
    for n in range(20):
        journal.client.put(f"{journal.keys.events}{n:020d}-gone", encode(EventRecord("test", float(n), "old")))
    write_next_round(journal, Outbox(journal, CONVENER), view(5, 3))
    assert [record.kind for record in journal.events()] == ["test", "loss", "loss", "loss", "round"]
