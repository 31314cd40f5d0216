"""Choose the kind of a job's Jobs by what a cluster offers: Volcano's where Volcano is installed and acts, else plain ones."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_dlrover.components.targets.kubernetes_api import ApiError, KubernetesApi, Resource
from lightning_dlrover.components.targets.kubernetes_manifests import (
    KUEUE,
    MARK_LABEL,
    MIN_VERSION,
    NODE_LABEL,
    PLAIN_JOBS,
    VOLCANO_JOBS,
    KubernetesOptions,
    job_manifest,
)
from lightning_dlrover.components.targets.target import ANY_SIZE, NodeSpec, TargetError

log = logging.getLogger(__name__)

TRIAL_S = 30.0
"""Seconds in which Volcano must act on a Job. Its controller takes less than one, unless thousands of Jobs wait before."""

_LOOK_S = 0.25

_DEAD_WEBHOOK = re.compile(
    r"failed calling webhook \"[^\"]*volcano[^\"]*\".*(service \"[^\"]+\" not found|no endpoints available|connection refused)"
)
"""Refusal of an API server whose configuration names a webhook of Volcano that does not run."""

_TRIAL = "trial"


def check_version(api: KubernetesApi) -> None:
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


def target_name(namespace: str, api_version: str) -> str:
    """Return the name of a target. It holds all that a later controller needs to find the same nodes."""
    return f"kubernetes/{namespace}{'/volcano' if api_version == VOLCANO_JOBS else ''}"


def offered(
    api: KubernetesApi, namespace: str, options: KubernetesOptions, spec: NodeSpec, recorded: str = "", trial_s: float = 0.0
) -> str:
    """Return the `apiVersion` of the Jobs to create.

    Args:
        recorded: name of the target that the job's records hold. A job keeps the kind of Jobs with which it was started.
        trial_s: seconds in which Volcano must act on a trial Job; 0: its presence in the API is enough.

    Raises:
        TargetError: the cluster lacks what the options require, or does not answer.
    """
    if options.plain_jobs and not options.queue:
        return PLAIN_JOBS
    try:
        has_volcano = not options.plain_jobs and api.has(VOLCANO_JOBS, "jobs")
        if has_volcano and recorded == target_name(namespace, PLAIN_JOBS):
            has_volcano = False
        elif has_volcano and trial_s and recorded != target_name(namespace, VOLCANO_JOBS):
            has_volcano = not (why := _why_volcano_is_dead(api, namespace, options, spec, trial_s))
            if why:
                log.warning(
                    "run %s: nodes are plain Jobs: the cluster defines Volcano's Jobs, but %s; start Volcano, or remove it",
                    *(spec.run_id, why),
                )
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


def trial_manifest(spec: NodeSpec, options: KubernetesOptions) -> dict[str, Any]:
    """Return a Volcano Job in Volcano's default queue whose pod never runs: a scheduling gate holds it back.

    Its name is that of this job alone, and the same in each of its processes: a later one removes what a killed one left.
    It asks for no GPU, which it would keep from others.
    """
    mark = hashlib.sha256(spec.run_id.encode()).hexdigest()[:10]
    manifest = job_manifest(spec, replace(options, gpus=""), ANY_SIZE, _TRIAL, mark, VOLCANO_JOBS)
    manifest["spec"]["queue"] = "default"
    [task] = manifest["spec"]["tasks"]
    task["template"]["spec"]["schedulingGates"] = [{"name": "lightning-dlrover/trial"}]
    return manifest


def _why_volcano_is_dead(api: KubernetesApi, namespace: str, options: KubernetesOptions, spec: NodeSpec, trial_s: float) -> str:
    """Return why no Volcano acts in the cluster; empty if one does, and wherever that is uncertain.

    Volcano's webhook answers to a new Job, and its controller gives it a phase and a PodGroup.
    """
    manifest = trial_manifest(spec, options)
    name, deadline = manifest["metadata"]["name"], time.monotonic() + trial_s
    try:
        if why := _why_not_created(api, namespace, manifest, deadline):
            return why
        while time.monotonic() < deadline:
            with contextlib.suppress(ApiError):
                if _phase(api.read_job(namespace, VOLCANO_JOBS, name)):
                    return ""
            time.sleep(_LOOK_S)
        # Only what the API server shows at the end counts.
        selector = f"{NODE_LABEL}={_TRIAL},{MARK_LABEL}={manifest['metadata']['labels'][MARK_LABEL]}"
        groups = api.listed(namespace, Resource("podgroups", "scheduling.volcano.sh/v1beta1"), selector).items
        is_dead = not groups and not _phase(api.read_job(namespace, VOLCANO_JOBS, name))
        return f"its controller has not acted on a Job for {trial_s:.0f} s" if is_dead else ""
    except ApiError as error:
        # A quota, a policy or an outage. The first node will show it, with its own message.
        log.info("run %s: whether Volcano's controller runs is not known: %s", spec.run_id, error)
        return ""
    finally:
        try:
            api.delete_job(namespace, VOLCANO_JOBS, name)
        except ApiError as error:
            log.warning("run %s: the trial Job %s could not be deleted: %s", spec.run_id, name, error)


def _why_not_created(api: KubernetesApi, namespace: str, manifest: Mapping[str, Any], deadline: float) -> str:
    """Create the trial Job, or find that of an earlier process. Return why Volcano's webhook has not answered, else empty."""
    while True:
        try:
            api.create_job(namespace, manifest)
            return ""
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return ""
            dead = _DEAD_WEBHOOK.search(str(error))
            if dead is None:
                raise
            if "not found" in dead[1] or time.monotonic() >= deadline:  # else its pods may just be starting
                return f"its webhook does not answer ({dead[1]})"
        time.sleep(_LOOK_S)


def _phase(job: Mapping[str, Any]) -> str:
    return str(((job.get("status") or {}).get("state") or {}).get("phase") or "")
