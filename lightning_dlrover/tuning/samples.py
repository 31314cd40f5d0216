"""Configurations, and the same figures of many of them as columns, on which all models of this package compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.samples import StepProfile

__all__ = ["Columns", "Configuration", "Floats", "configuration_of", "windows_by_configuration"]

Floats = NDArray[np.float64]

_COUNTS_FROM_0 = (
    "loader_workers",
    "intra_op_threads",
    "dense_bytes",
    "prefetch_factor",
    "dense_flops",
    "embedding_bytes",
    "fullest_node",
    "emptiest_node",
)


@dataclass(frozen=True)
class Configuration:
    """Conditions that determine step time and memory; the fullest worker where workers differ.

    `num_nodes` counts machines: two agents on one host are one node here, because they share its cores.

    Example:
        >>> two = Configuration(num_workers=2, num_nodes=1, cores=4, local_batch=256, loader_workers=0, intra_op_threads=1,
        ...                     dense_bytes=0, node_cores=6)
        >>> two.workers_on_node, two.core_share
        (2, 3.0)
    """

    num_workers: int
    num_nodes: int
    cores: float  # cores that one worker may use, shared or not
    local_batch: int  # samples per step on the fullest worker
    loader_workers: int
    intra_op_threads: int  # 0: one for each of `cores`
    dense_bytes: int  # gradient bytes reduced per step; 0: unknown
    node_cores: float = 0.0  # cores of one node, all its workers together; 0: unknown, workers are assumed to share no core
    device: str = "cpu"  # cpu, or the accelerator's name
    prefetch_factor: int = 0  # batches that each loader worker prepares ahead
    dense_flops: int = 0  # per sample, forward and backward; 0: unknown
    embedding_bytes: int = 0  # bytes of all tables of the job
    lookups_per_sample: float = 0.0  # rows that a sample reads from the tables
    fullest_node: int = 0  # workers on the fullest node; 0: spread evenly
    emptiest_node: int = 0  # workers on the emptiest node; 0: spread evenly

    def __post_init__(self) -> None:
        wrong = (
            [name for name in ("num_workers", "num_nodes", "local_batch") if getattr(self, name) < 1]
            + [name for name in _COUNTS_FROM_0 if getattr(self, name) < 0]
            + [name for name in ("cores", "node_cores", "lookups_per_sample") if not 0 <= getattr(self, name) < math.inf]
            + (["cores"] if self.cores == 0 else [])
        )
        if wrong:
            raise ValueError(f"no training step has {wrong[0]}={getattr(self, wrong[0])!r}: {self}")

    @property
    def workers_on_node(self) -> int:
        """Workers on the fullest node; a synchronous step waits for them."""
        return self.fullest_node or math.ceil(self.num_workers / self.num_nodes)

    @property
    def threads(self) -> float:
        """Threads of one worker that compute at the same time."""
        return min(self.intra_op_threads, self.cores) if self.intra_op_threads else self.cores

    @property
    def core_share(self) -> float:
        """Cores that one worker gets when all workers of its node compute at once."""
        return min(self.cores, self.node_cores / self.workers_on_node) if self.node_cores else self.cores


def configuration_of(profile: StepProfile, node_cores: float = 0.0) -> Configuration:
    """Return the configuration of a measured profile, which does not contain `node_cores`.

    Example:
        >>> configuration = configuration_of(windows[0])  # `windows`: step profiles of one job
        >>> configuration.num_workers, configuration.local_batch
        (1, 512)
    """
    return Configuration(
        num_workers=profile.num_workers,
        num_nodes=profile.num_nodes,
        cores=profile.cores,
        local_batch=max(profile.local_batch, math.ceil(profile.global_batch / profile.num_workers)),
        loader_workers=profile.loader_workers,
        intra_op_threads=profile.intra_op_threads,
        dense_bytes=profile.dense_bytes,
        node_cores=node_cores,
        device=profile.device,
        prefetch_factor=profile.prefetch_factor,
        dense_flops=profile.dense_flops,
        embedding_bytes=profile.embedding_bytes,
        lookups_per_sample=profile.lookups_per_sample,
        fullest_node=profile.fullest_node,
        emptiest_node=profile.emptiest_node,
    )


def windows_by_configuration(samples: Sequence[StepProfile], node_cores: float) -> dict[Configuration, list[StepProfile]]:
    """Return the windows of each configuration, oldest first; the configuration with the newest window comes last."""
    groups: dict[Configuration, list[StepProfile]] = {}
    for sample in samples:
        configuration = configuration_of(sample, node_cores)
        groups[configuration] = [*groups.pop(configuration, ()), sample]
    return groups


_FIGURES = tuple(f.name for f in dataclasses.fields(Configuration) if f.name != "device")
_figures_of = attrgetter(*_FIGURES)


@dataclass(frozen=True)
class Columns:
    """One row for each configuration; every array has shape ``(num_configurations,)``.

    Holds the same figures as the properties of `Configuration`, for 100,000 of them in a tenth of a second.

    Example:
        >>> Columns.of([configuration_of(window) for window in windows]).num_workers  # `windows`: step profiles of one job
        array([1., 2.])
    """

    num_workers: Floats
    num_nodes: Floats
    fullest: Floats  # workers on the fullest node: a synchronous step waits for them
    emptiest: Floats
    local_batch: Floats
    threads: Floats  # threads of one worker that compute at the same time
    core_share: Floats  # cores that one worker gets when all workers of its node compute at once
    node_cores: Floats  # 0: unknown
    loader_workers: Floats
    prefetch_factor: Floats
    dense_bytes: Floats
    dense_flops: Floats
    embedding_bytes: Floats
    lookups_per_sample: Floats

    @classmethod
    def of(cls, configurations: Sequence[Configuration]) -> Columns:
        table = np.array([_figures_of(c) for c in configurations], dtype=np.float64).reshape(-1, len(_FIGURES))
        raw = dict(zip(_FIGURES, table.T, strict=True))
        workers, nodes, cores, node_cores = raw["num_workers"], raw["num_nodes"], raw["cores"], raw["node_cores"]
        fullest = np.where(raw["fullest_node"] > 0, raw["fullest_node"], np.ceil(workers / nodes))
        emptiest = np.where(raw["emptiest_node"] > 0, raw["emptiest_node"], np.maximum(1.0, workers // nodes))
        threads = raw["intra_op_threads"]
        return cls(
            num_workers=workers,
            num_nodes=nodes,
            fullest=fullest,
            emptiest=emptiest,
            local_batch=raw["local_batch"],
            threads=np.where(threads > 0, np.minimum(threads, cores), cores),
            core_share=np.where(node_cores > 0, np.minimum(cores, node_cores / fullest), cores),
            node_cores=node_cores,
            loader_workers=raw["loader_workers"],
            prefetch_factor=raw["prefetch_factor"],
            dense_bytes=raw["dense_bytes"],
            dense_flops=raw["dense_flops"],
            embedding_bytes=raw["embedding_bytes"],
            lookups_per_sample=raw["lookups_per_sample"],
        )

    def rows(self, index: NDArray[Any]) -> Columns:
        """Return the rows at `index`, which is positions or a mask."""
        return Columns(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    def __len__(self) -> int:
        return len(self.num_workers)
