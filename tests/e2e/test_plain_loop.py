"""`rdzv/` alone makes any PyTorch loop live-elastic."""

from __future__ import annotations

from collections.abc import Callable

from harness import Job
from plain_loop import PlainSettings, run_plain_loop

MakeJob = Callable[..., Job]


def assert_everyone_counted_the_same(job: Job, num_steps: int) -> None:
    states = {record["step"]: record["state"] for record in job.records("done")}
    assert sorted(states) == list(range(1, num_steps + 1))
    for record in job.records("done"):
        assert record["state"] == states[record["step"]], record
    # The sum over workers does not depend on how many they were.
    assert states[num_steps] == [float(num_steps), sum(step * 0.5 for step in range(num_steps))]


def test_a_plain_loop_grows_loses_a_worker_and_shrinks_without_a_wrong_count(make_job: MakeJob) -> None:
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
