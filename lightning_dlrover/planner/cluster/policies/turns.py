"""Ours where jobs can be paused at no cost: the sets of `complementary` take turns on each device, the best one first.

The best set makes the most progress in a second: the sum of its weighted relative speeds. So jobs that leave a device idle run
beside others while there are others, and jobs that keep it busy alone are left for the end. Jobs that run already, such as
those that start, stay, and leave a set less of each limit. The policy is asked again whenever a job comes or ends, and a job
that was left out for too long goes before all others (`waiting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_dlrover.planner.cluster.grouping import Group, Room
from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policies.complementary import best_sets, costs
from lightning_dlrover.planner.cluster.policy import Floats, PolicySettings
from lightning_dlrover.planner.cluster.waiting import Place

__all__ = ["MOST_USE", "turns"]

MOST_USE = 1.25
"""Jobs of a set may want this times a limit. Beyond it each finds less of its data in the caches: four copies of
`benchmarks/colocation_job.py` on two cores take 10 % more CPU time than two, and six 20 % more.
"""
SAME = 0.02
"""Fraction by which the progress of two sets may differ before one is better."""


def turns(settings: PolicySettings) -> Place:
    """Return the policy."""

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        waiting = list(jobs)
        for device in packing.open_devices():
            chosen = _chosen(packing, device, [job for job in waiting if packing.fits(job, device)], settings)
            for job in chosen:
                if packing.fits(job, device):
                    packing.start(job, [device])
                    waiting.remove(job)

    return place


def _chosen(packing: Packing, device: Device, jobs: Sequence[Job], settings: PolicySettings) -> tuple[Job, ...]:
    """Return the jobs that run on a device, beside those that are there. On an empty one at least one runs."""
    present = packing.members(device)
    most_use = MOST_USE
    if present:
        most_use -= float(packing.use_of_limits((), device, with_present=True).max())
        jobs = [job for job in jobs if packing.use_of_limits((job,), device, with_present=False).max() <= most_use]
    if not jobs:
        return ()
    sets = best_sets(packing, [Group((job,)) for job in jobs], device, settings, most_use=most_use)
    progress = _progress([group.waiting for group in sets], device, settings)
    good = [group for group, amount in zip(sets, progress, strict=True) if amount >= (1 - SAME) * progress.max()]
    place_of = {job.name: number for number, job in enumerate(jobs)}
    best = min(good, key=lambda group: min(place_of[job.name] for job in group.waiting)).waiting
    first = _with_first(packing, device, best, jobs[0], settings, most_use)
    chosen = _filled(packing, device, first, jobs, settings, most_use)
    if not present:
        return chosen
    with_them, without = _progress([(*present, *chosen), present], device, settings)
    return chosen if with_them >= (1 - SAME) * without else ()


def _with_first(
    packing: Packing, device: Device, chosen: tuple[Job, ...], first: Job, settings: PolicySettings, most_use: float
) -> tuple[Job, ...]:
    """Put the job that is first in the order in the place of another that makes no more progress there.

    Of an odd number of equal jobs one is left over. It would be the same one each time.
    """
    if first in chosen:
        return chosen
    (least,) = (1 - SAME) * _progress([chosen], device, settings)
    for leaver in reversed(chosen):
        other = (first, *(job for job in chosen if job is not leaver))
        if _fit(packing, device, other, settings, most_use) and _progress([other], device, settings)[0] >= least:
            return other
    return chosen


def _filled(
    packing: Packing,
    device: Device,
    chosen: tuple[Job, ...],
    jobs: Sequence[Job],
    settings: PolicySettings,
    most_use: float,
) -> tuple[Job, ...]:
    """Add jobs in order that fit and take nothing from the progress: they use the cores while others begin and end."""
    (least,) = (1 - SAME) * _progress([chosen], device, settings)
    for job in [job for job in jobs if job not in chosen]:
        more = (*chosen, job)
        if _fit(packing, device, more, settings, most_use) and _progress([more], device, settings)[0] >= least:
            chosen = more
    return chosen


def _fit(packing: Packing, device: Device, jobs: Sequence[Job], settings: PolicySettings, most_use: float) -> bool:
    """Whether jobs that fit one by one also fit together."""
    room = Room(packing, [Group((job,)) for job in jobs], device, settings.most_together, True, most_use)
    return len(jobs) == 1 or room.fits(range(len(jobs)))


def _progress(sets: Sequence[Sequence[Job]], device: Device, settings: PolicySettings) -> Floats:
    """Return the sum of the weighted relative speeds of each set."""
    return np.array([sum(job.weight for job in jobs) for jobs in sets]) / costs(sets, device, settings)
