from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from lightning_dlrover.host import free_port
from lightning_dlrover.rdzv.etcd import server
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.health import inspect
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError, find_binary
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from tests.support.waiting import eventually


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
    embedded.stop()  # a second stop does nothing


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
        stolen = iter([taken.getsockname()[1]])
        monkeypatch.setattr(server, "free_port", lambda host: next(stolen, None) or free_port(host))
        with EmbeddedEtcd() as embedded:
            assert embedded.port != taken.getsockname()[1]


def test_failed_start_names_cause_and_kept_log(tmp_path: Path) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()
    (folder / "data").write_text("a file where etcd wants a folder")
    with pytest.raises(EtcdServerError, match=r"exited with code \d+ [\d.]+ s after its start: .*not a directory") as failed:
        EmbeddedEtcd(folder).start()
    assert len(str(failed.value).splitlines()) == 1
    assert f"Its log is kept in {tmp_path}/etcd.log" in str(failed.value)
    assert "not a directory" in (tmp_path / "etcd.log").read_text()


LIMITED = """
import resource, sys, tempfile
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError
limit = int(sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[1]), (limit, limit))
try:
    EmbeddedEtcd().start()
except EtcdServerError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "limit", "cause", "remedy"),
    [
        ("RLIMIT_NOFILE", 16, "file descriptor limit .* is too low", "ulimit -n"),
        ("RLIMIT_AS", 150 << 20, "cannot be run: .*(failed to reserve|cannot allocate|out of memory)", "more memory"),
        ("RLIMIT_FSIZE", 100_000, "failed to create WAL: error file too large", "ulimit -f"),
    ],
)
def test_limit_that_keeps_etcd_from_starting_is_named(kind: str, limit: int, cause: str, remedy: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, kind, str(limit)]
    output = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=60
    ).stdout
    assert re.search(cause, output), output
    assert remedy in output
    assert len(output.splitlines()) == 1
    if "log is kept in" in output:
        [kept] = tmp_path.iterdir()  # the data are gone
        assert f"kept in {kept}" in output


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not full. The test fakes the system's report of free space, and etcd fails for another reason."""
    (tmp_path / "data").write_text("a file where etcd wants a folder")
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(EtcdServerError, match=f"no space left on device: 4096 bytes are free for {tmp_path}.*free space there"):
        EmbeddedEtcd(tmp_path).start()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EtcdServerError, match=f"cannot be started: Not a directory .*{tmp_path}/file/etcd"):
        EmbeddedEtcd(tmp_path / "file" / "etcd").start()


def test_etcd_that_was_killed_is_described(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path / "etcd") as embedded:
        assert embedded.pid is not None
        os.kill(embedded.pid, signal.SIGKILL)
        eventually(lambda: not embedded.is_running(), "etcd has ended", 10)
        assert embedded.why_it_ended().startswith("it was killed by SIGKILL; another process killed it, or the host ran")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "runtime/cgo: pthread_create failed: Resource temporarily unavailable\nSIGABRT: abort\nPC=0x45",
            "pthread_create failed",
        ),
        (
            '{"level":"info","msg":"a"}\n{"level":"panic","msg":"b","error":"no space left"}\npanic: b\n\ngoroutine 1',
            "b: error no space",
        ),
        ('{"level":"info","msg":"ready"}', ""),
        ("", ""),
    ],
)
def test_cause_is_found_in_a_log(log: str, cause: str) -> None:
    found = server.reason(log)
    assert cause in found
    assert bool(found) == bool(cause)


def test_the_server_dies_with_its_parent() -> None:
    code = (
        "import sys, time; from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd\n"
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
    monkeypatch.setattr("tempfile.tempdir", None)  # read the variable anew
    code = (
        "import time; from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd;"
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


def listening_ports(pid: int) -> list[int]:
    return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_a_private_server_listens_on_no_port_and_comes_back_on_its_socket() -> None:
    with EmbeddedEtcd(private=True) as embedded:
        assert embedded.pid is not None
        assert listening_ports(embedded.pid) == []
        folder = Path(embedded.endpoint.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(embedded.log_path.stat().st_mode) == 0o600
        endpoint = embedded.endpoint
        with EtcdClient(EtcdConfig(endpoint)) as client:
            client.put("/a", b"1")
            embedded.kill()
            embedded.restart()
            entry = client.get("/a")
        assert embedded.endpoint == endpoint
        assert entry is not None
        assert entry.value == b"1"
        assert inspect(EtcdConfig(endpoint), "/dlrover").quota_bytes is not None  # a page, through the socket
    assert not folder.exists()


def test_a_server_on_a_port_has_no_second_one_for_other_members() -> None:
    with EmbeddedEtcd() as embedded:
        assert embedded.pid is not None
        assert listening_ports(embedded.pid) == [embedded.port]


@pytest.mark.parametrize("name", ["x" * 100, "a,b", "with spaces"])
def test_a_folder_for_temporary_files_that_holds_no_sockets_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with EmbeddedEtcd(private=True) as embedded, EtcdClient(EtcdConfig(embedded.endpoint)) as client:
        client.put("/a", b"1")
        assert embedded.endpoint.startswith("unix:/tmp/")
    assert list((tmp_path / name).iterdir()) == []
