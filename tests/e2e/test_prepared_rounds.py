"""Rounds whose communicators take a second: they are made while the former round trains, and members are lost meanwhile."""

from __future__ import annotations

import signal

import pytest
from forked_jobs import MakeJob
from harness import Job, violations
from nccl_stand_in import Quirks
from stand_in_jobs import OverStandIn, run_over_stand_in
from toy_job import ToySettings, train_toy

CREATE_S = 1.0

SETTINGS = ToySettings(max_epochs=12, step_s=0.03, ddp={"process_group_backend": "stand_in"})


def start(make_job: MakeJob, size: int) -> Job:
    job = make_job(OverStandIn(train_toy, SETTINGS, Quirks(create_s=CREATE_S)), script=run_over_stand_in)
    for _ in range(size):
        job.start()
    job.wait_for_world(size)
    return job


def wait_for_plan(job: Job) -> None:
    """Wait until a further round is planned; it cannot begin before its communicators are there."""
    number = job.round_number
    job.wait_until(lambda: job.round_number > number, "a further round")


def test_planned_change_does_not_wait_for_communicators(make_job: MakeJob) -> None:
    job = start(make_job, 1)
    job.start()
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    job.workers[0].terminate()
    job.wait_for_world(2)
    assert job.finish() == [0, 0, 0]
    assert violations(job, SETTINGS) == []
    pauses = [float(event.text.split()[2]) for event in job.events("stall")]
    assert len(pauses) == 3
    assert max(pauses) < CREATE_S / 2, pauses


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_member_of_a_round_in_preparation_is_lost(make_job: MakeJob, victim: int) -> None:
    job = start(make_job, 2)
    job.start()
    wait_for_plan(job)
    job.workers[victim].kill()
    job.start()
    job.wait_for_world(3)
    assert sorted(job.finish()) == [-signal.SIGKILL, 0, 0, 0]
    assert violations(job, SETTINGS) == []


def test_worker_leaves_a_round_in_preparation(make_job: MakeJob) -> None:
    job = start(make_job, 2)
    job.start()
    wait_for_plan(job)
    job.workers[0].terminate()
    assert job.workers[0].wait() == 0
    assert job.finish() == [0, 0, 0]
    assert violations(job, SETTINGS) == []
