"""As users asked, first come first served, with EASY backfilling: what a queue without elasticity does."""

from __future__ import annotations

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import backfilled

__all__ = ["user"]


def user(share: Share) -> Ints:
    """Return the sizes."""
    return backfilled(share, share.asked)
