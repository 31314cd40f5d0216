"""A wide-and-deep click model with DLRM's interactions, as an ordinary LightningModule.

The model contains nothing about resizing. Its validation figures are sums over samples, reduced once per validation,
so they do not depend on the split of the samples over workers.
"""

from __future__ import annotations

import lightning as L
import torch
from ctr_auc import weighted_auc
from ctr_data import Batch, ClickRows
from torch import nn
from torch.nn import functional as F

NUM_BINS = 1 << 16


class WideAndDeep(L.LightningModule):
    """Logit of a click.

    Wide: one weight per category id and per number. Deep: an embedding per category and a bottom MLP over
    the numbers, the dot product of every pair of those vectors (Naumov et al., arXiv 1906.00091), and a top
    MLP over all of it.

    Args:
        width: units of the two hidden layers of the top MLP; the cost of a step grows with its square.
    """

    offsets: torch.Tensor
    pairs: torch.Tensor

    def __init__(
        self,
        cardinalities: tuple[int, ...],
        num_numbers: int,
        width: int = 256,
        embedding_dim: int = 16,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-2,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        num_vectors = len(cardinalities) + 1
        # One table for all categories: category c owns the rows from offsets[c].
        offsets = torch.tensor((0, *cardinalities[:-1])).cumsum(0)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, offset=1), persistent=False)
        self.embedding = nn.Embedding(sum(cardinalities), embedding_dim)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.wide_categories = nn.Embedding(sum(cardinalities), 1)
        nn.init.zeros_(self.wide_categories.weight)
        self.wide_numbers = nn.Linear(num_numbers, 1)
        self.bottom = nn.Sequential(
            nn.Linear(num_numbers, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, embedding_dim)
        )
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(num_vectors * embedding_dim + num_pairs, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 1),
        )
        self._val_counts = torch.zeros(0)
        self._val_loss = torch.zeros(0)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Logits, shape ``(n,)``."""
        ids = categories + self.offsets
        vectors = torch.cat([self.bottom(numbers).unsqueeze(1), self.embedding(ids)], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        deep = self.top(torch.cat([vectors.flatten(1), dots], dim=1)).squeeze(1)
        wide = self.wide_categories(ids).sum(dim=(1, 2)) + self.wide_numbers(numbers).squeeze(1)
        logits: torch.Tensor = deep + wide
        return logits

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        numbers, categories, labels = batch
        loss = F.binary_cross_entropy_with_logits(self(numbers, categories), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self._val_counts = torch.zeros(2, NUM_BINS, dtype=torch.float64, device=self.device)
        self._val_loss = torch.zeros(1, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        numbers, categories, labels = batch
        logits = self(numbers, categories).float()
        self._val_loss += F.binary_cross_entropy_with_logits(logits, labels, reduction="sum").double()
        self._val_counts += count_scores(logits, labels)

    def on_validation_epoch_end(self) -> None:
        """Log loss and AUC of the whole validation set.

        Counts per bin of the logit are summed instead of gathering scores: workers may hold different
        numbers of samples, and one sum of a fixed size is all that a change of the world could interrupt.
        65,536 bins move the AUC by less than 1e-4.
        """
        sums = torch.cat([self._val_counts.flatten(), self._val_loss])
        sums = torch.as_tensor(self.trainer.strategy.reduce(sums, reduce_op="sum")).cpu()
        auc = auc_of_counts(sums[:-1].view(2, NUM_BINS))
        # The same on every worker already; sync_dist only spares the user Lightning's warning.
        self.log("val_auc", auc, prog_bar=True, sync_dist=True)
        self.log("val_loss", float(sums[-1] / sums[:-1].sum()), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)


def count_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negatives (first row) and positives per bin of the logit, float64 ``(2, NUM_BINS)``.

    Counts of parts of a data set add up to the counts of the whole.
    """
    # Half the logit: bins of 0.0001 where most scores are, and none is so far out that it shares a bin with all.
    where = (torch.sigmoid(logits.double() / 2) * (NUM_BINS - 1)).long() + NUM_BINS * labels.long()
    return torch.bincount(where, minlength=2 * NUM_BINS).view(2, NUM_BINS).double()


def auc_of_counts(counts: torch.Tensor) -> float:
    """AUC of the counts of `count_scores`."""
    negatives, positives = counts.cpu().numpy()
    return weighted_auc(range(NUM_BINS), positives, negatives)


@torch.no_grad()
def measure_auc(model: WideAndDeep, rows: ClickRows, batch_size: int = 4096) -> float:
    """Exact AUC over all of `rows`, computed by the calling process alone."""
    was_training = model.training
    model.eval()
    logits = [
        model(
            rows.numbers[i : i + batch_size].to(model.device),
            rows.categories[i : i + batch_size].to(model.device),
        )
        for i in range(0, len(rows), batch_size)
    ]
    model.train(was_training)
    return weighted_auc(torch.cat(logits).cpu().numpy(), rows.labels.numpy(), 1.0 - rows.labels.numpy())
