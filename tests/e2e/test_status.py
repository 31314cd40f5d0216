"""`dlrover status` shows why a stalled job waits, for which workers, and for how long."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from lightning_dlrover.cli.main import main
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import Keys
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import DEADLINE_S
from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess
from tests.support.warm_tree import run_program


def status(capsys: object, endpoint: str, run_id: str) -> str:
    main(["status", "--endpoint", endpoint, run_id])
    return str(capsys.readouterr().out)  # type: ignore[attr-defined]


def said(capsys: object, endpoint: str, run_id: str, pattern: str) -> re.Match[str]:
    """First match of `pattern` in the command's output."""
    last = ""

    def look() -> re.Match[str] | None:
        nonlocal last
        last = status(capsys, endpoint, run_id)
        return re.search(pattern, last)

    return eventually(look, pattern, DEADLINE_S, poll_s=0.1, report=lambda: f"the last answer was\n{last}")


def test_stopped_worker_is_named_by_the_neighbour_that_waits(
    make_job: MakeJob, etcd: EmbeddedEtcd, client: EtcdClient, capsys: object
) -> None:
    job = make_job(PlainSettings(num_steps=3000), script=run_plain_loop)
    workers = [job.start() for _ in range(3)]
    job.wait_for_world(3)
    # The coordinator detects the loss of the next rank, as each worker watches that one.
    election = client.get(Keys(job.run_id).coordinator)
    assert election is not None
    first = job.members.index(election.value.decode())
    pids = [int(worker_id.split("-")[-2]) for worker_id in job.members]
    _, killed, stopped = sorted(workers, key=lambda worker: (pids.index(worker.pid) - first) % 3)
    os.kill(stopped.pid, signal.SIGSTOP)
    killed.kill()
    match = said(capsys, etcd.endpoint, job.run_id, r"enters round (\d+), as do (\S+), for (\d+) s")
    number = match[1]

    def waited_s() -> int:
        return int(said(capsys, etcd.endpoint, job.run_id, rf"enters round {number}, as do \S+, for (\d+) s")[1])

    eventually(lambda: waited_s() >= int(match[3]) + 1, "a longer wait", 10, poll_s=0.1)
    os.kill(stopped.pid, signal.SIGCONT)
    job.wait_for_world(2)


def test_waiting_node_shows_how_many_it_awaits_and_for_how_long(
    fork_server: None, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path, capsys: object
) -> None:
    arguments = [
        *("-m", "torch.distributed.run"),
        *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}"),
        *("--rdzv-conf=join_timeout=500", "--nnodes=3:4", "--nproc-per-node=1", "--no-python", "true"),
    ]
    node = WarmProcess(run_program, arguments, os.environ, tmp_path / "log")
    try:
        pattern = r"waits for 2 more nodes of at least 3, for (\d+) s, gives up in (\d+) s"
        look = ["status", "--endpoint", etcd.endpoint, run_id]
        eventually(lambda: main(look) == 0, "the node to come", DEADLINE_S, poll_s=0.1)
        match = said(capsys, etcd.endpoint, run_id, pattern)
        assert 0 <= int(match[1]) <= 60
        assert 400 <= int(match[2]) <= 500
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait(20)
