"""Cores are divided fairly, and what a division does not explain is learned."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.colocate.slowdown import CoreSpeeds, CoreUse, Observation, expected, thread_shares
from lightning_dlrover.tuning.cluster import Device, Job, Profile

CPU = Device("cpu", "cpu", "node", 16 * 10**9, {"cores": 2.0}, 8)
USES = {"compute": (1.9, 0.0, 0.1), "memory": (1.5, 0.0, 0.6), "input": (0.25, 0.8, 0.0), "mixed": (1.2, 0.2, 0.2)}
"""Cores, waiting, and a pressure that is in no profile."""

uses = st.builds(CoreUse, family=st.just("any"), cores=st.floats(0.0, 4.0), wait=st.floats(0.0, 0.9))


@given(st.lists(uses, min_size=1, max_size=6), st.sampled_from([1.0, 2.0, 3.5, 16.0]))
@settings(max_examples=50)
def test_jobs_never_use_more_cores_than_there_are_or_than_alone(jobs: list[CoreUse], num_cores: float) -> None:
    shares = thread_shares([job.cores for job in jobs], num_cores)
    found = expected(jobs, shares, num_cores)
    assert found.use.sum() <= num_cores + 1e-6
    assert all(amount <= max(job.cores, 1e-3) + 1e-6 for amount, job in zip(found.use, jobs, strict=True))
    assert ((found.speeds > 0) & (found.speeds <= found.threaded + 1e-9) & (found.threaded <= 1 + 1e-9)).all()


@given(st.lists(st.floats(0.0, 8.0), min_size=2, max_size=6), st.sampled_from([1.0, 2.0, 8.0]))
@settings(max_examples=50)
def test_another_thread_is_granted_only_while_cores_are_idle(cores: list[float], num_cores: float) -> None:
    shares = thread_shares(cores, num_cores)
    assert min(shares) >= 1
    assert sum(shares) <= max(len(cores), num_cores + len(cores))
    assert all(share == 1 or share < each + 1 for share, each in zip(shares, cores, strict=True))


def test_job_among_others_that_wait_keeps_its_threads() -> None:
    assert thread_shares([1.9, 0.25, 0.25], 2.0) == [2, 1, 1]
    assert thread_shares([1.9, 1.5], 2.0) == [1, 1]
    assert thread_shares([0.3], 2.0) == [2]


def test_light_job_keeps_its_speed_next_to_two_heavy_ones() -> None:
    heavy, light = CoreUse("heavy", 1.0), CoreUse("light", 0.2, 0.8)
    found = expected([heavy, heavy, light], [1, 1, 1], 2.0)
    assert found.speeds[2] == pytest.approx(1.0)
    assert found.use[:2] == pytest.approx([0.9, 0.9])


def job(family: str, number: int) -> Job:
    cores, wait, _ = USES[family]
    return Job(f"{family}-{number}", {"cpu": Profile(0, 10.0, {"cores": cores, "input": wait})}, family=family)


def true_speeds(group: Sequence[Job]) -> list[float]:
    """The division of cores, better work with one thread, and a hidden pressure."""
    jobs = [CoreUse(one.family, *USES[one.family][:2]) for one in group]
    found = expected(jobs, thread_shares([one.cores for one in jobs], 2.0), 2.0)
    loss = [sum(USES[o.family][2] * found.use[j] / 2 for j, o in enumerate(group) if j != i) for i in range(len(group))]
    return [float(speed**0.9 * np.exp(-each)) for speed, each in zip(found.speeds, loss, strict=True)]


def groups_of(sizes: Sequence[int]) -> list[tuple[Job, ...]]:
    return [
        tuple(job(family, number) for number, family in enumerate(families))
        for size in sizes
        for families in combinations_with_replacement(USES, size)
    ]


def test_sets_not_seen_are_predicted_from_others() -> None:
    rng = random.Random(0)
    known, unseen = groups_of([2]), groups_of([3, 4])
    seen = [Observation(CPU, group, tuple(s * rng.lognormvariate(0, 0.03) for s in true_speeds(group))) for group in known]

    def error(model: CoreSpeeds) -> float:
        predicted = model.relative_speeds(unseen, CPU)
        return statistics.median(
            abs(float(p) / s - 1)
            for group, ps in zip(unseen, predicted, strict=True)
            for p, s in zip(ps, true_speeds(group), strict=True)
        )

    before, after = error(CoreSpeeds()), error(CoreSpeeds.fit(seen))
    assert after <= 0.05
    assert after < before / 2


def test_job_alone_runs_at_its_own_speed_whatever_was_observed() -> None:
    seen = [Observation(CPU, group, (0.4, 0.4)) for group in groups_of([2])]
    ((alone,),) = CoreSpeeds.fit(seen).relative_speeds([[job("compute", 0)]], CPU)
    assert alone == 1.0


def test_order_of_a_group_changes_no_prediction() -> None:
    seen = [Observation(CPU, group, (0.5, 0.7)) for group in groups_of([2])]
    group = [job("input", 0), job("compute", 0), job("memory", 0)]
    model = CoreSpeeds.fit(seen)
    forward, backward = model.relative_speeds([group, group[::-1]], CPU)
    assert forward.tolist() == backward[::-1].tolist()
