"""Jobs with scripts that use `pytorch_lightning`, alone or beside `lightning`."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.packages_job import PackageSettings, gate, train_with

SETTINGS = PackageSettings(num_rows=240, max_epochs=4, step_s=0.05, num_val_rows=24)


def environment(folder: Path, package: str, blocked: str = "") -> Mapping[str, str]:
    """Variables of fresh interpreters that import `package` first and cannot import `blocked`."""
    if blocked:
        (folder / "sitecustomize.py").write_text(BLOCKER.format(name=blocked))
    paths = [str(folder), *sys.path]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TOY_PACKAGE": package}


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def assert_survives_changes(job: Job, settings: PackageSettings) -> None:
    """Grow from one worker to three, lose one in a step, drain rank 0. No sample and no row of the log may be lost."""
    first, second, third = job.start(), job.start(), job.start()
    gate(first.place).touch()
    job.wait_for_step(3)
    gate(second.place).touch()
    job.wait_for_world(2)
    gate(third.place).touch()
    job.wait_for_world(3)
    second.arm("forward")
    job.wait_for_world(2)
    first.terminate()
    job.wait_for_world(1)
    assert job.finish() == [0, -9, 0], job.report()
    assert violations(job, settings) == []
    (end,) = job.records("after_fit")
    assert end["strategy"].startswith(settings.package)
    steps = {int(file.stem.removeprefix("step=")) for file in (job.folder / "checkpoints").glob("*.ckpt")}
    assert steps == set(range(10, settings.num_steps + 1, 10))
    with next(job.folder.rglob("metrics.csv")).open() as file:
        logged = [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]]
    assert logged == list(range(settings.num_steps))


@pytest.mark.long
def test_job_of_pytorch_lightning_alone_survives_changes(make_job: MakeJob, tmp_path: Path) -> None:
    alone = environment(tmp_path, "pytorch_lightning", blocked="lightning")
    assert_survives_changes(make_job(SETTINGS, script=train_with, environment=alone), SETTINGS)


def test_job_of_pytorch_lightning_after_lightning(make_job: MakeJob) -> None:
    # The process that forks workers has imported lightning.
    assert_survives_changes(make_job(SETTINGS, script=train_with), SETTINGS)


@pytest.mark.on_demand
def test_job_of_lightning_after_pytorch_lightning(make_job: MakeJob, tmp_path: Path) -> None:
    settings = PackageSettings(num_rows=240, max_epochs=4, step_s=0.05, num_val_rows=24, package="lightning.pytorch")
    first = environment(tmp_path, "pytorch_lightning")
    assert_survives_changes(make_job(settings, script=train_with, environment=first), settings)
