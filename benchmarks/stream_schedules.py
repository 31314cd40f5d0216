"""A live job's loaders of a stream, simulated in one process: resized, reduced by losses, rolled back to snapshots.

Rows are numbers, so a check can count which rows were trained, and compare their order with the plan's.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from lightning_dlrover.data import Shard, stream
from lightning_dlrover.live.loader import ElasticLoader, LoaderState

SEED = 3


class Numbered:
    """Shards of the numbers from 0 on, one by one or as record batches.

    Args:
        lengths: rows of each shard.
        chunk_rows: rows of a record batch; 0: single rows.
        cut: rows after which a shard ends, by its key, though it promises more.
    """

    def __init__(self, lengths: Sequence[int], chunk_rows: int = 0, cut: dict[str, int] | None = None) -> None:
        self.lengths = lengths
        self.starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self._chunk_rows = chunk_rows
        self._cut = cut or {}

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def shards(self) -> list[Shard]:
        return [Shard(str(number), length) for number, length in enumerate(self.lengths)]

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        import pyarrow as pa

        start, stop = int(self.starts[int(shard.key)]), self._cut.get(shard.key, shard.rows)
        if not self._chunk_rows:
            yield from range(start + row, start + stop)
        for first in range(row, stop, self._chunk_rows) if self._chunk_rows else ():
            values = np.arange(start + first, start + min(first + self._chunk_rows, stop))
            yield pa.record_batch({"number": pa.array(values)})


def rows_of(batch: Any) -> npt.NDArray[np.int64]:
    """Return the rows of a collated batch."""
    found: npt.NDArray[np.int64] = (batch["number"] if isinstance(batch, dict) else batch).numpy()
    return found


@dataclass(frozen=True)
class Action:
    """One event of a schedule."""

    kind: Literal["step", "resize", "lose", "back", "epoch"]
    number: int = 1  # steps, workers, place of the victim, batches


@dataclass(frozen=True)
class Tally:
    """Rows of epochs by how often they were trained."""

    rows: int = 0  # rows that should have been trained
    lost: int = 0
    doubled: int = 0  # times that a row was trained again

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, self.lost + other.lost, self.doubled + other.doubled)

    @staticmethod
    def of(trained: npt.NDArray[np.int64], num_rows: int) -> Tally:
        """Count the rows that one epoch has trained, shape ``(trained rows,)``."""
        times = np.bincount(trained, minlength=num_rows)
        return Tally(num_rows, int((times == 0).sum()), int(np.maximum(times - 1, 0).sum()))


class SimulatedJob:
    """The loaders of all workers of a job, in changing worlds.

    Args:
        num_loader_workers: loader workers of each worker.
        hands_over: whether joiners get the position of the others. Without it rows are lost and doubled.
        threads: threads that read ahead in each process.
        persistent: whether loader workers outlive an epoch.
    """

    def __init__(
        self,
        source: Numbered,
        global_batch: int,
        num_loader_workers: int = 0,
        shuffle_rows: int = 0,
        max_workers: int = 4,
        hands_over: bool = True,
        threads: int = 0,
        persistent: bool = False,
    ) -> None:
        self.source = source
        self.global_batch = global_batch
        self._num_loader_workers = num_loader_workers
        self._shuffle_rows = shuffle_rows
        self._max_workers = max_workers
        self.hands_over = hands_over
        self._threads = threads
        self._persistent = persistent
        self.loaders = [self.make()]
        self.trained: list[npt.NDArray[np.int64]] = []  # rows of each global batch of this epoch
        self.epoch = 0
        self._begin()

    def make(self) -> ElasticLoader:
        """Return the loader of one worker."""
        data = stream(self.source, shuffle_rows=self._shuffle_rows, seed=SEED, threads=self._threads)
        num_workers = self._num_loader_workers
        persistent = self._persistent and num_workers > 0
        loader = DataLoader(data, batch_size=1, num_workers=num_workers, persistent_workers=persistent)
        return ElasticLoader(loader, self.global_batch, training=True, max_workers=self._max_workers)

    def _begin(self) -> None:
        for loader in self.loaders:
            iter(loader)
            loader.set_epoch(self.epoch)
        self._place()

    def _place(self, rewind: int = 0) -> None:
        for rank, loader in enumerate(self.loaders):
            loader.reshard(rank, len(self.loaders), min(rewind, loader.cursor))

    @property
    def cursor(self) -> int:
        return len(self.trained)

    @property
    def num_batches(self) -> int:
        return -(-self.source.num_rows // self.global_batch)

    def step(self) -> None:
        batches = [rows_of(loader.refetch()) for loader in self.loaders]
        sizes = [loader.split.num_own_samples(self.cursor) for loader in self.loaders]
        # A worker without a share computes a placeholder with weight 0.
        self.trained.append(np.concatenate([batch[:size] for batch, size in zip(batches, sizes, strict=True)]))

    def resize(self, size: int) -> None:
        state = self.loaders[0].state()
        while len(self.loaders) > size:
            self.loaders.pop(0).close()
        self._grow(size, state)

    def restart(self, size: int, num_loader_workers: int = 0) -> None:
        """End all workers. Others go on from the state that their checkpoint holds, with so many loader workers each."""
        state = self.loaders[0].state()
        self._num_loader_workers = num_loader_workers
        self.close()
        self.loaders = []
        self._grow(size, state)

    def _grow(self, size: int, state: LoaderState) -> None:
        while len(self.loaders) < size:
            joiner = self.make()
            iter(joiner)
            if self.hands_over:
                joiner.load_state(pickle.loads(pickle.dumps(state)))
            self.loaders.append(joiner)
        self._place()
        for loader in self.loaders:
            loader.prepare_next()

    def lose(self, victim: int) -> None:
        """Lose a worker in a step, which the others do again."""
        self.step()
        if len(self.loaders) > 1:
            self.loaders.pop(victim % len(self.loaders)).close()
        self.trained.pop()
        self._place(rewind=1)

    def roll_back(self, num_batches: int) -> None:
        """Go back to a snapshot: what was trained since does not count."""
        num_batches = min(num_batches, self.cursor)
        del self.trained[self.cursor - num_batches :]
        self._place(rewind=num_batches)

    def finish_epoch(self) -> npt.NDArray[np.int64]:
        """Return all rows of the epoch in the order of training."""
        while self.cursor < self.num_batches:
            self.step()
        trained = np.concatenate(self.trained)
        self.trained = []
        self.epoch += 1
        self._begin()
        return trained

    def planned(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the rows of an epoch in the order of its plan."""
        layout = self.loaders[0].order.layout
        assert layout is not None
        plan = self.loaders[0].dataset.plan(SEED + epoch, layout)
        shards, rows = plan.rows_between(0, plan.num_rows)
        found: npt.NDArray[np.int64] = self.source.starts[shards] + rows
        return found

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def follow(job: SimulatedJob, schedule: Iterable[Action]) -> Iterator[npt.NDArray[np.int64]]:
    """Run a schedule and two epochs' ends; yield the trained rows of each epoch. The job ends with it."""
    try:
        for action in [*schedule, Action("epoch"), Action("epoch")]:
            if job.cursor == job.num_batches or action.kind == "epoch":
                yield job.finish_epoch()
            if action.kind == "step":
                for _ in range(min(action.number, job.num_batches - job.cursor)):
                    job.step()
            elif action.kind == "resize":
                job.resize(action.number)
            elif action.kind == "lose":
                job.lose(action.number)
            elif action.kind == "back":
                job.roll_back(action.number)
    finally:
        job.close()


def random_schedule(dice: random.Random, num_batches: int, max_workers: int) -> list[Action]:
    """Draw what happens in an epoch: steps between resizes, losses and rollbacks, and perhaps an early end."""
    schedule: list[Action] = []
    for _ in range(dice.randint(2, 8)):
        schedule.append(Action("step", dice.randint(0, max(1, num_batches // 4))))
        kind = dice.choices(("resize", "lose", "back", "epoch"), (6, 3, 3, 1))[0]
        number = {"resize": dice.randint(1, max_workers), "lose": dice.randrange(max_workers), "back": dice.randint(1, 4)}
        schedule.append(Action(kind, number.get(kind, 1)))  # type: ignore[arg-type]  # one of the four
    return schedule
