"""Folders of measured step times and traces of jobs that tests write: an application with a speed that is easy to compute."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

COMPUTE_S = 0.01
SYNC_S = 0.02

Times = Callable[[tuple[int, ...], int], tuple[float, float]]


def toy_time_s(placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
    """Step and synchronisation of `toy`: seconds by samples, and by nodes where there are several devices."""
    sync_s = SYNC_S * len(placement) if sum(placement) > 1 else 0.0
    return COMPUTE_S * local_batch + sync_s, sync_s


def write_speeds(
    folder: Path,
    name: str = "toy",
    times: Times = toy_time_s,
    batches: tuple[int, ...] = (4, 8, 16),
    per_node: int = 2,
) -> Path:
    """Write both files of an application: every placement on up to two nodes, and four even nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["placement,local_bsz,step_time,sync_time"]
    counts = range(1, per_node + 1)
    for placement in [*((n,) for n in counts), *((a, b) for a in counts for b in counts if a <= b)]:
        for batch in batches:
            step_s, sync_s = times(placement, batch)
            rows.append(f"{''.join(map(str, placement))},{batch},{step_s},{sync_s}")
    (folder / f"{name}-placements.csv").write_text("\n".join(rows) + "\n")
    rows = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    for count, batch in product(counts, batches):
        step_s, sync_s = times((count,) * 4, batch)
        rows.append(f"4,{4 * count},{batch},{step_s},{sync_s}")
    (folder / f"{name}-scalability.csv").write_text("\n".join(rows) + "\n")
    return folder


def write_trace(path: Path, num_jobs: int = 6, gap_s: float = 60.0, application: str = "toy", batch: int = 64) -> Path:
    """Write a trace in Pollux's form: a job at fixed intervals, each requesting one to four devices."""
    rows = ["name,time,application,num_replicas,batch_size"]
    rows += [f"{application}-{n},{n * gap_s:g},{application},{1 + n % 4},{batch}" for n in range(num_jobs)]
    path.write_text("\n".join(rows) + "\n")
    return path
