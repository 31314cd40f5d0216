"""Errors that an API server finds in a manifest: unknown fields, and values of the wrong kind.

Kubernetes' own objects are checked against its client's models, Volcano's Jobs against their CustomResourceDefinition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

_PLAIN: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": str}

_POLICY = {"action": "str", "event": "str", "events": "list[str]", "exitCode": "int", "timeout": "str"}
_TASK = {
    "dependsOn": "object",
    "maxRetry": "int",
    "minAvailable": "int",
    "name": "str",
    "partitionPolicy": "object",
    "policies": "list[volcano policy]",
    "replicas": "int",
    "template": "V1PodTemplateSpec",
    "topologyPolicy": "str",
}
_VOLCANO: dict[str, dict[str, str]] = {
    "volcano job": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "volcano spec", "status": "object"},
    "volcano spec": {
        "maxRetry": "int",
        "minAvailable": "int",
        "minSuccess": "int",
        "networkTopology": "object",
        "plugins": "dict[str, list[str]]",
        "policies": "list[volcano policy]",
        "priorityClassName": "str",
        "queue": "str",
        "runningEstimate": "str",
        "schedulerName": "str",
        "tasks": "list[volcano task]",
        "ttlSecondsAfterFinished": "int",
        "volumes": "list[object]",
    },
    "volcano policy": _POLICY,
    "volcano task": _TASK,
}
"""Fields of jobs.batch.volcano.sh, v1alpha1, and their types as the client's models write them."""


@cache
def models() -> Any:
    """Return the client's module of models. Its import takes a second, which most test processes need not spend."""
    from kubernetes.client import models

    return models


def problems(manifest: Mapping[str, Any]) -> list[str]:
    """Errors of an object, each with its place. An object of unknown kind is one error."""
    api_version, kind = manifest.get("apiVersion"), manifest.get("kind")
    ambiguous = {"batch.volcano.sh/v1alpha1 Job": "volcano job", "events.k8s.io/v1 Event": "EventsV1Event"}
    name = ambiguous.get(f"{api_version} {kind}", f"V1{kind}")
    if name not in _VOLCANO and not hasattr(models(), name):
        return [f"no matches for kind {kind!r} in version {api_version!r}"]
    return list(_of(manifest, name, str(kind)))


def _of(value: Any, kind: str, place: str) -> Iterator[str]:
    if value is None or kind == "object":
        return
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no list"
            return
        for number, item in enumerate(value):
            yield from _of(item, match[1], f"{place}[{number}]")
    elif match := re.fullmatch(r"dict[(\[]str, (.+)[)\]]", kind):
        if not isinstance(value, Mapping):
            yield f"{place}: {value!r} is no map"
            return
        for name, item in value.items():
            yield from _of(item, match[1], f"{place}.{name}")
    elif kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{place}: {value!r} is no {kind}"
    elif not isinstance(value, Mapping):
        yield f"{place}: {value!r} is no object"
    else:
        fields = _VOLCANO.get(kind) or _fields(kind)
        for name, item in value.items():
            if name not in fields:
                yield f"unknown field {f'{place}.{name}'!r}"
            else:
                yield from _of(item, fields[name], f"{place}.{name}")


def _fields(model: str) -> dict[str, str]:
    found = getattr(models(), model)
    return {found.attribute_map[name]: kind for name, kind in found.openapi_types.items()}


def restricted_violations(pod: Mapping[str, Any]) -> list[str]:
    """Controls of the Pod Security Standard `restricted` that a pod's spec violates, in the words of the admission plugin."""
    found = [f"{name}=true" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    found += [f"restricted volume types ({v['name']})" for v in pod.get("volumes", ()) if not v.keys() - {"name"} <= allowed]
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        own = container.get("securityContext", {})
        both = {**pod.get("securityContext", {}), **own}
        controls = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation != false": own.get("allowPrivilegeEscalation") is False,
            "unrestricted capabilities": "ALL" in own.get("capabilities", {}).get("drop", ())
            and {*own["capabilities"].get("add", ())} <= {"NET_BIND_SERVICE"},
            "runAsNonRoot != true": both.get("runAsNonRoot") is True,
            "runAsUser=0": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
        }
        found += [f'{text} (container "{container["name"]}")' for text, is_met in controls.items() if not is_met]
    return found
