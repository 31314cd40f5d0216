"""Shortest remaining time first, preemptive, with sizes that shrink and grow.

Jobs take turns by predicted seconds to their end at the requested size, over their weight, as in `srtf`. In this order each
has its requested size, or as many devices as are left, if these are enough for its fewest. What is left then goes to the jobs
in the same order, up to the size from which on no device makes a job faster.

Differences: no paper has this policy by itself. It is the baseline that Optimus and AFS (see `afs`) start from, and it shows
what elasticity alone adds to `srtf`. A job of unknown length is expected to need as much again as it has had.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.srtf import shortest_first

__all__ = ["elastic_srtf"]


def elastic_srtf(share: Share) -> Ints:
    """Return the sizes."""
    order = sorted(shortest_first(share), key=lambda index: share.floors[index] == 0)
    numbers, left = np.zeros(len(share.jobs), dtype=np.int64), share.num_devices
    for wanted in (share.asked, share.fastest):
        for index in order:
            have = int(numbers[index])
            number = min(max(int(wanted[index]), have), have + left)
            if number >= share.least[index]:
                numbers[index] = number
                left -= number - have
    return numbers
