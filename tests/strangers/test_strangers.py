"""Ordinary scripts end with the same result whether or not their job is resized and loses a worker."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job
from tests.strangers.stranger_job import SCRIPTS, StrangerSettings, result_path, run_stranger, work_folder


@dataclass(frozen=True)
class Stranger:
    """A script and its special properties."""

    name: str
    by_default: bool = False
    package: str = "lightning.pytorch"
    draws: bool = False  # draws noise in each worker: weights are compared between the remaining workers, not between jobs
    needs: str = ""  # package that the script needs
    tolerance: float = 1e-3  # relative and absolute, of weights and metrics: shares are summed in another order
    files_by_worker: tuple[str, ...] = field(default=())  # folders with a file for each worker that is left at the end


STRANGERS = [
    Stranger("gan", by_default=True, draws=True),
    Stranger("cli", by_default=True, needs="jsonargparse"),
    Stranger("tabular", by_default=True, package="pytorch_lightning"),
    Stranger("kfold"),
    Stranger("autoencoder"),
    Stranger("image_classifier"),
    Stranger("finetuning"),
    Stranger("transformer_lm"),
    Stranger("deepfm"),
    Stranger("wide_deep"),
    Stranger("dlrm", needs="torchrec"),
    Stranger("timeseries"),
    Stranger("ema"),
    Stranger("swa"),
    Stranger("schedule_free"),
    Stranger("datamodule"),
    Stranger("unlabelled"),
    Stranger("batch_per_worker"),
    Stranger("study", by_default=True),
    Stranger("warehouse", needs="pyarrow"),
    Stranger("predictions", files_by_worker=("predictions",)),
]


def test_every_script_is_in_the_table() -> None:
    assert sorted(stranger.name for stranger in STRANGERS) == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.long
@pytest.mark.parametrize(
    "stranger",
    [pytest.param(s, id=s.name, marks=() if s.by_default else pytest.mark.on_demand) for s in STRANGERS],
)
def test_changes_leave_the_result_as_it_is(stranger: Stranger, make_job: MakeJob) -> None:
    if stranger.needs:
        pytest.importorskip(stranger.needs)
    undisturbed = make_job(StrangerSettings(stranger.name, stranger.package, paced=False), script=run_stranger)
    undisturbed.start()
    disturbed = make_job(StrangerSettings(stranger.name, stranger.package), script=run_stranger)
    resize_and_kill(disturbed)
    assert undisturbed.finish() == [0], undisturbed.report()
    (expected,) = results(undisturbed)
    found = results(disturbed)
    assert len(found) == 2, disturbed.report()
    one, other = found
    assert not differences(one, other, tolerance=1e-6), disturbed.report()
    for result in found:
        if stranger.draws:
            result["weights"] = expected["weights"]
        found_differences = differences(expected, result, stranger.tolerance)
        assert not found_differences, "\n".join([*found_differences[:20], disturbed.report()])
    assert samples(disturbed) == samples(undisturbed)
    assert files(disturbed, stranger) == files(undisturbed, stranger)


def resize_and_kill(job: Job) -> None:
    """Grow from 1 to 3 workers, drain rank 0, add another one, and kill one between its forward and backward pass."""
    first = job.start()
    job.wait_for_step(3)
    second, _ = job.start(), job.start()
    job.wait_for_world(3)
    first.terminate()
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    second.arm("backward")
    job.wait_for_world(2)
    assert job.finish() == [0, -9, 0, 0], job.report()


def results(job: Job) -> list[Any]:
    """Results of the workers' scripts."""
    paths = [result_path(worker.place) for worker in job.workers]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def differences(expected: Any, found: Any, tolerance: float, where: str = "") -> list[str]:
    """Places at which two results differ, with both values."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return [line for key in expected for line in differences(expected[key], found[key], tolerance, f"{where}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, tolerance, f"{where}/{i}")]
    if isinstance(expected, float) and isinstance(found, float):
        if math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance):
            return []
    elif expected == found:
        return []
    return [f"{where}: {expected!r} undisturbed, {found!r} disturbed"]


def samples(job: Job) -> dict[tuple[int, int], int]:
    """Samples of each batch, over all shares of its last round, by epoch and batch."""
    shares: dict[tuple[int, int], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for record in job.records("share"):
        shares[record["epoch"], record["batch"]][record["round"]][record["rank"]] = record["samples"]
    return {place: sum(by_round[max(by_round)].values()) for place, by_round in shares.items()}


def files(job: Job, stranger: Stranger) -> list[Path]:
    """Files that the script has left in its folder."""
    work = work_folder(job.folder)
    found = [path.relative_to(work) for path in work.rglob("*") if path.is_file()]
    return sorted(path for path in found if path.parts[0] not in stranger.files_by_worker)
