"""The replaced methods of Lightning's loops, in a plain process: where a fit goes on after a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dlrover.live import lightning_adapter
from lightning_dlrover.live.wiring import wrap_restarts
from tests.support.quiet_trainer import quiet_trainer


class Batches:
    """A training loader with another number of batches in each epoch, which begins where `LiveTraining` would begin."""

    def __init__(self, lengths: tuple[int, ...], has_length: bool) -> None:
        self.lengths, self.has_length = lengths, has_length
        self.epoch = self.cursor = 0
        self.has_entered = False
        self.fetched: list[tuple[int, int]] = []
        self.fit_loop: Any = None
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError("as an IterableDataset's loader")
        return self.lengths[self.epoch]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.cursor = 0
        if not self.has_length and (fetcher := self.fit_loop._data_fetcher) is not None:
            fetcher.prefetch_batches = 0
        return self

    def __next__(self) -> torch.Tensor:
        fetcher = self.fit_loop._data_fetcher
        if not self.has_entered:
            self.has_entered = True
            self.cursor = fetcher.fetched = self.fit_loop.epoch_loop.batch_progress.current.ready
        if self.cursor >= self.lengths[self.epoch]:
            raise StopIteration
        self.fetched.append((self.epoch, self.cursor))
        self.cursor += 1
        if not self.has_length and self.cursor == self.lengths[self.epoch]:
            fetcher.length = fetcher.fetched + 1
        return torch.ones(1, 1)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.epochs: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append(self.current_epoch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Saving(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch{trainer.current_epoch}.ckpt")


def fitted(batches: Batches, model: Model, callbacks: list[Any], ckpt_path: Path | None, **limits: int) -> Any:
    trainer = quiet_trainer(enable_checkpointing=False, callbacks=callbacks, **limits)
    batches.fit_loop = fit_loop = trainer.fit_loop

    def set_up(own: Any) -> None:  # `LiveTraining.set_up_data` does this
        own()
        epochs: Any = fit_loop.epoch_progress.current
        batches.set_epoch(epochs.processed)
        if batches.has_length:
            lightning_adapter.recount_batches(trainer)

    lightning_adapter.surround(fit_loop, "setup_data", set_up)
    wrap_restarts(fit_loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, batches, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("max_steps", [-1, 100])
@pytest.mark.parametrize("saved", ["epoch0", "batch4", "batch3"])
@pytest.mark.parametrize(
    ("lengths", "has_length"),
    [((4, 4, 4), True), ((4, 8, 2), True), ((4, 2, 8), True), ((4, 8, 2), False)],
    ids=["map-style", "longer windows", "shorter windows", "unknown lengths"],
)
def test_every_batch_is_trained_after_a_checkpoint(
    lengths: tuple[int, ...], has_length: bool, saved: str, max_steps: int, tmp_path: Path
) -> None:
    fitted(Batches(lengths, has_length), Model(), [Saving(tmp_path)], None, max_epochs=1, max_steps=max_steps)
    later, model = Batches(lengths, has_length), Model()
    trainer = fitted(later, model, [], tmp_path / f"{saved}.ckpt", max_epochs=3, max_steps=max_steps)
    every = [(epoch, batch) for epoch, length in enumerate(lengths) for batch in range(length)]
    assert later.fetched == every[3 if saved == "batch3" else 4 :]
    assert trainer.current_epoch == 3
    if saved == "epoch0":
        assert model.epochs == [1, 2]
