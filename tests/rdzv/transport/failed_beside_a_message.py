"""A worker whose collective fails while one of its messages is on its way, for `test_dead_sockets.py`.

    python failed_beside_a_message.py FOLDER

Of four workers that reduce in a ring, rank 2 is killed while rank 1 waits for rank 0, so that the reduction of rank 1 fails.
Prints, as JSON, the share of a core that rank 1 uses then while it does nothing, and once more after its sockets were silenced.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.transport.process_groups import inet_sockets
from lightning_dlrover.rdzv.transport.waits import silence

SECONDS = 0.4


def idle_share() -> float:
    began_s = time.process_time()
    time.sleep(SECONDS)
    return (time.process_time() - began_s) / SECONDS


def watched(store: Any, victim: int) -> list[float]:
    work = dist.all_reduce(torch.ones(64), async_op=True)
    assert work is not None
    time.sleep(0.1)  # until it waits for rank 0
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    store.set("killed", "1")
    with contextlib.suppress(RuntimeError):
        work.wait()
    shares = [idle_share()]
    silence(inet_sockets().items())
    return [*shares, idle_share()]


def main(folder: Path) -> None:
    peers = []
    rank = 1
    for other in (0, 2, 3):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
            rank = other
            break
        peers.append(pid)
    store = dist.FileStore(str(folder / "store"), 4)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    dist.barrier()
    if rank != 1:
        store.wait(["killed"])
        _work = dist.all_reduce(torch.ones(64), async_op=True)
        time.sleep(60)
    print(json.dumps(watched(store, peers[1])), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
