"""Queue for lines of the job's history and results of searches until etcd accepts them, however long it is unavailable."""

from __future__ import annotations

import threading
from collections import deque

from lightning_dlrover.rdzv.job.journal import MAX_EVENTS, Journal
from lightning_dlrover.rdzv.job.records import EventRecord

__all__ = ["Outbox"]


class Outbox:
    """Queue one worker's lines for the job's history, and write them in order."""

    def __init__(self, journal: Journal, worker_id: str) -> None:
        self._journal = journal
        self._worker_id = worker_id
        self._events: deque[EventRecord] = deque()
        self._results: deque[tuple[str, bytes]] = deque()  # results of searches that etcd does not hold yet
        self._lock = threading.Lock()

    def add(self, event: EventRecord) -> None:
        """Queue one line for the job's history; never blocks."""
        if len(self._events) >= MAX_EVENTS:
            return  # after such a long outage of etcd the older lines matter more
        self._events.append(event)

    def add_result(self, number: int, payload: bytes) -> None:
        self._results.append((f"{self._journal.keys.searches}{number}", payload))

    def write(self) -> None:
        """Write the queued lines and results; those that fail stay in the queue."""
        # Two threads write: the background thread, and the one that flushes before its process ends.
        with self._lock:
            while self._results:
                self._journal.client.put(*self._results[0])
                self._results.popleft()
            while self._events:
                self._journal.append(self._events[0], self._worker_id)
                self._events.popleft()
