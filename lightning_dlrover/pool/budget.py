"""Decide the size that each job of a pool should have, within the budget.

Rules that hold for every policy:

- A job keeps its own limits. It is never stopped once it runs: at the least it keeps its fewest workers, whatever the priority
  of a job that waits.
- A job with a size set by hand, or with a planner that has not decided yet, keeps its size and is counted.
- Waiting jobs start in the order of `owners.py`. One that does not fit holds back the jobs of other owners. Smaller jobs of its
  own owner pass it, until it has waited longer than the bound: from then on no job does.
- An owner has no more than its quota.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from lightning_dlrover.planner.cluster.pool.jobs import PoolJob, held_by
from lightning_dlrover.planner.cluster.pool.owners import Owners, held_by_owner, queue_in_order, weighed
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.planner.cluster.queue_order import is_overdue

__all__ = ["Divider", "wanted_sizes", "why_never"]

NO_RULES = Owners()

STAY_S = 30.0
"""Seconds for which a job keeps a new size though another running job would gain more: predictions change with each size."""


class Divider(Protocol):
    """Divides resources among jobs. Pure."""

    def __call__(self, jobs: Sequence[PoolJob], free: Resources, now_s: float) -> Mapping[str, int]:
        """Return the number of workers of each job by name; a job that is absent, or has 0, waits.

        Args:
            jobs: running ones of variable size, then waiting ones in turn; the fewest workers of all fit into `free` together.
        """
        ...


def why_never(job: PoolJob, budget: Resources, owners: Owners = NO_RULES) -> str:
    """Return why a job can never start in a pool of this budget, for people; empty if it can."""
    fewest = job.needs.times(job.min_workers)
    if not fewest.fits(budget):
        return f"its {job.min_workers} workers need {fewest.text}, and the whole pool has {budget.text}"
    if not fewest.fits(quota := owners.quota(job.owner)):
        return f"its {job.min_workers} workers need {fewest.text}, and the quota of owner {job.owner} is {quota.text}"
    return ""


def wanted_sizes(
    jobs: Sequence[PoolJob],
    budget: Resources,
    divide: Divider,
    now_s: float,
    max_wait_s: float = 3600.0,
    owners: Owners = NO_RULES,
) -> dict[str, int]:
    """Return the number of workers that each job should have; 0 for one that waits.

    The sizes fit into the budget together, unless jobs that must not be changed, and the fewest workers of running ones, exceed
    it by themselves. The same holds for each owner and its quota.
    """
    running = _steady([job for job in jobs if job.is_flexible], now_s)
    queue = queue_in_order(jobs, budget, owners, now_s, max_wait_s)
    kept = [job for job in jobs if not job.is_flexible and not job.is_waiting]
    wanted = {job.name: job.held if not job.is_waiting else 0 for job in jobs if not job.is_flexible}
    free = budget - held_by(kept)
    if queue.jobs or not held_by(running).fits(free):
        running = [job for job in jobs if job.is_flexible]  # they have to make room
    by_hand = held_by(job for job in kept if job.is_by_hand)
    admitted, overdue = _admitted(running, queue.jobs, free, budget - by_hand, now_s, max_wait_s)
    movable = weighed([*running, *admitted], owners)
    if movable:
        wanted |= _divided(movable, free, held_by_owner(kept), divide, overdue, owners, now_s)
    return wanted


def _divided(
    movable: Sequence[PoolJob],
    free: Resources,
    kept: Mapping[str, Resources],
    divide: Divider,
    overdue: set[str],
    owners: Owners,
    now_s: float,
) -> dict[str, int]:
    """Return a policy's sizes, within quotas.

    A policy knows no quotas. So the jobs of an owner that would get too much are cut to it, and the rest is divided again.

    Args:
        kept: resources of each owner's other jobs.
    """
    for _ in range(1 + len(owners.quotas)):
        sizes = _kept_within(movable, divide(movable, free, now_s), overdue, free)
        held = {job.owner: kept.get(job.owner, Resources()) for job in movable}
        for job in movable:
            held[job.owner] += job.needs.times(sizes[job.name])
        exceeded = owners.exceeded(held)
        if not exceeded:
            break
        for owner in exceeded:
            of = [job for job in movable if job.owner == owner]
            cut = _kept_within(of, sizes, overdue, owners.quota(owner) - kept.get(owner, Resources()))
            most = {job.name: max(job.min_workers, cut[job.name]) for job in of}
            movable = [replace(job, max_workers=most.get(job.name, job.max_workers)) for job in movable]
    return sizes


def _steady(running: Sequence[PoolJob], now_s: float) -> list[PoolJob]:
    """Return running jobs, with their present sizes as the fewest where these are new."""

    def present(job: PoolJob) -> int:
        return max(job.min_workers, min(job.held, job.max_workers))

    return [replace(job, min_workers=present(job)) if now_s - job.since_s < STAY_S else job for job in running]


def _admitted(
    running: Sequence[PoolJob],
    queue: Sequence[PoolJob],
    free: Resources,
    in_the_end: Resources,
    now_s: float,
    max_wait_s: float,
) -> tuple[list[PoolJob], set[str]]:
    """Return the waiting jobs that fit, all with their fewest workers, and those of them that are overdue.

    Args:
        in_the_end: resources that are free once all jobs that nobody has set by hand have ended.
    """
    left = free
    for job in running:
        left -= job.needs.times(job.min_workers)
    admitted: list[PoolJob] = []
    overdue: set[str] = set()
    only: str | None = None  # owner whose turn it is, while the others are held back
    for job in queue:
        if only is not None and job.owner != only:
            continue
        is_late = is_overdue(job.submitted_s, now_s, max_wait_s)
        fewest = job.needs.times(job.min_workers)
        if fewest.fits(left):
            admitted.append(job)
            overdue |= {job.name} if is_late else set()
            left -= fewest
        elif not fewest.fits(in_the_end):
            continue  # a person has given away what it waits for
        elif is_late:
            break
        else:
            only = job.owner
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
            sizes[min(reversed(starting), key=lambda job: job.name in overdue).name] = 0  # the last in turn
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
