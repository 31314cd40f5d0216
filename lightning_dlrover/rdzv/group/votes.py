"""Agree on numbers with all members of a round, in a collective that overlaps with a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_dlrover.rdzv.group.meeting import Begun, CollectiveMonitor
from lightning_dlrover.rdzv.group.purpose import Purpose, shown

__all__ = ["Vote"]


class Vote:
    """One worker's ballot in flight, and then the minimum of each number over all members.

    Args:
        meeting: meeting of the round; None if this worker is alone in it.
        place: number of the next step; must be equal on all members.
    """

    def __init__(self, ballot: Sequence[int], meeting: CollectiveMonitor | None, place: int) -> None:
        self._ballot = list(ballot)
        self._meeting = meeting
        self._begun: Begun | None = None
        if meeting is not None:
            self._begun = meeting.vote(Purpose("the vote between two steps", f"step {place}", shown(sys._getframe())), ballot)

    def counted(self) -> list[int]:
        """Wait for the vote and return the minimum of each number.

        Raises:
            MismatchError: other workers do something other than voting.
        """
        if self._meeting is None or self._begun is None:
            return self._ballot
        return self._meeting.counted(self._begun, self._ballot)
