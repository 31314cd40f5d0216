"""Logs continue in one place while rank 0 moves from worker to worker."""

from __future__ import annotations

import csv
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.toy_job import ToySettings

pytest.importorskip("tensorboardX", reason="TensorBoardLogger needs it")

from tensorboardX.proto.event_pb2 import Event

from tests.e2e.loggers_job import train_and_log

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
