"""The worker processes that measure, as their parent sees them: started when needed, and ended with it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_dlrover import variables
from lightning_dlrover.characterize.limits import LIMITS, NEEDS_WORKERS
from lightning_dlrover.characterize.measure import Effort, Share
from lightning_dlrover.characterize.point import Limit, Point, Visit
from lightning_dlrover.characterize.worker import Request
from lightning_dlrover.codec import from_fields

__all__ = ["WorkerPool"]

ANSWER_TIMEOUT_S = 120.0
"""Seconds for one visit before its workers are ended and the point is given up."""

END_TIMEOUT_S = 10.0
"""Seconds for a worker to end after it has closed its channel."""

SPIN_COUNT = "0"
"""Turns of OpenMP's threads in a barrier before they sleep. By default they spin for milliseconds: measured, a small program
beside two threads on two cores then made steps five times as long, and no two runs agreed."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    unread: bytes = b""


class WorkerPoolError(Exception):
    """Workers gave no answer; they have been ended, and the next request starts others."""


class WorkerPool:
    """Worker processes on this machine. Use as a context manager.

    Args:
        folder: place for the files of a measurement; removed by the caller.
    """

    def __init__(self, folder: Path, effort: Effort) -> None:
        self._folder = folder
        self._effort = effort
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._number = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and their loader workers."""
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # a session of its own; nothing in it is worth saving
            worker.channel.close()
        for worker in self._workers:
            worker.process.wait()
        self._workers = []

    def visit(self, point: Point) -> Visit:
        """Measure a point once. A visit that fails has a problem in place of figures."""
        began, at = time.monotonic(), time.time()
        try:
            answers = self._ask(self._request(point.num_workers, point=point), point.num_workers)
            shares = [from_fields(Share, answer, "a worker's answer") for answer in answers]
        except WorkerPoolError as error:
            return Visit(point, at, time.monotonic() - began, (), {}, problem=str(error))
        first = shares[0]
        return Visit(
            point=point,
            at=at,
            took_s=time.monotonic() - began,
            blocks=first.blocks,
            part_s=first.part_s,
            forward_s=first.forward_s,
            peak_memory_bytes=sum(share.peak_memory_bytes for share in shares),
            cpu_percent=sum(share.cpu_percent for share in shares),
            gpu_memory_bytes=sum(share.gpu_memory_bytes for share in shares),
            joules_per_step=first.joules_per_step,  # energy of the whole machine
            reference_s=first.reference_s,
        )

    def limit(self, name: str, threads: int) -> Limit:
        began, at = time.monotonic(), time.time()
        num_workers = NEEDS_WORKERS.get(name, 1)
        request = replace(self._request(num_workers), limit=name, threads=threads)
        try:
            blocks = tuple(float(value) for value in self._ask(request, num_workers)[0]["blocks"])
        except WorkerPoolError as error:
            return Limit(name, LIMITS[name][1], threads, at, time.monotonic() - began, (), str(error))
        return Limit(name, LIMITS[name][1], threads, at, time.monotonic() - began, blocks)

    def _request(self, num_workers: int, point: Point | None = None) -> Request:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._number += 1
        return Request(self._number, 0, num_workers, self._store.port, str(self._folder), self._effort, point)

    def _ask(self, request: Request, num_workers: int) -> list[dict[str, Any]]:
        """Send a request to the first workers, and return their answers by global rank.

        Raises:
            WorkerPoolError: a worker failed.
        """
        while len(self._workers) < num_workers:
            self._workers.append(_start(self._folder))
        asked = self._workers[:num_workers]
        answers: list[dict[str, Any]] = []
        try:
            for global_rank, worker in enumerate(asked):
                worker.channel.sendall(json.dumps(asdict(replace(request, global_rank=global_rank))).encode() + b"\n")
            answers = _answers(asked)
        except OSError as error:
            self.close()
            raise WorkerPoolError(f"a worker ended: {error}") from error
        except WorkerPoolError:
            self.close()
            raise
        if problems := [answer["problem"] for answer in answers if "problem" in answer]:
            if num_workers > 1:
                self.close()  # the others may wait in a collective
            raise WorkerPoolError(problems[0])
        return answers


def _start(folder: Path) -> _Worker:
    ours, theirs = socket.socketpair()
    cores = len(os.sched_getaffinity(0))
    environment = {
        "GOMP_SPINCOUNT": SPIN_COUNT,
        **os.environ,
        "OMP_NUM_THREADS": str(cores),  # upper bound for all points
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        variables.HISTORY: "off",  # a user's model may hold our callback
    }
    with (folder / "workers.log").open("ab") as log, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_dlrover.characterize.worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the whole group
        )
    return _Worker(process, ours)


def _answers(workers: Sequence[_Worker]) -> list[dict[str, Any]]:
    """Wait for one line from each worker, or for the first problem.

    Raises:
        WorkerPoolError: a worker ended, or the time is over.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(workers):
        waiting = {worker.channel: i for i, worker in enumerate(workers) if i not in found}
        ready, _, _ = select.select([*waiting], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerPoolError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
        for channel in ready:
            worker = workers[waiting[channel]]
            data = channel.recv(1 << 16)
            if not data:
                try:
                    code = worker.process.wait(END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    raise WorkerPoolError(f"a worker gave no answer and did not end within {END_TIMEOUT_S:.0f} s") from None
                hint = ", perhaps killed for its memory" if code == -signal.SIGKILL else ""
                raise WorkerPoolError(f"a worker ended with exit code {code}{hint}")
            worker.unread += data
            if worker.unread.endswith(b"\n"):
                answer = found[waiting[channel]] = json.loads(worker.unread)
                worker.unread = b""
                if "problem" in answer and len(workers) > 1:
                    return [answer]
    return [found[i] for i in range(len(workers))]
