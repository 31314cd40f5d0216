"""Read any `IterableDataset` as global batches: one process per worker reads all rows and keeps its worker's share.

A request names the first row of a global batch and the worker's place in the world, so a resize needs no new iterator. The
reader looks one row ahead, so that all workers learn with the same batch that the epoch ends with it. Where a request is for
rows that are neither kept nor to come, the reader begins again: from a snapshot of the dataset's state, else from the
epoch's first row.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.data.one_pass import EpochKey, Limit, OnePass, OwnRandom, Snapshot, has_state
from lightning_dlrover.data.source import DataError

__all__ = [
    "BatchFacts",
    "BatchShare",
    "Fetched",
    "RowCount",
    "RowRanges",
    "SequenceReader",
    "advice_for_joiners",
    "all_alike",
    "describe_nothing",
    "reading_loader",
    "the_only",
]

log = logging.getLogger(__name__)

_LEFT_TO_PARENT: list[object] = []
"""Passes of the process that forked this one. Their destructors might close what both share."""


@dataclass(frozen=True)
class BatchShare:
    """Request for one worker's share of a global batch."""

    place: EpochKey
    first_row: int  # number of the global batch
    batch_size: int
    global_rank: int
    world_size: int
    drop_last: bool
    keep_from: int  # rows before this one are not asked for again
    start: Snapshot | None = None  # where to begin, rather than with the epoch's first row
    limit_s: float | None = None  # time to read up to `first_row`
    known: tuple[int, Any] | None = None  # number and description of a row that was trained before
    describes: bool = True  # whether the batch's first row is described; that of an epoch's last batch always is


@dataclass(frozen=True)
class RowRanges:
    """Request for rows by their numbers, in half-open ranges that ascend."""

    place: EpochKey
    ranges: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class RowCount:
    """Request for the number of rows."""

    place: EpochKey
    limit: int | None  # number at which to stop counting


class BatchFacts(NamedTuple):
    """Facts of a global batch that are alike on all workers, and a snapshot if one was taken meanwhile."""

    num_rows: int  # 0: the epoch has ended before
    is_last: bool
    first: Any  # description of its first row; None: it cannot be compared
    snapshot: Snapshot | None


class Fetched(NamedTuple):
    """A worker's share of a batch. A named tuple, as a DataLoader pins the memory of its parts."""

    batch: Any
    facts: BatchFacts | None


class _Share(list[Any]):
    """Samples on their way to the collate function."""

    facts: BatchFacts | None = None


class _Collate:
    def __init__(self, inner: Callable[[list[Any]], Any]) -> None:
        self._inner = inner

    def __call__(self, samples: list[Any]) -> Fetched:
        facts = samples.facts if isinstance(samples, _Share) else None
        return Fetched(self._inner(list(samples)) if samples else None, facts)


class _UsersInit:
    """The user's start-up function of loader workers, which looks for the user's dataset in the worker's info."""

    def __init__(self, inner: Callable[[int], None]) -> None:
        self._inner = inner

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SequenceReader):
            # WorkerInfo refuses plain assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        self._inner(worker_id)


def describe_nothing(row: object) -> None:
    """Describe no row: none is compared."""


def all_alike(one: object, other: object) -> bool:
    return True


def the_only(items: Sequence[Any]) -> Any:
    """Return the single item, as a collate function for `RowCount`."""
    (item,) = items
    return item


class SequenceReader(Dataset[Any]):
    """A dataset that answers requests for rows of an `IterableDataset`.

    Args:
        describe: returns a description of a row as plain data; None if there is none by which it can be compared.
        are_alike: whether two descriptions are of the same row.
    """

    def __init__(
        self,
        dataset: Any,
        describe: Callable[[Any], Any] = describe_nothing,
        are_alike: Callable[[Any, Any], bool] = all_alike,
    ) -> None:
        self.dataset = dataset
        self._describe = describe
        self._are_alike = are_alike
        self._pass: OnePass | None = None
        self._initial: Any = None  # the dataset's state before its first pass, if it has one then
        self._has_begun = False
        self._untouched: Any = None  # a copy of the dataset from before a state was loaded
        self._is_touched = False  # whether a state was loaded
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pass": None}

    def __getitem__(self, request: Any) -> Any:
        return self.__getitems__(request)

    def __getitems__(self, request: Any) -> list[Any]:
        """Return the samples of a request.

        Raises:
            DataError: the dataset has other rows than before, or they cannot be reached in time.
        """
        if self._pid != os.getpid():
            _LEFT_TO_PARENT.append(self._pass)
            self._pass, self._pid = None, os.getpid()
        if isinstance(request, BatchShare):
            return self._share(request)
        if isinstance(request, RowRanges):
            return self._rows(request)
        (counted,) = request
        return [self._count(counted)]

    # --- requests -----------------------------------------------------------------------------------------------------------

    def _share(self, request: BatchShare) -> _Share:
        first, stop = request.first_row, request.first_row + request.batch_size
        current = self._pass_for(request)
        current.keep_from(min(request.keep_from, first))
        current.read_to(stop + (request.batch_size if request.drop_last else 1))
        num_rows = request.batch_size if current.end is None else max(0, min(request.batch_size, current.end - first))
        is_last = current.end is not None and current.end <= stop
        if request.drop_last:
            num_rows = num_rows if num_rows == request.batch_size else 0
            is_last = current.end is not None and current.end < stop + request.batch_size
        samples = _Share()
        described = None
        if num_rows:
            begin, end = share(num_rows, request.global_rank, request.world_size)
            if begin == end:
                begin, end = 0, 1  # a placeholder with loss weight 0
            described = self._describe(current.rows(first, first + 1)[0]) if request.describes or is_last else None
            samples.extend(current.hand_out(first + begin, first + end))
        snapshot, current.fresh = current.fresh, None
        samples.facts = BatchFacts(num_rows, is_last, described, snapshot)
        return samples

    def _rows(self, request: RowRanges) -> list[Any]:
        if not request.ranges:
            return []
        first = request.ranges[0][0]
        current = self._pass
        if current is None or current.place != request.place or current.first > first:
            current = self._begin(request.place, 1)
        current.keep_from(first)
        last = request.ranges[-1][1]
        current.read_to(last)
        if current.end is not None and current.end < last:
            raise DataError(
                f"{_name(self.dataset)} had at least {last} rows when they were counted, and has {current.end} now: workers "
                "count the rows of an IterableDataset for validation once, and then split them. Give the dataset the same "
                "number of rows in each epoch, or use a map-style dataset"
            )
        return [row for start, stop in request.ranges for row in current.hand_out(start, stop)]

    def _count(self, request: RowCount) -> int:
        counting = self._begin(request.place, 1)
        counting.keep_from(2**62)
        if request.limit is None:
            while counting.end is None:
                counting.read_to(counting.next + 1024)
        else:
            counting.read_to(request.limit)
        return counting.next

    # --- passes -------------------------------------------------------------------------------------------------------------

    def _pass_for(self, request: BatchShare) -> OnePass:
        """Return a pass that has the request's first row, or reads it next."""
        current, wanted, start, began = self._pass, request.first_row, request.start, time.monotonic()
        if start is not None and (
            EpochKey(start.seed, start.epoch) != request.place or start.row > wanted or not isinstance(start.random, dict)
        ):
            start = None
        fits = current is not None and current.place == request.place and current.first <= wanted
        if current is not None and fits and (start is None or start.row <= current.next):
            self._skip(current, request, began)
            return current
        begun = self._resumed(request.place, request.batch_size, start) if start is not None else None
        begun = begun or self._begin(request.place, request.batch_size)
        self._skip(begun, request, began)
        return begun

    def _skip(self, current: OnePass, request: BatchShare, began: float) -> None:
        num_rows = request.first_row - current.next
        if num_rows <= 0:
            return
        if num_rows > request.batch_size:
            log.info("reads %d rows of %s up to row %d of the epoch", num_rows, _name(self.dataset), request.first_row)
        limit = None
        if request.limit_s is not None:
            limit = Limit(request.limit_s, num_rows, advice_for_joiners(self.dataset), began)
        if request.known is not None and current.next <= request.known[0] < request.first_row:
            current.keep_from(min(request.keep_from, request.known[0]))
            self._check_known_row(current, *request.known, limit)
        current.keep_from(min(request.keep_from, request.first_row))
        current.read_to(request.first_row, limit)

    def _check_known_row(self, current: OnePass, number: int, description: Any, limit: Limit | None) -> None:
        """Read up to a row that was trained before.

        Raises:
            DataError: another row has its number now.
        """
        current.read_to(number + 1, limit)
        rows = current.rows(number, number + 1)
        described = self._describe(rows[0]) if rows else None
        if rows and (described is None or self._are_alike(described, description)):
            return
        raise DataError(
            f"{_name(self.dataset)} gives other rows than before: row {number} of epoch {current.place.epoch} is another one "
            "now, so rows would be left out and others trained twice. Its order may depend on how often it was iterated over: "
            "let it follow from set_epoch(epoch) or from the random numbers of Python, numpy or torch, which are fixed for "
            "each epoch, and keep no generator or counter of its own. If rows are to differ, use "
            "DLRoverStrategy(compare_data=False)"
        )

    def _begin(self, place: EpochKey, batch_size: int) -> OnePass:
        """Begin a pass with the epoch's first row."""
        last, self._pass = self._pass, None
        if last is None or last.end is None or last.place == place or self._is_touched:
            self._rewind()
        self._pass = OnePass(self.dataset, place, batch_size, self._describe)
        return self._pass

    def _resumed(self, place: EpochKey, batch_size: int, start: Snapshot) -> OnePass | None:
        """Return a pass that begins at a snapshot; None if the dataset then has other rows than it had."""
        self._pass = None
        if not self._has_begun:
            self._rewind()
        # Numbers drawn at the beginning of a pass, for an order of all rows, need the generators as they were there.
        for numbers in (start.random, None):
            self._undo_state()
            self._will_load_state()
            try:
                resumed = OnePass(self.dataset, place, batch_size, self._describe, start, numbers or OwnRandom.of(place).plain)
                resumed.read_to(start.row + 1)
            except DataError:
                raise
            except Exception as error:  # the user's `load_state_dict`
                log.warning("%s cannot continue from its state: %r", _name(self.dataset), error)
                continue
            rows = resumed.rows(start.row, start.row + 1)
            described = self._describe(rows[0]) if rows else None
            if described is not None and start.first is not None and self._are_alike(described, start.first):
                self._pass = resumed
                return resumed
        log.warning(
            "%s continues from its state_dict() with another row than it had next%s. This worker reads the epoch from its "
            "first row instead",
            _name(self.dataset),
            ": rows in a shuffle buffer, for example, are not part of the state"
            if start.first is not None
            else ", as far as is known: its rows hold objects that cannot be pickled, and so cannot be recognised",
        )
        return None

    def _rewind(self) -> None:
        """Let the next iterator begin with the first row, though the last one may not have ended.

        A dataset with a state may otherwise go on where it is, as examples of torchdata's do.
        """
        if not has_state(self.dataset):
            return
        self._undo_state()
        if self._initial is not None:  # the copy may be from the middle of a pass
            self.dataset.load_state_dict(copy.deepcopy(self._initial))
        if not self._has_begun:
            self._has_begun = True
            try:
                self._initial = copy.deepcopy(self.dataset.state_dict())
            except Exception as error:  # some have a state only while they are iterated over
                log.debug("%s has no state before it is iterated over: %r", _name(self.dataset), error)

    def _will_load_state(self) -> None:
        if not self._is_touched:
            try:
                self._untouched = copy.deepcopy(self.dataset)
            except Exception as error:  # it holds a file, a lock or a connection
                log.debug("%s cannot be copied: %s", _name(self.dataset), error)
        self._is_touched = True

    def _undo_state(self) -> None:
        """Forget a state that was loaded: the dataset may apply it again to each new iterator."""
        if self._is_touched and self._untouched is not None:
            self.dataset, self._untouched, self._is_touched = self._untouched, None, False


def _name(dataset: object) -> str:
    return type(dataset).__name__


def advice_for_joiners(dataset: object) -> str:
    """Return what a user can do so that joiners need not read an epoch from its first row."""
    first = (
        "Its state does not bring back the same rows: leave out its shuffle buffer"
        if has_state(dataset)
        else f"Give {_name(dataset)} the methods state_dict() and load_state_dict(), and joiners begin where the others are"
    )
    return (
        f"{first}; or use lightning_dlrover.data.stream(...), which reads from any row on; or raise the limit with "
        "DLRoverStrategy(max_catch_up_s=...)"
    )


def reading_loader(loader: DataLoader[Any], reader: SequenceReader, batches: Sequence[Any] = ()) -> DataLoader[Any]:
    """Return a loader of `Fetched` batches with the user's settings, read by this process or by one loader worker."""
    num_workers = min(1, loader.num_workers)
    return DataLoader(
        reader,
        batch_sampler=list(batches),
        num_workers=num_workers,
        collate_fn=_Collate(loader.collate_fn),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout if num_workers else 0,
        worker_init_fn=_UsersInit(loader.worker_init_fn) if loader.worker_init_fn is not None else None,
        multiprocessing_context=loader.multiprocessing_context if num_workers else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if num_workers else None,
        persistent_workers=loader.persistent_workers and num_workers > 0,
    )
