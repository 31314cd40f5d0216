"""heSRPT: the division with the least mean completion time where all jobs have the speedup k^p and are present from the start.

With the m present jobs in the order of their remaining sizes, the largest first, job i gets the share

    theta_i = (i / m)^(1 / (1 - p)) - ((i - 1) / m)^(1 / (1 - p))

of all devices (Berg, Vesilo and Harchol-Balter, Performance Evaluation 144, 2020, theorem 3; weights as in their section on
weighted completion times: i / m becomes the part of all weights that jobs of at least this size have). When a job comes, it is
computed again for those present, which is the paper's heuristic for arrivals.

Differences: devices are whole. The smallest job gets its share, rounded, within its limits; then the next one its share of what
is left. Jobs do not have one speedup: p is `EXPONENT`, chosen on the workloads 1 and 2 of docs/lab/cluster_figures.md, and a
remaining size is the device seconds at a job's best efficiency. A job of unknown length is expected to need as much again as it
has had.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["EXPONENT", "hesrpt", "shares"]

EXPONENT = 0.6
"""Exponent p of the speedup."""


def hesrpt(share: Share) -> Ints:
    """Return the sizes."""
    part = shares(share.work_left, share.weights, EXPONENT)
    numbers, left = np.where(share.floors > 0, share.least, 0), share.num_devices - int(share.floors.sum())
    total = 1.0
    for index in np.argsort(-part, kind="stable").tolist():
        available = left + int(numbers[index])
        wanted = min(round(available * part[index] / total), int(share.fastest[index])) if total > 1e-12 else 0
        number = max(wanted, int(share.floors[index]))
        numbers[index] = number if number >= share.least[index] else 0
        left = available - int(numbers[index])
        total -= part[index]
    return share.sizes[share.columns_of(numbers)]


def shares(work: Floats, weights: Floats, exponent: float) -> Floats:
    """Return the part of all devices for each job, shape ``(num_jobs,)``; the sum is 1.

    Args:
        work: left, shape ``(num_jobs,)``.
        weights: of the completion times, of that shape.
    """
    order = np.lexsort((np.arange(len(work)), -work / weights))
    total = np.cumsum(weights[order])
    part = np.empty(len(work))
    bounds = (total / total[-1]) ** (1 / (1 - exponent)) if len(work) else total
    part[order] = np.diff(bounds, prepend=0.0)
    return part
