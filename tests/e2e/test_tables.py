"""Models with sharded tables are resized and lose workers like any other, and end as if undisturbed.

A spread of cases by default; DLROVER_ALL_FAULTS=1 in the environment tests all of them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.membership.member import EXIT_ALL_DRAINED
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Worker
from tests.support.dlrover_process import Dlrover

pytest.importorskip("torchrec", reason="sharded tables need torchrec")
import torch

from tests.e2e.table_job import (
    KINDS,
    TableSettings,
    train_stock,
    train_tables,
    train_tables_then_another_model,
    train_tables_twice,
)
from tests.e2e.table_verdict import assembled, judge, lose_shared_memory_of, shared_memory_of, steps_that_count, undisturbed

T = TypeVar("T")

SETTINGS = TableSettings(num_rows=112, step_s=0.13)  # few steps, slow enough for several changes on a busy machine
FEW_STEPS = 8
"""More steps than jobs make, slow as they are, in three intervals of snapshots."""
LEASE_TTL_S = 3
"""Seconds for which the workers of a job that was killed as a whole keep the next ones waiting."""
ALL = bool(os.environ.get("DLROVER_ALL_FAULTS"))


def some(cases: Sequence[T], step: int) -> Sequence[T]:
    """Return all cases in a full run, else every second of every `step`-th."""
    return cases if ALL else cases[:: 2 * step]


VALIDATING = replace(SETTINGS, num_val_rows=21, val_every=5)


@pytest.fixture
def new_job(make_job: MakeJob) -> Iterator[MakeJob]:
    """Make jobs of `train_tables`, and remove their shared memory however they end."""
    jobs: list[Job] = []

    def make(settings: TableSettings = SETTINGS, **kwargs: Any) -> Job:
        jobs.append(make_job(settings, **{"script": train_tables, **kwargs}))
        return jobs[-1]

    yield make
    for job in jobs:
        job.__exit__()
        lose_shared_memory_of(job)


def started(job: Job, workers: int) -> list[Worker]:
    """Start `workers` workers, which join one after the other."""
    job.grow_to(workers, after_step=1)
    return list(job.workers)


def wait_for_snapshot(job: Job, count: int = 1) -> None:
    """Wait until `count` further snapshots count."""
    newest = max(((r["round"], r["batch"]) for r in job.records("counted")), default=(0, 0))
    job.wait_until(
        lambda: len({found for r in job.records("counted") if (found := (r["round"], r["batch"])) > newest}) >= count,
        "a snapshot",
    )


def assert_fine(new_job: MakeJob, job: Job, settings: TableSettings, codes: list[int], rollbacks: int | None = 1) -> None:
    found = job.finish()
    assert found == codes, job.report()
    if rollbacks is not None:
        assert len(job.events("rollback")) == rollbacks, f"{job.events('round')}\n{job.report()}"
    assert judge(job, settings, undisturbed(new_job, settings)) == [], job.report()
    assert not shared_memory_of(job)


def assert_fine_after_changes(new_job: MakeJob, settings: TableSettings) -> None:
    """Run a job of three workers that loses rank 0 in a planned change and another one to SIGKILL."""
    job = new_job(settings)
    first, second, _ = started(job, 3)
    first.terminate()  # rank 0
    job.wait_for_world(2)
    wait_for_snapshot(job)
    second.kill()
    job.wait_for_world(1)
    assert_fine(new_job, job, settings, [0, -9, 0])


# --- growing tables ---------------------------------------------------------------------------------------------------------

GROWING = replace(SETTINGS, kinds=("growing", "growing", "row_wise"))
ONLY_GROWING = replace(SETTINGS, kinds=("growing", "growing"))


@pytest.mark.parametrize("settings", [GROWING, ONLY_GROWING], ids=["mixed", "only"])
def test_growing_tables_match_an_undisturbed_run_while_workers_come_and_go(new_job: MakeJob, settings: TableSettings) -> None:
    assert_fine_after_changes(new_job, settings)


def test_growing_tables_of_a_checkpoint_are_read_by_another_number_of_workers(new_job: MakeJob) -> None:
    settings = replace(GROWING, save_at=9)
    job = new_job(settings)
    started(job, 2)
    assert job.finish() == [0, 0], job.report()
    resuming = replace(settings, ckpt_path=str(job.folder / "checkpoint"), save_at=None)
    resumed = new_job(resuming, min_workers=3)
    resumed.start_all(3)
    assert resumed.finish() == [0, 0, 0], resumed.report()
    assert judge(resumed, resuming, undisturbed(new_job, settings), after=9, read_at=9) == [], resumed.report()


# --- planned changes ----------------------------------------------------------------------------------------------------------


def test_each_step_matches_an_undisturbed_run_while_workers_come_and_go(new_job: MakeJob) -> None:
    job = new_job()
    first, second, _ = started(job, 3)
    first.terminate()  # rank 0
    job.wait_for_world(2)
    second.terminate()
    job.wait_for_world(1)
    assert_fine(new_job, job, SETTINGS, [0, 0, 0], rollbacks=0)


def test_tables_follow_the_users_optimizer_across_changes(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, users_optimizer=True)
    assert_fine_after_changes(new_job, settings)


@pytest.mark.parametrize("world", some([2, 1], 2))
def test_a_worker_is_replaced(new_job: MakeJob, world: int) -> None:
    job = new_job()
    workers = started(job, world)
    joiner = job.start()
    job.wait_until(lambda: joiner.records("fit_start"), "the joiner to start")
    workers[0].terminate()
    job.wait_until(lambda: joiner.records("done"), "the joiner to train")
    assert workers[0].wait() == 0
    assert_fine(new_job, job, SETTINGS, [0] * (world + 1), rollbacks=0)


OTHER_TABLES = {
    "row_wise": replace(SETTINGS, kinds=("row_wise", "row_wise", "row_wise")),  # one table has 7 rows
    "table_wise": replace(SETTINGS, kinds=("table_wise",) * 4),
    "column_wise": replace(SETTINGS, kinds=("column_wise",) * 3),
    "table_row_wise": replace(SETTINGS, kinds=("table_row_wise", "row_wise", "table_wise")),
    "table_column_wise": replace(SETTINGS, kinds=("table_column_wise", "column_wise")),
    "data_parallel": replace(SETTINGS, kinds=("data_parallel", "data_parallel")),
    "one_table": replace(SETTINGS, kinds=("table_wise",)),  # most workers hold no rows
    "collection": replace(SETTINGS, kinds=("row_wise", "table_wise", "column_wise"), is_bag=False),
    "manual": replace(SETTINGS, manual=True),
    "uneven": replace(SETTINGS, num_rows=93, batch_size=7),  # shares differ, and the last batch has two samples
}


@pytest.mark.parametrize("name", some(list(OTHER_TABLES), 4))
def test_other_models_grow_shrink_and_survive_a_kill(new_job: MakeJob, name: str) -> None:
    settings = OTHER_TABLES[name]
    job = new_job(settings)
    workers = started(job, 3)
    workers[0].terminate()
    job.wait_for_world(2)
    wait_for_snapshot(job)
    workers[2].kill()
    job.wait_for_world(1)
    assert_fine(new_job, job, settings, [0, 0, -9])


def test_a_worker_that_holds_no_table_leaves_like_any_other(new_job: MakeJob) -> None:
    settings = OTHER_TABLES["one_table"]
    job = new_job(settings)
    _, second = started(job, 2)  # the table stays with the first worker
    second.terminate()
    job.wait_for_world(1)
    assert_fine(new_job, job, settings, [0, 0], rollbacks=0)


# --- kills --------------------------------------------------------------------------------------------------------------------


def test_killed_worker_costs_only_the_steps_since_the_last_snapshot(new_job: MakeJob) -> None:
    job = new_job()
    workers = started(job, 3)
    wait_for_snapshot(job)
    pids = {w.pid for w in workers[1:]}
    killed_at = job.step
    workers[0].kill()
    job.wait_for_world(2)
    assert_fine(new_job, job, SETTINGS, [-9, 0, 0])
    assert {r["pid"] for rs in steps_that_count(job).values() for r in rs if r["step"] > killed_at} == pids
    (event,) = job.events("rollback")
    assert killed_at - FEW_STEPS < event.data["batch"] <= killed_at + 2


MOMENTS = ("forward", "backward", "reduced", "zero_grad", "batch_end")


@pytest.mark.parametrize("manual, moment", some(list(product([False, True], MOMENTS)), 4))
def test_a_worker_is_killed_in_a_step(new_job: MakeJob, manual: bool, moment: str) -> None:
    settings = replace(SETTINGS, manual=manual)
    job = new_job(settings)
    workers = started(job, 2)
    wait_for_snapshot(job)
    workers[MOMENTS.index(moment) % 2].arm(moment)
    job.wait_for_world(1)
    assert_fine(new_job, job, settings, [-9, 0] if MOMENTS.index(moment) % 2 == 0 else [0, -9])


@pytest.mark.parametrize(
    "moment", some(["copying", "commit", "replicate", "swap0", "swap1", "swap2", "swap3", "commit_copy", "take_done"], 4)
)
def test_snapshot_before_a_kill_in_mid_snapshot_counts(new_job: MakeJob, moment: str) -> None:
    job = new_job()
    workers = started(job, 3)
    wait_for_snapshot(job)
    workers[1].arm(moment)
    job.wait_for_world(2)
    assert_fine(new_job, job, SETTINGS, [0, -9, 0])
    assert workers[1].records("killed")


@pytest.mark.parametrize("moment, victim", some(list(product(["reshard", "exchange", "reshard_done", "enter"], [0, 1, 2])), 5))
def test_a_worker_is_killed_while_another_joins(new_job: MakeJob, moment: str, victim: int) -> None:
    job = new_job()
    started(job, 2)
    wait_for_snapshot(job)
    job.start()
    job.workers[victim].arm(moment)
    job.wait_until(lambda: job.workers[victim].records("killed"), "the kill")
    job.wait_for_world(2)
    assert_fine(new_job, job, SETTINGS, [-9 if i == victim else 0 for i in range(3)])


@pytest.mark.parametrize("moment", some(["exchange", "hand_over", "hand_over_done"], 3))
def test_a_leaver_is_killed_while_it_hands_over(new_job: MakeJob, moment: str) -> None:
    job = new_job()
    workers = started(job, 3)
    wait_for_snapshot(job)
    workers[0].arm(moment)
    workers[0].terminate()
    job.wait_until(lambda: workers[0].records("killed"), "the kill")
    killed_at = time.monotonic()
    job.wait_for_world(2)
    assert time.monotonic() - killed_at < 20, job.report()  # its lease lasts 30 s
    assert_fine(new_job, job, SETTINGS, [-9, 0, 0], rollbacks=None if moment == "hand_over_done" else 1)


@pytest.mark.parametrize("moment", some(["hand_over", "exchange"], 2))
def test_a_survivor_is_killed_while_another_worker_hands_over(new_job: MakeJob, moment: str) -> None:
    job = new_job()
    workers = started(job, 3)
    wait_for_snapshot(job)
    workers[2].arm("exchange" if moment == "exchange" else "reshard")
    workers[1].terminate()
    job.wait_until(lambda: workers[2].records("killed"), "the kill")
    job.wait_for_world(1)
    assert_fine(new_job, job, SETTINGS, [0, 0, -9])


def test_two_lost_workers_do_no_harm_with_two_copies(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, replicas=2)
    job = new_job(settings)
    workers = started(job, 4)
    wait_for_snapshot(job)
    workers[0].kill()
    workers[1].kill()
    job.wait_for_world(2)
    assert_fine(new_job, job, settings, [-9, -9, 0, 0], rollbacks=None)


@pytest.mark.parametrize(
    "moment", some(["roll_back", "exchange", "roll_back_done", "enter", "take", "replicate", "forward"], 4)
)
def test_a_second_worker_is_killed_in_the_recovery_from_the_first(new_job: MakeJob, moment: str) -> None:
    settings = replace(SETTINGS, replicas=2)
    job = new_job(settings)
    workers = started(job, 3)
    wait_for_snapshot(job)
    workers[0].kill()
    workers[1].arm(moment)
    job.wait_for_world(1)
    assert_fine(new_job, job, settings, [-9, -9, 0], rollbacks=None)
    assert workers[1].records("killed")


def test_a_worker_is_killed_and_another_one_comes_at_the_same_time(new_job: MakeJob) -> None:
    job = new_job()
    workers = started(job, 2)
    wait_for_snapshot(job)
    joiner = job.start()
    job.wait_until(lambda: joiner.records("fit_start"), "the joiner to start")
    workers[0].kill()
    job.wait_until(lambda: joiner.records("done"), "the joiner to train")
    assert_fine(new_job, job, SETTINGS, [-9, 0, 0])


@pytest.mark.on_demand
def test_workers_are_killed_one_after_the_other_and_replaced(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, max_epochs=5)
    job = new_job(settings)
    started(job, 2)
    for _ in range(3):
        wait_for_snapshot(job)
        victim = next(w for w in job.workers if w.exit_code is None)
        victim.kill()
        joiner = job.start()
        job.wait_until(lambda joiner=joiner: joiner.records("done"), "the joiner to train")  # type: ignore[misc]
        job.wait_for_world(2)
    assert_fine(new_job, job, settings, [-9, -9, -9, 0, 0], rollbacks=None)


@pytest.mark.parametrize("moment", ["save", "save_done"])
def test_checkpoint_is_saved_again_after_a_kill_in_mid_save(new_job: MakeJob, moment: str) -> None:
    settings = replace(SETTINGS, save_at=23)
    job = new_job(settings)
    workers = started(job, 2)
    wait_for_snapshot(job)
    workers[1].arm(moment)
    assert_fine(new_job, job, settings, [0, -9])
    assert workers[1].records("killed")
    assert sorted(path.name for path in (job.folder / "checkpoint").iterdir()) == ["tables", "trainer.ckpt"]
    assert {path.name for path in job.folder.glob(".checkpoint*")} == set()


def test_stopped_worker_is_evicted_and_others_return_to_the_snapshot(new_job: MakeJob) -> None:
    job = new_job(lease_ttl_s=2)
    workers = started(job, 3)
    wait_for_snapshot(job)
    workers[1].stop()
    job.wait_for_world(2)
    workers[1].go_on()
    assert workers[1].wait() != 0  # an agent would start it again
    workers[1].doomed = True
    codes = job.finish()
    assert (codes[0], codes[2]) == (0, 0), job.report()
    assert len(job.events("rollback")) == 1
    assert judge(job, SETTINGS, undisturbed(new_job, SETTINGS)) == []
    assert not shared_memory_of(job)


# --- validation ---------------------------------------------------------------------------------------------------------------


def test_validation_inside_epochs_sees_the_tables_of_the_undisturbed_run(new_job: MakeJob) -> None:
    job = new_job(VALIDATING)
    workers = started(job, 3)
    workers[1].terminate()
    job.wait_for_world(2)
    assert_fine(new_job, job, VALIDATING, [0, 0, 0], rollbacks=0)


@pytest.mark.parametrize("victim", some([0, 1], 2))
def test_a_worker_is_killed_in_validation(new_job: MakeJob, victim: int) -> None:
    job = new_job(VALIDATING)
    workers = started(job, 2)
    wait_for_snapshot(job)
    workers[victim].arm("validation")
    job.wait_for_world(1)
    assert_fine(new_job, job, VALIDATING, [-9 if i == victim else 0 for i in range(2)])
    assert workers[victim].records("killed")


@pytest.mark.parametrize("victim", some([1, 0], 2))
def test_a_worker_is_killed_in_the_validation_at_the_end_of_an_epoch(new_job: MakeJob, victim: int) -> None:
    settings = replace(SETTINGS, num_val_rows=21)
    job = new_job(settings)
    workers = started(job, 2)
    wait_for_snapshot(job)
    workers[victim].arm("validation")
    with job.at_full_speed():
        job.wait_for_world(1)
    assert_fine(new_job, job, settings, [-9 if i == victim else 0 for i in range(2)])


# --- no snapshot --------------------------------------------------------------------------------------------------------------


def test_survivors_without_a_complete_snapshot_end_with_the_next_move(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, snapshot_s=0.0)
    job = new_job(settings)
    workers = started(job, 3)
    workers[0].kill()
    codes = job.finish()
    assert codes[0] == -9
    assert codes[1] not in (0, -9), job.report()
    assert codes[2] not in (0, -9), job.report()
    for worker in workers[1:]:
        assert "start again" in worker.output
        assert "checkpoint" in worker.output


@pytest.mark.parametrize("moment", some(["take", "copying", "commit"], 3))
def test_kill_before_the_first_snapshot_ends_all_with_the_next_move(new_job: MakeJob, moment: str) -> None:
    job = new_job(min_workers=2)
    workers = [job.start(), job.start()]
    workers[0].arm(moment)
    job.wait_until(lambda: workers[0].records("killed"), "the kill")
    workers.append(job.start())  # fewer than two workers form no round
    assert workers[1].wait() not in (0, -9)
    assert "start again" in workers[1].output
    workers.append(job.start())  # an agent would restart it, too
    job.finish()
    last = [w for w in workers[2:] if w.exit_code == 0]
    assert last, job.report()
    assert judge(job, SETTINGS, undisturbed(new_job, SETTINGS)) == [], job.report()


def test_snapshots_over_the_memory_limit_are_left_out_with_a_warning(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, max_bytes=1 << 10)
    job = new_job(settings)
    workers = started(job, 2)
    job.wait_until(lambda: all("a snapshot failed" in worker.output for worker in workers), "the warnings")
    assert_fine(new_job, job, settings, [0, 0], rollbacks=0)
    for worker in workers:
        assert "max_bytes" in worker.output


# --- starting again -----------------------------------------------------------------------------------------------------------


def kill_all(job: Job) -> int:
    """Kill all workers; return the newest completed step."""
    for worker in job.workers:
        worker.kill()
    for worker in job.workers:
        worker.wait()
    return job.step


@pytest.mark.parametrize("before, after", some(list(product([1, 2, 3], [1, 2, 3])), 5))
def test_a_job_killed_as_a_whole_goes_on_from_shared_memory(new_job: MakeJob, before: int, after: int) -> None:
    job = new_job(replace(SETTINGS, apart=False), lease_ttl_s=LEASE_TTL_S)
    started(job, before)
    wait_for_snapshot(job)
    reached = kill_all(job)
    old_round = job.round_number
    again = [job.start() for _ in range(after)]
    codes = job.finish()
    assert codes == [-9] * before + [0] * after, job.report()
    redone = min(r["step"] for w in again for r in w.records("done"))
    assert reached - FEW_STEPS < redone <= reached + 1, f"redone from step {redone}, {reached} were done"
    assert min(r["round"] for w in again for r in w.records("done")) > old_round
    assert judge(job, SETTINGS, undisturbed(new_job, SETTINGS)) == [], job.report()
    assert not shared_memory_of(job)


@pytest.mark.parametrize("world", some([2, 1], 2))
def test_workers_all_asked_to_leave_do_so_at_once(new_job: MakeJob, world: int) -> None:
    job = new_job(replace(SETTINGS, apart=False), lease_ttl_s=LEASE_TTL_S)
    workers = started(job, world)
    wait_for_snapshot(job)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        assert worker.wait(20) in (0, 143)  # the exit code shows its agent that it did not finish
    reached = job.step
    again = job.start()
    codes = job.finish()
    assert codes[-1] == 0, job.report()
    assert reached - FEW_STEPS < min(r["step"] for r in again.records("done")) <= reached + 1
    assert judge(job, SETTINGS, undisturbed(new_job, SETTINGS)) == [], job.report()
    assert not shared_memory_of(job)


def test_loss_after_the_last_step_restarts_from_the_snapshot(new_job: MakeJob) -> None:
    job = new_job(replace(SETTINGS, apart=False), lease_ttl_s=LEASE_TTL_S)
    workers = started(job, 2)
    wait_for_snapshot(job)
    workers[1].arm("train_end")
    with job.at_full_speed():
        assert workers[0].wait() not in (0, -9), job.report()
    workers[0].doomed = True
    assert "start again" in workers[0].output
    job.start()
    assert job.finish()[1:] == [-9, 0], job.report()
    assert judge(job, SETTINGS, undisturbed(new_job, SETTINGS)) == [], job.report()
    assert not shared_memory_of(job)


def test_job_without_shared_memory_resumes_from_the_newest_checkpoint(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, save_at=9)
    job = new_job(settings, lease_ttl_s=LEASE_TTL_S)
    started(job, 2)
    job.wait_for_step(12)
    kill_all(job)
    lose_shared_memory_of(job)
    again = [job.start() for _ in range(3)]
    codes = job.finish()
    assert codes == [-9, -9, 0, 0, 0], job.report()
    assert min(r["step"] for w in again for r in w.records("done")) == 10
    assert judge(job, settings, undisturbed(new_job, settings), read_at=9) == [], job.report()


def test_loss_of_all_copies_returns_the_job_to_its_checkpoint(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, save_at=9, replicas=0)
    job = new_job(settings)
    started(job, 2)
    job.wait_for_step(12)
    job.workers[1].kill()  # looks to the other worker like the loss of the whole host
    assert job.workers[0].wait() not in (0, -9)
    assert "start again" in job.workers[0].output
    again = [job.start(), job.start()]  # restarts, as agents would make
    codes = job.finish()
    assert codes[2:] == [0, 0], job.report()
    assert min(r["step"] for w in again for r in w.records("done")) == 10
    assert judge(job, settings, undisturbed(new_job, settings), read_at=9) == [], job.report()
    assert any("cannot be used: no worker holds the parts of" in event.text for event in job.events("snapshot"))


def test_job_without_shared_memory_resumes_from_the_snapshot_on_disk(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, on_disk=True)
    job = new_job(settings, lease_ttl_s=LEASE_TTL_S)
    started(job, 2)
    disk = job.folder / "disk"
    since = job.step
    job.wait_until(lambda: job.step > since + 5 and len(list(disk.glob("*/*/*-0"))) >= 4, "two parts of two snapshots on disk")
    kill_all(job)
    lose_shared_memory_of(job)
    again = [job.start() for _ in range(3)]
    codes = job.finish()
    assert codes == [-9, -9, 0, 0, 0], job.report()
    assert min(r["step"] for w in again for r in w.records("done")) > 1
    assert judge(job, settings, undisturbed(new_job, SETTINGS)) == [], job.report()
    assert not list(disk.glob("*/*"))  # a finished job removes its snapshots


def test_a_checkpoint_that_is_newer_than_the_snapshot_is_preferred(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, save_at=11, snapshot_s=1000.0, apart=False)  # one snapshot, at the beginning of each round
    job = new_job(settings, lease_ttl_s=LEASE_TTL_S)
    started(job, 2)
    job.wait_for_step(14)
    kill_all(job)
    again = [job.start(), job.start()]
    codes = job.finish()
    assert codes == [-9, -9, 0, 0], job.report()
    assert min(r["step"] for w in again for r in w.records("done")) == 12
    assert judge(job, settings, undisturbed(new_job, settings), read_at=11) == [], job.report()


def test_loss_with_an_old_snapshot_leads_on_from_a_newer_checkpoint(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, snapshot_s=1000.0, save_at=9, stale_s=0.5)  # one snapshot, at the beginning of each round
    job = new_job(settings, lease_ttl_s=LEASE_TTL_S)
    workers = started(job, 2)
    wait_for_snapshot(job)
    job.wait_for_step(11)
    workers[1].kill()
    assert workers[0].wait() not in (0, -9), job.report()
    workers[0].doomed = True
    assert "checkpoint of step 9 is newer" in workers[0].output
    again = job.start()
    assert job.finish()[1:] == [-9, 0], job.report()
    assert min(r["step"] for r in again.records("done")) == 10
    assert judge(job, settings, undisturbed(new_job, settings), read_at=9) == [], job.report()


def test_newer_checkpoint_of_the_user_is_preferred_to_the_snapshot(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, snapshot_s=1000.0, apart=False)  # one snapshot, at the beginning of each round
    donor = new_job(replace(settings, save_at=11), lease_ttl_s=LEASE_TTL_S)
    started(donor, 1)
    donor.wait_until(lambda: (donor.folder / "checkpoint").exists(), "the checkpoint")
    donor.wait_for_step(12)
    kill_all(donor)
    job = new_job(settings, lease_ttl_s=LEASE_TTL_S)
    started(job, 2)
    wait_for_snapshot(job)
    kill_all(job)
    resuming = replace(settings, ckpt_path=str(donor.folder / "checkpoint"))
    again = [job.start(settings=resuming), job.start(settings=resuming)]
    codes = job.finish()
    assert codes == [-9, -9, 0, 0], job.report()
    assert min(r["step"] for w in again for r in w.records("done")) == 12


def test_older_checkpoint_that_the_user_chooses_is_preferred_to_all_that_is_newer(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, save_at=6, apart=False)
    job = new_job(settings, lease_ttl_s=LEASE_TTL_S)
    started(job, 2)
    job.wait_for_step(12)
    kill_all(job)
    chosen = f"{job.folder}/chosen"
    shutil.copytree(job.folder / "checkpoint", chosen)
    resuming = replace(settings, ckpt_path=chosen, save_at=None)
    again = [job.start(settings=resuming), job.start(settings=resuming)]
    job.wait_until(lambda: any(r["step"] > 12 for r in again[0].records("done")), "steps after the chosen checkpoint")
    kill_all(job)
    assert min(r["step"] for w in again for r in w.records("done")) == 7
    third = [job.start(settings=resuming), job.start(settings=resuming)]  # the same choice as before
    codes = job.finish()
    assert codes == [-9, -9, -9, -9, 0, 0], job.report()
    assert min(r["step"] for w in third for r in w.records("done")) > 7


@pytest.mark.parametrize(
    "before, after, kinds",
    some(
        [(*w, k) for w in [(1, 3), (3, 1), (2, 2), (3, 2)] for k in [KINDS, ("column_wise", "table_column_wise", "row_wise")]],
        3,
    ),
)
def test_a_checkpoint_is_read_by_another_number_of_workers_bit_for_bit(
    new_job: MakeJob, before: int, after: int, kinds: tuple[str, ...]
) -> None:
    settings = replace(SETTINGS, save_at=6, kinds=kinds)
    job = new_job(settings, min_workers=before)
    job.start_all(before)
    job.wait_until(lambda: (job.folder / "checkpoint").exists(), "the checkpoint")
    job.wait_for_step(7)
    kill_all(job)
    resuming = replace(settings, ckpt_path=str(job.folder / "checkpoint"), save_at=None)
    other = new_job(resuming, min_workers=after)
    for _ in range(after):
        other.start()
    assert other.finish() == [0] * after, other.report()
    saved, loaded = assembled(job, "saved", settings), assembled(other, "loaded", settings)
    assert saved.keys() == loaded.keys()
    for name, values in saved.items():
        assert not values.isnan().any(), name
        assert torch.equal(values, loaded[name]), name
    assert judge(other, resuming, undisturbed(new_job, settings), after=6) == [], other.report()


def test_a_worker_joins_a_job_that_began_with_a_checkpoint_of_tables(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, save_at=9)
    job = new_job(settings)
    started(job, 2)
    assert job.finish() == [0, 0], job.report()
    resuming = replace(settings, ckpt_path=str(job.folder / "checkpoint"), save_at=None)
    resumed = new_job(resuming)
    started(resumed, 2)
    assert resumed.finish() == [0, 0], resumed.report()
    assert judge(resumed, resuming, undisturbed(new_job, settings), after=9, read_at=9) == [], resumed.report()


def test_checkpoint_of_stock_lightning_trains_on_as_there_while_workers_come_and_go(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, users_optimizer=True)
    stock = new_job(replace(settings, step_s=0.0), script=train_stock)
    stock.start()
    assert stock.finish() == [0], stock.report()
    resuming = replace(settings, ckpt_path=str(stock.folder / "stock.ckpt"))
    job = new_job(resuming, min_workers=2)
    workers = [job.start(), job.start()]
    job.wait_for_step(settings.batches_per_epoch + 1)
    job.start()
    job.wait_for_world(3)
    wait_for_snapshot(job)
    workers[1].kill()
    job.wait_for_world(2)
    assert job.finish() == [0, -9, 0], job.report()
    assert min(r["step"] for r in job.records("done")) == settings.batches_per_epoch + 1
    saved = torch.load(stock.folder / "stock.ckpt", weights_only=True)["state_dict"]
    loaded, found = assembled(job, "loaded", settings), assembled(job, "end", settings)
    for i in range(len(settings.kinds)):
        assert torch.equal(loaded[f"tables.t{i}.weight"], saved[f"tables.embedding_bags.t{i}.weight"])
        expected = torch.load(stock.folder / "end.pt", weights_only=True)[f"tables.embedding_bags.t{i}.weight"]
        assert torch.allclose(found[f"tables.t{i}.weight"], expected, rtol=0.01, atol=1e-3), i


def test_job_whose_last_fit_has_no_tables_leaves_no_snapshot(new_job: MakeJob) -> None:
    job = new_job(replace(SETTINGS, max_epochs=1), script=train_tables_then_another_model)
    job.start()
    wait_for_snapshot(job)
    assert job.finish() == [0], job.report()
    assert job.records("after_second_fit")
    assert not shared_memory_of(job)


def test_loss_in_a_later_fit_leads_back_to_a_snapshot_of_that_fit(new_job: MakeJob) -> None:
    settings = replace(SETTINGS, num_rows=240, max_epochs=1)
    job = new_job(settings, script=train_tables_twice)
    lost, survivor = job.start(), job.start()
    job.wait_for_world(2)
    wait_for_snapshot(job)
    with job.at_full_speed():
        job.wait_until(lambda: survivor.records("after_fit"), "the end of the first fit")

    def counted_in_second() -> list[int]:
        records = survivor.records()
        ends = [i for i, record in enumerate(records) if record["kind"] == "after_fit"]
        return [r["batch"] for r in records[ends[0] :] if r["kind"] == "counted"] if ends else []

    job.wait_until(lambda: len(counted_in_second()) >= 2, "snapshots of the second fit")
    newest = counted_in_second()[-1]
    lost.kill()
    job.wait_until(lambda: survivor.records("done")[-1]["world"] == 1, "a step of the survivor alone")
    assert job.finish() == [-9, 0], job.report()
    (event,) = job.events("rollback")
    assert newest <= event.data["batch"] < settings.num_steps * 0.75  # the first fit's newest snapshots are from its end
    assert len(job.records("after_second_fit")) == 1
    assert not shared_memory_of(job)


@pytest.mark.parametrize("num_first", [1, 2])
def test_collective_in_save_hook_refuses_joiners_of_tables_in_words(num_first: int, new_job: MakeJob) -> None:
    settings = replace(SETTINGS, saves_together=True)
    job = new_job(settings, min_workers=num_first)
    first = [job.start() for _ in range(num_first)]
    job.wait_for_step(5)
    joiner = job.start()
    assert joiner.wait() == 1, job.report()
    assert "in on_save_checkpoint" in joiner.output
    assert "with sharded tables only one worker captures the state for a joiner" in joiner.output
    job.finish()
    assert [worker.exit_code for worker in first] == [0] * num_first, job.report()
    assert job.step == settings.num_steps


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_snapshots_of_a_stopped_job_stay_unless_it_was_cancelled(
    is_cancelled: bool, new_job: MakeJob, dlrover: Dlrover, etcd: EmbeddedEtcd
) -> None:
    job = new_job(replace(SETTINGS, max_epochs=100, apart=False, on_disk=True))
    started(job, 2)
    wait_for_snapshot(job, 2)
    job.wait_until(lambda: [*(job.folder / "disk").glob("*/*/*")], "a snapshot on disk")
    if is_cancelled:
        done = dlrover("cancel", job.run_id, "--endpoint", etcd.endpoint)
        assert done.returncode == 0, done.stderr
    else:
        job.drain()
    assert {*job.finish()} <= {0, EXIT_ALL_DRAINED}, job.report()  # 0: another one still trained
    assert bool(shared_memory_of(job)) != is_cancelled
    assert bool([*(job.folder / "disk").glob("*")]) != is_cancelled


# --- shares by speed ----------------------------------------------------------------------------------------------------------

SLOW = replace(SETTINGS, num_rows=960, batch_size=24, step_s=0.02, slow="w1")
WITH_SLOW_WORKER = {
    "each_kind": SLOW,
    "shared_rows": replace(SLOW, kinds=("table_row_wise", "row_wise", "table_wise")),
    "collection": replace(SLOW, kinds=("row_wise", "table_wise", "column_wise"), is_bag=False),
    "manual": replace(SLOW, manual=True),
}


@pytest.mark.parametrize("name", WITH_SLOW_WORKER)
def test_slow_worker_of_tables_gets_fewer_samples(name: str, new_job: MakeJob) -> None:
    settings = WITH_SLOW_WORKER[name]
    job = new_job(settings)
    workers = [job.start() for _ in range(3)]
    job.wait_for_world(3)
    event = job.wait_until(lambda: next(iter(job.events("shares")), None), "shares by speed")
    assert min(event.data["samples"]) < 7
    job.wait_for_step(job.step + 10)
    number = job.round_number
    workers[2].kill()
    job.wait_until(lambda: any(e.data["round"] > number for e in job.events("shares")), "shares after the rollback")
    job.wait_for_step(job.step + 5)
    assert_fine(new_job, job, settings, [0, 0, -9])
