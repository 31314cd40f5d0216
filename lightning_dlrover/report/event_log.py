"""Read the events of a job, and keep them in its run folder."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.job.events import FitFinished, JobFailed, RoundFormed, WorkerFailed, events_of
from lightning_dlrover.rdzv.job.journal import read_events
from lightning_dlrover.rdzv.job.records import EventRecord, RecordError, decode, encode

__all__ = [
    "CANCELLED",
    "EVENTS_FILE",
    "EventLog",
    "JobEndedError",
    "JobNotFoundError",
    "ended_how",
    "first_traceback",
    "last_events",
    "read_event_file",
]

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"

CANCELLED = "cancelled by `dlrover cancel`"
"""Reason of a job's end, as `dlrover cancel` gives it."""


class JobNotFoundError(RuntimeError):
    """No job of this name was found in the given place."""


class JobEndedError(JobNotFoundError):
    """The job has ended, and its etcd with it; its run folder has its events."""


def read_event_file(file: Path) -> list[EventRecord]:
    """Read the events of a run folder.

    Raises:
        JobNotFoundError: there is no such file.
    """
    if not file.is_file():
        raise JobNotFoundError(f"{file} does not exist: neither etcd nor the run folder knows this job")
    return _decoded(file.read_bytes().splitlines(), file)


def _decoded(lines: Sequence[bytes], file: Path) -> list[EventRecord]:
    events = []
    for line in lines:
        with contextlib.suppress(RecordError):  # the last line of a killed job may be incomplete
            events.append(decode(EventRecord, line, str(file)))
    return events


def ended_how(events: Sequence[EventRecord]) -> str:
    """Return how a job has ended, by its events: finished, failed, cancelled or interrupted. Empty: they hold no end.

    The events of a job that runs may hold one, too: a worker that stops is replaced.
    """
    if failed := [record.text for record, _ in events_of(events, JobFailed)]:
        return "cancelled" if CANCELLED in failed[-1] else "failed"
    if any(events_of(events, FitFinished)):
        return "finished"
    kinds = [event.kind for _, event in events_of(events, RoundFormed)]
    return "interrupted" if kinds[-1:] == ["stop"] else ""


def last_events(file: Path, num_bytes: int = 1 << 17) -> list[EventRecord]:
    """Read the newest events of a run folder, from the last bytes of its file; none if it cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - num_bytes))
            lines = stream.read().splitlines()
    except OSError:
        return []
    return _decoded(lines, file)


def first_traceback(file: Path) -> str | None:
    """Return the traceback of the first worker in the newest group of failures, as recorded in the events."""
    events = read_event_file(file) if file.exists() else []
    newest_round = max((record.at for record, _ in events_of(events, RoundFormed)), default=0.0)
    failures = [(record.at, failed.traceback) for record, failed in events_of(events, WorkerFailed) if failed.traceback]
    failures.sort(key=lambda failure: failure[0])
    recent = [failure for failure in failures if failure[0] >= newest_round] or failures[-1:]
    return recent[0][1].rstrip() if recent else None


@dataclass
class EventLog:
    """Copy a job's events from etcd into its run folder, each once.

    The file is the only place with all of them, because etcd keeps a limited number. Events that an earlier process has copied
    there stay, and are not reported as new.
    """

    mirror: Mirror
    file: Path
    _seen: set[str] = field(default_factory=set)
    _revision: int = -1
    _has_looked: bool = False
    _began: bool = False
    _unwritten: bytes = b""
    _failed: bool = False

    def new(self) -> list[EventRecord]:
        """Return events since the last call, or since an earlier process wrote the file.

        They are in the file on return unless it cannot be written. A later call repeats failed writes: a full disk ends no job.
        """
        if self.mirror.revision == self._revision:
            self._write()
            return []
        self._revision = self.mirror.revision
        fresh = [entry for key, entry in self.mirror.snapshot().items() if key not in self._seen]
        self._seen.update(entry.key for entry in fresh)
        events = self._without_former(read_events(fresh))
        self._unwritten += b"".join(encode(event) + b"\n" for event in events)
        self._write()
        return events

    def _without_former(self, events: list[EventRecord]) -> list[EventRecord]:
        """Return the events that no earlier process has copied. The file is read once."""
        if self._has_looked:
            return events
        self._has_looked = True
        try:
            content = self.file.read_bytes()
        except OSError:  # missing: all events are new
            return events
        if content and not content.endswith(b"\n"):
            self._unwritten = b"\n"  # ends the line that the earlier process left incomplete
        former = set(content.splitlines())
        return [event for event in events if encode(event) not in former]

    def _write(self) -> None:
        if self._began and not self._unwritten:
            return
        try:
            # Unbuffered, so that the number of bytes a full disk has accepted is exact.
            with self.file.open("ab", buffering=0) as stream:
                self._began = True
                while self._unwritten:
                    self._unwritten = self._unwritten[stream.write(self._unwritten) :]
            self._failed = False
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            log.warning("events are missing in %s for now, the job goes on: %s", self.file, error.strerror)
        self._failed = True

    def complete(self, client: EtcdClient) -> None:
        """Complete the file from etcd. The watch may lag behind a job's last events.

        Workers write their events independently, so some arrive late. Here they are sorted by time.
        """
        try:
            last = [entry for entry in client.get_prefix(self.mirror.prefix)[1] if entry.key not in self._seen]
        except EtcdError as error:
            log.warning("the last events may be missing in %s: %s", self.file, error)
            last = []
        self._seen.update(entry.key for entry in last)
        events = self._without_former(read_events(last))
        self._unwritten += b"".join(encode(event) + b"\n" for event in events)
        self._write()
        if self._unwritten:
            return
        unfinished = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        try:
            events = sorted(read_event_file(self.file), key=lambda event: event.at)
            unfinished.write_bytes(b"".join(encode(event) + b"\n" for event in events))
            unfinished.replace(self.file)
        except JobNotFoundError as error:  # deleted meanwhile: the job's end must not depend on the file
            log.warning("the events of the job are not kept: %s", error)
        except OSError as error:
            self._complain(error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
