"""DLRover's published heuristics: each job by itself, greedy (`PSLocalOptimizer`, and the optimisers of the Brain).

- A job starts with its fewest workers, in its turn.
- It is looked at again `INTERVAL_S` after a change. It grows by `MOST_MORE` workers, or as many as there are, while the
  marginal ratio ((v' - v) / (n' - n)) / (v / n) of the speeds v with n workers is at least `MIN_RATIO`.
- It gives the workers of its last step back where its speed fell by more than `MAX_LOSS`.
Constants are those of the code. Devices go to jobs in their turns, waiting ones before those that grow, as no job is stopped
for another.

Differences: the published rules are for parameter servers, with cores and memory of each kind of node; for workers of equal
devices only those about the number of workers remain. They compare measured speeds; here all policies use the same predictions.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.elastic.turn_taking import start_in_turn

__all__ = ["INTERVAL_S", "MAX_LOSS", "MIN_RATIO", "MOST_MORE", "dlrover"]

INTERVAL_S = 300.0
"""Seconds between looks at a job."""

MOST_MORE = 4
"""Workers that a job gains at a time."""

MIN_RATIO = 0.2
"""Smallest marginal speed of a further worker over the mean speed of the present ones."""

MAX_LOSS = 0.1
"""Fraction of its speed from which a job with more workers goes back."""


def dlrover(share: Share) -> Ints:
    """Return the sizes."""
    numbers, left = start_in_turn(share, share.fewest)
    is_due = (share.present > 0) & (share.now_s - share.since_s >= INTERVAL_S)
    for index in np.flatnonzero(is_due).tolist():
        new = _next_size(share, index, left)
        left -= new - int(numbers[index])
        numbers[index] = new
    return numbers


def _next_size(share: Share, index: int, left: int) -> int:
    now, fewest, most = int(share.present[index]), int(share.fewest[index]), int(share.most[index])
    smaller, larger = max(now - MOST_MORE, fewest), min(now + MOST_MORE, now + left, most)
    columns = share.columns_of(np.array([smaller, now, larger]))
    before, speed, after = share.speeds[index, columns].tolist()
    smaller, _, larger = share.sizes[columns].tolist()
    if speed < (1 - MAX_LOSS) * before:
        return int(smaller)
    if larger > now and speed > 0 and (after - speed) / (larger - now) >= MIN_RATIO * speed / now:
        return int(larger)
    return now
