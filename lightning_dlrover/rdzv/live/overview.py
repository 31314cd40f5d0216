"""All records of a job, followed by its convener, and records of single workers, read when they are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import Get, KeyValue
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.records import Keys, RecordError, WorkerRecord
from lightning_dlrover.rdzv.live.rounds import View
from lightning_dlrover.rdzv.live.view import Decoder

__all__ = ["Overview", "WorkerRecords"]

T = TypeVar("T")

GETS_PER_REQUEST = 100
"""Records read in one transaction: etcd refuses more than 128 operations."""

ABSENT_S = 1.0
"""Seconds for which a worker without a record is not asked for again. It may register again after an outage of etcd."""


class Overview:
    """A mirror of all records, open while this worker convenes the job. For use by one thread."""

    def __init__(
        self, client: EtcdClient, keys: Keys, on_change: Callable[[], None], bad: Callable[[str, RecordError], None]
    ) -> None:
        self._client = client
        self._keys = keys
        self._on_change = on_change
        self._bad = bad
        self._mirror: Mirror | None = None
        self._decoder = Decoder(keys, bad)
        self._view = View()
        self._view_since = 0.0

    def look(self) -> tuple[dict[str, KeyValue], View, float]:
        """Return all records at one revision, the view that they give, and the seconds for which it has not changed.

        Opens the mirror if it is closed.

        Raises:
            EtcdError: the records cannot be read.
        """
        if self._mirror is None:
            self._mirror = Mirror(self._client, self._keys.live, self._on_change)
            self._decoder, self._view = Decoder(self._keys, self._bad), View()
        entries = self._mirror.snapshot()
        view = self._decoder.view(entries)
        if view != self._view:
            self._view, self._view_since = view, time.monotonic()
        return entries, self._view, time.monotonic() - self._view_since

    @property
    def is_healthy(self) -> bool:
        """False while etcd cannot be reached, so that the records may be out of date."""
        return self._mirror is None or self._mirror.healthy

    def wait_for(self, found: Callable[[dict[str, KeyValue]], T | None], timeout_s: float) -> T:
        """See `Mirror.wait_for`."""
        assert self._mirror is not None
        return self._mirror.wait_for(found, timeout_s)

    def close(self, timeout_s: float = 0.0) -> None:
        """Stop following the records. `look` starts again."""
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            mirror.close(timeout_s)


class WorkerRecords:
    """Records of single workers. What does not change during a worker's life is read once: its address, host and agent."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._known: dict[str, KeyValue] = {}
        self._absent: dict[str, float] = {}  # workers without a record, and when this was found

    def entries(self, worker_ids: Iterable[str]) -> dict[str, KeyValue]:
        """Return entries of the workers that are, or were a moment ago, registered. Their state may be out of date.

        Raises:
            EtcdError: one of them was not read before, and etcd does not answer.
        """
        wanted, now = list(worker_ids), time.monotonic()
        unknown = [w for w in wanted if w not in self._known and now - self._absent.get(w, -ABSENT_S) >= ABSENT_S]
        if unknown:
            found = self.present(unknown)
            self._absent.update({worker: now for worker in unknown if worker not in found})
        return {worker: self._known[worker] for worker in wanted if worker in self._known}

    def present(self, worker_ids: Iterable[str]) -> dict[str, KeyValue]:
        """Read which workers are registered now, and return their entries."""
        wanted = list(worker_ids)
        found: dict[str, KeyValue] = {}
        for first in range(0, len(wanted), GETS_PER_REQUEST):
            gets = [Get(self._keys.workers + worker) for worker in wanted[first : first + GETS_PER_REQUEST]]
            values = self._client.txn([], gets).values
            found |= {entry.key.removeprefix(self._keys.workers): entry for entry in values}
        self._known.update(found)
        for worker in wanted:
            if worker not in found:
                self._known.pop(worker, None)
        return found

    def of(self, worker_ids: Iterable[str]) -> dict[str, WorkerRecord]:
        """Return the records of `entries` that can be read."""
        records = {worker: readable(WorkerRecord, entry) for worker, entry in self.entries(worker_ids).items()}
        return {worker: record for worker, record in records.items() if record is not None}

    def forget(self, worker_id: str) -> None:
        """Read a worker's record afresh when it is needed again."""
        self._known.pop(worker_id, None)
