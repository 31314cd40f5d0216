"""Jobs over the stand-in for NCCL."""

from __future__ import annotations

import pytest
from forked_jobs import MakeJob
from harness import Job, violations
from nccl_stand_in import Quirks
from plain_loop import PlainSettings, run_plain_loop
from stand_in_jobs import OverStandIn, run_over_stand_in
from test_plain_loop import assert_everyone_counted_the_same
from toy_job import ToySettings, train_toy


def test_plain_loop(make_job: MakeJob) -> None:
    settings = PlainSettings(backend="stand_in")
    job = make_job(OverStandIn(run_plain_loop, settings), script=run_over_stand_in)
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


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("moment", ["forward", "backward", "reduced", "zero_grad"])
def test_toy(make_job: MakeJob, is_late: bool, moment: str) -> None:
    settings = ToySettings(
        max_epochs=8, step_s=0.03, ddp={"process_group_backend": "stand_in", "gradient_as_bucket_view": is_late}
    )
    job = make_job(OverStandIn(train_toy, settings, Quirks(is_late=is_late)), script=run_over_stand_in)
    job.start()
    job.wait_for_step(3)
    second, third = job.start(), job.start()
    job.wait_for_world(3)
    second.arm(moment)
    job.wait_for_world(2)
    third.kill()
    job.wait_for_world(1)
    job.start()
    job.wait_for_world(2)
    assert job.finish() == [0, -9, -9, 0]
    assert violations(job, settings) == []
