"""Windows of steps for tests of models, and the traces that some of them read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_dlrover.tuning.samples import StepProfile

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "step_traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no step-time traces in {TRACES}")


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
    local_batch = math.ceil(global_batch / num_workers)
    return StepProfile(
        worker_id="w0",
        round_number=1,
        global_rank=0,
        num_workers=num_workers,
        num_nodes=num_nodes,
        first_step=0,
        num_steps=50,
        global_batch=global_batch,
        local_batch=local_batch,
        loader_workers=0,
        intra_op_threads=threads,
        cores=cores,
        device="cpu",
        step_time_s=step_time_s,
        data_wait_s=0.0,
        forward_s=(step_time_s - communication_s) / 3,
        backward_s=(step_time_s - communication_s) * 2 / 3,
        communication_s=communication_s,
        optimizer_s=0.0,
        other_s=0.0,
        samples_per_s=global_batch / step_time_s,
        memory_bytes=1 << 28,
        cpu_percent=100.0,
        dense_bytes=dense_bytes,
    )


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path
