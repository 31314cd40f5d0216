"""Scripts of jobs that are killed as a whole and started again, and scripts that no worker can join."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from tests.e2e.toy_job import SEED, Recorder, Rows, ToyModel, make_trainer, streamed

NUM_ROWS, BATCH_SIZE = 160, 8
STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE


@dataclass(frozen=True)
class Resumable:
    """Kind and location of the checkpoints that the script saves."""

    name: str = ""
    as_url: bool = False
    at_epoch_end: bool = False
    step_s: float = 0.02
    epochs: int = 3
    files: str = ""  # folder of Parquet files to read as a stream
    order_seed: int = SEED  # of the stream
    resumes: str = ""  # checkpoint that the script resumes from


class Size(enum.Enum):
    SMALL = 16


class WithObjects(ToyModel):
    """Has hyperparameters of any kind, as `save_hyperparameters` finds them in `__init__`."""

    def __init__(self, recorder: Recorder, step_s: float, activation: nn.Module, size: Size, layer: Any) -> None:
        super().__init__(recorder, step_s)
        self.save_hyperparameters(ignore=["recorder"])
        self.net = nn.Sequential(layer(8, size.value), activation, nn.Linear(size.value, 1))


class Unsendable(ToyModel):
    """Keeps an object that cannot be serialized in its checkpoints, from the start or from the fifth step on."""

    since = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_step >= self.since:
            checkpoint["kept"] = lambda: 1


class UnsendableLater(Unsendable):
    since = 5


class SavesTogether(ToyModel):
    """Runs a collective in its hook, which stock DDP calls on all workers."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.is_initialized():
            dist.all_reduce(total := torch.ones(1))
            checkpoint["num_workers"] = int(total)


class JoinedInARoundAfterALoss(SavesTogether):
    """Lets a test kill a worker after the round that admits another one has formed, or inside the hook."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.live is not None and not self.live.position.is_saving:
            self.recorder.moment("hook")  # while the state for a joiner is captured
        super().on_save_checkpoint(checkpoint)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        strategy: Any = self.trainer.strategy
        enter_round = strategy.enter_round

        def enter(rank: int, size: int) -> None:
            if size == 3:
                self.recorder.moment("round_of_three")
            enter_round(rank, size)

        strategy.enter_round = enter


class DeadlyIO(TorchCheckpointIO):
    """Lets a test kill the worker that writes the checkpoint of a job that stops."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if Path(path).name.startswith("dlrover-"):
            self.recorder.moment("last_checkpoint")
            self.recorder.write("last_checkpoint", step=checkpoint["global_step"])
        super().save_checkpoint(checkpoint, path, storage_options)


class Drawing(ToyModel):
    """Draws noise of all kinds, and validates after the steps at whose end a checkpoint is saved."""

    num_validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        noise = [float(torch.rand(())), float(np.random.rand()), random.random()]
        self.recorder.write("noise", rank=self.trainer.global_rank, drawn=noise)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.num_validated = 0
        self.recorder.moment(f"validation after {self.trainer.global_step}")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_validated += len(batch[0])

    def on_validation_end(self) -> None:
        self.recorder.write("whole", step=self.trainer.global_step, rows=self.num_validated)


MODELS: dict[str, type[ToyModel]] = {
    "drawing": Drawing,
    "unsendable": Unsendable,
    "unsendable_later": UnsendableLater,
    "saves_together": SavesTogether,
    "joined_after_a_loss": JoinedInARoundAfterALoss,
}


def run_resumable(recorder: Recorder, settings: Resumable) -> None:
    """Train, save and resume."""
    L.seed_everything(1, verbose=False)
    folder = Path(recorder.place.folder) / "checkpoints"
    if settings.name == "objects":
        model: ToyModel = WithObjects(recorder, settings.step_s, nn.ReLU(), Size.SMALL, partial(nn.Linear, bias=False))
    else:
        model = MODELS.get(settings.name, ToyModel)(recorder, settings.step_s)
    every = {"save_on_train_epoch_end": True} if settings.at_epoch_end else {"every_n_train_steps": 5}
    checkpoints = ModelCheckpoint(f"local://{folder}" if settings.as_url else folder, "{step}", save_top_k=-1, **every)
    saves = not settings.name.startswith("unsendable")
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(check_interval_s=0.03),
        max_epochs=settings.epochs,
        limit_val_batches=1.0 if settings.name == "drawing" else 0,
        val_check_interval=5,
        callbacks=[checkpoints] if saves else [],
        enable_checkpointing=saves,
        plugins=[DeadlyIO(recorder)],
    )
    if settings.files:
        rows = streamed(Path(settings.files), shuffle=True)
        rows.seed = settings.order_seed
        loader = DataLoader(rows, BATCH_SIZE, num_workers=1)
    else:
        loader = DataLoader(Rows(NUM_ROWS), BATCH_SIZE, shuffle=True)
    val_loader = DataLoader(Rows(NUM_ROWS // 4), BATCH_SIZE) if settings.name == "drawing" else None
    trainer.fit(model, loader, val_loader, ckpt_path=settings.resumes or None)
    recorder.write("after_fit", step=trainer.global_step, epoch=trainer.current_epoch)
