"""Nodes that get another size while they train: their processes stay."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.components.targets.kubernetes_state import quantity
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import Keys, NodeRecord
from tests.e2e.test_dlrover_run import LIGHTNING_SCRIPT, is_limited, wait_for_first_round, wait_for_workers
from tests.support import pod_limits
from tests.support.dlrover_process import Dlrover, Run
from tests.support.kubernetes_cluster import KubernetesCluster, kubernetes_cluster
from tests.support.stored import stored

CORES = len(os.sched_getaffinity(0))
MIB = 2**20

needs_two_cores = pytest.mark.skipif(CORES < 2, reason="a node cannot have two cores here")


def group_limit(pid: int) -> int:
    """Return the memory limit of a process's own control group, in bytes."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root in (Path("/sys/fs/cgroup", controllers), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (file := root / path.lstrip("/") / name).exists() and controllers in ("", "memory"):
                    return int(file.read_text())
    raise AssertionError(f"process {pid} has no control group with a memory limit")


def threads(run: Run) -> int:
    """Return the threads of the job's worker after its newest change of settings; 0: there was none."""
    return next((int(event.data["intra_op_threads"]) for event in reversed(run.events) if event.kind == "settings"), 0)


@needs_two_cores
@pytest.mark.long
@pytest.mark.timeout(150)
def test_local_node_grows_and_shrinks_without_a_new_process(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    options = ("--workers", "1:1", "--cpus", "1:2", "--mem", "1G:2G")
    run = dlrover.start(*options, LIGHTNING_SCRIPT, "--until", until)
    wait_for_first_round(run)
    [worker] = wait_for_workers(run, 1)
    pid, limited = worker["pid"], is_limited(run)

    def has(num_cores: int, memory_mb: int) -> bool:
        fits = not limited or group_limit(pid) == memory_mb * MIB
        return len(os.sched_getaffinity(pid)) == num_cores and fits

    run.wait_for(lambda: has(1, 1024), "a node of one core")
    before = set(dlrover.processes())
    assert dlrover("scale", "job", "--cpus", 2, "--mem", "2G", "--threads", 0).returncode == 0
    run.wait_for(lambda: has(2, 2048), "a node of two cores")
    # Threads of the process that existed before have the new cores, too.
    masks = {len(os.sched_getaffinity(int(thread.name))) for thread in Path(f"/proc/{pid}/task").iterdir()}
    assert masks == {2}
    run.wait_for(lambda: threads(run) == 2, "two threads")
    assert dlrover("scale", "job", "--cpus", 1, "--mem", "1G").returncode == 0
    run.wait_for(lambda: threads(run) == 1, "one thread")
    began = time.monotonic()
    run.wait_for(lambda: has(1, 1024), "a node of one core again")
    assert time.monotonic() - began < 20.0  # the worker's profile has shown one thread; otherwise it takes 30 s
    assert set(dlrover.processes()) <= before
    assert [each["pid"] for each in wait_for_workers(run, 1)] == [pid]
    run.finish(until)
    acts = [
        (event.data["act"], event.data["cpus"], event.data["memory_mb"]) for event in run.events if event.kind == "node_size"
    ]
    assert acts == [("resized", *size) for size in ((1, 2048), (2, 2048), (1, 2048), (1, 1024))]
    assert not [event for event in run.events if event.kind == "loss"]
    dlrover.assert_all_ended()


@pytest.fixture
def cluster(dlrover: Dlrover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    limits_pods = not pod_limits.why_not()
    with kubernetes_cluster(tmp_path, environment=dlrover.environment, limits_pods=limits_pods) as running:
        running.host.cpus, running.host.taken_cpus = 2.0, 1.0
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("warm_nodes")
def test_pod_gets_what_was_deferred_from_the_next_controller(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    until = tmp_path / "enough"
    options = ("--target", "kubernetes", "--workers", "1:1", "--image", "trainer:1", "--endpoint", etcd.endpoint)
    arguments = (*options, "--cpus", "1:2", "--mem", "1G:2G", LIGHTNING_SCRIPT, "--until", until)
    run_id = keys.run_id
    run = dlrover.start(*arguments, run_id=run_id)
    wait_for_first_round(run)
    [worker] = wait_for_workers(run, 1)

    def record() -> NodeRecord:
        return stored(client, NodeRecord, f"{keys.each_node}node1")

    assert dlrover("scale", run_id, "--cpus", 2, "--mem", "2G", "--endpoint", etcd.endpoint).returncode == 0
    run.wait_for(lambda: record().resize == "waiting", "cores without room")
    assert (record().cpus, record().memory_mb) == (1, 2048)  # memory has not waited behind them
    shown = dlrover("status", run_id, "--endpoint", etcd.endpoint).stdout
    assert "size of node1: 2 cores, 2048 MiB in place of 1 cores, 2048 MiB: waits for room: Deferred" in shown
    run.process.kill()
    run.process.wait()
    cluster.host.taken_cpus = 0.0
    successor = dlrover.start(*arguments, run_id=run_id)
    successor.wait_for(lambda: record().cpus == 2 and not record().resize, "the cores", 60)
    pod: dict[str, Any] = cluster.pod_of("node1")
    given = pod["status"]["containerStatuses"][0]["resources"]["limits"]
    assert (quantity(given["cpu"]), quantity(given["memory"])) == (2, 2**31)
    assert [each["pid"] for each in wait_for_workers(successor, 1)] == [worker["pid"]]
    assert cluster.nodes() == ["node1"]
    successor.finish(until)
    dlrover.wait_for_end()
