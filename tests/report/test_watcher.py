"""Pictures of jobs kept current from a real etcd, and from folders of run folders."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job.records import JobRecord, Keys, encode
from lightning_dlrover.report import watcher as watching
from lightning_dlrover.report.status import EVENTS_FILE, JobPlace
from lightning_dlrover.report.view_model import ShownJob
from lightning_dlrover.report.watcher import Watcher
from tests.support.counted_requests import counted
from tests.support.recorded_jobs import profile, recorded_job, write
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLROVER_ENDPOINT", "DLROVER_PREFIX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def client(private_etcd: EmbeddedEtcd) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as connected:
        yield connected


def seen(watcher: Watcher, run_id: str = "job") -> ShownJob:
    return eventually(lambda: watcher.job(run_id).job, f"job {run_id} is seen", 10)


def test_a_change_is_seen_at_once_and_a_new_job_too(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "job", recorded_job(2))
    with Watcher(private_etcd.endpoint) as watcher:
        assert seen(watcher).num_workers == 2
        client.delete(Keys("job").workers + "host0-1")
        eventually(lambda: seen(watcher).num_workers == 1, "the loss is seen", 5)
        write(client, "other", recorded_job(1))
        eventually(lambda: [job.run_id for job in watcher.jobs().jobs] == ["job", "other"], "the new job is listed", 5)
        version = watcher.version
        client.put(Keys("job").profiles + "host0-0", encode(profile("host0-0", 0, 2, memory_bytes=7)))
        assert watcher.wait_for_change(version, 5) != version
        eventually(lambda: seen(watcher).workers[0].memory_bytes == 7, "the profile is seen", 5)


def test_a_job_is_asked_for_alone(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "job", recorded_job(2))
    write(client, "job2", recorded_job(2))
    with Watcher(private_etcd.endpoint, only="job") as watcher:
        assert len(seen(watcher).events) == 4
        assert [job.run_id for job in watcher.jobs().jobs] == ["job"]


def test_a_job_shown_alone_has_its_older_events_too(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    records = recorded_job(2)
    for number in range(60):
        event = kinds.record_of(kinds.NodesHeldUp(), f"held up {number}", 1000.0 + number)
        records[f"events/{1000 + number:020d}-w"] = encode(event)
    write(client, "job", records)
    with Watcher(private_etcd.endpoint) as watcher:
        eventually(lambda: watcher.jobs().jobs, "the job is listed", 10)
        assert len(watcher.jobs().jobs[0].events) == watching.LISTED_EVENTS
        assert watcher.jobs().jobs[0].goodput is None
        assert len(seen(watcher).events) == 64
        assert seen(watcher).goodput is not None


def test_a_list_reads_older_events_one_job_after_the_other(
    private_etcd: EmbeddedEtcd, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "COMPLETE_S", 0.1)
    for name in ("a", "b"):
        write(client, name, recorded_job(2))
    with Watcher(private_etcd.endpoint) as watcher:
        eventually(
            lambda: [job.goodput is not None for job in watcher.jobs().jobs] == [True, True], "all jobs have a goodput", 10
        )


def test_an_unknown_job_is_named(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    with Watcher(private_etcd.endpoint, only="nobody") as watcher:
        eventually(lambda: watcher.job("nobody").source.is_connected, "etcd was read", 10)
        found = watcher.job("nobody")
    assert found.job is None
    assert "has no job 'nobody' under '/dlrover'" in found.source.problem


def test_pictures_outlast_etcd_and_are_current_again_after_it(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "job", recorded_job(2))
    with Watcher(private_etcd.endpoint) as watcher:
        seen(watcher)
        private_etcd.kill()
        eventually(lambda: not watcher.job("job").source.is_connected, "the silence is noticed", 20)
        away = watcher.job("job")
        assert away.job is not None
        assert away.job.num_workers == 2
        assert 0 < away.source.as_of <= time.time()
        assert "does not answer" in away.source.problem
        private_etcd.restart()
        client.delete(Keys("job").workers + "host0-1")
        eventually(lambda: watcher.job("job").source.is_connected, "etcd is back", 20)
        eventually(lambda: seen(watcher).num_workers == 1, "the loss in between is seen", 10)


def test_an_etcd_that_starts_later_is_read_then(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "job", recorded_job(2))
    private_etcd.kill()
    with Watcher(private_etcd.endpoint) as watcher:
        eventually(lambda: "does not answer" in watcher.job("job").source.problem, "the silence is named", 20)
        assert watcher.job("job").job is None
        private_etcd.restart()
        assert seen(watcher).num_workers == 2


def memory_is(watcher: Watcher, num_bytes: int) -> bool:
    return seen(watcher).workers[7].memory_bytes == num_bytes


def test_a_thousand_workers_cost_a_request_in_a_second_at_most(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "job", recorded_job(1000))
    for only in (None, "job"):
        with Watcher(private_etcd.endpoint, only=only) as watcher:
            assert seen(watcher).num_workers == 1000
            used = watcher.client_of("job")
            assert used is not None
            with counted(used) as requests:
                begin = time.monotonic()
                for number in range(8):
                    for worker in range(100):
                        made = profile(f"host0-{worker % 8}", worker % 8, 1000, memory_bytes=number)
                        client.put(Keys("job").profiles + f"host0-{worker % 8}", encode(made))
                    eventually(partial(memory_is, watcher, number), "the change is seen", 10)
                passed_s = time.monotonic() - begin
            assert len(requests) <= passed_s + 1, (requests, passed_s)


def test_changes_of_keys_that_no_picture_needs_wake_no_screen(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    write(client, "job", recorded_job(2))
    with Watcher(private_etcd.endpoint) as watcher:
        seen(watcher)
        version = watcher.version
        client.put(Keys("job").store + "0/key", b"value")
        client.put("/dlrover/.pools/p/brain", b"{}")
        eventually(lambda: watcher.entries_below(".pools/"), "the add-on's record is seen", 5)
        assert watcher.version == version + 1


def run_folder(parent: Path, run_id: str, endpoint: str) -> Path:
    folder = parent / run_id
    folder.mkdir()
    JobPlace(run_id, endpoint).write(folder)
    ended = kinds.record_of(kinds.FitFinished(7), "finished after 7 steps", 1000.0)
    (folder / EVENTS_FILE).write_bytes(encode(ended) + b"\n")
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder as its `dlrover run` does."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_folder_of_run_folders_shows_running_and_ended_jobs(
    private_etcd: EmbeddedEtcd, client: EtcdClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "SCAN_S", 0.1)
    run_folder(tmp_path, "old", "127.0.0.1:1")
    running = run_folder(tmp_path, "job", private_etcd.endpoint)
    write(client, "job", recorded_job(2))
    write(client, "stranger", recorded_job(2))  # in the same etcd, but not in the folder
    with Watcher(run_dir=tmp_path) as watcher:
        with locked(running):
            eventually(lambda: seen(watcher).state == "training", "the running job is seen", 10)
            assert [(job.run_id, job.state) for job in watcher.jobs().jobs] == [("job", "training"), ("old", "finished")]
            assert watcher.job("job").place == JobPlace("job", private_etcd.endpoint)
            assert watcher.job("old").place is None
        private_etcd.kill()  # as the embedded etcd of a `dlrover run` ends with it
        eventually(lambda: seen(watcher).state == "finished", "its end is read from its folder", 20)
        assert "has no job 'none'" in watcher.job("none").source.problem


def test_a_job_of_an_etcd_that_has_ended_is_read_from_its_run_folder(private_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    run_folder(tmp_path, "job", private_etcd.endpoint)
    private_etcd.kill()
    with Watcher(run_dir=tmp_path, only="job") as watcher:
        found = watcher.job("job")
    assert found.job is not None
    assert (found.job.state, found.source.is_connected, found.place) == ("finished", True, None)


def test_hostile_names_of_jobs_end_no_watch(private_etcd: EmbeddedEtcd, client: EtcdClient) -> None:
    evil = "<b>\x1b[31m"
    client.put(f"/dlrover/{evil}/live/shared/job", encode(JobRecord("training", True, 1, 2, "0.1")))
    client.put("/dlrover//live/shared/job", b"nameless")
    client.put("/dlrover/ spaced /live/shared/job", b"\xff")
    write(client, "job", recorded_job(1))
    with Watcher(private_etcd.endpoint) as watcher:
        seen(watcher)
        assert {job.run_id for job in watcher.jobs().jobs} >= {"job", "<b> [31m"}
