"""A pool in simulated time, with owners that always have jobs to submit. Pure: only sizes are decided, nothing runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_dlrover.pool.budget import PoolJob, Rate, Resources
from lightning_dlrover.pool.decisions import Rules, choose


@dataclass(frozen=True)
class Flood:
    """An owner that always has jobs waiting.

    Args:
        from_s: before this time it has none.
        most_fewest: largest number of fewest workers of a job.
        spread: workers that a job may have beyond its fewest.
        longest_s: longest time that a job runs.
    """

    from_s: float = 0.0
    most_fewest: int = 4
    spread: int = 0
    longest_s: int = 10


@dataclass
class PoolOfOwners:
    """Steps of one second. A job ends at its time, whatever its size."""

    rules: Rules
    floods: Mapping[str, Flood] = field(default_factory=dict)
    seed: int = 0
    jobs: dict[str, PoolJob] = field(default_factory=dict)
    num_waiting: int = 20  # waiting jobs of each owner before a decision, so that some remain after it
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._ends_s: dict[str, float] = {}
        self._num_jobs = 0

    def submit(self, owner: str, fewest: int, most: int, length_s: float, priority: int = 0) -> str:
        self._num_jobs += 1
        name = f"{owner}-{self._num_jobs}"
        self.jobs[name] = PoolJob(name, Resources(1.0), fewest, most, owner=owner, submitted_s=self.now_s, priority=priority)
        self._ends_s[name] = length_s
        return name

    def held(self, owner: str) -> int:
        """Workers of an owner's jobs."""
        return sum(job.held for job in self.jobs.values() if job.owner == owner)

    def step(self) -> None:
        """End jobs, submit others, and give all the sizes that they should have."""
        for name in [name for name, job in self.jobs.items() if job.held and self._ends_s[name] <= self.now_s]:
            del self.jobs[name]
        for owner, flood in self.floods.items():
            while self.now_s >= flood.from_s and self._num_waiting_of(owner) < self.num_waiting:
                fewest = self._random.randint(1, flood.most_fewest)
                most = fewest + self._random.randint(0, flood.spread)
                self.submit(owner, fewest, most, self._random.randint(1, flood.longest_s), self._random.randint(0, 9))
        found = choose(list(self.jobs.values()), self.rules, self.now_s, may_grow=True).wanted
        assert sum(found.values()) <= self.rules.budget.cores
        for name, job in self.jobs.items():
            size = found[name]
            assert size >= job.min_workers or job.is_waiting, "a running job was stopped"
            if size and job.is_waiting:
                self._ends_s[name] += self.now_s
                rates = tuple(Rate(n, n**0.7, n**0.7, n**0.7) for n in range(1, job.max_workers + 1))
                job = replace(job, since_s=self.now_s, rates=rates)
            self.jobs[name] = replace(job, granted=size, planned=size, alive=size)
        self.now_s += 1.0

    def _num_waiting_of(self, owner: str) -> int:
        return sum(job.owner == owner and job.is_waiting for job in self.jobs.values())
