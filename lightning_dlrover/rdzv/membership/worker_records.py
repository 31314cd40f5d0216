"""The record that a worker writes about itself."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdFullError, LeaseLostError
from lightning_dlrover.rdzv.etcd.lease import Lease
from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, KeyValue, Put, Txn, absent, created, modified
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.records import (
    MAX_UNREACHABLE,
    AddressRecord,
    DrainRecord,
    Keys,
    RecordError,
    RoundRecord,
    WorkerRecord,
    WorkerState,
    decode,
    encode,
)
from lightning_dlrover.rdzv.live.member import EvictedError

__all__ = ["OwnRecord"]

log = logging.getLogger(__name__)


class OwnRecord:
    """A worker's own record: written only by the worker, bound to its lease, and guarded against late writes.

    Args:
        came_back: called with the new lease after the worker has registered again.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        run_id: str,
        worker_id: str,
        lease_ttl_s: float,
        came_back: Callable[[Lease], None],
    ) -> None:
        self.key = keys.workers + worker_id
        self.address_key = keys.addresses + worker_id
        self.evicted = False
        self.lease = client.lease(lease_ttl_s).keep_alive()
        self._client = client
        self._keys = keys
        self._run_id = run_id
        self._worker_id = worker_id
        self._lease_ttl_s = lease_ttl_s
        self._came_back = came_back
        self._record: WorkerRecord | None = None
        self._created = self._modified = 0  # revisions of our record: its creation and our last write
        self._write_lock = threading.Lock()
        self.has_asked_to_leave = False
        self._drain_reason = ""

    @property
    def is_in_force(self) -> bool:
        """Whether this worker is registered, and not evicted."""
        return self._record is not None and not self.evicted

    @property
    def fence(self) -> tuple[Compare, ...]:
        """The condition that this worker is registered, for writes that it makes on behalf of the job."""
        return (created(self.key) == self._created,)

    @property
    def evicted_text(self) -> str:
        return (
            f"run {self._run_id!r}: worker {self._worker_id} is no longer part of the job; its lease ended or it did not "
            "answer in time (stopped, cut off, or overloaded for longer than the lease?). It has to start again as a new worker"
        )

    def create(self, record: WorkerRecord) -> None:
        self._record = record
        # Guarded like every write of the record: a retry that arrives late must not restore this state after we have moved on.
        made = self._client.txn([absent(self.key)], [Put(self.key, encode(record), self.lease.id), self._put_address(record)])
        self._created = self._modified = made.revision

    def update(
        self, state: WorkerState, round_number: int = 0, fingerprint: str | None = None, unreachable: Sequence[str] = ()
    ) -> None:
        """Write this worker's state.

        Args:
            unreachable: workers that this one could not reach, see `WorkerRecord.unreachable`.

        Raises:
            EvictedError: the record is gone because the job went on without this worker.
        """
        with self._write_lock:
            if self._record is None or self.evicted:
                raise EvictedError(self.evicted_text)
            apart = list(unreachable)[:MAX_UNREACHABLE]
            record = dataclasses.replace(self._record, state=state, round_number=round_number, unreachable=apart)
            if fingerprint is not None:
                record = dataclasses.replace(record, fingerprint=fingerprint)
            if (state, round_number) != (self._record.state, self._record.round_number):
                record = dataclasses.replace(record, since=time.time())
            put = Put(self.key, encode(record), self.lease.id)
            while not (written := self._try_write(put)).succeeded:
                entry = self._client.get(self.key)
                if entry is not None and entry.create_revision == self._created:
                    self._modified = entry.mod_revision  # our own write, if its response was lost, or another client's garbage
                elif not self._come_back():
                    self.evicted = True
                    raise EvictedError(self.evicted_text)
                put = dataclasses.replace(put, lease_id=self.lease.id)
            self._record, self._modified = record, written.revision

    def _try_write(self, put: Put) -> Txn:
        try:
            return self._client.txn([modified(self.key) == self._modified], [put])
        except LeaseLostError:
            return Txn(False, 0, [])

    def check(self, seen: KeyValue | None) -> None:
        """Register again, or note the eviction, if etcd lacks this worker's record; write it again if it holds garbage.

        Args:
            seen: the record as a mirror shows it.
        """
        if seen is not None and seen.mod_revision > self._modified and readable(WorkerRecord, seen) is None:
            with self._write_lock:
                if self._record is not None and not self.evicted and seen.mod_revision > self._modified:
                    self._restore(seen)
        if seen is None or self.lease.lost.is_set():
            # The mirror may lag behind our own registration, but never behind the loss of our lease.
            with self._write_lock:
                if self._record is not None and not self.evicted and self._client.get(self.key) is None:
                    self.evicted = not self._come_back()

    def _restore(self, garbage: KeyValue) -> None:
        """Replace another client's garbage, as the next coordinator would take this worker for dead.

        The caller holds `_write_lock`.
        """
        assert self._record is not None
        unchanged = modified(self.key) == garbage.mod_revision
        with contextlib.suppress(LeaseLostError):
            done = self._client.txn([unchanged], [Put(self.key, encode(self._record), self.lease.id)])
            if done.succeeded:
                self._modified = done.revision

    def _come_back(self) -> bool:
        """Register again after the lease has expired, provided that the others did not go on without this worker meanwhile.

        This happens when etcd was unreachable from all workers for longer than a lease. Each new round is guarded by the
        revision of the one before, and so is this write: it fails unless the job's newest round still includes this worker. A
        worker that was buried is not registered again. The caller holds `_write_lock`.
        """
        assert self._record is not None
        if not self.lease.has_ended():
            return False
        entry = self._client.get(self._keys.round)
        if entry is not None:
            try:
                is_member = self._worker_id in decode(RoundRecord, entry.value, entry.key).members
            except RecordError:
                return False
            # A worker that waits for admission, also again after a round that did not form, misses nothing while it is away.
            if not is_member and self._record.state not in ("standby", "ready"):
                return False
        nobody_went_on = modified(self._keys.round) == (entry.mod_revision if entry else 0)
        lease = self._client.lease(self._lease_ttl_s)
        ops = [Put(self.key, encode(self._record), lease.id), self._put_address(self._record)]
        if self._drain_reason:
            ops.append(self._drain_request(lease))
        made = self._client.txn([absent(self.key), nobody_went_on], ops)
        if not made.succeeded:
            lease.revoke()
            return False
        log.warning("run %s: worker %s has registered again after its lease had ended", self._run_id, self._worker_id)
        self.lease.close()
        self.lease = lease.keep_alive()
        self._created = self._modified = made.revision
        self._came_back(lease)
        return True

    def _put_address(self, record: WorkerRecord) -> Put:
        where = AddressRecord(record.worker_id, record.agent_id, record.host, record.address, record.port)
        return Put(self.address_key, encode(where))

    def leave(self) -> None:
        """Remove this worker's records. From then on the others treat it as gone."""
        with self._write_lock:
            if self._record is not None:
                self._record = None
                # No transaction: a full etcd takes none, but it deletes.
                self._client.delete(self.address_key)  # first: without it nobody waits for this worker
                self._client.delete(self.key)
                self._client.delete(self._keys.drains + self._worker_id)
                election = self._client.get(self._keys.coordinator)
                if election is not None and election.value == self._worker_id.encode():
                    with contextlib.suppress(EtcdFullError):  # the key ends with the lease
                        self._client.txn([created(election.key) == election.create_revision], [Delete(election.key)])

    def drain(self, reason: str) -> None:
        """Ask to leave the job: the next planned round is formed without this worker.

        Raises:
            LeaseLostError: this worker's lease has expired; the request is repeated if the worker registers again.
        """
        self._drain_reason = reason
        request = self._drain_request(self.lease)
        self._client.put(request.key, request.value, self.lease)
        self.has_asked_to_leave = True

    def _drain_request(self, lease: Lease) -> Put:
        record = DrainRecord(self._worker_id, self._drain_reason)
        return Put(self._keys.drains + self._worker_id, encode(record), lease.id)
