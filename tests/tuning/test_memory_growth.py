"""Predictions of the time at which memory reaches its limit, and the remedies before it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_dlrover.tuning.memory import (
    LEADS,
    GrowthSituation,
    MemoryForecast,
    choose_remedy,
    forecast_memory,
    inherited_forecast,
    least_workers,
)
from lightning_dlrover.tuning.samples import StepProfile
from tests.support.windows import MIB
from tests.support.windows import memory_window as window


def growing(per_step_mib: float, num: int = 12, noise_mib: float = 3.0, seed: int = 0) -> list[StepProfile]:
    rng = random.Random(seed)
    windows = [window(i, 400 + per_step_mib * 20 * (i + 1) + rng.uniform(-noise_mib, noise_mib)) for i in range(num)]
    return [window(0, 300), window(1, 350), *[replace(w, first_step=w.first_step + 40) for w in windows]]


@pytest.mark.parametrize("per_step_mib", [0.2, 0.5, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_steady_growth_is_extrapolated_to_the_limit_less_a_reserve(per_step_mib: float, seed: int) -> None:
    forecast = forecast_memory(growing(per_step_mib, seed=seed))
    assert forecast is not None
    assert forecast.bytes_per_step == pytest.approx(per_step_mib * MIB, rel=0.1)
    expected = (950 - (400 + per_step_mib * 240)) / per_step_mib
    assert forecast.steps_left == pytest.approx(expected, rel=0.15)
    assert forecast.earliest_steps_left <= forecast.steps_left
    assert forecast.seconds_left == pytest.approx(forecast.steps_left * 0.1)


def test_a_few_odd_windows_do_not_move_the_forecast() -> None:
    windows = growing(0.5, num=20)
    odd = [replace(w, memory_bytes=w.memory_bytes + 300 * MIB) if i in (6, 12) else w for i, w in enumerate(windows)]
    plain, disturbed = forecast_memory(windows), forecast_memory(odd)
    assert plain is not None
    assert disturbed is not None
    assert disturbed.steps_left == pytest.approx(plain.steps_left, rel=0.1)


@pytest.mark.parametrize("seed", range(50))
def test_memory_that_only_fluctuates_does_not_grow(seed: int) -> None:
    assert forecast_memory(growing(0.0, num=30, noise_mib=20.0, seed=seed)) is None


def test_allocations_at_the_start_of_a_round_are_no_growth() -> None:
    settling = [window(0, 300), window(1, 500), *[window(i, 600) for i in range(2, 12)]]
    assert forecast_memory(settling) is None
    changed = [window(i, 300, 1) for i in range(10)] + [window(10 + i, 600, 2) for i in range(10)]
    assert forecast_memory(changed) is None


@pytest.mark.parametrize("before", [3, 10, 30])
@pytest.mark.parametrize("after", [2, 5, 10, 30])
@pytest.mark.parametrize("seed", range(3))
def test_memory_that_was_taken_at_once_does_not_grow(before: int, after: int, seed: int) -> None:
    rng = random.Random(seed)
    levels = [300, 350, *[400.0] * before, *[600.0] * after]
    windows = [window(i, level + rng.uniform(-3, 3)) for i, level in enumerate(levels)]
    for number in range(1, len(windows) + 1):
        assert forecast_memory(windows[:number]) is None


def test_loader_workers_that_come_one_after_the_other_are_no_growth() -> None:
    windows = [replace(window(i, 400 + 60 * (i // 5)), loader_workers=i // 5, prefetch_factor=2) for i in range(25)]
    for number in range(1, len(windows) + 1):
        assert forecast_memory(windows[:number]) is None


@pytest.mark.parametrize("num_flat", [0, 10, 30])
def test_growth_that_began_late_is_seen(num_flat: int) -> None:
    levels = [400.0] * (num_flat + 2) + [400 + 20.0 * i for i in range(25)]
    windows = [window(i, level + random.Random(i).uniform(-3, 3)) for i, level in enumerate(levels)]
    first = next(n for n in range(len(windows) + 1) if forecast_memory(windows[:n]) is not None)
    assert levels[first - 1] < 850


def test_a_peak_inside_of_a_window_counts() -> None:
    windows = growing(0.5)
    peaks = [replace(w, peak_memory_bytes=w.memory_bytes + 200 * MIB) for w in windows]
    low, high = forecast_memory(windows), forecast_memory(peaks)
    assert low is not None
    assert high is not None
    assert low.steps_left - high.steps_left == pytest.approx(400, rel=0.1)  # 200 MiB at half a MiB a step


def test_allocations_of_a_process_first_seconds_are_no_growth() -> None:
    windows = growing(0.5)
    assert forecast_memory(windows) is not None
    assert forecast_memory([replace(w, step_time_s=0.02) for w in windows]) is None


def test_nothing_is_predicted_without_a_limit_or_from_few_windows() -> None:
    assert forecast_memory([replace(w, memory_limit_bytes=0) for w in growing(0.5)]) is None
    assert forecast_memory(growing(0.5)[:6]) is None
    assert forecast_memory([]) is None
    with pytest.raises(ValueError, match="several workers"):
        forecast_memory([window(0, 300), replace(window(1, 300), worker_id="v")])


FORECAST = MemoryForecast(700 * MIB, 200 * MIB, 1000 * MIB, 1.0 * MIB, 250.0, 200.0, 0.1)  # 25 s, 20 s at the earliest
SITUATION = GrowthSituation(
    remaining_steps=1000,
    lead_s=10.0,
    num_workers=2,
    max_workers=4,
    can_add=True,
    can_replace=True,
    has_sharded_tables=False,
)


def test_a_job_that_ends_before_needs_nothing() -> None:
    assert choose_remedy(FORECAST, replace(SITUATION, remaining_steps=190)).act == "none"
    assert choose_remedy(FORECAST, replace(SITUATION, remaining_steps=210)).act != "none"


def test_it_is_acted_on_early_enough_and_not_earlier() -> None:
    assert choose_remedy(FORECAST, replace(SITUATION, lead_s=20.0 / LEADS - 0.1)).act == "wait"
    assert choose_remedy(FORECAST, replace(SITUATION, lead_s=20.0 / LEADS + 0.1)).act == "replace"


def test_leak_ends_with_its_process_and_tables_shrink_with_workers() -> None:
    assert choose_remedy(FORECAST, SITUATION).act == "replace"
    more = choose_remedy(FORECAST, replace(SITUATION, has_sharded_tables=True))
    assert (more.act, more.num_workers) == ("add_workers", 4)
    # 2 x 200 MiB that have grown and 2 x 300 that will: 1,000 MiB over 3 workers, which hold 500 MiB beside it.
    some = choose_remedy(FORECAST, replace(SITUATION, has_sharded_tables=True, remaining_steps=300))
    assert (some.act, some.num_workers) == ("add_workers", 3)


def test_replacement_of_the_same_size_inherits_the_forecast() -> None:
    same = inherited_forecast(window(3, 750), FORECAST)
    assert same is not None
    assert same.steps_left == pytest.approx(200)  # 950 - 750 MiB, 1 MiB a step
    assert same.earliest_steps_left == pytest.approx(160)
    assert inherited_forecast(window(3, 450), FORECAST) is None


def test_measure_that_did_not_help_is_not_repeated() -> None:
    second = choose_remedy(FORECAST, replace(SITUATION, tried=["replace"]))
    assert second.act == "add_workers"
    assert "a new worker in its place did not help" in second.reason
    last = choose_remedy(FORECAST, replace(SITUATION, tried=["replace", "add_workers"]))
    assert last.act == "checkpoint"


@pytest.mark.parametrize(("remaining", "expected_mib"), [(4000, 3072), (None, 2304), (40_000, 4000)])
def test_larger_node_covers_the_forecast_within_its_limit(remaining: int | None, expected_mib: int) -> None:
    forecast = MemoryForecast(700 * MIB, 200 * MIB, 1000 * MIB, 0.3875 * MIB, 600, 500, 0.1)
    situation = GrowthSituation(remaining, 30.0, 2, 4, True, True, True, max_memory_bytes=4000 * MIB)
    remedy = choose_remedy(forecast, situation)
    assert remedy.act == "enlarge"
    assert remedy.node_memory_bytes / MIB == pytest.approx(expected_mib, abs=1)
    assert f"a node of {expected_mib} instead of 1000 MiB" in remedy.reason


def test_larger_node_is_requested_only_within_limits_and_after_leaks() -> None:
    forecast = MemoryForecast(700 * MIB, 200 * MIB, 1000 * MIB, 0.4 * MIB, 600, 500, 0.1)
    situation = GrowthSituation(4000, 30.0, 2, 4, True, True, False, max_memory_bytes=4000 * MIB)
    assert choose_remedy(forecast, situation).act == "replace"
    assert choose_remedy(forecast, replace(situation, tried=("replace",))).act == "enlarge"
    assert choose_remedy(forecast, replace(situation, tried=("replace", "enlarge"))).act == "add_workers"
    for limit in (0, 1000 * MIB):
        assert choose_remedy(forecast, replace(situation, tried=("replace",), max_memory_bytes=limit)).act == "add_workers"
    assert choose_remedy(forecast, replace(situation, can_replace=False, can_add=False)).act == "checkpoint"


def test_checkpoint_is_written_where_no_controller_starts_workers() -> None:
    remedy = choose_remedy(FORECAST, replace(SITUATION, can_add=False, can_replace=False))
    assert remedy.act == "checkpoint"
    assert "nobody starts workers" in remedy.reason
    assert "in 25 s (20 s at the earliest)" in remedy.reason


def test_workers_that_memory_asked_for_are_kept() -> None:
    assert least_workers([]) == 0
    assert least_workers([("add_workers", 3), ("replace", 4), ("add_workers", 2)]) == 3
