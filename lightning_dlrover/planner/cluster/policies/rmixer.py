"""RMixer's rule of types (Tian et al., IEEE TPDS 2024; policy "dyType" of the published code).

A job is of type "compute", "memory", or "low" in both. Jobs are sorted by memory, the largest first. The device with the most
free memory takes the first job that fits and whose type differs from the one most present there, else the first that fits.

The published code takes types from a table by the name of the model. Here they follow from profiles: a job is of a type when it
uses more than an equal share of the device, one of `most_together`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule, start_spread

__all__ = ["rmixer", "type_of"]


def rmixer(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""
    together = settings.most_together

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        waiting = start_spread(packing, jobs)
        while True:
            with_room = [each for each in packing.open_devices() if len(packing.members(each)) < together]
            for device in sorted(with_room, key=lambda d: (-packing.free_bytes(d), d.name)):
                chosen = _next_job(packing, device, waiting, together)
                if chosen is not None:
                    break
            else:
                return
            packing.start(chosen, [device])
            waiting.remove(chosen)

    return place


def type_of(job: Job, device: Device, together: int) -> str:
    """Return "compute", "memory" or "low"."""
    profile = job.profiles[device.kind]
    limits = device.limits
    compute = max((profile.use.get(r, 0.0) / limits[r] for r in ("gpu", "cores") if limits.get(r)), default=0.0)
    if compute > 1 / together:
        return "compute"
    return "memory" if profile.memory_bytes > device.memory_bytes / together else "low"


def _next_job(packing: Packing, device: Device, waiting: Sequence[Job], together: int) -> Job | None:
    present = Counter(type_of(job, device, together) for job in packing.members(device))
    most = max(sorted(present), key=lambda t: present[t]) if present else None
    fitting = sorted(
        (job for job in waiting if packing.fits(job, device)),
        key=lambda job: (-job.profiles[device.kind].memory_bytes, job.name),
    )
    return next((job for job in fitting if type_of(job, device, together) != most), fitting[0] if fitting else None)
