"""Conditions under which shares must stay equal, and how much more than an equal one a worker may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_dlrover.live import agreement
from lightning_dlrover.live.agreement import SpeedShares
from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.tuning.health import Pulse


def shares(option: str = "by-speed", num_loaders: int = 1, needs_equal_shares: bool = False) -> SpeedShares:
    batches = SimpleNamespace(all=[None] * num_loaders)
    trainer = SimpleNamespace(strategy=SimpleNamespace(shares=option), device=torch.device("cpu"))
    position = FitPosition(None, needs_equal_shares=needs_equal_shares)
    return SpeedShares(cast(Any, None), cast(Any, batches), cast(Any, trainer), position, Pulse())


def test_shares_must_be_equal_by_option_with_collectives_and_with_several_loaders() -> None:
    assert shares().largest_share() > 1
    assert shares("equal").largest_share() == 0
    assert shares(needs_equal_shares=True).largest_share() == 0
    assert shares(num_loaders=2).largest_share() == 0


@pytest.mark.parametrize(("free", "largest"), [(0, 1.0), (50, 1.25), (300, 2.5)])
def test_larger_share_takes_at_most_half_of_the_free_memory(free: int, largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "available_bytes", lambda: free)
    monkeypatch.setattr(agreement, "status_bytes", lambda *_: {"VmHWM": 100})
    assert shares().largest_share() == largest
