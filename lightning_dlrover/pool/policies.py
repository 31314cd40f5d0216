"""The policies of a pool, by name: requested sizes with backfilling, Sia, and `jct` of `allocation.py`. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lightning_dlrover.pool.allocation import MOST_EXACT, Ints, Share, SizePolicy, exactly, jct
from lightning_dlrover.pool.placement import with_placement
from lightning_dlrover.tuning.cluster import Floats, Policy, PolicySettings

SEEN_SPREAD = 0.05
"""Largest deviation of a predicted speed's logarithm at which the size counts as profiled."""


def restart_factors(share: Share) -> Floats:
    """Return the factor on the goodput of a job that has to restart, in Sia and Pollux, shape ``(num_jobs,)``.

    (T - R S) / (T + S), with the job's age T, its restarts R so far and the cost S of one. It is 1 for jobs younger than a
    restart, as in Sia's artefact.
    """
    restarts = np.array([job.restarts for job in share.jobs])
    cost_s = np.array([job.change_s for job in share.jobs])
    lost_s = np.maximum(share.ages_s - restarts * cost_s, 0.0)
    return np.where(share.ages_s > cost_s, lost_s / np.maximum(share.ages_s + cost_s, 1e-9), 1.0)


def growth_limits(share: Share) -> Ints:
    """Return the maximum devices of each job: twice the largest profiled size, at least its minimum; shape ``(num_jobs,)``."""
    is_seen = (share.speeds > 0) & (share.spreads <= SEEN_SPREAD)
    seen = np.where(is_seen, share.sizes, 0).max(axis=1)
    limits = 2 * np.maximum(seen, share.present)
    return np.asarray(np.clip(limits, share.least, share.most))


def first_fits(share: Share, order: Sequence[int], wanted: Ints) -> Ints:
    """Return sizes that give each job in this order its size, if enough devices remain; else it waits.

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
    """Return the seconds until this many devices are free, and how many more are free then."""
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

    It ends at the first job that does not fit. No device remains while a job waits, so that no other job takes devices that it
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


def as_requested(share: Share) -> Ints:
    """Return sizes as requested, first come first served, with EASY backfilling: a queue without elasticity.

    In Pollux's workloads the requests are those of Pollux's tuned jobs: sizes and batches at which a job reaches 50 to 80 % of
    the ideal speedup (`get_configurations` of the artefact; the sizes that users requested are in its `workloads-realistic`).
    """
    return backfilled(share, share.asked)


SIA_INTERVAL_S = 60.0
"""Seconds between rounds."""

SIA_POWER = -0.5
"""Exponent p of goodputs. The lower, the fairer."""

LAMBDA_NONE = 1.1
"""Cost of a job without devices."""

LAMBDA_CHANGE = 0.01
"""Cost of a change of configuration, counted for the old and the new one."""

MIP_GAP = 1e-4
"""Relative gap to the optimum at which the solver ends."""


# Sia: one configuration for each job, by an integer program (Jayaram Subramanya et al., SOSP 2023).
#
# With x_ij = 1 where job i has configuration j, and goodputs G_ij over the job's smallest one,
#
# minimise  sum_ij x_ij (r_ij G_ij)^p + lambda_n sum_i (1 - sum_j x_ij) + lambda_a sum_ij |x_ij - present_ij|
# subject to  sum_j x_ij <= 1,  sum_ij x_ij devices_j <= all devices
#
# with p = -0.5, lambda_n = 1.1, lambda_a = 0.01, and a restart factor r_ij unless j is the present configuration.
# Configurations are powers of two within a node, and whole nodes. A job grows to at most twice the largest size that was
# profiled. Rounds come every `INTERVAL_S`. The program is a knapsack problem, which dynamic programming solves exactly.
# Where that takes too long, SciPy's HiGHS solves it to a gap of 1e-4, the artefact's.
#
# Differences: devices are of one kind at a time, so no kind is chosen, and the batch is given, so goodput is
# speed. The published artefact never adds the term of lambda_a. The program is solved when jobs come and go, too, for those
# that have not changed within a round.
def sia(share: Share) -> Ints:
    """Return the sizes that Sia chooses."""
    allowed = configurations(share)
    cost = np.where(allowed, sia_costs(share, allowed), np.inf)
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


def sia_costs(share: Share, allowed: NDArray[np.bool_]) -> Floats:
    """Return the cost of each job at each size, shape ``(num_jobs, num_sizes)``; that of waiting included."""
    runs = allowed & (share.sizes > 0)
    smallest = np.where(runs, share.speeds, np.inf).min(axis=1, keepdims=True)
    goodputs = np.where(runs, share.speeds / np.where(np.isfinite(smallest), smallest, 1.0), 1.0)
    is_present = (share.sizes == share.present[:, None]) & (share.sizes > 0)
    factors = np.where(is_present | (share.present[:, None] == 0), 1.0, restart_factors(share)[:, None])
    cost = np.minimum(np.maximum(goodputs * factors, 1e-7) ** SIA_POWER, 1e3)
    cost = np.where(share.sizes == 0, LAMBDA_NONE, cost) * share.weights[:, None]
    # |x - present|: 1 for the former configuration, 1 for the new one.
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
    kinds = {"integrality": np.ones(len(jobs)), "bounds": Bounds(0, 1), "options": {"mip_rel_gap": MIP_GAP}}
    found = milp(cost[jobs, columns], constraints=constraints, **kinds)
    if found.x is None:
        raise ValueError(f"no sizes for {len(cost)} jobs on {num_devices} devices: {found.message}")
    chosen = found.x > 0.5
    result = np.zeros(len(cost), dtype=np.int64)
    result[jobs[chosen]] = columns[chosen]
    return result


POOL_POLICIES: Mapping[str, SizePolicy] = {
    "jct": SizePolicy(jct),
    "sia": SizePolicy(sia, every_s=SIA_INTERVAL_S),
    "as-requested": SizePolicy(as_requested, preempts=False, rigid=True),
}


def make_policy(
    name: str, settings: PolicySettings | None = None, policies: Mapping[str, SizePolicy] = POOL_POLICIES
) -> Policy:
    """Return the policy with that name.

    Raises:
        ValueError: the policy is unknown.
    """
    if name not in policies:
        raise ValueError(f"there is no policy {name!r} for elastic jobs; choose one of {', '.join(policies)}")
    return with_placement(policies[name], settings or PolicySettings())
