"""A convolutional classifier of generated images: one-cycle schedule, torchmetrics, the best checkpoint is tested."""

import json
import os
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Stripes(Dataset):
    """Images of stripes in one of four directions, with noise."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (size,), generator=generator)
        base = torch.zeros(4, 1, 12, 12)
        base[0, :, ::2] = 1
        base[1, :, :, ::2] = 1
        base[2, :, ::3] = 1
        base[3, :, :, ::3] = 1
        self.images = base[self.labels] + 0.5 * torch.randn(size, 1, 12, 12, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class LitClassifier(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)
        )
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    L.seed_everything(7)
    model = LitClassifier()
    checkpoint = ModelCheckpoint(monitor="val_loss", mode="min", save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=CSVLogger("logs"),
        log_every_n_steps=10,
        callbacks=[checkpoint, LearningRateMonitor("step"), DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    trainer.fit(model, DataLoader(Stripes(640, 0), batch_size=16, shuffle=True), DataLoader(Stripes(96, 1), batch_size=32))
    weights = {name: value.tolist() for name, value in model.net.state_dict().items()}
    steps, epochs = trainer.global_step, trainer.current_epoch
    fit_metrics = {
        name: float(trainer.callback_metrics[name]) for name in ("val_loss", "val_acc", "train_loss_epoch", "train_acc")
    }
    (tested,) = trainer.test(model, DataLoader(Stripes(96, 2), batch_size=32), ckpt_path="best")
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": weights,
            "steps": steps,
            "epochs": epochs,
            "fit": fit_metrics,
            "test": tested,
            "best": Path(checkpoint.best_model_path).name,
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
