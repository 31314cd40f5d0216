"""An autoencoder on generated digits, in the way of Lightning's first example."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden_dim: int = 8, learning_rate: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(8 * 8, 32), nn.ReLU(), nn.Linear(32, hidden_dim))
        self.decoder = nn.Sequential(nn.Linear(hidden_dim, 32), nn.ReLU(), nn.Linear(32, 8 * 8))

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        loss = self._step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._step(batch), prog_bar=True)

    def _step(self, batch):
        (x,) = batch
        x = x.view(x.size(0), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


def main():
    L.seed_everything(42)
    images = torch.rand(720, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    train, val = random_split(TensorDataset(images), [640, 80], generator=torch.Generator().manual_seed(1))
    model = LitAutoEncoder()
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=CSVLogger(".", name="logs"),
        callbacks=[checkpoint, DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=16))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
            "best": [Path(checkpoint.best_model_path).name, float(checkpoint.best_model_score)],
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
