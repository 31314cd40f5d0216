"""Decide the size that each job of a pool should have, within the budget.

Rules that hold for every policy:

- A job keeps its own limits. It is never stopped once it runs: at the least it keeps its fewest workers.
- A job with a size set by hand, or with a planner that has not decided yet, keeps its size and is counted.
- Waiting jobs start by priority, then by submission. One that does not fit lets smaller ones pass, until it has waited longer
  than the bound: from then on it goes before all others, whatever their priority, and no job passes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from lightning_dlrover.planner.cluster.pool.jobs import PoolJob, held_by
from lightning_dlrover.planner.cluster.pool.resources import Resources

__all__ = ["Divider", "in_queue_order", "wanted_sizes", "why_never"]


STAY_S = 30.0
"""Seconds for which a job keeps a new size though another running job would gain more: predictions change with each size."""


class Divider(Protocol):
    """Divides resources among jobs. Pure."""

    def __call__(self, jobs: Sequence[PoolJob], free: Resources, now_s: float) -> Mapping[str, int]:
        """Return the number of workers of each job by name; a job that is absent, or has 0, waits.

        Args:
            jobs: running ones of variable size, and waiting ones; the fewest workers of all fit into `free` together.
        """
        ...


def in_queue_order(jobs: Sequence[PoolJob], now_s: float, max_wait_s: float) -> list[PoolJob]:
    """Sort waiting jobs: first those that have waited too long, then by priority; the longest wait first among equals."""

    def key(job: PoolJob) -> tuple[bool, int, float, str]:
        is_overdue = now_s - job.submitted_s > max_wait_s
        return not is_overdue, 0 if is_overdue else -job.priority, job.submitted_s, job.name

    return sorted(jobs, key=key)


def why_never(job: PoolJob, budget: Resources) -> str:
    """Return why a job can never start in a pool of this budget, for people; empty if it can."""
    fewest = job.needs.times(job.min_workers)
    if fewest.fits(budget):
        return ""
    return f"its {job.min_workers} workers need {fewest.text}, and the whole pool has {budget.text}"


def wanted_sizes(
    jobs: Sequence[PoolJob],
    budget: Resources,
    divide: Divider,
    now_s: float,
    max_wait_s: float = 3600.0,
) -> dict[str, int]:
    """Return the number of workers that each job should have; 0 for one that waits.

    The sizes fit into the budget together, unless jobs that must not be changed, and the fewest workers of running ones, exceed
    it by themselves.
    """
    running = _steady([job for job in jobs if job.is_flexible], now_s)
    queue = in_queue_order([job for job in jobs if job.is_waiting], now_s, max_wait_s)
    kept = [job for job in jobs if not job.is_flexible and not job.is_waiting]
    wanted = {job.name: job.held for job in kept} | {job.name: 0 for job in queue}
    free = budget - held_by(kept)
    if queue or not held_by(running).fits(free):
        running = [job for job in jobs if job.is_flexible]  # they have to make room
    admitted, overdue = _admitted(running, queue, free, now_s, max_wait_s)
    movable = [*running, *admitted]
    if movable:
        chosen = divide(movable, free, now_s)
        wanted |= _kept_within(movable, chosen, overdue, free)
    return wanted


def _steady(running: Sequence[PoolJob], now_s: float) -> list[PoolJob]:
    """Return running jobs, with their present sizes as the fewest where these are new."""

    def present(job: PoolJob) -> int:
        return max(job.min_workers, min(job.held, job.max_workers))

    return [replace(job, min_workers=present(job)) if now_s - job.since_s < STAY_S else job for job in running]


def _admitted(
    running: Sequence[PoolJob], queue: Sequence[PoolJob], free: Resources, now_s: float, max_wait_s: float
) -> tuple[list[PoolJob], set[str]]:
    """Return the waiting jobs that fit, all with their fewest workers, and those of them that are overdue."""
    left = free
    for job in running:
        left -= job.needs.times(job.min_workers)
    admitted: list[PoolJob] = []
    overdue: set[str] = set()
    for job in queue:
        is_overdue = now_s - job.submitted_s > max_wait_s
        fewest = job.needs.times(job.min_workers)
        if fewest.fits(left):
            admitted.append(job)
            overdue |= {job.name} if is_overdue else set()
            left -= fewest
        elif is_overdue and fewest.fits(free):
            break  # later room is kept for it
    return admitted, overdue


def _kept_within(jobs: Sequence[PoolJob], chosen: Mapping[str, int], overdue: set[str], free: Resources) -> dict[str, int]:
    """Return a policy's sizes, corrected to the rules and to all resources: policies divide one of them."""
    sizes = {}
    for job in jobs:
        asked = chosen.get(job.name, 0)
        must_run = not job.is_waiting or job.name in overdue
        sizes[job.name] = min(job.max_workers, max(job.min_workers, asked)) if asked or must_run else 0
    by_name = {job.name: job for job in jobs}
    while not _fit(by_name, sizes, free):
        larger = [job for job in jobs if sizes[job.name] > job.min_workers]
        starting = [job for job in jobs if job.is_waiting and sizes[job.name]]
        if larger:
            least = min(larger, key=lambda job: (job.priority, _loss(job, sizes[job.name]), job.name))
            sizes[least.name] -= 1
        elif starting:
            sizes[min(starting, key=lambda job: (job.name in overdue, job.priority, -job.submitted_s)).name] = 0
        else:
            break  # all run with their fewest workers
    return sizes


def _fit(jobs: Mapping[str, PoolJob], sizes: Mapping[str, int], free: Resources) -> bool:
    return held_by(replace(jobs[name], granted=size, planned=0, alive=0) for name, size in sizes.items()).fits(free)


def _loss(job: PoolJob, num_workers: int) -> float:
    """Return the weighted share of a job's best throughput that it loses with its last worker."""
    now, less = job.rate(num_workers), job.rate(num_workers - 1)
    if now is None or less is None:
        return 0.0
    return job.weight * (now.samples_per_s - less.samples_per_s) / max(r.samples_per_s for r in job.rates)
