"""Tables of predicted speeds: steps/s of each job by number of devices, on as few nodes as can be.

A prediction costs far more than a look into a table, and a job's `Scaling` is the same object until more is known. So each is
asked once for a set of sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.jobs import Job
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["Ints", "SpeedTables"]

Ints = NDArray[np.int64]

MOST_KEPT = 8192
"""Rows that are kept. Above it all are dropped, which costs time only."""


@dataclass(frozen=True)
class _Row:
    source: object  # kept, so that its id is not used again
    steps_per_s: Floats
    spread: Floats


class SpeedTables:
    """Rows of speeds, remembered by the object that predicts them."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int, bytes], _Row] = {}

    def of(self, jobs: Sequence[Job], kind: str, sizes: Ints, per_node: int) -> tuple[Floats, Floats]:
        """Return predicted steps/s and the deviations of their logarithms, both of shape ``(num_jobs, num_sizes)``.

        Speeds are 0 at size 0, and above a job's limit.
        """
        grid = sizes.tobytes()
        speeds, spreads = np.zeros((len(jobs), len(sizes))), np.zeros((len(jobs), len(sizes)))
        for index, job in enumerate(jobs):
            row = self._row(job, kind, sizes, per_node, grid)
            speeds[index], spreads[index] = row.steps_per_s, row.spread
        return speeds, spreads

    def _row(self, job: Job, kind: str, sizes: Ints, per_node: int, grid: bytes) -> _Row:
        source: object = job.scaling or job.profiles[kind]
        key = (id(source), job.most_devices, per_node, grid)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MOST_KEPT:
                self._rows.clear()
            row = self._rows[key] = _predicted(job, kind, sizes, per_node, source)
        return row


def _predicted(job: Job, kind: str, sizes: Ints, per_node: int, source: object) -> _Row:
    speeds, spreads = np.zeros(len(sizes)), np.zeros(len(sizes))
    able = (sizes > 0) & (sizes <= job.most_devices)
    if job.scaling is None:
        speeds[able] = job.profiles[kind].steps_per_s * sizes[able]
    elif able.any():
        found = job.scaling.speeds(sizes[able], -(-sizes[able] // per_node))
        speeds[able], spreads[able] = found.steps_per_s, found.spread
    return _Row(source, speeds, spreads)
