"""Divide a cluster's resources among its jobs.

Uses DLRover-RM's weighted greedy on marginal gain (Wang et al., PVLDB 17(12), 2024): the job that gains most for a unit of
resources gets it first. Options below the concave hull of a job's Pareto front would never be chosen this way; they only use
the resources left at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.planner.plan import Decision, Settings
from lightning_dlrover.planner.space import pareto_front

__all__ = ["ClusterJob", "Option", "divide", "options_of"]


@dataclass(frozen=True)
class Option:
    """Settings that a job could have."""

    settings: Settings
    cost: float  # unit of the budget, such as cores
    samples_per_s: float


@dataclass(frozen=True)
class ClusterJob:
    """A job that competes for resources; it runs with one of its options.

    Args:
        weight: importance of this job's relative gain beside that of others; remaining work is one choice.
    """

    name: str
    options: tuple[Option, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError(f"job {self.name!r} has no settings to choose from")
        if not self.weight > 0 or any(o.cost <= 0 or o.samples_per_s <= 0 for o in self.options):
            raise ValueError(f"job {self.name!r}: weight, costs and rates must be above 0")

    def gain(self, option: Option) -> float:
        """Return weighted throughput as a fraction of the job's best, so that jobs with different samples can be compared."""
        return self.weight * option.samples_per_s / max(o.samples_per_s for o in self.options)


def options_of(decision: Decision) -> tuple[Option, ...]:
    """Return the options that a job's own planner found feasible, in cores, or in GPUs where the job has some."""
    able = [c for c in decision.candidates if c.feasible and (c.gpus or c.cores)]
    return tuple(Option(c.settings, float(c.gpus or c.cores), c.samples_per_s) for c in able)


def divide(jobs: Sequence[ClusterJob], budget: float) -> dict[str, Option]:
    """Return an option for each job, by name, so that together they stay within `budget` and gain much.

    Raises:
        ValueError: not even the cheapest options fit, or two jobs have one name.
    """
    fronts = {job.name: _front(job) for job in jobs}
    if len(fronts) != len(jobs):
        raise ValueError(f"two of the jobs {sorted(job.name for job in jobs)} have one name")
    chosen = {name: front[0] for name, front in fronts.items()}
    left = budget - sum(option.cost for option in chosen.values())
    if left < 0:
        raise ValueError(f"the cheapest settings of {len(jobs)} jobs need {budget - left:g}, the budget is {budget:g}")
    for on_hull in (True, False):
        while True:
            steps = [
                ((job.gain(option) - job.gain(now)) / (option.cost - now.cost), job.name, option)
                for job in jobs
                for now in (chosen[job.name],)
                for option in (_hull(job, fronts[job.name]) if on_hull else fronts[job.name])
                if now.cost < option.cost <= now.cost + left and job.gain(option) > job.gain(now)
            ]
            if not steps:
                break
            _, name, option = max(steps, key=lambda step: (step[0], step[1]))
            left -= option.cost - chosen[name].cost
            chosen[name] = option
    return chosen


def _front(job: ClusterJob) -> list[Option]:
    gains, costs = np.array([job.gain(o) for o in job.options]), np.array([o.cost for o in job.options])
    return [job.options[i] for i in pareto_front(gains, costs)]


def _hull(job: ClusterJob, front: Sequence[Option]) -> list[Option]:
    """The upper concave hull of a front, ascending in cost."""
    hull: list[Option] = []
    for option in front:
        while len(hull) > 1 and _slope(job, hull[-2], hull[-1]) <= _slope(job, hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(job: ClusterJob, small: Option, large: Option) -> float:
    return (job.gain(large) - job.gain(small)) / (large.cost - small.cost)
