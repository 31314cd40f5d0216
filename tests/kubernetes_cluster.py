"""A Kubernetes cluster of one process: an API server over HTTP, its Job controller, and a kubelet that runs pods as processes.

What it answers is what a real one does, as far as a target asks: names and labels are checked, a name is taken once, lists obey
selectors, a pod that is deleted is told SIGTERM and goes when its process has ended, a Job counts its pod. A test may have the
next requests fail (`answer_next`), and may do what hosts and their owners do to pods.
"""

from __future__ import annotations

import contextlib
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
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

__all__ = ["Answer", "KubernetesCluster", "kubernetes_cluster"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

POD_VARIABLE = "KUBERNETES_TEST_POD"
"""In the environment of every process of a pod: its name."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a request is answered with instead of, or after, being carried out."""

    status: int = 0  # 0: the connection is closed without an answer
    message: str = ""
    reason: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    is_carried_out: bool = False
    delay_s: float = 0.0


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass
class _Process:
    process: subprocess.Popen[bytes]
    lines: list[tuple[str, bytes]] = field(default_factory=list)  # with the time at which each was written
    reader: threading.Thread | None = None


class KubernetesCluster:
    """Made by `kubernetes_cluster`.

    Args:
        folder: of the kubeconfig.
        runs_pods: else they stay Pending until the test says otherwise.
        environment: of pods, beside their own variables.
        tls: the server speaks HTTPS.
    """

    namespace = "training"

    def __init__(
        self,
        folder: Path,
        runs_pods: bool = True,
        environment: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.folder = folder
        self.runs_pods = runs_pods
        self.environment = dict(os.environ if environment is None else environment)
        self.lock = threading.RLock()
        self.objects: dict[str, dict[str, Object]] = {"jobs": {}, "pods": {}, "events": {}}
        self.requests: list[tuple[str, str]] = []  # method, path with query
        self.max_jobs = 1000
        self.has_room_for_pods = True
        self.logs: dict[str, str] = {}  # of pods that no process runs for
        self.forbidden: set[tuple[str, str]] = set()  # verb and resource
        self.killing: tuple[str, Callable[[], None]] | None = None  # when the next Job is created, before or after
        self._answers: list[tuple[str, str, Answer]] = []
        self._processes: dict[str, _Process] = {}  # by a pod's name
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.05), daemon=True)
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
        """End the server and everything that runs in a pod."""
        self._stopped.set()
        self._kubelet.join(5)
        for name, entry in list(self._processes.items()):
            _kill_all(name)
            entry.process.wait(10)
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    # --- what a test does -----------------------------------------------------------------------------------------------

    def answer_next(self, method: str, kind: str, *answers: Answer) -> None:
        """Have the next requests of this method, for this kind of object, answered so."""
        with self.lock:
            self._answers += [(method, kind, answer) for answer in answers]

    def clear_answers(self) -> None:
        with self.lock:
            self._answers.clear()

    def num_requests(self, method: str, kind: str) -> int:
        with self.lock:
            return sum(m == method and f"/{kind}" in path for m, path in self.requests)

    def pod_of(self, node: str) -> Object:
        with self.lock:
            return next(p for p in self.objects["pods"].values() if p["metadata"]["labels"]["lightning-dlrover/node"] == node)

    def nodes(self) -> list[str]:
        """Of all Jobs that have not ended."""
        with self.lock:
            jobs = [j for j in self.objects["jobs"].values() if not j["status"].get("conditions")]
            return sorted(j["metadata"]["labels"]["lightning-dlrover/node"] for j in jobs)

    def set_pod(self, node: str, phase: str, **status: Any) -> None:
        """What a kubelet, or a controller of hosts, writes about a pod."""
        with self.lock:
            pod = self.pod_of(node)
            pod["status"] = {"phase": phase, **status}
            self._count(pod)

    def remove_pod(self, node: str) -> None:
        """What is left of an evicted pod in the end."""
        with self.lock:
            pod = self.objects["pods"].pop(self.pod_of(node)["metadata"]["name"])
            self._count({**pod, "status": {"phase": "Failed"}} if pod["status"]["phase"] in ("Pending", "Running") else pod)

    def kill_pod(self, node: str) -> None:
        """What the kernel does when a pod's memory is too small."""
        self._signal(self.pod_of(node)["metadata"]["name"], signal.SIGKILL)

    def evict(self, node: str) -> None:
        """What `kubectl drain` does."""
        pod = self.pod_of(node)
        self.delete("pods", pod["metadata"]["name"], pod["spec"]["terminationGracePeriodSeconds"])

    # --- the API --------------------------------------------------------------------------------------------------------

    def serve(self, method: str, path: str, body: bytes) -> Answer:
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match = re.fullmatch(r"/(?:api/v1|apis/batch/v1)/namespaces/([^/]+)/(jobs|pods|events)(?:/([^/]+))?(/log)?", url.path)
        with self.lock:
            self.requests.append((method, path))
            if match is None or ("/apis/batch/" in path) != (match[2] == "jobs"):
                return _status(404, "NotFound", "the server could not find the requested resource")
            kind = match[2]
            override = next((a for a in self._answers if a[0] == method and a[1] == (kind + (match[4] or ""))), None)
            if override is not None:
                self._answers.remove(override)
            killing, self.killing = (self.killing, None) if (method, kind) == ("POST", "jobs") else (None, self.killing)
        if killing is not None and killing[0] == "before":
            killing[1]()
            return Answer()
        if override is not None and not override[2].is_carried_out:
            return override[2]
        try:
            with self.lock:
                verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if match[3] else "list")
                resource = kind + (match[4] or "")
                if match[1] != self.namespace or (verb, resource) in self.forbidden:
                    user = "system:serviceaccount:training:controller"
                    words = f'User "{user}" cannot {verb} resource "{resource}" in the namespace "{match[1]}"'
                    raise _Refused(403, "Forbidden", f"{resource} is forbidden: {words}")
                answer = self._carry_out(verb, kind, match[3] or "", bool(match[4]), query, json.loads(body or b"{}"))
        except _Refused as refused:
            return _status(refused.status, refused.reason, str(refused))
        if killing is not None:
            killing[1]()
        return override[2] if override is not None else answer

    def _carry_out(self, verb: str, kind: str, name: str, is_log: bool, query: Mapping[str, str], body: Object) -> Answer:
        if verb == "create":
            return _json(201, self._create_job(body))
        if verb == "list":
            found = [o for o in self.objects[kind].values() if _is_selected(o, query)]
            return _json(200, {"kind": f"{kind[:-1].capitalize()}List", "metadata": {"resourceVersion": "1"}, "items": found})
        if name not in self.objects[kind]:
            group = "jobs.batch" if kind == "jobs" else kind
            raise _Refused(404, "NotFound", f'{group} "{name}" not found')
        if is_log:
            return Answer(200, body=self._log(name, query).encode())
        if verb == "delete":
            found_object = self.objects[kind][name]
            self.delete(kind, name, body.get("gracePeriodSeconds"))
            return _json(200, found_object)
        return _json(200, self.objects[kind][name])

    def _create_job(self, job: Object) -> Object:
        name, labels = job["metadata"]["name"], job["metadata"].get("labels", {})
        if len(self.objects["jobs"]) >= self.max_jobs and name not in self.objects["jobs"]:
            used = f"count/jobs.batch={len(self.objects['jobs'])}, limited: count/jobs.batch={self.max_jobs}"
            words = f"exceeded quota: team, requested: count/jobs.batch=1, used: {used}"
            raise _Refused(403, "Forbidden", f'jobs.batch "{name}" is forbidden: {words}')
        if name in self.objects["jobs"]:
            raise _Refused(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        pod = job["spec"]["template"]["spec"]
        wrong = [value for value in labels.values() if not _LABEL.fullmatch(value)]
        if not _NAME.fullmatch(name) or wrong or pod["restartPolicy"] not in ("Never", "OnFailure"):
            raise _Refused(422, "Invalid", f'Job.batch "{name}" is invalid')
        if not all(container.get("image") for container in pod["containers"]):
            raise _Refused(
                422, "Invalid", f'Job.batch "{name}" is invalid: spec.template.spec.containers[0].image: Required value'
            )
        job["metadata"] |= {"namespace": self.namespace, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        job["status"] = {}
        self.objects["jobs"][name] = job
        if self.has_room_for_pods:
            self._create_pod(job)
        return job

    def _create_pod(self, job: Object) -> None:
        template, job_name = job["spec"]["template"], job["metadata"]["name"]
        name = f"{job_name}-{uuid.uuid4().hex[:5]}"
        pod = {
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": job_name},
                "creationTimestamp": _now(),
            },
            "spec": {**template["spec"], "nodeName": "host-1"},
            "status": {"phase": "Pending"},
        }
        self.objects["pods"][name] = pod
        if self.runs_pods:
            self._run(pod)

    def delete(self, kind: str, name: str, grace_s: int | None = None) -> None:
        with self.lock:
            found = self.objects[kind][name]
            if kind == "jobs":
                del self.objects["jobs"][name]
                owned = [p for p in self.objects["pods"].values() if _job_of(p) == name]
                for pod in owned:
                    self.delete("pods", pod["metadata"]["name"])
                return
            grace_s = found["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
            meta = found["metadata"]
            is_first = "deletionTimestamp" not in meta
            meta["deletionTimestamp"] = meta.get("deletionTimestamp", _now())
            meta["deletionGracePeriodSeconds"] = min(grace_s, meta.get("deletionGracePeriodSeconds", grace_s))
            if name not in self._processes:
                if not self.runs_pods:
                    return  # its host is not there; a test removes it
                del self.objects["pods"][name]
            elif is_first:
                self._signal(name, signal.SIGTERM)
                timer = threading.Timer(meta["deletionGracePeriodSeconds"], self._signal, (name, signal.SIGKILL))
                timer.daemon = True
                timer.start()

    def _count(self, pod: Object) -> None:
        """What the Job controller does when a pod has ended."""
        job = self.objects["jobs"].get(_job_of(pod))
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
            variables[variable["name"]] = _expanded(variable["value"], variables)
        command = [_expanded(word, variables) for word in [*container["command"], *container.get("args", [])]]
        # The image of all pods is this machine, where our interpreter is the first.
        path = f"{Path(sys.executable).parent}:{self.environment.get('PATH', '')}"
        process = subprocess.Popen(
            command,
            cwd=container.get("workingDir"),
            env={**self.environment, **variables, "PATH": path, POD_VARIABLE: pod["metadata"]["name"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        entry = _Process(process)
        entry.reader = threading.Thread(target=_read_lines, args=(entry,), daemon=True)
        entry.reader.start()
        self._processes[pod["metadata"]["name"]] = entry
        pod["status"] = {"phase": "Running"}

    def _watch_processes(self) -> None:
        while not self._stopped.wait(0.05):
            for name, entry in list(self._processes.items()):
                code = entry.process.poll()
                if code is None:
                    continue
                _kill_all(name)  # a container ends with its first process
                if entry.reader is not None:
                    entry.reader.join(5)
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
                            "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
                        }
                        self._count(pod)
                    if pod is not None and "deletionTimestamp" in pod["metadata"]:
                        del self.objects["pods"][name]

    def _signal(self, name: str, number: signal.Signals) -> None:
        """SIGKILL is for all of a pod's processes, anything else for the first."""
        entry = self._processes[name]
        if entry.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            _kill_all(name)
        else:
            entry.process.send_signal(number)

    def _log(self, name: str, query: Mapping[str, str]) -> str:
        assert query["container"] == "worker"
        assert query["timestamps"] == "true"
        pod = self.objects["pods"][name]
        if pod["status"]["phase"] == "Pending":
            raise _Refused(400, "BadRequest", f'container "worker" in pod "{name}" is waiting to start: ContainerCreating')
        if name in self._processes:
            text = "".join(f"{stamp} {line.decode(errors='replace')}" for stamp, line in self._processes[name].lines)
        else:
            text = self.logs.get(_node_of(pod), "")
        since = query.get("sinceTime", "")[:19]  # an API server knows seconds only
        return "".join(line for line in text.splitlines(keepends=True) if line[:19] >= since)


def _handler(cluster: KubernetesCluster) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer is two writes: the second would wait 40 ms for the first one's receipt

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # who has asked was killed
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
            content = answer.body if answer.body is not None else _status_body(answer)
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(content)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # who has asked did not wait
                self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _serve

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def kubernetes_cluster(folder: Path, **options: Any) -> Iterator[KubernetesCluster]:
    """A running cluster; `kubeconfig` names it."""
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
    """End all processes of a pod: torchrun starts each worker in a session of its own."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(POD_VARIABLE) == pod:
                found.append(process)
    # The worker first: once its agent is gone it is asked to leave, and may have done so a moment later.
    for process in sorted(found, key=lambda p: p.pid, reverse=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) is replaced where NAME is known; $$ is one $."""

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
    return str(pod["metadata"]["labels"]["batch.kubernetes.io/job-name"])


def _node_of(found: Object) -> str:
    return str(found["metadata"]["labels"]["lightning-dlrover/node"])


def _now() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond:06d}000Z"


def _json(status: int, content: Object) -> Answer:
    return Answer(status, body=json.dumps(content).encode(), headers={"Content-Type": "application/json"})


def _status(status: int, reason: str, message: str) -> Answer:
    return Answer(status, message, reason)


def _status_body(answer: Answer) -> bytes:
    content = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": answer.status}
    return json.dumps({**content, "reason": answer.reason, "message": answer.message}).encode()
