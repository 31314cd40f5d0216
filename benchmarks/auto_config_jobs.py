"""Jobs for `auto_config.py`. Their workers record every step.

dense      a perceptron with products that fill a core; its data are in memory
embedding  sharded embedding tables with many lookups per sample, and small products
input      a small model with samples that are fetched (a wait) and decoded (a core)
images     convolutions: a thousand operations for each parameter, unlike any reference model of `dlrover lab characterize`
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jobs import Step
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy, callback
from lightning_dlrover.tables.snapshots import SnapshotConfig

NUM_SAMPLES = 1_000_000
NUM_FEATURES = 256
NUM_TABLES, NUM_ROWS, DIM, LOOKUPS = 4, 100_000, 32, 40
FETCH_S, DECODED_BYTES = 0.5e-3, 120_000

GLOBAL_BATCH = {"dense": 240, "embedding": 384, "input": 48, "images": 48}
JOBS = ("dense", "embedding", "input")
"""Jobs that need different configurations."""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows in memory, repeated, so that long epochs cost nothing."""

    def __init__(self) -> None:
        self._inputs = torch.randn(997, NUM_FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._inputs[index % len(self._inputs)]
        return row, row[:8].sum(0, keepdim=True)


class Packed(Rows):
    """The same rows from a simulated remote source: each one takes a while to arrive, and is then unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self._packed = [zlib.compress(bytes([i]) * DECODED_BYTES + os.urandom(4_000), 1) for i in range(97)]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(FETCH_S)
        decoded = torch.frombuffer(bytearray(zlib.decompress(self._packed[index % len(self._packed)])), dtype=torch.uint8)
        row = decoded[: NUM_FEATURES * (DECODED_BYTES // NUM_FEATURES)].view(NUM_FEATURES, -1).float().mean(1)
        return row / 255, row[:1] / 255


class Clicks(Dataset[tuple[Tensor, Tensor]]):
    """Ids for every table, and a click that follows from them."""

    def __init__(self) -> None:
        self._ids = torch.randint(NUM_ROWS, (4_001, NUM_TABLES, LOOKUPS), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = self._ids[index % len(self._ids)]
        return ids, (ids[:, :1].sum() % 2).float().view(1)


class Perceptron(L.LightningModule):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        hidden = [part for _ in range(num_layers) for part in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Pictures(Rows):
    """The same rows, each as a small image."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, target = super().__getitem__(index)
        return row.view(1, 16, 16), target


class Convolutions(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = [part for _ in range(4) for part in (nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())]
        self.net = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), *hidden, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ClickModel(L.LightningModule):
    def __init__(self) -> None:
        from torch.distributed.optim import _apply_optimizer_in_backward
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.optim import RowWiseAdagrad

        super().__init__()
        self.names = [f"category{i}" for i in range(NUM_TABLES)]
        tables = [EmbeddingBagConfig(num_embeddings=NUM_ROWS, embedding_dim=DIM, name=n, feature_names=[n]) for n in self.names]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        _apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.01})
        self.net = nn.Sequential(nn.Linear(NUM_TABLES * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        from torchrec import KeyedJaggedTensor

        ids, clicks = batch
        values = ids.transpose(0, 1).reshape(-1)  # ordered by feature, then by sample
        features = KeyedJaggedTensor(self.names, values, lengths=torch.full((NUM_TABLES * len(ids),), LOOKUPS))
        pooled = self.tables(features).values()
        return nn.functional.binary_cross_entropy_with_logits(self.net(pooled), clicks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Options:
    job: str
    records: Path
    window_s: float
    plan_every_s: float  # seconds between plans; 0: only profiles
    until: Path  # file that ends the job when it exists

    @staticmethod
    def from_command_line() -> Options:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--job", choices=GLOBAL_BATCH, required=True)
        parser.add_argument("--records", type=Path, required=True)
        parser.add_argument("--window-s", type=float, default=2.0)
        parser.add_argument("--plan-every-s", type=float, default=10.0)
        parser.add_argument("--until", type=Path, required=True)
        return Options(**vars(parser.parse_args()))


class Recorder(L.Callback):
    """Writes one line per step and worker, with the settings of the step."""

    def __init__(self, options: Options) -> None:
        self._file = (options.records / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._until = options.until

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        ended_s = time.monotonic()
        combined = trainer.fit_loop._combined_loader
        assert combined is not None
        loader = combined.flattened[0]
        assert isinstance(trainer.strategy, DLRoverStrategy)
        live = trainer.strategy.live
        assert live is not None
        assert live.formation is not None
        step = Step(
            pid=os.getpid(),
            ended_s=ended_s,
            number=trainer.global_step,
            epoch=trainer.current_epoch,
            global_rank=trainer.global_rank,
            world_size=trainer.world_size,
            round_number=live.formation.round.number,
            settings=(trainer.world_size, loader.num_workers, torch.get_num_threads(), loader.prefetch_factor),
        )
        self._file.write(step.encode())
        if trainer.global_step % 10 == 0:
            # All workers must stop after the same step, so they vote.
            stop = trainer.strategy.reduce(torch.tensor(float(self._until.exists())), reduce_op="sum")
            trainer.should_stop = bool(stop)


def main() -> None:
    options = Options.from_command_line()
    L.seed_everything(7, verbose=False)
    module: L.LightningModule
    data: Dataset[Any]
    if options.job == "dense":
        module, data = Perceptron(640, 3), Rows()
    elif options.job == "embedding":
        module, data = ClickModel(), Clicks()
    elif options.job == "images":
        module, data = Convolutions(), Pictures()
    else:
        module, data = Perceptron(64, 1), Packed()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DLRoverStrategy(
            global_batch_size=GLOBAL_BATCH[options.job],
            # A snapshot in the middle of a measurement would count against the settings of that time.
            snapshots=SnapshotConfig(interval_s=0.0),
        ),
        callbacks=[DLRoverCallback(options.window_s, options.plan_every_s, tune=callback.TUNABLE), Recorder(options)],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    # A careless user's settings: no loader worker.
    trainer.fit(module, DataLoader(data, batch_size=GLOBAL_BATCH[options.job], shuffle=True))


if __name__ == "__main__":
    main()
