"""A job of a pool, as a decision sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_dlrover.planner.cluster.pool.resources import Resources

__all__ = ["PoolJob", "Rate", "held_by"]


@dataclass(frozen=True)
class Rate:
    """Throughput with a number of workers, with the best settings known for it.

    Args:
        low_per_s: interval of the throughput, 90 %.
    """

    num_workers: int
    samples_per_s: float
    low_per_s: float
    high_per_s: float
    is_measured: bool = False


@dataclass(frozen=True)
class PoolJob:
    """A job that has a place in the pool, or waits for one.

    Args:
        needs: of one worker.
        granted: workers that it was given; 0: it waits.
        planned: workers in its plan; 0: it has no plan yet.
        alive: workers that run, start or end.
        is_present: its `dlrover run` lives.
        is_by_hand: a person has set its size, so it is left alone, and counted.
        rates: by number of workers, ascending; empty before its planner has decided.
        samples_left: None where the end is unknown.
        change_s: expected pause of the job when its size changes.
        submitted_s: on the clock of decisions, as all times.
        served_worker_s: seconds times workers that it had before `since_s`.
        deadline_s: None: any.
    """

    name: str
    needs: Resources
    min_workers: int
    max_workers: int
    granted: int = 0
    planned: int = 0
    alive: int = 0
    is_present: bool = True
    is_by_hand: bool = False
    rates: tuple[Rate, ...] = ()
    samples_left: float | None = None
    change_s: float = 0.5
    submitted_s: float = 0.0
    since_s: float = 0.0
    served_worker_s: float = 0.0
    priority: int = 0
    weight: float = 1.0
    owner: str = ""
    deadline_s: float | None = None

    @property
    def held(self) -> int:
        """Workers with resources that no other job may have."""
        if self.is_by_hand:
            return max(self.planned, self.alive)  # a person may also make it smaller than it was granted
        return max(self.granted, self.planned, self.alive)

    def served_by(self, now_s: float) -> float:
        """Return the seconds times workers that it has had by now."""
        return self.served_worker_s + max(0.0, now_s - self.since_s) * self.held

    @property
    def is_waiting(self) -> bool:
        return self.is_present and not self.held

    @property
    def is_flexible(self) -> bool:
        """Whether a decision may change its size: it runs, its speed by size is known, and no person has set it."""
        return self.is_present and bool(self.held and self.rates) and not self.is_by_hand

    @property
    def least_held(self) -> int:
        """Workers that it cannot be made to give back."""
        return self.min_workers if self.is_flexible else self.held

    def rate(self, num_workers: int) -> Rate | None:
        """Return the throughput with a number of workers, in a straight line between known ones; None if it is unknown."""
        below = max((r for r in self.rates if r.num_workers <= num_workers), key=lambda r: r.num_workers, default=None)
        above = min((r for r in self.rates if r.num_workers >= num_workers), key=lambda r: r.num_workers, default=None)
        if below is None or above is None or below is above:
            return below if above is not None else None
        part = (num_workers - below.num_workers) / (above.num_workers - below.num_workers)

        def between(low: float, high: float) -> float:
            return low + part * (high - low)

        return Rate(
            num_workers,
            between(below.samples_per_s, above.samples_per_s),
            between(below.low_per_s, above.low_per_s),
            between(below.high_per_s, above.high_per_s),
        )

    def seconds_left(self, num_workers: int) -> float | None:
        """Return the seconds that the rest of the job takes with a number of workers; None if that is unknown."""
        rate = self.rate(num_workers)
        return self.samples_left / rate.samples_per_s if rate is not None and self.samples_left is not None else None


def held_by(jobs: Iterable[PoolJob]) -> Resources:
    """Return the resources that these jobs hold together."""
    total = Resources()
    for job in jobs:
        total += job.needs.times(job.held)
    return total
