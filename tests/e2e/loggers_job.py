"""A script that logs every step with loggers that write files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from tests.e2e.feature_jobs import Logged
from tests.e2e.toy_job import Recorder, Rows, ToySettings, make_trainer


def train_and_log(recorder: Recorder, settings: ToySettings) -> None:
    """Train and log every step."""
    L.seed_everything(1, verbose=False)
    folder = recorder.place.folder
    loggers = [CSVLogger(folder, name="table", flush_logs_every_n_steps=1), TensorBoardLogger(folder, name="board")]
    trainer = make_trainer(
        folder,
        strategy=DLRoverStrategy(check_interval_s=0.03),
        logger=loggers,
        log_every_n_steps=1,
        callbacks=[TQDMProgressBar(refresh_rate=1)],
        enable_progress_bar=True,
        max_epochs=settings.max_epochs,
        limit_val_batches=0,
    )
    trainer.fit(Logged(recorder, settings.step_s), DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=True))
    recorder.write("after_fit", versions=[logger.version for logger in loggers])


class RemoteLogger(Logger):
    """Names its run as Weights & Biases does: the "server" assigns an id at the first use, unless the script has one.

    Its run is a file of the id's name, to which every process of the run appends.
    """

    def __init__(self, folder: Path, version: str | None = None) -> None:
        super().__init__()
        self._folder, self._version, self._run = folder, version, ""

    @property
    def name(self) -> str:
        return "remote"

    @property
    def version(self) -> str:
        if self._version is None:
            self._version = f"run{os.getpid()}"
        return self._version

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"{self.version}.jsonl").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "step": step, **metrics}) + "\n")


def log_through_all_loggers(recorder: Recorder, settings: ToySettings) -> None:
    """Save every few steps and log the job's series with every logger that is installed."""
    L.seed_everything(1, verbose=False)
    folder = Path(recorder.place.folder)
    loggers: list[Any] = [
        CSVLogger(folder, name="table", flush_logs_every_n_steps=1),
        TensorBoardLogger(folder, name="board"),
        RemoteLogger(folder / "remote"),
    ]
    if settings.limits.get("tracker") == "wandb":
        loggers.append(WandbLogger(save_dir=folder, offline=True, project="test", settings={"console": "off"}))
    elif settings.limits.get("tracker") == "mlflow":
        loggers.append(MLFlowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db"))
    if settings.limits.get("named"):
        loggers[0] = CSVLogger(folder, name="table", version="mine", flush_logs_every_n_steps=1)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=settings.batch_size, check_interval_s=0.03),
        logger=loggers,
        log_every_n_steps=1,
        callbacks=[
            DLRoverCallback(window_s=0.1, plan_every_s=0.1, history="off", log_world=settings.limits.get("log_world", True)),
            *([ModelCheckpoint(every_n_train_steps=settings.save_every)] if settings.save_every else []),
        ],
        enable_checkpointing=bool(settings.save_every),
        max_epochs=settings.max_epochs,
        limit_val_batches=0,
    )
    trainer.fit(Logged(recorder, settings.step_s), DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=True))
    recorder.write("after_fit", versions=[logger.version for logger in loggers])
