"""Somebody else fills a shared etcd up to its quota while jobs train, change, and end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.harness import Job, Worker
from tests.e2e.test_dlrover_run import SIZE, wait_for_workers
from tests.e2e.test_faults import Watched, start
from tests.support.dlrover_process import Dlrover, Run
from tests.support.full_etcd import fill, make_room, small_etcd
from tests.support.processes import JsonLines
from tests.support.waiting import eventually

__all__ = ["start"]

SCRIPT = Path(__file__).with_name("tiny_loop.py")

Small = tuple[EmbeddedEtcd, EtcdClient]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    with small_etcd(tmp_path) as small:
        yield small


def coordinator_of(job: Job) -> int:
    """Index of the worker that coordinates."""
    [coordinator] = {r["pid"] for r in job.records("done")} & {int(job.coordinator.split("-")[-2])}
    return next(index for index, worker in enumerate(job.workers) if worker.pid == coordinator)


def test_changes_wait_until_a_full_etcd_has_room(start: Callable[..., Watched], small: Small) -> None:
    """A worker starts, one is drained, one is killed, the coordinator is killed, a lease is lost: each in a job of its own."""
    server, others = small
    ttls_s = (10, 10, 3, 3, 3)
    jobs = [start(endpoint=server.endpoint, lease_ttl_s=ttl_s) for ttl_s in ttls_s]
    grown, drained, broken, headless, paused = jobs
    rounds = [watched.num_rounds for watched in jobs]
    coordinator = coordinator_of(headless.job)
    fill(others)
    for watched in jobs:
        watched.go_on_for(5)
    joiner, leaver = grown.job.start(), drained.job.workers[1]
    leaver.terminate()
    broken.job.workers[1].kill()
    headless.job.workers[coordinator].kill()
    paused.job.workers[1].stop()
    for worker in (joiner, leaver, broken.job.workers[0], headless.job.workers[1 - coordinator]):
        worker_is_told(worker)
    for watched in (broken, headless, paused):
        eventually(lambda: watched.job.num_registered == 1, "the lease of a dead or stopped worker expires", 20)  # noqa: B023
    paused.job.workers[1].go_on()
    for watched in (grown, drained, paused):
        watched.go_on_for(50)
    assert [watched.num_rounds for watched in jobs] == rounds
    assert joiner.exit_code is None
    make_room(others)
    paused.job.wait_until(lambda: paused.job.num_registered == 2, "the worker that was stopped registers again", 20)
    results = ((grown, 3, [0, 0, 0]), (drained, 1, [0, 0]), (broken, 1, [-9, 0]), (headless, 1, [-9, 0]), (paused, 2, [0, 0]))
    for watched, size, codes in results:
        watched.job.wait_for_world(size)
        assert sorted(watched.end()) == codes
    assert [watched.num_rounds - before for watched, before in zip(jobs, rounds, strict=True)] == [1, 1, 1, 1, 0]


def worker_is_told(worker: Worker) -> None:
    eventually(
        lambda: "is full" in worker.output and "etcdctl alarm disarm" in worker.output,
        f"worker {worker.name} names the cause and the next move",
        30,
    )


class Records:
    """Records of all workers of `tiny_loop.py`."""

    def __init__(self, file: Path) -> None:
        self._lines: JsonLines[dict[str, Any]] = JsonLines(file, dict)

    def lines(self) -> list[dict[str, Any]]:
        return [line for line in self._lines.read() if "step" in line]

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def finals(self) -> list[list[float]]:
        return [line["final"] for line in self._lines.read() if "final" in line]

    def assert_each_step_was_made_once(self) -> None:
        states = {line["step"]: line["state"] for line in self.lines()}
        assert sorted(states) == list(range(1, self.step + 1))
        for line in self.lines():
            assert line["state"] == states[line["step"]] == [line["step"], sum(range(line["step"]))]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_run_outlasts_an_etcd_that_is_full_at_its_start_in_a_change_and_at_its_end(
    dlrover: Dlrover, small: Small, tmp_path: Path
) -> None:
    server, others = small
    records, until = Records(tmp_path / "records"), tmp_path / "enough"
    script = (SCRIPT, "--records", tmp_path / "records", "--until", until)
    arguments = ("--endpoint", server.endpoint, "--workers", "2:3", "--lease-ttl", 20, *SIZE, *script)

    fill(others)
    refused = dlrover("run", "--rdzv-id", "job", *arguments)
    assert refused.returncode == 2
    assert_next_move_is_named(refused.stderr)
    make_room(others)

    run = dlrover.start(*arguments)
    run.wait_for_output(r"\[round\] round 1: 2 workers", 90)
    first, second = wait_for_workers(run, 2)
    fill(others)
    made = records.step
    run.wait_for(lambda: records.step > made + 50, "50 steps while etcd is full")
    for command in (("scale", "job", 3), ("drain", "job", first["worker_id"], "--replace"), ("cancel", "job")):
        done = dlrover(*command)
        assert done.returncode == 2, command
        assert_next_move_is_named(done.stderr)
    shown = dlrover("status", "job")
    assert shown.returncode == 0
    assert "NOSPACE" in shown.stdout
    os.kill(second["pid"], signal.SIGKILL)
    run.wait_for_output(r"\[node\d\] etcd at .* is full.*etcdctl alarm disarm", 60)
    run.wait_for_output(r"no node is started for now: .*is full", 60)
    made = records.step
    assert len(dlrover_workers(run)) == 1
    make_room(others)
    wait_for_workers(run, 2, without=(second["worker_id"],))
    run.wait_for(lambda: records.step > made + 20, "steps of the worker and its new mate")
    assert run.output.count("no node is started for now") == 1

    fill(others)
    until.touch()
    run.wait_for(lambda: len(records.finals()) == 2 or None, "both workers to save their results")
    run.wait_for_output(r"waits up to 600 s for etcd to accept .*the end of the training", 30)
    assert run.process.poll() is None
    make_room(others)
    assert run.wait_for_exit(100) == 0, run.output
    dlrover.assert_all_ended()
    records.assert_each_step_was_made_once()
    assert records.finals() == [[records.step, sum(range(records.step))]] * 2
    kinds = [event.kind for event in run.events]
    assert kinds.count("finished") == 1
    assert "loss" in kinds
    assert "Traceback" not in run.output


def assert_next_move_is_named(output: str) -> None:
    [line] = output.splitlines()
    assert line.startswith("dlrover: cannot ")
    assert "is full" in line
    assert "etcdctl alarm disarm" in line


def dlrover_workers(run: Run) -> list[dict[str, Any]]:
    return [worker for worker in run.status()["workers"] if worker["state"] != "starting"]
