"""A script with a sharded table that `dlrover run` runs in tests. It trains until it is ended, with a snapshot every moment."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad

from lightning_dlrover import DLRoverStrategy, SnapshotConfig
from tests.support.quiet_trainer import quiet_trainer

NUM_ROWS = 64


class TableModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=NUM_ROWS, feature_names=["f"])
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
        _apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.05})
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        lengths = torch.ones(len(batch[0]), dtype=torch.int64)
        found = self.tables(KeyedJaggedTensor(keys=["f"], values=batch[0], lengths=lengths))
        return self.net(found["f"]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 1e-3)


def main() -> None:
    torch.set_num_threads(1)
    snapshots = SnapshotConfig(interval_s=0.1, disk=Path(sys.argv[1]), disk_interval_s=0.1)
    trainer = quiet_trainer(strategy=DLRoverStrategy(snapshots=snapshots), max_epochs=-1)
    trainer.fit(TableModel(), DataLoader(TensorDataset(torch.randint(NUM_ROWS, (4096,))), batch_size=8))


if __name__ == "__main__":
    main()
