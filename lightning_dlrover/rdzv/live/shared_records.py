"""The records that all workers of a job share, as one worker reads and writes them.

The mirror answers what it holds without a request. Writes that no worker waits for go through the outbox.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_dlrover.rdzv.etcd.errors import EtcdError, EtcdUnavailableError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import Put
from lightning_dlrover.rdzv.job.events import Event, record_of
from lightning_dlrover.rdzv.job.journal import FenceLostError, Journal, read, readable
from lightning_dlrover.rdzv.job.records import (
    CheckpointRecord,
    CheckpointRequest,
    JobRecord,
    NodesRecord,
    PlacesRecord,
    PlanRecord,
    SearchRecord,
    SnapshotRecord,
    StacksRecord,
    StacksRequest,
    WindowRecord,
    encode,
)
from lightning_dlrover.rdzv.live.member import EvictedError, MembershipError
from lightning_dlrover.rdzv.live.outbox import Outbox
from lightning_dlrover.rdzv.live.own_record import OwnRecord
from lightning_dlrover.rdzv.live.requests import ask_for_replacement, ask_for_stacks, read_stacks

__all__ = ["SharedRecords"]

R = TypeVar("R")
T = TypeVar("T")


class SharedRecords:
    """A job's history, plan, checkpoints, searches, nodes, requests and figures.

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
            name: what is recorded, for people. A change that waits under the same name is replaced.
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
            raise self._not_registered() from error

    def _not_registered(self) -> Exception:
        if self._own.evicted:
            return EvictedError(self._own.evicted_text)
        # It comes back, or finds that it is evicted.
        return EtcdUnavailableError(f"run {self._keys.run_id!r}: worker {self._worker_id} is not registered for the moment")
