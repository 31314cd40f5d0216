"""The order in which a fit reads its rows, the part of each worker, and a worker's position in it."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.codec import from_fields, to_json
from lightning_dlrover.data.dataset import Positions, Stream, ranges_of
from lightning_dlrover.data.iterable import (
    BatchFacts,
    BatchShare,
    EpochKey,
    IterableReader,
    RowCount,
    RowRanges,
    Snapshot,
    all_alike,
    describe_nothing,
    has_state,
    reading_loader,
)
from lightning_dlrover.data.lane_plan import CYCLE, STRIDE_OF_LAPS, Layout, share, speeds_for
from lightning_dlrover.data.source import DataError
from lightning_dlrover.rdzv.membership.member import Formation

log = logging.getLogger(__name__)

T = TypeVar("T")

# Each worker's place in the training program: as it changes on this worker, and as workers publish it on entering a round.


@dataclass(frozen=True)
class Position:
    """A worker's place in the training program, published to the others on entering a round."""

    updates: int  # optimizer updates done (gradient accumulation: windows)
    batch: int  # global batches handed out over all epochs
    in_step: bool
    collective: int  # collectives outside of steps since the newest batch was handed out
    validation: int  # number of the current validation run; 0 outside
    at_boundary: bool  # between two batches and two windows, where joiners can receive the state
    tables: int = 0  # last round with all sharded tables in its members' memory; 0: no tables, or incomplete ones
    has_unused: bool = False  # parameters without a gradient were found, so DDP has to search for them
    stopped_at: str = ""  # newest place at which all workers wanted to stop, see `Votes.agree_on_stop`
    fit: int = 1  # number of this `fit` in the script
    values: tuple[int, ...] = (0, 0, 0, 0)  # version of the kept epoch values, see `kept_values.Version`

    def encode(self) -> bytes:
        return to_json(self)

    @staticmethod
    def decode(hello: bytes) -> Position | None:
        """Return the position, or None for a joiner, which has none yet.

        Raises:
            ValueError: the bytes are not a position.
        """
        return from_fields(Position, json.loads(hello), "a worker's position") if hello else None


def can_meet(hellos: Mapping[str, bytes]) -> bool:
    """Return whether the workers entering a round can continue together.

    Joiners can receive the state only between steps, and only in the script's first `fit`, in which they are.
    """
    positions = [Position.decode(hello) for hello in hellos.values()]
    standing = [p for p in positions if p is not None]
    if len(standing) in (0, len(positions)):
        return True
    return all(p.at_boundary and p.batch == standing[0].batch and p.fit == 1 for p in standing)


@dataclass
class FitPosition:
    """This worker's place in its round and in the fit."""

    formation: Formation | None  # the worker's round; None on a worker that joins later
    fit: int = 1  # number of this `fit` in the script
    is_standby: bool = False  # waits to be admitted
    is_in_loops: bool = False  # set from the Trainer's run-stage barrier on
    has_entered: bool = False  # set once the training loop is reached; from here on the worker survives losses
    is_between_fits: bool = False
    is_finishing: bool = False
    is_saving: bool = False  # set while a checkpoint is saved
    updates: int = 0
    batch: int = 0
    in_step: bool = False
    is_redoing: bool = False  # set while the open window's batches are repeated, between two batches
    collective: int = 0
    validation: int = 0
    at_boundary: bool = False
    stopped_at: str = ""
    is_between_dataloaders: bool = False  # set while one of several validation dataloaders ends, but the last
    is_repeatable: bool = False  # set in work outside of steps that a loss may interrupt, as it is done again
    speeds: tuple[int, ...] = ()  # of the round's workers, to which their shares are proportional; empty: equal shares
    needs_equal_shares: bool = False  # whether the script gathers shares, or a step has failed with shares by speed
    looks: int = 0  # times that it has looked for new rows of a stream
    is_in_parts: bool = False  # set while a share is computed in parts, which others wait for
    parts: int = 0  # parts of shares that it has begun

    @property
    def rank(self) -> int:
        return self.formation.rank if self.formation is not None else 0

    @property
    def size(self) -> int:
        """Workers of the current round; 1 on a worker that is not admitted yet."""
        return self.formation.size if self.formation is not None else 1

    @property
    def round_number(self) -> int:
        """Number of the current round; 0 before the first one."""
        return self.formation.round.number if self.formation is not None else 0

    @property
    def is_computing(self) -> bool:
        """Whether collectives belong to a batch that would be repeated as a whole."""
        return self.in_step or self.is_redoing

    @property
    def uses_share(self) -> bool:
        """Whether collectives of the script may be of this worker's share of a training batch, or of what it made of it."""
        is_elsewhere = self.validation or self.is_saving or self.is_between_fits
        return self.is_computing or (self.has_entered and not is_elsewhere)

    def published(self, in_window: bool, tables: int, has_unused: bool, values: tuple[int, ...]) -> Position:
        """Return the position for the other workers.

        Args:
            in_window: whether gradients of earlier batches wait for an optimizer step.
            values: version of the kept epoch values.
        """
        return Position(
            *(self.updates, self.batch, self.in_step, self.collective, self.validation, self.at_boundary and not in_window),
            *(tables, has_unused, self.stopped_at, self.fit, values),
        )

    def describe(self) -> str:
        """Describe the position for an error message. Safe in any thread."""
        if not self.has_entered or self.is_between_fits:
            return "before the first step"
        where = "in a training step" if self.in_step else "between two steps"
        if self.validation:
            where = f"in validation run {self.validation}"
        return f"{where} (batch {self.batch})"


# Order the samples of an epoch, in the same way on every worker.
#
# The order depends on seed and epoch only, unless the user has a sampler. Rank 0 then draws it for all workers. A stream's
# order is never drawn: `data/lane_plan.py` finds the rows of any position.


def epoch_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """Return the sample indices of one epoch, int64, shape ``(num_samples,)``, equal for every worker and world size."""
    if not shuffle:
        return torch.arange(num_samples)
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


class Peers(Protocol):
    """The workers that share the batches of a loader, this one included."""

    @property
    def place(self) -> tuple[int, int]:
        """This worker's rank, 0 if it is alone, and the number of workers."""

    @property
    def speeds(self) -> tuple[int, ...]:
        """Relative speed of each worker, to which its share of a training batch is proportional; empty: equal shares."""

    @property
    def owned_sockets(self) -> Sequence[tuple[int, int]]:
        """(fd, inode) pairs of the connections to them, which loader workers must close."""

    def of_rank_zero(self, mine: T) -> T:
        """Return rank 0's argument on all workers. All of them call it together."""


@dataclass(frozen=True)
class Unconnected:
    """Peers that exchange nothing, as those of a loader outside of a job."""

    place: tuple[int, int] = (0, 1)
    speeds: tuple[int, ...] = ()
    owned_sockets: Sequence[tuple[int, int]] = ()

    def of_rank_zero(self, mine: T) -> T:
        return mine


ALONE = Unconnected()
"""The peers of a worker that has none."""


class EpochOrder(Protocol):
    """The order of one epoch's samples."""

    def between(self, start: int, stop: int) -> Sequence[int]:
        """Return the samples at these positions, in a form that the dataset takes."""

    def at(self, positions: npt.NDArray[np.int64]) -> Sequence[int]: ...


class _Drawn:
    def __init__(self, order: torch.Tensor) -> None:
        self._order = order

    def between(self, start: int, stop: int) -> Sequence[int]:
        samples: list[int] = self._order[start:stop].tolist()
        return samples

    def at(self, positions: npt.NDArray[np.int64]) -> Sequence[int]:
        samples: list[int] = self._order[torch.from_numpy(positions)].tolist()
        return samples


@dataclass(frozen=True)
class _Planned:
    _seed: int
    _layout: Layout
    _window: tuple[tuple[str, int, int], ...] | None

    def between(self, start: int, stop: int) -> Sequence[int]:
        return Positions(self._seed, self._layout, ((start, stop),), self._window)

    def at(self, positions: npt.NDArray[np.int64]) -> Sequence[int]:
        return Positions(self._seed, self._layout, tuple(ranges_of(positions.tolist())), self._window)


class LoaderOrder:
    """Orders of one loader's epochs: of a dataset whose samples are the same in all epochs and follow from the seed."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.seed = seed
        self.layout: Layout | None = None  # how a stream's rows are laid over global batches
        self._dataset = dataset

    @property
    def grows(self) -> bool:
        """Whether each epoch has other samples."""
        return False

    @property
    def window(self) -> dict[str, list[int]] | None:
        """First row of each shard and the row after the last, of a stream whose rows come and go."""
        return None

    @property
    def shards(self) -> str:
        """Digest of what a stream reads."""
        return ""

    def enter(self, epoch: int) -> None:
        """Take the rows of an epoch."""

    def take_seed(self, seed: int) -> None:
        """Adopt another worker's order. Otherwise scripts that seed each worker by its rank would have one order each."""
        self.seed = seed

    def take_layout(self, layout: Layout | None) -> None:
        """Adopt the job's layout."""
        if layout is not None:
            raise self._refusal("the layout of a stream")

    def take_window(self, window: dict[str, list[int]] | None, epoch: int) -> None:
        """Adopt the job's rows of an epoch."""

    def take(self, order: torch.Tensor, epoch: int) -> None:
        """Adopt the order that a user's sampler drew on another worker."""
        raise self._refusal(f"an order of {len(order)} samples")

    def _refusal(self, what: str) -> UnsupportedLoaderError:
        return UnsupportedLoaderError(
            f"the job's state has {what} for this loader, which reads a {type(self._dataset).__name__} here: the workers' "
            "scripts differ. Start all workers with the same script"
        )

    def drawn(self, epoch: int) -> torch.Tensor | None:
        """Return the order that a user's sampler drew for this epoch; None if it has not, or the seed gives the order."""
        return None

    def needs_others(self, epoch: int) -> bool:
        """Return whether all workers must take part in finding this epoch's order."""
        return False

    def forget(self) -> None:
        """Draw the next order again, even for the same epoch."""

    def fitting_loader_workers(self, wanted: int) -> int:
        """Return the largest useful number of loader workers up to `wanted`."""
        return wanted


class StreamOrder(LoaderOrder):
    """Orders of a stream's epochs. They follow from the seed and from the job's layout."""

    def __init__(self, stream: Stream, layout: Layout) -> None:
        super().__init__(stream, stream.seed)
        self.layout = layout
        self._stream = stream

    @property
    def grows(self) -> bool:
        return self._stream.grows

    @property
    def num_samples(self) -> int:
        return len(self._stream)

    @property
    def shards(self) -> str:
        return self._stream.fingerprint

    @property
    def shuffles(self) -> bool:
        return self._stream.shuffle_rows > 0

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue in the order of a checkpoint, whatever seed and layout the script has now.

        Raises:
            DataError: the stream has other rows, or the checkpoint's order is not possible.
        """
        self._stream.refuse_other_rows(position)
        seed, layout = int(position["seed"]), Layout(**position["layout"])
        if (seed, layout) != (self.seed, self.layout):
            log.warning(
                "the order of the checkpoint, which is from inside an epoch, is kept in this fit: seed %d and %s, in place of "
                "the script's seed %d and %s",
                *(seed, layout, self.seed, self.layout),
            )
        self.seed, self.layout = seed, layout

    def refuse_other_windows(self, position: Mapping[str, Any]) -> None:
        """Refuse a checkpoint from an epoch's end if the window after its last one would not follow.

        Raises:
            DataError: the stream has the checkpoint's partitions, but begins at another offset.
        """
        window = position.get("window", {})
        if self.grows and position.get("stream", self.name) != self.name and any(key in window for key in self.window or ()):
            raise DataError(
                f"the checkpoint's window ends at an offset of each partition of {self._stream.source!r:.120}, which was "
                "opened by other topics, servers or another start, so it would begin at a place of its own: messages would be "
                "trained twice or never. Give it the former ones"
            )

    def take_layout(self, layout: Layout | None) -> None:
        if layout is not None:
            self.layout = layout

    def enter(self, epoch: int) -> None:
        if self.grows and self._stream.epoch != epoch:
            self._stream.set_epoch(epoch)

    @property
    def window(self) -> dict[str, list[int]] | None:
        return self._stream.window_as_data

    @property
    def name(self) -> str:
        """The stream's name in records of its windows."""
        return self._stream.name

    def take_window(self, window: dict[str, list[int]] | None, epoch: int) -> None:
        if window is not None and self._stream.windows is not None:
            self._stream.take_window(epoch, window)

    def of(self, epoch: int, lap: int = 0) -> EpochOrder:
        assert self.layout is not None
        return _Planned(self.seed + lap * STRIDE_OF_LAPS + epoch, self.layout, self._stream.window)

    def fitting_loader_workers(self, wanted: int) -> int:
        """Return the largest number of loader workers up to `wanted` of which no two read the same lane."""
        assert self.layout is not None
        if self.layout.cycle < CYCLE:
            return wanted  # small data, with shorter cycles, are decoded fast enough that several may read one
        return next(number for number in range(wanted, -1, -1) if not number or self.layout.cycle % number == 0)


class SampleOrder(LoaderOrder):
    """Orders of a map-style dataset's epochs. The newest one is kept.

    Args:
        sampler: the sampler of the user's loader.
        peers: they get the order that the user's sampler drew on rank 0.
    """

    def __init__(self, sampler: Any, dataset: Any, peers: Peers) -> None:
        super().__init__(dataset, int(os.environ.get("PL_GLOBAL_SEED", "0")))
        self._peers = peers
        self._shuffle = False
        self._user_sampler: Any = None
        if type(sampler) is DistributedSampler:
            self._shuffle, self.seed = sampler.shuffle, sampler.seed
        elif type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
            self._shuffle = True
            if sampler.generator is not None:
                self.seed = sampler.generator.initial_seed() % 2**62
        elif type(sampler) is not SequentialSampler:
            self._user_sampler = sampler
        self.num_laps = 1  # orders of a user's sampler to draw for an epoch, in which a shorter loader begins again
        self._order = torch.empty(0, dtype=torch.int64)  # of a user's sampler: those of all laps, one after the other
        self._drawn_for: tuple[int, int] | None = None  # epoch and lap of the order that is kept

    @property
    def num_samples(self) -> int:
        return len(self._dataset if self._user_sampler is None else self._user_sampler)

    def take_seed(self, seed: int) -> None:
        if seed != self.seed:
            self.seed, self._drawn_for = seed, None

    def forget(self) -> None:
        self._drawn_for = None

    def needs_others(self, epoch: int) -> bool:
        return self._user_sampler is not None and self.drawn(epoch) is None

    def drawn(self, epoch: int) -> torch.Tensor | None:
        is_there = self._user_sampler is not None and self._drawn_for is not None and self._drawn_for[0] == epoch
        return self._order if is_there else None

    def take(self, order: torch.Tensor, epoch: int) -> None:
        self._order, self._drawn_for = order, (epoch, 0)

    def of(self, epoch: int, lap: int = 0) -> EpochOrder:
        """Return the order of an epoch's samples, or that of one lap if a loader begins again within the epoch."""
        if self._user_sampler is not None:
            return self._of_user(epoch, lap)
        if self._drawn_for != (epoch, lap):
            self._order = epoch_order(self.num_samples, self._shuffle, self.seed + lap * STRIDE_OF_LAPS, epoch)
            self._drawn_for = epoch, lap
        return _Drawn(self._order)

    def _of_user(self, epoch: int, lap: int) -> EpochOrder:
        num_samples = self.num_samples
        if self.drawn(epoch) is None:
            if hasattr(self._user_sampler, "set_epoch"):
                self._user_sampler.set_epoch(epoch)
            # Rank 0 draws all laps at the epoch's start: later on not all workers would take part.
            drawn = [index for _ in range(self.num_laps) for index in [*self._user_sampler][:num_samples]]
            self._order = self._checked(self._peers.of_rank_zero(drawn), epoch)
            self._drawn_for = epoch, 0
        lap %= max(1, len(self._order) // max(1, num_samples))  # a checkpoint of an older version has one lap
        return _Drawn(self._order[lap * num_samples :])

    def _checked(self, order: list[Any], epoch: int) -> torch.Tensor:
        name = type(self._user_sampler).__name__
        try:
            indices = torch.tensor(order)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedLoaderError(f"sampler {name} gives {order[0]!r:.80}, not a sample's number: {error}") from error
        if indices.dim() != 1 or indices.is_floating_point():
            raise UnsupportedLoaderError(f"sampler {name} gives {order[:1]!r:.80}, not the numbers of samples")
        if len(indices) < self.num_samples * self.num_laps:
            raise UnsupportedLoaderError(
                f"sampler {name} gave {len(indices) // self.num_laps} samples in epoch {epoch}, but its "
                f"length is {self.num_samples}: the batches of an epoch are counted before they are split over the workers, so "
                "its __len__ must be right"
            )
        return indices.to(torch.int64)


# Decide which worker gets which samples: an epoch's global batches, and one split of each over the workers. Pure.


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
    """Division of an epoch's samples, as one worker of the current world takes part in it."""

    num_samples: int
    global_batch_size: int
    global_rank: int
    world_size: int
    training: bool  # whether every worker gets a share of every batch, see `ElasticLoader`
    drop_last: bool
    epoch_batches: int | None = None  # batches of the Trainer's epoch; None: as many as this loader has
    cycles: bool = False  # whether the samples begin again within the Trainer's epoch
    speeds: tuple[int, ...] = ()  # relative speed of each rank, to which its share is proportional; empty: equal shares

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
        start, stop = self._share_of(batch)
        return stop - start

    def _share_of(self, batch: int) -> tuple[int, int]:
        length = self._length(batch)
        return share(length, self.global_rank, self.world_size, speeds_for(self.speeds, length, self._samples_per_batch))

    def loss_weight(self, batch: int) -> float:
        """Return the factor for this worker's mean loss with which the mean over workers is that over samples."""
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
            start, stop = self._share_of(batch)
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


# Keep what a worker has learned of an `IterableDataset`'s epochs: their ends, the dataset's states, and what was handed out.
#
# `data/iterable.py` reads the rows. Rows of training data are never counted: an epoch ends with the batch that is marked as
# the last. Those of validation data are counted once, and then split like samples with numbers.

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


class IterableSource(Protocol):
    """A loader's place in its epoch and in the world."""

    epoch: int
    cursor: int
    global_batch_size: int
    global_rank: int
    world_size: int

    @property
    def speeds(self) -> tuple[int, ...]: ...
    @property
    def num_epoch_batches(self) -> int: ...


@dataclass(frozen=True)
class IterableSettings:
    """How a loader of an `IterableDataset` is read."""

    max_catch_up_s: float = 60.0  # for which others wait for a joiner that has to read what they have read
    max_rows: int | None = None  # rows of a validation after which counting ends; None: no limit
    describe: Callable[[Any], Any] = describe_nothing  # as in `IterableReader`
    are_alike: Callable[[Any, Any], bool] = all_alike
    compares_rows: bool = True  # whether workers compare descriptions of rows; a state is checked by them in any case
    # Lightning's, whose fetcher must fetch no batch ahead, as it does without a length; None: another loop, or none.
    fit_loop: Any = None


class IterableOrder(LoaderOrder):
    """The epochs of one loader of an `IterableDataset`."""

    def __init__(
        self, loader: DataLoader[Any], source: IterableSource, training: bool, drop_last: bool, settings: IterableSettings
    ) -> None:
        super().__init__(loader.dataset, int(os.environ.get("PL_GLOBAL_SEED", "0")))
        self.settings = settings
        # The loader that reads the rows; its batches are `Fetched`.
        self.reading_loader = reading_loader(loader, IterableReader(loader.dataset, settings.describe, settings.are_alike))
        self.redo_batches = 1  # batches that a step may take again, the one under computation included
        self.is_catching_up = False  # whether other workers wait for this one's next batch
        self.num_counted: int | None = None  # rows of a validation; None: not counted yet
        self.in_vote: list[HandedOut] = []  # what was handed out between the newest two votes
        self._users_loader_workers = loader.num_workers
        self._training = training
        self._drop_last = drop_last
        self._source = source
        self._ends: dict[int, int] = {}  # rows by epoch
        self._snapshots: list[Snapshot] = []
        self.known: tuple[int, Any] | None = None  # number and description of the newest row of the epoch that has one
        self._handed_out: list[HandedOut] = []  # since the last vote has begun

    # --- the interface of `LoaderOrder` -------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Rows of the current epoch; `UNKNOWN` while its end is not known."""
        if self._training:
            return self._ends.get(self._source.epoch, UNKNOWN)
        assert self.num_counted is not None, "rows are counted before they are split"
        return self.num_counted

    def fitting_loader_workers(self, wanted: int) -> int:
        return min(1, wanted)

    def of(self, epoch: int, lap: int = 0) -> IterableOrder:
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

    def fetch_nothing_ahead(self) -> None:
        """Let Lightning's fetcher ask for each batch when it is needed. Call it while the fetcher makes its iterators."""
        if self.settings.fit_loop is not None and (fetcher := self.settings.fit_loop._data_fetcher) is not None:
            fetcher.prefetch_batches = 0

    def end_epoch(self) -> None:
        """Let Lightning's fetcher take the batch that it is about to receive for the epoch's last one."""
        if self.settings.fit_loop is not None:
            fetcher = self.settings.fit_loop._data_fetcher
            fetcher.length = fetcher.fetched + 1

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
                speeds=source.speeds,
                start=start,
                limit_s=limit_s,
                known=known,
                describes=batch in (0, first_batch) or batch % every == 0,
            )
            start = limit_s = known = None  # the reader is there now

    def fetched(self, batch: int, facts: BatchFacts) -> None:
        """Note what the reader has found with a batch that is about to be handed out."""
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

    # --- names and checkpoints ------------------------------------------------------------------------------------------------

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
        """Return the loader's place as plain data, for checkpoints and other workers."""
        source = self._source
        snapshot = self._snapshot_at(source.cursor * source.global_batch_size)  # newest state at or before the next batch
        return {
            "seed": self.seed,
            "epoch": source.epoch,
            "end": self._ends.get(source.epoch) if self._training else None,  # others are counted
            "snapshot": vars(snapshot) if snapshot is not None else None,
            "known": self.known,
        }

    def resume_from(self, saved: dict[str, Any]) -> None:
        """Adopt what `in_checkpoint` has returned."""
        self.seed = int(saved["seed"])
        self._snapshots = [Snapshot(**saved["snapshot"])] if saved["snapshot"] is not None else []
        self._ends = {int(saved["epoch"]): saved["end"]} if saved["end"] is not None else {}
        self.known = saved.get("known") if self.settings.compares_rows else None
        self.forget_handed_out()
