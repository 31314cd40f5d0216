"""A job's events as its controller copies them into the run folder."""

from __future__ import annotations

from pathlib import Path

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, encode
from lightning_dlrover.report.status import EventLog, read_event_file


def test_resumed_controller_keeps_events_that_etcd_has_dropped(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    lines = [encode(EventRecord("note", float(number), str(number))) for number in range(12)]
    file.write_bytes(b"\n".join(lines[:10]) + b"\n" + lines[10][:15])  # the former controller was killed in a write
    for number in range(6, 12):
        client.put(f"{keys.events}{number:020d}-x", lines[number])
    with Mirror(client, keys.events) as mirror:
        log = EventLog(mirror, file)
        assert [event.at for event in log.new()] == [10.0, 11.0]
        assert [event.at for event in read_event_file(file)] == [float(number) for number in range(12)]
        log.complete(client)
    assert [event.at for event in read_event_file(file)] == [float(number) for number in range(12)]


def test_events_are_copied_once_each_and_kept_in_order(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text("of an earlier attempt\n")
    with Mirror(client, keys.events) as mirror:
        log = EventLog(mirror, file)
        copied = []
        for number in range(20):
            client.put(f"{keys.events}{number:020d}-x", encode(EventRecord("note", float(number), str(number))))
            copied += log.new()
        client.put(f"{keys.events}{5:020d}-y", encode(EventRecord("late", 5.5, "5.5")))
        client.put(f"{keys.events}{6:020d}-y", b"not an event")
        log.complete(client)
    assert [e.at for e in read_event_file(file)] == sorted([*map(float, range(20)), 5.5])
