"""A DLRM of torchrec: embedding bags and two MLPs, jagged tensors from a collate function, one optimizer for all."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

FEATURES, SIZES, DIM = ["user", "item"], [40, 60], 8


class Clicks(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.dense = torch.randn(size, 3, generator=generator)
        self.ids = torch.stack([torch.randint(0, n, (size,), generator=generator) for n in SIZES], 1)
        self.labels = ((self.ids.sum(1) % 3 == 0) ^ (self.dense[:, 0] > 0)).float()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.dense[i], self.ids[i], self.labels[i]


def collate(samples):
    dense, ids, labels = (torch.stack(column) for column in zip(*samples, strict=True))
    lengths = torch.ones(len(samples) * len(FEATURES), dtype=torch.long)
    return dense, KeyedJaggedTensor(keys=FEATURES, values=ids.t().flatten(), lengths=lengths), labels


class LitDLRM(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=size, feature_names=[name])
                for name, size in zip(FEATURES, SIZES, strict=True)
            ],
        )
        self.dense_arch = nn.Sequential(nn.Linear(3, DIM), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(DIM + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        bottom = self.dense_arch(dense)
        vectors = torch.stack([bottom, *self.tables(sparse).to_dict().values()], 1)
        first, second = torch.triu_indices(3, 3, offset=1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2))[:, first, second]
        return self.over_arch(torch.cat([bottom, pairs], 1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        dense, sparse, labels = batch
        loss = F.binary_cross_entropy_with_logits(self(dense, sparse), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def main():
    L.seed_everything(21)
    model = LitDLRM()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        callbacks=[DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    trainer.fit(model, DataLoader(Clicks(960), batch_size=24, shuffle=True, collate_fn=collate))
    if path := os.environ.get("STRANGER_RESULT"):
        dense = {**model.dense_arch.state_dict(prefix="dense."), **model.over_arch.state_dict(prefix="over.")}
        result = {
            "weights": {name: value.tolist() for name, value in dense.items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "train_loss": float(trainer.callback_metrics["train_loss"]),
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
