"""All requests to a Kubernetes API server, each with a deadline and a bounded number of attempts.

Lists are read page by page, and streams (watches, pods' output) as they come.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lightning_dlrover.components.targets.target import TargetError

log = logging.getLogger(__name__)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

PAGE = 500
"""Maximum number of objects that one answer to a list holds."""

_MAX_PAGES = 200

_CONNECT_S = 5.0
_MAX_PAUSE_S = 15.0

_IDLE_S = 120.0
"""Seconds without output after which a stream is requested again: a connection may be lost without a sign."""


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


@dataclass(frozen=True)
class Resource:
    """A kind of object as URLs name it: `jobs` of `batch/v1`. The core group is empty."""

    name: str
    group: str = ""


@dataclass(frozen=True)
class Listed:
    """Objects of one kind, and the resource version at which they were so."""

    items: list[dict[str, Any]]
    version: str


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

    def listed(self, namespace: str, resource: Resource, selector: str) -> Listed:
        """List objects, page by page. Not repeated within one call, because callers poll anyway.

        All pages show the same moment. A list whose continuation has expired is started once more.
        """
        path, query = _path(namespace, resource.name, group=resource.group), {"labelSelector": selector, "limit": str(PAGE)}
        try:
            return self._listed(path, query)
        except ApiError as error:
            if error.status != 410:
                raise
            return self._listed(path, query)

    def _listed(self, path: str, query: Mapping[str, str]) -> Listed:
        answer = self._object("GET", path, query)
        version, items = str((answer.get("metadata") or {}).get("resourceVersion", "")), _items(answer)
        for _ in range(_MAX_PAGES):
            if not (token := str((answer.get("metadata") or {}).get("continue") or "")):
                return Listed(items, version)
            answer = self._object("GET", path, {**query, "continue": token})
            items = [*items, *_items(answer)]
        raise ApiError(f"GET {path}: the list has no end after {_MAX_PAGES} pages")

    @contextlib.contextmanager
    def watch(
        self, namespace: str, resource: Resource, selector: str, version: str, duration_s: float, idle_s: float
    ) -> Iterator[LineStream]:
        """Stream the changes of objects after a resource version, one JSON object a line, until the server ends it.

        Raises:
            ApiError: the request was refused, or the connection was lost. A stream without a byte for `idle_s` just ends.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(int(duration_s)),
        }
        path = _path(namespace, resource.name, group=resource.group)
        with self._streamed(path, query, idle_s, f"the watch of {resource.name}") as stream:
            yield stream

    def pod_named(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a pod by its name; None if there is none. A list of one, as targets need no permission to get pods."""
        query = {"fieldSelector": f"metadata.name={name}"}
        return next(iter(_items(self._object("GET", _path(namespace, "pods"), query, is_repeated=True))), None)

    def pod_groups(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        return self.listed(namespace, Resource("podgroups", "scheduling.volcano.sh/v1beta1"), selector).items

    def events(self, namespace: str, kind: str, name: str) -> list[dict[str, Any]]:
        selector = f"involvedObject.kind={kind},involvedObject.name={name}"
        return self._listed(_path(namespace, "events"), {"fieldSelector": selector, "limit": str(PAGE)}).items

    def hosts(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """List the cluster's nodes of these names, from the API server's cache. Needs a right in the whole cluster."""
        query = {"labelSelector": f"kubernetes.io/hostname in ({','.join(names)})", "resourceVersion": "0"}
        return _items(self._object("GET", "/api/v1/nodes", query))

    def delete_job(self, namespace: str, group: str, name: str) -> None:
        """Delete a Job; its pods end in the background. A missing Job is not an error."""
        self._delete(_path(namespace, "jobs", name, group), {"propagationPolicy": "Background"})

    def offers_resize(self) -> bool:
        """Whether the resources of running pods can be changed, from Kubernetes 1.33 on. The request needs no permission."""
        found = self._object("GET", "/api/v1")
        return any(isinstance(each, dict) and each.get("name") == "pods/resize" for each in found.get("resources") or ())

    def resize_pod(self, namespace: str, name: str, container: str, resources: Mapping[str, str]) -> None:
        """Request other resources for a container of a running pod. Requests stay equal to limits, so its QoS class stays."""
        wanted = {"name": container, "resources": {"requests": dict(resources), "limits": dict(resources)}}
        self._object("PATCH", f"{_path(namespace, 'pods', name)}/resize", body={"spec": {"containers": [wanted]}})

    def delete_pod(self, namespace: str, name: str, grace_s: int) -> None:
        self._delete(_path(namespace, "pods", name), {"gracePeriodSeconds": grace_s})

    def create_secret(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Create a Secret. One of that name is kept."""
        try:
            self._object("POST", _path(namespace, "secrets"), {"fieldValidation": "Strict"}, manifest, is_repeated=True)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    def create_event(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Create an event. Not repeated: it may be lost."""
        path = _path(namespace, "events", group="events.k8s.io/v1")
        self._object("POST", path, {"fieldValidation": "Strict"}, manifest)

    def replace_budget(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Create a PodDisruptionBudget in the place of one of that name. Not repeated, because callers try again anyway."""
        path, query = _path(namespace, "poddisruptionbudgets", group="policy/v1"), {"fieldValidation": "Strict"}
        try:
            self._object("POST", path, query, manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            self.delete_budget(namespace, manifest["metadata"]["name"])
            self._object("POST", path, query, manifest)

    def delete_budget(self, namespace: str, name: str) -> None:
        """Delete a PodDisruptionBudget. A missing one is not an error."""
        self._delete(_path(namespace, "poddisruptionbudgets", name, "policy/v1"), {})

    def delete_secret(self, namespace: str, name: str) -> None:
        """Delete a Secret. A missing one is not an error."""
        self._delete(_path(namespace, "secrets", name), {})

    @contextlib.contextmanager
    def pod_log(self, namespace: str, pod: str, container: str, since: str, follow: bool) -> Iterator[LineStream]:
        """Read a log from the time `since`, with a timestamp before each line; with `follow`, until its container ends.

        Raises:
            ApiError: the request was refused, or the connection was lost. A stream without output for two minutes just ends.
        """
        query = {"container": container, "timestamps": "true", **({"sinceTime": since} if since else {})}
        if follow:
            query["follow"] = "true"
        path, name = f"{_path(namespace, 'pods', pod)}/log", f"the output of {pod}"
        with self._streamed(path, query, _IDLE_S if follow else self._request_s, name, must_end=not follow) as stream:
            yield stream

    @contextlib.contextmanager
    def _streamed(
        self, path: str, query: Mapping[str, str], idle_s: float, name: str, must_end: bool = False
    ) -> Iterator[LineStream]:
        """Request a stream. One that stays silent for `idle_s` just ends, unless it `must_end` by itself."""
        answer = self._send("GET", path, query, None, idle_s)
        errors = self._urllib3.exceptions
        try:
            yield LineStream(answer)
        except errors.ReadTimeoutError as error:
            if must_end:
                raise ApiError(f"{name} did not end in time: {error}") from error
        except (errors.HTTPError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, errors.HTTPError) and error.errno is None:
                raise  # of the reader
            raise ApiError(f"{name} was cut off: {error}") from error
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
            # Containers are merged by their names. A plain merge patch would replace the whole list.
            headers["Content-Type"] = f"application/{'strategic-merge-patch+' if method == 'PATCH' else ''}json"
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


class LineStream:
    """Pieces of a stream as they arrive, such as a pod's log. `stop` ends it from another thread."""

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
