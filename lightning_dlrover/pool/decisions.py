"""Divide a pool with one of the policies for elastic jobs.

A device is a core, or a GPU; a pool's jobs on GPUs are divided first, then the others on the cores that are left. Where the
devices lie is left to the schedulers, so they count as one node, and only the number of each job's devices is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.elastic import ELASTIC_POLICIES, make_elastic
from lightning_dlrover.planner.cluster.jobs import Device, Job, Profile, Running, State
from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob, Rate
from lightning_dlrover.planner.cluster.pool.owners import Owners
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.planner.cluster.pool.sizes import Divider
from lightning_dlrover.planner.cluster.scaling import Speeds

__all__ = ["RateScaling", "as_asked", "elastic_divider"]

GUESSED_EXPONENT = 0.8
"""Throughput of a job with unknown speed: the number of its workers to this power."""

GUESSED_SPREAD = 0.3
"""Deviation of the logarithm of a guessed speed."""

SIGMAS_OF_INTERVAL = 2 * 1.645
"""Width of an interval of 90 %, in standard deviations."""

NODE = "pool"
MEMORY_BYTES = 1 << 40  # memory of each device; a pool counts memory by itself


def elastic_divider(name: str, max_wait_s: float) -> Divider:
    """Return the divider that decides as the policy with that name.

    Raises:
        ValueError: there is no such policy.
    """
    policy = make_elastic(name, PolicySettings(max_wait_s=max_wait_s, may_pause=False))
    # The needs of a new job are learned by running it, so it gets its fewest workers as soon as others can make room. A rigid
    # policy makes none.
    waits_longer_s = 0.0 if ELASTIC_POLICIES[name].rigid else 2 * max_wait_s

    def divide(jobs: Sequence[PoolJob], free: Resources, now_s: float) -> Mapping[str, int]:
        on_gpus = [job for job in jobs if job.needs.gpus]
        others = [job for job in jobs if not job.needs.gpus]
        sizes = _divided(policy, on_gpus, "gpus", free.gpus, now_s, waits_longer_s)
        for job in on_gpus:
            free -= job.needs.times(sizes.get(job.name, 0))
        return sizes | _divided(policy, others, "cores", free.cores, now_s, waits_longer_s)

    return divide


def as_asked(jobs: Sequence[PoolJob], budget: Resources, owners: Owners) -> list[PoolJob]:
    """Return jobs as a rigid policy treats them: one that waits needs its most workers, and one that runs gives none back.

    Where its most workers are too many for the budget, or the quota of its owner, a job needs its fewest.
    """

    def asked(job: PoolJob) -> int:
        if not job.is_waiting:
            return max(job.min_workers, min(job.held, job.max_workers))
        most = job.needs.times(job.max_workers)
        return job.max_workers if most.fits(budget) and most.fits(owners.quota(job.owner)) else job.min_workers

    return [replace(job, min_workers=asked(job)) for job in jobs]


@dataclass(frozen=True)
class RateScaling:
    """The speed of a pool's job by its devices, in samples/s.

    Args:
        units: devices of each worker.
    """

    rates: tuple[Rate, ...]
    units: int

    def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
        """Return speeds in a straight line between known numbers of workers, and as the last known one beyond them."""
        known = np.array([rate.num_workers for rate in self.rates], dtype=float)
        workers = np.asarray(num_devices, dtype=np.int64) // self.units
        samples = np.interp(workers, known, [rate.samples_per_s for rate in self.rates])
        slower = np.minimum(workers / known[0], 1.0)  # fewer workers than known are slower in proportion
        spread = np.interp(workers, known, [_spread(rate) for rate in self.rates])
        return Speeds(np.where(workers > 0, samples * slower, 0.0), spread)


def _spread(rate: Rate) -> float:
    if rate.is_measured or not 0 < rate.low_per_s < rate.high_per_s:
        return 0.0
    return math.log(rate.high_per_s / rate.low_per_s) / SIGMAS_OF_INTERVAL


@functools.lru_cache(maxsize=4096)
def _scaling(rates: tuple[Rate, ...], units: int, most: int) -> RateScaling:
    """Return the same object for equal arguments: policies remember their questions to it."""
    if rates:
        return RateScaling(rates, units)
    factor = math.exp(GUESSED_SPREAD * SIGMAS_OF_INTERVAL / 2)
    guessed = [(workers, workers**GUESSED_EXPONENT) for workers in range(1, most + 1)]
    return RateScaling(tuple(Rate(n, speed, speed / factor, speed * factor) for n, speed in guessed), units)


def _divided(
    policy: Policy, jobs: Sequence[PoolJob], unit: str, amount: float, now_s: float, waits_longer_s: float
) -> dict[str, int]:
    """Return the number of workers of each job on devices of one kind.

    Args:
        waits_longer_s: added to the wait of a job with unknown speed, as policies see it.
    """
    if not jobs:
        return {}
    units = {job.name: max(1, math.ceil(getattr(job.needs, unit))) for job in jobs}
    most = sum(units[job.name] * job.max_workers for job in jobs)
    num_devices = int(min(max(amount, 0.0), most))
    present = _present(jobs, units, num_devices)
    if present is None:
        return {job.name: job.min_workers for job in jobs if job.held}
    devices = tuple(Device(f"{unit}{number}", unit, NODE, MEMORY_BYTES, places=1) for number in range(num_devices))
    running, waiting, used = [], [], 0
    for job in jobs:
        made = _job(job, units[job.name], unit, now_s)
        if size := present[job.name] * units[job.name]:
            running.append(Running(made, tuple(device.name for device in devices[used : used + size]), job.since_s))
            used += size
        elif not job.held:
            since_s = job.submitted_s - (0.0 if job.rates else waits_longer_s)
            waiting.append(replace(made, waiting_since_s=since_s))
    allocation = policy(State(now_s, devices, tuple(waiting), tuple(running)))
    return {job.name: len(allocation.get(job.name, ())) // units[job.name] for job in jobs}


def _present(jobs: Sequence[PoolJob], units: Mapping[str, int], num_devices: int) -> dict[str, int] | None:
    """Return the present sizes, smaller where there are more than devices; None if even the fewest workers are too many."""
    sizes = {job.name: min(job.max_workers, job.held) for job in jobs}

    def excess() -> int:
        return sum(size * units[name] for name, size in sizes.items()) - num_devices

    for job in sorted(jobs, key=lambda job: (job.priority, -job.submitted_s, job.name)):
        while excess() > 0 and sizes[job.name] > job.min_workers:
            sizes[job.name] -= 1
    return sizes if excess() <= 0 else None


def _job(job: PoolJob, units: int, kind: str, now_s: float) -> Job:
    scaling = _scaling(job.rates, units, job.max_workers)
    one = scaling.speeds(np.array([job.min_workers * units]), np.array([1])).steps_per_s[0]
    return Job(
        name=job.name,
        profiles={kind: Profile(0, max(float(one), 1e-9))},
        steps_left=job.samples_left if job.rates else None,
        submitted_s=job.submitted_s,
        priority=job.priority,
        weight=job.weight,
        owner=job.owner,
        num_devices=job.max_workers * units,
        min_devices=job.min_workers * units,
        max_devices=job.max_workers * units,
        served_device_s=job.served_by(now_s) * units,
        scaling=scaling,
        start_s=job.change_s,
        change_s=job.change_s,
        deadline_s=job.deadline_s,
    )
