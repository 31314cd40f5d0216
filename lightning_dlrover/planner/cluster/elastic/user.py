"""As users asked, first come first served, with EASY backfilling: a queue without elasticity."""

from __future__ import annotations

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import backfilled

__all__ = ["user"]


def user(share: Share) -> Ints:
    """Return the sizes."""
    return backfilled(share, share.asked)
