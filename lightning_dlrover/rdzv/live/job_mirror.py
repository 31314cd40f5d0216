"""All records of a job, followed by its coordinator, and records of single workers, read when they are needed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdFullError, EtcdUnavailableError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import Get, KeyValue
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.records import Keys, WorkerRecord
from lightning_dlrover.rdzv.live.rounds import JobView
from lightning_dlrover.rdzv.live.view import Decoder

__all__ = ["JobMirror", "WorkerRecords"]

log = logging.getLogger(__name__)

T = TypeVar("T")

GETS_PER_REQUEST = 100
"""Records read in one transaction: etcd refuses more than 128 operations."""

MAX_KNOWN = 2000
"""Workers of which one worker remembers the records, in addition to those that it asks for."""

ABSENT_S = 1.0
"""Seconds for which a worker without a record is not asked for again. It may register again after an outage of etcd."""


class JobMirror:
    """A mirror of all records, open while this worker coordinates the job. For use by one thread.

    Args:
        decoder: also decodes the shared records while the mirror is closed, and so knows their last readable versions.
    """

    def __init__(self, client: EtcdClient, keys: Keys, on_change: Callable[[], None], decoder: Decoder) -> None:
        self._client = client
        self._keys = keys
        self._on_change = on_change
        self._mirror: Mirror | None = None
        self._decoder = decoder
        self._view = JobView()
        self._view_since = 0.0

    def look(self) -> tuple[Mapping[str, KeyValue], JobView, float]:
        """Return all records at one revision, the view that they give, and the seconds for which it has not changed.

        Opens the mirror if it is closed.

        Raises:
            EtcdError: the records cannot be read.
        """
        if self._mirror is None:
            self._mirror = Mirror(self._client, self._keys.live, self._on_change)
            self._view = JobView()
        entries = self._mirror.snapshot()
        view = self._decoder.view(entries)
        if view is not self._view and view != self._view:
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
    """Records of single workers. What does not change during a worker's life is read once: its address, host and agent.

    Args:
        mirror: knows whether etcd answers. If not, nothing waits for it.
    """

    def __init__(self, client: EtcdClient, keys: Keys, mirror: Mirror) -> None:
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._known: dict[str, KeyValue] = {}
        self._decoded: dict[str, tuple[KeyValue, WorkerRecord | None]] = {}  # each entry once, as probes need them often
        self._absent: dict[str, float] = {}  # workers without a record, and when this was found

    def entries(self, worker_ids: Iterable[str]) -> dict[str, KeyValue]:
        """Return entries of workers that were registered when they were read. Their state may be out of date.

        While etcd does not answer, these are the workers that were read before.
        """
        wanted, now = list(worker_ids), time.monotonic()
        unknown = [w for w in wanted if w not in self._known and now - self._absent.get(w, -ABSENT_S) >= ABSENT_S]
        if len(self._known) + len(self._absent) > MAX_KNOWN + len(wanted):  # most of them have left
            for forgotten in (self._known, self._decoded, self._absent):
                forgotten.clear()
            unknown = wanted
        if unknown and self._mirror.healthy:
            try:
                found = self.present(unknown)
            except EtcdUnavailableError as error:
                log.debug("could not read the records of workers: %s", error)
            else:
                self._absent.update({worker: now for worker in unknown if worker not in found})
        # Several threads read and forget records.
        entries = ((worker, self._known.get(worker)) for worker in wanted)
        return {worker: entry for worker, entry in entries if entry is not None}

    def present(self, worker_ids: Iterable[str]) -> dict[str, KeyValue]:
        """Read which workers are registered now, and return their entries.

        Raises:
            EtcdError: etcd does not answer.
        """
        wanted = list(worker_ids)
        found: dict[str, KeyValue] = {}
        for first in range(0, len(wanted), GETS_PER_REQUEST):
            values = self._read([self._keys.workers + worker for worker in wanted[first : first + GETS_PER_REQUEST]])
            found |= {entry.key.removeprefix(self._keys.workers): entry for entry in values}
        self._known.update(found)
        for worker in wanted:
            if worker not in found:
                self._known.pop(worker, None)
        return found

    def _read(self, keys: list[str]) -> list[KeyValue]:
        if len(keys) > 1:
            with contextlib.suppress(EtcdFullError):  # a full etcd takes no transactions, not even of reads alone
                return self._client.txn([], [Get(key) for key in keys]).values
        return [entry for key in keys if (entry := self._client.get(key)) is not None]

    def of(self, worker_ids: Iterable[str]) -> dict[str, WorkerRecord]:
        """Return what is constant in the records of `entries` that can be read."""
        records = {worker: self._decode(worker, entry) for worker, entry in self.entries(worker_ids).items()}
        return {worker: record for worker, record in records.items() if record is not None}

    def _decode(self, worker_id: str, entry: KeyValue) -> WorkerRecord | None:
        decoded = self._decoded.get(worker_id)
        if decoded is None or decoded[0] is not entry:
            decoded = self._decoded[worker_id] = (entry, readable(WorkerRecord, entry))
        return decoded[1]

    def forget(self, worker_id: str) -> None:
        """Read a worker's record afresh when it is needed again."""
        self._known.pop(worker_id, None)
        self._decoded.pop(worker_id, None)
