"""Scripts of the feature tests: each is what a user of that feature would write, plus the toy model's records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics import CatMetric, MeanMetric
from toy_job import Recorder, Rows, ToyModel, make_trainer

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


class Gan(ToyModel):
    """Two networks, each with an optimizer and a loss of its own, as in Lightning's GAN example."""

    automatic_optimization = False

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.critic = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.record_share(batch, batch_idx)
        time.sleep(self.step_s)
        generator, critic = self.optimizers()  # type: ignore[attr-defined, misc]
        x, y, _ = batch
        self.recorder.moment("forward")
        with self.toggled_optimizer(generator):
            loss = -self.critic(torch.cat([x, self.net(x)], 1)).mean() + nn.functional.mse_loss(self.net(x), y)
            self.manual_backward(loss)
            generator.step()
            generator.zero_grad()
        self.recorder.moment("second_forward")
        with self.toggled_optimizer(critic):
            fake = self.critic(torch.cat([x, self.net(x).detach()], 1))
            self.manual_backward((fake - 1).square().mean() + self.critic(torch.cat([x, y], 1)).square().mean())
            critic.step()
            critic.zero_grad()
        self._loss, self._weight = float(loss.detach()), len(batch[2])

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.net, self.critic)]


class Unused(ToyModel):
    """A branch that no step uses, and one that only some shares of some steps do."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.never, self.rare = nn.Linear(8, 1), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.rare_only:
            return loss + (self.never(batch[0]).square().mean() + self.use_rare(batch, batch_idx))
        return loss

    rare_only = False

    def use_rare(self, batch: Any, batch_idx: int) -> Tensor:
        """From the second epoch on, in the share that holds row 0 alone."""
        if self.trainer.current_epoch == 0 or 0 in batch[2].tolist():
            return self.rare(batch[0]).square().mean()
        return torch.zeros(())


class RarelyUnused(Unused):
    rare_only = True


class Normed(ToyModel):
    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class RawBackward(Manual):
    """Manual optimization that calls `loss.backward()` itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.record_share(batch, batch_idx)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers()[0].step()  # type: ignore[index]
        self._loss, self._weight = float(loss.detach()), len(batch[2])


class RateOfWorld(ToyModel):
    """A learning rate that follows the number of workers, as this worker sees it when it starts."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.001)
        world_size = self.trainer.world_size
        by_world = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: world_size)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_world, "interval": "step"}}


class ZeroOptimizer(ToyModel):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=1e-3)


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


class OneDevice(ToyModel):
    """Logs as scripts for one device do: without `sync_dist`. Every value is a function of the samples alone."""

    NUM_ROWS = NUM_ROWS + 1  # the last batch is of one sample: all workers but one have none
    NUM_VAL_ROWS = 40

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.mean_id, self.all_ids = MeanMetric(), CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        ids = batch[2].float()
        self.log("ids", ids.mean(), on_step=True, on_epoch=True, batch_size=len(ids))
        self.log("last", ids.mean(), batch_size=len(ids))
        self.log("largest", ids.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", ids.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("count", float(len(ids)), on_step=False, on_epoch=True, reduce_fx="sum")
        if 0 in ids:
            self.log("of_row_0", float(self.trainer.current_epoch), on_step=False, on_epoch=True)
        self.mean_id(ids)
        self.log("metric", self.mean_id, on_step=False, on_epoch=True)
        self.all_ids.update(ids)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("num_ids", float(len(self.all_ids.compute())))
        self.all_ids.reset()
        self.recorder.moment("epoch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Falls by 1 in each epoch, though each worker's share of the rows rises and falls.
        self.log("val", batch[2].float().mean() - self.trainer.current_epoch, batch_size=len(batch[2]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.99, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "last", "reduce_on_plateau": True},
        }


class Follower(Callback):
    """A callback of the user's own that reads what it monitors after each step and each epoch."""

    monitor = "last"

    def on_train_batch_end(self, trainer: L.Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = float(trainer.callback_metrics["last"])
        model.recorder.write("followed", epoch=trainer.current_epoch, batch=batch_idx, value=value)

    def on_train_epoch_start(self, trainer: L.Trainer, model: Any) -> None:
        # A step's value that nothing monitors stays each worker's own.
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "ids_step"}
        if "ids_epoch" in metrics:
            states = {type(c).__name__: _plain(c.state_dict()) for c in trainer.callbacks}  # type: ignore[attr-defined]
            model.recorder.write("metrics", **model.where(), epoch=trainer.current_epoch - 1, metrics=metrics, states=states)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: float(value) for key, value in state.items() if isinstance(value, float | int | Tensor)}


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
    "gan": Gan,
    "unused": Unused,
    "rarely_unused": RarelyUnused,
    "raw_backward": RawBackward,
    "rate_of_world": RateOfWorld,
    "zero": ZeroOptimizer,
    "single_sample": Normed,
    "batch_norm": Normed,
    "failing": Failing,
    "csv_logger": Logged,
    "one_device": OneDevice,
    "means": Means,
    "single_rows": Means,
}


def run_feature(recorder: Recorder, feature: Feature) -> None:
    """The script."""
    L.seed_everything(1, verbose=False)
    folder = Path(recorder.place.folder)
    options: dict[str, Any] = {}
    strategy: Any = DLRoverStrategy(check_interval_s=0.03)
    match feature.name:
        case "clipping":
            options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        case "bf16":
            options = {"precision": "bf16-mixed"}
        case "csv_logger":
            options = {"logger": CSVLogger(folder, flush_logs_every_n_steps=1), "log_every_n_steps": 1}
        case "checkpoint" | "resume":
            callback = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1)
            options = {"callbacks": [callback], "enable_checkpointing": True}
        case "early_stopping":
            options = {"callbacks": [EarlyStopping("val", patience=1, min_delta=1e9, check_on_train_epoch_end=False)]}
        case "one_device":
            stopping = EarlyStopping("val", patience=1, check_on_train_epoch_end=True)
            best = ModelCheckpoint(folder / "best", "{epoch}", monitor="num_ids", mode="max", save_on_train_epoch_end=True)
            options = {"callbacks": [stopping, best, Follower()], "enable_checkpointing": True}
        case "by_name":
            strategy = "dlrover"
    model = MODELS.get(feature.name, ToyModel)(recorder, feature.step_s)
    num_rows = OneDevice.NUM_ROWS if feature.name == "one_device" else NUM_ROWS
    data: Any = Stream() if feature.name == "iterable" else Rows(num_rows)
    sampler = Backwards() if feature.name == "sampler" else None
    shuffle = None if feature.name in ("iterable", "sampler") else True
    batch_size = 1 if feature.name == "single_sample" else BATCH_SIZE
    loader = DataLoader(data, batch_size, shuffle=shuffle, sampler=sampler, drop_last=feature.name == "drop_last")
    val_loader = DataLoader(Rows(40), BATCH_SIZE) if feature.name == "early_stopping" else None
    if feature.name in ("means", "single_rows"):
        val_loader = DataLoader(Rows(Means.NUM_VAL_ROWS), BATCH_SIZE if feature.name == "means" else 1)
    if feature.name == "one_device":
        val_loader = DataLoader(Rows(OneDevice.NUM_VAL_ROWS), 8)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=strategy,
        max_epochs=feature.epochs,
        max_steps=feature.max_steps,
        limit_val_batches=None if val_loader else 0,
        **options,
    )
    trainer.fit(model, loader, val_loader)
    recorder.write("after_fit", step=trainer.global_step)
    if feature.name == "one_device":
        recorder.write("validated", metrics=trainer.validate(model, val_loader, verbose=False)[0])


def run_two_trainers(recorder: Recorder, feature: Feature) -> None:
    """A script that trains twice, each time with a Trainer of its own."""
    for number in range(2):
        model = ToyModel(recorder, feature.step_s)
        trainer = make_trainer(recorder.place.folder, max_epochs=1)
        trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
        recorder.write("trained", number=number, step=trainer.global_step, world=trainer.world_size)


def run_other_model(recorder: Recorder, feature: Feature) -> None:
    """The same script with a model that has other parameters."""
    model = ToyModel(recorder)
    model.net = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1))
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs)
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
