"""Assign samples to workers: one order per epoch, one cursor, one split of every global batch.

The order depends on seed and epoch only, and the global batch is constant. Its split over the workers is computed from the
current rank and world size. Resizing therefore changes neither the samples of a step nor the number of steps.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sqlite3
import tempfile
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dlrover.checks.loaders import (
    UnsupportedLoaderError,
    batching_of,
)
from lightning_dlrover.packages import default_package, fabric_submodule

__all__ = ["ElasticLoader", "LoaderState", "UnsupportedLoaderError", "epoch_order", "share"]

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_PREFETCH_FACTOR = 2
"""Batches ahead per loader worker. The same as a DataLoader's default."""

BATCHES_TO_START_IN = 2
"""Minimum number of batches that the old loader workers still deliver while new ones start."""

MAX_SOCKET_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Maximum path length, in bytes, of a temporary folder in which processes can open a socket to hand over tensors."""

MAX_PROBED_OBJECTS = 50_000
DATA_AND_CODE = (torch.Tensor, np.ndarray, str, bytes, bytearray, int, float, type, types.FunctionType, types.ModuleType)
HANDLES = (io.IOBase, socket.socket, sqlite3.Connection)
LIBRARIES_OF_HANDLES = ("h5py", "lmdb", "netCDF4")

STRIDE_OF_LAPS = 1_000_003
"""Step added to an order's seed whenever a loader begins again within an epoch."""

NOT_FORWARDED = ("state_dict", "load_state_dict")
"""Attributes that Lightning looks for but must not find: nothing is ever fetched from the user's loader, so it has no state."""


def _keep_socket_paths_short() -> None:
    """Let processes open their sockets in /tmp if the path of the temporary folder is too long for a socket.

    Python does so itself from 3.14 on. Before, loader workers cannot hand over a single batch in such a folder.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_SOCKET_FOLDER:
        tempfile.tempdir = "/tmp"
        try:
            multiprocessing.util.get_temp_dir()  # remembers the folder, also for the processes that start from here on
        finally:
            tempfile.tempdir = folder


def _leave_deaths_to_fetching(batches: Any) -> None:
    """Report the death of a loader worker through the next batch alone.

    torch's handler of SIGCHLD raises at any point of the main thread, even in the user's step.
    """
    if batches._worker_pids_set:  # False for processes that continue from a former round
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def share(num_samples: int, global_rank: int, world_size: int) -> tuple[int, int]:
    """Return the half-open range of a global batch that one worker processes.

    Ranges of all ranks are contiguous, cover the batch and differ by at most one sample in length.
    """
    base, extra = divmod(num_samples, world_size)
    start = global_rank * base + min(global_rank, extra)
    return start, start + base + (1 if global_rank < extra else 0)


def epoch_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """Return the sample indices of one epoch, int64, shape ``(num_samples,)``, equal for every worker and world size."""
    if not shuffle:
        return torch.arange(num_samples)
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


@dataclass(frozen=True)
class LoaderState:
    """A loader's position, sent to joiners and kept in checkpoints."""

    epoch: int
    cursor: int  # global batches of this epoch that were handed out
    global_batch_size: int
    order: torch.Tensor | None  # set only with a sampler of the user's; else it follows from seed and epoch
    seed: int = 0  # seed of the order


class _Feed(Sampler[list[int]]):
    """The processes that prepare this worker's share of the batches from `first` on, and the batch sampler that feeds them.

    Args:
        loader: the user's loader, which provides everything except processes and batches.
    """

    def __init__(self, owner: ElasticLoader, loader: DataLoader[Any], num_workers: int, prefetch_factor: int) -> None:
        super().__init__()
        self.first = 0
        self.stop: int | None = None  # first batch of the next feed
        self.asked_for = 0  # the batch after the last one that is being prepared
        self.batches: Iterator[Any] | None = None
        self._owner = owner
        loader = copy.copy(loader)
        loader._iterator = None
        loader.num_workers = num_workers
        loader.prefetch_factor = prefetch_factor if num_workers else None
        if num_workers == 0:
            loader.timeout = 0.0
        loader.in_order = True  # the cursor counts in order, else it could not separate finished batches from open ones
        object.__setattr__(loader, "batch_sampler", self)
        # Loader workers survive a switch, because starting them anew would be its longest part.
        object.__setattr__(loader, "persistent_workers", num_workers > 0)
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._shares(self.first)

    def __len__(self) -> int:
        return len(self._owner)

    def _shares(self, first: int) -> Iterator[list[int]]:
        self.asked_for = first
        for indices in self._owner._remaining_shares(first):
            if self.asked_for == self.stop:
                return
            self.asked_for += 1
            yield indices

    def dismiss(self) -> None:
        """Let the loader workers end by themselves, without waiting for them. Call `end` once they have."""
        self.batches = None
        running: Any = self.loader._iterator  # DataLoader has no public way to end its processes without waiting
        if running is not None:
            running._workers_done_event.set()
            for worker in range(self.loader.num_workers):
                running._mark_worker_as_unavailable(worker, shutdown=True)

    @property
    def is_over(self) -> bool:
        running: Any = self.loader._iterator
        return running is None or not any(worker.is_alive() for worker in running._workers)

    def end(self) -> None:
        # Dropping the iterator ends its processes and waits for them.
        self.batches = None
        self.loader._iterator = None


class _LoaderWorkerInit:
    """Start-up of a loader worker, which must neither outlive its worker nor keep the worker's sockets open."""

    def __init__(
        self, inner: Callable[[int], None] | None, sockets: Sequence[tuple[int, int]], start_method: str = "fork"
    ) -> None:
        self._inner = inner
        self._sockets = tuple(sockets)
        # A fork server is the parent of the processes it forks. They inherit nothing of ours.
        self._parent = os.getpid() if start_method != "forkserver" else None

    def __call__(self, worker_id: int) -> None:
        # The worker's garbage may hold a process group or a connection. Its destructor waits for threads that were not forked,
        # so it must never be collected here.
        gc.freeze()
        gc.enable()
        if self._parent is not None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != self._parent:
                os._exit(1)
        # An elastic agent that ends its worker signals the whole process group. The worker then hands over and leaves, but a
        # dead loader worker would turn that into an error. The loader worker leaves the group and ends with its worker.
        os.setpgid(0, 0)
        for fd, inode in self._sockets:
            try:
                if os.stat(fd).st_ino == inode:
                    os.close(fd)
            except OSError:
                continue  # not inherited, as with spawn, or closed meanwhile
        if self._inner is not None:
            self._inner(worker_id)


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
    """Iterates over this worker's share of every global batch of a map-style `DataLoader`.

    Attributes that it lacks, such as `batch_size` and `collate_fn`, are read from the user's loader.

    Args:
        loader: the user's loader.
        global_batch_size: samples per step over all workers.
        training: whether every worker gets a share of every batch. If a global batch has fewer samples than workers, the others
            get one sample with weight 0. Otherwise (validation, test) a worker without samples simply ends earlier.
        before_next: called before every fetch; may change rank, size, cursor and state.
        place: the current global rank and world size.
        sockets: (fd, inode) pairs that loader workers must close.
        materialise: sends the order that the user's sampler drew on rank 0 to all workers.

    Raises:
        UnsupportedLoaderError: see `checks.loaders.batching_of`.
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
        batching = batching_of(loader)
        self._batch_sampler = _BatchSamplerView(self, loader.batch_sampler)
        self.global_batch_size = global_batch_size
        self.global_rank = 0
        self.world_size = 1
        self.epoch = 0
        self.cursor = 0
        self.wait_s = 0.0  # seconds that the last `next` spent waiting for data
        self.refusal = ""  # why loader workers are impossible, once they were requested
        self.handover_s = 0.0  # seconds that the last change of loader workers took on this thread
        self._loader = loader
        self._training = training
        self._before_next = before_next
        self._place = place
        self._sockets = sockets
        self._materialise = materialise
        self._keeps_workers = loader.persistent_workers
        self._user_init = loader.worker_init_fn
        self._drop_last = batching.drop_last
        sampler = self._given_sampler = batching.sampler
        self._user_sampler: Any = None
        self.order_seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        if type(sampler) is DistributedSampler:
            self._shuffle, self.order_seed = sampler.shuffle, sampler.seed
        elif type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
            self._shuffle = True
            if sampler.generator is not None:
                self.order_seed = sampler.generator.initial_seed() % 2**62
        elif type(sampler) is SequentialSampler:
            self._shuffle = False
        else:
            self._shuffle, self._user_sampler = False, sampler
        self._order: torch.Tensor | None = None
        self._order_epoch = -1
        self._order_lap = 0
        self._epoch_batches: int | None = None  # batches of the Trainer's epoch; None: as many as this loader has
        self._cycles = False
        self._idle = False
        self._dealt: Sequence[Any] | None = None  # positions of each batch to come, if they do not follow from rank and size
        self._prefetch_factor = loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR
        self._feed = _Feed(self, loader, loader.num_workers, self._prefetch_factor)
        self._next_feed: _Feed | None = None  # takes over at its first batch
        self._dismissed: list[_Feed] = []
        self._num_starts = 0
        self._draws_seed = True  # the user's own loader would make the next start, too
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
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        return self._given_sampler

    @property
    def batch_sampler(self) -> Any:
        return self._batch_sampler

    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        """The user's function, or the one of `seed_everything(workers=True)`, which Lightning would otherwise set itself."""
        return self._seeded_init()

    @property
    def num_samples(self) -> int:
        return len(self._user_sampler) if self._user_sampler is not None else len(self.dataset)

    @property
    def num_workers(self) -> int:
        return self._feed.loader.num_workers

    @property
    def users_loader(self) -> DataLoader[Any]:
        return self._loader

    @property
    def users_num_workers(self) -> int:
        """Number of loader workers in the user's own loader."""
        return self._loader.num_workers

    @property
    def prefetch_factor(self) -> int:
        """Batches that each loader worker prepares ahead; 0 without loader workers."""
        return self._feed.loader.prefetch_factor or 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch. In validation it is an upper limit."""
        return self._count_batches(self.global_batch_size)

    def _count_batches(self, batch_size: int) -> int:
        return self.num_samples // batch_size if self._drop_last else -(-self.num_samples // batch_size)

    @property
    def _samples_per_batch(self) -> int:
        # Larger batches do no harm in validation, but a worker without a sample has no result to reduce.
        return self.global_batch_size if self._training else max(self.global_batch_size, self.world_size)

    def num_dealt(self, limit: float) -> int:
        """Return the number of samples of a validation run that all workers compute together.

        Args:
            limit: maximum number of batches.
        """
        batch_size = self.global_batch_size
        whole = self.num_samples // batch_size * batch_size if self._drop_last else self.num_samples
        return int(min(whole, limit * batch_size))

    def deal(self, batches: Sequence[Any]) -> None:
        """Hand out these batches next, until the next `iter`.

        Args:
            batches: one array of positions in the epoch's order per batch.
        """
        self._dealt, self.cursor = batches, 0
        self._restart()

    @property
    def _num_batches(self) -> int:
        if self._dealt is not None:
            return len(self._dealt)
        full, rest = divmod(self.num_samples, self._samples_per_batch)
        # If too few samples for all workers remain, they join the batch before: a forward pass may need every worker.
        joined = not self._training and full and rest < self.world_size
        return full if joined else self._count_batches(self._samples_per_batch)

    @property
    def num_epoch_batches(self) -> int:
        """Batches of the Trainer's epoch, up to which the cursor counts. Another loader may decide the number."""
        return len(self) if self._epoch_batches is None else self._epoch_batches

    @property
    def _end(self) -> int:
        """Index after the last batch of the epoch that this loader delivers."""
        if self._epoch_batches is None:
            return self._num_batches
        return self._epoch_batches if self._cycles and self._num_batches else min(self._num_batches, self._epoch_batches)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> ElasticLoader:
        # Lightning requests an iterator before it has set the epoch, so nothing is fetched or started here.
        self.cursor = 0
        self._dealt = None
        self._restart()
        self.global_rank, self.world_size = self._place()
        if not self._training:
            self._order_epoch = -1  # a joiner must take part when a user's sampler is materialised
        if not self._keeps_workers:
            self._feed.end()
            self._draws_seed = True
        return self

    def __next__(self) -> Any:
        if self._before_next is not None:
            self._before_next(self)
        if self._dismissed:
            self._see_off()
        started = time.perf_counter()
        try:
            return self._fetch()
        finally:
            self.wait_s = time.perf_counter() - started

    # --- the strategy's interface -------------------------------------------------------------------------------------

    def loss_weight(self, batch: int) -> float:
        """Return the factor for a mean loss over this worker's share that turns the mean over workers into that over samples.

        Args:
            batch: number of the global batch in this epoch.
        """
        return self.num_own_samples(batch) * self.world_size / self._batch_length(batch)

    def num_own_samples(self, batch: int) -> int:
        """Return the size of this worker's share of a global batch of this epoch."""
        start, stop = share(self._batch_length(batch), self.global_rank, self.world_size)
        return stop - start

    def has_samples(self, batch: int) -> bool:
        """Return whether this loader takes part in a batch of the epoch. One shorter than the others may have ended."""
        return self._batch_length(batch) > 0

    def keep_step(self, num_batches: int, cycles: bool) -> None:
        """Count through an epoch of `num_batches`, set by the longest or the shortest of several loaders.

        Args:
            cycles: whether the loader begins again after its own batches. Otherwise it only counts on.
        """
        self._epoch_batches, self._cycles = num_batches, cycles

    def reshard(self, global_rank: int, world_size: int, rewind: int = 0) -> None:
        """Split the batches from the cursor on for another world.

        Batches that loader workers prepared for the old split are discarded.

        Args:
            rewind: number of batches to hand out again.
        """
        self.global_rank, self.world_size = global_rank, world_size
        self.cursor -= rewind
        self._restart()

    def retune(self, num_workers: int | None = None, prefetch_factor: int | None = None) -> bool:
        """Switch to other loader workers; None: keep their number. Call between two batches until the switch is complete.

        The new ones start on the batches after those in preparation by the old ones. So none is lost or prepared twice, and
        batches are delivered meanwhile. Processes are forked on this thread; nothing else takes long on it.

        Returns:
            Whether the loader has the requested settings, or cannot have them (see `refusal`). False during the change.
        """
        if self._next_feed is not None:
            return False
        if type(self._loader)._get_iterator is not DataLoader._get_iterator:
            self.refusal = f"{type(self._loader).__name__} makes its iterators itself"
            return True
        self._prefetch_factor = prefetch_factor or self._prefetch_factor
        wanted = self.num_workers if num_workers is None else num_workers
        if wanted == self.num_workers and (wanted == 0 or self._prefetch_factor == self.prefetch_factor):
            return True
        if wanted and not self._loader.num_workers and (self.refusal or self._cannot_be_shared()):
            return True
        began = time.perf_counter()
        feed = _Feed(self, self._loader, wanted, self._prefetch_factor)
        if self._feed.batches is None:
            # Nothing is in preparation, so it begins with the next batch. At an epoch's start all workers are to do so at once.
            self._feed.dismiss()
            self._dismissed.append(self._feed)
            self._feed = feed
            self.handover_s = time.perf_counter() - began
            return True
        feed.first = max(self._feed.asked_for, self.cursor + BATCHES_TO_START_IN)
        if wanted:
            try:
                self._start(feed)
            except OSError as error:
                feed.end()
                self.refusal = f"they cannot be started: {error}"
                return True
        self._feed.stop, self._next_feed = feed.first, feed
        self.handover_s = time.perf_counter() - began
        return False

    def warm_up(self) -> None:
        """Start the loader workers before there is anything to fetch."""
        if self.num_workers > 0:
            self._idle = True
            self._start(self._feed)
            self._feed.batches = None
            self._idle = False

    def fetch_apart(self, indices: Sequence[int], collate: Callable[[list[Any]], T]) -> Iterator[T]:
        """Collate single samples, fetched in the place where the user's loader fetches, one after the other by one process.

        It is this process only if the loader has no workers. A dataset may open resources at its first sample, and processes
        must not share them.
        """
        loader = copy.copy(self._loader)
        loader._iterator = None
        loader.num_workers = min(1, self.users_num_workers)
        loader.collate_fn = collate
        loader.pin_memory = False
        object.__setattr__(loader, "batch_sampler", [[index] for index in indices])
        object.__setattr__(loader, "persistent_workers", False)
        return self._iterate(loader, torch.Generator())

    def refetch(self) -> Any:
        """Return the next batch, without the switch point of `__next__`.

        Raises:
            StopIteration: the loader has ended, though its cursor has advanced, too.
        """
        return self._fetch()

    def state(self) -> LoaderState:
        order = self._order if self._user_sampler is not None and self._order_epoch == self.epoch else None
        return LoaderState(self.epoch, self.cursor, self.global_batch_size, order, self.order_seed)

    def load_state(self, state: LoaderState) -> None:
        self.epoch, self.cursor = state.epoch, state.cursor
        self.global_batch_size = state.global_batch_size
        self.take_order_seed(state.seed)
        if state.order is not None:
            self._order, self._order_epoch = state.order, state.epoch
        self._restart()

    def take_order_seed(self, seed: int) -> None:
        """Adopt another worker's order. Otherwise scripts that seed each worker by its rank would have one order each."""
        if seed != self.order_seed:
            self.order_seed, self._order_epoch = seed, -1

    def close(self) -> None:
        self._restart()
        for feed in (self._feed, *self._dismissed):
            feed.end()
        self._dismissed = []

    # --- fetching -------------------------------------------------------------------------------------------------------

    def _fetch(self) -> Any:
        if self.cursor >= self._end:
            self.cursor += self.cursor < self.num_epoch_batches
            raise StopIteration
        began = time.perf_counter()
        is_first = self._next_feed is not None and self.cursor == self._next_feed.first
        if is_first:
            self._take_over()
        batches = self._running()
        try:
            batch = next(batches)
        except Exception as error:
            if not self.num_workers or self.users_num_workers:
                raise  # the user's own loader would have failed, too
            batch = self._fetch_without_workers(error)
        if is_first:
            self.handover_s += time.perf_counter() - began
        self.cursor += 1
        if self.cursor == self._end and not self._keeps_workers:
            self.close()
        return batch

    def _fetch_without_workers(self, error: Exception) -> Any:
        """Return the batch that loader workers of a plan failed to prepare, and do without loader workers from here on.

        The user did not request them, and their failure need not be the user's mistake: shared memory may be missing, or a
        device unusable in forked processes.
        """
        self.refusal = f"one of them has failed: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}"
        log.warning("this worker prepares its batches itself again, loader workers cannot: %s", error)
        self._restart()
        # Immediately: a killed process is reported as an error again and again until it is forgotten.
        self._feed.end()
        self._feed = _Feed(self, self._loader, 0, self._prefetch_factor)
        return next(self._running())

    def _running(self) -> Iterator[Any]:
        """Return the batches from the cursor on. Start their preparation if necessary."""
        if self._feed.batches is None:
            self._feed.first = self.cursor
            self._start(self._feed)
        assert self._feed.batches is not None
        return self._feed.batches

    def _restart(self) -> None:
        """Discard prepared batches. The next fetch begins at the cursor."""
        if self._next_feed is not None:
            self._take_over()
        self._feed.batches = None

    def _take_over(self) -> None:
        assert self._next_feed is not None
        self._feed.dismiss()
        self._dismissed.append(self._feed)
        self._feed, self._next_feed = self._next_feed, None

    def _see_off(self) -> None:
        for feed in [feed for feed in self._dismissed if feed.is_over]:
            feed.end()
            self._dismissed.remove(feed)

    def _start(self, feed: _Feed) -> None:
        generator = self._loader.generator
        if not self._draws_seed:
            # An iterator draws the seed of its workers. The model must draw the same numbers with and without that iterator.
            seed = hash((torch.initial_seed(), self.epoch, self.global_rank, self._num_starts))
            generator = torch.Generator().manual_seed(seed % 2**63)
        self._draws_seed = False
        self._num_starts += 1
        feed.batches = self._iterate(feed.loader, generator)
        if feed.loader.num_workers and not self.users_num_workers:
            _leave_deaths_to_fetching(feed.batches)

    def _iterate(self, loader: DataLoader[Any], generator: Any) -> Iterator[Any]:
        """Start a loader's processes with our start-up function."""
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
        loader.worker_init_fn = _LoaderWorkerInit(self._seeded_init(), self._sockets(), method)
        loader.generator = generator
        if loader.num_workers:
            _keep_socket_paths_short()
        was_enabled = gc.isenabled()
        gc.disable()  # stays off in loader workers until they are initialised
        try:
            return iter(loader)
        finally:
            if was_enabled:
                gc.enable()

    def _cannot_be_shared(self) -> bool:
        """Return whether forked processes would disturb each other. `refusal` then gives the reason."""
        if handle := open_handle(self.dataset):
            self.refusal = f"the dataset holds {handle}, which processes cannot share; open it in worker_init_fn"
        return bool(self.refusal)

    def _seeded_init(self) -> Callable[[int], None] | None:
        if self._user_init is not None or not int(os.environ.get("PL_SEED_WORKERS", "0")):
            return self._user_init
        from functools import partial

        seed = fabric_submodule(default_package(), "utilities.seed")
        return partial(seed.pl_worker_init_function, rank=self.global_rank)

    def _order_now(self, lap: int = 0) -> torch.Tensor:
        """Return the order of this epoch's samples, or that of one lap if a loader begins again within the epoch."""
        if self._user_sampler is not None:
            lap = 0  # rank 0 draws it, which is possible only at an epoch's start
        if self._order is None or (self._order_epoch, self._order_lap) != (self.epoch, lap):
            if self._user_sampler is None:
                seed = self.order_seed + lap * STRIDE_OF_LAPS
                self._order = epoch_order(self.num_samples, self._shuffle, seed, self.epoch)
            else:
                if hasattr(self._user_sampler, "set_epoch"):
                    self._user_sampler.set_epoch(self.epoch)
                self._order = self._checked_order(self._materialise(list(self._user_sampler)))
            self._order_epoch, self._order_lap = self.epoch, lap
        return self._order

    def _checked_order(self, order: list[Any]) -> torch.Tensor:
        name = type(self._user_sampler).__name__
        try:
            indices = torch.tensor(order)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedLoaderError(f"sampler {name} gives {order[0]!r:.80}, not a sample's number: {error}") from error
        if indices.dim() != 1 or indices.is_floating_point():
            raise UnsupportedLoaderError(f"sampler {name} gives {order[:1]!r:.80}, not the numbers of samples")
        if len(indices) < self.num_samples:
            raise UnsupportedLoaderError(
                f"sampler {name} gave {len(indices)} samples in epoch {self.epoch}, but its length is {self.num_samples}: "
                "the batches of an epoch are counted before they are split over the workers, so its __len__ must be right"
            )
        return indices.to(torch.int64)

    def _batch_length(self, batch: int) -> int:
        size = self._samples_per_batch
        if self._cycles and self._num_batches:
            batch %= self._num_batches
        left = max(0, self.num_samples - batch * size)
        if batch >= self._num_batches:
            return 0
        is_last = batch == self._num_batches - 1
        return left if is_last and not self._drop_last else min(size, left)

    def _remaining_shares(self, first_batch: int) -> Iterator[list[int]]:
        if self._idle:
            return
        if self._dealt is not None:
            order = self._order_now()
            yield from (order[torch.from_numpy(positions)].tolist() for positions in self._dealt[first_batch:])
            return
        for place in range(first_batch, self._end):
            lap, batch = divmod(place, self._num_batches)
            order = self._order_now(lap)
            first = batch * self._samples_per_batch
            start, stop = share(self._batch_length(batch), self.global_rank, self.world_size)
            if start < stop:
                yield order[first + start : first + stop].tolist()
            elif self._training:
                yield order[first : first + 1].tolist()  # a placeholder with loss weight 0
            else:
                return


def open_handle(dataset: object) -> str:
    """Describe an object of a dataset that forked processes must not share, such as an open file with its common position.

    The search is limited to the number of objects that fit between two steps. Returns an empty string if nothing was found.
    """
    seen: set[int] = set()
    found: deque[object] = deque([dataset])
    while found and len(seen) < MAX_PROBED_OBJECTS:
        each = found.popleft()
        if isinstance(each, torch.Tensor) and each.device.type != "cpu":
            return f"a tensor on {each.device.type}"  # a forked process cannot use the device
        if id(each) in seen or isinstance(each, DATA_AND_CODE):
            continue
        seen.add(id(each))
        kind = type(each)
        in_memory = isinstance(each, io.BytesIO | io.StringIO)
        if (isinstance(each, HANDLES) and not in_memory) or kind.__module__.partition(".")[0] in LIBRARIES_OF_HANDLES:
            return f"{kind.__module__}.{kind.__qualname__} {getattr(each, 'name', '')}".rstrip()
        found.extend(gc.get_referents(each))
    return ""
