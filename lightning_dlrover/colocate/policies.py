"""Ours where jobs can be paused at no cost: the sets of `complementary` take turns on each device, the best one first.

The best set makes the most progress in a second: the sum of its weighted relative speeds. So jobs that leave a device idle run
beside others while there are others, and jobs that keep it busy alone are left for the end. Jobs that run already, such as
those that start, stay, and leave a set less of each limit. The policy is asked again whenever a job comes or ends, and a job
that was left out for too long goes before all others (`waiting.py`).

The last jobs end together: those with the longest remaining time run first (McNaughton, Management Science 1959).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from lightning_dlrover.planner.cluster.grouping import Group, Room
from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policies.complementary import best_sets, costs
from lightning_dlrover.planner.cluster.policy import Floats, PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule

__all__ = ["MOST_USE", "turns"]

MOST_USE = 1.25
"""Jobs of a set may want this times a limit. Beyond it each finds less of its data in the caches: four copies of
`benchmarks/colocation_job.py` on two cores take 10 % more CPU time than two, and six 20 % more.
"""
FULL_USE = 1.6
"""Jobs may want this times a limit where cores would be idle otherwise: three that could each use a core, on two cores."""
BUSY = 0.95
"""Fraction of a limit from which on no job is added for the rest."""
WHOLE = ("cores", "gpu")
"""Resources that a job has or has not at any moment; it uses a part of the others."""
SAME = 0.02
"""Fraction by which the progress of two sets may differ before one is better."""
SAME_END_S = 0.5
"""The last jobs run at once where their remaining times differ by less."""


def turns(settings: PolicySettings, are_last: bool = False) -> PlacementRule:
    """Return the policy.

    Args:
        are_last: no other jobs will come. Those with the longest remaining time go first. If all have the same, they run at
            once where they nearly fit, and take turns otherwise. A job that is left over would leave cores idle in the end.
    """

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        waiting = list(jobs)
        for device in packing.open_devices():
            able = [job for job in waiting if packing.fits(job, device)]
            if are_last:
                able.sort(key=functools.partial(_in_turn, device=device))
            if are_last and able and _end_together(able, device) and _fit_beside(packing, device, able, settings, FULL_USE):
                chosen = tuple(able)
            else:
                chosen = _chosen(packing, device, able, settings)
            for job in chosen:
                if packing.fits(job, device):
                    packing.start(job, [device])
                    waiting.remove(job)

    return place


def _in_turn(job: Job, device: Device) -> tuple[float, float]:
    left_s = _left_s(job, device)
    return -left_s if math.isinf(left_s) else -math.floor(left_s / SAME_END_S), job.waits_since_s


def _left_s(job: Job, device: Device) -> float:
    """Return the time that the rest of a job takes alone; infinite where its end is unknown."""
    return math.inf if job.steps_left is None else job.steps_left / job.profiles[device.kind].steps_per_s


def _end_together(jobs: Sequence[Job], device: Device) -> bool:
    """Whether jobs have about the same remaining time, as far as it is known."""
    known = [left_s for job in jobs if (left_s := _left_s(job, device)) < math.inf]
    return not known or max(known) - min(known) <= SAME_END_S


def _chosen(packing: Packing, device: Device, jobs: Sequence[Job], settings: PolicySettings) -> tuple[Job, ...]:
    """Return the jobs that run on a device, beside those that are there. On an empty one at least one runs."""
    present = packing.members(device)
    most_use = MOST_USE - _present_use(packing, device)
    if present:
        jobs = [job for job in jobs if packing.use_of_limits((job,), device, with_present=False).max() <= most_use]
    if not jobs:
        return ()
    sets = best_sets(packing, [Group((job,)) for job in jobs], device, settings, most_use=most_use)
    progress = _progress([group.waiting for group in sets], device, settings)
    good = [group for group, amount in zip(sets, progress, strict=True) if amount >= (1 - SAME) * progress.max()]
    place_of = {job.name: number for number, job in enumerate(jobs)}
    best = min(good, key=lambda group: min(place_of[job.name] for job in group.waiting)).waiting
    first = _with_earlier(packing, device, best, jobs, settings, most_use)
    chosen = _filled(packing, device, first, jobs, settings)
    if not present:
        return chosen
    with_them, without = _progress([(*present, *chosen), present], device, settings)
    return chosen if with_them >= (1 - SAME) * without else ()


def _with_earlier(
    packing: Packing, device: Device, chosen: tuple[Job, ...], jobs: Sequence[Job], settings: PolicySettings, most_use: float
) -> tuple[Job, ...]:
    """Put earlier jobs of the order in the place of later ones that make no more progress there.

    Of equal jobs, some are left over. They would be the same ones each time.
    """
    (least,) = (1 - SAME) * _progress([chosen], device, settings)
    for number, job in enumerate(jobs):
        for leaver in [other for other in reversed(jobs[number + 1 :]) if other in chosen and job not in chosen]:
            others = (job, *(each for each in chosen if each is not leaver))
            if _fit(packing, device, others, settings, most_use) and _progress([others], device, settings)[0] >= least:
                chosen = others
                break
    return chosen


def _filled(
    packing: Packing, device: Device, chosen: tuple[Job, ...], jobs: Sequence[Job], settings: PolicySettings
) -> tuple[Job, ...]:
    """Add jobs in order that take nothing from the progress, until the device is busy also while others begin and end."""
    (least,) = (1 - SAME) * _progress([chosen], device, settings)
    for job in [job for job in jobs if job not in chosen]:
        if _busy(device, (*packing.members(device), *chosen)) >= BUSY:
            break
        more = (*chosen, job)
        if _fit_beside(packing, device, more, settings, FULL_USE) and _progress([more], device, settings)[0] >= least:
            chosen = more
    return chosen


def _busy(device: Device, jobs: Sequence[Job]) -> float:
    """Return the largest fraction of a limit that jobs keep busy.

    A job that uses a part of a core or of a GPU has a whole one for that part of the time. Those times are independent, so some
    are idle even where the sum exceeds the limit.
    """
    fractions = [0.0]
    for resource, limit in device.limits.items():
        uses = [job.profiles[device.kind].use.get(resource, 0.0) for job in jobs]
        parts = [use for use in uses if use < 1.0] if resource in WHOLE else []
        at_once = np.ones(1)  # chance of each number of them
        for part in parts:
            at_once = np.convolve(at_once, [1.0 - part, part])
        always = sum(uses) - sum(parts)
        fractions.append(float(at_once @ np.minimum(limit, always + np.arange(len(at_once)))) / limit)
    return max(fractions)


def _fit_beside(packing: Packing, device: Device, jobs: Sequence[Job], settings: PolicySettings, most_use: float) -> bool:
    """Whether jobs that fit one by one also fit together, beside those present, which leave them less of each limit."""
    return _fit(packing, device, jobs, settings, most_use - _present_use(packing, device))


def _present_use(packing: Packing, device: Device) -> float:
    """Return the largest fraction of a limit that the jobs on a device use."""
    return float(packing.use_of_limits((), device, with_present=True).max()) if packing.members(device) else 0.0


def _fit(packing: Packing, device: Device, jobs: Sequence[Job], settings: PolicySettings, most_use: float) -> bool:
    """Whether jobs that fit one by one also fit together. A single job on an empty device always does."""
    if len(jobs) == 1 and not packing.members(device):
        return True
    room = Room(packing, [Group((job,)) for job in jobs], device, settings.most_together, True, most_use)
    return room.fits(range(len(jobs)))


def _progress(sets: Sequence[Sequence[Job]], device: Device, settings: PolicySettings) -> Floats:
    """Return the sum of the weighted relative speeds of each set."""
    return np.array([sum(job.weight for job in jobs) for jobs in sets]) / costs(sets, device, settings)
