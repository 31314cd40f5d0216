"""Functions that stock agents run as workers, in a separate module that an agent imports quickly."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from tests.support.elastic_worker import Worker

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def square_of_rank(factor: int) -> torch.Tensor | None:
    rank = int(os.environ["RANK"])
    return torch.full((2, 3), float(factor * rank * rank)) if rank else None


def fail_with_a_reason() -> None:
    raise ValueError(f"rank {os.environ['RANK']} does not feel well")


def sum_of_ranks() -> float:
    Worker.started()
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def ask_the_worker() -> str:
    role = os.environ["ROLE_NAME"]
    rpc.init_rpc(role, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))  # type: ignore[no-untyped-call]
    answer: str = rpc.rpc_sync("worker", str.upper, args=("hello",)) if role == "master" else ""
    rpc.shutdown()
    return answer


def step_with_one_killed() -> int:
    me = Worker.started()
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    for step in range(20):
        dist.all_reduce(torch.ones(1))
        if step == 5 and me.rank == me.world_size - 1 and not me.has("killed"):
            me.leave("killed")
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
    return me.world_size


def step_until_done() -> int:
    """Make steps until the test leaves its mark, and return the size of the world. A lost peer makes a step raise."""
    me = Worker.started()
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    is_done = torch.zeros(1)
    while not is_done:
        is_done = torch.tensor([float(me.has("done"))])
        dist.all_reduce(is_done)
        me.leave(f"stepped-in-{me.world_size}")
        time.sleep(0.01)
    dist.destroy_process_group()
    return me.world_size
