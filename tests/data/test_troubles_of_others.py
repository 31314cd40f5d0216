"""Situations in which other libraries lose rows, double them, or repeat an order, with streams of Parquet.

Each test names the issue or test that describes the situation. All compare with a reader that nothing interrupts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stream_schedules import Numbered, SimulatedJob

from lightning_dlrover.data import Shard, parquet

BATCH, ROWS_PER_FILE, NUM_FILES = 12, 25, 4
BATCHES = -(-ROWS_PER_FILE * NUM_FILES // BATCH)
"""Global batches of an epoch, the last one smaller than the others."""


class Files(Numbered):
    """The numbers in Parquet files with row groups of 10, so that no batch ends where a row group or a file does."""

    def __init__(self, folder: Path) -> None:
        super().__init__([ROWS_PER_FILE] * NUM_FILES)
        for number in range(NUM_FILES):
            rows = range(ROWS_PER_FILE * number, ROWS_PER_FILE * (number + 1))
            pq.write_table(pa.table({"number": list(rows)}), folder / f"{number}.parquet", row_group_size=10)
        self._files = parquet(str(folder))

    def shards(self) -> list[Shard]:
        return list(self._files.shards())

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        return self._files.read(shard, row)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def started(files: Files, size: int) -> SimulatedJob:
    job = SimulatedJob(files, BATCH, shuffle_rows=30, max_workers=8, persistent=True)
    job.resize(size)
    return job


def train(job: SimulatedJob, num_batches: int) -> None:
    for _ in range(num_batches):
        job.step()


def finished(job: SimulatedJob, num_epochs: int = 1) -> list[list[int]]:
    """Return the rows of this epoch, and of those that follow it, in the order of training. The job ends."""
    epochs = [job.finish_epoch().tolist() for _ in range(num_epochs)]
    job.close()
    return epochs


def undisturbed(files: Files, num_epochs: int = 1) -> list[list[int]]:
    """Return the rows of each epoch of a job with one worker."""
    epochs = finished(started(files, 1), num_epochs)
    for rows in epochs:
        assert sorted(rows) == list(range(ROWS_PER_FILE * NUM_FILES))
    return epochs


@pytest.mark.parametrize("stop", range(BATCHES))
def test_a_stop_within_a_row_group_loses_none_of_its_rows(files: Files, stop: int) -> None:
    """https://github.com/huggingface/datasets/issues/7538 and 7630: the rest of the decoded rows is skipped."""
    job = started(files, 2)
    train(job, stop)
    job.restart(2)
    assert finished(job) == undisturbed(files)


@pytest.mark.parametrize("sizes", [(4, 2, 3), (1, 5, 1), (3, 7, 8), (8, 1, 6)])
def test_any_number_of_workers_continues_within_an_epoch(files: Files, sizes: Sequence[int]) -> None:
    """Grain's elastic iterators need a number of shards that each number of workers divides.

    LitData doubled and lost samples (https://github.com/Lightning-AI/litData/pull/878, its `tests/streaming/test_elastic.py`).
    """
    job = started(files, sizes[0])
    for num_batches, size in zip((2, 3), sizes[1:], strict=True):
        train(job, num_batches)
        job.restart(size)
    assert finished(job) == undisturbed(files)


def test_a_second_resume_continues_where_the_first_one_ended(files: Files) -> None:
    """https://github.com/huggingface/datasets/issues/8308: the state does not advance after a resume."""
    job = started(files, 2)
    for _ in range(BATCHES - 1):
        job.step()
        job.restart(2)
    assert finished(job) == undisturbed(files)


def test_a_resume_in_a_later_epoch_has_the_order_of_that_epoch(files: Files) -> None:
    """https://github.com/huggingface/transformers/pull/40691 and https://github.com/pytorch/torchtitan/pull/3008."""
    first, second = undisturbed(files, 2)
    assert first != second
    job = started(files, 3)
    job.finish_epoch()
    train(job, 3)
    job.restart(2)
    assert finished(job) == [second]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_after_a_resume_are_whole(files: Files, num_workers: int) -> None:
    """https://github.com/huggingface/datasets/issues/7447: later epochs repeat the rest of the first one."""
    job = started(files, 2)
    train(job, 5)
    job.restart(2, num_workers)
    assert finished(job, 3) == undisturbed(files, 3)
