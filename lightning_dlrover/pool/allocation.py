"""The sizing engine: shares of a cluster among elastic jobs, by speeds, prices and remaining work. Pure.

`jct` is the default policy of sizes. `best_columns` solves its knapsack problem, and `prices` weighs the jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.tuning.cluster import Floats, Job, PolicySettings

Ints = NDArray[np.int64]

MOST_KEPT = 8192
"""Rows that are kept. Above it all are dropped, which costs time only."""


@dataclass(frozen=True)
class _Row:
    source: object  # kept, so that its id is not used again
    steps_per_s: Floats
    spread: Floats


class SpeedTables:
    """Tables of predicted speeds: steps/s of each job by number of devices, on as few nodes as possible.

    A prediction costs far more than a look into a table, and a job's `Scaling` is the same object until more is known. So each
    is asked once for a set of sizes.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, tuple[int, ...], int, bytes], _Row] = {}

    def of(self, jobs: Sequence[Job], kind: str, sizes: Ints, per_node: int) -> tuple[Floats, Floats]:
        """Return predicted steps/s and the deviations of their logarithms, both of shape ``(num_jobs, num_sizes)``.

        Speeds are 0 at size 0, above a job's limit, and at sizes that it may not have.
        """
        grid = sizes.tobytes()
        speeds, spreads = np.zeros((len(jobs), len(sizes))), np.zeros((len(jobs), len(sizes)))
        for index, job in enumerate(jobs):
            row = self._row(job, kind, sizes, per_node, grid)
            speeds[index], spreads[index] = row.steps_per_s, row.spread
        return speeds, spreads

    def _row(self, job: Job, kind: str, sizes: Ints, per_node: int, grid: bytes) -> _Row:
        source: object = job.scaling or job.profiles[kind]
        key = (id(source), job.most_devices, job.sizes, per_node, grid)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MOST_KEPT:
                self._rows.clear()
            row = self._rows[key] = _predicted(job, kind, sizes, per_node, source)
        return row


def _predicted(job: Job, kind: str, sizes: Ints, per_node: int, source: object) -> _Row:
    speeds, spreads = np.zeros(len(sizes)), np.zeros(len(sizes))
    able = (sizes > 0) & (sizes <= job.most_devices)
    if job.sizes:
        able &= np.isin(sizes, job.sizes)
    if job.scaling is None:
        speeds[able] = job.profiles[kind].steps_per_s * sizes[able]
    elif able.any():
        found = job.scaling.speeds(sizes[able], -(-sizes[able] // per_node))
        speeds[able], spreads[able] = found.steps_per_s, found.spread
    return _Row(source, speeds, spreads)


UNKNOWN_WORK_DEVICE_S = 600.0
"""Least expected work of a job with an unknown end, seconds times devices."""

SERVICE_STEP = 8.0
"""Factor between two levels of attained service."""


@dataclass(frozen=True)
class Share:
    """Jobs that compete for devices of one kind, in the order of their turns: all that a size policy decides on.

    Arrays have the shape ``(num_jobs,)``, ``(num_sizes,)`` or ``(num_jobs, num_sizes)``.
    """

    now_s: float
    jobs: tuple[Job, ...]
    num_devices: int  # that these jobs may have together
    num_in_cluster: int  # all devices of this kind
    per_node: int  # devices of a node
    present: Ints  # devices that each job has now; 0: it waits
    since_s: Floats  # when each job got these
    floors: Ints  # minimum devices of each job; 0 where it may wait
    sizes: Ints  # numbers of devices to choose from, ascending, beginning with 0
    speeds: Floats  # predicted steps/s of each job at each size; 0 where it cannot run
    spreads: Floats  # deviations of the logarithms of these speeds
    settings: PolicySettings

    @cached_property
    def fewest(self) -> Ints:
        """Minimum number of devices of each job."""
        return np.array([job.fewest_devices for job in self.jobs], dtype=np.int64)

    @cached_property
    def least(self) -> Ints:
        """Minimum devices of each job that runs, shape ``(num_jobs,)``."""
        return np.maximum(self.fewest, self.floors)

    @cached_property
    def most(self) -> Ints:
        """Maximum number of devices of each job, within the cluster."""
        return np.array([min(job.most_devices, self.num_in_cluster) for job in self.jobs], dtype=np.int64)

    @cached_property
    def asked(self) -> Ints:
        """Devices that each user requested, or the job's minimum where the cluster has fewer."""
        wanted = np.array([job.num_devices for job in self.jobs], dtype=np.int64)
        return np.where(wanted <= self.num_in_cluster, wanted, self.fewest)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Where a job may have a size, waiting included, shape ``(num_jobs, num_sizes)``."""
        sizes = self.sizes[None, :]
        runs = (sizes >= self.least[:, None]) & (sizes <= self.most[:, None]) & (self.speeds > 0)
        return np.asarray(runs | ((sizes == 0) & (self.floors[:, None] == 0)))

    @cached_property
    def filling(self) -> NDArray[np.bool_]:
        """Allowed sizes that fill nodes: any within a node, whole nodes above, and the fewest devices of the job."""
        fills = (self.sizes <= self.per_node) | (self.sizes % self.per_node == 0)
        return np.asarray(self.allowed & (fills | (self.sizes == self.least[:, None])))

    @cached_property
    def fastest(self) -> Ints:
        """The smallest of the sizes in `filling` that give each job its highest speed, shape ``(num_jobs,)``."""
        return np.asarray(self.sizes[np.where(self.filling, self.speeds, -1.0).argmax(axis=1)])

    @cached_property
    def steps_left(self) -> Floats:
        """Steps that each job has left, infinite where its end is unknown; shape ``(num_jobs,)``."""
        return np.array([np.inf if job.steps_left is None else max(job.steps_left, 1e-9) for job in self.jobs])

    @cached_property
    def most_efficient(self) -> Floats:
        """Best steps/s per device of each job over its sizes, shape ``(num_jobs,)``; 0 where it cannot run."""
        runs = (self.sizes >= self.fewest[:, None]) & (self.sizes <= self.most[:, None]) & (self.sizes > 0)
        return np.asarray(np.where(runs, self.speeds / np.maximum(self.sizes, 1), 0.0).max(axis=1))

    @cached_property
    def work_left(self) -> Floats:
        """Device seconds that each job has left at its most efficient size, shape ``(num_jobs,)``.

        A job of unknown length is expected to need as much again as it has had, as for a scale-free distribution of lengths.
        What it has had counts in powers of `SERVICE_STEP`: jobs with about as much service would take turns without end
        otherwise.
        """
        served = np.array([max(job.served_device_s, UNKNOWN_WORK_DEVICE_S) for job in self.jobs])
        step = np.log(SERVICE_STEP)
        served = UNKNOWN_WORK_DEVICE_S * np.exp(step * np.floor(np.log(served / UNKNOWN_WORK_DEVICE_S) / step + 1e-9))
        known = self.steps_left / np.where(self.most_efficient > 0, self.most_efficient, 1e-300)
        return np.where(np.isfinite(self.steps_left), known, served)

    @cached_property
    def seconds_left(self) -> Floats:
        """Expected seconds to the end with each size, shape ``(num_jobs, num_sizes)``; infinite where a job cannot run."""
        runs = self.speeds > 0
        steps = self.work_left * self.most_efficient
        return np.where(runs, steps[:, None] / np.where(runs, self.speeds, 1.0), np.inf)

    @cached_property
    def weights(self) -> Floats:
        """Importance of each job, with that of its owner."""
        return np.array([job.weight for job in self.jobs])

    @cached_property
    def ages_s(self) -> Floats:
        """Seconds since each job was submitted."""
        return np.array([max(self.now_s - job.submitted_s, 0.0) for job in self.jobs])

    def columns_of(self, numbers: Ints) -> Ints:
        """Return the columns of numbers of devices; the next smaller size where one is not considered."""
        return np.asarray(np.searchsorted(self.sizes, numbers, side="right") - 1, dtype=np.int64)

    def speeds_at(self, numbers: Ints) -> Floats:
        """Return the predicted steps/s of each job with these numbers of devices, shape ``(num_jobs,)``."""
        return np.asarray(self.speeds[np.arange(len(self.jobs)), self.columns_of(numbers)])

    def rows(self, indices: Sequence[int], num_devices: int) -> Share:
        """Return the share of some of the jobs, with other devices to divide."""
        some = list(indices)
        of_jobs = {name: getattr(self, name)[some] for name in ("present", "since_s", "floors", "speeds", "spreads")}
        return replace(self, jobs=tuple(self.jobs[i] for i in some), num_devices=num_devices, **of_jobs)


class ChooseSizes(Protocol):
    """A pure function that assigns each job a number of devices."""

    def __call__(self, share: Share, /) -> Ints:
        """Return the number of devices of each job, shape ``(num_jobs,)``; 0: it waits, or is paused.

        Their sum is at most `share.num_devices`, and each is allowed by `share.allowed`.
        """
        ...


@dataclass(frozen=True)
class SizePolicy:
    """A way to choose sizes, and the facts that its caller needs.

    Args:
        every_s: seconds between decisions in its paper. A running job with a change within them is not changed, so
            that a policy that is asked more often changes no job more often. None: it decides whenever it is asked.
        preempts: takes devices from running jobs for waiting ones. Otherwise it sees the jobs of all priorities at once, in
            the order of their turns, and starts none before those that come first could.
        rigid: gives a job the devices that were asked for, or none.
    """

    choose: ChooseSizes
    every_s: float | None = None
    preempts: bool = True
    rigid: bool = False


MOST_EXACT = 60_000_000
"""Maximum number of operations for the exact solution: a few tenths of a second."""


def best_columns(values: Floats, sizes: Ints, num_devices: int) -> Ints:
    """Return one column for each job so that the sum of their values is as large as the devices allow, shape ``(num_jobs,)``.

    This is the multiple-choice knapsack problem. Dynamic programming over devices solves it exactly, whatever the shape of the
    values: with f[c] the best value of the jobs so far with at most c devices, one more job gives

        f'[c] = max over sizes k of f[c - k] + value[k]

    Beyond `MOST_EXACT` operations, jobs climb their concave hulls, steepest step first. That is the optimum of the linear
    relaxation but for the last step, so its loss is at most the gain of one step (Sinha and Zoltners, Operations Research
    27(3), 1979).

    Args:
        values: of each job at each size, shape ``(num_jobs, num_sizes)``; minus infinity where a size is not allowed.
        sizes: ascending, beginning with 0, shape ``(num_sizes,)``.
    Raises:
        ValueError: the smallest sizes of all jobs together exceed the devices.
    """
    least = sizes[_first_allowed(values)].sum()
    if least > num_devices:
        raise ValueError(f"{len(values)} jobs need at least {least} devices, and there are {num_devices}")
    if values.size * (num_devices + 1) <= MOST_EXACT:
        return exactly(values, sizes, num_devices)
    return by_hulls(values, sizes, num_devices)


def exactly(values: Floats, sizes: Ints, num_devices: int) -> Ints:
    """Return the optimum; of equal ones, that with fewer devices for the last jobs."""
    num_jobs = len(values)
    left = np.arange(num_devices + 1)[:, None] - sizes[None, :]
    source = np.where(left < 0, num_devices + 1, left)  # the last place of `best` is for impossible choices
    best = np.append(np.zeros(num_devices + 1), -np.inf)
    choice = np.empty((num_jobs, num_devices + 1), dtype=np.int32)
    rows = np.arange(num_devices + 1)
    for job in range(num_jobs):
        total = best[source] + values[job]
        columns = total.argmax(axis=1)
        choice[job] = columns
        best[:-1] = total[rows, columns]
    columns, devices = np.zeros(num_jobs, dtype=np.int64), num_devices
    for job in range(num_jobs - 1, -1, -1):
        columns[job] = choice[job, devices]
        devices -= int(sizes[columns[job]])
    return columns


def by_hulls(values: Floats, sizes: Ints, num_devices: int) -> Ints:
    """Return a solution near the optimum, in time that grows little faster than the number of values."""
    columns = _first_allowed(values)
    left = num_devices - int(sizes[columns].sum())
    steps: list[tuple[float, int, int, int]] = []
    for job, (row, first) in enumerate(zip(values, columns.tolist(), strict=True)):
        for before, after in pairwise(hull(row, sizes, first)):
            slope = float((row[after] - row[before]) / (sizes[after] - sizes[before]))
            steps.append((-slope, job, before, after))
    steps.sort()
    for _, job, before, after in steps:
        devices = int(sizes[after] - sizes[before])
        if columns[job] == before and devices <= left:
            columns[job] = after
            left -= devices
    return _filled(values, sizes, columns, left)


def _filled(values: Floats, sizes: Ints, columns: Ints, left: int) -> Ints:
    """Use devices that remain because steps of hulls were too large, by the best single changes."""
    rows = np.arange(len(values))
    while left > 0 and len(values):
        more = sizes[None, :] - sizes[columns][:, None]
        gain = np.where((more > 0) & (more <= left), values - values[rows, columns][:, None], 0.0)
        job, column = divmod(int(gain.argmax()), len(sizes))
        if not gain[job, column] > 0:
            break
        left -= int(more[job, column])
        columns[job] = column
    return columns


def _first_allowed(values: Floats) -> Ints:
    return np.asarray((values > -np.inf).argmax(axis=1), dtype=np.int64)


def hull(row: Floats, sizes: Ints, first: int) -> list[int]:
    """Return the columns of the rising part of the upper concave hull of one job's values, from `first` on."""
    found = [first]
    peak = int(row.argmax())
    for column in range(first + 1, peak + 1):
        if row[column] <= row[found[-1]]:
            continue
        while len(found) > 1 and (row[found[-1]] - row[found[-2]]) * (sizes[column] - sizes[found[-1]]) <= (
            row[column] - row[found[-1]]
        ) * (sizes[found[-1]] - sizes[found[-2]]):
            found.pop()
        found.append(column)
    return found


# Prices of work: by how much all completion times together fall for each unit of work that a job makes now.
#
# Jobs end one after the other, those with the least work first. So the time until all have ended has a phase for each job.
# In phase l the jobs from l on share the devices. Let W_l be their weights together, S_j(k) the speed of job j with k
# devices, and x_j its work. The total of all completion times is sum_l W_l t_l, with t_l the length of phase l, and a job
# makes its work in the phases up to its own. The prices y are the multipliers of these equations:
#
# W_l = sum_{j >= l} y_j S_j(k_jl)    for each l
#
# with k_jl the devices of job j in phase l, and the total is sum_l y_l x_l. So the best division of a phase has the lowest
# price for the job that ends with it. With G(m) the largest sum of y_j S_j(k_j) over the jobs after l on m of n devices,
#
# y_l = min over k of (W_l - G(n - k)) / S_l(k)
#
# These are computed from the last job back to the first. Where all have the speed k^p, this is heSRPT (Berg, Vesilo and
# Harchol-Balter, Performance Evaluation 144, 2020). Where devices suffice for all, y_l is w_l / S_l, and no job counts more
# for being short.
#
# Speeds count by their concave hulls, as if jobs could take turns with two sizes.


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


HORIZON_S = 300.0
"""Seconds that sizes are expected to stay."""


# Mean job completion time: least total completion time by learned speeds, remaining work, and the measured cost of a
# change.
#
# Sizes maximise the sum of the rates at which jobs come nearer to their ends, each weighed by how many others wait for it:
#
# sum_i v_i (S_i(k_i) - g k_i) l_i / (l_i + c_i)    subject to  sum_i k_i <= devices
#
# S_i(k) is the speed with k devices over that of one device at the job's best efficiency. A device has to add at least g,
# `PolicySettings.least_gain`, or it stays free: jobs hold no devices that they leave idle. The urgency v_i is the price of
# the job's work by the learned speedups of all present jobs, see `prices`. It prefers short jobs only to the extent that
# jobs hinder each other: in a cluster with room for all, no long job yields. Where all jobs have the speedup k^p, it is the
# price of heSRPT (Berg, Vesilo and Harchol-Balter, Performance Evaluation 144, 2020). heSRPT's own price, for one p chosen
# beforehand, was mixed in once. It brought nothing and was removed.
#
# All jobs get some devices while that is efficient.
#
# A change costs c_i seconds without a step, and then lasts l_i seconds: until the job ends, but no longer than `HORIZON_S`.
# The present size costs nothing, so sizes stay unless others are better by more than the cost. Where new devices take time
# to join, the job has its present speed until then. A waiting job pays for its start at any time, so only the difference
# between its sizes counts. A job that is paused pays for a later start.
#
# Speeds count as expected, however uncertain they are: counted half a deviation lower, jobs learned less and ended 1.5 %
# later. The maximum is exact for clusters of usual size, see `knapsack`.
def jct(share: Share) -> Ints:
    """Return the sizes that minimise the mean job completion time."""
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
    """Return the speedups less the price of devices and the costs of changes, in the shape of `speedups`."""
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
