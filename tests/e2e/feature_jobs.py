"""Scripts of the feature tests: each is what a user of that feature would write, plus the toy model's records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
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


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return NUM_ROWS


class Repeating(Backwards):
    """A sampler that picks one worker's samples, as for repeated augmentation."""

    def __init__(self) -> None:
        self.num_replicas, self.rank = 1, 0


class SeveralLoaders(ToyModel):
    """Trains on two loaders at once; the first one, which has fewer batches, holds the rows that are recorded."""

    NUM_SHORT_ROWS, NUM_LONG_ROWS = 20, 720

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        long = batch["long"]
        self.recorder.write("long", epoch=self.trainer.current_epoch, batch=batch_idx, **self.where(), ids=long[2].tolist())
        if batch["short"] is not None:
            return super().training_step(batch["short"], batch_idx)
        self._share = {**self.where(), "epoch": self.trainer.current_epoch, "batch": batch_idx}
        self.recorder.write("share", **self._share, ids=[])
        self.recorder.moment("forward")
        time.sleep(self.step_s)
        loss = nn.functional.mse_loss(self.net(long[0]), long[1])
        self._loss, self._weight = float(loss.detach()), len(long[2])
        return loss


class Fetching(ToyModel):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


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
    "max_size_cycle": SeveralLoaders,
    "max_size": SeveralLoaders,
    "dataloader_iter": Fetching,
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
        case "by_name":
            strategy = "dlrover"
        case "max_size_cycle" | "max_size":
            options = {"accumulate_grad_batches": 4}
        case "split_by_user":
            options = {"use_distributed_sampler": False}
    model = MODELS.get(feature.name, ToyModel)(recorder, feature.step_s)
    data: Any = Stream() if feature.name == "iterable" else Rows(NUM_ROWS)
    sampler = Backwards() if feature.name == "sampler" else None
    shuffle = None if feature.name in ("iterable", "sampler") else True
    loader = DataLoader(data, BATCH_SIZE, shuffle=shuffle, sampler=sampler, drop_last=feature.name == "drop_last")
    val_loader = DataLoader(Rows(40), BATCH_SIZE) if feature.name == "early_stopping" else None
    if feature.name in ("means", "single_rows"):
        val_loader = DataLoader(Rows(Means.NUM_VAL_ROWS), BATCH_SIZE if feature.name == "means" else 1)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=strategy,
        max_epochs=feature.epochs,
        max_steps=feature.max_steps,
        limit_val_batches=None if val_loader else 0,
        **options,
    )
    trainer.fit(model, _training_data(feature.name, loader), val_loader)
    recorder.write("after_fit", step=trainer.global_step)


def _training_data(name: str, loader: DataLoader[Any]) -> Any:
    """What a script of that feature trains on; `loader` unless its data are the feature."""
    rows = Rows(NUM_ROWS)
    match name:
        case "batch_sampler":
            return DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), BATCH_SIZE, False))
        case "max_size_cycle" | "max_size":
            loaders = {
                "short": DataLoader(Rows(SeveralLoaders.NUM_SHORT_ROWS), BATCH_SIZE, shuffle=True),
                "long": DataLoader(Rows(SeveralLoaders.NUM_LONG_ROWS), BATCH_SIZE),
            }
            return CombinedLoader(loaders, name)
        case "rank_aware" | "split_by_user":
            return DataLoader(rows, BATCH_SIZE, sampler=Repeating() if name == "rank_aware" else Backwards())
        case "list":
            return [DataLoader(rows, BATCH_SIZE), range(30)]
    return loader


def run_split(recorder: Recorder, feature: Feature) -> None:
    """A script that splits its data at random; the feature's name is the seed that a worker happens to draw."""
    seed = int(feature.name)
    rows, _ = torch.utils.data.random_split(Rows(2 * NUM_ROWS), [0.5, 0.5], torch.Generator().manual_seed(seed))
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs)
    trainer.fit(ToyModel(recorder, feature.step_s), DataLoader(rows, BATCH_SIZE))


def run_seeded_by_worker(recorder: Recorder, feature: Feature) -> None:
    """A script that seeds each worker differently, for its augmentation."""
    L.seed_everything(1 + int(recorder.place.agent_id.removeprefix("w")), verbose=False)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=BATCH_SIZE, check_interval_s=0.03),
        max_epochs=feature.epochs,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(Reloading(recorder, feature.step_s))


class Reloading(ToyModel):
    """Has fewer rows in each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.live is not None
        self.recorder.write("number", of=self.live.progress.batch)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(NUM_ROWS // (self.trainer.current_epoch + 1)), BATCH_SIZE, shuffle=True)


def run_two_trainers(recorder: Recorder, feature: Feature) -> None:
    """A script that trains twice, each time with a Trainer of its own, on the same data."""
    data = CombinedLoader(DataLoader(Rows(NUM_ROWS), BATCH_SIZE), "max_size")
    for number in range(2):
        model = ToyModel(recorder, feature.step_s)
        trainer = make_trainer(recorder.place.folder, max_epochs=1)
        trainer.fit(model, data)
        recorder.write("trained", number=number, step=trainer.global_step, world=trainer.world_size)


def run_other_model(recorder: Recorder, feature: Feature) -> None:
    """The same script with a model that has other parameters."""
    model = ToyModel(recorder)
    model.net = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1))
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs)
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
