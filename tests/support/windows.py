"""Windows of a job with growing memory."""

from __future__ import annotations

from lightning_dlrover.perf.samples import StepProfile

MIB = 2**20


def window(index: int, memory_mib: float, round_number: int = 1) -> StepProfile:
    return StepProfile(
        worker_id="w",
        round_number=round_number,
        global_rank=0,
        num_workers=2,
        num_nodes=1,
        first_step=20 * index,
        num_steps=20,
        global_batch=64,
        local_batch=32,
        loader_workers=0,
        intra_op_threads=1,
        cores=1.0,
        device="cpu",
        step_time_s=0.1,
        data_wait_s=0.0,
        forward_s=0.05,
        backward_s=0.04,
        communication_s=0.0,
        optimizer_s=0.01,
        other_s=0.0,
        samples_per_s=640.0,
        memory_bytes=round(memory_mib * MIB),
        cpu_percent=90.0,
        memory_limit_bytes=1000 * MIB,
        at=float(index),
    )
