"""Hold the right to act for one job: its `controller` key, which fences every write reserved for its holder."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping

import psutil

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.lease import Lease
from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, created, modified
from lightning_dlrover.rdzv.job.events import Event, record_of
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import ControllerRecord, Keys, NodeRecord, NodesRecord, encode

__all__ = ["ControllerBusyError", "Office"]

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


class Office:
    """The right to act for one job, held by a lease on the job's `controller` key.

    The key's create revision fences every write, so a controller with an expired lease cannot change anything.

    Raises:
        ControllerBusyError: another controller holds the key.
        EtcdError: the holder is unknown.
    """

    def __init__(self, client: EtcdClient, keys: Keys, record: ControllerRecord) -> None:
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._record = record
        self._claim: Lease | None = None  # lease that may or may not hold the controller key
        self.lease, self._fence = self._take_over()

    def take_back(self) -> bool:
        """Take the key again after its loss. Return whether it was lost: another controller may have acted in between."""
        if not self.lease.lost.is_set():
            return False
        self.lease.close()
        self.lease, self._fence = self._take_over()
        return True

    def give_up(self) -> None:
        """Release the key; without etcd, its lease expires."""
        try:
            self.lease.revoke()
        except EtcdError as error:
            log.info("run %s: the controller's lease ends by itself: %s", self._keys.run_id, error)

    @property
    def is_ours(self) -> Compare:
        """Return the comparison of the controller key that fences each of our writes."""
        return created(self._keys.controller) == self._fence

    def still_acts(self) -> bool | None:
        """Whether no other controller has taken over; None: etcd does not answer. Call before actions that etcd cannot fence.

        A process that was stopped for a while does not notice by itself that its lease has expired.
        """
        if self.lease.lost.is_set():
            return False
        try:
            entry = self._client.get(self._keys.controller)
        except EtcdError:
            return None
        return entry is not None and entry.create_revision == self._fence

    def write(self, key: str, record: NodesRecord | NodeRecord, revision: int | None = None) -> None:
        """Write a record if this controller still acts and, with `revision`, if the record has not changed since.

        Raises:
            EtcdError: the record was not written, or its fate is unknown.
        """
        unchanged = [modified(key) == revision] if revision is not None else []
        if not self._journal.fenced_write({key: record}, [self.is_ours, *unchanged]):
            raise EtcdError(f"run {self._keys.run_id}: {key!r} was not written: another controller acts, or has written it")

    def delete(self, key: str) -> None:
        """Delete a key if this controller still acts and etcd answers."""
        with contextlib.suppress(EtcdError):  # the next controller repeats it
            self._client.txn([self.is_ours], [Delete(key)])

    def add_event(self, event: Event, text: str) -> bool:
        """Append to the job's history if this controller still acts."""
        return self._journal.append(record_of(event, text[:2000]), "controller", [self.is_ours])

    def publish(self, apps: Mapping[str, str], held_up: str) -> bool:
        """Update the controller's record. Return whether it has changed."""
        record = dataclasses.replace(self._record, apps=dict(apps), held_up=held_up[:2000])
        if record == self._record:
            return False
        try:
            self._client.put(self._keys.controller, encode(record), self.lease)
        except EtcdError as error:
            log.info("run %s: the list of nodes is written later: %s", self._keys.run_id, error)
            return False
        self._record = record
        return True

    def _take_over(self) -> tuple[Lease, int]:
        """Acquire the controller key. Return its lease and its create revision, which fences all our writes.

        Raises:
            ControllerBusyError: another controller holds it.
            EtcdError: the holder is unknown.
        """
        key = self._keys.controller
        self._drop_claim()
        deadline = time.monotonic() + 2 * LEASE_TTL_S
        # Only lease expiry proves that the holder is gone: another container may share its host name, but not its processes.
        while self._holder_seems_dead() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._claim = lease = self._client.lease(LEASE_TTL_S)
        self._record = dataclasses.replace(self._record, apps={}, held_up="")
        try:
            fence = self._journal.claim(key, encode(self._record), lease.id)
        except EtcdError:
            with contextlib.suppress(EtcdError):  # otherwise the next attempt would find the key taken, by us
                self._drop_claim()
            raise
        if fence:
            self._claim = None
            return lease.keep_alive(), fence
        self._drop_claim()
        raise ControllerBusyError(_busy_text(self._journal))

    def _drop_claim(self) -> None:
        if self._claim is not None:
            self._claim.revoke()
            self._claim = None

    def _holder_seems_dead(self) -> bool:
        """Whether the key's holder is a process of this host that no longer exists."""
        holder = self._journal.get(ControllerRecord, self._keys.controller, readable).record
        if holder is None:
            return False
        return holder.host == self._record.host and holder.pid > 0 and not psutil.pid_exists(holder.pid)


def _busy_text(journal: Journal) -> str:
    keys = journal.keys
    holder = journal.get(ControllerRecord, keys.controller, readable).record
    who = f"process {holder.pid} on {holder.host}" if holder is not None else "another controller"
    return (
        f"job {keys.run_id!r} is already run by {who}; choose another --rdzv-id, or use `dlrover scale` to resize it "
        f"(if that process was killed a moment ago: try again in {LEASE_TTL_S:.0f} s)"
    )
