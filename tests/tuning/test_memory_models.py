"""Models of a worker's memory: allocators, safety margin, peak and growth."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.tuning import MemoryModel, StepProfile, configuration_of
from lightning_dlrover.tuning.memory import (
    DEFAULT_SHARE,
    LEADS,
    MAX_RECORDS,
    MIN_SHARE,
    CudaCache,
    Event,
    Footprint,
    GrowthSituation,
    MemoryForecast,
    MemoryMargin,
    choose_remedy,
    forecast_memory,
    inherited_forecast,
    least_workers,
)
from tests.support.windows import MIB, memory_window, window


def test_margin_without_records_is_the_default() -> None:
    assert MemoryMargin.of().bytes_for(1000) == DEFAULT_SHARE * 1000


def test_one_large_error_raises_the_margin_at_once() -> None:
    assert MemoryMargin.of([(100, 140)]).share == pytest.approx(0.4)


def test_few_good_records_do_not_shrink_the_margin() -> None:
    assert MemoryMargin.of([(100, 100)] * 18).share == DEFAULT_SHARE
    assert MemoryMargin.of([(100, 100)] * 19).share == MIN_SHARE


def test_margin_covers_new_jobs_as_often_as_the_risk_allows() -> None:
    draw = random.Random(0)
    missed = 0
    for _ in range(400):
        errors = [draw.gauss(0.0, 0.1) for _ in range(60)]
        margin = MemoryMargin.of([(1_000_000, round(1_000_000 * (1 + error))) for error in errors], risk=0.1)
        missed += draw.gauss(0.0, 0.1) > margin.share
    assert 0.05 < missed / 400 < 0.13


def test_old_records_are_forgotten() -> None:
    assert MemoryMargin.of([(100, 300)] * MAX_RECORDS + [(100, 101)] * MAX_RECORDS).share == MIN_SHARE


@pytest.mark.parametrize("record", [(0, 10), (10, 0), (-1, 10)])
def test_record_without_both_figures_is_refused(record: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"memory record 1 of 2 .* leave out jobs"):
        MemoryMargin.of([(10, 10), record])


@pytest.mark.parametrize("risk", [0.0, 1.0, -0.1])
def test_risk_outside_its_range_is_refused(risk: float) -> None:
    with pytest.raises(ValueError, match=f"risk={risk}"):
        MemoryMargin.of([], risk)


# --- allocators --------------------------------------------------------------------------------------------------------------


def served(events: list[Event]) -> Footprint:
    found = Footprint(CudaCache())
    for event in events:
        found.add(event)
    return found


@pytest.mark.parametrize(
    ("num_bytes", "reserved"), [(1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12), (33 * MIB, 34)]
)
def test_first_request_reserves_the_documented_segment(num_bytes: int, reserved: int) -> None:
    assert served([(1, num_bytes)]).peak_held_bytes == reserved * MIB


def test_freed_memory_serves_the_next_request_of_its_size() -> None:
    assert served([(1, 40 * MIB), (1, 0), (2, 40 * MIB)]).peak_held_bytes == 40 * MIB


def test_small_and_large_requests_do_not_share_a_segment() -> None:
    assert served([(1, 12 * MIB), (1, 0), (2, 1000)]).peak_held_bytes == 14 * MIB


def test_neighbours_merge_when_both_are_free() -> None:
    assert served([(1, 8 * MIB), (2, 8 * MIB), (1, 0), (2, 0), (3, 9 * MIB), (4, 9 * MIB)]).peak_held_bytes == 20 * MIB


def test_holes_that_are_too_small_cost_memory() -> None:
    found = served([(1, 10 * MIB), (2, 10 * MIB), (1, 0), (2, 0), (3, 20 * MIB)])
    assert (found.peak_held_bytes, found.peak_live_bytes, found.peak_at) == (40 * MIB, 20 * MIB, 2)


def test_held_memory_is_never_below_the_live_one() -> None:
    draw = random.Random(1)
    found = Footprint(cache := CudaCache())
    live: list[int] = []
    for handle in range(1, 3000):
        if live and draw.random() < 0.5:
            found.add((live.pop(draw.randrange(len(live))), 0))
        else:
            found.add((handle, int(2 ** draw.uniform(4, 25))))
            live.append(handle)
        assert cache.held_bytes >= found.live_bytes
    for handle in live:
        found.add((handle, 0))
    assert found.live_bytes == 0


@pytest.mark.parametrize("events", [[(1, 0)], [(1, 5), (1, 5)], [(1, -5)]])
def test_impossible_event_is_refused(events: list[Event]) -> None:
    with pytest.raises(ValueError, match=r"event \d gives handle 1 .* allocate each handle once"):
        served(events)


# --- peaks -------------------------------------------------------------------------------------------------------------------


TABLES = 768 * MIB


def grown(
    workers: int = 1, *, batch: int = 64, loaders: int = 0, prefetch: int = 2, tables: int = 0, peak: float = 0.0
) -> StepProfile:
    """A window with a peak that follows its own rule, unless `peak` is given."""
    by_rule = 300 * MIB + 0.5 * MIB * batch + loaders * (80 * MIB + 0.1 * MIB * prefetch * batch) + 1.5 * tables / workers
    return replace(
        window(workers, 0.1, global_batch=batch * workers, dense_bytes=8 * MIB),
        loader_workers=loaders,
        prefetch_factor=prefetch,
        embedding_bytes=tables,
        peak_memory_bytes=int(peak or by_rule),
        memory_bytes=0,
    )


def test_a_rule_of_named_terms_is_found_and_holds_far_beyond_the_samples() -> None:
    seen = [
        grown(workers, batch=batch, loaders=loaders, tables=TABLES)
        for workers, batch, loaders in itertools.product((1, 2), (16, 64), (0, 1, 2))
    ]
    far = grown(4, batch=512, loaders=4, prefetch=4, tables=TABLES)
    predicted = MemoryModel.fit(seen).predict(configuration_of(far))
    assert predicted.peak_bytes == pytest.approx(far.peak_memory_bytes, rel=0.05)
    assert predicted.low_bytes < far.peak_memory_bytes < predicted.high_bytes


def test_one_sample_suffices_and_larger_inputs_never_need_less() -> None:
    model = MemoryModel.fit([grown(batch=64)])
    here = configuration_of(grown(batch=64))
    peak = model.predict(here).peak_bytes
    assert peak == pytest.approx(grown(batch=64).peak_memory_bytes, rel=0.05)
    for more in (
        replace(here, local_batch=128),
        replace(here, loader_workers=2),
        replace(here, loader_workers=2, prefetch_factor=8),
        replace(here, embedding_bytes=TABLES),
    ):
        assert model.predict(more).peak_bytes >= peak


def test_more_workers_hold_less_of_the_tables_each() -> None:
    model = MemoryModel.fit([grown(w, tables=TABLES) for w in (1, 2)])
    peaks = [model.predict(configuration_of(grown(w, tables=TABLES))).peak_bytes for w in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.5 * peaks[-1]


def test_interval_is_wider_beyond_the_measured_range() -> None:
    model = MemoryModel.fit([grown(batch=b) for b in (16, 32, 64, 128, 256)])
    near, far = (model.predict(configuration_of(grown(batch=b))) for b in (100, 10_000))
    assert far.high_bytes / far.peak_bytes > 1.05 * near.high_bytes / near.peak_bytes


def test_no_peaks_are_refused() -> None:
    with pytest.raises(ValueError, match="none of 1 samples has peak_memory_bytes"):
        MemoryModel.fit([replace(window(1, 0.1), memory_bytes=0)])


def test_a_negative_peak_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 1 \(worker 'w0'.* has peak_memory_bytes=-5"):
        MemoryModel.fit([grown(), replace(grown(), peak_memory_bytes=-5)])


# --- measured ---


def measured(configurations: Sequence[dict[str, int]]) -> list[StepProfile]:
    """Peaks of processes that trained in these configurations."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("memory_worker.py"))],
        input="".join(json.dumps(configuration) + "\n" for configuration in configurations),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(configurations), done.stderr[-2000:]
    return [
        grown(
            row["num_workers"],
            batch=row["local_batch"],
            loaders=row["loader_workers"],
            prefetch=row["prefetch_factor"],
            tables=row["embedding_bytes"],
            peak=row["peak_memory_bytes"],
        )
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.timeout(700)
def test_measured_peaks_of_held_out_configurations_are_predicted() -> None:
    grid = [
        {
            "local_batch": batch,
            "loader_workers": loaders,
            "prefetch_factor": prefetch,
            "num_workers": workers,
            "embedding_bytes": TABLES,
        }
        for batch, (loaders, prefetch), workers in itertools.product((16, 64, 256), ((0, 2), (1, 2), (2, 2), (2, 4)), (1, 2, 4))
    ]
    random.Random(0).shuffle(grid)
    profiles = measured(grid[:14])
    model = MemoryModel.fit(profiles[:8])
    held_out = profiles[8:]
    predictions = [model.predict(configuration_of(p)) for p in held_out]
    errors = [abs(p.peak_bytes / h.peak_memory_bytes - 1) for p, h in zip(predictions, held_out, strict=True)]
    inside = [p.low_bytes <= h.peak_memory_bytes <= p.high_bytes for p, h in zip(predictions, held_out, strict=True)]
    usual = statistics.median(p.peak_memory_bytes for p in profiles[:8])
    by_the_usual = statistics.median(abs(usual / h.peak_memory_bytes - 1) for h in held_out)
    assert statistics.median(errors) <= 0.10
    assert statistics.median(errors) < by_the_usual / 2  # the configurations do differ
    assert sum(inside) >= 5


# --- growth ------------------------------------------------------------------------------------------------------------------


def forecast_of(windows: list[StepProfile]) -> MemoryForecast:
    forecast = forecast_memory(windows)
    assert forecast is not None
    return forecast


def growing(per_step_mib: float, num: int = 12, noise_mib: float = 3.0, seed: int = 0) -> list[StepProfile]:
    rng = random.Random(seed)
    windows = [memory_window(i, 400 + per_step_mib * 20 * (i + 1) + rng.uniform(-noise_mib, noise_mib)) for i in range(num)]
    return [memory_window(0, 300), memory_window(1, 350), *[replace(w, first_step=w.first_step + 40) for w in windows]]


@pytest.mark.parametrize("per_step_mib", [0.2, 0.5, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_steady_growth_is_extrapolated_to_the_limit_less_a_reserve(per_step_mib: float, seed: int) -> None:
    forecast = forecast_of(growing(per_step_mib, seed=seed))
    assert forecast.bytes_per_step == pytest.approx(per_step_mib * MIB, rel=0.1)
    expected = (950 - (400 + per_step_mib * 240)) / per_step_mib
    assert forecast.steps_left == pytest.approx(expected, rel=0.15)
    assert forecast.earliest_steps_left <= forecast.steps_left
    assert forecast.seconds_left == pytest.approx(forecast.steps_left * 0.1)


def test_a_few_odd_windows_do_not_move_the_forecast() -> None:
    windows = growing(0.5, num=20)
    odd = [replace(w, memory_bytes=w.memory_bytes + 300 * MIB) if i in (6, 12) else w for i, w in enumerate(windows)]
    plain, disturbed = forecast_of(windows), forecast_of(odd)
    assert disturbed.steps_left == pytest.approx(plain.steps_left, rel=0.1)


@pytest.mark.parametrize("seed", range(50))
def test_memory_that_only_fluctuates_does_not_grow(seed: int) -> None:
    assert forecast_memory(growing(0.0, num=30, noise_mib=20.0, seed=seed)) is None


def test_allocations_at_the_start_of_a_round_do_not_count_as_growth() -> None:
    settling = [memory_window(0, 300), memory_window(1, 500), *[memory_window(i, 600) for i in range(2, 12)]]
    assert forecast_memory(settling) is None
    changed = [memory_window(i, 300, 1) for i in range(10)] + [memory_window(10 + i, 600, 2) for i in range(10)]
    assert forecast_memory(changed) is None


@pytest.mark.parametrize("before", [3, 10, 30])
@pytest.mark.parametrize("after", [2, 5, 10, 30])
@pytest.mark.parametrize("seed", range(3))
def test_memory_that_was_taken_at_once_does_not_grow(before: int, after: int, seed: int) -> None:
    rng = random.Random(seed)
    levels = [300, 350, *[400.0] * before, *[600.0] * after]
    windows = [memory_window(i, level + rng.uniform(-3, 3)) for i, level in enumerate(levels)]
    for number in range(1, len(windows) + 1):
        assert forecast_memory(windows[:number]) is None


def test_loader_workers_that_start_one_by_one_do_not_count_as_growth() -> None:
    windows = [replace(memory_window(i, 400 + 60 * (i // 5)), loader_workers=i // 5, prefetch_factor=2) for i in range(25)]
    for number in range(1, len(windows) + 1):
        assert forecast_memory(windows[:number]) is None


@pytest.mark.parametrize("num_flat", [0, 10, 30])
def test_growth_that_began_late_is_seen(num_flat: int) -> None:
    levels = [400.0] * (num_flat + 2) + [400 + 20.0 * i for i in range(25)]
    windows = [memory_window(i, level + random.Random(i).uniform(-3, 3)) for i, level in enumerate(levels)]
    first = next(n for n in range(len(windows) + 1) if forecast_memory(windows[:n]) is not None)
    assert levels[first - 1] < 850


def test_a_peak_inside_of_a_window_counts() -> None:
    windows = growing(0.5)
    peaks = [replace(w, peak_memory_bytes=w.memory_bytes + 200 * MIB) for w in windows]
    low, high = forecast_memory(windows), forecast_memory(peaks)
    assert low is not None
    assert high is not None
    assert low.steps_left - high.steps_left == pytest.approx(400, rel=0.1)  # 200 MiB at half a MiB a step


def test_allocations_in_the_first_seconds_of_a_process_do_not_count_as_growth() -> None:
    windows = growing(0.5)
    assert forecast_memory(windows) is not None
    assert forecast_memory([replace(w, step_time_s=0.02) for w in windows]) is None


def test_nothing_is_predicted_without_a_limit_or_from_few_windows() -> None:
    assert forecast_memory([replace(w, memory_limit_bytes=0) for w in growing(0.5)]) is None
    assert forecast_memory(growing(0.5)[:6]) is None
    assert forecast_memory([]) is None
    with pytest.raises(ValueError, match="several workers"):
        forecast_memory([memory_window(0, 300), replace(memory_window(1, 300), worker_id="v")])


FORECAST = MemoryForecast(700 * MIB, 200 * MIB, 1000 * MIB, 1.0 * MIB, 250.0, 200.0, 0.1)  # 25 s, 20 s at the earliest
SITUATION = GrowthSituation(
    remaining_steps=1000, lead_s=10.0, num_workers=2, max_workers=4, can_add=True, can_replace=True, has_sharded_tables=False
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


@pytest.mark.parametrize(("sizes", "expected"), [((1, 2, 4), 4), ((2, 3, 4), 3)])
def test_workers_against_a_lack_of_memory_are_added_up_to_a_size(sizes: tuple[int, ...], expected: int) -> None:
    situation = replace(SITUATION, has_sharded_tables=True, remaining_steps=300, sizes=WorldSizes(sizes))
    assert choose_remedy(FORECAST, situation).num_workers == expected


def test_replacement_of_the_same_size_inherits_the_forecast() -> None:
    same = inherited_forecast(memory_window(3, 750), FORECAST)
    assert same is not None
    assert same.steps_left == pytest.approx(200)  # 950 - 750 MiB, 1 MiB a step
    assert same.earliest_steps_left == pytest.approx(160)
    assert inherited_forecast(memory_window(3, 450), FORECAST) is None


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


def test_larger_node_has_room_for_the_spare_process() -> None:
    forecast = MemoryForecast(700 * MIB, 200 * MIB, 1000 * MIB, 0.3875 * MIB, 600, 500, 0.1)
    situation = GrowthSituation(4000, 30.0, 2, 4, True, True, True, max_memory_bytes=4000 * MIB)
    without, with_spare = (choose_remedy(forecast, replace(situation, spare_bytes=size)) for size in (0, 512 * MIB))
    assert with_spare.node_memory_bytes - without.node_memory_bytes == 512 * MIB


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
    assert "nothing starts workers" in remedy.reason
    assert "in 25 s (20 s at the earliest)" in remedy.reason


def test_workers_that_memory_asked_for_are_kept() -> None:
    assert least_workers([]) == 0
    assert least_workers([("add_workers", 3), ("replace", 4), ("add_workers", 2)]) == 3


def test_memory_is_raised_in_place_before_anything_else_where_that_is_possible() -> None:
    forecast = MemoryForecast(700 * MIB, 200 * MIB, 1000 * MIB, 0.4 * MIB, 600, 500, 0.1)
    situation = GrowthSituation(4000, 30.0, 2, 4, True, True, False, max_memory_bytes=4000 * MIB, can_raise=True)
    for has_tables in (False, True):
        remedy = choose_remedy(forecast, replace(situation, has_sharded_tables=has_tables))
        assert (remedy.act, remedy.node_memory_bytes) == ("raise", 3072 * MIB)
        assert remedy.reason.endswith("its node gets 3072 instead of 1000 MiB in place")
    assert choose_remedy(forecast, replace(situation, max_memory_bytes=1000 * MIB)).act == "replace"
    assert choose_remedy(forecast, replace(situation, can_raise=False)).act == "replace"
