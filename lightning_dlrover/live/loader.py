"""Iterate over this worker's part of a loader's batches: one order per epoch, one cursor, one split of every global batch.

The order depends on seed and epoch only, and the global batch is constant. Its split over the workers follows from the current
rank and world size (`live/order.py`). So resizing changes neither a step's samples nor the number of steps.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dlrover.checks import batching_of
from lightning_dlrover.data.dataset import Positions, Stream
from lightning_dlrover.data.iterable import Fetched, the_only
from lightning_dlrover.data.lane_plan import Layout
from lightning_dlrover.data.source import DataError, SkippedRange, WithSkipped
from lightning_dlrover.live.loader_workers import LoaderWorkers
from lightning_dlrover.live.order import (
    ALONE,
    EpochOrder,
    HandedOut,
    IterableOrder,
    IterableSettings,
    Peers,
    SampleOrder,
    Split,
    StreamOrder,
)
from lightning_dlrover.rdzv.job.events import RowsSkipped
from lightning_dlrover.report.streams import merged

MAX_LISTED = 500
"""Ranges of rows that one worker records for a loader. A damaged store, or a compacted topic, has any number of them."""


class SkippedRows:
    """Rows of a stream that one loader's batches skip. Each is reported once, however many batches and epochs have it."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[int, int]]] = {}  # ranges of rows by shard
        self._news: dict[int, list[SkippedRange]] = {}
        self._num_listed = 0
        self._is_cut_short = False  # whether a record states that further rows are not listed

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def add(self, found: Iterable[SkippedRange]) -> None:
        for each in found:
            known = self._known.setdefault(each.shard, [])
            if not self._is_cut_short if each.is_cut_short else _added(known, each.first, each.stop):
                self._news.setdefault(each.shard, []).append(each)

    def take_news(self, fit: int, number: int) -> list[RowsSkipped]:
        """Return records of the rows found since the last call.

        Args:
            fit, number: the script's `fit`, and the loader in it.
        """
        found_by_shard, self._news = self._news, {}
        found: list[RowsSkipped] = []
        for shard, rows in found_by_shard.items():
            listed = [each for each in rows if not each.is_cut_short][: MAX_LISTED - self._num_listed]
            self._num_listed += len(listed)
            file, reason = rows[0].key, rows[0].reason
            if listed:
                ranges = merged((each.first, each.stop) for each in listed)
                found.append(RowsSkipped(fit, number, shard, file, list(map(list, ranges)), reason))
            if len(listed) < len(rows) and not self._is_cut_short:
                self._is_cut_short = True
                found.append(RowsSkipped(fit, number, shard, file, [], reason))
        return found


def _added(known: list[tuple[int, int]], first: int, stop: int) -> bool:
    """Add a half-open range to ascending ones that neither overlap nor touch. Return False if one of them contains it.

    Only the ranges that it touches are merged, because a damaged store has thousands, and training waits for this.
    """
    begin = bisect_left(known, first, key=lambda span: span[1])
    end = bisect_right(known, stop, key=lambda span: span[0])
    if begin < end:
        if known[begin][0] <= first and stop <= known[begin][1]:
            return False
        first, stop = min(first, known[begin][0]), max(stop, known[end - 1][1])
    known[begin:end] = [(first, stop)]
    return True


NOT_FORWARDED = ("state_dict", "load_state_dict")
"""Attributes that Lightning looks for but must not find: nothing is ever fetched from the user's loader, so it has no state."""

_KINDS = {SampleOrder: "map-style dataset", StreamOrder: "stream", IterableOrder: "IterableDataset"}

EVALUATION_SEED = 0
"""Seed of the orders of validation and test data, the same on all workers without communication."""


@dataclass(frozen=True)
class LoaderState:
    """A loader's position, sent to joiners and kept in checkpoints."""

    epoch: int
    cursor: int  # global batches of this epoch that were handed out
    global_batch_size: int
    order: torch.Tensor | None  # set only with a sampler of the user's; else it follows from seed and epoch
    seed: int = 0  # seed of the order
    layout: Layout | None = None  # layout of a stream's rows
    window: dict[str, list[int]] | None = None  # rows of each shard, for a stream that has windows
    iterable: dict[str, Any] | None = None  # place in an `IterableDataset`, see `IterableOrder.in_checkpoint`


class _BatchSamplerView:
    """A loader's `batch_sampler` as user code sees it. Lightning finds the loader below it, to set its epoch."""

    def __init__(self, loader: ElasticLoader, inner: Any) -> None:
        self.sampler = loader
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class ElasticLoader:
    """Iterates over this worker's share of every global batch of a `DataLoader`.

    Attributes that it lacks, such as `batch_size` and `collate_fn`, are read from the user's loader. Its own
    `order`, `split`, `workers` and `skipped` hide attributes of these names in a subclass of the user's.

    Args:
        loader: the user's loader.
        global_batch_size: samples per step over all workers.
        training: whether every worker gets a share of every batch. If a global batch has fewer samples than workers, the others
            get one sample with weight 0. Otherwise (validation, test) a worker without samples simply ends earlier.
        before_next: called before every fetch; may change rank, size, cursor and state.
        peers: the workers that share the batches.
        max_workers: maximum number of workers in the job.
        iterable: how an `IterableDataset` is read.

    Raises:
        UnsupportedLoaderError: see `checks.batching_of`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        global_batch_size: int,
        training: bool,
        before_next: Callable[[ElasticLoader], None] | None = None,
        peers: Peers = ALONE,
        max_workers: int = 1,
        iterable: IterableSettings | None = None,
    ) -> None:
        batching = batching_of(loader)
        self._batch_sampler = _BatchSamplerView(self, loader.batch_sampler)
        self.global_batch_size = global_batch_size
        self.global_rank = 0
        self.world_size = 1
        self.speeds: tuple[int, ...] = ()  # of each rank, to which its share is proportional; empty: equal shares
        self.epoch = 0
        self.cursor = 0
        self.wait_s = 0.0  # seconds that the last `next` spent waiting for data
        self.skipped = SkippedRows()  # rows of a stream that could not be read
        self.order: SampleOrder | StreamOrder | IterableOrder
        self.iterable: IterableOrder | None = None  # the order of an `IterableDataset`
        reading = loader
        if isinstance(loader.dataset, IterableDataset):
            self.iterable = self.order = IterableOrder(
                loader, self, training, batching.drop_last, iterable or IterableSettings()
            )
            reading = self.order.reading_loader
        elif isinstance(loader.dataset, Stream):
            self.order = StreamOrder(loader.dataset, loader.dataset.layout_for(global_batch_size, max_workers))
        else:
            self.order = SampleOrder(batching.sampler, loader.dataset, peers)
        if not training:  # workers agree on seeds of training only, and a script may have seeded each by its rank
            self.order.take_seed(EVALUATION_SEED)
        self.workers = LoaderWorkers(reading, self, peers)
        self._loader = loader
        self._batching = batching
        self._training = training
        self._before_next = before_next
        self._peers = peers
        self._epoch_batches: int | None = None  # batches of the Trainer's epoch; None: as many as this loader has
        self._cycles = False
        self._split_fields: tuple[Any, ...] = ()  # fields of the newest `Split`
        self._dealt: Sequence[Any] | None = None  # positions of each batch to come, if they do not follow from rank and size
        self._expected: tuple[int, int] | None = None  # rank and world size in a round that is about to follow
        self._only_opens = False  # set while lanes are opened for a place that this loader is not at
        self._peeked: tuple[int, Any] | None = None  # a batch that was fetched ahead, and its number
        self._is_made = True

    # --- the loader's interface to Lightning and the user --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in NOT_FORWARDED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        known = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not known and "_is_made" in self.__dict__:
            raise AttributeError(
                f"{name} of a loader cannot be set to {value!r} in a live job: the loader is read, never changed. "
                "Make a new one in train_dataloader(), with Trainer(reload_dataloaders_every_n_epochs=...)"
            )
        super().__setattr__(name, value)

    @property
    def sampler(self) -> Any:
        return self._batching.sampler

    @property
    def batch_sampler(self) -> Any:
        return self._batch_sampler

    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        return self.workers.init_fn

    @property
    def num_workers(self) -> int:
        return self.workers.number

    @property
    def prefetch_factor(self) -> int:
        return self.workers.prefetch_factor

    @property
    def users_loader(self) -> DataLoader[Any]:
        return self._loader

    @property
    def users_batch_size(self) -> int:
        return self._batching.batch_size

    def __len__(self) -> int:
        """Return the number of batches of an epoch. In validation it is an upper limit.

        Raises:
            TypeError: it is not known, as for any training loader of an `IterableDataset` without a length.
        """
        if self.iterable is not None and self._training:
            num_rows = len(self.dataset)
            return num_rows // self.global_batch_size if self._batching.drop_last else -(-num_rows // self.global_batch_size)
        return self.split.max_batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order.enter(epoch)

    def __iter__(self) -> ElasticLoader:
        # Lightning requests an iterator before it has set the epoch, so nothing is fetched or started here.
        self.cursor = 0
        self._dealt = self._peeked = None
        self.workers.discard()
        if self.iterable is not None:
            self.iterable.fetch_nothing_ahead()
        self.global_rank, self.world_size = self._peers.place
        self.speeds = self._peers.speeds if self._training else ()
        if not self._training:
            self.order.forget()  # a joiner must take part when a user's sampler is materialised
        self.workers.begin_epoch()
        return self

    def __next__(self) -> Any:
        if self._before_next is not None:
            self._before_next(self)
        self.workers.see_off()
        started = time.perf_counter()
        try:
            batch = self.refetch()
        finally:
            self.wait_s = time.perf_counter() - started
        if self.iterable is not None and self.cursor >= self.num_epoch_batches:
            self.iterable.end_epoch()
        return batch

    # --- the strategy's interface -------------------------------------------------------------------------------------

    @property
    def split(self) -> Split:
        """The division of the epoch's samples in the current world."""
        self._count_rows()
        split = (
            *(self.order.num_samples, self.global_batch_size, self.global_rank, self.world_size),
            *(self._training, self._batching.drop_last, self._epoch_batches, self._cycles, self.speeds),
        )
        if split != self._split_fields:  # every step needs the split several times
            self._split_fields, self._split = split, Split(*split)
        return self._split

    @property
    def num_epoch_batches(self) -> int:
        """Batches of the Trainer's epoch, up to which the cursor counts. Another loader may decide the number."""
        if self.iterable is not None and self._training:
            return self.split.end  # the largest number possible while the end is not known
        return len(self) if self._epoch_batches is None else self._epoch_batches

    @property
    def _end(self) -> int:
        """Index after the last batch of the epoch that this loader delivers."""
        return self.split.end if self._dealt is None else len(self._dealt)

    def deal(self, batches: Sequence[Any]) -> None:
        """Hand out these batches next, until the next `iter`.

        Args:
            batches: one array of positions in the epoch's order per batch.
        """
        self._dealt, self.cursor = batches, 0
        self._discard()

    def shares(self, first_batch: int) -> Iterator[Sequence[int]]:
        """Yield this worker's sample indices of each batch from `first_batch` on."""
        if self.iterable is not None and self._training:
            yield from self.iterable.requests(first_batch)
        elif self._dealt is None:
            for batch, indices in enumerate(self.split.shares(first_batch, self._order_of), first_batch):
                yield self._with_lanes_ahead(indices, batch) if isinstance(indices, Positions) else indices
        else:
            order = self.order.of(self.epoch)
            yield from (order.at(positions) for positions in self._dealt[first_batch:])

    def _order_of(self, lap: int) -> EpochOrder:
        return self.order.of(self.epoch, lap)

    # --- lanes of a stream that are opened before they are read ---------------------------------------------------------------

    @property
    def reads_lanes(self) -> bool:
        """Whether lanes can be opened ahead: loader workers read a stream, and its rows do not depend on the epoch."""
        return isinstance(self.order, StreamOrder) and not self.order.grows and self.num_workers > 0

    def expect_place(self, global_rank: int, world_size: int) -> None:
        """Let loader workers open the lanes of this place, too, whenever they prepare a batch, until `reshard`."""
        if self.reads_lanes:
            self._expected = global_rank, world_size
            self.workers.ask_for_more()

    def open_lanes(self, epoch: int, cursor: int, seed: int, global_rank: int, world_size: int) -> None:
        """Let loader workers open the lanes of a place that this loader will have, while nothing else uses it.

        Requests for the batches there that a loader worker would prepare ahead make it open their lanes only.
        """
        before = self.epoch, self.cursor, self.order.seed, (self.global_rank, self.world_size, self.speeds)
        try:
            self.epoch, self.cursor, self._only_opens = epoch, cursor, True
            self.order.take_seed(seed)
            self.reshard(global_rank, world_size)
            self.prepare_next()
        finally:
            self.epoch, self.cursor, seed, (self.global_rank, self.world_size, self.speeds) = before
            self.order.take_seed(seed)
            self._only_opens = False
            self._discard()

    def _with_lanes_ahead(self, indices: Positions, batch: int) -> Positions:
        """Add the lanes to open to a request for a share of a batch."""
        if self._only_opens:
            return replace(indices, ranges=(), ahead=indices.ranges)
        if self._expected is None:
            return indices
        global_rank, world_size = self._expected
        split = replace(self.split, global_rank=global_rank, world_size=world_size, speeds=())
        ranges: list[tuple[int, int]] = []
        for number in (batch - self.num_workers, batch):  # both are prepared by the same loader worker
            ahead = next(split.shares(number, self._order_of), None) if number >= self.cursor else None
            ranges += ahead.ranges if isinstance(ahead, Positions) else ()
        return replace(indices, ahead=tuple(ranges))

    def keep_step(self, num_batches: int | None, cycles: bool) -> None:
        """Count through an epoch of `num_batches`, set by the longest or the shortest of several loaders; None: not known.

        Args:
            cycles: whether the loader begins again after its own batches. Otherwise it only counts on.
        """
        cycles = cycles and self.iterable is None
        if self.iterable is None and (num_batches, cycles) != (self._epoch_batches, self._cycles):
            self._discard()  # prepared batches end where the epoch ended before
        self._epoch_batches, self._cycles = num_batches, cycles
        if isinstance(self.order, SampleOrder):
            self.order.num_laps = self.split.num_laps

    def reshard(self, global_rank: int, world_size: int, rewind: int = 0, speeds: tuple[int, ...] = ()) -> None:
        """Split the batches from the cursor on for another world.

        Batches that loader workers prepared for the old split are discarded.

        Args:
            rewind: number of batches to hand out again.
            speeds: to which the workers' shares are proportional; empty: equal shares.
        """
        self.global_rank, self.world_size, self.speeds = global_rank, world_size, speeds
        self.cursor -= rewind
        self._expected = None
        self._discard()

    def divide(self, speeds: tuple[int, ...]) -> None:
        """Split the batches from the cursor on in proportion to the workers' speeds; empty: in equal shares."""
        self.speeds = speeds
        self._discard()

    def prepare_next(self) -> None:
        """Let loader workers begin with the next batch, as after a change of the split. Does not wait for them."""
        if self.iterable is None and not self.order.needs_others(self.epoch) and self.cursor < self._end:
            self.workers.begin(self.cursor)

    def refetch(self) -> Any:
        """Return the next batch, without the switch point of `__next__`.

        Raises:
            StopIteration: the loader has ended, though its cursor has advanced, too.
        """
        if self.cursor >= self._end:
            self.cursor += self.cursor < self.num_epoch_batches
            raise StopIteration
        batch = self._fetch()
        if self.cursor >= self._end:  # the epoch has ended with the batch before
            raise StopIteration
        self.cursor += 1
        # The process that reads an `IterableDataset` still has the rows in case a loss repeats this batch.
        if self.cursor == self._end and not self._loader.persistent_workers and self.iterable is None:
            self.close()
        return batch

    def peek(self) -> HandedOut | None:
        """Fetch the next batch ahead; return what other workers must see in it. None: there is none to compare."""
        if self.iterable is None or self.cursor >= self._end:
            return None
        fetched = self.workers.fetch(self.cursor)
        assert isinstance(fetched, Fetched)
        assert fetched.facts is not None
        self._peeked = self.cursor, fetched
        return self.iterable.seen(self.cursor, fetched.facts)

    def _fetch(self) -> Any:
        peeked, self._peeked = self._peeked, None
        is_next = peeked is not None and peeked[0] == self.cursor
        fetched = peeked[1] if peeked is not None and is_next else self.workers.fetch(self.cursor)
        if isinstance(fetched, WithSkipped):
            self.skipped.add(fetched.skipped)
            return fetched.batch
        if self.iterable is None:
            return fetched
        assert isinstance(fetched, Fetched)
        if fetched.facts is not None:
            self.iterable.fetched(self.cursor, fetched.facts)
        return fetched.batch

    def _discard(self) -> None:
        self._peeked = None
        self.workers.discard()

    def _count_rows(self) -> None:
        """Count the rows of an `IterableDataset` for validation, where its rows are read."""
        if self.iterable is not None and self.iterable.needs_count:
            request: Any = self.iterable.count_request
            (self.iterable.num_counted,) = self.workers.fetch_apart([request], the_only)

    def state(self) -> LoaderState:
        return LoaderState(
            *(self.epoch, self.cursor, self.global_batch_size, self.order.drawn(self.epoch), self.order.seed),
            *(self.order.layout, self.order.window),
            self.iterable.in_checkpoint() if self.iterable is not None else None,
        )

    @property
    def position_in_stream(self) -> dict[str, Any] | None:
        """What `Stream.resume_from` takes; None for other data."""
        layout = self.order.layout
        if layout is None:
            return None
        first_row = self.cursor * self.global_batch_size
        assert isinstance(self.order, StreamOrder)
        position = {"seed": self.order.seed, "epoch": self.epoch, "first_row": first_row, "layout": asdict(layout)}
        position |= {"shards": self.order.shards, "shuffles": self.order.shuffles, "num_rows": self.order.num_samples}
        if self.order.window is not None:
            position |= {"stream": self.order.name, "window": self.order.window}
        return position

    @property
    def order_in_checkpoint(self) -> dict[str, Any]:
        """What a cursor refers to, in addition to `position_in_stream` and the place in an `IterableDataset`."""
        order = {"kind": _KINDS[type(self.order)], "seed": self.order.seed, "global_batch_size": self.global_batch_size}
        return order | ({"num_samples": self.order.num_samples} if isinstance(self.order, SampleOrder) else {})

    def resume(
        self, order: Mapping[str, Any] | None, stream: Mapping[str, Any] | None, iterable: dict[str, Any] | None
    ) -> None:
        """Continue at the cursor in the order of a checkpoint.

        Args:
            order, stream, iterable: what the checkpoint has of this loader, as `order_in_checkpoint`, `position_in_stream` and
                `IterableOrder.in_checkpoint` return it; None if it has nothing.

        Raises:
            DataError: it is from inside an epoch, whose next samples this loader would not give.
        """
        if not self.cursor:
            if stream is not None and isinstance(self.order, StreamOrder):
                self.order.refuse_other_windows(stream)
            return
        saved = dict(order or ())
        if stream is not None:
            saved |= {"kind": _KINDS[StreamOrder], "global_batch_size": stream["layout"]["batch_size"]}
        own = self.order_in_checkpoint
        for name in ("kind", "global_batch_size", "num_samples"):
            if saved.get(name, own.get(name)) != own.get(name):
                raise DataError(
                    f"the checkpoint was saved after {self.cursor} batches of an epoch with {name}={saved[name]}, and the "
                    f"training loader has {name}={own.get(name)} now: samples of that epoch would be trained twice or never. "
                    f"Keep the former one until the epoch has ended, or resume a checkpoint of an epoch's end"
                )
        if stream is not None and isinstance(self.order, StreamOrder):
            self.order.resume(stream)
        elif iterable is not None and self.iterable is not None:
            self.iterable.resume_from(iterable)
        elif "seed" in saved:
            self.order.take_seed(int(saved["seed"]))
        self._discard()

    def load_state(self, state: LoaderState) -> None:
        self.order.take_window(state.window, state.epoch)
        self.set_epoch(state.epoch)
        self.cursor = state.cursor
        self.global_batch_size = state.global_batch_size
        self.order.take_seed(state.seed)
        self.order.take_layout(state.layout)
        if state.order is not None:
            self.order.take(state.order, state.epoch)
        if self.iterable is not None and state.iterable is not None:
            self.iterable.resume_from(state.iterable)
        self._discard()

    def close(self) -> None:
        self.workers.close()
