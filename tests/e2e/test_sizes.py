"""`dlrover run --sizes`: real nodes of a job that may request 1, 2 or 4 workers."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import PlanRecord
from lightning_dlrover.report.status import JOB_FILE, connect, read_job_file
from tests.e2e.test_dlrover_run import wait_for_workers
from tests.support.dlrover_process import Dlrover, Run

LOOP = Path(__file__).with_name("tiny_loop.py")


def write_plan(run: Run, num_workers: int) -> None:
    """Request a number of workers as a program that knows no sizes would."""
    place = read_job_file(run.folder / JOB_FILE).place

    def planned(plan: PlanRecord | None) -> PlanRecord:
        assert plan is not None
        return replace(plan, num_workers=num_workers, source="user", binding=True)

    with connect(place) as client:
        Journal(client, place.keys).swap(PlanRecord, place.keys.plan, planned)


def rounds(run: Run) -> list[int]:
    """Return the number of workers of each round."""
    return [len(event.data["members"]) for event in run.events if event.kind == "round"]


@pytest.mark.timeout(300)
def test_job_requests_listed_sizes_only_and_goes_on_with_the_survivors_of_a_loss(dlrover: Dlrover, tmp_path: Path) -> None:
    until, records = tmp_path / "until", tmp_path / "records"
    run = dlrover.start("--workers", "1:5", "--sizes", "pow2", LOOP, "--until", until, "--records", records)
    run.wait_for_output(r"at most 4 workers, not 5: the largest of --sizes")
    run.wait_for_output(r"job job: 1 to 4 workers \(sizes 1, 2 or 4\)")
    wait_for_workers(run, 1)
    refused = dlrover("scale", "job", 3)
    assert refused.returncode == 2
    assert "3 is not one of the --sizes 1,2,4 that job 'job' was started with: use 2 or 4" in refused.stderr
    assert "1 to 4 workers, sizes 1, 2 or 4, etcd" in dlrover("status", "job").stdout

    write_plan(run, 3)
    wait_for_workers(run, 2)
    assert dlrover("scale", "job", 4).returncode == 0
    four = wait_for_workers(run, 4)
    assert set(rounds(run)) == {1, 2, 4}

    os.kill(four[1]["pid"], signal.SIGKILL)
    wait_for_workers(run, 4, without=(four[1]["worker_id"],))
    run.finish(until)
    assert rounds(run)[-3:] == [4, 3, 4]
    steps = [line for line in map(json.loads, records.read_text().splitlines()) if "step" in line]
    of_survivor = [line for line in steps if line["pid"] == four[0]["pid"]]
    numbers = [line["state"][0] for line in of_survivor]
    assert numbers == [numbers[0] + i for i in range(len(numbers))], "a step was lost or made twice"
    assert {line["world"] for line in of_survivor} == {1, 2, 3, 4}, "three train on after the loss"
    dlrover.assert_all_ended()
