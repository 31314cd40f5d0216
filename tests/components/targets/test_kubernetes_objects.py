"""What a job keeps on Kubernetes besides its nodes: the PodDisruptionBudget, and events on its Jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi
from lightning_dlrover.components.targets.kubernetes_events import JobEvents
from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions, labelled
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.rdzv.job.events import RoundFormed, WorkerLost, record_of
from tests.support.kubernetes_cluster import Answer, KubernetesCluster, kubernetes_cluster
from tests.support.manual_clock import ShiftedClock
from tests.support.waiting import eventually

MARK = "0123456789"
BUDGET = f"run-nodes-{MARK}"
SPEC = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, 4)
OPTIONS = KubernetesOptions(image="trainer:1", keeps_budget=True)

MakeTarget = Callable[..., KubernetesTarget]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    """A cluster without a kubelet; the test updates its pods."""
    with kubernetes_cluster(tmp_path, runs_pods=False) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def api(cluster: KubernetesCluster) -> KubernetesApi:
    return KubernetesApi(request_s=5.0, pause_s=0.01)


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def make_target(cluster: KubernetesCluster, tmp_path: Path, clock: ShiftedClock) -> Iterator[MakeTarget]:
    made: list[KubernetesTarget] = []

    def make(spec: NodeSpec = SPEC, options: KubernetesOptions = OPTIONS) -> KubernetesTarget:
        own = KubernetesApi(request_s=5.0, pause_s=0.01)
        made.append(KubernetesTarget(spec, options, tmp_path / "logs", poll_s=0.0, api=own, clock=clock, watches=False))
        made[-1].open(MARK)
        return made[-1]

    yield make
    for target in made:
        target.close()


def start(target: KubernetesTarget, cluster: KubernetesCluster, *nodes: str) -> list[str]:
    handles = [target.start(node) for node in nodes]
    for node in nodes:
        cluster.set_pod(node, "Running")
    assert len(target.apps()) >= len(nodes)
    return handles


@pytest.mark.parametrize(("min_workers", "workers_per_node"), [(2, 1), (4, 2), (3, 2)])
def test_drain_leaves_the_nodes_of_min_workers(
    make_target: MakeTarget, cluster: KubernetesCluster, min_workers: int, workers_per_node: int
) -> None:
    target = make_target(replace(SPEC, min_workers=min_workers, max_workers=8, workers_per_node=workers_per_node))
    start(target, cluster, "node1", "node2", "node3")
    assert cluster.drain("node1") == ""
    assert cluster.drain("node2") == cluster.drain("node3") != ""
    cluster.set_pod("node2", "Failed")
    assert cluster.drain("node2") == ""  # it no longer trains


def test_budget_is_removed_with_the_last_node_and_not_before(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    first = make_target()
    handles = start(first, cluster, "node1", "node2")
    first.close()
    assert list(cluster.objects["poddisruptionbudgets"]) == [BUDGET]
    second = make_target(replace(SPEC, min_workers=2))  # continued with another MIN
    second.apps()
    [budget] = cluster.objects["poddisruptionbudgets"].values()
    assert budget["spec"]["minAvailable"] == 2
    second.cancel(handles)
    for node in ("node1", "node2"):
        cluster.remove_pod(node)
    second.close()
    assert cluster.objects["poddisruptionbudgets"] == {}


def test_refused_budget_keeps_no_node_from_training_and_is_logged_once(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.forbidden.add(("create", "poddisruptionbudgets.policy"))
    target = make_target()
    [handle] = start(target, cluster, "node1")
    for ahead_s in (0.0, 5.0, 25.0, 100.0):
        clock.ahead_s = ahead_s
        assert target.status(handle) == "running"
    [said] = [text for text in caplog.messages if "PodDisruptionBudget" in text]
    assert "cannot create resource" in said
    assert "--no-disruption-budget" in said
    assert 2 <= cluster.num_requests("POST", "poddisruptionbudgets") <= 4
    cluster.forbidden.clear()
    clock.ahead_s = 800.0
    target.apps()
    assert list(cluster.objects["poddisruptionbudgets"]) == [BUDGET]


@pytest.mark.parametrize("failure", [Answer(503, "starting"), Answer(), Answer(is_carried_out=True)])
def test_budget_whose_creation_fails_is_created_later(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock, failure: Answer
) -> None:
    cluster.answer_next("POST", "poddisruptionbudgets", failure)
    target = make_target()
    start(target, cluster, "node1")
    clock.ahead_s = 5.0
    target.apps()
    assert list(cluster.objects["poddisruptionbudgets"]) == [BUDGET]
    assert not target._needs_budget


def test_budget_belongs_to_the_controllers_job_and_not_to_its_pod(
    make_target: MakeTarget, cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = make_target(replace(SPEC, run_id="other"), KubernetesOptions(image="trainer:1"))
    controller.start("controller")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("HOSTNAME", cluster.pod_of("controller")["metadata"]["name"])
    start(make_target(), cluster, "node1")
    cluster.remove_pod("controller")  # evicted
    assert list(cluster.objects["poddisruptionbudgets"]) == [BUDGET]
    cluster.delete("jobs", f"other-controller-{MARK}")
    assert cluster.objects["poddisruptionbudgets"] == {}


def test_job_that_wants_no_budget_has_none(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    target = make_target(options=replace(OPTIONS, keeps_budget=False))
    start(target, cluster, "node1")
    assert cluster.num_requests("POST", "poddisruptionbudgets") == 0


# Events


def sent(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    with cluster.lock:
        return sorted(cluster.objects["events"].values(), key=lambda event: str(event["eventTime"]))


def wait_for_events(cluster: KubernetesCluster, number: int) -> list[dict[str, Any]]:
    eventually(lambda: len(sent(cluster)) >= number, f"{number} events", 10.0, 0.01, report=lambda: f"{sent(cluster)}")
    return sent(cluster)


def test_history_of_a_job_is_on_the_job_of_its_oldest_node(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    target = make_target()
    target.publish(record_of(RoundFormed(1, ["w1"], "start"), "nobody can see it yet"))
    start(target, cluster, "node2", "node1")
    target.publish(record_of(RoundFormed(1, ["w1", "w2"], "start"), "round 1: 2 workers"))
    target.publish(record_of(WorkerLost("w2", 1), "w2 is lost: its lease has expired"))
    formed, lost = wait_for_events(cluster, 2)
    oldest = cluster.objects["jobs"][f"run-node2-{MARK}"]["metadata"]
    for event, reason, kind, message in (
        (formed, "RoundFormed", "Normal", "round 1: 2 workers"),
        (lost, "WorkerLost", "Warning", "w2 is lost: its lease has expired"),
    ):
        assert (event["reason"], event["type"], event["message"]) == (reason, kind, message)
        assert event["involvedObject"]["uid"] == oldest["uid"]
        assert event["metadata"]["labels"]["lightning-dlrover/job"] == "run"


def test_end_of_a_node_is_on_its_own_job(make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock) -> None:
    target = make_target()
    start(target, cluster, "node1", "node2")
    handle = target._handle("node2")
    cluster.set_pod("node2", "Failed", reason="Evicted", message="low on memory")
    eventually(lambda: target.status(handle) == "failed", "its end", 10.0, 0.01)
    [event] = wait_for_events(cluster, 1)
    assert event["involvedObject"]["name"] == f"run-node2-{MARK}"
    assert (event["reason"], event["message"]) == ("NodeEnded", "node2 has failed: Evicted: low on memory")


def test_own_events_are_not_the_reason_why_a_node_waits(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.has_room_for_pods = False
    target = make_target()
    handle = target.start("node1")
    target.apps()
    target.publish(record_of(WorkerLost("w2", 1), "w2 is lost"))
    wait_for_events(cluster, 1)
    clock.ahead_s = 6.0
    assert target.status(handle) == "pending"
    assert cluster.num_requests("GET", "events") == 1
    assert "w2 is lost" not in caplog.text


@pytest.fixture
def job(cluster: KubernetesCluster, make_target: MakeTarget) -> dict[str, Any]:
    start(make_target(options=replace(OPTIONS, keeps_budget=False)), cluster, "node1")
    [found] = cluster.objects["jobs"].values()
    return found


def test_events_beyond_the_rate_become_one(api: KubernetesApi, cluster: KubernetesCluster, job: dict[str, Any]) -> None:
    cluster.answer_next("POST", "events", Answer(is_carried_out=True, delay_s=0.3))  # the others wait
    events = JobEvents(api, "training", labelled("run", MARK), first=3, every_s=60.0)
    for number in range(200):
        events.add(job, "RoundFormed", f"round {number}")
        if number == 0:
            eventually(lambda: cluster.num_requests("POST", "events"), "the first event", 10.0, 0.01)
    events.add(job, "WorkerLost", "w2", is_warning=True)
    wait_for_events(cluster, 3)
    assert [event["message"] for event in sent(cluster)] == ["round 0", "round 199 (the newest of 199)", "w2"]
    for number in range(200):
        events.add(job, f"Reason{number}", "unlike the others")
    events.close()
    assert len(sent(cluster)) == 3 + 3
    assert sent(cluster)[-1]["reason"] == "Reason152"  # of the newest 50, the oldest come first


def test_any_text_makes_an_event_that_kubernetes_takes(
    api: KubernetesApi, cluster: KubernetesCluster, job: dict[str, Any]
) -> None:
    events = JobEvents(api, "training", labelled("run", MARK))
    for number, text in enumerate(["", "x" * 5000, "ä" * 700, "\0\x1b[31m", "日" * 1000]):
        events.add(job, f"Reason{number}", text)
        wait_for_events(cluster, number + 1)
    assert all(len(event["message"].encode()) <= 1024 for event in sent(cluster))
    events.close()


def test_refused_events_are_logged_once_and_are_in_nobodys_way(
    api: KubernetesApi, cluster: KubernetesCluster, job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster.forbidden.add(("create", "events.events.k8s.io"))
    events = JobEvents(api, "training", labelled("run", MARK))
    for number in range(5):
        events.add(job, f"Reason{number}", "text")
        eventually(lambda: "events on Jobs are left out" in caplog.text, "the refusal", 10.0, 0.01)
    events.close()
    assert cluster.num_requests("POST", "events") == 1
    assert len([text for text in caplog.messages if "events on Jobs are left out: events.events.k8s.io is forb" in text]) == 1


def test_hanging_server_delays_neither_the_job_nor_its_end(
    api: KubernetesApi, cluster: KubernetesCluster, job: dict[str, Any]
) -> None:
    cluster.answer_next("POST", "events", *[Answer(delay_s=60.0)] * 10)
    events = JobEvents(api, "training", labelled("run", MARK))
    began = time.monotonic()
    for number in range(100):
        events.add(job, f"Reason{number}", "text")
    assert time.monotonic() - began < 2.0
    events.close()
    assert time.monotonic() - began < 6.0
