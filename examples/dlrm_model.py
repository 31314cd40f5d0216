"""DLRM (Naumov et al., arXiv 1906.00091) with torchrec's tables, as an ordinary LightningModule.

The model contains nothing about sharding or resizing: `DLRoverStrategy` shards its tables over the workers and keeps them
sharded. Figures are sums over samples, reduced once per validation by all workers together. One worker alone cannot
query sharded tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from ctr_data import Batch
from ctr_model import NUM_BINS, auc_of_counts, count_scores
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn import functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad

SETS = ("val", "test")
"""Names of the validation loaders, in this order. The second one may be missing."""


class DLRM(L.LightningModule):
    """Logit of a click.

    A table per category and a bottom MLP over the numbers give one vector each; the dot product of every pair of them and the
    bottom MLP's own vector go through a top MLP.

    Args:
        cardinalities: ids per category.
        width: units of the two hidden layers of the top MLP; the cost of a step grows with its square.
        embedding_dim: values per id, a multiple of 4 (fbgemm's kernels).
        learning_rate: learning rate of the MLPs, used by AdamW.
        table_learning_rate: learning rate of the tables, used by row-wise Adagrad. A row is updated in the backward pass,
            and only if it was used.
    """

    pairs: torch.Tensor

    def __init__(
        self,
        cardinalities: Sequence[int],
        num_numbers: int,
        width: int = 256,
        embedding_dim: int = 16,
        learning_rate: float = 3e-3,
        table_learning_rate: float = 0.02,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.features = [f"category{i}" for i in range(len(cardinalities))]
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),  # the strategy gives every worker the memory of its own rows
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=embedding_dim,
                    num_embeddings=cardinality,
                    feature_names=[name],
                    init_fn=partial(nn.init.normal_, std=0.01),  # near zero, so that untrained ids hardly contribute
                )
                for name, cardinality in zip(self.features, cardinalities, strict=True)
            ],
        )
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": table_learning_rate})

        num_vectors = 1 + len(cardinalities)
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, offset=1), persistent=False)
        self.bottom = nn.Sequential(
            nn.Linear(num_numbers, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, embedding_dim)
        )
        self.top = nn.Sequential(
            nn.Linear(embedding_dim + num_vectors * (num_vectors - 1) // 2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )
        self._counts = torch.zeros(0)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Logits, shape ``(n,)``."""
        # One id per sample and category; torchrec wants all of the first category first.
        ids = KeyedJaggedTensor(
            keys=self.features,
            values=categories.t().flatten(),
            lengths=torch.ones(categories.numel(), dtype=torch.int64, device=categories.device),
        )
        numbers = self.bottom(numbers)
        looked_up = self.ebc(ids).values().unflatten(1, (len(self.features), -1))
        vectors = torch.cat([numbers.unsqueeze(1), looked_up], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.top(torch.cat([numbers, dots], dim=1)).squeeze(1)
        return logits

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        numbers, categories, labels = batch
        loss = F.binary_cross_entropy_with_logits(self(numbers, categories), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        # When max_steps ends training in the middle of an epoch, Lightning validates only if it is asked to stop.
        if self.trainer.global_step == self.trainer.max_steps:
            self.trainer.should_stop = True

    def on_validation_epoch_start(self) -> None:
        self._counts = torch.zeros(len(SETS), 2, NUM_BINS, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_index: int, dataloader_idx: int = 0) -> None:
        numbers, categories, labels = batch
        self._counts[dataloader_idx] += count_scores(self(numbers, categories), labels)

    def on_validation_epoch_end(self) -> None:
        """AUC of each whole set, from counts that are summed over the workers as in `WideAndDeep`."""
        sums = torch.as_tensor(self.trainer.strategy.reduce(self._counts, reduce_op="sum"))
        for name, counts in zip(SETS, sums, strict=True):
            if counts.any():
                self.log(f"{name}_auc", auc_of_counts(counts), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
