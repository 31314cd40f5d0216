"""Nodes on Kubernetes: one independent single-pod Job per node, all of which join one rendezvous.

`KubernetesTarget` implements `Target`. The manifest of a Job is a pure function of the options and the node's size.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_dlrover import variables
from lightning_dlrover.components.targets.kubernetes_api import (
    READ_FILE,
    ApiError,
    KubernetesApi,
    PodLogs,
    kind_of_refusal,
    own_pod,
)
from lightning_dlrover.components.targets.local import node_app
from lightning_dlrover.components.targets.target import (
    ANY_SIZE,
    CANNOT_START,
    App,
    AppStatus,
    NodeSize,
    NodeSpec,
    NotTakenError,
    Polling,
    TargetError,
    existing_logs,
    set_aside,
    thread_variables,
)
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, read_password

PLAIN_JOBS, VOLCANO_JOBS = "batch/v1", "batch.volcano.sh/v1alpha1"
"""API versions of a node's Job; its controller creates the pod."""

CONTAINER = "worker"
JOB_LABEL, NODE_LABEL, MARK_LABEL = (f"lightning-dlrover/{name}" for name in ("job", "node", "mark"))

KUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KUEUE = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
"""API versions of Kueue, newest first. It suspends a Job with that label until the queue has room."""

SECRET_FOLDER = "/etc/dlrover/etcd"
SECRET_KEYS = {"password_file": "password", "ca_cert": "ca.crt", "cert": "tls.crt", "cert_key": "tls.key"}
"""Keys in a Secret that hold etcd's credentials. The last three match a Secret of type kubernetes.io/tls."""

MIN_VERSION = (1, 29)
"""Oldest release whose Jobs have a `podReplacementPolicy` by default."""

REMEMBERED_S = 3600
"""Seconds that the cluster keeps an ended Job, so that a later controller can still read its outcome."""


@dataclass(frozen=True)
class Mount:
    """A persistent volume claim in a node's pod."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class KubernetesOptions:
    """Settings of each node's pod. An empty one keeps the default of the cluster or the image."""

    image: str = ""
    namespace: str = ""  # default: kubectl's, or the namespace of this process
    service_account: str = ""
    gpus: str = ""  # GPUs of each node, [RESOURCE:]NUMBER
    node_selector: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    secret: str = ""  # name of the Secret with etcd's credentials
    endpoint: str = ""  # address of etcd inside pods; default: the same as for this process
    image_pull_secret: str = ""
    work_dir: str = ""
    python: str = "python"  # interpreter in the image
    grace_s: int = 120  # seconds that an ending pod has for its hand-over
    template: Mapping[str, Any] = field(default_factory=dict)  # base pod template; our fields override it
    queue: str = ""  # Volcano's queue, or Kueue's for plain Jobs
    job_labels: Mapping[str, str] = field(default_factory=dict)  # further ones of the Job, such as Kueue's priority class
    job_annotations: Mapping[str, str] = field(default_factory=dict)
    plain_jobs: bool = False  # ignore Volcano even if the cluster has it
    run_as: str = ""  # UID[:GID] of the container's processes, or root; default: the image's user, which must not be root

    def resources(self, size: NodeSize) -> dict[str, str]:
        """Return requests, which are also the limits: a worker's speed must not depend on other pods of its host."""
        asked = {"cpu": str(size.cpus or 1)}
        if size.memory_mb:
            asked["memory"] = f"{size.memory_mb}Mi"
        if self.gpus:
            resource, _, number = self.gpus.rpartition(":")
            asked[resource or "nvidia.com/gpu"] = number
        return asked


def job_name(run_id: str, node: str, mark: str) -> str:
    """Return a Job's name: lower-case letters, digits and hyphens; short enough for Volcano's pod names (63)."""
    return f"{_slug(run_id)[:30].rstrip('-')}-{node}-{mark}"


def secret_name(run_id: str, mark: str) -> str:
    """Return the name of the Secret with the password of a job's own etcd."""
    return job_name(run_id, "etcd", mark)


def secret_manifest(run_id: str, mark: str, password: str, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the Secret with the password of a job's own etcd. The cluster removes it with `owner`, the pod of etcd."""
    metadata: dict[str, Any] = {"name": secret_name(run_id, mark), **_labelled(run_id, mark)}
    if owner is not None:
        reference = {"apiVersion": "v1", "kind": "Pod", **{name: owner["metadata"][name] for name in ("name", "uid")}}
        metadata["ownerReferences"] = [reference]
    data = {SECRET_KEYS["password_file"]: password}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "immutable": True, "stringData": data}


def _labelled(run_id: str, mark: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "lightning-dlrover", JOB_LABEL: _slug(run_id)[:63].strip("-"), MARK_LABEL: mark}
    return {"labels": labels, "annotations": {JOB_LABEL: run_id}}


def job_manifest(
    spec: NodeSpec, options: KubernetesOptions, size: NodeSize, node: str, mark: str, api_version: str = PLAIN_JOBS
) -> dict[str, Any]:
    """Return the Job of one node. It has one pod and no retries, because a new node has a new name.

    Raises:
        TargetError: etcd needs credential files, and no Secret is set.
    """
    metadata = _labelled(spec.run_id, mark)
    metadata["labels"][NODE_LABEL] = node
    base = _laid_over({"spec": _security(options.run_as)}, options.template)
    template = _laid_over(base, {"metadata": metadata, "spec": _pod_spec(spec, options, size, node)})
    in_kueue = {KUEUE_LABEL: options.queue} if options.queue and api_version == PLAIN_JOBS else {}
    of_job = {
        "labels": {**options.job_labels, **in_kueue, **metadata["labels"]},
        "annotations": {**options.job_annotations, **metadata["annotations"]},
    }
    return {
        "apiVersion": api_version,
        "kind": "Job",
        "metadata": {"name": job_name(spec.run_id, node, mark), **of_job},
        "spec": _plain_spec(template) if api_version == PLAIN_JOBS else _volcano_spec(template, options.queue),
    }


def _plain_spec(template: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        # A terminating pod has not failed yet: it is handing over.
        "podReplacementPolicy": "Failed",
        "ttlSecondsAfterFinished": REMEMBERED_S,
        "template": template,
    }


def _volcano_spec(template: Mapping[str, Any], queue: str) -> dict[str, Any]:
    """Return Volcano's Job spec, without plugins.

    TorchX enables `svc`, which blocks traffic from outside the Job. Nodes are Jobs of their own and must reach each other.
    """
    priority = template["spec"].get("priorityClassName")
    return {
        "schedulerName": "volcano",
        "queue": queue or "default",
        # sets the Job's place in the queue, which ignores the pod's priority
        **({"priorityClassName": priority} if priority else {}),
        "minAvailable": 1,
        # Volcano would recreate a deleted pod under its name. `maxRetry` does not prevent that, and 0 means 3.
        "policies": [{"event": "PodEvicted", "action": "TerminateJob"}],
        "maxRetry": 0,
        "ttlSecondsAfterFinished": REMEMBERED_S,
        # TorchX finds pods by this name, the one of a role's first replica: its `status` and `log` work on nodes, too.
        "tasks": [{"name": f"{CONTAINER}-0", "replicas": 1, "template": template}],
    }


def _security(run_as: str) -> dict[str, Any]:
    """Return the part of a pod's spec that the Pod Security Standard `restricted` asks for, unless it is to run as root."""
    if run_as == "root":
        return {"securityContext": {"runAsUser": 0}}
    user, _, group = run_as.partition(":")
    pod: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod |= {"runAsUser": int(user)} if user else {}
    # Volumes belong to the group, so that a user who is not root may write to them.
    pod |= {"runAsGroup": int(group), "fsGroup": int(group)} if group else {}
    container = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"securityContext": pod, "containers": [{"name": CONTAINER, "securityContext": container}]}


def _pod_spec(spec: NodeSpec, options: KubernetesOptions, size: NodeSize, node: str) -> dict[str, Any]:
    files = {name: key for name, key in SECRET_KEYS.items() if name in spec.access}
    if files and not options.secret:
        raise TargetError(
            f"pods cannot read {', '.join(spec.access[name] for name in files)} of this machine: put them into a Secret, under "
            f"{', '.join(files.values())}, and name it with --secret"
        )
    access = {**spec.access, **{name: f"{SECRET_FOLDER}/{key}" for name, key in files.items()}}
    inside = replace(spec, endpoint=options.endpoint or spec.endpoint, access=access)
    role = node_app(inside, node, dollar="$$").roles[0]
    resources = options.resources(size)
    exported = {**thread_variables(size.cpus, spec.workers_per_node), "PYTHONUNBUFFERED": "1", **role.env, **spec.environment}
    exported[variables.LEAVE_ON_SIGTERM] = "1"
    # Loader workers pass batches through shared memory, and NCCL the data of one pod's workers. A container has 64 MB of it by
    # default.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if files:
        items = [{"key": key, "path": key} for key in files.values()]
        volumes.append({"name": "etcd-access", "secret": {"secretName": options.secret, "items": items}})
        mounts.append({"name": "etcd-access", "mountPath": SECRET_FOLDER, "readOnly": True})
    for number, mount in enumerate(options.mounts):
        volumes.append({"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": mount.claim}})
        mounts.append({"name": f"mount-{number}", "mountPath": mount.path, "readOnly": mount.read_only})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "command": [options.python],
        # Kubernetes expands $(...) and turns $$ into $.
        "args": [argument.replace("$", "$$") for argument in role.args],
        "env": [{"name": name, "value": value.replace("$", "$$")} for name, value in exported.items()],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    container |= {"image": options.image} if options.image else {}
    container |= {"workingDir": options.work_dir} if options.work_dir else {}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        # Training never calls the Kubernetes API.
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }
    pod |= {"serviceAccountName": options.service_account} if options.service_account else {}
    pod |= {"nodeSelector": dict(options.node_selector)} if options.node_selector else {}
    pod |= {"imagePullSecrets": [{"name": options.image_pull_secret}]} if options.image_pull_secret else {}
    return pod


def _laid_over(base: Any, ours: Any) -> Any:
    """Merge ours into a template: our fields win, lists are joined, and entries with the same name are merged recursively."""
    if isinstance(base, Mapping) and isinstance(ours, Mapping):
        return {**base, **{name: _laid_over(base[name], value) if name in base else value for name, value in ours.items()}}
    if isinstance(base, list) and isinstance(ours, list):
        named = {item["name"]: item for item in ours if isinstance(item, Mapping) and "name" in item}
        kept = [_laid_over(i, named.pop(i["name"])) if isinstance(i, Mapping) and i.get("name") in named else i for i in base]
        return [*kept, *(i for i in ours if not (isinstance(i, Mapping) and "name" in i) or i["name"] in named)]
    return ours


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "job"


log = logging.getLogger(__name__)

_LAST_WORDS_S = 10.0
"""Maximum seconds to wait for an ended node's output before its end is reported."""

_CANCEL_GRACE_S = 30
"""Seconds from a node's cancellation to its pod's SIGKILL. A cancelled node has nothing, or no peer, to hand over."""

_LOST_S = 60.0
"""Seconds beyond its grace period after which a terminating pod counts as lost: its host is unreachable."""

_DISMISS_S = 30.0
"""Seconds between two requests to delete a pod that has outlived its worker."""

_MAX_PAUSE_S = 60.0
"""Maximum seconds between two requests to delete ended Jobs while the cluster refuses."""

_ASK_WHY_S = 30.0
"""Seconds between two reads of a waiting node's events."""


@dataclass(frozen=True)
class _State:
    """State of a node and its cause, as reported by the cluster."""

    status: AppStatus
    why: str = ""


@dataclass
class _Seen:
    """One node's objects in the newest lists."""

    job: Mapping[str, Any] | None = None
    pods: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def pod(self) -> Mapping[str, Any] | None:
        return max(self.pods, key=_created, default=None)


class KubernetesTarget:
    """Create, watch and delete one-node Jobs.

    Where the cluster has Volcano, nodes are Volcano Jobs and wait in its queues like other workloads. Elsewhere they are
    plain batch/v1 Jobs. A pod's state takes precedence over its Job's, which may count the pod as failed during its hand-over.
    A failed API call never means that a node has ended.

    Args:
        log_dir: local folder; each node's output is copied into a subfolder. None: output is not copied.
        poll_s: minimum interval between queries; two requests cover all nodes.
        api: default: the cluster that kubectl would use.
        api_version: API version of the nodes' Jobs; default: Volcano's if the cluster has it, unless the options require plain
            Jobs.
        output_since: RFC 3339; earlier output of the pods is skipped.
        clock: time of queries and of all waits for nodes.
        has_own_etcd: the job's etcd serves this job alone. Its password reaches the pods in a Secret that is removed with the
            last node.

    Raises:
        TargetError: the cluster is not configured or does not answer, the package is missing, or the options are invalid.
    """

    outlives_controller = True
    spares: None = None

    def __init__(
        self,
        spec: NodeSpec,
        options: KubernetesOptions,
        log_dir: Path | None,
        poll_s: float = 2.0,
        api: KubernetesApi | None = None,
        api_version: str = "",
        output_since: str = "",
        clock: Callable[[], float] = time.monotonic,
        has_own_etcd: bool = False,
    ) -> None:
        self._makes_secret = has_own_etcd and "password_file" in spec.access
        self._has_made_secret = False
        if self._makes_secret:
            options = replace(options, secret=secret_name(spec.run_id, ""))  # the mark follows in `open`
        job_manifest(spec, options, ANY_SIZE, "node0", "")  # fail on invalid options now, once, instead of for every node
        self._spec = spec
        self._options = options
        self._log_dir = log_dir
        self._clock = clock
        self._api = api or KubernetesApi()
        self._namespace = options.namespace or self._api.namespace
        if not api_version:
            _check_version(self._api)
        self._api_version = api_version or _offered(self._api, options)
        # With another namespace or the other kind of Job, a later controller would find no node and consider all deleted.
        self.name = f"kubernetes/{self._namespace}{'/volcano' if self._api_version == VOLCANO_JOBS else ''}"
        self._mark = ""
        nothing_seen: dict[str, _Seen] = {}  # key: node
        self._polling = Polling(self._list, nothing_seen, poll_s, clock)
        self._known: dict[str, AppStatus] = {}  # key: handle
        self._cancelled: set[str] = set()  # nodes
        self._terminating_since: dict[str, float] = {}  # key: pod name
        self._ended_at: dict[str, float] = {}  # key: node; start of the wait for its remaining output
        self._logged_waits: dict[str, str] = {}  # key: node; kind of the last logged reason for waiting
        self._asked_why_at: dict[str, float] = {}  # key: node
        self._dismissed_at: dict[str, float] = {}  # key: node; last request to delete a pod that has outlived its worker
        self._release_at = -float("inf")  # time of the next request to delete an ended Job
        self._release_pause_s = 0.0  # after a refused one
        self._logs = (
            PodLogs(self._api, self._namespace, CONTAINER, log_dir, min(1.0, poll_s), output_since)
            if log_dir is not None
            else None
        )

    def open(self, mark: str) -> None:
        self._mark = mark
        if self._makes_secret:
            self._options = replace(self._options, secret=secret_name(self._spec.run_id, mark))

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        manifest = job_manifest(self._spec, self._options, size, node, self._mark, self._api_version)
        name = manifest["metadata"]["name"]
        self._set_former_output_aside(node)
        self._make_secret()  # before the first pod that mounts it
        try:
            self._api.create_job(self._namespace, manifest)
        except ApiError as error:
            if error.status == 409 and error.reason != "Conflict":
                self._check_that_it_is_ours(name, node)
            elif error.uncertain:
                raise TargetError(f"whether Job {name} was created is not known: {error}") from error
            else:
                forbidden = self._api_version == VOLCANO_JOBS and "cannot create resource" in str(error)
                instead = "; --plain-jobs starts nodes without Volcano" if forbidden else ""
                raise NotTakenError(f"Job {name} was not created: {error}{instead}", error.kind) from error
        self._polling.note_start(node)
        return self._handle(node)

    def owns(self, node: str, handle: str) -> bool:
        return handle == self._handle(node)

    def apps(self) -> Sequence[App]:
        self._refresh()
        self._polling.raise_trouble()
        found = self._polling.newest.items()
        return [App(node, self._handle(node), self._state(seen).status in ("pending", "running")) for node, seen in found]

    def status(self, handle: str) -> AppStatus:
        known = self._known.get(handle, "pending")
        if known not in ("pending", "running"):
            return known  # final
        self._refresh()
        node = handle.split("/")[1]
        seen = self._polling.newest.get(node)
        if seen is not None:
            state = self._state(seen)
        elif not self._polling.covers(node):
            return known
        else:
            # A deleted Job leaves no reason. One that ended normally stays visible for an hour.
            state = _State("failed", "" if node in self._cancelled else "its Job was deleted")
        if state.status == "pending" and known == "running" and seen is not None and _is_suspended(seen):
            # It would come back under a name whose worker has left. Another node waits in its place.
            state = _State("failed", f"its Job was suspended ({_waits_in_queue(seen)})")
        if state.status == "pending" and known == "running":
            return known  # its pod has just been deleted, and the Job's status does not reflect it yet
        if state.status not in ("pending", "running") and not self._has_last_words(node, state):
            return known
        self._known[handle] = state.status
        return state.status

    def cancel(self, handles: Iterable[str]) -> None:
        problem: ApiError | None = None
        for handle in handles:
            name, node = handle.split("/")
            self._cancelled.add(node)
            seen = self._polling.newest.get(node)
            try:
                # The Job first: otherwise it would see its pod fail.
                self._api.delete_job(self._namespace, self._api_version, name)
                for pod in seen.pods if seen else ():
                    self._api.delete_pod(self._namespace, pod["metadata"]["name"], _CANCEL_GRACE_S)
            except ApiError as error:
                problem = error
                if not error.status:
                    break  # the API server is unreachable, and every further request would wait as long
        self._polling.hasten()
        if problem is not None:
            raise TargetError(f"not all nodes could be deleted: {problem}") from problem

    def release(self, handle: str) -> bool:
        """Delete an ended node's Job, which may count against a quota, once all of its output is here."""
        name, node = handle.split("/")
        seen = self._polling.newest.get(node)
        if seen is None:
            return self._polling.covers(node)
        if self._clock() < self._release_at or (self._logs is not None and not self._logs.finish(node)):
            return False
        try:
            self._api.delete_job(self._namespace, self._api_version, name)
        except ApiError as error:
            level = logging.DEBUG if self._release_pause_s else logging.WARNING
            log.log(level, "run %s: ended Jobs stay for now, and count against quotas: %s", self._spec.run_id, error)
            self._release_pause_s = min(_MAX_PAUSE_S, 2.0 * self._release_pause_s or 2.0)
            self._release_at = self._clock() + self._release_pause_s
            return False
        self._release_pause_s = 0.0
        return True

    def ran_out_of_memory(self, handle: str) -> bool:
        seen = self._polling.newest.get(handle.split("/")[1])
        pod = seen.pod if seen is not None else None
        return pod is not None and "OOMKilled" in _why_it_failed(pod.get("status", {}))

    def wants_back(self, handle: str) -> bool:
        return False  # SIGTERM notifies the pod directly, and the node leaves on its own

    def logs(self, handle: str) -> list[Path]:
        return existing_logs(self._log_dir / handle.split("/")[1]) if self._log_dir is not None else []

    def copy_output(self, timeout_s: float) -> None:
        """Copy all output printed so far; raise TargetError at the timeout. 0 leaves the copying to the background thread."""
        nodes = {app.node for app in self.apps()}
        deadline = time.monotonic() + timeout_s
        while timeout_s and self._logs is not None and (left := [n for n in nodes if not self._logs.finish(n)]):
            if time.monotonic() > deadline:
                raise TargetError(
                    f"the cluster has not returned the output of {', '.join(sorted(left))} within {timeout_s:.0f} s"
                )
            time.sleep(0.02)

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()
        if self._makes_secret and self._mark:
            try:
                # Nodes that outlive this process read the password again whenever they need a token.
                if not any(self._state(seen).status in ("pending", "running") for seen in self._list().values()):
                    self.remove_secret()
            except ApiError as error:
                log.warning(
                    "run %s: Secret %s could not be removed: %s; `dlrover cancel %s` removes it",
                    *(self._spec.run_id, self._options.secret, error, self._spec.run_id),
                )
        self._api.close()

    def remove_secret(self) -> None:
        """Remove the Secret with the password of the job's own etcd. A missing one is not an error."""
        self._api.delete_secret(self._namespace, secret_name(self._spec.run_id, self._mark))

    def _make_secret(self) -> None:
        """Create the Secret with the password of the job's own etcd, once; raise NotTakenError if it may be missing."""
        if not self._makes_secret or self._has_made_secret:
            return
        try:
            access = self._spec.access
            password = read_password(EtcdConfig(self._spec.endpoint, access["user"], access["password_file"])) or ""
            owner = self._api.pod_named(self._namespace, name) if (name := own_pod()) else None
            self._api.create_secret(self._namespace, secret_manifest(self._spec.run_id, self._mark, password, owner))
        except (ApiError, EtcdError) as error:
            raise NotTakenError(
                f"Secret {self._options.secret} with the password of the job's own etcd was not created: {error}; allow it as "
                "in examples/kubernetes/rbac.yaml, or name a permanent etcd with --endpoint",
                kind_of_refusal(str(error)),
            ) from error
        self._has_made_secret = True

    def _set_former_output_aside(self, node: str) -> None:
        """Separate the output of an earlier job of this name, already gone from etcd, from that of a new node."""
        if self._log_dir is not None:
            with contextlib.suppress(OSError):
                for name in ("stdout.log", "stderr.log", READ_FILE):
                    set_aside(self._log_dir / node / name)

    def _handle(self, node: str) -> str:
        return f"{job_name(self._spec.run_id, node, self._mark)}/{node}"

    def _refresh(self) -> None:
        """List the nodes' objects if a poll is due, and act on changes."""
        if not self._polling.refresh():
            return
        found, now = self._polling.newest, self._polling.asked_at
        terminating = {p["metadata"]["name"] for s in found.values() for p in s.pods if p["metadata"].get("deletionTimestamp")}
        self._terminating_since = {name: self._terminating_since.get(name, now) for name in terminating}
        for node, seen in found.items():
            for pod in sorted(seen.pods, key=_created) if self._logs is not None else ():
                if _phase(pod) in ("Running", "Succeeded", "Failed"):
                    self._logs.follow(node, pod["metadata"]["name"])  # type: ignore[union-attr]
            self._log_why_it_waits(node, seen, now)
            self._dismiss_leftover(node, seen, now)

    def _list(self) -> dict[str, _Seen]:
        selector = f"{MARK_LABEL}={self._mark}"
        found: dict[str, _Seen] = {}
        try:
            for job in self._api.jobs(self._namespace, self._api_version, selector):
                found.setdefault(_node(job), _Seen()).job = job
            for pod in self._api.pods(self._namespace, selector):
                found.setdefault(_node(pod), _Seen()).pods.append(pod)
        except ApiError as error:
            raise ApiError(f"the nodes cannot be listed: {error}", retry_after_s=error.retry_after_s) from error
        return found

    def _dismiss_leftover(self, node: str, seen: _Seen, now: float) -> None:
        """Delete a pod after its worker's end and last output. Another container, such as a mesh's proxy, keeps it alive."""
        if self._known.get(self._handle(node), "pending") in ("pending", "running") or seen.pod is None:
            return
        is_left = _phase(seen.pod) in ("Pending", "Running") and not seen.pod["metadata"].get("deletionTimestamp")
        if not is_left or now - self._dismissed_at.get(node, -float("inf")) < _DISMISS_S:
            return
        is_first = node not in self._dismissed_at
        self._dismissed_at[node] = now
        log.info("run %s: deleting the pod of %s: its worker has ended, another container runs on", self._spec.run_id, node)
        try:
            self._api.delete_job(self._namespace, self._api_version, self._handle(node).split("/")[0])
            self._api.delete_pod(self._namespace, seen.pod["metadata"]["name"], _CANCEL_GRACE_S)
        except ApiError as error:
            level = logging.WARNING if is_first else logging.DEBUG
            log.log(level, "run %s: the pod of %s could not be deleted, it keeps its host: %s", self._spec.run_id, node, error)

    def _state(self, seen: _Seen) -> _State:
        pod = seen.pod
        if pod is None:
            return _job_state(seen.job or {})
        if _phase(pod) in ("Pending", "Running") and _end_of_worker(pod) is None:
            since = self._terminating_since.get(pod["metadata"]["name"])
            grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            # The host's kubelet would have ended it, and nothing else can. The pod remains until its host returns or goes.
            if since is not None and self._clock() - since > grace_s + _LOST_S:
                return _State("failed", f"its host {pod['spec'].get('nodeName', '')} is lost")
        return _pod_state(pod)

    def _check_that_it_is_ours(self, name: str, node: str) -> None:
        """Accept an existing Job by its labels. Raise NotTakenError for one of another job, TargetError if that is unknown."""
        try:
            labels = self._api.read_job(self._namespace, self._api_version, name)["metadata"].get("labels") or {}
        except ApiError as error:
            raise TargetError(f"Job {name} exists already, and whether it is ours is not known: {error}") from error
        if (labels.get(MARK_LABEL), labels.get(NODE_LABEL)) != (self._mark, node):
            raise NotTakenError(f"namespace {self._namespace} has a Job {name} that is not this job's")
        log.info("run %s: Job %s exists already: an earlier request has created it", self._spec.run_id, name)

    def _log_why_it_waits(self, node: str, seen: _Seen, now: float) -> None:
        if self._state(seen).status != "pending":
            return
        why = f"its Job is suspended: {_waits_in_queue(seen)}" if _is_suspended(seen) else _waits_for(seen.pod)
        if not why and now - self._asked_why_at.setdefault(node, now - _ASK_WHY_S + 5.0) > _ASK_WHY_S:
            self._asked_why_at[node] = now
            try:
                why = self._reason_in_events(node, seen)
            except ApiError as error:
                log.info("run %s: why %s waits is not known: %s", self._spec.run_id, node, error)
        kind = kind_of_refusal(why)  # a pod that is refused again has another name
        if why and kind != self._logged_waits.get(node):
            self._logged_waits[node] = kind
            log.warning("run %s: %s waits: %s", self._spec.run_id, node, why)

    def _reason_in_events(self, node: str, seen: _Seen) -> str:
        """Return why a node waits, as reported by its events; empty without events."""
        if seen.pod is None and self._api_version == VOLCANO_JOBS:
            queue = f"queue {(seen.job or {}).get('spec', {}).get('queue', 'default')}"
            groups = self._api.pod_groups(self._namespace, f"{MARK_LABEL}={self._mark},{NODE_LABEL}={node}")
            if not groups:
                return f"Volcano has made no PodGroup for it; `kubectl get queue` shows whether there is {queue}"
            # Volcano reports a full queue in an event of type Normal, not Warning.
            events = self._api.events(self._namespace, "PodGroup", str(groups[0]["metadata"]["name"]))
            texts = [*_messages(events, "Normal"), *_messages(events, "Warning"), *_unschedulable(groups[0])]
            phase = groups[0].get("status", {}).get("phase") or "new"
            return "; ".join([f"in {queue} of Volcano, {phase}", *dict.fromkeys(texts)])
        found = seen.pod or seen.job or {}
        kind = "Pod" if seen.pod is not None else "Job"
        return "".join(_messages(self._api.events(self._namespace, kind, str(found["metadata"]["name"])), "Warning"))

    def _has_last_words(self, node: str, state: _State) -> bool:
        """Whether an ended node's output is complete here; the cause of its end is appended below it."""
        if self._logs is None or self._log_dir is None:
            return True
        began = self._ended_at.setdefault(node, self._clock())
        if not self._logs.finish(node) and self._clock() - began < _LAST_WORDS_S:
            return False
        if state.why and node not in self._cancelled:
            log.warning("run %s: %s has %s: %s", self._spec.run_id, node, state.status, state.why)
            folder = self._log_dir / node
            with contextlib.suppress(OSError):  # a full disk of this host ends no job
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / "stderr.log").open("a", encoding="utf-8") as stream:
                    stream.write(f"Kubernetes: {state.why}\n")
        return True


def known_target(
    spec: NodeSpec, name: str, log_dir: Path | None, poll_s: float = 2.0, output_since: str = ""
) -> KubernetesTarget:
    """Return the target of a running job by its recorded `name`, for processes that start no nodes and have no options."""
    _, namespace, *volcano = name.split("/")
    api_version = VOLCANO_JOBS if volcano else PLAIN_JOBS
    return KubernetesTarget(
        spec, KubernetesOptions(namespace=namespace), log_dir, poll_s, api_version=api_version, output_since=output_since
    )


def _check_version(api: KubernetesApi) -> None:
    """Raise TargetError if the cluster is too old."""
    try:
        version = api.version()
    except ApiError as error:
        log.debug("the version of the cluster is unknown: %s", error)  # the API is read again in a moment
        return
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < MIN_VERSION:
        raise TargetError(
            f"the cluster runs Kubernetes {version}, and nodes need {'.'.join(map(str, MIN_VERSION))} or newer: older ones "
            "count a pod as failed while it hands over; name a newer cluster with KUBECONFIG"
        )


def _offered(api: KubernetesApi, options: KubernetesOptions) -> str:
    """Return the `apiVersion` of Jobs in a cluster that fits the options; raise TargetError if it lacks them."""
    if options.plain_jobs and not options.queue:
        return PLAIN_JOBS
    try:
        has_volcano = not options.plain_jobs and api.has(VOLCANO_JOBS, "jobs")
        has_queues = has_volcano or not options.queue or any(api.has(version, "localqueues") for version in KUEUE)
    except ApiError as error:
        instead = "leave out --queue" if options.plain_jobs else "do without it: --plain-jobs"
        raise TargetError(f"whether the cluster has Volcano or Kueue is unknown ({error}); try again, or {instead}") from error
    if not has_queues:
        raise TargetError(
            f"--queue {options.queue}: the cluster has no {'' if options.plain_jobs else 'Volcano and no '}Kueue, so it has no "
            "queues; leave the option out for plain Jobs, or have one of them installed"
        )
    return VOLCANO_JOBS if has_volcano else PLAIN_JOBS


def _messages(events: Iterable[Mapping[str, Any]], kind: str) -> list[str]:
    """Return the newest message of this event type, if any."""
    of_kind = [event for event in events if event.get("type") == kind]
    newest = max(of_kind, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""), default={})
    return [str(newest["message"])] if newest.get("message") else []


def _unschedulable(group: Mapping[str, Any]) -> list[str]:
    conditions = group.get("status", {}).get("conditions") or ()
    return [str(c.get("message")) for c in conditions if c.get("type") == "Unschedulable" and c.get("status") == "True"]


def _node(found: Mapping[str, Any]) -> str:
    return str(found["metadata"].get("labels", {}).get(NODE_LABEL, ""))


def _created(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))


def _phase(pod: Mapping[str, Any]) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _job_state(job: Mapping[str, Any]) -> _State:
    """State of a Job without a pod, either not created yet or already deleted."""
    state = job.get("status", {}).get("state") or {}  # Volcano only
    match state.get("phase"):
        case "Completed":
            return _State("succeeded")
        case "Failed" | "Terminated" | "Aborted" as phase:
            reason = state.get("message") or state.get("reason")
            return _State("failed", f"its pod is gone (Volcano: {phase}{f', {reason}' if reason else ''})")
    conditions = {c["type"]: c for c in job.get("status", {}).get("conditions") or () if c.get("status") == "True"}
    if "Complete" in conditions or "SuccessCriteriaMet" in conditions:
        return _State("succeeded")
    failed = conditions.get("Failed") or conditions.get("FailureTarget")
    if failed is not None:
        # The condition only reports that no retry is allowed. The cause is its pod's deletion, for example to free the host.
        return _State("failed", f"its pod is gone ({failed.get('message') or failed.get('reason') or 'no reason given'})")
    return _State("pending")


def _pod_state(pod: Mapping[str, Any]) -> _State:
    status = pod.get("status", {})
    if (ended := _end_of_worker(pod)) is not None and "exitCode" in ended:
        # The pod's phase depends on all its containers, and may reflect another one's failure.
        return _State("succeeded") if ended["exitCode"] == 0 else _State("failed", _why_it_failed(status))
    phase = _phase(pod)
    states: dict[str, AppStatus] = {"Succeeded": "succeeded", "Running": "running", "Pending": "pending"}
    if phase == "Failed":
        return _State("failed", _why_it_failed(status))
    if phase not in states:  # the host has been silent for long
        return _State("failed", f"its host {pod['spec'].get('nodeName', '')} is lost (its phase is {phase})")
    return _State(states[phase])


def _end_of_worker(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the end state of our container alone; None while it runs, or if the pod does not report it."""
    for container in pod.get("status", {}).get("containerStatuses") or ():
        if container.get("name", CONTAINER) == CONTAINER:
            ended = (container.get("state") or {}).get("terminated")
            return ended if isinstance(ended, Mapping) else None
    return None


def _why_it_failed(status: Mapping[str, Any]) -> str:
    """Return why the pod failed: evicted, out of memory, preempted. Empty if the container ended with an error of its own."""
    parts = [f"{status['reason']}: {status.get('message', '')}".rstrip(": ")] if status.get("reason") else []
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            parts.append(f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": "))
    ended = _end_of_worker({"status": status})
    if ended is not None and ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return f"{CANNOT_START}: {ended.get('message') or ended['reason']} (exit code {ended.get('exitCode')})"
    if ended is not None and (parts or ended.get("reason") not in ("Error", "Completed", None)):
        parts.append(f"{ended.get('reason', 'ended')}, exit code {ended.get('exitCode')}")
    return "; ".join(parts)


def _is_suspended(seen: _Seen) -> bool:
    """Whether a plain Job has no pod because it is suspended, by its queue or by hand."""
    return seen.pod is None and (seen.job or {}).get("spec", {}).get("suspend") is True


def _waits_in_queue(seen: _Seen) -> str:
    queue = (seen.job or {"metadata": {}})["metadata"].get("labels", {}).get(KUEUE_LABEL)
    return f"it waits for room in Kueue's queue {queue}" if queue else "`spec.suspend` is set, and nothing here resumes it"


def _waits_for(pod: Mapping[str, Any] | None) -> str:
    """Return the pod's reason for not running yet; empty if its start is in progress."""
    status = (pod or {}).get("status", {})
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            why = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
            as_root = "will run as root" in why
            return why + ("; give --run-as UID, or --run-as root where the namespace allows it" if as_root else "")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    return ""
