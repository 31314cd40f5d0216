"""A script with workers that are killed, or fail, in a hook before their first batch."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverStrategy


class UnluckyModel(L.LightningModule):
    def __init__(self, hook: str, bad: Path, until: Path) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.hook, self.bad, self.until = hook, bad, until

    def setup(self, stage: str) -> None:
        self._meet_fate("setup")

    def on_fit_start(self) -> None:
        self._meet_fate("on_fit_start")

    def on_train_start(self) -> None:
        self._meet_fate("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._meet_fate("on_train_batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # As with `EarlyStopping`, all workers stop after the same step.
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(self.until.exists(), all=False)

    def _meet_fate(self, hook: str) -> None:
        """Kill the only worker that arrives while the file `bad` exists; fail if `bad` is a folder."""
        if hook != self.hook:
            return
        if self.bad.is_dir():
            raise OSError(f"process {os.getpid()} finds no device")
        try:
            self.bad.unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("hook")
    parser.add_argument("bad", type=Path)
    parser.add_argument("until", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        accelerator="cpu",
        max_epochs=-1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(TensorDataset(torch.ones(4096, 8)), batch_size=8, shuffle=True)
    trainer.fit(UnluckyModel(given.hook, given.bad, given.until), loader)


if __name__ == "__main__":
    main()
