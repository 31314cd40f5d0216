"""An average of the weights kept by a callback, which validates with it and saves it with checkpoints."""

import copy
import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class EMA(Callback):
    def __init__(self, decay=0.95):
        self.decay = decay
        self.shadow = None
        self.backup = None
        self.num_updates = 0

    def on_fit_start(self, trainer, pl_module):
        if self.shadow is None:
            self.shadow = copy.deepcopy(pl_module.state_dict())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, value in pl_module.state_dict().items():
            self.shadow[name].mul_(decay).add_(value, alpha=1 - decay)

    def on_validation_start(self, trainer, pl_module):
        self.backup = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.backup)
        self.backup = None

    def state_dict(self):
        return {"shadow": self.shadow, "num_updates": self.num_updates}

    def load_state_dict(self, state_dict):
        self.shadow, self.num_updates = state_dict["shadow"], state_dict["num_updates"]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    L.seed_everything(5)
    x = torch.randn(900, 7, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    model, ema = Net(), EMA()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        num_sanity_val_steps=0,
        callbacks=[ema, DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    trainer.fit(model, DataLoader(data, 20, shuffle=True), DataLoader(TensorDataset(*data[:180]), 30))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "average": {name: value.tolist() for name, value in ema.shadow.items()},
            "updates": ema.num_updates,
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
