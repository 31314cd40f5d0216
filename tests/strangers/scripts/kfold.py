"""Cross-validation: a new model and Trainer for each fold; the folds' scores are averaged at the end."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self.net(x).squeeze(1), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x).squeeze(1)
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, y))
        self.log("val_acc", ((logits > 0) == y.bool()).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def folds(size, k):
    order = torch.randperm(size, generator=torch.Generator().manual_seed(9)).tolist()
    parts = [order[i::k] for i in range(k)]
    for i in range(k):
        yield [row for j, part in enumerate(parts) if j != i for row in part], parts[i]


def main():
    x = torch.randn(600, 5, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).float())
    results = []
    for fold, (train, val) in enumerate(folds(len(data), 3)):
        L.seed_everything(100 + fold)
        model = Classifier()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=4,
            logger=False,
            enable_checkpointing=False,
            callbacks=[DLRoverCallback()],
            strategy=DLRoverStrategy(),
        )
        trainer.fit(model, DataLoader(Subset(data, train), 16, shuffle=True), DataLoader(Subset(data, val), 50))
        (validated,) = trainer.validate(model, DataLoader(Subset(data, val), 50), verbose=False)
        results.append(
            {
                "weights": {name: value.tolist() for name, value in model.state_dict().items()},
                "steps": trainer.global_step,
                "epochs": trainer.current_epoch,
                "validated": validated,
            }
        )
        trainer.save_checkpoint(f"fold{fold}.ckpt")
    if path := os.environ.get("STRANGER_RESULT"):
        mean = sum(result["validated"]["val_acc"] for result in results) / len(results)
        Path(path).write_text(json.dumps({"folds": results, "val_acc": mean}))


if __name__ == "__main__":
    main()
