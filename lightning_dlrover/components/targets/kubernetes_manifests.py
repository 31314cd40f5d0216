"""Manifests of a job's objects on Kubernetes: pure functions of the options and the node's size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_dlrover import variables
from lightning_dlrover.components.targets.local import node_app
from lightning_dlrover.components.targets.target import NodeSize, NodeSpec, TargetError, thread_variables

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
    keeps_budget: bool = False  # a PodDisruptionBudget keeps MIN workers
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
    metadata: dict[str, Any] = {"name": secret_name(run_id, mark), **labelled(run_id, mark)}
    if owner is not None:
        reference = {"apiVersion": "v1", "kind": "Pod", **{name: owner["metadata"][name] for name in ("name", "uid")}}
        metadata["ownerReferences"] = [reference]
    data = {SECRET_KEYS["password_file"]: password}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "immutable": True, "stringData": data}


def budget_manifest(run_id: str, mark: str, min_nodes: int, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the PodDisruptionBudget that keeps `min_nodes` pods from evictions by the API, such as `kubectl drain`.

    Args:
        owner: pod of the controller. The cluster removes the budget with that pod's own Job, which outlives an eviction.
    """
    metadata = {"name": budget_name(run_id, mark), **labelled(run_id, mark)}
    if owner is not None:
        itself = {"apiVersion": "v1", "kind": "Pod", **owner["metadata"]}
        whose = next((o for o in owner["metadata"].get("ownerReferences") or () if o.get("controller")), itself)
        metadata["ownerReferences"] = [{name: whose[name] for name in ("apiVersion", "kind", "name", "uid")}]
    spec = {
        # Pods of Jobs have no scale, so a percentage or `maxUnavailable` does not apply to them.
        "minAvailable": min_nodes,
        "selector": {"matchLabels": {MARK_LABEL: mark}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


def budget_name(run_id: str, mark: str) -> str:
    """Return the name of a job's PodDisruptionBudget."""
    return job_name(run_id, "nodes", mark)


def labelled(run_id: str, mark: str) -> dict[str, Any]:
    """Return the labels and annotations of every object of a job."""
    labels = {"app.kubernetes.io/name": "lightning-dlrover", JOB_LABEL: _slug(run_id)[:63].strip("-"), MARK_LABEL: mark}
    return {"labels": labels, "annotations": {JOB_LABEL: run_id}}


def job_manifest(
    spec: NodeSpec, options: KubernetesOptions, size: NodeSize, node: str, mark: str, api_version: str = PLAIN_JOBS
) -> dict[str, Any]:
    """Return the Job of one node. It has one pod and no retries, because a new node has a new name.

    Raises:
        TargetError: etcd needs credential files, and no Secret is set.
    """
    metadata = labelled(spec.run_id, mark)
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
