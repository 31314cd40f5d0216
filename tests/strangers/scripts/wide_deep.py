"""Wide & Deep: an optimizer for each part, plain rows from a collate function, early stopping on the AUC."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Rows(Dataset):
    """Rows as dictionaries, as they would come from a CSV file."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.job = torch.randint(0, 9, (size,), generator=generator)
        self.city = torch.randint(0, 25, (size,), generator=generator)
        self.age = torch.rand(size, generator=generator)
        score = (self.job % 2).float() * 2 - 1 + (self.city % 5 == 0).float() - self.age
        self.label = (score + 0.3 * torch.randn(size, generator=generator) > 0).float()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return {"job": int(self.job[i]), "city": int(self.city[i]), "age": float(self.age[i]), "label": float(self.label[i])}


def collate(rows):
    return {
        "ids": torch.tensor([[row["job"], row["city"]] for row in rows]),
        "age": torch.tensor([[row["age"]] for row in rows]),
        "label": torch.tensor([row["label"] for row in rows]),
    }


class WideAndDeep(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.wide = nn.Embedding(9 * 25, 1)
        self.job, self.city = nn.Embedding(9, 4), nn.Embedding(25, 4)
        self.deep = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))
        self.loss = nn.BCEWithLogitsLoss()
        self.metrics = MetricCollection({"auc": BinaryAUROC(), "acc": BinaryAccuracy()}, prefix="val_")
        self.automatic_optimization = False

    def forward(self, batch):
        ids = batch["ids"]
        crossed = self.wide(ids[:, 0] * 25 + ids[:, 1])
        deep = self.deep(torch.cat([self.job(ids[:, 0]), self.city(ids[:, 1]), batch["age"]], 1))
        return (crossed + deep).squeeze(1)

    def training_step(self, batch, batch_idx):
        wide, deep = self.optimizers()
        loss = self.loss(self(batch), batch["label"])
        wide.zero_grad()
        deep.zero_grad()
        self.manual_backward(loss)
        wide.step()
        deep.step()
        self.log("loss", loss, batch_size=len(batch["label"]), prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.metrics.update(torch.sigmoid(self(batch)), batch["label"].long())
        self.log_dict(self.metrics, batch_size=len(batch["label"]))

    def configure_optimizers(self):
        deep = [*self.job.parameters(), *self.city.parameters(), *self.deep.parameters()]
        return torch.optim.Adagrad(self.wide.parameters(), lr=0.05), torch.optim.Adam(deep, lr=5e-3)


def main():
    L.seed_everything(0, workers=True)
    model = WideAndDeep()
    stopping = EarlyStopping("val_auc", mode="max", patience=2)
    checkpoint = ModelCheckpoint("checkpoints", "{epoch}", monitor="val_auc", mode="max", save_top_k=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        callbacks=[stopping, checkpoint, DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    train = DataLoader(Rows(960, 0), batch_size=24, shuffle=True, collate_fn=collate, num_workers=1)
    trainer.fit(model, train, DataLoader(Rows(200, 1), batch_size=40, collate_fn=collate))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "metrics": {name: float(trainer.callback_metrics[name]) for name in ("val_auc", "val_acc")},
            "stopping": [stopping.wait_count, float(stopping.best_score)],
            "best": Path(checkpoint.best_model_path).name,
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
