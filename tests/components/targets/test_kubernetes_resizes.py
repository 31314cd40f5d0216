"""Pods that get another size in place, against an API server and the kubelet's part of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi
from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions
from lightning_dlrover.components.targets.kubernetes_state import quantity, resize_state
from lightning_dlrover.components.targets.target import NodeSize, NodeSpec, Resize, TargetError
from tests.support.kubernetes_cluster import Answer, KubernetesCluster, kubernetes_cluster
from tests.support.manual_clock import ShiftedClock
from tests.support.waiting import eventually

MARK = "0123456789"
SPEC = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, 2)
OPTIONS = KubernetesOptions(image="trainer:1")
SMALL, WIDE, TALL = NodeSize(1, 1024), NodeSize(2, 1024), NodeSize(1, 2048)
MIB = 2**20


class Sized:
    """A target with node1, which has one core and 1 GiB, on a host of 4 cores."""

    def __init__(self, cluster: KubernetesCluster, folder: Path, options: KubernetesOptions) -> None:
        self.cluster = cluster
        self.clock = ShiftedClock()
        api = KubernetesApi(request_s=5.0, pause_s=0.01)
        self.target = KubernetesTarget(SPEC, options, folder / "logs", poll_s=0.0, api=api, clock=self.clock)
        self.target.open(MARK)
        self.handle = self.add("node1")

    def add(self, node: str) -> str:
        handle = self.target.start(node, SMALL)
        self.cluster.set_pod(node, "Running")
        return handle

    def resize(self, size: NodeSize) -> Resize:
        return self.target.resize(self.handle, size)

    def wait_for(self, size: NodeSize, state: str) -> Resize:
        seen: list[Resize] = []

        def look() -> bool:
            seen.append(self.resize(size))
            return seen[-1].state == state

        eventually(look, f"a change that is {state}", 10.0, 0.02, report=lambda: f"it is {seen[-1]}")
        return seen[-1]

    @property
    def resources(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.pod_of("node1")["spec"]["containers"][0]["resources"]
        return found

    @property
    def num_requests(self) -> int:
        return sum(method == "PATCH" for method, _ in self.cluster.requests)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    with kubernetes_cluster(tmp_path, runs_pods=False) as running:
        running.host.cpus, running.host.memory_bytes = 4.0, 8192.0 * MIB
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def make_sized(cluster: KubernetesCluster, tmp_path: Path) -> Iterator[Callable[..., Sized]]:
    made: list[Sized] = []

    def make(options: KubernetesOptions = OPTIONS) -> Sized:
        made.append(Sized(cluster, tmp_path, options))
        return made[-1]

    yield make
    for each in made:
        each.target.close()


@pytest.fixture
def sized(make_sized: Callable[..., Sized]) -> Sized:
    return make_sized()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2", 2.0), ("1500m", 1.5), ("2Gi", 2**31), ("2048Mi", 2**31), ("1e3", 1000.0), ("4k", 4000.0), (3, 3.0), ("x", None)],
)
def test_quantities_are_compared_as_numbers(text: object, expected: float | None) -> None:
    assert quantity(text) == expected


def test_running_pod_gets_cores_and_memory_by_one_request_each(sized: Sized) -> None:
    assert sized.target.resizes_in_place
    uid = sized.cluster.pod_of("node1")["metadata"]["uid"]
    assert sized.resize(WIDE) == Resize("asked")
    assert sized.wait_for(WIDE, "done") == Resize("done")
    assert sized.wait_for(NodeSize(2, 2048), "done") == Resize("done")  # the server writes 2048Mi as 2Gi
    assert sized.num_requests == 2
    assert sized.resources["requests"] == sized.resources["limits"] == {"cpu": "2", "memory": "2Gi"}
    assert sized.cluster.pod_of("node1")["metadata"]["uid"] == uid


def test_other_containers_and_resources_stay_as_they_are(make_sized: Callable[..., Sized]) -> None:
    sidecar = {"name": "proxy", "image": "proxy:1", "resources": {"limits": {"cpu": "100m"}, "requests": {"cpu": "100m"}}}
    template = {"spec": {"containers": [sidecar]}}
    made = make_sized(KubernetesOptions(image="trainer:1", gpus="1", template=template))
    made.wait_for(WIDE, "done")
    containers = {each["name"]: each["resources"] for each in made.cluster.pod_of("node1")["spec"]["containers"]}
    assert containers["proxy"] == sidecar["resources"]
    assert containers["worker"]["limits"] == {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "1"}


@pytest.mark.parametrize("reports_generations", [False, True])
def test_deferred_change_waits_until_there_is_room(sized: Sized, reports_generations: bool) -> None:
    sized.cluster.host.reports_generations = reports_generations
    sized.add("node2")
    sized.add("node3")
    sized.resize(NodeSize(3, 1024))
    sized.clock.ahead_s += 6.0
    assert sized.wait_for(NodeSize(3, 1024), "waiting").why == "Deferred: Node didn't have enough resource: cpu"
    sized.cluster.remove_pod("node3")
    assert sized.wait_for(NodeSize(3, 1024), "done") == Resize("done")
    assert sized.num_requests <= 2  # repeated once if the pod has not shown it after 5 s


@pytest.mark.parametrize("reports_generations", [False, True])
def test_infeasible_change_is_refused_and_can_be_withdrawn(sized: Sized, reports_generations: bool) -> None:
    sized.cluster.host.reports_generations = reports_generations
    sized.resize(NodeSize(5, 1024))
    sized.clock.ahead_s += 6.0
    assert sized.wait_for(NodeSize(5, 1024), "refused").why == "Infeasible: Node didn't have enough capacity"
    assert sized.target.resizes_in_place
    assert sized.wait_for(SMALL, "done") == Resize("done")
    assert sized.resources["limits"]["cpu"] == "1"


def test_condition_of_an_earlier_request_does_not_count(sized: Sized) -> None:
    sized.wait_for(NodeSize(5, 1024), "refused")
    pod = copy.deepcopy(sized.cluster.pod_of("node1"))
    assert resize_state(pod, {"cpu": "5"}, trusts_conditions=False).state == "refused"
    pod["metadata"]["generation"] += 1
    assert resize_state(pod, {"cpu": "2"}, trusts_conditions=True) == Resize("asked")
    for condition in pod["status"]["conditions"]:
        del condition["observedGeneration"]  # of an older server
    assert resize_state(pod, {"cpu": "2"}, trusts_conditions=False) == Resize("asked")


def test_static_cpu_manager_refuses_other_cores(sized: Sized) -> None:
    sized.cluster.host.has_static_cpus = True
    assert "static CPU manager" in sized.wait_for(WIDE, "refused").why


def test_memory_in_use_is_not_taken_back(sized: Sized) -> None:
    sized.wait_for(TALL, "done")
    sized.cluster.host.used_bytes = 1800.0 * MIB
    assert "below current usage" in sized.wait_for(SMALL, "waiting").why
    assert sized.wait_for(TALL, "done") == Resize("done")
    sized.cluster.host.used_bytes = 0.0
    assert sized.wait_for(SMALL, "done") == Resize("done")


def test_server_without_the_subresource_refuses_once_for_all(sized: Sized) -> None:
    sized.cluster.has_resize = False
    assert "Kubernetes 1.33" in sized.resize(WIDE).why
    assert not sized.target.resizes_in_place
    assert sized.wait_for(SMALL, "done") == Resize("done")  # the withdrawal needs no request
    assert sized.num_requests == 1


def test_old_server_is_known_before_the_first_request(make_sized: Callable[..., Sized], cluster: KubernetesCluster) -> None:
    cluster.has_resize = False
    assert not make_sized().target.resizes_in_place


def test_missing_permission_refuses_and_names_the_remedy(sized: Sized) -> None:
    sized.cluster.forbidden.add(("patch", "pods/resize"))
    found = sized.resize(WIDE)
    assert found.state == "refused"
    assert found.why.endswith("allow it as in examples/kubernetes/rbac.yaml")
    assert not sized.target.resizes_in_place


def test_full_quota_is_waited_for_with_a_pause(sized: Sized) -> None:
    text = 'pods "x" is forbidden: exceeded quota: compute, requested: limits.cpu=1, used: limits.cpu=4, limited: limits.cpu=4'
    sized.cluster.answer_next("PATCH", "pods/resize", Answer(403, text, "Forbidden"))
    assert sized.resize(WIDE) == Resize("waiting", f"{text} (403)")
    assert sized.resize(WIDE).state == "waiting"
    assert sized.num_requests == 1
    sized.clock.ahead_s += 31.0
    assert sized.wait_for(WIDE, "done") == Resize("done")
    assert sized.target.resizes_in_place


@pytest.mark.parametrize("status", [0, 409, 429, 500])
def test_request_that_may_have_been_carried_out_is_repeated(sized: Sized, status: int) -> None:
    reason = "Conflict" if status == 409 else ""
    sized.cluster.answer_next("PATCH", "pods/resize", Answer(status, "try again", reason, is_carried_out=status == 0))
    with pytest.raises(TargetError):
        sized.resize(WIDE)
    assert sized.wait_for(WIDE, "done") == Resize("done")


def test_change_that_would_give_the_pod_another_qos_class_is_refused(make_sized: Callable[..., Sized]) -> None:
    sized = make_sized()
    with sized.cluster.lock:
        for kind in ("requests", "limits"):
            del sized.resources[kind]["memory"]
    assert "Pod QOS Class may not change" in sized.resize(TALL).why


def test_pod_that_is_gone_ends_no_change_by_itself(sized: Sized) -> None:
    sized.cluster.remove_pod("node1")
    assert sized.resize(WIDE) == Resize("asked")
