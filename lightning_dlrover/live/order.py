"""Order the samples of an epoch, equally on every worker.

The order depends on seed and epoch only, unless the user has a sampler. Rank 0 then draws it for all workers.
A stream's order is never drawn: `data/lane_plan.py` finds the rows of any position.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dlrover.checks.loaders import UnsupportedLoaderError
from lightning_dlrover.data.dataset import Positions, Stream, ranges_of
from lightning_dlrover.data.lane_plan import CYCLE, STRIDE_OF_LAPS, Layout
from lightning_dlrover.data.source import DataError

__all__ = ["ALONE", "EpochOrder", "Peers", "SampleOrder", "StreamOrder", "Unconnected", "WithoutWindows", "epoch_order"]


log = logging.getLogger(__name__)

T = TypeVar("T")


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
    def owned_sockets(self) -> Sequence[tuple[int, int]]:
        """(fd, inode) pairs of the connections to them, which loader workers must close."""

    def of_rank_zero(self, mine: T) -> T:
        """Return rank 0's argument on all workers. All of them call it together."""


@dataclass(frozen=True)
class Unconnected:
    """Peers that exchange nothing, as those of a loader outside of a job."""

    place: tuple[int, int] = (0, 1)
    owned_sockets: Sequence[tuple[int, int]] = ()

    def of_rank_zero(self, mine: T) -> T:
        return mine


ALONE = Unconnected()
"""The peers of a worker that has none."""


class EpochOrder(Protocol):
    """The order of one epoch's samples."""

    def between(self, start: int, stop: int) -> Sequence[int]:
        """Return the samples at these positions, in a form that the dataset takes."""

    def at(self, positions: npt.NDArray[np.int64]) -> Sequence[int]:
        """Return the samples at these positions, in a form that the dataset takes."""


class _Drawn:
    def __init__(self, order: torch.Tensor) -> None:
        self._order = order

    def between(self, start: int, stop: int) -> Sequence[int]:
        samples: list[int] = self._order[start:stop].tolist()
        return samples

    def at(self, positions: npt.NDArray[np.int64]) -> Sequence[int]:
        samples: list[int] = self._order[torch.from_numpy(positions)].tolist()
        return samples


class _Planned:
    def __init__(self, seed: int, layout: Layout, window: tuple[tuple[str, int, int], ...] | None) -> None:
        self._seed, self._layout, self._window = seed, layout, window

    def between(self, start: int, stop: int) -> Sequence[int]:
        return Positions(self._seed, self._layout, ((start, stop),), self._window)

    def at(self, positions: npt.NDArray[np.int64]) -> Sequence[int]:
        return Positions(self._seed, self._layout, tuple(ranges_of(positions.tolist())), self._window)


class StreamOrder:
    """Orders of a stream's epochs. They follow from the seed and from the job's layout.

    Args:
        layout: how rows are laid over global batches.
    """

    def __init__(self, stream: Stream, layout: Layout) -> None:
        self.seed = stream.seed
        self.layout: Layout | None = layout
        self._stream = stream

    @property
    def grows(self) -> bool:
        """Whether each epoch has other samples."""
        return self._stream.grows

    @property
    def num_samples(self) -> int:
        return len(self._stream)

    @property
    def shards(self) -> str:
        """Digest of what the stream reads."""
        return self._stream.fingerprint

    @property
    def shuffles(self) -> bool:
        return self._stream.shuffle_rows > 0

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on in the order of a checkpoint, whatever seed and layout the script has now.

        Raises:
            DataError: the stream has other rows, or the checkpoint's order cannot be had.
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
            DataError: the stream has the checkpoint's partitions, but begins somewhere by itself.
        """
        window = position.get("window", {})
        if self.grows and position.get("stream", self.name) != self.name and any(key in window for key in self.window or ()):
            raise DataError(
                f"the checkpoint's window ends at an offset of each partition of {self._stream.source!r:.120}, which was "
                "opened by other topics, servers or another start, so it would begin at a place of its own: messages would be "
                "trained twice or never. Give it the former ones"
            )

    def take_seed(self, seed: int) -> None:
        self.seed = seed

    def take_layout(self, layout: Layout | None) -> None:
        """Adopt the job's layout."""
        if layout is not None:
            self.layout = layout

    def enter(self, epoch: int) -> None:
        """Take the rows of an epoch."""
        if self.grows and self._stream.epoch != epoch:
            self._stream.set_epoch(epoch)

    @property
    def window(self) -> dict[str, list[int]] | None:
        """What the stream has of each shard, if its rows come and go."""
        return self._stream.window_as_data

    @property
    def name(self) -> str:
        """The stream's name in records of its windows."""
        return self._stream.name

    def take_window(self, window: dict[str, list[int]] | None, epoch: int) -> None:
        """Adopt the job's rows of an epoch."""
        if window is not None and self._stream.windows is not None:
            self._stream.take_window(epoch, window)

    def forget(self) -> None:
        """Do nothing: an order is not kept."""

    def needs_others(self, epoch: int) -> bool:
        return False

    def drawn(self, epoch: int) -> torch.Tensor | None:
        """Return None: the seed gives the order."""
        return None

    def take(self, order: torch.Tensor, epoch: int) -> None:
        raise UnsupportedLoaderError(
            f"the job's state has an order of {len(order)} samples for this loader, which reads a stream here: the workers' "
            "scripts differ. Start all workers with the same script"
        )

    def of(self, epoch: int, lap: int = 0) -> EpochOrder:
        assert self.layout is not None
        return _Planned(self.seed + lap * STRIDE_OF_LAPS + epoch, self.layout, self._stream.window)

    def fitting_loader_workers(self, wanted: int) -> int:
        """Return the largest number of loader workers up to `wanted` of which no two read the same lane.

        Small data, with shorter cycles, are decoded fast enough that several may.
        """
        assert self.layout is not None
        if self.layout.cycle < CYCLE:
            return wanted
        return next(number for number in range(wanted, -1, -1) if not number or self.layout.cycle % number == 0)


class WithoutWindows:
    """Orders of data that are no stream."""

    grows = False
    window = None
    layout: Layout | None = None
    _dataset: Any

    def enter(self, epoch: int) -> None:
        """Do nothing: all epochs have the same samples."""

    def needs_others(self, epoch: int) -> bool:
        """Return whether all workers must take part in finding this epoch's order."""
        return False

    def take_window(self, window: dict[str, list[int]] | None, epoch: int) -> None:
        """Do nothing: there is none."""

    def take_layout(self, layout: Layout | None) -> None:
        if layout is not None:
            raise UnsupportedLoaderError(
                f"the job's state has the layout of a stream for this loader, which reads a {type(self._dataset).__name__} "
                "here: the workers' scripts differ. Start all workers with the same script"
            )


class SampleOrder(WithoutWindows):
    """Orders of one loader's epochs. The newest one is kept.

    Args:
        sampler: the sampler of the user's loader.
        dataset: the loader's dataset.
        peers: they get the order that the user's sampler drew on rank 0.
    """

    def __init__(self, sampler: Any, dataset: Any, peers: Peers) -> None:
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self._dataset = dataset
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

    @property
    def shards(self) -> str:
        return ""

    def fitting_loader_workers(self, wanted: int) -> int:
        return wanted

    def take_seed(self, seed: int) -> None:
        """Adopt another worker's order. Otherwise scripts that seed each worker by its rank would have one order each."""
        if seed != self.seed:
            self.seed, self._drawn_for = seed, None

    def forget(self) -> None:
        """Draw the next order anew, even for the same epoch."""
        self._drawn_for = None

    def needs_others(self, epoch: int) -> bool:
        return self._user_sampler is not None and self.drawn(epoch) is None

    def drawn(self, epoch: int) -> torch.Tensor | None:
        """Return the order that a user's sampler drew for this epoch; None if it has not, or the seed gives the order."""
        is_there = self._user_sampler is not None and self._drawn_for is not None and self._drawn_for[0] == epoch
        return self._order if is_there else None

    def take(self, order: torch.Tensor, epoch: int) -> None:
        """Adopt the order that a user's sampler drew on another worker."""
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
