"""Common parts of the policies with the requested sizes: order, and backfilling."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["backfilled", "first_fits", "start_in_turn"]


def first_fits(share: Share, order: Sequence[int], wanted: Ints) -> Ints:
    """Return sizes that give each job in this order its size, if so many devices are left; else it waits.

    Jobs with a floor come before all others.
    """
    numbers, left = np.zeros(len(share.jobs), dtype=np.int64), share.num_devices
    for index in sorted(order, key=lambda index: share.floors[index] == 0):
        devices = max(int(wanted[index]), int(share.floors[index]))
        if devices <= left:
            numbers[index] = devices
            left -= devices
    return numbers


def backfilled(share: Share, wanted: Ints) -> Ints:
    """Return sizes that leave running jobs alone and start waiting ones in the order of their turns, with EASY backfilling.

    The first job that does not fit reserves its devices at the earliest time at which enough will be free by the predicted
    ends of running jobs. A job behind it starts now if it ends before that time, or uses devices that are not reserved
    (Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995). Without predicted ends, only the latter.
    """
    numbers: Ints = share.present.copy()
    left = share.num_devices - int(numbers.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = share.steps_left / share.speeds_at(np.where(numbers > 0, numbers, wanted))
    waiting = [index for index in range(len(share.jobs)) if not numbers[index]]
    reserved_s, spare = np.inf, 0
    head: int | None = None
    for index in waiting:
        devices = int(wanted[index])
        if head is None:
            if devices <= left:
                numbers[index] = devices
                left -= devices
            else:
                head = index
                reserved_s, spare = _reservation(share, numbers, seconds, left, devices)
            continue
        ends_before = reserved_s < np.inf and seconds[index] + share.jobs[index].start_s <= reserved_s
        if devices <= left and (ends_before or devices <= spare):
            numbers[index] = devices
            left -= devices
            spare -= 0 if ends_before else devices
    return numbers


def _reservation(share: Share, numbers: Ints, seconds: Floats, left: int, devices: int) -> tuple[float, int]:
    """Seconds until so many devices will be free, and how many more will be free then."""
    ends = [(float(seconds[index]), index) for index in np.flatnonzero(numbers).tolist()]
    heapq.heapify(ends)
    while ends:
        end_s, index = heapq.heappop(ends)
        if not end_s < np.inf:
            break
        left += int(numbers[index])
        if left >= devices:
            return end_s, left - devices
    return np.inf, 0


def start_in_turn(share: Share, wanted: Ints) -> tuple[Ints, int]:
    """Return sizes that leave running jobs alone and start waiting ones in their turns, and the number of devices left.

    It ends at the first job that does not fit. Nothing is left while a job waits, so that no other job takes devices which it
    will need.
    """
    numbers = share.present.copy()
    left = share.num_devices - int(numbers.sum())
    for index in np.flatnonzero(share.present == 0).tolist():
        if wanted[index] > left:
            return numbers, 0
        numbers[index] = wanted[index]
        left -= int(wanted[index])
    return numbers, left
