"""End waits for gloo's collectives once their round is over.

When a connection breaks, gloo wakes all waiting threads but one: the waiter for a message that was sent or received in part
(`tcp::Pair::signalException` covers only the operations that have not begun). That thread would wait until the timeout of
collectives, half an hour. So waits are divided into slices here, and abandoned between two slices once the group was severed.
The hanging operation stays with the group. A thread with any other task must not destroy the group, because the destructor
waits for that operation.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.group.dead_sockets import silence
from lightning_dlrover.rdzv.live.member import RoundEndedError

__all__ = [
    "AWAKE_S",
    "begin",
    "broadcast_buffers",
    "end_waits_with",
    "guard_replica",
    "guards_all",
    "is_of_host",
    "let_go",
    "time_with",
    "wait_for",
    "wait_in",
    "wait_until",
]

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
    """Make waits that Python code begins without a timeout fail once the round in which they began is over.

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
    if guards_all():
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
    its_replica = weakref.ref(replica)  # a strong reference would form a cycle with the reducer and live for ever
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
        time.sleep(AWAKE_S)  # until gloo has closed those that it closes by itself
        silence(sockets)
        after.wait()
        kept.clear()

    thread = threading.Thread(target=drop, name="dlrover-let-go", daemon=True)
    thread.start()
    return thread
