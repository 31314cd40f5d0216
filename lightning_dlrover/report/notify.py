"""Notify people of what happens to a job: one JSON document for each event, posted to a URL or passed to a command.

`dlrover run`, `dlrover pool run` and `dlrover colocate` share this module. An event passes through four states:

    recorded   it is in the history: in etcd, or in the journal of a queue. Written by whoever decides or observes it.
    queued     handed to the thread of each destination. Only the process that holds the job, pool or queue does this.
    settled    its destination has it, or was tried until `TOTAL_S`.
    passed     the cursor of the destination, which is stored with the history, is at its position or behind it.

A successor continues behind the cursors. So an event whose process was killed before it could move a cursor is sent there once
more, with the same id. Nobody waits for a destination, but the end of the process does for `END_S`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from lightning_dlrover._version import __version__
from lightning_dlrover.files import atomic_write
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdError, KeyValue
from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.records import EventRecord, encode

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightning_dlrover.rdzv.etcd.mirror import Mirror

log = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the document. A field may be added without a new one."""

ATTEMPTS = 5
ATTEMPT_S = 10.0  # seconds for one attempt, name server and TLS included
TOTAL_S = 60.0  # seconds for all attempts of one notification
FIRST_PAUSE_S = 0.5  # seconds between the first two attempts; doubled after each
MAX_QUEUED = 200
"""Notifications that wait for one destination. The oldest are dropped first: a destination that hangs must not take memory."""

MAX_TEXTS = 5
"""Lost workers that a text describes."""

END_S = 3.0
"""Seconds for which the end of a process waits for its last notifications."""

FINAL_CODES = {code for code in range(300, 500) if code not in (408, 425, 429)}
"""Answers of a server that a repetition does not change."""

Kind = Literal[
    "started", "grown", "shrunk", "replaced", "lost", "refused", "hung", "short_of_memory", "finished", "failed", "stopped"
]
Source = Literal["run", "pool", "colocate"]


@dataclass(frozen=True)
class Notification:
    """One event, as the document has it. Fields that are None are left out."""

    id: str  # the same whenever the event is sent again
    event: Kind
    source: Source  # the command that sends it
    text: str  # one sentence with the job's name
    at: float  # seconds since the epoch
    job: str = ""
    pool: str | None = None
    workers: int | None = None  # after the event
    workers_before: int | None = None
    lost: list[str] | None = None  # ids of lost workers
    round: int | None = None
    reason: str | None = None
    exit_code: int | None = None  # of `dlrover run`

    def document(self) -> bytes:
        """Return the document in UTF-8."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        at = datetime.datetime.fromtimestamp(self.at, datetime.timezone.utc)
        time_ = at.isoformat(timespec="milliseconds")
        return json.dumps({"schema": SCHEMA, **fields, "time": time_, "host": socket.gethostname()}).encode()


# --- destinations -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Destination:
    """Where notifications go. Only `label` may be shown: a URL and arguments of a command often hold a secret."""

    label: str
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.label


def destination(text: str) -> Destination:
    """Return the destination of `--notify`: a URL, a command, or `@FILE` with one of them in its first line.

    Raises:
        ValueError: it cannot be used. The message holds nothing of the text but a file's or program's name.
    """
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"file {text[1:]!r} cannot be read: {reason}") from None
        if not lines or not lines[0].strip() or lines[0].startswith("@"):
            raise ValueError(f"file {text[1:]!r} has no URL or command in its first line")
        return destination(lines[0].strip())
    if text.lower().startswith(("http://", "https://")):
        return _url(text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"the command cannot be split into words: {error}") from None
    if not words:
        raise ValueError("it is empty, perhaps an unset variable; give a URL or a command")
    if "://" in words[0]:
        raise ValueError(f"{words[0].partition(':')[0]}:// is no scheme that can be posted to; give http:// or https://")
    if shutil.which(words[0]) is None:
        raise ValueError(f"there is no program {words[0]!r}; a command is run without a shell, or use sh -c '...'")
    return Destination(f"command {os.path.basename(words[0])}", command=tuple(words))


def _url(text: str) -> Destination:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("the URL's host or port is malformed") from None
    if not host or any(character.isspace() or ord(character) < 32 or ord(character) > 126 for character in text):
        raise ValueError("the URL has no host, or holds characters that must be percent-encoded")
    headers = {}
    if parts.username is not None:
        import base64

        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    place = parts.netloc.rpartition("@")[2]
    shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}"
    return Destination(shown, urlunsplit((parts.scheme, place, parts.path or "/", parts.query, "")), headers)


class _AttemptError(Exception):
    """An attempt failed. The message names no secret.

    Args:
        is_final: a repetition would fail, too.
        pause_s: seconds until the next attempt, as the server demands.
    """

    def __init__(self, text: str, is_final: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.is_final, self.pause_s = is_final, pause_s


def _post(to: Destination, notification: Notification) -> None:
    """Post a document. Redirections are not followed: a POST would become a GET."""
    import urllib.error
    import urllib.request

    class NoRedirection(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": f"lightning-dlrover/{__version__}", **to.headers}
    headers["Idempotency-Key"] = notification.id
    try:
        request = urllib.request.Request(to.url, notification.document(), headers, method="POST")
        with urllib.request.build_opener(NoRedirection).open(request, timeout=ATTEMPT_S):
            return
    except urllib.error.HTTPError as error:
        error.close()
        pause_s = 0.0
        with contextlib.suppress(ValueError):  # it may be a date
            pause_s = min(TOTAL_S / 2, float(error.headers.get("Retry-After") or 0.0))
        raise _AttemptError(f"HTTP {error.code}", error.code in FINAL_CODES, max(0.0, pause_s)) from None
    except Exception as error:  # urllib and http.client raise many types, and their messages may quote the URL
        cause = getattr(error, "reason", error)
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else type(cause).__name__
        raise _AttemptError(text) from None


def _within(timeout_s: float, attempt: Callable[[], None]) -> None:
    """Call `attempt` in a thread, and give it up after `timeout_s`: neither a name server nor a slow answer has a deadline."""
    ended: list[_AttemptError | None] = []

    def call() -> None:
        try:
            attempt()
            ended.append(None)
        except _AttemptError as error:
            ended.append(error)

    thread = threading.Thread(target=call, name="notify-post", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not ended:
        raise _AttemptError("no answer in time")
    if ended[0] is not None:
        raise ended[0]


class _Line:
    """The notifications for one destination, sent in order by a thread of its own."""

    def __init__(self, to: Destination, begin: int, settled: Callable[[], None]) -> None:
        self.to = to
        self._begin = begin
        self.num_dropped = 0  # given up, or never tried
        self.problem = ""  # of the newest failed attempt
        self._newest = begin  # position of the newest notification that was put
        self._settled = settled
        self._queue: deque[tuple[int, Notification]] = deque()
        self._changed = threading.Condition()
        self._ends_at = float("inf")
        self._is_abandoned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._thread.start()

    def put(self, position: int, notification: Notification, is_last: bool) -> None:
        if position <= self._begin and not is_last:
            return  # a former process has sent it
        with self._changed:
            self._queue.append((position, notification))
            self._newest = position
            if len(self._queue) > MAX_QUEUED:
                # Not the one that is being sent, which is the first.
                del self._queue[1]
                self.num_dropped += 1
            self._changed.notify_all()

    def passed(self) -> int:
        """Return the position up to which all notifications are settled."""
        with self._changed:
            return self._queue[0][0] - 1 if self._queue else self._newest

    def end(self, deadline: float) -> None:
        """Let the thread end once its queue is empty, or at the deadline, in seconds of the monotonic clock."""
        with self._changed:
            self._ends_at = deadline
            self._changed.notify_all()

    def join(self, is_hurried: Callable[[], bool]) -> None:
        while self._thread.is_alive() and time.monotonic() < self._ends_at and not is_hurried():
            self._thread.join(0.05)
        with self._changed:
            self._ends_at = 0.0
            self._is_abandoned = True
            left, self._queue = len(self._queue), deque()
            self.num_dropped += left
            self._changed.notify_all()
        process = self._process
        if process is not None and process.poll() is None:
            _kill(process)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_ending():
                    self._changed.wait()
                if not self._queue or time.monotonic() >= self._ends_at:
                    return
                position, notification = self._queue[0]
            if not self._deliver(notification):
                self.num_dropped += 1
            with self._changed:
                if self._is_abandoned:
                    return  # what was not tried is left to the next process
                if self._queue and self._queue[0][0] == position:
                    self._queue.popleft()
            self._settled()

    def _deliver(self, notification: Notification) -> bool:
        """Try until the destination has it, or the limits are reached."""
        deadline, pause_s = time.monotonic() + TOTAL_S, FIRST_PAUSE_S
        for number in range(1, ATTEMPTS + 1):
            left_s = min(deadline, self._ends_at) - time.monotonic()
            try:
                if left_s <= 0:
                    break
                if self.to.command:
                    self._command(notification, min(ATTEMPT_S, left_s))
                else:
                    _within(min(ATTEMPT_S, left_s), lambda: _post(self.to, notification))
                return True
            except _AttemptError as error:
                self.problem = str(error)
                pause = max(pause_s, error.pause_s)
                if error.is_final or number == ATTEMPTS or time.monotonic() + pause > deadline:
                    break
                with self._changed:
                    if self._changed.wait_for(self._is_ending, pause):
                        self._changed.wait(FIRST_PAUSE_S)  # shorter pauses from now on: the process waits
                pause_s *= 2
        if not self._is_ending():
            text = "the notification %r to %s was given up: %s; later ones are tried"
            log.warning(text, notification.event, self.to, self.problem)
        return False

    def _is_ending(self) -> bool:
        return self._ends_at < float("inf")

    def _command(self, notification: Notification, timeout_s: float) -> None:
        """Run the command with the document as its input. Its output is not shown, as it may hold secrets."""
        try:
            self._process = process = subprocess.Popen(
                self.to.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise _AttemptError(f"it cannot be started: {error.strerror}") from None
        try:
            process.communicate(notification.document() + b"\n", timeout_s)
        except subprocess.TimeoutExpired:
            raise _AttemptError("it did not end in time") from None
        finally:
            if process.poll() is None:
                _kill(process)
            self._process = None
        if process.returncode:
            raise _AttemptError(f"exit code {process.returncode}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with the processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


# --- delivery -----------------------------------------------------------------------------------------------------------------


class Cursors(Protocol):
    """The position in a history up to which the notifications for each destination are settled, by its number and label."""

    def read(self) -> dict[str, int] | None:
        """Return the positions; None if none were written."""
        ...

    def write(self, positions: Mapping[str, int]) -> None:
        """Store the positions; a failure is not reported, and only leads to repetitions."""


class Notifier:
    """Sends notifications to destinations in the background, and moves their cursors behind those that are settled.

    Use as a context manager. Leaving it waits up to `END_S` for the last ones, and reports those that were not delivered.

    Args:
        newest: position of the history's newest event. Where a history began without notifications, only later ones are sent.
        hurry: when set, the end waits for nothing.

    Attributes:
        begin: smallest position of a cursor at the start.
    """

    def __init__(
        self, destinations: Sequence[Destination], cursors: Cursors, newest: int = 0, hurry: threading.Event | None = None
    ) -> None:
        self._cursors = cursors
        self._hurry = hurry or threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False
        names = [f"{number} {to.label}" for number, to in enumerate(destinations, 1)]
        former = {name: min(position, newest) for name, position in (cursors.read() or {}).items()}
        begins = {name: former.get(name, max(former.values(), default=newest)) for name in names}
        self.begin = min(begins.values())
        self._written = begins
        if begins != former:
            cursors.write(begins)
        self._lines = {name: _Line(to, begins[name], self._move) for name, to in zip(names, destinations, strict=True)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, position: int, notification: Notification, is_last: bool = False) -> None:
        """Queue a notification. Returns at once.

        Args:
            position: of its event in the history; never below that of the one before.
            is_last: it has no event of its own, and `position` is that of the newest.
        """
        for line in self._lines.values():
            line.put(position, notification, is_last)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + END_S
        for line in self._lines.values():
            line.end(deadline)
        for line in self._lines.values():
            line.join(self._hurry.is_set)
            if line.num_dropped:
                what = counted(line.num_dropped, "notification")
                log.warning("%s to %s not delivered: %s", what, line.to, line.problem or "no answer in time")

    def _move(self) -> None:
        """Move the cursors."""
        with self._lock:  # also orders the writes
            positions = {name: max(self._written[name], line.passed()) for name, line in self._lines.items()}
            if positions != self._written:
                self._cursors.write(positions)
                self._written = positions


@dataclass(frozen=True)
class NotifiedRecord:
    """The cursors of a job or a pool in etcd, written by the process that sends its notifications."""

    revisions: dict[str, int]  # of the newest event that is settled, by the destination's number and label


class EtcdCursors:
    """Cursors in etcd, whose positions are revisions: events of workers with other clocks have an order there, too."""

    def __init__(self, client: EtcdClient, key: str) -> None:
        self._client, self._key = client, key

    def read(self) -> dict[str, int] | None:
        with contextlib.suppress(EtcdError):
            record = readable(NotifiedRecord, self._client.get(self._key))
            return record.revisions if record is not None else None
        return None

    def write(self, positions: Mapping[str, int]) -> None:
        with contextlib.suppress(EtcdError):
            self._client.put(self._key, encode(NotifiedRecord(dict(positions))))


class FileCursors:
    """Cursors in a file, whose positions are numbers of records."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, int] | None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return {str(name): int(position) for name, position in json.loads(self._path.read_bytes()).items()}
        return None

    def write(self, positions: Mapping[str, int]) -> None:
        with contextlib.suppress(OSError):
            atomic_write(self._path, json.dumps(positions) + "\n")


class EtcdNotifications:
    """Sends the notifications of a history in etcd: of a job, or of a pool. Use as a context manager.

    Args:
        events: folder of the history's lines.
        cursors_key: key of the cursors, in the same etcd.
        made: returns the notification for the lines that were written at one revision; None if nobody needs one.

    Raises:
        EtcdError: etcd does not answer.
    """

    def __init__(
        self,
        client: EtcdClient,
        events: str,
        cursors_key: str,
        destinations: Sequence[Destination],
        made: Callable[[str, list[EventRecord]], Notification | None],
        hurry: threading.Event | None = None,
    ) -> None:
        self._client, self._events, self._made = client, events, made
        found = client.get_prefix(events)[1]
        newest = max((entry.mod_revision for entry in found), default=0)
        self._seen = self._looked_at = 0
        self.notifier = Notifier(destinations, EtcdCursors(client, cursors_key), newest, hurry)
        self.look(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self, entries: Iterable[KeyValue]) -> None:
        """Queue the notifications of the lines that are new among `entries`. Returns at once."""
        new = sorted((e for e in entries if e.mod_revision > self._seen), key=lambda e: (e.mod_revision, e.key))
        for revision, group in groupby(new, lambda entry: entry.mod_revision):
            lines = [*group]
            records = [record for entry in lines if (record := readable(EventRecord, entry)) is not None]
            found = self._made(lines[0].key.removeprefix(self._events), records) if records else None
            if found is not None:
                self.notifier.put(revision, found)
            self._seen = revision

    def look_if_new(self, events: Mirror) -> None:
        """Queue the notifications of new lines of a mirror of the history. Returns at once."""
        if (revision := events.revision) != self._looked_at:
            self._looked_at = revision
            self.look(events.snapshot().values())

    def look_once_more(self) -> None:
        """Read the newest lines from etcd itself: a watch may lag behind."""
        with contextlib.suppress(EtcdError):
            self.look(self._client.get_prefix(self._events, self._seen)[1])

    def put_last(self, notification: Notification) -> None:
        """Queue a notification that has no line in the history."""
        self.notifier.put(self._seen, notification, is_last=True)

    def close(self) -> None:
        self.notifier.close()


# --- the events of a job ------------------------------------------------------------------------------------------------------

_OF_ROUNDS: dict[str, Kind] = {"start": "started", "grow": "grown", "shrink": "shrunk", "replace": "replaced", "loss": "lost"}

_OF_EVENTS: tuple[tuple[type[kinds.Event], Kind], ...] = (
    (kinds.GrowthFailed, "refused"),
    (kinds.NodesHeldUp, "refused"),
    (kinds.StateClosed, "refused"),
    (kinds.HangFound, "hung"),
    (kinds.MemoryShort, "short_of_memory"),
    (kinds.NodeMemoryShort, "short_of_memory"),
)


class JobEvents:
    """Turns the lines of a job's history into notifications. Lines of a round and its losses have one revision."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._num_workers: int | None = None

    def __call__(self, name: str, records: list[EventRecord]) -> Notification | None:
        found = self._of_round(records) or self._of_others(records)
        return dataclasses.replace(found, id=f"{self._run_id}/{name}") if found is not None else None

    def _of_round(self, records: list[EventRecord]) -> Notification | None:
        losses = [*kinds.events_of(records, kinds.WorkerLost)]
        for record, formed in kinds.events_of(records, kinds.RoundFormed):
            before, after = self._num_workers, formed.num_members or len(formed.members)
            self._num_workers = after
            event = _OF_ROUNDS.get(formed.kind)
            if event is None or (event == "lost" and not losses):
                continue
            if event == "lost" and formed.cause.get("joined") and before == after:
                event = "replaced"
            texts = [each.text for each, _ in losses[:MAX_TEXTS]] + [record.text]
            return Notification(
                "",
                event,
                "run",
                f"job {self._run_id} {WORDS[event]}: {'; '.join(texts)}",
                record.at,
                self._run_id,
                workers=after,
                workers_before=before,
                lost=[loss.worker_id for _, loss in losses] or None,
                round=formed.number,
                reason=formed.reason,
            )
        return None

    def _of_others(self, records: list[EventRecord]) -> Notification | None:
        for kind, event in _OF_EVENTS:
            for record, _ in kinds.events_of(records, kind):
                text = f"job {self._run_id} {WORDS[event]}: {record.text}"
                return Notification("", event, "run", text, record.at, self._run_id, reason=record.text)
        return None


WORDS: dict[str, str] = {
    "started": "has started",
    "grown": "has grown",
    "shrunk": "has shrunk",
    "replaced": "has replaced a worker",
    "lost": "has lost workers",
    "refused": "does not get what it asked for",
    "hung": "does not make progress",
    "short_of_memory": "is short of memory",
    "finished": "has finished",
    "failed": "has failed",
    "stopped": "was stopped",
}


def ended(run_id: str, event: Kind, reason: str, exit_code: int | None = None) -> Notification:
    """Return the notification of the end of a `dlrover run`."""
    id_ = f"{run_id}/{time.time_ns():020d}-end"
    text = f"job {run_id} {WORDS[event]}" + (f": {reason}" if reason and event != "finished" else "")
    return Notification(id_, event, "run", text, time.time(), run_id, reason=reason or None, exit_code=exit_code)
