"""Exports of a warehouse: Parquet files whose writers chose other types for one column, as a shuffled stream."""

import json
import os
from pathlib import Path

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.data import parquet, stream


def export(folder):
    """Write three days, unless another process has."""
    dice = torch.Generator().manual_seed(9)
    for day, kind in enumerate(["int32", "int64", "float64"]):
        clicks = torch.randint(0, 50, (320,), generator=dice)
        price = torch.rand(320, generator=dice)
        columns = {
            "clicks": pa.array(clicks.tolist(), kind),
            "price": pa.array(price.tolist(), "float32" if day else "float64"),
            "bought": pa.array((clicks * price > 12).tolist()),
        }
        target = folder / f"day_{day}.parquet"
        if not target.exists():
            part = folder / f".{os.getpid()}-{day}"
            pq.write_table(pa.table(columns), part, row_group_size=100)
            part.rename(target)


class Buyers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch):
        x = torch.stack([batch["clicks"].float() / 50, batch["price"].float()], 1)
        return nn.functional.binary_cross_entropy_with_logits(self.net(x).squeeze(1), batch["bought"].float())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["bought"]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["bought"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def main():
    L.seed_everything(4)
    folder = Path("exports")
    folder.mkdir(exist_ok=True)
    export(folder)
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    model = Buyers()
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        callbacks=[DLRoverCallback()],
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        model,
        DataLoader(stream(parquet(files), shuffle_rows=200), 24),
        DataLoader(stream(parquet(files[-1:])), 32),
    )
    if path := os.environ.get("STRANGER_RESULT"):
        metrics = {name: float(trainer.callback_metrics[name]) for name in ("loss", "val_loss")}
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        Path(path).write_text(json.dumps({"weights": weights, "metrics": metrics, "steps": trainer.global_step}))


if __name__ == "__main__":
    main()
