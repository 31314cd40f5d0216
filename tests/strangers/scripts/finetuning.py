"""A frozen backbone that is unfrozen in the second epoch, by BaseFinetuning."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones=(1, 2)):
        super().__init__()
        self.milestones = milestones

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(modules=pl_module.feature_extractor[-2:], optimizer=optimizer)
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(modules=pl_module.feature_extractor[:-2], optimizer=optimizer)


class TransferLearningModel(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        generator = torch.Generator().manual_seed(5)
        self.feature_extractor = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        for parameter in self.feature_extractor.parameters():  # "pretrained"
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(self.feature_extractor(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        trainable = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.Adam(trainable, lr=self.hparams.lr)


def main():
    L.seed_everything(11)
    x = torch.randn(880, 10, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = TransferLearningModel()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        callbacks=[MilestonesFinetuning(), DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    train, val = TensorDataset(x[:800], y[:800]), TensorDataset(x[800:], y[800:])
    trainer.fit(model, DataLoader(train, batch_size=20, shuffle=True), DataLoader(val, batch_size=20))
    if path := os.environ.get("STRANGER_RESULT"):
        groups = trainer.optimizers[0].param_groups
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "val_acc": float(trainer.callback_metrics["val_acc"]),
            "groups": [[len(group["params"]), group["lr"]] for group in groups],
            "trainable": [parameter.requires_grad for parameter in model.parameters()],
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
