"""The Kubernetes target against a scripted API server, which answers, refuses, throttles, fails, hangs or returns garbage."""

from __future__ import annotations

import base64
import dataclasses
import logging
import re
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from kubernetes import client, config
from kubernetes.config import incluster_config, kube_config
from torchx.schedulers.kubernetes_scheduler import KubernetesScheduler
from torchx.specs import AppDef, AppState, Role

from lightning_dlrover.components.control.controller import Controller
from lightning_dlrover.components.control.reconcile import FailurePolicy, Limits
from lightning_dlrover.components.targets import kubernetes_api
from lightning_dlrover.components.targets.kubernetes import KubernetesTarget, known_target
from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi
from lightning_dlrover.components.targets.kubernetes_manifests import (
    PLAIN_JOBS,
    VOLCANO_JOBS,
    KubernetesOptions,
    Mount,
    job_manifest,
    job_name,
)
from lightning_dlrover.components.targets.target import ANY_SIZE, App, NodeSize, NodeSpec, NotTakenError, TargetError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.events import WorkerLost, record_of
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.kubernetes_cluster import Answer, KubernetesCluster, kubernetes_cluster
from tests.support.kubernetes_models import problems, restricted_violations
from tests.support.manual_clock import ShiftedClock
from tests.support.waiting import eventually

MARK = "0123456789"
HANDLE = f"run-node1-{MARK}/node1"
PLAIN = KubernetesOptions(image="trainer:1")
SPEC = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, 2)
EXAMPLES = Path(__file__).parents[3] / "examples" / "kubernetes"

MakeTarget = Callable[..., KubernetesTarget]


with_and_without_volcano = pytest.mark.parametrize("has_volcano", [False, True], ids=["plain", "volcano"])
with_volcano = pytest.mark.parametrize("has_volcano", [True], ids=["volcano"])


@pytest.fixture
def has_volcano() -> bool:
    return False


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_volcano: bool) -> Iterator[KubernetesCluster]:
    """A cluster without a kubelet; the test updates its pods."""
    with kubernetes_cluster(tmp_path, runs_pods=False, has_volcano=has_volcano) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def make_target(cluster: KubernetesCluster, tmp_path: Path, clock: ShiftedClock) -> Iterator[MakeTarget]:
    made: list[KubernetesTarget] = []

    def make(
        options: KubernetesOptions = PLAIN,
        spec: NodeSpec = SPEC,
        poll_s: float = 0.0,
        has_own_etcd: bool = False,
        watches: bool = False,
        **api: Any,
    ) -> KubernetesTarget:
        api = {"request_s": 5.0, "pause_s": 0.01, **api}
        logs, client = tmp_path / "logs", KubernetesApi(**api)
        # Without watches a test sees each change at its next query.
        made.append(
            KubernetesTarget(
                spec, options, logs, poll_s=poll_s, api=client, clock=clock, has_own_etcd=has_own_etcd, watches=watches
            )
        )
        made[-1].open(MARK)
        return made[-1]

    yield make
    for target in made:
        target.close()


@pytest.fixture
def target(make_target: MakeTarget) -> KubernetesTarget:
    """A target that has started node1."""
    made = make_target()
    made.start("node1")
    return made


def wait_for_status(target: KubernetesTarget, wanted: str, handle: str = HANDLE, timeout_s: float = 15.0) -> None:
    what = f"{handle} to be {wanted}"
    eventually(lambda: target.status(handle) == wanted, what, timeout_s, 0.02, report=lambda: f"it is {target.status(handle)}")


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


MUCH = KubernetesOptions(
    image="trainer:1",
    service_account="trainer",
    gpus="2",
    node_selector={"pool": "gpu"},
    mounts=(Mount("data", "/data", read_only=True),),
    image_pull_secret="registry",
    work_dir="/work",
)


def test_node_is_a_job_of_one_pod_with_the_requested_resources() -> None:
    options = dataclasses.replace(MUCH, grace_s=300)
    spec = dataclasses.replace(SPEC, script_args=("--lr", "0.1", "${HOME}", "$(HOME)"), environment={"LEVEL": "5$"})
    manifest = job_manifest(spec, options, NodeSize(4, 16384), "node3", MARK)
    assert manifest["metadata"]["name"] == f"run-node3-{MARK}"
    assert manifest["metadata"]["labels"].items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
    job, pod, container = manifest["spec"], manifest["spec"]["template"]["spec"], container_of(manifest)
    assert (job["backoffLimit"], job["completions"], job["parallelism"]) == (0, 1, 1)
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"], pod["serviceAccountName"]) == ("Never", 300, "trainer")
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "16384Mi", "nvidia.com/gpu": "2"}
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert (container["image"], container["workingDir"], container["command"]) == ("trainer:1", "/work", ["python"])
    # Kubernetes turns two $ into one, and so does torchrun afterwards.
    assert container["args"][-5:] == ["/s/train.py", "--lr", "0.1", "$$$${HOME}", "$$$$(HOME)"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (variables["DLROVER_NODE"], variables["LEVEL"]) == ("node3", "5$$")
    assert {"name": "mount-0", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert {"name": "mount-0", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]


@with_and_without_volcano
@pytest.mark.parametrize("run_id", ["run", "My.Run_2", "_" * 80, "x" * 300, "-a-", "ctr." + "y" * 38 + "-z"])
def test_any_run_id_makes_names_and_labels_that_kubernetes_takes(make_target: MakeTarget, run_id: str) -> None:
    target = make_target(spec=dataclasses.replace(SPEC, run_id=run_id))
    handle = target.start("node12345")
    assert handle == f"{job_name(run_id, 'node12345', MARK)}/node12345"
    assert [app.handle for app in target.apps()] == [handle]


def test_etcd_credentials_come_from_a_secret_and_not_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    files = {name: str(tmp_path / name) for name in ("password_file", "ca_cert", "cert", "cert_key")}
    spec = dataclasses.replace(SPEC, access={"user": "trainer", **files})
    manifest = job_manifest(
        spec, dataclasses.replace(PLAIN, secret="etcd-access", endpoint="etcd:2379"), ANY_SIZE, "node1", MARK
    )
    text = str(manifest)
    assert str(tmp_path) not in text
    assert "hunter2" not in text
    arguments = container_of(manifest)["args"]
    assert "--rdzv-endpoint=etcd:2379" in arguments
    [conf] = [a for a in arguments if a.startswith("--rdzv-conf=")]
    folder = "/etc/dlrover/etcd"
    paths = {"password_file": "password", "ca_cert": "ca.crt", "cert": "tls.crt", "cert_key": "tls.key"}
    for name, file in paths.items():
        assert f",{name}={folder}/{file}" in conf
    [volume] = [v for v in manifest["spec"]["template"]["spec"]["volumes"] if "secret" in v]
    assert volume["secret"]["secretName"] == "etcd-access"
    assert sorted(item["key"] for item in volume["secret"]["items"]) == sorted(paths.values())
    with pytest.raises(TargetError, match="put them into a Secret"):  # before any start
        KubernetesTarget(spec, PLAIN, tmp_path)


SECRET = f"run-etcd-{MARK}"


@pytest.fixture
def own_spec(tmp_path: Path) -> NodeSpec:
    """A job whose etcd serves it alone and has a password."""
    (tmp_path / "etcd.password").write_text("hunter2\n")
    return dataclasses.replace(SPEC, access={"user": "root", "password_file": str(tmp_path / "etcd.password")})


@with_and_without_volcano
def test_password_of_a_jobs_own_etcd_is_in_one_secret_until_its_last_node_has_ended(
    make_target: MakeTarget, cluster: KubernetesCluster, own_spec: NodeSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    cluster.answer_next("POST", "secrets", Answer(is_carried_out=True))  # the answer to the first request is lost
    first = make_target(spec=own_spec, has_own_etcd=True)
    handles = [first.start("node1"), first.start("node2")]
    [(name, secret)] = cluster.objects["secrets"].items()
    assert (name, base64.b64decode(secret["data"]["password"])) == (SECRET, b"hunter2")
    for pod in cluster.objects["pods"].values():
        [volume] = [v["secret"] for v in pod["spec"]["volumes"] if "secret" in v]
        assert volume == {"secretName": SECRET, "items": [{"key": "password", "path": "password"}]}
    assert "hunter2" not in f"{cluster.objects['jobs']} {cluster.objects['pods']} {cluster.requests} {caplog.text}"
    first.close()  # its nodes train on, and ask for the password again
    assert list(cluster.objects["secrets"]) == [SECRET]
    second = make_target(spec=own_spec, has_own_etcd=True)
    second.cancel(handles)
    second.close()
    assert cluster.objects["secrets"] == cluster.objects["pods"] == {}


def test_no_node_starts_without_the_secret_that_it_mounts(
    make_target: MakeTarget, cluster: KubernetesCluster, own_spec: NodeSpec
) -> None:
    cluster.forbidden = {("create", "secrets")}
    target = make_target(spec=own_spec, has_own_etcd=True)
    with pytest.raises(NotTakenError, match=rf"Secret {SECRET} .* cannot create resource .* examples/kubernetes/rbac\.yaml"):
        target.start("node1")
    assert cluster.objects["jobs"] == {}
    cluster.forbidden = set()
    assert target.start("node1") == HANDLE


def test_secret_goes_with_the_pod_of_the_etcd_that_it_is_for(
    make_target: MakeTarget, cluster: KubernetesCluster, own_spec: NodeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_target(spec=dataclasses.replace(SPEC, run_id="other")).start("controller")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("HOSTNAME", cluster.pod_of("controller")["metadata"]["name"])
    make_target(spec=own_spec, has_own_etcd=True).start("node1")
    assert list(cluster.objects["secrets"]) == [SECRET]
    cluster.remove_pod("controller")
    assert cluster.objects["secrets"] == {}


def test_template_adds_fields_without_an_option() -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    template = {
        "metadata": {"annotations": {"team": "ads"}},
        "spec": {
            "tolerations": [toleration],
            "priorityClassName": "low",
            "restartPolicy": "Always",
            "containers": [{"name": "worker", "image": "other", "securityContext": {"runAsUser": 1}}, {"name": "side"}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }
    pod = job_manifest(SPEC, dataclasses.replace(PLAIN, template=template), ANY_SIZE, "node1", MARK)["spec"]["template"]
    assert pod["metadata"]["annotations"] == {"team": "ads", "lightning-dlrover/job": "run"}
    assert pod["spec"]["tolerations"] == [toleration]
    assert (pod["spec"]["priorityClassName"], pod["spec"]["restartPolicy"]) == ("low", "Never")
    worker, side = pod["spec"]["containers"]
    assert (worker["image"], worker["securityContext"]["runAsUser"]) == ("trainer:1", 1)
    assert side == {"name": "side"}
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["scratch", "shm"]


def test_node_of_several_workers_is_one_pod_with_all_their_gpus_and_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = dataclasses.replace(SPEC, workers_per_node=8, min_workers=8, max_workers=16)
    options = dataclasses.replace(PLAIN, gpus="8")
    manifest = job_manifest(spec, options, NodeSize(64, 131072), "node1", MARK)
    container, pod = container_of(manifest), manifest["spec"]["template"]["spec"]
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "131072Mi", "nvidia.com/gpu": "8"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert container["args"][:3] == ["-m", "lightning_dlrover.components.node", "--agents=8"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert (variables["DLROVER_WORKERS_PER_NODE"], variables["OMP_NUM_THREADS"]) == ("8", "8")


@with_and_without_volcano
def test_a_node_that_was_taken_on_before_is_taken_for_started(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    assert make_target().start("node1") == HANDLE
    assert make_target().start("node1") == HANDLE  # another controller, without the answer to the first one's request
    assert len(cluster.objects["jobs"]) == 1


@with_and_without_volcano
def test_a_job_of_that_name_that_is_not_ours_is_no_node_of_ours(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    make_target().start("node1")
    cluster.objects["jobs"][f"run-node1-{MARK}"]["metadata"]["labels"] = {}
    with pytest.raises(NotTakenError, match="is not this job's"):
        make_target().start("node1")


@with_and_without_volcano
@pytest.mark.parametrize(
    "failure",
    [
        Answer(is_carried_out=True),
        Answer(),
        Answer(503, "etcdserver: leader changed"),
        Answer(504, "timed out", is_carried_out=True),
        Answer(429, "too many requests", headers={"Retry-After": "0"}),
        Answer(409, "Operation cannot be fulfilled on resourcequotas: please apply your changes", "Conflict"),
        Answer(200, body=b"<html>Welcome to our proxy</html>", is_carried_out=True),
        Answer(201, is_carried_out=True, delay_s=1.0),
    ],
    ids=lambda answer: f"{answer.status}{'-done' if answer.is_carried_out else ''}",
)
def test_request_whose_answer_is_lost_starts_one_node(
    make_target: MakeTarget, cluster: KubernetesCluster, failure: Answer
) -> None:
    cluster.answer_next("POST", "jobs", failure)
    target = make_target(request_s=0.5)
    if failure.status == 200:  # such an answer is ambiguous, and the lists resolve it
        with pytest.raises(TargetError, match="whether Job"):
            target.start("node1")
    else:
        assert target.start("node1") == HANDLE
    assert list(target.apps()) == [App("node1", HANDLE, True)]


def test_throttling_is_waited_out_for_the_servers_time(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    cluster.answer_next("POST", "jobs", Answer(429, "slow down", headers={"Retry-After": "1"}))
    began = time.monotonic()
    assert make_target().start("node1") == HANDLE
    assert 1.0 <= time.monotonic() - began < 4.0


@with_and_without_volcano
@pytest.mark.parametrize(
    ("failures", "error", "message"),
    [
        ([Answer(429, "too many requests")] * 3, NotTakenError, "was not created: too many requests (429)"),
        ([Answer(500, "internal error")] * 3, TargetError, "whether Job run-node1"),
        ([Answer()] * 3, TargetError, "whether Job run-node1"),
        # The first request may have been executed; the second one's answer does not show it.
        ([Answer(), Answer(403, "exceeded quota", "Forbidden")], TargetError, "whether Job run-node1"),
    ],
)
def test_a_server_that_keeps_failing_is_given_up(
    make_target: MakeTarget, cluster: KubernetesCluster, failures: list[Answer], error: type[TargetError], message: str
) -> None:
    cluster.answer_next("POST", "jobs", *failures)
    with pytest.raises(TargetError, match=re.escape(message)) as raised:
        make_target().start("node1")
    assert raised.type is error


@with_and_without_volcano
def test_a_quota_refuses_in_the_servers_own_words(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    cluster.max_jobs = 1
    target = make_target()
    target.start("node1")
    with pytest.raises(NotTakenError, match=r"exceeded quota: team, requested: count/jobs\.batch(\.volcano\.sh)?=1"):
        target.start("node2")
    assert cluster.num_requests("POST", "jobs") == 2  # not repeated here: the controller retries, with backoff


@pytest.mark.parametrize(
    "refusal",
    [
        Answer(400, 'admission webhook "policy.example" denied the request: no root', ""),
        Answer(403, 'admission webhook "policy.example" denied the request: no root', "Forbidden"),
        Answer(422, 'Job.batch "x" is invalid: spec.template.spec.containers[0].image: no', "Invalid"),
    ],
    ids=lambda answer: str(answer.status),
)
def test_denied_admission_is_final_and_quoted(make_target: MakeTarget, cluster: KubernetesCluster, refusal: Answer) -> None:
    cluster.answer_next("POST", "jobs", refusal)
    with pytest.raises(NotTakenError, match=re.escape(refusal.message)):
        make_target().start("node1")
    assert cluster.num_requests("POST", "jobs") == 1


@with_and_without_volcano
def test_unknown_field_of_a_template_is_an_error(make_target: MakeTarget) -> None:
    target = make_target(dataclasses.replace(PLAIN, template={"spec": {"tolerration": []}}))
    with pytest.raises(NotTakenError, match=r"unknown field .*template\.spec\.tolerration"):
        target.start("node1")


@with_and_without_volcano
def test_a_missing_permission_and_a_missing_image_are_refusals(
    make_target: MakeTarget, cluster: KubernetesCluster, has_volcano: bool
) -> None:
    with pytest.raises(NotTakenError, match="image: Required value"):
        make_target(KubernetesOptions()).start("node1")
    cluster.forbidden |= {("create", "jobs"), ("create", "jobs.batch.volcano.sh")}
    with pytest.raises(NotTakenError, match="cannot create resource") as refused:
        make_target().start("node1")
    assert ("--plain-jobs starts nodes without Volcano" in str(refused.value)) == has_volcano


def test_an_api_server_that_hangs_or_is_not_there_is_given_up_in_time(
    make_target: MakeTarget, cluster: KubernetesCluster
) -> None:
    cluster.answer_next("GET", "jobs", Answer(200, delay_s=30.0))
    target = make_target(request_s=0.5)
    began = time.monotonic()
    with pytest.raises(TargetError, match=r"cannot be listed: GET .*timed out"):
        target.apps()
    assert time.monotonic() - began < 5.0
    gone = make_target()
    gone._api.close()  # its connections would outlive the server
    cluster._server.shutdown()
    cluster._server.server_close()
    with pytest.raises(NotTakenError, match="Connection refused"):
        gone.start("node1")


def containers(**exit_codes: int | None) -> dict[str, Any]:
    """States of a pod's containers; None: still running."""

    def state(code: int | None) -> dict[str, Any]:
        if code is None:
            return {"running": {}}
        return {"terminated": {"exitCode": code, "reason": {0: "Completed", 137: "OOMKilled"}.get(code, "Error")}}

    return {"containerStatuses": [{"name": name, "state": state(code)} for name, code in exit_codes.items()]}


NAMELESS_OOM = {"containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]}
PREEMPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]}


@pytest.mark.parametrize(
    ("phase", "details", "status", "why"),
    [
        ("Pending", {}, "pending", ""),
        ("Running", {}, "running", ""),
        ("Succeeded", {}, "succeeded", ""),
        ("Failed", {"reason": "Evicted", "message": "low on memory"}, "failed", "Evicted: low on memory"),
        ("Failed", {"reason": "NodeLost"}, "failed", "NodeLost"),
        ("Unknown", {}, "failed", "its host host-1 is lost"),
        ("Failed", NAMELESS_OOM, "failed", "OOMKilled, exit code 137"),
        ("Failed", PREEMPTED, "failed", "PreemptionByScheduler"),
        ("Failed", {"containerStatuses": [{"state": {"terminated": {"reason": "Error", "exitCode": 1}}}]}, "failed", ""),
        ("Running", containers(worker=None, proxy=None), "running", ""),
        ("Running", containers(proxy=1, worker=None), "running", ""),
        ("Running", containers(proxy=None, worker=0), "succeeded", ""),
        ("Running", containers(proxy=None, worker=1), "failed", ""),
        ("Running", containers(proxy=None, worker=137), "failed", "OOMKilled, exit code 137"),
        ("Failed", containers(proxy=137, worker=0), "succeeded", ""),
        ("Failed", containers(proxy=137, worker=1), "failed", ""),
    ],
)
def test_each_state_of_a_pod_has_its_meaning_and_its_reason_is_kept(
    target: KubernetesTarget,
    cluster: KubernetesCluster,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    phase: str,
    details: dict[str, Any],
    status: str,
    why: str,
) -> None:
    cluster.set_pod("node1", phase, **details)
    wait_for_status(target, status)
    assert [app.is_living for app in target.apps()] == [status in ("pending", "running")]
    if why:
        assert why in caplog.text
        assert f"Kubernetes: {why}" in target.logs(HANDLE)[-1].read_text()
    else:
        assert not (tmp_path / "logs/node1/stderr.log").exists()


def test_pod_that_hands_over_counts_as_running(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    cluster.set_pod("node1", "Running")
    cluster.evict("node1")
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    cluster.objects["jobs"][f"run-node1-{MARK}"]["status"] = {"conditions": [failed]}
    assert target.status(HANDLE) == "running"
    cluster.remove_pod("node1")
    wait_for_status(target, "failed")


def test_job_without_a_pod_has_not_ended_before_its_status_shows_it(
    target: KubernetesTarget, cluster: KubernetesCluster
) -> None:
    cluster.set_pod("node1", "Running")
    assert target.status(HANDLE) == "running"
    with cluster.lock:
        cluster.objects["pods"].clear()
    assert target.status(HANDLE) == "running"
    complete = {"type": "Complete", "status": "True"}
    cluster.objects["jobs"][f"run-node1-{MARK}"]["status"] = {"conditions": [complete]}
    wait_for_status(target, "succeeded")


def test_a_pod_on_a_lost_host_is_given_up_long_after_its_grace(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock
) -> None:
    target = make_target(dataclasses.replace(PLAIN, grace_s=100))
    target.start("node1")
    cluster.set_pod("node1", "Running")
    cluster.evict("node1")  # without a kubelet no process ends it
    assert target.status(HANDLE) == "running"
    clock.ahead_s = 155.0
    assert target.status(HANDLE) == "running"
    clock.ahead_s = 165.0
    assert target.apps() == [App("node1", HANDLE, False)]
    target.status(HANDLE)
    clock.ahead_s = 180.0
    assert target.status(HANDLE) == "failed"


def test_lists_wait_as_long_as_a_throttling_server_asks(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock
) -> None:
    target = make_target(poll_s=0.1)
    target.start("node1")
    cluster.answer_next("GET", "jobs", Answer(429, "slow down", headers={"Retry-After": "30"}))
    for later_s, num_lists in ((0.0, 1), (10.0, 1), (29.0, 1), (31.0, 2)):
        clock.ahead_s = later_s
        assert target.status(HANDLE) == "pending"
        assert cluster.num_requests("GET", "jobs") == num_lists


@pytest.mark.parametrize(
    ("details", "why"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 fit"}]},
            "node1 waits: Unschedulable: 0/3 fit",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            "node1 waits: ImagePullBackOff: no such image",
        ),
    ],
)
def test_reason_why_a_node_waits_is_given_once(
    target: KubernetesTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, details: dict[str, Any], why: str
) -> None:
    cluster.set_pod("node1", "Pending", **details)
    for _ in range(3):
        assert target.status(HANDLE) == "pending"
    assert caplog.text.count(why) == 1


def test_events_explain_why_a_job_gets_no_pod(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, clock: ShiftedClock
) -> None:
    cluster.has_room_for_pods = False
    target = make_target()
    target.start("node1")
    reference = {"kind": "Job", "name": f"run-node1-{MARK}"}
    message = "pods is forbidden: exceeded quota: team, requested: cpu=1"
    event = {"metadata": {"name": "e"}, "involvedObject": reference, "type": "Warning", "message": message}
    cluster.objects["events"]["e"] = event
    assert target.status(HANDLE) == "pending"
    assert cluster.num_requests("GET", "events") == 0  # its pod may just be on its way
    clock.ahead_s = 6.0
    assert target.status(HANDLE) == "pending"
    assert target.status(HANDLE) == "pending"
    assert f"node1 waits: {message}" in caplog.text
    assert cluster.num_requests("GET", "events") == 1


@with_and_without_volcano
def test_a_cancelled_node_is_deleted_with_its_pod(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    target = make_target()
    target.start("node1")
    cluster.set_pod("node1", "Running")
    assert target.status(HANDLE) == "running"
    target.cancel([HANDLE])
    assert cluster.objects["jobs"] == {}
    pod = cluster.pod_of("node1")
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 30  # although a hand-over may take 120 s
    assert target.apps() == [App("node1", HANDLE, True)]  # the node is ending, but has not ended
    assert target.status(HANDLE) == "running"
    cluster.remove_pod("node1")
    wait_for_status(target, "failed")
    assert caplog.text == ""
    target.cancel([HANDLE])  # ended nodes need no request


def test_pod_that_outlives_its_worker_is_deleted(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    cluster.set_pod("node1", "Running", **containers(proxy=None, worker=1))
    cluster.logs["node1"] = stamped(1, "last words")
    wait_for_status(target, "failed")
    assert "last words\n" in target.logs(HANDLE)[0].read_text()
    for _ in range(3):
        target.apps()
    assert cluster.objects["jobs"] == {}
    assert cluster.num_requests("DELETE", "pods") == 1
    assert cluster.pod_of("node1")["metadata"]["deletionGracePeriodSeconds"] == 30
    assert target.status(HANDLE) == "failed"


def test_command_that_cannot_start_ends_the_job_after_its_second_pod(
    make_target: MakeTarget, cluster: KubernetesCluster, client: EtcdClient, keys: Keys
) -> None:
    ended = {"reason": "StartError", "exitCode": 128, "message": 'exec: "pythn": executable file not found in $PATH'}
    policy = dataclasses.replace(QUICK, settle_s=0.1)
    with Controller(client, keys, make_target(), Limits(1, 1), show=print, policy=policy) as controller:
        for node in ("node1", "node2"):
            step_until(controller, lambda: node in cluster.nodes(), node)  # noqa: B023
            cluster.set_pod(node, "Failed", containerStatuses=[{"name": "worker", "state": {"terminated": ended}}])
        end = eventually(controller.step, "the job's end", 15.0, 0.01)
    assert end.exit_code == 1
    assert 'failed before the first step: its command could not start: exec: "pythn": executable file not found' in end.reason
    assert cluster.num_requests("POST", "jobs") == 2


def test_out_of_memory_is_that_of_the_worker(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    cluster.set_pod("node1", "Running", **containers(proxy=137, worker=1))
    target.apps()
    assert not target.ran_out_of_memory(HANDLE)
    cluster.set_pod("node1", "Running", **containers(proxy=None, worker=137))
    target.apps()
    assert target.ran_out_of_memory(HANDLE)


def stamped(second: int, text: str, nanosecond: int = 0) -> str:
    return f"2026-01-01T00:00:{second:02d}.{nanosecond:09d}Z {text}\n"


def wait_for_output(target: KubernetesTarget, text: str) -> None:
    def output() -> str:
        return "".join(file.read_text() for file in target.logs(HANDLE))

    def has_come() -> bool:
        if text != output():
            target.status(HANDLE)  # reads the logs
            return False
        return True

    eventually(has_come, f"{text!r}", 15.0, 0.02, report=output)


def test_output_is_copied_line_by_line_once_and_completely(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    target = make_target(poll_s=0.01)
    target.start("node1")
    cluster.logs["node1"] = stamped(1, "one") + stamped(1, "same time") + stamped(2, "two")
    cluster.set_pod("node1", "Running")
    wait_for_output(target, "one\nsame time\ntwo\n")
    cluster.answer_next("GET", "pods/log", Answer(), Answer(500, "the kubelet does not answer"))
    cluster.logs["node1"] += (
        stamped(2, "again at two") + stamped(2, "later", nanosecond=7) + stamped(3, "last words").rstrip("\n")
    )
    wait_for_output(target, "one\nsame time\ntwo\nagain at two\nlater\n")  # an incomplete line is held back
    cluster.set_pod("node1", "Succeeded")
    wait_for_status(target, "succeeded")
    assert target.logs(HANDLE)[0].read_text() == "one\nsame time\ntwo\nagain at two\nlater\nlast words\n"


def test_the_next_controller_goes_on_where_the_output_was_left(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    first = make_target()
    first.start("node1")
    cluster.logs["node1"] = stamped(1, "one") + stamped(1, "same time")
    cluster.set_pod("node1", "Running")
    wait_for_output(first, "one\nsame time\n")
    first.close()
    cluster.logs["node1"] += stamped(1, "another") + stamped(2, "two")
    wait_for_output(make_target(), "one\nsame time\nanother\ntwo\n")


def test_end_is_reported_though_the_output_cannot_be_read(
    target: KubernetesTarget, cluster: KubernetesCluster, clock: ShiftedClock
) -> None:
    cluster.forbidden.add(("get", "pods/log"))
    cluster.set_pod("node1", "Succeeded")
    assert target.status(HANDLE) == "pending"
    clock.ahead_s = 11.0
    assert target.status(HANDLE) == "succeeded"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2026-10-25T02:59:58+02:00", "2026-10-25T02:00:01+01:00"),  # three seconds later: winter has begun
        ("2026-01-01T00:00:09.7Z", "2026-01-01T00:00:05.2Z"),  # the host's clock was set
    ],
)
def test_no_output_is_lost_when_timestamps_step_back(
    target: KubernetesTarget, cluster: KubernetesCluster, before: str, after: str
) -> None:
    cluster.logs["node1"] = f"{before} one\n{before} two\n"
    cluster.set_pod("node1", "Running")
    wait_for_output(target, "one\ntwo\n")
    cluster.cut_streams()
    cluster.logs["node1"] += f"{after} three\n"
    wait_for_output(target, "one\ntwo\nthree\n")
    cluster.logs["node1"] += f"{after} four\n{before} five\n"
    wait_for_output(target, "one\ntwo\nthree\nfour\nfive\n")
    cluster.cut_streams()
    cluster.logs["node1"] += f"{before} six\n"
    wait_for_output(target, "one\ntwo\nthree\nfour\nfive\nsix\n")


def test_timestamps_are_compared_as_times(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    cluster.logs["node1"] = "2026-10-25T02:59:58.500+02:00 one\n2026-10-25T02:59:59+02:00 two\n"
    cluster.set_pod("node1", "Running")
    wait_for_output(target, "one\ntwo\n")
    # The kubelet was started again, in another time zone.
    cluster.logs["node1"] = "2026-10-25T00:59:58.5Z one\n2026-10-25T00:59:59.000Z two\n2026-10-25T00:59:59.1Z three\n"
    cluster.cut_streams()
    wait_for_output(target, "one\ntwo\nthree\n")


def test_every_pod_of_a_node_is_followed(target: KubernetesTarget, cluster: KubernetesCluster) -> None:
    cluster.logs["node1"] = stamped(5, "first pod")
    cluster.set_pod("node1", "Running")
    wait_for_output(target, "first pod\n")
    with cluster.lock:
        [pod] = cluster.objects["pods"].values()
        metadata = {**pod["metadata"], "name": "second", "creationTimestamp": "2099-01-01T00:00:00Z"}
        cluster.objects["pods"] = {"second": {**pod, "metadata": metadata}}
        cluster.logs["node1"] = stamped(4, "second pod")  # its host's clock is behind
    wait_for_output(target, "first pod\nsecond pod\n")


def test_output_costs_one_request_per_pod(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    target = make_target(poll_s=0.01)
    target.start("node1")
    cluster.logs["node1"] = ""
    cluster.set_pod("node1", "Running")
    for second in range(5):
        cluster.logs["node1"] += stamped(second, "line")
        wait_for_output(target, "line\n" * (second + 1))
    assert cluster.num_requests("GET", "pods/") == 1


def test_output_waits_for_room_on_a_full_disk(target: KubernetesTarget, cluster: KubernetesCluster, tmp_path: Path) -> None:
    copy = tmp_path / "logs/node1/stdout.log"
    copy.parent.mkdir(parents=True)
    copy.symlink_to("/dev/full")
    cluster.logs["node1"] = stamped(1, "one")
    cluster.set_pod("node1", "Running")
    asked = len(cluster.requests)
    eventually(lambda: target.status(HANDLE) == "running" and len(cluster.requests) > asked + 3, "some looks at the node", 15)
    cluster.logs["node1"] += stamped(2, "two")
    copy.unlink()
    wait_for_output(target, "one\ntwo\n")


def test_disk_that_cannot_be_written_hides_no_end(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock, tmp_path: Path
) -> None:
    target = make_target()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/node1").touch()  # no folder can be made
    target.start("node1")
    cluster.logs["node1"] = stamped(1, "one")
    cluster.set_pod("node1", "Failed", reason="Evicted", message="low on memory")
    assert target.status(HANDLE) == "pending"
    clock.ahead_s = 11.0
    assert target.status(HANDLE) == "failed"
    assert target.logs(HANDLE) == []


def test_output_of_an_earlier_job_is_not_a_new_nodes(
    make_target: MakeTarget, cluster: KubernetesCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "logs/node1"
    folder.mkdir(parents=True)
    for name in ("stdout.log", "stderr.log"):
        (folder / name).write_text("ValueError: old bug\n")
    (folder / ".read").write_text(f"{stamped(9, '').strip()} 1")
    target = make_target()
    target.start("node1")
    cluster.logs["node1"] = stamped(9, "new")
    cluster.set_pod("node1", "Running")
    wait_for_output(target, "new\n")
    assert (folder / "former-stderr.log").read_text() == "ValueError: old bug\n"


@with_and_without_volcano
def test_volcano_is_used_where_present_unless_plain_jobs_are_asked_for(
    make_target: MakeTarget, cluster: KubernetesCluster, has_volcano: bool
) -> None:
    target, plain = make_target(), make_target(dataclasses.replace(PLAIN, plain_jobs=True))
    assert plain.name == "kubernetes/training"
    assert target.name == ("kubernetes/training/volcano" if has_volcano else plain.name)
    target.start("node1")
    plain.start("node2")
    kinds = [job["apiVersion"] for job in cluster.objects["jobs"].values()]
    assert kinds == [VOLCANO_JOBS if has_volcano else PLAIN_JOBS, PLAIN_JOBS]


def test_a_queue_needs_volcano(make_target: MakeTarget) -> None:
    with pytest.raises(TargetError, match=r"--queue ads: the cluster has no Volcano .* leave the option out"):
        make_target(dataclasses.replace(PLAIN, queue="ads"))


def test_node_in_a_queue_of_kueue_waits_for_it_and_is_replaced_when_suspended(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.has_kueue = True
    options = dataclasses.replace(
        PLAIN, queue="ads", plain_jobs=True, job_labels={"kueue.x-k8s.io/priority-class": "low"}, job_annotations={"team": "a"}
    )
    target = make_target(options)
    target.start("node1")
    [job] = cluster.objects["jobs"].values()
    assert job["metadata"]["labels"].items() >= {
        ("kueue.x-k8s.io/queue-name", "ads"),
        ("kueue.x-k8s.io/priority-class", "low"),
    }
    assert job["metadata"]["annotations"]["team"] == "a"
    assert "kueue.x-k8s.io/queue-name" not in job["spec"]["template"]["metadata"]["labels"]
    for _ in range(3):
        assert target.status(HANDLE) == "pending"
    assert caplog.text.count("node1 waits: its Job is suspended: it waits for room in Kueue's queue ads") == 1
    cluster.admit("node1")
    cluster.set_pod("node1", "Running")
    assert target.status(HANDLE) == "running"
    cluster.suspend("node1")
    wait_for_status(target, "failed")
    assert "node1 has failed: its Job was suspended" in caplog.text


@with_volcano
@pytest.mark.parametrize("failure", [Answer(503, "starting"), Answer(), Answer(200, body=b"nonsense")])
def test_unknown_presence_of_volcano_is_an_error(make_target: MakeTarget, cluster: KubernetesCluster, failure: Answer) -> None:
    cluster.answer_next("GET", "apis", failure)
    if failure.status == 200:  # the request was answered, so it is not repeated
        with pytest.raises(TargetError, match=r"whether the cluster has Volcano or Kueue is unknown .*--plain-jobs"):
            make_target()
    else:
        assert make_target().name == "kubernetes/training/volcano"
    cluster.answer_next("GET", "apis", *[failure] * 3)
    with pytest.raises(TargetError, match="whether the cluster has Volcano or Kueue is unknown"):
        make_target()
    make_target(dataclasses.replace(PLAIN, plain_jobs=True))


def test_volcano_job_has_the_same_pod_and_never_restarts() -> None:
    options = dataclasses.replace(PLAIN, queue="ads", template={"spec": {"priorityClassName": "low"}})
    plain = job_manifest(SPEC, options, NodeSize(2, 1024), "node3", MARK)
    job = job_manifest(SPEC, options, NodeSize(2, 1024), "node3", MARK, VOLCANO_JOBS)
    [task] = job["spec"].pop("tasks")
    assert (task["replicas"], task["template"]) == (1, plain["spec"]["template"])
    assert plain["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "ads"  # Volcano has queues of its own
    assert job["metadata"] == plain["metadata"]
    assert job["spec"] == {
        "schedulerName": "volcano",
        "queue": "ads",
        "priorityClassName": "low",
        "minAvailable": 1,
        "policies": [{"event": "PodEvicted", "action": "TerminateJob"}],
        "maxRetry": 0,
        "ttlSecondsAfterFinished": 3600,
    }


@with_volcano
@pytest.mark.parametrize("keeps_policies", [True, False])
def test_a_pod_of_volcano_that_hands_over_is_running_and_never_made_anew(
    target: KubernetesTarget, cluster: KubernetesCluster, keeps_policies: bool
) -> None:
    job = cluster.objects["jobs"][f"run-node1-{MARK}"]
    if not keeps_policies:
        job["spec"]["policies"] = []
    cluster.set_pod("node1", "Running")
    assert target.status(HANDLE) == "running"
    cluster.evict("node1")
    assert job["status"]["state"]["phase"] == ("Terminated" if keeps_policies else "Running")
    assert target.status(HANDLE) == "running"
    cluster.remove_pod("node1")
    if keeps_policies:
        wait_for_status(target, "failed")
    else:  # shows the purpose of the policy
        assert [pod["status"]["phase"] for pod in cluster.objects["pods"].values()] == ["Pending"]


@with_volcano
@pytest.mark.parametrize(
    ("phase", "status", "why"),
    [
        ("Pending", "running", ""),
        ("Running", "running", ""),
        ("Restarting", "running", ""),
        ("Aborting", "running", ""),
        ("Terminating", "running", ""),
        ("Completing", "running", ""),
        ("Completed", "succeeded", ""),
        ("Failed", "failed", "its pod is gone (Volcano: Failed)"),
        ("Terminated", "failed", "its pod is gone (Volcano: Terminated, by a policy)"),
        ("Aborted", "failed", "its pod is gone (Volcano: Aborted)"),
    ],
)
def test_each_phase_of_a_job_of_volcano_without_a_pod_has_its_meaning(
    target: KubernetesTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, phase: str, status: str, why: str
) -> None:
    cluster.set_pod("node1", "Running")
    assert target.status(HANDLE) == "running"
    with cluster.lock:
        cluster.objects["pods"].clear()
        state = {"phase": phase, **({"message": "by a policy"} if "policy" in why else {})}
        job = cluster.objects["jobs"][f"run-node1-{MARK}"]
        job["status"] = {"state": state, "conditions": [{"status": "Pending"}, {"status": phase}]}
    wait_for_status(target, status)
    assert why in caplog.text


@with_volcano
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_queue_that_is_missing_or_closed_refuses_in_volcanos_words(
    make_target: MakeTarget, cluster: KubernetesCluster, is_closed: bool
) -> None:
    if is_closed:
        cluster.queues["ads"] = "Closed"
    words = "queue `ads` status is `Closed`" if is_closed else 'queues.scheduling.volcano.sh "ads" not found'
    with pytest.raises(NotTakenError, match=re.escape(words)):
        make_target(dataclasses.replace(PLAIN, queue="ads")).start("node1")


@with_volcano
def test_missing_queue_is_named_when_its_node_waits(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, clock: ShiftedClock
) -> None:
    cluster.has_webhook = False
    target = make_target(dataclasses.replace(PLAIN, queue="ads"))
    target.start("node1")
    assert target.status(HANDLE) == "pending"
    clock.ahead_s = 6.0
    assert target.status(HANDLE) == "pending"
    assert (
        "node1 waits: Volcano has made no PodGroup for it; `kubectl get queue` shows whether there is queue ads" in caplog.text
    )


@with_volcano
def test_full_queue_is_named_when_its_node_waits(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, clock: ShiftedClock
) -> None:
    cluster.has_room_for_pods = False
    target = make_target()
    target.start("node1")
    [(name, group)] = cluster.objects["podgroups"].items()
    gang = "1/0 tasks in gang unschedulable: pod group is not ready, 1 minAvailable"
    group["status"]["conditions"] = [{"type": "Unschedulable", "status": "True", "message": gang}]
    reference = {"kind": "PodGroup", "name": name}
    for number, message in enumerate(["queue resource quota insufficient: memory", "queue resource quota insufficient: cpu"]):
        event = {"involvedObject": reference, "type": "Normal", "message": message, "lastTimestamp": f"2026-01-0{number + 1}"}
        cluster.objects["events"][f"e{number}"] = {"metadata": {"name": f"e{number}"}, **event}
    assert target.status(HANDLE) == "pending"
    for later_s in (6.0, 40.0):
        clock.ahead_s = later_s
        assert target.status(HANDLE) == "pending"
    said = f"node1 waits: in queue default of Volcano, Pending; queue resource quota insufficient: cpu; {gang}"
    assert caplog.text.count(said) == 1


@with_volcano
def test_later_controllers_find_nodes_of_volcano_by_their_target(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    first = make_target()
    first.start("node1")
    later = known_target(SPEC, first.name, None, poll_s=0.0)
    later.open(MARK)
    assert later.name == first.name
    assert list(later.apps()) == [App("node1", HANDLE, True)]
    later.cancel([HANDLE])
    assert cluster.objects["jobs"] == cluster.objects["podgroups"] == {}
    later.close()


@pytest.fixture
def torchx(cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch) -> KubernetesScheduler:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.kubeconfig))
    configuration = client.Configuration()
    config.load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=configuration)
    return KubernetesScheduler("session", client=client.ApiClient(configuration))


@with_volcano
def test_torchx_lists_describes_reads_and_cancels_a_node_of_volcano(
    target: KubernetesTarget, cluster: KubernetesCluster, torchx: KubernetesScheduler
) -> None:
    cluster.logs["node1"] = stamped(1, "one")
    cluster.set_pod("node1", "Running")
    [listed] = torchx.list()
    assert (listed.app_id, listed.state) == (f"training:run-node1-{MARK}", AppState.RUNNING)
    described = torchx.describe(listed.app_id)
    assert described is not None
    assert [(role.name, role.num_replicas) for role in described.roles] == [("worker", 1)]
    # Newer clients return a log as the representation of its bytes.
    assert " one" in "".join(torchx.log_iter(listed.app_id, "worker"))
    torchx.cancel(listed.app_id)  # 0.7 deletes the Job, 0.8 aborts it
    assert "deletionTimestamp" in cluster.pod_of("node1")["metadata"]
    assert target.status(HANDLE) == "running"  # the node hands over
    cluster.remove_pod("node1")
    wait_for_status(target, "failed")


@with_volcano
def test_an_app_that_torchx_starts_runs_in_this_cluster(
    cluster: KubernetesCluster, torchx: KubernetesScheduler, tmp_path: Path
) -> None:
    cluster.runs_pods = True
    script = "import os, sys; print(sys.argv[1], os.environ['LEVEL'], os.environ['VC_TASK_INDEX'])"
    role = Role("controller", image="trainer:1", entrypoint="python", args=["-c", script, "hello"], env={"LEVEL": "5"})
    app_id = torchx.submit(AppDef("ctr", [role]), {"namespace": "training", "queue": "default"}, workspace=None)

    def succeeded() -> bool:
        described = torchx.describe(app_id)
        return described is not None and described.state == AppState.SUCCEEDED

    eventually(succeeded, f"the success of {app_id}", 15.0, 0.05, report=lambda: f"{torchx.describe(app_id)}")
    assert "hello 5 0" in "".join(torchx.log_iter(app_id, "controller"))


def test_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(TargetError, match=re.escape("pip install 'lightning-dlrover[kubernetes]'")):
        KubernetesApi()


def test_missing_cluster_is_an_error_that_names_the_places_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(TargetError, match="no Kubernetes cluster is configured"):
        KubernetesApi()


def test_inside_a_cluster_its_own_server_is_asked_with_the_pods_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    files = {"SERVICE_TOKEN_FILENAME": tmp_path / "token", "SERVICE_CERT_FILENAME": tmp_path / "ca.crt"}
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret-token")
    (tmp_path / "namespace").write_text("training\n")
    for name, file in files.items():
        monkeypatch.setattr(incluster_config, name, str(file))
    monkeypatch.setattr(kubernetes_api, "_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with kubernetes_cluster(tmp_path, runs_pods=False, tls=tls) as inside:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(inside.port))
        target = KubernetesTarget(SPEC, PLAIN, None, poll_s=0.0)
        target.open(MARK)
        assert target.name == "kubernetes/training"
        assert target.start("node1") == HANDLE
        assert list(target.apps()) == [App("node1", HANDLE, True)]
        (tmp_path / "ca.crt").unlink()
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
        with pytest.raises(TargetError, match="certificate verify failed"):
            KubernetesTarget(SPEC, PLAIN, None, api=KubernetesApi(pause_s=0.01))


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_example_role_allows_exactly_the_targets_requests(
    make_target: MakeTarget, cluster: KubernetesCluster, clock: ShiftedClock, own_spec: NodeSpec
) -> None:
    [role] = [d for d in documents("rbac.yaml") if d["kind"] == "Role"]
    own_groups = {"": "", "batch": ""}
    allowed = {
        (verb, f"{resource}{own_groups.get(group, '.' + group)}")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    verbs = ("create", "list", "get", "delete", "watch", "patch")
    groups = {"jobs.batch.volcano.sh": VOLCANO_JOBS, "podgroups.scheduling.volcano.sh": "scheduling.volcano.sh/v1beta1"}
    others = ("events.events.k8s.io", "poddisruptionbudgets.policy")
    resources = ("jobs", "pods", "pods/log", "pods/resize", "events", "secrets", *others, *groups)
    cluster.forbidden = {(verb, resource) for verb in verbs for resource in resources} - allowed
    for has_volcano in (False, True):
        cluster.has_volcano, cluster.has_room_for_pods = has_volcano, True
        options = dataclasses.replace(PLAIN, keeps_budget=True)
        target = make_target(options, poll_s=0.01, spec=own_spec, has_own_etcd=True, watches=True)
        target.open(f"{MARK}{has_volcano:d}")
        handle = target.start("node1")
        assert target.start("node1") == handle
        cluster.logs["node1"] = stamped(1, "one")
        cluster.set_pod("node1", "Running")
        clock.ahead_s += 0.1  # a list is due
        assert target.resize(handle, NodeSize(2)).state == "asked"
        wait_for_output(target, "one\n")
        cluster.has_room_for_pods = False
        waiting = target.start("node2")
        eventually(lambda: len(target.apps()) == 2, "the node that waits", 10.0, 0.02)  # noqa: B023
        clock.ahead_s += 6.0
        num_events = cluster.num_requests("GET", "events")
        eventually(lambda: target.apps() and cluster.num_requests("GET", "events") > num_events, "events", 10.0, 0.02)  # noqa: B023
        target.publish(record_of(WorkerLost("w1", 1), "w1 is lost"))
        num_sent = has_volcano + 1
        eventually(lambda: cluster.num_requests("POST", "events") == num_sent, "an event", 10.0, 0.02)  # noqa: B023
        target.cancel([handle, waiting])
        cluster.remove_pod("node1")
        target.remove_leftovers()
    asked = set()
    for method, path in cluster.requests:
        place, _, rest = path.partition("?")[0].partition("/namespaces/training/")
        if not rest:
            continue  # any user may read the cluster's capabilities
        kind, *name = rest.split("/")
        verb = {"POST": "create", "DELETE": "delete", "PATCH": "patch"}.get(method, "get" if name else "list")
        verb = "watch" if "watch=true" in path else verb
        group = place.removeprefix("/apis/").partition("/")[0] if place != "/api/v1" else ""
        asked.add((verb, "/".join([f"{kind}{own_groups.get(group, '.' + group)}", *name[1:]])))
    assert asked == allowed


@pytest.mark.parametrize("name", ["rbac.yaml", "etcd.yaml", "brain.yaml", "controller.yaml", "policies.yaml"])
def test_example_manifests_have_no_field_that_kubernetes_does_not_know(name: str) -> None:
    assert [problem for document in documents(name) for problem in problems(document)] == []


@pytest.mark.parametrize("api_version", [PLAIN_JOBS, VOLCANO_JOBS])
def test_node_with_every_option_has_only_known_fields(api_version: str, tmp_path: Path) -> None:
    options = dataclasses.replace(
        MUCH,
        secret="etcd-access",
        queue="ads",
        template={"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}], "priorityClassName": "low"}},
    )
    spec = dataclasses.replace(SPEC, access={"ca_cert": str(tmp_path / "ca")}, environment={"LEVEL": "5$"})
    manifest = job_manifest(spec, options, NodeSize(4, 16384), "node3", MARK, api_version)
    assert problems(manifest) == []
    manifest["spec"]["backOffLimit"] = 0
    manifest["metadata"]["label"] = {}
    [template] = [t["template"] for t in manifest["spec"].get("tasks", [manifest["spec"]])]
    template["spec"]["containers"][0]["resources"]["limit"] = {}
    template["spec"]["terminationGracePeriodSeconds"] = "120"
    found = " ".join(problems(manifest))
    for wrong in ("Job.spec.backOffLimit", "Job.metadata.label", "containers[0].resources.limit", "'120' is no int"):
        assert wrong in found


@pytest.mark.parametrize("api_version", [PLAIN_JOBS, VOLCANO_JOBS])
@pytest.mark.parametrize("run_as", ["", "1000", "1000:100", "root"])
def test_pods_of_nodes_meet_the_restricted_level_unless_they_run_as_root(api_version: str, run_as: str) -> None:
    manifest = job_manifest(SPEC, dataclasses.replace(MUCH, run_as=run_as), NodeSize(4), "node3", MARK, api_version)
    [template] = [t["template"] for t in manifest["spec"].get("tasks", [manifest["spec"]])]
    assert bool(restricted_violations(template["spec"])) == (run_as == "root")
    assert problems(manifest) == []


def test_policies_and_template_of_the_examples_select_the_pods_of_a_job() -> None:
    [template] = documents("pod-template.yaml")
    spec = dataclasses.replace(SPEC, run_id="ctr")
    manifest = job_manifest(spec, dataclasses.replace(PLAIN, template=template), ANY_SIZE, "node1", MARK)
    assert problems(manifest) == []
    pod = manifest["spec"]["template"]
    assert pod["spec"]["priorityClassName"] == "training"
    [of_nodes, of_etcd] = documents("policies.yaml")
    [etcd] = [d for d in documents("etcd.yaml") if d["kind"] == "StatefulSet"]
    [controller] = [d for d in documents("controller.yaml") if d["kind"] == "Job"]
    labels = {"nodes": pod, "etcd": etcd["spec"]["template"], "controller": controller["spec"]["template"]}
    selected = [
        (*(constraint["labelSelector"] for constraint in pod["spec"]["topologySpreadConstraints"]), "nodes"),
        (
            of_nodes["spec"]["podSelector"],
            of_nodes["spec"]["ingress"][0]["from"][0]["podSelector"],
            "nodes",
        ),
        (of_etcd["spec"]["podSelector"], "etcd"),
        (of_etcd["spec"]["ingress"][0]["from"][0]["podSelector"], "nodes"),
        (of_etcd["spec"]["ingress"][0]["from"][1]["podSelector"], "controller"),
    ]
    for *selectors, whose in selected:
        for selector in selectors:
            assert selector["matchLabels"].items() <= labels[whose]["metadata"]["labels"].items()


def test_template_changes_the_security_context() -> None:
    own = {"containers": [{"name": "worker", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}]}
    manifest = job_manifest(SPEC, dataclasses.replace(PLAIN, template={"spec": own}), ANY_SIZE, "node3", MARK)
    context = container_of(manifest)["securityContext"]
    assert context == {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}}


def test_examples_meet_the_restricted_level() -> None:
    specs = [
        d["spec"]["template"]["spec"]
        for name in ("etcd.yaml", "controller.yaml")
        for d in documents(name)
        if "template" in d.get("spec", {})
    ]
    assert [restricted_violations(spec) for spec in specs] == [[], []]


def test_warnings_of_the_server_are_logged_once_and_refused_pods_are_explained(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, clock: ShiftedClock
) -> None:
    cluster.pod_security = "restricted"
    target = make_target(dataclasses.replace(PLAIN, run_as="root"))
    for node in ("node1", "node2"):
        target.start(node)
    assert caplog.text.count('the API server warns: would violate PodSecurity "restricted:latest": allowPriv') == 1
    target.apps()
    clock.ahead_s += 31.0
    target.apps()
    assert 'node1 waits: Error creating: pods "run-node1' in caplog.text
    assert 'is forbidden: violates PodSecurity "restricted:latest"' in caplog.text
    make_target().start("node3")
    assert cluster.pod_of("node3")


def test_a_cluster_below_the_oldest_supported_release_is_refused(make_target: MakeTarget, cluster: KubernetesCluster) -> None:
    cluster.version = "v1.28.9-eks-1"
    with pytest.raises(TargetError, match=r"the cluster runs Kubernetes v1\.28\.9-eks-1, and nodes need 1\.29 or newer"):
        make_target()
    cluster.version = "v1.29.0+k3s1"
    assert make_target()


@pytest.mark.parametrize("name", ["rbac.yaml", "etcd.yaml", "controller.yaml"])
def test_example_manifests_are_objects_that_fit_together(name: str) -> None:
    found = documents(name)
    assert all(d["apiVersion"] and d["kind"] and d["metadata"]["name"] for d in found)
    named = {(d["kind"], d["metadata"]["name"]) for file in ("rbac.yaml", "etcd.yaml") for d in documents(file)}
    for document in found:
        if document["kind"] == "RoleBinding":
            assert ("Role", document["roleRef"]["name"]) in named
            assert all(("ServiceAccount", subject["name"]) in named for subject in document["subjects"])
        if document["kind"] == "Service":
            templates = [d["spec"]["template"]["metadata"]["labels"] for d in found if "template" in d.get("spec", {})]
            assert any(document["spec"]["selector"].items() <= labels.items() for labels in templates)
        if document["kind"] == "Job":
            pod = document["spec"]["template"]["spec"]
            assert ("ServiceAccount", pod["serviceAccountName"]) in named
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)
            for volume in volumes.values():
                if "secret" in volume:
                    assert ("Secret", volume["secret"]["secretName"]) in named


QUICK = FailurePolicy(first_backoff_s=0.01, max_backoff_s=0.02, first_refusal_s=0.01, max_refusal_s=0.02, first_cancel_s=0.01)


def step_until(controller: Controller, is_done: Callable[[], bool], what: str) -> None:
    def look() -> bool:
        assert controller.step() is None
        controller.wait(0.01)
        return is_done()

    eventually(look, what, 15.0, 0.0)


def refuse_with_quota(cluster: KubernetesCluster) -> None:
    cluster.max_jobs = 1


def refuse_with_role(cluster: KubernetesCluster) -> None:
    cluster.forbidden |= {("create", "jobs"), ("create", "secrets")}


def refuse_with_webhook(cluster: KubernetesCluster) -> None:
    words = 'admission webhook "policy.example" denied the request: [{}] no owner'
    cluster.answer_next("POST", "jobs", *(Answer(403, words.format("xyz"[i % 3] * i), "Forbidden") for i in range(100)))


@pytest.mark.parametrize("refuse", [refuse_with_quota, refuse_with_role, refuse_with_webhook])
def test_job_goes_on_when_the_cluster_refuses_a_node(
    make_target: MakeTarget,
    cluster: KubernetesCluster,
    client: EtcdClient,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[KubernetesCluster], None],
) -> None:
    with Controller(client, keys, make_target(), Limits(2, 2), show=print, policy=QUICK) as controller:
        cluster.killing = ("after", lambda: refuse(cluster))  # the second node
        step_until(controller, lambda: len(controller._registry.entries) >= 4, "three refusals")
        assert cluster.nodes() == ["node1"]
        assert cluster.num_requests("DELETE", "jobs") == 0
        assert len([text for text in caplog.messages if "was refused (try" in text]) == 1
        cluster.max_jobs = 2
        cluster.forbidden.clear()
        cluster.clear_answers()
        step_until(controller, lambda: len(cluster.nodes()) == 2, "the second node")


def test_ended_job_is_removed_and_makes_room_in_the_quota(
    make_target: MakeTarget, cluster: KubernetesCluster, client: EtcdClient, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.max_jobs = 2
    with Controller(client, keys, make_target(), Limits(2, 2), show=print, policy=QUICK) as controller:
        step_until(controller, lambda: len(cluster.nodes()) == 2, "two nodes")
        cluster.logs["node1"] = stamped(1, "last words")
        cluster.forbidden.add(("delete", "jobs"))
        cluster.set_pod("node1", "Failed", reason="Evicted")
        step_until(controller, lambda: len(controller._registry.entries) >= 4, "a refused replacement")
        cluster.forbidden.clear()
        step_until(controller, lambda: len(cluster.nodes()) == 2, "the replacement")
        assert "node2" in cluster.nodes()
        assert controller._target.logs("job/node1")[0].read_text() == "last words\n"
        assert len([text for text in caplog.messages if "ended Jobs stay for now" in text]) == 1


def test_reason_for_a_pods_refusal_is_given_once_although_it_names_another_pod_each_time(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture, clock: ShiftedClock
) -> None:
    cluster.has_room_for_pods = False
    target = make_target()
    target.start("node1")
    words = 'Error creating: pods "run-node1-{}" is forbidden: exceeded quota: team, requested: cpu=1, used: cpu={}'
    for number, name in enumerate(("x7f2k", "bcdfg", "99zzz")):
        reference = {"kind": "Job", "name": f"run-node1-{MARK}"}
        event = {
            "metadata": {"name": "e"},
            "involvedObject": reference,
            "type": "Warning",
            "message": words.format(name, number),
        }
        cluster.objects["events"]["e"] = event
        clock.ahead_s += 31.0
        assert target.status(HANDLE) == "pending"
    assert cluster.num_requests("GET", "events") >= 2
    assert caplog.text.count("node1 waits: ") == 1


def test_refused_output_is_reported_once(
    make_target: MakeTarget, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.forbidden.add(("get", "pods/log"))
    target = make_target()
    for node in ("node1", "node2"):
        target.start(node)
        cluster.set_pod(node, "Running")
    target.apps()
    eventually(lambda: cluster.num_requests("GET", "pods/") >= 3, "three refusals", 10.0)
    assert caplog.text.count("its output cannot be copied now: pods/log is forbidden") == 1
