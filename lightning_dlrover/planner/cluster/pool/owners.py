"""Fairness among the owners of a pool's jobs: the order in which waiting jobs start, quotas, and the weights of running ones.

An owner's share is that of its dominant resource: the largest part of the budget that it has of any resource (dominant resource
fairness, Ghodsi et al., NSDI 2011). A running job counts with the workers that it cannot be made to give back.

The next start goes to the owner whose share, over its weight, would then be the least. Jobs of one owner start by priority,
then by submission; one that waits longer than the bound goes before the others of its owner. If it is larger than its owner's
part, the weight over that of all owners with jobs, it then counts as if it needed nothing: so it has its turn, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.resources import UNLIMITED, Resources
from lightning_dlrover.planner.cluster.queue_order import is_overdue

__all__ = ["Owners", "Queue", "held_by_owner", "queue_in_order", "weighed"]


@dataclass(frozen=True)
class Owners:
    """Weights and quotas by owner. The weight of an owner that is absent is 1, and its quota has no limit."""

    weights: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, Resources] = field(default_factory=dict)

    def weight(self, owner: str) -> float:
        return self.weights.get(owner, 1.0)

    def quota(self, owner: str) -> Resources:
        return self.quotas.get(owner, UNLIMITED)

    def exceeded(self, held: Mapping[str, Resources]) -> list[str]:
        """Return the owners that hold more than their quotas."""
        return [owner for owner in self.quotas if owner in held and not held[owner].fits(self.quota(owner))]


@dataclass(frozen=True)
class Queue:
    """Waiting jobs.

    Args:
        jobs: in the order in which they start.
        beyond_quota: jobs that would exceed their owner's quota if those before them had started.
    """

    jobs: Sequence[PoolJob]
    beyond_quota: Sequence[PoolJob]


def held_by_owner(jobs: Collection[PoolJob]) -> dict[str, Resources]:
    """Return the resources of each owner that its running jobs cannot be made to give back."""
    held: dict[str, Resources] = {}
    for job in jobs:
        held[job.owner] = held.get(job.owner, Resources()) + job.needs.times(job.least_held)
    return held


def queue_in_order(jobs: Collection[PoolJob], budget: Resources, owners: Owners, now_s: float, max_wait_s: float) -> Queue:
    """Sort the waiting jobs of a pool by their turns.

    Args:
        jobs: running ones, too.
    """

    def turn(job: PoolJob) -> tuple[bool, int, float, str]:
        late = is_overdue(job.submitted_s, now_s, max_wait_s)
        return not late, 0 if late else -job.priority, job.submitted_s, job.name

    held = held_by_owner(jobs)
    waiting = {owner: sorted((job for job in of if job.is_waiting), key=turn) for owner, of in _by_owner(jobs).items()}
    total = math.fsum(map(owners.weight, waiting))

    def counted(job: PoolJob) -> Resources:
        fewest = _fewest(job)
        is_too_large = _dominant(fewest, budget) * total > owners.weight(job.owner)
        return Resources() if is_too_large and is_overdue(job.submitted_s, now_s, max_wait_s) else fewest

    def next_of(owner: str) -> tuple[float, tuple[bool, int, float, str], str]:
        job = waiting[owner][0]
        return _dominant(held[owner] + counted(job), budget) / owners.weight(owner), turn(job), owner

    heads = [next_of(owner) for owner, of in waiting.items() if of]
    heapq.heapify(heads)
    order, beyond = [], []
    while heads:
        *_, owner = heapq.heappop(heads)
        job = waiting[owner].pop(0)
        then = held[owner] + _fewest(job)
        if then.fits(owners.quota(owner)):
            order.append(job)
            held[owner] = then
        else:
            beyond.append(job)
            if is_overdue(job.submitted_s, now_s, max_wait_s):  # its owner's later jobs would take the part that it waits for
                beyond += waiting[owner]
                waiting[owner] = []
        if waiting[owner]:
            heapq.heappush(heads, next_of(owner))
    return Queue(order, beyond)


def weighed(jobs: Sequence[PoolJob], owners: Owners) -> list[PoolJob]:
    """Return jobs as a policy of sizes should see them, so that no owner gains by more jobs or higher priorities.

    The weights of an owner's jobs add up to that of the owner, on a scale on which the mean weight of a job is 1.
    Priorities count among the jobs of one owner: the highest of each owner becomes 0, its next one -1.
    """
    of_owner = _by_owner(jobs)
    total = math.fsum(map(owners.weight, of_owner))
    found: dict[str, PoolJob] = {}
    for owner, of in of_owner.items():
        levels = sorted({job.priority for job in of}, reverse=True)
        scale = owners.weight(owner) * len(jobs) / (total * math.fsum(job.weight for job in of))
        found |= {job.name: replace(job, priority=-levels.index(job.priority), weight=job.weight * scale) for job in of}
    return [found[job.name] for job in jobs]


def _by_owner(jobs: Collection[PoolJob]) -> dict[str, list[PoolJob]]:
    found: dict[str, list[PoolJob]] = {}
    for job in jobs:
        found.setdefault(job.owner, []).append(job)
    return found


def _fewest(job: PoolJob) -> Resources:
    return job.needs.times(job.min_workers)


def _dominant(held: Resources, budget: Resources) -> float:
    pairs = ((held.cores, budget.cores), (held.gpus, budget.gpus), (held.memory_mb, budget.memory_mb))
    return max((has / of for has, of in pairs if has and of and math.isfinite(of)), default=0.0)
