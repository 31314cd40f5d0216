"""The benchmark of the planner's settings runs in its short form and says what its documentation promises."""

from __future__ import annotations

import os

import pytest
from test_benchmarks import DEADLINE_S, quick_result


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DLROVER_ALL_FAULTS"), reason="takes minutes: with DLROVER_ALL_FAULTS=1 only")
@pytest.mark.timeout(DEADLINE_S + 40)
def test_what_the_planner_chooses_is_compared_with_the_best_of_a_grid() -> None:
    result = quick_result("auto_config.py")
    assert list(result) == ["cold_min", "warm_min", "visited_max"]
    # How good it is takes a quiet machine; that it is of the order of the best is seen on any.
    assert 0.2 < result["cold_min"] < 5
    assert 0.2 < result["warm_min"] < 5
    assert 1 <= result["visited_max"] <= 4  # of as many
