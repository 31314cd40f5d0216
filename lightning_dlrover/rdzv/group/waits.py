"""Let waits for gloo's collectives end once their round is over.

Whoever waits for a collective is woken by gloo when a connection breaks, but for one: of a message that was on its way, in part
sent or received, gloo tells nobody (`tcp::Pair::signalException` goes through the operations that have not begun). Its waiter
would sit there until the timeout of collectives, half an hour. So waits are taken in slices here, and given up between two of
them once the group was cut off. What hangs is left behind with the group, which must not be destroyed by a thread that has
anything else to do: the destructor waits for it, too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.live.member import RoundEndedError

__all__ = ["broadcast_buffers", "end_waits_with", "guard_replica", "guards_all", "let_go", "time_with", "wait_for", "wait_in"]

SLICE_S = 0.2

Round = tuple[int, bool]

_find_round: Callable[[], Callable[[], Round] | None] = lambda: None  # noqa: E731
_guards_all = False
_timer: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def end_waits_with(round_: weakref.WeakMethod[Callable[[], Round]], *, all_waits: bool = True) -> None:
    """From here on a wait that is begun from Python, and given no timeout, fails once the round in which it was begun is over.

    Args:
        round_: tells the number of the round that this process is in, and whether its group was cut off so long ago that
            whatever gloo wakes is awake. Raises the reason if the round was ended because of an error.
        all_waits: False: only those in `wait_for`. NCCL's waits are none of the host's.
    """
    global _find_round, _guards_all
    _find_round = round_
    if all_waits:
        _guards_all = True
        _install()


def guards_all() -> bool:
    """Whether every wait that is begun from Python ends with its round, not only those in `wait_for`."""
    return _guards_all


def time_with(timer: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """From here on enter `timer()` around every wait that is begun from Python, in place of the timer before it."""
    global _timer
    _timer = timer
    _install()


def wait_for(work: Any) -> None:
    """Wait for a collective or a message of gloo's, and give it up with its round, beside NCCL, too."""
    if guards_all():
        work.wait()
    else:
        wait_in(work, type(work).wait)


def _round_now() -> Round:
    round_ = _find_round()
    return round_() if round_ is not None else (0, False)


@functools.cache
def _install() -> None:
    """Stand around torch's own wait: the only place that does."""
    work = torch_names.work_class()
    wait = work.wait

    def watched_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _timer():
            return wait_in(self, wait) if _guards_all and not args and not kwargs else wait(self, *args, **kwargs)

    work.wait = watched_wait


def wait_in(work: Any, wait: Callable[..., Any]) -> Any:
    """Wait for `work`, and give it up with its round; `wait` is torch's own method."""
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


def _wait_in_slices(number: int, work: Any, wait: Callable[..., Any]) -> Any:
    while True:
        try:
            return wait(work, timedelta(seconds=SLICE_S))
        except RuntimeError as error:
            if work.is_completed():
                return wait(work)  # perhaps only since the slice was over
            if "timed out" not in str(error):
                raise
        _raise_if_over(number)


def _wait_beside(number: int, wait: Callable[[], Any]) -> Any:
    """Wait in a thread of its own, which is left behind if nothing comes."""
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
    """Let DDP's passes end with their round, too: it waits for gradients and buffers where Python has no say.

    Gradients are reduced as DDP does it by itself, and awaited from Python just before. Does nothing to a model that has, or is
    to have, a hook for communication of its own, nor to a static graph, whose first pass reduces gradients later than that.
    """
    if torch_names.has_gradient_hook(replica) or replica.static_graph:
        return
    group: Any = replica.process_group
    size, is_divided = group.size(), replica.gradient_as_bucket_view  # or multiplied, which rounds otherwise
    torch_names.replace_buffer_broadcast(replica, functools.partial(broadcast_buffers, group))
    its_replica = weakref.ref(replica)  # in a cycle with the reducer it would live for ever
    pending: list[Any] = []

    def await_all() -> None:
        works = pending.copy()
        pending.clear()
        for work in works:
            work.wait()

    def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            pending.clear()  # of a pass that failed
        values = bucket.buffer().div_(size) if is_divided else bucket.buffer().mul_(1.0 / size)
        pending.append(group.allreduce([values]))
        if getattr(its_replica(), "static_graph", True):
            await_all()  # made static after it was wrapped
        else:
            # Run before what DDP queues after the last bucket, which takes the values. For every bucket: this may be a pass
            # within another one, each of which runs what was queued in it.
            try:
                torch_names.after_backward(await_all)
            except RuntimeError:  # not in a backward pass, as for a worker that has run out of inputs
                await_all()
        # Not the work's own future: a thread of gloo's would call into Python, and abort a process that is about to end.
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(values)
        return done

    replica.register_comm_hook(None, lambda _, bucket: reduce(bucket))


def broadcast_buffers(group: Any, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0) -> None:
    """Give all workers one worker's tensors; those of one kind at once."""
    options = dist.BroadcastOptions()
    options.rootRank = authoritative_rank
    options.asyncOp = True  # part of a forward pass, which is not compared with the others'
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        together = torch.cat([tensor.flatten() for tensor in alike])
        group.broadcast([together], options).wait()
        if group.rank() != authoritative_rank:
            for tensor, values in zip(alike, torch.split(together, [t.numel() for t in alike]), strict=True):
                tensor.copy_(values.view_as(tensor))


def let_go(groups: Sequence[object], after: threading.Event) -> threading.Thread:
    """Drop groups once `after` is set, in a thread that may hang in their destructors. The caller drops them, too.

    A thread that comes back from there while the process ends would abort it: do not set `after` then.
    """
    kept = list(groups)

    def drop() -> None:
        after.wait()
        kept.clear()

    thread = threading.Thread(target=drop, name="dlrover-let-go", daemon=True)
    thread.start()
    return thread
