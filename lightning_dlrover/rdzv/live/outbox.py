"""Queue for lines of the job's history and results of searches until etcd accepts them, however long it is unavailable."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, encode

__all__ = ["MAX_EVENTS", "TRIM_EVERY", "Outbox"]

MAX_EVENTS = 4000
"""Maximum number of events kept per job; the oldest are removed first."""

TRIM_EVERY = 50
"""Events that a worker writes between two removals of the oldest ones. It also trims with its first event, because in some jobs
each worker writes only a few."""


class Outbox:
    """Queue one worker's lines for the job's history, and write them in order."""

    def __init__(self, client: EtcdClient, keys: Keys, worker_id: str) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._events: deque[EventRecord] = deque()
        self._results: deque[tuple[str, bytes]] = deque()  # results of searches that etcd does not hold yet
        self._lock = threading.Lock()
        self._num_events_written = 0

    def add_event(self, kind: str, text: str, data: dict[str, Any] | None = None) -> None:
        """Queue one line for the job's history; never blocks."""
        if len(self._events) >= MAX_EVENTS:
            return  # after such a long outage of etcd the older lines matter more
        self._events.append(EventRecord(kind=kind, at=time.time(), text=text, data=data or {}))

    def add_result(self, number: int, payload: bytes) -> None:
        self._results.append((f"{self._keys.searches}{number}", payload))

    def write(self) -> None:
        """Write the queued lines and results; those that fail stay in the queue."""
        # Two threads write: the background thread, and the one that flushes before its process ends.
        with self._lock:
            while self._results:
                self._client.put(*self._results[0])
                self._results.popleft()
            while self._events:
                self._client.put(f"{self._keys.events}{time.time_ns():020d}-{self._worker_id}", encode(self._events[0]))
                self._events.popleft()
                self._num_events_written += 1
                if self._num_events_written % TRIM_EVERY == 1:
                    self._client.trim_prefix(self._keys.events, MAX_EVENTS)
