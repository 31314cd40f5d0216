"""A script that records every call of the hooks of a changing job, and trains on as the tests of hooks need."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.live.hooks import WorldInfo
from tests.e2e.toy_job import SEED, Recorder, Rows, ToyModel, ToySettings, make_trainer


class Hooked(ToyModel):
    """Has the hooks as methods of the module."""

    def on_world_change(self, former: WorldInfo | None, world: WorldInfo) -> None:
        record_change(self.recorder, "module", former, world, self.trainer.strategy.world)  # type: ignore[attr-defined]
        if self.recorder.is_armed("hook_fails"):
            raise ValueError(f"no place for {world.size} workers")
        if self.recorder.is_armed("hook_saves"):
            self.trainer.save_checkpoint(f"{self.recorder.place.folder}/in_hook.ckpt")
        self.recorder.moment("world_change")

    def on_notice(self, notice: float) -> None:
        self.recorder.write("notice", by="module", notice=notice, seen=self.trainer.strategy.notice)  # type: ignore[attr-defined]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        world = self.trainer.strategy.world  # type: ignore[attr-defined]
        assert (world.size, world.rank) == (self.trainer.world_size, self.trainer.global_rank)

    def on_train_end(self) -> None:
        self.recorder.write("train_end", world=self.trainer.strategy.world.size)  # type: ignore[attr-defined]


def record_change(recorder: Recorder, by: str, former: WorldInfo | None, world: WorldInfo, now: WorldInfo) -> None:
    recorder.write(
        "change",
        by=by,
        former=[former.size, former.rank, former.round] if former is not None else None,
        world=[world.size, world.rank, world.round],
        now=[now.size, now.rank, now.round],
    )


def train_with_hooks(recorder: Recorder, settings: ToySettings) -> None:
    """Train the toy model with hooks of the callback and of the module."""
    L.seed_everything(SEED, verbose=False)

    def on_change(trainer: L.Trainer, module: L.LightningModule, former: WorldInfo | None, world: WorldInfo) -> None:
        record_change(recorder, "callback", former, world, trainer.strategy.world)  # type: ignore[attr-defined]

    def on_notice(trainer: L.Trainer, module: L.LightningModule, notice: float) -> None:
        recorder.write("notice", by="callback", notice=notice, seen=trainer.strategy.notice)  # type: ignore[attr-defined]

    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=settings.batch_size, check_interval_s=0.03),
        callbacks=[DLRoverCallback(plan_every_s=0, history="off", on_world_change=on_change, on_notice=on_notice)],
        max_epochs=settings.max_epochs,
        limit_val_batches=None if settings.num_val_rows else 0,
        max_steps=settings.limits.get("max_steps", -1),
    )
    val_loader = DataLoader(Rows(settings.num_val_rows), settings.batch_size) if settings.num_val_rows else None
    trainer.fit(Hooked(recorder, settings.step_s), DataLoader(Rows(settings.num_rows), settings.batch_size), val_loader)
    recorder.write("after_fit", step=trainer.global_step)
