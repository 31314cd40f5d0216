"""Shortest remaining time first, preemptive, with the sizes that users asked for (Schrage, Operations Research 16(3), 1968).

Jobs take turns by predicted seconds to their end over their weight (Smith's rule); those that do not fit are passed over.

Differences: the rule is for one server. Seconds come from learned speeds. A job of unknown length is expected to need as much
again as it has had.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import first_fits

__all__ = ["shortest_first", "srtf"]


def srtf(share: Share) -> Ints:
    """Return the sizes."""
    return first_fits(share, shortest_first(share), share.asked)


def shortest_first(share: Share) -> list[int]:
    """Return the indices of jobs by seconds to their end at the requested size, over their weight."""
    seconds = share.seconds_left[np.arange(len(share.jobs)), share.columns_of(share.asked)] / share.weights
    return sorted(range(len(share.jobs)), key=lambda i: (seconds[i], share.jobs[i].submitted_s, share.jobs[i].name))
