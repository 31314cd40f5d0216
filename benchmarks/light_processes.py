"""Many light processes of many threads each, which share a few cores as the members of a large job share a cluster.

The parent calls methods of one object in each process. The processes are forked from a server that has imported their modules.
Obstacles that only come from sharing one machine are removed: the processes have a lower priority than the server they talk to,
and their threads do not wake up many times per second to poll (`be_light`).
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import multiprocessing
import os
import re
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from jobs import BenchmarkError

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig

STACK_BYTES = 256 << 10


class LightProcesses:
    """Processes with one object each. Leaving ends them as a crash would, without any write to etcd.

    Args:
        make: makes the object, in its process.
        preloaded: names of modules that the processes share.
        timeout_s: maximum seconds that a call may take.
    """

    def __init__(self, make: Callable[[], Any], number: int, preloaded: Sequence[str], timeout_s: float) -> None:
        fork = multiprocessing.get_context("forkserver")
        fork.set_forkserver_preload(list(preloaded))
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(number):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_serve, args=(theirs, make), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)

    def ask(self, process: int, name: str, *arguments: Any) -> Any:
        """Call a method of one process's object.

        Raises:
            BenchmarkError: it raised an error, or did not return in time.
        """
        self._pipes[process].send((name, arguments))
        return self._answer(process)

    def ask_all(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of each process's object, at the same time; the processes beyond the list of arguments are left out."""
        for process, of_process in enumerate(arguments):
            self._pipes[process].send((name, of_process))
        return [self._answer(process) for process in range(len(arguments))]

    def _answer(self, process: int) -> Any:
        if not self._pipes[process].poll(self._timeout_s):
            raise BenchmarkError(f"process {process} did not answer within {self._timeout_s:g} s")
        succeeded, answer = self._pipes[process].recv()
        if not succeeded:
            raise BenchmarkError(answer)
        return answer


def _serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """Execute the parent's calls until it closes the pipe."""
    be_light()
    target = make()
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send((True, getattr(target, name)(*arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))


def be_light() -> None:
    """Let many processes of many threads each share a few cores."""
    import grpc  # type: ignore[import-untyped]

    os.nice(10)
    threading.stack_size(STACK_BYTES)
    gc.freeze()  # scanning torch's objects would cost each process more than the rest of its work
    sys.setswitchinterval(1.0)  # seconds after which a thread may take the interpreter; no thread here holds it for long
    grpc._common.MAXIMUM_WAIT_TIMEOUT = 5.0  # wake-up interval in seconds of gRPC threads that wait for a watch (default 0.1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def metrics_of(etcd: EmbeddedEtcd) -> list[tuple[str, dict[str, str], float]]:
    """Return etcd's own metrics: name, labels and value of each."""
    connection = http.client.HTTPConnection(etcd.host, etcd.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
    return [(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for name, labels, value in found]


def requests_to(etcd: EmbeddedEtcd) -> dict[str, float]:
    """Unary calls answered and stream messages received so far, by method, from etcd's own metrics."""
    counted: dict[str, float] = {}
    for name, label, value in metrics_of(etcd):
        is_unary = label.get("grpc_type") == "unary"
        if name == ("grpc_server_handled_total" if is_unary else "grpc_server_msg_received_total"):
            counted[label["grpc_method"]] = counted.get(label["grpc_method"], 0.0) + value
    return counted


class OtherUser:
    """Another user of the same etcd, writing under another prefix."""

    def __init__(self, etcd: EmbeddedEtcd, writes_per_s: float) -> None:
        self.num_writes = 0
        self._etcd = etcd
        self._pause_s = 1 / writes_per_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> OtherUser:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _write(self) -> None:
        with EtcdClient(EtcdConfig(self._etcd.endpoint, timeout_s=60)) as client:
            while not self._over.wait(self._pause_s):
                client.put("/elsewhere/key", b"")
                self.num_writes += 1
