"""Scripts whose workers fail as soon as anything is unpickled."""

from __future__ import annotations

import multiprocessing.queues
import pickle
import sys
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from tests.e2e.table_job import TableSettings, train_tables
from tests.e2e.toy_job import Recorder, Rows, ToyModel, ToySettings, make_trainer


class UnpickledError(Exception):
    """Something was unpickled."""


def refuse_pickles() -> None:
    """Fail at every class that an unpickler of Python's looks up, in this process and from now on.

    The unpicklers of `torch.load(weights_only=True)` and of this package look classes up by themselves, among those that are
    accepted.
    """

    def hook(event: str, arguments: Any) -> None:
        if event == "pickle.find_class" and not _is_own_queue():
            raise UnpickledError(f"the class {arguments} was unpickled")

    sys.addaudithook(hook)


def _is_own_queue() -> bool:
    """Whether a process reads its own queue, as TensorBoard's writer does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != multiprocessing.queues.__file__:
        frame = frame.f_back
    return frame is not None


def refuse_plain_pickles() -> None:
    """Fail at every call of Python's or torch's unpicklers, whatever it would find."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise UnpickledError(f"unpickled: {str(arguments)[:200]}")

    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        setattr(pickle, name, refuse)
    module: Any = dist.distributed_c10d
    for name in ("_tensor_to_object", "_object_to_tensor", "_unpickler"):
        assert hasattr(module, name)
        setattr(module, name, refuse)


class Logged(ToyModel):
    """Logs reduced values and metrics with states of both kinds."""

    def __init__(self, recorder: Recorder, step_s: float) -> None:
        super().__init__(recorder, step_s)
        self.mean, self.all = MeanMetric(), CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.mean.update(loss)
        self.all.update(loss)
        self.log("val", loss, sync_dist=True)
        self.log("val_mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.all.compute()
        self.all.reset()


def train_without_pickle(recorder: Recorder, settings: ToySettings) -> None:
    """Fit with validation, checkpoints, callbacks and loggers, then validate."""
    L.seed_everything(1, verbose=False)
    folder = recorder.place.folder
    strategy = DLRoverStrategy(check_interval_s=0.03)
    trainer = make_trainer(
        folder,
        strategy=strategy,
        logger=[CSVLogger(folder, name="table"), TensorBoardLogger(folder, name="board")],
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[
            DLRoverCallback(),
            EarlyStopping("val", patience=100),
            ModelCheckpoint(monitor="val", every_n_train_steps=5, save_last=True),
            ModelCheckpoint(monitor="val"),
            Timer("00:10:00:00"),
        ],
        max_epochs=settings.max_epochs,
        num_sanity_val_steps=2,
        enable_model_summary=True,
    )
    model = Logged(recorder, settings.step_s)
    # Imports are done: a library may keep its own data in pickles.
    refuse_pickles()
    refuse_plain_pickles()
    rows = Rows(settings.num_rows)
    trainer.fit(model, DataLoader(rows, settings.batch_size, shuffle=True), DataLoader(rows, settings.batch_size))
    assert trainer.log_dir
    trainer.validate(model, DataLoader(rows, settings.batch_size), verbose=False)
    recorder.write("after_fit", checkpoints=trainer.checkpoint_callback is not None)


def train_tables_without_pickle(recorder: Recorder, settings: TableSettings) -> None:
    """Train tables, and save a checkpoint of several files."""
    refuse_pickles()
    train_tables(recorder, settings)
