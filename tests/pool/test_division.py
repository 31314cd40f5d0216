"""Jobs share a cluster nearly as well as under the best division."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from lightning_dlrover.pool.commands import ClusterJob, Option, divide
from lightning_dlrover.tuning.plan import Settings


def option(workers: int, rate: float, cost: float | None = None) -> Option:
    return Option(Settings(workers, 0, 1, 0), float(workers if cost is None else cost), rate)


def random_jobs(rng: random.Random, num_jobs: int) -> list[ClusterJob]:
    """Jobs that scale by Amdahl's law, lose to communication, and are measured with noise."""
    jobs = []
    for number in range(num_jobs):
        serial, loss, base = rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.03), rng.uniform(10, 1e5)
        options = tuple(
            option(w, base / (serial + (1 - serial) / w + loss * (w - 1)) * rng.lognormvariate(0, 0.05)) for w in range(1, 17)
        )
        jobs.append(ClusterJob(f"job-{number}", options, rng.choice([0.5, 1.0, 1.0, 3.0])))
    return jobs


def total_gain(jobs: list[ClusterJob], chosen: dict[str, Option]) -> float:
    return sum(job.gain(chosen[job.name]) for job in jobs)


def optimum(jobs: list[ClusterJob], budget: float) -> float:
    """Largest possible gain: a multiple-choice knapsack as a mixed-integer programme."""
    gains = np.concatenate([[job.gain(o) for o in job.options] for job in jobs])
    costs = np.concatenate([[o.cost for o in job.options] for job in jobs])
    one_each = np.zeros((len(jobs), len(gains)))
    at = 0
    for row, job in enumerate(jobs):
        one_each[row, at : at + len(job.options)] = 1
        at += len(job.options)
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(costs[None, :], -np.inf, budget)]
    found = milp(-gains, integrality=np.ones(len(gains)), bounds=(0, 1), constraints=constraints)
    assert found.success, found.message
    return float(-found.fun)


@pytest.mark.parametrize("num_jobs, cores", [(2, 6), (3, 16), (5, 40), (8, 30), (12, 100)])
def test_greedy_stays_close_to_the_optimum_and_within_the_budget(num_jobs: int, cores: int) -> None:
    shares = []
    for seed in range(12):
        jobs = random_jobs(random.Random(100 * num_jobs + seed), num_jobs)
        chosen = divide(jobs, cores)
        assert set(chosen) == {job.name for job in jobs}
        assert sum(o.cost for o in chosen.values()) <= cores
        best = optimum(jobs, cores)
        shares.append(total_gain(jobs, chosen) / best)
        assert shares[-1] <= 1 + 1e-9
    assert min(shares) >= 0.9, shares
    assert sum(shares) / len(shares) >= 0.98, shares


def test_with_resources_for_all_every_job_has_its_best() -> None:
    jobs = random_jobs(random.Random(1), 5)
    chosen = divide(jobs, 1000)
    for job in jobs:
        assert job.gain(chosen[job.name]) == pytest.approx(job.weight)


def test_a_job_that_counts_more_is_served_first() -> None:
    options = (option(1, 100.0), option(2, 190.0))
    jobs = [ClusterJob("low", options), ClusterJob("high", options, weight=2.0)]
    chosen = divide(jobs, 3)
    assert {name: o.settings.num_workers for name, o in chosen.items()} == {"low": 1, "high": 2}


def test_points_below_the_hull_fill_the_remainder() -> None:
    job = ClusterJob("only", (option(1, 100.0), option(3, 120.0), option(8, 800.0)))
    assert divide([job], 5)["only"].settings.num_workers == 3
    assert divide([job], 8)["only"].settings.num_workers == 8


def test_a_budget_that_cannot_run_all_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match="budget is 1"):
        divide([ClusterJob("a", (option(1, 1.0),)), ClusterJob("b", (option(1, 1.0),))], 1)


def test_two_jobs_of_one_name_are_refused() -> None:
    job = ClusterJob("a", (option(1, 1.0),))
    with pytest.raises(ValueError, match="one name"):
        divide([job, job], 10)


@pytest.mark.parametrize(
    "options, weight", [((), 1.0), ((option(1, 0.0),), 1.0), ((option(1, 1.0, 0.0),), 1.0), ((option(1, 1.0),), 0.0)]
)
def test_impossible_jobs_are_refused(options: tuple[Option, ...], weight: float) -> None:
    with pytest.raises(ValueError, match="job 'a'"):
        ClusterJob("a", options, weight)
