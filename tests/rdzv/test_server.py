from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun_agent import eventually

from lightning_dlrover.rdzv import server
from lightning_dlrover.rdzv.client import EtcdClient, EtcdConfig
from lightning_dlrover.rdzv.server import EmbeddedEtcd, EtcdServerError, find_binary


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stopped_server_leaves_neither_process_nor_data() -> None:
    embedded = EmbeddedEtcd().start()
    pid, data_dir = embedded.pid, embedded.data_dir
    assert pid is not None
    assert data_dir is not None
    embedded.stop()
    assert not _is_alive(pid)
    assert not data_dir.exists()
    embedded.stop()  # twice is fine


def test_data_in_a_given_directory_outlives_a_stop(tmp_path: Path) -> None:
    for expected in (None, b"kept"):
        with (
            EmbeddedEtcd(tmp_path / "etcd", durable=True) as embedded,
            EtcdClient(EtcdConfig(embedded.endpoint)) as client,
        ):
            found = client.get("/k")
            assert (found.value if found else None) == expected
            client.put("/k", b"kept")


def test_a_restart_keeps_port_and_data() -> None:
    with EmbeddedEtcd() as embedded, EtcdClient(EtcdConfig(embedded.endpoint)) as client:
        endpoint = embedded.endpoint
        client.put("/k", b"1")
        embedded.kill()
        assert not embedded.is_running()
        embedded.restart()
        assert embedded.endpoint == endpoint
        assert client.get("/k") is not None


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EtcdServerError, match=f"{port} is in use"):
            EmbeddedEtcd(port=port).start()


def test_a_port_lost_to_another_program_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free_port = server._free_port
        stolen = iter([taken.getsockname()[1]])
        monkeypatch.setattr(server, "_free_port", lambda host: next(stolen, None) or free_port(host))
        with EmbeddedEtcd() as embedded:
            assert embedded.port != taken.getsockname()[1]


def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where etcd wants a folder")
    with pytest.raises(EtcdServerError, match="not a directory"):
        EmbeddedEtcd(tmp_path).start()


def test_the_server_dies_with_its_parent() -> None:
    code = (
        "import sys, time; from lightning_dlrover.rdzv.server import EmbeddedEtcd\n"
        "print(EmbeddedEtcd().start().pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    eventually(lambda: not _is_alive(pid), "etcd has ended", 10)


def test_data_of_a_dead_owner_go_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # read anew
    code = (
        "import time; from lightning_dlrover.rdzv.server import EmbeddedEtcd;"
        "e = EmbeddedEtcd().start(); print(e.data_dir, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner, EmbeddedEtcd() as living:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert left.parent == tmp_path
        with EmbeddedEtcd():
            assert left.exists()
        owner.kill()
        owner.wait()
        assert left.exists()
        with EmbeddedEtcd():
            assert not left.exists()
            assert living.data_dir is not None
            assert living.data_dir.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_users_etcd_variables_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:1")
    monkeypatch.setenv("ETCD_DISCOVERY", "http://nowhere.invalid")
    with EmbeddedEtcd() as embedded:
        assert embedded.is_running()


@pytest.mark.parametrize(("version", "wins"), [("99.0.0", True), ("0.0.1", False)])
def test_the_newest_binary_wins(version: str, wins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "etcd"
    fake.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert (find_binary() == str(fake)) == wins
