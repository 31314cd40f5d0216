"""Scripts with Trainer arguments, or with steps before `fit`, that assume a fixed number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from tests.e2e.toy_job import Recorder, Rows, ToyModel, make_trainer

NUM_ROWS, BATCH_SIZE = 240, 8


@dataclass(frozen=True)
class Arguments:
    """Settings of the script."""

    name: str = ""
    epochs: int = 3
    step_s: float = 0.05
    search_step_s: float = 0.0
    devices: Any = 1
    num_nodes: int = 1


class Searched(ToyModel):
    """A model with a learning-rate search; the batches of the search are not recorded."""

    def __init__(self, recorder: Recorder, step_s: float, search_step_s: float) -> None:
        super().__init__(recorder)
        self.lr = 0.5
        self.times = step_s, search_step_s

    @property
    def is_searched(self) -> bool:
        return any(type(callback).__name__ == "_LRCallback" for callback in self.trainer.callbacks)  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        self.recorder.write("waits", **self.where())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step_s = self.times[self.is_searched]
        return super().training_step(batch, batch_idx)

    def record_share(self, batch: Any, batch_idx: int) -> None:
        if not self.is_searched:
            super().record_share(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.is_searched:
            super().on_train_batch_end(outputs, batch, batch_idx)
        else:
            self.recorder.write("searched", **self.where())
            self.recorder.moment("search")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


def search_and_train(recorder: Recorder, arguments: Arguments) -> None:
    """Search for the learning rate, then train."""
    L.seed_everything(1, verbose=False)
    model = Searched(recorder, arguments.step_s, arguments.search_step_s)
    loader = DataLoader(Rows(NUM_ROWS), BATCH_SIZE, shuffle=True)
    options: dict[str, Any] = {"max_epochs": arguments.epochs, "limit_val_batches": 0}
    finder = LearningRateFinder(num_training_steps=20) if arguments.name == "callback" else None

    def trainer() -> L.Trainer:
        strategy = DLRoverStrategy(check_interval_s=0.03)
        made: L.Trainer = make_trainer(
            recorder.place.folder, strategy=strategy, callbacks=[finder] if finder else [], **options
        )
        return made

    first = trainer()
    if finder is None:
        found: Any = Tuner(first).lr_find(model, loader, num_training=20)
        recorder.write("found", lr=model.lr, suggestion=found.suggestion(), losses=found.results["loss"])
    last = trainer() if arguments.name == "two_trainers" else first
    last.fit(model, loader)
    recorder.write("after_fit", step=last.global_step, lr=model.lr)


def train_with_devices(recorder: Recorder, arguments: Arguments) -> None:
    """Train with a Trainer that has a fixed number of devices."""
    L.seed_everything(1, verbose=False)
    trainer = make_trainer(
        recorder.place.folder,
        max_epochs=1,
        limit_val_batches=0,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
    )
    trainer.fit(ToyModel(recorder), DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
