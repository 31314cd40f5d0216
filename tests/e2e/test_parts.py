"""A share that does not fit into a worker's memory is computed in parts, with the result of a whole one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Job, Record
from parts_jobs import NUM_ROWS, PartsRun, run_in_parts, write_files

MakeJob = Callable[..., Job]

STEP_S = 0.05


def make(make_job: MakeJob, run: PartsRun) -> Job:
    job = make_job(run, script=run_in_parts)
    if run.kind == "stream":
        write_files(job.folder / "train", NUM_ROWS)
    return job


def undisturbed(make_job: MakeJob, kind: str) -> Record:
    job = make(make_job, PartsRun(kind))
    job.start()
    assert job.finish() == [0], job.report()
    return job.records("result")[0]


def assert_same(job: Job, expected: Record, rel: float = 1e-4) -> None:
    results = job.records("result")
    assert results, job.report()
    for result in results:
        assert result["step"] == expected["step"]
        assert result["weights"].keys() == expected["weights"].keys()
        for name, values in expected["weights"].items():
            assert result["weights"][name] == pytest.approx(values, rel=rel, abs=rel), name
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4), "metrics"


@pytest.mark.parametrize("kind", ["plain", "accumulation", "scaled", "logged", "dictionaries", "stream"])
def test_shares_that_no_longer_fit_after_losses_end_as_the_undisturbed_run(kind: str, make_job: MakeJob) -> None:
    expected = undisturbed(make_job, kind)
    job = make(make_job, PartsRun(kind, room=(3, 1, 3), step_s=STEP_S))
    for _ in range(3):
        job.start()
    job.wait_for_world(3)
    for size in (2, 1):
        job.workers[size].arm("forward")
        job.wait_for_world(size)

    assert job.finish() == [0, -9, -9], job.report()
    assert_same(job, expected, rel=5e-3 if kind == "scaled" else 1e-4)
    for worker in job.workers[:2]:
        full = [record["samples"] for record in worker.records("full")]
        assert full, "a share did not fit"
        assert full == sorted(set(full), reverse=True), "the room is remembered"
