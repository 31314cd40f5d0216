"""`dlrover pool run` with real jobs: they share two cores, come and go, and the brain is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dlrover.pool.view import GrantRecord, PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.events import DecisionMade, events_of
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import Keys, PlanRecord
from tests.support.dlrover_process import Dlrover, Run
from tests.support.pool_audit import PoolAudit
from tests.support.waiting import eventually

SCRIPT = Path(__file__).with_name("tiny_script.py")
GROWING = ("--global-batch", 8, "--sample-s", 0.03, "--step-s", 0.002, "--only-resizes")
"""Arguments with which the script is the faster the more workers share a batch."""

LEASE_S = 3
"""Lease of all processes of a pool whose etcd is away. That of a `dlrover run` is twice as long."""

SETTLING_S = 2.4 * LEASE_S
"""Patience of its brain with records that are missing."""

POOL = PoolKeys("default")


class Cluster:
    """A pool of two cores, with its jobs and its brains."""

    def __init__(self, dlrover: Dlrover, etcd: EmbeddedEtcd, audit: PoolAudit) -> None:
        self.dlrover, self.etcd, self.audit = dlrover, etcd, audit
        self.client = EtcdClient(EtcdConfig(etcd.endpoint))

    def brain(self, *options: object) -> Run:
        command = [sys.executable, "-m", "lightning_dlrover.cli", "pool", "run", "--budget", "cores=2", "--interval", "0.5s"]
        return self.dlrover.follow([*command, "--endpoint", self.etcd.endpoint, *map(str, options)], "brain")

    def job(self, name: str, *arguments: object, workers: str = "1:2", options: tuple[object, ...] = ()) -> Run:
        place = ("--pool", "default", "--endpoint", self.etcd.endpoint, "--workers", workers, *options)
        return self.dlrover.start(*place, SCRIPT, *GROWING, *arguments, run_id=name)

    def grant(self, name: str) -> GrantRecord | None:
        return readable(GrantRecord, self.client.get(POOL.grants + name))

    def plan_size(self, name: str) -> int:
        plan = readable(PlanRecord, self.client.get(Keys(name).plan))
        return plan.num_workers if plan is not None else 0

    def workers_of_script(self) -> list[int]:
        """Process ids of all workers that run the script."""
        return [pid for pid, command in self.dlrover.processes().items() if SCRIPT.name in command and "--rdzv-" not in command]

    def assert_nothing_left(self) -> None:
        """Assert that the budget was never exceeded, and that the pool is empty."""
        assert self.audit.most <= 2, self.audit.history
        assert self.client.get_prefix(POOL.grants)[1] == []
        assert self.client.get_prefix(POOL.members)[1] == []

    def wait_for_decision(self, run: Run) -> None:
        """Wait until the job's planner has published its predictions."""
        journal = Journal(self.client, Keys(run.run_id))
        run.wait_for(lambda: any(events_of(journal.events(), DecisionMade)) or None, "a decision of its planner", 60.0)

    def wait_for_workers(self, run: Run, num_workers: int, timeout_s: float = 60.0) -> None:
        run.wait_for(
            lambda: self.audit.counts()[run.run_id] == num_workers or None, f"{num_workers} workers of {run.run_id}", timeout_s
        )


@pytest.fixture
def cluster(dlrover: Dlrover, private_etcd: EmbeddedEtcd) -> Iterator[Cluster]:
    with PoolAudit(private_etcd.endpoint, ["a", "b", "c", "d"], 2) as audit:
        made = Cluster(dlrover, private_etcd, audit)
        yield made
        print(audit.history, *(f"{run.run_id}: {run.output}" for run in dlrover.runs), sep="\n")
        made.client.close()
        dlrover.end()


@pytest.mark.long
def test_job_shrinks_for_another_and_grows_when_it_has_ended(cluster: Cluster, tmp_path: Path) -> None:
    cluster.brain()
    first = cluster.job("a", "--until", tmp_path / "until")
    cluster.wait_for_workers(first, 2)
    second = cluster.job("b", "--steps", 30)
    cluster.wait_for_workers(second, 1)
    assert cluster.audit.counts() == {"a": 1, "b": 1, "c": 0, "d": 0}
    assert second.wait_for_exit(60) == 0, second.output
    cluster.wait_for_workers(first, 2)
    (tmp_path / "until").touch()
    assert first.wait_for_exit(60) == 0, first.output
    cluster.assert_nothing_left()


@pytest.mark.long
def test_killed_brain_is_replaced_in_the_middle_of_a_change(cluster: Cluster, tmp_path: Path) -> None:
    first_brain = cluster.brain()
    first_brain.wait_for_output("this process decides")
    second_brain = cluster.brain()
    second_brain.wait_for_output("this one stands by")
    until = tmp_path / "until"
    first = cluster.job("a", "--until", until)
    cluster.wait_for_workers(first, 2)
    cluster.wait_for_decision(first)
    second = cluster.job("b", "--steps", 30)
    first.wait_for(lambda: (cluster.plan_size("a") == 1) or None, "the smaller plan of a")
    first_brain.process.kill()
    second_brain.wait_for_output("this process decides")
    cluster.wait_for_workers(second, 1)
    assert second.wait_for_exit(60) == 0, second.output
    first.finish(until)
    cluster.assert_nothing_left()


@pytest.mark.long
def test_nothing_changes_while_etcd_is_away_and_all_goes_on_afterwards(cluster: Cluster, tmp_path: Path) -> None:
    """etcd stands still for longer than all leases, so every record of a living process expires."""
    brief = ("--lease-ttl", f"{LEASE_S}s")
    brain = cluster.brain(*brief)
    until = tmp_path / "until"
    first = cluster.job("a", "--until", until, workers="1:1", options=brief)
    second = cluster.job("b", "--until", until, workers="1:1", options=brief)
    for run in (first, second):  # a worker that starts without etcd fails
        cluster.wait_for_decision(run)
    waiting = cluster.job("c", "--steps", 10, workers="1:1", options=brief)
    waiting.wait_for_output("number 1 of 1 in the queue")
    pid = cluster.etcd.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        brain.wait_for_output("nothing changes until etcd is back")
        time.sleep(2 * LEASE_S + 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    brain.wait_for_output("etcd is back")
    time.sleep(SETTLING_S + 1)
    assert "has a place" not in waiting.output
    assert len(cluster.workers_of_script()) == 2
    until.touch()
    for run in (first, second, waiting):
        assert run.wait_for_exit(90) == 0, run.output
    cluster.assert_nothing_left()


@pytest.mark.long
def test_place_of_a_job_that_fails_goes_to_the_next_one(cluster: Cluster) -> None:
    cluster.brain()
    failing = cluster.job("a", "--fail-at", 30, "--steps", 1000, workers="2:2")
    cluster.wait_for_workers(failing, 2)
    waiting = cluster.job("b", "--steps", 20, workers="2:2")
    waiting.wait_for_output("number 1 of 1 in the queue")
    assert failing.wait_for_exit(60) == 1, failing.output
    assert waiting.wait_for_exit(60) == 0, waiting.output
    cluster.assert_nothing_left()


@pytest.mark.long
def test_killed_run_frees_its_place_once_its_workers_have_ended(cluster: Cluster) -> None:
    cluster.brain()
    killed = cluster.job("a", "--steps", 100_000, workers="2:2")
    cluster.wait_for_workers(killed, 2)
    waiting = cluster.job("b", "--steps", 20, workers="2:2")
    waiting.wait_for_output("number 1 of 1 in the queue")
    killed.process.kill()
    assert waiting.wait_for_exit(90) == 0, waiting.output
    assert cluster.audit.most <= 2, cluster.audit.history


@pytest.mark.long
def test_runs_of_one_machine_use_different_gpus_and_those_of_a_killed_one_are_free(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = "".join(f"GPU {number}: H200 (UUID: GPU-{name})\\n" for number, name in enumerate("ab"))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    brief, until = ("--lease-ttl", f"{LEASE_S}s"), tmp_path / "until"

    def gpus() -> list[str]:
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in cluster.workers_of_script()]
        return sorted(e.decode() for environment in environments for e in environment if e.startswith(b"CUDA_VISIBLE_DEVICES="))

    cluster.brain(*brief)
    first, second = (cluster.job(name, "--until", until, workers="1:1", options=(*brief, "--gpus", 1)) for name in ("a", "b"))
    for run in (first, second):
        cluster.wait_for_workers(run, 1)
    both = ["CUDA_VISIBLE_DEVICES=GPU-a", "CUDA_VISIBLE_DEVICES=GPU-b"]
    second.wait_for(lambda: gpus() == both or None, "a GPU for each")
    first.process.kill()
    third = cluster.job("c", "--until", until, workers="1:1", options=(*brief, "--gpus", 1))
    cluster.wait_for_workers(third, 1)
    third.wait_for(lambda: gpus() == both or None, "the GPU of the killed one")
    until.touch()
    for run in (second, third):
        assert run.wait_for_exit(60) == 0, run.output
    cluster.assert_nothing_left()
    assert claims_left(cluster) == []


def claims_left(cluster: Cluster) -> list[str]:
    """Claims of GPUs that are left."""
    return [entry.key for entry in cluster.client.get_prefix(POOL.pools)[1] if "/.gpus/" in entry.key]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_waiting_run_that_ends_leaves_no_place_in_the_queue(cluster: Cluster, number: signal.Signals, code: int) -> None:
    waiting = cluster.job("a")
    waiting.wait_for_output("no process decides on that pool")
    waiting.process.send_signal(number)
    assert waiting.wait_for_exit(20) == code, waiting.output
    eventually(lambda: not cluster.client.get_prefix(POOL.members)[1], "the end of its record", 20.0)
    assert cluster.client.get_prefix(Keys("a").root)[1] == []


@pytest.mark.long
def test_job_set_by_hand_keeps_its_size_and_the_queue_shows_who_waits_and_why(cluster: Cluster, tmp_path: Path) -> None:
    cluster.brain()
    until = tmp_path / "until"
    first = cluster.job("a", "--until", until)
    cluster.wait_for_workers(first, 2)
    first.wait_for(lambda: first.status()["phase"] == "training" or None, "training")
    assert cluster.dlrover("scale", "a", 2).returncode == 0
    cluster.wait_for_decision(first)
    waiting = cluster.job("b", "--steps", 20, options=("--priority", 3, "--owner", "ads"))
    waiting.wait_for_output("number 1 of 1 in the queue")
    shown = cluster.dlrover("pool", "status", "--endpoint", cluster.etcd.endpoint)
    assert shown.returncode == 0, shown.stderr
    assert "budget: 2 cores of 2 cores in use" in shown.stdout
    assert "runs, its size set by hand" in shown.stdout
    assert (
        "it needs 1 core, and the other jobs leave it nothing; when it starts depends on a, whose end is not known"
        in shown.stdout
    )
    listed = json.loads(cluster.dlrover("pool", "status", "--json", "--endpoint", cluster.etcd.endpoint).stdout)
    assert [(job["job"], job["workers"], job["place"]) for job in listed["jobs"]] == [("a", 2, 0), ("b", 0, 1)]
    assert cluster.dlrover("scale", "a", 1).returncode == 0
    assert waiting.wait_for_exit(60) == 0, waiting.output
    first.finish(until)
    cluster.assert_nothing_left()
