"""A user's script that writes down where its packages were loaded from. It is copied out of the repository before it runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dlrover
from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2)


def main() -> None:
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    # For type checkers both are classes of `lightning`.
    strategy: Any = DLRoverStrategy()
    callback: Any = DLRoverCallback()
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=[callback],
        accelerator="cpu",
        max_epochs=-1,
        max_steps=int(sys.argv[1]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(256, 4)), batch_size=4, shuffle=True))
    seen = {
        "steps": trainer.global_step,
        "world_size": trainer.world_size,
        "package": lightning_dlrover.__file__,
        "path": sys.path,
    }
    Path(f"worker-{os.getpid()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
