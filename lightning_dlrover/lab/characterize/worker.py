"""One worker process: reads requests as lines of JSON from a socket, measures, and answers.

It ends when the socket closes, and with its parent, whatever kills that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_dlrover.codec import from_fields
from lightning_dlrover.lab.characterize.measure import (
    Effort,
    Share,
    measure,
    measure_limit,
    measure_users_model,
    normalized_entropy,
)
from lightning_dlrover.lab.characterize.points import Point, die_with_parent

GROUP_TIMEOUT_S = 60.0
NUM_SEEDS = 3


@dataclass(frozen=True)
class Request:
    """One measurement, as every worker in it receives it; `global_rank` differs."""

    number: int
    global_rank: int
    num_workers: int
    store_port: int
    folder: str
    effort: Effort
    point: Point | None = None
    limit: str = ""
    threads: int = 1


def main() -> None:
    parent = int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rwb") as lines:
        for line in lines:
            try:
                answer = _answer(from_fields(Request, json.loads(line), "a request"))
            except Exception as error:
                answer = {"problem": f"{type(error).__name__}: {error}".splitlines()[0][:400]}
            lines.write(json.dumps(answer).encode() + b"\n")
            lines.flush()


def _answer(request: Request) -> dict[str, Any]:
    folder = Path(request.folder)
    with _group(request):
        if request.point is None:
            return {"blocks": measure_limit(request.limit, request.threads, folder)}
        point = request.point
        if point.model:
            return asdict(measure_users_model(point, request.effort))
        if point.measures_loss:
            losses = tuple(normalized_entropy(point, seed) for seed in range(NUM_SEEDS))
            return asdict(Share(losses, {}, 0.0, 0, 0.0, 0, None))
        return asdict(measure(point, request.global_rank, request.effort, folder))


@contextlib.contextmanager
def _group(request: Request) -> Iterator[None]:
    """Form the process group of one request. Tables divided over workers need one even for a worker alone."""
    point = request.point
    if request.num_workers == 1 and (point is None or point.placement in ("local", "replicated")):
        yield
        return
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    store = TCPStore("127.0.0.1", request.store_port, is_master=False, timeout=timeout)
    prefixed = PrefixStore(f"visit{request.number}", store)
    dist.init_process_group("gloo", store=prefixed, rank=request.global_rank, world_size=request.num_workers, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
