"""A job for `cluster_real.py`: a perceptron that computes, for a number of steps, and goes on from its newest checkpoint.

With `--step-s` and `--sample-s` it sleeps in each step: a fixed time, and one that its workers share. So its speed depends on
their number as that of a job that scales, and hardly on the machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

GLOBAL_BATCH = 240
NUM_FEATURES = 256


class Perceptron(L.LightningModule):
    def __init__(self, width: int, step_s: float, sample_s: float) -> None:
        super().__init__()
        self.step_s, self.sample_s = step_s, sample_s
        self.first_at: float | None = None
        self.first_step = 0
        hidden = [part for _ in range(3) for part in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.step_s + self.sample_s * len(batch[0]))
        if batch_idx and self.first_at is None:
            self.first_at, self.first_step = time.monotonic(), self.global_step
        return nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :8].sum(1, keepdim=True))

    def on_train_end(self) -> None:
        if self.first_at is not None:
            print(f"{(self.global_step - self.first_step) / (time.monotonic() - self.first_at):.3f} steps/s", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--sample-s", type=float, default=0.0)
    parser.add_argument("--checkpoints", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DLRoverStrategy(global_batch_size=GLOBAL_BATCH),
        callbacks=[
            DLRoverCallback(window_s=1.0, plan_every_s=2.0, tune=["num_workers"]),
            ModelCheckpoint(
                given.checkpoints, every_n_train_steps=100, save_top_k=1, filename="newest", enable_version_counter=False
            ),
        ],
        max_epochs=-1,
        max_steps=given.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    newest = given.checkpoints / "newest.ckpt"
    data = TensorDataset(torch.randn(9600, NUM_FEATURES))
    loader = DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=True)
    trainer.fit(
        Perceptron(given.width, given.step_s, given.sample_s), loader, ckpt_path=str(newest) if newest.exists() else None
    )


if __name__ == "__main__":
    main()
