"""The script of agents that start several workers each. Every worker records its steps, and rank 0 the end.

Steps from `SLOW_FROM` on are slow until a file `fast` exists in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from tests.e2e.toy_job import Rows
from tests.support.quiet_trainer import quiet_trainer

SLOW_FROM, SLOW_S = 24, 0.5
NUM_ROWS, BATCH_SIZE, EPOCHS = 160, 8, 3
NUM_STEPS = EPOCHS * NUM_ROWS // BATCH_SIZE


class GroupedModel(L.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("large", torch.arange(2000, dtype=torch.float32))  # large enough to travel outside the message
        self.folder = folder
        self.trace = folder / "trace"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= SLOW_FROM and not (self.folder / "fast").exists():
            time.sleep(SLOW_S)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.loss, self.size = float(loss.detach()), len(batch[0])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        line = {
            "step": self.trainer.global_step,
            "pid": os.getpid(),
            "agent": os.environ.get("DLROVER_AGENT_ID", ""),
            "in_epoch": self.trainer.current_epoch,
            "loss": self.loss,
            "size": self.size,
        }
        with self.trace.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_epoch_end(self) -> None:
        line = {"epoch": self.trainer.current_epoch, "mean": float(self.trainer.callback_metrics["loss"])}
        with self.trace.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    trainer = quiet_trainer(strategy=DLRoverStrategy(global_batch_size=BATCH_SIZE, check_interval_s=0.03), max_epochs=EPOCHS)
    model = GroupedModel(given.folder)
    trainer.fit(model, DataLoader(Rows(NUM_ROWS), batch_size=BATCH_SIZE, shuffle=True))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), given.folder / "weights")


if __name__ == "__main__":
    main()
