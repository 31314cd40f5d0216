"""Nodes on Kubernetes: one independent single-pod Job per node, all of which join one rendezvous.

`KubernetesTarget` implements `Target`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dlrover.components.targets.kubernetes_api import ApiError, KubernetesApi, Resource, kind_of_refusal, own_pod
from lightning_dlrover.components.targets.kubernetes_events import JobEvents
from lightning_dlrover.components.targets.kubernetes_logs import READ_FILE, PodLogs
from lightning_dlrover.components.targets.kubernetes_manifests import (
    CONTAINER,
    MARK_LABEL,
    NODE_LABEL,
    PLAIN_JOBS,
    VOLCANO_JOBS,
    KubernetesOptions,
    budget_manifest,
    budget_name,
    job_manifest,
    job_name,
    labelled,
    secret_manifest,
    secret_name,
)
from lightning_dlrover.components.targets.kubernetes_notices import Hosts, pod_notice
from lightning_dlrover.components.targets.kubernetes_offer import check_version, offered, target_name
from lightning_dlrover.components.targets.kubernetes_state import (
    Seen,
    State,
    created,
    end_of_worker,
    has_requested,
    is_suspended,
    job_state,
    messages_of,
    node_of,
    phase_of,
    pod_state,
    resize_state,
    unschedulable,
    waits_for,
    waits_in_queue,
    why_it_failed,
)
from lightning_dlrover.components.targets.kubernetes_watch import WatchedList
from lightning_dlrover.components.targets.target import (
    ANY_SIZE,
    App,
    AppStatus,
    NodeSize,
    NodeSpec,
    NotTakenError,
    Polling,
    Resize,
    TargetError,
    existing_logs,
    set_aside,
)
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, read_password
from lightning_dlrover.rdzv.job.events import (
    HangFound,
    JobFailed,
    MemoryShort,
    ValuesLost,
    WorkerFailed,
    WorkerLost,
    content_of,
)
from lightning_dlrover.rdzv.job.records import EndNotice, EventRecord

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

_RESIZE_AGAIN_S = 30.0
"""Seconds between two requests to resize a pod while a quota has no room for it."""

_CONDITIONS_S = 5.0
"""Seconds from a request until a pod shows it, and until conditions without a generation do not concern an earlier one."""

_MAX_BUDGET_PAUSE_S = 600.0
"""Maximum seconds between two requests to create the PodDisruptionBudget."""

_WARNINGS = (HangFound, JobFailed, MemoryShort, ValuesLost, WorkerFailed, WorkerLost)
"""Events of a job that are warnings on Kubernetes."""

_ASK_WHY_S = 30.0
"""Seconds between two reads of a waiting node's events."""


class KubernetesTarget:
    """Create, watch and delete one-node Jobs.

    Where the cluster has Volcano, nodes are Volcano Jobs and wait in its queues like other workloads. Elsewhere they are
    plain batch/v1 Jobs. A pod's state takes precedence over its Job's, which may count the pod as failed during its hand-over.
    A failed API call never means that a node has ended.

    Args:
        log_dir: local folder; each node's output is copied into a subfolder. None: output is not copied.
        poll_s: minimum interval between queries; two requests cover all nodes, and none is needed while watches work.
        api: default: the cluster that kubectl would use.
        api_version: API version of the nodes' Jobs; default: see `offered`, also for `recorded` and `trial_s`.
        output_since: RFC 3339; earlier output of the pods is skipped.
        clock: time of queries and of all waits for nodes.
        watches: watch the nodes' Jobs and pods where the cluster lets us; else list them at each query.
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
        watches: bool = True,
        recorded: str = "",
        trial_s: float = 0.0,
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
            check_version(self._api)
        self._api_version = api_version or offered(self._api, self._namespace, options, spec, recorded, trial_s)
        # With another namespace or the other kind of Job, a later controller would find no node and consider all deleted.
        self.name = target_name(self._namespace, self._api_version)
        self._mark = ""
        nothing_seen: dict[str, Seen] = {}  # key: node
        self._jobs, self._pods = (
            WatchedList(self._api, self._namespace, resource, watches, clock)
            for resource in (Resource("jobs", self._api_version), Resource("pods"))
        )
        self._polling = Polling(
            self._list, nothing_seen, poll_s, clock, listed_at=lambda: min(self._jobs.listed_at, self._pods.listed_at)
        )
        self._known: dict[str, AppStatus] = {}  # key: handle
        self._cancelled: set[str] = set()  # nodes
        self._terminating_since: dict[str, float] = {}  # key: pod name
        self._ended_at: dict[str, float] = {}  # key: node; start of the wait for its remaining output
        self._logged_waits: dict[str, str] = {}  # key: node; kind of the last logged reason for waiting
        self._asked_why_at: dict[str, float] = {}  # key: node
        self._dismissed_at: dict[str, float] = {}  # key: node; last request to delete a pod that has outlived its worker
        self._offers_resize: bool | None = None  # None: not looked up yet
        self._resized: dict[str, tuple[Mapping[str, str], float]] = {}  # key: node; newest accepted request and its time
        # key: node; time of the next request for a size, why it is not made now, and that size
        self._resize_at: dict[str, tuple[float, str, Mapping[str, str]]] = {}
        self._release_at = -float("inf")  # time of the next request to delete an ended Job
        self._release_pause_s = 0.0  # after a refused one
        self._hosts = Hosts(self._api, spec.run_id, clock)
        self._needs_budget = options.keeps_budget
        self._may_have_budget = False
        self._budget_at = -float("inf")  # time of the next request to create the PodDisruptionBudget
        self._budget_pause_s = 0.0  # after a failed one
        self._events: JobEvents | None = None
        self._logs = (
            PodLogs(self._api, self._namespace, CONTAINER, log_dir, min(1.0, poll_s), output_since)
            if log_dir is not None
            else None
        )

    def open(self, mark: str) -> None:
        self._mark = mark
        for listed in (self._jobs, self._pods):
            listed.select(f"{MARK_LABEL}={mark}")
        if self._makes_secret:
            self._options = replace(self._options, secret=secret_name(self._spec.run_id, mark))

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        manifest = job_manifest(self._spec, self._options, size, node, self._mark, self._api_version)
        name = manifest["metadata"]["name"]
        self._set_former_output_aside(node)
        self._make_secret()  # before the first pod that mounts it
        self._jobs.expect()
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
            state = State("failed", "" if node in self._cancelled else "its Job was deleted")
        if state.status == "pending" and known == "running" and seen is not None and is_suspended(seen):
            # It would come back under a name whose worker has left. Another node waits in its place.
            state = State("failed", f"its Job was suspended ({waits_in_queue(seen)})")
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
        self._jobs.expect()
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
        self._jobs.expect()
        self._release_pause_s = 0.0
        return True

    @property
    def resizes_in_place(self) -> bool:
        if self._offers_resize is None:
            try:
                self._offers_resize = self._api.offers_resize()
            except ApiError as error:
                log.debug("whether the cluster resizes pods is unknown: %s", error)
                self._offers_resize = True  # the answer to the first request shows it
        return self._offers_resize

    def resize(self, handle: str, size: NodeSize) -> Resize:
        node = handle.split("/")[1]
        self._refresh()
        self._polling.raise_trouble()
        seen = self._polling.newest.get(node)
        pod = seen.pod if seen is not None else None
        if pod is None:
            return Resize("asked")  # its end is noticed elsewhere
        wanted, now = self._options.resources(size), self._clock()
        asked, asked_at = self._resized.get(node, (wanted, -float("inf")))
        # After a request for another size, what is known of the pod may be older than that request.
        if asked == wanted and has_requested(pod, wanted):
            return resize_state(pod, wanted, now - asked_at > _CONDITIONS_S)
        if asked == wanted and now - asked_at <= _CONDITIONS_S:
            return Resize("asked")
        next_at, why, refused = self._resize_at.get(node, (-float("inf"), "", wanted))
        if now < next_at and refused == wanted:
            return Resize("waiting", why)
        try:
            self._api.resize_pod(self._namespace, pod["metadata"]["name"], CONTAINER, wanted)
        except ApiError as error:
            return self._unresized(node, pod["metadata"]["name"], wanted, error)
        self._resized[node] = wanted, self._clock()
        self._resize_at.pop(node, None)
        self._polling.hasten()
        return Resize("asked")

    def _unresized(self, node: str, pod: str, wanted: Mapping[str, str], error: ApiError) -> Resize:
        """Return the progress after a request that was not accepted. Raise the error if it may be accepted soon."""
        if error.may_pass:
            raise error
        if "exceeded quota" in str(error):
            self._resize_at[node] = self._clock() + _RESIZE_AGAIN_S, str(error), wanted
            return Resize("waiting", str(error))
        if error.status == 404 and pod in str(error):
            return Resize("asked")  # the pod is gone
        if error.status in (404, 405):
            self._offers_resize = False
            return Resize("refused", f"this cluster cannot resize pods, Kubernetes 1.33 and newer can: {error}")
        if "pods/resize" in str(error):
            self._offers_resize = False
            return Resize("refused", f"{error}; allow it as in examples/kubernetes/rbac.yaml")
        return Resize("refused", str(error))

    def ran_out_of_memory(self, handle: str) -> bool:
        seen = self._polling.newest.get(handle.split("/")[1])
        pod = seen.pod if seen is not None else None
        return pod is not None and "OOMKilled" in why_it_failed(pod.get("status", {}))

    def notice(self, handle: str) -> EndNotice | None:
        node = handle.split("/")[1]
        seen = self._polling.newest.get(node)
        if node in self._cancelled or seen is None or seen.pod is None:
            return None
        if self._hosts.is_due:
            pods = [each.pod for each in self._polling.newest.values() if each.pod is not None]
            self._hosts.look({name for pod in pods if (name := pod["spec"].get("nodeName"))})
        return pod_notice(seen.pod) or self._hosts.notice(seen.pod["spec"].get("nodeName", ""))

    def publish(self, event: EventRecord) -> None:
        """Show an event of the job on the Job of its oldest node."""
        jobs = [seen.job for seen in self._polling.newest.values() if seen.job is not None]
        if jobs:
            content = content_of(event)
            self._send_event(min(jobs, key=created), type(content).__name__, event.text, isinstance(content, _WARNINGS))

    def _send_event(self, job: Mapping[str, Any], reason: str, note: str, is_warning: bool) -> None:
        if self._events is None:
            self._events = JobEvents(self._api, self._namespace, labelled(self._spec.run_id, self._mark))
        self._events.add(job, reason, note, is_warning)

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
        if self._events is not None:
            self._events.close()
        self._jobs.close()
        self._pods.close()
        if (self._makes_secret or self._may_have_budget) and self._mark:
            try:
                # Nodes that outlive this process are to be kept, and read the password again whenever they need a token.
                if not any(self._state(seen).status in ("pending", "running") for seen in self._list(fresh=True).values()):
                    self.remove_leftovers(self._makes_secret, self._may_have_budget)
            except ApiError as error:
                log.warning(
                    "run %s: its Secret or PodDisruptionBudget could not be removed: %s; `dlrover cancel %s` removes them",
                    *(self._spec.run_id, error, self._spec.run_id),
                )
        self._api.close()

    def remove_leftovers(self, secret: bool = True, budget: bool = True) -> None:
        """Remove the Secret with the password of the job's own etcd, and the PodDisruptionBudget. Missing ones are no error."""
        if budget:
            self._api.delete_budget(self._namespace, budget_name(self._spec.run_id, self._mark))
        if secret:
            self._api.delete_secret(self._namespace, secret_name(self._spec.run_id, self._mark))

    def _keep_budget(self, now: float) -> None:
        """Create the PodDisruptionBudget. A cluster that refuses it keeps the job from nothing."""
        if not self._needs_budget or now < self._budget_at:
            return
        self._may_have_budget = True  # a request without an answer may have been carried out
        min_nodes = math.ceil(self._spec.min_workers / self._spec.workers_per_node)
        try:
            owner = self._api.pod_named(self._namespace, name) if (name := own_pod()) else None
            self._api.replace_budget(self._namespace, budget_manifest(self._spec.run_id, self._mark, min_nodes, owner))
        except ApiError as error:
            level = logging.DEBUG if self._budget_pause_s else logging.WARNING
            log.log(
                level,
                "run %s: a drain may evict more than the job can lose, without a PodDisruptionBudget: %s; allow it as in "
                "examples/kubernetes/rbac.yaml, or give --no-disruption-budget",
                *(self._spec.run_id, error),
            )
            self._budget_pause_s = min(_MAX_BUDGET_PAUSE_S, 4.0 * self._budget_pause_s or 4.0)
            self._budget_at = now + self._budget_pause_s
        else:
            self._needs_budget = False

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
        is_free = self._jobs.is_current and self._pods.is_current
        if not self._polling.refresh(has_news=is_free and (self._jobs.has_news or self._pods.has_news)):
            return
        found, now = self._polling.newest, self._clock()
        terminating = {p["metadata"]["name"] for s in found.values() for p in s.pods if p["metadata"].get("deletionTimestamp")}
        self._terminating_since = {name: self._terminating_since.get(name, now) for name in terminating}
        if found:
            self._keep_budget(now)
        for node, seen in found.items():
            for pod in sorted(seen.pods, key=created) if self._logs is not None else ():
                if phase_of(pod) in ("Running", "Succeeded", "Failed"):
                    self._logs.follow(node, pod["metadata"]["name"])  # type: ignore[union-attr]
            self._log_why_it_waits(node, seen, now)
            self._dismiss_leftover(node, seen, now)

    def _list(self, fresh: bool = False) -> dict[str, Seen]:
        found: dict[str, Seen] = {}
        try:
            listed_at = self._jobs.listed_at
            for job in self._jobs.read(fresh):
                found.setdefault(node_of(job), Seen()).job = job
            # A node without a Job has ended only if a list of pods is as new as that of the Jobs.
            for pod in self._pods.read(fresh or self._jobs.listed_at > listed_at):
                found.setdefault(node_of(pod), Seen()).pods.append(pod)
        except ApiError as error:
            raise ApiError(f"the nodes cannot be listed: {error}", retry_after_s=error.retry_after_s) from error
        return found

    def _dismiss_leftover(self, node: str, seen: Seen, now: float) -> None:
        """Delete a pod after its worker's end and last output. Another container, such as a mesh's proxy, keeps it alive."""
        if self._known.get(self._handle(node), "pending") in ("pending", "running") or seen.pod is None:
            return
        is_left = phase_of(seen.pod) in ("Pending", "Running") and not seen.pod["metadata"].get("deletionTimestamp")
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

    def _state(self, seen: Seen) -> State:
        pod = seen.pod
        if pod is None:
            return job_state(seen.job or {})
        if phase_of(pod) in ("Pending", "Running") and end_of_worker(pod) is None:
            since = self._terminating_since.get(pod["metadata"]["name"])
            grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            # The host's kubelet would have ended it, and nothing else can. The pod remains until its host returns or goes.
            if since is not None and self._clock() - since > grace_s + _LOST_S:
                return State("failed", f"its host {pod['spec'].get('nodeName', '')} is lost")
        return pod_state(pod)

    def _check_that_it_is_ours(self, name: str, node: str) -> None:
        """Accept an existing Job by its labels. Raise NotTakenError for one of another job, TargetError if that is unknown."""
        try:
            labels = self._api.read_job(self._namespace, self._api_version, name)["metadata"].get("labels") or {}
        except ApiError as error:
            raise TargetError(f"Job {name} exists already, and whether it is ours is not known: {error}") from error
        if (labels.get(MARK_LABEL), labels.get(NODE_LABEL)) != (self._mark, node):
            raise NotTakenError(f"namespace {self._namespace} has a Job {name} that is not this job's")
        log.info("run %s: Job %s exists already: an earlier request has created it", self._spec.run_id, name)

    def _log_why_it_waits(self, node: str, seen: Seen, now: float) -> None:
        if self._state(seen).status != "pending":
            return
        why = f"its Job is suspended: {waits_in_queue(seen)}" if is_suspended(seen) else waits_for(seen.pod)
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

    def _reason_in_events(self, node: str, seen: Seen) -> str:
        """Return why a node waits, as reported by its events; empty without events."""
        if seen.pod is None and self._api_version == VOLCANO_JOBS:
            queue = f"queue {(seen.job or {}).get('spec', {}).get('queue', 'default')}"
            groups = self._api.pod_groups(self._namespace, f"{MARK_LABEL}={self._mark},{NODE_LABEL}={node}")
            if not groups:
                return f"Volcano has made no PodGroup for it; `kubectl get queue` shows whether there is {queue}"
            # Volcano reports a full queue in an event of type Normal, not Warning.
            events = self._api.events(self._namespace, "PodGroup", str(groups[0]["metadata"]["name"]))
            texts = [*messages_of(events, "Normal"), *messages_of(events, "Warning"), *unschedulable(groups[0])]
            phase = groups[0].get("status", {}).get("phase") or "new"
            return "; ".join([f"in {queue} of Volcano, {phase}", *dict.fromkeys(texts)])
        found = seen.pod or seen.job or {}
        kind = "Pod" if seen.pod is not None else "Job"
        return "".join(messages_of(self._api.events(self._namespace, kind, str(found["metadata"]["name"])), "Warning"))

    def _has_last_words(self, node: str, state: State) -> bool:
        """Whether an ended node's output is complete here; the cause of its end is appended below it."""
        if self._logs is None or self._log_dir is None:
            return True
        began = self._ended_at.setdefault(node, self._clock())
        if not self._logs.finish(node) and self._clock() - began < _LAST_WORDS_S:
            return False
        if state.why and node not in self._cancelled:
            log.warning("run %s: %s has %s: %s", self._spec.run_id, node, state.status, state.why)
            if (seen := self._polling.newest.get(node)) is not None and seen.job is not None:
                self._send_event(seen.job, "NodeEnded", f"{node} has {state.status}: {state.why}", is_warning=True)
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
