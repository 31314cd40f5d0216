"""Common parts of Pollux and Sia: how much a restart counts, and how far a job may grow."""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["SEEN_SPREAD", "growth_limits", "restart_factors"]

SEEN_SPREAD = 0.05
"""Largest deviation of a predicted speed's logarithm at which the size counts as profiled."""


def restart_factors(share: Share) -> Floats:
    """Return the factor on the goodput of a job that has to restart, shape ``(num_jobs,)``.

    (T - R S) / (T + S), with the job's age T, its restarts R so far and the cost S of one, in Pollux and in Sia. It is 1 for
    jobs younger than a restart, as in Sia's artefact.
    """
    restarts = np.array([job.restarts for job in share.jobs])
    cost_s = np.array([job.change_s for job in share.jobs])
    lost_s = np.maximum(share.ages_s - restarts * cost_s, 0.0)
    return np.where(share.ages_s > cost_s, lost_s / np.maximum(share.ages_s + cost_s, 1e-9), 1.0)


def growth_limits(share: Share) -> Ints:
    """Return the most devices of each job: twice the largest profiled size, at least its fewest; shape ``(num_jobs,)``."""
    is_seen = (share.speeds > 0) & (share.spreads <= SEEN_SPREAD)
    seen = np.where(is_seen, share.sizes, 0).max(axis=1)
    limits = 2 * np.maximum(seen, share.present)
    return np.asarray(np.clip(limits, share.least, share.most))
