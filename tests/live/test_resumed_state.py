"""A Trainer that continues from a checkpoint of its job, after hooks have changed what it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.live.state import resume, trained_parameters
from tests.support.quiet_trainer import quiet_trainer

Groups = list[list[float]]


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.25)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.seen: list[tuple[int, Groups, bool]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        groups = [[group["lr"], len(group["params"])] for group in self.trainer.optimizers[0].param_groups]
        self.seen.append((self.trainer.global_step, groups, all(p.requires_grad for p in self.parameters())))
        loss: torch.Tensor = self.head(self.body(batch[0])).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.5)


class Keep(Callback):
    """Keeps the checkpoint after a step, as the strategy of a job writes it."""

    def __init__(self, step: int, file: Path) -> None:
        self._step, self._file = step, file

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._step % 4:
            self._keep(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        if trainer.global_step == self._step and not self._file.exists():
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            checkpoint["dlrover"] = {"parameters": trained_parameters(trainer)}
            torch.save(checkpoint, self._file)


class Resume(Callback):
    """Continues from a checkpoint once the first epoch has begun, as a worker of a job does."""

    def __init__(self, file: Path) -> None:
        self._checkpoint = torch.load(file, weights_only=True)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            resume(trainer, checkpoint)


def train(folder: Path, *callbacks: Callback) -> Model:
    model = Model()
    trainer = quiet_trainer(max_epochs=4, default_root_dir=folder, strategy=DLRoverStrategy(), callbacks=list(callbacks))
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(8, 2)), 2))
    return model


@pytest.mark.parametrize("step", [2, 4, 6, 8, 10])  # 4 and 8 are ends of epochs; epoch 1 begins with step 4
def test_unfrozen_parameters_are_trained_in_their_groups_after_a_resume(step: int, tmp_path: Path) -> None:
    whole = train(tmp_path, Thaw(), Keep(step, tmp_path / "kept.ckpt"))
    resumed = train(tmp_path, Thaw(), Resume(tmp_path / "kept.ckpt"))
    assert [len(groups) for _, groups, _ in whole.seen] == [1] * 4 + [2] * 12
    rest = 4 - step % 4  # steps until the epoch's end, which only a job's own loaders find again
    assert resumed.seen[:rest] == whole.seen[step : step + rest]
