"""Scripts that use `lightning`, `pytorch_lightning` or both. The test chooses the order of the imports."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from tests.e2e.toy_job import SEED, Place, Recorder, Rows, ToySettings, ToySteps
from tests.support.waiting import eventually


@dataclass(frozen=True)
class PackageSettings(ToySettings):
    """A training run with the Trainer of one package."""

    package: str = "pytorch_lightning"
    also: str = ""  # another package to import after `package`


def gate(place: Place) -> Path:
    """File that lets the worker begin. Fresh interpreters import for seconds, and do so all at once."""
    return Path(place.folder) / f"{place.agent_id}.gate"


def train_with(recorder: Recorder, settings: PackageSettings) -> None:
    """Run a typical script for the package, plus the toy model's records."""
    package: Any = importlib.import_module(settings.package)
    if settings.also:
        importlib.import_module(settings.also)
    callbacks = importlib.import_module(f"{settings.package}.callbacks")
    loggers = importlib.import_module(f"{settings.package}.loggers")
    from lightning_dlrover import DLRoverCallback, DLRoverStrategy

    eventually(gate(recorder.place).exists, f"the test to let worker {recorder.place.agent_id} begin", 60)

    class Model(ToySteps, package.LightningModule):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[2]))
            return loss

    package.seed_everything(SEED, verbose=False)
    folder = recorder.place.folder
    trainer = package.Trainer(
        strategy=DLRoverStrategy(global_batch_size=settings.batch_size, check_interval_s=0.03),
        callbacks=[
            DLRoverCallback(plan_every_s=0, history="off"),
            callbacks.ModelCheckpoint(f"{folder}/checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1),
        ],
        logger=loggers.CSVLogger(folder, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        accelerator="cpu",
        max_epochs=settings.max_epochs,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    trainer.fit(
        Model(recorder, settings.step_s),
        DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=True),
        DataLoader(Rows(settings.num_val_rows), settings.batch_size),
    )
    recorder.write(
        "after_fit",
        step=trainer.global_step,
        strategy=next(c.__module__ for c in type(trainer.strategy).__mro__ if c.__name__ == "DDPStrategy"),
    )
