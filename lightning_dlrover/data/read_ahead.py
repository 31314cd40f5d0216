"""Threads that read blocks of lanes before they are asked for, and when a lane's next block is due."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

__all__ = ["ReadingThreads"]

T = TypeVar("T")

BLOCKS_PER_THREAD = 2
"""Blocks that are read ahead for each thread, approximately. One may be waited for while another is not yet needed."""

MAX_WAIT_BEFORE_FORK_S = 1.0
"""Seconds that a fork waits for reads to end, so that the new process finds no lock held by a thread that it lacks."""


class ReadingThreads:
    """Threads of one process. They start with the first read.

    Args:
        number: number of threads.
    """

    def __init__(self, number: int) -> None:
        self._pool = ThreadPoolExecutor(number, thread_name_prefix="stream")
        self._max_ahead = BLOCKS_PER_THREAD * number
        self._reads: weakref.WeakSet[Future[object]] = weakref.WeakSet()
        _all_threads().add(self)

    def is_due(self, rows_left: int, block_rows: int, num_lanes: int) -> bool:
        """Return whether a lane's next block should be read now.

        Lanes that are read in turn end their blocks in turn, too. So the blocks that are needed next, as many as are read
        ahead, are those of the lanes with the smallest rest of a block.

        Args:
            rows_left: rows of the lane's block that are still to be used.
            block_rows: rows of a whole block.
            num_lanes: lanes that are read in turn.
        """
        return rows_left * num_lanes <= self._max_ahead * block_rows

    def submit(self, read: Callable[[], T]) -> Future[T]:
        """Read in a thread."""
        future = self._pool.submit(read)
        self._reads.add(future)  # type: ignore[arg-type]  # its result is never looked at here
        return future

    def let_reads_end(self, timeout_s: float) -> None:
        wait(list(self._reads), timeout_s)


@cache
def _all_threads() -> weakref.WeakSet[ReadingThreads]:
    os.register_at_fork(before=_before_fork)
    return weakref.WeakSet()


def _before_fork() -> None:
    for threads in list(_all_threads()):
        threads.let_reads_end(MAX_WAIT_BEFORE_FORK_S)
