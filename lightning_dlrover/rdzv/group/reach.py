"""Find out which workers' processes are gone or cannot be reached from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import Member, UnreachableError
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.probe import silent_workers

__all__ = ["Neighbour", "Reach"]

PROBE_INTERVAL_S = 0.3
"""How often a worker sees whether the next rank's process lives."""

OUT_OF_REACH_S = 5.0
"""For how long a worker is given no answer by another, not even a refusal, before it takes itself for cut off from it."""


class Reach:
    """Which members of a round give no answer while it is formed."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._next_probe = 0.0

    def begin(self) -> None:
        """Connections are about to be made: give the others time to answer."""
        self._next_probe = time.monotonic() + OUT_OF_REACH_S

    def raise_if_silent(self, target: RoundRecord) -> None:
        """Said within seconds: the others wait for the round to form, too."""
        if time.monotonic() > self._next_probe:
            self._next_probe = time.monotonic() + OUT_OF_REACH_S
            if silent := self.silent(target.members):
                raise UnreachableError(f"round {target.number}: {', '.join(silent)} cannot be reached from here", silent)

    def too_late(self, target: RoundRecord, text: str) -> UnreachableError:
        """Names those that are out of reach from here; who merely is late, as in a long validation run, is not."""
        return UnreachableError(text, self.silent(target.members))

    def silent(self, members: Sequence[str], timeout_s: float = 1.0) -> list[str]:
        """Those of `members` to whose port no connection can be made from here, though it is not refused."""
        workers, me = self._membership.view.workers, self._membership.worker_id
        return silent_workers((workers[w] for w in members if w in workers and w != me), timeout_s)


class Neighbour:
    """The next rank of the round, watched by the membership thread.

    Its death also breaks our collectives, but not while we compute or validate, and with NCCL not by itself.

    Args:
        sever: shuts down the connections of a round.
    """

    def __init__(self, membership: Membership, member: Member, reach: Reach, sever: Callable[[int], None]) -> None:
        self._membership = membership
        self._member = member
        self._reach = reach
        self._sever = sever
        self._next_probe = 0.0
        self._silent_since: float | None = None  # of whom nothing else would tell, as when a cable was cut

    def probe(self) -> None:
        """See that its process lives and can be reached; does nothing if that was seen a moment ago."""
        formation = self._member.formation
        if formation is None or self._member.forming or formation.size == 1 or time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + PROBE_INTERVAL_S
        neighbour = [formation.round.members[(formation.rank + 1) % formation.size]]
        self._membership.bury_the_dead(neighbour)
        if not self._reach.silent(neighbour, PROBE_INTERVAL_S):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif time.monotonic() - self._silent_since > OUT_OF_REACH_S:
            # Collectives would wait until their timeout. In the next round both sides say whom they do not reach.
            self._silent_since = None
            self._sever(formation.round.number)
