"""Each job at its most efficient size, first come first served, with EASY backfilling.

The size is the largest with a scaling efficiency s(n) / (n s(1)) of at least `MIN_EFFICIENCY`. Pollux's "tuned jobs" run at
50 to 80 % of the ideal speedup (Qiao et al., OSDI 2021, section 5.1; `get_configurations` of the artefact). A job keeps the
size it starts with. The difference to Pollux's: the batch is given, so only the size is tuned, and by predicted speeds.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import backfilled

__all__ = ["MIN_EFFICIENCY", "efficient_sizes", "tuned"]

MIN_EFFICIENCY = 0.5
"""Smallest fraction of the ideal speedup, over the smallest size of the job."""


def tuned(share: Share) -> Ints:
    """Return the sizes."""
    return backfilled(share, efficient_sizes(share, MIN_EFFICIENCY))


def efficient_sizes(share: Share, min_efficiency: float) -> Ints:
    """Return the largest size of each job with such an efficiency, shape ``(num_jobs,)``."""
    runs = share.allowed & (share.sizes > 0)
    per_device = np.where(runs, share.speeds / np.maximum(share.sizes, 1), 0.0)
    smallest = per_device[np.arange(len(share.jobs)), runs.argmax(axis=1)]
    good = runs & (per_device >= (1 - 1e-9) * min_efficiency * smallest[:, None])
    last = len(share.sizes) - 1 - good[:, ::-1].argmax(axis=1)
    return np.asarray(np.where(good.any(axis=1), share.sizes[last], share.fewest), dtype=np.int64)
