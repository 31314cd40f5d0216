"""Scripts that use Lightning's features, each run twice: undisturbed, and in a job with workers that join, leave and die.

A feature is the difference between its script and the plain one. Each script records its results at its end.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from tests.e2e.toy_job import Recorder, Rows, ToyModel, make_trainer

NUM_ROWS, NUM_VAL_ROWS, BATCH_SIZE = 320, 40, 8  # enough steps to outlast four changes that a busy machine makes slowly
STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE


@dataclass(frozen=True)
class Run:
    """One run of a feature's script."""

    name: str
    step_s: float = 0.0
    backend: str | None = None  # process groups' backend; None: the strategy's choice


# --- models -------------------------------------------------------------------------------------------------------------------


class Plain(ToyModel):
    """SGD, so that weights of two runs can be compared: a rounding error does not grow."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.02, momentum=0.5)


class Plateau(Plain):
    """Follows a metric that every second epoch logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.current_epoch % 2 == 0:
            self.log("now_and_then", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[2]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.02)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "now_and_then"}}


class Metrics(Plain):
    """Logs torchmetrics objects and values over the epoch."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.error(torch.zeros(len(batch[2])), batch[2].float())
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss


class Mode(enum.Enum):
    COLD = "cold"
    WARM = "warm"


@dataclasses.dataclass
class Vocabulary:
    words: dict[str, int]


class Objects(Plain):
    """Keeps objects of many kinds in its checkpoints."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.kept: dict[str, Any] = {"scaler": StandardScaler(), "mode": Mode.COLD, "words": Vocabulary({})}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.kept["scaler"].fit([[1.0], [3.0]])
            self.kept |= {"mode": Mode.WARM, "words": Vocabulary({"a": 1}), "maker": functools.partial(nn.Linear, 2)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"maker": functools.partial(nn.Linear, 1), **self.kept}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]


class Curriculum(Plain):
    """Sets a factor of the loss, a frozen layer and the accumulation in a hook, depending on the epoch."""

    factor = 1.0

    def on_train_epoch_start(self) -> None:
        self.factor = 1.0 + self.trainer.current_epoch
        self.net[0].weight.requires_grad_(self.trainer.current_epoch != 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor


class HeadFirst(Plain):
    """Trains its last layer; a callback unfreezes the first one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], 0.02)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class Net(nn.Sequential):
    """Dynamo leaves torch's own modules alone when they are compiled in place."""

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = super().forward(rows)  # type: ignore[no-untyped-call]
        return result


class Compiled(Plain):
    """Compiles its network, whose shares of a batch have several sizes."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.net = Net(*self.net)
        self.net.compile(backend="eager")  # runs Dynamo's graphs and guards, without the time of a compiler


class ChannelsLast(Plain):
    """Keeps the weights of a convolution, and its inputs, with their channels last."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        layers = nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1)
        self.net = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def on_train_end(self) -> None:
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in self.net[1].parameters() if p.dim() == 4)


# --- the table ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Arguments of a feature's model and Trainer."""

    model: type[ToyModel] = Plain
    callbacks: Callable[[Path], list[Any]] = lambda folder: []
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)  # arguments of the strategy
    epochs: int = 4
    follows_clock: bool = False  # the number of validations differs from run to run


def _monitors(folder: Path) -> list[Any]:
    return [
        EarlyStopping("val", patience=2, min_delta=1e9, check_on_train_epoch_end=False),
        ModelCheckpoint(folder / "best", "{step}", monitor="val", save_top_k=2),
        ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=7, save_top_k=-1),
        ModelCheckpoint(folder / "watched", "{step}", monitor="val", every_n_train_steps=9, save_top_k=-1),
    ]


FEATURES: dict[str, Setup] = {
    "monitors": Setup(callbacks=_monitors, options={"min_epochs": 4}, epochs=6),
    "plateau": Setup(Plateau, options={"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 2}, epochs=6),
    "accumulation_scheduler": Setup(
        callbacks=lambda folder: [
            GradientAccumulationScheduler({0: 1, 1: 4}),
            ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=3, save_top_k=-1),
        ]
    ),
    "weight_averaging": Setup(callbacks=lambda folder: [callbacks.EMAWeightAveraging(decay=0.9)]),
    "swa": Setup(callbacks=lambda folder: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)]),
    "finetuning": Setup(HeadFirst, callbacks=lambda folder: [Unfreeze()]),
    "pruning": Setup(
        callbacks=lambda folder: [ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)]
    ),
    "epoch_hooks": Setup(Curriculum),
    "torchmetrics": Setup(Metrics),
    "objects": Setup(Objects),
    "static_graph": Setup(ddp={"static_graph": True}),
    "channels_last": Setup(ChannelsLast, ddp={"gradient_as_bucket_view": True}),
    "compiled": Setup(Compiled),
    "clock": Setup(
        callbacks=lambda folder: [Timer(duration="00:01:00:00")],
        options={"val_check_interval": "00:00:00:01"},
        epochs=6,
        follows_clock=True,
    ),
}


def run_feature_of_table(recorder: Recorder, run: Run) -> None:
    """Train with one feature and record the results."""
    L.seed_everything(1, verbose=False)
    setup = FEATURES[run.name]
    folder = Path(recorder.place.folder)
    model = setup.model(recorder, run.step_s)
    callbacks = setup.callbacks(folder)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(check_interval_s=0.03, process_group_backend=run.backend, **setup.ddp),
        max_epochs=setup.epochs,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **setup.options,
    )
    train = DataLoader(Rows(NUM_ROWS), BATCH_SIZE, shuffle=True)
    began = time.monotonic()
    trainer.fit(model, train, DataLoader(Rows(NUM_VAL_ROWS), BATCH_SIZE))
    recorder.write(
        "result",
        took_s=time.monotonic() - began,
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        training=model.training,
        weights={name: value.flatten().tolist() for name, value in model.state_dict().items()},
        lr=[group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        callbacks=[_plain(callback.state_dict()) for callback in trainer.callbacks],
        kept=repr(sorted(getattr(model, "kept", {}).items())),
    )


def _plain(value: Any) -> Any:
    """Numbers and texts of a callback's state, without times and paths."""
    if isinstance(value, dict):
        left_out = ("time_elapsed", "dirpath")
        return {str(key).rsplit("/", 1)[-1]: _plain(each) for key, each in value.items() if key not in left_out}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Tensor):
        return [round(float(each), 4) for each in value.flatten()]
    if isinstance(value, float):
        return round(value, 4)
    return value.rsplit("/", 1)[-1] if isinstance(value, str) else value if isinstance(value, bool | int | None) else str(value)
