"""Results of a simulation: each job's times, and figures of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dlrover.planner.cluster.jobs import Job
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["Finished", "SimulationOutcome", "Span"]


@dataclass(frozen=True)
class Span:
    """A stretch of time in which a job had the same devices."""

    job: str
    began_s: float
    ended_s: float
    num_devices: int


@dataclass(frozen=True)
class Finished:
    """A job that has ended, or failed."""

    job: Job
    started_s: float
    ended_s: float
    served_device_s: float
    starts: int  # 1 more than it was put back to wait
    changes: int  # times that its devices changed while it ran
    steps: float  # made for good
    is_whole: bool = True  # False: it failed before its last step

    @property
    def completion_s(self) -> float:
        """Seconds from its submission to its end: the JCT."""
        return self.ended_s - self.job.submitted_s

    @property
    def waited_s(self) -> float:
        """Seconds until it first started."""
        return self.started_s - self.job.submitted_s

    @property
    def alone_s(self) -> float:
        """Seconds that it would take alone on one device of its fastest kind."""
        return self.steps / max(profile.steps_per_s for profile in self.job.profiles.values())


@dataclass(frozen=True)
class SimulationOutcome:
    """All jobs of a simulation in the order of their ends."""

    finished: tuple[Finished, ...]
    start_s: float  # first submission
    end_s: float
    num_devices: int
    busy_device_s: float
    decisions: int
    spans: tuple[Span, ...] = ()  # all jobs, in the order of their ends

    @property
    def makespan_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def completions_s(self) -> Floats:
        """JCT of each job, shape ``(num_jobs,)``."""
        return np.array([job.completion_s for job in self.finished])

    @property
    def mean_completion_s(self) -> float:
        return float(self.completions_s.mean())

    @property
    def p99_completion_s(self) -> float:
        return float(np.quantile(self.completions_s, 0.99))

    @property
    def longest_wait_s(self) -> float:
        return max(job.waited_s for job in self.finished)

    @property
    def utilisation(self) -> float:
        """Fraction of the devices' time in which a job had them."""
        return self.busy_device_s / (self.num_devices * self.makespan_s) if self.makespan_s else 0.0

    @property
    def changes_per_job(self) -> float:
        """Changes of a running job's devices, and times that it was put back to wait."""
        return sum(job.changes + job.starts - 1 for job in self.finished) / len(self.finished)

    @property
    def unfairness(self) -> float:
        """Largest ratio of a job's JCT to its time alone on one device."""
        return max(job.completion_s / job.alone_s for job in self.finished)
