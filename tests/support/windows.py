"""Windows of steps, as a profiler measures them."""

from __future__ import annotations

from dataclasses import replace

from lightning_dlrover.tuning.samples import StepProfile

MIB = 2**20

WINDOW = StepProfile(
    worker_id="w",
    round_number=1,
    global_rank=0,
    num_workers=2,
    num_nodes=2,
    first_step=0,
    num_steps=20,
    global_batch=64,
    local_batch=32,
    loader_workers=1,
    intra_op_threads=1,
    cores=1.0,
    device="cpu",
    step_time_s=0.1,
    data_wait_s=0.0,
    forward_s=0.04,
    backward_s=0.04,
    communication_s=0.01,
    optimizer_s=0.01,
    other_s=0.0,
    samples_per_s=640.0,
    memory_bytes=1 << 30,
    cpu_percent=90.0,
)


def memory_window(index: int, memory_mib: float, round_number: int = 1) -> StepProfile:
    """Window `index` of a job with growing memory."""
    return replace(
        WINDOW,
        round_number=round_number,
        num_nodes=1,
        first_step=20 * index,
        loader_workers=0,
        forward_s=0.05,
        communication_s=0.0,
        memory_bytes=round(memory_mib * MIB),
        memory_limit_bytes=1000 * MIB,
        at=float(index),
    )
