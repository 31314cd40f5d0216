"""Probe the ports of workers to detect which of them are gone."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from lightning_dlrover.rdzv.job.records import AddressRecord, WorkerRecord

__all__ = ["Answer", "answers", "dead_beside", "dead_workers", "silent_workers"]

Answer = Literal["accepts", "refuses", "silent"]
"""Response of a worker's port to a connection."""


def dead_beside(
    me: str,
    workers: Sequence[str],
    probers: Collection[str],
    knock: Callable[[list[str]], Mapping[str, Answer]],
    num_answers: int = 1,
) -> list[str]:
    """Probe the workers after `me` in a ring until some of them answer; return the dead ones among those probed.

    If every living worker of the ring does this, all dead ones are found: each by the nearest living worker before it. A worker
    probes two others as a rule, however long the ring is. If many have died at once, it probes twice as many each time.

    Args:
        me: this worker; need not be in the ring.
        workers: the ring.
        probers: workers that probe this ring, too. Only their answers count.
        knock: connects to workers; leaves out those whose answer proves nothing to this worker.
        num_answers: answers after which to stop; more of them make up for probers that cannot tell whether others are dead.
    """
    first = workers.index(me) + 1 if me in workers else 0
    ring = [w for w in (*workers[first:], *workers[:first]) if w != me]
    dead: list[str] = []
    num_probed, num_next = 0, num_answers
    while num_answers > 0 and num_probed < len(ring):
        found = knock(ring[num_probed : num_probed + num_next])
        num_probed, num_next = num_probed + num_next, 2 * num_next
        dead += [w for w, answer in found.items() if answer == "refuses"]
        num_answers -= sum(answer == "accepts" and w in probers for w, answer in found.items())
    return dead


def dead_workers(records: Iterable[WorkerRecord], timeout_s: float = 0.3) -> list[str]:
    """Return the ids of workers that are certainly dead: their host refuses connections to their port.

    A worker that does not answer at all (host gone, process stopped) is not in the list. Its lease decides.
    """
    return [worker_id for worker_id, answer in answers(records, timeout_s).items() if answer == "refuses"]


def silent_workers(records: Iterable[WorkerRecord], timeout_s: float = 1.0) -> list[str]:
    """Return the ids of workers that neither accept nor refuse a connection: they are cut off, or their host is gone."""
    return [worker_id for worker_id, answer in answers(records, timeout_s).items() if answer == "silent"]


def answers(records: Iterable[WorkerRecord | AddressRecord], timeout_s: float) -> dict[str, Answer]:
    """Connect to each worker's port, and return the responses within `timeout_s` by worker id.

    Workers for which this process cannot open a socket are left out.
    """
    named: dict[int, Answer] = {0: "accepts", errno.ECONNREFUSED: "refuses"}
    return {worker_id: named.get(code, "silent") for worker_id, code in _knock(records, timeout_s).items()}


def _knock(records: Iterable[WorkerRecord | AddressRecord], timeout_s: float) -> dict[str, int]:
    """Try to connect to each worker's port; return 0 or the error number, by worker id."""
    answers: dict[str, int] = {}
    with selectors.DefaultSelector() as selector:
        for record in records:
            try:
                family, _, _, _, target = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
            except OSError:
                answers[record.worker_id] = errno.EHOSTUNREACH
                continue
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # this process has no room for another open file, which says nothing about the worker
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
