"""Models with sharded tables are resized and lose workers like any other, and end as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Job

pytest.importorskip("torchrec", reason="sharded tables need torchrec")
from table_job import TableSettings, train_tables
from table_verdict import judge

MakeJob = Callable[..., Job]


def run_alone(make_job: MakeJob, settings: TableSettings) -> Job:
    job = make_job(settings, script=train_tables)
    job.start()
    assert job.finish() == [0]
    return job


def test_workers_join_and_leave_and_each_step_is_that_of_an_undisturbed_run(make_job: MakeJob) -> None:
    settings = TableSettings()
    reference = run_alone(make_job, settings)
    job = make_job(settings, script=train_tables)
    first = job.start()
    job.wait_for_step(2)
    second = job.start()
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    first.terminate()  # rank 0
    job.wait_for_world(2)
    second.terminate()
    job.wait_for_world(1)
    codes = job.finish()
    assert codes == [0, 0, 0], job.report()
    assert not job.events("rollback")
    assert judge(job, settings, reference) == []


def test_a_killed_worker_costs_the_steps_since_the_last_snapshot_and_nothing_else(make_job: MakeJob) -> None:
    settings = TableSettings()
    reference = run_alone(make_job, settings)
    job = make_job(settings, script=train_tables)
    workers = [job.start(), job.start()]
    job.wait_for_world(2)
    workers.append(job.start())
    job.wait_for_world(3)
    job.wait_for_step(job.step + 15)
    workers[0].kill()
    job.wait_for_world(2)
    codes = job.finish()
    assert codes == [-9, 0, 0], job.report()
    assert job.events("rollback")
    assert judge(job, settings, reference) == []
