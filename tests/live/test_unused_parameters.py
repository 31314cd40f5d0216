"""Conditions under which DDP searches for parameters that a step leaves out."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_dlrover.checks import UnsupportedScriptError
from lightning_dlrover.live.replica import LiveStrategy, Replica, UnusedParameters
from lightning_dlrover.rdzv.transport.torch_names import HashStore


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(2, 1), nn.Linear(2, 1)


def after_step(unused: UnusedParameters, *names: str, ignored: Collection[str] = ()) -> bool:
    """Return whether the search is on after a worker alone has used these branches."""
    module = Branches()
    torch.stack([getattr(module, name)(torch.ones(2)).sum() for name in names]).sum().backward()  # type: ignore[no-untyped-call]
    unused.check(cast(LiveStrategy, SimpleNamespace(lightning_module=module, model=module, world_size=1, table_names=ignored)))
    return unused.found


def after_setup(unused: UnusedParameters, is_automatic: bool, num_optimizers: int) -> bool:
    module = SimpleNamespace(automatic_optimization=is_automatic)
    strategy: Any = SimpleNamespace(lightning_module=module, model=None, optimizers=[None] * num_optimizers)
    Replica(strategy, unused).note_optimizers()
    return unused.found


def test_worker_alone_notices_a_branch_without_gradient() -> None:
    assert not after_step(UnusedParameters({}, is_live=True), "used", "other")
    assert after_step(UnusedParameters({}, is_live=True), "used")


def test_tables_are_no_unused_parameters() -> None:
    assert not after_step(UnusedParameters({}, is_live=True), "used", ignored={"other.weight", "other.bias"})


@pytest.mark.parametrize("kwargs", [{"find_unused_parameters": False}, {"static_graph": True}])
def test_users_own_choice_is_kept(kwargs: dict[str, Any]) -> None:
    unused = UnusedParameters(kwargs, is_live=True)
    assert not after_step(unused, "used")
    unused.agree(found=True, is_reporter=True)
    assert not after_setup(unused, is_automatic=False, num_optimizers=2)


@pytest.mark.parametrize(
    ("is_automatic", "num_optimizers", "expected"), [(False, 2, True), (False, 1, False), (True, 1, False), (True, 2, False)]
)
def test_manual_optimizers_of_separate_parts_need_the_search(is_automatic: bool, num_optimizers: int, expected: bool) -> None:
    assert after_setup(UnusedParameters({}, is_live=True), is_automatic, num_optimizers) is expected


def test_workers_of_a_round_take_over_the_unused_parameters() -> None:
    unused = UnusedParameters({}, is_live=True)
    unused.agree(found=True, is_reporter=True)
    assert unused.found


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_search_that_fails_in_reentrant_checkpoints_is_refused_in_words(use_reentrant: bool, group_of_one: None) -> None:
    unused = UnusedParameters({}, is_live=True)
    unused.agree(found=True, is_reporter=True)
    model = DistributedDataParallel(Checkpointed(use_reentrant), find_unused_parameters=True)
    loss = model(torch.ones(2)).sum()
    refused = pytest.raises(UnsupportedScriptError, match="use_reentrant=False") if use_reentrant else contextlib.nullcontext()
    with refused, unused.searching():
        loss.backward()


def test_error_of_the_users_own_search_stays_as_it_is() -> None:
    unused = UnusedParameters({"find_unused_parameters": True}, is_live=True)
    with pytest.raises(RuntimeError, match="ready only once"), unused.searching():
        raise RuntimeError("Expected to mark a variable ready only once")
