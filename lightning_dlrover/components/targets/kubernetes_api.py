"""All requests to a Kubernetes API server, each with a deadline and a bounded number of attempts; the streams of pods' output.

Answers are plain JSON, so fields added by newer servers cause no error. Pauses between attempts follow the server's
`Retry-After` up to a limit. urllib3's own retries would follow it for hours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lightning_dlrover.components.targets.target import TargetError
from lightning_dlrover.files import atomic_write

log = logging.getLogger(__name__)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_CONNECT_S = 5.0
_MAX_PAUSE_S = 15.0


def is_in_pod() -> bool:
    """Whether this process runs in a cluster with access to its API: with a service account or a kubeconfig of its own."""
    return _has_service_account() and (_NAMESPACE_FILE.exists() or _has_config())


def own_pod() -> str:
    """Return the name of the pod that this process runs in, which is its host name there; empty outside of a cluster."""
    return os.environ.get("HOSTNAME", "") if is_in_pod() else ""


def _has_service_account() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def has_cluster() -> bool:
    """Whether a cluster is configured: by this pod's service account, or by a kubeconfig. One that is named must exist."""
    return is_in_pod() or "KUBECONFIG" in os.environ or _has_config()


def _config_file() -> str:
    """Return the path of the kubeconfig, or several separated by colons, as `kubectl` accepts them."""
    return os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")


def _has_config() -> bool:
    return any(map(os.path.exists, _config_file().split(":")))


_REASONS = tuple(
    re.compile(pattern)
    for pattern in (
        r"exceeded quota: [^,\s]+",
        r"must specify [\w.,-]+ for",
        r"admission webhook \"[^\"]+\"",
        r"ValidatingAdmissionPolicy '[^']+'",
        r"violates PodSecurity \"[^\"]+\"",
        r"cannot \w+ resource \"[^\"]+\"",
        r"no PriorityClass with name \S+",
    )
)


def kind_of_refusal(message: str) -> str:
    """Return the part of a message that names who refused: names, amounts and lists of reasons vary between two refusals."""
    found = next((match for pattern in _REASONS if (match := pattern.search(message))), None)
    return found[0] if found else " ".join(re.sub(r"\"[^\"]*\"|\S*\d\S*", "", message).split())


class ApiError(TargetError):
    """A request has failed.

    Args:
        message: the server's, or the reason why no request reached it.
        status: HTTP status; 0: there was no answer.
        reason: the server's machine-readable reason, such as AlreadyExists.
        uncertain: the request may have been carried out.
        retry_after_s: seconds to wait before the next request.
    """

    def __init__(
        self, message: str, status: int = 0, reason: str = "", uncertain: bool = False, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.uncertain = uncertain
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """Text that refusals for the same reason share, while their wording varies."""
        return kind_of_refusal(str(self))

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed a moment later."""
        # Two concurrent updates of a quota conflict with each other. Such a conflict does not concern the requested object.
        return self.status in (0, 429) or self.status >= 500 or (self.status == 409 and self.reason == "Conflict")


class KubernetesApi:
    """Client of the API server that `kubectl` would use: from KUBECONFIG or ~/.kube/config, else of this pod's cluster.

    Args:
        num_attempts: maximum number of attempts of a repeatable request.
        pause_s: pause before the second attempt; doubles with each further one.

    Raises:
        TargetError: the package is missing, or no cluster is configured.
    """

    def __init__(self, request_s: float = 15.0, num_attempts: int = 3, pause_s: float = 0.5) -> None:
        try:
            import urllib3
            from kubernetes import client, config
        except ImportError as error:
            raise TargetError(
                "--target kubernetes needs the package `kubernetes`: pip install 'lightning-dlrover[kubernetes]'"
            ) from error
        self._urllib3 = urllib3
        self._config_error: type[Exception] = config.ConfigException
        self._connect_s, self._request_s = min(_CONNECT_S, request_s), request_s
        self._num_attempts = num_attempts
        self._pause_s = pause_s
        configuration = client.Configuration()
        file = _config_file()
        try:
            if _has_service_account() and not _has_config():
                config.load_incluster_config(client_configuration=configuration)
                self.namespace = _NAMESPACE_FILE.read_text().strip()
            else:
                config.load_kube_config(config_file=file, client_configuration=configuration)
                context = config.list_kube_config_contexts(config_file=file)[1]["context"]
                self.namespace = str(context.get("namespace") or "default")
        except (config.ConfigException, OSError, KeyError, TypeError) as error:
            raise TargetError(
                f"no Kubernetes cluster is configured ({error}); name a file with KUBECONFIG that `kubectl get jobs` works "
                "with, or run inside the cluster with a service account"
            ) from error
        self._client = client.ApiClient(configuration)
        self._shown_warnings: set[str] = set()  # their kinds

    def close(self) -> None:
        """Close all connections."""
        self._client.rest_client.pool_manager.clear()

    # The requests; examples/kubernetes/rbac.yaml allows exactly these.

    def has(self, api_version: str, resource: str) -> bool:
        """Whether the cluster has objects of this kind, named as in URLs, such as `jobs`. The request needs no permission."""
        try:
            found = self._object("GET", f"/apis/{api_version}", is_repeated=True)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return any(isinstance(each, dict) and each.get("name") == resource for each in found.get("resources") or ())

    def version(self) -> str:
        """Return the server's version, such as v1.36.1. The request needs no permission by default."""
        return str(self._object("GET", "/version").get("gitVersion", ""))

    def create_job(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Create a Job. Repeatable, because each name is taken only once. An unknown field is an error and is never dropped."""
        path = _path(namespace, "jobs", group=manifest["apiVersion"])
        self._object("POST", path, {"fieldValidation": "Strict"}, manifest, is_repeated=True)

    def read_job(self, namespace: str, group: str, name: str) -> dict[str, Any]:
        return self._object("GET", _path(namespace, "jobs", name, group), is_repeated=True)

    def jobs(self, namespace: str, group: str, selector: str) -> list[dict[str, Any]]:
        """List Jobs. Not repeated within one call, because callers poll anyway."""
        return _items(self._object("GET", _path(namespace, "jobs", group=group), {"labelSelector": selector}))

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        return _items(self._object("GET", _path(namespace, "pods"), {"labelSelector": selector}))

    def pod_named(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a pod by its name; None if there is none. A list of one, as targets need no permission to get pods."""
        query = {"fieldSelector": f"metadata.name={name}"}
        return next(iter(_items(self._object("GET", _path(namespace, "pods"), query, is_repeated=True))), None)

    def pod_groups(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        path = _path(namespace, "podgroups", group="scheduling.volcano.sh/v1beta1")
        return _items(self._object("GET", path, {"labelSelector": selector}))

    def events(self, namespace: str, kind: str, name: str) -> list[dict[str, Any]]:
        selector = f"involvedObject.kind={kind},involvedObject.name={name}"
        return _items(self._object("GET", _path(namespace, "events"), {"fieldSelector": selector, "limit": "100"}))

    def delete_job(self, namespace: str, group: str, name: str) -> None:
        """Delete a Job; its pods end in the background. A missing Job is not an error."""
        self._delete(_path(namespace, "jobs", name, group), {"propagationPolicy": "Background"})

    def delete_pod(self, namespace: str, name: str, grace_s: int) -> None:
        self._delete(_path(namespace, "pods", name), {"gracePeriodSeconds": grace_s})

    def create_secret(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Create a Secret. One of that name is kept."""
        try:
            self._object("POST", _path(namespace, "secrets"), {"fieldValidation": "Strict"}, manifest, is_repeated=True)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    def delete_secret(self, namespace: str, name: str) -> None:
        """Delete a Secret. A missing one is not an error."""
        self._delete(_path(namespace, "secrets", name), {})

    @contextlib.contextmanager
    def pod_log(self, namespace: str, pod: str, container: str, since: str, follow: bool) -> Iterator[LogStream]:
        """Read a log from the time `since`, with a timestamp before each line; with `follow`, until its container ends.

        Raises:
            ApiError: the request was refused, or the connection was lost. A stream without output for two minutes just ends.
        """
        query = {"container": container, "timestamps": "true", **({"sinceTime": since} if since else {})}
        if follow:
            query["follow"] = "true"
        answer = self._send("GET", f"{_path(namespace, 'pods', pod)}/log", query, None, _IDLE_S if follow else self._request_s)
        errors = self._urllib3.exceptions
        try:
            yield LogStream(answer)
        except errors.ReadTimeoutError as error:
            if not follow:
                raise ApiError(f"the output of {pod} did not end in time: {error}") from error
        except (errors.HTTPError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, errors.HTTPError) and error.errno is None:
                raise  # of the reader
            raise ApiError(f"the output of {pod} was cut off: {error}") from error
        finally:
            answer.close()

    def _delete(self, path: str, options: Mapping[str, Any]) -> None:
        try:
            self._object("DELETE", path, body=options, is_repeated=True)
        except ApiError as error:
            if error.status != 404:
                raise

    def _object(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        is_repeated: bool = False,
    ) -> dict[str, Any]:
        answer = self._request(method, path, query or {}, body, is_repeated)
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            message = f"{method} {path}: the answer is not an object of Kubernetes: {answer[:200]!r}"
            raise ApiError(message, uncertain=method != "GET")
        return found

    def _request(
        self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None, is_repeated: bool
    ) -> bytes:
        uncertain = False
        attempts_left = self._num_attempts if is_repeated else 1
        pause_s = self._pause_s
        while True:
            try:
                return self._attempt(method, path, query, body)
            except ApiError as error:
                # A former attempt may have been carried out, whatever the answer to this one is.
                uncertain = error.uncertain = uncertain or error.uncertain
                attempts_left -= 1
                if not attempts_left or not error.may_pass:
                    raise
                time.sleep(min(_MAX_PAUSE_S, max(pause_s, error.retry_after_s)))
                pause_s *= 2.0

    def _attempt(self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None) -> bytes:
        """Send a request once, and return the body of the answer."""
        return bytes(self._send(method, path, query, body).data)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        stream_idle_s: float | None = None,
    ) -> Any:
        """Send a request once, and return urllib3's answer; with `stream_idle_s`, its body is still to be read."""
        changes = method != "GET"
        headers = {"Accept": "application/json, */*", "User-Agent": "lightning-dlrover"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        errors = self._urllib3.exceptions
        is_stream = stream_idle_s is not None
        timeout = self._urllib3.Timeout(connect=self._connect_s, read=stream_idle_s or self._request_s)
        try:
            self._client.update_params_for_auth(headers, [], ["BearerToken"])
            answer = self._client.rest_client.pool_manager.request(
                method,
                f"{self._client.configuration.host}{path}{'?' if query else ''}{urlencode(query)}",
                body=json.dumps(body) if body is not None else None,
                headers=headers,
                timeout=timeout,
                retries=False,
                preload_content=not is_stream,
            )
            self._show_warnings(answer.headers.getlist("Warning"))
            if 200 <= answer.status < 300:
                return answer
            content = bytes(answer.data)
        except (errors.NewConnectionError, errors.ConnectTimeoutError, errors.SSLError, self._config_error) as error:
            raise ApiError(f"{method} {path}: {error}") from error  # nothing was sent
        except (errors.HTTPError, OSError) as error:
            raise ApiError(f"{method} {path}: {error}", uncertain=changes) from error
        message, reason = _message_of(content, answer.status)
        pause = answer.headers.get("Retry-After", "")
        uncertain = changes and (answer.status >= 500 or answer.status < 400)
        raise ApiError(message, answer.status, reason, uncertain, float(pause) if pause.isdecimal() else 0.0)

    def _show_warnings(self, headers: Sequence[str]) -> None:
        """Log the server's warnings, such as of a deprecated field or a violated Pod Security level, each kind once."""
        for header in headers:
            found = re.search(r'"((?:[^"\\]|\\.)*)"', header)
            text = re.sub(r"\\(.)", r"\1", found[1]) if found else header
            if (kind := kind_of_refusal(text)) not in self._shown_warnings:
                self._shown_warnings.add(kind)
                log.warning("the API server warns: %s", text)


class LogStream:
    """Pieces of a pod's log as they arrive. `stop` ends it from another thread."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._answer.stream(64 * 1024))

    def stop(self) -> None:
        # Only the socket can be shut down while another thread reads from it.
        with contextlib.suppress(AttributeError, OSError):
            self._answer.connection.sock.shutdown(socket.SHUT_RDWR)


def _path(namespace: str, kind: str, name: str = "", group: str = "") -> str:
    return f"/{f'apis/{group}' if group else 'api/v1'}/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def _items(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = answer.get("items")
    if items is None and str(answer.get("kind", "")).endswith("List"):
        return []  # some servers write an empty list like this
    if not isinstance(items, list) or not all(isinstance(item, dict) and item.get("metadata") for item in items):
        raise ApiError(f"the answer is not a list of objects: {str(answer)[:200]}")
    return items


def _message_of(body: bytes, status: int) -> tuple[str, str]:
    """Return the server's message and its machine-readable reason."""
    try:
        found = json.loads(body)
        return f"{found['message']} ({status})", str(found.get("reason", ""))
    except (ValueError, KeyError, TypeError):
        text = " ".join(body.decode(errors="replace").split())[:300]
        return f"the API server answered with {status}: {text or 'no message'}", ""


SET_BACK_S = 5
"""Seconds that a host's clock may be set back without a loss of output. Each read overlaps the previous one by this much."""

READ_FILE = ".read"
"""Name of the file with the position that a node's output has been copied up to."""

_IDLE_S = 120.0
"""Seconds without output after which a stream is requested again: a connection may be lost without a sign."""

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
        self.stream: LogStream | None = None
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
