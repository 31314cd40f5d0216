"""An etcd with client certificates and authentication, set up with the commands of docs/reference/security.md."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from lightning_dlrover.rdzv.etcd.server import find_binary
from tests.support.waiting import eventually

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "security.md"

PASSWORD = "trainers-secret-7e1f"


@dataclass(frozen=True)
class SecureEtcd:
    endpoint: str
    folder: Path  # folder of certificates and passwords

    @property
    def access(self) -> dict[str, Any]:
        """Access of the user that docs/reference/security.md creates, as fields of `EtcdConfig`."""
        files = {"password_file": "trainer.password", "ca_cert": "ca.pem", "cert": "client.pem", "cert_key": "client.key"}
        return {"user": "trainer", **{name: str(self.folder / file) for name, file in files.items()}}


def documented_commands() -> str:
    [block] = re.findall(r"```bash\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    return str(block)


@contextlib.contextmanager
def secure_etcd(folder: Path, token_ttl_s: int = 300) -> Iterator[SecureEtcd]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other-ca.pem")
    for name, identity in (("server", "127.0.0.1"), ("client", "trainer.example")):
        certificate = authority.issue_cert(identity, common_name=identity)
        certificate.private_key_pem.write_to_path(folder / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    (folder / "root.password").write_text("roots-secret\n")
    (folder / "trainer.password").write_text(f"{PASSWORD}\n")
    (folder / "wrong.password").write_text("wrong\n")
    client, peer, health = _free_ports(3)
    command = [
        find_binary(),
        f"--data-dir={folder / 'data'}",
        f"--listen-client-urls=https://127.0.0.1:{client}",
        f"--advertise-client-urls=https://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--listen-metrics-urls=http://127.0.0.1:{health}",
        f"--cert-file={folder / 'server.pem'}",
        f"--key-file={folder / 'server.key'}",
        f"--trusted-ca-file={folder / 'ca.pem'}",
        "--client-cert-auth",
        f"--auth-token-ttl={token_ttl_s}",
        "--bcrypt-cost=4",
        "--log-level=error",
    ]
    with (folder / "etcd.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _await_health(process, health, folder / "etcd.log")
            _run_documented_commands(folder, client)
            yield SecureEtcd(f"127.0.0.1:{client}", folder)
        finally:
            process.kill()


def _run_documented_commands(folder: Path, port: int) -> None:
    tools = folder / "bin"
    tools.mkdir()
    shutil.copy(Path(find_binary()).with_name("etcdctl"), tools / "etcdctl")
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ETCDCTL_API": "3",
        "ETCDCTL_ENDPOINTS": f"https://127.0.0.1:{port}",
        "ETCDCTL_CACERT": "ca.pem",
        "ETCDCTL_CERT": "client.pem",
        "ETCDCTL_KEY": "client.key",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", documented_commands()], cwd=folder, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _await_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def is_healthy() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return b'"true"' in answer.read()
        return False

    def ended() -> str:
        return "etcd has ended" if process.poll() is not None else ""

    eventually(is_healthy, "etcd's health", 30, 0.05, ended=ended, report=log.read_text)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [probe.getsockname()[1] for probe in probes]
