"""One queue for GPUs and cores: the speed of a job where it was not measured, and which jobs leave the GPUs to run on cores.

A GPU runs a part of a step, its kernels, many times as fast as cores do, and leaves the rest as it is: waits for input, and the
job's own code. So a job that keeps a GPU busy for a fraction `busy` of its step takes `1 + busy (factor - 1)` times as long on
cores. The factor is learned from kinds that were measured on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlrover.planner.cluster.jobs import Profile

__all__ = ["FACTOR", "Left", "factor_of", "for_cores", "speed_on_cores", "speed_on_gpu"]

FACTOR = 16.0
"""Times that a GPU runs kernels as fast as cores, where no job was measured on both."""

SLACK = 1.2
"""Jobs on cores take up to this times as long as alone, for what they take from each other's caches."""


def factor_of(measured: Sequence[tuple[Profile, Profile]]) -> float:
    """Return how many times as fast as cores a GPU runs kernels; `FACTOR` counts as much as a kind that is all kernels.

    Args:
        measured: profiles of kinds of jobs on a GPU and on cores.
    """
    longer = sum(on_gpu.steps_per_s / on_cores.steps_per_s - 1 for on_gpu, on_cores in measured)
    return max(1.0, 1 + (longer + FACTOR - 1) / (sum(_busy(on_gpu) for on_gpu, _ in measured) + 1))


def speed_on_cores(on_gpu: Profile, factor: float) -> float:
    """Return the steps/s to expect on cores of a job that was measured on a GPU."""
    return on_gpu.steps_per_s / (1 + _busy(on_gpu) * (factor - 1))


def speed_on_gpu(on_cores: Profile, factor: float) -> float:
    """Return the steps/s to expect on a GPU of a job that was measured on cores; all but its wait for input becomes faster."""
    wait = min(on_cores.use.get("input", 0.0), 1.0)
    return on_cores.steps_per_s / (wait + (1 - wait) / factor)


def _busy(on_gpu: Profile) -> float:
    return min(on_gpu.use.get("gpu", 1.0), 1.0)


@dataclass(frozen=True)
class Left:
    """What is left of a job.

    Args:
        gpu_s: time alone on a GPU.
        busy: fraction of that in which its kernels run.
        cores_s: time alone on cores.
        cores: cores that it then keeps busy.
    """

    gpu_s: float
    busy: float
    cores_s: float
    cores: float

    @property
    def price(self) -> float:
        """Seconds of cores for each second that the GPU is relieved of."""
        return self.cores_s * self.cores / max(self.gpu_s * self.busy, 1e-9)


def for_cores(
    jobs: Sequence[Left], on_gpus: Sequence[Left], on_cores: Sequence[Left], at_once: int, num_gpus: int, num_cores: float
) -> list[int]:
    """Return which of the jobs that wait should start on cores, the one of the lowest price first.

    A job is left to the GPUs if these would end all that is left before the cores could end this job. So no job runs on cores
    alone in the end.

    Args:
        jobs: those that wait, and could run on either.
        on_gpus: those that the GPUs have.
        on_cores: those that the cores have.
        at_once: most jobs of all GPUs that run at once.
    """
    gpu_jobs = [*jobs, *on_gpus]
    # The GPUs end no sooner, however well their jobs share them.
    gpus_end_s = max(sum(job.gpu_s * job.busy for job in gpu_jobs) / num_gpus, sum(job.gpu_s for job in gpu_jobs) / at_once)
    before_s = sum(job.cores_s * job.cores for job in on_cores)
    ends_s = [max(job.cores_s, (before_s + job.cores_s * job.cores) / num_cores) for job in jobs]
    able = [index for index, end_s in enumerate(ends_s) if SLACK * end_s < gpus_end_s or math.isinf(jobs[index].gpu_s)]
    return sorted(able, key=lambda index: jobs[index].price)
