"""A dataset that reads shards by their rows, for a DataLoader: the same batches for any number of workers and loader workers.

Its samples are the positions of an epoch, whose order `lane_plan.py` decides. A live job asks for `Positions`, which hold
everything that their rows depend on. A DataLoader without a job asks for numbers.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dlrover.data.lane_plan import BLOCK_ROWS, CYCLES, MIN_SLOTS, LanePlan, Layout, share
from lightning_dlrover.data.reader import LaneReader, ReadingThreads
from lightning_dlrover.data.rows import prepare_default_collate
from lightning_dlrover.data.source import DataError, Ranges, Shard, SkippedRange, Source, WindowedSource, Windows, WithSkipped

log = logging.getLogger(__name__)

OWN_BATCH_SIZE = 2048
"""Rows of a batch in the layout of a stream without a job. Any batch size works; divisors of this one are read fastest."""

MIN_SHUFFLED_BLOCK = 512
"""Minimum number of rows that are shuffled together in a lane."""

OBJECTS_PER_BLOCK = 128
"""Rows of a lane that are read together from a user's source without `block_rows`. They may be large objects."""

MIN_LANE_ROWS = 65_536
"""Minimum rows of a lane, unless workers need more lanes. Where a lane begins, part of a row group is decoded for nothing."""

OF_A_PROCESS = ("_readers", "_reading_threads", "_skipped", "_pid")
"""Attributes that belong to one process and are not pickled."""

MAX_THREADS = 1024
"""Maximum number of reading threads: more is a mistake, and each takes memory."""

NUM_READERS = 2
"""Orders that a process reads at once: loader workers prepare the next epoch's batches before the last one's are used up."""


Window = tuple[tuple[str, int, int], ...]
"""Shards of a growing source in one epoch: key, first row, and the row after the last."""


@dataclass(frozen=True)
class Positions(Sequence[int]):
    """Positions in one order of a stream's rows."""

    seed: int  # seed of this epoch's order
    layout: Layout
    ranges: tuple[tuple[int, int], ...]  # half-open
    window: Window | None = None  # of a growing source in this epoch
    ahead: tuple[tuple[int, int], ...] = ()  # positions of the same order; their lanes are opened once these rows are read

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.ranges:
            yield from range(start, stop)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return list(self)[index]


class Opened(list[Any]):
    """The answer to `Positions` that only open lanes: no samples."""


class Stream(Dataset[Any]):
    """A dataset for a DataLoader that reads a source in parallel, in an order that depends on the seed alone.

    Args:
        source: for example `parquet(...)` or `files(...)`, or an object with `shards()` and `read(shard, row)`.
        transform: makes a sample of a row: a dictionary by column, or an item of the source. None: samples are the rows, and
            the default `collate_fn` makes a dictionary of tensors from columns.
        shuffle_rows: rows that are shuffled together, over all workers, which hold them in memory. 0: no shuffling.
        keep_order: whether rows come in the order of the shards, for predictions. Each process then reads everything.
        seed: of the first epoch's order; None: that of `seed_everything`, or 0.
        threads: threads that read rows ahead in each process that reads: the training process if the DataLoader has no loader
            workers, else each of these. 0: rows are read when they are asked for.

    Raises:
        TypeError: `source` lacks a method.
        ValueError: an argument is out of range, or `source` cannot be read in threads.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from lightning_dlrover.data import Shard, stream
        >>> class Squares:
        ...     def shards(self):
        ...         return [Shard("squares", rows=6)]
        ...
        ...     def read(self, shard, row):
        ...         yield from (number * number for number in range(row, shard.rows))
        >>> rows = stream(Squares(), keep_order=True)
        >>> len(rows), list(DataLoader(rows, batch_size=3))
        (6, [tensor([0, 1, 4]), tensor([ 9, 16, 25])])
    """

    def __init__(
        self,
        source: Source,
        transform: Callable[[Any], Any] | None = None,
        shuffle_rows: int = 0,
        keep_order: bool = False,
        seed: int | None = None,
        threads: int = 0,
    ) -> None:
        for method in ("shards", "read"):
            if not callable(getattr(source, method, None)):
                raise TypeError(
                    f"a stream reads from a source with the methods shards() and read(shard, row), and {source!r:.80} has no "
                    f"{method}(): use lightning_dlrover.data.parquet(...) or files(...), or write the two methods"
                )
        if isinstance(shuffle_rows, bool) or not isinstance(shuffle_rows, int) or shuffle_rows < 0:
            raise ValueError(
                f"shuffle_rows={shuffle_rows!r} is not a number of rows: give 0 for no shuffling, or for example 200_000"
            )
        if keep_order and shuffle_rows:
            raise ValueError(f"shuffle_rows={shuffle_rows} shuffles, and keep_order=True asks for the order of the shards")
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 0:
            raise ValueError(f"threads={threads!r} is not a number of threads: give 0 for none, or for example 2")
        if threads > MAX_THREADS:
            raise ValueError(f"threads={threads} is above {MAX_THREADS}: give a few for each core that the process may use")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed={seed!r}: give a whole number, or None for that of seed_everything")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform={transform!r:.80} cannot be called: give a function of one row, or None")
        if threads and not getattr(source, "reads_in_threads", False):
            raise ValueError(
                f"threads={threads}: {source!r:.80} cannot be read in threads, only parquet(...) can, and sources of your own "
                "with reads_in_threads = True. Use num_workers of the DataLoader"
            )
        self.source = source
        self.transform = transform
        self.shuffle_rows = shuffle_rows
        self.keep_order = keep_order
        self.threads = threads
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        # Shared with loader workers that outlive an epoch.
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # epoch, and its first row
        self._layout: Layout | None = None  # once the shards are known
        self.windows = Windows(source) if isinstance(source, WindowedSource) else None
        self._shards: Sequence[Shard] | None = None
        self._fingerprint: tuple[Sequence[Shard], str] | None = None  # of these shards
        self._num_rows = 0  # rows of all shards, once they are known; asked for several times in each batch
        self._window_epoch = 0  # the epoch of these shards
        self._forget_readers()
        prepare_default_collate()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in OF_A_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_readers()
        prepare_default_collate()

    def _forget_readers(self) -> None:
        self._readers: OrderedDict[tuple[Any, ...], LaneReader] = OrderedDict()
        self._reading_threads: ReadingThreads | None = None
        self._skipped: dict[SkippedRange, None] = {}
        self._pid = os.getpid()

    # --- shards and their order -----------------------------------------------------------------------------------------------

    @property
    def shards(self) -> Sequence[Shard]:
        """All shards, as first listed; of a source that grows, this epoch's window.

        Raises:
            DataError: there are none, or two of the same name.
        """
        if self._shards is None or (self.grows and self._window_epoch != self.epoch):
            self._window_epoch = self.epoch
            if self.windows is not None:
                shards = list(self._in_window(self.windows.of(self.epoch)))
            else:
                shards = list(self.source.shards())
            key, times = Counter(shard.key for shard in shards).most_common(1)[0] if shards else ("", 0)
            if times > 1:
                raise DataError(f"{self.source!r:.120} has {key!r} {times} times: its rows would be trained {times} times")
            has_ended = self.windows is not None and self.grows and (self.epoch > 0 or self.windows.is_continued)
            if not has_ended and not any(shard.rows for shard in shards):
                raise DataError(f"{self.source!r:.120} has no rows (in {len(shards)} shards): check the path or the pattern")
            self._shards, self._num_rows = shards, sum(shard.rows for shard in shards)
        return self._shards

    @property
    def grows(self) -> bool:
        """Whether each epoch has rows of its own: those that came after the rows of the epoch before."""
        return self.windows is not None and self.windows.grows

    def _in_window(self, ranges: Ranges) -> Sequence[Shard]:
        assert isinstance(self.source, WindowedSource)
        return self.source.shards_in(ranges)

    @property
    def window(self) -> Window | None:
        """This epoch's shards of a source that grows; None for any other."""
        if not self.grows:
            return None
        assert self.windows is not None
        return tuple((key, first, stop) for key, (first, stop) in self.windows.of(self.epoch).items())

    @property
    def window_as_data(self) -> dict[str, list[int]] | None:
        """This epoch's rows of each shard, for records and checkpoints; None if the rows never change."""
        if self.windows is None:
            return None
        return {key: [first, stop] for key, (first, stop) in self.windows.of(self.epoch).items()}

    def take_window(self, epoch: int, window: Mapping[str, Sequence[int]]) -> None:
        """Begin an epoch with the rows that were fixed for it earlier."""
        assert self.windows is not None
        self.windows.take(epoch, {key: (first, stop) for key, (first, stop) in window.items()})
        self._shards = None
        self.set_epoch(epoch)

    def share_windows(self, windows: Windows) -> None:
        """Use the windows of an earlier stream of the same source."""
        self.windows, self._shards = windows, None

    @property
    def name(self) -> str:
        """Name of the stream in records, the same for all streams of an equal source.

        A topic that grows begins where its first window was fixed, so a start that depends on the present time does not count.
        """
        text = getattr(self.source, "text_without_times", None) if self.grows else None
        return hashlib.sha256((text or repr(self.source)).encode(errors="replace")).hexdigest()[:12]

    @property
    def fingerprint(self) -> str:
        """Digest of the shards' names and lengths. Their folder may differ from host to host."""
        shards = self.shards
        if self._fingerprint is None or self._fingerprint[0] is not shards:  # each checkpoint asks for it
            text = "\n".join(f"{shard.identity} {shard.rows}" for shard in shards)
            self._fingerprint = shards, hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
        return self._fingerprint[1]

    def layout_for(self, batch_size: int, max_workers: int = 1) -> Layout:
        """Return the layout of a job with so many rows in a global batch. Each worker should have lanes of its own."""
        num_rows = len(self)  # a source of files learns their format here
        # Where rows are not shuffled, their order does not depend on the size of blocks.
        default = BLOCK_ROWS if getattr(self.source, "reads_in_threads", False) else OBJECTS_PER_BLOCK
        block_rows = getattr(self.source, "block_rows", default)
        if self.keep_order:
            return Layout(batch_size, slots=1, cycle=1, block_rows=block_rows)
        slots = min(batch_size, max(MIN_SLOTS, max_workers))
        cycle = next((each for each in CYCLES if slots * each * MIN_LANE_ROWS <= num_rows), CYCLES[-1])
        layout = Layout(batch_size, slots, cycle, block_rows)
        if not self.shuffle_rows:
            return layout
        return replace(layout, block_rows=max(min(MIN_SHUFFLED_BLOCK, block_rows), -(-self.shuffle_rows // layout.num_lanes)))

    @property
    def layout(self) -> Layout:
        """The layout without a job: that of a checkpoint, or a common one."""
        if self._layout is None:
            self._layout = self.layout_for(OWN_BATCH_SIZE)
        return self._layout

    def plan(self, seed: int, layout: Layout, shards: Sequence[Shard] | None = None) -> LanePlan:
        """Return the order of one epoch, by default of the current epoch's shards."""
        of_epoch = self.shards if shards is None else shards
        return LanePlan([shard.rows for shard in of_epoch], seed if self.shuffle_rows else None, layout)

    # --- for plain loops ------------------------------------------------------------------------------------------------------

    def share_of_batch(
        self, number: int, global_batch_size: int, global_rank: int = 0, world_size: int = 1, max_workers: int = 1
    ) -> Sequence[Any]:
        """Return one worker's samples of a global batch: `Rows` if there is no transform.

        Args:
            number: of the batch, counted over all epochs. The last batch of an epoch may be smaller.
            max_workers: maximum number of workers in the job. It is part of the order, so it has to stay the same.

        Raises:
            DataError: a shard has changed, or cannot be read.
        """
        if self.windows is not None and max(max_workers, world_size) > 1:
            raise DataError(
                f"{self.source!r:.120} has rows that come and go, and each worker of a plain loop would find others: train "
                "with Lightning and DLRoverStrategy, which fixes them once for all workers"
            )
        epoch, batch = divmod(number, -(-len(self) // global_batch_size))
        first = batch * global_batch_size
        start, stop = share(min(global_batch_size, len(self) - first), global_rank, world_size)
        if start == stop:
            return []
        layout = self.layout_for(global_batch_size, max_workers)
        return self._samples(self.seed + epoch, layout, [(first + start, first + stop)])

    # --- for a DataLoader without a job ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        _ = self.shards  # counts the rows
        return self._num_rows

    @property
    def epoch(self) -> int:
        """The epoch that a DataLoader without a job reads."""
        return int(self._start[0])

    def set_epoch(self, epoch: int, first_row: int = 0) -> None:
        """Begin an epoch at its row `first_row`. A live job and `DLRoverCallback` call this for you."""
        self._start[0], self._start[1] = epoch, first_row

    def resume_from(self, checkpoint: Mapping[str, Any], number: int = 0) -> None:
        """Continue from a live job's checkpoint without a job: the next iterator begins with the first untrained row.

        The DataLoader's batches should be as large as the job's global batches, since Lightning counts batches.

        Args:
            checkpoint: Lightning's checkpoint, as `torch.load` returns it.
            number: which of the job's training loaders it was, from 0 on.

        Raises:
            DataError: the checkpoint has no position of that loader in a stream.
        """
        streams = checkpoint.get("dlrover", {}).get("streams", [])
        position = streams[number] if 0 <= number < len(streams) else None
        if position is None:
            raise DataError(
                f"the checkpoint has no position of training loader {number} in a stream (it has {len(streams)} loaders): it "
                "was saved by a job with other data, without DLRoverStrategy, or outside a fit"
            )
        self.seed, self._layout = int(position["seed"]), Layout(**position["layout"])
        self._forget_readers()
        if self.windows is not None and "window" in position:
            self.take_window(position["epoch"], position["window"])
        is_over = position["first_row"] >= position.get("num_rows", len(self))
        if not is_over:
            self.refuse_other_rows(position)
        self.set_epoch(position["epoch"] + is_over, 0 if is_over else position["first_row"])

    def refuse_other_rows(self, position: Mapping[str, Any]) -> None:
        """Raise `DataError` if a checkpoint's position is in other rows than this stream's, or in an impossible order.

        Checkpoints of former releases hold less of the position.
        """
        cause = ""
        if position.get("window", self.window_as_data) != self.window_as_data:
            cause = (
                "it has other rows of a source whose rows come and go. Topics, servers, start and stop have to be the same, "
                "so give a fixed time in place of one that depends on now"
            )
        elif position.get("shards", self.fingerprint) != self.fingerprint:
            cause = "files came, went or changed their number of rows since: give it the former files"
        elif position.get("shuffles", self.shuffle_rows > 0) != (self.shuffle_rows > 0):
            cause = f"shuffle_rows={self.shuffle_rows} {'shuffles' if self.shuffle_rows else 'does not shuffle'}, unlike before"
        if cause:
            raise DataError(
                f"the checkpoint is from inside an epoch of another stream than {self.source!r:.120}: {cause}; or use a "
                "checkpoint from an epoch's end. Otherwise rows would be trained twice or never"
            )

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> Sequence[Any]:
        """Return samples by their position in the epoch. Raises `DataError` if a shard has changed or cannot be read."""
        if isinstance(numbers, Positions):
            samples: Sequence[Any] = Opened()
            if numbers.ranges or not numbers.ahead:
                samples = self._samples(numbers.seed, numbers.layout, numbers.ranges, numbers.window)
            if numbers.ahead:
                self._open(numbers)
            return samples
        epoch, first_row = self._start.tolist()
        ranges = [(first_row + start, first_row + stop) for start, stop in ranges_of(numbers)]
        if first_row:  # a DataLoader asks for as many rows as in a whole epoch
            ranges = [(start, min(stop, len(self))) for start, stop in ranges if start < len(self)]
        return self._samples(self.seed + epoch, self.layout, ranges, self.window)

    def _open(self, positions: Positions) -> None:
        """Read the blocks of the rows ahead, before they are asked for."""
        reader = self._reader(positions.seed, positions.layout, positions.window)
        pieces = [piece for start, stop in positions.ahead for piece in reader.plan.pieces(start, stop)]
        try:
            reader.open(pieces)
        except DataError as error:  # raised again if these rows are ever asked for
            log.debug("lanes could not be opened ahead: %s", error)

    def _samples(
        self, seed: int, layout: Layout, ranges: Sequence[tuple[int, int]], window: Window | None = None
    ) -> Sequence[Any]:
        if not ranges:
            raise IndexError(f"the epoch of {len(self)} rows, which was resumed in its middle, is over")
        reader = self._reader(seed, layout, window)
        rows = reader.read([piece for start, stop in ranges for piece in reader.plan.pieces(start, stop)])
        self._skipped |= reader.skipped
        reader.skipped.clear()
        if not rows:
            raise DataError(
                f"{self.source!r:.120}: none of the {sum(b - a for a, b in ranges)} rows of a worker's share of a batch can be "
                "used, as all of them are skipped. Use larger batches, or write the rows that are there to files"
            )
        if self.transform is None:
            return rows
        samples = [self.transform(row) for row in rows]
        if any(sample is None for sample in samples):
            raise DataError(
                f"the transform {_name(self.transform)} returned None for a row. Rows are counted before they are read, so "
                "that all workers agree on each batch: a transform makes one sample of each row. Filter while the data are "
                "written, or give the row weight 0 in the loss"
            )
        if isinstance(samples[0], Iterator):
            raise DataError(
                f"the transform {_name(self.transform)} returned a {type(samples[0]).__name__} for a row, which may give any "
                "number of samples, but rows are counted before they are read. Return a list, which stays one sample of the "
                "batch, and join the lists in collate_fn; or write such rows as several ones"
            )
        return samples

    def take_skipped(self) -> tuple[SkippedRange, ...]:
        """Return the skipped rows of the blocks that samples were taken from since the last call."""
        found = tuple(self._skipped)
        self._skipped.clear()
        return found

    def _reader(self, seed: int, layout: Layout, window: Window | None) -> LaneReader:
        if self._pid != os.getpid():
            self._forget_readers()  # a forked process opens files of its own
        key = (seed if self.shuffle_rows else None), layout, window
        reader = self._readers.get(key)
        if reader is None:
            while len(self._readers) >= NUM_READERS:
                self._readers.popitem(last=False)[1].close()
            ranges = {key: (first, stop) for key, first, stop in window or ()}
            shards = self.shards if window is None else self._in_window(ranges)
            if self.threads and self._reading_threads is None:
                self._reading_threads = ReadingThreads(self.threads)
            plan = self.plan(seed, layout, shards)
            reader = self._readers[key] = LaneReader(self.source, shards, plan, threads=self._reading_threads)
        self._readers.move_to_end(key)
        return reader


stream = Stream
"""Name of `Stream` in scripts."""


def ranges_of(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of consecutive numbers, in their order."""
    if not len(numbers):
        return
    if isinstance(numbers, list):  # a loader without a job reads rows in order
        first, stop = int(numbers[0]), int(numbers[0]) + len(numbers)
        if numbers[-1] == stop - 1 and numbers == list(range(first, stop)):
            yield first, stop
            return
    array = np.fromiter(numbers, np.int64, len(numbers))
    is_last = array[1:] - array[:-1] != 1
    ends = [*np.flatnonzero(is_last).tolist(), len(array) - 1]
    first = 0
    for last in ends:
        yield int(array[first]), int(array[last]) + 1
        first = last + 1


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


class StreamCollate:
    """A live job's collate function for a stream: the user's batch, `WithSkipped` if this process skipped rows."""

    def __init__(self, inner: Callable[[Any], Any], dataset: Stream) -> None:
        self._inner = inner
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Opened):
            return None
        batch = self._inner(samples)
        skipped = self._dataset.take_skipped()
        return WithSkipped(batch, skipped) if skipped else batch
