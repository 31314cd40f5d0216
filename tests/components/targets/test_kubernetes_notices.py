"""Notices on Kubernetes: deletion and disruption of pods, taints of hosts, and clusters that let nobody read their hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi
from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions
from lightning_dlrover.components.targets.kubernetes_notices import BATCH, ENDS, LOOK_S, REFUSED_S, Hosts, pod_notice
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.rdzv.job.records import EndNotice
from tests.support.kubernetes_cluster import Answer, KubernetesCluster, kubernetes_cluster
from tests.support.kubernetes_models import problems
from tests.support.manual_clock import ShiftedClock
from tests.support.waiting import eventually

MARK = "0123456789"
ROLE = Path(__file__).parents[3] / "examples" / "kubernetes" / "hosts-rbac.yaml"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    with kubernetes_cluster(tmp_path, runs_pods=False) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def target(cluster: KubernetesCluster, clock: ShiftedClock, tmp_path: Path) -> Iterator[KubernetesTarget]:
    """A target with two running nodes."""
    spec, options = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, 2), KubernetesOptions(image="trainer:1")
    made = KubernetesTarget(spec, options, tmp_path / "logs", 0.0, KubernetesApi(pause_s=0.01), clock=clock)
    made.open(MARK)
    for node in ("node1", "node2"):
        made.start(node)
        cluster.set_pod(node, "Running")
    yield made
    made.close()


def handle(node: str) -> str:
    return f"run-{node}-{MARK}/{node}"


def notices(target: KubernetesTarget) -> list[EndNotice | None]:
    """Notices of both nodes after another look at their pods."""
    assert all(app.is_living for app in target.apps())
    return [target.notice(handle(node)) for node in ("node1", "node2")]


def first_notice(target: KubernetesTarget, node: str) -> EndNotice:
    """The notice of a node, once a watch has delivered what has changed; the other node has none."""

    def look() -> EndNotice | None:
        found = dict(zip(("node1", "node2"), notices(target), strict=True))
        notice = found.pop(node)
        assert [*found.values()] == [None]
        return notice

    return eventually(look, f"a notice of {node}", poll_s=0.02)


def test_pods_deletion_is_a_notice_with_its_grace(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    assert notices(target) == [None, None]
    began = time.time()
    cluster.delete("pods", cluster.pod_of("node2")["metadata"]["name"], 90)
    notice = first_notice(target, "node2")
    assert notice.source == "kubernetes pod deletion"
    assert began + 89.0 <= notice.taken_at <= time.time() + 90.0


@pytest.mark.parametrize("reason", ["PreemptionByScheduler", "EvictionByEvictionAPI"])
def test_disruption_names_its_reason(target: KubernetesTarget, cluster: KubernetesCluster, reason: str) -> None:
    cluster.disrupt("node1", reason)
    notice = first_notice(target, "node1")
    assert notice.source == f"kubernetes {reason}"
    assert notice.taken_at > time.time()


@pytest.mark.parametrize(
    ("metadata", "conditions", "expected"),
    [
        ({}, [{"type": "DisruptionTarget", "status": "True"}], EndNotice("kubernetes DisruptionTarget")),
        ({}, [{"type": "DisruptionTarget", "status": "False", "reason": "x"}], None),
        ({"deletionTimestamp": "2026-01-31T14:30:00Z"}, [], EndNotice("kubernetes pod deletion", 1769869800.0)),
        ({"deletionTimestamp": "garbage"}, [], EndNotice("kubernetes pod deletion", 0.0)),
    ],
)
def test_notice_of_a_pod(metadata: dict[str, Any], conditions: list[dict[str, Any]], expected: EndNotice | None) -> None:
    assert pod_notice({"metadata": metadata, "status": {"conditions": conditions}}) == expected


def test_node_that_the_controller_ends_itself_has_no_notice(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    target.cancel([handle("node1")])
    target.status(handle("node2"))
    assert target.notice(handle("node1")) is None


@pytest.mark.parametrize("key", sorted(ENDS))
def test_taint_that_foretells_the_end_of_a_host_is_a_notice(
    target: KubernetesTarget, cluster: KubernetesCluster, clock: ShiftedClock, key: str
) -> None:
    assert notices(target) == [None, None]
    cluster.taint("node2", key, "1700000000")
    assert notices(target) == [None, None]  # the hosts are read again later
    clock.ahead_s += LOOK_S
    [none, notice] = notices(target)
    assert none is None
    assert notice is not None
    assert notice.source == f"kubernetes taint {key}"
    assert notice.taken_at == pytest.approx(time.time() + ENDS[key] if ENDS[key] else 0.0, abs=2.0)
    clock.ahead_s += LOOK_S
    assert notices(target) == [None, notice]


@pytest.mark.parametrize(
    "key",
    [
        "DeletionCandidateOfClusterAutoscaler",
        "node.kubernetes.io/unschedulable",
        "kubernetes.azure.com/scalesetpriority",
        "nvidia.com/gpu",
    ],
)
def test_other_taints_are_none(target: KubernetesTarget, cluster: KubernetesCluster, key: str) -> None:
    cluster.taint("node2", key)
    assert notices(target) == [None, None]


def test_taint_that_executes_at_once_shows_as_the_pods_disruption(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    cluster.taint("node1", "node.kubernetes.io/out-of-service", "nodeshutdown", "NoExecute")
    # The taint may be seen first.
    eventually(lambda: first_notice(target, "node1").source == "kubernetes DeletionByTaintManager", "the pod's disruption")


def test_cluster_that_hides_its_hosts_is_reported_once(
    target: KubernetesTarget, cluster: KubernetesCluster, clock: ShiftedClock, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.forbidden = {("list", "nodes")}
    cluster.taint("node1", "ToBeDeletedByClusterAutoscaler")
    for _ in range(3):
        assert notices(target) == [None, None]
        clock.ahead_s += REFUSED_S + 1.0
    assert caplog.text.count("no notices from taints of hosts") == 1
    assert "hosts-rbac.yaml" in caplog.text
    asked = [path for _, path in cluster.requests if path.startswith("/api/v1/nodes")]
    assert len(asked) == 3
    cluster.forbidden = set()
    assert notices(target) != [None, None]


@pytest.mark.parametrize("answer", [Answer(), Answer(500, "etcd is away"), Answer(429, "later"), Answer(200, body=b"{}")])
def test_failed_request_for_hosts_keeps_what_is_known(
    target: KubernetesTarget, cluster: KubernetesCluster, clock: ShiftedClock, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.taint("node1", "ToBeDeletedByClusterAutoscaler")
    known = notices(target)
    assert known[0] is not None
    cluster.answer_next("GET", "nodes", answer)
    clock.ahead_s += LOOK_S
    assert notices(target) == known
    assert caplog.text == ""


def test_hosts_of_a_large_job_take_few_requests() -> None:
    class Api:
        num_requests = 0

        def hosts(self, names: list[str]) -> list[dict[str, Any]]:
            self.num_requests += 1
            return [{"metadata": {"name": name}, "spec": {"taints": [{"key": "karpenter.sh/disrupted"}]}} for name in names]

    api: Any = Api()
    hosts = Hosts(api, "run", lambda: 0.0)
    hosts.look([f"host-{n}" for n in range(100)])
    assert api.num_requests == 100 / BATCH
    assert not hosts.is_due
    assert api.num_requests / LOOK_S < 1.0
    assert {hosts.notice(f"host-{n}") for n in range(100)} == {EndNotice("kubernetes taint karpenter.sh/disrupted")}
    assert hosts.notice("other") is None


def test_example_role_for_hosts_allows_their_list_alone() -> None:
    documents = list(yaml.safe_load_all(ROLE.read_text()))
    assert [problem for document in documents for problem in problems(document)] == []
    [role] = [document for document in documents if document["kind"] == "ClusterRole"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
