"""A search for hyperparameters: one fit after the other, of which a callback ends unpromising ones by an exception."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Unpromising(Exception):
    """Raised by `Judge`, and caught by the study."""


class Judge(L.Callback):
    def __init__(self, best):
        self.best = best

    def on_validation_end(self, trainer, pl_module):
        error = float(trainer.callback_metrics["val_error"])
        if self.best is not None and error > 1.02 * self.best and not trainer.sanity_checking:
            raise Unpromising(f"{error:.3f} after epoch {trainer.current_epoch}, and {self.best:.3f} is known")


class Net(L.LightningModule):
    def __init__(self, width, rate):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_error", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


def loader(rows, seed):
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x[:, :2] ** 2).sum(1, keepdim=True)), 24)


def main():
    best, trials = None, []
    for number, (width, rate) in enumerate([(24, 0.05), (4, 1e-5), (32, 0.05)]):
        L.seed_everything(number)
        model = Net(width, rate)
        trainer = L.Trainer(
            strategy=DLRoverStrategy(),
            callbacks=[DLRoverCallback(), Judge(best)],
            max_epochs=4,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        try:
            trainer.fit(model, loader(480, 0), loader(96, 1))
        except Unpromising:
            trials.append({"width": width, "pruned_in": trainer.current_epoch})
            continue
        error = float(trainer.callback_metrics["val_error"])
        best = error if best is None else min(best, error)
        trials.append({"width": width, "error": error, "weights": model.net[0].weight.tolist()})
    if path := os.environ.get("STRANGER_RESULT"):
        Path(path).write_text(json.dumps({"trials": trials, "pruned": ["pruned_in" in trial for trial in trials]}))


if __name__ == "__main__":
    main()
