"""Workers of `large_world.py`, forked from one process that has imported torch, and steered through its standard input.

A worker is a process of its own with all connections and threads of a real one. Only the seconds for its imports are saved,
and the memory that these take. Run with the folder for the workers' records as the only argument. Commands, one per line:

    live INDEX ENDPOINT RUN_ID PAUSE_S   fork a worker of a live job
    stock INDEX SIZE PORT START_AT       fork a rank of a plain gloo group, which connects at that time
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv import World, WorldConfig
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX
from lightning_dlrover.rdzv.membership.rounds import RoundTimeouts

MAX_FILES = 1024
"""Open files that a worker may have, as with `ulimit -n 1024`."""

ETCD_TIMEOUT_S = 30.0
"""Limit on etcd's response: all workers and etcd share a few processors."""

LEASE_TTL_S = 30.0
"""Long, so that no lease expires on a busy machine. A killed worker is detected by other means."""

NO_END = 1_000_000
"""Steps of a job that ends with the benchmark."""

PR_SET_PDEATHSIG = 1


def live_worker(write: Callable[..., None], endpoint: str, run_id: str, index: int, pause_s: float, most: int) -> None:
    """Train in a live job: one small reduction and a pause for each step."""
    etcd = EtcdConfig(endpoint, timeout_s=ETCD_TIMEOUT_S)
    timeouts = RoundTimeouts(start_s=300.0, return_s=2 * LEASE_TTL_S)
    config = WorldConfig(
        *(run_id, DEFAULT_PREFIX, f"a{index}", 0, 1, most, "1"), etcd=etcd, lease_ttl_s=LEASE_TTL_S, timeouts=timeouts
    )
    model = torch.nn.Linear(4, 4)
    with World(config) as world:
        for step in world.steps(NO_END, model=model):
            with step:
                dist.all_reduce(torch.ones(1))
                time.sleep(pause_s)
            if step.was_made and world.formation is not None:
                write(step=step.number, round=world.formation.round.number, size=step.size)


def stock_rank(write: Callable[..., None], rank: int, size: int, port: int, start_at: float) -> None:
    """Connect with plain torch, and reduce one number."""
    time.sleep(max(0.0, start_at - time.time()))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    write(step=0, round=1, size=size)
    dist.all_reduce(torch.ones(1))
    write(step=1, round=1, size=size)
    time.sleep(3600.0)  # the benchmark kills it: leaving is not measured


def _fork(folder: Path, index: int, work: Callable[[Callable[..., None]], None]) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery:
            os._exit(1)
        os.nice(10)  # etcd would not share a worker's processor
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
        output = os.open(folder / f"{index}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        records = os.open(folder / f"{index}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        def write(**line: float) -> None:
            os.write(records, (json.dumps({"at": time.time(), "pid": os.getpid(), **line}) + "\n").encode())

        work(write)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a worker would copy the memory that it shares with this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: a pid that is gone has ended
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["live", index, endpoint, run_id, pause_s, most]:
                work = functools.partial(
                    live_worker,
                    endpoint=endpoint,
                    run_id=run_id,
                    index=int(index),
                    pause_s=float(pause_s),
                    most=int(most),
                )
                print(_fork(folder, int(index), work), flush=True)
            case ["stock", rank, size, port, start_at]:
                work = functools.partial(stock_rank, rank=int(rank), size=int(size), port=int(port), start_at=float(start_at))
                print(_fork(folder, int(rank), work), flush=True)
            case other:
                raise ValueError(f"unknown command: {other}")


if __name__ == "__main__":
    main()
