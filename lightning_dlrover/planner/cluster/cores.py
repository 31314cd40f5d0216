"""Divide the cores of one machine among jobs that run side by side: threads, and the speeds to expect.

A job's step alone is a wait for input, a fraction `wait` of it, and work of `cores` core-seconds for each second of the step.
With fewer threads than that work could use, the working part takes longer. Where all jobs together want more cores than there
are, each gets what it wants or an equal share, whichever is less (max-min fairness), as the kernel divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["LEAST_IDLE", "CoreUse", "Expected", "Shares", "equal_shares", "expected", "thread_shares"]

Shares: TypeAlias = Callable[[Sequence[float], float], list[int]]
"""Returns the threads of each job's processes, given the busy cores of each alone and the number of cores."""

LEAST_USED = 0.1
"""Cores that a job must be able to use more for another thread."""
LEAST_IDLE = 0.5
"""Cores that must be idle for another thread."""
LEAST_CORES = 1e-3
SYNC = 0.06
"""Part of a job's work with several threads that only keeps them in step: 5 to 7 % of the CPU time of small MLPs and tables."""


@dataclass(frozen=True, order=True)
class CoreUse:
    """Needs of a job alone, when it may use all cores.

    Args:
        family: jobs of one family are alike.
        cores: busy cores, mean over a step.
        wait: fraction of a step in which it waits for input.
    """

    family: str
    cores: float
    wait: float = 0.0


def thread_shares(cores: Sequence[float], num_cores: float) -> list[int]:
    """Return the threads of each job's processes: one, and more for jobs that can use them while cores are idle.

    Args:
        cores: busy cores of each job alone. A job that has the machine to itself gets all.
    """
    if len(cores) == 1:
        return [max(1, round(num_cores))]
    threads = [1] * len(cores)
    idle = num_cores - sum(min(each, 1.0) for each in cores)
    while idle >= LEAST_IDLE:
        wants = [each - number for each, number in zip(cores, threads, strict=True)]
        most = max(range(len(wants)), key=lambda index: wants[index], default=None)
        if most is None or wants[most] < LEAST_USED:
            break
        threads[most] += 1
        idle -= min(1.0, wants[most])
    return threads


def equal_shares(cores: Sequence[float], num_cores: float) -> list[int]:
    """Return the threads of each job's processes: all alike, and at least one."""
    return [max(1, round(num_cores / max(1, len(cores))))] * len(cores)


@dataclass(frozen=True)
class Expected:
    """What to expect of jobs side by side, each of shape ``(num_jobs,)``."""

    use: Floats  # busy cores
    speeds: Floats  # over those alone
    threaded: Floats  # speeds if the cores were enough, with the jobs' threads


def expected(jobs: Sequence[CoreUse], threads: Sequence[int], num_cores: float) -> Expected:
    """Return the use and speeds of jobs side by side."""
    cores = np.maximum(np.array([job.cores for job in jobs]), LEAST_CORES)
    work = np.where(cores > np.asarray(threads), (1 - SYNC) * cores, cores)
    wait = np.clip([job.wait for job in jobs], 0.0, 1.0)
    step = wait + np.maximum(1.0 - wait, work / np.asarray(threads))
    use = np.minimum(work / step, _level(work / step, num_cores))
    return Expected(use, use / work, 1 / step)


def _level(wanted: Floats, num_cores: float) -> float:
    """Return the share that no job exceeds, so that all together have the cores; infinity where there are enough."""
    rest = num_cores
    for position, amount in enumerate(sorted(wanted.tolist())):
        share = rest / (len(wanted) - position)
        if share <= amount:
            return share
        rest -= amount
    return float("inf")
