"""`dlrover run --target kubernetes` with real training. Pods are processes on this machine, run by the test's kubelet.

With DLROVER_TEST_IMAGE and a KUBECONFIG of a real cluster, a job also runs there. The image holds this package and
tests/e2e/tiny_loop.py as /work/tiny_loop.py. DLROVER_TEST_ENDPOINT is an etcd that both sides can reach.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from lightning_dlrover.components.targets.kubernetes_manifests import PLAIN_JOBS, VOLCANO_JOBS, secret_name
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.report.status import JOB_FILE, read_job_file
from tests.e2e.test_dlrover_run import SCRIPT, wait_for_first_round, wait_for_workers
from tests.e2e.test_torchx import COMPONENT, torchx
from tests.support.dlrover_process import Dlrover, Run
from tests.support.kubernetes_cluster import KubernetesCluster, kubernetes_cluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("warm_nodes")  # the kubelet is in this process


@pytest.fixture
def has_volcano() -> bool:
    return False


@pytest.fixture
def cluster(
    dlrover: Dlrover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_volcano: bool
) -> Iterator[KubernetesCluster]:
    with kubernetes_cluster(tmp_path, environment=dlrover.environment, has_volcano=has_volcano) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("has_volcano", [pytest.param(False, marks=pytest.mark.on_demand), True], ids=["plain", "volcano"])
def test_kubernetes_job_survives_loss_of_controller_and_pods(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path, has_volcano: bool
) -> None:
    until = tmp_path / "enough"
    options = ("--target", "kubernetes", "--workers", "1:3", "--image", "trainer:1", "--endpoint", etcd.endpoint)
    arguments = (*options, SCRIPT, "--until", until)
    run = dlrover.start(*arguments, run_id=run_id)
    wait_for_first_round(run)
    assert dlrover("scale", run_id, 3).returncode == 0
    run.wait_for(lambda: len(cluster.nodes()) == 3, "three nodes")
    run.process.kill()
    run.process.wait()
    run = dlrover.start(*arguments, run_id=run_id)
    run.wait_for_output(rf"job {run_id}: 1 to 3 workers")  # once the former controller's lease has expired
    three = wait_for_workers(run, 3)
    assert [budget["spec"]["minAvailable"] for budget in cluster.objects["poddisruptionbudgets"].values()] == [1]
    assert cluster.nodes() == ["node1", "node2", "node3"]  # the controller has taken over the existing nodes
    target = f"kubernetes/{cluster.namespace}{'/volcano' if has_volcano else ''}"
    assert {job["apiVersion"] for job in cluster.objects["jobs"].values()} == {VOLCANO_JOBS if has_volcano else PLAIN_JOBS}
    listed = dlrover("list", "--endpoint", etcd.endpoint).stdout  # reads etcd, from any host that reaches it
    controller = f"process {run.process.pid} on {socket.gethostname()}"
    began = r"\d{4}-\d\d-\d\d \d\d:\d\d"
    assert re.search(rf"^{run_id} +training +{began} +{target} +3 +3 +{controller}$", listed, re.MULTILINE), listed

    nodes = {worker["worker_id"]: node_of(worker["pid"]) for worker in three}
    evicted, killed, drained = (worker["worker_id"] for worker in three)
    cluster.evict(nodes[evicted])
    run.wait_for(lambda: left_planned(run, evicted), "the evicted worker's planned leave")
    cluster.kill_pod(nodes[killed])
    wait_for_workers(run, 3, without=(evicted, killed))
    assert dlrover("drain", run_id, drained).returncode == 0
    run.wait_for(lambda: left_planned(run, drained), "the drained worker's planned leave")
    run.finish(until)
    assert cluster.nodes() == []
    dlrover.wait_for_end()

    assert f"{nodes[killed]} has failed: OOMKilled, exit code 137" in run.output
    assert cluster.objects["poddisruptionbudgets"] == {}
    history = {event["reason"]: event["type"] for event in cluster.objects["events"].values()}
    assert history.items() >= {"RoundFormed": "Normal", "NodeEnded": "Warning"}.items()
    elsewhere = dlrover("logs", run_id, "--endpoint", etcd.endpoint, "--run-dir", tmp_path / "elsewhere")
    for output in (dlrover("logs", run_id).stdout, elsewhere.stdout):
        assert re.search(r"^\[node\d\] trained for \d+ steps$", output, re.MULTILINE), (output, elsewhere.stderr)
    # Only the killed worker had no time to hand over.
    losses = [event for event in run.events if event.kind == "loss"]
    assert len(losses) == 1, [event.text for event in losses]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_worker_on_a_host_that_is_tainted_is_replaced_before_it_is_lost(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    until = tmp_path / "enough"
    options = ("--target", "kubernetes", "--workers", "2:2", "--image", "trainer:1", "--endpoint", etcd.endpoint)
    run = dlrover.start(*options, SCRIPT, "--until", until, run_id=run_id)
    run.wait_for_output(r"\[round\] round 1: 2 workers,", timeout_s=90)
    doomed = wait_for_workers(run, 2)[1]
    node = node_of(doomed["pid"])
    cluster.taint(node, "aws-node-termination-handler/spot-itn")
    wait_for_workers(run, 2, without=(doomed["worker_id"],))
    with contextlib.suppress(StopIteration):  # its pod has ended by itself
        cluster.kill_pod(node)
    run.finish(until)
    dlrover.wait_for_end()
    assert [event.text for event in run.events if event.kind == "loss"] == []
    [notice] = [event for event in run.events if event.kind == "notice"]
    assert notice.data["worker_id"] == doomed["worker_id"]
    assert "(kubernetes taint aws-node-termination-handler/spot-itn)" in notice.text


@pytest.mark.long
@pytest.mark.timeout(150)
@pytest.mark.parametrize("has_volcano", [True], ids=["volcano"])
def test_torchx_job_has_a_controller_and_nodes_as_volcano_apps(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    # The environment of pods.
    cluster.environment |= {"KUBECONFIG": str(cluster.kubeconfig), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    place = ("--rdzv_id", run_id, "--rdzv_endpoint", etcd.endpoint, "--run_dir", tmp_path / "runs")
    train = (f"{COMPONENT}:train", "--script", SCRIPT, "--workers", "1:2", "--image", "trainer:1", *place, "--", "--steps", 20)
    scheduler = ("-s", "kubernetes", "--workspace", "", "-cfg", f"queue=default,namespace={cluster.namespace}")
    done = dlrover.process(torchx("run", *scheduler, *train))
    assert done.returncode == 0, done.stderr
    [handle] = re.findall(r"^kubernetes://\S+", done.stdout, re.MULTILINE)

    def phases() -> list[str]:
        with cluster.lock:
            return [job["status"]["state"]["phase"] for job in cluster.objects["jobs"].values()]

    eventually(lambda: phases() == ["Completed", "Completed"], "the end of controller and node", 90)
    assert "SUCCEEDED" in dlrover.process(torchx("status", handle)).stdout
    assert "trained for 20 steps" in dlrover.process(torchx("log", f"{handle}/controller/0")).stdout


@pytest.mark.timeout(120)
def test_a_controller_in_a_pod_needs_no_etcd_and_gives_its_nodes_a_password_that_only_a_secret_holds(
    dlrover: Dlrover, cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")  # set in every pod
    until = tmp_path / "enough"
    run = dlrover.start("--target", "auto", "--image", "trainer:1", "--partition", "main", SCRIPT, "--until", until)
    wait_for_first_round(run)
    password = (run.folder / "etcd.password").read_text().strip()
    endpoint = read_job_file(run.folder / JOB_FILE).place.endpoint
    with EtcdClient(EtcdConfig(endpoint)) as stranger, pytest.raises(EtcdError, match="user name is empty"):
        stranger.put("/dlrover/job/a", b"1")
    with cluster.lock:
        [secret] = cluster.objects["secrets"].values()
        public = json.dumps([cluster.objects[kind] for kind in ("jobs", "pods", "events")])
    assert base64.b64decode(secret["data"]["password"]).decode() == password
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            public += f"{process.cmdline()} {process.environ()}"
    assert password not in public
    run.finish(until)
    assert "nodes run on Kubernetes, where these are ignored: --partition" in run.output
    assert run.events[-1].kind == "finished"
    written = "".join(f.read_text(errors="replace") for f in run.folder.rglob("*") if f.is_file())
    assert password not in run.output + written
    assert cluster.objects["secrets"] == {}
    assert not any((run.folder / name).exists() for name in ("etcd", "etcd.password"))
    dlrover.wait_for_end()


def has_nodes(cluster: KubernetesCluster, num_nodes: int) -> bool:
    return len(cluster.nodes()) == num_nodes


def left_planned(run: Run, worker: str) -> bool:
    rounds = [event.data for event in run.events if event.kind == "round"]
    return bool(rounds) and rounds[-1]["planned"] and worker not in rounds[-1]["members"]


def node_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(v.partition("=")[2] for v in variables if v.startswith("DLROVER_NODE="))


@pytest.mark.timeout(120)
def test_kubernetes_job_without_a_controller_is_cancelled(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    run_id = keys.run_id
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    options = ("--target", "kubernetes", "--workers", "2:2", "--image", "trainer:1", "--endpoint", etcd.endpoint)
    run = dlrover.start(*options, script, run_id=run_id)
    run.wait_for_output(r"(?s)\[node1\] here.*\[node2\] here|\[node2\] here.*\[node1\] here")
    run.process.kill()
    run.process.wait()
    elsewhere = ("--endpoint", etcd.endpoint, "--run-dir", tmp_path / "elsewhere")
    assert dlrover("logs", run_id, *elsewhere).stdout == "[node1] here\n[node2] here\n"  # read from the pods
    eventually(lambda: client.get(keys.controller) is None, "the end of the controller's lease")
    assert "controller: none; nodes on kubernetes/training train on" in dlrover("status", run_id, *elsewhere).stdout
    # As the killed process of a job with an etcd of its own leaves it.
    cluster.objects["secrets"][secret_name(run_id, read_job_file(run.folder / JOB_FILE).mark)] = {"metadata": {}}
    done = dlrover("cancel", run_id, *elsewhere)
    assert done.returncode == 0, done.stderr
    assert cluster.objects["jobs"] == cluster.objects["secrets"] == {}
    dlrover.wait_for_end()


@pytest.mark.on_demand
@pytest.mark.timeout(120)
def test_the_error_of_a_script_ends_a_job_on_kubernetes_and_is_shown(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nraise ValueError(f'bad: {sys.argv[1:]}')\n")
    options = ("--target", "kubernetes", "--image", "trainer:1", "--env", "LEVEL=1", "--endpoint", etcd.endpoint)
    run = dlrover.start(*options, script, "$(LEVEL)", "${HOME}", "$$", run_id=run_id)
    assert run.wait_for_exit(60) == 1
    # Text that the shell does not expand belongs to the script.
    assert "ValueError: bad: ['$(LEVEL)', '${HOME}', '$$']" in run.output
    assert "failed before the first step" in run.output


@pytest.mark.on_demand
@pytest.mark.timeout(600)
def test_controller_killed_while_it_creates_a_node_duplicates_none(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    until = tmp_path / "enough"
    options = ("--target", "kubernetes", "--workers", "1:3", "--image", "trainer:1", "--endpoint", etcd.endpoint)
    run = dlrover.start(*options, SCRIPT, "--until", until, run_id=run_id)
    wait_for_first_round(run)
    workers = wait_for_workers(run, 1)
    for step in ("add", "drain", "replace"):
        for when in ("before", "after"):
            cluster.killing = (when, run.process.kill)
            gone: tuple[str, ...] = ()
            wanted = len(workers)
            if step == "add":
                wanted += 1
                assert dlrover("scale", run_id, wanted).returncode == 0
            else:
                gone = (workers[-1]["worker_id"],)
                more = ["--replace"] if step == "replace" else []
                assert dlrover("drain", run_id, *gone, *more).returncode == 0
            run.process.wait(30)
            run = dlrover.start(*options, SCRIPT, "--until", until, run_id=run_id)
            workers = wait_for_workers(run, wanted, without=gone)
            eventually(partial(has_nodes, cluster, wanted), f"{wanted} nodes ({step}, killed {when})", 60)
    run.finish(until)
    assert cluster.nodes() == []
    dlrover.wait_for_end()


@pytest.mark.cluster
@pytest.mark.skipif(not os.environ.get("DLROVER_TEST_IMAGE"), reason="needs a cluster: see this file's docstring")
@pytest.mark.timeout(900)
def test_a_job_on_a_real_cluster_grows_and_is_cancelled(dlrover: Dlrover, run_id: str) -> None:
    options = ("--image", os.environ["DLROVER_TEST_IMAGE"], "--endpoint", os.environ["DLROVER_TEST_ENDPOINT"])
    run = dlrover.start(
        "--target", "kubernetes", "--workers", "1:2", *options, "/work/tiny_loop.py", "--until", "/x", run_id=run_id
    )
    run.wait_for_output(r"\[round\] round 1: 1 worker,", timeout_s=300)
    assert dlrover("scale", run_id, 2).returncode == 0
    workers = wait_for_workers(run, 2)
    assert len({worker["host"] for worker in workers}) == 2
    done = dlrover("cancel", run_id, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert run.wait_for_exit(120) != 0
