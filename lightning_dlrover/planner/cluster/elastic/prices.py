"""Prices of work: by how much all completion times together fall for each unit of work that a job makes now.

Jobs end one after the other, those with the least work first. So the time until all have ended has a phase for each job. In
phase l the jobs from l on share the devices. Let W_l be their weights together, S_j(k) the speed of job j with k devices, and
x_j its work. The total of all completion times is sum_l W_l t_l, with t_l the length of phase l, and a job makes its work in
the phases up to its own. The prices y are the multipliers of these equations:

    W_l = sum_{j >= l} y_j S_j(k_jl)    for each l

with k_jl the devices of job j in phase l, and the total is sum_l y_l x_l. So the best division of a phase has the lowest price
for the job that ends with it. With G(m) the largest sum of y_j S_j(k_j) over the jobs after l on m of n devices,

    y_l = min over k of (W_l - G(n - k)) / S_l(k)

These are computed from the last job back to the first. Where all have the speed k^p, this is heSRPT (Berg, Vesilo and
Harchol-Balter, Performance Evaluation 144, 2020). Where devices suffice for all, y_l is w_l / S_l, and no job counts more for
being short.

Speeds count by their concave hulls, as if jobs could take turns with two sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.elastic.knapsack import hull
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["prices"]


def prices(
    speeds: Floats,
    allowed: NDArray[np.bool_],
    sizes: Ints,
    num_devices: int,
    work: Floats,
    weights: Floats,
    least_gain: float = 0.0,
) -> Floats:
    """Return the price of each job's work, shape ``(num_jobs,)``; 0 for a job that cannot run.

    Args:
        speeds: work per second of each job at each size, shape ``(num_jobs, num_sizes)``.
        allowed: sizes that each job may have, of that shape.
        sizes: ascending, beginning with 0, shape ``(num_sizes,)``.
        work: that each job has left, shape ``(num_jobs,)``.
        weights: of the jobs' completion times, of that shape.
        least_gain: a job uses no device that adds less than this to its speed, but for its smallest size.
    """
    found = np.zeros(len(work))
    curves: dict[bytes, _Curve] = {}
    gains = np.zeros(0)  # gains of one more device for the jobs so far, the largest first; negative, as sorting is ascending
    total = 0.0
    for job in np.lexsort((np.arange(len(work)), -work / weights)).tolist():
        row = np.where(allowed[job] & (sizes <= num_devices), speeds[job], 0.0)
        key = row.tobytes()
        if key not in curves:
            curves[key] = _Curve.of(row, sizes, least_gain)
        curve = curves[key]
        if not len(curve.devices):
            continue
        total += weights[job]
        best = np.concatenate([[0.0], -gains.cumsum(), np.full(num_devices - len(gains), -gains.sum())])
        found[job] = ((total - best[num_devices - curve.devices]) / curve.speeds).min()
        gains = np.sort(np.concatenate([gains, -found[job] * curve.slopes]), kind="stable")[:num_devices]
    return found


@dataclass(frozen=True)
class _Curve:
    """The concave hull of a job's speeds, without size 0."""

    devices: Ints
    speeds: Floats
    slopes: Floats  # one for each device, up to the last of `devices`

    @classmethod
    def of(cls, row: Floats, sizes: Ints, least_gain: float) -> _Curve:
        columns = np.array(hull(row, sizes, 0))
        widths = np.diff(sizes[columns])
        slopes = np.diff(row[columns]) / widths
        steps = max(int((slopes >= least_gain).sum()), min(len(slopes), 1))
        used = columns[1 : steps + 1]
        return cls(sizes[used], row[used], np.repeat(slopes[:steps], widths[:steps]))
