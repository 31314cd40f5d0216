"""A Kubernetes cluster of one process: an API server over HTTP, its Job controller, and a kubelet that runs pods as processes.

Its answers match a real cluster's in all that a target needs. It checks fields, names and labels, refuses duplicate names,
and applies selectors to lists. Lists have pages and a resource version, and watches deliver every change after such a version.
A deleted pod receives SIGTERM and disappears when its process has ended. A Job counts its pod.
Volcano is optional. A test may let the next requests fail (`answer_next`), and may act on pods like hosts and their owners.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import datetime
import http.server
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from tests.support import kubernetes_models, kubernetes_resizes, kubernetes_volcano
from tests.support.pod_limits import PodLimits

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

_PLAIN, _VOLCANO, _SCHEDULING = "batch/v1", "batch.volcano.sh/v1alpha1", "scheduling.volcano.sh/v1beta1"

_LOOK_S = 0.02
"""Seconds between two looks of a stream for something new."""

POD_VARIABLE = "KUBERNETES_TEST_POD"
"""Environment variable with the pod's name, in every process of a pod."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Answer to a request, instead of or after its execution."""

    status: int = 0  # 0: the connection is closed without an answer
    message: str = ""
    reason: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    is_carried_out: bool = False
    delay_s: float = 0.0
    stream: Iterator[bytes] | None = None  # pieces of the body as they arrive
    is_buffered: bool = False  # a proxy passes the stream on, and its headers, only once it has ended


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class _Change:
    """A change of an object, as a watch delivers it."""

    revision: int
    place: tuple[str, str]  # kind and API version
    type: str  # ADDED, MODIFIED or DELETED
    content: Object
    former_labels: Mapping[str, str]


@dataclass
class _Process:
    process: subprocess.Popen[bytes]
    lines: list[tuple[str, bytes]] = field(default_factory=list)  # output with the time at which each line was written
    reader: threading.Thread | None = None
    has_ended: bool = False  # true once it and all its children have ended
    limits: PodLimits | None = None


class KubernetesCluster:
    """A cluster created by `kubernetes_cluster`.

    Args:
        folder: folder of the kubeconfig.
        runs_pods: run pods as processes; else they stay Pending until the test changes them.
        environment: environment of pods, in addition to their own variables.
        tls: serve HTTPS.
        has_volcano: include Volcano with one queue, `default`.
        limits_pods: limit the processes of each pod to its resources by control groups.
    """

    namespace = "training"

    def __init__(
        self,
        folder: Path,
        runs_pods: bool = True,
        environment: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        has_volcano: bool = False,
        limits_pods: bool = False,
    ) -> None:
        self.folder = folder
        self.runs_pods = runs_pods
        self.environment = dict(os.environ if environment is None else environment)
        self.lock = threading.RLock()
        self.has_volcano = has_volcano
        # Jobs of both kinds under one name: no test gives two of them the same name.
        kinds = ("jobs", "pods", "events", "podgroups", "secrets", "poddisruptionbudgets")
        self.objects: dict[str, dict[str, Object]] = {kind: {} for kind in kinds}
        self.requests: list[tuple[str, str]] = []  # method, path with query
        self.max_jobs = 1000
        self.has_room_for_pods = True  # if false, a Job has no pod
        self.queues = {"default": "Open"}  # Volcano's queues and their states
        self.has_webhook = True  # whether Volcano's webhook, which may be disabled, runs
        self.has_volcano_controller = True  # else only Volcano's definitions are in the cluster
        self.dead_webhook = ""  # why the API server cannot call Volcano's webhook, which is still configured
        self.logs: dict[str, str] = {}  # logs of pods that have no process
        self.forbidden: set[tuple[str, str]] = set()  # verb and resource
        self.killing: tuple[str, Callable[[], None]] | None = None  # action before or after the creation of the next Job
        self.has_kueue = False  # Jobs with its label are suspended until `admit`
        self.version = "v1.36.1"
        self.hosts: dict[str, Object] = {}  # the cluster's nodes; each pod has its own
        self.limits_pods = limits_pods
        self.host = kubernetes_resizes.Host()
        self.has_resize = True  # whether the server has the subresource, as from Kubernetes 1.33 on
        self.pod_security = ""  # level that pods must meet: "" or "restricted"; of Jobs it only warns
        self.bookmark_s = 60.0  # time between two bookmarks of a watch
        self.has_buffering_proxy = False  # a proxy holds watches back until they end
        self._revision = 1
        self._compacted = 0  # watches from an older revision have expired
        self._noted: dict[tuple[str, str], tuple[str, str, int]] = {}  # kind and name: uid, content, revision
        self._history: list[_Change] = []
        self._pages: dict[str, tuple[int, list[Object]]] = {}  # continuation token: revision, rest of a list
        self._num_cuts = 0  # see `cut_streams`
        self._answers: list[tuple[str, str, Answer]] = []
        self._processes: dict[str, _Process] = {}  # process by the pod's name
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.01), daemon=True)
        self._stopped = threading.Event()
        self._kubelet = threading.Thread(target=self._watch_processes, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._kubelet.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": self.namespace}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": "secret-token"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    def stop(self) -> None:
        """End the server and all processes of its pods."""
        self._stopped.set()
        self._kubelet.join(5)
        for name, entry in list(self._processes.items()):
            _kill_all(name)
            entry.process.wait(10)
            if entry.limits is not None:
                entry.limits.remove()
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    # --- actions of a test ----------------------------------------------------------------------------------------------

    def answer_next(self, method: str, kind: str, *answers: Answer) -> None:
        """Give these answers to the next requests of this method for this kind of object."""
        with self.lock:
            self._answers += [(method, kind, answer) for answer in answers]

    def clear_answers(self) -> None:
        with self.lock:
            self._answers.clear()

    def admit(self, node: str) -> None:
        """Resume a suspended Job, as Kueue does when its queue has room."""
        with self.lock:
            job = next(job for job in self.objects["jobs"].values() if _node_of(job) == node)
            job["spec"]["suspend"] = False
            self._create_pod_of(job)

    def suspend(self, node: str) -> None:
        """Suspend a Job and end its pod, as Kueue does when another job has precedence."""
        with self.lock:
            job = next(job for job in self.objects["jobs"].values() if _node_of(job) == node)
            job["spec"]["suspend"] = True
            del self.objects["pods"][self.pod_of(node)["metadata"]["name"]]

    def cut_streams(self) -> None:
        """End all watches and streams of output in their middle, as a load balancer does."""
        self._num_cuts += 1

    def compact(self) -> None:
        """Forget all changes until now, as etcd does after five minutes. Running watches have seen them."""
        with self.lock:
            self._note_changes()
            self._revision += 1
            self._compacted = self._revision
            self._pages.clear()

    def num_requests(self, method: str, kind: str) -> int:
        """Count the requests for a kind of object. Watches are counted by method WATCH alone."""
        with self.lock:
            return sum(_method(m, path) == method and f"/{kind}" in path for m, path in self.requests)

    def pod_of(self, node: str) -> Object:
        with self.lock:
            return next(p for p in self.objects["pods"].values() if _node_of(p) == node)

    def nodes(self) -> list[str]:
        """Names of all Jobs that have not ended."""
        with self.lock:
            return sorted(node for job in self.objects["jobs"].values() if not _has_ended(job) and (node := _node_of(job)))

    def taint(self, node: str, key: str, value: str = "", effect: str = "NoSchedule") -> None:
        """Taint the host of a node's pod. A pod that does not tolerate a taint NoExecute is deleted at once."""
        with self.lock:
            host = self.pod_of(node)["spec"]["nodeName"]
            taint = {"key": key, "effect": effect, **({"value": value} if value else {})}
            if effect == "NoExecute":
                taint["timeAdded"] = _now()
            self.hosts[host]["spec"].setdefault("taints", []).append(taint)
            on_host = [p for p in self.objects["pods"].values() if p["spec"]["nodeName"] == host]
            for pod in on_host if effect == "NoExecute" else ():
                self.disrupt(_node_of(pod), "DeletionByTaintManager")

    def disrupt(self, node: str, reason: str = "EvictionByEvictionAPI") -> None:
        """Delete a pod with its own grace period and the reason, as all controllers do that end pods of others."""
        with self.lock:
            pod = self.pod_of(node)
            condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": ""}
            pod["status"].setdefault("conditions", []).append(condition)
            self.delete("pods", pod["metadata"]["name"])

    def set_pod(self, node: str, phase: str, **status: Any) -> None:
        """Update a pod's status, as a kubelet or a controller of hosts does."""
        with self.lock:
            pod = self.pod_of(node)
            pod["status"] = {"phase": phase, **status}
            self._count(pod)

    def remove_pod(self, node: str) -> None:
        """Remove an evicted pod, as happens in the end."""
        with self.lock:
            pod = self.pod_of(node)
            if pod["status"]["phase"] in ("Pending", "Running"):
                pod["status"] = {"phase": "Failed"}
            self._remove(pod)

    def kill_pod(self, node: str) -> None:
        """Kill a pod as the kernel does when its memory is too small."""
        self._signal(self.pod_of(node)["metadata"]["name"], signal.SIGKILL)

    def drain(self, node: str) -> str:
        """Evict a pod by the API, as `kubectl drain` does. Return why the API refuses; empty if it does not."""
        with self.lock:
            pod = self.pod_of(node)

            def is_healthy(each: Object) -> bool:
                # Pods here have no readiness probe, so a running one is ready.
                return each["status"]["phase"] == "Running" and "deletionTimestamp" not in each["metadata"]

            def matched(budget: Object, each: Object) -> bool:
                return bool(budget["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items())

            budgets = [each for each in self.objects["poddisruptionbudgets"].values() if matched(each, pod)]
            if len(budgets) > 1:
                return "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
            for budget in budgets:
                num_healthy = sum(is_healthy(each) and matched(budget, each) for each in self.objects["pods"].values())
                if is_healthy(pod) and num_healthy <= budget["spec"]["minAvailable"]:
                    return "Cannot evict pod as it would violate the pod's disruption budget."
            self.disrupt(node)
            return ""

    def evict(self, node: str) -> None:
        """Delete a pod with its grace, as a preemption does, whatever its PodDisruptionBudget says."""
        self.disrupt(node, "PreemptionByScheduler")

    # --- the API --------------------------------------------------------------------------------------------------------

    def serve(self, method: str, path: str, body: bytes) -> Answer:
        url = urlsplit(path)
        if url.path == "/version":
            return _json(200, {"gitVersion": self.version})
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/api/v1/nodes":
            return self._list_hosts(method, path, query)
        match = re.fullmatch(
            r"/(?:api/v1|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+)/([a-z]+)(?:/([^/]+)(?:/([a-z]+))?)?)?", url.path
        )
        with self.lock:
            self.requests.append((method, path))
            method = _method(method, path)
            offered = self._resources(match[1] or "") if match else []
            is_known = match is not None and match[3] in (None, *offered) and (match[5] != "resize" or self.has_resize)
            if match is None or not offered or not is_known:
                return _status(404, "NotFound", "the server could not find the requested resource")
            group, namespace, kind, name, part = match.groups(default="")
            override = next((a for a in self._answers if a[0] == method and a[1] == _joined(kind or "apis", part)), None)
            if override is not None:
                self._answers.remove(override)
            killing, self.killing = (self.killing, None) if (method, kind) == ("POST", "jobs") else (None, self.killing)
        if killing is not None and killing[0] == "before":
            killing[1]()
            return Answer()
        if override is not None and not override[2].is_carried_out:
            return override[2]
        if not kind:
            offered += ["pods/resize"] * ("pods" in offered and self.has_resize)
            return _json(200, {"kind": "APIResourceList", "groupVersion": group, "resources": [{"name": n} for n in offered]})
        try:
            with self.lock:
                verbs = {"POST": "create", "DELETE": "delete", "PUT": "update", "WATCH": "watch", "PATCH": "patch"}
                verb = verbs.get(method, "get" if name else "list")
                own_group = group.partition("/")[0] if group != _PLAIN else ""
                resource = _joined(f"{kind}.{own_group}" if own_group else kind, part)
                if namespace != self.namespace or (verb, resource) in self.forbidden:
                    user = "system:serviceaccount:training:controller"
                    words = f'User "{user}" cannot {verb} resource "{resource}" in the namespace "{namespace}"'
                    raise _Refused(403, "Forbidden", f"{resource} is forbidden: {words}")
                answer = self._carry_out(verb, group, kind, name, part == "log", query, json.loads(body or b"{}"))
        except _Refused as refused:
            return _status(refused.status, refused.reason, str(refused))
        if killing is not None:
            killing[1]()
        return override[2] if override is not None else answer

    def _list_hosts(self, method: str, path: str, query: Mapping[str, str]) -> Answer:
        with self.lock:
            self.requests.append((method, path))
            if override := next((a for a in self._answers if a[:2] == (method, "nodes")), None):
                self._answers.remove(override)
                return override[2]
            if ("list", "nodes") in self.forbidden:
                words = 'User "system:serviceaccount:training:controller" cannot list resource "nodes" in API group ""'
                return _status(403, "Forbidden", f"nodes is forbidden: {words} at the cluster scope")
            match = re.fullmatch(r"kubernetes\.io/hostname in \(([^()]*)\)", query["labelSelector"])
            assert match is not None
            found = [host for name, host in self.hosts.items() if name in match[1].split(",")]
            return _json(200, {"kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": found})

    def _resources(self, group: str) -> list[str]:
        of_volcano = {_VOLCANO: ["jobs"], _SCHEDULING: ["podgroups"]} if self.has_volcano else {}
        if self.has_kueue and group == "kueue.x-k8s.io/v1beta1":
            return ["localqueues"]
        of_groups = {"events.k8s.io/v1": ["events"], "policy/v1": ["poddisruptionbudgets"]}
        return {"": ["pods", "events", "secrets"], _PLAIN: ["jobs"], **of_groups, **of_volcano}.get(group, [])

    def _carry_out(
        self, verb: str, group: str, kind: str, name: str, is_log: bool, query: Mapping[str, str], body: Object
    ) -> Answer:
        if verb == "create" and kind == "jobs":
            answer = _json(201, self._create_job(group, body, query))
            if self.pod_security and (wrong := self._violations(body)):
                warning = f"299 - {json.dumps(f'would violate {wrong}')}"
                return dataclasses.replace(answer, headers={**answer.headers, "Warning": warning})
            return answer
        if verb == "create":
            self._check_fields(body)
            create = {"events": self._create_event, "poddisruptionbudgets": self._create_budget}.get(kind, self._create_secret)
            return _json(201, create(body))
        self._note_changes()
        objects = {n: o for n, o in self.objects[kind].items() if kind != "jobs" or o["apiVersion"] == group}
        if verb == "watch":
            stream = self._watched((kind, group), query)
            headers = {"Content-Type": "application/json"}
            return Answer(200, headers=headers, stream=stream, is_buffered=self.has_buffering_proxy)
        if verb == "list":
            return self._page(kind, [o for _, o in sorted(objects.items()) if _is_selected(o, query)], query)
        if name not in objects:
            raise _Refused(404, "NotFound", f'{kind} "{name}" of {group or "v1"} not found')
        if verb == "patch":
            if wrong := kubernetes_resizes.request(objects[name], body):
                raise _Refused(422, "Invalid", f'Pod "{name}" is invalid: {wrong}')
            return _json(200, objects[name])
        if is_log and query.get("follow") == "true":
            self._log(name, query)  # an error has no stream
            return Answer(200, headers={"Content-Type": "text/plain"}, stream=self._followed_log(name, query))
        if is_log:
            return Answer(200, body=self._log(name, query).encode(), headers={"Content-Type": "text/plain"})
        if verb == "update":  # TorchX 0.8 aborts a Volcano Job this way; Volcano's controller then deletes the pods
            objects[name]["status"] = body["status"]
            for pod in [p for p in self.objects["pods"].values() if _job_of(p) == name]:
                self.delete("pods", pod["metadata"]["name"])
        if verb == "delete":
            self.delete(kind, name, body.get("gracePeriodSeconds"))
        return _json(200, objects[name])

    def _page(self, kind: str, found: list[Object], query: Mapping[str, str]) -> Answer:
        """Return a list, or a page of it. All pages show the objects at the time of the first one."""
        revision = self._revision
        if token := query.get("continue"):
            if token not in self._pages:
                words = "The provided continue parameter is too old to display a consistent list result."
                raise _Refused(410, "Expired", words)
            revision, found = self._pages.pop(token)
        metadata: Object = {"resourceVersion": str(revision)}
        limit = int(query.get("limit") or len(found) or 1)
        if found[limit:]:
            metadata |= {"continue": uuid.uuid4().hex, "remainingItemCount": len(found[limit:])}
            self._pages[metadata["continue"]] = (revision, copy.deepcopy(found[limit:]))
        return _json(200, {"kind": f"{kind[:-1].capitalize()}List", "metadata": metadata, "items": found[:limit]})

    def _note_changes(self) -> None:
        """Give each object that has changed a new resource version, and add the change to the history."""
        for kind, objects in self.objects.items():
            gone = {key: noted for key, noted in self._noted.items() if key[0] == kind and key[1] not in objects}
            for name, found in objects.items():
                metadata = found["metadata"]
                uid = metadata.setdefault("uid", str(uuid.uuid4()))
                without_version = {key: value for key, value in metadata.items() if key != "resourceVersion"}
                text = json.dumps({**found, "metadata": without_version})
                noted = self._noted.get((kind, name))
                if noted is not None and noted[0] != uid:
                    gone[kind, name] = noted
                elif noted is not None and noted[1] == text:
                    metadata.setdefault("resourceVersion", str(noted[2]))
                    continue
                if (kind, name) in gone:
                    self._note((kind, name), "DELETED", *gone.pop((kind, name)))
                self._note((kind, name), "MODIFIED" if noted and noted[0] == uid else "ADDED", uid, text)
                metadata["resourceVersion"] = str(self._revision)
            for key, noted in gone.items():
                self._note(key, "DELETED", *noted)

    def _note(self, key: tuple[str, str], change: str, uid: str, text: str, _: int = 0) -> None:
        former = json.loads(self._noted[key][1])["metadata"].get("labels", {}) if key in self._noted else {}
        content = json.loads(text)
        self._revision += 1
        content["metadata"]["resourceVersion"] = str(self._revision)
        group = content.get("apiVersion", "") if key[0] == "jobs" else ""
        self._history.append(_Change(self._revision, (key[0], group), change, content, former))
        if change == "DELETED":
            del self._noted[key]
        else:
            self._noted[key] = (uid, text, self._revision)

    def _watched(self, place: tuple[str, str], query: Mapping[str, str]) -> Iterator[bytes]:
        """Deliver all changes after a resource version until the time is up, and a bookmark now and then."""
        seen, num_cuts = int(query["resourceVersion"]), self._num_cuts
        ends_at = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        bookmark_at = time.monotonic() + self.bookmark_s
        if seen < self._compacted:  # not an HTTP status: the request itself was valid
            words = f"too old resource version: {seen} ({self._compacted})"
            yield _event("ERROR", json.loads(_status_body(Answer(410, words, "Expired"))))
            return
        place = place if place[0] == "jobs" else (place[0], "")
        while num_cuts == self._num_cuts and time.monotonic() < ends_at:
            with self.lock:
                self._note_changes()
                new = [change for change in self._history if change.revision > seen and change.place == place]
                seen = self._revision
            for change in new:
                is_selected = _is_selected(change.content, query)
                was_selected = _is_selected({"metadata": {"labels": change.former_labels}}, query) and change.type != "ADDED"
                if is_selected or was_selected:
                    kind = "DELETED" if not is_selected else "ADDED" if not was_selected else change.type
                    yield _event(kind, change.content)
            if time.monotonic() >= bookmark_at and query.get("allowWatchBookmarks") == "true":
                bookmark_at = time.monotonic() + self.bookmark_s
                yield _event("BOOKMARK", {"kind": "Object", "metadata": {"resourceVersion": str(seen)}})
            if self._stopped.wait(_LOOK_S):
                return

    def _check_fields(self, found: Object) -> None:
        if wrong := kubernetes_models.problems(found):
            raise _Refused(400, "BadRequest", f"{found.get('kind')}: strict decoding error: {wrong}")

    def _create_event(self, event: Object) -> Object:
        """Store an event of events.k8s.io, which the core API shows with other names of its fields."""
        about, note = event.get("regarding", {}), event.get("note", "")
        required = ("eventTime", "reportingController", "reportingInstance", "action", "reason")
        wrong = [name for name in required if not 1 <= len(event.get(name, "")) <= 128]
        wrong += ["note"] * (len(note.encode()) > 1024) + ["type"] * (event.get("type") not in ("Normal", "Warning"))
        wrong += ["regarding.namespace"] * (about.get("namespace") != event["metadata"].get("namespace", self.namespace))
        wrong += ["metadata.name"] * (not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", event["metadata"]["name"]))
        wrong += ["eventTime"] * (not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", str(event.get("eventTime"))))
        if wrong:
            raise _Refused(422, "Invalid", f'Event.events.k8s.io "{event["metadata"]["name"]}" is invalid: {wrong}')
        name = event["metadata"]["name"]
        if name in self.objects["events"]:
            raise _Refused(409, "AlreadyExists", f'events.events.k8s.io "{name}" already exists')
        core = {"involvedObject": about, "message": note, "reportingComponent": event["reportingController"]}
        kept = ("metadata", "eventTime", "reportingInstance", "action", "reason", "type")
        self.objects["events"][name] = {**{key: event[key] for key in kept}, **core}
        return event

    def _create_budget(self, budget: Object) -> Object:
        name, spec = budget["metadata"]["name"], budget["spec"]
        if name in self.objects["poddisruptionbudgets"]:
            raise _Refused(409, "AlreadyExists", f'poddisruptionbudgets.policy "{name}" already exists')
        if len({"minAvailable", "maxUnavailable"} & spec.keys()) != 1 or not _NAME.fullmatch(name):
            raise _Refused(422, "Invalid", f'PodDisruptionBudget.policy "{name}" is invalid')
        self.objects["poddisruptionbudgets"][name] = budget
        return budget

    def _create_secret(self, secret: Object) -> Object:
        name = secret["metadata"]["name"]
        if name in self.objects["secrets"]:
            raise _Refused(409, "AlreadyExists", f'secrets "{name}" already exists')
        text = secret.pop("stringData", {})
        secret["data"] = {key: base64.b64encode(value.encode()).decode() for key, value in text.items()}
        self.objects["secrets"][name] = secret
        return secret

    def _create_job(self, group: str, job: Object, query: Mapping[str, str]) -> Object:
        name, labels = job["metadata"]["name"], job["metadata"].get("labels", {})
        resource = f"jobs.{group.partition('/')[0]}"
        if wrong := kubernetes_models.problems(job):
            # Without strict validation a server accepts such a Job, and drops the unknown fields.
            assert query.get("fieldValidation") == "Strict", wrong
            raise _Refused(400, "BadRequest", f'Job in version "{group.partition("/")[2]}": strict decoding error: {wrong}')
        if len(self.objects["jobs"]) >= self.max_jobs and name not in self.objects["jobs"]:
            used = f"count/{resource}={len(self.objects['jobs'])}, limited: count/{resource}={self.max_jobs}"
            words = f"exceeded quota: team, requested: count/{resource}=1, used: {used}"
            raise _Refused(403, "Forbidden", f'{resource} "{name}" is forbidden: {words}')
        if name in self.objects["jobs"]:
            raise _Refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
        templates = [job["spec"]["template"]] if group == _PLAIN else [task["template"] for task in job["spec"]["tasks"]]
        values = [value for value in labels.values() if not _LABEL.fullmatch(value)]
        if not _NAME.fullmatch(name) or values or any(t["spec"]["restartPolicy"] == "Always" for t in templates):
            raise _Refused(422, "Invalid", f'Job.batch "{name}" is invalid')
        if not all(container.get("image") for template in templates for container in template["spec"]["containers"]):
            raise _Refused(
                422, "Invalid", f'Job.batch "{name}" is invalid: spec.template.spec.containers[0].image: Required value'
            )
        if group == _VOLCANO and self.dead_webhook:
            url = "https://volcano-admission-service.volcano-system.svc:443/jobs/mutate?timeout=10s"
            words = f'failed calling webhook "mutatejob.volcano.sh": failed to call webhook: Post "{url}": {self.dead_webhook}'
            raise _Refused(500, "InternalError", f"Internal error occurred: {words}")
        if group == _VOLCANO and self.has_webhook:
            if why := kubernetes_volcano.refusal(job, self.queues):
                raise _Refused(400, "", f'admission webhook "validatejob.volcano.sh" denied the request: {why}')
            job = kubernetes_volcano.with_defaults(job)
        if query.get("dryRun") == "All":
            return job
        job["metadata"] |= {"namespace": self.namespace, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        job["status"] = {}
        self.objects["jobs"][name] = job
        if group == _VOLCANO:
            self._start_with_volcano(job)
        elif self.has_kueue and "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]:
            job["spec"]["suspend"] = True
        elif self.pod_security and self._violations(job):
            about = {"kind": "Job", "name": name}
            text = f'Error creating: pods "{name}-{uuid.uuid4().hex[:5]}" is forbidden: violates {self._violations(job)}'
            event = {"metadata": {"name": name}, "involvedObject": about, "type": "Warning", "message": text}
            self.objects["events"][name] = event
        elif self.has_room_for_pods:
            self._create_pod_of(job)
        return job

    def _create_pod_of(self, job: Object) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
        owner = {"apiVersion": _PLAIN, "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
        metadata = {"name": f"{name}-{uuid.uuid4().hex[:5]}", "labels": labels, "ownerReferences": [owner]}
        self._create_pod({"metadata": metadata, "spec": template["spec"]})

    def _violations(self, job: Object) -> str:
        """Return why the level of Pod Security forbids a Job's pod; empty if it does not."""
        spec = job["spec"]
        template = spec["template"] if "template" in spec else spec["tasks"][0]["template"]
        wrong = kubernetes_models.restricted_violations(template["spec"])
        return f'PodSecurity "{self.pod_security}:latest": {", ".join(wrong)}' if wrong else ""

    def _start_with_volcano(self, job: Object) -> None:
        if not self.has_volcano_controller:
            return
        if job["spec"]["queue"] not in self.queues:
            return  # its controller cannot read the queue, and retries silently
        group = kubernetes_volcano.pod_group(job)
        self.objects["podgroups"][group["metadata"]["name"]] = group
        job["status"] = {"state": {"phase": "Pending"}}
        if self.has_room_for_pods:
            group["status"]["phase"] = "Inqueue"
            self._count_with_volcano(job)

    def _count_with_volcano(self, job: Object) -> None:
        """Update the counts, as Volcano's controller does after every change of a Job or its pods."""
        name = job["metadata"]["name"]
        if job["status"]["state"]["phase"] not in (*kubernetes_volcano.ENDED, "Terminating"):
            for pod in kubernetes_volcano.pods_of(job):
                if pod["metadata"]["name"] not in self.objects["pods"]:
                    self._create_pod(pod)
        job["status"] = kubernetes_volcano.with_status(job, [p for p in self.objects["pods"].values() if _job_of(p) == name])

    def _create_pod(self, pod: Object) -> None:
        name, host = pod["metadata"]["name"], f"host-{len(self.hosts) + 1}"
        self.hosts[host] = {"metadata": {"name": host, "labels": {"kubernetes.io/hostname": host}}, "spec": {}}
        self.objects["pods"][name] = {
            "metadata": {
                **pod["metadata"],
                "namespace": self.namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": _now(),
            },
            "spec": {**pod["spec"], "nodeName": host},
            "status": {"phase": "Pending"},
        }
        kubernetes_resizes.admit(self.objects["pods"][name], self.host)
        if self.runs_pods and not pod["spec"].get("schedulingGates"):
            self._run(self.objects["pods"][name])

    def delete(self, kind: str, name: str, grace_s: int | None = None) -> None:
        with self.lock:
            found = self.objects[kind][name]
            if kind in ("secrets", "poddisruptionbudgets"):
                del self.objects[kind][name]
                return
            if kind == "jobs":
                del self.objects["jobs"][name]
                self._collect(found["metadata"]["uid"])
                owned = [p for p in self.objects["pods"].values() if _job_of(p) == name]
                for pod in owned:
                    self.delete("pods", pod["metadata"]["name"])
                self.objects["podgroups"].pop(f"{name}-{found['metadata']['uid']}", None)
                return
            grace_s = found["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            meta = found["metadata"]
            is_first = "deletionTimestamp" not in meta
            shorter_s = meta.get("deletionGracePeriodSeconds", grace_s + 1.0)
            if grace_s < shorter_s:  # the time at which it shall be gone
                meta["deletionTimestamp"], meta["deletionGracePeriodSeconds"] = _now(grace_s), grace_s
            job = self.objects["jobs"].get(_job_of(found), {})
            if is_first and job.get("apiVersion") == _VOLCANO:
                kubernetes_volcano.evicted(job)
                self._count_with_volcano(job)
            if name not in self._processes:
                if not self.runs_pods and found["status"]["phase"] != "Pending":
                    return  # its host is gone; a test removes it
                self._remove(found)
            elif is_first:
                self._signal(name, signal.SIGTERM)
                timer = threading.Timer(meta["deletionGracePeriodSeconds"], self._signal, (name, signal.SIGKILL))
                timer.daemon = True
                timer.start()

    def _remove(self, pod: Object) -> None:
        del self.objects["pods"][pod["metadata"]["name"]]
        self._collect(pod["metadata"]["uid"])
        self._count(pod)

    def _collect(self, owner: str) -> None:
        """Remove what a removed object owned, as the garbage collector does."""
        for kind in ("secrets", "poddisruptionbudgets"):
            for name, found in list(self.objects[kind].items()):
                if any(each["uid"] == owner for each in found["metadata"].get("ownerReferences", ())):
                    del self.objects[kind][name]

    def _count(self, pod: Object) -> None:
        """Update the Job, as the Job controller does when a pod has changed."""
        job = self.objects["jobs"].get(_job_of(pod))
        if job is not None and job["apiVersion"] == _VOLCANO:
            self._count_with_volcano(job)
            return
        if job is None or pod["status"]["phase"] not in ("Succeeded", "Failed"):
            return
        kind, reason = ("Complete", "") if pod["status"]["phase"] == "Succeeded" else ("Failed", "BackoffLimitExceeded")
        message = "Job has reached the specified backoff limit" if reason else ""
        job["status"] = {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": message}]}

    # --- the kubelet ----------------------------------------------------------------------------------------------------

    def _run(self, pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        variables: dict[str, str] = {}
        for variable in container.get("env", []):
            variables[variable["name"]] = _expanded(_value(variable, pod), variables)
        command = [_expanded(word, variables) for word in [*container["command"], *container.get("args", [])]]
        # A process has no mounts of its own: its arguments name the folder in place of the mount.
        volumes = {volume["name"]: volume["secret"] for volume in pod["spec"].get("volumes", ()) if "secret" in volume}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] in volumes:
                folder = self._mounted(volumes[mount["name"]], pod["metadata"]["name"])
                command = [word.replace(mount["mountPath"], str(folder)) for word in command]
        # All pods use this machine as their image, with our interpreter first in PATH.
        path = f"{Path(sys.executable).parent}:{self.environment.get('PATH', '')}"
        limits = PodLimits(pod["metadata"]["name"]) if self.limits_pods else None
        if limits is not None:
            kubernetes_resizes.limit(limits, kubernetes_resizes.resources_of(pod))
        process = subprocess.Popen(
            command,
            preexec_fn=limits.enter if limits is not None else None,
            cwd=container.get("workingDir"),
            env={
                **self.environment,
                **variables,
                "PATH": path,
                POD_VARIABLE: pod["metadata"]["name"],
                "HOSTNAME": pod["metadata"]["name"],
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        entry = _Process(process, limits=limits)
        entry.reader = threading.Thread(target=_read_lines, args=(entry,), daemon=True)
        entry.reader.start()
        self._processes[pod["metadata"]["name"]] = entry
        pod["status"] = {"phase": "Running", "podIP": "127.0.0.1"}
        self._count(pod)

    def _mounted(self, volume: Object, pod: str) -> Path:
        """Write the files of a Secret's volume; return their folder."""
        folder = self.folder / "mounts" / pod
        folder.mkdir(parents=True)
        data = self.objects["secrets"][volume["secretName"]]["data"]
        for item in volume["items"]:
            (folder / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
        return folder

    def _watch_processes(self) -> None:
        while not self._stopped.wait(0.05):
            with self.lock:
                self._settle_resizes()
            for name, entry in list(self._processes.items()):
                code = entry.process.poll()
                if code is None:
                    continue
                if not entry.has_ended:
                    _kill_all(name)  # a container ends with its first process
                    if entry.reader is not None:
                        entry.reader.join(5)
                    if entry.limits is not None:
                        entry.limits.remove()
                    entry.has_ended = True
                with self.lock:
                    pod = self.objects["pods"].get(name)
                    if pod is not None and pod["status"]["phase"] == "Running":
                        code = 128 - code if code < 0 else code
                        ended = {
                            "exitCode": code,
                            "reason": "Completed" if code == 0 else "OOMKilled" if code == 137 else "Error",
                        }
                        pod["status"] = {
                            "phase": "Failed" if code else "Succeeded",
                            "containerStatuses": [_container_status(pod["spec"]["containers"][0], {"terminated": ended})],
                        }
                        self._count(pod)
                    if pod is not None and "deletionTimestamp" in pod["metadata"]:
                        del self._processes[name]  # a newer pod may have the same name
                        self._remove(pod)

    def _settle_resizes(self) -> None:
        """Give running pods the resources that were requested for them, as far as there is room."""
        running = [pod for pod in self.objects["pods"].values() if pod["status"]["phase"] == "Running"]
        for pod in running:
            entry = self._processes.get(pod["metadata"]["name"])
            kubernetes_resizes.settle(pod, running, self.host, entry.limits if entry is not None else None)

    def _signal(self, name: str, number: signal.Signals) -> None:
        """Send SIGKILL to all of a pod's processes, any other signal to the first."""
        entry = self._processes.get(name)
        if entry is None or entry.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            _kill_all(name)
        else:
            entry.process.send_signal(number)

    def _followed_log(self, name: str, query: Mapping[str, str]) -> Iterator[bytes]:
        num_sent, num_cuts = 0, self._num_cuts
        while num_cuts == self._num_cuts:
            with self.lock:
                if name not in self.objects["pods"]:
                    return
                states = self.objects["pods"][name]["status"]
                has_ended = states["phase"] in ("Succeeded", "Failed") or "terminated" in str(states.get("containerStatuses"))
                text = self._log(name, query)
            if text[num_sent:]:
                yield text[num_sent:].encode()
                num_sent = len(text)
            if has_ended or self._stopped.wait(_LOOK_S):
                return

    def _log(self, name: str, query: Mapping[str, str]) -> str:
        pod = self.objects["pods"][name]
        container = pod["spec"]["containers"][0]["name"]
        if query.get("container", container) != container:
            raise _Refused(400, "BadRequest", f"container {query['container']} is not valid for pod {name}")
        if pod["status"]["phase"] == "Pending":
            raise _Refused(400, "BadRequest", f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
        if name in self._processes:
            lines = list(self._processes[name].lines)
            has_stamps = query.get("timestamps", "").lower() == "true"
            text = "".join(f"{f'{stamp} ' if has_stamps else ''}{line.decode(errors='replace')}" for stamp, line in lines)
        else:
            text = self.logs.get(_node_of(pod), "")
        if not (since := query.get("sinceTime")):
            return text
        # A kubelet compares the time of each line separately. It takes times in whole seconds.
        return "".join(line for line in text.splitlines(keepends=True) if _second(line) >= _second(since))


def _second(text: str) -> datetime.datetime:
    """Return the second of the RFC 3339 time at the start of a text."""
    match = re.match(r"([\dT:-]{19})(?:\.\d+)?(Z|[+-]\d\d:\d\d)", text)
    assert match is not None, text
    return datetime.datetime.fromisoformat(match[1] + match[2].replace("Z", "+00:00"))


def _handler(cluster: KubernetesCluster) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer is two writes, and Nagle would hold the second for 40 ms

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client was killed
                super().handle()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization", "").lower() != "bearer secret-token":
                answer = _status(401, "Unauthorized", "Unauthorized")
            else:
                answer = cluster.serve(self.command, self.path, body)
            if answer.delay_s:
                cluster._stopped.wait(answer.delay_s)
            if not answer.status:
                self.close_connection = True
                return
            if answer.stream is not None:
                self._send_stream(answer)
                return
            content = answer.body if answer.body is not None else _status_body(answer)
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(content)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client did not wait
                self.wfile.write(content)

        def _send_stream(self, answer: Answer) -> None:
            if answer.is_buffered:
                answer = dataclasses.replace(answer, stream=iter([b"".join(answer.stream or ())]))
            self.send_response(answer.status)
            for name, value in {"Transfer-Encoding": "chunked", **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client has read enough
                for piece in filter(None, answer.stream or ()):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def kubernetes_cluster(folder: Path, **options: Any) -> Iterator[KubernetesCluster]:
    """A running cluster; `kubeconfig` holds its address."""
    kubernetes_models.models()  # not in the first request, whose client would wait
    cluster = KubernetesCluster(folder, **options)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def _read_lines(entry: _Process) -> None:
    assert entry.process.stdout is not None
    for line in entry.process.stdout:
        entry.lines.append((_now(), line))


def _kill_all(pod: str) -> None:
    """End all processes of a pod: torchrun starts each worker in its own session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(POD_VARIABLE) == pod:
                found.append(process)
    # The worker first: once its agent is gone it receives SIGTERM, and may leave a moment later.
    for process in sorted(found, key=lambda p: p.pid, reverse=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _container_status(container: Mapping[str, Any], state: Object) -> Object:
    known = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False, "restartCount": 0}
    return {**known, "state": state}


def _value(variable: Mapping[str, Any], pod: Object) -> str:
    if "valueFrom" not in variable:
        return str(variable.get("value", ""))
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    known = {"metadata.name": pod["metadata"]["name"], "metadata.namespace": pod["metadata"]["namespace"]}
    return str(known.get(path, "127.0.0.1"))


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand $(NAME) where NAME is known, and $$ to one $."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]+)\)", replaced, text)


def _is_selected(found: Object, query: Mapping[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    wanted = [term.split("=", 1) for term in query.get("labelSelector", "").split(",") if term]
    fields = [term.split("=", 1) for term in query.get("fieldSelector", "").split(",") if term]

    def at(path: str) -> Any:
        place: Any = found
        for part in path.split("."):
            place = place.get(part, {})
        return place

    return all(labels.get(n) == v for n, v in wanted) and all(at(n) == v for n, v in fields)


def _job_of(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return str(labels.get("batch.kubernetes.io/job-name") or labels.get("volcano.sh/job-name"))


def _node_of(found: Object) -> str:
    return str(found["metadata"].get("labels", {}).get("lightning-dlrover/node", ""))


def _has_ended(job: Object) -> bool:
    if job["apiVersion"] == _VOLCANO:
        return job["status"].get("state", {}).get("phase") in kubernetes_volcano.ENDED
    return bool(job["status"].get("conditions"))


def _joined(*parts: str) -> str:
    return "/".join(filter(None, parts))


def _now(plus_s: float = 0.0) -> str:
    now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=plus_s)
    return f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond:06d}000Z"


def _json(status: int, content: Object) -> Answer:
    return Answer(status, body=json.dumps(content).encode(), headers={"Content-Type": "application/json"})


def _method(method: str, path: str) -> str:
    """Return a request's method; WATCH for a watch, which is a GET of another kind."""
    return "WATCH" if method == "GET" and "watch=true" in path.partition("?")[2].split("&") else method


def _event(kind: str, content: Object) -> bytes:
    return json.dumps({"type": kind, "object": content}).encode() + b"\n"


def _status(status: int, reason: str, message: str) -> Answer:
    return Answer(status, message, reason)


def _status_body(answer: Answer) -> bytes:
    content = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": answer.status}
    return json.dumps({**content, "reason": answer.reason, "message": answer.message}).encode()
