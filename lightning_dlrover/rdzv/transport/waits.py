"""Wait for gloo's collectives, and end the waits, sockets and groups of a round that is over; messages along a tree.

gloo cannot abort a collective, so this file bounds its waits, silences broken sockets, and reduces numbers along a `Tree`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import platform
import queue
import re
import resource
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv.membership.member import RoundEndedError
from lightning_dlrover.rdzv.transport import torch_names

log = logging.getLogger(__name__)

ENOUGH = 1 << 20
"""Open files that any worker can do with. Some programs visit all numbers up to the limit, which may be billions."""

MAX_VISITED = 10_000  # objects of a batch that are examined; a larger batch is estimated too low
_TEXTS = ("Too many open files", "received 0 items of ancdata")
"""Parts of error messages of a loader worker, or of its batch in transit, when no more files can be opened."""


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes allow no change
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def files_of(batch: Any) -> int:
    """Return how many files a batch from a loader worker holds open: one for each tensor that came in shared memory."""
    storages: set[int] = set()
    seen: set[int] = set()
    left: list[Any] = [batch]
    while left and len(seen) < MAX_VISITED:
        each = left.pop()
        if id(each) in seen or isinstance(each, str | bytes | int | float | type):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if each.device.type == "cpu" and each.layout == torch.strided and each.numel() and each.is_shared():  # type: ignore[no-untyped-call]
                storages.add(each.untyped_storage().data_ptr())
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
        elif hasattr(each, "__dict__"):
            left += vars(each).values()
    return len(storages)


def warn_of_batches(batch: Any, num_workers: int, prefetch_factor: int) -> None:
    """Name the limit of open files before it is reached, if batches in preparation may use up the rest of it.

    Where a loader worker reaches it, torch drops the batch, and the training process waits for it.

    Args:
        batch: the first one from the loader workers.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    of_batch, now = files_of(batch), _open_now()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A loader worker has two files of each tensor until it is fetched. This process may receive all batches out of turn.
    needed = now + of_batch * max(2 * (prefetch_factor + 1), num_workers * prefetch_factor + 1)
    if of_batch and soft != resource.RLIM_INFINITY and needed > soft:
        log.warning(
            "a batch has %d tensors, each in a file of its own, and %d loader workers prepare %d batches ahead each: a process "
            "may need %d open files, and its limit is %d (hard limit %d, ulimit -n). Call "
            "torch.multiprocessing.set_sharing_strategy('file_system') first, let collate_fn make fewer tensors, or prepare "
            "fewer batches ahead (num_workers x prefetch_factor)",
            *(of_batch, num_workers, prefetch_factor, needed, soft, hard),
        )


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # the limit is reached
        return 0


def lack_of_files(error: BaseException) -> OSError | None:
    """Return an error that explains this one of a loader's batches, if it came because no more files can be opened."""
    if getattr(error, "errno", None) != errno.EMFILE and not any(text in str(error) for text in _TEXTS):
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OSError(
        errno.EMFILE,
        f"this worker has as many files open as it may: {soft}, and its hard limit is {hard} (ulimit -n). "
        "A batch from a loader worker holds a file for each of its tensors until the last reference to it is gone: keep "
        "clones of the tensors instead of batches, prepare fewer batches ahead (num_workers x prefetch_factor), or call "
        "torch.multiprocessing.set_sharing_strategy('file_system') first",
    )


EPOLL_CTL_MOD = 3


class _Event(ctypes.Structure):
    """`struct epoll_event`. Gloo uses its data as a pointer, which Python's own `epoll` would overwrite."""

    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def silence(sockets: Iterable[tuple[int, int]]) -> int:
    """Make each epoll of this process report these sockets only once more; return the number of those found.

    Gloo removes a broken connection from its epoll when it reads the end of its data. It never reads that of a connection that
    had delivered a message only in part when the operation failed. Epoll would report the socket again and again, which takes a
    whole core. The sockets stay registered, because gloo removes them itself when the group is destroyed.

    Call it only while nothing else closes them: a socket that reuses the number of a closed one would be silenced in its place.

    Args:
        sockets: (fd, inode) pairs of connections that were shut down. Closed ones are skipped.
    """
    dead = {fd for fd, inode in sockets if _inode(fd) == inode}
    if not dead:
        return 0
    modify = ctypes.CDLL(None, use_errno=True).epoll_ctl
    num_found = 0
    for epoll, fd, data in _registered():
        if fd in dead:
            event = _Event(select.EPOLLIN | select.EPOLLONESHOT, data)
            num_found += modify(epoll, EPOLL_CTL_MOD, fd, ctypes.byref(event)) == 0
    return num_found


def _inode(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(fd).st_ino
    return None


def _registered() -> list[tuple[int, int, int]]:
    """Return the file descriptors in all epolls of this process: (epoll, fd, data)."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed concurrently
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                text = Path(f"/proc/self/fdinfo/{name}").read_text()
                pairs = re.findall(r"^tfd:\s*(\d+)\s.*?data:\s*([0-9a-f]+)", text, re.MULTILINE)
                found += [(int(name), int(fd), int(data, 16)) for fd, data in pairs]
    return found


# When a connection breaks, gloo wakes all waiting threads but one: the waiter for a message that was sent or received in
# part (`tcp::Pair::signalException` covers only the operations that have not begun). That thread would wait until the
# timeout of collectives, half an hour. So waits are divided into slices here, and abandoned between two slices once the
# group was severed. The hanging operation stays with the group. A thread with any other task must not destroy the group,
# because the destructor waits for that operation.

T = TypeVar("T")

SLICE_S = 0.2

AWAKE_S = 0.5
"""Grace period in seconds after severing a group. By then gloo has failed every operation that it will fail on its own."""

Round = tuple[int, bool]

_find_round: Callable[[], Callable[[], Round] | None] = lambda: None  # noqa: E731
_guards_all = False
_of_host: weakref.WeakSet[Any] = weakref.WeakSet()
_timer: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def end_waits_with(round_: weakref.WeakMethod[Callable[[], Round]], *, all_waits: bool = True) -> None:
    """Make waits that Python code begins without a timeout fail once the round of their begin is over.

    Args:
        round_: returns the number of this process's round, and whether its group was severed so long ago that gloo has woken
            every waiter that it will wake. Raises the reason if an error ended the round.
        all_waits: False limits this to waits in `wait_for`, and to those noted by `is_of_host`, because the host does not wait
            for NCCL, and a wait in slices would abort its communicators.
    """
    global _find_round, _guards_all
    _find_round = round_
    _guards_all = _guards_all or all_waits
    _install_wait()


def guards_all() -> bool:
    """Whether every wait begun from Python ends with its round, not only those in `wait_for`."""
    return _guards_all


def is_of_host(work: Any) -> None:
    """Note that the host waits for a collective, as for all of gloo's, so that the wait ends with its round."""
    if not _guards_all and work is not None:
        _of_host.add(work)


def time_with(timer: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """Enter `timer()` around every later wait begun from Python. It replaces any timer set before."""
    global _timer
    _timer = timer
    _install_wait()


def wait_for(work: Any) -> None:
    """Wait for a collective or message of gloo and abandon it with its round, even if the job uses NCCL."""
    if _guards_all:
        work.wait()
    else:
        wait_in(work, type(work).wait)


def wait_until(done: Future[T]) -> T:
    """Wait for the result of another thread's collective, and abandon it with its round."""
    with _timer():
        number, _ = _round_now()
        try:
            while not wait_for_futures([done], SLICE_S).done:
                _raise_if_over(number)
            return done.result()
        except RuntimeError:
            _round_now()  # raises the reason if the round was ended on purpose
            raise


def _round_now() -> Round:
    round_ = _find_round()
    return round_() if round_ is not None else (0, False)


@functools.cache
def _install_wait() -> None:
    """Wrap torch's own wait. No other place does so."""
    work = torch_names.work_class()
    wait = work.wait

    def watched_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _timer():
            is_guarded = (_guards_all or self in _of_host) and not args and not kwargs
            return wait_in(self, wait) if is_guarded else wait(self, *args, **kwargs)

    work.wait = watched_wait


def wait_in(work: Any, wait: Callable[..., Any]) -> Any:
    """Wait for `work` and abandon it with its round; `wait` is torch's own method."""
    number, _ = _round_now()
    if number == 0:
        return wait(work)
    try:
        if torch_names.is_point_to_point(work):
            return _wait_beside(number, functools.partial(wait, work))
        return _wait_in_slices(number, work, wait)
    except RuntimeError:
        _round_now()  # raises the reason if the round was ended on purpose
        raise


def begin(start: Callable[[], Any]) -> Any:
    """Begin a message between two workers that may have to connect first, and abandon it with its round.

    Gloo connects two workers in the thread that begins the message. One of both only waits for the other to connect.
    """
    number, _ = _round_now()
    return start() if number == 0 else _wait_beside(number, start)


def _wait_in_slices(number: int, work: Any, wait: Callable[..., Any]) -> Any:
    while True:
        try:
            return wait(work, timedelta(seconds=SLICE_S))
        except RuntimeError as error:
            if work.is_completed():
                return wait(work)  # it may have completed after the slice was over
            if "timed out" not in str(error):
                raise
        _raise_if_over(number)


def _wait_beside(number: int, wait: Callable[[], Any]) -> Any:
    """Wait in a separate thread, which is abandoned if the work never completes."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(wait())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="dlrover-wait", daemon=True).start()
    while not wait_for_futures([done], SLICE_S).done:
        _raise_if_over(number)
    return done.result()


def _raise_if_over(number: int) -> None:
    now, is_cut_off = _round_now()
    if now != number or is_cut_off:
        raise RoundEndedError(f"round {number} ended in the middle of a message between two workers")


def guard_replica(replica: DistributedDataParallel) -> None:
    """Make DDP's passes end with their round as well: DDP waits for gradients and buffers outside of Python's control.

    Gradients are reduced as by DDP itself, and awaited from Python just before. A model that has, or will get, a communication
    hook is left unchanged. So is a static graph, because its first pass reduces gradients later than that.
    """
    if torch_names.has_gradient_hook(replica) or replica.static_graph:
        return
    group: Any = replica.process_group
    size, is_divided = group.size(), replica.gradient_as_bucket_view  # dividing and multiplying round differently
    torch_names.replace_buffer_broadcast(replica, functools.partial(broadcast_buffers, group))
    its_replica = weakref.ref(replica)  # a strong reference would form a cycle with the reducer and live forever
    pending: list[Any] = []

    def await_all() -> None:
        works = pending.copy()
        pending.clear()
        for work in works:
            work.wait()

    def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            pending.clear()  # left over from a failed pass
        values = bucket.buffer().div_(size) if is_divided else bucket.buffer().mul_(1.0 / size)
        pending.append(group.allreduce([values]))
        if getattr(its_replica(), "static_graph", True):
            await_all()  # the graph was made static after the model was wrapped
        else:
            # Runs before the callback that DDP queues after the last bucket, which reads the values. Queued for every bucket,
            # because this pass may be nested in another one, and each pass runs its own callbacks.
            try:
                torch_names.after_backward(await_all)
            except RuntimeError:  # outside a backward pass, as on a worker that has run out of inputs
                await_all()
        # The work's own future is not used: one of gloo's threads would call into Python, and abort a process that is ending.
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(values)
        return done

    replica.register_comm_hook(None, lambda _, bucket: reduce(bucket))


def broadcast_buffers(group: Any, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0) -> None:
    """Copy one worker's tensors to all workers, those of one kind together."""
    options = dist.BroadcastOptions()
    options.rootRank = authoritative_rank
    options.asyncOp = True  # not compared with the others' collectives, as it is part of a forward pass
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        together = torch.cat([tensor.flatten() for tensor in alike])
        group.broadcast([together], options).wait()
        if group.rank() != authoritative_rank:
            for tensor, values in zip(alike, torch.split(together, [t.numel() for t in alike]), strict=True):
                tensor.copy_(values.view_as(tensor))


def let_go(groups: Sequence[object], sockets: Sequence[tuple[int, int]], after: threading.Event) -> threading.Thread:
    """Drop groups once `after` is set, in a thread that may hang in their destructors. The caller must drop them as well.

    If the thread returned from a destructor while the process ends, it would abort the process. Do not set `after` then.

    Args:
        sockets: (fd, inode) pairs of the groups' connections, which are down, or shut down by the caller right after this call.
    """
    kept = list(groups)

    def drop() -> None:
        time.sleep(AWAKE_S)  # until gloo has closed those that it closes on its own
        silence(sockets)
        after.wait()
        kept.clear()

    thread = threading.Thread(target=drop, name="dlrover-let-go", daemon=True)
    thread.start()
    return thread


class RoundGroups:
    """gloo's groups of a worker's round, and those of earlier rounds until they can be destroyed without blocking a thread."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroupGloo] = []  # groups of the current round
        self._are_unused = threading.Event()  # set once the groups of the round before are no longer referenced
        self._keeping: list[threading.Thread] = []  # threads that keep the groups of the round before
        self._dropping: list[threading.Thread] = []  # threads that drop the groups of still earlier rounds
        self._may_hang = True  # whether an operation of the round before may never end

    def add(self, group: dist.ProcessGroupGloo) -> None:
        self._groups.append(group)

    def let_go(self, is_last: bool, is_severed: bool, sockets: Sequence[tuple[int, int]]) -> None:
        """Drop the round's groups in another thread once they are no longer referenced; never after the last round.

        Args:
            is_severed: whether the round was severed, so that an operation of its groups may never end.
            sockets: (fd, inode) pairs of its connections, see `waits.let_go`.
        """
        # This thread must not hold the last reference to a group, see `waits`. Models were wrapped again when this round was
        # formed, so the groups of the round before are no longer referenced.
        if dist.is_initialized() and not is_last:
            self._drop()
        former, self._groups = self._groups, []
        self._may_hang = is_severed
        if former:
            self._keeping.append(let_go(former, sockets, self._are_unused))

    def drop_early(self) -> None:
        """Drop the groups of the previous round. Call it after a few steps of this one: by then the models are wrapped again.

        Each group of a large world has a thread that wakes up a hundred times a second.
        """
        if self._keeping and not self._may_hang:
            self._drop()

    def _drop(self) -> None:
        self._are_unused.set()
        self._are_unused = threading.Event()
        self._dropping = [thread for thread in (*self._dropping, *self._keeping) if thread.is_alive()]
        self._keeping = []

    def join(self, timeout_s: float) -> None:
        """Wait for each thread that drops groups: if it returns while the process ends, it aborts the process."""
        for thread in self._dropping:
            thread.join(timeout_s)  # limited, because the thread may hang


ARITY = 4  # branches of each worker; more of them make the tree flatter, but a worker reads their messages one after the other
TAG = 0x444C52  # tag of all messages; messages with a tag of the user's own do not mix with them


class Reduction:
    """A reduction in progress. Offers the part of torch's `Work` that callers need."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
        self.done: Future[None] = Future()

    def wait(self) -> None:
        """Wait for the result, or until the round is over; see `waits.wait_for`."""
        wait_until(self.done)

    def is_completed(self) -> bool:
        return self.done.done()

    def is_success(self) -> bool:
        return self.done.done() and self.done.exception() is None


class Tree:
    """Reduce a few numbers to their minimum over many workers, in messages along a tree. Runs in a thread of its own.

    Gloo's own reduction among n workers is a ring of 2 (n - 1) messages, one after the other, for each number. Along a tree of
    `ARITY` branches the longest way has 2 log(n) messages, and all numbers travel in each. They travel in the round's own
    group: another one would need another device of gloo's, whose thread wakes up a hundred times a second.

    Args:
        group: the round's group of gloo, in which `join_tree` has connected the tree's edges. Used for nothing but messages
            so far.
    """

    def __init__(self, group: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._group = group
        self._patience = timeout
        self._parent, self._children = edges(rank, size)
        self._lock = threading.Lock()
        self._num_messages = torch_names.num_begun(group)
        self._reductions: queue.SimpleQueue[Reduction | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dlrover-tree", daemon=True)
        self._thread.start()

    def least(self, numbers: torch.Tensor) -> Reduction:
        """Begin to replace `numbers` by their minimum over all workers. All of them call this in the same order."""
        reduction = Reduction(numbers)
        self._reductions.put(reduction)
        return reduction

    def without_messages(self, begun: Callable[[], int]) -> int:
        """Return `begun`, the number of operations begun in the round's group, less the tree's own messages."""
        with self._lock:  # a number read in between would be one too high
            return begun() - self._num_messages

    def close(self) -> None:
        """End the thread, once its reduction has ended or failed with the group."""
        self._reductions.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (reduction := self._reductions.get()) is not None:
            try:
                self._reduce(reduction.numbers)
            except BaseException as error:
                reduction.done.set_exception(error)
            else:
                reduction.done.set_result(None)
            del reduction
        self._group = None  # the thread must not hold the last reference, see `waits`

    def _reduce(self, numbers: torch.Tensor) -> None:
        theirs = [torch.empty_like(numbers) for _ in self._children]
        arrivals = [self._begin(self._group.recv, each, child) for each, child in zip(theirs, self._children, strict=True)]
        for arrival, each in zip(arrivals, theirs, strict=True):
            arrival.wait(self._patience)
            torch.minimum(numbers, each, out=numbers)
        if self._parent is not None:
            result = torch.empty_like(numbers)
            arrival = self._begin(self._group.recv, result, self._parent)
            self._begin(self._group.send, numbers, self._parent).wait(self._patience)
            arrival.wait(self._patience)
            numbers.copy_(result)
        for departure in [self._begin(self._group.send, numbers, child) for child in self._children]:
            departure.wait(self._patience)  # a wait without a timeout would take another thread

    def _begin(self, method: Callable[[list[torch.Tensor], int, int], Any], numbers: torch.Tensor, other: int) -> Any:
        with self._lock:
            self._num_messages += 1
            return method([numbers], other, TAG)


def join_tree(group: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Connect a worker with its neighbours in the tree. All workers of the group call this.

    Some releases of gloo connect two workers in the thread that begins their message, and one of both only waits for the other.
    All begin with the connection to their parent, so the connections are made from the root on.
    """
    parent, children = edges(rank, size)
    message = torch.zeros(1)
    works = [group.recv([message], parent, TAG)] if parent is not None else []
    works += [group.send([torch.zeros(1)], child, TAG) for child in children]
    for work in works:
        work.wait(timeout)


def edges(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Return the parent of a rank, None for the root, and its children."""
    parent = (rank - 1) // ARITY if rank else None
    return parent, list(range(ARITY * rank + 1, min(ARITY * rank + ARITY + 1, size)))
