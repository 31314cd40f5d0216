"""Run the election of the coordinator, and its decisions in office, against etcd."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Collection

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.election import candidacy_delay_s
from lightning_dlrover.rdzv.etcd.errors import EtcdFullError
from lightning_dlrover.rdzv.etcd.lease import Lease
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import Put, modified
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.rdzv.live.announcement import Announcer
from lightning_dlrover.rdzv.live.coordinator import Coordinator, Entries
from lightning_dlrover.rdzv.live.job_mirror import JobMirror
from lightning_dlrover.rdzv.live.probe import Answer, answers
from lightning_dlrover.rdzv.live.rounds import JobView, RoundTimeouts
from lightning_dlrover.rdzv.live.view import Decoder

__all__ = ["Office"]

log = logging.getLogger(__name__)

CHECK_S = 10.0
"""Approximate seconds between two checks that the election key's holder is registered."""

MAX_SILENCE = 0.8
"""Share of a lease's time without a refresh after which etcd counts as away. Refreshes are due after half of it."""

KNOCK_S = 1.0
"""Seconds between two knocks at the ports of missing members."""

MAX_KNOCKS = 200
"""Ports of missing members at which this worker knocks at once. Each takes an open file, and the script may need many."""

ANSWER_S = 0.3
"""Maximum seconds for which a missing member's port may take to answer."""

SIGHT_S = 5.0
"""Maximum seconds until a write of this worker shows up in its copy of the records."""


class Office:
    """One worker's candidacy for coordinator, and its term. For use by one thread.

    Args:
        shared: mirror of `keys.shared`.
        on_change: called when the records of other workers have changed, while this worker is in office.
        decoder: decodes the shared records, in the same thread.
        announcer: adds the lines of the job's history about a round to its transaction.
        reached: workers that this one has formed a round with.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        worker_id: str,
        lease: Lease,
        timeouts: RoundTimeouts,
        shared: Mirror,
        on_change: Callable[[], None],
        decoder: Decoder,
        announcer: Announcer,
        reached: Collection[str],
    ) -> None:
        self._client = client
        self._keys = keys
        self._coordinator = Coordinator(keys, worker_id, lease.id, timeouts)
        self._shared = shared
        self._lease = lease
        self._announcer = announcer
        self._reached = reached
        self._knocked_at = -KNOCK_S
        self._num_knocks = 0
        self._told_of: list[str] = []  # missing members whose return the log says is awaited
        self._job_mirror = JobMirror(client, keys, on_change, decoder)
        self._stands_at: float | None = None  # time of this worker's candidacy, while there is no coordinator
        self._holder_is_checked_at = time.monotonic() + CHECK_S
        self._is_refused = False  # whether etcd was full at this worker's last write

    def act(self, num_members: int) -> None:
        """Make this worker's next write on behalf of the job, if there is one.

        Args:
            num_members: approximate number of candidates.

        Raises:
            EtcdError: etcd does not answer.
        """
        is_late = self._lease.silent_s > MAX_SILENCE * self._lease.ttl_s
        if is_late or not (self._shared.healthy and self._job_mirror.is_healthy):
            self._coordinator.was_cut_off(time.monotonic())  # also as a candidate: in office it must know of the outage
        try:
            self._act(self._shared.snapshot(), num_members)
        except EtcdFullError:
            self._is_refused = True
            raise

    def _act(self, shared: Entries, num_members: int) -> None:
        if not self._coordinator.is_in_office(shared):
            self.step_down()
            self._campaign(shared, num_members)
            return
        self._stands_at = None
        if self._is_refused:
            self._find_room(shared)
        # Read both together: the view must come from the revision that guards the next round.
        entries, view, age_s = self._job_mirror.look()
        self._knock(view)
        write = self._coordinator.next_write(entries, view, time.monotonic(), time.time())
        if write is None:
            return
        announcement = self._announcer.of(view, write.round, age_s) if write.round is not None else None
        lines = announcement.puts if announcement is not None else ()
        if not self._client.txn(write.compare, [*write.ops, *lines]).succeeded:
            return
        if announcement is not None:
            self._announcer.made(announcement)
        # The next decision must see this write, or it would be repeated in vain.
        with contextlib.suppress(TimeoutError):
            self._job_mirror.wait_for(lambda now: None if write.may_succeed(now) else True, SIGHT_S)

    def _knock(self, view: JobView) -> None:
        """Find out which missing members live, and say that the next round waits for them."""
        if view.missing and time.monotonic() - self._knocked_at >= KNOCK_S:
            first = self._num_knocks % len(view.missing) if len(view.missing) > MAX_KNOCKS else 0
            turn = [*view.missing[first:], *view.missing[:first]][:MAX_KNOCKS]
            found = answers([view.addresses[w] for w in turn], ANSWER_S)
            self._knocked_at = time.monotonic()
            self._num_knocks = first + len(turn)
            self._coordinator.hear({w: self._judged(view, w, answer) for w, answer in found.items()})
        awaited = self._coordinator.awaits_return(view, time.monotonic())
        if not set(awaited) <= set(self._told_of):
            log.warning(
                "workers %s are cut off from etcd, and not known to be dead: waits for their return", ", ".join(awaited)
            )
        self._told_of = awaited

    def _judged(self, view: JobView, worker_id: str, answer: Answer) -> Answer:
        # A refusal from another host may come from a firewall as long as that address was never reached. If nobody else holds
        # the state, such a network could not carry the job anyway.
        is_proof = not view.holders or worker_id in self._reached or view.addresses[worker_id].host == socket.gethostname()
        return answer if answer != "refuses" or is_proof else "silent"

    def _find_room(self, shared: Entries) -> None:
        """Write the notice again as it is, until etcd takes it.

        Healthy workers whose leases expired while etcd was full can register again from then on, and need time for that. A
        round would come too early for them if it were the first write.
        """
        last = shared.get(self._keys.notice)
        if last is not None:
            self._client.txn([modified(last.key) == last.mod_revision], [Put(last.key, last.value)])
        self._is_refused = False
        self._coordinator.was_cut_off(time.monotonic())

    @property
    def is_about_to_stand(self) -> bool:
        """Whether this worker waits for a moment before it stands for coordinator, so that not all do at once."""
        return self._stands_at is not None

    def step_down(self, timeout_s: float = 0.0) -> None:
        """Stop following the records of other workers."""
        self._job_mirror.close(timeout_s)

    def came_back(self, lease: Lease) -> None:
        """Note that this worker has registered again, under another lease."""
        self._lease = lease
        self._coordinator.came_back(lease.id, time.monotonic())

    def _campaign(self, shared: Entries, num_members: int) -> None:
        if self._keys.coordinator in shared:
            self._stands_at, self._is_refused = None, False
        elif self._stands_at is None:
            self._stands_at = time.monotonic() + candidacy_delay_s(num_members)
        if self._stands_at is not None and time.monotonic() < self._stands_at:
            return
        write = self._coordinator.candidacy(shared, self._is_vacant(shared))
        if write is not None and self._client.txn(write.compare, write.ops).succeeded:
            before = shared.get(self._keys.coordinator)
            with contextlib.suppress(TimeoutError):
                self._shared.wait_for(lambda now: True if now.get(self._keys.coordinator) != before else None, SIGHT_S)

    def _is_vacant(self, shared: Entries) -> bool:
        """Whether the election key's holder has no record. Checked rarely: removing its record also unseats it."""
        election = shared.get(self._keys.coordinator)
        if election is None or time.monotonic() < self._holder_is_checked_at:
            return False
        self._holder_is_checked_at = time.monotonic() + CHECK_S * random.SystemRandom().uniform(0.8, 1.2)
        return self._client.get(self._keys.workers + election.value.decode(errors="replace")) is None
