"""LightningCLI with a configuration file: model, data, optimizer and strategy are named in YAML."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dlrover  # noqa: F401


class Regressor(L.LightningModule):
    def __init__(self, features: int = 6, width: int = 16, activation: nn.Module | None = None):
        super().__init__()
        self.save_hyperparameters(ignore="activation")
        self.net = nn.Sequential(nn.Linear(features, width), activation or nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = F.huber_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.huber_loss(self.net(batch[0]), batch[1]))


class Waves(L.LightningDataModule):
    def __init__(self, rows: int = 800, batch_size: int = 20, features: int = 6):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        x = torch.randn(self.hparams.rows, self.hparams.features, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(x, torch.sin(x).sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.data, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.data[:100]), self.hparams.batch_size)


def main():
    config = Path(__file__).with_suffix(".yaml")
    cli = LightningCLI(Regressor, Waves, args=["fit", "--config", str(config)])
    if path := os.environ.get("STRANGER_RESULT"):
        trainer = cli.trainer
        result = {
            "weights": {name: value.tolist() for name, value in cli.model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
