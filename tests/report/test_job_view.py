"""A job as the command line shows it, and the copy of its events in the run folder."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dlrover.cli.run import run_folder
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError
from lightning_dlrover.rdzv.job.records import (
    AgentRecord,
    ControllerRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodeRecord,
    WorkerRecord,
    encode,
)
from lightning_dlrover.report.status import (
    EventLog,
    JobNotFoundError,
    JobPlace,
    connect_to_job,
    find_job,
    read_event_file,
    read_job,
    read_nodes,
    show_status,
)
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLROVER_ENDPOINT", "DLROVER_PREFIX"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path) -> JobPlace:
    place = JobPlace("job", "127.0.0.1:1", "/mine")
    (folder / "job").mkdir()
    place.write(folder / "job")
    return place


def test_job_is_found_through_its_run_folder(tmp_path: Path) -> None:
    place = written(tmp_path)
    assert find_job("job", None, None, tmp_path) == place
    assert [each.name for each in (tmp_path / "job").iterdir()] == ["job.json"]


def test_given_options_outrank_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ended_job_is_not_taken_for_a_fault_of_etcd(tmp_path: Path) -> None:
    place = written(tmp_path)
    with pytest.raises(JobNotFoundError, match=rf"'job' has ended, .* `dlrover report job --run-dir {tmp_path}`"):
        connect_to_job(place, tmp_path)


@pytest.mark.slow
def test_job_with_a_controller_or_another_etcd_has_not_ended_because_etcd_is_silent(tmp_path: Path) -> None:
    place = written(tmp_path)
    with pytest.raises(EtcdUnavailableError, match=r"no etcd v3 answered at 127\.0\.0\.1:2"):
        connect_to_job(JobPlace("job", "127.0.0.1:2"), tmp_path)
    with (
        run_folder(tmp_path / "job", "job", place.endpoint, "local"),
        pytest.raises(EtcdUnavailableError, match=place.endpoint),
    ):
        connect_to_job(place, tmp_path)


def test_the_event_file_is_complete_and_in_order_at_the_end(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    mirror = Mirror(client, keys.events)
    log = EventLog(mirror, file)
    put_event(client, keys, 1, 1.0)
    put_event(client, keys, 2, 3.0)
    assert [e.text for e in eventually(log.new, "the first events")][:1] == ["event 1"]
    put_event(client, keys, 3, 2.0)  # a late event of another worker
    client.put(f"{keys.events}{4:020d}-w", b"garbage")
    log.complete(client)
    assert [e.at for e in read_event_file(file)] == [1.0, 2.0, 3.0]
    log.complete(client)
    assert len(file.read_bytes().splitlines()) == 3
    mirror.close()


def test_job_ends_though_its_event_file_was_removed(
    client: EtcdClient, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "events.jsonl"
    with Mirror(client, keys.events) as mirror:
        log = EventLog(mirror, file)
        put_event(client, keys, 1, 1.0)
        eventually(log.new, "the first event")
        file.unlink()
        log.complete(client)
    assert f"{file} does not exist" in caplog.text


def test_events_copied_by_an_earlier_process_are_not_new(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
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


def test_a_job_that_etcd_does_not_hold_is_not_found(client: EtcdClient, keys: Keys) -> None:
    with pytest.raises(JobNotFoundError, match=keys.run_id):
        read_job(client, keys)


@pytest.mark.parametrize("name", ["shared/job", "shared/plan", "shared/round", "agent_round", "workers/a", "drains/a"])
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


def test_event_file_is_made_up_for_after_a_full_disk(client: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk: the first write is cut, the others fail."""
    file = tmp_path / "events.jsonl"
    mirror = Mirror(client, keys.events)
    log = EventLog(mirror, file)
    size = len(encode(EventRecord("round", 1.0, "event 1"))) + 1
    with limited_files(size + 20):
        put_event(client, keys, 1, 1.0)
        put_event(client, keys, 2, 2.0)
        eventually(lambda: len(mirror.snapshot()) == 2, "the events")
        assert [event.text for event in log.new()] == ["event 1", "event 2"]
        assert log.new() == []
    assert file.stat().st_size == size + 20
    with limited_files(size + 30):
        log.complete(client)
    assert [event.text for event in read_event_file(file)] == ["event 1"]
    log.complete(client)
    assert [event.text for event in read_event_file(file)] == ["event 1", "event 2"]
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    mirror.close()


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_status_shows_how_far_joiners_are(client: EtcdClient, keys: Keys) -> None:
    client.put(keys.job, encode(JobRecord("training", True, 1, 9, "0")))
    apps = {f"node{number}": "handle" if number > 1 else "" for number in range(1, 9)}
    client.put(keys.controller, encode(ControllerRecord("host", 1, "slurm", apps)))
    client.put(keys.each_node + "node1", encode(NodeRecord("asked", asked_at=90.0)))
    client.put(keys.each_node + "node2", encode(NodeRecord("started", "handle", asked_at=80.0)))
    client.put(keys.each_node + "node3", b"garbage")
    for number in (7, 8):  # their workers have left
        client.put(f"{keys.each_node}node{number}", encode(NodeRecord("started", "handle", had_worker=True)))
    for number, state in ((3, None), (4, "standby"), (5, "ready"), (6, "active"), (8, None)):
        agent = AgentRecord(f"a{number}", "host", number, 1, "running", {"node": f"node{number}"}, since=70.0)
        client.put(f"{keys.agents}a{number}", encode(agent))
        if state is not None:
            worker = WorkerRecord(f"w{number}", agent.agent_id, "host", number, 0, "127.0.0.1", 1, state, since=60.0)  # type: ignore[arg-type]
            client.put(f"{keys.workers}w{number}", encode(worker))
    place, found = JobPlace(keys.run_id, "host:1"), read_job(client, keys)
    shown = show_status(place, found, {}, [], now=100.0, nodes=read_nodes(client, keys))
    assert [(each["node"], each["stage"], each["for_s"]) for each in shown["joining"]] == [
        ("node1", "requested", 10.0),
        ("node2", "starting", 20.0),
        ("node3", "importing", 30.0),
        ("node4", "building", 40.0),
        ("node5", "ready", 40.0),
    ]
    assert shown["controller"]["awaited_nodes"] == ["node1", "node2"]


# --- events in the run folder ------------------------------------------------------------------------------------------------


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
