"""Read and write a job's records in etcd: the one place for compare-and-swap, fenced writes, elections and the history.

Workers, agents, controllers and commands all call etcd synchronously, so one object serves them all. Three kinds of writes are
separate transactions elsewhere, because "read again and repeat" is not the right reaction to their failure:

- `membership/coordinator.py` decides on a mirror's copy of all records, and its writes are valid for that copy's revision only.
- `OwnRecord` and `Registration` have one writer, bound to a lease: a failed write means that the lease may be lost.
- Deletions at the end of a process or of a job.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import psutil

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.client import Election, EtcdClient, Lease
from lightning_dlrover.rdzv.etcd.types import Compare, EtcdError, EtcdUnavailableError, Get, KeyValue, Put, modified
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord, Keys, NodesRecord, decode, encode

log = logging.getLogger(__name__)

R = TypeVar("R")
Reader = Callable[[type[R], KeyValue | None], R | None]

CONTENTION_S = 30.0  # seconds to compete with other writers of a record
RETRY_PAUSE_S = 0.1  # seconds between two attempts while etcd does not answer; a full etcd refuses writes at once
MAX_EVENTS = 4000  # maximum number of events kept per job; the oldest are removed first
LINES_PER_ANSWER = 500  # events that etcd returns at once, so that many readers of a long history do not hold it up
TRIM_EVERY = 50
"""Events that a process writes between two removals of the oldest ones. It also trims with its first event, because many
processes write only a few."""


class FenceLostError(EtcdError):
    """The condition under which this process may write no longer holds."""


class ContentionError(EtcdError):
    """Other processes changed a record each time before this one could write it."""


@dataclass(frozen=True)
class Found(Generic[R]):
    """A record and the revision of its last write. None and 0: there is none."""

    record: R | None
    revision: int


def read(record_type: type[R], entry: KeyValue | None) -> R | None:
    """Return the record of an entry, None if the entry is missing. Raises `RecordError` if the entry holds another value."""
    return decode(record_type, entry.value, entry.key) if entry is not None else None


def readable(record_type: type[R], entry: KeyValue | None) -> R | None:
    """Return the record of an entry, None if the entry is missing or holds another value."""
    try:
        return read(record_type, entry)
    except RecordError:
        return None


def readable_folder(client: EtcdClient, record_type: type[R], folder: str, beginning: str = "") -> dict[str, R]:
    """Return the records of a folder of keys, by name in it. Unreadable ones are skipped.

    Args:
        beginning: of the names to read.
    """
    entries = client.get_prefix(folder + beginning)[1]
    found = {entry.key.removeprefix(folder): readable(record_type, entry) for entry in entries}
    return {name: record for name, record in found.items() if record is not None}


def read_events(entries: Iterable[KeyValue]) -> list[EventRecord]:
    """Return events in the order of their keys. A foreign value under our prefix must not hide the rest of the history."""
    ordered = sorted(entries, key=lambda entry: entry.key)
    return [event for entry in ordered if (event := readable(EventRecord, entry)) is not None]


class Journal:
    """The records of one job."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._num_appended = 0
        self._events: dict[str, EventRecord | None] = {}  # lines that were read before, by key; None: unreadable
        self._read_until = 0  # revision of the newest read of the lines
        self._lock = threading.Lock()

    def get(self, record_type: type[R], key: str, read: Reader[R] = read) -> Found[R]:
        """Read a record.

        Args:
            read: another way to read an entry, such as `readable`.

        Raises:
            RecordError: the key holds another value.
        """
        entry = self.client.get(key)
        return Found(read(record_type, entry), entry.mod_revision if entry is not None else 0)

    def is_over(self) -> bool:
        """Read whether no worker will ever continue the job: it has finished, has failed for good, or was cancelled.

        Raises:
            RecordError: its records hold other values.
        """
        job, nodes = self.get(JobRecord, self.keys.job).record, self.get(NodesRecord, self.keys.nodes).record
        return (job is not None and job.is_over) or (nodes is not None and bool(nodes.stop))

    def swap(
        self,
        record_type: type[R],
        key: str,
        change: Callable[[R | None], R | None],
        fence: Sequence[Compare] = (),
        read: Reader[R] = read,
        timeout_s: float | None = None,
    ) -> Found[R]:
        """Write `change` of a record's newest version, with no other write in between; return the resulting record.

        If the answer to a write was lost and another process has written since, `change` is applied twice.

        Args:
            change: returns None, or the record as it is, to leave it unchanged.
            fence: conditions without which nothing may be written.
            read: another way to read an entry, such as `readable`.
            timeout_s: seconds to repeat writes, also while etcd does not answer. None: an unreachable or full etcd is an error
                at once, because training must not wait for it.

        Raises:
            RecordError: the key holds another value.
            FenceLostError: a condition of `fence` does not hold.
            ContentionError: other processes wrote first until the timeout.
            EtcdUnavailableError: etcd does not answer; the record may or may not have been written.
        """
        limit_s = CONTENTION_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        lost: dict[bytes, R] = {}  # writes without an answer
        while True:
            try:
                entry = self.client.get(key)
                if entry is not None and entry.value in lost:
                    return Found(lost[entry.value], entry.mod_revision)
                now = Found(read(record_type, entry), entry.mod_revision if entry is not None else 0)
                updated = change(now.record)
                if updated is None or updated == now.record:
                    return now
                value = encode(updated)
                may_arrive_late = value in lost
                lost[value] = updated
                condition = [*fence, modified(key) == now.revision]
                done = self.client.txn(condition, [Put(key, value)], [Get(each.key) for each in fence])
            except EtcdUnavailableError:
                if timeout_s is None or time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_PAUSE_S)
                continue
            if done.succeeded:
                return Found(updated, done.revision)
            if not may_arrive_late:
                del lost[value]
            seen = {entry.key: entry for entry in done.values}
            if not all(each.holds(seen.get(each.key)) for each in fence):
                raise FenceLostError(f"{key!r} was not written: another process has taken over, or the job's keys were deleted")
            if time.monotonic() >= deadline:
                raise ContentionError(
                    f"{key!r} was not written: others have changed it for {limit_s:g} s, each time before this process could; "
                    "end the program that keeps writing it"
                )

    def fenced_write(self, records: Mapping[str, Any], fence: Sequence[Compare]) -> bool:
        """Write records by key, all or none, while every condition holds. Return whether they were written.

        Raises:
            EtcdUnavailableError: etcd does not answer; they may or may not have been written.
        """
        return self.client.txn(fence, [Put(key, encode(record)) for key, record in records.items()]).succeeded

    def append(self, event: EventRecord, writer: str, fence: Sequence[Compare] = ()) -> bool:
        """Add a line to the job's history while every condition holds. Return whether it was added.

        Raises:
            EtcdUnavailableError: etcd does not answer; the line may or may not have been added.
        """
        if not self.client.txn(fence, self.puts([event], writer)).succeeded:
            return False
        self.note_appended(1)
        return True

    def append_all(self, puts: Sequence[Put]) -> None:
        """Add lines to the job's history in one transaction, see `puts`.

        Raises:
            EtcdUnavailableError: etcd does not answer; they may or may not have been added.
        """
        self.client.txn([], puts)
        self.note_appended(len(puts))

    def puts(self, events: Iterable[EventRecord], writer: str) -> list[Put]:
        """Return writes that add lines to the job's history as part of another transaction; see `note_appended`."""
        now_ns = time.time_ns()
        return [Put(f"{self.keys.events}{now_ns + n:020d}-{writer}", encode(event)) for n, event in enumerate(events)]

    def note_appended(self, num_lines: int) -> None:
        """Remove the oldest lines now and then. To be called after each transaction with `puts`."""
        before, self._num_appended = self._num_appended, self._num_appended + num_lines
        if before == 0 or (before - 1) // TRIM_EVERY != (self._num_appended - 1) // TRIM_EVERY:
            with contextlib.suppress(EtcdError):  # a later line removes them
                self.client.trim_prefix(self.keys.events, MAX_EVENTS)

    def events(self) -> list[EventRecord]:
        """Return the job's history so far, oldest first. Unreadable lines are skipped.

        A line never changes, so each is read and decoded once: thousands at a time would hold up the training thread, and the
        etcd if all workers of a job look for the same line.
        """
        with self._lock:
            revision, entries = self.client.get_prefix(self.keys.events, self._read_until, LINES_PER_ANSWER)
            if revision < self._read_until:  # etcd was restored from a backup, and counts from there
                self._events = {}
                revision, entries = self.client.get_prefix(self.keys.events, per_answer=LINES_PER_ANSWER)
            if entries:
                self._events |= {entry.key: readable(EventRecord, entry) for entry in entries}
                self._events = dict(sorted(self._events.items())[-MAX_EVENTS:])
            self._read_until = revision
            return [event for event in self._events.values() if event is not None]


class Holder(Protocol):
    """A record that names the process that holds its key."""

    @property
    def host(self) -> str: ...

    @property
    def pid(self) -> int: ...


H = TypeVar("H", bound=Holder)


def holder_text(holder: Holder | None, unknown: str = "another process") -> str:
    """Name the process that holds a key; `unknown` where its record cannot be read."""
    return f"process {holder.pid} on {holder.host}" if holder is not None else unknown


class Tenure(Generic[H]):
    """One process's hold on a key, for as long as its lease lives, which fences the writes of that process.

    A controller holds its job's key, a brain that of its pool, and a `dlrover run` its job's place in a pool. Each loses the
    key with its lease. The create revision of the key then differs, so a write that arrives late is refused.

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
            log.info("the lease of %r was not revoked and will expire: %s", self._election.key, error)

    @property
    def is_ours(self) -> Compare:
        """Return the comparison of the key that fences each of our writes."""
        return self._election.fence(self.revision)

    def still_holds(self) -> bool | None:
        """Whether no other process has taken over; None: etcd does not answer. Call before actions that etcd cannot fence.

        A process that was stopped for a while does not notice by itself that its lease has expired.
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
        """Replace the key's record. Raises `EtcdError` if it was not written, or its fate is unknown."""
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
