"""Sizes as requested, first come first served, with EASY backfilling (Lifka, JSSPP 1995): a queue without elasticity.

In Pollux's workloads the requests are those of Pollux's tuned jobs: sizes and batches at which a job reaches 50 to 80 % of the
ideal speedup (`get_configurations` of the artefact; the sizes that users asked for are in its `workloads-realistic`).
"""

from __future__ import annotations

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import backfilled

__all__ = ["as_requested"]


def as_requested(share: Share) -> Ints:
    """Return the sizes."""
    return backfilled(share, share.asked)
