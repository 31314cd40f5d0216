"""Keep the process groups of the last rounds until they can be destroyed without blocking other threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch.distributed as dist

from lightning_dlrover.rdzv.group import waits

__all__ = ["RoundGroups"]


class RoundGroups:
    """gloo's groups of a worker's round, and groups of earlier rounds that may still be referenced."""

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
        # This thread must not hold the last reference to a group, see `waits`. Models were wrapped anew when this round was
        # formed, so the groups of the round before are no longer referenced.
        if dist.is_initialized() and not is_last:
            self._drop()
        former, self._groups = self._groups, []
        self._may_hang = is_severed
        if former:
            self._keeping.append(waits.let_go(former, sockets, self._are_unused))

    def drop_early(self) -> None:
        """Drop the groups of the round before. Call it after a few steps of this one: the models are wrapped anew by then.

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
