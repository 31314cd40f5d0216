"""Turn wanted sizes into changes that never exceed the budget, however late processes end.

A job holds the most of its grant, the workers of its plan, and those that run. So a smaller grant frees nothing by itself: only
when the job's workers have ended does another one grow. Changes that do not fit yet wait for a later decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dlrover.planner.cluster.pool.jobs import PoolJob, held_by
from lightning_dlrover.planner.cluster.pool.resources import Resources

__all__ = ["Move", "next_moves"]


@dataclass(frozen=True)
class Move:
    """A change of a job's grant."""

    name: str
    before: int
    after: int


def next_moves(
    jobs: Sequence[PoolJob],
    budget: Resources,
    wanted: Mapping[str, int],
    may_grow: bool = True,
) -> list[Move]:
    """Return the changes to make now: all that shrink, then those that grow or start and fit.

    Args:
        jobs: in the order in which they may grow.
        wanted: number of workers of each job by name; jobs that are absent stay.
        may_grow: whether the state is known well enough to give resources away.
    """
    sizes = {job.name: wanted.get(job.name, job.granted) for job in jobs}
    moves = [Move(job.name, job.granted, sizes[job.name]) for job in jobs if 0 < sizes[job.name] < job.granted]
    if not may_grow:
        return moves
    left = budget - held_by(jobs)
    for job in jobs:
        size = sizes[job.name]
        if size <= job.granted or not job.is_present:
            continue
        more = job.needs.times(max(0, size - job.held))
        # Its present workers are no reason to refuse it: then others have too much.
        if size <= job.held or more.fits(left):
            moves.append(Move(job.name, job.granted, size))
            left -= more
    return moves
