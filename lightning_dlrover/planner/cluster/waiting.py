"""The bound on waiting that every policy keeps, and the order of priorities.

Jobs that have waited longer than `max_wait_s` go first, the longest wait before all. Where such a job does not fit, the devices
with the fewest workers are closed for all others until it does. Those lose workers and gain none, so the job starts as soon as
they have ended. Below that, no job of a lower priority is considered before those of a higher one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice

from lightning_dlrover.planner.cluster.jobs import Allocation, Device, Job, State
from lightning_dlrover.planner.cluster.packing import Packing, why_never
from lightning_dlrover.planner.cluster.policy import Policy
from lightning_dlrover.planner.cluster.queue_order import is_overdue, turn_of

__all__ = ["WINDOW", "PlacementRule", "num_wanted", "spread", "start_spread", "with_bounded_wait"]

WINDOW = 64
"""Waiting jobs that one decision considers, the first in order. Bounds the time of a decision."""

PlacementRule = Callable[[Packing, Sequence[Job], float], None]
"""Starts some of these jobs, which have one priority and are in order of submission, in a packing. The float is now, s."""


def with_bounded_wait(place: PlacementRule, max_wait_s: float) -> Policy:
    """Return the policy that places jobs with `place`, priority by priority, after those that have waited too long."""

    def decide(state: State) -> Allocation:
        packing = Packing(state)
        overdue = [job for job in state.waiting if is_overdue(job.waits_since_s, state.now_s, max_wait_s)]
        for job in sorted(overdue, key=lambda job: (job.waits_since_s, job.name)):
            if not packing.open_devices():
                break
            _start_or_reserve(packing, job)
        others = sorted((j for j in state.waiting if not is_overdue(j.waits_since_s, state.now_s, max_wait_s)), key=turn_of)
        for _, jobs in groupby(islice(others, WINDOW), lambda job: job.priority):
            if not packing.open_devices():
                break
            place(packing, list(jobs), state.now_s)
        return packing.allocation

    return decide


def spread(packing: Packing, job: Job) -> list[Device] | None:
    """Return the devices with the fewest workers that fit a job, all of its fastest possible kind; None: there are too few."""
    open_devices = packing.open_devices()
    for kind in sorted(job.profiles, key=lambda kind: (-job.profiles[kind].steps_per_s, kind)):
        fitting = [device for device in open_devices if device.kind == kind and packing.fits(job, device)]
        wanted = num_wanted(job, kind, packing)
        if wanted and len(fitting) >= wanted:
            return sorted(fitting, key=lambda device: (len(packing.members(device)), device.name))[:wanted]
    return None


def start_spread(packing: Packing, jobs: Sequence[Job]) -> list[Job]:
    """Start those jobs of several devices that fit, on the devices with the fewest workers. Return the jobs of one device."""
    for job in jobs:
        if job.num_devices > 1 and (devices := spread(packing, job)) is not None:
            packing.start(job, devices)
    return [job for job in jobs if job.num_devices == 1]


def num_wanted(job: Job, kind: str, packing: Packing) -> int:
    """Devices that a job starts with: as many as it asks for, or as few as it can where there are no more; 0: never there."""
    large = _large_enough(job, kind, packing)
    return job.num_devices if len(large) >= job.num_devices else job.fewest_devices if len(large) >= job.fewest_devices else 0


def _start_or_reserve(packing: Packing, job: Job) -> None:
    devices = spread(packing, job)
    if devices is not None and all(packing.fits(job, device) for device in devices):
        packing.start(job, devices)
        return
    if why_never(job, tuple(packing.devices.values())) is not None:
        return
    kinds = [kind for kind in job.profiles if num_wanted(job, kind, packing)]
    closing = {
        kind: sorted(_large_enough(job, kind, packing), key=lambda d: (len(packing.members(d)), d.name))[
            : num_wanted(job, kind, packing)
        ]
        for kind in kinds
    }
    # The kind that has the fewest workers to wait for; the faster one where they are equal.
    kind = min(kinds, key=lambda k: (sum(len(packing.members(d)) for d in closing[k]), -job.profiles[k].steps_per_s, k))
    packing.close(closing[kind])


def _large_enough(job: Job, kind: str, packing: Packing) -> list[Device]:
    profile = job.profiles[kind]
    return [d for d in packing.devices.values() if d.kind == kind and profile.memory_bytes <= d.memory_bytes]
