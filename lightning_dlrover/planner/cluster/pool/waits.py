"""Predict the wait of each job in the queue: its place, the expected time until it starts, and the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.owners import Owners, queue_in_order
from lightning_dlrover.planner.cluster.pool.resources import Resources

__all__ = ["Wait", "queue_of"]


@dataclass(frozen=True)
class Wait:
    """A job's wait.

    Args:
        place: number in the queue, from 1.
        expected_s: seconds until it starts, if no other job is submitted meanwhile; None: unknown.
        reason: a sentence for people.
    """

    name: str
    place: int
    expected_s: float | None
    reason: str


def queue_of(jobs: Sequence[PoolJob], budget: Resources, now_s: float, max_wait_s: float, owners: Owners) -> list[Wait]:
    """Return the waits of all waiting jobs in order.

    Each job starts once enough of those before it have ended. Running jobs can go down to their fewest workers for it, so they
    are counted with these, and end as late as with their present sizes.
    """
    queue = queue_in_order(jobs, budget, owners, now_s, max_wait_s)
    holders = [job for job in jobs if job.held]
    free = budget
    for job in holders:
        free -= job.needs.times(job.least_held)
    ends = [_End(job.name, job.seconds_left(job.held), job.needs.times(job.least_held)) for job in holders]
    waits: list[Wait] = []
    for place, job in enumerate(queue.jobs, start=1):
        need = job.needs.times(job.min_workers)
        wait, free, ends = _wait_of(job, place, need, free, ends)
        waits.append(_behind(waits, wait, {each.name: each.owner for each in queue.jobs}))
    for place, job in enumerate(queue.beyond_quota, start=len(waits) + 1):
        need, quota = job.needs.times(job.min_workers), owners.quota(job.owner)
        reason = f"it needs {need.text}, and with the jobs before it owner {job.owner} has its quota of {quota.text}"
        waits.append(Wait(job.name, place, None, reason))
    return waits


def _behind(before: Sequence[Wait], wait: Wait, owner_of: Mapping[str, str]) -> Wait:
    """Return a wait that ends no sooner than those of other owners' jobs with an earlier turn: no job passes these."""
    if wait.expected_s is None:
        return wait
    for other in reversed(before):
        is_later = other.expected_s is None or other.expected_s > wait.expected_s
        if is_later and owner_of[other.name] != owner_of[wait.name]:
            reason = f"owner {owner_of[other.name]} has its turn first, with {other.name}"
            return replace(wait, expected_s=other.expected_s, reason=reason)
    return wait


@dataclass(frozen=True)
class _End:
    """The expected end of a job, in seconds from now, and the resources that it gives back."""

    name: str
    at_s: float | None
    gives: Resources


def _wait_of(
    job: PoolJob, place: int, need: Resources, free: Resources, ends: list[_End]
) -> tuple[Wait, Resources, list[_End]]:
    """Return the wait of one job, and the free resources and later ends after its start."""
    missing = f"it needs {need.text}, and the other jobs leave it {_positive(free).text}"
    waited_s = 0.0
    known = sorted((end for end in ends if end.at_s is not None), key=lambda end: (end.at_s or 0.0, end.name))
    unknown = [end for end in ends if end.at_s is None]
    last = ""
    while not need.fits(free) and known:
        end, *known = known
        free, waited_s, last = free + end.gives, end.at_s or 0.0, end.name
    rest = [*known, *unknown]
    if not need.fits(free):
        names = ", ".join(sorted(end.name for end in unknown)) or "other jobs"
        reason = f"{missing}; when it starts depends on {names}, whose end is not known"
        return Wait(job.name, place, None, reason), free - need, rest
    reason = f"{missing}; it starts when {last} has ended" if last else "running jobs make room for it"
    own_s = job.seconds_left(job.min_workers)
    end = _End(job.name, waited_s + own_s if own_s is not None else None, need)
    return Wait(job.name, place, waited_s, reason), free - need, [*rest, end]


def _positive(resources: Resources) -> Resources:
    return Resources(max(0.0, resources.cores), max(0.0, resources.gpus), max(0.0, resources.memory_mb))
