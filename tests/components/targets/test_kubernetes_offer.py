"""The choice between Volcano's Jobs and plain ones, also where Volcano has left only its definitions behind."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.components.control.controller import Controller
from lightning_dlrover.components.control.reconcile import Limits
from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi
from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions
from lightning_dlrover.components.targets.kubernetes_offer import trial_manifest
from lightning_dlrover.components.targets.target import NodeSpec, TargetError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.report.status import read_job
from tests.support.kubernetes_cluster import Answer, KubernetesCluster, kubernetes_cluster
from tests.support.kubernetes_models import problems, restricted_violations
from tests.support.waiting import eventually

SPEC = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, 2)
OPTIONS = KubernetesOptions(image="trainer:1")
VOLCANO, PLAIN = "kubernetes/training/volcano", "kubernetes/training"
TRIAL = f"run-trial-{hashlib.sha256(b'run').hexdigest()[:10]}"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    with kubernetes_cluster(tmp_path, runs_pods=False, has_volcano=True) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def make(trial_s: float = 0.6, options: KubernetesOptions = OPTIONS, recorded: str = "", **more: Any) -> KubernetesTarget:
    api = KubernetesApi(request_s=5.0, pause_s=0.01)
    return KubernetesTarget(SPEC, options, None, poll_s=0.0, api=api, recorded=recorded, trial_s=trial_s, **more)


def test_volcano_that_acts_is_used_and_its_trial_job_is_removed(
    cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert make(trial_s=30.0).name == VOLCANO
    assert cluster.num_requests("POST", "jobs") == 1
    assert cluster.objects["jobs"] == cluster.objects["pods"] == cluster.objects["podgroups"] == {}
    assert caplog.text == ""


def test_pod_of_the_trial_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kubernetes_cluster(tmp_path, has_volcano=True) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        seen: list[str] = []
        original = running._create_pod

        def create_pod(pod: dict[str, Any]) -> None:
            seen.append(str(pod["metadata"]["name"]))
            original(pod)

        monkeypatch.setattr(running, "_create_pod", create_pod)
        assert make(trial_s=30.0).name == VOLCANO
        assert seen == [f"{TRIAL}-worker-0-0"]
        assert running._processes == {}


def test_definitions_without_a_controller_fall_back_to_plain_jobs_with_one_sentence(
    cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.has_volcano_controller = False
    target = make()
    assert target.name == PLAIN
    [said] = caplog.messages
    assert said == (
        "run run: nodes are plain Jobs: the cluster defines Volcano's Jobs, but its controller has not acted on a Job for 1 s; "
        "start Volcano, or remove it"
    )
    target.open("0123456789")
    target.start("node1")
    assert [(job["apiVersion"], job["kind"]) for job in cluster.objects["jobs"].values()] == [("batch/v1", "Job")]
    target.close()


@pytest.mark.parametrize(
    ("dead", "is_final"),
    [
        ('service "volcano-admission-service" not found', True),
        ('no endpoints available for service "volcano-admission-service"', False),
        ("dial tcp 10.96.3.7:443: connect: connection refused", False),
    ],
)
def test_webhook_that_does_not_answer_falls_back_to_plain_jobs(
    cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, dead: str, is_final: bool
) -> None:
    cluster.dead_webhook = dead
    assert make(trial_s=30.0 if is_final else 0.6).name == PLAIN
    assert "the cluster defines Volcano's Jobs, but its webhook does not answer" in caplog.text
    assert len(caplog.messages) == 1


def test_volcano_that_is_just_starting_is_waited_for(cluster: KubernetesCluster) -> None:
    cluster.dead_webhook = "dial tcp 10.96.3.7:443: connect: connection refused"
    cluster.has_volcano_controller = False

    def start_volcano() -> None:
        eventually(lambda: cluster.num_requests("POST", "jobs"), "a refused trial", 10.0, 0.01)
        cluster.dead_webhook = ""
        eventually(lambda: TRIAL in cluster.objects["jobs"], "the trial", 10.0, 0.01)
        with cluster.lock:
            cluster.has_volcano_controller = True
            cluster._start_with_volcano(cluster.objects["jobs"][TRIAL])

    volcano = threading.Thread(target=start_volcano)
    volcano.start()
    assert make(trial_s=30.0).name == VOLCANO
    volcano.join()


@pytest.mark.parametrize("refusal", ["quota", "role", "policy", "reads"])
def test_refused_trial_proves_nothing_against_volcano(
    cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    cluster.has_volcano_controller = refusal != "reads"
    match refusal:
        case "quota":
            cluster.max_jobs = 0
        case "role":
            cluster.forbidden.add(("create", "jobs.batch.volcano.sh"))
        case "policy":
            words = 'admission webhook "policy.example" denied the request: no owner'
            cluster.answer_next("POST", "jobs", Answer(403, words, "Forbidden"))
        case _:
            cluster.answer_next("GET", "jobs", *[Answer(503, "starting")] * 100)
    assert make().name == VOLCANO
    assert "plain Jobs" not in caplog.text


def test_trial_of_a_killed_process_is_taken_over_and_removed(cluster: KubernetesCluster) -> None:
    KubernetesApi().create_job("training", trial_manifest(SPEC, OPTIONS))
    assert make(trial_s=30.0).name == VOLCANO
    assert cluster.objects["jobs"] == {}


def test_job_keeps_the_kind_of_its_jobs_without_another_trial(cluster: KubernetesCluster) -> None:
    assert make(recorded=PLAIN).name == PLAIN
    cluster.has_volcano_controller = False
    assert make(recorded=VOLCANO).name == VOLCANO
    assert cluster.num_requests("POST", "jobs") == 0
    assert make(recorded="kubernetes/other").name == PLAIN  # of a job elsewhere, whose records cannot decide here
    assert cluster.num_requests("POST", "jobs") == 1


def test_later_controller_finds_the_nodes_that_were_started_without_volcano(
    cluster: KubernetesCluster, client: EtcdClient, keys: Keys
) -> None:
    cluster.has_volcano_controller = False
    with Controller(client, keys, make(), Limits(1, 1), show=print) as first:

        def has_node() -> bool:
            assert first.step() is None
            return cluster.nodes() == ["node1"]

        eventually(has_node, "node1", 15.0, 0.01)
        cluster.has_volcano_controller = True  # Volcano is repaired, and the controller killed
        nodes = read_job(client, keys).nodes
        assert nodes is not None
        later = make(trial_s=30.0, recorded=nodes.target)
        later.open(nodes.mark)
        assert [app.node for app in later.apps()] == ["node1"]
        later.close()


def test_queue_without_its_volcano_is_an_error_or_that_of_kueue(cluster: KubernetesCluster) -> None:
    cluster.has_volcano_controller = False
    options = replace(OPTIONS, queue="ads")
    with pytest.raises(TargetError, match="--queue ads: the cluster has no Volcano and no Kueue"):
        make(options=options)
    cluster.has_kueue = True
    target = make(options=options)
    target.open("0123456789")
    target.start("node1")
    [job] = cluster.objects["jobs"].values()
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "ads"
    target.close()


def test_trial_has_only_known_fields_and_meets_the_restricted_level() -> None:
    manifest = trial_manifest(SPEC, replace(OPTIONS, queue="ads", gpus="8"))
    assert problems(manifest) == []
    [task] = manifest["spec"]["tasks"]
    assert restricted_violations(task["template"]["spec"]) == []
    assert manifest["spec"]["queue"] == "default"  # a missing queue proves nothing
