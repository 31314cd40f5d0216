"""DLRover-RM: weighted greedy on the gain of throughput for each unit of resources (Wang et al., PVLDB 17(12), 2024).

Each job has its fewest devices, and candidates of more. The job and candidate with the largest weighted gain per device come
first, until the devices are used:

    w_i (S_i(k') l / (l + c) - S_i(k)) / (k' - k)

with S_i(k) the throughput over that of the job's best candidate, and the throughput of a changed job less what the change
costs in the `INTERVAL_S` of the published code. The weight w_i favours jobs with little work left. `division.divide` is the
same search for jobs of any settings.

Differences: the paper's jobs have parameter servers, and candidates of cores and memory for each kind of node, by NSGA-II; for
workers of equal devices, candidates are numbers of workers, all of which are looked at. The exact weight was not at hand: here
it is the inverse of the seconds left at the job's best candidate. The first stage, a start near the optimum by a history of
jobs, is what a family's learned speeds give all policies here. It decides whenever it is asked: leaving jobs alone for 60 to
600 s after a change made it worse on the workloads 1 and 2 of docs/lab/cluster_figures.md.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.knapsack import by_hulls
from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints

__all__ = ["INTERVAL_S", "dlrover_rm"]

INTERVAL_S = 300.0
"""Seconds for which a change is expected to last."""


def dlrover_rm(share: Share) -> Ints:
    """Return the sizes."""
    if not len(share.jobs):
        return np.zeros(0, dtype=np.int64)
    allowed = np.where(share.filling, share.speeds, 0.0)
    best = allowed.max(axis=1)
    weights = share.weights / np.maximum(np.where(share.filling, share.seconds_left, np.inf).min(axis=1), 1e-9)
    cost_s = np.array([job.change_s for job in share.jobs])[:, None]
    kept = np.where(
        (share.sizes == share.present[:, None]) | (share.present[:, None] == 0), 1.0, INTERVAL_S / (INTERVAL_S + cost_s)
    )
    gains = weights[:, None] * kept * allowed / np.where(best > 0, best, 1.0)[:, None]
    return share.sizes[by_hulls(np.where(share.filling, gains, -np.inf), share.sizes, share.num_devices)]
