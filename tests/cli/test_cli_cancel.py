"""`dlrover cancel`."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import threading
from pathlib import Path

import pytest

from lightning_dlrover.cli import control
from lightning_dlrover.pool.admission import PoolTicket, TicketError
from lightning_dlrover.pool.view import MemberRecord, PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError
from lightning_dlrover.rdzv.job.records import ControllerRecord, JobRecord, Keys, NodesRecord, decode, encode
from lightning_dlrover.report.status import JobPlace
from tests.support.run_cli import RunCli, left_folder
from tests.support.stored import entry_at, stored


def test_job_without_a_controller_is_marked_as_cancelled(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    assert "were asked to leave and have not: w-a, w-b, w-c" in dlrover.refused("cancel", "--timeout", "0.3", *at)
    assert client.count(job.drains) == 3
    client.delete_prefix(job.workers)
    code, output, errors = dlrover("cancel", *at)
    assert (code, errors) == (0, "")
    assert "cancelled, all its nodes have ended" in output
    record = stored(client, JobRecord, job.job)
    assert (record.phase, record.message) == ("failed", "cancelled by `dlrover cancel`")
    assert client.get(job.plan) is None
    assert client.get_prefix(job.drains)[1] == []
    assert "had ended already" in dlrover("cancel", *at)[1]


def test_a_controller_that_does_not_end_a_cancelled_job_is_named(
    dlrover: RunCli, client: EtcdClient, at: tuple[str, ...], job: Keys
) -> None:
    nodes = NodesRecord("local", "mark", num_started=3)
    client.put(job.nodes, encode(nodes))
    with contextlib.closing(client.lease(5)) as lease:
        client.put(job.controller, encode(ControllerRecord("h", 1, "local")), lease)
        assert "its controller has not ended within 0.3 s" in dlrover.refused("cancel", "--timeout", "0.3", *at)
    entry = entry_at(client, job.nodes)
    asked = dataclasses.replace(nodes, stop="cancelled by `dlrover cancel`")
    assert decode(NodesRecord, entry.value, entry.key) == asked


@pytest.mark.parametrize(("target", "is_run"), [("local", False), ("slurm", True)])
def test_job_whose_etcd_does_not_answer_is_not_reported_as_ended(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, target: str, is_run: bool
) -> None:
    def no_answer(*_: object, **__: object) -> None:
        raise EtcdUnavailableError("no answer")

    monkeypatch.setattr("lightning_dlrover.cli.control.connect", no_answer)
    folder = Path("runs/job")
    folder.mkdir(parents=True)
    JobPlace("job", "h:1").write(folder, target, "mark")
    with (folder / ".lock").open("a") as lock:
        if is_run:
            fcntl.flock(lock, fcntl.LOCK_EX)
        code, output, errors = dlrover("cancel", "job")
    assert (code, output) == (2, "")
    assert "the etcd of job 'job' at h:1 does not answer" in errors
    assert ("would start new nodes" in errors) == is_run


def test_job_that_has_ended_with_its_own_etcd_needs_no_cancelling(dlrover: RunCli) -> None:
    left_folder(endpoint="unix:/nowhere/etcd.sock:0")
    assert dlrover("cancel", "job") == (0, "job job: had ended already; no node of it is left\n", "")


@pytest.mark.parametrize("ends", [True, False])
def test_etcd_that_ends_right_after_the_controller_is_no_error_once_its_run_has_ended(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    client.put(job.nodes, encode(NodesRecord("local", "mark")))
    folder = Path("runs") / job.run_id
    folder.mkdir(parents=True)
    JobPlace(job.run_id, etcd.endpoint).write(folder)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def no_answer(*_: object) -> None:
            if ends:
                threading.Timer(0.3, lock.close).start()
            raise EtcdUnavailableError("no answer")

        monkeypatch.setattr(control, "_let_workers_leave", no_answer)
        monkeypatch.setattr(control, "MAX_END_AFTER_ETCD_S", 10.0 if ends else 0.3)
        code, output, errors = dlrover("cancel", job.run_id)
    assert (code, "cancelled, all its nodes have ended" in output, "no answer" in errors) == (0 if ends else 2, ends, not ends)


def test_job_in_a_queue_is_cancelled_before_it_begins(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, run_id: str
) -> None:
    keys = Keys(run_id)
    ask = MemberRecord("h", 1, 1, 2, submitted_at=1.0)
    with PoolTicket(client, PoolKeys("team-a"), keys, ask) as place:
        assert "its `dlrover run` still waits for its permission to run, or has it" in dlrover.refused(
            "cancel", "--timeout", "0.3", "--endpoint", etcd.endpoint, run_id
        )
        with pytest.raises(TicketError, match="has not begun: cancelled by"):
            place.wait(30.0)
    assert client.get_prefix(keys.root)[1] == []


def test_run_that_is_killed_in_a_queue_leaves_no_request_to_end(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, run_id: str
) -> None:
    keys = Keys(run_id)
    with contextlib.closing(client.lease(2)) as lease:
        client.put(PoolKeys("team-a").members + run_id, encode(MemberRecord("h", 1, 1, 2, submitted_at=1.0)), lease)
        assert "cancelled before its start" in dlrover("cancel", "--endpoint", etcd.endpoint, run_id)[1]
    assert client.get_prefix(keys.root)[1] == []
