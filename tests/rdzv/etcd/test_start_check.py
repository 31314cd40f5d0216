"""A job's start names troubles of its etcd and unsupported releases, and is neither delayed nor disturbed."""

from __future__ import annotations

import logging
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd import health
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc, grpc
from lightning_dlrover.rdzv.etcd.health import troubles_of, version_warning, warn_of_troubles
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from tests.support.full_etcd import fill, small_etcd
from tests.support.secure_etcd import secure_etcd


def checks(text: str) -> set[str]:
    """Names of the checks that found trouble. The tests' etcd has an old release."""
    return set(re.findall(r"^(etcd \w+) \(", text, re.MULTILINE)) - {"etcd release"}


def test_etcd_without_trouble_is_not_mentioned(etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EtcdConfig(etcd.endpoint)
    assert checks(troubles_of(config)) == set()
    monkeypatch.setattr(health, "version_warning", lambda version: None)
    warnings: list[str] = []
    warn_of_troubles(config, warnings.append).join(30)
    assert warnings == []


def test_nearly_full_etcd_is_one_warning_with_the_next_move(tmp_path: Path) -> None:
    with small_etcd(tmp_path) as (server, others):
        number = 0
        while "etcd size" not in checks(text := troubles_of(others.config)):
            others.put(f"/others/{number}", b"x" * 50_000)
            number += 1
        warnings: list[str] = []
        warn_of_troubles(replace(others.config, endpoints=f"127.0.0.1:9,{server.endpoint}"), warnings.append).join(30)
        fill(others)
        full = troubles_of(others.config)
    [line] = [line for line in text.splitlines() if line.startswith("etcd size")]
    assert re.search(r"of 4\.0 MiB, \d+%: at its quota it accepts no writes -> etcdctl .*--quota-backend-bytes", line)
    assert len(warnings) == 1
    assert checks(warnings[0]) == {"etcd size"}
    assert "alarm NOSPACE: it accepts no writes -> " in full


def test_etcd_that_never_compacts_is_pointed_out(private_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded etcd compacts by its command line; another one is told apart by its command line, too."""
    config = EtcdConfig(private_etcd.endpoint)
    monkeypatch.setattr("lightning_dlrover.rdzv.etcd.health._compacts_by_itself", lambda config: None)
    judge_server = health.judge_server
    monkeypatch.setattr(
        "lightning_dlrover.rdzv.etcd.health.judge_server", lambda endpoint, found: judge_server(endpoint, found, 10)
    )
    with EtcdClient(config) as client:
        for _ in range(12):
            newest = client.put("/others/key", b"")
        assert "-> start etcd with --auto-compaction-retention=1h" in troubles_of(config)
        client.caller.call("compact", "KV", "Compact", etcdrpc.CompactionRequest(revision=newest))
    assert checks(troubles_of(config)) == set()


def test_user_with_a_role_for_the_prefix_alone_may_ask(tmp_path: Path) -> None:
    with secure_etcd(tmp_path) as etcd:
        assert checks(troubles_of(EtcdConfig(etcd.endpoint, **etcd.access))) == set()


class Guarded(etcdrpc.MaintenanceServicer):  # type: ignore[misc]
    """An etcd that answers questions about itself to its administrators only."""

    def Status(self, request: object, context: grpc.ServicerContext) -> object:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        raise AssertionError("unreachable")


def test_user_who_may_not_ask_starts_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    password = tmp_path / "password"
    password.write_text("secret\n")
    server = grpc.server(ThreadPoolExecutor(2))
    etcdrpc.add_MaintenanceServicer_to_server(Guarded(), server)
    etcdrpc.add_AuthServicer_to_server(Welcoming(), server)
    config = EtcdConfig(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", user="me", password_file=str(password))
    server.start()
    try:
        with EtcdClient(config) as client:
            client.check()
        assert troubles_of(config) == ""
    finally:
        server.stop(0).wait()
    assert caplog.text == ""


class Welcoming(etcdrpc.AuthServicer):  # type: ignore[misc]
    def Authenticate(self, request: object, context: object) -> object:
        return etcdrpc.AuthenticateResponse(token="token")


def test_silent_etcd_neither_delays_nor_disturbs_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        warnings: list[str] = []
        thread = warn_of_troubles(EtcdConfig(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5), warnings.append)
        assert time.monotonic() - began < 0.5
        thread.join(30)
        assert not thread.is_alive()
    assert (warnings, caplog.text) == ([], "")


@pytest.mark.parametrize("version", ["3.3.27", "3.4.43", "3.5.1", "3.5.29", "3.6.10"])
def test_a_release_that_leaks_other_users_prefixes_is_named(version: str) -> None:
    assert version in (version_warning(version) or "")


@pytest.mark.parametrize("version", ["3.4.44", "3.5.30", "3.6.11", "3.7.0", "4.0.0", "unreadable"])
def test_a_fixed_release_is_not_complained_about(version: str) -> None:
    assert version_warning(version) is None
