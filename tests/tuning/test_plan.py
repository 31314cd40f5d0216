"""A plan: its record, its settings and limits, and the objective that ranks them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.tuning import configuration_of
from lightning_dlrover.tuning.plan import (
    Candidate,
    Decision,
    Limits,
    Objective,
    Prices,
    Resources,
    Settings,
    all_settings,
    configuration,
    objective_from,
    outcome,
    pareto_front,
    parse_prices,
    resources_of,
    settings_of,
    tunable_axes,
    why_not,
)
from tests.support.simulated_jobs import dense_heavy, limits_of, window

seconds = st.floats(1e-6, 1e6)
some_settings = st.builds(Settings, st.integers(1, 64), st.integers(0, 8), st.integers(0, 16), st.integers(0, 8))


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    considered = sorted(draw(st.sets(some_settings, min_size=1, max_size=5)))
    candidates = tuple(
        Candidate(
            settings=settings,
            step_time_s=draw(seconds),
            low_s=draw(seconds),
            high_s=draw(seconds),
            samples_per_s=draw(seconds),
            worth_s=draw(st.floats(-1e9, 1e9)),
            measured=draw(st.booleans()),
            feasible=draw(st.booleans()),
            note=draw(st.text(max_size=10)),
        )
        for settings in considered
    )
    return Decision(
        decision_id=draw(st.integers(0, 1 << 62)),
        at=draw(st.floats(0, 4e9)),
        current=draw(some_settings),
        chosen=draw(st.sampled_from(considered)),
        reason=draw(st.text()),
        candidates=candidates,
        observed_step_time_s=draw(seconds),
        predicted_step_time_s=draw(seconds),
        explored=draw(st.booleans()),
        break_even_s=draw(st.none() | seconds),
        fallback=draw(st.none() | some_settings),
    )


ONE_WORKER, TWO_WORKERS = Settings(1, 0, 1, 0), Settings(2, 0, 1, 0)
GROWN = Candidate(ONE_WORKER, 0.08, 0.075, 0.085, 800.0, 0.0, measured=True, feasible=True)
TWO = Candidate(TWO_WORKERS, 0.04, 0.03, 0.06, 1600.0, 30.0, measured=False, feasible=True)
GROW = Decision(7, 1000.0, ONE_WORKER, TWO_WORKERS, "1 -> 2 workers: twice as fast", (GROWN, TWO), 0.08, 0.04, explored=True)


@given(decisions())
def test_a_decision_comes_back_from_json_as_it_was(decision: Decision) -> None:
    assert Decision.from_data(json.loads(json.dumps(decision.to_data(), allow_nan=False))) == decision


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": {"num_workers": 5, "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": "2", "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": True, "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": 0, "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": 2}},
        {"chosen": 2},
        {"reason": None},
        {"reason": ["a", "b"]},
        {"at": math.nan},
        {"at": "now"},
        {"explored": 1},
        {"candidates": None},
        {"candidates": [3]},
        {"candidates": [{"settings": {"num_workers": 2}}]},
        {"surprise": 1},
    ],
)
def test_malformed_decision_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Decision.from_data({**GROW.to_data(), **change})


def test_a_missing_field_is_named() -> None:
    data = GROW.to_data()
    del data["at"]
    with pytest.raises(ValueError, match="at"):
        Decision.from_data(data)


def test_outcome_compares_measurement_with_prediction() -> None:
    good, bad = outcome(GROW, 0.05), outcome(GROW, 0.1)
    assert good.ratio == pytest.approx(1.25)
    assert good.expected
    assert not bad.expected
    assert good.text == (
        "decision 7, 2x1: 50 ms a step, 1.25 times the 40 ms predicted (inside 30 ms to 60 ms); 1.60 times as fast as with 1x1"
    )


@pytest.mark.parametrize("observed_s", [0.0, -1.0, math.nan, math.inf])
def test_a_decision_is_not_judged_by_an_impossible_time(observed_s: float) -> None:
    with pytest.raises(ValueError, match="decision 7"):
        outcome(GROW, observed_s)


@pytest.mark.parametrize("name", ["num_workers", "loader_workers", "intra_op_threads", "prefetch_factor"])
def test_no_job_runs_with_a_negative_number_of_anything(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(ONE_WORKER, **{name: -1})


# --- settings and limits -----------------------------------------------------------------------------------------------------


ONE = Settings(1, 0, 1, 0)


@given(points=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=30))
@settings(max_examples=200)
def test_front_holds_exactly_the_undominated_settings(points: list[tuple[int, int]]) -> None:
    gain, cost = np.array([p[0] for p in points], float), np.array([p[1] for p in points], float)
    front = pareto_front(gain, cost)

    def beats(a: int, b: int) -> bool:
        return bool(gain[a] >= gain[b] and cost[a] <= cost[b] and (gain[a] > gain[b] or cost[a] < cost[b]))

    unbeaten = {points[i] for i in range(len(points)) if not any(beats(j, i) for j in range(len(points)))}
    assert {points[i] for i in front} == unbeaten
    assert len(front) == len(unbeaten), "equals are on the front twice"
    assert list(cost[front]) == sorted(cost[front])


def test_settings_are_the_product_of_the_axes() -> None:
    limits = Limits(1, 2, loader_workers=(0, 1), intra_op_threads=(1, 2), prefetch_factors=(2, 4))
    found = all_settings(limits, ONE)
    assert len(found) == len(set(found)) == 2 * 2 * (1 + 2)
    assert all((s.prefetch_factor == 0) == (s.loader_workers == 0) for s in found)


def test_size_that_has_failed_is_not_chosen_from() -> None:
    limits = Limits(1, 4, failed_sizes=frozenset({3}))
    assert {settings.num_workers for settings in all_settings(limits, Settings(2, 0, 1, 0))} == {1, 2, 4}
    assert not limits.allows(Settings(3, 0, 1, 0))


def test_setting_without_an_axis_stays_unchanged() -> None:
    now = Settings(2, 3, 5, 7)
    assert all_settings(Limits(1, 3), now) == [Settings(w, 3, 5, 7) for w in (1, 2, 3)]


@pytest.mark.parametrize("cores", [1, 2, 3, 6, 16, 64])
def test_threads_exceed_the_cores_only_if_they_run_already(cores: int) -> None:
    truth = dense_heavy(cores)
    limits = limits_of(truth, 8)
    now = Settings(2, 0, cores, 0)
    current = window(truth, now, random.Random(0), 0.0)
    here = configuration(now, current, limits, float(cores))
    for each in all_settings(limits, now):
        there = configuration(each, current, limits, float(cores))
        refused = why_not(each, here, there, truth.global_batch, limits)
        if each == now:
            assert not refused
        elif not refused and each.intra_op_threads > 1:
            assert each.num_workers * each.intra_op_threads <= cores
    assert max(tunable_axes(cores, cores)["intra_op_threads"]) == cores


def test_worker_has_a_core_per_thread_and_loader_worker_on_larger_nodes() -> None:
    current = replace(window(dense_heavy(8), ONE, random.Random(0), 0.0), cores=2.0)

    def cores(limits: Limits, threads: int, loaders: int) -> float:
        return configuration(Settings(2, loaders, threads, 2 * bool(loaders)), current, limits, 8.0).cores

    assert cores(Limits(1, 4, max_cores=6), 4, 1) == 5
    assert cores(Limits(1, 4, max_cores=6), 4, 4) == 6
    assert cores(Limits(1, 4, max_cores=6), 1, 0) == 2  # existing cores are not taken away
    assert cores(Limits(1, 4), 4, 1) == 2
    assert configuration(settings_of(current), current, Limits(1, 4, max_cores=6), 8.0).cores == 2


@pytest.mark.parametrize("bound_to", [1, 2, 4, 8])
def test_workers_that_are_bound_to_cores_are_planned_with_no_others(bound_to: int) -> None:
    truth = dense_heavy(8)
    current = replace(window(truth, ONE, random.Random(0), 0.0), cores=float(bound_to))
    axes = tunable_axes(8.0, current.cores)
    assert max(axes["loader_workers"]) == max(axes["intra_op_threads"]) == bound_to
    limits = Limits(1, 8, loader_workers=(0, 1, 2, 4, 8, 16))
    here = configuration(ONE, current, limits, 8.0)
    for each in all_settings(limits, ONE):
        refused = why_not(each, here, configuration(each, current, limits, 8.0), truth.global_batch, limits)
        cores = min(8, each.num_workers * bound_to)
        assert bool(refused) == (each.loader_workers > 1 and each.num_workers * each.loader_workers > 2 * cores)


def test_the_global_batch_is_kept_by_every_configuration() -> None:
    truth = dense_heavy(8)
    current = window(truth, ONE, random.Random(0), 0.0)
    for workers in range(1, 9):
        there = configuration(Settings(workers, 0, 1, 0), current, Limits(1, 8), 8.0)
        assert (there.local_batch - 1) * workers < truth.global_batch <= there.local_batch * workers


@pytest.mark.parametrize("workers_per_node", [0, 8])
def test_numbers_of_workers_of_a_large_job_are_a_few_percent_apart(workers_per_node: int) -> None:
    limits = Limits(20, 5003, workers_per_node=workers_per_node, failed_sizes=frozenset({64}))
    assert limits.sizes[:44] == tuple(range(20, 64))
    assert limits.sizes[-1] == 5003
    large = [size for size in limits.sizes if 136 <= size < 5003]
    assert all(after <= max(before * 1.04, before + workers_per_node) for before, after in pairwise(large))
    assert all(size % max(1, workers_per_node) == 0 for size in large)
    assert len(limits.sizes) < 300


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_workers": 0},
        {"min_workers": 5},
        {"loader_workers": (0, -1)},
        {"intra_op_threads": (0,)},
        {"prefetch_factors": (0,)},
        {"workers_per_node": -1},
        {"listed_sizes": (9,)},
    ],
)
def test_impossible_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cannot plan|workers"):
        Limits(**{"min_workers": 1, "max_workers": 4, **wrong})


@pytest.mark.parametrize(
    ("foreign_cores", "threads", "is_considered"),
    [(0.0, 8, True), (0.4, 8, True), (1.0, 8, False), (1.0, 4, True), (6.0, 4, False), (6.0, 2, True), (60.0, 2, True)],
)
def test_more_threads_are_considered_on_free_cores_only(foreign_cores: float, threads: int, is_considered: bool) -> None:
    runs = Settings(1, 0, 2, 0)
    truth = dense_heavy(8)
    current = window(truth, runs, random.Random(0), 0.0)
    limits = replace(limits_of(truth, 1), foreign_cores=foreign_cores)
    here = configuration(runs, current, limits, 8.0)
    asked = configuration(Settings(1, 1, threads, 2), current, limits, 8.0)
    refused = why_not(Settings(1, 1, threads, 2), here, asked, truth.global_batch, limits)
    assert bool(refused) != is_considered
    assert is_considered or f"of which others keep {foreign_cores:.1f} busy" in refused


# --- objectives --------------------------------------------------------------------------------------------------------------


PROFILE = window(dense_heavy(8), Settings(3, 1, 2, 2), random.Random(0), 0.0)


def test_one_core_per_thread_and_loader_worker_up_to_the_nodes() -> None:
    assert resources_of(configuration_of(PROFILE, 16.0)).cores == 3 * (2 + 1)
    assert resources_of(configuration_of(PROFILE, 8.0)).cores == 8
    assert resources_of(configuration_of(PROFILE, 0.0)).cores == 9
    assert resources_of(configuration_of(replace(PROFILE, cores=2.0), 16.0)).cores == 3 * 2
    assert resources_of(configuration_of(PROFILE, 8.0)).gpus == 0
    assert resources_of(configuration_of(replace(PROFILE, device="H200"), 8.0)).gpus == 3
    assert resources_of(configuration_of(PROFILE, 8.0), 2**30).memory_gib == 3


@pytest.mark.parametrize(
    "prices, used, expected",
    [
        (Prices(), Resources(4, 0, 2.0), None),
        (Prices(core_hour=0.5), Resources(4, 0, 2.0), 2.0),
        (Prices(core_hour=0.5, gib_hour=0.1), Resources(4, 0, 2.0), 2.2),
        (Prices(core_hour=0.5), Resources(4, 2, 2.0), None),  # an unknown price of a GPU is not guessed
        (Prices(gpu_hour=3.0), Resources(4, 2, 2.0), 6.0),
        (Prices(core_hour=0.0), Resources(4, 0, 0.0), 0.0),
    ],
)
def test_a_price_is_known_or_unknown_never_guessed(prices: Prices, used: Resources, expected: float | None) -> None:
    found = prices.per_hour(used)
    assert found == (pytest.approx(expected) if expected is not None else None)


def test_the_environment_carries_an_objective_from_the_command_line() -> None:
    environ = {"DLROVER_OBJECTIVE": "cheapest", "DLROVER_DEADLINE_S": "7200", "DLROVER_PRICES": "core_hour=0.04, gpu_hour=2.5"}
    assert objective_from(environ) == Objective("cheapest", deadline_s=7200.0, prices=Prices(0.04, 2.5))
    assert objective_from({}) == Objective()


@pytest.mark.parametrize(
    "environ, named",
    [
        ({"DLROVER_OBJECTIVE": "best"}, "'best'"),
        ({"DLROVER_BUDGET": "much"}, "DLROVER_BUDGET"),
        ({"DLROVER_BUDGET": "10"}, "needs prices"),
        ({"DLROVER_DEADLINE_S": "-1"}, "deadline_s"),
        ({"DLROVER_PRICES": "core=1"}, "core_hour, gpu_hour, gib_hour"),
        ({"DLROVER_PRICES": "core_hour"}, "core_hour=0.04"),
        ({"DLROVER_PRICES": "core_hour=-1"}, "core_hour"),
    ],
)
def test_invalid_objective_is_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        objective_from(environ)


@pytest.mark.parametrize("wrong", [{"budget": 0.0}, {"deadline_s": math.nan}, {"budget": math.inf}])
def test_amounts_without_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Objective(prices=parse_prices("core_hour=1"), **wrong)
