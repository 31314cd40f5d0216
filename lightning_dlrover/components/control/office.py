"""Hold the right to act for one job: its `controller` key, and the fence of all writes that only its holder may make."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import psutil

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.lease import Lease
from lightning_dlrover.rdzv.etcd.operations import (
    Compare,
    Delete,
    Put,
    absent,
    created,
    modified,
)
from lightning_dlrover.rdzv.job.records import (
    ControllerRecord,
    EventRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    RecordError,
    decode,
    encode,
)

__all__ = ["ControllerBusyError", "Office"]

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


class Office:
    """The right to act for one job, held by a lease on the job's `controller` key.

    The key's create revision fences every write, so that a controller whose lease has ended changes nothing any more.

    Raises:
        ControllerBusyError: another controller holds the key.
        EtcdError: it is not known which one does.
    """

    def __init__(self, client: EtcdClient, keys: Keys, record: ControllerRecord) -> None:
        self._client = client
        self._keys = keys
        self._record = record
        self._claim: Lease | None = None  # whether it holds the controller key is not known
        self.lease, self._fence = self._take_over()

    def take_back(self) -> bool:
        """Take the key again if it was lost. Returns whether it was: another controller may have acted in between."""
        if not self.lease.lost.is_set():
            return False
        self.lease.close()
        self.lease, self._fence = self._take_over()
        return True

    def give_up(self) -> None:
        """Give the key back; without etcd, it goes by itself."""
        try:
            self.lease.revoke()
        except EtcdError as error:
            log.info("run %s: the controller's lease ends by itself: %s", self._keys.run_id, error)

    @property
    def is_ours(self) -> Compare:
        """The controller key: what each of our writes is fenced with."""
        return created(self._keys.controller) == self._fence

    def still_acts(self) -> bool | None:
        """Whether nobody has taken over; None: etcd does not tell. Asked before what none of etcd's fences can stop.

        A process that was stopped for a while does not know yet that its lease has ended.
        """
        if self.lease.lost.is_set():
            return False
        try:
            entry = self._client.get(self._keys.controller)
        except EtcdError:
            return None
        return entry is not None and entry.create_revision == self._fence

    def write(self, key: str, record: NodesRecord | NodeRecord, revision: int | None = None) -> None:
        """Write a record if we still are the one who acts and, if `revision` is given, nobody has written it since.

        Raises:
            EtcdError: it was not written, or nobody can tell.
        """
        unchanged = [modified(key) == revision] if revision is not None else []
        if not self._client.txn([self.is_ours, *unchanged], [Put(key, encode(record))]).succeeded:
            raise EtcdError(f"run {self._keys.run_id}: {key!r} was not written: another controller acts, or has written it")

    def delete(self, key: str) -> None:
        """Delete a key if we still are the one who acts and etcd answers."""
        with contextlib.suppress(EtcdError):  # it is tried again by whoever comes next
            self._client.txn([self.is_ours], [Delete(key)])

    def add_event(self, kind: str, text: str, data: dict[str, Any] | None = None) -> bool:
        """Add to the job's history, if we still are the one who acts."""
        event = EventRecord(kind, time.time(), text[:2000], data or {})
        key = f"{self._keys.events}{time.time_ns():020d}-controller"
        return self._client.txn([self.is_ours], [Put(key, encode(event))]).succeeded

    def publish(self, apps: Mapping[str, str], held_up: str) -> bool:
        """Bring the controller's record up to date. Returns whether it has changed."""
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
        """A lease that holds the controller key, and that key's create revision: the fence of all that we write.

        Raises:
            ControllerBusyError: another one holds it.
            EtcdError: nobody knows who does.
        """
        key = self._keys.controller
        self._drop_claim()
        deadline = time.monotonic() + 2 * LEASE_TTL_S
        # Only its lease says for certain that it is gone: another container of this host may have its name and other processes.
        while self._holder_seems_dead() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._claim = lease = self._client.lease(LEASE_TTL_S)
        self._record = dataclasses.replace(self._record, apps={}, held_up="")
        try:
            self._client.txn([absent(key)], [Put(key, encode(self._record), lease.id)])
            entry = self._client.get(key)  # who holds it now, whatever became of the transaction's first answer
        except EtcdError:
            with contextlib.suppress(EtcdError):  # before the next attempt: it would find the key taken, by us
                self._drop_claim()
            raise
        if entry is not None and entry.lease_id == lease.id:
            self._claim = None
            return lease.keep_alive(), entry.create_revision
        self._drop_claim()
        raise ControllerBusyError(_busy_text(self._client, self._keys))

    def _drop_claim(self) -> None:
        if self._claim is not None:
            self._claim.revoke()
            self._claim = None

    def _holder_seems_dead(self) -> bool:
        """Whether the key is held by a process of this host that does not exist."""
        entry = self._client.get(self._keys.controller)
        if entry is None:
            return False
        try:
            record = decode(ControllerRecord, entry.value, entry.key)
        except RecordError:
            return False
        return record.host == self._record.host and record.pid > 0 and not psutil.pid_exists(record.pid)


def _busy_text(client: EtcdClient, keys: Keys) -> str:
    entry = client.get(keys.controller)
    who = "another controller"
    if entry is not None:
        with contextlib.suppress(RecordError):
            record = decode(ControllerRecord, entry.value, entry.key)
            who = f"process {record.pid} on {record.host}"
    return (
        f"job {keys.run_id!r} is already run by {who}; choose another --rdzv-id, or use `dlrover scale` to resize it "
        f"(if that process was killed a moment ago: try again in {LEASE_TTL_S:.0f} s)"
    )
