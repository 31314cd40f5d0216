"""Reduce a few numbers to their minimum over many workers, in messages along a tree.

Gloo's own reduction among n workers is a ring of 2 (n - 1) messages, one after the other, for each number. Along a tree of
`ARITY` branches the longest way has 2 log(n) messages, and all numbers travel in each.

The messages travel in the round's own group, beside its collectives: gloo never mixes messages and collectives. Another group
would need another device of gloo's, whose thread wakes up a hundred times a second.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from lightning_dlrover.rdzv.group import torch_names, waits

__all__ = ["Reduction", "Tree", "edges", "join_tree"]

ARITY = 4
"""Branches of each worker. More of them make the tree flatter, but a worker reads their messages one after the other."""

TAG = 0x444C52
"""Tag of all messages. Messages with a tag of the user's own do not mix with them."""


class Reduction:
    """Numbers on their way. Offers what callers need of torch's `Work`."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
        self.done: Future[None] = Future()

    def wait(self) -> None:
        """Wait for the result, or until the round is over; see `waits.wait_for`."""
        waits.wait_until(self.done)

    def is_completed(self) -> bool:
        return self.done.done()

    def is_success(self) -> bool:
        return self.done.done() and self.done.exception() is None


class Tree:
    """One worker's place in the tree of its round. Reductions run in a thread of its own, one after the other.

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
