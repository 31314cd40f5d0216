"""Measured steps: one sample per window, their columns for a fit, and the threads that a fit may use."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

AGENT_BYTES = 160 * 2**20  # memory of a node that its elastic agent takes; the worker and its loader workers get the rest

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
    spare_bytes: int = 0  # memory of the process that this node's workers are forked from; the limit above is without it


def impossible_figure(sample: StepProfile) -> tuple[str, str] | None:
    """Return the first figure in `sample` that is impossible for a training step, and the rule it breaks; else None."""
    if not 0 < sample.step_time_s < math.inf:
        return "step_time_s", "must be a finite time above 0"
    for name in [f"{part}_s" for part in STEP_PARTS]:
        if not 0 <= getattr(sample, name) < math.inf:
            return name, "must be a finite time, 0 or more"
    for name in ("num_workers", "num_nodes", "global_batch", "local_batch"):
        if not getattr(sample, name) >= 1:
            return name, "must be 1 or more"
    for name in (*_COUNTS_FROM_0, "lookups_per_sample"):
        if not 0 <= getattr(sample, name) < math.inf:
            return name, "must be finite, 0 or more"
    return None if 0 < sample.cores < math.inf else ("cores", "must be finite and above 0")


@dataclass(frozen=True)
class OwnTimes:
    """Time of each worker's own work in a few consecutive steps of one round: means per step, by global rank."""

    num_steps: int
    step_time_s: float
    compute_s: tuple[float, ...]
    data_s: tuple[float, ...]
    queued_s: tuple[float, ...]  # additional time in which the worker was ready but had no core
    speeds: tuple[int, ...] = ()  # to which the workers' shares were proportional; empty: equal shares

    def at_equal_shares(self) -> OwnTimes:
        """Return the times that equal shares would have taken, if a worker's time is proportional to its share."""
        if not self.speeds:
            return self
        factors = [sum(self.speeds) / len(self.speeds) / speed for speed in self.speeds]
        compute_s, data_s, queued_s = (
            tuple(seconds * factor for seconds, factor in zip(part, factors, strict=True))
            for part in (self.compute_s, self.data_s, self.queued_s)
        )
        return OwnTimes(self.num_steps, self.step_time_s, compute_s, data_s, queued_s)


# Configurations, and the same figures of many of them as columns, on which all models of this package compute.

Floats = NDArray[np.float64]

NORMAL_WIDTH = 1.645  # standard deviations to either side that hold 90 % of a normal error
MIN_SIGMA = 0.02  # relative difference of two means over a window of the same steps

_COUNTS_FROM_0 = (
    *("loader_workers", "intra_op_threads", "dense_bytes", "prefetch_factor", "dense_flops", "embedding_bytes"),
    *("fullest_node", "emptiest_node"),
)


@dataclass(frozen=True)
class Configuration:
    """Conditions that determine step time and memory; those of the fullest worker where workers differ.

    `num_nodes` counts hosts: two agents on one host are one node here, because they share its cores.

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
    measured: dict[str, Any] = dict(zip(_MEASURED, _measured_of(profile), strict=True))
    measured["local_batch"] = max(profile.local_batch, math.ceil(profile.global_batch / profile.num_workers))
    return Configuration(**measured, node_cores=node_cores)


_MEASURED = tuple(f.name for f in fields(Configuration) if f.name != "node_cores")
_measured_of = attrgetter(*_MEASURED)


def windows_by_configuration(samples: Sequence[StepProfile], node_cores: float) -> dict[Configuration, list[StepProfile]]:
    """Return the windows of each configuration, oldest first; the configuration with the newest window comes last."""
    groups: dict[Configuration, list[StepProfile]] = {}
    for sample in samples:
        configuration = configuration_of(sample, node_cores)
        groups[configuration] = [*groups.pop(configuration, ()), sample]
    return groups


_FIGURES = tuple(f.name for f in fields(Configuration) if f.name != "device")
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
            fullest=fullest,
            emptiest=emptiest,
            threads=np.where(threads > 0, np.minimum(threads, cores), cores),
            core_share=np.where(node_cores > 0, np.minimum(cores, node_cores / fullest), cores),
            **{f.name: raw[f.name] for f in fields(cls) if f.name in raw},
        )

    def rows(self, index: NDArray[Any]) -> Columns:
        """Return the rows at `index`, which is positions or a mask."""
        return Columns(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.num_workers)


@dataclass(frozen=True)
class Measured:
    """Means of the measurements in each of some configurations; arrays of shape ``(num_configurations,)``."""

    step_s: Floats  # geometric mean
    compute_s: Floats  # nan where parts were not measured
    data_s: Floats
    weight: Floats

    @classmethod
    def of(cls, groups: Collection[Sequence[StepProfile]], weights: Sequence[float] = ()) -> Measured:
        """Return one row for each group of windows of one configuration.

        A hundred windows of one size show no more of the shape than ten, so the number of windows does not count.

        Args:
            weights: weight of each group; empty: all weigh 1.
        """
        parts = [np.mean([_shares(sample) for sample in group], axis=0) for group in groups]
        step_s = np.array([np.exp(np.mean(np.log([sample.step_time_s for sample in group]))) for group in groups])
        shares = np.array(parts).reshape(-1, 2)
        weight = np.asarray(weights or [1.0] * len(groups), dtype=np.float64)
        return cls(step_s, shares[:, 0] * step_s, shares[:, 1] * step_s, weight)

    @property
    def shares(self) -> Floats:
        """Shares of the step, as `PARTS`; of shape ``(num_configurations, 3)``, nan where parts were not measured."""
        compute, data = self.compute_s / self.step_s, self.data_s / self.step_s
        return np.stack([compute, data, np.maximum(0.0, 1 - compute - data)], axis=1)

    @property
    def work_s(self) -> Floats:
        """Seconds of computing, and the whole step where that was not measured."""
        return np.where(np.isfinite(self.compute_s), self.compute_s, self.step_s)

    def rows(self, index: NDArray[Any]) -> Measured:
        return Measured(self.step_s[index], self.compute_s[index], self.data_s[index], self.weight[index])


def measurements(samples: Sequence[StepProfile], node_cores: float = 0.0) -> tuple[Columns, Measured]:
    """Return the measured configurations, each once, and the means of the measurements in them."""
    groups = windows_by_configuration(samples, node_cores)
    return Columns.of([*groups]), Measured.of(groups.values())


def noise_of(logs: Sequence[Floats]) -> float:
    """Return the standard deviation of the log of a window's step time about the mean of its array.

    Args:
        logs: logs of the step times of windows under equal conditions, one array for each of these.
    """
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in logs)
    repetitions = sum(len(values) - 1 for values in logs)
    # One imagined repetition that differs by 5 % keeps a single window from looking free of noise.
    return max(MIN_SIGMA, math.sqrt((squares + 0.05**2) / (repetitions + 1)))


def _shares(sample: StepProfile) -> tuple[float, float]:
    """Return compute and data as shares of the step; nan where the parts do not add up to it."""
    compute_s = sample.forward_s + sample.backward_s + sample.optimizer_s + sample.other_s
    whole_s = compute_s + sample.data_wait_s + sample.communication_s
    if abs(whole_s - sample.step_time_s) > 0.05 * sample.step_time_s:
        return np.nan, np.nan
    return compute_s / whole_s, sample.data_wait_s / whole_s


# Restrict numerical libraries to the calling thread: training keeps every core busy. Threads that waited for each other at a
# barrier made a fit of 0.4 s take seconds of processor time, or half a minute.


def one_openmp_thread() -> AbstractContextManager[Any]:
    """Limit scikit-learn's trees, once they are imported; the calling thread's own setting is restored afterwards."""
    limits: AbstractContextManager[Any] = _openmp().limit(limits=1)
    return limits


def one_blas_thread() -> AbstractContextManager[Any]:
    """Limit numpy's and scipy's linear algebra; torch has its own."""
    limits: AbstractContextManager[Any] = _openblas().limit(limits=1)
    return limits


# Cached, because finding the loaded libraries takes 5 ms. threadpoolctl comes with scikit-learn, which uses it the same way.


@functools.cache
def _openmp() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="openmp")


@functools.cache
def _openblas() -> Any:
    import scipy.optimize  # noqa: F401  (brings an OpenBLAS of its own)
    from threadpoolctl import ThreadpoolController

    # torch may use other libraries (MKL), too, and their threads belong to training.
    return ThreadpoolController().select(internal_api="openblas")
