"""A LightningDataModule that writes its data to disk once, counts the calls of its hooks and is tested after the fit."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class SquaresDataModule(L.LightningDataModule):
    def __init__(self, data_dir="data", batch_size=16):
        super().__init__()
        self.save_hyperparameters()
        self.epochs_begun = 0

    def prepare_data(self):
        file = Path(self.hparams.data_dir) / "squares.pt"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            x = torch.randn(800, 4, generator=torch.Generator().manual_seed(0))
            fresh = file.with_suffix(f".{os.getpid()}")
            torch.save({"x": x, "y": x.square().sum(1, keepdim=True)}, fresh)
            fresh.rename(file)

    def setup(self, stage):
        saved = torch.load(Path(self.hparams.data_dir) / "squares.pt")
        data = TensorDataset(saved["x"], saved["y"])
        self.train, self.val, self.test = random_split(data, [640, 80, 80], generator=torch.Generator().manual_seed(42))

    def train_dataloader(self):
        self.epochs_begun += 1
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, self.hparams.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.test, self.hparams.batch_size)

    def state_dict(self):
        return {"epochs_begun": self.epochs_begun}

    def load_state_dict(self, state_dict):
        self.epochs_begun = state_dict["epochs_begun"]


class Regressor(L.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        self.seen = 0

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(17)
    datamodule, model = SquaresDataModule(), Regressor()
    checkpoint = ModelCheckpoint("checkpoints", "{epoch}", monitor="val_loss", save_weights_only=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        callbacks=[checkpoint, DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    trainer.fit(model, datamodule=datamodule)
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    steps, epochs = trainer.global_step, trainer.current_epoch
    (tested,) = trainer.test(model, datamodule=datamodule)
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": weights,
            "steps": steps,
            "epochs": epochs,
            "epochs_begun": datamodule.epochs_begun,
            "tested": tested,
            "best": Path(checkpoint.best_model_path).name,
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
