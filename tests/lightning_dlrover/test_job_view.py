"""How a job is found and read, while it lives and afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dlrover_process import eventually

from lightning_dlrover.job_view import EventLog, JobNotFoundError, JobPlace, find_job, read_event_file, read_job, show_status
from lightning_dlrover.rdzv.client import EtcdClient, Mirror
from lightning_dlrover.rdzv.records import AgentRecord, EventRecord, JobRecord, Keys, encode


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLROVER_ENDPOINT", "DLROVER_PREFIX"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path) -> JobPlace:
    place = JobPlace("job", "127.0.0.1:1", "/mine")
    (folder / "job").mkdir()
    place.write(folder / "job")
    return place


def test_a_job_is_found_where_its_run_folder_says(tmp_path: Path) -> None:
    place = written(tmp_path)
    assert find_job("job", None, None, tmp_path) == place
    assert [each.name for each in (tmp_path / "job").iterdir()] == ["job.json"]


def test_what_is_given_counts_more_than_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setenv("DLROVER_ENDPOINT", "environment:1")
    assert find_job("job", "given:1", None, tmp_path).endpoint == "given:1"
    assert find_job("other", None, None, tmp_path).endpoint == "environment:1"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"run_id": "job"}'])
def test_a_job_file_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_text(content)
    with pytest.raises(JobNotFoundError, match=r"job\.json.*--endpoint"):
        find_job("job", None, None, tmp_path)


def put_event(client: EtcdClient, keys: Keys, number: int, at: float) -> None:
    client.put(f"{keys.events}{number:020d}-w", encode(EventRecord("round", at, f"event {number}")))


def test_the_event_file_is_complete_and_in_order_at_the_end(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    mirror = Mirror(client, keys.events)
    log = EventLog(mirror, file)
    put_event(client, keys, 1, 1.0)
    put_event(client, keys, 2, 3.0)
    assert [e.text for e in eventually(log.new, "the first events")][:1] == ["event 1"]
    put_event(client, keys, 3, 2.0)  # a worker that was slow to tell
    client.put(f"{keys.events}{4:020d}-w", b"garbage")
    log.complete(client)
    assert [e.at for e in read_event_file(file)] == [1.0, 2.0, 3.0]
    log.complete(client)
    assert len(file.read_bytes().splitlines()) == 3
    mirror.close()


def test_events_that_an_earlier_process_has_copied_are_no_news(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with Mirror(client, keys.events) as mirror:
        put_event(client, keys, 1, 1.0)
        put_event(client, keys, 2, 2.0)
        mirror.wait_for(lambda entries: True if len(entries) == 2 else None, 5.0)
        assert len(EventLog(mirror, file).new()) == 2
        put_event(client, keys, 3, 3.0)
        mirror.wait_for(lambda entries: True if len(entries) == 3 else None, 5.0)
        assert [event.text for event in EventLog(mirror, file).new()] == ["event 3"]
    assert [event.at for event in read_event_file(file)] == [1.0, 2.0, 3.0]


def test_a_half_written_line_does_not_hide_the_others(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(encode(EventRecord("round", 1.0, "whole")) + b"\n" + encode(EventRecord("round", 2.0, "cut"))[:20])
    assert [e.text for e in read_event_file(file)] == ["whole"]


def test_a_job_that_etcd_does_not_know_is_not_made_up(client: EtcdClient, keys: Keys) -> None:
    with pytest.raises(JobNotFoundError, match=keys.run_id):
        read_job(client, keys)


@pytest.mark.parametrize("name", ["job", "plan", "round", "agent_round", "workers/a", "drains/a"])
def test_every_record_that_cannot_be_read_is_a_problem(client: EtcdClient, keys: Keys, name: str) -> None:
    client.put(keys.live + name, b"{")
    problems = read_job(client, keys).problems
    assert len(problems) == 1
    assert repr(keys.live + name) in problems[0]


@pytest.mark.parametrize("phase", ["starting", "training", "finished", "failed"])
def test_a_job_without_processes_is_stopped_unless_it_has_ended(client: EtcdClient, keys: Keys, phase: str) -> None:
    client.put(keys.job, encode(JobRecord(phase, True, 1, 2, "0")))  # type: ignore[arg-type]
    place = JobPlace(keys.run_id, "host:1")
    shown = show_status(place, read_job(client, keys), {}, [])
    assert shown["phase"] == (phase if phase in ("finished", "failed") else "stopped")
    client.put(keys.agents + "a", encode(AgentRecord("a", "host", 1, 1, "running")))
    shown = show_status(place, read_job(client, keys), {}, [])
    assert shown["phase"] == phase
    json.dumps(shown)
