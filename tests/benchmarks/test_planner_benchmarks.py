"""The benchmarks of the planner's three stages run in their short form and report the promised figures."""

from __future__ import annotations

import pytest
from test_benchmarks import DEADLINE_S, quick_result, takes_minutes

pytestmark = [
    pytest.mark.slow,
    takes_minutes,
    pytest.mark.timeout(DEADLINE_S + 40),
]


def test_planners_choice_is_compared_with_the_best_of_a_grid() -> None:
    result = quick_result("auto_config.py")
    assert list(result) == ["cold_min", "warm_min", "visited_max"]
    # Precise figures need a quiet machine; their order of magnitude shows on any.
    assert 0.2 < result["cold_min"] < 5
    assert 0.2 < result["warm_min"] < 5
    assert 1 <= result["visited_max"] <= 4  # four configurations in all


def test_only_the_slow_worker_is_named_and_replaced() -> None:
    result = quick_result("stragglers.py")
    assert list(result) == ["named_steps", "recovered", "false_alarms"]
    assert 0 < result["named_steps"] < 100
    assert result["recovered"] > 0.5
    assert result["false_alarms"] == 0


def test_leaking_job_finishes_only_if_it_is_watched() -> None:
    assert quick_result("memory_growth.py") == {"static_killed": 1, "finished": 1, "killed": 0, "jobs": 1}
