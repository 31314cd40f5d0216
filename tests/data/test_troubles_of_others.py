"""Situations in which other libraries lose rows, double them, or repeat an order, with streams of Parquet.

Each test names the issue or test that describes the situation. All compare with a reader that nothing interrupts.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from lightning_dlrover.data import parquet, stream
from lightning_dlrover.live.loader import ElasticLoader, LoaderState

BATCH, ROWS_PER_FILE, NUM_FILES = 12, 25, 4
BATCHES = -(-ROWS_PER_FILE * NUM_FILES // BATCH)
"""Global batches of an epoch, the last one smaller than the others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of 25 rows in row groups of 10, so that no batch ends where a row group or a file does."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(NUM_FILES):
        rows = range(ROWS_PER_FILE * number, ROWS_PER_FILE * (number + 1))
        pq.write_table(pa.table({"n": list(rows)}), folder / f"{number}.parquet", row_group_size=10)
    return folder


class Workers:
    """The loaders of a job's workers, from its start or from the state of an earlier job."""

    def __init__(self, folder: Path, size: int, state: bytes = b"", num_workers: int = 0) -> None:
        data = stream(parquet(str(folder)), shuffle_rows=30, seed=5)
        options = {"batch_size": 1, "num_workers": num_workers, "persistent_workers": num_workers > 0}
        self.loaders = [
            ElasticLoader(DataLoader(data, **options), BATCH, training=True, max_workers=8)  # type: ignore[arg-type]
            for _ in range(size)
        ]
        for rank, loader in enumerate(self.loaders):
            iter(loader)
            if state:
                found: LoaderState = pickle.loads(state)
                loader.load_state(found)
            loader.reshard(rank, size)

    def train(self, num_batches: int) -> list[list[int]]:
        """Return the rows of each of the next global batches of this epoch, sorted."""
        return [self._step() for _ in range(num_batches)]

    def _step(self) -> list[int]:
        rows: list[int] = []
        for loader in self.loaders:
            num_own = loader.split.num_own_samples(loader.cursor)  # one without a share gets a placeholder
            rows += loader.refetch()["n"].tolist()[:num_own]
        return sorted(rows)

    def begin_epoch(self, epoch: int) -> None:
        for rank, loader in enumerate(self.loaders):
            loader.set_epoch(epoch)
            iter(loader)
            loader.reshard(rank, len(self.loaders))

    def end(self) -> bytes:
        """End the job; return what its checkpoint holds."""
        state = pickle.dumps(self.loaders[0].state())
        for loader in self.loaders:
            loader.close()
        return state


def undisturbed(folder: Path, num_epochs: int = 1) -> list[list[list[int]]]:
    """Return the global batches of each epoch of a job with one worker."""
    job = Workers(folder, 1)
    epochs = []
    for epoch in range(num_epochs):
        job.begin_epoch(epoch)
        epochs.append(job.train(BATCHES))
        assert sorted(chain.from_iterable(epochs[-1])) == list(range(ROWS_PER_FILE * NUM_FILES))
    job.end()
    return epochs


@pytest.mark.parametrize("stop", range(BATCHES))
def test_a_stop_within_a_row_group_loses_none_of_its_rows(folder: Path, stop: int) -> None:
    """https://github.com/huggingface/datasets/issues/7538 and 7630: the rest of the decoded rows is skipped."""
    [whole] = undisturbed(folder)
    first = Workers(folder, 2)
    before = first.train(stop)
    assert before + Workers(folder, 2, first.end()).train(BATCHES - stop) == whole


@pytest.mark.parametrize("sizes", [(4, 2, 3), (1, 5, 1), (3, 7, 8), (8, 1, 6)])
def test_any_number_of_workers_goes_on_within_an_epoch(folder: Path, sizes: Sequence[int]) -> None:
    """Grain's elastic iterators need a number of shards that each number of workers divides.

    LitData doubled and lost samples (https://github.com/Lightning-AI/litData/pull/878, its `tests/streaming/test_elastic.py`).
    """
    [whole] = undisturbed(folder)
    trained, state = [], b""
    for size, num_batches in zip(sizes, (2, 3, BATCHES - 5), strict=True):
        job = Workers(folder, size, state)
        trained += job.train(num_batches)
        state = job.end()
    assert trained == whole


def test_a_second_resume_goes_on_where_the_first_one_ended(folder: Path) -> None:
    """https://github.com/huggingface/datasets/issues/8308: the state does not advance after a resume."""
    [whole] = undisturbed(folder)
    trained, state = [], b""
    for _ in range(BATCHES):
        job = Workers(folder, 2, state)
        trained += job.train(1)
        state = job.end()
    assert trained == whole


def test_a_resume_in_a_later_epoch_has_the_order_of_that_epoch(folder: Path) -> None:
    """https://github.com/huggingface/transformers/pull/40691 and https://github.com/pytorch/torchtitan/pull/3008."""
    first, second = undisturbed(folder, 2)
    assert first != second
    job = Workers(folder, 3)
    job.begin_epoch(1)
    before = job.train(3)
    assert before + Workers(folder, 2, job.end()).train(BATCHES - 3) == second


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_after_a_resume_are_whole(folder: Path, num_workers: int) -> None:
    """https://github.com/huggingface/datasets/issues/7447: later epochs repeat the rest of the first one."""
    epochs = undisturbed(folder, 3)
    job = Workers(folder, 2)
    job.train(5)
    resumed = Workers(folder, 2, job.end(), num_workers)
    resumed.train(BATCHES - 5)
    for epoch in (1, 2):
        resumed.begin_epoch(epoch)
        assert resumed.train(BATCHES) == epochs[epoch]
    resumed.end()
