"""What the workers of jobs with sharded tables run. Imported by the process that they are forked from, like `toy_job`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.optim import RowWiseAdagrad
from toy_job import SEED, Recorder, Rows, ToyModel, fingerprint, make_trainer

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.sharding.elastic import SnapshotConfig

__all__ = ["TableSettings", "train_tables"]

KINDS = ("row_wise", "table_wise", "column_wise", "data_parallel")
NUM_ROWS = (41, 30, 7, 19)
DIM = 8


@dataclass(frozen=True)
class TableSettings:
    """A training run of a model with one table of each kind."""

    num_rows: int = 240
    batch_size: int = 8
    max_epochs: int = 2
    step_s: float = 0.02
    snapshot_s: float = 0.2
    replicas: int = 1
    kinds: tuple[str, ...] = KINDS
    manual: bool = False
    num_val_rows: int = 0

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)


class TableModel(ToyModel):
    """The toy model on embeddings of the rows' indices."""

    def __init__(self, recorder: Recorder, settings: TableSettings) -> None:
        super().__init__(recorder, settings.step_s)
        self.automatic_optimization = not settings.manual
        self.kinds = settings.kinds
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=NUM_ROWS[i], feature_names=[f"f{i}"])
                for i in range(len(settings.kinds))
            ],
        )
        fused = [p for name, p in self.tables.named_parameters() if self.kinds[int(name.split(".t")[1][0])] != "data_parallel"]
        _apply_optimizer_in_backward(RowWiseAdagrad, fused, {"lr": 0.05})
        self.net = nn.Sequential(nn.Linear(DIM * len(settings.kinds), 16), nn.ReLU(), nn.Linear(16, 1))

    def logits(self, batch: Any) -> Tensor:
        ids = batch[2]
        values = torch.cat([(ids * (2 * i + 1)) % NUM_ROWS[i] for i in range(len(self.kinds))])
        keys = [f"f{i}" for i in range(len(self.kinds))]
        pooled = self.tables(KeyedJaggedTensor(keys=keys, values=values, lengths=torch.ones(len(values), dtype=torch.int64)))
        out: Tensor = self.net(pooled.values())
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.record_share(batch, batch_idx)
        self.recorder.moment("forward")
        time.sleep(self.step_s)
        loss = nn.functional.mse_loss(self.logits(batch), batch[1])
        self._loss, self._weight = float(loss.detach()), len(batch[2])
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[2]))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.recorder.moment("reduced")
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.recorder.moment("validation")
        self.log("val", nn.functional.mse_loss(self.logits(batch), batch[1]), sync_dist=True, batch_size=len(batch[2]))

    def on_validation_end(self) -> None:
        metric = float(self.trainer.callback_metrics["val"])
        self.recorder.write("val_done", **self.where(), step=self.trainer.global_step, metric=metric)

    def record_done(self) -> None:
        self.recorder.write(
            "done",
            **self._share,
            step=self.trainer.global_step,
            loss=self._loss,
            weight=self._weight,
            parameters=fingerprint(list(self.net.parameters())),
        )

    def on_train_epoch_end(self) -> None:
        mean = float(self.trainer.callback_metrics["mean_loss"])
        self.recorder.write("epoch_done", **self.where(), epoch=self.trainer.current_epoch, mean_loss=mean)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def train_tables(recorder: Recorder, settings: TableSettings) -> None:
    """The script of these tests."""
    L.seed_everything(SEED, verbose=False)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(
            global_batch_size=settings.batch_size,
            check_interval_s=0.03,
            sharding_constraints={
                f"t{i}": ParameterConstraints(sharding_types=[kind], min_partition=4) for i, kind in enumerate(settings.kinds)
            },
            snapshots=SnapshotConfig(interval_s=settings.snapshot_s, replicas=settings.replicas),
        ),
        max_epochs=settings.max_epochs,
        limit_val_batches=None if settings.num_val_rows else 0,
    )
    loader = DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=True)
    val_loader = DataLoader(Rows(settings.num_val_rows), settings.batch_size) if settings.num_val_rows else None
    trainer.fit(TableModel(recorder, settings), loader, val_loader)
    recorder.write("after_fit", step=trainer.global_step)
