"""Lines of a job's history about a new round, against a real etcd."""

from __future__ import annotations

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import Put, absent
from lightning_dlrover.rdzv.job import journal
from lightning_dlrover.rdzv.job.events import RoundFormed, WorkerLost, content_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, Keys, RoundRecord, WorkerRecord, encode
from lightning_dlrover.rdzv.membership.coordinator import Announcer, lines_about
from lightning_dlrover.rdzv.membership.rounds import JobView, next_round
from lightning_dlrover.rdzv.membership.worker_records import Outbox
from tests.rdzv.present import present

CONVENER = "w0"


def view(num_workers: int, num_lost: int) -> JobView:
    """Workers that train, the last of which are gone."""
    names = [f"w{n}" for n in range(num_workers)]
    living = {w: WorkerRecord(w, f"agent-{w}", "host", 1, 0, "127.0.0.1", 1, "active", 1) for w in names[: -num_lost or None]}
    round_ = RoundRecord(1, names, "", "start", planned=True)
    return JobView(
        JobRecord("training", live=True, min_workers=1, max_workers=num_workers, version="1"), round_, workers=living
    )


def write_next_round(journal_: Journal, outbox: Outbox, seen: JobView) -> None:
    """Write the round that follows from a view and its lines as a coordinator does."""
    announcer = Announcer(journal_, outbox, CONVENER, evicted={"w1"})
    round_ = present(next_round(seen, 0.0))
    keys = journal_.keys
    lines = announcer.lines(seen, round_, 0.1)
    ops = [Put(keys.round, encode(round_)), Put(keys.notice, b"{}"), *announcer.puts(lines)]
    assert journal_.client.txn([absent(keys.round)], ops).succeeded
    announcer.made(round_, lines)


@pytest.mark.parametrize("num_lost", [1, 99, 100, 250])
def test_every_loss_is_recorded_once_however_many_there_are(num_lost: int, client: EtcdClient, keys: Keys) -> None:
    journal_ = Journal(client, keys)
    outbox = Outbox(journal_, CONVENER)
    write_next_round(journal_, outbox, view(300, num_lost))
    outbox.write()
    events = [content_of(record) for record in journal_.events()]
    lost = [event.worker_id for event in events if isinstance(event, WorkerLost)]
    assert sorted(lost) == sorted(f"w{n}" for n in range(300 - num_lost, 300))
    assert [event.number for event in events if isinstance(event, RoundFormed)] == [2]


def test_line_of_a_round_in_a_large_job_names_only_those_that_came_or_went() -> None:
    seen = view(1000, 1)
    formed = content_of(lines_about(seen, present(next_round(seen, 0.0)), 0.1, evicted=())[-1])
    assert isinstance(formed, RoundFormed)
    assert (formed.num_members, formed.members) == (999, [])
    assert formed.cause == {"joined": [], "lost": ["w999"], "left_out": [], "drained": [], "not_in_plan": []}


def test_losses_come_before_their_round(client: EtcdClient, keys: Keys) -> None:
    journal_ = Journal(client, keys)
    write_next_round(journal_, Outbox(journal_, CONVENER), view(5, 3))
    assert [record.kind for record in journal_.events()] == ["loss", "loss", "loss", "round"]


def test_lines_of_rounds_are_bounded_as_all_others(client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_EVENTS", 5)
    for n in range(20):
        client.put(f"{keys.events}{n:020d}-gone", encode(EventRecord("test", float(n), "old")))
    journal_ = Journal(client, keys)
    write_next_round(journal_, Outbox(journal_, CONVENER), view(5, 3))
    assert [record.kind for record in journal_.events()] == ["test", "loss", "loss", "loss", "round"]
