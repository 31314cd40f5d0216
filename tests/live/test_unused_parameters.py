"""Conditions under which DDP searches for parameters that a step leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dlrover.live.unused_parameters import UnusedParameters


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(2, 1), nn.Linear(2, 1)


def after_step(unused: UnusedParameters, *names: str, ignored: set[str] | None = None) -> bool:
    """Return whether the search is on after a worker alone has used these branches."""
    module = Branches()
    torch.stack([getattr(module, name)(torch.ones(2)).sum() for name in names]).sum().backward()  # type: ignore[no-untyped-call]
    unused.check(module, module, lambda: ignored or set(), num_workers=1, is_reporter=True)
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
    unused.note_optimizers(is_automatic=False, num_optimizers=2)
    assert not unused.found


def test_manual_optimizers_of_separate_parts_need_the_search() -> None:
    for is_automatic, num_optimizers, expected in ((False, 2, True), (False, 1, False), (True, 1, False)):
        unused = UnusedParameters({}, is_live=True)
        unused.note_optimizers(is_automatic, num_optimizers)
        assert unused.found is expected


def test_workers_of_a_round_take_over_the_unused_parameters() -> None:
    unused = UnusedParameters({}, is_live=True)
    unused.agree(found=True, is_reporter=True)
    assert unused.found
