"""A GAN: manual optimization, two optimizers that are toggled, noise that is drawn in each step."""

import json
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Generator(nn.Module):
    def __init__(self, latent_dim, features):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(latent_dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, features), nn.Tanh())

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(features, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, x):
        return self.model(x)


class GAN(L.LightningModule):
    def __init__(self, latent_dim=8, features=16, lr=2e-4, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim, features)
        self.discriminator = Discriminator(features)
        self.validation_z = torch.randn(8, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(real.shape[0], self.hparams.latent_dim).type_as(real)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(real.size(0), 1).type_as(real)
        g_loss = F.binary_cross_entropy(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = F.binary_cross_entropy(self.discriminator(real), valid)
        fake = torch.zeros(real.size(0), 1).type_as(real)
        fake_loss = F.binary_cross_entropy(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self):
        self.samples = self(self.validation_z.type_as(self.generator.model[0].weight))

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        return [
            torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas),
            torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas),
        ], []


def main():
    L.seed_everything(3)
    data = torch.tanh(torch.randn(960, 16, generator=torch.Generator().manual_seed(0)) + 1)
    model = GAN()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, callbacks=[DLRoverCallback()], strategy=DLRoverStrategy()
    )
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=24, shuffle=True))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "samples": list(model.samples.shape),
            "updates": [int(o.state[o.param_groups[0]["params"][0]]["step"]) for o in trainer.optimizers],
            "trainable": [parameter.requires_grad for parameter in model.parameters()],
            "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
