"""Optimus: one device at a time to the job whose remaining time it shortens most (Peng et al., EuroSys 2018).

Every job first gets its fewest devices, in the order of submission. Then, with Q steps left and a speed f(n), the marginal
gain of a device is Q / f(n) - Q / f(n + 1), and the largest takes it, until no gain is positive. The interval is that of the
paper.

Differences: there are no parameter servers, so a job has one kind of task. The work left is known, as to every policy here; the
paper fits a curve to the loss. Gains are weighed by a job's weight. Where the next size is slower, the gain is the best mean
gain per device of a larger step, as a speed that depends on nodes has steps; one device at a time would stop there. The paper
fits its own model of speed; here all policies have the same predictions. It decides every interval; here also when jobs come
and go, for those that have not changed within an interval.
"""

from __future__ import annotations

import heapq

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["INTERVAL_S", "optimus"]

INTERVAL_S = 600.0
"""Seconds between decisions."""


def optimus(share: Share) -> Ints:
    """Return the sizes."""
    numbers, left = np.zeros(len(share.jobs), dtype=np.int64), share.num_devices
    least = share.least
    for index in sorted(range(len(share.jobs)), key=lambda i: (share.floors[i] == 0, least[i])):
        if least[index] <= left:
            numbers[index] = least[index]
            left -= int(least[index])
    seconds = np.where(share.allowed, share.seconds_left, np.inf) * share.weights[:, None]
    heap = [entry for index in np.flatnonzero(numbers).tolist() if (entry := _step(share, seconds, numbers, index))]
    heapq.heapify(heap)
    while heap and left > 0:
        _, index, column = heapq.heappop(heap)
        more = int(share.sizes[column] - numbers[index])
        if more > left:
            continue
        numbers[index] += more
        left -= more
        if entry := _step(share, seconds, numbers, index):
            heapq.heappush(heap, entry)
    return numbers


def _step(share: Share, seconds: Floats, numbers: Ints, index: int) -> tuple[float, int, int] | None:
    """The next size of a job and its gain per device, negative so that a heap yields the largest; None: nothing gains."""
    column = int(share.columns_of(numbers[index : index + 1])[0])
    gains = seconds[index, column] - seconds[index, column + 1 :]
    if not len(gains):
        return None
    per_device = gains / (share.sizes[column + 1 :] - share.sizes[column])
    best = 0 if per_device[0] > 0 else int(per_device.argmax())
    return (-float(per_device[best]), index, column + 1 + best) if per_device[best] > 0 else None
