"""Divide a pool by marginal gain: the worker that adds most to its job's throughput is given first.

`division.divide` does the work; this file turns a pool's jobs into its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dlrover.planner.cluster.division import ClusterJob, Option, divide
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.planner.plan import Settings

__all__ = ["by_marginal_gain"]

MIN_GAIN = 0.03
"""Gain below which running jobs keep their sizes, as a share of the weighted throughput of all: predictions have an error."""


def by_marginal_gain(jobs: Sequence[PoolJob], free: Resources, now_s: float) -> Mapping[str, int]:
    """Return sizes that gain much together. Jobs with GPUs are divided first, then the others on the cores that are left."""
    on_gpus = [job for job in jobs if job.needs.gpus]
    others = [job for job in jobs if not job.needs.gpus]
    sizes = _divided(on_gpus, "gpus", free.gpus)
    for job in on_gpus:
        free -= job.needs.times(sizes[job.name])
    return sizes | _divided(others, "cores", free.cores)


def _divided(jobs: Sequence[PoolJob], unit: str, amount: float) -> dict[str, int]:
    if not jobs:
        return {}
    competitors = [ClusterJob(job.name, _options(job, unit), job.weight) for job in jobs]
    fewest = sum(min(option.cost for option in job.options) for job in competitors)
    shares = divide(competitors, max(amount, fewest))
    sizes = {name: option.settings.num_workers for name, option in shares.items()}
    present = {job.name: job.held for job in jobs}
    fits = sum(getattr(job.needs, unit) * job.held for job in jobs) <= amount
    if fits and not any(job.is_waiting for job in jobs) and _gain(competitors, present, sizes) < MIN_GAIN:
        return present
    return sizes


def _options(job: PoolJob, unit: str) -> tuple[Option, ...]:
    """Return the job's sizes with known throughput; its fewest workers alone where none is known."""
    each = getattr(job.needs, unit) or 1e-6  # a worker that needs none of it costs next to nothing
    sizes = range(job.min_workers, job.max_workers + 1)
    known = [(size, rate.samples_per_s) for size in sizes if (rate := job.rate(size)) is not None and rate.samples_per_s > 0]
    if job.min_workers not in dict(known):
        # Its fewest workers must be an option even if they are slower than any known size.
        known.append((job.min_workers, known[0][1] * job.min_workers / known[0][0] if known else 1.0))
    return tuple(Option(Settings(size, 0, 0, 0), each * size, rate) for size, rate in known)


def _gain(jobs: Sequence[ClusterJob], before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Return the gain of all jobs together, as a share of the present sum of weighted throughputs."""

    def total(sizes: Mapping[str, int]) -> float:
        options = {(job.name, option.settings.num_workers): job.gain(option) for job in jobs for option in job.options}
        return sum(options.get((job.name, sizes[job.name]), 0.0) for job in jobs)

    now = total(before)
    return (total(after) - now) / now if now else 1.0
