"""`IterableDataset`s of all kinds, and loaders of them as several workers have."""

from __future__ import annotations

import datetime
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_dlrover.live.data_agreement import are_same_row, described_row
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import IterableSettings, Unconnected

SETTINGS = IterableSettings(describe=described_row, are_alike=are_same_row)


class Opaque(IterableDataset[int]):
    """Numbers in order."""

    def __init__(self, num_rows: int | None) -> None:
        self.num_rows = num_rows
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count() if self.num_rows is None else range(self.num_rows):
            self.num_read += 1
            yield number


class Stateful(IterableDataset[int]):
    """Numbers in order, with torchdata's protocol. Its state is applied to the next iterator only."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.next = 0
        self._resumes = False
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        if not self._resumes:
            self.next = 0
        self._resumes = False
        while self.next < self.num_rows:
            self.next += 1
            self.num_read += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self._resumes = state["next"], True


class GoesOn(Stateful):
    """An iterator continues where the previous one stopped, unless that has ended, as in torchdata's examples."""

    def __iter__(self) -> Iterator[int]:
        while self.next < self.num_rows:
            self.next += 1
            yield self.next - 1
        self.next = 0


class Sticky(Stateful):
    """A state that was loaded applies to each new iterator, as with Hugging Face."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        self.next = self.first
        while self.next < self.num_rows:
            self.next += 1
            yield self.next - 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["next"]


class GoesOnElsewhere(GoesOn):
    """Its state leaves rows out once they are read."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next + 3 if self.next else 0}


class NumpyState(Stateful):
    """Its state contains an object that `torch.load(weights_only=True)` refuses."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": np.array([self.next]), "file": Path("a"), "at": datetime.datetime(2026, 1, 1), "count": np.int64(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["file"].suffix == ""
        super().load_state_dict({"next": state["next"][0].item()})


class Shuffled(IterableDataset[float]):
    """An unseeded order, augmented by unseeded numbers of all three libraries."""

    def __iter__(self) -> Iterator[float]:
        for number in torch.randperm(40).tolist():
            yield number + random.random() / 4 + np.random.rand() / 4 + float(torch.rand(())) / 4


class SplitByWorker(IterableDataset[int]):
    """Takes every n-th row in each of n loader workers, as scripts for plain torch do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, 30, step)


class LossyState(Stateful):
    """A shuffle buffer that is not part of the state: after a state is loaded, the rows differ from those before."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for row in super().__iter__():
            buffer.append(row)
            if len(buffer) > 8:
                yield buffer.pop(0)
        yield from buffer


def make(
    dataset: IterableDataset[Any],
    rank: int = 0,
    world: int = 1,
    batch_size: int = 8,
    settings: IterableSettings = SETTINGS,
    training: bool = True,
    **options: Any,
) -> ElasticLoader:
    loader = DataLoader(dataset, batch_size=3, **options)
    made = ElasticLoader(loader, batch_size, training, peers=Unconnected((rank, world)), iterable=settings)
    iter(made)
    made.set_epoch(0)
    return made


def shares(made: ElasticLoader, limit: int = 1000) -> list[list[Any]]:
    """Return the rest of an epoch without placeholders, by batch."""
    return [batch.tolist()[: made.split.num_own_samples(made.cursor - 1)] for batch in rest(made, limit)]


def rest(made: ElasticLoader, limit: int = 1000) -> Iterator[Any]:
    """Yield the batches to come. `iter` would begin the epoch again."""
    for _ in range(limit):
        try:
            yield next(made)
        except StopIteration:
            return


def global_batches(of_ranks: list[list[list[Any]]]) -> list[list[Any]]:
    return [list(itertools.chain(*parts)) for parts in zip(*of_ranks, strict=True)]


def chunks(num_rows: int, size: int = 8) -> list[list[int]]:
    return [list(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]
