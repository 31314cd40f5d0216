"""Load blocks of lanes on a thread, before the step that needs them.

The thread ends when there is nothing to load, so a reader that is no longer used leaves none behind. It never loads while the
process forks: a child must not begin with locks held by a thread that it does not have.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

__all__ = ["ReadAhead"]

log = logging.getLogger(__name__)

T = TypeVar("T")

Key = tuple[int, int]
"""Numbers of a lane and of a block in it."""

FORK_S = 10.0
"""Seconds that a fork waits for a block that is being loaded."""


class ReadAhead(Generic[T]):
    """Blocks that were asked for and not taken yet.

    The thread that takes blocks calls all methods; `load` runs on one thread at a time, in the order in which it was asked for.

    Args:
        load: loads a block of a lane. Its error is raised by `take`, so only where the block is needed.
    """

    def __init__(self, load: Callable[[int, int], T]) -> None:
        self._load = load
        self._asked: dict[Key, Future[T]] = {}
        self._queue: deque[tuple[Key, Future[T]]] = deque()
        self._is_running = False
        self._lock = threading.Lock()  # guards the two above
        self._loading = threading.Lock()
        _living.add(self)

    def ask(self, key: Key) -> None:
        """Begin to load a block, after those that were asked for before."""
        if key not in self._asked:
            future = self._asked[key] = Future()
            with self._lock:
                self._queue.append((key, future))
                starts, self._is_running = not self._is_running, True
            if starts:
                # No daemon: Python would end it within a call of pyarrow, which aborts the process.
                threading.Thread(target=self._work, name="dlrover-read-ahead").start()

    def take(self, key: Key) -> T:
        """Return a block, once it is loaded. The error of loading it is raised here."""
        self.ask(key)
        return self._asked.pop(key).result()

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all other blocks."""
        with self._lock:
            self._queue = deque((key, future) for key, future in self._queue if key in keys)
        self._asked = {key: future for key, future in self._asked.items() if key in keys}

    def wait(self) -> None:
        """Wait until no block is being loaded, and load no other one."""
        self.keep(())
        with self._loading:
            pass

    def _work(self) -> None:
        while True:
            with self._loading:
                with self._lock:
                    if not self._queue or not threading.main_thread().is_alive():  # or the process ends
                        self._is_running = False
                        return
                    key, future = self._queue.popleft()
                try:
                    future.set_result(self._load(*key))
                except BaseException as error:  # raised by `take`
                    future.set_exception(error)

    def pause(self, timeout_s: float) -> bool:
        """Begin no further block; return whether none is being loaded now."""
        return self._loading.acquire(timeout=max(0.0, timeout_s))

    def go_on(self) -> None:
        self._loading.release()


_living: weakref.WeakSet[ReadAhead[Any]] = weakref.WeakSet()
_paused: list[ReadAhead[Any]] = []


def _before_fork() -> None:
    until = time.monotonic() + FORK_S
    for each in list(_living):
        if each.pause(until - time.monotonic()):
            _paused.append(each)
        else:
            log.warning("a process is forked while a thread has read data for more than %.0f s: it may hang", FORK_S)


def _after_fork() -> None:
    while _paused:
        _paused.pop().go_on()


def _in_child() -> None:
    _paused.clear()
    _living.clear()  # a child makes readers of its own


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
