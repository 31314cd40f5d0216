"""Hooks of a changing job run once for each change, in order, on every worker of the new world."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import DrainRecord, Keys, encode
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Worker
from tests.e2e.hooks_job import train_with_hooks
from tests.e2e.toy_job import ToySettings

SETTINGS = ToySettings(num_rows=480, batch_size=8, max_epochs=2, step_s=0.03)


def changes(worker: Worker) -> list[tuple[Any, Any]]:
    """Former and new world of each change, as (size, rank, round), once for the callback and once for the module."""
    calls = worker.records("change")
    assert [call["by"] for call in calls] == ["callback", "module"] * (len(calls) // 2)
    by_callback, by_module = (calls[start::2] for start in (0, 1))
    found = [(call["former"], call["world"]) for call in by_callback]
    assert found == [(call["former"], call["world"]) for call in by_module]
    return found


def rounds_seen(job: Job) -> dict[str, list[int]]:
    return {worker.name: [world[2] for _, world in changes(worker)] for worker in job.workers}


def assert_in_order(worker: Worker) -> None:
    """Assert that each change begins with the world that the one before has brought."""
    found = changes(worker)
    for (_, before), (former, after) in itertools.pairwise(found):
        assert former == before
        assert after[2] > before[2]


def test_each_change_reaches_every_worker_of_the_new_world_once_and_in_order(make_job: MakeJob) -> None:
    job = make_job(SETTINGS, script=train_with_hooks)
    job.grow_to(3)
    job.workers[1].arm("reduced")
    job.wait_for_world(2)
    job.workers[0].terminate()  # rank 0
    job.wait_for_world(1)
    assert job.finish() == [0, -9, 0], job.report()
    first, lost, last = job.workers
    for worker in job.workers:
        assert_in_order(worker)
    assert [(f and f[0], w[0]) for f, w in changes(first)] == [(1, 2), (2, 3), (3, 2)]
    assert [(f and f[0], w[0]) for f, w in changes(lost)] == [(None, 2), (2, 3)]
    assert [(f and f[0], w[0]) for f, w in changes(last)] == [(None, 3), (3, 2), (2, 1)]
    assert [world[1] for _, world in changes(last)][-1] == 0
    seen = rounds_seen(job)
    assert seen["w0"][1:] == seen["w2"][:-1]
    assert all(call["world"] == call["now"] for worker in job.workers for call in worker.records("change"))


@pytest.mark.parametrize("moment", ["forward", "zero_grad", "world_change"])
def test_two_losses_at_once_leave_no_survivor_without_the_newest_world(make_job: MakeJob, moment: str) -> None:
    job = make_job(SETTINGS, script=train_with_hooks)
    job.grow_to(4)
    job.workers[0].arm("forward" if moment == "world_change" else moment)
    job.workers[2].arm(moment)
    job.wait_for_world(2)
    assert sorted(job.finish()) == [-9, -9, 0, 0], job.report()
    survivors = [worker for worker in job.workers if worker.exit_code == 0]
    for worker in survivors:
        assert_in_order(worker)
        sizes = [world[0] for _, world in changes(worker)]
        assert sizes[sizes.index(4) :] in ([4, 2], [4, 3, 2])
    assert changes(survivors[0])[-1][1][2] == changes(survivors[1])[-1][1][2]


def test_loss_in_the_last_validation_is_reported_before_the_end(make_job: MakeJob) -> None:
    settings = ToySettings(num_rows=400, batch_size=8, max_epochs=1, step_s=0.03, num_val_rows=24)
    job = make_job(settings, script=train_with_hooks)
    job.grow_to(2)
    job.workers[1].arm("validation")
    assert job.finish() == [0, -9], job.report()
    [kept] = [worker for worker in job.workers if worker.exit_code == 0]
    assert [(former[0], world[0]) for former, world in changes(kept)] == [(1, 2), (2, 1)]
    kinds = [record["kind"] for record in kept.records() if record["kind"] in ("change", "train_end")]
    assert kinds == [*["change"] * 4, "train_end"]


def test_sigterm_is_a_notice_that_comes_once_before_the_worker_leaves(make_job: MakeJob) -> None:
    job = make_job(SETTINGS, script=train_with_hooks)
    job.grow_to(2)
    before = time.time()
    leaver = job.workers[1]
    leaver.terminate()
    leaver.terminate()
    job.wait_for_world(1)
    assert job.finish() == [0, 0], job.report()
    notices = leaver.records("notice")
    assert [call["by"] for call in notices] == ["callback", "module"]
    assert all(before + 29 < call["notice"] == call["seen"] < time.time() + 31 for call in notices)
    assert not job.workers[0].records("notice")
    assert [world[0] for _, world in changes(job.workers[0])] == [2, 1]
    assert [world[0] for _, world in changes(leaver)] == [2]  # it is no part of the world that follows


def test_announced_time_reaches_the_worker_that_will_be_taken_away(make_job: MakeJob, client: EtcdClient) -> None:
    job = make_job(SETTINGS, script=train_with_hooks)
    job.grow_to(2)
    keys, chosen = Keys(job.run_id), job.members[1]
    record = DrainRecord(chosen, "spot", once_replaced=True, source="test", taken_at=4e9)
    client.put(keys.drains + chosen, encode(record))
    leaver = job.workers[1]
    job.wait_until(lambda: len(leaver.records("notice")) == 2, "the notice")
    leaver.terminate()
    job.wait_for_world(1)
    assert job.finish() == [0, 0], job.report()
    assert [call["notice"] for call in leaver.records("notice")] == [4e9, 4e9]
    assert not job.workers[0].records("notice")


def test_error_in_a_hook_ends_the_job_with_its_text(make_job: MakeJob) -> None:
    job = make_job(SETTINGS, script=train_with_hooks)
    job.start()
    job.wait_for_step(3)
    job.start()
    for worker in job.workers:
        (worker.place.armed.with_suffix(".tmp")).write_text("hook_fails")
        worker.place.armed.with_suffix(".tmp").rename(worker.place.armed)
    assert job.finish() == [1, 1], job.report()
    assert all("ValueError: no place for 2 workers" in worker.output for worker in job.workers), job.report()


def test_collective_in_a_hook_is_refused_with_the_place_for_it(make_job: MakeJob) -> None:
    job = make_job(SETTINGS, script=train_with_hooks)
    job.grow_to(2)
    survivor = job.workers[0]
    survivor.place.armed.write_text("hook_saves")
    job.start()
    assert 1 in job.finish(), job.report()
    assert "on_world_change and on_notice run on each worker by itself" in survivor.output, job.report()
