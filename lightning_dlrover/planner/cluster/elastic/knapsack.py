"""Choose one size for each job such that the sum of their values is the largest, and the devices suffice.

This is the multiple-choice knapsack problem. Dynamic programming over devices solves it exactly, whatever the shape of the
values: with f[c] the best value of the jobs so far with at most c devices, one more job gives

    f'[c] = max over sizes k of f[c - k] + value[k]

Beyond `MOST_EXACT` operations, jobs climb their concave hulls, steepest step first. That is the optimum of the linear
relaxation but for the last step, so its loss is at most the gain of one step (Sinha and Zoltners, Operations Research 27(3),
1979).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["MOST_EXACT", "best_columns", "by_hulls", "exactly", "hull"]

MOST_EXACT = 60_000_000
"""Operations up to which the exact solution is computed: a few tenths of a second."""


def best_columns(values: Floats, sizes: Ints, num_devices: int) -> Ints:
    """Return the chosen column of each job, shape ``(num_jobs,)``.

    Args:
        values: of each job at each size, shape ``(num_jobs, num_sizes)``; minus infinity where a size is not allowed.
        sizes: ascending, beginning with 0, shape ``(num_sizes,)``.
    Raises:
        ValueError: the smallest sizes of all jobs need more devices than there are.
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
    """Use devices that are left, as steps of hulls were too large, by the best single changes."""
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
