"""A job of at least two nodes, in a cluster that has room for one of them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.test_dlrover_run import SCRIPT, wait_for_workers
from tests.support.dlrover_process import Dlrover, Run
from tests.support.kubernetes_cluster import KubernetesCluster, kubernetes_cluster
from tests.support.waiting import eventually

TIMEOUT_S = 2.0
"""Timeout of nodes and of workers; each wait of the tests is several times longer."""


@pytest.fixture
def cluster(dlrover: Dlrover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    with kubernetes_cluster(tmp_path, environment=dlrover.environment) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        running.max_jobs = 1
        yield running


def start(dlrover: Dlrover, etcd: EmbeddedEtcd, run_id: str, *arguments: object) -> Run:
    timeouts = ("--join-timeout", f"{TIMEOUT_S:g}s", "--wait-timeout", f"{TIMEOUT_S:g}s")
    place = ("--target", "kubernetes", "--image", "trainer:1", "--endpoint", etcd.endpoint)
    run = dlrover.start(*place, "--workers", "2:2", *timeouts, SCRIPT, *arguments, run_id=run_id)
    run.wait_for_output(rf"job {run_id}: 2 to 2 workers")
    return run


def waits_longer(records: list[dict[str, Any]], state: str) -> bool:
    """Whether the only one of these agents or workers has been in this state for several timeouts."""
    return [each["state"] for each in records] == [state] and records[0]["for_s"] > 3 * TIMEOUT_S


@pytest.mark.long
@pytest.mark.timeout(240)
def test_node_and_worker_outwait_their_timeouts_for_the_second_node(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    until = tmp_path / "enough"
    run = start(dlrover, etcd, run_id, "--until", until)
    run.wait_for(lambda: waits_longer(run.status()["agents"], "waiting"), "a first node that waits for long", 60)
    status = run.status()
    assert (status["phase"], status["workers"], status["agents"][0]["gives_up_in_s"]) == ("not started", [], None)
    assert "exceeded quota" in status["controller"]["held_up"]
    cluster.max_jobs = 1000
    first, second = wait_for_workers(run, 2)
    # A worker that is lost before the first step leaves the other one "ready", as before the round.
    run.wait_for(lambda: run.status()["phase"] == "training", "two workers that train")

    cluster.max_jobs = 1
    os.kill(second["pid"], signal.SIGKILL)
    run.wait_for(lambda: waits_longer(run.status()["workers"], "reforming"), "a survivor that waits for long", 60)
    cluster.max_jobs = 1000
    two = wait_for_workers(run, 2, without=(second["worker_id"],))
    assert first["worker_id"] in {worker["worker_id"] for worker in two}
    run.finish(until)
    eventually(lambda: not dlrover.processes(), "the end of all processes")


@pytest.mark.timeout(120)
def test_node_without_a_controller_gives_up_after_its_join_timeout(
    dlrover: Dlrover, cluster: KubernetesCluster, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    run = start(dlrover, etcd, run_id)
    run.wait_for(lambda: waits_longer(run.status()["agents"], "waiting"), "a first node that waits for long", 60)
    run.process.kill()
    run.process.wait()
    # Its lease ends first: until then the node believes that a controller is there.
    eventually(lambda: cluster.nodes() == [], "the end of the node", 30)
    # The run folder has only output from the controller's life.
    logs = dlrover("logs", run_id, "--endpoint", etcd.endpoint, "--run-dir", tmp_path / "elsewhere").stdout
    why = "only 1 of at least 2 nodes joined: start more, or lower --nnodes. To wait longer, set --rdzv-conf join_timeout="
    assert re.search(rf"no room in a round within join_timeout={TIMEOUT_S:g} s; {re.escape(why)}", logs), logs
    eventually(lambda: not dlrover.processes(), "the end of all processes")
