"""The output of pods, copied into local files by background threads."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from lightning_dlrover.components.targets.kubernetes_api import ApiError, KubernetesApi, LineStream
from lightning_dlrover.files import atomic_write

log = logging.getLogger(__name__)

SET_BACK_S = 5
"""Seconds that a host's clock may be set back without a loss of output. Each read overlaps the previous one by this much."""

READ_FILE = ".read"
"""Name of the file with the position that a node's output has been copied up to."""

_READS_PER_S, _FIRST_READS = 3.0, 30.0
"""Mean rate of requests for streams, all pods together, and the number at once after a pause."""

_MAX_UNWRITTEN = 16 * 1024 * 1024
"""Bytes of one pod's output to hold while a disk accepts none. The rest waits in the pod."""

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d):(\d\d)(?:\.(\d{1,9})\d*)?(?:Z|([+-]\d\d:\d\d))")


def _instant(stamp: str) -> int | str:
    """Return a timestamp in nanoseconds since the epoch, whatever its time zone; one of another form unchanged."""
    match = _TIME.fullmatch(stamp)
    try:
        minute = datetime.fromisoformat(f"{match[1]}{match[4] or '+00:00'}") if match else None
    except ValueError:
        minute = None
    if match is None or minute is None:
        return stamp
    return (int(minute.timestamp()) + int(match[2])) * 10**9 + int((match[3] or "0").ljust(9, "0"))


def _shortly_before(stamp: str) -> str:
    """Return a time, in whole seconds of UTC, before that of a line: a host's clock may be set back for the lines after it."""
    at = _instant(stamp)
    if isinstance(at, str):
        return stamp
    return datetime.fromtimestamp(at // 10**9 - SET_BACK_S, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class _PodLog:
    """One pod's output, and the position up to which it was received: the newest line's time, and the number of lines with it.

    Not thread-safe except where a method says so.
    """

    def __init__(self, pod: str, folder: Path) -> None:
        self.pod = pod
        self.folder = folder
        self.has_ended = False
        self.is_complete = False
        self.num_failures = 0  # consecutive failed reads
        self.next_at = 0.0
        self.reader: threading.Thread | None = None
        self.stream: LineStream | None = None
        self._lock = threading.Lock()
        self._is_placed = False  # whether the position of an earlier process was looked for
        self._newest = ""
        self._num_newest = 0
        self._unwritten = b""  # lines before the position that are not in the file yet
        # of the current read
        self._rest = b""  # an incomplete line
        self._is_new = True  # whether the position was passed
        self._held: list[tuple[str, str]] = []  # lines that may lie before it
        self._counts: OrderedDict[int | str, int] = OrderedDict()  # lines by time

    def begin(self) -> str:
        """Prepare for a read from the position. Return the timestamp of the first line to request; empty: of all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            if not self._is_placed:
                self._newest, self._num_newest = _read_position(self.folder / READ_FILE, self.pod)
                self._is_placed = True
            self._rest, self._is_new = b"", not self._newest
            self._held.clear()
            self._counts.clear()
            return _shortly_before(self._newest) if self._newest else ""

    def take(self, piece: bytes) -> None:
        """Accept the next piece of the read. An incomplete line is held back.

        Raises:
            OSError: too much output waits for the disk.
        """
        with self._lock:
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                self._take_line(line.decode(errors="replace"))
            if len(self._unwritten) > _MAX_UNWRITTEN:
                raise OSError(f"{len(self._unwritten)} bytes of output wait for room in {self.folder}")

    def end(self) -> None:
        """Accept that the read has returned all output up to the pod's end."""
        with self._lock:
            if self._rest:
                self._take_line(self._rest.decode(errors="replace"))
            self._release()

    def _take_line(self, line: str) -> None:
        stamp, _, words = line.partition(" ")
        at, newest_at = _instant(stamp), _instant(self._newest)
        self._counts[at] = self._counts.get(at, 0) + 1
        if len(self._counts) > 10_000:  # lines beyond the overlap of two reads
            self._counts.popitem(last=False)
        if self._is_new:
            self._add(stamp, words)
            return
        # Whatever follows the last line seen is new: a clock that was set back gives later lines earlier timestamps.
        self._held.append((stamp, words))
        if at == newest_at and self._counts[at] == self._num_newest:
            self._is_new = True
            self._held.clear()
        elif isinstance(at, int) and isinstance(newest_at, int) and at > newest_at + SET_BACK_S * 10**9:
            self._release()

    def _release(self) -> None:
        """Accept the held lines: the last line seen is missing among them, so the host has begun another file since."""
        newest_at = _instant(self._newest)
        seen = [i for i, (stamp, _) in enumerate(self._held) if _instant(stamp) == newest_at]
        for stamp, words in self._held[seen[-1] + 1 if seen else 0 :]:
            self._add(stamp, words)
        self._held.clear()
        self._is_new = True

    def _add(self, stamp: str, words: str) -> None:
        self._newest, self._num_newest = stamp, self._counts.get(_instant(stamp), 1)
        self._unwritten += f"{words}\n".encode(errors="replace")

    def write(self) -> None:
        """Append the lines that are not in the file yet, then save the position. Thread-safe."""
        with self._lock:
            if not self._unwritten:
                return
            # Unbuffered, so that the number of bytes a full disk has accepted is exact.
            with (self.folder / "stdout.log").open("ab", buffering=0) as stream:
                while self._unwritten:
                    self._unwritten = self._unwritten[stream.write(self._unwritten) :]
            with contextlib.suppress(OSError):
                atomic_write(self.folder / READ_FILE, f"{self._newest} {self._num_newest} {self.pod}")


def _read_position(file: Path, pod: str) -> tuple[str, int]:
    """Return the timestamp of this pod's last line that an earlier process has copied, and the number of lines with it."""
    try:
        newest, count, *of = file.read_text(encoding="utf-8").split(" ")
        return (newest, int(count)) if of in ([], [pod]) else ("", 0)
    except (FileNotFoundError, ValueError):
        return "", 0


class PodLogs:
    """Copy the output of pods into files, in background threads: an unresponsive host or a full disk blocks no caller.

    Each pod's log is followed by one request for as long as it lasts, so that a hundred pods cost the API server few requests.
    The position is saved in a file, and the next controller continues from there.

    Args:
        pause_s: time between two writes of new output.
        since: timestamp of the first line of interest; default: all lines.
    """

    def __init__(
        self, api: KubernetesApi, namespace: str, container: str, folder: Path, pause_s: float, since: str = ""
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._container = container
        self._folder = folder
        self._pause_s = max(0.02, pause_s)
        self._since = since
        self._logs: dict[str, list[_PodLog]] = {}  # key: node
        self._allowed, self._allowed_at = _FIRST_READS, time.monotonic()  # requests
        self._is_refusal_logged = False
        self._is_closed = threading.Event()
        self._is_woken = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, node: str, pod: str) -> None:
        """Copy a pod's output. An earlier pod of this node has ended."""
        of_node = self._logs.setdefault(node, [])
        if any(entry.pod == pod for entry in of_node):
            return
        self._end(of_node)
        of_node.append(_PodLog(pod, self._folder / node))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dlrover-pod-logs", daemon=True)
            self._thread.start()

    def finish(self, node: str) -> bool:
        """Mark a node as ended. Return whether all of its output has been copied."""
        of_node = self._logs.get(node, [])  # empty: it has never run
        self._end(of_node)
        return all(entry.is_complete for entry in of_node)

    def close(self) -> None:
        """Stop all reads. What was received is written."""
        self._is_closed.set()
        self._is_woken.set()
        entries = [entry for of_node in self._logs.values() for entry in of_node]
        for entry in entries:
            _stop(entry)
        for thread in (self._thread, *(entry.reader for entry in entries)):
            if thread is not None:
                thread.join(5.0)
        for entry in entries:
            with contextlib.suppress(OSError):
                entry.write()

    def _end(self, of_node: Sequence[_PodLog]) -> None:
        for entry in of_node:
            if not entry.has_ended:
                entry.has_ended = True
                _stop(entry)
                self._is_woken.set()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            self._is_woken.clear()
            left = [of_node for of_node in list(self._logs.values()) if not all(entry.is_complete for entry in of_node)]
            # One pod of a node at a time. Ended ones come first: their ends are reported after their output.
            entries = [next(entry for entry in of_node if not entry.is_complete) for of_node in left]
            for entry in sorted(entries, key=lambda entry: not entry.has_ended):
                if entry.reader is None:
                    self._start_reader(entry)
                    continue
                with contextlib.suppress(OSError):  # the reader detects a full disk, too
                    entry.write()
            self._is_woken.wait(self._pause_s)

    def _start_reader(self, entry: _PodLog) -> None:
        now = time.monotonic()
        self._allowed = min(_FIRST_READS, self._allowed + (now - self._allowed_at) * _READS_PER_S)
        self._allowed_at = now
        if now < entry.next_at or (self._allowed < 1.0 and not entry.has_ended):
            return
        self._allowed -= 1.0
        entry.reader = threading.Thread(target=self._read, args=(entry,), name=f"dlrover-log-{entry.pod}", daemon=True)
        entry.reader.start()

    def _read(self, entry: _PodLog) -> None:
        """Read a pod's output once, to its end or as long as the stream lasts."""
        had_ended = entry.has_ended
        try:
            entry.write()
            since = entry.begin() or self._since
            with self._api.pod_log(self._namespace, entry.pod, self._container, since, follow=not had_ended) as stream:
                entry.stream = stream
                if entry.has_ended and not had_ended:
                    _stop(entry)
                for piece in stream:
                    entry.take(piece)
            if had_ended:
                entry.end()
            entry.write()
        except Exception as error:  # the output of this pod later needs no other reader to have failed
            # 400: its container has not started. 404: the pod and its output are gone.
            entry.is_complete = had_ended and isinstance(error, ApiError) and error.status in (400, 404)
            entry.num_failures += 1
            self._log_failure(entry, error)
        else:
            entry.is_complete, entry.num_failures = had_ended, 0
        # An unresponsive host would delay every request.
        pause_s = min(30.0, self._pause_s * 2.0 ** min(10, entry.num_failures))
        is_due = entry.has_ended and not had_ended
        entry.next_at = 0.0 if is_due else time.monotonic() + pause_s
        entry.stream = entry.reader = None
        if is_due or entry.is_complete:
            self._is_woken.set()

    def _log_failure(self, entry: _PodLog, error: Exception) -> None:
        is_refused = isinstance(error, ApiError) and error.status == 403 and not self._is_refusal_logged
        self._is_refusal_logged |= is_refused
        is_new = entry.num_failures == 1 and not isinstance(error, ApiError)
        level = logging.WARNING if is_new or is_refused else logging.DEBUG
        log.log(level, "%s: its output cannot be copied now: %s", entry.pod, error)


def _stop(entry: _PodLog) -> None:
    if (stream := entry.stream) is not None:
        stream.stop()
