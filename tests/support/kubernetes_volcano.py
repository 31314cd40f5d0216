"""Volcano's treatment of one-node jobs, the part that TorchX sees: its controller's changes of a Job, and its count of pods.

Based on Volcano's source. Its webhook refuses a missing or closed queue and writes defaults into a Job. A Job waits with a
PodGroup until its queue has room. A pod leaves the count as soon as its deletion begins. Unless a policy of the Job prevents
it, the pod is then created again under its old name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Object = dict[str, Any]

ENDED = ("Completed", "Failed", "Terminated", "Aborted")


def refusal(job: Object, queues: Mapping[str, str]) -> str:
    """Reason for which the webhook refuses a Job; empty if it accepts it."""
    queue = job["spec"].get("queue", "default")
    if queue not in queues:
        return f'unable to find job queue: queues.scheduling.volcano.sh "{queue}" not found;'
    if queues[queue] != "Open":
        return f"can only submit job to queue with state `Open`, queue `{queue}` status is `{queues[queue]}`;"
    too_long = [f"{job['metadata']['name']}-{task['name']}-0" for task in job["spec"]["tasks"]]
    return "".join(f"create pod with name {name} validate failed;" for name in too_long if len(name) > 63)


def with_defaults(job: Object) -> Object:
    """Return a Job with the webhook's defaults."""
    spec = {"queue": "default", "schedulerName": "volcano", **job["spec"], "maxRetry": job["spec"].get("maxRetry") or 3}
    spec["tasks"] = [{"minAvailable": t["replicas"], **t, "maxRetry": t.get("maxRetry") or 3} for t in spec["tasks"]]
    spec["minAvailable"] = spec.get("minAvailable") or sum(task["minAvailable"] for task in spec["tasks"])
    return {**job, "spec": spec}


def pod_group(job: Object) -> Object:
    meta = job["metadata"]
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {
            "name": f"{meta['name']}-{meta['uid']}",
            "namespace": meta["namespace"],
            "labels": meta.get("labels", {}),
            "ownerReferences": [{"kind": "Job", "name": meta["name"], "uid": meta["uid"]}],
        },
        "spec": {"queue": job["spec"]["queue"], "minMember": job["spec"]["minAvailable"]},
        "status": {"phase": "Pending"},
    }


def pods_of(job: Object) -> list[Object]:
    """Pods that a Job requires."""
    pods = []
    for task in job["spec"]["tasks"]:
        for index in range(task["replicas"]):
            template = task["template"]
            ours = {"volcano.sh/job-name": job["metadata"]["name"], "volcano.sh/task-spec": task["name"]}
            spec = {"schedulerName": job["spec"]["schedulerName"], **template["spec"]}
            if "env" in job["spec"].get("plugins", {}):
                added = [{"name": name, "value": str(index)} for name in ("VK_TASK_INDEX", "VC_TASK_INDEX")]
                spec["containers"] = [{**c, "env": [*c.get("env", []), *added]} for c in spec["containers"]]
            metadata = template.get("metadata", {})
            pods.append(
                {
                    "metadata": {
                        "name": f"{job['metadata']['name']}-{task['name']}-{index}",
                        "labels": {**metadata.get("labels", {}), **ours},
                        "annotations": metadata.get("annotations", {}),
                    },
                    "spec": spec,
                }
            )
    return pods


def evicted(job: Object) -> None:
    """Update a Job after the deletion of its pod has begun."""
    actions = [p["action"] for p in job["spec"].get("policies", []) if "PodEvicted" in (p.get("event"), *p.get("events", ()))]
    if "TerminateJob" in actions and job["status"]["state"]["phase"] not in ENDED:
        job["status"]["state"]["phase"] = "Terminating"


def with_status(job: Object, pods: Iterable[Object]) -> Object:
    """Count a Job's pods. Pods that are being deleted no longer count."""
    counted = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    phases = Counter(pod["status"]["phase"] for pod in counted)
    living = phases["Pending"] + phases["Running"]
    phase = job["status"]["state"]["phase"]
    if phase == "Terminating":
        phase = phase if living else "Terminated"
    elif phase not in ENDED:
        num_pods = sum(task["replicas"] for task in job["spec"]["tasks"])
        if phases["Succeeded"] + phases["Failed"] == num_pods:
            phase = "Failed" if phases["Failed"] else "Completed"
        else:
            phase = "Running" if phases["Running"] >= job["spec"]["minAvailable"] else phase
    tasks: dict[str, Object] = {}
    for pod in counted:
        tasks[pod["metadata"]["labels"]["volcano.sh/task-spec"]] = {"phase": {pod["status"]["phase"]: 1}}
    # Its conditions are a history of phases, unlike those of other resources.
    history = [*job["status"].get("conditions", []), {"status": phase}]
    return {"state": {"phase": phase}, "taskStatusCount": tasks, "conditions": history}
