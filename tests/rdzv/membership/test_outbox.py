"""The queue of a worker's lines and changes, against a real etcd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError, Put
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import EventRecord, Keys
from lightning_dlrover.rdzv.membership.worker_records import BATCH, Outbox


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
