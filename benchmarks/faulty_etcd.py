"""An etcd that fails on command: behind a proxy that severs its clients, or as a cluster with a leader that is killed.

Used by `etcd_faults.py` and by tests/e2e/test_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from lightning_dlrover.host import free_port
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc
from lightning_dlrover.rdzv.etcd.server import _LAUNCHER, find_binary
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, parse_endpoints

_START_TIMEOUT_S = 60.0


class EtcdProxy:
    """Forwards TCP connections on its own port to an etcd, until it is disturbed.

    A `blackhole` delivers nothing: connections stay, and their data arrive when it is over, as with TCP. While the proxy is
    `refusing`, it resets connections and refuses new ones.
    """

    def __init__(self, endpoint: str) -> None:
        self._target = parse_endpoints(endpoint)[0]
        self._passing = threading.Event()
        self._passing.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> EtcdProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._passing.set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def blackhole(self) -> None:
        self._passing.clear()

    def refuse(self) -> None:
        _shut(self._listener)
        with self._lock:
            doomed, self._sockets = self._sockets, set()
        for sock in doomed:
            _shut(sock)

    def heal(self) -> None:
        if self._listener.fileno() == -1:
            self._listener = self._listen(self.port)
        self._passing.set()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, args=(listener,), name="proxy-accept", daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client = listener.accept()[0]
                try:
                    server = socket.create_connection(self._target)
                except OSError:  # etcd itself is down
                    client.close()
                    continue
                with self._lock:
                    self._sockets |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), name="proxy", daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._passing.wait()
                sink.sendall(data)
        for sock in (source, sink):
            with self._lock:
                self._sockets.discard(sock)
            _shut(sock)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # a mere close would not wake a thread that is blocked in accept or recv
    sock.close()


class EtcdCluster:
    """Etcd servers on this machine that form one cluster. They end with the thread that created them."""

    def __init__(self, size: int = 3) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dlrover-etcd-cluster-"))
        self._ports = [(free_port("127.0.0.1"), free_port("127.0.0.1")) for _ in range(size)]  # clients, peers
        self._servers: list[subprocess.Popen[bytes] | None] = [None] * size

    def __enter__(self) -> EtcdCluster:
        try:
            for index in range(len(self._ports)):
                self._spawn(index)
            self.leader()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(len(self._ports)):
            self.kill(index)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port, _ in self._ports]

    @property
    def endpoint(self) -> str:
        """Endpoints of all servers, separated by commas."""
        return ",".join(self.endpoints)

    def leader(self) -> int:
        """Index of the leading server, once one leads."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            for index, server in enumerate(self._servers):
                if server is not None and self._leads(index):
                    return index
            time.sleep(0.02)
        logs = "\n".join(self._log(index).read_text()[-500:] for index in range(len(self._ports)))
        raise TimeoutError(f"waited {_START_TIMEOUT_S:.0f} s for a leader of the etcd cluster at {self.endpoint}:\n{logs}")

    def kill(self, index: int) -> None:
        server, self._servers[index] = self._servers[index], None
        if server is not None:
            server.send_signal(signal.SIGKILL)
            server.wait()

    def restart(self, index: int) -> None:
        """Start a killed server again, with its old data."""
        self.kill(index)
        self._spawn(index)

    def _leads(self, index: int) -> bool:
        try:
            with EtcdClient(EtcdConfig(self.endpoints[index], timeout_s=1.0)) as client:
                status = client.caller.call("ask who leads", "Maintenance", "Status", etcdrpc.StatusRequest())
        except EtcdError:
            return False
        return bool(status.leader == status.header.member_id)

    def _spawn(self, index: int) -> None:
        client_port, peer_port = self._ports[index]
        peers = ",".join(f"server{i}=http://127.0.0.1:{peer}" for i, (_, peer) in enumerate(self._ports))
        command = [
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), find_binary()),
            f"--data-dir={self._folder / f'data{index}'}",
            f"--name=server{index}",
            f"--listen-client-urls=http://127.0.0.1:{client_port}",
            f"--advertise-client-urls=http://127.0.0.1:{client_port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-cluster={peers}",
            "--log-outputs=stderr",
            "--unsafe-no-fsync",
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with self._log(index).open("ab") as log:
            self._servers[index] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def _log(self, index: int) -> Path:
        return self._folder / f"server{index}.log"
