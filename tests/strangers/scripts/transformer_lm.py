"""A small language model: causal transformer, AdamW with warm-up, accumulation and clipping."""

import json
import math
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

VOCABULARY, BLOCK = 17, 12


class Tokens(Dataset):
    """Overlapping blocks of a repetitive text."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(0)
        text = (torch.arange(length) * 3 + torch.randint(0, 3, (length,), generator=generator)) % VOCABULARY
        self.text = text

    def __len__(self):
        return len(self.text) - BLOCK - 1

    def __getitem__(self, index):
        chunk = self.text[index : index + BLOCK + 1]
        return {"input_ids": chunk[:-1], "labels": chunk[1:]}


class LanguageModel(L.LightningModule):
    def __init__(self, width=16, heads=2, layers=2, lr=3e-3, warmup=10):
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, bias=False)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK), persistent=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_ppl", math.exp(min(20.0, float(loss))))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch):
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=self.hparams.lr,
            betas=(0.9, 0.95),
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.hparams.warmup))
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def main():
    L.seed_everything(1)
    model = LanguageModel()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=0.5,
        logger=False,
        callbacks=[DLRoverCallback()],
        strategy=DLRoverStrategy(),
    )
    trainer.fit(model, DataLoader(Tokens(980), batch_size=16, shuffle=True), DataLoader(Tokens(60), batch_size=16))
    if path := os.environ.get("STRANGER_RESULT"):
        result = {
            "weights": {name: value.tolist() for name, value in model.state_dict().items()},
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
            "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        }
        Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
