"""Probe the ports of workers to detect which of them are gone."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable

from lightning_dlrover.rdzv.job.records import WorkerRecord

__all__ = ["dead_workers", "silent_workers"]


def dead_workers(records: Iterable[WorkerRecord], timeout_s: float = 0.3) -> list[str]:
    """Return the ids of workers that are certainly dead: their host refuses connections to their port.

    A worker that does not answer at all (host gone, process stopped) is not in the list. Its lease decides.
    """
    return [worker_id for worker_id, code in _knock(records, timeout_s).items() if code == errno.ECONNREFUSED]


def silent_workers(records: Iterable[WorkerRecord], timeout_s: float = 1.0) -> list[str]:
    """Return the ids of workers that neither accept nor refuse a connection: they are cut off, or their host is gone."""
    return [worker_id for worker_id, code in _knock(records, timeout_s).items() if code not in (0, errno.ECONNREFUSED)]


def _knock(records: Iterable[WorkerRecord], timeout_s: float) -> dict[str, int]:
    """Try to connect to each worker's port; return 0 or the error number, by worker id."""
    answers: dict[str, int] = {}
    with selectors.DefaultSelector() as selector:
        for record in records:
            try:
                family, _, _, _, target = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
            except OSError:
                answers[record.worker_id] = errno.EHOSTUNREACH
                continue
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            code = sock.connect_ex(target)
            if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                answers[record.worker_id] = errno.ETIMEDOUT
                selector.register(sock, selectors.EVENT_WRITE, record.worker_id)
            else:
                answers[record.worker_id] = code
                sock.close()
        deadline = time.monotonic() + timeout_s
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]
                answers[key.data] = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                selector.unregister(sock)
                sock.close()
        for key in list((selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answers
