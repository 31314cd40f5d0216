"""`World.steps` alone makes any PyTorch loop live-elastic."""

from __future__ import annotations

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job
from tests.e2e.plain_loop import PlainSettings, run_plain_loop


def assert_everyone_counted_the_same(job: Job, num_steps: int) -> None:
    states = {record["step"]: record["state"] for record in job.records("done")}
    assert sorted(states) == list(range(1, num_steps + 1))
    for record in job.records("done"):
        assert record["state"] == states[record["step"]], record
    assert [record for record in job.records("batches") if record["batches"] != record["step"]] == []
    # The sum over workers does not depend on their number.
    assert states[num_steps] == [float(num_steps), sum(step * 0.5 for step in range(num_steps))]


def test_plain_loop_grows_loses_a_worker_and_shrinks_with_right_counts(make_job: MakeJob) -> None:
    settings = PlainSettings()
    job = make_job(settings, script=run_plain_loop)
    job.start()
    job.wait_for_step(3)
    second, third = job.start(), job.start()
    job.wait_for_world(3)
    second.arm("forward")
    job.wait_for_world(2)
    third.kill()
    job.wait_for_world(1)
    job.start()
    job.wait_for_world(2)
    assert job.finish() == [0, -9, -9, 0]
    assert_everyone_counted_the_same(job, settings.num_steps)
    rounds, losses = job.events("round"), job.events("loss")
    assert [event.data["number"] for event in rounds] == list(range(1, len(rounds) + 1))
    assert sum(len(event.data["cause"]["joined"]) for event in rounds) == 4
    # One event each, with its detection. The next round records the same losses.
    lost = [event.data["worker_id"] for event in losses]
    assert len(lost) == len(set(lost)) == 2
    assert sorted(lost) == sorted(worker for event in rounds for worker in event.data["cause"]["lost"])
    assert all(event.data["evidence"] and 0 <= event.data["decided_s"] < 30 for event in losses)


@pytest.mark.parametrize("moment", ["reduced", "made"])
def test_loss_between_collectives_neither_skips_nor_repeats_a_step(make_job: MakeJob, moment: str) -> None:
    settings = PlainSettings()
    job = make_job(settings, script=run_plain_loop)
    job.start_all(2)
    third = job.start()
    job.wait_for_world(3)
    third.arm(moment)
    job.wait_for_world(2)
    assert job.finish() == [0, 0, -9]
    assert_everyone_counted_the_same(job, settings.num_steps)


def test_worker_with_sigterm_exits_0_and_runs_nothing_after_the_loop(make_job: MakeJob) -> None:
    settings = PlainSettings()
    job = make_job(settings, script=run_plain_loop)
    first = job.start()
    job.wait_for_step(3)
    second = job.start()
    job.wait_for_world(2)
    first.terminate()  # rank 0 hosts the store of the group
    job.wait_for_world(1)
    assert job.finish() == [0, 0]
    assert not first.records("after_loop")
    assert second.records("after_loop")
    assert_everyone_counted_the_same(job, settings.num_steps)


def test_loop_may_end_early_on_all_workers_and_joiners_learn_of_it(make_job: MakeJob) -> None:
    job = make_job(PlainSettings(num_steps=10_000, last_step=399), script=run_plain_loop)
    job.grow_to(2)
    assert job.finish() == [0, 0]
    assert_everyone_counted_the_same(job, 400)
