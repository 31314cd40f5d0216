"""One job at a time on each device, in order: the baseline of co-location."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlrover.planner.cluster.jobs import Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule, spread

__all__ = ["sequential"]


def sequential(settings: PolicySettings) -> PlacementRule:
    """Return the policy; a job that finds no empty device stops those behind it."""

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        for job in jobs:
            devices = spread(packing, job)  # those with the fewest workers
            if devices is None or any(packing.members(device) for device in devices):
                return
            packing.start(job, devices)

    return place
