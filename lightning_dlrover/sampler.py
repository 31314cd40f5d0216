"""Which worker gets which samples: one order per epoch, one cursor, one split of every global batch.

The order depends on seed and epoch only, the global batch is constant, and its split over the workers is computed from the
current rank and world size. Resizing therefore changes neither the samples of a step nor the number of steps.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

__all__ = ["ElasticLoader", "LoaderState", "UnsupportedLoaderError", "epoch_order", "share"]


class UnsupportedLoaderError(TypeError):
    """A data loader whose samples cannot be split anew when the world changes."""


def share(num_samples: int, global_rank: int, world_size: int) -> tuple[int, int]:
    """The half-open range of a global batch that one worker processes.

    Ranges of all ranks are contiguous, cover the batch and differ by at most one sample in length.
    """
    base, extra = divmod(num_samples, world_size)
    start = global_rank * base + min(global_rank, extra)
    return start, start + base + (1 if global_rank < extra else 0)


def epoch_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """Sample indices of one epoch, int64, shape ``(num_samples,)``; the same on every worker and for every world size."""
    if not shuffle:
        return torch.arange(num_samples)
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


@dataclass(frozen=True)
class LoaderState:
    """Where a loader stands; sent to joiners and kept in checkpoints."""

    epoch: int
    cursor: int  # global batches of this epoch that were handed out
    global_batch_size: int
    order: torch.Tensor | None  # only when it comes from a sampler of the user's, else it follows from seed and epoch


class _Schedule(Sampler[list[int]]):
    """Batch sampler of one worker: its share of every global batch from the cursor on."""

    def __init__(self, owner: ElasticLoader) -> None:
        super().__init__()
        self._owner = owner

    def __iter__(self) -> Iterator[list[int]]:
        return self._owner._remaining_shares()

    def __len__(self) -> int:
        return len(self._owner)


class _LoaderWorkerInit:
    """Start-up of a loader worker: it must not outlive its worker, nor keep the worker's sockets open."""

    def __init__(
        self, inner: Callable[[int], None] | None, sockets: Sequence[tuple[int, int]], start_method: str = "fork"
    ) -> None:
        self._inner = inner
        self._sockets = tuple(sockets)
        # A fork server is the parent of what it forks; its children inherit nothing of ours.
        self._parent = os.getpid() if start_method != "forkserver" else None

    def __call__(self, worker_id: int) -> None:
        # Garbage of the worker's may hold a process group or a connection, whose destructor waits for threads that were not
        # forked: it must never be collected here.
        gc.freeze()
        gc.enable()
        if self._parent is not None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != self._parent:
                os._exit(1)
        # An elastic agent that ends its worker signals the whole process group. The worker then hands over and leaves, which
        # a dead loader worker would turn into an error: it leaves the group and ends with its worker instead.
        os.setpgid(0, 0)
        for fd, inode in self._sockets:
            try:
                if os.stat(fd).st_ino == inode:
                    os.close(fd)
            except OSError:
                continue  # not inherited: the loader uses spawn, or it was closed meanwhile
        if self._inner is not None:
            self._inner(worker_id)


class ElasticLoader:
    """Iterates over this worker's share of every global batch of a map-style `DataLoader`.

    Args:
        loader: the user's loader.
        global_batch_size: samples per step over all workers.
        training: skips nothing and never yields an empty share: where a global batch has fewer samples than workers, the
            others get one sample with weight 0. Else (validation, test) a worker without samples simply ends earlier.
        before_next: called before every fetch; may change rank, size, cursor and state.
        place: the current global rank and world size.
        sockets: (fd, inode) pairs that loader workers must close.
        materialise: makes the order that a sampler of the user's drew on rank 0 everyone's.

    Raises:
        UnsupportedLoaderError: an iterable dataset, no automatic batching, or a batch sampler of the user's.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        global_batch_size: int,
        training: bool,
        before_next: Callable[[ElasticLoader], None] | None = None,
        place: Callable[[], tuple[int, int]] = lambda: (0, 1),
        sockets: Callable[[], Sequence[tuple[int, int]]] = tuple,
        materialise: Callable[[list[int]], list[int]] = lambda order: order,
    ) -> None:
        check_supported(loader)
        loader = copy.copy(loader)  # its batch sampler becomes ours
        self.dataset = loader.dataset
        self.batch_sampler = self  # Lightning calls `set_epoch` on `batch_sampler.sampler`
        self.sampler = self
        self.global_batch_size = global_batch_size
        self.global_rank = 0
        self.world_size = 1
        self.epoch = 0
        self.cursor = 0
        self.wait_s = 0.0  # time the last `next` spent waiting for data
        self._loader = loader
        self._training = training
        self._before_next = before_next
        self._place = place
        self._sockets = sockets
        self._materialise = materialise
        self._keeps_workers = loader.persistent_workers
        self._user_init = loader.worker_init_fn
        self._drop_last = loader.drop_last
        sampler = loader.sampler
        self._user_sampler: Any = None
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        if type(sampler) is DistributedSampler:
            self._shuffle, self._seed = sampler.shuffle, sampler.seed
        elif type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
            self._shuffle = True
        elif type(sampler) is SequentialSampler:
            self._shuffle = False
        else:
            self._shuffle, self._user_sampler = False, sampler
        self._order: torch.Tensor | None = None
        self._order_epoch = -1
        self._batches: Iterator[Any] | None = None
        self._idle = False
        object.__setattr__(loader, "batch_sampler", _Schedule(self))
        if loader.num_workers > 0:
            # Loader workers survive a switch: starting them anew would be the longest part of it.
            object.__setattr__(loader, "persistent_workers", True)

    # --- what Lightning sees ---------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        return len(self._user_sampler) if self._user_sampler is not None else len(self.dataset)  # type: ignore[arg-type]

    @property
    def num_workers(self) -> int:
        return self._loader.num_workers

    def __len__(self) -> int:
        """Batches of an epoch; at most, when it is for validation."""
        return self._count_batches(self.global_batch_size)

    def _count_batches(self, batch_size: int) -> int:
        return self.num_samples // batch_size if self._drop_last else -(-self.num_samples // batch_size)

    @property
    def _samples_per_batch(self) -> int:
        # In validation nobody minds larger batches, but a worker that gets no sample has no result to reduce.
        return self.global_batch_size if self._training else max(self.global_batch_size, self.world_size)

    @property
    def _num_batches(self) -> int:
        full, rest = divmod(self.num_samples, self._samples_per_batch)
        # Too few samples for all workers come with the batch before: a forward pass may need all of them.
        joined = not self._training and full and rest < self.world_size
        return full if joined else self._count_batches(self._samples_per_batch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> ElasticLoader:
        # Lightning asks for an iterator before it has set the epoch, so nothing is fetched or started here.
        self.cursor = 0
        self._batches = None
        self.global_rank, self.world_size = self._place()
        if not self._training:
            self._order_epoch = -1  # a joiner must take part in materialising a user's sampler
        if not self._keeps_workers:
            self._stop_workers()
        return self

    def __next__(self) -> Any:
        if self._before_next is not None:
            self._before_next(self)
        started = time.perf_counter()
        try:
            return self._fetch()
        finally:
            self.wait_s = time.perf_counter() - started

    # --- what the strategy does ---------------------------------------------------------------------------------------

    def loss_weight(self, batch: int) -> float:
        """What a mean loss over this worker's share is multiplied by, so that the mean over workers is that over samples.

        Args:
            batch: number of the global batch in this epoch.
        """
        total = self._batch_length(batch)
        start, stop = share(total, self.global_rank, self.world_size)
        return (stop - start) * self.world_size / total

    def reshard(self, global_rank: int, world_size: int, rewind: int = 0) -> None:
        """Split the batches from the cursor on for another world.

        Batches that loader workers prepared for the old split are thrown away.

        Args:
            rewind: batches to hand out again.
        """
        self.global_rank, self.world_size = global_rank, world_size
        self.cursor -= rewind
        self._batches = None

    def warm_up(self) -> None:
        """Start the loader workers before there is anything to fetch."""
        if self.num_workers > 0:
            self._idle = True
            self._start()
            self._batches = None
            self._idle = False

    def refetch(self) -> Any:
        """The next batch, without the switch point of `__next__`."""
        return self._fetch()

    def state(self) -> LoaderState:
        order = self._order if self._user_sampler is not None and self._order_epoch == self.epoch else None
        return LoaderState(self.epoch, self.cursor, self.global_batch_size, order)

    def load_state(self, state: LoaderState) -> None:
        self.epoch, self.cursor = state.epoch, state.cursor
        self.global_batch_size = state.global_batch_size
        if state.order is not None:
            self._order, self._order_epoch = state.order, state.epoch
        self._batches = None

    def close(self) -> None:
        self._batches = None
        self._stop_workers()

    # --- fetching -------------------------------------------------------------------------------------------------------

    def _fetch(self) -> Any:
        if self.cursor >= self._num_batches:
            raise StopIteration
        if self._batches is None:
            self._start()
        assert self._batches is not None
        batch = next(self._batches)
        self.cursor += 1
        if self.cursor == self._num_batches and not self._keeps_workers:
            self.close()
        return batch

    def _start(self) -> None:
        method = (self._loader.multiprocessing_context or multiprocessing).get_start_method()
        self._loader.worker_init_fn = _LoaderWorkerInit(self._seeded_init(), self._sockets(), method)
        was_enabled = gc.isenabled()
        gc.disable()  # in loader workers, until they are initialised
        try:
            self._batches = iter(self._loader)
        finally:
            if was_enabled:
                gc.enable()

    def _seeded_init(self) -> Callable[[int], None] | None:
        if self._user_init is not None or not int(os.environ.get("PL_SEED_WORKERS", "0")):
            return self._user_init
        from functools import partial

        from lightning.fabric.utilities.seed import pl_worker_init_function

        return partial(pl_worker_init_function, rank=self.global_rank)

    def _stop_workers(self) -> None:
        # Dropping the iterator ends its processes (DataLoader has no public way to do so).
        self._loader._iterator = None

    def _order_now(self) -> torch.Tensor:
        if self._order is None or self._order_epoch != self.epoch:
            if self._user_sampler is None:
                self._order = epoch_order(self.num_samples, self._shuffle, self._seed, self.epoch)
            else:
                if hasattr(self._user_sampler, "set_epoch"):
                    self._user_sampler.set_epoch(self.epoch)
                self._order = torch.tensor(self._materialise(list(self._user_sampler)), dtype=torch.int64)
            self._order_epoch = self.epoch
        return self._order

    def _batch_length(self, batch: int) -> int:
        size = self._samples_per_batch
        left = max(0, self.num_samples - batch * size)
        is_last = batch == self._num_batches - 1
        return left if is_last and not self._drop_last else min(size, left)

    def _remaining_shares(self) -> Iterator[list[int]]:
        if self._idle:
            return
        order = self._order_now()
        for batch in range(self.cursor, self._num_batches):
            first = batch * self._samples_per_batch
            start, stop = share(self._batch_length(batch), self.global_rank, self.world_size)
            if start < stop:
                yield order[first + start : first + stop].tolist()
            elif self._training:
                yield order[first : first + 1].tolist()  # its loss gets weight 0
            else:
                return


def check_supported(loader: DataLoader[Any]) -> None:
    """Raise `UnsupportedLoaderError` unless the loader's batches can be split anew for every world."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise UnsupportedLoaderError(
            f"{type(loader.dataset).__name__} is an IterableDataset: it cannot be split anew when workers join or leave. "
            "Use a map-style dataset (__getitem__ and __len__), or strategy='ddp' with a fixed number of workers"
        )
    if loader.batch_sampler is None:
        raise UnsupportedLoaderError(
            "a DataLoader with batch_size=None makes its own batches, which cannot be split anew when workers join or leave: "
            "give it a batch_size"
        )
    if isinstance(loader.sampler, DistributedSampler) and type(loader.sampler) is not DistributedSampler:
        raise UnsupportedLoaderError(
            f"sampler {type(loader.sampler).__name__} gives every worker samples of its own and cannot be split anew when "
            "workers join or leave: give the DataLoader a sampler that says the order of the whole epoch"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise UnsupportedLoaderError(
            f"batch_sampler {type(loader.batch_sampler).__name__} decides which samples form a batch and cannot be split anew "
            "when workers join or leave: give the DataLoader a batch_size and, if needed, a sampler"
        )
