"""Logs continue in one place while rank 0 moves from worker to worker."""

from __future__ import annotations

import csv
import itertools
import json
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job
from tests.e2e.toy_job import ToySettings

pytest.importorskip("tensorboardX", reason="TensorBoardLogger needs it")

from tensorboardX.proto.event_pb2 import Event

from tests.e2e.loggers_job import log_through_all_loggers, train_and_log

SETTINGS = ToySettings(num_rows=240, batch_size=4, max_epochs=3, step_s=0.05)
NUM_STEPS = SETTINGS.num_steps // 2  # two workers start, with batches of 4 each


def logged_steps(file: Path) -> Iterator[int]:
    """Steps with a loss in a TensorBoard event file; its records are length, checksum, event and checksum."""
    content = file.read_bytes()
    while len(content) >= 12:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]
        if any(value.tag == "loss" for value in event.summary.value):
            yield event.step


def test_logs_stay_in_one_version_when_rank_0_moves(make_job: MakeJob) -> None:
    job = make_job(SETTINGS, script=train_and_log, min_workers=2)
    job.start_all(2)
    job.wait_for_world(2)
    leader = job.wait_until(
        lambda: next((w for w in job.workers if any(r["rank"] == 0 for r in w.records("done"))), None), "a step of rank 0"
    )
    other = next(w for w in job.workers if w is not leader)  # has not named a run yet
    leader.arm("forward")
    job.start()
    last = job.wait_until(lambda: next((r["step"] for r in other.records("done") if r["round"] > 1), None), "a step without it")
    job.wait_for_world(2, since=last)
    assert sorted(job.finish()) == [-9, 0, 0], job.report()
    assert [path.name for path in (job.folder / "board").iterdir()] == ["version_0"]
    assert [path.name for path in (job.folder / "table").iterdir()] == ["version_0"]
    assert all(record["versions"] == [0, 0] for record in job.records("after_fit"))
    with (job.folder / "table" / "version_0" / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["loss"]] == list(range(NUM_STEPS))
    steps = [step for file in (job.folder / "board" / "version_0").glob("events*") for step in logged_steps(file)]
    # TensorBoard's writer buffers for two minutes, so a killed worker's last values may be lost.
    assert {*range(last, NUM_STEPS)} <= {*steps}
    assert len(steps) == len({*steps})
    num_batches = NUM_STEPS // SETTINGS.max_epochs
    assert f"{num_batches}/{num_batches}" in other.output  # its progress bar
    assert all("Previous log files" not in worker.output for worker in job.workers)


SAVED = ToySettings(num_rows=400, batch_size=8, max_epochs=1, step_s=0.03, save_every=5)


def rows_of(job: Job, version: str = "version_0") -> list[dict[str, str]]:
    with (job.folder / "table" / version / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def world_rows(rows: list[dict[str, str]]) -> list[tuple[int, int]]:
    """World size and round of the rows at the start and at changes."""
    found = [row for row in rows if row["dlrover/stall_s"]]
    return [(int(float(row["dlrover/world_size"])), int(float(row["dlrover/round"]))) for row in found]


def test_series_of_a_changing_job_are_logged_at_its_steps(make_job: MakeJob) -> None:
    job = make_job(replace(SAVED, save_every=0), script=log_through_all_loggers)
    job.grow_to(2)
    job.workers[1].arm("forward")
    job.wait_for_world(1)
    assert job.finish() == [0, -9], job.report()
    rows = rows_of(job)
    assert world_rows(rows) == [(1, 1), (2, 2), (1, 3)]
    at_changes = [row for row in rows if row["dlrover/stall_s"]]
    pauses = [float(row["dlrover/stall_s"]) for row in at_changes]
    stalls = [event.data["seconds"] for event in job.events("stall")]
    assert pauses == pytest.approx([0.0, *stalls], abs=2e-3)
    for before, after in itertools.pairwise(at_changes):
        steps = range(int(before["step"]) + 1, int(after["step"]) + 1)
        assert steps, "the steps of the rows ascend"
    windows = [row for row in rows if row["dlrover/step_time_s"] not in ("", "nan")]
    assert all(float(row["dlrover/samples_per_s"]) > 0 for row in windows)
    # Predictions begin with the planner's first decision, which a short job may not live to see.
    assert all(float(row["dlrover/predicted_step_time_s"] or "nan") != 0.0 for row in windows)
    assert [int(row["step"]) for row in rows if row["loss"]] == list(range(50))


def test_job_logs_no_series_where_they_are_switched_off(make_job: MakeJob) -> None:
    job = make_job(replace(SAVED, num_rows=40, save_every=0, limits={"log_world": False}), script=log_through_all_loggers)
    job.start()
    assert job.finish() == [0], job.report()
    assert not [name for name in rows_of(job)[0] if name.startswith("dlrover/")]


@pytest.mark.parametrize("case", ["checkpoint", "no checkpoint", "named", "spare"])
def test_run_goes_on_after_the_loss_of_all_workers(make_job: MakeJob, case: str) -> None:
    settings = replace(SAVED, save_every=0 if case == "no checkpoint" else 5, limits={"named": case == "named"})
    job = make_job(settings, script=log_through_all_loggers)
    job.grow_to(2)
    job.wait_for_step(12)
    if case == "spare":  # it waits to be admitted, and has chosen a version of its own
        spare = job.start(settings=replace(settings, slow_start_s=0.0))
        spare.stop()
    for worker in job.workers[:2]:
        worker.kill()
    if case == "spare":
        spare.go_on()
    job.start()
    codes = job.finish()
    assert codes[:2] == [-9, -9], job.report()
    assert not any(codes[2:]), job.report()
    version = "mine" if case == "named" else "version_0"
    assert [path.name for path in (job.folder / "table").iterdir()] == [version]
    assert [path.name for path in (job.folder / "board").iterdir()] == ["version_0"]
    [remote] = (job.folder / "remote").iterdir()
    pids = {json.loads(line)["pid"] for line in remote.read_text().splitlines()}
    assert len(pids) >= 2, "one of each life"
    assert job.workers[0].pid in pids
    steps = [int(row["step"]) for row in rows_of(job, version) if row["loss"]]
    assert {*steps} == {*range(50)}, "rows of both lives"
    again = [step for step in steps if steps.count(step) > 1]
    assert len(again) > 0
    if settings.save_every:
        [saved] = [path.parent for path in job.folder.glob("**/*.ckpt")]
        assert saved.parent.name == version


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_run_at_a_tracker_goes_on_after_the_loss_of_all_workers(make_job: MakeJob, tracker: str) -> None:
    pytest.importorskip(tracker, reason="the logger needs it")
    job = make_job(replace(SAVED, limits={"tracker": tracker}), script=log_through_all_loggers)
    job.start()
    job.wait_for_step(12)
    job.workers[0].kill()
    job.start()
    assert job.finish() == [-9, 0], job.report()
    [*_, run] = job.workers[1].records("after_fit")[0]["versions"]
    if tracker == "wandb":
        folders = [path.name for path in (job.folder / "wandb").glob("offline-run-*")]
        assert len(folders) == 2, "one of each life"
        assert all(name.endswith(f"-{run}") for name in folders), folders
    else:
        with sqlite3.connect(job.folder / "mlflow.db") as database:
            assert [row[0] for row in database.execute("SELECT run_uuid FROM runs")] == [run]
            steps = {row[0] for row in database.execute("SELECT step FROM metrics WHERE key = 'loss'")}
        assert steps == {*range(50)}
