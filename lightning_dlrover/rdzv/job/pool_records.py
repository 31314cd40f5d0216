"""Records of a pool: a budget of cores, GPUs and memory that several jobs share.

    members/{run_id}   a job that has, or waits for, a place. Written by its `dlrover run`, bound to that process's lease.
    grants/{run_id}    the size that the job has, or its place in the queue. Written by the brain, fenced on `brain`.
                       Removed by the run when it ends in order, or by the brain once nothing is left of the job.
    ../.gpus/{gpu}/holder  the run that uses a GPU of its machine, whatever its pool. Written by that run, bound to the lease of
                       its place, and fenced on it.
    others             jobs in no pool that the brain counts. Written by the brain, bound to its lease; for commands only.
    brain              the process that decides. Rewritten with each of its decisions, so that a decision which arrives late,
                       after its answer was lost, is refused.

A job holds its grant, the workers of its plan, or those that run, whichever is the most. So a place is free only when
the processes in it have ended, however their `dlrover run` has ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX

__all__ = ["POOLS_FOLDER", "BrainRecord", "GpuRecord", "GrantRecord", "MemberRecord", "OthersRecord", "PoolKeys"]

POOLS_FOLDER = ".pools"
"""Folder of all pools below the prefix of all jobs. No job has this name: names of jobs begin with a letter, digit or `_`."""


@dataclass(frozen=True)
class PoolKeys:
    """Every key of one pool."""

    pool: str
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", self.pool):
            raise ValueError(f"{self.pool!r} cannot name a pool: use letters, digits, '.', '_' and '-', such as team-a")

    @property
    def jobs(self) -> str:
        """Folder of all jobs."""
        return f"{self.prefix.rstrip('/')}/"

    @property
    def pools(self) -> str:
        """Folder of all pools."""
        return f"{self.jobs}{POOLS_FOLDER}/"

    @property
    def root(self) -> str:
        return f"{self.pools}{self.pool}/"

    @property
    def brain(self) -> str:
        return f"{self.root}brain"

    @property
    def others(self) -> str:
        return f"{self.root}others"

    @property
    def members(self) -> str:
        return f"{self.root}members/"

    @property
    def grants(self) -> str:
        return f"{self.root}grants/"

    def gpu(self, name: str) -> str:
        """The key of a GPU, the same for all pools. No pool has a name that begins with a dot."""
        return f"{self.pools}.gpus/{name}/holder"


@dataclass(frozen=True)
class GpuRecord:
    """The run that uses a GPU of its machine."""

    run_id: str
    host: str
    pid: int


@dataclass(frozen=True)
class MemberRecord:
    """A job of the pool, as it was started. Times are seconds since the epoch."""

    host: str
    pid: int
    min_workers: int
    max_workers: int
    submitted_at: float
    cores: float = 1.0  # per worker
    gpus: int = 0
    memory_mb: int = 0  # 0: its memory is not counted
    priority: int = 0  # higher ones start first
    weight: float = 1.0
    owner: str = ""  # user or team
    deadline_at: float = 0.0  # 0: any time

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers or not self.weight > 0 or self.cores < 0:
            raise ValueError(
                f"a job of {self.min_workers} to {self.max_workers} workers with {self.cores} cores each and weight "
                f"{self.weight} can have no place: give at least one worker, and a weight above 0"
            )


@dataclass(frozen=True)
class GrantRecord:
    """The place of a job in a pool. Times are seconds since the epoch."""

    state: Literal["waiting", "granted", "refused"]
    num_workers: int = 0  # 0: it waits
    reason: str = ""  # one sentence for people
    place: int = 0  # waiting: its number in the queue, from 1
    queued: int = 0  # waiting: jobs in the queue
    expected_at: float = 0.0  # waiting: expected start; 0: unknown
    since: float = 0.0  # start of this state, or of this size
    submitted_at: float = 0.0
    served_worker_s: float = 0.0  # seconds times workers that it had before `since`
    # The owner, and the needs of a worker, for as long as the job has processes though its `dlrover run` is gone.
    owner: str = ""
    cores: float = 1.0
    gpus: int = 0
    memory_mb: int = 0


@dataclass(frozen=True)
class BrainRecord:
    """The process that decides on a pool. Key `brain`, bound to its lease."""

    host: str
    pid: int
    policy: str = ""
    budget: dict[str, float] = field(default_factory=dict)  # cores, gpus, memory_mb; a resource that is absent is unlimited
    max_wait_s: float = 3600.0
    owner_weights: dict[str, float] = field(default_factory=dict)
    quotas: dict[str, dict[str, float]] = field(default_factory=dict)  # by owner, each as `budget`
    number: int = 0  # decisions of this process so far


@dataclass(frozen=True)
class OthersRecord:
    """Jobs in no pool that the brain counts. Key `others`, bound to the brain's lease."""

    jobs: list[str] = field(default_factory=list)
