"""Collective operations of a round's members beside an exchange: meet, gather plain data, compare, send to each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.group import transfer, waits
from lightning_dlrover.rdzv.live.member import Formation

__all__ = ["all_gather", "largest", "meet", "swap"]

SWAP_S = 300.0
"""Seconds until a message to or from a neighbour fails. gloo does not notice a peer's loss in the middle of one."""


def all_gather(formation: Formation, obj: Any) -> list[Any]:
    """Return plain data of all members, by rank."""
    if formation.size == 1:
        return [obj]
    return [json.loads(text) for text in transfer.all_gather(json.dumps(obj))]


def meet(group: Any) -> None:
    if group is not None:
        waits.wait_for(group.allreduce([torch.zeros(1)]))


def largest(group: Any, values: Mapping[str, int]) -> dict[str, int]:
    """Return the largest of all workers' values, by name. The names must be the same on all of them."""
    numbers = torch.tensor(list(values.values()), dtype=torch.int64)
    if group is not None and len(numbers):
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        waits.wait_for(group.allreduce([numbers], options))
    return dict(zip(values, numbers.tolist(), strict=True))


def swap(group: Any, mine: Mapping[int, torch.Tensor], theirs: Mapping[int, torch.Tensor]) -> None:
    """Send to and receive from several ranks at once."""
    work = [group.recv([values], rank, 0) for rank, values in theirs.items() if len(values)]
    work += [group.send([values], rank, 0) for rank, values in mine.items() if len(values)]
    for each in work:
        each.wait(timedelta(seconds=SWAP_S))
