"""Streams in a Trainer that no job steers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.data import DataError, Shard, Stream, stream
from lightning_dlrover.live.loader import ElasticLoader

NUM_ROWS, BATCH = 50, 8


class Numbers:
    def shards(self) -> list[Shard]:
        return [Shard("a", 20), Shard("b", NUM_ROWS - 20)]

    def read(self, shard: Shard, row: int) -> Iterator[float]:
        yield from map(float, range(row + 20 * (shard.key == "b"), shard.rows + 20 * (shard.key == "b")))


class Recording(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.tolist())
        return self.net(batch.float()[:, None]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def numbers() -> Stream:
    return stream(Numbers(), shuffle_rows=1000, seed=4)


def fit(folder: Path, data: Stream, num_workers: int = 0, ckpt_path: Path | None = None, **options: Any) -> list[list[float]]:
    model = Recording()
    settings = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False, **options}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=folder, **settings)
    trainer.fit(model, DataLoader(data, BATCH, num_workers=num_workers), ckpt_path=ckpt_path)
    return model.seen


def epochs(data: Stream) -> list[list[float]]:
    """Return the rows of the first two epochs of a job with these batches."""
    loader = ElasticLoader(DataLoader(data, BATCH), BATCH, training=True)
    found = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        iter(loader)
        found.append(list(chain.from_iterable(batch.tolist() for batch in loader)))
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_callback_gives_each_epoch_its_own_order(tmp_path: Path, num_workers: int) -> None:
    seen = fit(
        tmp_path, numbers(), num_workers, strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()], enable_checkpointing=False
    )
    rows = list(chain.from_iterable(seen))
    assert sorted(rows[:NUM_ROWS]) == sorted(rows[NUM_ROWS:]) == list(range(NUM_ROWS))
    assert rows[:NUM_ROWS] != rows[NUM_ROWS:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_plain_lightning_continues_from_a_jobs_checkpoint(tmp_path: Path, num_workers: int) -> None:
    first, _ = epochs(numbers())
    saving = ModelCheckpoint(tmp_path, filename="at3", every_n_train_steps=3, save_top_k=1, save_on_train_epoch_end=False)
    fit(tmp_path, numbers(), max_steps=3, callbacks=[saving])
    path = tmp_path / "at3.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    job = ElasticLoader(DataLoader(numbers(), BATCH), BATCH, training=True)
    iter(job)
    for _ in range(3):
        next(job)
    checkpoint["dlrover"] = {"streams": [None, job.position_in_stream]}
    torch.save(checkpoint, path)

    data = numbers()
    data.resume_from(checkpoint, number=1)
    seen = fit(tmp_path, data, num_workers, ckpt_path=path, max_epochs=1)
    assert list(chain.from_iterable(seen)) == first[3 * BATCH :]


def test_checkpoint_of_an_epochs_end_continues_with_the_next_epoch() -> None:
    data = numbers()
    job = ElasticLoader(DataLoader(numbers(), BATCH), BATCH, training=True)
    list(job)
    data.resume_from({"dlrover": {"streams": [job.position_in_stream]}})
    assert data.epoch == 1
    assert data.__getitems__(range(NUM_ROWS)) == epochs(numbers())[1]


@pytest.mark.parametrize("checkpoint", [{}, {"dlrover": {"streams": [None]}}])
def test_checkpoint_without_a_position_is_refused(checkpoint: Any) -> None:
    with pytest.raises(DataError, match="no position of training loader 0 in a stream"):
        numbers().resume_from(checkpoint)


def test_view_of_a_stream_is_refused_by_the_callback(tmp_path: Path) -> None:
    part: Any = Subset(numbers(), range(8))
    with pytest.raises(UnsupportedLoaderError, match="Subset asks a stream for single rows by number"):
        fit(tmp_path, part, callbacks=[DLRoverCallback()], strategy=DLRoverStrategy())
