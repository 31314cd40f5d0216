"""Keep the process groups of the last rounds until they can be destroyed without holding anything up."""

from __future__ import annotations

import threading

import torch.distributed as dist

from lightning_dlrover.rdzv.group import waits

__all__ = ["RoundGroups"]


class RoundGroups:
    """gloo's groups of a worker's round, and those of rounds before it that somebody may still have."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroupGloo] = []  # of the round
        self._are_unused = threading.Event()  # set when nobody has the groups of the round before any more
        self._keeping: list[threading.Thread] = []  # these groups
        self._dropping: list[threading.Thread] = []  # those of the round before that

    def add(self, group: dist.ProcessGroupGloo) -> None:
        self._groups.append(group)

    def let_go(self, is_last: bool) -> None:
        """Drop the round's groups in another thread, once nobody has them any more; never if it is the last round."""
        # This thread must not be the last one to have a group: see `waits`. Since this round was formed nobody has those of the
        # one before any more, as models were wrapped anew.
        if dist.is_initialized() and not is_last:
            self._are_unused.set()
            self._are_unused = threading.Event()
            self._dropping, self._keeping = self._keeping, []
        former, self._groups = self._groups, []
        self._keeping.append(waits.let_go(former, self._are_unused))

    def join(self, timeout_s: float) -> None:
        """Wait for each thread that drops groups: one that comes back from there while the process ends aborts it."""
        for thread in self._dropping:
            thread.join(timeout_s)  # if it does not hang
