"""Elastic loaders of numbers, as several workers have them. All are closed after a test."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import Unconnected

_made: list[ElasticLoader] = []


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def over(users: DataLoader[Any], global_batch_size: int, training: bool = True, **options: Any) -> ElasticLoader:
    """Return the loader that replaces the user's, at the beginning of an epoch."""
    made = ElasticLoader(users, global_batch_size, training, **options)
    _made.append(made)
    return iter(made)


def elastic(
    length: int = 20, global_batch_size: int = 8, training: bool = True, place: tuple[int, int] = (0, 1), **loader: Any
) -> ElasticLoader:
    users = DataLoader(Numbers(length), **{"batch_size": global_batch_size, **loader})
    return over(users, global_batch_size, training, peers=Unconnected(place))


def indices(batch: Tensor) -> list[int]:
    return [int(i) for i in batch]


def rest_of(loader: ElasticLoader) -> list[list[int]]:
    """Return the remaining batches. A `for` loop would begin the epoch again."""
    batches = []
    with suppress(StopIteration):
        while True:
            batches.append(indices(next(loader)))
    return batches


def workers_of(loader: ElasticLoader) -> list[Any]:
    """Return the processes of a loader's newest loader workers; none if there are none."""
    running = loader.workers._feed.running
    return running._workers if running is not None else []


def close_all() -> None:
    while _made:
        _made.pop().close()
