"""A script with steps that take time in proportion to a worker's share of the global batch, so that more workers are faster.

It sleeps instead of computing: its speed depends neither on other processes nor on the machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

GLOBAL_BATCH = 8


class Sleeper(L.LightningModule):
    def __init__(self, sample_s: float, step_s: float, fail_at: int, until: Path | None) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.sample_s, self.step_s, self.fail_at, self.until = sample_s, step_s, fail_at, until

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.fail_at:
            raise ArithmeticError(f"the script's own error at step {self.fail_at}")
        time.sleep(self.step_s + self.sample_s * len(batch[0]))
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.until is not None:
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(self.until.exists(), all=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--sample-s", type=float, default=0.03)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--until", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=DLRoverStrategy(global_batch_size=GLOBAL_BATCH),
        callbacks=[DLRoverCallback(window_s=0.5, plan_every_s=1.0, tune=["num_workers"])],
        accelerator="cpu",
        max_epochs=-1,
        max_steps=given.steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=GLOBAL_BATCH, shuffle=True)
    trainer.fit(Sleeper(given.sample_s, given.step_s, given.fail_at, given.until), loader)
    if trainer.is_global_zero:
        print(f"trained for {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
