"""Queue for writes that no worker waits for, until etcd accepts them, however long it is unavailable or full."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from lightning_dlrover.rdzv.etcd.errors import EtcdError, EtcdUnavailableError
from lightning_dlrover.rdzv.etcd.operations import Put
from lightning_dlrover.rdzv.job.journal import MAX_EVENTS, Journal
from lightning_dlrover.rdzv.job.records import EventRecord, RecordError
from lightning_dlrover.rdzv.live.member import MembershipError

__all__ = ["BATCH", "Outbox"]

log = logging.getLogger(__name__)

BATCH = 100
"""Lines in one transaction. etcd allows 128 operations (--max-txn-ops)."""

MAX_BYTES = 512 * 1024
"""Bytes of lines in one transaction, unless it is a single line. etcd takes requests of 1.5 MiB (--max-request-bytes)."""


class Outbox:
    """Queue one worker's lines for the job's history and its changes of other records, and write them in order."""

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
            what `write` raises, except `EtcdUnavailableError`.
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
                except (EtcdError, RecordError, MembershipError) as error:  # another attempt would fail alike
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
