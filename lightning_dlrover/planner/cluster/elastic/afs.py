"""AFS: each device to the job that gains most by it, as far as that does not hold up a shorter one (Hwang et al., NSDI 2021).

"Apathetic future share": of two jobs, the one that would end first is a, the other b. A further device for a until a ends, and
for b then, gives a smaller mean completion time than for b at once, if

    (p_a' - p_a) / p_a  >  (p_b' - p_b) / p_b'

with the speeds p as they are and p' with the device, and what becomes of all other devices ignored. Devices are given one by
one; for each, jobs are compared pairwise, and the last winner gets it. Of two jobs without devices the shorter one wins. This
is AFS-L, the variant for known lengths.

Differences: sizes fill nodes, and speeds count by their concave hull from the fewest devices of a job on, as a node's border
makes some devices slow a job down. A job of unknown length is expected to need as much again as it has
had; the paper's AFS-P lets such jobs take turns instead. Lengths are divided by weights. The rule ignores the cost of a change,
here as in the paper; its system decides when jobs come and go, here also at each interval of the simulation. Leaving jobs alone
for 60, 300 or 600 s after a change made it worse on the workloads 1 and 2 of docs/lab/cluster_figures.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.planner.cluster.elastic.knapsack import hull
from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints

__all__ = ["afs"]


@dataclass
class _Job:
    """A job, and the steps in which it takes devices: its speeds and sizes, those of 0 devices first."""

    index: int
    work: float  # steps left over the weight
    speeds: list[float]
    sizes: list[int]
    at: int = 0

    @property
    def seconds(self) -> float:
        speed = self.speeds[self.at]
        return self.work / speed if speed > 0 else math.inf

    @property
    def step(self) -> int:
        """Devices of the next step."""
        return self.sizes[self.at + 1] - self.sizes[self.at]

    @property
    def next_speed(self) -> float:
        """Speed with one device more; the first step counts as one."""
        gain = self.speeds[self.at + 1] - self.speeds[self.at]
        return self.speeds[self.at] + (gain / self.step if self.at else gain)


def afs(share: Share) -> Ints:
    """Return the sizes."""
    jobs = [_job(share, index) for index in range(len(share.jobs))]
    for job in jobs:
        job.at = int(share.floors[job.index] > 0)
    left = share.num_devices - sum(job.sizes[job.at] for job in jobs)
    able = [job for job in jobs if job.at + 1 < len(job.sizes)]
    while able:
        best = able[0]
        for job in able[1:]:
            best = _preferred(best, job)
        if best.step <= left:
            left -= best.step
            best.at += 1
        else:
            able.remove(best)
            continue
        if best.at + 1 == len(best.sizes):
            able.remove(best)
    return np.array([job.sizes[job.at] for job in jobs], dtype=np.int64)


def _job(share: Share, index: int) -> _Job:
    runs = np.flatnonzero(share.filling[index] & (share.sizes > 0))
    work = float(share.work_left[index] * share.most_efficient[index] / share.weights[index])
    if not len(runs):
        return _Job(index, work, [0.0], [0])
    columns = hull(np.where(share.filling[index], share.speeds[index], 0.0), share.sizes, int(runs[0]))
    sizes = share.sizes[runs[runs <= columns[-1]]]
    speeds = np.interp(sizes, share.sizes[columns], share.speeds[index, columns])
    return _Job(index, work, [0.0, *speeds.tolist()], [0, *sizes.tolist()])


def _preferred(one: _Job, other: _Job) -> _Job:
    """Return the job to which the next device goes."""
    a, b = (one, other) if one.seconds < other.seconds else (other, one)
    if a.seconds == math.inf:
        return one if one.work / one.next_speed <= other.work / other.next_speed else other
    gain_a = (a.next_speed - a.speeds[a.at]) / a.speeds[a.at]
    gain_b = (b.next_speed - b.speeds[b.at]) / b.next_speed
    return a if gain_a > gain_b else b
