"""Predict the effects of another size, another budget, or the absence of a job, before anything is done. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dlrover.brain.decisions import Rules
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.planner.cluster.pool.sizes import wanted_sizes
from lightning_dlrover.planner.plan import Candidate, Decision

__all__ = ["Prospect", "prospect", "sizes_if"]


@dataclass(frozen=True)
class Prospect:
    """The rest of a job with a number of workers.

    Args:
        seconds: until its end, with the interval of 90 %; None: its end is unknown.
        cost: money until its end; None: no prices, or an unknown end.
    """

    num_workers: int
    samples_per_s: float
    seconds: float | None
    low_s: float | None
    high_s: float | None
    cost: float | None
    is_measured: bool


def prospect(job: PoolJob, decision: Decision | None, num_workers: int) -> Prospect | None:
    """Return the rest of a job with a number of workers; None if its planner has not predicted that."""
    rate = job.rate(num_workers)
    if rate is None:
        return None
    pause_s = job.change_s if num_workers != job.alive else 0.0
    left = job.samples_left

    def seconds(samples_per_s: float) -> float | None:
        return None if left is None or samples_per_s <= 0 else left / samples_per_s + pause_s

    until_end_s = seconds(rate.samples_per_s)
    price = _price(decision, num_workers)
    return Prospect(
        num_workers,
        rate.samples_per_s,
        until_end_s,
        seconds(rate.high_per_s),
        seconds(rate.low_per_s),
        price * until_end_s / 3600 if price is not None and until_end_s is not None else None,
        rate.is_measured,
    )


def sizes_if(
    jobs: Sequence[PoolJob],
    rules: Rules,
    now_s: float,
    budget: Resources,
    without: str = "",
    by_hand: str = "",
    num_workers: int = 0,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes that the policy wants now, and those that it would want.

    Args:
        budget: the other one.
        without: a job to leave out.
        by_hand: a job to set to `num_workers` by hand.
    """
    others = [job for job in jobs if job.name != without]
    if by_hand:
        fixed = {"is_by_hand": True, "planned": num_workers, "alive": num_workers}
        others = [replace(job, **fixed) if job.name == by_hand else job for job in others]  # type: ignore[arg-type]
    return _sizes(jobs, rules, now_s), _sizes(others, replace(rules, budget=budget), now_s)


def _sizes(jobs: Sequence[PoolJob], rules: Rules, now_s: float) -> dict[str, int]:
    return wanted_sizes(rules.treated(jobs), rules.budget, rules.divide, now_s, rules.max_wait_s, rules.owners)


def _price(decision: Decision | None, num_workers: int) -> float | None:
    """Return the price per hour of a number of workers, by the candidate with these or, in proportion, with others."""
    priced: list[Candidate] = [c for c in decision.candidates if c.cost_per_hour is not None] if decision is not None else []
    if not priced:
        return None
    nearest = min(priced, key=lambda c: abs(c.num_workers - num_workers))
    assert nearest.cost_per_hour is not None
    return nearest.cost_per_hour * num_workers / nearest.num_workers
