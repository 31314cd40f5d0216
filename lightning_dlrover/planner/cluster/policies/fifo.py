"""As many jobs at once as fit by memory and places, in order, whatever they do to each other."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlrover.planner.cluster.jobs import Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule, spread

__all__ = ["fifo"]


def fifo(settings: PolicySettings) -> PlacementRule:
    """Return the policy; a job that does not fit stops those behind it on the kinds of device that it could use."""

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        for job in jobs:
            devices = spread(packing, job)
            if devices is not None:
                packing.start(job, devices)
            else:
                packing.close([device for device in packing.open_devices() if device.kind in job.profiles])

    return place
