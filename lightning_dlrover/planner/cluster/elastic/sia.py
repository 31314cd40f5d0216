"""Sia: one configuration for each job, by an integer program (Jayaram Subramanya et al., SOSP 2023).

With x_ij = 1 where job i gets configuration j, and goodputs G_ij over the job's smallest one,

    minimise  sum_ij x_ij (r_ij G_ij)^p + lambda_n sum_i (1 - sum_j x_ij) + lambda_a sum_ij |x_ij - present_ij|
    subject to  sum_j x_ij <= 1,  sum_ij x_ij devices_j <= all devices

with p = -0.5, lambda_n = 1.1, lambda_a = 0.01, and a restart factor r_ij unless j is the present configuration.
Configurations are powers of two within a node, and whole nodes. A job grows to at most twice the largest size that was
profiled. Rounds come every `INTERVAL_S`. The program is a knapsack problem, which dynamic programming solves exactly. Where
that takes too long, SciPy's HiGHS solves it to a gap of 1e-4, the artefact's.

Differences: devices are of one kind at a time, so there is no choice of kinds, and the batch is given, so goodput is speed.
The published artefact never adds the term of lambda_a. The program is solved when jobs come and go, too, for those that have
not changed within a round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lightning_dlrover.planner.cluster.elastic.goodput import growth_limits, restart_factors
from lightning_dlrover.planner.cluster.elastic.knapsack import MOST_EXACT, exactly
from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["INTERVAL_S", "LAMBDA_CHANGE", "LAMBDA_NONE", "POWER", "configurations", "costs", "sia", "solved"]

INTERVAL_S = 60.0
"""Seconds between rounds."""

POWER = -0.5
"""Exponent p of goodputs. The lower, the fairer."""

LAMBDA_NONE = 1.1
"""Cost of a job without devices."""

LAMBDA_CHANGE = 0.01
"""Cost of a change of configuration, counted for the old and the new one."""

MIP_GAP = 1e-4
"""Relative gap to the optimum at which the solver ends."""


def sia(share: Share) -> Ints:
    """Return the sizes."""
    allowed = configurations(share)
    cost = np.where(allowed, costs(share, allowed), np.inf)
    used = np.flatnonzero(allowed.any(axis=0))
    cost, sizes = cost[:, used], share.sizes[used]
    if cost.size * (share.num_devices + 1) <= MOST_EXACT:
        return sizes[exactly(-cost, sizes, share.num_devices)]
    return sizes[solved(cost, sizes, share.num_devices)]


def configurations(share: Share) -> NDArray[np.bool_]:
    """Return the columns that each job may have, waiting included, shape ``(num_jobs, num_sizes)``.

    The fewest devices that a job must get are one, too, and the fewest of a job that is allowed no other.
    """
    sizes, per_node = share.sizes, share.per_node
    is_one = (sizes == 0) | ((sizes <= per_node) & ((sizes & (sizes - 1)) == 0)) | (sizes % per_node == 0)
    is_one = is_one | (sizes == np.maximum(share.floors, share.fewest)[:, None]) & (share.floors[:, None] > 0)
    within = share.allowed & (sizes <= growth_limits(share)[:, None])
    allowed = within & is_one
    without = ~(allowed & (sizes > 0)).any(axis=1)
    first = (share.allowed & (sizes > 0)).argmax(axis=1)
    allowed[without, first[without]] |= share.allowed[without, first[without]]
    return np.asarray(allowed)


def costs(share: Share, allowed: NDArray[np.bool_]) -> Floats:
    """Return the cost of each job at each size, shape ``(num_jobs, num_sizes)``; that of waiting included."""
    runs = allowed & (share.sizes > 0)
    smallest = np.where(runs, share.speeds, np.inf).min(axis=1, keepdims=True)
    goodputs = np.where(runs, share.speeds / np.where(np.isfinite(smallest), smallest, 1.0), 1.0)
    is_present = (share.sizes == share.present[:, None]) & (share.sizes > 0)
    factors = np.where(is_present | (share.present[:, None] == 0), 1.0, restart_factors(share)[:, None])
    cost = np.minimum(np.maximum(goodputs * factors, 1e-7) ** POWER, 1e3)
    cost = np.where(share.sizes == 0, LAMBDA_NONE, cost) * share.weights[:, None]
    # |x - present|: 1 for the configuration that is left, 1 for the one that is taken.
    running = (share.present > 0)[:, None]
    changes = np.where(is_present, 0.0, np.where(share.sizes == 0, 1.0, 2.0))
    return np.asarray(cost + np.where(running, LAMBDA_CHANGE * changes, 0.0))


def solved(cost: Floats, sizes: Ints, num_devices: int) -> Ints:
    """Return the column of each job with the smallest total cost, by HiGHS, shape ``(num_jobs,)``.

    Args:
        cost: shape ``(num_jobs, num_sizes)``; infinite where a size is not allowed.
    Raises:
        ValueError: the devices do not suffice for the smallest sizes, or the solver gives up.
    """
    jobs, columns = np.nonzero(np.isfinite(cost))
    if not len(jobs):
        return np.zeros(len(cost), dtype=np.int64)
    one_each = csr_array((np.ones(len(jobs)), (jobs, np.arange(len(jobs)))), shape=(len(cost), len(jobs)))
    devices = csr_array(sizes[columns][None, :].astype(np.float64))
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(devices, 0, num_devices)]
    found = milp(
        cost[jobs, columns],
        integrality=np.ones(len(jobs)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": MIP_GAP},
    )
    if found.x is None:
        raise ValueError(f"no sizes for {len(cost)} jobs on {num_devices} devices: {found.message}")
    chosen = found.x > 0.5
    result = np.zeros(len(cost), dtype=np.int64)
    result[jobs[chosen]] = columns[chosen]
    return result
