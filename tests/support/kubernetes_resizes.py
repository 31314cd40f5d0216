"""Changes of a pod's resources in place, as an API server validates them and a kubelet carries them out (KEP-1287).

The spec of a pod has what was requested, `containerStatuses` what it has. In between, one of two conditions stands:
`PodResizePending` with the reason `Deferred` or `Infeasible`, or `PodResizeInProgress`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dlrover.components.targets.kubernetes_state import quantity
from tests.support.pod_limits import PodLimits

Object = dict[str, Any]

_CONDITIONS = ("PodResizePending", "PodResizeInProgress")


@dataclass
class Host:
    """The only host of the cluster."""

    cpus: float = 64.0
    memory_bytes: float = 2.0**40
    taken_cpus: float = 0.0  # by pods of others
    has_static_cpus: bool = False  # static CPU manager, whose exclusive cores never change
    reports_generations: bool = True  # in conditions, from Kubernetes 1.34 on
    used_bytes: float = 0.0  # of each pod that has no control group
    given: dict[str, Mapping[str, str]] = field(default_factory=dict)  # by pod: what it has


def resources_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the limits that the pod's spec asks for."""
    return dict(_worker(pod).get("resources", {}).get("limits", {}))


def _worker(pod: Mapping[str, Any]) -> Object:
    containers = pod["spec"]["containers"]
    return dict(next((each for each in containers if each["name"] == "worker"), containers[0]))


def admit(pod: Object, host: Host) -> None:
    """Note what a new pod was given by its host."""
    pod["metadata"]["generation"] = 1
    host.given[pod["metadata"]["name"]] = _canonical(resources_of(pod))


def request(pod: Object, patch: Mapping[str, Any]) -> str:
    """Apply a strategic merge patch of the subresource `resize`; return why it is invalid."""
    if pod["status"]["phase"] not in ("Pending", "Running"):
        return "status.phase: Forbidden: a pod that has ended cannot be resized"
    if set(patch) != {"spec"} or set(patch["spec"]) != {"containers"}:
        return "spec: Forbidden: only cpu and memory resources are mutable"
    wanted = []
    for changed in patch["spec"]["containers"]:
        container = next((c for c in pod["spec"]["containers"] if c["name"] == changed.get("name")), None)
        if container is None or set(changed) != {"name", "resources"}:
            return "spec.containers: Forbidden: only cpu and memory resources are mutable"
        before, after = container["resources"], {}
        for kind in ("requests", "limits"):
            given = changed["resources"].get(kind, {})
            after[kind] = {**before.get(kind, {}), **_canonical(given)}
            others = [name for name in given if name not in ("cpu", "memory") and given[name] != before.get(kind, {}).get(name)]
            if others:
                return f"spec.containers[0].resources.{kind}: Forbidden: {others[0]} is immutable"
        if _qos(before) != _qos(after):
            return f'status.qosClass: Invalid value: "{_qos(after)}": Pod QOS Class may not change as a result of resizing'
        wanted.append((container, after))
    for container, after in wanted:
        if container["resources"] != after:
            container["resources"] = after
            pod["metadata"]["generation"] += 1
    return ""


def settle(pod: Object, running: Sequence[Object], host: Host, limits: PodLimits | None) -> None:
    """Give a pod what was requested for it, or say why that is not possible now."""
    name, wanted = pod["metadata"]["name"], resources_of(pod)
    if name not in host.given:
        admit(pod, host)  # a test has written it
    if _equal(wanted, host.given[name]):
        _set_condition(pod, host, None)
        _show(pod, host)
        return
    cpus, memory = quantity(wanted["cpu"]) or 0.0, quantity(wanted.get("memory", "0")) or 0.0
    others = [host.given.get(other["metadata"]["name"], {}) for other in running if other is not pod]
    if host.has_static_cpus:
        why = "In-place resize of Guaranteed Pods is infeasible alongside the static CPU manager"
        _set_condition(pod, host, ("PodResizePending", "Infeasible", why))
    elif cpus > host.cpus or memory > host.memory_bytes:
        _set_condition(pod, host, ("PodResizePending", "Infeasible", "Node didn't have enough capacity"))
    elif cpus > host.cpus - host.taken_cpus - _sum(others, "cpu"):
        _set_condition(pod, host, ("PodResizePending", "Deferred", "Node didn't have enough resource: cpu"))
    elif memory > host.memory_bytes - _sum(others, "memory"):
        _set_condition(pod, host, ("PodResizePending", "Deferred", "Node didn't have enough resource: memory"))
    elif 0 < memory < (used := limits.used_bytes() if limits is not None else host.used_bytes):
        why = f"attempting to set container memory limit ({memory:.0f}) below current usage ({used:.0f})"
        _set_condition(pod, host, ("PodResizeInProgress", "Error", why))
    else:
        if limits is not None:
            limit(limits, wanted)
        host.given[name] = wanted
        _set_condition(pod, host, None)
    _show(pod, host)


def limit(limits: PodLimits, resources: Mapping[str, str]) -> None:
    """Apply a pod's resources to its processes."""
    limits.set_cpus(quantity(resources["cpu"]) or 0.0)
    if "memory" in resources:
        limits.set_memory(int(quantity(resources["memory"]) or 0))


def _show(pod: Object, host: Host) -> None:
    """Write what the pod has into its status, unless a test has written one of its own."""
    status = pod["status"]
    if "resources" in (status.get("containerStatuses") or [{"resources": {}}])[0]:
        status["containerStatuses"] = [_status(_worker(pod), host.given[pod["metadata"]["name"]])]


def _status(container: Object, resources: Mapping[str, str]) -> Object:
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"running": {}},
        "resources": {"requests": dict(resources), "limits": dict(resources)},
    }


def _set_condition(pod: Object, host: Host, found: tuple[str, str, str] | None) -> None:
    conditions = [c for c in pod["status"].get("conditions") or () if c["type"] not in _CONDITIONS]
    if found is not None:
        kind, reason, message = found
        condition: Object = {"type": kind, "status": "True", "reason": reason, "message": message}
        if host.reports_generations:
            condition["observedGeneration"] = pod["metadata"]["generation"]
        conditions.append(condition)
    if conditions or pod["status"].get("conditions"):
        pod["status"]["conditions"] = conditions


def _canonical(resources: Mapping[str, str]) -> Object:
    """Return quantities as a server writes them: 2048Mi is 2Gi."""
    written = {}
    for name, text in resources.items():
        number = quantity(text)
        is_gib = name == "memory" and number and number % 2**30 == 0
        written[name] = f"{number / 2**30:.0f}Gi" if is_gib and number else text
    return written


def _qos(resources: Mapping[str, Any]) -> str:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if all(name in limits and _equal({name: requests.get(name)}, {name: limits[name]}) for name in ("cpu", "memory")):
        return "Guaranteed"
    return "Burstable" if requests or limits else "BestEffort"


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(quantity(one.get(name, 0)) == quantity(other.get(name, 0)) for name in ("cpu", "memory"))


def _sum(all_resources: Sequence[Mapping[str, str]], name: str) -> float:
    return sum(quantity(each.get(name, "0")) or 0.0 for each in all_resources)
