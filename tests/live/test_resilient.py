"""Collectives outside of steps, without processes."""

from __future__ import annotations

import pytest
import torch

from lightning_dlrover.live.order import Position
from tests.support.live_parts import a_formation, a_worker, hellos

TWO = hellos(Position(5, 5, False, 0, 0, True), Position(5, 5, False, 0, 0, True))


def test_results_of_earlier_collectives_are_dropped_when_all_have_them() -> None:
    collectives = a_worker("w0", a_formation("w0", TWO)).collectives
    collectives._checked = lambda run: run()
    for _ in range(100):
        collectives.run(lambda: torch.ones(1000))
    assert list(collectives._results) == [(5, 100)]


@pytest.mark.parametrize("decision", [True, False])
def test_decision_that_a_survivor_took_with_the_lost_worker_holds_for_all(decision: bool) -> None:
    collectives = a_worker("w1", a_formation("w1", TWO)).collectives
    collectives._missed = {(5, 1): decision}
    assert collectives.run(lambda: not decision) is decision
