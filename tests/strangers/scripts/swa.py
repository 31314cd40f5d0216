"""Stochastic weight averaging by Lightning's own callback, over the last epochs of a cosine schedule."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


def main():
    L.seed_everything(8)
    x = torch.randn(480, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.square().mean(1, keepdim=True))
    model = Net()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        logger=False,
        callbacks=[StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=2), DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    trainer.fit(model, DataLoader(data, 16, shuffle=True), DataLoader(TensorDataset(*data[:96]), 32))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
