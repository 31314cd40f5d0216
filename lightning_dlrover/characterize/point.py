"""One configuration of a study, one visit to it, and a limit of the machine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PARTS", "Data", "Limit", "Placement", "Point", "Visit"]

PARTS = ("data", "embedding", "bottom_mlp", "interaction", "top_mlp", "communication", "optimizer")
"""Parts of a step of the reference model; those of a user's own model are Lightning's."""

Placement = Literal["local", "replicated", "table_wise", "row_wise", "column_wise", "remote"]
Data = Literal["memory", "rows", "packed", "parquet"]


@dataclass(frozen=True)
class Point:
    """A configuration to measure. Two studies that need the same one share its measurements, see `Study`."""

    workload: str  # name of the reference model that the point varies
    num_dense: int = 64  # dense features per sample
    num_sparse: int = 8  # tables; 0: an MLP alone
    rows: int = 100_000  # rows of each table
    dim: int = 32  # values per row
    lookups: int = 8  # rows that a sample reads from each table
    skew: float = 0.0  # exponent of the ids' power law; 0: uniform
    width: int = 256  # units of each hidden layer
    depth: int = 2  # hidden layers of the bottom and of the top MLP
    batch: int = 256  # samples per step, all workers together
    num_workers: int = 1
    threads: int = 1  # per worker
    loader_workers: int = 0  # per worker
    placement: Placement = "local"
    device: Literal["cpu", "cuda", "mix"] = "cpu"  # mix: tables on the CPU, MLPs on the GPU
    data: Data = "memory"
    learning_rate: float = 0.0  # above 0: train on planted data with it, and measure the loss instead of the time
    model: str = ""  # the user's own, as MODULE:CLASS or FILE:CLASS

    @property
    def measures_loss(self) -> bool:
        return self.learning_rate > 0


@dataclass(frozen=True)
class Visit:
    """One visit to a point: a fresh model, a warm-up, then several blocks of steps."""

    point: Point
    at: float  # seconds since the epoch
    took_s: float  # includes the model's construction and the warm-up
    blocks: tuple[float, ...]  # seconds per step in each block; normalized entropy per seed where the loss is measured
    part_s: dict[str, float]  # seconds of each part of a step, from blocks of their own
    forward_s: float = 0.0  # computation of the forward pass within the parts
    peak_memory_bytes: int = 0  # highest resident set, all workers together
    cpu_percent: float = 0.0  # percent of one core, all workers together
    gpu_memory_bytes: int = 0
    joules_per_step: float | None = None  # None: the machine does not measure it
    problem: str = ""  # why there are no blocks
    reference_s: tuple[float, ...] = ()  # seconds of the reference program within each block; empty: not run


@dataclass(frozen=True)
class Limit:
    """One measured limit of the machine."""

    name: str
    unit: str
    threads: int
    at: float
    took_s: float
    blocks: tuple[float, ...]
    problem: str = ""
