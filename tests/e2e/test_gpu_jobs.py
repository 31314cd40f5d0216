"""GPU workers join, leave and are lost. All share one GPU, which gloo allows and NCCL does not."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.gpu_jobs import DeviceSettings, train_on_device
from tests.e2e.harness import violations

DEVICES = [("cpu", "cpu"), pytest.param("gpu", "cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("accelerator, device", DEVICES)
def test_workers_of_one_device_survive_changes(accelerator: str, device: str, make_job: MakeJob) -> None:
    settings = DeviceSettings(num_rows=2400, max_epochs=1, accelerator=accelerator, step_s=0.02)
    with make_job(settings, script=train_on_device) as job:
        first, second = job.start(), job.start()
        job.wait_for_world(2)
        job.start()
        job.wait_for_world(3)
        first.terminate()  # rank 0 hands over
        job.wait_for_world(2)
        second.arm("backward")
        assert second.wait() == -signal.SIGKILL
        assert job.finish() == [0, -signal.SIGKILL, 0], job.report()
        assert violations(job, settings) == [], job.report()
        found = job.records("device")
        assert {kind for record in found for kind in record["kinds"]} == {device}
        survivor = job.workers[2].records("device")
        in_last_round = [r["taken"] for r in survivor if r["round"] == survivor[-1]["round"]]
        before = [r["taken"] for r in survivor if r["round"] < survivor[-1]["round"]]
        # The first step of the next round must free the memory of the old group, such as its gradient buckets.
        assert min(in_last_round[1:]) <= max(before)
