"""Prepare a loader's batches in loader workers, and replace these without a pause.

`live/loader.py` decides which batch comes next, `live/order.py` which samples are in it.
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
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.data.dataset import Stream, StreamCollate
from lightning_dlrover.data.iterable import IterableReader
from lightning_dlrover.lightning_compat import default_package, fabric_submodule
from lightning_dlrover.live.order import Peers
from lightning_dlrover.rdzv.transport.waits import lack_of_files, warn_of_batches

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_PREFETCH_FACTOR = 2
"""Batches ahead per loader worker. The same as a DataLoader's default."""

BATCHES_TO_START_IN = 2
"""Minimum number of batches that the old loader workers still deliver while new ones start."""

END_S = 1.0
"""Seconds that loader workers have to end by themselves before they are killed."""

MAX_SOCKET_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Maximum path length, in bytes, of a temporary folder in which processes can open a socket to hand over tensors."""

MAX_PROBED_OBJECTS = 50_000
DATA_AND_CODE = (torch.Tensor, np.ndarray, str, bytes, bytearray, int, float, type, types.FunctionType, types.ModuleType)
HANDLES = (io.IOBase, socket.socket, sqlite3.Connection)
LIBRARIES_OF_HANDLES = ("h5py", "lmdb", "netCDF4")


class BatchSource(Protocol):
    """The batches of one worker: which samples are in them, and what their random numbers depend on."""

    @property
    def epoch(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    def shares(self, first_batch: int) -> Iterator[Sequence[int]]:
        """Yield the sample indices of each batch of the epoch from `first_batch` on."""


class _Feed(Sampler[Sequence[int]]):
    """The processes that prepare this worker's share of the batches from `first` on, and the batch sampler that feeds them.

    Args:
        loader: the user's loader, which provides everything except processes and batches.
    """

    def __init__(self, source: BatchSource, loader: DataLoader[Any], num_workers: int, prefetch_factor: int) -> None:
        super().__init__()
        self.first = 0
        self.stop: int | None = None  # first batch of the next feed
        self.asked_for = 0  # the batch after the last one that is being prepared
        self.batches: Iterator[Any] | None = None
        self._dealt_from = 0  # a batch that the first of the loader workers prepares
        self._source = source
        loader = copy.copy(loader)
        loader._iterator = None
        loader.num_workers = num_workers
        loader.prefetch_factor = prefetch_factor if num_workers else None
        if num_workers == 0:
            loader.timeout = 0.0
        if isinstance(loader.dataset, Stream):
            loader.collate_fn = StreamCollate(loader.collate_fn, loader.dataset)
        loader.in_order = True  # the cursor counts in order, else it could not separate finished batches from open ones
        object.__setattr__(loader, "batch_sampler", self)
        # Loader workers survive a switch, because a new start of them would be its longest part.
        object.__setattr__(loader, "persistent_workers", num_workers > 0)
        self.loader = loader

    def __iter__(self) -> Iterator[Sequence[int]]:
        self.asked_for = self.first
        return self._shares()

    def _shares(self) -> Iterator[Sequence[int]]:
        shares = self._source.shares(self.first)
        while self.asked_for != self.stop and (indices := next(shares, None)) is not None:
            self.asked_for += 1
            yield indices

    def deal_as_before(self) -> None:
        """Let each loader worker prepare every n-th batch as before, when those that are running begin at another batch.

        DataLoader would begin again with its first process. In most changes of the world all of a stream's lanes would move to
        another process, which would have to open them.
        """
        if (running := self.running) is not None:
            shift = (self.first - self._dealt_from) % len(running._workers)
            for of_each in (running._workers, running._index_queues):
                of_each[:] = of_each[shift:] + of_each[:shift]
        self._dealt_from = self.first

    @property
    def running(self) -> Any:
        """DataLoader's own iterator, which has the loader workers; None if there are none."""
        return _unwrapped(self.loader._iterator)

    def dismiss(self) -> None:
        """Let the loader workers end by themselves, without waiting for them. Call `end` once they have."""
        self.batches = None
        if self.running is not None:
            _dismiss(self.running)

    @property
    def is_over(self) -> bool:
        running = self.running
        return running is None or not any(worker.is_alive() for worker in running._workers)

    def end(self) -> None:
        """End the loader workers, and wait for that. Those that are still busy after a short time are killed."""
        if self.running is not None:
            _end(self.running)
        self.batches = None
        self.loader._iterator = None


def _unwrapped(batches: Any) -> Any:
    """Return DataLoader's own iterator, which a subclass may have wrapped in one of its own, as loaders of graphs do."""
    if batches is None or isinstance(batches, _BaseDataLoaderIter):
        return batches
    return next((each for each in getattr(batches, "__dict__", {}).values() if isinstance(each, _BaseDataLoaderIter)), None)


def _check_iterator(loader: DataLoader[Any]) -> None:
    """Raise `UnsupportedLoaderError` if a subclass of DataLoader hides its loader workers in an iterator of its own."""
    if not loader.num_workers or type(loader)._get_iterator is DataLoader._get_iterator:
        return
    loader = copy.copy(loader)  # without loader workers it starts no process
    loader.num_workers, loader.prefetch_factor, loader.timeout, loader.generator = 0, None, 0, torch.Generator()
    object.__setattr__(loader, "persistent_workers", False)
    batches = loader._get_iterator()
    if _unwrapped(batches) is None or not hasattr(batches, "_reset"):
        raise UnsupportedLoaderError(
            f"{type(loader).__name__} hands out its batches through a {type(batches).__name__}, in which its loader workers "
            "cannot be found, or which cannot begin another epoch (it has no _reset): give it num_workers=0, or use a plain "
            "DataLoader"
        )


def _dismiss(running: Any) -> None:
    # DataLoader has no public way to end its processes without waiting.
    running._workers_done_event.set()
    for worker in range(len(running._workers)):
        if running._persistent_workers or running._workers_status[worker]:
            running._mark_worker_as_unavailable(worker, shutdown=True)


def _end(running: Any) -> None:
    """End the processes and the thread of a DataLoader's iterator.

    Dropping the iterator is not enough: the error of a loader worker keeps it for as long as the error is kept. If the garbage
    collector ends it, its processes get no message, and it waits for seconds.
    """
    if running._shutdown:
        return
    thread = getattr(running, "_pin_memory_thread", None)
    if thread is not None:
        # First: it would wait forever for the rest of a batch that a killed process was sending.
        running._pin_memory_thread_done_event.set()
        running._worker_result_queue.put((None, None))  # wakes it
        thread.join(END_S)
    _dismiss(running)
    deadline = time.monotonic() + END_S
    for worker in running._workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    _unwatch(running)
    for worker in running._workers:
        if worker.is_alive():
            worker.kill()
    running._shutdown_workers()


def _unwatch(running: Any) -> None:
    """Detach loader workers from torch's handler of SIGCHLD.

    It reports a killed one by an error at any point of the main thread, even in the user's step. The next fetch still fails.
    """
    if running._worker_pids_set:  # False for processes that continue from a former round
        torch._C._remove_worker_pids(id(running))
        running._worker_pids_set = False


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
        # Signals sent until here are for the worker alone (see `_iterate`).
        signal.sigtimedwait({signal.SIGTERM}, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for fd, inode in self._sockets:
            try:
                if os.stat(fd).st_ino == inode:
                    os.close(fd)
            except OSError:
                continue  # not inherited, as with spawn, or closed since
        if self._inner is not None:
            self._inner(worker_id)


class LoaderWorkers:
    """Prepares the batches of one loader: in processes, or in this one if the loader has no workers.

    Args:
        loader: the user's loader.
        peers: connections to them are closed in loader workers.
    """

    def __init__(self, loader: DataLoader[Any], source: BatchSource, peers: Peers) -> None:
        self.refusal = ""  # why loader workers are impossible, once they were requested
        self.handover_s = 0.0  # seconds that the last change of loader workers took on this thread
        self._loader = loader
        self._source = source
        self._peers = peers
        _check_iterator(loader)
        self._user_init = loader.worker_init_fn
        self._prefetch_factor = loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR
        self._feed = _Feed(source, loader, loader.num_workers, self._prefetch_factor)
        self._next_feed: _Feed | None = None  # takes over at its first batch
        self._next_batch = 0  # the batch after the last one that was fetched
        self._looked_at: _Feed | None = None  # the newest one whose first batch was looked at
        self._dismissed: list[_Feed] = []
        self._num_starts = 0
        self._draws_seed = True  # the user's own loader would make the next start, too

    @property
    def number(self) -> int:
        return self._feed.loader.num_workers

    @property
    def users_number(self) -> int:
        """Number of loader workers in the user's own loader."""
        return self._loader.num_workers

    @property
    def would_be_first(self) -> bool:
        """Whether loader workers would fetch from copies of a dataset that only the training process has used until now.

        What training writes to the dataset, such as a replay buffer, would not reach them. The rows of a stream are in files.
        """
        return not self.number and not self.users_number and not isinstance(self._loader.dataset, Stream)

    @property
    def prefetch_factor(self) -> int:
        """Batches that each loader worker prepares ahead; 0 without loader workers."""
        return self._feed.loader.prefetch_factor or 0

    @property
    def init_fn(self) -> Callable[[int], None] | None:
        """The user's function, or the one of `seed_everything(workers=True)`, which Lightning would otherwise set itself."""
        if self._user_init is not None or not int(os.environ.get("PL_SEED_WORKERS", "0")):
            return self._user_init
        seed = fabric_submodule(default_package(), "utilities.seed")
        return partial(seed.pl_worker_init_function, rank=self._source.global_rank)

    def fetch(self, batch: int) -> Any:
        """Return one batch of the epoch: the next one, or any other after `discard`."""
        began = time.perf_counter()
        is_first = self._next_feed is not None and batch == self._next_feed.first
        if is_first:
            self._take_over()
        batches = self._running(batch)
        try:
            fetched = next(batches)
        except Exception as error:
            if not self.number or self.users_number:
                if (named := lack_of_files(error)) is not None:
                    raise named from error
                raise  # the user's own loader would have failed, too
            fetched = self._fetch_without_workers(batch, error)
        if is_first:
            self.handover_s += time.perf_counter() - began
        self._next_batch = batch + 1
        if self.number and self._looked_at is not self._feed:
            self._looked_at = self._feed
            warn_of_batches(fetched, self.number, self.prefetch_factor)
        return fetched

    def begin(self, batch: int) -> None:
        """Let loader workers that have been started prepare the batches from this one on."""
        if self._feed.running is None or self._next_feed is not None:
            return
        try:
            self._running(batch)
        except Exception:  # one was killed: the fetch of this batch fails, too, and where it can be reported
            self._feed.batches = None

    def ask_for_more(self) -> None:
        """Ask each loader worker for one more batch than it usually prepares ahead, until the next `discard`."""
        running = self._feed.running
        if running is None or self._feed.batches is None or running._prefetch_factor != self.prefetch_factor:
            return
        # DataLoader asks for a batch when one is taken, so not all loader workers would be asked before a change.
        running._prefetch_factor += 1
        for _ in range(self.number):
            running._try_put_index()

    def retune(self, num_workers: int | None = None, prefetch_factor: int | None = None) -> bool:
        """Switch to other loader workers; None: keep their number. Call between two batches until the switch is complete.

        The new ones start on the batches after those in preparation by the old ones. So none is lost or prepared twice, and
        batches are delivered during the change. Processes are forked on this thread; nothing else takes long on it.

        Returns:
            Whether the loader has the requested settings, or cannot have them (see `refusal`). False during the change.
        """
        if self._next_feed is not None:
            return False
        if type(self._loader)._get_iterator is not DataLoader._get_iterator:
            self.refusal = f"{type(self._loader).__name__} makes its iterators itself"
            return True
        if isinstance(self._loader.dataset, IterableReader):
            # New ones would have to read the epoch from its beginning.
            self.refusal = "an IterableDataset is read by one process from an epoch's first row to its last"
            return True
        self._prefetch_factor = prefetch_factor or self._prefetch_factor
        wanted = self.number if num_workers is None else num_workers
        if wanted == self.number and (wanted == 0 or self._prefetch_factor == self.prefetch_factor):
            return True
        if wanted and not self.users_number and (self.refusal or self._cannot_be_shared()):
            return True
        began = time.perf_counter()
        feed = _Feed(self._source, self._loader, wanted, self._prefetch_factor)
        if self._feed.batches is None:
            # Nothing is in preparation, so it begins with the next batch. At an epoch's start all workers are to do so at once.
            self._feed.dismiss()
            self._dismissed.append(self._feed)
            self._feed = feed
            self.handover_s = time.perf_counter() - began
            return True
        feed.first = max(self._feed.asked_for, self._next_batch + BATCHES_TO_START_IN)
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
        if self.number > 0:
            self._feed.stop = self._feed.first  # nothing is prepared yet
            self._start(self._feed)
            self._feed.stop, self._feed.batches = None, None

    def fetch_apart(self, indices: Sequence[int], collate: Callable[[list[Any]], T]) -> Iterator[T]:
        """Collate single samples, fetched in the place where the user's loader fetches, one after the other by one process.

        It is this process only if the loader has no workers. A dataset may open resources at its first sample, and processes
        must not share them.
        """
        loader = copy.copy(self._loader)
        loader._iterator = None
        loader.num_workers = min(1, self.users_number)
        loader.collate_fn = collate
        loader.pin_memory = False
        object.__setattr__(loader, "batch_sampler", [[index] for index in indices])
        object.__setattr__(loader, "persistent_workers", False)
        # A subclass may change each batch in an iterator of its own, and these are none.
        object.__setattr__(loader, "_get_iterator", partial(DataLoader._get_iterator, loader))
        batches = self._iterate(loader, torch.Generator())
        try:
            yield from batches
        finally:
            if loader.num_workers:
                _end(batches)

    def begin_epoch(self) -> None:
        """End loader workers that were not to persist. The next ones start as those of the user's own loader would."""
        if not self._loader.persistent_workers:
            self._feed.end()
            self._draws_seed = True

    def discard(self) -> None:
        """Discard prepared batches. Loader workers prepare the next batch that is fetched, and those after it."""
        if self._next_feed is not None:
            self._take_over()
        self._feed.batches = None

    def see_off(self) -> None:
        """Drop former loader workers that have ended."""
        for feed in [feed for feed in self._dismissed if feed.is_over]:
            feed.end()
            self._dismissed.remove(feed)

    def close(self) -> None:
        """End all loader workers."""
        self.discard()
        for feed in (self._feed, *self._dismissed):
            feed.end()
        self._dismissed = []

    def _fetch_without_workers(self, batch: int, error: Exception) -> Any:
        """Return the batch that loader workers of a plan failed to prepare, and do without loader workers from here on.

        The user did not request them, and their failure need not be the user's mistake: shared memory may be missing, or a
        device unusable in forked processes.
        """
        self.refusal = f"one of them has failed: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}"
        log.warning("this worker prepares its batches itself again, loader workers cannot: %s", error)
        self.discard()
        # Immediately: a killed process is reported as an error again and again until it is forgotten.
        self._feed.end()
        self._feed = _Feed(self._source, self._loader, 0, self._prefetch_factor)
        return next(self._running(batch))

    def _running(self, batch: int) -> Iterator[Any]:
        """Return the batches from this one on. Start their preparation if necessary."""
        if self._feed.batches is None:
            self._feed.first = self._next_batch = batch
            self._start(self._feed)
        assert self._feed.batches is not None
        return self._feed.batches

    def _take_over(self) -> None:
        assert self._next_feed is not None
        self._feed.dismiss()
        self._dismissed.append(self._feed)
        self._feed, self._next_feed = self._next_feed, None

    def _start(self, feed: _Feed) -> None:
        generator = self._loader.generator
        if not self._draws_seed:
            # An iterator draws the seed of its workers. The model must draw the same numbers with and without that iterator.
            seed = hash((torch.initial_seed(), self._source.epoch, self._source.global_rank, self._num_starts))
            generator = torch.Generator().manual_seed(seed % 2**63)
        self._draws_seed = False
        self._num_starts += 1
        feed.deal_as_before()
        if (running := feed.running) is not None:
            running._prefetch_factor = feed.loader.prefetch_factor
        feed.batches = self._iterate(feed.loader, generator)
        if feed.loader.num_workers and not self.users_number:
            _unwatch(feed.running)

    def _iterate(self, loader: DataLoader[Any], generator: Any) -> Iterator[Any]:
        """Start a loader's processes with our start-up function."""
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
        loader.worker_init_fn = _LoaderWorkerInit(self.init_fn, self._peers.owned_sockets, method)
        loader.generator = generator
        if loader.num_workers:
            _keep_socket_paths_short()
            if method != "fork":
                resource_tracker.ensure_running()  # its start would unblock SIGTERM
        was_enabled = gc.isenabled()
        gc.disable()  # stays off in loader workers until they are initialised
        # Loader workers inherit this. Until they have left the process group, SIGTERM to the group must not end them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if was_enabled:
                gc.enable()

    def _cannot_be_shared(self) -> bool:
        """Return whether forked processes would disturb each other. `refusal` then gives the reason."""
        if isinstance(self._loader.dataset, Stream):
            return False  # each process opens its own files
        if handle := open_handle(self._loader.dataset):
            self.refusal = f"the dataset holds {handle}, which processes cannot share; open it in worker_init_fn"
        return bool(self.refusal)


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


def open_handle(dataset: object) -> str:
    """Describe an object of a dataset that forked processes must not share, such as an open file with its common position.

    The search is limited to as many objects as fit between two steps. Returns an empty string if nothing was found.
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
