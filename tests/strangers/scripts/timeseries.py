"""A forecaster: windows of a series, quantile loss, a rate that falls on plateaus, early stopping."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Windows(Dataset):
    def __init__(self, length, offset, past=24, future=6):
        time = torch.arange(offset, offset + length).float()
        noise = 0.1 * torch.randn(length, generator=torch.Generator().manual_seed(offset))
        self.series = torch.sin(time / 4) + 0.3 * torch.sin(time / 11) + noise
        self.past, self.future = past, future

    def __len__(self):
        return len(self.series) - self.past - self.future + 1

    def __getitem__(self, i):
        middle = i + self.past
        x = {"encoder": self.series[i:middle].unsqueeze(1), "index": torch.tensor(i)}
        return x, (self.series[middle : middle + self.future], None)


def collate(samples):
    x = {"encoder": torch.stack([s[0]["encoder"] for s in samples]), "index": torch.stack([s[0]["index"] for s in samples])}
    return x, (torch.stack([s[1][0] for s in samples]), None)


class QuantileLoss(nn.Module):
    def __init__(self, quantiles=(0.1, 0.5, 0.9)):
        super().__init__()
        self.quantiles = list(quantiles)

    def forward(self, predicted, target):
        losses = []
        for i, q in enumerate(self.quantiles):
            errors = target - predicted[..., i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
        return torch.cat(losses, dim=-1).mean()


class Forecaster(L.LightningModule):
    def __init__(self, hidden_size=12, future=6, learning_rate=0.02, reduce_on_plateau_patience=0):
        super().__init__()
        self.save_hyperparameters()
        self.loss = QuantileLoss()
        self.rnn = nn.GRU(1, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, future * 3)

    def forward(self, x):
        _, hidden = self.rnn(x["encoder"])
        return self.out(hidden[-1]).view(-1, self.hparams.future, 3)

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "val")

    def step(self, batch, name):
        x, (y, _) = batch
        loss = self.loss(self(x), y)
        self.log(f"{name}_loss", loss, on_step=name == "train", on_epoch=True, prog_bar=True, batch_size=len(y))
        return {"loss": loss, "n_samples": len(y)}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=self.hparams.reduce_on_plateau_patience, threshold=0.2
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "frequency": 1},
        }


def main():
    L.seed_everything(42)
    model = Forecaster()
    stopping = EarlyStopping(monitor="val_loss", min_delta=1e-1, patience=2, mode="min")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=8,
        gradient_clip_val=0.1,
        logger=CSVLogger("logs"),
        callbacks=[stopping, LearningRateMonitor("epoch"), DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    train = DataLoader(Windows(669, 0), batch_size=16, shuffle=True, collate_fn=collate)
    trainer.fit(model, train, DataLoader(Windows(125, 700), batch_size=32, collate_fn=collate))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "metrics": {name: float(trainer.callback_metrics[name]) for name in ("val_loss", "train_loss_epoch")},
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "stopped": [stopping.stopped_epoch, stopping.wait_count, float(stopping.best_score)],
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
