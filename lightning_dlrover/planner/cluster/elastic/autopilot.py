"""A reaction to usage, vertical only, as of Autopilot (Rzadca et al., EuroSys 2020) and Kubernetes' vertical autoscaler.

The autoscaler requests the decaying 90th percentile of usage, times `MARGIN`, and leaves requests alone that are less than
`MIN_CHANGE` off. A job uses as many of its devices as it would need at its best efficiency for the same speed,

    usage(n) = s(n) / (s(f) / f)        f: its fewest devices

In a steady state all samples are equal, so that percentile is the present usage.

Differences: the originals set the cores and memory of a task; here the size of a job is the only dimension. They leave the
queue to the cluster's scheduler; here jobs start as in `as_requested`, and none grows while a job waits, as nothing is
preempted. Usage is predicted from the learned speeds, not sampled.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import backfilled

__all__ = ["INTERVAL_S", "MARGIN", "MIN_CHANGE", "autopilot", "recommended"]

INTERVAL_S = 300.0
"""Seconds over which usage is aggregated, so a job is left alone for as long after a change."""

MARGIN = 1.15
"""Factor on usage."""

MIN_CHANGE = 0.1
"""Least relative change that is made."""


def autopilot(share: Share) -> Ints:
    """Return the sizes."""
    wanted = recommended(share)
    numbers = backfilled(share, share.asked)
    left = share.num_devices - int(numbers.sum()) if numbers.all() else 0
    is_due = (share.present > 0) & (share.now_s - share.since_s >= INTERVAL_S)
    is_due &= np.abs(wanted - share.present) > MIN_CHANGE * share.present
    for index in np.flatnonzero(is_due).tolist():
        new = min(int(wanted[index]), int(numbers[index]) + left)
        left -= new - int(numbers[index])
        numbers[index] = new
    return numbers


def recommended(share: Share) -> Ints:
    """Return the size that the usage of each running job asks for, shape ``(num_jobs,)``."""
    per_device = share.speeds_at(share.fewest) / share.fewest
    usage = share.speeds_at(share.present) / np.where(per_device > 0, per_device, 1.0)
    wanted = np.clip(np.ceil(usage * MARGIN - 1e-9).astype(np.int64), share.fewest, share.most)
    return share.sizes[share.columns_of(wanted)]
