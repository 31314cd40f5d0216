"""Notices of a node's end on Kubernetes: from its pod's deletion and disruption, and from the taints of its host.

Hosts are objects of the whole cluster. Reading them is a right that a namespace's role cannot give, so it is optional.
"""

from __future__ import annotations

import datetime
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lightning_dlrover.components.targets.kubernetes_api import ApiError, KubernetesApi
from lightning_dlrover.rdzv.job.records import EndNotice

log = logging.getLogger(__name__)

LOOK_S = 5.0  # seconds between two readings of the hosts
BATCH = 50  # hosts in one request: their names are part of its URL
REFUSED_S = 600.0  # seconds until the next reading after one that was refused
MAX_PAUSE_S = 60.0  # limit on the pause after requests that failed in any other way

ENDS: Mapping[str, float] = {
    "node.kubernetes.io/out-of-service": 0.0,
    "node.cloudprovider.kubernetes.io/shutdown": 0.0,
    "ToBeDeletedByClusterAutoscaler": 0.0,
    "karpenter.sh/disrupted": 0.0,
    "karpenter.sh/disruption": 0.0,
    "aws-node-termination-handler/spot-itn": 120.0,
    "aws-node-termination-handler/rebalance-recommendation": 0.0,
    "aws-node-termination-handler/scheduled-maintenance": 0.0,
    "aws-node-termination-handler/asg-lifecycle-termination": 0.0,
    "cloud.google.com/impending-node-termination": 30.0,
}
"""Taints of hosts that will be taken away, and the seconds that their clouds promise from then on; 0: the time is unknown.

A host that the autoscaler only considers (`DeletionCandidateOfClusterAutoscaler`), that is cordoned or that is merely of a kind
that may be taken away (`kubernetes.azure.com/scalesetpriority`) stays for now.
"""


def pod_notice(pod: Mapping[str, Any]) -> EndNotice | None:
    """Return the notice in a pod's own object: the API server has set its deletion, or says what disrupts it."""
    deleted_at = _time(pod["metadata"].get("deletionTimestamp"))  # with the grace period
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return EndNotice(f"kubernetes {condition.get('reason') or 'DisruptionTarget'}", deleted_at)
    return EndNotice("kubernetes pod deletion", deleted_at) if pod["metadata"].get("deletionTimestamp") else None


def ending_taints(host: Mapping[str, Any]) -> list[str]:
    """Return the keys of a host's taints that foretell its end."""
    taints = host.get("spec", {}).get("taints") or ()
    return [taint["key"] for taint in taints if taint.get("key") in ENDS]


def _time(text: Any) -> float:
    """Return an RFC 3339 time in seconds since the epoch; 0 if there is none."""
    try:
        return datetime.datetime.fromisoformat(re.sub(r"(\.\d+)?[zZ]$", "+00:00", str(text))).timestamp()
    except ValueError:
        return 0.0


class Hosts:
    """The hosts of a job's pods, read at intervals where the cluster allows it.

    Args:
        clock: time of the requests.
        now: time of the notices, seconds since the epoch.
    """

    def __init__(
        self, api: KubernetesApi, run_id: str, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._api = api
        self._run_id = run_id
        self._clock = clock
        self._now = now
        self._next_at = -float("inf")
        self._pause_s = 0.0  # after a request that failed
        self._is_refused = False
        self._notices: dict[str, dict[str, EndNotice]] = {}  # by host and taint
        self._has_looked = False

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next_at

    def look(self, names: Collection[str]) -> None:
        """Read these hosts. A failed request changes nothing that is known of them."""
        self._next_at = self._clock() + LOOK_S
        found: dict[str, list[str]] = {}
        ordered = sorted(names)
        try:
            for start in range(0, len(ordered), BATCH):
                for host in self._api.hosts(ordered[start : start + BATCH]):
                    found[host["metadata"]["name"]] = ending_taints(host)
        except ApiError as error:
            self._note_failure(error)
            return
        self._pause_s, self._is_refused = 0.0, False
        self._notices = {name: self._noted(name, keys) for name, keys in found.items()}
        self._has_looked = True

    def notice(self, host: str) -> EndNotice | None:
        """Return the notice of a host with the earliest time, as of the newest reading."""
        return min(self._notices.get(host, {}).values(), key=lambda n: n.taken_at or float("inf"), default=None)

    def _noted(self, host: str, keys: list[str]) -> dict[str, EndNotice]:
        """Return a host's notices. When a taint began that was there at the first look, a former controller may know."""
        known = self._notices.get(host, {})
        ends = {key: self._now() + ENDS[key] if ENDS[key] and self._has_looked else 0.0 for key in keys}
        return {key: known.get(key) or EndNotice(f"kubernetes taint {key}", ends[key]) for key in keys}

    def _note_failure(self, error: ApiError) -> None:
        if error.status in (401, 403):
            if not self._is_refused:
                text = "run %s: no notices from taints of hosts: %s; examples/kubernetes/hosts-rbac.yaml allows reading them"
                log.warning(text, self._run_id, error)
            self._is_refused = True
            self._next_at = self._clock() + REFUSED_S
            return
        log.debug("run %s: hosts cannot be read for now: %s", self._run_id, error)
        self._pause_s = min(MAX_PAUSE_S, 2.0 * self._pause_s or LOOK_S)
        self._next_at = self._clock() + max(self._pause_s, error.retry_after_s)
