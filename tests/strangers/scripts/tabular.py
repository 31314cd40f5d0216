"""A tabular library: it builds its own pytorch_lightning Trainer from a configuration, and passes users' options on."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


@dataclass
class DataConfig:
    target: str
    continuous_cols: list
    categorical_cols: list


@dataclass
class TrainerConfig:
    batch_size: int = 24
    max_epochs: int = 3
    early_stopping_patience: int = 3
    trainer_kwargs: dict = field(default_factory=dict)


class TabularDataset(Dataset):
    def __init__(self, frame, config):
        self.y = frame[config.target].astype(np.int64)
        self.continuous = np.stack([frame[name] for name in config.continuous_cols], 1).astype(np.float32)
        self.categorical = np.stack([frame[name] for name in config.categorical_cols], 1).astype(np.int64)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"target": self.y[i], "continuous": self.continuous[i], "categorical": self.categorical[i]}


class TabularDatamodule(pl.LightningDataModule):
    def __init__(self, train, validation, config, batch_size):
        super().__init__()
        self.frames, self.config, self.batch_size = (train, validation), config, batch_size

    def setup(self, stage=None):
        self.train, self.validation = (TabularDataset(frame, self.config) for frame in self.frames)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, self.batch_size, shuffle=False)


class CategoryEmbeddingModel(pl.LightningModule):
    def __init__(self, cardinalities, num_continuous):
        super().__init__()
        self.save_hyperparameters()
        self.embeddings = nn.ModuleList([nn.Embedding(n, 3) for n in cardinalities])
        width = 3 * len(cardinalities) + num_continuous
        self.backbone = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        embedded = [table(x["categorical"][:, i]) for i, table in enumerate(self.embeddings)]
        return {"logits": self.head(self.backbone(torch.cat([*embedded, x["continuous"]], 1)))}

    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch)["logits"], batch["target"])
        self.log("train_loss", loss, on_epoch=True, on_step=False, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch)["logits"]
        self.log("valid_loss", self.loss(logits, batch["target"]), on_epoch=True)
        self.log("valid_accuracy", (logits.argmax(1) == batch["target"]).float().mean(), on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class TabularModel:
    """The library's public interface."""

    def __init__(self, data_config, trainer_config):
        self.data_config, self.trainer_config = data_config, trainer_config

    def fit(self, train, validation, callbacks=()):
        pl.seed_everything(42)
        datamodule = TabularDatamodule(train, validation, self.data_config, self.trainer_config.batch_size)
        cardinalities = [int(train[c].max()) + 1 for c in self.data_config.categorical_cols]
        self.model = CategoryEmbeddingModel(cardinalities, len(self.data_config.continuous_cols))
        self.early_stopping = EarlyStopping("valid_loss", patience=self.trainer_config.early_stopping_patience)
        self.checkpoint = ModelCheckpoint("saved_models", "{epoch}", monitor="valid_loss", save_top_k=1)
        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=self.trainer_config.max_epochs,
            logger=False,
            callbacks=[self.early_stopping, self.checkpoint, *callbacks],
            **self.trainer_config.trainer_kwargs,
        )
        self.trainer.fit(self.model, datamodule)
        self.final = {name: value.tolist() for name, value in self.model.state_dict().items()}
        best = torch.load(self.checkpoint.best_model_path, weights_only=False)
        self.model.load_state_dict(best["state_dict"])
        return self

    @torch.no_grad()
    def predict(self, frame):
        self.model.eval()
        loader = DataLoader(TabularDataset(frame, self.data_config), 64)
        return np.concatenate([self.model(batch)["logits"].softmax(1).numpy() for batch in loader])


def make_frame(size, seed):
    generator = np.random.default_rng(seed)
    frame = {"a": generator.normal(size=size), "b": generator.normal(size=size)}
    frame["kind"] = generator.integers(0, 6, size)
    frame["place"] = generator.integers(0, 4, size)
    frame["target"] = frame["a"] + (frame["kind"] % 2) * frame["b"] > 0
    frame["kind"][0], frame["place"][0] = 5, 3
    return frame


def main():
    tabular = TabularModel(
        DataConfig("target", ["a", "b"], ["kind", "place"]),
        TrainerConfig(trainer_kwargs={"strategy": DLRoverStrategy()}),
    )
    tabular.fit(make_frame(960, 0), make_frame(192, 1), callbacks=[DLRoverCallback()])
    predicted = tabular.predict(make_frame(50, 2))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": tabular.final,
            "steps": tabular.trainer.global_step,
            "epochs": tabular.trainer.current_epoch,
            "metrics": {n: float(tabular.trainer.callback_metrics[n]) for n in ("valid_loss", "valid_accuracy", "train_loss")},
            "best": Path(tabular.checkpoint.best_model_path).name,
            "stopping": [tabular.early_stopping.wait_count, float(tabular.early_stopping.best_score)],
            "predicted": predicted.tolist(),
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
