"""DeepFM for click-through rates: embeddings by feature column, FM and deep part, L2 penalty, AUC on held-out rows."""

import json
import os
from collections import namedtuple
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

SparseFeat = namedtuple("SparseFeat", ["name", "vocabulary_size", "embedding_dim"])
DenseFeat = namedtuple("DenseFeat", ["name", "dimension"])


class FM(nn.Module):
    def forward(self, inputs):
        square_of_sum = inputs.sum(dim=1).pow(2)
        sum_of_square = inputs.pow(2).sum(dim=1)
        return 0.5 * (square_of_sum - sum_of_square).sum(dim=1, keepdim=True)


class DeepFM(L.LightningModule):
    def __init__(self, sparse, dense, hidden=(32, 16), l2_reg_embedding=1e-5):
        super().__init__()
        self.sparse, self.dense, self.l2 = sparse, dense, l2_reg_embedding
        self.embedding_dict = nn.ModuleDict({f.name: nn.Embedding(f.vocabulary_size, f.embedding_dim) for f in sparse})
        self.linear_dict = nn.ModuleDict({f.name: nn.Embedding(f.vocabulary_size, 1) for f in sparse})
        for table in [*self.embedding_dict.values(), *self.linear_dict.values()]:
            nn.init.normal_(table.weight, std=1e-2)
        width = sum(f.embedding_dim for f in sparse) + len(dense)
        layers = []
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.dnn = nn.Sequential(*layers, nn.Linear(width, 1, bias=False))
        self.fm = FM()
        self.bias = nn.Parameter(torch.zeros(1))
        self.auc = BinaryAUROC()

    def forward(self, ids, values):
        embedded = torch.stack([self.embedding_dict[f.name](ids[:, i]) for i, f in enumerate(self.sparse)], 1)
        linear = sum(self.linear_dict[f.name](ids[:, i]) for i, f in enumerate(self.sparse))
        deep = self.dnn(torch.cat([embedded.flatten(1), values], 1))
        return torch.sigmoid(linear + self.fm(embedded) + deep + self.bias).squeeze(1)

    def training_step(self, batch, batch_idx):
        ids, values, y = batch
        loss = F.binary_cross_entropy(self(ids, values), y)
        penalty = sum(table.weight.square().sum() for table in self.embedding_dict.values())
        total = loss + self.l2 * penalty
        self.log_dict({"binary_crossentropy": loss, "total_loss": total}, on_epoch=True)
        return total

    def validation_step(self, batch, batch_idx):
        ids, values, y = batch
        predicted = self(ids, values)
        self.auc.update(predicted, y.long())
        self.log("val_logloss", F.binary_cross_entropy(predicted, y))

    def on_validation_epoch_end(self):
        self.log("val_auc", self.auc.compute())
        self.auc.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def clicks(size, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(0, n, (size,), generator=generator) for n in (20, 30, 11)], 1)
    values = torch.randn(size, 2, generator=generator)
    score = (ids[:, 0] % 3 - 1) + (ids[:, 1] % 2) * values[:, 0]
    return TensorDataset(ids, values, (torch.rand(size, generator=generator) < torch.sigmoid(score)).float())


def main():
    L.seed_everything(1024)
    sparse = [SparseFeat("user", 20, 4), SparseFeat("item", 30, 4), SparseFeat("hour", 11, 4)]
    model = DeepFM(sparse, [DenseFeat("age", 1), DenseFeat("price", 1)])
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, callbacks=[DLRoverCallback()], strategy=DLRoverStrategy()
    )
    trainer.fit(model, DataLoader(clicks(1280, 0), batch_size=32, shuffle=True), DataLoader(clicks(256, 1), batch_size=64))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "metrics": {n: float(trainer.callback_metrics[n]) for n in ("val_auc", "val_logloss", "total_loss_epoch")},
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
