"""The shape that physics gives to the time of a training step.

A step time is a sum of named terms with non-negative coefficients, fitted by least squares in relative error.
What the terms cannot express, and how far the sum can be trusted, is left to `model.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.samples import StepProfile

__all__ = ["TERMS", "Configuration", "PhysicalPrior", "Term", "configuration_of"]

Floats = NDArray[np.float64]
Part = Literal["compute", "data", "communication"]

INTER_NODE_BYTES_PER_S = 1e9  # 10 Gbit/s Ethernet less its protocols: the link assumed until one was measured
INTRA_NODE_BYTES_PER_S = 2e9  # gloo through one machine's loopback
LATENCY_S = 2e-4  # of one more participant in a collective over TCP

PART_WEIGHT = 0.3  # of a measured part beside the whole step: parts tell terms apart, the whole is what is predicted


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
    """What a step time depends on; the fullest worker where workers differ.

    `num_nodes` counts machines: two agents on one host are one node here, because they share its cores.
    """

    num_workers: int
    num_nodes: int
    cores: float  # that one worker may use, shared or not
    local_batch: int  # samples per step on the worker that has most
    loader_workers: int
    intra_op_threads: int  # 0: as many as `cores`
    dense_bytes: int  # gradient bytes reduced per step
    node_cores: float = 0.0  # of one node, all its workers together; 0: unknown, workers are taken to share no core
    device: str = "cpu"  # cpu, or the accelerator's name
    prefetch_factor: int = 0  # batches that each loader worker prepares ahead
    dense_flops: int = 0  # per sample, forward and backward; 0: unknown
    embedding_bytes: int = 0  # of all tables of the job
    lookups_per_sample: float = 0.0  # rows that a sample reads from the tables
    fullest_node: int = 0  # workers on the node that has most; 0: spread evenly
    emptiest_node: int = 0  # workers on the node that has fewest; 0: spread evenly

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
    """The configuration in which `profile` was measured; a profile does not know `node_cores`."""
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


@dataclass(frozen=True)
class Term:
    """One cause of time: seconds = coefficient x `amount`, the coefficient fitted and never negative."""

    name: str
    part: Part  # of the step that it explains
    source: str
    amount: Callable[[Configuration], float]
    default: float  # the coefficient until samples say otherwise
    doubt: float  # where several terms explain the samples, the one with the least takes the time


def _ring_bytes(configuration: Configuration) -> float:
    workers = configuration.num_workers
    return 2 * (workers - 1) / workers * configuration.dense_bytes


TERMS: tuple[Term, ...] = (
    Term(
        "parallel_compute",
        "compute",
        "data parallelism splits a global batch, and operators split theirs over threads; workers of one "
        "node share its cores, so three workers on two cores are not three times as fast",
        lambda c: c.local_batch / min(c.threads, c.core_share),
        default=0.0,
        doubt=0.0,
    ),
    Term(
        "serial_compute",
        "compute",
        "the share of a sample's work that more threads do not speed up (Amdahl, AFIPS 1967)",
        lambda c: c.local_batch / min(1.0, c.core_share),
        default=0.0,
        doubt=1.0,
    ),
    Term(
        "step_overhead",
        "compute",
        "interpreter, kernel launches and optimizer: once a step, whatever the batch",
        lambda c: 1.0 / min(1.0, c.core_share),
        default=0.0,
        doubt=2.0,
    ),
    Term(
        "core_contention",
        "compute",
        "threads of a node beyond its cores switch, and wait for each other at every barrier",
        lambda c: c.local_batch * max(0.0, c.workers_on_node * c.threads / c.node_cores - 1) if c.node_cores else 0.0,
        default=0.0,
        doubt=2.0,
    ),
    Term(
        "data_loading",
        "data",
        "loader workers prepare the samples of a batch side by side; without any, the worker does it itself",
        lambda c: c.local_batch / max(1, c.loader_workers),
        default=0.0,
        doubt=1.0,
    ),
    Term(
        "ring_inside_node",
        "communication",
        "ring all-reduce: 2 (W - 1) / W of the bytes on every link (Patarasuk, Yuan, JPDC 69(2), 2009)",
        lambda c: _ring_bytes(c) if c.num_nodes == 1 else 0.0,
        default=1 / INTRA_NODE_BYTES_PER_S,
        doubt=1.0,
    ),
    Term(
        "ring_between_nodes",
        "communication",
        "the same ring, but its slowest link is the network",
        lambda c: _ring_bytes(c) if c.num_nodes > 1 else 0.0,
        default=1 / INTER_NODE_BYTES_PER_S,
        doubt=1.0,
    ),
    Term(
        "latency_of_workers",
        "communication",
        "a ring has W - 1 hops each way, and the slowest of more workers is slower",
        lambda c: float(c.num_workers - 1),
        default=LATENCY_S,
        doubt=1.0,
    ),
    Term(
        "latency_of_nodes",
        "communication",
        "hops that leave a machine cost more than those that do not",
        lambda c: float(c.num_nodes - 1),
        default=0.0,
        doubt=1.0,
    ),
)
"""Everything the prior knows. Tables that are exchanged by all-to-all are not in it yet."""


@dataclass(frozen=True)
class PhysicalPrior:
    """Fitted coefficients of `TERMS`, in their order."""

    coefficients: tuple[float, ...]

    @classmethod
    def fit(
        cls, configurations: Sequence[Configuration], samples: Sequence[StepProfile], weights: Sequence[float] | None = None
    ) -> PhysicalPrior:
        """The non-negative coefficients with the least squared relative error.

        A sample whose parts add up gives one row for each part besides the row of its step time: that tells
        apart terms which one world size alone cannot. Where several terms still explain the samples equally
        well, the default figures decide, weighing about a hundredth of a configuration.
        """
        from scipy.optimize import nnls  # type: ignore[import-untyped]  # 0.3 s, which a reader of profiles need not pay

        amounts = np.array([[term.amount(c) for term in TERMS] for c in configurations])
        step_s = np.array([s.step_time_s for s in samples])
        # Every configuration counts alike: a hundred windows of one size say no more about the shape than ten,
        # and the size that runs now must not bend the prediction of the others from decision to decision.
        repeated = Counter(configurations)
        weight = np.array([repeated[c] ** -0.5 for c in configurations]) * (1.0 if weights is None else np.asarray(weights))
        blocks, targets = [amounts * (weight / step_s)[:, None]], [weight]
        parts = np.array([_parts_s(s) for s in samples])
        has_parts = np.abs(parts.sum(axis=1) - step_s) <= 0.05 * step_s
        for column, part in enumerate(("compute", "data", "communication")):
            of_part = np.array([term.part == part for term in TERMS])
            blocks.append(PART_WEIGHT * (amounts * of_part * (weight / step_s)[:, None])[has_parts])
            targets.append(PART_WEIGHT * (parts[:, column] * weight / step_s)[has_parts])
        rows, target = np.vstack(blocks), np.concatenate(targets)

        # Columns of equal length: a coefficient then is about the share of the step time that its term takes.
        scale = np.sqrt((rows[: len(samples)] ** 2).sum(axis=0) / len(repeated))
        seen = scale > 0
        coefficients = np.array([term.default for term in TERMS])
        doubt = np.array([1e-3 + 0.1 * term.doubt for term in TERMS])[seen]
        pull = np.diag(doubt)
        rows = np.vstack([rows[:, seen] / scale[seen], pull])
        target = np.concatenate([target, doubt * coefficients[seen] * scale[seen]])
        coefficients[seen] = nnls(rows, target)[0] / scale[seen]
        return cls(tuple(float(c) for c in coefficients))

    def step_time_s(self, configuration: Configuration) -> float:
        return sum(self.seconds(configuration).values())

    def seconds(self, configuration: Configuration) -> dict[str, float]:
        """Seconds of each term, by its name: what a decision is explained with."""
        return {t.name: k * t.amount(configuration) for t, k in zip(TERMS, self.coefficients, strict=True)}

    def parts_s(self, configuration: Configuration, step_time_s: float) -> dict[str, float]:
        """Seconds of compute, data and communication, scaled to add up to `step_time_s`."""
        seconds = self.seconds(configuration)
        scale = step_time_s / max(sum(seconds.values()), 1e-9)
        parts = dict.fromkeys(("compute", "data", "communication"), 0.0)
        for term in TERMS:
            parts[term.part] += scale * seconds[term.name]
        return parts


def _parts_s(sample: StepProfile) -> tuple[float, float, float]:
    """Compute, data and communication seconds of one sample."""
    compute_s = sample.forward_s + sample.backward_s + sample.optimizer_s + sample.other_s
    return compute_s, sample.data_wait_s, sample.communication_s
