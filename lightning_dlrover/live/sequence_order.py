"""Keep what a worker knows of an `IterableDataset`'s epochs: their ends, the dataset's states, and what was handed out.

`data/sequence.py` reads the rows. Rows of training data are never counted: an epoch ends with the batch that says so. Those of
validation data are counted once, and then split like samples with numbers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dlrover.checks.loaders import UnsupportedLoaderError
from lightning_dlrover.data.dataset import ranges_of
from lightning_dlrover.data.one_pass import EpochKey, Snapshot, has_state
from lightning_dlrover.data.sequence import (
    BatchFacts,
    BatchShare,
    RowCount,
    RowRanges,
    SequenceReader,
    all_alike,
    describe_nothing,
    reading_loader,
)
from lightning_dlrover.live.order import WithoutWindows

__all__ = ["UNKNOWN", "HandedOut", "SequenceOrder", "SequenceSettings", "SequenceSource"]

UNKNOWN = 2**62
"""Number of samples of an epoch before its end is known."""

NUM_SNAPSHOTS = 4
"""Newest snapshots that are kept. Loader workers run ahead, so the newest one may be of rows still to come."""

ROWS_PER_DESCRIPTION = 64
"""Minimum number of rows between two that are described, except where workers join and epochs end. One takes some 0.4 ms."""

MAX_COMPARED = 1000
"""Batches of which descriptions are kept until the next comparison."""


class HandedOut(NamedTuple):
    """A global batch as this worker has seen it: equal on all workers, or their datasets differ."""

    epoch: int
    batch: int
    num_rows: int
    is_last: bool
    first: Any  # description of its first row


class SequenceSource(Protocol):
    """A loader's place in its epoch and in the world."""

    @property
    def epoch(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def num_epoch_batches(self) -> int: ...


def do_nothing() -> None:
    pass


@dataclass(frozen=True)
class SequenceSettings:
    """How a loader of an `IterableDataset` is read.

    Args:
        max_catch_up_s: seconds for which others wait for a joiner that has to read what they have read.
        max_rows: rows of a validation after which counting ends; None: no limit.
        describe, are_alike: see `SequenceReader`.
        compares_rows: whether workers compare descriptions of rows. Those by which a state is checked are needed in any case.
        before_iter: called whenever an iterator is asked for.
        at_end: called once the epoch's last batch is about to be handed out.
    """

    max_catch_up_s: float = 60.0
    max_rows: int | None = None
    describe: Callable[[Any], Any] = describe_nothing
    are_alike: Callable[[Any, Any], bool] = all_alike
    compares_rows: bool = True
    before_iter: Callable[[], None] = do_nothing
    at_end: Callable[[], None] = do_nothing


class SequenceOrder(WithoutWindows):
    """The epochs of one loader of an `IterableDataset`, as `SampleOrder` has those of other datasets.

    Args:
        source: where the loader is.

    Attributes:
        reading_loader: the loader that reads the rows; its batches are `Fetched`.
        redo_batches: batches that a step may take again, the one under computation included.
        is_catching_up: whether other workers wait for this one's next batch.
        num_counted: rows of a validation; None: not counted yet.
        in_vote: what was handed out between the newest two votes.
    """

    shards = ""

    def __init__(
        self, loader: DataLoader[Any], source: SequenceSource, training: bool, drop_last: bool, settings: SequenceSettings
    ) -> None:
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.settings = settings
        self.reading_loader = reading_loader(loader, SequenceReader(loader.dataset, settings.describe, settings.are_alike))
        self.redo_batches = 1
        self.is_catching_up = False
        self.num_counted: int | None = None
        self.in_vote: list[HandedOut] = []
        self._dataset = loader.dataset
        self._users_loader_workers = loader.num_workers
        self._training = training
        self._drop_last = drop_last
        self._source = source
        self._ends: dict[int, int] = {}  # rows by epoch
        self._snapshots: list[Snapshot] = []
        self.known: tuple[int, Any] | None = None  # number and description of the newest row of the epoch that has one
        self._handed_out: list[HandedOut] = []  # since the last vote has begun

    # --- the interface of `SampleOrder` -------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Rows of the current epoch; `UNKNOWN` while its end is not known."""
        if self._training:
            return self._ends.get(self._source.epoch, UNKNOWN)
        assert self.num_counted is not None, "rows are counted before they are split"
        return self.num_counted

    def take_seed(self, seed: int) -> None:
        self.seed = seed

    def forget(self) -> None:
        """Do nothing: no order is kept."""

    def drawn(self, epoch: int) -> torch.Tensor | None:
        return None

    def take(self, order: torch.Tensor, epoch: int) -> None:
        raise UnsupportedLoaderError(
            f"the job's state has an order of {len(order)} samples for this loader, which reads an IterableDataset here: the "
            "workers' scripts differ. Start all workers with the same script"
        )

    def fitting_loader_workers(self, wanted: int) -> int:
        return min(1, wanted)

    def of(self, epoch: int, lap: int = 0) -> SequenceOrder:
        """Return the order of an epoch's counted rows."""
        return self

    def between(self, start: int, stop: int) -> Any:
        return RowRanges(self._place, ((start, stop),))

    def at(self, positions: npt.NDArray[np.int64]) -> Any:
        return RowRanges(self._place, tuple(ranges_of(positions.tolist())))

    # --- counting -----------------------------------------------------------------------------------------------------------

    @property
    def needs_count(self) -> bool:
        """Whether rows have to be counted before anything else."""
        return not self._training and self.num_counted is None

    @property
    def count_request(self) -> RowCount:
        return RowCount(EpochKey(self.seed, 0), self.settings.max_rows)

    # --- training -----------------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> EpochKey:
        return EpochKey(self.seed, self._source.epoch)

    @property
    def is_stateful(self) -> bool:
        return has_state(self._dataset)

    def requests(self, first_batch: int) -> Iterator[Any]:
        """Yield requests for this worker's share of each batch from `first_batch` on, as long as someone takes them."""
        source, size = self._source, self._source.global_batch_size
        start, limit_s = self._snapshot_at(first_batch * size), self.settings.max_catch_up_s if self.is_catching_up else None
        known = None if self.is_catching_up else self.known  # other workers compare a joiner's next batch with theirs
        every = max(1, ROWS_PER_DESCRIPTION // size)
        for batch in itertools.count(first_batch):
            if batch >= source.num_epoch_batches:
                return
            keep_from = max(0, (min(source.cursor, batch) - self.redo_batches) * size)
            yield BatchShare(
                *(self._place, batch * size, size, source.global_rank, source.world_size, self._drop_last, keep_from),
                start=start,
                limit_s=limit_s,
                known=known,
                describes=batch in (0, first_batch) or batch % every == 0,
            )
            start = limit_s = known = None  # the reader is there now

    def fetched(self, batch: int, facts: BatchFacts) -> None:
        """Note what the reader has found out with a batch that is about to be handed out."""
        self.is_catching_up = False
        if facts.is_last or not facts.num_rows:
            self._ends = {self._source.epoch: batch * self._source.global_batch_size + facts.num_rows}
        if facts.snapshot is not None:
            self._snapshots = [*self._snapshots, facts.snapshot][-NUM_SNAPSHOTS:]
        seen = self.seen(batch, facts)
        if seen.first is not None or not batch:
            self.known = (batch * self._source.global_batch_size, seen.first) if seen.first is not None else None
        is_repeated = bool(self._handed_out) and self._handed_out[-1][:2] == seen[:2]
        if not is_repeated and len(self._handed_out) < MAX_COMPARED:
            self._handed_out.append(seen)

    def seen(self, batch: int, facts: BatchFacts) -> HandedOut:
        """Return what other workers must have seen in the same batch."""
        first = facts.first if self.settings.compares_rows else None
        return HandedOut(self._source.epoch, batch, facts.num_rows, facts.is_last, first)

    def forget_handed_out(self) -> None:
        """Compare nothing of what came before: other workers have not seen it."""
        self._handed_out, self.in_vote = [], []

    def begin_vote(self) -> list[HandedOut]:
        """Return what was handed out since the vote before."""
        self.in_vote, self._handed_out = self._handed_out, []
        return self.in_vote

    # --- states -------------------------------------------------------------------------------------------------------------

    def _snapshot_at(self, row: int) -> Snapshot | None:
        """Return the newest state of the dataset from which this row of the epoch can be reached."""
        fitting = [each for each in self._snapshots if EpochKey(each.seed, each.epoch) == self._place and each.row <= row]
        return max(fitting, key=lambda each: each.row, default=None)

    @property
    def snapshot(self) -> Snapshot | None:
        """The dataset's newest state at or before the next batch."""
        return self._snapshot_at(self._source.cursor * self._source.global_batch_size)

    @property
    def end(self) -> int | None:
        """Rows of the current epoch; None: not known, or not needed as they are counted anyway."""
        return self._ends.get(self._source.epoch) if self._training else None

    def resume(self, epoch: int, snapshot: Snapshot | None, end: int | None, known: tuple[int, Any] | None) -> None:
        """Adopt what another worker, or a checkpoint, knows of an epoch."""
        self._snapshots = [snapshot] if snapshot is not None else []
        self._ends = {epoch: end} if end is not None else {}
        self.known = known if self.settings.compares_rows else None
        self.forget_handed_out()

    # --- words --------------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The dataset's class. That of Hugging Face has the name of torch's."""
        kind = type(self._dataset)
        package = f"{kind.__module__.partition('.')[0]}." if kind.__name__ == IterableDataset.__name__ else ""
        return f"{package}{kind.__name__}"

    @property
    def unused_loader_workers(self) -> int:
        """Loader workers of the user's loader, if more than the one that reads; else 0."""
        return self._users_loader_workers if self._users_loader_workers > 1 else 0

    def in_checkpoint(self) -> dict[str, Any]:
        """Return the loader's place as plain data."""
        snapshot = self.snapshot
        return {
            "seed": self.seed,
            "epoch": self._source.epoch,
            "end": self.end,
            "snapshot": vars(snapshot) if snapshot is not None else None,
            "known": self.known,
        }

    def resume_from(self, saved: dict[str, Any]) -> None:
        """Adopt what `in_checkpoint` has returned."""
        self.seed = int(saved["seed"])
        snapshot = saved["snapshot"]
        start = Snapshot(**snapshot) if snapshot is not None else None
        self.resume(int(saved["epoch"]), start, saved["end"], saved.get("known"))
