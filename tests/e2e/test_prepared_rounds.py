"""Rounds whose communicators take a second: they are made while the former round trains, and members are lost during that."""

from __future__ import annotations

import signal

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.stand_in_jobs import OverStandIn, run_over_stand_in
from tests.e2e.toy_job import ToySettings, train_toy
from tests.support.nccl_stand_in import Quirks

CREATE_S = 1.0

SETTINGS = ToySettings(max_epochs=10, step_s=0.08, ddp={"process_group_backend": "stand_in"})


def start(make_job: MakeJob, size: int) -> Job:
    job = make_job(OverStandIn(train_toy, SETTINGS, Quirks(create_s=CREATE_S)), script=run_over_stand_in)
    job.start_all(size)
    job.wait_for_world(size)
    return job


def prepare_another(job: Job) -> None:
    """Start a worker, and wait until a round with it is planned; that cannot begin before its communicators are there."""
    number = job.round_number
    job.start()
    job.wait_until(lambda: job.round_number > number and len(job.members) == 3, "a further round of three")


def test_planned_changes_do_not_wait_for_communicators(make_job: MakeJob) -> None:
    job = start(make_job, 1)
    job.start()
    job.wait_for_world(2)
    prepare_another(job)
    job.workers[0].terminate()  # rank 0 leaves after a round with it has formed
    job.wait_for_world(2)
    assert job.finish() == [0, 0, 0]
    assert violations(job, SETTINGS) == []
    pauses = [float(event.text.split()[2]) for event in job.events("stall")]
    assert len(pauses) >= 2
    assert max(pauses) < CREATE_S / 2, pauses


def test_members_of_rounds_in_preparation_may_be_lost(make_job: MakeJob) -> None:
    job = start(make_job, 2)
    prepare_another(job)
    job.workers[2].kill()  # the joiner
    prepare_another(job)
    job.workers[0].kill()  # rank 0, which serves the former round
    prepare_another(job)
    job.wait_for_world(3)
    assert sorted(job.finish()) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0, 0]
    assert violations(job, SETTINGS) == []


def test_device_without_room_for_two_communicators_connects_after_the_switch(make_job: MakeJob) -> None:
    quirks = Quirks(cramped_rank=0)
    job = make_job(OverStandIn(train_toy, SETTINGS, quirks), script=run_over_stand_in)
    job.start_all(2)
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    job.workers[0].kill()
    job.wait_for_world(2)
    assert sorted(job.finish()) == [-signal.SIGKILL, 0, 0]
    assert violations(job, SETTINGS) == []
