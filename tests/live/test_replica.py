"""One worker's copy of the model: reserved memory, unused parameters, device."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_dlrover.checks import UnsupportedScriptError
from lightning_dlrover.live import replica as memory
from lightning_dlrover.live.replica import LiveStrategy, Replica, UnusedParameters, own_device

ALLOCATE = """
import resource, sys
import pytest
import torch
from lightning_dlrover.live import replica as memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

model = torch.nn.Linear(1000, 4000, bias=False)  # 16 MB
before = model.weight.clone()
print(memory.reserve(model, int(sys.argv[1])))
assert torch.equal(model.weight, before)
for _ in range(8):  # what was freed is kept, too; it takes some rounds until all sizes have found their places
    start = faults()
    blocks = [torch.ones(4_000_000) for _ in range(4)]
    print(faults() - start)
    del blocks
"""
NUM_PAGES = 4 * 16_000_000 // os.sysconf("SC_PAGE_SIZE")


def allocate(num_copies: int, **environ: str) -> tuple[str, list[int]]:
    command = [sys.executable, "-c", ALLOCATE, str(num_copies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environ}, check=True)
    reserved, *faults = done.stdout.split()
    return reserved, [int(n) for n in faults]


def test_reserved_memory_is_there_when_it_is_needed() -> None:
    reserved, faults = allocate(5)
    assert reserved == "True"
    assert faults[0] < NUM_PAGES / 20
    assert faults[-1] < NUM_PAGES / 20


def test_without_a_reservation_every_page_costs() -> None:
    reserved, faults = allocate(5, MALLOC_MMAP_THRESHOLD_="100000")
    assert reserved == "False"
    assert min(faults) > NUM_PAGES * 0.8


def test_embeddings_with_sparse_gradients_are_not_touched() -> None:
    assert memory.reserve(torch.nn.Embedding(1000, 1000, sparse=True), 1_000_000, {})
    assert not memory.reserve(torch.nn.Embedding(1000, 1000), 1_000_000, {})


def test_more_than_half_of_the_available_memory_is_not_reserved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert not memory.reserve(torch.nn.Linear(1000, 1000), 1_000_000)
    assert "not enough memory" in caplog.text


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


def test_tables_are_not_counted_as_unused() -> None:
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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_search_that_fails_in_reentrant_checkpoints_is_explained(use_reentrant: bool, group_of_one: None) -> None:
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


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize("given", [gpus(0), gpus(2), gpus(3, 1), gpus(0, 1, 2, 3)])
def test_workers_of_a_node_have_different_gpus(given: list[torch.device]) -> None:
    found = [own_device(given, local_rank, 4) for local_rank in range(4)]
    assert found[: len(given)] == given
    assert sorted(device.index for device in found) == [0, 1, 2, 3]


def test_worker_without_a_gpu_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="local rank 1 has no GPU of its own, as 1 in all"):
        own_device(gpus(0), 1, 1)


@pytest.mark.parametrize("given, backend", [(gpus(0), "gloo"), ([torch.device("cpu")], None)])
def test_workers_share_a_cpu_and_gpus_with_gloo(given: list[torch.device], backend: str | None) -> None:
    assert [own_device(given, local_rank, 1, backend) for local_rank in range(3)] == given * 3
