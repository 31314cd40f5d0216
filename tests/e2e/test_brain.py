"""`dlrover brain` with real jobs: they share two cores, come and go, and the brain is killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlrover_process import Dlrover, Run
from pool_audit import PoolAudit

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.config import EtcdConfig
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.pool_records import GrantRecord, PoolKeys

SCRIPT = Path(__file__).with_name("pooled_script.py")
POOL = PoolKeys("default")


class Cluster:
    """A pool of two cores, with its jobs and its brains."""

    def __init__(self, dlrover: Dlrover, etcd: EmbeddedEtcd, audit: PoolAudit) -> None:
        self.dlrover, self.etcd, self.audit = dlrover, etcd, audit
        self.client = EtcdClient(EtcdConfig(etcd.endpoint))

    def brain(self, *options: object) -> Run:
        command = [sys.executable, "-m", "lightning_dlrover.cli", "brain", "--budget", "cores=2", "--every", "0.5s"]
        return self.dlrover.follow([*command, "--endpoint", self.etcd.endpoint, *map(str, options)], "brain")

    def job(self, name: str, *arguments: object, workers: str = "1:2", options: tuple[object, ...] = ()) -> Run:
        place = ("--pool", "default", "--endpoint", self.etcd.endpoint, "--workers", workers, *options)
        return self.dlrover.start(*place, SCRIPT, *arguments, run_id=name)

    def grant(self, name: str) -> GrantRecord | None:
        return readable(GrantRecord, self.client.get(POOL.grants + name))

    def wait_for_workers(self, run: Run, num_workers: int, timeout_s: float = 60.0) -> None:
        run.wait_for(
            lambda: self.audit.counts()[run.run_id] == num_workers or None, f"{num_workers} workers of {run.run_id}", timeout_s
        )


@pytest.fixture
def cluster(dlrover: Dlrover, private_etcd: EmbeddedEtcd) -> Iterator[Cluster]:
    with PoolAudit(private_etcd.endpoint, ["a", "b", "c", "d"], 2) as audit:
        made = Cluster(dlrover, private_etcd, audit)
        yield made
        print(audit.history)
        made.client.close()
        dlrover.end()


@pytest.mark.long
def test_job_shrinks_for_another_and_grows_when_it_has_ended(cluster: Cluster, tmp_path: Path) -> None:
    cluster.brain()
    first = cluster.job("a", "--until", tmp_path / "until")
    cluster.wait_for_workers(first, 2)
    second = cluster.job("b", "--steps", 60)
    cluster.wait_for_workers(second, 1)
    assert cluster.audit.counts() == {"a": 1, "b": 1, "c": 0, "d": 0}
    assert second.wait_for_exit(60) == 0, second.output
    cluster.wait_for_workers(first, 2)
    (tmp_path / "until").touch()
    assert first.wait_for_exit(60) == 0, first.output
    assert cluster.audit.most <= 2, cluster.audit.history
    assert cluster.client.get_prefix(POOL.grants)[1] == []
    assert cluster.client.get_prefix(POOL.members)[1] == []
