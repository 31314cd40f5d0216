"""States of a node on Kubernetes: pure functions of its Job and its pods as the API server lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dlrover.components.targets.kubernetes_events import REPORTER
from lightning_dlrover.components.targets.kubernetes_manifests import CONTAINER, KUEUE_LABEL, NODE_LABEL
from lightning_dlrover.components.targets.target import CANNOT_START, AppStatus, Resize


@dataclass(frozen=True)
class State:
    """State of a node and its cause, as reported by the cluster."""

    status: AppStatus
    why: str = ""


@dataclass
class Seen:
    """One node's objects in the newest lists."""

    job: Mapping[str, Any] | None = None
    pods: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def pod(self) -> Mapping[str, Any] | None:
        return max(self.pods, key=created, default=None)


def messages_of(events: Iterable[Mapping[str, Any]], kind: str) -> list[str]:
    """Return the newest message of this event type, if any. Events of this package do not count."""
    of_kind = [event for event in events if event.get("type") == kind and event.get("reportingComponent") != REPORTER]
    newest = max(of_kind, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""), default={})
    return [str(newest["message"])] if newest.get("message") else []


def unschedulable(group: Mapping[str, Any]) -> list[str]:
    conditions = group.get("status", {}).get("conditions") or ()
    return [str(c.get("message")) for c in conditions if c.get("type") == "Unschedulable" and c.get("status") == "True"]


def node_of(found: Mapping[str, Any]) -> str:
    return str(found["metadata"].get("labels", {}).get(NODE_LABEL, ""))


def created(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))


def phase_of(pod: Mapping[str, Any]) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def job_state(job: Mapping[str, Any]) -> State:
    """State of a Job without a pod, either not created yet or already deleted."""
    state = job.get("status", {}).get("state") or {}  # Volcano only
    match state.get("phase"):
        case "Completed":
            return State("succeeded")
        case "Failed" | "Terminated" | "Aborted" as phase:
            reason = state.get("message") or state.get("reason")
            return State("failed", f"its pod is gone (Volcano: {phase}{f', {reason}' if reason else ''})")
    conditions = {c["type"]: c for c in job.get("status", {}).get("conditions") or () if c.get("status") == "True"}
    if "Complete" in conditions or "SuccessCriteriaMet" in conditions:
        return State("succeeded")
    failed = conditions.get("Failed") or conditions.get("FailureTarget")
    if failed is not None:
        # The condition only reports that no retry is allowed. The cause is its pod's deletion, for example to free the host.
        return State("failed", f"its pod is gone ({failed.get('message') or failed.get('reason') or 'no reason given'})")
    return State("pending")


def pod_state(pod: Mapping[str, Any]) -> State:
    status = pod.get("status", {})
    if (ended := end_of_worker(pod)) is not None and "exitCode" in ended:
        # The pod's phase depends on all its containers, and may reflect another one's failure.
        return State("succeeded") if ended["exitCode"] == 0 else State("failed", why_it_failed(status))
    phase = phase_of(pod)
    states: dict[str, AppStatus] = {"Succeeded": "succeeded", "Running": "running", "Pending": "pending"}
    if phase == "Failed":
        return State("failed", why_it_failed(status))
    if phase not in states:  # the host has been silent for long
        return State("failed", f"its host {pod['spec'].get('nodeName', '')} is lost (its phase is {phase})")
    return State(states[phase])


def end_of_worker(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the end state of our container alone; None while it runs, or if the pod does not report it."""
    for container in pod.get("status", {}).get("containerStatuses") or ():
        if container.get("name", CONTAINER) == CONTAINER:
            ended = (container.get("state") or {}).get("terminated")
            return ended if isinstance(ended, Mapping) else None
    return None


def why_it_failed(status: Mapping[str, Any]) -> str:
    """Return why the pod failed: evicted, out of memory, preempted. Empty if the container ended with an error of its own."""
    parts = [f"{status['reason']}: {status.get('message', '')}".rstrip(": ")] if status.get("reason") else []
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            parts.append(f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": "))
    ended = end_of_worker({"status": status})
    if ended is not None and ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return f"{CANNOT_START}: {ended.get('message') or ended['reason']} (exit code {ended.get('exitCode')})"
    if ended is not None and (parts or ended.get("reason") not in ("Error", "Completed", None)):
        parts.append(f"{ended.get('reason', 'ended')}, exit code {ended.get('exitCode')}")
    return "; ".join(parts)


# Changes of a pod's resources in place. The pod's spec has what was requested, and the container's status what it has.

_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?\d+)?)([a-zA-Z]{0,2})")


def quantity(text: object) -> float | None:
    """Return the number of a quantity such as 500m or 2Gi; None if it has another form. Servers rewrite 2048Mi as 2Gi."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or (match[2] and match[2] not in _UNITS):
        return None
    return float(match[1]) * _UNITS.get(match[2], 1.0)


def has_requested(pod: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    """Whether the spec of the pod asks for these resources of our container."""
    containers = pod.get("spec", {}).get("containers") or ()
    asked = [container.get("resources") or {} for container in containers if container.get("name") == CONTAINER]
    return any(_covers(each.get("requests"), wanted) and _covers(each.get("limits"), wanted) for each in asked)


def resize_state(pod: Mapping[str, Any], wanted: Mapping[str, str], trusts_conditions: bool) -> Resize:
    """Return the progress of a change to resources that the pod's spec asks for already.

    Args:
        trusts_conditions: whether conditions without a generation are newer than the request.
    """
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or ():
        if container.get("name") == CONTAINER and _covers((container.get("resources") or {}).get("limits"), wanted):
            return Resize("done")
    generation = pod["metadata"].get("generation")
    for condition in status.get("conditions") or ():
        observed = condition.get("observedGeneration")
        is_newest = trusts_conditions if observed is None or generation is None else observed >= generation
        if condition.get("status") != "True" or not is_newest:
            continue
        why = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
        match condition.get("type"), condition.get("reason"):
            case "PodResizePending", "Infeasible":
                return Resize("refused", why)
            case "PodResizePending", _:
                return Resize("waiting", why)
            case "PodResizeInProgress", "Error":  # such as memory that is still in use
                return Resize("waiting", why)
    return Resize("asked")


def _covers(has: Mapping[str, Any] | None, wanted: Mapping[str, str]) -> bool:
    return all(quantity((has or {}).get(name)) == quantity(wanted[name]) for name in ("cpu", "memory") if name in wanted)


def is_suspended(seen: Seen) -> bool:
    """Whether a plain Job has no pod because it is suspended, by its queue or by hand."""
    return seen.pod is None and (seen.job or {}).get("spec", {}).get("suspend") is True


def waits_in_queue(seen: Seen) -> str:
    queue = (seen.job or {"metadata": {}})["metadata"].get("labels", {}).get(KUEUE_LABEL)
    return f"it waits for room in Kueue's queue {queue}" if queue else "`spec.suspend` is set, and nothing here resumes it"


def waits_for(pod: Mapping[str, Any] | None) -> str:
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
