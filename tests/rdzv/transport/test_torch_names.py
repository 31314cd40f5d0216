"""The private names of torch that live process groups depend on exist in the installed release."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.private_names import MissingNamesError, missing_names
from lightning_dlrover.rdzv import desync, group, transport
from lightning_dlrover.rdzv.desync import MESSAGES, OPERATIONS
from lightning_dlrover.rdzv.transport import torch_names

NEWER = {"all_gather_single", "reduce_scatter_single", "all_to_all_single"}
"""Names that exist only in later releases, as replacements."""


@pytest.fixture
def gloo() -> Iterator[dist.ProcessGroupGloo]:
    """Default group of one worker, as `as_connected` hands it over."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))  # type: ignore[attr-defined]
    with torch_names.as_connected({"gloo": group}):
        dist.init_process_group("gloo", store=torch_names.HashStore(), rank=0, world_size=1)
    yield group
    dist.destroy_process_group()


def test_private_names_exist() -> None:
    assert missing_names(torch_names.NAMES) == []
    listed = {name for names in torch_names.NAMES.values() for name in names}
    own = ast.parse(inspect.getsource(torch_names))
    used = {n.attr for n in ast.walk(own) if isinstance(n, ast.Attribute) and n.attr.startswith("_")}
    modules = {"_C", "_distributed_c10d", "_execution_engine", "_weights_only_unpickler"}
    assert used - modules <= listed


def test_missing_name_is_named_with_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_update_default_pg")
    torch_names.check.cache_clear()
    release = re.escape(importlib.metadata.version("torch"))
    message = rf"torch {release} lacks torch.distributed.distributed_c10d._update_default_pg, which"
    with pytest.raises(MissingNamesError, match=message):
        torch_names.check()
    torch_names.check.cache_clear()


@pytest.mark.parametrize("name", [name for name in (*OPERATIONS, *MESSAGES, "monitored_barrier") if name not in NEWER])
def test_replaced_operation_exists(name: str) -> None:
    assert hasattr(dist.ProcessGroup, name)


def test_other_files_use_no_private_name_of_torch() -> None:
    own = ast.parse(inspect.getsource(torch_names))
    private = {n.attr for n in ast.walk(own) if isinstance(n, ast.Attribute) and n.attr.startswith("_")} | {"_C"}
    rooms = [Path(each.__path__[0]).glob("*.py") for each in (group, transport)]
    for file in chain(*rooms, [Path(str(desync.__file__))]):
        if file.name != "torch_names.py":
            tree = ast.parse(file.read_text())
            attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
            assert not private & {n.attr for n in attributes if ast.unparse(n.value) != "self"}, file
            imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            assert not [name for name in imported if name.startswith("torch._")], file


def test_connected_group_becomes_the_default_groups_backend(gloo: dist.ProcessGroupGloo) -> None:
    assert torch_names.backend_of(dist.group.WORLD, torch.device("cpu")) is gloo


def test_connected_group_is_used_with_torchs_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    any_dist: Any = dist
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    any_dist.set_debug_level_from_env()
    try:
        connected = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))  # type: ignore[attr-defined]
        with torch_names.as_connected({"gloo": connected}):
            dist.init_process_group("gloo", store=torch_names.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        assert torch_names.num_begun(connected) == 1
        dist.destroy_process_group()
    finally:
        monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
        any_dist.set_debug_level_from_env()


def test_begun_collectives_and_kinds_of_works_are_read(gloo: dist.ProcessGroupGloo) -> None:
    before = torch_names.num_begun(gloo)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    assert torch_names.num_begun(gloo) == before + 1
    assert not torch_names.is_point_to_point(work)


def test_callback_runs_after_the_backward_pass() -> None:
    seen = []
    weight = torch.ones(1, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        seen.append(torch_names.is_in_backward())
        torch_names.after_backward(lambda: seen.append("after"))  # type: ignore[arg-type]

    weight.register_hook(hook)  # type: ignore[no-untyped-call]
    weight.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [True, "after"]
    assert not torch_names.is_in_backward()


def test_hooks_of_a_wrapped_model_are_found(gloo: dist.ProcessGroupGloo) -> None:
    replica = DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
    assert not torch_names.has_gradient_hook(replica)
    replica.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    assert torch_names.has_gradient_hook(replica)


@pytest.mark.parametrize("is_retired", [True, False])
def test_model_of_a_broken_pass_that_is_still_held_disturbs_the_next_one(gloo: object, is_retired: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    former = DistributedDataParallel(model)

    def lose(gradient: torch.Tensor) -> None:
        raise RuntimeError("Connection closed by peer")

    broken = next(model.parameters()).register_hook(lose)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="Connection closed"):
        former(torch.ones(1, 2)).sum().backward()
    broken.remove()
    if is_retired:
        torch_names.retire(former)
    replica = DistributedDataParallel(model)
    with contextlib.nullcontext() if is_retired else pytest.raises(RuntimeError, match="ready only once"):
        replica(torch.ones(1, 2)).sum().backward()
