"""Troubles of a host are planted for real where the system permits it: namespaces, limits, listeners."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.doctor import report
from lightning_dlrover.output import Finding

GIB = 1 << 30


def elsewhere(check: str, *prefix: str) -> Finding:
    """Run a check of this module in a process that a command, `prefix`, starts in another environment."""
    code = (
        "import dataclasses, json; from lightning_dlrover.doctor import report; "
        f"print(json.dumps(dataclasses.asdict(report.{check})))"
    )
    command = [*prefix, sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "ermitted" in ran.stderr or "ermission" in ran.stderr:
        pytest.skip(f"no namespaces here: {ran.stderr.strip()[-100:]}")
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return Finding(**found)


def in_shell(line: str, *namespaces: str) -> list[str]:
    """Command that runs a line of shell first."""
    return [*(["unshare", *namespaces] if namespaces else []), "sh", "-c", f'{line} && exec "$@"', "sh"]


# --- shared memory ------------------------------------------------------------------------------------------------------------


def test_tiny_shared_memory_is_named() -> None:
    tiny = elsewhere("check_shared_memory()", *in_shell("mount -t tmpfs -o size=64m tmpfs /dev/shm", "--mount"))
    assert tiny.verdict == "warning"
    assert tiny.text.startswith("64 MiB of 64 MiB are free in /dev/shm")
    assert "--shm-size" in tiny.next_move


def test_nearly_full_shared_memory_is_named() -> None:
    fill = "mount -t tmpfs -o size=1100m tmpfs /dev/shm && fallocate -l 1000M /dev/shm/left"
    full = elsewhere("check_shared_memory()", *in_shell(fill, "--mount"))
    assert full.verdict == "warning"
    assert "remove files" in full.next_move


def test_missing_shared_memory_is_an_error(tmp_path: Path) -> None:
    missing = report.check_shared_memory(tmp_path / "none")
    assert (missing.verdict, missing.text.split()[-1]) == ("error", "it")


# --- limits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "verdict"), [(200, "error"), (512, "warning"), (1024, "ok")])
def test_few_open_files_are_named(limit: int, verdict: str) -> None:
    found = elsewhere("check_files()", *in_shell(f"ulimit -S -n {limit}"))
    assert found.verdict == verdict
    assert str(limit) in found.text
    assert ("ulimit -n" in found.next_move) is (verdict != "ok")


def test_low_hard_limit_of_files_is_named() -> None:
    assert "hard limit of 512" in report.check_files(512, 512).next_move


def test_limited_addresses_are_named() -> None:
    found = elsewhere("check_memory()[-1]", *in_shell(f"ulimit -v {8 << 20}"))
    assert (found.check, found.verdict) == ("addresses", "warning")
    assert "8.0 GiB" in found.text
    assert "ulimit -v unlimited" in found.next_move


@pytest.mark.parametrize(("available", "verdict"), [(GIB // 4, "error"), (GIB * 3 // 4, "warning"), (4 * GIB, "ok")])
def test_little_memory_is_named(available: int, verdict: str) -> None:
    [found] = report.check_memory(available, 2.0, resource.RLIM_INFINITY)
    assert found.verdict == verdict


@pytest.mark.parametrize(("left", "verdict"), [(20, "error"), (300, "warning"), (5000, "ok")])
def test_few_processes_are_named(left: int, verdict: str) -> None:
    found = report.check_processes(left, "control group /sys/fs/cgroup/x")
    assert found.verdict == verdict
    assert ("--pids-limit" in found.next_move) is (verdict != "ok")


def test_limit_of_a_control_group_is_read(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/pod\n")
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/pids.max").write_text("100\n")
    (tmp_path / "pod/pids.current").write_text("58\n")
    assert report._processes_left(tmp_path, tmp_path) == (42, f"control group {tmp_path / 'pod'}")


def test_ordinary_machine_has_no_trouble() -> None:
    found = [
        *report.check_memory(8 * GIB, 2.0, resource.RLIM_INFINITY),
        report.check_files(1024, 4096),
        report.check_processes(None),
        report.check_name(None, "laptop", lambda name: "127.0.1.1"),
        *report.check_interfaces(None, {}),
        report.check_port({}),
        report.check_clock(None),
    ]
    assert {each.verdict for each in found} == {"ok"}


# --- names, addresses, ports, clock -------------------------------------------------------------------------------------------


def test_name_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.9\n")
    mount = in_shell(f"mount --bind {tmp_path / 'resolv.conf'} /etc/resolv.conf", "--mount")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind(("127.0.0.9", 53))
        except OSError as error:
            pytest.skip(f"port 53 cannot be used here: {error}")
        found = elsewhere("check_name_server(None, '192.0.2.1')", *mount)
    assert (found.check, found.verdict) == ("name server", "warning")
    assert "::ffff:192.0.2.1" in found.text
    assert "/etc/hosts" in found.next_move


def test_address_without_a_name_is_fine(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.9\n")  # nothing listens there, so each question fails at once
    mount = in_shell(f"mount --bind {tmp_path / 'resolv.conf'} /etc/resolv.conf", "--mount")
    assert elsewhere("check_name_server(None, '192.0.2.1')", *mount).verdict == "ok"


def test_name_that_does_not_resolve_is_named() -> None:
    found = elsewhere("check_name(None)", *in_shell("hostname nowhere.invalid", "--uts"))
    assert found.verdict == "warning"
    assert "'nowhere.invalid' does not resolve" in found.text
    assert "/etc/hosts" in found.next_move


@pytest.mark.parametrize(
    ("variable", "value", "verdict"),
    [
        ("GLOO_SOCKET_IFNAME", "ib7", "error"),
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib,rdma", "error"),
        ("NCCL_SOCKET_IFNAME", "=l", "error"),
        ("NCCL_SOCKET_IFNAME", "l", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
    ],
)
def test_interface_that_does_not_exist_is_named(variable: str, value: str, verdict: str) -> None:
    [found] = report.check_interfaces(None, {variable: value}, {"lo": [], "eth0": []})
    assert found.verdict == verdict
    assert (f"unset {variable}" in found.next_move) is (verdict == "error")


def test_name_with_the_address_of_another_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "own_address", lambda: "198.51.100.7")  # an address reserved for documentation
    [found] = report.check_interfaces(None, {})
    assert found.verdict == "error"
    assert "does not reach its own address 198.51.100.7" in found.text
    assert "/etc/hosts" in found.next_move


def test_port_in_use_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = report.check_port({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        assert report.check_port({"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x"}).verdict == "ok"
    assert found.verdict == "warning"
    assert f"MASTER_PORT {port} is in use by python" in found.text
    assert "unset MASTER_PORT" in found.next_move
    assert report.check_port({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).verdict == "ok"


@pytest.mark.parametrize(("ahead_s", "verdict"), [(60.0, "warning"), (-60.0, "warning"), (0.4, "ok"), (-2.0, "ok")])
def test_clock_that_is_off_is_named(ahead_s: float, verdict: str) -> None:
    found = report.check_clock(ahead_s, 0.5)
    assert found.verdict == verdict
    assert ("synchronize" in found.next_move) is (verdict != "ok")


def test_clock_before_the_installation_is_an_error() -> None:
    assert report.check_clock(None, now=1.0e9).verdict == "error"
