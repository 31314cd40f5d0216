"""Rules of every policy of sizes: turns, the bound on waiting, deadlines, and which jobs are not paused.

Jobs take turns. A job that has waited longer than `max_wait_s` comes before all others, the longest wait first. Then come those
whose deadlines can still be met, the earliest first, then priorities, then the time of submission.

A policy that preempts gets floors: devices that it must give.
- A job that was started because of its wait keeps its fewest devices for `max_wait_s`, or it would be paused again at once.
- A job that waits longer than the bound gets its fewest devices.
- A job with a deadline gets as few as meet it, from now to its end.
- With `may_pause` off, a running job keeps its fewest devices.
Where devices are too few for a floor, no job starts that could not be paused again, until they suffice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats
from lightning_dlrover.planner.cluster.queue_order import is_overdue

__all__ = ["Floors", "floors_of", "turns", "within_limits"]

DEADLINE_MARGIN = 1.1
"""Factor on the predicted time to a job's end, as predictions are uncertain."""


def turns(share: Share) -> list[int]:
    """Return the indices of jobs in the order of their turns."""
    needed = _needed_for_deadline(share)
    max_wait_s = share.settings.max_wait_s

    def key(index: int) -> tuple[float, ...]:
        job = share.jobs[index]
        if share.present[index] == 0 and is_overdue(job.waits_since_s, share.now_s, max_wait_s):
            return (0.0, job.waits_since_s)
        if needed[index] > 0 and job.deadline_s is not None:
            return (1.0, job.deadline_s)
        return (2.0, -job.priority, job.submitted_s)

    return sorted(range(len(share.jobs)), key=lambda index: (key(index), share.jobs[index].name))


@dataclass(frozen=True)
class Floors:
    """Devices that each job must get, shape ``(num_jobs,)``, and whether some job waits for a floor."""

    devices: Ints
    is_short: bool


def floors_of(share: Share, rigid: bool) -> Floors:
    """Return the floors of jobs of all priorities, as far as the devices suffice.

    Args:
        share: with floors of 0.
        rigid: a job gets as many devices as asked for, or none.
    """
    wanted = np.where(share.asked > 0, share.asked, 0) if rigid else share.fewest
    needed = np.where(_needed_for_deadline(share) > 0, wanted, 0) if rigid else _needed_for_deadline(share)
    max_wait_s = share.settings.max_wait_s
    claims: list[tuple[tuple[float, float, str], int, int, bool]] = []  # order, job, devices, whether others wait for it
    for index, job in enumerate(share.jobs):
        since_s, runs = float(share.since_s[index]), bool(share.present[index])
        if runs and not share.settings.may_pause:
            claims.append(((0, since_s, job.name), index, int(min(wanted[index], share.present[index])), True))
        elif runs and since_s - job.waits_since_s > max_wait_s and share.now_s - since_s < max_wait_s:
            claims.append(((1, since_s, job.name), index, int(wanted[index]), False))
        elif not runs and is_overdue(job.waits_since_s, share.now_s, max_wait_s):
            claims.append(((2, job.waits_since_s, job.name), index, int(wanted[index]), True))
        if needed[index] > 0 and job.deadline_s is not None:
            claims.append(((3, job.deadline_s, job.name), index, int(needed[index]), not runs))
    floors, left, is_short = np.zeros(len(share.jobs), dtype=np.int64), share.num_devices, False
    for _, index, devices, others_wait in sorted(claims):
        more = devices - int(floors[index])
        if 0 < more <= left:
            floors[index] = devices
            left -= more
        elif more > left:
            is_short = is_short or others_wait
    return Floors(floors, is_short)


def within_limits(share: Share, numbers: Ints) -> Ints:
    """Return sizes that keep all limits, as near to the given ones as can be.

    Policies choose allowed sizes. This makes sure of it, in every case: sizes that no job may have are rounded down, floors are
    given, and where devices do not suffice the last ones in turn get less.
    """
    columns = share.columns_of(numbers)
    exact = (share.sizes[columns] == numbers) & share.allowed[np.arange(len(share.jobs)), columns]
    if exact.all() and numbers.sum() <= share.num_devices:
        return numbers
    found = np.zeros(len(share.jobs), dtype=np.int64)
    least = np.zeros(len(share.jobs), dtype=np.int64)
    for index, column in enumerate(columns.tolist()):
        allowed = np.flatnonzero(share.allowed[index])
        if len(allowed):
            least[index] = share.sizes[allowed[0]]
            below = allowed[allowed <= column]
            found[index] = share.sizes[below[-1]] if len(below) else least[index]
    excess = int(found.sum()) - share.num_devices
    for smallest in (np.maximum(share.fewest, least), least):  # first less of each job, then the last ones wait
        for index in range(len(share.jobs) - 1, -1, -1):
            if excess > 0 and found[index] > smallest[index]:
                lower = max(int(smallest[index]), int(found[index]) - excess)
                column = int(share.columns_of(np.array([lower]))[0])
                allowed = np.flatnonzero(share.allowed[index])
                below = allowed[allowed <= column]
                new = int(share.sizes[below[-1]]) if len(below) else int(smallest[index])
                excess -= int(found[index]) - new
                found[index] = new
    return found


def _needed_for_deadline(share: Share) -> Ints:
    """The fewest devices with which each job ends by its deadline; 0 where it has none, or cannot."""
    needed = np.zeros(len(share.jobs), dtype=np.int64)
    for index, job in enumerate(share.jobs):
        if job.deadline_s is None or job.steps_left is None:
            continue
        seconds = _seconds_to_end(share, index)
        meets = np.flatnonzero(seconds * DEADLINE_MARGIN <= job.deadline_s - share.now_s)
        if len(meets):
            needed[index] = share.sizes[meets[0]]
    return needed


def _seconds_to_end(share: Share, index: int) -> Floats:
    """Predicted seconds to a job's end with each size, shape ``(num_sizes,)``; infinite where it cannot run."""
    job = share.jobs[index]
    speeds = np.where(share.sizes >= share.fewest[index], share.speeds[index], 0.0)
    speeds = np.where(share.sizes <= share.most[index], speeds, 0.0)
    with np.errstate(divide="ignore"):
        seconds = np.where(speeds > 0, share.steps_left[index] / np.where(speeds > 0, speeds, 1.0), np.inf)
    cost_s = job.change_s + job.join_s if share.present[index] else job.start_s
    return np.asarray(seconds + np.where(share.sizes == share.present[index], 0.0, cost_s))
