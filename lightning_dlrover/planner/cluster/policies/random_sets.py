"""Random jobs beside each other, as many as fit: the chance level of choosing sets."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning_dlrover.planner.cluster.jobs import Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule, spread

__all__ = ["random_sets"]


def random_sets(settings: PolicySettings) -> PlacementRule:
    """Return the policy. A job's turn depends on the seed and its name alone, so equal states are decided alike."""

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        for job in sorted(jobs, key=lambda job: random.Random(f"{settings.seed}/{job.name}").random()):
            if not packing.open_devices():
                return
            devices = spread(packing, job)
            if devices is not None:
                packing.start(job, devices)

    return place
