"""A job starts with the final settings of similar jobs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_dlrover.tuning import StepProfile, StepTimeModel
from lightning_dlrover.tuning.autoscale import plan
from lightning_dlrover.tuning.candidates import (
    Descriptor,
    PastJob,
    PlanRequest,
    Rules,
    Suggestion,
    descriptor_of,
    distance,
    nearest,
    suggest,
)
from lightning_dlrover.tuning.plan import Decision, Limits, Objective, Prices, Settings, all_settings
from tests.support.simulated_jobs import (
    KINDS,
    SimulatedJob,
    Truth,
    dense_heavy,
    input_bound,
    limits_of,
    throughput_share,
    window,
)

ONE = Settings(1, 0, 1, 0)
TWO = Settings(2, 1, 1, 2)
FOUR = Settings(4, 1, 1, 2)
TWIN = Descriptor(1e6, 4e6, 0.0, 0.0, 512.0, "cpu", 4.0)
LIMITS = Limits(1, 8)
LIMITS_4 = Limits(1, 4, loader_workers=(0, 1), intra_op_threads=(1,), prefetch_factors=(2,))
DAY_S = 86400.0


def windows(times_s: dict[Settings, float]) -> tuple[StepProfile, ...]:
    template = window(dense_heavy(4), ONE, random.Random(0), 0.0)
    return tuple(
        replace(template, **vars(s), step_time_s=time_s, dense_flops=1_000_000, dense_bytes=4_000_000)
        for s, time_s in times_s.items()
    )


def job(name: str, at: float, times_s: dict[Settings, float], descriptor: Descriptor = TWIN) -> PastJob:
    return PastJob(name, at, descriptor, windows(times_s))


NOW = windows({ONE: 0.1})[0]


def suggested(*args: Any, **kwargs: Any) -> Suggestion:
    found = suggest(*args, **kwargs)
    assert found is not None
    return found


def test_without_similar_jobs_nothing_is_suggested() -> None:
    assert suggest(NOW, [], LIMITS, node_cores=4.0, at=0.0) is None


def test_best_settings_of_similar_jobs_are_suggested() -> None:
    past = [job(name, 0.0, {ONE: 0.1, TWO: 0.06, FOUR: 0.04}) for name in "abc"]
    past.append(job("d", 0.0, {ONE: 0.1, TWO: 0.05, FOUR: 0.07}))
    found = suggested(NOW, past, LIMITS, node_cores=4.0, at=DAY_S)
    assert found.settings == FOUR
    assert found.speedup == pytest.approx(2.5)
    assert "3 of the 4 most similar past jobs (a, b, c)" in found.reason


@pytest.mark.parametrize(("noisy_s", "ends"), [((0.1, 0.12, 0.095), TWO), ((0.1, 0.12, 0.07), ONE)])
def test_settings_are_suggested_only_if_faster_than_every_window_of_the_first_ones(
    noisy_s: tuple[float, ...], ends: Settings
) -> None:
    first = [windows({ONE: time_s})[0] for time_s in noisy_s]
    past = [PastJob(name, 0.0, TWIN, (*first, *windows({TWO: 0.08}))) for name in "abcde"]
    assert suggested(NOW, past, LIMITS, node_cores=4.0, at=DAY_S).settings == ends


def test_new_jobs_count_more_than_old_ones() -> None:
    old = [job(f"old-{n}", 0.0, {ONE: 0.1, FOUR: 0.04}) for n in range(2)]
    new = [job(f"new-{n}", 400 * DAY_S, {ONE: 0.1, TWO: 0.04}) for n in range(2)]
    assert suggested(NOW, [*old, *new], LIMITS, node_cores=4.0, at=400 * DAY_S).settings == TWO


def test_jobs_with_more_workers_than_allowed_do_not_count() -> None:
    past = [job("a", 0.0, {ONE: 0.1, TWO: 0.06, FOUR: 0.04})]
    assert suggested(NOW, past, Limits(1, 2), node_cores=4.0, at=0.0).settings == TWO
    assert suggest(NOW, [job("b", 0.0, {FOUR: 0.04})], Limits(1, 2), node_cores=4.0, at=0.0) is None


def test_cheapest_objective_does_not_start_at_the_fastest_settings() -> None:
    past = [job("a", 0.0, {ONE: 0.1, FOUR: 0.04})]
    for aim, ends in (("fastest", FOUR), ("cheapest", None), ("efficient", None)):
        objective = Objective(aim)  # type: ignore[arg-type]
        found = suggest(NOW, past, LIMITS, node_cores=4.0, at=0.0, objective=objective)
        request = PlanRequest([NOW] * 3, node_cores=4.0, remaining_samples=1e9, suggestion=found)
        model = StepTimeModel.fit(request.windows, node_cores=4.0, earlier=past[0].windows)
        rules = Rules(max_trials=0)
        decision = plan(request, model, LIMITS_4, objective, decision_id=1, at=0.0, rules=rules)
        assert decision.chosen == (ends or ONE), f"{aim}: {decision.reason}"


def test_suggestion_beyond_the_budget_is_not_followed() -> None:
    told = job("a", 0.0, {ONE: 0.1, FOUR: 0.04})
    past = [replace(told, windows=tuple(replace(w, local_batch=512 // w.num_workers) for w in told.windows))]
    found = suggest(NOW, past, LIMITS, node_cores=4.0, at=0.0)
    hours = 1e5 * 0.1 / 3600
    for budget, ends in ((1.1 * hours, ONE), (10 * hours, FOUR)):
        objective = Objective(budget=budget, prices=Prices(core_hour=1.0))
        request = PlanRequest([NOW] * 3, node_cores=4.0, remaining_samples=1e5 * 512, suggestion=found, spent=0.0)
        model = StepTimeModel.fit(request.windows, node_cores=4.0, earlier=past[0].windows)
        decision = plan(request, model, LIMITS_4, objective, decision_id=1, at=0.0, rules=Rules(max_trials=0))
        assert decision.chosen == ends, decision.reason


def test_distance_is_a_semimetric_and_infinite_between_devices() -> None:
    other = replace(TWIN, dense_flops=3e6, global_batch=1024.0)
    assert distance(TWIN, TWIN) == 0.0
    assert distance(TWIN, other) == pytest.approx(distance(other, TWIN))
    assert 0 < distance(TWIN, other) < distance(TWIN, replace(other, embedding_bytes=1e9))
    assert distance(TWIN, replace(TWIN, device="H200")) == math.inf


def test_only_jobs_that_are_similar_enough_are_neighbours_nearest_first() -> None:
    jobs = [
        PastJob("far", 0.0, replace(TWIN, dense_flops=1e12, dense_bytes=1e12), ()),
        PastJob("near", 0.0, replace(TWIN, dense_flops=1.5e6), ()),
        *(PastJob(f"twin-{n}", float(n), TWIN, ()) for n in range(3)),
    ]
    assert [each.job for each in nearest(TWIN, jobs)] == ["twin-2", "twin-1", "twin-0", "near"]


def learned(truth: Truth, limits: Limits, seed: int) -> PastJob:
    """Record that a cold job leaves in the history."""

    def cold(request: PlanRequest, limits: Limits, number: int) -> Decision:
        model = StepTimeModel.fit(request.windows, node_cores=request.node_cores)
        return plan(request, model, limits, Objective(), decision_id=number, at=float(number))

    job = SimulatedJob(truth, cold, limits, ONE, seed=seed)
    job.run(9)
    return PastJob(f"job-{seed}", 0.0, descriptor_of(job.samples[-1], float(truth.node_cores)), tuple(job.samples))


@pytest.mark.parametrize("kind", KINDS)
def test_first_plan_with_a_history_equals_the_earlier_jobs_last(kind: object) -> None:
    truth: Truth = kind(8)  # type: ignore[operator]
    limits = limits_of(truth, 8)
    past = learned(truth, limits, seed=3)
    earlier = past.windows

    def warm(request: PlanRequest, limits: Limits, number: int) -> Decision:
        neighbours = nearest(descriptor_of(request.current, 8.0), [past])
        assert neighbours
        found = suggest(request.current, neighbours, limits, node_cores=8.0, at=1.0)
        model = StepTimeModel.fit(request.windows, node_cores=8.0, earlier=earlier)
        told = replace(request, suggestion=found)
        return plan(told, model, limits, Objective(), decision_id=number, at=float(number))

    job = SimulatedJob(truth, warm, limits, ONE, seed=11)
    first = job.run(1)
    assert job.decisions[0].explored
    assert "most similar past jobs (job-3)" in job.decisions[0].reason
    space = all_settings(limits, ONE)
    best = past.best_within(limits)
    assert best is not None
    assert throughput_share(truth, first, space) >= 0.99 * throughput_share(truth, best, space)


def test_a_suggestion_is_not_followed_when_it_is_not_worth_the_change() -> None:
    truth = input_bound(4)
    sample = window(truth, ONE, random.Random(0), 0.0)
    found = suggest(sample, [job("a", 0.0, {ONE: 0.1, TWO: 0.0999})], LIMITS, node_cores=4.0, at=0.0)
    request = PlanRequest([sample] * 3, node_cores=4.0, remaining_samples=1e6, suggestion=found)
    model = StepTimeModel.fit(request.windows, node_cores=4.0)
    decision = plan(request, model, Limits(1, 1), Objective(), decision_id=1, at=0.0)
    assert not decision.is_change
