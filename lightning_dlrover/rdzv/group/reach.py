"""Detect workers that are dead or cannot be reached from here."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import Member, UnreachableError
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.probe import Answer, answers, dead_beside, silent_workers

__all__ = ["FEW", "Neighbour", "Patrol", "Reach"]

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.3
"""Minimum seconds between two probes of more than `FEW` workers."""

CALM_INTERVAL_S = 1.0
"""Seconds between two probes of the next rank's process while a round lasts. Each takes time from both workers' training."""

OUT_OF_REACH_S = 5.0
"""Seconds without a response from another worker, not even a refusal, after which this worker counts as cut off from it."""

FEW = 16
"""Maximum number of workers that are all probed by each other, and connected before a round begins."""

DOUBLED_S = 3.0
"""Seconds of a wait after which a worker wants twice as many answers of others."""

DEAD_S = 0.3
"""Seconds to wait for a response of a worker that may be dead."""


class Patrol:
    """Look for dead workers during one wait, at a cost for each worker that does not grow with their number.

    Up to `FEW` workers are all probed every time. Of more, a worker probes those after it in the ring until one answers. The
    number of answers that it wants doubles every few seconds, because another worker may not probe yet, or may not know whether
    a firewall refuses. It probes the less often, so that the number of connections per second stays the same.

    Args:
        workers: the suspects, in an order that all who look for them share.
        interval_s: seconds between two looks at up to `FEW` workers; among more it is `PROBE_INTERVAL_S` or longer.
    """

    def __init__(self, membership: Membership, workers: Sequence[str], interval_s: float) -> None:
        self._membership = membership
        self._workers = workers
        self._interval_s = interval_s if len(workers) <= FEW else PROBE_INTERVAL_S
        self._began = time.monotonic()
        self._next_look = 0.0

    def pause(self) -> Patrol:
        """Let the first look wait for one interval, and return the patrol."""
        self._next_look = time.monotonic() + self._interval_s
        return self

    def look(self) -> None:
        """Probe and bury, unless the last look was a moment ago."""
        now = time.monotonic()
        if now < self._next_look:
            return
        view, me = self._membership.view, self._membership.worker_id
        num_answers = len(self._workers)
        self._next_look = now + self._interval_s
        if num_answers > FEW:
            num_answers = min(num_answers, 2 ** min(int((now - self._began) / DOUBLED_S), 10))
            self._next_look = now + num_answers * self._interval_s
        probers = set(view.round.members) if view.round is not None else set()
        try:
            if dead := dead_beside(me, self._workers, probers, self._knock, num_answers):
                self._membership.bury(dead)
        except EtcdUnavailableError as error:
            # A dead worker stays dead: the next probe or its lease expiry removes the record.
            log.debug("could not bury the dead: %s", error)

    def _knock(self, workers: list[str]) -> Mapping[str, Answer]:
        return answers(self._membership.whose_refusal_counts(workers), DEAD_S)


class Reach:
    """Detect members of a round that do not respond while it is formed."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._next_probe = 0.0

    def begin(self) -> None:
        """Restart the timer before connections are made, so that the others have time to respond."""
        self._next_probe = time.monotonic() + OUT_OF_REACH_S

    def raise_if_silent(self, target: RoundRecord, contacts: Sequence[str]) -> None:
        """Raise an error for silent workers within seconds, because the others also wait for the round to form.

        Args:
            contacts: workers that this one has to connect to.
        """
        if time.monotonic() > self._next_probe:
            self._next_probe = time.monotonic() + OUT_OF_REACH_S
            if silent := self.silent(contacts):
                raise UnreachableError(f"round {target.number}: {', '.join(silent)} cannot be reached from here", silent)

    def too_late(self, contacts: Sequence[str], text: str) -> UnreachableError:
        """Return an error that names the unreachable contacts, but not those that are merely late, as in a long validation."""
        return UnreachableError(text, self.silent(contacts))

    def silent(self, members: Sequence[str], timeout_s: float = 1.0) -> list[str]:
        """Return the members whose port neither accepts nor refuses a connection from here."""
        me, lost = self._membership.worker_id, set(self._membership.view.lost)
        records = self._membership.workers.of(w for w in members if w != me and w not in lost)
        return silent_workers(records.values(), timeout_s)


class Severable(Protocol):
    """Connections of a round."""

    def sever(self, number: int) -> None:
        """Shut down the connections of round `number`, unless this worker has gone on to another one."""


class Neighbour:
    """The next rank of the round, watched by the membership thread.

    Its death also breaks our collectives, but not while this worker computes or validates. With NCCL it does not break them at
    all by itself.

    Args:
        sockets: connections of the round.
    """

    def __init__(self, membership: Membership, member: Member, sockets: Severable) -> None:
        self._membership = membership
        self._member = member
        self._sockets = sockets
        self._next_probe = 0.0
        self._silent_since: float | None = None  # start of a silence that leaves no other trace, as of a cut cable

    def probe(self) -> None:
        """Check that its process lives and can be reached, unless the last check was a moment ago."""
        formation = self._member.formation
        if formation is None or self._member.forming or formation.size == 1 or time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + CALM_INTERVAL_S
        neighbour = formation.round.members[(formation.rank + 1) % formation.size]
        answer: Answer = "accepts"
        with contextlib.suppress(EtcdUnavailableError):  # see `Patrol`
            if neighbour not in self._membership.view.lost:
                answer = answers(self._membership.workers.of([neighbour]).values(), DEAD_S).get(neighbour, answer)
            if answer == "refuses":
                self._membership.bury([neighbour])
        if answer != "silent":
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif time.monotonic() - self._silent_since > OUT_OF_REACH_S:
            # Collectives would wait until their timeout. In the next round both sides report the workers they cannot reach.
            self._silent_since = None
            self._sockets.sever(formation.round.number)
