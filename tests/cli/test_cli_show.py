"""`dlrover status` and `dlrover list`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from lightning_dlrover.cli.run import run_folder
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.events import FitFinished, JobFailed, RoundFormed, SnapshotCompleted, SnapshotFailed, record_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import (
    ControllerRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    PlanRecord,
    SnapshotRecord,
    encode,
)
from lightning_dlrover.report.status import JobPlace, JobSummary, list_jobs
from tests.support.run_cli import RunCli, left_folder


def test_escape_sequences_of_others_reach_no_terminal(
    dlrover: RunCli, at: tuple[str, ...], client: EtcdClient, job: Keys
) -> None:
    client.put(f"{job.events}9-other", encode(EventRecord("round", 1.0, "\x1b]52;c;cm0gLXJm\x07 nice \x1b[2J")))
    text = dlrover.output("status", *at)
    assert "\\x1b]52;c;cm0gLXJm\\x07 nice \\x1b[2J" in text
    assert "\x1b" not in text


def test_status_shows_the_plan_of_a_pool_by_the_name_of_the_pool(
    dlrover: RunCli, at: tuple[str, ...], client: EtcdClient, job: Keys
) -> None:
    client.put(job.plan, encode(PlanRecord(2, "brain", "pool ads: 3 -> 2 workers", True)))
    assert "plan: 2 workers, by pool ads: 3 -> 2 workers\n" in dlrover("status", *at)[1]
    status = json.loads(dlrover("status", "--json", *at)[1])
    assert status["plan"]["source"] == "pool"


def test_status_shows_the_job_for_people_and_for_programs(dlrover: RunCli, at: tuple[str, ...]) -> None:
    text = dlrover.output("status", *at)
    for part in (
        "training, 1 to 3 workers",
        "round 4 (grow): w-a joined",
        "plan: 2 workers, by planner: 2 is best",
        "joining: host:102 builds model and data, for 0 s",
        "host:101",
    ):
        assert part in text
    text = dlrover.output("status", "--json", *at)
    status = json.loads(text)
    assert (status["phase"], status["round"]["number"]) == ("training", 4)
    assert [(w["worker_id"], w["rank"], w["state"]) for w in status["workers"]] == [
        ("w-b", 0, "active"),
        ("w-a", 1, "active"),
        ("w-c", None, "standby"),
    ]


def test_status_shows_shares_by_speed_of_the_current_round(
    dlrover: RunCli, etcd: EmbeddedEtcd, client: EtcdClient, job: Keys
) -> None:
    for number, samples in ((3, [9, 1]), (4, [70, 26])):
        client.put(
            f"{job.events}{number}-shares",
            encode(EventRecord("shares", 1.0, "", {"round": number, "step": 1, "samples": samples})),
        )
    text = dlrover("status", "--endpoint", etcd.endpoint, job.run_id)[1]
    assert [line.split(":")[1].split()[0] for line in text.splitlines() if "share by speed" in line] == ["70", "26"]


def test_list_shows_the_jobs_of_a_folder_or_of_an_etcd(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys) -> None:
    assert dlrover("list") == (0, "no jobs in folder runs\n", "")
    Path("runs/old").mkdir(parents=True)
    JobPlace("old", "127.0.0.1:1").write(Path("runs/old"))
    Path("runs/odd").mkdir()
    Path("runs/odd/job.json").write_text("[]")
    started_at = Path("runs/old/job.json").stat().st_mtime
    old = JobSummary("old", "ended", "local", started_at=started_at)
    assert list_jobs(None, None, Path("runs")) == [JobSummary("odd", "unreadable"), old]
    assert (job.run_id, "training") in [(j.run_id, j.state) for j in list_jobs(etcd.endpoint, None, Path("runs"))]
    assert job.run_id in dlrover("list", "--endpoint", etcd.endpoint)[1]


ENDS = {
    "finished": [record_of(FitFinished(7), "done")],
    "failed": [record_of(JobFailed(), "the job has failed: boom")],
    "cancelled": [
        record_of(RoundFormed(2, [], "stop"), "every worker was asked to leave"),
        record_of(JobFailed(), "the job has failed: cancelled by `dlrover cancel`"),
    ],
    "interrupted": [record_of(RoundFormed(2, [], "stop"), "every worker was asked to leave")],
}


@pytest.mark.parametrize("how", ENDS)
def test_list_report_and_json_of_an_ended_job_tell_the_same_end(dlrover: RunCli, how: str) -> None:
    begins = record_of(RoundFormed(1, ["w"], "start"), "begins", 1.0)
    left_folder(begins, *ENDS[how], endpoint="unix:/nowhere/etcd.sock:0")
    assert dlrover("list")[1].splitlines()[1].split()[:2] == ["job", how]
    assert f"({how})" in dlrover("report", "job")[1].splitlines()[1]
    code, text, _ = dlrover("status", "job", "--json")
    assert (code, json.loads(text)["phase"]) == (0, how)


def test_status_without_a_name_takes_the_only_job_that_runs(dlrover: RunCli, etcd: EmbeddedEtcd, job: Keys) -> None:
    assert "no job runs in folder runs: name the job" in dlrover.refused("status")
    folder = Path("runs") / job.run_id
    with run_folder(folder, job.run_id, etcd.endpoint, "local"):
        JobPlace(job.run_id, etcd.endpoint, job.prefix).write(folder)
        code, text, errors = dlrover("status")
        assert (code, text.startswith(f"job {job.run_id}: training")) == (0, True), errors
        [listed] = json.loads(dlrover("list", "--json")[1])
    assert (listed["run_id"], listed["state"], listed["num_workers"]) == (job.run_id, "training", 2)


def test_status_is_watched_until_the_job_ends(
    dlrover: RunCli, etcd: EmbeddedEtcd, client: EtcdClient, job: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(seconds: float) -> None:
        client.put(job.job, encode(JobRecord("finished", True, 1, 3, "0")))

    monkeypatch.setattr("lightning_dlrover.cli.show.time.sleep", end)
    text = dlrover.output("status", job.run_id, "--watch", "--endpoint", etcd.endpoint)
    assert [line.split()[2] for line in text.splitlines() if line.startswith("job ")] == ["training,", "finished,"]


def test_list_shows_target_size_and_controller_of_each_job(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    client.put(job.nodes, encode(NodesRecord("slurm", "mark")))
    for number, state in enumerate(("started", "asked", "ended")):
        client.put(f"{job.each_node}node{number}", encode(NodeRecord(state)))  # type: ignore[arg-type]
    for name, endpoint in ((job.run_id, etcd.endpoint), ("gone", etcd.endpoint), ("silent", "127.0.0.1:1")):
        Path(f"runs/{name}").mkdir(parents=True)
        JobPlace(name, endpoint, job.prefix).write(Path(f"runs/{name}"), "slurm", "mark")
    # No `dlrover run` is left here, but nodes of the first job train.
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "AT", dlrover("list")[1])
    listed = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines()}
    assert listed == {
        "JOB": "STATE STARTED TARGET WORKERS NODES CONTROLLER",
        job.run_id: "training AT slurm 2 2 none",
        "gone": "ended AT slurm - - none",
        "silent": "unknown: its etcd at 127.0.0.1:1 does not answer AT slurm - - none",
    }
    workers = client.get_prefix(job.workers)[1]
    for entry in workers:
        client.delete(entry.key)
    assert f"{job.run_id} " in dlrover("list")[1].partition("stopped")[0]
    client.put(job.controller, encode(ControllerRecord("host-7", 123, "slurm")))
    assert "process 123 on host-7" in dlrover("list", "--endpoint", etcd.endpoint, "--key-prefix", job.prefix)[1]
    client.put(job.round, b"nonsense")
    client.put(f"{job.prefix}/ odd/key", b"somebody else's")
    states = {each.run_id: each.state for each in list_jobs(etcd.endpoint, job.prefix, Path("runs"))}
    assert (states[job.run_id], states[" odd"]) == ("unreadable", "unreadable")
    client.delete(f"{job.prefix}/ odd/key")


def test_status_shows_the_age_of_the_newest_snapshot_and_a_failure(
    dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys
) -> None:
    asking = ("status", "--endpoint", etcd.endpoint, "--key-prefix", job.prefix, job.run_id)
    assert "snapshot" not in dlrover(*asking)[1]
    client.put(job.snapshot, encode(SnapshotRecord(4, 1200, time.time() - 90.0)))
    problem = record_of(SnapshotFailed(4, "w1", "no memory"), "worker w1: a snapshot failed: no memory")
    Journal(client, job).append(problem, "w1")
    text = dlrover(*asking)[1]
    assert re.search(r"snapshot: batch 1200 or later, 9\d s old", text)
    assert "snapshots fail: worker w1: a snapshot failed: no memory" in text
    Journal(client, job).append(record_of(SnapshotCompleted(4, 1, 1), "snapshots are complete again"), "w0")
    assert "snapshots had failed: worker w1" in dlrover(*asking)[1]


def test_status_warns_of_nodes_without_a_controller(dlrover: RunCli, client: EtcdClient, etcd: EmbeddedEtcd, job: Keys) -> None:
    client.put(job.nodes, encode(NodesRecord("slurm", "mark")))
    asking = ("status", "--endpoint", etcd.endpoint, "--key-prefix", job.prefix, job.run_id)
    assert "controller: none; nodes on slurm train on, the same `dlrover run` adopts them" in dlrover(*asking)[1]
    client.put(job.controller, encode(ControllerRecord("host-7", 123, "slurm")))
    assert "none; nodes" not in dlrover(*asking)[1]
