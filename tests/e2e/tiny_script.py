"""A small script with Lightning. It trains until a file appears or for some steps."""

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


class TinyModel(L.LightningModule):
    def __init__(self, until: Path | None, step_s: float) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.until = until
        self.step_s = step_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.step_s)
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.until is not None:
            # As with `EarlyStopping`, all workers stop after the same step.
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(self.until.exists(), all=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--window-s", type=float, default=0.5)
    parser.add_argument("--fail-after-fit", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        callbacks=[DLRoverCallback(window_s=given.window_s, plan_every_s=1.0)],
        accelerator="cpu",
        max_epochs=-1,
        max_steps=given.steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=8, shuffle=True)
    trainer.fit(TinyModel(given.until, given.step_s), loader)
    if trainer.is_global_zero:
        print(f"trained for {trainer.global_step} steps", flush=True)
    if given.fail_after_fit:
        raise OSError("could not write the final model")


if __name__ == "__main__":
    main()
