"""Hold a key that only one process at a time can hold, and fence that process's writes with it.

A controller holds its job's key, a brain that of its pool, and a `dlrover run` its job's place in a pool. Each loses the key
with its lease. The create revision of the key then differs, so a write that arrives late is refused.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import psutil

from lightning_dlrover.rdzv.etcd.client import Election, EtcdClient, Lease
from lightning_dlrover.rdzv.etcd.types import Compare, EtcdError, KeyValue
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import encode

log = logging.getLogger(__name__)


class Holder(Protocol):
    """A record that names the process that holds its key."""

    @property
    def host(self) -> str: ...

    @property
    def pid(self) -> int: ...


H = TypeVar("H", bound=Holder)


def holder_text(holder: Holder | None, unknown: str = "another process") -> str:
    """Describe the process that holds a key; `unknown` where its record cannot be read."""
    return f"process {holder.pid} on {holder.host}" if holder is not None else unknown


class Tenure(Generic[H]):
    """One process's hold on a key, for as long as its lease lives.

    Args:
        journal: any journal of the etcd with the key.
        fresh: returns the record to begin with, each time that the key is taken.
        busy: returns the error for a key that another process holds, from that process's record if it can be read.

    Raises:
        Exception: the error of `busy`.
        EtcdError: the holder is unknown.
    """

    def __init__(
        self,
        journal: Journal,
        key: str,
        fresh: Callable[[], H],
        busy: Callable[[H | None], Exception],
        ttl_s: float = 10.0,
    ) -> None:
        self._client: EtcdClient = journal.client
        self._journal = journal
        self._election = Election(key)
        self._fresh = fresh
        self._busy = busy
        self._ttl_s = ttl_s
        self._claim: Lease | None = None  # lease that may or may not hold the key
        self.record = fresh()
        self.lease, self.revision = self._take_over()

    def take_back(self) -> bool:
        """Take the key again after its loss. Return whether it was lost: another process may have acted in between."""
        if not self.lease.lost.is_set():
            return False
        self.lease.close()
        self.lease, self.revision = self._take_over()
        return True

    def give_up(self) -> None:
        """Release the key; without etcd, its lease expires."""
        try:
            self.lease.revoke()
        except EtcdError as error:
            log.info("the lease of %r ends by itself: %s", self._election.key, error)

    @property
    def is_ours(self) -> Compare:
        """Return the comparison of the key that fences each of our writes."""
        return self._election.fence(self.revision)

    def still_holds(self) -> bool | None:
        """Whether no other process has taken over; None: etcd does not answer. Call before actions that etcd cannot fence.

        A process that was stopped for a while does not notice that its lease has expired.
        """
        if self.lease.lost.is_set():
            return False
        try:
            entry = self._client.get(self._election.key)
        except EtcdError:
            return None
        return self.holds(entry)

    def holds(self, entry: KeyValue | None) -> bool:
        """Whether this entry of the key is ours."""
        return self._election.is_held(entry, self.revision)

    def publish(self, record: H) -> None:
        """Replace the key's record.

        Raises:
            EtcdError: it was not written, or its fate is unknown.
        """
        self._client.put(self._election.key, encode(record), self.lease)
        self.record = record

    def _take_over(self) -> tuple[Lease, int]:
        """Acquire the key. Return its lease and its create revision."""
        self._drop_claim()
        deadline = time.monotonic() + 2 * self._ttl_s
        # Only lease expiry proves that the holder is gone: another container may share its host name, but not its processes.
        while self._holder_seems_dead() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._claim = lease = self._client.lease(self._ttl_s)
        self.record = self._fresh()
        try:
            revision = self._election.claim(self._client, encode(self.record), lease.id)
        except EtcdError:
            with contextlib.suppress(EtcdError):  # otherwise the next attempt would find the key taken, by us
                self._drop_claim()
            raise
        if revision:
            self._claim = None
            return lease.keep_alive(), revision
        self._drop_claim()
        raise self._busy(self._holder())

    def _drop_claim(self) -> None:
        if self._claim is not None:
            self._claim.revoke()
            self._claim = None

    def _holder(self) -> H | None:
        return self._journal.get(type(self.record), self._election.key, readable).record

    def _holder_seems_dead(self) -> bool:
        """Whether the key's holder is a process of this host that no longer exists."""
        holder = self._holder()
        if holder is None:
            return False
        return holder.host == self.record.host and holder.pid > 0 and not psutil.pid_exists(holder.pid)
