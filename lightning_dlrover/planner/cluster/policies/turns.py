"""Ours where jobs can be paused at no cost: the sets of `complementary` take turns on each device, the best one first.

The best set makes the most progress in a second: the sum of its weighted relative speeds. So jobs that leave a device idle run
beside others while there are others, and jobs that keep it busy alone are left for the end. The policy is asked again whenever
a job comes or ends, and a job that was left out for too long goes before all others (`waiting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_dlrover.planner.cluster.grouping import Group
from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policies.complementary import best_sets, costs
from lightning_dlrover.planner.cluster.policy import PolicySettings
from lightning_dlrover.planner.cluster.waiting import Place

__all__ = ["MOST_USE", "turns"]

MOST_USE = 1.2
"""Jobs of a set may want this times a limit. Their use is a mean, and an idle core is lost."""
LEAST_GAIN = 0.02
"""A set is better than one with earlier jobs if it makes more progress by this fraction."""


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
    """Return the jobs that run on a device, beside those that are there."""
    present = packing.members(device)
    groups = [*([Group((), present, device)] if present else []), *(Group((job,)) for job in jobs)]
    if not jobs:
        return ()
    sets = best_sets(packing, groups, device, settings, most_use=MOST_USE)
    if present:
        return next(group.waiting for group in sets if group.device is not None)
    weights = np.array([sum(job.weight for job in group.waiting) for group in sets])
    progress = weights / costs([group.waiting for group in sets], device, settings)
    good = [group for group, amount in zip(sets, progress, strict=True) if amount >= (1 - LEAST_GAIN) * progress.max()]
    place_of = {job.name: number for number, job in enumerate(jobs)}
    return min(good, key=lambda group: min(place_of[job.name] for job in group.waiting)).waiting
