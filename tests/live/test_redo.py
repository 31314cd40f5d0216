"""Counts of Lightning's loops that are taken back before a step is repeated."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.loops.progress import _OptimizationProgress, _OptimizerProgress, _Progress

from lightning_dlrover.live.recovery import Counts


@pytest.mark.parametrize("make", [_OptimizerProgress, _Progress, _OptimizationProgress])
def test_counts_go_back_to_what_was_taken(make: Any) -> None:
    progress = make()
    of_steps = getattr(getattr(progress, "optimizer", progress), "step", progress)
    of_steps.increment_ready()
    before = progress.state_dict()
    counts = Counts(progress)
    taken = counts.take()
    for _ in range(2):
        of_steps.increment_ready()
        of_steps.increment_completed()
        assert progress.state_dict() != before
        counts.restore(taken)
        assert progress.state_dict() == before
