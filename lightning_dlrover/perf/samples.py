"""One window of training steps: the unit that is published, stored, learned from and drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AGENT_BYTES", "STEP_PARTS", "OwnTimes", "StepProfile", "impossible_figure"]

AGENT_BYTES = 160 * 2**20
"""Memory of a node that its elastic agent takes; the worker and its loader workers get the rest."""

STEP_PARTS = ("data_wait", "forward", "backward", "communication", "optimizer", "other")
"""Parts of a step. The fields `StepProfile.<part>_s` of all of them add up to `step_time_s`."""


@dataclass(frozen=True)
class StepProfile:
    """Means over `num_steps` consecutive steps of one worker within one round.

    Published under `profiles/{worker_id}` (a recent window of each worker); rank 0's windows, merged while nothing changes, are
    also kept in the job's events as kind "profile".

    Example:
        >>> parts = dict(data_wait_s=0.01, forward_s=0.03, backward_s=0.05, communication_s=0.0, optimizer_s=0.01, other_s=0.0)
        >>> window = StepProfile(
        ...     worker_id="w0", round_number=1, global_rank=0, num_workers=2, num_nodes=1, first_step=0, num_steps=20,
        ...     global_batch=512, local_batch=256, loader_workers=0, intra_op_threads=1, cores=4.0, device="cpu",
        ...     step_time_s=0.1, samples_per_s=5120.0, memory_bytes=2**28, cpu_percent=100.0, **parts,
        ... )
        >>> f"{window.samples_per_s * window.step_time_s:.0f} samples a step"
        '512 samples a step'
    """

    worker_id: str
    round_number: int
    global_rank: int
    num_workers: int
    num_nodes: int
    first_step: int  # batches done by the job before this window
    num_steps: int
    global_batch: int  # samples per step, all workers together
    local_batch: int  # samples per step on this worker
    loader_workers: int
    intra_op_threads: int
    cores: float  # cores this worker may use
    device: str  # cpu, or the accelerator's name
    step_time_s: float
    data_wait_s: float
    forward_s: float
    backward_s: float  # excludes communication that backward does not hide
    communication_s: float  # waits for other workers in both passes; on a GPU, those of the stream that computes
    optimizer_s: float
    other_s: float
    samples_per_s: float  # throughput of the whole job
    memory_bytes: int  # resident set of the worker, its loader workers included
    cpu_percent: float  # percent of one core, loader workers included
    dense_bytes: int = 0  # gradient bytes reduced per step
    gpu_memory_bytes: int = 0  # most bytes of tensors at once in the window
    gpu_percent: float = 0.0  # percent of the time in which a kernel of any process ran, mean of the window
    at: float = 0.0  # seconds since the epoch, end of the window
    prefetch_factor: int = 0  # batches that each loader worker prepares ahead
    peak_memory_bytes: int = 0  # highest resident set of the worker and its loader workers seen in the window; 0: unknown
    memory_limit_bytes: int = 0  # limit on the worker with its loader workers; 0: none known
    dense_flops: int = 0  # per sample, forward and backward, outside of tables; 0: unknown
    embedding_bytes: int = 0  # bytes of all tables of the job
    lookups_per_sample: float = 0.0  # rows that a sample reads from the tables
    fullest_node: int = 0  # workers on the fullest node; 0: unknown, taken as spread evenly
    emptiest_node: int = 0  # workers on the emptiest node; 0: unknown, taken as spread evenly
    gpu_limit_bytes: int = 0  # limit on `gpu_memory_bytes`; 0: none known
    pass_limit: int = 0  # most samples that a worker computes at once, more in parts; 0: a share is never computed in parts


def impossible_figure(sample: StepProfile) -> tuple[str, str] | None:
    """Return the first figure in `sample` that is impossible for a training step, and the rule it breaks; else None."""
    parts = [f"{part}_s" for part in STEP_PARTS]
    counts = ("num_workers", "num_nodes", "global_batch", "local_batch")
    not_negative = (
        *("loader_workers", "intra_op_threads", "dense_bytes", "prefetch_factor", "dense_flops", "embedding_bytes"),
        *("lookups_per_sample", "fullest_node", "emptiest_node"),
    )
    problems = (
        *((n, "must be a finite time above 0") for n in ("step_time_s",) if not 0 < sample.step_time_s < math.inf),
        *((n, "must be a finite time, 0 or more") for n in parts if not 0 <= getattr(sample, n) < math.inf),
        *((n, "must be 1 or more") for n in counts if not getattr(sample, n) >= 1),
        *((n, "must be finite, 0 or more") for n in not_negative if not 0 <= getattr(sample, n) < math.inf),
        *((n, "must be finite and above 0") for n in ("cores",) if not 0 < sample.cores < math.inf),
    )
    return problems[0] if problems else None


@dataclass(frozen=True)
class OwnTimes:
    """Time that each worker needed by itself in a few consecutive steps of one round: means per step, by global rank."""

    num_steps: int
    step_time_s: float
    compute_s: tuple[float, ...]
    data_s: tuple[float, ...]
    queued_s: tuple[float, ...]  # additional time in which the worker was ready but had no core
