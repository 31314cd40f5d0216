"""A script for several devices: it divides its batch by their number, in loaders that are made for each epoch."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

TOTAL_BATCH = 24


class Waves(L.LightningDataModule):
    def setup(self, stage):
        x = torch.linspace(-3, 3, 480).unsqueeze(1)
        order = torch.randperm(480, generator=torch.Generator().manual_seed(1))
        self.rows = TensorDataset(x[order], torch.sin(2 * x[order]))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=TOTAL_BATCH // self.trainer.world_size, shuffle=True)


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 1))
        self.curve = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("error", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def on_train_epoch_end(self):
        self.curve.append(float(self.trainer.callback_metrics["error"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)}


def main():
    L.seed_everything(11)
    model = Regressor()
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        callbacks=[DLRoverCallback()],
        max_epochs=6,
        reload_dataloaders_every_n_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, datamodule=Waves())
    if path := os.environ.get("STRANGER_RESULT"):
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        result = {
            "weights": weights,
            "steps": trainer.global_step,
            "rate": rate,
            "last": float(trainer.callback_metrics["error"]),
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
