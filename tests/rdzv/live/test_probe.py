"""Detection of workers that are certainly gone."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

from lightning_dlrover.rdzv.job.records import (
    WorkerRecord,
)
from lightning_dlrover.rdzv.live.probe import (
    dead_workers,
    silent_workers,
)


def test_only_a_port_that_refuses_proves_a_death() -> None:
    def record(name: str, address: str, port: int) -> WorkerRecord:
        return WorkerRecord(name, "agent", "host", 1, 0, address, port, "active")

    with ExitStack() as stack:
        alive = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # a full queue: it answers no connection, like a lost host
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(silent.getsockname())
        with socket.create_server(("127.0.0.1", 0)) as closing:
            gone = closing.getsockname()[1]
        records = [
            record("alive", "127.0.0.1", alive.getsockname()[1]),
            record("dead", "127.0.0.1", gone),
            record("silent", "127.0.0.1", silent.getsockname()[1]),
            record("unknown", "no-such-host.invalid", 9),
        ]
        began = time.monotonic()
        assert dead_workers(records) == ["dead"]
        assert silent_workers(records) == ["silent", "unknown"]
        assert time.monotonic() - began < 5.0
