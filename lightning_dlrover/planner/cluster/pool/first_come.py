"""Give each job as many workers as it may have, first come first served, and never change them: a pool without elasticity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.resources import Resources

__all__ = ["first_come"]


def first_come(jobs: Sequence[PoolJob], free: Resources, now_s: float) -> Mapping[str, int]:
    """Return the sizes of running jobs as they are, and of each waiting one as asked if that fits, in order."""
    sizes = {job.name: job.held for job in jobs if not job.is_waiting}
    for job in jobs:
        if not job.is_waiting:
            free -= job.needs.times(job.held)
    for job in jobs:
        if not job.is_waiting:
            continue
        asked = job.needs.times(job.max_workers)
        if not asked.fits(free):
            break  # no job passes another
        sizes[job.name] = job.max_workers
        free -= asked
    return sizes
