"""Show that an ordinary Lightning script becomes elastic by its Trainer's two arguments.

dlrover run --workers 1:3 examples/minimal.py
"""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        rows, labels = batch
        return torch.nn.functional.cross_entropy(self.net(rows), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    inputs = torch.randn(200_000, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    trainer = L.Trainer(max_epochs=100, accelerator="cpu", strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()])
    trainer.fit(Classifier(), DataLoader(data, batch_size=256, shuffle=True))
