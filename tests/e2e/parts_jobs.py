"""Scripts of workers whose memory holds only some of their share's samples."""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from tests.e2e.toy_job import Recorder, Rows, ToyModel, make_trainer, streamed, write_files

__all__ = ["PartsRun", "run_in_parts", "write_files"]

NUM_ROWS, BATCH_SIZE, EPOCHS = 164, 8, 2
"""The last batch of an epoch has 4 rows."""


@dataclass(frozen=True)
class PartsRun:
    """One run of a script.

    Args:
        room: samples that fit into each worker's memory, by its number; those of others, and of one at 0, have no limit.
        fails_in: where memory runs out: "forward", "backward", or "logged", after the step has logged its values.
    """

    kind: str
    room: tuple[int, ...] = ()
    fails_in: str = "forward"
    step_s: float = 0.0
    max_share: Any = None
    gpu_mib: int = 0  # memory of the GPU that the worker may use; 0: it trains on the CPU


class OutOfMemoryInBackward(torch.autograd.Function):
    """Passes its input on, and runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise out_of_memory()


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (by hand)")


class Small(ToyModel):
    """Runs out of memory like a GPU, once a pass has too many samples."""

    def __init__(self, recorder: Recorder, run: PartsRun) -> None:
        super().__init__(recorder, run.step_s)
        number = int(recorder.place.agent_id.removeprefix("w"))
        self.room = run.room[number] if number < len(run.room) else 0
        self.fails_in = run.fails_in
        self.failed: weakref.ref[Tensor] | None = None  # something of the last pass that did not fit

    def predict(self, x: Tensor) -> Tensor:
        assert self.failed is None or self.failed() is None, "memory of a failed pass is still in use"
        hidden = self.net[0](x)
        if self.room and len(x) > self.room:
            self.failed = weakref.ref(hidden)
            self.recorder.write("full", samples=len(x), world=self.trainer.world_size)
            if self.fails_in == "forward":
                raise out_of_memory()
            if self.fails_in == "backward":
                hidden = OutOfMemoryInBackward.apply(hidden)  # type: ignore[no-untyped-call]
        predicted: Tensor = self.net[2](self.net[1](hidden))
        return predicted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.record_share(batch, batch_idx)
        self.recorder.moment("forward")
        self.recorder.pace(self.step_s)
        loss = nn.functional.mse_loss(self.predict(batch[0]), batch[1])
        self._loss, self._weight = float(loss.detach()), len(batch[2])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.write(
            "ended",
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
            epoch=self.trainer.current_epoch,
            batch=batch_idx,
            loss=float(outputs["loss"]),
        )
        super().on_train_batch_end(outputs, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.02, momentum=0.5)


class Wide(Small):
    """Needs about 200 MiB of a GPU for each sample."""

    def predict(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x)
        copies = hidden.repeat_interleave(1 << 20 if x.is_cuda else 1, dim=1).relu()
        predicted: Tensor = self.net[2](copies.reshape(*hidden.shape, -1).mean(2))
        return predicted


class Logging(Small):
    """Logs values of steps and epochs, reduced at once and not, and torchmetrics objects."""

    def __init__(self, recorder: Recorder, run: PartsRun) -> None:
        super().__init__(recorder, run)
        self.error, self.largest = torchmetrics.MeanSquaredError(), torchmetrics.MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        ids = batch[2].float()
        self.error(torch.zeros_like(ids), ids)
        self.largest.update(ids)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("mean", ids.mean(), on_step=True, on_epoch=True)
        self.log("sum", ids.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("max", ids.max(), on_step=True, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("synced", ids.sum(), on_step=True, on_epoch=False, reduce_fx="sum", sync_dist=True)
        if self.fails_in == "logged" and self.room and len(ids) > self.room:
            raise out_of_memory()
        return {"loss": loss, "ids": ids, "square": ids.square().mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if len(outputs["ids"]) == len(batch[2]):  # else this is the batch before a loss, and the step was repeated
            torch.testing.assert_close(outputs["ids"], batch[2].float())
            torch.testing.assert_close(outputs["square"], batch[2].float().square().mean())
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items() if name != "loss"}
        self.recorder.write(
            "step_values", world=self.trainer.world_size, batch=batch_idx, rank=self.trainer.global_rank, **values
        )

    def on_train_epoch_end(self) -> None:
        self.log("largest", self.largest.compute())
        self.largest.reset()


class Sparing(Small):
    """Some parts use a branch that others leave out; batches are dictionaries with tuples, lists of texts and numbers."""

    def __init__(self, recorder: Recorder, run: PartsRun) -> None:
        super().__init__(recorder, run)
        self.rare = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["pair"]
        assert batch["names"] == [f"row {i}" for i in batch["ids"].tolist()]
        assert batch["scale"] == 1.0
        is_rare = (batch["ids"] % 7 == 0).float()[:, None]
        loss = super().training_step((x, y, batch["ids"]), batch_idx)
        if is_rare.any():
            extra: Tensor = (self.rare(x).square() * is_rare).mean()
            return loss + extra
        return loss


Pair = namedtuple("Pair", ["x", "y"])


def as_dictionary(rows: list[Any]) -> dict[str, Any]:
    x, y, ids = zip(*rows, strict=True)
    names = [f"row {i}" for i in ids]
    return {"pair": Pair(torch.stack(x), torch.stack(y)), "ids": torch.tensor(ids), "names": names, "scale": 1.0}


class Opaque:
    """A batch of another library, which shows no tensors."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


class OpaqueBatches(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, ids = zip(*batch.rows, strict=True)
        return super().training_step((torch.stack(x), torch.stack(y), torch.tensor(ids)), batch_idx)


class OwnParts(OpaqueBatches):
    """Cuts its batches itself."""

    def split_batch(self, batch: Opaque, sizes: list[int]) -> list[Opaque]:
        rows = iter(batch.rows)
        return [Opaque([next(rows) for _ in range(size)]) for size in sizes]


class InPlace(Small):
    """Changes its batches in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2).add_(1)
        return super().training_step(batch, batch_idx)


class Manual(Small):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record_done()


class Contrastive(Small):
    """Compares its samples with those of all workers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        everyone: Any = self.all_gather(torch.zeros(1))
        return super().training_step(batch, batch_idx) + everyone.sum()


@dataclass(frozen=True)
class Script:
    """What differs from the plain script."""

    model: type[Small] = Small
    options: dict[str, Any] = field(default_factory=dict)
    plugins: Callable[[], list[Any]] = list
    collate: Any = None
    streams: bool = False


SCRIPTS = {
    "plain": Script(),
    "accumulation": Script(options={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "scaled": Script(plugins=lambda: [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10))]),
    "logged": Script(Logging),
    "dictionaries": Script(Sparing, collate=as_dictionary),
    "stream": Script(streams=True),
    "own_parts": Script(OwnParts, collate=Opaque),
    "in_place": Script(InPlace),
    "opaque": Script(OpaqueBatches, collate=Opaque),
    "wide": Script(Wide),
    "manual": Script(Manual),
    "contrastive": Script(Contrastive),
}


def run_in_parts(recorder: Recorder, run: PartsRun) -> None:
    """Train with one script and record the results."""
    L.seed_everything(1, verbose=False)
    script = SCRIPTS[run.kind]
    model = script.model(recorder, run)
    if run.gpu_mib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((run.gpu_mib << 20) / total)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=BATCH_SIZE, check_interval_s=0.03, max_share=run.max_share),
        accelerator="gpu" if run.gpu_mib else "cpu",
        devices=1,
        max_epochs=EPOCHS,
        plugins=script.plugins(),
        **script.options,
    )
    data: Any = Rows(NUM_ROWS)
    if script.streams:
        folder = Path(recorder.place.folder) / "train"
        data = streamed(folder, shuffle=True)
    loader = DataLoader(data, BATCH_SIZE, shuffle=None if script.streams else True, collate_fn=script.collate)
    trainer.fit(model, loader)
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    recorder.write(
        "result",
        step=trainer.global_step,
        weights={name: value.flatten().tolist() for name, value in model.state_dict().items()},
        metrics={name: float(value) for name, value in trainer.callback_metrics.items() if "step" not in name},
        zeroed=progress.zero_grad.total.completed,
    )
