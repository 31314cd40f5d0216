"""Treat several training loaders as one: a common counter, one order's seed for all workers, one weight for a batch's loss.

Lightning's `CombinedLoader` fetches from each loader in turn. The first one holds the point at which the world may change.
So all of them count the Trainer's batches, whether they have begun again (`max_size_cycle`) or have ended (`max_size`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_dlrover.checks.loaders import UnsupportedLoaderError
from lightning_dlrover.live.loader import ElasticLoader

if TYPE_CHECKING:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

__all__ = ["TrainLoaders", "refetch"]

log = logging.getLogger(__name__)


class TrainLoaders:
    """State that outlives the loaders themselves, which a Trainer may make anew for each epoch.

    Args:
        has_global_batch_size: whether the strategy was given one, which holds for each loader.
    """

    def __init__(self, has_global_batch_size: bool) -> None:
        self._has_global_batch_size = has_global_batch_size
        self._order_seeds: Sequence[int] = ()
        self._known: Sequence[ElasticLoader] = ()
        self._has_warned = False

    def keep_step(self, combined: CombinedLoader, loaders: Sequence[ElasticLoader], num_batches: int) -> None:
        """Make new loaders count through the Trainer's epoch. Call it before each fetch.

        Raises:
            UnsupportedLoaderError: one global batch size was given for loaders of several batch sizes.
        """
        if len(loaders) == len(self._known) and all(new is known for new, known in zip(loaders, self._known, strict=True)):
            return
        sizes = [loader.batch_sampler.batch_size for loader in loaders]
        if self._has_global_batch_size and len(set(sizes)) > 1:
            raise UnsupportedLoaderError(
                f"there are {len(loaders)} training loaders with batch sizes {sizes}, and global_batch_size would give each of "
                "them the same: leave it out of DLRoverStrategy, then each loader's global batch is its own batch size times "
                "the workers that the job starts with"
            )
        for loader in loaders:
            loader.keep_step(num_batches, cycles=combined._mode == "max_size_cycle")
        self._known = loaders
        self.take_order_seeds(self._order_seeds)

    def take_order_seeds(self, seeds: Sequence[int]) -> None:
        """Give each loader, and its later replacement, the job's order."""
        self._order_seeds = seeds
        for loader, seed in zip(self._known, seeds, strict=False):
            loader.order.take_seed(seed)

    def loss_weight(self, batch: int) -> float:
        """Return the weight of a worker's mean loss in a batch, by its share of the first loader that takes part."""
        weights = [loader.split.loss_weight(batch) for loader in self._known if loader.split.has_samples(batch)]
        if not self._has_warned and weights and max(weights) - min(weights) > 1e-9:
            self._has_warned = True
            log.warning(
                "the global batches of the training loaders (%s samples) do not divide alike over %d workers: the loss is "
                "weighted by the share of the first one. Batch sizes that all numbers of workers divide make it exact",
                ", ".join(str(loader.global_batch_size) for loader in self._known),
                self._known[0].world_size,
            )
        return weights[0] if weights else 1.0


def refetch(combined: CombinedLoader, loaders: Sequence[ElasticLoader]) -> Any:
    """Return the next batch of all loaders, as Lightning combines it, without its iterators."""
    parts: list[Any] = []
    for loader in loaders:
        try:
            parts.append(loader.refetch())
        except StopIteration:
            parts.append(None)  # this loader is shorter than the others, in mode `max_size`
    return torch.utils._pytree.tree_unflatten(parts, combined._spec)
