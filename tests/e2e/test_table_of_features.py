"""Lightning's features give the same result whether or not the job's workers change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from lightning.pytorch import callbacks

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Record
from tests.e2e.stand_in_jobs import OverStandIn, run_over_stand_in
from tests.e2e.table_of_features import FEATURES, STEPS_PER_EPOCH, Run, run_feature_of_table
from tests.support.nccl_stand_in import NAME

STEP_S = 0.05


def grow(job: Job) -> None:
    """Two workers join inside the second epoch."""
    with job.at_full_speed():
        job.wait_until(lambda: any(r["epoch"] == 1 and r["batch"] >= 1 for r in job.records("done")), "the second epoch")
    for size in (2, 3):
        job.start()
        job.wait_for_world(size)


def lose_in_step(job: Job) -> None:
    job.workers[-1].arm("forward")
    job.wait_for_world(2)


def lose_in_validation(job: Job) -> None:
    """Kill a worker in the next validation, if there is one."""
    job.workers[-1].arm("validation")


def let_rank_0_leave(job: Job) -> None:
    job.workers[0].terminate()
    job.wait_for_world(sum(not worker.doomed for worker in job.workers))


def validate_by_clock(job: Job) -> None:
    """Wait for a validation of all workers, which begins a second after the one before."""
    job.wait_until(lambda: any(r["world"] == 3 for r in job.records("val_done")), "a validation of three workers")


FAULTS: dict[str, list[Callable[[Job], None]]] = {
    "grow": [grow],
    "loss_in_step": [grow, lose_in_step],
    "loss_in_validation": [grow, lose_in_validation],
    "rank_0_leaves": [grow, let_rank_0_leave],
    "all": [grow, lose_in_step, let_rank_0_leave],
}


def undisturbed(make_job: MakeJob, name: str) -> tuple[Record, set[str]]:
    job = make_job(Run(name, STEP_S if FEATURES[name].follows_clock else 0.0), script=run_feature_of_table)
    job.start()
    assert job.finish() == [0], job.report()
    return job.records("result")[0], checkpoints(job)


def checkpoints(job: Job) -> set[str]:
    return {str(path.relative_to(job.folder)) for path in job.folder.rglob("*.ckpt")}


def assert_same(job: Job, expected: Record, metrics: bool) -> None:
    """Assert that every worker that finished has the undisturbed run's weights, rates, metrics and callback states."""
    results = job.records("result")
    assert results, job.report()
    for result in results:
        for name in ("step", "epoch", "training", "kept"):
            assert result[name] == expected[name], (name, job.report())
        assert result["lr"] == pytest.approx(expected["lr"]), "learning rates"
        assert result["callbacks"] == approx(expected["callbacks"]), "callbacks"
        if metrics:
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, abs=1e-4), "metrics"
        assert result["weights"].keys() == expected["weights"].keys()
        for name, values in expected["weights"].items():
            assert result["weights"][name] == pytest.approx(values, rel=1e-3, abs=1e-4), name


def approx(value: object) -> object:
    """Compare numbers anywhere inside `value` within rounding."""
    if isinstance(value, dict):
        return {key: approx(each) for key, each in value.items()}
    if isinstance(value, list):
        return [approx(each) for each in value]
    return pytest.approx(value, rel=1e-3, abs=2e-4) if isinstance(value, float) else value


def assert_workers_agree(job: Job) -> None:
    steps: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in job.records("done"):
        steps[record["epoch"], record["batch"]].append(record)
    for place, records in steps.items():
        assert len({record["parameters"] for record in records}) == 1, (place, records)


def disturbed(make_job: MakeJob, name: str, faults: str, backend: str | None = None) -> Job:
    run = Run(name, STEP_S, backend)
    job = make_job(OverStandIn(run_feature_of_table, run), script=run_over_stand_in) if backend else None
    job = job or make_job(run, script=run_feature_of_table)
    job.start()
    for fault in FAULTS[faults]:
        fault(job)
        if fault is grow and FEATURES[name].follows_clock:
            validate_by_clock(job)
    codes = job.finish()
    assert all(code == (-9 if w.killed and w.records("killed") else 0) for code, w in zip(codes, job.workers, strict=True)), (
        job.report()
    )
    return job


@pytest.mark.parametrize("name", FEATURES)
def test_resized_run_ends_as_the_undisturbed_one(name: str, make_job: MakeJob) -> None:
    check(name, "all", make_job)


BY_DEFAULT = "compiled", "channels_last"
"""Features that run over the stand-in for NCCL without being asked for."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in BY_DEFAULT else [pytest.mark.on_demand]) for n in FEATURES])
def test_feature_survives_over_the_stand_in_for_nccl(name: str, make_job: MakeJob) -> None:
    check(name, "all", make_job, NAME)


@pytest.mark.on_demand
@pytest.mark.parametrize("faults", [faults for faults in FAULTS if faults != "all"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature_survives_each_fault(name: str, faults: str, make_job: MakeJob) -> None:
    check(name, faults, make_job)


def check(name: str, faults: str, make_job: MakeJob, backend: str | None = None) -> None:
    if name in ("weight_averaging", "clock") and not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("came with Lightning 2.6")
    expected, files = undisturbed(make_job, name)
    job = disturbed(make_job, name, faults, backend)
    assert_workers_agree(job)
    assert_same(job, expected, metrics=not FEATURES[name].follows_clock)
    assert checkpoints(job) == files
    assert STEPS_PER_EPOCH * FEATURES[name].epochs >= job.step
