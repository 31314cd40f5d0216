"""Decide which worker gets which samples: an epoch's global batches, and one split of each over the workers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.live.order import EpochOrder

__all__ = ["Split", "global_batch_of_next"]


def global_batch_of_next(batch: int, former_batch: int, former_global: int, sizes: tuple[int, int]) -> int:
    """Return the global batch of a loader that a script has made in place of another one.

    It follows the loader's batch size, unless this is the former global batch's share of one worker, as it was before: such
    a script divides by the number of workers itself.

    Args:
        sizes: numbers of workers when the former loader was made, and now.
    """
    shares = [(former_global // size, -(-former_global // size)) for size in sizes]
    if sizes[0] != sizes[1] and former_batch in shares[0] and batch in shares[1]:
        return former_global
    return max(1, round(former_global * batch / former_batch))


@dataclass(frozen=True)
class Split:
    """Division of an epoch's samples, as one worker of the current world takes part in it.

    Args:
        training: whether every worker gets a share of every batch. If a global batch has fewer samples than workers, the others
            get one sample with weight 0. Otherwise (validation, test) a worker without samples simply ends earlier.
        epoch_batches: batches of the Trainer's epoch; None: as many as this loader has.
        cycles: whether the samples begin again within the Trainer's epoch.
    """

    num_samples: int
    global_batch_size: int
    global_rank: int
    world_size: int
    training: bool
    drop_last: bool
    epoch_batches: int | None = None
    cycles: bool = False

    @property
    def max_batches(self) -> int:
        """Number of batches of one pass over the samples. In validation it is an upper limit."""
        return self._count_batches(self.global_batch_size)

    def _count_batches(self, batch_size: int) -> int:
        return self.num_samples // batch_size if self.drop_last else -(-self.num_samples // batch_size)

    @cached_property
    def _samples_per_batch(self) -> int:
        # Larger batches do no harm in validation, but a worker without a sample has no result to reduce.
        return self.global_batch_size if self.training else max(self.global_batch_size, self.world_size)

    @cached_property
    def _num_batches(self) -> int:
        full, rest = divmod(self.num_samples, self._samples_per_batch)
        # If too few samples for all workers remain, they join the batch before: a forward pass may need every worker.
        joined = not self.training and full and rest < self.world_size
        return full if joined else self._count_batches(self._samples_per_batch)

    @property
    def end(self) -> int:
        """Index after the last batch of the epoch that the loader delivers."""
        if self.epoch_batches is None:
            return self._num_batches
        return self.epoch_batches if self.cycles and self._num_batches else min(self._num_batches, self.epoch_batches)

    @property
    def num_laps(self) -> int:
        """Number of passes over the samples in the Trainer's epoch. The last one may be cut short."""
        return -(-self.end // self._num_batches) if self._num_batches else 1

    def num_dealt(self, limit: float) -> int:
        """Return the number of samples of a validation run that all workers compute together.

        Args:
            limit: maximum number of batches.
        """
        batch_size = self.global_batch_size
        whole = self.num_samples // batch_size * batch_size if self.drop_last else self.num_samples
        return int(min(whole, limit * batch_size))

    def has_samples(self, batch: int) -> bool:
        """Return whether the loader takes part in a batch of the epoch. One shorter than the others may have ended."""
        return self._length(batch) > 0

    def num_own_samples(self, batch: int) -> int:
        """Return the size of this worker's share of a global batch of this epoch."""
        start, stop = share(self._length(batch), self.global_rank, self.world_size)
        return stop - start

    def loss_weight(self, batch: int) -> float:
        """Return the factor for a mean loss over this worker's share that turns the mean over workers into that over samples.

        Args:
            batch: number of the global batch in this epoch.
        """
        return self.num_own_samples(batch) * self.world_size / self._length(batch)

    def shares(self, first_batch: int, order: Callable[[int], EpochOrder]) -> Iterator[Sequence[int]]:
        """Yield this worker's sample indices of each batch from `first_batch` on.

        Args:
            order: order of the samples by lap, the number of passes over them before.
        """
        for place in range(first_batch, self.end):
            lap, batch = divmod(place, self._num_batches)
            indices = order(lap)
            first = batch * self._samples_per_batch
            start, stop = share(self._length(batch), self.global_rank, self.world_size)
            if start < stop:
                yield indices.between(first + start, first + stop)
            elif self.training:
                yield indices.between(first, first + 1)  # a placeholder with loss weight 0
            else:
                return

    def _length(self, batch: int) -> int:
        size = self._samples_per_batch
        if self.cycles and self._num_batches:
            batch %= self._num_batches
        if batch >= self._num_batches:
            return 0
        left = max(0, self.num_samples - batch * size)
        is_last = batch == self._num_batches - 1
        return left if is_last and not self.drop_last else min(size, left)
