"""Events about a job on its Kubernetes Jobs, for `kubectl describe job` and `kubectl get events`.

They are sent in the background, at a bounded rate. Events of one reason that wait for their turn become one. An event that the
API server does not take is lost; nothing waits for it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from lightning_dlrover.components.targets.kubernetes_api import ApiError, KubernetesApi

log = logging.getLogger(__name__)

REPORTER = "lightning-dlrover"
"""`reportingController` of these events; `reportingComponent` where they are read by the core API."""

_FIRST, _EVERY_S = 10, 10.0
"""Number of events that may be sent at once, and seconds until one more may be."""

_MAX_WAITING = 50
_MAX_NOTE_BYTES = 1024
"""The API server refuses a longer one."""

_REFUSED_S = 600.0
"""Seconds without an event after a refusal."""

_LAST_S, _NUM_LAST = 3.0, 5
"""Maximum seconds for the events that wait when the job ends, and how many of them may exceed the rate."""


@dataclass
class _Waiting:
    """The newest of the events with one reason that wait to be sent about one Job."""

    regarding: dict[str, Any]
    labels: Mapping[str, Any]
    reason: str
    note: str
    is_warning: bool
    at: datetime
    count: int = 1

    def manifest(self) -> dict[str, Any]:
        name, namespace = self.regarding["name"], self.regarding["namespace"]
        suffix = f" (the newest of {self.count})" if self.count > 1 else ""
        note = self.note.encode()[: _MAX_NOTE_BYTES - len(suffix)].decode(errors="ignore") + suffix
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{time.time_ns():x}", "namespace": namespace, **self.labels},
            "eventTime": f"{self.at:%Y-%m-%dT%H:%M:%S.%f}Z",
            "reportingController": REPORTER,
            "reportingInstance": socket.gethostname()[:128] or REPORTER,
            "action": "Train",
            "reason": self.reason,
            "regarding": self.regarding,
            "note": note,
            "type": "Warning" if self.is_warning else "Normal",
        }


class JobEvents:
    """Send events about the Jobs of one run. Thread-safe.

    Args:
        labels: metadata of each event besides its name.
        first: number of events that may be sent at once.
        every_s: seconds until one more may be.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        labels: Mapping[str, Any],
        first: int = _FIRST,
        every_s: float = _EVERY_S,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._labels = labels
        self._first, self._every_s = float(first), every_s
        self._allowed, self._allowed_at = float(first), time.monotonic()
        self._waiting: OrderedDict[tuple[str, str], _Waiting] = OrderedDict()  # key: Job and reason
        self._lock = threading.Lock()
        self._is_woken = threading.Event()
        self._is_closed = threading.Event()
        self._silent_until = -float("inf")
        self._is_refusal_logged = False
        self._thread: threading.Thread | None = None

    def add(self, job: Mapping[str, Any], reason: str, note: str, is_warning: bool = False) -> None:
        """Send an event about a Job, which is given as a list or a watch returns it. Returns at once."""
        metadata = job["metadata"]
        regarding = {"apiVersion": job.get("apiVersion", "batch/v1"), "kind": "Job", "namespace": self._namespace}
        regarding |= {name: metadata[name] for name in ("name", "uid") if name in metadata}
        new = _Waiting(regarding, self._labels, reason, note, is_warning, datetime.now(timezone.utc))
        with self._lock:
            if time.monotonic() < self._silent_until or self._is_closed.is_set():
                return
            former = self._waiting.get((metadata["name"], reason))
            new.count += former.count if former is not None else 0
            self._waiting[metadata["name"], reason] = new  # in the place of the former one
            while len(self._waiting) > _MAX_WAITING:
                self._waiting.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dlrover-kubernetes-events", daemon=True)
                self._thread.start()
        self._is_woken.set()

    def close(self) -> None:
        """Send what waits, within some seconds."""
        self._is_closed.set()
        self._is_woken.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        while True:
            self._is_woken.clear()
            is_last = self._is_closed.is_set()
            self._allowed += _NUM_LAST * is_last
            self._send_allowed()
            if is_last:
                return
            self._is_woken.wait(self._every_s)
            if not self._is_closed.is_set() and self._num_allowed() < 1.0:
                self._is_closed.wait(self._every_s)

    def _num_allowed(self) -> float:
        now = time.monotonic()
        self._allowed = min(self._first, self._allowed + (now - self._allowed_at) / self._every_s)
        self._allowed_at = now
        return self._allowed

    def _send_allowed(self) -> None:
        while self._num_allowed() >= 1.0:
            with self._lock:
                if not self._waiting:
                    return
                _, event = self._waiting.popitem(last=False)
            self._allowed -= 1.0
            try:
                self._api.create_event(self._namespace, event.manifest())
            except Exception as error:  # whatever it is, the job needs no events
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        is_refused = isinstance(error, ApiError) and error.status in (401, 403, 404, 405)
        if is_refused:
            with self._lock:
                self._silent_until = time.monotonic() + _REFUSED_S
                self._waiting.clear()
        level = logging.INFO if is_refused and not self._is_refusal_logged else logging.DEBUG
        self._is_refusal_logged |= is_refused
        log.log(level, "events on Jobs are left out: %s; examples/kubernetes/rbac.yaml allows them", error)
