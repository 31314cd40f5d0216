"""The reference models' measurements as jobs of the history, from which later jobs start."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from lightning_dlrover.characterize.machine import Machine
from lightning_dlrover.characterize.point import Point, Visit
from lightning_dlrover.characterize.studies import WORKLOADS
from lightning_dlrover.characterize.work import dense_bytes, descriptor, mlp_flops, table_bytes
from lightning_dlrover.learn.history import JobEntry, JobHistory
from lightning_dlrover.perf.samples import StepProfile

__all__ = ["as_window", "record_in_history"]

PREFETCH_FACTOR = 2
"""Batches that a DataLoader's worker prepares ahead by default."""


def record_in_history(history: JobHistory, machine: Machine, visits: Iterable[Visit]) -> int:
    """Write each reference model as a job that has tried its settings one after the other. Return the number of jobs.

    Only points on CPU with a DataLoader count: they differ in workers, threads and loader workers, as a job's settings do.

    Raises:
        HistoryError: the history cannot be written.
    """
    by_workload: dict[str, list[Visit]] = {}
    for visit in visits:
        if _has_settings(visit.point) and visit.blocks:
            by_workload.setdefault(visit.point.workload, []).append(visit)
    for workload, found in by_workload.items():
        found.sort(key=lambda visit: visit.at)
        whole = WORKLOADS[workload].batch
        windows = [as_window(visit, machine.cores, whole) for visit in found]
        name = f"characterize-{workload}"
        entry = JobEntry(
            key=f"{name}-{machine.name}",
            run_id=name,
            started_at=found[0].at,
            updated_at=found[-1].at + found[-1].took_s,
            outcome="finished",
            descriptor=descriptor(WORKLOADS[workload], machine.cores),
        )
        history.record(entry, windows)
    return len(by_workload)


def _has_settings(point: Point) -> bool:
    """Whether a point is a reference model as a job would run it, changed in its settings only."""
    base = WORKLOADS.get(point.workload)
    if base is None or point.device != "cpu" or point.data == "memory" or point.placement not in ("local", "table_wise"):
        return False
    model = ("num_dense", "num_sparse", "rows", "dim", "lookups", "skew", "width", "depth")
    data = "packed" if point.workload == "input" else "rows"
    return point.data == data and all(getattr(point, name) == getattr(base, name) for name in model)


def as_window(visit: Visit, node_cores: float, global_batch: int) -> StepProfile:
    """Return a visit as a window of steps.

    Args:
        global_batch: batch of the reference model. A point's own may be a few samples smaller, to be divisible.
    """
    point = visit.point
    step_s = statistics.median(visit.blocks) * global_batch / point.batch
    parts = visit.part_s
    compute_s = sum(s for name, s in parts.items() if name not in ("data", "communication", "optimizer"))
    # Parts come from blocks of their own, so they do not add up to the other blocks' steps exactly.
    scale = min(1.0, step_s / sum(parts.values())) if any(parts.values()) else 0.0
    known = {
        "data_wait_s": parts.get("data", 0.0) * scale,
        "forward_s": visit.forward_s * scale,
        "backward_s": max(0.0, compute_s - visit.forward_s) * scale,
        "communication_s": parts.get("communication", 0.0) * scale,
        "optimizer_s": parts.get("optimizer", 0.0) * scale,
    }
    window = StepProfile(
        worker_id="characterize",
        round_number=1,
        global_rank=0,
        num_workers=point.num_workers,
        num_nodes=1,
        first_step=0,
        num_steps=len(visit.blocks),
        global_batch=global_batch,
        local_batch=max(1, global_batch // point.num_workers),
        loader_workers=point.loader_workers,
        intra_op_threads=point.threads,
        cores=node_cores,
        device="cpu",
        step_time_s=step_s,
        data_wait_s=known["data_wait_s"],
        forward_s=known["forward_s"],
        backward_s=known["backward_s"],
        communication_s=known["communication_s"],
        optimizer_s=known["optimizer_s"],
        other_s=max(0.0, step_s - sum(known.values())),
        samples_per_s=global_batch / step_s,
        memory_bytes=visit.peak_memory_bytes // point.num_workers,
        cpu_percent=visit.cpu_percent / point.num_workers,
        dense_bytes=dense_bytes(point),
        at=visit.at,
        peak_memory_bytes=visit.peak_memory_bytes // point.num_workers,
        dense_flops=int(mlp_flops(point)),
        embedding_bytes=table_bytes(point),
        lookups_per_sample=float(point.num_sparse * point.lookups),
        fullest_node=point.num_workers,
        emptiest_node=point.num_workers,
    )
    return replace(window, prefetch_factor=PREFETCH_FACTOR if point.loader_workers else 0)
