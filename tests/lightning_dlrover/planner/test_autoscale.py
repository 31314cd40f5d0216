"""The planner drives jobs whose truth is known: it finds the best size in a few decisions and stays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.perf.model import StepTimeModel
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.autoscale import Limits, plan_workers
from lightning_dlrover.planner.plan import Decision

World = Callable[[int], tuple[float, float]]  # workers -> compute seconds, communication seconds
GLOBAL_BATCH = 240


def scales(workers: int) -> tuple[float, float]:
    return 0.080 / workers + 0.001, 0.0005 * (workers - 1)


def does_not_scale(workers: int) -> tuple[float, float]:
    return 0.080, 0.001 * (workers - 1)


def helps_to_three_then_hurts(workers: int) -> tuple[float, float]:
    return 0.090 / workers, 0.0 if workers == 1 else 0.004 + 0.020 * max(0, workers - 3)


def two_cores(workers: int) -> tuple[float, float]:
    """One laptop: single-threaded workers, the third finds no core."""
    return 0.080 / workers * max(1.0, workers / 2) * (1.15 if workers > 2 else 1.0), 0.002 * (workers - 1)


def window(workers: int, world: World, noise: float = 1.0, intra_op_threads: int = 1) -> StepProfile:
    compute_s, communication_s = (part * noise for part in world(workers))
    step_time_s = compute_s + communication_s
    return StepProfile(
        worker_id="w0",
        round_number=1,
        global_rank=0,
        num_workers=workers,
        num_nodes=1,
        first_step=0,
        num_steps=50,
        global_batch=GLOBAL_BATCH,
        local_batch=math.ceil(GLOBAL_BATCH / workers),
        loader_workers=0,
        intra_op_threads=intra_op_threads,
        cores=2.0,
        device="cpu",
        step_time_s=step_time_s,
        data_wait_s=0.0,
        forward_s=compute_s / 3,
        backward_s=compute_s * 2 / 3,
        communication_s=communication_s,
        optimizer_s=0.0,
        other_s=0.0,
        samples_per_s=GLOBAL_BATCH / step_time_s,
        memory_bytes=1 << 28,
        cpu_percent=100.0,
        dense_bytes=2_000_000,
    )


@dataclass
class Job:
    """A synthetic job: two windows, then a decision, which is carried out."""

    world: World
    limits: Limits
    workers: int
    remaining_samples: float = 200_000.0 * GLOBAL_BATCH
    resize_cost_s: float = 0.3
    noise: float = 0.0
    node_cores: float = 0.0
    seed: int = 0
    samples: list[StepProfile] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def run(self, num_decisions: int) -> list[int]:
        """World sizes after each decision."""
        rng = random.Random(self.seed)
        sizes = []
        for number in range(num_decisions):
            for _ in range(2):
                self.samples.append(window(self.workers, self.world, rng.lognormvariate(0, self.noise)))
                self.remaining_samples -= 50 * GLOBAL_BATCH
            decision = plan_workers(
                StepTimeModel.fit(self.samples, node_cores=self.node_cores),
                self.samples[-1],
                self.limits,
                remaining_samples=self.remaining_samples,
                resize_cost_s=self.resize_cost_s,
                decision_id=number,
                at=float(number),
                past=self.decisions,
            )
            self.decisions.append(decision)
            self.workers = decision.chosen_workers
            sizes.append(self.workers)
        return sizes


@pytest.mark.parametrize(
    "world, node_cores, start, best",
    [
        (scales, 0.0, 1, {8}),
        (scales, 0.0, 4, {8}),
        (does_not_scale, 0.0, 1, {1}),
        (does_not_scale, 0.0, 4, {1, 2, 3, 4}),  # nothing need show that fewer would do
        (helps_to_three_then_hurts, 0.0, 1, {3}),
        (helps_to_three_then_hurts, 0.0, 6, {3}),
        (two_cores, 0.0, 1, {2}),
        (two_cores, 2.0, 1, {2}),
        (two_cores, 2.0, 4, {2}),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_best_size_is_found_in_a_few_decisions_and_kept(
    world: World, node_cores: float, start: int, best: set[int], noise: float
) -> None:
    job = Job(world, Limits(1, 8), start, node_cores=node_cores, noise=noise)
    sizes = job.run(20)
    assert sizes[-1] in best
    assert len(set(sizes[6:])) == 1, sizes


@given(
    times=st.lists(st.floats(0.01, 0.2), min_size=5, max_size=5),
    start=st.integers(1, 5),
    noise=st.sampled_from([0.0, 0.02, 0.05]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_the_planner_settles_in_any_world(times: list[float], start: int, noise: float, seed: int) -> None:
    job = Job(lambda workers: (times[workers - 1], 0.0), Limits(1, 5), start, noise=noise, seed=seed)
    sizes = job.run(16)
    moves = sum(a != b for a, b in zip([start, *sizes], sizes, strict=False))
    assert moves <= 8, sizes
    assert len(set(sizes[10:])) == 1, sizes
    explored = [d.chosen_workers for d in job.decisions if d.explored]
    assert len(explored) == len(set(explored)), "a size was tried twice"
    if noise == 0.0:
        tried = {sample.num_workers for sample in job.samples}
        assert times[sizes[-1] - 1] <= 1.25 * times[start - 1]
        assert sizes[-1] in tried


@given(
    low=st.integers(1, 6),
    spread=st.integers(0, 6),
    now=st.integers(1, 12),
    left=st.floats(0, 1e8),
    cost=st.floats(0, 1e4),
)
@settings(max_examples=40, deadline=None)
def test_the_chosen_size_is_a_feasible_candidate_within_the_limits(
    low: int, spread: int, now: int, left: float, cost: float
) -> None:
    current = window(now, scales)
    decision = plan_workers(
        StepTimeModel.fit([current]),
        current,
        Limits(low, low + spread),
        remaining_samples=left,
        resize_cost_s=cost,
        decision_id=1,
        at=0.0,
    )
    assert low <= decision.chosen_workers <= low + spread
    assert decision.choice.feasible
    assert decision.reason
    sizes = [c.num_workers for c in decision.candidates]
    assert sizes == sorted({*range(low, low + spread + 1), now})


def decide(*sizes: int, world: World = scales, left_steps: float = 1e5, cost_s: float = 0.3) -> Decision:
    """The decision of a job that measured `sizes`, the last one now."""
    samples = [window(size, world) for size in sizes for _ in range(3)]
    return plan_workers(
        StepTimeModel.fit(samples),
        samples[-1],
        Limits(1, 4),
        remaining_samples=left_steps * GLOBAL_BATCH,
        resize_cost_s=cost_s,
        decision_id=3,
        at=12.5,
    )


def test_a_size_measured_worse_is_left_and_not_tried_again() -> None:
    back = decide(1, 2, world=does_not_scale)
    assert back.chosen_workers == 1
    assert not back.explored
    assert not decide(1, 2, 1, world=does_not_scale).is_change


def test_nothing_is_tried_when_little_work_is_left_or_a_resize_is_dear() -> None:
    assert decide(1).is_change
    assert not decide(1, left_steps=20).is_change
    assert not decide(1, cost_s=2000.0).is_change
    assert not decide(1, left_steps=0).is_change


def test_a_gain_below_a_fifth_of_a_workers_share_is_not_worth_a_worker() -> None:
    def barely(workers: int) -> tuple[float, float]:
        return {1: 0.100, 2: 0.088, 3: 0.086, 4: 0.086}[workers], 0.0

    assert decide(1, 2, 3, 4, 1, world=barely).chosen_workers == 1
    assert decide(1, 2, 3, 4, world=barely).chosen_workers == 1


def test_an_unknown_end_counts_as_an_hour() -> None:
    sample = window(1, scales)
    decision = plan_workers(
        StepTimeModel.fit([sample]),
        sample,
        Limits(1, 2),
        remaining_samples=None,
        resize_cost_s=1.0,
        decision_id=1,
        at=0.0,
    )
    assert decision.chosen_workers == 2
    assert decision.explored


def test_a_size_that_was_explored_in_vain_is_not_explored_again() -> None:
    sample = window(1, scales)
    model = StepTimeModel.fit([sample] * 3)

    def plan(past: list[Decision]) -> Decision:
        return plan_workers(
            model,
            sample,
            Limits(1, 2),
            remaining_samples=1e8,
            resize_cost_s=1.0,
            decision_id=len(past),
            at=0.0,
            past=past,
        )

    first = plan([])
    assert first.explored
    assert not plan([first]).is_change


def test_more_workers_than_samples_in_a_batch_are_not_feasible() -> None:
    sample = replace(window(1, scales), global_batch=3, local_batch=3)
    decision = plan_workers(
        StepTimeModel.fit([sample]),
        sample,
        Limits(1, 5),
        remaining_samples=1e6,
        resize_cost_s=0.1,
        decision_id=1,
        at=0.0,
    )
    assert [c.feasible for c in decision.candidates] == [True, True, True, False, False]
    assert "without a sample" in decision.candidates[-1].note


def test_the_same_question_gets_the_same_answer() -> None:
    assert decide(1, 2, world=helps_to_three_then_hurts) == decide(1, 2, world=helps_to_three_then_hurts)


def test_a_reason_names_sizes_times_interval_and_when_the_resize_is_repaid() -> None:
    decision = decide(1)
    assert decision.reason == (
        "1 -> 2 workers: never tried; 41.7 ms instead of 81 ms a step predicted (34.1 ms to 85.2 ms, "
        "best so far 81 ms with 1); trying costs at most 0.81 s of the 2.2 h left; a resize of 0.3 s is repaid after 8 steps"
    )


@pytest.mark.parametrize("low, high", [(0, 2), (3, 2), (-1, 4)])
def test_impossible_limits_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="workers"):
        Limits(low, high)


@pytest.mark.parametrize("left, cost", [(-1.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.inf)])
def test_impossible_work_or_cost_is_refused(left: float, cost: float) -> None:
    sample = window(1, scales)
    with pytest.raises(ValueError, match=r"remaining_samples|resize_cost_s"):
        plan_workers(
            StepTimeModel.fit([sample]),
            sample,
            Limits(1, 2),
            remaining_samples=left,
            resize_cost_s=cost,
            decision_id=1,
            at=0.0,
        )
