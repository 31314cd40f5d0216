"""Troubles of real etcd servers are named with the next move."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.doctor.report import check_clock, check_embedded, check_endpoints
from lightning_dlrover.output import Finding
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc, grpc
from lightning_dlrover.rdzv.etcd.health import inspect, judge
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdFullError
from tests.support.full_etcd import commit, etcd_with
from tests.support.secure_etcd import secure_etcd
from tests.support.waiting import eventually

PREFIX = "/dlrover"


def config_of(endpoint: str) -> EtcdConfig:
    return EtcdConfig(endpoint, timeout_s=5.0)


def finding(check: str, findings: list[Finding]) -> Finding:
    return next(each for each in findings if each.check == check)


def filled_until(verdict: str, client: EtcdClient, name: str) -> Finding:
    """Write keys until the finding about the size is this one."""
    for number in range(80):
        with suppress(EtcdFullError):
            client.put(f"/others/{name}/{number}", b"x" * 200_000)
        commit(client)
        found = finding("etcd size", check_endpoints(client.config, PREFIX)[0])
        if found.verdict == verdict:
            return found
    raise AssertionError(f"never {verdict}: {found}")


def test_real_etcd_has_no_trouble_but_its_release(etcd: EmbeddedEtcd) -> None:
    findings, condition = check_endpoints(config_of(etcd.endpoint), PREFIX)
    assert condition is not None
    assert {each.check for each in findings if each.verdict != "ok"} <= {"etcd release"}
    assert condition.quota_bytes == 2 << 30
    assert condition.compacts_by_itself
    assert "automatic" in finding("etcd compaction", findings).text


def test_inspection_writes_nothing(etcd: EmbeddedEtcd) -> None:
    with EtcdClient(config_of(etcd.endpoint)) as client:
        before = client.get_prefix(PREFIX)[1]
        assert inspect(config_of(etcd.endpoint), PREFIX).write_problem == ""
        assert client.get_prefix(PREFIX)[1] == before


def test_clock_that_is_off_is_seen_in_a_real_answer(etcd: EmbeddedEtcd) -> None:
    for off_s, verdict in ((0.0, "ok"), (90.0, "warning"), (-90.0, "warning")):
        clock = inspect(config_of(etcd.endpoint), PREFIX, lambda off_s=off_s: time.time() + off_s).clock  # type: ignore[misc]
        assert clock is not None
        found = check_clock(clock.ahead_s, clock.uncertain_s)
        assert found.verdict == verdict
        assert ("90 s" in found.text or "91 s" in found.text or "89 s" in found.text) is (off_s != 0.0)


def is_refused(client: EtcdClient) -> bool:
    """Whether a write finds etcd full."""
    try:
        client.put("/others/third", b"x" * 50_000)
    except EtcdFullError:
        return True
    return False


def test_nearly_full_and_full_quota_are_named(tmp_path: Path) -> None:
    with etcd_with(tmp_path, f"--quota-backend-bytes={6 << 20}") as server, EtcdClient(config_of(server.endpoint)) as client:
        assert finding("etcd size", check_endpoints(client.config, PREFIX)[0]).verdict == "ok"
        nearly = filled_until("warning", client, "first")
        assert inspect(client.config, PREFIX).alarms == ()
        filled_until("error", client, "second")
        eventually(lambda: is_refused(client), "a refused write", 30)  # etcd looks at its size when it commits
        eventually(lambda: "NOSPACE" in inspect(client.config, PREFIX).alarms, "the alarm", 10)
        full = finding("etcd size", check_endpoints(client.config, PREFIX)[0])
    assert "of 6.0 MiB" in nearly.text
    assert "--quota-backend-bytes" in nearly.next_move
    assert full.verdict == "error"
    assert "NOSPACE" in full.text
    assert "etcdctl alarm disarm" in full.next_move


def test_etcd_that_is_never_compacted_is_named(tmp_path: Path) -> None:
    with etcd_with(tmp_path, "--auto-compaction-retention=0") as server, EtcdClient(config_of(server.endpoint)) as client:
        for number in range(60):
            client.put("/key", str(number).encode())
        condition = inspect(config_of(server.endpoint), PREFIX)
        assert condition.compacts_by_itself is False
        assert finding("etcd compaction", judge(server.endpoint, condition)).verdict == "ok"
        grown = finding("etcd compaction", judge(server.endpoint, condition, many_revisions=50))
    assert grown.verdict == "warning"
    assert "--auto-compaction-retention=1h" in grown.next_move
    compacted = replace(condition, compacted_revision=30)
    assert finding("etcd compaction", judge(server.endpoint, compacted, many_revisions=50)).verdict == "ok"


class OldEtcd(etcdrpc.MaintenanceServicer):  # type: ignore[misc]
    """Answers the question for the release, as a server of that release would, and nothing else."""

    def __init__(self, version: str) -> None:
        self.version = version

    def Status(self, request: object, context: object) -> object:
        return etcdrpc.StatusResponse(version=self.version, leader=1, dbSize=20_000)


@pytest.mark.parametrize(
    ("version", "host", "text"),
    [
        ("3.5.4", "127.0.0.1", "may lose an acknowledged write"),
        ("3.4.20", "etcd.example", "does not confine users"),
        ("3.4.20", "127.0.0.1", ""),
        ("3.6.11", "etcd.example", ""),
    ],
)
def test_old_etcd_is_named_with_the_release_to_use(version: str, host: str, text: str) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    etcdrpc.add_MaintenanceServicer_to_server(OldEtcd(version), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        condition = inspect(config_of(f"127.0.0.1:{port}"), PREFIX)
    finally:
        server.stop(0).wait()
    assert (condition.version, condition.quota_bytes, condition.clock) == (version, None, None)
    release = finding("etcd release", judge(f"{host}:2379", condition))
    assert release.verdict == ("warning" if text else "ok")
    assert text in release.text
    assert ("upgrade to 3." in release.next_move) is bool(text)


@pytest.mark.slow
def test_endpoint_without_etcd_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken, _ = check_endpoints(replace(config_of(f"127.0.0.1:{port}"), timeout_s=0.5), PREFIX)
    free, condition = check_endpoints(replace(config_of(f"127.0.0.1:{port}"), timeout_s=0.5), PREFIX)
    assert condition is None
    assert [taken[0].verdict, free[0].verdict] == ["error", "error"]
    assert f"port {port}" in taken[0].text
    assert "in use by python" in taken[0].text
    assert f"nothing listens at 127.0.0.1:{port}" in free[0].text
    [unknown], _ = check_endpoints(replace(config_of("nowhere.invalid:2379"), timeout_s=0.5), PREFIX)
    assert "does not resolve" in unknown.text


def test_one_missing_endpoint_of_several_is_a_warning(etcd: EmbeddedEtcd) -> None:
    findings, condition = check_endpoints(replace(config_of(f"127.0.0.1:9,{etcd.endpoint}"), timeout_s=1.0), PREFIX)
    assert condition is not None
    assert [each.verdict for each in findings if each.check == "etcd"] == ["warning", "ok"]


def test_secured_etcd_is_read_with_its_files_and_refusals_are_named(tmp_path: Path) -> None:
    with secure_etcd(tmp_path) as secured:
        config = EtcdConfig(secured.endpoint, timeout_s=5.0, **secured.access)
        findings, condition = check_endpoints(config, PREFIX)
        refused, _ = check_endpoints(config, "/others")
        nobody, _ = check_endpoints(replace(config, user=None, password_file=None), PREFIX)
        plain, _ = check_endpoints(EtcdConfig(secured.endpoint, timeout_s=0.5), PREFIX)
    assert condition is not None
    assert {each.check for each in findings if each.verdict != "ok"} <= {"etcd release"}
    assert condition.quota_bytes == 2 << 30
    assert condition.clock is not None
    for found, text in ((refused[0], "permission denied"), (nobody[0], "authentication enabled"), (plain[0], "requires TLS")):
        assert found.verdict == "error"
        assert text in found.text


def test_slow_etcd_and_refused_writes_are_named(etcd: EmbeddedEtcd) -> None:
    condition = inspect(config_of(etcd.endpoint), PREFIX)
    slow = judge(etcd.endpoint, replace(condition, latency_s=0.5))[0]
    refused = judge(etcd.endpoint, replace(condition, write_problem="cannot write: PERMISSION_DENIED"))[0]
    headless = judge(etcd.endpoint, replace(condition, has_leader=False))[0]
    assert [slow.verdict, refused.verdict, headless.verdict] == ["warning", "error", "error"]
    assert "500 ms" in slow.text
    assert "--key-prefix" in refused.next_move


def test_missing_embedded_etcd_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    [present] = check_embedded()
    assert present.verdict == "ok"

    def none() -> str:
        raise EtcdServerError("no etcd was found")

    monkeypatch.setattr("lightning_dlrover.doctor.report.find_binary", none)
    [missing] = check_embedded()
    assert (missing.verdict, missing.text) == ("error", "no etcd was found")
