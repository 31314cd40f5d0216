"""Run one pass over an `IterableDataset` so that it gives every process the same rows.

The dataset sees neither the number of a loader worker nor the process's random numbers: `OwnRandom` has some of its own, fixed
by seed and epoch. A pass keeps the rows that may be asked for again, and takes the dataset's state from time to time.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from lightning_dlrover.data.own_copies import own_copies
from lightning_dlrover.data.source import DataError
from lightning_dlrover.rdzv.group import transfer

__all__ = ["EpochKey", "Limit", "OnePass", "OwnRandom", "Snapshot", "has_state"]

log = logging.getLogger(__name__)

SNAPSHOT_S = 1.0
"""Minimum seconds between two snapshots. A joiner reads again what was read since the newest one."""

MAX_SNAPSHOT_SHARE = 0.02
"""Maximum share of the time that snapshots may take."""

MIN_ROWS_FOR_SPEED = 64
"""Rows whose time shows how long others will take."""


@dataclass(frozen=True)
class EpochKey:
    """What the order of rows in one pass depends on: a dataset that shuffles gives another one in each epoch."""

    seed: int
    epoch: int


@dataclass(frozen=True)
class Snapshot:
    """The state of a dataset between two rows of a pass, as plain data that any worker and checkpoint takes."""

    seed: int
    epoch: int
    row: int  # number of the row that comes next
    state: bytes  # result of `state_dict()`, with classes that `torch.load(weights_only=True)` would refuse, as numpy's
    random: dict[str, Any]
    first: Any  # description of the row that comes next; None: it cannot be compared


@dataclass(frozen=True)
class Limit:
    """Time to read up to a row while other workers wait."""

    seconds: float
    num_rows: int
    advice: str
    began: float  # since when they wait, on the monotonic clock

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
    """Generators of Python, numpy and torch of a dataset's own, in force only while it runs.

    Args:
        plain: states of the three, as plain data.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        version, numbers, gauss = plain["python"]
        name, keys, *rest = plain["numpy"]
        self._state = (
            (version, tuple(numbers), gauss),
            (name, np.array(keys, dtype=np.uint32), *rest),
            plain["torch"],
        )

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
        """Put these generators into force, and those of before afterwards."""
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
    """Hide the number of this loader worker: a dataset that gives each one a part would leave out all others' rows."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def has_state(dataset: object) -> bool:
    """Return whether a dataset, or its iterator, can hand out its state and take one."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


class OnePass:
    """The rows of a dataset in one epoch, read from the first one or from a snapshot on.

    Args:
        batch_size: rows between two places where a snapshot may be taken.
        describe: returns a description of a row by which it can be recognised, or None.
        snapshot: where to begin.
        random: the dataset's random numbers; None: those of the snapshot, or of the epoch's start.

    Attributes:
        first: number of the first row that is kept.
        next: number of the row that is read next.
        end: number of rows in the epoch; None: not known yet.
        fresh: a snapshot that nobody has taken over yet.
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
        """Read the rows up to a number, or up to the end.

        Raises:
            DataError: the limit is too short for that.
        """
        if self.next >= stop or self.end is not None:
            return
        if self.error is not None:
            raise self.error  # a generator that has failed would seem to have ended
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
        """Return rows that are kept, for someone who only looks at them."""
        assert self.first <= start
        return [self._kept[number - self.first] for number in range(start, min(stop, self.next))]

    def hand_out(self, start: int, stop: int) -> list[Any]:
        """Return rows to someone who may change them. Rows that cannot be copied are kept no longer."""
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
                "the state of %s is not handed on, because it holds more than plain data (%s): joiners read an epoch from its "
                "first row. Let state_dict() return numbers, texts, lists, dictionaries and tensors",
                _name(self),
                error,
            )
            self._stateful = None
        except Exception as error:  # the user's code; training goes on without snapshots
            log.warning("%s.state_dict() has failed, so joiners read from the epoch's beginning: %r", _name(self), error)
            self._stateful = None
        self._snapshot_at = time.monotonic()
        self._snapshot_cost_s = self._snapshot_at - now


def _plain_bytes(state: Any) -> bytes:
    """Serialize a state.

    Raises:
        TransferError: a joiner would refuse it, as it holds objects of the script's classes.
    """
    body = transfer.dumps(state)
    if names := transfer.names_in(transfer.Packed(body, [])):
        raise transfer.TransferError(", ".join(sorted(names)))
    transfer.loads(body)
    return body


def _name(pass_: OnePass) -> str:
    return type(pass_.dataset).__name__
