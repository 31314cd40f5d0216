"""A schedule-free optimizer: averages live in its state, counters in its groups; it is switched for evaluation."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Gradients are taken at y, z is the plain iterate, x the average that is evaluated."""

    def __init__(self, params, lr=0.1, beta=0.9, warmup_steps=10):
        defaults = {"lr": lr, "beta": beta, "warmup_steps": warmup_steps, "k": 0, "weight_sum": 0.0, "train_mode": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in training mode")
            lr = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup_steps"])
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], share)
                p.add_(p.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
                state["z"].sub_(p.grad, alpha=lr)
            group["k"] += 1
        return loss


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_start(self):
        self.optimizers().optimizer.train()

    def on_validation_epoch_start(self):
        self.optimizers().optimizer.eval()

    def on_validation_epoch_end(self):
        self.optimizers().optimizer.train()

    def configure_optimizers(self):
        return ScheduleFreeSGD(self.parameters(), lr=0.5)


def main():
    L.seed_everything(13)
    x = torch.randn(800, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    model = Net()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, callbacks=[DLRoverCallback()], strategy=DLRoverStrategy()
    )
    trainer.fit(model, DataLoader(data, 20, shuffle=True), DataLoader(TensorDataset(*data[:120]), 40))
    if path := os.environ.get("STRANGER_RESULT"):
        optimizer = trainer.optimizers[0]
        group = optimizer.param_groups[0]
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "z": [optimizer.state[p]["z"].tolist() for p in group["params"]],
            "k": group["k"],
            "weight_sum": group["weight_sum"],
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
