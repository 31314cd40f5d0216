"""Windows of steps, as a profiler measures them, and the traces that some tests read instead."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dlrover.tuning.samples import StepProfile

DATA = Path(os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
TRACES = DATA / "step_traces"
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"no {TRACES}: set DLROVER_SHARED_DATA to the folder that holds step_traces"
)

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


def window(
    num_workers: int,
    step_time_s: float,
    *,
    global_batch: int = 64,
    communication_s: float = 0.0,
    cores: float = 2.0,
    threads: int = 1,
    num_nodes: int = 1,
    dense_bytes: int = 4_000_000,
) -> StepProfile:
    return replace(
        WINDOW,
        worker_id="w0",
        num_workers=num_workers,
        num_nodes=num_nodes,
        num_steps=50,
        global_batch=global_batch,
        local_batch=math.ceil(global_batch / num_workers),
        loader_workers=0,
        intra_op_threads=threads,
        cores=cores,
        step_time_s=step_time_s,
        forward_s=(step_time_s - communication_s) / 3,
        backward_s=(step_time_s - communication_s) * 2 / 3,
        communication_s=communication_s,
        optimizer_s=0.0,
        samples_per_s=global_batch / step_time_s,
        memory_bytes=1 << 28,
        dense_bytes=dense_bytes,
    )


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path
