"""Records that a worker reads and writes: its own, the shared ones, requests to workers, and a queue for deferred writes.

`SharedRecords` holds the shared ones. The coordinator's own reads and writes are in `coordinator.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.client import EtcdClient, Lease
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import (
    Compare,
    Delete,
    EtcdError,
    EtcdFullError,
    EtcdUnavailableError,
    KeyValue,
    LeaseLostError,
    Put,
    Txn,
    absent,
    created,
    exists,
    modified,
)
from lightning_dlrover.rdzv.job.events import Event, NodeNoticed, record_of
from lightning_dlrover.rdzv.job.journal import MAX_EVENTS, FenceLostError, Journal, read, readable, readable_folder
from lightning_dlrover.rdzv.job.records import (
    MAX_UNREACHABLE,
    AddressRecord,
    CheckpointRecord,
    CheckpointRequest,
    DrainRecord,
    EndNotice,
    EventRecord,
    JobRecord,
    Keys,
    NodesRecord,
    PlacesRecord,
    PlanRecord,
    RoundRecord,
    SearchRecord,
    SnapshotRecord,
    StacksRecord,
    StacksRequest,
    WindowRecord,
    WorkerRecord,
    WorkerState,
    decode,
    encode,
)
from lightning_dlrover.rdzv.membership.member import EvictedError, MembershipError


def ask_for_replacement(journal: Journal, worker_id: str, reason: str, *guard: Compare) -> bool:
    """Request a worker's replacement; False if it is gone or was drained already, or if a guard fails."""
    drain = journal.keys.drains + worker_id
    # A worker that must leave at once, because its host is taken away, cannot wait for its replacement.
    may_ask = (*guard, exists(journal.keys.workers + worker_id), absent(drain))
    return journal.fenced_write({drain: DrainRecord(worker_id, reason, once_replaced=True)}, may_ask)


def note_end(journal: Journal, worker_id: str, notice: EndNotice, *guard: Compare) -> bool:
    """Record that a worker's node will be taken away: it leaves once replaced, and in time in any case.

    A request to leave at once remains one.

    Returns:
        False if that is known, if the worker is gone, or if a guard fails.
    """
    key, seen = journal.keys.drains + worker_id, -1
    while True:
        entry = journal.client.get(key)
        revision = entry.mod_revision if entry is not None else 0
        known = readable(DrainRecord, entry) or DrainRecord(worker_id, f"its node {notice}", once_replaced=True)
        if not notice.updates(known.notice) or revision == seen:
            return False
        record = dataclasses.replace(known, source=notice.source[:200], taken_at=notice.taken_at)
        if known.once_replaced:
            record = dataclasses.replace(record, reason=f"its node {notice}"[:500])
        line = record_of(NodeNoticed(worker_id, notice.source[:200], notice.taken_at), f"{worker_id}: its node {notice}"[:500])
        may_write = (*guard, exists(journal.keys.workers + worker_id), modified(key) == revision)
        put = Put(key, encode(record), entry.lease_id if entry is not None else 0)
        if journal.client.txn(may_write, [put, *journal.puts([line], worker_id)]).succeeded:
            return True
        seen = revision  # another request came first, if it differs


def dismiss(journal: Journal, worker_id: str, failed_round: int, reason: str) -> bool:
    """Request that a worker is in no round after `failed_round`, which the caller is about to report as broken.

    Returns:
        False if it is gone.
    """
    request = DrainRecord(worker_id, reason, failed_round=failed_round)
    return journal.fenced_write({journal.keys.drains + worker_id: request}, [exists(journal.keys.workers + worker_id)])


def ask_for_stacks(journal: Journal, asked_by: str, reason: str, after: int | None = None) -> StacksRequest | None:
    """Request a stack trace from every worker of a job; None if another process has just done so.

    Args:
        after: number of the newest request that the caller has seen, 0 if there is none; None: always write a new request.
    """
    key = journal.keys.stacks_request
    found = journal.get(StacksRequest, key, readable)
    newest = found.record.number if found.record is not None else 0
    if after is not None and newest > after:
        return None
    request = StacksRequest(newest + 1, asked_by, reason, time.time())
    return request if journal.fenced_write({key: request}, [modified(key) == found.revision]) else None


def read_stacks(journal: Journal) -> dict[str, StacksRecord]:
    """Return each worker's newest stack trace. Unreadable records are skipped."""
    return readable_folder(journal.client, StacksRecord, journal.keys.stacks)


log = logging.getLogger(__name__)

BATCH = 100  # lines in one transaction; etcd allows 128 operations (--max-txn-ops)
MAX_BYTES = 512 * 1024
"""Bytes of lines in one transaction, unless it is a single line. etcd takes requests of 1.5 MiB (--max-request-bytes)."""


class Outbox:
    """Queue one worker's lines for the job's history and its changes of other records, however long etcd is unavailable."""

    def __init__(self, journal: Journal, worker_id: str) -> None:
        self._journal = journal
        self._worker_id = worker_id
        self._events: deque[EventRecord] = deque()
        self._sent: list[Put] = []  # the oldest lines as they were sent: etcd may hold them although it did not answer
        self._changes: dict[str, Callable[[], object]] = {}  # writes by name, oldest first
        self._lock = threading.Lock()

    @property
    def waiting(self) -> list[str]:
        """Names of the changes that etcd does not hold yet."""
        return list(self._changes)

    def add(self, event: EventRecord) -> None:
        """Queue one line for the job's history; never blocks."""
        if len(self._events) >= MAX_EVENTS:
            return  # after such a long outage of etcd the older lines matter more
        self._events.append(event)

    def add_change(self, name: str, write: Callable[[], object]) -> None:
        """Queue a change; never blocks. It replaces a queued one of the same name."""
        self._changes[name] = write

    def change(self, name: str, write: Callable[[], object]) -> bool:
        """Carry out a change now, or queue it while etcd is unavailable. Return whether it was carried out.

        Raises:
            any error of `write`, except `EtcdUnavailableError`.
        """
        if not self._changes:  # otherwise etcd was unavailable a moment ago, and training should not wait for it again
            try:
                write()
                return True
            except EtcdUnavailableError as error:
                log.warning("%s is recorded later: %s", name, error)
        self.add_change(name, write)
        return False

    def write(self, most: int = MAX_EVENTS) -> None:
        """Write the queued changes and lines. Those that etcd cannot take now stay in the queue, those that it refuses do not.

        Args:
            most: lines after which to stop. A thread that has other work to do writes one transaction of them at a time.
        """
        # Two threads write: the background thread, and the one that flushes before its process ends.
        with self._lock:
            for name, write in list(self._changes.items()):
                try:
                    write()
                except EtcdUnavailableError:
                    raise
                except (EtcdError, RecordError, MembershipError) as error:  # another attempt would fail in the same way
                    log.error("%s is not recorded: %s", name, error)
                if self._changes.get(name) is write:
                    del self._changes[name]
            num_written = 0
            while self._events and num_written < most:
                num_written += self._write_lines(min(BATCH, most - num_written))

    def _write_lines(self, most: int) -> int:
        """Write or drop the oldest lines; return how many."""
        lines = list(itertools.islice(self._events, len(self._sent) or most))
        while True:
            try:
                puts = self._sent or self._journal.puts(lines, self._worker_id)
                if len(lines) == 1 or sum(len(put.value) for put in puts) <= MAX_BYTES:
                    self._sent = puts  # another attempt writes the same keys again, and no line twice
                    self._journal.append_all(puts)
                    break
            except EtcdUnavailableError:
                raise
            except (EtcdError, ValueError) as error:
                if len(lines) == 1:
                    log.error("a line of the job's history is not recorded: %s: %s", lines[0].text[:200], error)
                    break
            self._sent = []
            lines = lines[: len(lines) // 2]
        self._sent = []
        for _ in lines:
            self._events.popleft()
        return len(lines)


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
        self._notice: DrainRecord | None = None  # known when this worker asked to leave

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
            "answer in time (stopped, cut off, or overloaded for longer than the lease?). Start it again as a new worker"
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
            EvictedError: the record is gone because the job continues without this worker.
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
        """Register again after the lease has expired, provided that the others have not continued without this worker.

        This happens when etcd was unreachable from all workers for longer than a lease. Each new round is guarded by the
        revision of the one before, and so is this write: it fails unless the job's newest round still includes this worker. A
        worker that was evicted is not registered again. The caller holds `_write_lock`.
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
        is_newest = modified(self._keys.round) == (entry.mod_revision if entry else 0)
        lease = self._client.lease(self._lease_ttl_s)
        ops = [Put(self.key, encode(self._record), lease.id), self._put_address(self._record)]
        if self._drain_reason:
            ops.append(self._drain_request(lease))
        made = self._client.txn([absent(self.key), is_newest], ops)
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
                self._client.delete(self.address_key)  # first: without it no worker waits for this one
                self._client.delete(self.key)
                self._client.delete(self._keys.drains + self._worker_id)
                election = self._client.get(self._keys.coordinator)
                if election is not None and election.value == self._worker_id.encode():
                    with contextlib.suppress(EtcdFullError):  # the key ends with the lease
                        self._client.txn([created(election.key) == election.create_revision], [Delete(election.key)])

    def drain(self, reason: str) -> None:
        """Ask to leave the job: the next planned round is formed without this worker. A notice keeps its deadline.

        Raises:
            LeaseLostError: this worker's lease has expired; the request is repeated if the worker registers again.
        """
        self._drain_reason = reason
        noticed = readable(DrainRecord, self._client.get(self._keys.drains + self._worker_id))
        self._notice = noticed if noticed is not None and noticed.source else None
        request = self._drain_request(self.lease)
        self._client.put(request.key, request.value, self.lease)
        self.has_asked_to_leave = True

    def _drain_request(self, lease: Lease) -> Put:
        record = DrainRecord(self._worker_id, self._drain_reason)
        if (notice := self._notice) is not None:
            record = dataclasses.replace(notice, reason=self._drain_reason, once_replaced=False)
        return Put(self._keys.drains + self._worker_id, encode(record), lease.id)


R = TypeVar("R")
T = TypeVar("T")


class SharedRecords:
    """The records that all workers of a job share, as one worker reads and writes them.

    Reads of mirrored keys need no request. Writes that no worker waits for go through the outbox.

    Args:
        mirror: mirror of the job's shared records.
        own: the worker's own record. Without it the worker changes none of the job's records: it may be cut off, and others may
            have taken the job over.
        wake: makes the thread that writes the outbox take a turn.
    """

    def __init__(self, journal: Journal, mirror: Mirror, worker_id: str, own: OwnRecord, wake: Callable[[], None]) -> None:
        self.journal = journal
        self.outbox = Outbox(journal, worker_id)
        self._keys = journal.keys
        self._mirror = mirror
        self._worker_id = worker_id
        self._own = own
        self._wake = wake

    def event(self, event: Event, text: str) -> None:
        """Queue one line for the job's history, which the background thread writes at once; never waits for etcd."""
        self.outbox.add(record_of(event, text))
        self._wake()

    def update_job(self, change: Callable[[JobRecord], JobRecord]) -> None:
        """Compare-and-swap the job record until `change` of its newest version is stored."""
        self._swap(JobRecord, self._keys.job, lambda job: change(job) if job else None)

    def record(self, name: str, change: Callable[[JobRecord], JobRecord]) -> bool:
        """Update the job record now, or once etcd is available. Return whether it was done.

        Args:
            name: subject of the write, in words. A waiting change under the same name is replaced.
        """
        return self.outbox.change(name, lambda: self.update_job(change))

    def update_plan(self, change: Callable[[PlanRecord | None], PlanRecord | None]) -> PlanRecord:
        """Compare-and-swap the plan and return the resulting one; `change` returns None to leave it unchanged."""
        return self._swap(PlanRecord, self._keys.plan, change)

    def newest_checkpoint(self) -> CheckpointRecord | None:
        return self.journal.get(CheckpointRecord, self._keys.checkpoint).record

    def put_checkpoint(self, record: CheckpointRecord, then: Callable[[], None] = lambda: None) -> None:
        """Record the newest checkpoint now, or once etcd is available.

        Args:
            then: called after the record was written, maybe in another thread.
        """

        def write() -> None:
            self._swap(CheckpointRecord, self._keys.checkpoint, lambda _: record)
            then()

        self.outbox.change(f"run {self._keys.run_id}: the newest checkpoint", write)

    def checkpoint_request(self) -> int:
        """Return the number of the newest checkpoint request, 0 if there is none."""
        request = readable(CheckpointRequest, self._mirror.get(self._keys.checkpoint_request))
        return request.number if request is not None else 0

    def ask_for_checkpoint(self, reason: str) -> None:
        """Ask all workers to save a checkpoint between two steps."""
        self._swap(
            CheckpointRequest,
            self._keys.checkpoint_request,
            lambda now: CheckpointRequest(now.number + 1 if now is not None else 1, reason),
        )

    def search(self, number: int) -> SearchRecord | None:
        """Return the result of the script's search with this number, None before there is one."""
        return read(SearchRecord, self._mirror.get(f"{self._keys.searches}{number}"))

    def put_search(self, number: int, record: SearchRecord) -> None:
        """Queue a search's result until etcd accepts it. Joiners wait for it; the workers that found it train on."""
        self._queue(f"result of search {number}", f"{self._keys.searches}{number}", record)

    def put_places(self, record: PlacesRecord) -> None:
        """Queue where the loaders are; never waits for etcd. A record that etcd does not hold yet is replaced."""
        self._queue("places in the data", self._keys.places, record)

    def put_snapshot(self, record: SnapshotRecord) -> None:
        """Queue which snapshot of the tables counts; never waits for etcd."""
        self._queue("the newest snapshot", self._keys.snapshot, record)

    def places(self) -> PlacesRecord | None:
        """Read from etcd where the loaders were before the newest round with joiners.

        Raises:
            EtcdError: etcd does not answer.
        """
        return self.journal.get(PlacesRecord, self._keys.places, readable).record

    def window(
        self, name: str, change: Callable[[WindowRecord | None], WindowRecord | None], timeout_s: float, outdated: str = ""
    ) -> WindowRecord | None:
        """Compare-and-swap the record of a stream's window; `change` returns None to leave it unchanged.

        Args:
            timeout_s: seconds to wait while etcd is away.
            outdated: a record that is removed with the write of this one.
        """
        found = self.journal.swap(WindowRecord, f"{self._keys.windows}{name}", change, timeout_s=timeout_s)
        if outdated and found.record is not None:
            with contextlib.suppress(EtcdError):  # it expires with the job
                self.journal.client.delete(f"{self._keys.windows}{outdated}")
        return found.record

    def has_controller(self) -> bool:
        return self._mirror.get(self._keys.controller) is not None

    @property
    def nodes(self) -> NodesRecord | None:
        """A controller's record of the job's nodes; None if there is none or it cannot be read."""
        return readable(NodesRecord, self._mirror.get(self._keys.nodes))

    def replace(self, worker_id: str, reason: str) -> bool:
        """Request a worker's replacement; False if it is gone or was drained already."""
        return ask_for_replacement(self.journal, worker_id, reason)

    def stacks_request(self) -> StacksRequest | None:
        """Return the newest request for stack traces, None if there is none."""
        return readable(StacksRequest, self._mirror.get(self._keys.stacks_request))

    def ask_for_stacks(self, after: int, reason: str) -> StacksRequest | None:
        """Request a stack trace from every worker; see `ask_for_stacks`."""
        return ask_for_stacks(self.journal, self._worker_id, reason, after)

    def put_stacks(self, record: StacksRecord) -> None:
        """Publish this worker's stack traces, bound to its lease."""
        self.journal.client.put(self._keys.stacks + self._worker_id, encode(record), self._own.lease)

    def stacks(self, request: int) -> dict[str, StacksRecord]:
        """Return the responses to a request so far, by worker."""
        answers = read_stacks(self.journal)
        return {worker: answer for worker, answer in answers.items() if answer.request == request}

    def put_profile(self, payload: bytes) -> None:
        """Publish this worker's newest step profile, bound to its lease."""
        self.journal.client.put(self._keys.profiles + self._worker_id, payload, self._own.lease)

    def put_progress(self, payload: bytes) -> None:
        """Publish the progress of the job, bound to this worker's lease."""
        self.journal.client.put(self._keys.progress, payload, self._own.lease)

    def _swap(self, record_type: type[R], key: str, change: Callable[[R | None], R | None]) -> R:
        record = self._while_registered(lambda: self.journal.swap(record_type, key, change, fence=self._own.fence).record)
        if record is None:
            raise MembershipError(f"run {self._keys.run_id!r}: {key!r} does not exist")
        return record

    def _queue(self, what: str, key: str, record: Any) -> None:
        put = [Put(key, encode(record))]

        def write() -> None:
            if not self.journal.client.txn(self._own.fence, put).succeeded:
                raise FenceLostError(f"{key!r} was not written: this worker is not registered")

        self.outbox.add_change(f"run {self._keys.run_id}: {what}", lambda: self._while_registered(write))
        self._wake()

    def _while_registered(self, write: Callable[[], T]) -> T:
        """Run a write that is fenced by this worker's registration."""
        with contextlib.suppress(FenceLostError):
            return write()
        self._own.check(None)  # its lease may have ended a moment ago, as while the script held the GIL
        try:
            return write()
        except FenceLostError as error:
            if self._own.evicted:
                raise EvictedError(self._own.evicted_text) from error
            # It comes back, or finds that it is evicted.
            text = f"run {self._keys.run_id!r}: worker {self._worker_id} is not registered for the moment"
            raise EtcdUnavailableError(text) from error
