"""Scripts with workers that hang or slow down when the test asks for it, for `test_instability.py`."""

from __future__ import annotations

import os
import pdb
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverCallback, DLRoverStrategy, watchdog
from lightning_dlrover.variables import UNSAFE_STACKS
from tests.e2e.toy_job import SEED, Recorder, Rows, ToyModel, make_trainer


@dataclass(frozen=True)
class UnstableSettings:
    num_steps: int = 200
    step_s: float = 0.02
    hang_after_s: float = 1.5
    num_val_rows: int = 0
    val_every: int | None = None
    slow_s: float = 0.0  # extra seconds for validation, for saving a checkpoint and for the first step
    unsafe_stacks: bool = False
    stragglers: tuple[str, ...] = ()  # names of workers that take three times as long


class Unstable(ToyModel):
    """Executes the command in the file `{agent_id}.trouble`, once."""

    def __init__(self, recorder: Recorder, settings: UnstableSettings) -> None:
        slow = 3.0 if recorder.place.agent_id in settings.stragglers else 1.0
        super().__init__(recorder, settings.step_s * slow)
        self._slow_s = settings.slow_s
        self._file = Path(recorder.place.folder) / f"{recorder.place.agent_id}.trouble"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 0:
            time.sleep(self._slow_s)
        if self._file.exists():
            trouble = self._file.read_text()
            self._file.unlink()
            self.recorder.write("trouble", trouble=trouble)
            getattr(self, trouble)()
        return super().training_step(batch, batch_idx)

    def spin(self) -> None:
        while True:
            pass

    def spin_in_c(self) -> None:
        re.match("(a+)+$", "a" * 60 + "b")  # holds Python's lock practically for ever

    def wait_alone(self) -> None:
        dist.barrier()  # no other worker comes to this barrier

    def debug(self) -> None:
        fifo = self._file.with_suffix(".commands")
        os.mkfifo(fifo)
        with fifo.open() as commands:  # blocks until a person types
            pdb.Pdb(stdin=commands, stdout=sys.stdout).set_trace()

    def on_validation_start(self) -> None:
        time.sleep(self._slow_s)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            time.sleep(self._slow_s)


class Saves(L.Callback):
    """Saves a checkpoint in the middle of the training."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 20:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def train_unstable(recorder: Recorder, settings: UnstableSettings) -> None:
    L.seed_everything(SEED, verbose=False)
    if settings.unsafe_stacks:
        os.environ[UNSAFE_STACKS] = "1"
        watchdog.GIL_TIMEOUT_S = 5.0
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=12, check_interval_s=0.03),
        callbacks=[DLRoverCallback(plan_every_s=0, hang_after_s=settings.hang_after_s, history="off"), Saves()],
        max_steps=settings.num_steps,
        val_check_interval=settings.val_every,
        limit_val_batches=None if settings.num_val_rows else 0,
    )
    val_loader = DataLoader(Rows(settings.num_val_rows), 12) if settings.num_val_rows else None
    trainer.fit(Unstable(recorder, settings), DataLoader(Rows(12 * 1000), 12), val_loader)
    recorder.write("after_fit", step=trainer.global_step)
