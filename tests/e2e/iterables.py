"""`IterableDataset`s of the toy rows: without a state, with one, and one that must be refused."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_dlrover.data.iterable import EpochKey, OwnRandom


class Opaque(IterableDataset[Any]):
    """Rows in an order that no seed of its own fixes.

    Args:
        row_s: seconds that a row takes.
    """

    def __init__(self, rows: Dataset[Any], shuffle: bool, row_s: float = 0.0) -> None:
        self.rows = rows
        self.shuffle = shuffle
        self.row_s = row_s

    def __iter__(self) -> Iterator[Any]:
        num_rows = len(self.rows)  # type: ignore[arg-type]
        for number in torch.randperm(num_rows).tolist() if self.shuffle else range(num_rows):
            time.sleep(self.row_s)
            yield self.rows[number]


class Stateful(Opaque):
    """Has torchdata's protocol. Its order follows from `set_epoch`."""

    epoch = next = 0
    order: list[int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self.order is None:
            num_rows = len(self.rows)  # type: ignore[arg-type]
            self.next, self.order = 0, list(range(num_rows))
            if self.shuffle:
                random.Random(self.epoch).shuffle(self.order)
        while self.next < len(self.order):
            self.next += 1
            time.sleep(self.row_s)
            yield self.rows[self.order[self.next - 1]]
        self.order = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.order = state["next"], state["order"]


class ByRank(Opaque):
    """Every worker yields rows of its own, as scripts with a fixed number of workers do."""

    def __iter__(self) -> Iterator[Any]:
        number = int(os.environ["DLROVER_AGENT_ID"].removeprefix("w"))
        for index in range(number, len(self.rows), 2):  # type: ignore[arg-type]
            yield self.rows[index]


class ByClock(Opaque):
    """Begins alike on all workers, and draws numbers later that nothing fixes."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.rows)):  # type: ignore[arg-type]
            x, y, number = self.rows[index]
            yield x + (random.SystemRandom().random() if index > 40 else 0), y, number


ITERABLES: dict[str, type[Opaque]] = {"opaque": Opaque, "stateful": Stateful, "by_rank": ByRank, "by_clock": ByClock}


def order_of(kind: str, num_rows: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return the ids of an epoch's rows, in the order in which a job must train them."""
    order = list(range(num_rows))
    if shuffle and kind == "stateful":
        random.Random(epoch).shuffle(order)
    elif shuffle:
        with OwnRandom.of(EpochKey(seed, epoch)).in_force():
            order = torch.randperm(num_rows).tolist()
    return order
