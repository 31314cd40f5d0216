"""Scripts with profiled workers. Rank 1 takes longer over its part of a step, so the others wait for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from tests.e2e.table_job import DIM, KINDS, NUM_ROWS, TableModel, TableSettings
from tests.e2e.toy_job import SEED, Recorder, Rows, ToyModel, make_trainer

LOOKUPS = len(KINDS)
TABLE_BYTES = 4 * DIM * sum(NUM_ROWS)
DENSE_FLOPS = {"dense": 3 * 2 * (8 * 16 + 16), "tables": 3 * 2 * (DIM * len(KINDS) * 16 + 16)}
"""FLOPs per sample of the two models' linear layers."""


@dataclass(frozen=True)
class Profiled:
    with_tables: bool
    fast_s: float = 0.01
    slow_s: float = 0.16


class Slow:
    """Mixin with a `training_step` that takes a time depending on the rank."""

    settings_: Profiled
    trainer: Any

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.settings_.slow_s if self.trainer.global_rank == 1 else self.settings_.fast_s)
        loss: Tensor = super().training_step(batch, batch_idx)  # type: ignore[misc]
        return loss


class SlowToy(Slow, ToyModel):
    """Data-parallel model."""


class SlowTables(Slow, TableModel):
    """Model with sharded tables."""


def train_profiled(recorder: Recorder, settings: Profiled) -> None:
    L.seed_everything(SEED, verbose=False)
    module: Any = (
        SlowTables(recorder, TableSettings(step_s=0.0, users_optimizer=True)) if settings.with_tables else SlowToy(recorder)
    )
    module.settings_ = settings
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=8, check_interval_s=0.03),
        callbacks=[DLRoverCallback(window_s=0.3, plan_every_s=0, history="off")],
        max_epochs=-1,
    )
    trainer.fit(module, DataLoader(Rows(240), 8, shuffle=True, num_workers=1))
    assert torch.get_num_threads() == 1
