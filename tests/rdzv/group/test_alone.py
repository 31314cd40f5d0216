"""The world of a script that was started by hand supports every call of a job's world."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.desync import CollectiveCall
from lightning_dlrover.rdzv.group.world import LoneWorld, World
from lightning_dlrover.rdzv.job.events import FitFinished
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.membership.member import WorldError
from lightning_dlrover.rdzv.transport.transfer import pack

PUBLIC = sorted(name for name in vars(World) if not name.startswith("_") and name != "from_environment")
ATTRIBUTES = ["backend", "config", "membership", "num_fits", "place", "standing", "wishes"]

REFUSED = {"admit", "config", "connect", "membership", "records", "recover", "standing", "switch", "view"}
"""Calls that need other workers, or the records of a job."""

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "admit": (b"", ""),
    "all_reach": ("here",),
    "alone": ("reason",),
    "announce": ("model",),
    "compared": (lambda: CollectiveCall("test"),),
    "connect": (RoundRecord(1, [], "", "start", planned=True), "name", []),
    "event": (FitFinished(3), "text"),
    "finish": (3,),
    "guard": (None,),
    "wait_for_device": (torch.device("cpu"),),
    "is_failure": (RuntimeError("Connection closed by peer"),),
    "is_recoverable": (RuntimeError("Connection closed by peer"), True),
    "is_stop": (1,),
    "keep_for_successors": (1, pack({})),
    "recover": (b"",),
    "report_error": (RuntimeError("mistake"),),
    "steps": (1,),
    "switch": (2, b""),
}


@pytest.fixture
def world() -> Iterator[LoneWorld]:
    with LoneWorld() as made:
        yield made


@pytest.mark.parametrize("name", [*PUBLIC, *ATTRIBUTES])
def test_every_call_works_or_is_refused(name: str, world: LoneWorld) -> None:
    refused = pytest.raises(WorldError, match=r"runs outside a job.*start the script with torchrun")
    with refused if name in REFUSED else contextlib.nullcontext():
        found = getattr(world, name)
        if name in PUBLIC and not isinstance(vars(World)[name], property):
            assert inspect.signature(getattr(World, name)).parameters == inspect.signature(getattr(LoneWorld, name)).parameters
            found(*ARGUMENTS.get(name, ()))


def test_attributes_of_a_job_are_known() -> None:
    source = inspect.getsource(World.__init__)
    assert sorted(name for name in ATTRIBUTES if f"self.{name}" in source) == ATTRIBUTES


def test_lone_worker_makes_all_steps(world: LoneWorld) -> None:
    model = torch.nn.Linear(2, 2)
    places = []
    for step in world.steps(3, model=model):
        with step:
            dist.all_reduce(torch.ones(1))
            places.append((step.number, step.rank, step.size, world.has_finished))
    assert places == [(0, 0, 1, False), (1, 0, 1, False), (2, 0, 1, False)]
    assert world.has_finished
