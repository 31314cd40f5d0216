"""Mean job completion time: least total completion time by learned speeds, remaining work, and the measured cost of a change.

Sizes maximise the sum of the rates at which jobs come nearer to their ends, each weighed by how many others wait for it:

    sum_i v_i (S_i(k_i) - g k_i) l_i / (l_i + c_i)    subject to  sum_i k_i <= devices

S_i(k) is the speed with k devices over that of one device at the job's best efficiency. A device has to add at least g,
`PolicySettings.least_gain`, or it stays free: jobs hold no devices that they leave idle. The urgency v_i is the geometric mean
of two prices of a job's work, each of which is best for another future:

- heSRPT's (Berg, Vesilo and Harchol-Balter, Performance Evaluation 144, 2020), which has the least total completion time where
  all jobs have the speedup k^p. With W_i the weights of the jobs with at least as much work left as job i, and q = 1 / (1 - p),
  it is (W_i^q - (W_i - w_i)^q)^(1 / q). It prefers short jobs strongly, as if jobs always competed for devices. Clusters that
  stay crowded need this.
- that by the jobs' learned speedups, see `prices`. It prefers short jobs only as far as the present jobs hinder each other. In
  a cluster with room for all, no long job stands back.

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

from lightning_dlrover.planner.cluster.elastic.hesrpt import shares
from lightning_dlrover.planner.cluster.elastic.knapsack import best_columns
from lightning_dlrover.planner.cluster.elastic.prices import prices
from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["jct", "urgencies", "values"]

HORIZON_S = 300.0
"""Seconds for which sizes are expected to stay."""

SPEEDUP_EXPONENT = 0.7
"""Exponent p of the speedup for which heSRPT's urgencies are the best ones."""

SHARE_OF_PRICES = 0.5
"""Exponent of the price by learned speedups in the urgency; the rest is that of heSRPT's price."""


def jct(share: Share) -> Ints:
    """Return the sizes."""
    if not len(share.jobs):
        return np.zeros(0, dtype=np.int64)
    return share.sizes[best_columns(values(share), share.sizes, share.num_devices)]


def values(share: Share) -> Floats:
    """Return the value of each size for each job, shape ``(num_jobs, num_sizes)``; minus infinity where it is not allowed."""
    unit = np.where(share.most_efficient > 0, share.most_efficient, 1.0)[:, None]
    speedups = share.speeds / unit
    urgency = _urgency(share, speedups)
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


def _urgency(share: Share, speedups: Floats) -> Floats:
    crowded = urgencies(share.work_left, share.weights, SPEEDUP_EXPONENT)
    present = prices(
        speedups,
        share.filling,
        share.sizes,
        share.num_devices,
        share.work_left,
        share.weights,
        share.settings.least_gain,
    )
    return np.asarray(crowded ** (1 - SHARE_OF_PRICES) * present**SHARE_OF_PRICES)


def urgencies(work: Floats, weights: Floats, exponent: float) -> Floats:
    """Return heSRPT's weight of the speed of each job, shape ``(num_jobs,)``: the less work, the more."""
    return np.asarray(shares(work, weights, exponent) ** (1 - exponent))
