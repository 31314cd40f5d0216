"""Detect workers that are dead or cannot be reached from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import Member, UnreachableError
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.probe import silent_workers

__all__ = ["Neighbour", "Reach"]

PROBE_INTERVAL_S = 0.3
"""Seconds between two probes of the next rank's process."""

OUT_OF_REACH_S = 5.0
"""Seconds without a response from another worker, not even a refusal, after which this worker counts as cut off from it."""


class Reach:
    """Detect members of a round that do not respond while it is formed."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._next_probe = 0.0

    def begin(self) -> None:
        """Restart the timer before connections are made, so that the others have time to respond."""
        self._next_probe = time.monotonic() + OUT_OF_REACH_S

    def raise_if_silent(self, target: RoundRecord) -> None:
        """Raise an error for silent members within seconds, because the others also wait for the round to form."""
        if time.monotonic() > self._next_probe:
            self._next_probe = time.monotonic() + OUT_OF_REACH_S
            if silent := self.silent(target.members):
                raise UnreachableError(f"round {target.number}: {', '.join(silent)} cannot be reached from here", silent)

    def too_late(self, target: RoundRecord, text: str) -> UnreachableError:
        """Return an error that names the unreachable members, but not those that are merely late, as in a long validation."""
        return UnreachableError(text, self.silent(target.members))

    def silent(self, members: Sequence[str], timeout_s: float = 1.0) -> list[str]:
        """Return the members whose port neither accepts nor refuses a connection from here."""
        me, lost = self._membership.worker_id, set(self._membership.view.lost)
        records = self._membership.records(w for w in members if w != me and w not in lost)
        return silent_workers(records.values(), timeout_s)


class Neighbour:
    """The next rank of the round, watched by the membership thread.

    Its death also breaks our collectives, but not while this worker computes or validates. With NCCL it does not break them at
    all by itself.

    Args:
        sever: shuts down the connections of a round.
    """

    def __init__(self, membership: Membership, member: Member, reach: Reach, sever: Callable[[int], None]) -> None:
        self._membership = membership
        self._member = member
        self._reach = reach
        self._sever = sever
        self._next_probe = 0.0
        self._silent_since: float | None = None  # start of a silence that leaves no other trace, as of a cut cable

    def probe(self) -> None:
        """Check that its process lives and can be reached, unless the last check was a moment ago."""
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
            # Collectives would wait until their timeout. In the next round both sides report the workers they cannot reach.
            self._silent_since = None
            self._sever(formation.round.number)
