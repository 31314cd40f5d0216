"""The etcd that `dlrover run` starts for nodes on other hosts admits nobody without the job's password."""

from __future__ import annotations

import argparse
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.cli.errors import Interrupted
from lightning_dlrover.cli.run import own_etcd
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc, grpc
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError
from lightning_dlrover.report.status import JobPlace
from tests.support.stored import entry_at

SLURM = argparse.Namespace(target="slurm", etcd_host="127.0.0.1")


def test_etcd_of_a_slurm_job_refuses_everyone_without_its_password(tmp_path: Path) -> None:
    password = tmp_path / "etcd.password"
    with own_etcd(SLURM, tmp_path) as (server, access):
        assert access == {"user": "root", "password_file": str(password)}
        assert stat.S_IMODE(password.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "etcd").stat().st_mode) == 0o700
        with EtcdClient(EtcdConfig(server.endpoint, **access)) as client:
            client.put("/dlrover/job/a", b"1")
        wrong = tmp_path / "wrong"
        wrong.write_text("0" * 64 + "\n")
        refused: list[dict[str, Any]] = [{}, {"user": "root", "password_file": str(wrong)}]
        for other in refused:
            with EtcdClient(EtcdConfig(server.endpoint, **other)) as stranger:
                for attempt in (
                    lambda: stranger.get("/dlrover/job/a"),
                    lambda: stranger.put("/dlrover/job/a", b"2"),
                    lambda: stranger.delete_prefix("/"),
                ):
                    with pytest.raises(EtcdError, match=r"user name is empty|authentication failed"):
                        attempt()
    assert list(tmp_path.iterdir()) == [wrong]


def test_a_job_that_goes_on_after_a_kill_keeps_its_password_and_data(tmp_path: Path) -> None:
    killed = own_etcd(SLURM, tmp_path)
    server, access = killed.__enter__()
    JobPlace("job", server.endpoint, access=access).write(tmp_path, "slurm")
    with EtcdClient(EtcdConfig(server.endpoint, **access)) as client:
        client.put("/dlrover/job/a", b"1")
    first = server.endpoint, (tmp_path / "etcd.password").read_text()
    server.kill()
    assert killed.__exit__(Interrupted, Interrupted(15), None) is not True
    with own_etcd(SLURM, tmp_path) as (server, access):
        assert (server.endpoint, (tmp_path / "etcd.password").read_text()) == first
        with EtcdClient(EtcdConfig(server.endpoint, **access)) as client:
            entry = entry_at(client, "/dlrover/job/a")
            assert entry.value == b"1"


def test_an_etcd_whose_preparation_was_killed_is_prepared_anew(tmp_path: Path) -> None:
    (tmp_path / "etcd.new" / "data").mkdir(parents=True)
    (tmp_path / "etcd.password").write_text("0123456789abcdef" * 4 + "\n")
    with own_etcd(SLURM, tmp_path) as (server, access):
        with EtcdClient(EtcdConfig(server.endpoint, **access)) as client:
            client.check()
        with EtcdClient(EtcdConfig(server.endpoint)) as stranger, pytest.raises(EtcdError, match="user name is empty"):
            stranger.get("/dlrover/job/a")


def test_no_value_leaves_an_etcd_by_requests_that_are_not_about_keys(tmp_path: Path) -> None:
    """etcd 3.5.1 answers some requests without a user: docs/reference/security.md lists them."""
    with own_etcd(SLURM, tmp_path) as (server, _), grpc.insecure_channel(server.endpoint) as channel:
        maintenance: Any = etcdrpc.MaintenanceStub(channel)
        watch: Any = etcdrpc.WatchStub(channel)
        attempts: list[Callable[[], object]] = [
            lambda: next(iter(maintenance.Snapshot(etcdrpc.SnapshotRequest(), timeout=5))),
            lambda: maintenance.Hash(etcdrpc.HashRequest(), timeout=5),
        ]
        for attempt in attempts:
            with pytest.raises(grpc.RpcError, match="user name is empty"):
                attempt()
        everything = etcdrpc.WatchCreateRequest(key=b"\0", range_end=b"\0")
        answer = next(iter(watch.Watch(iter([etcdrpc.WatchRequest(create_request=everything)]), timeout=5)))
        assert answer.canceled
