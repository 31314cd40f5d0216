"""Policies of published papers, as baselines for ours, and the registry of all policies for elastic jobs. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.pool.allocation import Ints, Share, SizePolicy, by_hulls, hull
from lightning_dlrover.pool.policies import (
    POOL_POLICIES,
    backfilled,
    first_fits,
    growth_limits,
    make_policy,
    restart_factors,
    start_in_turn,
)
from lightning_dlrover.tuning.cluster import Floats, Policy, PolicySettings

# Shortest remaining time first, preemptive, with the sizes that users asked for (Schrage, Operations Research 16(3), 1968).
#
# Jobs take turns by predicted seconds to their end over their weight (Smith's rule); those that do not fit are passed over.
#
# Differences: the rule is for one server. Seconds come from learned speeds. A job of unknown length is expected to need as
# much again as it has had.


def srtf(share: Share) -> Ints:
    """Return the sizes."""
    return first_fits(share, shortest_first(share), share.asked)


def shortest_first(share: Share) -> list[int]:
    """Return the indices of jobs by seconds to their end at the requested size, over their weight."""
    seconds = share.seconds_left[np.arange(len(share.jobs)), share.columns_of(share.asked)] / share.weights
    return sorted(range(len(share.jobs)), key=lambda i: (seconds[i], share.jobs[i].submitted_s, share.jobs[i].name))


# Shortest remaining time first, preemptive, with sizes that shrink and grow.
#
# Jobs take turns by predicted seconds to their end at the requested size, over their weight, as in `srtf`. In this order
# each has its requested size, or all remaining devices, if these are enough for its minimum. The rest then goes to
# the jobs in the same order, up to the size above which no device makes a job faster.
#
# Differences: no paper has this policy on its own. It is the baseline that Optimus and AFS (see `afs`) start from, and it
# shows what elasticity alone adds to `srtf`. A job of unknown length is expected to need as much again as it has had.


def elastic_srtf(share: Share) -> Ints:
    """Return the sizes."""
    order = sorted(shortest_first(share), key=lambda index: share.floors[index] == 0)
    numbers, left = np.zeros(len(share.jobs), dtype=np.int64), share.num_devices
    for wanted in (share.asked, share.fastest):
        for index in order:
            have = int(numbers[index])
            number = min(max(int(wanted[index]), have), have + left)
            if number >= share.least[index]:
                numbers[index] = number
                left -= number - have
    return numbers


THRESHOLD_DEVICE_S = 16 * 3600.0
"""Device seconds after which a job leaves the first queue."""

PROMOTE_KNOB = 8.0
"""Ratio of waiting to running time above which a job is promoted."""


# Tiresias: discretised two-dimensional least attained service (Gu et al., NSDI 2019), preemptive, sizes as asked.
#
# Attained service is devices times seconds. Jobs below `THRESHOLD_DEVICE_S` are in the first queue, others in the second;
# within a queue, first come first served. A job of the second queue that has waited `PROMOTE_KNOB` times as long as it ran
# goes back to the first, where it stays until it has had another `THRESHOLD_DEVICE_S`. The threshold is that of the
# Tiresias in Pollux's artefact.
#
# Differences: service is weighed by a job's weight. The state holds the service of all of a job's runs, so the time that it
# ran is that over its size. Queues are updated at each decision. Tiresias places skewed models only on few nodes, and lets
# others be split; here all jobs have the shared placement. Its variant with Gittins indices is not there.
def las(share: Share) -> Ints:
    """Return the sizes."""
    served = np.array([job.served_device_s for job in share.jobs])
    waits_since_s = np.array([job.waits_since_s for job in share.jobs])
    runs = share.present > 0
    since_start = np.where(runs, (share.now_s - share.since_s) * share.present, 0.0)
    ran_s = np.maximum(served - since_start, 0.0) / share.asked  # before the last wait
    waited_s = np.where(runs, share.since_s, share.now_s) - waits_since_s
    is_promoted = (ran_s > 0) & (waited_s >= PROMOTE_KNOB * ran_s) & (since_start < THRESHOLD_DEVICE_S * share.weights)
    in_second = (served >= THRESHOLD_DEVICE_S * share.weights) & ~is_promoted
    order = sorted(range(len(share.jobs)), key=lambda i: (bool(in_second[i]), share.jobs[i].submitted_s, share.jobs[i].name))
    return first_fits(share, order, share.asked)


INTERVAL_S = 300.0
"""Seconds between looks at a job."""

MOST_MORE = 4
"""Workers that a job gains at a time."""

MIN_RATIO = 0.2
"""Smallest marginal speed of a further worker over the mean speed of the present ones."""

MAX_LOSS = 0.1
"""Loss, as a fraction of its speed, above which a job with more workers shrinks back."""


# DLRover's published heuristics: each job separately, greedy (`PSLocalOptimizer`, and the optimisers of the Brain).
#
# - A job starts with its minimum of workers, in its turn.
# - It is looked at again `INTERVAL_S` after a change. It grows by `MOST_MORE` workers, or all that remain, while the
#   marginal ratio ((v' - v) / (n' - n)) / (v / n) of the speeds v with n workers is at least `MIN_RATIO`.
# - It gives back the workers of its last step if its speed fell by more than `MAX_LOSS`.
#
# Constants are those of the code. Devices go to jobs in their turns, waiting ones before those that grow, because no job is
# stopped for another.
#
# Differences: the published rules are for parameter servers, with cores and memory of each kind of node; for workers of
# equal devices only those about the number of workers remain. They compare measured speeds; here all policies use the same
# predictions.
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


# DLRover-RM: weighted greedy on the gain of throughput for each unit of resources (Wang et al., PVLDB 17(12), 2024).
#
# Each job has its fewest devices, and candidates of more. The job and candidate with the largest weighted gain per device
# come first, until the devices are used:
#
# w_i (S_i(k') l / (l + c) - S_i(k)) / (k' - k)
#
# with S_i(k) the throughput over that of the job's best candidate, and the throughput of a changed job reduced by the change's
# cost in the `INTERVAL_S` of the published code. The weight w_i favours jobs with little work left. `division.divide` is
# the same search for jobs of any settings.
#
# Differences: the paper's jobs have parameter servers, and candidates of cores and memory for each kind of node, by
# NSGA-II; for workers of equal devices, candidates are numbers of workers, and all are considered. The exact weight was
# not available: here it is the inverse of the seconds left at the job's best candidate. The first stage, a start near the
# optimum by a history of jobs, corresponds to a family's learned speeds, which all policies have here. It decides whenever it
# is asked: leaving jobs alone for 60 to 600 s after a change made it worse on the workloads 1 and 2 of
# docs/lab/cluster_figures.md.
def dlrover_rm(share: Share) -> Ints:
    """Return the sizes."""
    if not len(share.jobs):
        return np.zeros(0, dtype=np.int64)
    allowed = np.where(share.filling, share.speeds, 0.0)
    best = allowed.max(axis=1)
    weights = share.weights / np.maximum(np.where(share.filling, share.seconds_left, np.inf).min(axis=1), 1e-9)
    cost_s = np.array([job.change_s for job in share.jobs])[:, None]
    kept = np.where(
        (share.sizes == share.present[:, None]) | (share.present[:, None] == 0), 1.0, INTERVAL_S / (INTERVAL_S + cost_s)
    )
    gains = weights[:, None] * kept * allowed / np.where(best > 0, best, 1.0)[:, None]
    return share.sizes[by_hulls(np.where(share.filling, gains, -np.inf), share.sizes, share.num_devices)]


MARGIN = 1.15
"""Factor on usage."""

MIN_CHANGE = 0.1
"""Least relative change that is made."""


# A reaction to usage, vertical only, as of Autopilot (Rzadca et al., EuroSys 2020) and Kubernetes' vertical autoscaler.
#
# The autoscaler requests the decaying 90th percentile of usage, times `MARGIN`, and leaves requests alone that are less
# than `MIN_CHANGE` off. A job uses as many of its devices as it would need at its best efficiency for the same speed,
#
# usage(n) = s(n) / (s(f) / f)        f: its fewest devices
#
# In a steady state all samples are equal, so that percentile is the present usage.
#
# Differences: the originals set the cores and memory of a task; here the size of a job is the only dimension. They leave
# the queue to the cluster's scheduler; here jobs start as in `as_requested`, and none grows while a job waits, as nothing
# is preempted. Usage is predicted from the learned speeds, not sampled.
def autopilot(share: Share) -> Ints:
    """Return the sizes."""
    wanted = recommended(share)
    numbers = backfilled(share, share.asked)
    left = share.num_devices - int(numbers.sum()) if numbers.all() else 0
    is_due = (share.present > 0) & (share.now_s - share.since_s >= INTERVAL_S)
    is_due &= np.abs(wanted - share.present) > MIN_CHANGE * share.present
    for index in np.flatnonzero(is_due).tolist():
        new = min(int(wanted[index]), int(numbers[index]) + left)
        left -= new - int(numbers[index])
        numbers[index] = new
    return numbers


def recommended(share: Share) -> Ints:
    """Return the size that the usage of each running job asks for, shape ``(num_jobs,)``."""
    per_device = share.speeds_at(share.fewest) / share.fewest
    usage = share.speeds_at(share.present) / np.where(per_device > 0, per_device, 1.0)
    wanted = np.clip(np.ceil(usage * MARGIN - 1e-9).astype(np.int64), share.fewest, share.most)
    return share.sizes[share.columns_of(wanted)]


OPTIMUS_INTERVAL_S = 600.0
"""Seconds between decisions."""


# Optimus: one device at a time, to the job with the largest reduction of remaining time (Peng et al., EuroSys 2018).
#
# Every job first gets its fewest devices, in the order of submission. Then, with Q steps left and a speed f(n), the
# marginal gain of a device is Q / f(n) - Q / f(n + 1), and the largest takes it, until no gain is positive. The interval is
# that of the paper.
#
# Differences: jobs have no parameter servers, so a job has one kind of task. The work left is known, as to every policy
# here; the paper fits a curve to the loss. Gains are weighed by a job's weight. Where the next size is slower, the gain is
# the best mean gain per device of a larger step, as a speed that depends on nodes has steps; one device at a time would
# stop there. The paper fits its own model of speed; here all policies have the same predictions. It decides every interval;
# here also when jobs come and go, for those that have not changed within an interval.
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


@dataclass
class _Job:
    """A job, and the steps that it grows in: its speeds and sizes, those of 0 devices first."""

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


# AFS: each device to the job that gains most by it, unless that delays a shorter one (Hwang et al., NSDI 2021).
#
# "Apathetic future share": of two jobs, the one that would end first is a, the other b. A further device for a until a
# ends, and for b then, gives a smaller mean completion time than for b at once, if
#
# (p_a' - p_a) / p_a  >  (p_b' - p_b) / p_b'
#
# with the speeds p as they are and p' with the device, ignoring the later use of all other devices. Devices are given one
# by one; for each, jobs are compared pairwise, and the last winner gets it. Of two jobs without devices the shorter one
# wins. This is AFS-L, the variant for known lengths.
#
# Differences: sizes fill nodes, and speeds count by their concave hull from the fewest devices of a job on, as a node's
# border makes some devices slow a job down. A job of unknown length is expected to need as much again as it has had; the
# paper's AFS-P lets such jobs take turns instead. Lengths are divided by weights. The rule ignores the cost of a change,
# here as in the paper; its system decides when jobs come and go, here also at each interval of the simulation. Leaving jobs
# alone for 60, 300 or 600 s after a change made it worse on the workloads 1 and 2 of docs/lab/cluster_figures.md.
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
    """Return the job that receives the next device."""
    a, b = (one, other) if one.seconds < other.seconds else (other, one)
    if a.seconds == math.inf:
        return one if one.work / one.next_speed <= other.work / other.next_speed else other
    gain_a = (a.next_speed - a.speeds[a.at]) / a.speeds[a.at]
    gain_b = (b.next_speed - b.speeds[b.at]) / b.next_speed
    return a if gain_a > gain_b else b


EXPONENT = 0.6
"""Exponent p of the speedup."""


# heSRPT: the division with the least mean completion time where all jobs have the speedup k^p and are present from the
# start.
#
# With the m present jobs in the order of their remaining sizes, the largest first, job i receives the share
#
# theta_i = (i / m)^(1 / (1 - p)) - ((i - 1) / m)^(1 / (1 - p))
#
# of all devices (Berg, Vesilo and Harchol-Balter, Performance Evaluation 144, 2020, theorem 3; weights as in their section
# on weighted completion times: i / m becomes the part of all weights that jobs of at least this size have). When a job
# comes, it is computed again for those present, which is the paper's heuristic for arrivals.
#
# Differences: devices are whole. The smallest job gets its share, rounded, within its limits; then the next one its share
# of the rest. Jobs do not have one speedup: p is `EXPONENT`, chosen on the workloads 1 and 2 of
# docs/lab/cluster_figures.md, and a remaining size is the device seconds at a job's best efficiency. A job of unknown
# length is expected to need as much again as it has had.
def hesrpt(share: Share) -> Ints:
    """Return the sizes."""
    part = hesrpt_shares(share.work_left, share.weights, EXPONENT)
    numbers, left = np.where(share.floors > 0, share.least, 0), share.num_devices - int(share.floors.sum())
    total = 1.0
    for index in np.argsort(-part, kind="stable").tolist():
        available = left + int(numbers[index])
        wanted = min(round(available * part[index] / total), int(share.fastest[index])) if total > 1e-12 else 0
        number = max(wanted, int(share.floors[index]))
        numbers[index] = number if number >= share.least[index] else 0
        left = available - int(numbers[index])
        total -= part[index]
    return share.sizes[share.columns_of(numbers)]


def hesrpt_shares(work: Floats, weights: Floats, exponent: float) -> Floats:
    """Return the part of all devices for each job, shape ``(num_jobs,)``; the sum is 1.

    Args:
        work: left, shape ``(num_jobs,)``.
        weights: of the completion times, of that shape.
    """
    order = np.lexsort((np.arange(len(work)), -work / weights))
    total = np.cumsum(weights[order])
    part = np.empty(len(work))
    bounds = (total / total[-1]) ** (1 / (1 - exponent)) if len(work) else total
    part[order] = np.diff(bounds, prepend=0.0)
    return part


POLLUX_INTERVAL_S = 60.0
"""Seconds between decisions."""

POPULATION = 100
"""Individuals of a generation."""

GENERATIONS = 100
"""Generations of a search."""

PATIENCE = 25
"""Generations without a better individual after which a search ends early."""

POLLUX_POWER = -1.0
"""Exponent p of the mean. The lower, the fairer."""

LEAST = 1e-3
"""Added to each speedup, so that a waiting job has a finite cost."""


# Pollux: the generalised mean of goodputs, by genetic search (Qiao et al., OSDI 2021).
#
# The fitness of sizes a_j is the power mean of the speedups over a fair share of the cluster,
#
# fitness = (1/n sum_j (r_j speedup_j(a_j))^p)^(1/p)        p = -1
#
# with a restart factor r_j where the size of a running job changes. A population of `POPULATION` evolves for `GENERATIONS`:
# tournaments, one-point crossover over the jobs, mutation and repair. A job grows to at most twice the largest size that
# was profiled. The interval is `INTERVAL_S`.
#
# Differences: Pollux adapts each job's batch size, and goodput is throughput times statistical efficiency. Here the global
# batch never changes, so that efficiency is 1, and goodput is speed. Individuals are numbers of devices, which the shared
# placement puts on few nodes, so sizes are those that fill nodes; the artefact's are devices on each node. The artefact
# begins a search with the population of the last one. This function keeps nothing. It begins with the present sizes, a fair
# share, their mutants, and a climb of concave hulls, and ends when `PATIENCE` generations have found nothing better. The
# artefact takes devices that are not there from jobs in the order of their attained service, and charges the restart factor
# to waiting jobs, too. Here that order is random, and a waiting job that starts pays nothing.
def pollux(share: Share) -> Ints:
    """Return the sizes."""
    if not len(share.jobs):
        return np.zeros(0, dtype=np.int64)
    cost = pollux_costs(share)
    least = cost.min(axis=1)
    cheapest = cost.argmin(axis=1)
    if share.sizes[cheapest].sum() <= share.num_devices and ((cost == least[:, None]).sum(axis=1) == 1).all():
        return np.asarray(share.sizes[cheapest])  # each job's best size, which the search begins with and would not leave
    rng = np.random.default_rng((share.settings.seed, int(share.now_s * 1e3)))
    search = _Search(share, cost, rng)
    people = search.first()
    fitness = search.costs_of(people)
    unchanged = 0
    for _ in range(GENERATIONS):
        before = fitness.min()
        children = search.children(people, fitness)
        people = np.concatenate([people, children])
        fitness = np.concatenate([fitness, search.costs_of(children)])
        best = np.argsort(fitness, kind="stable")[:POPULATION]
        people, fitness = people[best], fitness[best]
        unchanged = 0 if fitness[0] < before else unchanged + 1
        if unchanged == PATIENCE:
            break
    return np.asarray(share.sizes[people[0]])


def pollux_costs(share: Share) -> Floats:
    """Return (r_j speedup_j)^p of each job at each size; their sum is minimised. Infinite where a size is not allowed."""
    fair = np.clip(-(-share.num_devices // max(len(share.jobs), 1)), share.fewest, share.most)
    base = share.speeds_at(fair)
    speedups = share.speeds / np.where(base > 0, base, 1.0)[:, None]
    stays = (share.sizes == share.present[:, None]) | (share.present[:, None] == 0)
    speedups = speedups * np.where(stays, 1.0, restart_factors(share)[:, None])
    allowed = share.filling & (share.sizes <= growth_limits(share)[:, None])
    cost = share.weights[:, None] * (speedups / share.per_node + LEAST) ** POLLUX_POWER
    return np.where(allowed, cost, np.inf)


class _Search:
    """Individuals are arrays of columns of sizes, shape ``(num_individuals, num_jobs)``.

    A gene is looked up in tables with a row for each job, by its place in the flattened table.
    """

    def __init__(self, share: Share, cost: Floats, rng: np.random.Generator) -> None:
        self._share, self._costs, self._rng = share, cost, rng
        allowed = np.isfinite(self._costs)
        num_jobs, num_sizes = allowed.shape
        least = allowed.argmax(axis=1)
        self._least = share.sizes[least]
        self._spare = share.num_devices - int(self._least.sum())
        # The nearest allowed column at or below each number of devices, so that mutants can be rounded.
        columns = np.arange(num_sizes)
        nearest = np.maximum(np.maximum.accumulate(np.where(allowed, columns, -1), axis=1), least[:, None])
        most = int(max(share.sizes[-1], share.most.max()))
        self._column_of = nearest[:, share.columns_of(np.arange(most + 1))].ravel()
        self._jobs = np.arange(num_jobs)
        self._in_costs, self._in_columns = self._jobs * num_sizes, self._jobs * (most + 1)
        self._present, self._runs = self._rounded(share.present), share.present > 0

    def first(self) -> Ints:
        share = self._share
        fair = np.full(len(share.jobs), max(share.num_devices // len(share.jobs), 1), dtype=np.int64)
        people = np.repeat(np.stack([self._present, self._rounded(np.minimum(fair, share.sizes[-1]))]), POPULATION // 2, axis=0)
        mutants = self._mutated(people)
        mutants[0], mutants[POPULATION // 2] = people[0], people[POPULATION // 2]
        mutants[-1] = by_hulls(-self._costs, share.sizes, share.num_devices)
        return self._repaired(mutants)

    def costs_of(self, people: Ints) -> Floats:
        return np.asarray(self._costs.ravel().take(people + self._in_costs).sum(axis=1))

    def children(self, people: Ints, fitness: Floats) -> Ints:
        count = len(people)
        rivals = self._rng.integers(0, count, size=(2, 2, count))
        winners = np.where(fitness[rivals[0]] <= fitness[rivals[1]], rivals[0], rivals[1])
        cut = self._rng.integers(0, len(self._jobs) + 1, size=(count, 1))
        crossed = np.where(self._jobs < cut, people[winners[0]], people[winners[1]])
        return self._repaired(self._mutated(crossed))

    def _rounded(self, numbers: Ints) -> Ints:
        """Return the columns of the largest allowed sizes up to these numbers of devices, at least those of the smallest."""
        return np.asarray(self._column_of.take(numbers + self._in_columns))

    def _mutated(self, people: Ints) -> Ints:
        """Some genes of running jobs go back to the present size; others lose or gain the devices of up to a node."""
        rng, shape, per_node = self._rng, people.shape, self._share.per_node
        people = np.where((rng.random(shape) < 0.1) & self._runs, self._present, people)
        change = rng.integers(1, per_node + 1, size=shape)
        loses, gains = rng.random(shape) < 1.0 / shape[1], rng.random(shape) < 2.0 / shape[1]
        numbers = self._share.sizes.take(people) + np.where(gains, change, np.where(loses, -change, 0))
        return self._rounded(np.minimum(np.maximum(numbers, 0), self._share.most))

    def _repaired(self, people: Ints) -> Ints:
        """Take devices that are not there from jobs in a random order, down to their least, until the rest suffices."""
        draws = self._rng.random(people.shape)
        more = self._share.sizes.take(people) - self._least
        is_over = more.sum(axis=1) > self._spare
        more = more[is_over]
        order = np.argsort(draws[is_over], axis=1)
        order += np.arange(len(more))[:, None] * more.shape[1]
        given = np.minimum(more.take(order).cumsum(axis=1), self._spare)
        given[:, 1:] -= given[:, :-1].copy()
        numbers = np.empty_like(more)
        numbers.put(order, given)
        people[is_over] = self._rounded(numbers + self._least)
        return people


ELASTIC_POLICIES: Mapping[str, SizePolicy] = {
    "srtf": SizePolicy(srtf, rigid=True),
    "elastic-srtf": SizePolicy(elastic_srtf),
    "las": SizePolicy(las, rigid=True),
    "dlrover": SizePolicy(dlrover, preempts=False),
    "dlrover-rm": SizePolicy(dlrover_rm),
    "autopilot": SizePolicy(autopilot, preempts=False),
    "optimus": SizePolicy(optimus, every_s=OPTIMUS_INTERVAL_S),
    "afs": SizePolicy(afs),
    "hesrpt": SizePolicy(hesrpt),
    "pollux": SizePolicy(pollux, every_s=POLLUX_INTERVAL_S),
    **POOL_POLICIES,
}


def make_elastic(name: str, settings: PolicySettings | None = None) -> Policy:
    """Return the policy with that name.

    Raises:
        ValueError: the policy is unknown.
    """
    return make_policy(name, settings, ELASTIC_POLICIES)
