"""Mean job completion time: least total completion time by learned speeds, remaining work, and the measured cost of a change.

Sizes maximise the sum of the rates at which jobs come nearer to their ends, each weighed by how many others wait for it:

    sum_i v_i (S_i(k_i) - g k_i) l_i / (l_i + c_i)    subject to  sum_i k_i <= devices

S_i(k) is the speed with k devices over that of one device at the job's best efficiency. A device has to add at least g,
`PolicySettings.least_gain`, or it stays free: jobs hold no devices that they leave idle. The urgency v_i is the price of the
job's work by the learned speedups of all present jobs, see `prices`. It prefers short jobs only as far as these hinder each
other: in a cluster with room for all, no long job stands back. Where all jobs have the speedup k^p, it is the price of heSRPT
(Berg, Vesilo and Harchol-Balter, Performance Evaluation 144, 2020). heSRPT's own price, for one p chosen beforehand, was mixed
in once. It brought nothing and was removed.

All jobs get some devices while that is efficient.

A change costs c_i seconds without a step, and then lasts l_i seconds: until the job ends, but no longer than `HORIZON_S`. The
present size costs nothing, so sizes stay unless others are better by more than the cost. Where new devices take time to join,
the job has its present speed until then. A waiting job pays for its start at any time, so only the difference between its sizes
counts. A job that is paused pays for a later start.

Speeds count as expected, however uncertain they are: counted half a deviation lower, jobs learned less and ended 1.5 % later.
The maximum is exact for clusters of usual size, see `knapsack`.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.knapsack import best_columns
from lightning_dlrover.planner.cluster.elastic.prices import prices
from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["jct", "values"]

HORIZON_S = 300.0
"""Seconds for which sizes are expected to stay."""


def jct(share: Share) -> Ints:
    """Return the sizes."""
    if not len(share.jobs):
        return np.zeros(0, dtype=np.int64)
    return share.sizes[best_columns(values(share), share.sizes, share.num_devices)]


def values(share: Share) -> Floats:
    """Return the value of each size for each job, shape ``(num_jobs, num_sizes)``; minus infinity where it is not allowed."""
    unit = np.where(share.most_efficient > 0, share.most_efficient, 1.0)[:, None]
    speedups = share.speeds / unit
    urgency = prices(
        speedups, share.filling, share.sizes, share.num_devices, share.work_left, share.weights, share.settings.least_gain
    )
    value = urgency[:, None] * _gained(share, speedups)
    now = speedups[np.arange(len(share.jobs)), share.columns_of(share.present)]
    start_s = np.array([job.start_s for job in share.jobs])
    value[:, 0] = -urgency * now * np.minimum(start_s / HORIZON_S, 1.0)
    return np.where(share.filling, value, -np.inf)


def _gained(share: Share, speedups: Floats) -> Floats:
    """Return the speedups less the price of devices, as far as the costs of changes leave them, of the shape of `speedups`."""
    start_s, change_s, join_s = np.array([(job.start_s, job.change_s, job.join_s) for job in share.jobs]).T[:, :, None]
    price = share.settings.least_gain * share.sizes
    gained, now = speedups - price, speedups[np.arange(len(share.jobs)), share.columns_of(share.present)][:, None]
    lasts_s = np.maximum(np.minimum(share.seconds_left, HORIZON_S), 1e-9)
    joins_s = np.where(share.sizes > share.present[:, None], join_s, 0.0)
    changed = (joins_s * (now - price) + lasts_s * gained) / (joins_s + lasts_s + change_s)
    started = lasts_s / (lasts_s + start_s)
    first = (share.allowed & (share.sizes > 0)).argmax(axis=1)
    started = started / started[np.arange(len(share.jobs)), first][:, None]
    running = np.where(share.sizes == share.present[:, None], gained, changed)
    return np.where(share.present[:, None] > 0, running, gained * started)
