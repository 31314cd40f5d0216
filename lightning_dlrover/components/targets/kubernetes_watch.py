"""Keep the newest objects of one kind: by a list and a watch from it, or by lists alone where watches do not work.

docs/internals/nodes.md has the two states and their changes. A watch only saves requests: whatever it fails to
deliver is found by a list, and an object that a watch reports as deleted is gone once a list requested afterwards lacks it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lightning_dlrover.components.targets.kubernetes_api import ApiError, KubernetesApi, LineStream, Resource

log = logging.getLogger(__name__)

SILENT_S = 75.0
"""Seconds without an event or a bookmark after which a list checks a watch. API servers send a bookmark about every minute."""

UNPROVEN_S = 10.0
"""The same for a watch on a path that has not delivered anything yet: a proxy may hold it back."""

EXPECTED_S = 5.0
"""Seconds in which a change that this process has made must arrive, before a list checks the watch."""

REFUSED_S = 600.0
"""Seconds of lists alone after the API server has refused a watch, or something on the way has held one back."""

_DURATION_S = (300.0, 600.0)
"""Range of a watch's length. It is drawn for each one, so that watches of many jobs do not end together."""

_MIN_LENGTH_S = 1.0
"""A watch that ends earlier, and without an event, has failed."""

_MAX_PAUSE_S = 60.0

_NOT_ALLOWED = (400, 401, 403, 404, 405, 406, 415, 501)
"""HTTP statuses of watches that an API server, or a proxy, does not offer to us."""

_MAX_LINE_BYTES = 16 * 1024 * 1024

Object = Mapping[str, Any]


class _BadEventError(ApiError):
    """A line of a watch is not an event."""


class _Watch:
    """The objects of one list, and the changes that the watch from it has delivered since. Thread-safe."""

    def __init__(self, items: Iterable[Object], version: str, now: float) -> None:
        self._lock = threading.Lock()
        self._objects = {str(item["metadata"]["name"]): item for item in items}
        self.version = version  # of the newest event or bookmark
        self.alive_at = now  # time of the newest sign, or of a list that has confirmed the objects
        self.event_at = -float("inf")
        self.num_signs = 0  # events and bookmarks
        self.num_events = 0
        self.num_read_events = 0
        self.has_deletion = False
        self.error: ApiError | None = None  # why it has ended
        self.over = threading.Event()  # nobody reads it any more
        self.stream: LineStream | None = None

    def objects(self) -> list[Object]:
        with self._lock:
            self.num_read_events = self.num_events
            return list(self._objects.values())

    def confirm(self, items: Iterable[Object], now: float) -> bool:
        """Whether a list requested at `now` shows the same, so that the watch may continue."""
        with self._lock:
            is_same = self.error is None and not self.has_deletion and _versions(self._objects.values()) == _versions(items)
            self.alive_at = now if is_same else self.alive_at
            return is_same

    def add(self, event: Mapping[str, Any], now: float) -> None:
        """Apply an event.

        Raises:
            ApiError: it is an error of the server, such as 410 for an expired resource version, or not an event at all.
        """
        kind, found = event.get("type"), event.get("object")
        if kind == "ERROR":
            status = found if isinstance(found, Mapping) else {}
            code = status.get("code")
            if not isinstance(code, int):
                raise _BadEventError(f"an error without a code: {str(event)[:200]}")
            raise ApiError(f"{status.get('message')} ({code})", code, str(status.get("reason")))
        metadata = found.get("metadata") if isinstance(found, Mapping) else None
        if not isinstance(metadata, Mapping) or not metadata.get("resourceVersion"):
            raise _BadEventError(f"not an event of a watch: {str(event)[:200]}")
        with self._lock:
            self.version = str(metadata["resourceVersion"])
            self.alive_at = now
            self.num_signs += 1
            if kind == "BOOKMARK":
                return
            self.num_events += 1
            self.event_at = now
            if kind == "DELETED":
                self.has_deletion = True  # the object stays until a list confirms it
            elif kind in ("ADDED", "MODIFIED") and isinstance(found, Mapping):
                self._objects[str(metadata["name"])] = found
            else:
                raise _BadEventError(f"unknown type of event: {kind!r}")


class WatchedList:
    """The objects of one kind with a label, as a list would return them.

    `read` belongs to one thread, which alone changes between the two states. A thread of this class's own reads the watch.

    Args:
        watches: use watches; else each `read` is a list.
        clock: time of everything but the length of a watch.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        resource: Resource,
        watches: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._resource = resource
        self._selector = ""
        self._watches = watches
        self._clock = clock
        self._watch: _Watch | None = None
        self._watch_at = -float("inf")  # time from which a watch may be tried
        self._random = random.Random()  # the script may use the global one in this process
        self._num_failures = 0  # of watches, in a row
        self._num_silences = 0  # watches in a row that have missed a change
        self._is_proven = False  # whether a watch has delivered anything since the last failure
        self._expected_at: float | None = None
        self._is_refusal_logged = False
        self.listed_at = -float("inf")  # time of the request for the newest list

    def select(self, selector: str) -> None:
        """Choose the label of the objects, before the first `read`."""
        self._selector = selector

    def expect(self) -> None:
        """Announce a change that this process has just made: the watch must deliver it soon."""
        self._expected_at = self._clock()

    @property
    def has_news(self) -> bool:
        """Whether the watch has delivered changes since the last `read`, which will return them without a request."""
        watch = self._watch
        return watch is not None and watch.num_events > watch.num_read_events and self.is_current

    @property
    def is_current(self) -> bool:
        """Whether `read` needs no request now."""
        return self._watch is not None and not self._must_list(self._watch, self._clock())

    def read(self, fresh: bool = False) -> list[Object]:
        """Return the newest objects; with `fresh`, by a list.

        Raises:
            ApiError: a list was due, and has failed.
        """
        now = self._clock()
        if not fresh and self._watch is not None and not self._must_list(self._watch, now):
            return self._watch.objects()
        had_expected = self._expected_at
        found = self._api.listed(self._namespace, self._resource, self._selector)
        if self._expected_at == had_expected:
            self._expected_at = None
        self.listed_at = now
        if self._watch is not None and self._watch.confirm(found.items, now):
            return self._watch.objects()
        if self._watch is not None:
            was_expected = had_expected is not None and now - had_expected > EXPECTED_S
            self._judge(self._watch, now, was_expected)
            _stop(self._watch)
            self._watch = None
        if self._watches and found.version and now >= self._watch_at:
            self._watch = _Watch(found.items, found.version, now)
            name = f"dlrover-watch-{self._resource.name}"
            threading.Thread(target=self._follow, args=(self._watch,), name=name, daemon=True).start()
        return list(found.items)

    def close(self) -> None:
        """End the watch. Further reads are lists."""
        self._watches = False
        if self._watch is not None:
            _stop(self._watch)
            self._watch = None

    def _must_list(self, watch: _Watch, now: float) -> bool:
        if watch.error is not None or watch.has_deletion:
            return True
        if now - watch.alive_at > (SILENT_S if self._is_proven or watch.num_signs else UNPROVEN_S):
            return True
        if self._expected_at is None:
            return False
        if watch.event_at >= self._expected_at:
            self._expected_at = None
            return False
        return now - self._expected_at > EXPECTED_S

    def _judge(self, watch: _Watch, now: float, was_expected: bool) -> None:
        """Learn from a watch that a list has replaced: when, or whether, the next one may begin."""
        error = watch.error
        if watch.num_signs:
            self._is_proven, self._num_failures, self._num_silences = True, 0, 0
        elif error is None:
            self._num_silences += 1  # the list differs
        if error is not None and (error.status != 410 or not watch.num_signs):
            self._is_proven = False
            self._num_failures += 1
            is_refused = error.status in _NOT_ALLOWED
            pause_s = REFUSED_S if is_refused else min(_MAX_PAUSE_S, 2.0 ** min(10, self._num_failures - 1))
            self._watch_at = now + max(pause_s, error.retry_after_s)
            if is_refused:
                self._log_refusal(f"{error}; allow `watch` as in examples/kubernetes/rbac.yaml")
            else:
                log.debug("the watch of %s has failed: %s", self._resource.name, error)
        elif self._num_silences and (was_expected or self._num_silences > 1):
            self._is_proven, self._num_silences = False, 0
            self._watch_at = now + REFUSED_S
            self._log_refusal("it delivered nothing although they changed; a proxy before the API server may buffer it")

    def _log_refusal(self, why: str) -> None:
        level = logging.DEBUG if self._is_refusal_logged else logging.INFO
        self._is_refusal_logged = True
        log.log(level, "%s cannot be watched and are listed instead: %s", self._resource.name, why)

    def _follow(self, watch: _Watch) -> None:
        """Apply the events of a watch. Open it again where it was cut off or its time was up."""
        while not watch.over.is_set():
            began_at, num_signs = time.monotonic(), watch.num_signs
            watch.stream = None
            try:
                duration_s = self._random.uniform(*_DURATION_S)
                opened = self._api.watch(
                    self._namespace, self._resource, self._selector, watch.version, duration_s, SILENT_S + 15.0
                )
                with opened as stream:
                    watch.stream = stream
                    self._apply(watch, stream)
            except ApiError as error:
                if watch.stream is None or error.status or isinstance(error, _BadEventError):
                    watch.error = error
                    return
            except Exception as error:  # a list follows, whatever this was
                watch.error = ApiError(f"the watch of {self._resource.name} has failed: {error!r}")
                return
            if watch.num_signs == num_signs and time.monotonic() - began_at < _MIN_LENGTH_S and not watch.over.is_set():
                watch.error = ApiError(f"the watch of {self._resource.name} was closed at once")
                return

    def _apply(self, watch: _Watch, stream: LineStream) -> None:
        events = iter(()) if watch.over.is_set() else _events_of(stream)
        for event in events:
            watch.add(event, self._clock())
            if watch.over.is_set():
                return


def _versions(items: Iterable[Object]) -> dict[str, Any]:
    """Return the resource version of each object, by its name."""
    return {str(item["metadata"]["name"]): item["metadata"].get("resourceVersion") for item in items}


def _events_of(stream: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    rest = b""
    for piece in stream:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise _BadEventError(f"a line of a watch has more than {_MAX_LINE_BYTES} bytes")
        for line in filter(None, lines):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise _BadEventError(f"not an event of a watch: {line[:200]!r}")
            yield event


def _stop(watch: _Watch) -> None:
    watch.over.set()
    if (stream := watch.stream) is not None:
        with contextlib.suppress(OSError):
            stream.stop()
