"""Scripts of the feature tests: each one is a typical user's script for its feature, plus the toy model's records."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torchmetrics import CatMetric, MeanMetric

from lightning_dlrover import DLRoverStrategy, variables
from tests.e2e.toy_job import Recorder, Rows, ToyModel, fingerprint, make_trainer
from tests.support.waiting import eventually

NUM_ROWS, BATCH_SIZE = 240, 8


@dataclass(frozen=True)
class Feature:
    """Features that a test's script uses."""

    name: str
    epochs: int = 3
    max_steps: int = -1
    step_s: float = 0.05  # until the test lets the job hurry: slow enough for all its changes


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
        self.pace(batch_idx)
        for number, optimizer in enumerate(self.optimizers()):
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
        self.pace(batch_idx)
        generator, critic = self.optimizers()  # type: ignore[attr-defined]
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
    """One branch that no step uses, and another that only some workers' shares of some steps use."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.never, self.rare = nn.Linear(8, 1), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        if self.rare_only:
            never: Tensor = self.never(batch[0]).square().mean()
            return loss + (never + self.use_rare(batch, batch_idx))
        return loss

    rare_only = False

    def use_rare(self, batch: Any, batch_idx: int) -> Tensor:
        """Return true from the second epoch on, in the share that holds row 0 alone."""
        if self.trainer.current_epoch == 0 or 0 in batch[2].tolist():
            used: Tensor = self.rare(batch[0]).square().mean()
            return used
        return torch.zeros(())


class RarelyUnused(Unused):
    rare_only = True


class Normed(ToyModel):
    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class Buffered(ToyModel):
    """Has buffers whose values show how many forward passes have written them, whatever the samples."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norm(torch.full_like(batch[0], 10.0).repeat(2, 1))  # more than one row
        self.passes: Tensor = self.passes + 1
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.recorder.moment(f"backward_{self.trainer.fit_loop.epoch_loop.batch_idx % 3}")

    def record_done(self) -> None:
        super().record_done()
        tracked, mean = int(self.norm.num_batches_tracked), self.norm.running_mean.tolist()  # type: ignore[arg-type, union-attr]
        self.recorder.write("buffers", **self._share, tracked=tracked, mean=mean, passes=int(self.passes))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.01)


class BufferedManual(Buffered):
    """Steps once in three batches by hand."""

    automatic_optimization = False
    window = 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 3 == 2:
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]
        return None  # type: ignore[return-value]


class RawBackward(Manual):
    """Manual optimization that calls `loss.backward()` itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.record_share(batch, batch_idx)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers()[0].step()  # type: ignore[index]
        self._loss, self._weight = float(loss.detach()), len(batch[2])


class RateOfWorld(ToyModel):
    """A learning rate that follows the number of workers that this worker sees when it starts."""

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
    """Logs means, counts and a name that only some steps log; records the values that Lightning computes."""

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

    NUM_ROWS = NUM_ROWS + 1  # the last batch has one sample, so all workers but one get none
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
        # Falls by 1 in each epoch, although each worker's share of the rows rises and falls.
        self.log("val", batch[2].float().mean() - self.trainer.current_epoch, batch_size=len(batch[2]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.99, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "last", "reduce_on_plateau": True},
        }


class RarelyRead(ToyModel):
    """Logs a value that callbacks monitor but do not read after each step; counts collectives between steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[2].float()
        self.log("last", ids.mean(), batch_size=len(ids))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert self.live is not None
        self.recorder.write("collectives", number=self.live.position.collective)


class SeveralSets(ToyModel):
    """Validates and tests on several sets, some with fewer samples than there are workers."""

    NUM_ROWS = (1, 40, 2)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        ids = batch[2].float()
        self.log("id", ids.mean(), batch_size=len(ids))

    test_step = validation_step

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.recorder.write("validated", metrics=_plain(dict(self.trainer.callback_metrics)))


def run_several_sets(recorder: Recorder, feature: Feature) -> None:
    """Train, validate and test."""
    sets = [DataLoader(Rows(number), BATCH_SIZE) for number in SeveralSets.NUM_ROWS]
    model = SeveralSets(recorder, feature.step_s)
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs, num_sanity_val_steps=2)
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE), sets)
    for run in (trainer.validate, trainer.test):
        recorder.write("evaluated", results=run(model, sets, verbose=False))


class Closing(Callback):
    """A user's callback that reads its monitored value when training ends."""

    monitor = "last"

    def on_train_epoch_end(self, trainer: L.Trainer, model: Any) -> None:
        model.recorder.write("closed", value=float(trainer.callback_metrics["last"]))


class OnRankZero(ToyModel):
    """Saves the best checkpoints with a callback that exists on rank 0 alone."""

    def configure_callbacks(self) -> Any:
        path = Path(self.recorder.place.folder) / "checkpoints"
        return [ModelCheckpoint(path, monitor="loss")] if self.recorder.place.agent_id == "w0" else []


class Follower(Callback):
    """A user's callback that reads its monitored value after each step and each epoch."""

    monitor = "last"

    def on_train_batch_end(self, trainer: L.Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = float(trainer.callback_metrics["last"])
        model.recorder.write("followed", epoch=trainer.current_epoch, batch=batch_idx, value=value)

    def on_train_epoch_start(self, trainer: L.Trainer, model: Any) -> None:
        if model.live is not None and 0 < model.live.loaders.first.cursor < model.live.loaders.first.num_epoch_batches:
            return  # this worker is admitted inside of an epoch, and the values are those of the last step
        # A step's value that nothing monitors is not reduced: each worker keeps its own.
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "ids_step"}
        if "ids_epoch" in metrics:
            states = {type(c).__name__: _plain(c.state_dict()) for c in trainer.callbacks}  # type: ignore[attr-defined]
            model.recorder.write("metrics", **model.where(), epoch=trainer.current_epoch - 1, metrics=metrics, states=states)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a callback's state, without the one that Lightning saves and does not restore: a joiner lacks it."""
    return {k: float(v) for k, v in state.items() if isinstance(v, float | int | Tensor) and k != "current_score"}


class Validated(ToyModel):
    """Has everything that a repeated validation could disturb: modes, metrics of several kinds, and callbacks that count."""

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
        self.log("val_unique", float(len(self.all_ids.compute().unique())))  # type: ignore[no-untyped-call]
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
    """Runs collectives in its validation steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        gathered = self.all_gather(torch.tensor(float(len(batch[2]))))
        assert isinstance(gathered, Tensor)
        self.recorder.moment(f"gathered_{batch_idx}")
        self.log("val_at_once", gathered.sum(), on_step=True, on_epoch=False, sync_dist=True)


class Dying(TorchCheckpointIO):
    """Writes checkpoints with a moment at which a worker can be killed."""

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
    """Counts samples in every way that Lightning offers, and records the totals after each epoch."""

    accumulated = 0  # samples counted by the script itself

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.logged = torchmetrics.SumMetric()
        self.held = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = len(batch[2])
        own: dict[str, Any] = {"on_step": False, "on_epoch": True}
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


class CountedManual(Counted):
    """Counts in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]


class Drifting(ToyModel):
    """Changes a tensor on one worker alone: one of each kind, `APART` steps after the other."""

    APART = 110

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.register_buffer("constant", torch.ones(5))
        self.register_buffer("own", torch.zeros(3))  # each worker writes its own, as in BatchNorm

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.own += batch[0].mean()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        number, rest = divmod(self.trainer.global_step, self.APART)
        if rest or self.trainer.global_rank != 1 or not 0 < number <= 3:
            return
        weight: Any = self.net[0].weight
        state = self.trainer.optimizers[0].state[weight]
        tensor: Any = (weight.data, self.constant, state["exp_avg_sq"])[number - 1]
        tensor.view(-1)[-1] += tensor.abs().max()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


class MaxNorm(ToyModel):
    """Looks rows up that are rescaled where they are read."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self.words = nn.Embedding(NUM_ROWS, 8, max_norm=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] + self.words(batch[2]), *batch[1:]), batch_idx)


class Toggling(ToyModel):
    """Freezes one half while it trains the other, and steps once in three batches: typical of GANs and manual accumulation."""

    automatic_optimization = False
    window = 3

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.record_share(batch, batch_idx)
        self.pace(batch_idx)
        for number, optimizer in enumerate(self.optimizers()):
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


class Accumulating(ToyModel):
    """Accumulates gradients over several batches, and records its weights at the end."""

    def await_loss(self) -> None:
        """Wait until this worker's round has ended."""
        assert self.live is not None
        world = self.live.world
        eventually(lambda: world.broken, "the end of the round that another worker was lost from", 20)

    def on_train_end(self) -> None:
        self.recorder.write("weights", values=[float(value) for p in self.parameters() for value in p.flatten()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.02)


class ManualWindows(Accumulating):
    """Steps once in three batches. A reduction may be aborted on one worker after another worker has its result."""

    automatic_optimization = False
    window = 3
    was_aborted = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.record_share(batch, batch_idx)
        self.pace(batch_idx)
        optimizer: Any = self.optimizers()
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.manual_backward(loss / 3)
        place = f"added_{self.trainer.current_epoch}_{batch_idx}"
        self.recorder.moment(place)
        if self.recorder.is_armed(f"aborted_{place}") and not self.was_aborted:
            self.was_aborted = True
            self.await_loss()
            for parameter in self.parameters():
                parameter.grad = torch.full_like(parameter, 1e3)  # garbage, as an aborted reduction may leave
            assert self.live is not None
            raise self.live.world.broken_error()
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        self._loss, self._weight = float(loss.detach()), len(batch[2])


class GatheringWindows(Accumulating):
    """Runs a collective in each batch of an accumulation window."""

    def __init__(self, recorder: Recorder, step_s: float = 0.0) -> None:
        super().__init__(recorder, step_s)
        self._computed: set[tuple[int, int]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        place = self.trainer.current_epoch, batch_idx
        if place in self._computed:
            self.recorder.write("again", batch=batch_idx, in_step=self._in_step)
            self.recorder.moment("again")
        self._computed.add(place)
        loss = super().training_step(batch, batch_idx)
        gathered = self.all_gather(torch.tensor(float(len(batch[2]))))
        assert isinstance(gathered, Tensor)
        self.recorder.moment(f"gathered_{place[0]}_{batch_idx}")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.recorder.is_armed(f"late_{self.trainer.current_epoch}_{batch_idx}"):
            self.await_loss()

    @property
    def _in_step(self) -> bool:
        assert self.live is not None
        return self.live.position.in_step


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
    """A user's own sampler."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return NUM_ROWS


class Repeating(Backwards):
    """A sampler that picks one worker's samples, as repeated augmentation does."""

    def __init__(self) -> None:
        self.num_replicas, self.rank = 1, 0


class SeveralLoaders(ToyModel):
    """Trains on two loaders at once. The first one has fewer batches and holds the rows that are recorded."""

    NUM_SHORT_ROWS, NUM_LONG_ROWS = 20, 720

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        long = batch["long"]
        self.recorder.write("long", epoch=self.trainer.current_epoch, batch=batch_idx, **self.where(), ids=long[2].tolist())
        if batch["short"] is not None:
            return super().training_step(batch["short"], batch_idx)
        self._share = {**self.where(), "epoch": self.trainer.current_epoch, "batch": batch_idx}
        self.recorder.write("share", **self._share, ids=[])
        self.recorder.moment("forward")
        self.pace(batch_idx)
        loss = nn.functional.mse_loss(self.net(long[0]), long[1])
        self._loss, self._weight = float(loss.detach()), len(long[2])
        return loss


class Fetching(ToyModel):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class OwnBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Rows(NUM_ROWS), BATCH_SIZE))


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
    "bf16": Normed,
    "failing": Failing,
    "saved": Logged,
    "one_device": OneDevice,
    "means": Means,
    "single_rows": Means,
    "max_size_cycle": SeveralLoaders,
    "max_size": SeveralLoaders,
    "dataloader_iter": Fetching,
    "counted": Counted,
    "counted_windows": Counted,
    "drifting": Drifting,
    "max_norm": MaxNorm,
    "counted_manual": CountedManual,
    "buffered": Buffered,
    "buffered_windows": Buffered,
    "buffered_manual": BufferedManual,
    "toggling": Toggling,
    "hourly": RarelyRead,
    "each_moment": RarelyRead,
    "on_rank_zero": OnRankZero,
    "manual_windows": ManualWindows,
    "gathering_windows": GatheringWindows,
    "walked": Walked,
    "newton": Newton,
    "validated": Validated,
    "gathering": Gathering,
}


def run_feature(recorder: Recorder, feature: Feature) -> None:
    """Train with the chosen feature."""
    L.seed_everything(1, verbose=False)
    folder = Path(recorder.place.folder)
    options: dict[str, Any] = {}
    strategy: Any = DLRoverStrategy(check_interval_s=0.03)
    match feature.name:
        case "hook_state":
            state: Any = PowerSGDState(process_group=None)
            strategy = DLRoverStrategy(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)
        case "drifting":
            strategy = DLRoverStrategy(check_interval_s=0.03, on_drift="repair", broadcast_buffers=False)
        case "toggling":
            strategy = DLRoverStrategy(check_interval_s=0.03, find_unused_parameters=True)
        case "clipping":
            options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
        case "counted_windows" | "buffered_windows":
            options = {"accumulate_grad_batches": 3}
        case "gathering_windows":
            options = {"accumulate_grad_batches": 5}
        case "hourly" | "each_moment":
            interval = timedelta(hours=1) if feature.name == "hourly" else timedelta(0)
            clock: dict[str, Any] = {"train_time_interval": interval, "save_on_train_epoch_end": False}
            saver = ModelCheckpoint(folder / "checkpoints", "{step}-{last:.3f}", "last", save_top_k=-1, **clock)
            options = {"callbacks": [Closing(), saver], "enable_checkpointing": True}
        case "bf16":
            options = {"precision": "bf16-mixed"}
        case "saved" | "resume":
            callback = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1)
            options = {"callbacks": [callback], "enable_checkpointing": True}
            if feature.name == "saved":
                options |= {"logger": CSVLogger(folder, flush_logs_every_n_steps=1), "log_every_n_steps": 1}
        case "saving":
            saver = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1)
            alarms: list[Callback] = [Alarm(recorder), OnExceptionCheckpoint(folder / "exceptions")]
            options = {"callbacks": [saver, *alarms], "enable_checkpointing": True, "plugins": [Dying(recorder)]}
        case "early_stopping":
            options = {"callbacks": [EarlyStopping("val", patience=1, min_delta=1e9, check_on_train_epoch_end=False)]}
        case "one_device":
            stopping = EarlyStopping("val", patience=1, check_on_train_epoch_end=True)
            best = ModelCheckpoint(folder / "best", "{epoch}", monitor="num_ids", mode="max", save_on_train_epoch_end=True)
            options = {"callbacks": [stopping, best, Follower()], "enable_checkpointing": True}
        case "validated" | "gathering":
            saving = ModelCheckpoint(folder / "checkpoints", "{epoch}", monitor="val_mean", save_top_k=-1)
            stopping = EarlyStopping("val_mean", patience=100, check_on_train_epoch_end=False)
            averaging = callbacks.EMAWeightAveraging(decay=0.5)
            options = {"callbacks": [averaging, stopping, saving], "enable_checkpointing": True}
        case "by_name" | "batch_sampler":
            strategy = "dlrover"
        case "max_size_cycle" | "max_size":
            options = {"accumulate_grad_batches": 4}
        case "split_by_user":
            options = {"use_distributed_sampler": False}
        case "late_validation":
            options = {"check_val_every_n_epoch": 50, "num_sanity_val_steps": 0}
    model = MODELS.get(feature.name, ToyModel)(recorder, feature.step_s)
    num_rows = {"one_device": OneDevice.NUM_ROWS, "bf16": NUM_ROWS + BATCH_SIZE // 2}.get(feature.name, NUM_ROWS)
    data = Rows(num_rows)
    sampler = Backwards() if feature.name == "sampler" else None
    shuffle = None if feature.name == "sampler" else True
    batch_size = 1 if feature.name == "single_sample" else BATCH_SIZE
    loader = DataLoader(data, batch_size, shuffle=shuffle, sampler=sampler, drop_last=feature.name == "bf16")
    val_loader = DataLoader(Rows(40), BATCH_SIZE) if feature.name == "early_stopping" else None
    if feature.name in ("means", "single_rows"):
        val_loader = DataLoader(Rows(Means.NUM_VAL_ROWS), BATCH_SIZE if feature.name == "means" else 1)
    if feature.name == "one_device":
        val_loader = DataLoader(Rows(OneDevice.NUM_VAL_ROWS), 8)
    if feature.name in ("validated", "gathering"):
        val_loader = DataLoader(Rows(Validated.NUM_VAL_ROWS), 2)
    if feature.name == "late_validation":
        val_loader = DataLoader(Rows(40), BATCH_SIZE, sampler=Repeating())
    trainer = make_trainer(
        recorder.place.folder,
        strategy=strategy,
        max_epochs=feature.epochs,
        max_steps=feature.max_steps,
        limit_val_batches=None if val_loader else 0,
        **options,
    )
    trainer.fit(model, _training_data(feature.name, loader), val_loader)
    best_path: str = getattr(trainer.checkpoint_callback, "best_model_path", "")
    recorder.write("after_fit", step=trainer.global_step, best=best_path)
    if feature.name == "one_device":
        recorder.write("validated", metrics=trainer.validate(model, val_loader, verbose=False)[0])


def _training_data(name: str, loader: DataLoader[Any]) -> Any:
    """Return a feature's training data: `loader`, unless the data are the feature."""
    rows = Rows(NUM_ROWS)
    match name:
        case "own_batches":
            return DataLoader(OwnBatches(), batch_size=None)
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
    """Split the data at random. The feature's name is the seed that the worker draws."""
    seed = int(feature.name)
    rows, _ = torch.utils.data.random_split(Rows(2 * NUM_ROWS), [0.5, 0.5], torch.Generator().manual_seed(seed))
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs)
    trainer.fit(ToyModel(recorder, feature.step_s), DataLoader(rows, BATCH_SIZE))


def run_seeded_by_worker(recorder: Recorder, feature: Feature) -> None:
    """Seed each worker differently, for its augmentation."""
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
        children = len(multiprocessing.active_children())
        self.recorder.write("number", of=self.live.progress.now.batch, children=children)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        rows = Rows(NUM_ROWS // (self.trainer.current_epoch + 1))
        return DataLoader(rows, BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True)


class PreparedRows(L.LightningDataModule):
    """Writes its rows to a file, in a way that two workers must not do at once."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.file = recorder, Path(recorder.place.folder) / "rows.pt"

    def prepare_data(self) -> None:
        self.recorder.write("prepares", part="datamodule")
        self.file.unlink(missing_ok=True)
        time.sleep(0.3)
        torch.save(NUM_ROWS, self.file)

    def setup(self, stage: str) -> None:
        self.rows = Rows(torch.load(self.file))


class PreparingOnce(ToyModel):
    prepare_data_per_node = False

    def prepare_data(self) -> None:
        self.recorder.write("prepares", part="module")


class DividedRows(PreparedRows):
    """Divides the batch by the number of workers by itself, and makes its loader for each epoch."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        sampler: Sampler[Any] = DistributedSampler(self.rows, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(self.rows, 2 * BATCH_SIZE // self.trainer.world_size, sampler=sampler)


class RowsDividedByGroup(PreparedRows):
    """Divides by the number of workers in the process group, which a joiner is not in when it makes its first loader."""

    def train_dataloader(self) -> Any:
        num_workers = dist.get_world_size() if dist.is_initialized() else 1
        return DataLoader(self.rows, 6 * BATCH_SIZE // num_workers, shuffle=True)


def run_prepared(recorder: Recorder, feature: Feature) -> None:
    """Train on prepared data; the feature's name is the datamodule's."""
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs, reload_dataloaders_every_n_epochs=1)
    trainer.fit(PreparingOnce(recorder, feature.step_s), datamodule=globals()[feature.name](recorder))


class Signalled(ToyModel):
    """Sets a handler of SIGTERM while it trains."""

    def on_train_start(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.recorder.write("signalled"))


def run_with_surroundings(recorder: Recorder, feature: Feature) -> None:
    """Train after the script has made a process group; the feature's name says when it sets a handler of SIGTERM."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if feature.name == "before":
        signal.signal(signal.SIGTERM, lambda *_: recorder.write("signalled"))
    model = (Signalled if feature.name == "while" else ToyModel)(recorder, feature.step_s)
    strategy = DLRoverStrategy(global_batch_size=BATCH_SIZE, check_interval_s=0.03)
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs, strategy=strategy)
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))


def run_in_pool(recorder: Recorder, feature: Feature) -> None:
    os.environ[variables.POOL] = "research"
    run_feature(recorder, feature)


def run_two_trainers(recorder: Recorder, feature: Feature) -> None:
    """Train twice on the same data, each time with a new Trainer."""
    data = CombinedLoader(DataLoader(Rows(NUM_ROWS), BATCH_SIZE), "max_size")
    for number in range(2):
        model = ToyModel(recorder, feature.step_s)
        trainer = make_trainer(recorder.place.folder, max_epochs=1)
        trainer.fit(model, data)
        recorder.write("trained", number=number, step=trainer.global_step, world=trainer.world_size)


class Folded(ToyModel):
    """Can be killed, or cut off from the others, when all workers have met at the end of a fit."""

    def on_train_end(self) -> None:
        assert self.live is not None
        live: Any = self.live
        end_together = live.fits._end_together

        def end() -> None:
            end_together()
            self.recorder.moment("met")
            if self.recorder.is_armed("cut_off"):
                self.recorder.write("cut_off")
                self.recorder.place.armed.unlink()
                raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

        live.fits._end_together = end


def run_folds(recorder: Recorder, feature: Feature) -> None:
    """Cross-validate with one strategy and Trainer per fold, then continue the `fit` of the last Trainer."""
    for number in range(3):
        model = Folded(recorder, feature.step_s)
        trainer = make_trainer(recorder.place.folder, max_epochs=1)
        trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
        recorder.write("trained", number=number, step=trainer.global_step, world=trainer.world_size)
        recorder.moment(f"after_fit_{number}")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
    recorder.write("trained", number=3, step=trainer.global_step, world=trainer.world_size)


class SlowToEnd(ToyModel):
    """Ends its `fit` only when a round has been decided that admits another worker."""

    def on_train_end(self) -> None:
        live = self.live
        assert live is not None
        assert live.formation is not None
        if self.trainer.current_epoch == 0 or live.formation.size > 1:
            return
        self.recorder.write("ends")
        number = live.formation.round.number
        live.world.membership.wait_for(
            lambda view: view.round if view.round and view.round.number > number else None, 60, "a joiner"
        )


def run_two_fits(recorder: Recorder, feature: Feature) -> None:
    """Train two models one after the other. The first `fit` ends with a joiner at the door."""
    for number in range(2):
        model = (SlowToEnd if number == 0 else ToyModel)(recorder, feature.step_s)
        trainer = make_trainer(recorder.place.folder, max_epochs=1)
        trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
        recorder.write("trained", number=number, step=trainer.global_step, world=trainer.world_size)


def run_other_model(recorder: Recorder, feature: Feature) -> None:
    """Run the same script with a model that has different parameters."""
    model = ToyModel(recorder)
    model.net = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1))
    trainer = make_trainer(recorder.place.folder, max_epochs=feature.epochs)
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), BATCH_SIZE))
