"""Read any `IterableDataset` as global batches: each worker reads all rows of an epoch and keeps its share.

A request names the first row of a global batch and the worker's place in the world, so a resize needs no new iterator. The
reader looks one row ahead, so that all workers learn with the same batch that the epoch ends with it. If a request is for rows
that are neither kept nor to come, the reader begins again: from a snapshot of the dataset's state, else from the first row.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lightning_dlrover.data.lane_plan import share, speeds_for
from lightning_dlrover.data.rows import own_copies
from lightning_dlrover.data.source import DataError
from lightning_dlrover.rdzv.transport import transfer

# Iterate over one epoch so that a dataset gives every process the same rows.
#
# The dataset sees neither the number of a loader worker nor the process's random numbers: it has generators of its own,
# seeded for each epoch (`OwnRandom`). The iterator keeps the rows that may be asked for again, and takes the dataset's state
# from time to time.

log = logging.getLogger(__name__)

SNAPSHOT_S = 1.0
"""Minimum seconds between two snapshots. A joiner reads the rows since the newest one again."""

MAX_SNAPSHOT_SHARE = 0.02
"""Maximum share of the time that snapshots may take."""

MIN_ROWS_FOR_SPEED = 64
"""Minimum number of rows whose time predicts that of others."""


@dataclass(frozen=True)
class EpochKey:
    """An epoch and its seed, which a shuffled order of rows depends on."""

    seed: int
    epoch: int


@dataclass(frozen=True)
class Snapshot:
    """The state of a dataset between two rows of an epoch, as plain data for other workers and checkpoints."""

    seed: int
    epoch: int
    row: int  # number of the next row
    state: bytes  # result of `state_dict()`; its classes, such as numpy's, would be refused by `torch.load(weights_only=True)`
    random: dict[str, Any]
    first: Any  # description of the next row; None: it cannot be compared


@dataclass(frozen=True)
class Limit:
    """Time to read up to a row while other workers wait."""

    seconds: float
    num_rows: int
    advice: str
    began: float  # beginning of the wait on the monotonic clock

    def check(self, num_read: int, took_s: float) -> None:
        """Raise `DataError` if the rest cannot be read in time."""
        is_over = time.monotonic() - self.began > self.seconds
        shows_speed = num_read >= MIN_ROWS_FOR_SPEED and took_s >= self.seconds / 10
        if not is_over and not (shows_speed and took_s / num_read * self.num_rows > self.seconds):
            return
        raise DataError(
            f"this worker would have to read {self.num_rows} rows to be where the others are, while they wait. It has read "
            f"{num_read} of them in {took_s:.1f} s, and all would take longer than the limit of {self.seconds:g} s. "
            f"{self.advice}"
        )


class OwnRandom:
    """A dataset's own generators of Python, numpy and torch, in force only while it runs. `plain` holds their states."""

    def __init__(self, plain: dict[str, Any]) -> None:
        version, numbers, gauss = plain["python"]
        name, keys, *rest = plain["numpy"]
        self._state = ((version, tuple(numbers), gauss), (name, np.array(keys, dtype=np.uint32), *rest), plain["torch"])

    @staticmethod
    def of(place: EpochKey) -> OwnRandom:
        """Return the generators at the beginning of an epoch."""
        digest = hashlib.sha256(f"{place.seed}/{place.epoch}".encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        return OwnRandom(
            _plain(
                random.Random(number).getstate(),
                np.random.RandomState(number % 2**32).get_state(),
                torch.Generator().manual_seed(number).get_state(),
            )
        )

    @staticmethod
    def in_force_now() -> dict[str, Any]:
        """Return the states in force, as plain data."""
        return _plain(*_in_force())

    @property
    def plain(self) -> dict[str, Any]:
        return _plain(*self._state)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Use these generators inside the block, and the former ones again afterwards."""
        before = _in_force()
        _put_in_force(self._state)
        try:
            yield
        finally:
            self._state = _in_force()
            _put_in_force(before)


def _in_force() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _put_in_force(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _plain(of_python: Any, of_numpy: Any, of_torch: torch.Tensor) -> dict[str, Any]:
    numbers = [value.tolist() if isinstance(value, np.ndarray) else value for value in of_numpy]
    return {"python": of_python, "numpy": numbers, "torch": of_torch}


@contextmanager
def _as_only_process() -> Iterator[None]:
    """Hide the number of this loader worker, for which a dataset might yield only a part of its rows."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def has_state(dataset: object) -> bool:
    """Return whether a dataset, or its iterator, can return its state and load one."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


class EpochIterator:
    """The rows of a dataset in one epoch, read from the first one or from a snapshot on.

    Args:
        batch_size: rows between two places where a snapshot may be taken.
        describe: returns a description by which a row can be recognised, or None.
        random: states of the dataset's generators; None: those of the snapshot, or of the epoch's start.

    Attributes:
        first: number of the first row that is kept.
        next: number of the next row to read.
        end: number of rows in the epoch; None: not known yet.
        fresh: a snapshot that was not handed out yet.
    """

    def __init__(
        self,
        dataset: Any,
        place: EpochKey,
        batch_size: int,
        describe: Callable[[Any], Any],
        snapshot: Snapshot | None = None,
        random: dict[str, Any] | None = None,
    ) -> None:
        self.place = place
        self.dataset = dataset
        self.first = self.next = snapshot.row if snapshot is not None else 0
        self.end: int | None = None
        self.fresh: Snapshot | None = None
        self.error: Exception | None = None
        self._kept: deque[Any] = deque()
        self._keep_from = self.first
        self._batch_size = batch_size
        self._describe = describe
        self._pending: tuple[int, bytes, dict[str, Any]] | None = None  # a snapshot before its next row was read
        self._snapshot_at = time.monotonic()
        self._snapshot_cost_s = 0.0
        self._random = OwnRandom.of(place)
        with self._random.in_force(), _as_only_process():
            if callable(set_epoch := getattr(dataset, "set_epoch", None)):
                set_epoch(place.epoch)
            if snapshot is not None and has_state(dataset):
                dataset.load_state_dict(transfer.loads(snapshot.state))
            self._iterator = iter(dataset)
            self._stateful = self._iterator if has_state(self._iterator) else dataset if has_state(dataset) else None
            if snapshot is not None and self._stateful is not dataset:
                self._iterator.load_state_dict(transfer.loads(snapshot.state))
        if snapshot is not None:
            self._random = OwnRandom(random if random is not None else snapshot.random)

    @property
    def is_stateful(self) -> bool:
        return self._stateful is not None

    def keep_from(self, row: int) -> None:
        """Forget the rows before this one."""
        self._keep_from = row
        while self._kept and self.first < row:
            self._kept.popleft()
            self.first += 1

    def read_to(self, stop: int, limit: Limit | None = None) -> None:
        """Read the rows up to a number, or to the end. Raises `DataError` if that would exceed the limit."""
        if self.next >= stop or self.end is not None:
            return
        if self.error is not None:
            raise self.error  # a generator that has failed looks exhausted
        begin, began = self.next, time.monotonic()
        with self._random.in_force(), _as_only_process():
            while self.next < stop:
                if limit is not None:
                    limit.check(self.next - begin, time.monotonic() - began)
                if not self._read_one():
                    return
                if self.next == begin + 1:
                    began = time.monotonic()  # the first row may take long, as files are opened and buffers filled

    def rows(self, start: int, stop: int) -> list[Any]:
        """Return rows that are kept, for reading only."""
        assert self.first <= start
        return [self._kept[number - self.first] for number in range(start, min(stop, self.next))]

    def hand_out(self, start: int, stop: int) -> list[Any]:
        """Return rows to a caller who may change them. Rows that cannot be copied are no longer kept."""
        rows = self.rows(start, stop)
        copies = own_copies(rows)
        if copies is None:
            self.keep_from(stop)
            return rows
        return copies

    def _read_one(self) -> bool:
        if self._stateful is not None and self.next % self._batch_size == 0:
            self._maybe_take_snapshot()
        try:
            row = next(self._iterator)
        except StopIteration:
            self.end, self._pending = self.next, None
            return False
        except Exception as error:
            self.error = error
            raise
        if self._pending is not None:
            number, state, numbers = self._pending
            self.fresh = Snapshot(self.place.seed, self.place.epoch, number, state, numbers, self._describe(row))
            self._pending = None
        if self.next >= self._keep_from:
            self._kept.append(row)
        else:
            self.first = self.next + 1
        self.next += 1
        return True

    def _maybe_take_snapshot(self) -> None:
        now = time.monotonic()
        if now - self._snapshot_at < max(SNAPSHOT_S, self._snapshot_cost_s / MAX_SNAPSHOT_SHARE) or not self.next:
            return
        assert self._stateful is not None
        try:
            self._pending = self.next, _plain_bytes(self._stateful.state_dict()), OwnRandom.in_force_now()
        except transfer.TransferError as error:
            log.warning(
                "the state of %s is not shared, because it holds more than plain data (%s): joiners read an epoch from its "
                "first row. Let state_dict() return numbers, strings, lists, dictionaries and tensors",
                _kind(self.dataset),
                error,
            )
            self._stateful = None
        except Exception as error:  # the user's code; training continues without snapshots
            log.warning("%s.state_dict() failed, so joiners read an epoch from its first row: %r", _kind(self.dataset), error)
            self._stateful = None
        self._snapshot_at = time.monotonic()
        self._snapshot_cost_s = self._snapshot_at - now


def _plain_bytes(state: Any) -> bytes:
    """Serialize a state. Raises `TransferError` for objects of the script's classes, which a joiner would refuse."""
    body = transfer.dumps(state)
    if names := transfer.names_in(transfer.Packed(body, [])):
        raise transfer.TransferError(", ".join(sorted(names)))
    transfer.loads(body)
    return body


_LEFT_TO_PARENT: list[object] = []
"""Iterators of the parent of this forked process. Their destructors might close what both processes share."""


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
    speeds: tuple[int, ...] = ()  # of each rank, to which its share is proportional; empty: equal shares
    start: Snapshot | None = None  # where to begin instead of the epoch's first row
    limit_s: float | None = None  # time to read up to `first_row`
    known: tuple[int, Any] | None = None  # number and description of a trained row
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
    """Batch metadata, identical on all workers, and this worker's newest snapshot, if it took one."""

    num_rows: int  # 0: the epoch ended before this batch
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
    """The user's `worker_init_fn`, which expects the user's dataset in the worker's info."""

    def __init__(self, inner: Callable[[int], None]) -> None:
        self._inner = inner

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, IterableReader):
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


class IterableReader(Dataset[Any]):
    """A dataset that answers requests for rows of an `IterableDataset`.

    Args:
        describe: returns a description of a row as plain data; None if it cannot be compared. By default no row can.
        are_alike: whether two descriptions are of the same row.
    """

    def __init__(
        self, dataset: Any, describe: Callable[[Any], Any] = describe_nothing, are_alike: Callable[[Any, Any], bool] = all_alike
    ) -> None:
        self.dataset = dataset
        self._describe = describe
        self._are_alike = are_alike
        self._current: EpochIterator | None = None
        self._initial: Any = None  # the dataset's state before its first epoch, if it has one by then
        self._has_begun = False
        self._untouched: Any = None  # a copy of the dataset before a state was loaded
        self._is_touched = False  # whether a state was loaded
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None}

    def __getitem__(self, request: Any) -> Any:
        return self.__getitems__(request)

    def __getitems__(self, request: Any) -> list[Any]:
        """Return the samples of a request. Raises `DataError` for other rows than before, or if reading takes too long."""
        if self._pid != os.getpid():
            _LEFT_TO_PARENT.append(self._current)
            self._current, self._pid = None, os.getpid()
        if isinstance(request, BatchShare):
            return self._share(request)
        if isinstance(request, RowRanges):
            return self._rows(request)
        (counted,) = request
        return [self._count(counted)]

    # --- requests -----------------------------------------------------------------------------------------------------------

    def _share(self, request: BatchShare) -> _Share:
        first, stop = request.first_row, request.first_row + request.batch_size
        current = self._iterator_for(request)
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
            speeds = speeds_for(request.speeds, num_rows, request.batch_size)
            begin, end = share(num_rows, request.global_rank, request.world_size, speeds)
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
        current = self._current
        if current is None or current.place != request.place or current.first > first:
            current = self._begin(request.place, 1)
        current.keep_from(first)
        last = request.ranges[-1][1]
        current.read_to(last)
        if current.end is not None and current.end < last:
            raise DataError(
                f"{_kind(self.dataset)} had at least {last} rows when they were counted, and has {current.end} now: workers "
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

    # --- iterators ------------------------------------------------------------------------------------------------------------

    def _iterator_for(self, request: BatchShare) -> EpochIterator:
        """Return an iterator that has the request's first row, or reads it next."""
        current, wanted, start, began = self._current, request.first_row, request.start, time.monotonic()
        if start is not None and (
            EpochKey(start.seed, start.epoch) != request.place or start.row > wanted or not isinstance(start.random, dict)
        ):
            start = None
        fits = current is not None and current.place == request.place and current.first <= wanted
        if current is not None and fits and (start is None or start.row <= current.next):
            found = current
        else:
            resumed = self._resumed(request.place, request.batch_size, start) if start is not None else None
            found = resumed or self._begin(request.place, request.batch_size)
        self._skip(found, request, began)
        return found

    def _skip(self, current: EpochIterator, request: BatchShare, began: float) -> None:
        num_rows = request.first_row - current.next
        if num_rows <= 0:
            return
        if num_rows > request.batch_size:
            log.info("reads %d rows of %s up to row %d of the epoch", num_rows, _kind(self.dataset), request.first_row)
        limit = None
        if request.limit_s is not None:
            limit = Limit(request.limit_s, num_rows, advice_for_joiners(self.dataset), began)
        if request.known is not None and current.next <= request.known[0] < request.first_row:
            current.keep_from(min(request.keep_from, request.known[0]))
            self._check_known_row(current, *request.known, limit)
        current.keep_from(min(request.keep_from, request.first_row))
        current.read_to(request.first_row, limit)

    def _check_known_row(self, current: EpochIterator, number: int, description: Any, limit: Limit | None) -> None:
        """Read up to a row that was trained before. Raises `DataError` if another row has its number now."""
        current.read_to(number + 1, limit)
        rows = current.rows(number, number + 1)
        described = self._describe(rows[0]) if rows else None
        if rows and (described is None or self._are_alike(described, description)):
            return
        raise DataError(
            f"{_kind(self.dataset)} gives other rows than before: row {number} of epoch {current.place.epoch} is another one "
            "now, so some rows would never be trained and others twice. Its order may depend on how often it was iterated "
            "over: let it follow from set_epoch(epoch) or from the random numbers of Python, numpy or torch, which are seeded "
            "for each epoch, and keep no generator or counter of its own. If rows are to differ, use "
            "DLRoverStrategy(compare_data=False)"
        )

    def _begin(self, place: EpochKey, batch_size: int) -> EpochIterator:
        """Begin with the epoch's first row."""
        last, self._current = self._current, None
        if last is None or last.end is None or last.place == place or self._is_touched:
            self._rewind()
        self._current = EpochIterator(self.dataset, place, batch_size, self._describe)
        return self._current

    def _resumed(self, place: EpochKey, batch_size: int, start: Snapshot) -> EpochIterator | None:
        """Return an iterator that begins at a snapshot; None if the dataset then yields other rows than before."""
        self._current = None
        if not self._has_begun:
            self._rewind()
        # An order of all rows, drawn when iteration begins, needs the generators of the epoch's start.
        for numbers in (start.random, OwnRandom.of(place).plain):
            self._undo_state()
            self._will_load_state()
            try:
                resumed = EpochIterator(self.dataset, place, batch_size, self._describe, start, numbers)
                resumed.read_to(start.row + 1)
            except DataError:
                raise
            except Exception as error:  # the user's `load_state_dict`
                log.warning("%s cannot continue from its state: %r", _kind(self.dataset), error)
                continue
            rows = resumed.rows(start.row, start.row + 1)
            described = self._describe(rows[0]) if rows else None
            if described is not None and start.first is not None and self._are_alike(described, start.first):
                self._current = resumed
                return resumed
        log.warning(
            "%s continues from its state_dict() with another row than expected%s. This worker reads the epoch from its first "
            "row instead",
            _kind(self.dataset),
            ": rows in a shuffle buffer, for example, are not part of the state"
            if start.first is not None
            else ", or so it seems: its rows hold objects that cannot be pickled, and so cannot be recognised",
        )
        return None

    def _rewind(self) -> None:
        """Let the next iterator begin with the first row even if the last one did not end.

        A dataset with a state may otherwise continue where it is, as torchdata's examples do.
        """
        if not has_state(self.dataset):
            return
        self._undo_state()
        if self._initial is not None:  # the copy may be from the middle of an epoch
            self.dataset.load_state_dict(copy.deepcopy(self._initial))
        if not self._has_begun:
            self._has_begun = True
            try:
                self._initial = copy.deepcopy(self.dataset.state_dict())
            except Exception as error:  # some have a state only while they are iterated over
                log.debug("%s has no state before it is iterated over: %r", _kind(self.dataset), error)

    def _will_load_state(self) -> None:
        if not self._is_touched:
            try:
                self._untouched = copy.deepcopy(self.dataset)
            except Exception as error:  # it holds a file, a lock or a connection
                log.debug("%s cannot be copied: %s", _kind(self.dataset), error)
        self._is_touched = True

    def _undo_state(self) -> None:
        """Forget a loaded state: the dataset may apply it to each new iterator."""
        if self._is_touched and self._untouched is not None:
            self.dataset, self._untouched, self._is_touched = self._untouched, None, False


def _kind(dataset: object) -> str:
    return type(dataset).__name__


def advice_for_joiners(dataset: object) -> str:
    """Return what a user can do so that joiners need not read an epoch from its first row."""
    first = (
        "Its state does not restore the same rows: remove its shuffle buffer"
        if has_state(dataset)
        else f"Give {_kind(dataset)} the methods state_dict() and load_state_dict(), so that joiners begin where the others are"
    )
    return (
        f"{first}; or use lightning_dlrover.data.stream(...), which reads from any row on; or raise the limit with "
        "DLRoverStrategy(max_catch_up_s=...)"
    )


def reading_loader(loader: DataLoader[Any], reader: IterableReader, batches: Sequence[Any] = ()) -> DataLoader[Any]:
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
