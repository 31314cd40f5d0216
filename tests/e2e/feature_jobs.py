"""Scripts of the feature tests: each is what a user of that feature would write, plus the toy model's records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from toy_job import Recorder, Rows, ToyModel, fingerprint, make_trainer

from lightning_dlrover import DLRoverStrategy

NUM_ROWS, BATCH_SIZE = 240, 8


@dataclass(frozen=True)
class Feature:
    """What the script of a feature test uses."""

    name: str
    epochs: int = 3
    max_steps: int = -1
    step_s: float = 0.05  # slow enough for three workers to join before the job ends


class Scheduled(ToyModel):
    """A learning rate that follows steps, and a second factor that follows epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_step, "interval": "step"}}


class Manual(ToyModel):
    """Two optimizers that take turns within one batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.record_share(batch, batch_idx)
        time.sleep(self.step_s)
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type, var-annotated]
            self.recorder.moment("forward" if number == 0 else "second_forward")
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self._loss, self._weight = float(loss.detach()), len(batch[2])

    def configure_optimizers(self) -> Any:
        first, last = self.net[0], self.net[2]
        return [torch.optim.Adam(first.parameters(), 1e-2), torch.optim.SGD(last.parameters(), 1e-2)]


class Normed(ToyModel):
    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class Failing(ToyModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 5:
            raise ZeroDivisionError("a mistake of the user's")
        return super().training_step(batch, batch_idx)


class Logged(ToyModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Means(ToyModel):
    """Logs a name that is not there in every step, means and counts; writes down what Lightning makes of them."""

    NUM_VAL_ROWS = 80
    NAMES = ("rare", "common", "val_mean", "val_count")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 10 == 0:
            self.log("rare", 1000.0, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[2]))
        self.log("common", 1.0, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[2]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_mean", batch[2].float().mean(), sync_dist=True, batch_size=len(batch[2]))
        self.log("val_count", float(len(batch[2])), reduce_fx="sum", sync_dist=True)

    def on_train_epoch_start(self) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items() if name in self.NAMES}
        if "common" in metrics:
            self.recorder.write("metrics", **self.where(), epoch=self.trainer.current_epoch - 1, metrics=metrics)


class Validated(ToyModel):
    """Has all that a repeated validation would disturb: modes, metrics of several kinds, and callbacks that count."""

    NUM_VAL_ROWS = 80

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
        self.mean_id = torchmetrics.MeanMetric()
        self.sum_of_ids = torchmetrics.SumMetric()
        self.all_ids = torchmetrics.CatMetric()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        flags = [module.training for module in self.net.modules()]
        self.recorder.write("next", step=self.trainer.global_step, training=flags, parameters=fingerprint([*self.parameters()]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("trained", 1.0, reduce_fx="sum", on_step=False, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.recorder.moment(f"validation_{batch_idx}")
        super().validation_step(batch, batch_idx)
        ids = batch[2].float()
        self.log("val_mean", ids.mean(), sync_dist=True, batch_size=len(ids))
        self.log("val_count", float(len(ids)), reduce_fx="sum", sync_dist=True)
        self.log("val_max", ids.max(), reduce_fx="max", sync_dist=True)
        self.mean_id(ids)
        self.log("val_metric", self.mean_id)
        self.sum_of_ids.update(ids)
        self.all_ids.update(ids)

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", self.sum_of_ids.compute())
        self.recorder.moment("validation_end")
        self.log("val_unique", float(len(self.all_ids.compute().unique())))
        self.sum_of_ids.reset()
        self.all_ids.reset()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.recorder.moment("validation_ended")
        stopping = self.trainer.early_stopping_callback
        assert isinstance(stopping, EarlyStopping)
        metrics = {k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("val_")}
        self.recorder.write("validated", epoch=self.trainer.current_epoch, waited=stopping.wait_count, metrics=metrics)


class Gathering(Validated):
    """Its validation steps have collectives."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        gathered = self.all_gather(torch.tensor(float(len(batch[2]))))
        assert isinstance(gathered, Tensor)
        self.recorder.moment(f"gathered_{batch_idx}")
        self.log("val_at_once", gathered.sum(), on_step=True, on_epoch=False, sync_dist=True)


class Dying(TorchCheckpointIO):
    """Writes checkpoints so that a worker can be killed meanwhile."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.recorder.moment("saving")
        super().save_checkpoint(checkpoint, path, storage_options)
        self.recorder.moment("saved")


class Alarm(Callback):
    """Sends an alert when training fails."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.recorder.write("alarm", exception=repr(exception))


class Counted(ToyModel):
    """Counts samples in every way that Lightning offers; writes down what comes of it after each epoch."""

    accumulated = 0  # by the script itself

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.logged = torchmetrics.SumMetric()
        self.held = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number, own = len(batch[2]), {"on_step": False, "on_epoch": True}
        self.log("count", float(number), reduce_fx="sum", sync_dist=True, **own)
        self.log("mean_id", batch[2].float().mean(), sync_dist=True, **own)
        self.logged(float(number))
        self.log("metric", self.logged, **own)
        self.held.update(float(number))
        self.accumulated += number
        self._batch_idx = batch_idx
        loss = super().training_step(batch, batch_idx)
        self.recorder.moment(f"counted_{self.trainer.current_epoch}_{batch_idx}")
        return loss

    def on_train_batch_restart(self, batch_idx: int) -> None:
        self.recorder.write("restart", batch=batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("ended", 1.0, reduce_fx="max", on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("held", self.held.compute())
        self.held.reset()

    def on_train_epoch_start(self) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.recorder.write("metrics", epoch=self.trainer.current_epoch - 1, metrics=metrics)


class Toggling(ToyModel):
    """Freezes one half while the other is trained, and steps once in three batches: what GANs do, and manual accumulation."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.record_share(batch, batch_idx)
        time.sleep(self.step_s)
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type, var-annotated]
            self.toggle_optimizer(optimizer)
            self.recorder.moment(f"toggled_{number}")
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1]) / 3
            self.manual_backward(loss)
            if batch_idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self._loss, self._weight = float(loss.detach()), len(batch[2])
        self.recorder.write("trainable", flags=[p.requires_grad for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), 1e-2), torch.optim.SGD(self.net[2].parameters(), 1e-2)]


class Walking(torch.optim.SGD):
    """Keeps state in its parameter groups, as schedule-free optimizers do, and evaluates its closure twice, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        closure()
        with torch.no_grad():
            moved = [(p, p.grad.mul(0.01)) for p in group["params"]]
            for parameter, by in moved:
                parameter.add_(by)
        loss = closure()
        with torch.no_grad():
            for parameter, by in moved:
                parameter.sub_(by).sub_(parameter.grad, alpha=0.1 / group["k"])
        return loss


class Walked(ToyModel):
    def configure_optimizers(self) -> Any:
        return Walking(self.parameters(), 1e-2)


class Newton(ToyModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return NUM_ROWS


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Rows(NUM_ROWS))  # type: ignore[call-overload, no-any-return]


MODELS: dict[str, type[ToyModel]] = {
    "scheduler": Scheduled,
    "manual": Manual,
    "batch_norm": Normed,
    "failing": Failing,
    "csv_logger": Logged,
    "means": Means,
    "single_rows": Means,
    "counted": Counted,
    "counted_windows": Counted,
    "toggling": Toggling,
    "walked": Walked,
    "newton": Newton,
    "validated": Validated,
    "gathering": Gathering,
}


def run_feature(recorder: Recorder, feature: Feature) -> None:
    """The script."""
    L.seed_everything(1, verbose=False)
    folder = Path(recorder.place.folder)
    options: dict[str, Any] = {}
    strategy: Any = DLRoverStrategy(check_interval_s=0.03)
    match feature.name:
        case "toggling":
            strategy = DLRoverStrategy(check_interval_s=0.03, find_unused_parameters=True)
        case "clipping":
            options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        case "counted_windows":
            options = {"accumulate_grad_batches": 3}
        case "bf16":
            options = {"precision": "bf16-mixed"}
        case "csv_logger":
            options = {"logger": CSVLogger(folder, flush_logs_every_n_steps=1), "log_every_n_steps": 1}
        case "checkpoint" | "resume":
            callback = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1)
            options = {"callbacks": [callback], "enable_checkpointing": True}
        case "saving":
            saver = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1)
            alarms: list[Callback] = [Alarm(recorder), OnExceptionCheckpoint(folder / "exceptions")]
            options = {"callbacks": [saver, *alarms], "enable_checkpointing": True, "plugins": [Dying(recorder)]}
        case "early_stopping":
            options = {"callbacks": [EarlyStopping("val", patience=1, min_delta=1e9, check_on_train_epoch_end=False)]}
        case "validated" | "gathering":
            saving = ModelCheckpoint(folder / "checkpoints", "{epoch}", monitor="val_mean", save_top_k=-1)
            stopping = EarlyStopping("val_mean", patience=100, check_on_train_epoch_end=False)
            averaging = EMAWeightAveraging(decay=0.5)
            options = {"callbacks": [averaging, stopping, saving], "enable_checkpointing": True}
        case "by_name":
            strategy = "dlrover"
    model = MODELS.get(feature.name, ToyModel)(recorder, feature.step_s)
    data: Any = Stream() if feature.name == "iterable" else Rows(NUM_ROWS)
    sampler = Backwards() if feature.name == "sampler" else None
    shuffle = None if feature.name in ("iterable", "sampler") else True
    loader = DataLoader(data, BATCH_SIZE, shuffle=shuffle, sampler=sampler, drop_last=feature.name == "drop_last")
    val_loader = DataLoader(Rows(40), BATCH_SIZE) if feature.name == "early_stopping" else None
    if feature.name in ("means", "single_rows"):
        val_loader = DataLoader(Rows(Means.NUM_VAL_ROWS), BATCH_SIZE if feature.name == "means" else 1)
    if feature.name in ("validated", "gathering"):
        val_loader = DataLoader(Rows(Validated.NUM_VAL_ROWS), 2)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=strategy,
        max_epochs=feature.epochs,
        max_steps=feature.max_steps,
        limit_val_batches=None if val_loader else 0,
        **options,
    )
    trainer.fit(model, loader, val_loader)
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    recorder.write("after_fit", step=trainer.global_step, best=best)


def run_two_trainers(recorder: Recorder, feature: Feature) -> None:
    """A script that trains twice, each time with a Trainer of its own."""
    for number in range(2):
        model = ToyModel(recorder, feature.step_s)
        trainer = make_trainer(recorder.place.folder, max_epochs=1)
        trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
        recorder.write("trained", number=number, step=trainer.global_step, world=trainer.world_size)


def run_folds(recorder: Recorder, feature: Feature) -> None:
    """Cross-validation with one strategy and Trainer per fold, and a `fit` of the last Trainer that goes on."""
    for number in range(3):
        model = ToyModel(recorder, feature.step_s)
        trainer = make_trainer(recorder.place.folder, max_epochs=1)
        trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
        recorder.write("trained", number=number, step=trainer.global_step, world=trainer.world_size)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
    recorder.write("trained", number=3, step=trainer.global_step, world=trainer.world_size)


def run_other_model(recorder: Recorder, feature: Feature) -> None:
    """The same script with a model that has other parameters."""
    model = ToyModel(recorder)
    model.net = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1))
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs)
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
