"""Physical causes of a step's time, as terms with non-negative coefficients, and the shapes that combine them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Columns, Floats

__all__ = [
    "BETWEEN_NODES",
    "MAX_LATENCY_S",
    "OF_PARTS",
    "PARTS",
    "SHAPES",
    "TERMS",
    "Part",
    "Term",
    "amounts_of",
    "job_units",
    "terms_of",
]

Part = Literal["compute", "data", "communication"]
PARTS: tuple[Part, ...] = ("compute", "data", "communication")

INTER_NODE_BYTES_PER_S = 1e9  # 10 Gbit/s Ethernet less its protocols; assumed until a link was measured
INTRA_NODE_BYTES_PER_S = 2e9  # gloo through one machine's loopback
LATENCY_S = 2e-4  # latency of one more participant in a collective over TCP
MAX_LATENCY_S = 1e-2  # upper bound on a hop's latency by order of magnitude, however much a model sends


@dataclass(frozen=True)
class Term:
    """One cause of time: seconds = coefficient x `amount`; the coefficient is fitted and never negative."""

    name: str
    part: Part  # part of the step that it explains
    source: str
    amount: Callable[[Columns], Floats]
    doubt: float  # pull to the default: where several terms explain the samples, the one with the smallest doubt takes the time
    default: float = 0.0  # coefficient in the absence of samples


def _flops(c: Columns) -> Floats:
    """Return the FLOPs per step of one worker; samples if FLOPs are unknown, which changes only the coefficient's unit."""
    return c.local_batch * np.maximum(c.dense_flops, 1.0)


def _serially(c: Columns) -> Floats:
    return np.minimum(1.0, c.core_share)


def _ring(c: Columns) -> Floats:
    return 2 * (c.num_workers - 1) / c.num_workers


def _exchanged_rows(c: Columns) -> Floats:
    return c.local_batch * c.lookups_per_sample * (c.num_workers - 1) / c.num_workers


def _crowding(c: Columns) -> Floats:
    """Return by how much the threads of a node outnumber its cores; 0 where that is unknown."""
    known = c.node_cores > 0
    return np.where(known, np.maximum(0.0, c.fullest * c.threads / np.where(known, c.node_cores, 1.0) - 1), 0.0)


def _without_a_core(c: Columns) -> Floats:
    """Return the share of loading without a spare core during training, divided by the cores that do it then."""
    spare = np.maximum(0.0, c.core_share - c.threads)
    return np.where((c.loader_workers > 0) & (c.node_cores > 0), np.maximum(0.0, 1 - spare) / c.core_share, 0.0)


def _several(c: Columns) -> Floats:
    return (c.num_nodes > 1).astype(np.float64)


TERMS: tuple[Term, ...] = (
    Term(
        "parallel_compute",
        "compute",
        "data parallelism splits a global batch, and operators split theirs over threads; workers of one "
        "node share its cores, so three workers on two cores are not three times as fast",
        lambda c: _flops(c) / np.minimum(c.threads, c.core_share),
        doubt=0.0,
    ),
    Term(
        "serial_compute",
        "compute",
        "the share of a sample's work that more threads do not speed up (Amdahl, AFIPS 1967)",
        lambda c: _flops(c) / _serially(c),
        doubt=0.1,
    ),
    Term(
        "step_overhead",
        "compute",
        "interpreter, kernel launches and optimizer: once a step, whatever the batch, which is also what a batch costs "
        "that does not fill the device (roofline: Williams et al., CACM 52(4), 2009)",
        lambda c: 1.0 / _serially(c),
        doubt=0.2,
    ),
    Term(
        "lookups",
        "compute",
        "rows of the tables that are read and updated, bound by memory (DLRM, Naumov et al., arXiv 1906.00091)",
        lambda c: c.local_batch * c.lookups_per_sample / _serially(c),
        doubt=0.3,
    ),
    Term(
        "core_contention",
        "compute",
        "threads of a node beyond its cores switch, and wait for each other at every barrier",
        lambda c: _flops(c) * _crowding(c),
        doubt=0.2,
    ),
    Term(
        "loader_contention",
        "compute",
        "loader workers take core time from training where no core is left for them",
        lambda c: c.local_batch * _without_a_core(c),
        doubt=0.3,
    ),
    Term(
        "neighbours",
        "compute",
        "workers of one node share what the figures do not show: memory, PCIe, the power budget",
        lambda c: c.fullest - 1,
        doubt=0.2,
    ),
    Term(
        "neighbours_per_sample",
        "compute",
        "as before, for what grows with the batch",
        lambda c: (c.fullest - 1) * _flops(c),
        doubt=0.2,
    ),
    Term(
        "data_loading",
        "data",
        "loader workers prepare the samples of a batch side by side, as many as there are cores; without any, the worker "
        "does it itself",
        lambda c: c.local_batch / np.minimum(np.maximum(1.0, c.loader_workers), c.core_share),
        doubt=0.1,
    ),
    Term(
        "data_fetching",
        "data",
        "waiting for storage or a network takes no core: as many samples come at a time as there are loader workers",
        lambda c: c.local_batch / np.maximum(1.0, c.loader_workers),
        doubt=0.2,
    ),
    Term(
        "ring_inside_node",
        "communication",
        "ring all-reduce: 2 (W - 1) / W of the bytes on every link (Patarasuk, Yuan, JPDC 69(2), 2009)",
        lambda c: _ring(c) * np.maximum(c.dense_bytes, 1.0) * (1 - _several(c)),
        default=1 / INTRA_NODE_BYTES_PER_S,
        doubt=0.2,
    ),
    Term(
        "ring_between_nodes",
        "communication",
        "the same ring, but its slowest link is the network; nothing where bytes are unknown, for `network` says as much then",
        lambda c: _ring(c) * c.dense_bytes * _several(c),
        default=1 / INTER_NODE_BYTES_PER_S,
        doubt=0.2,
    ),
    Term(
        "exchange_inside_node",
        "communication",
        "all-to-all of looked-up rows: a worker sends (W - 1) / W of them (DLRM, Naumov et al., arXiv 1906.00091)",
        lambda c: _exchanged_rows(c) * (1 - _several(c)),
        doubt=0.3,
    ),
    Term(
        "exchange_between_nodes",
        "communication",
        "the same exchange over the network",
        lambda c: _exchanged_rows(c) * _several(c),
        doubt=0.3,
    ),
    Term(
        "network",
        "communication",
        "what it costs to leave a node at all (Pollux: alpha of several nodes)",
        _several,
        doubt=0.06,
    ),
    Term(
        "latency_of_workers",
        "communication",
        "a ring has W - 1 hops each way (Pollux: beta); a hop takes at most milliseconds, so steps of seconds hardly feel it",
        lambda c: c.num_workers - 1,
        default=LATENCY_S,
        doubt=0.0,  # see MAX_LATENCY_S
    ),
    Term(
        "stages",
        "communication",
        "a tree has log2 W stages (Sanders et al., Parallel Computing 35(12), 2009), and the slowest of W workers is later "
        "than the average by about log W (Dean, Barroso, CACM 56(2), 2013)",
        lambda c: np.log2(c.num_workers),
        default=LATENCY_S,
        doubt=0.06,
    ),
    Term(
        "pair_of_nodes",
        "communication",
        "two nodes have one path between them, which all workers share, while three and more have several: measured on "
        "clusters, doubted by one of the shapes",
        lambda c: (c.num_nodes == 2) * np.log2(c.num_workers),
        doubt=0.2,
    ),
)
"""All terms of the prior."""

SHAPES: tuple[frozenset[str], ...] = (
    frozenset({"stages", "pair_of_nodes"}),
    frozenset({"latency_of_workers"}),
    frozenset({"latency_of_workers", "stages", "pair_of_nodes"}),
)
"""Terms with combinations that differ far from the samples and hardly near them: how synchronisation grows with workers.

Samples of a small world cannot distinguish them. The prior is the mean of the logs of all shapes (model averaging, Hoeting et
al., Statistical Science 14(4), 1999), and their spread is part of the interval.
"""

BYTE_TERMS = ("ring_inside_node", "ring_between_nodes")
"""Terms with coefficients per byte."""

BETWEEN_NODES: NDArray[np.bool_] = np.array([term.name in ("ring_between_nodes", "network", "pair_of_nodes") for term in TERMS])
"""Terms of synchronisation that need several nodes, apart from those of tables."""

_GROWTH = frozenset(name for shape in SHAPES for name in shape)
OF_PARTS: tuple[NDArray[np.bool_], ...] = tuple(np.array([term.part == part for term in TERMS]) for part in PARTS)


def amounts_of(columns: Columns) -> Floats:
    return np.stack([term.amount(columns) for term in TERMS], axis=1)


def job_units(columns: Columns) -> Floats:
    """Return the factor of each term that turns its coefficient into seconds of the job's gradient bytes."""
    num_bytes = float(np.maximum(columns.dense_bytes, 1.0).mean())
    return np.array([num_bytes if term.name in BYTE_TERMS else 1.0 for term in TERMS])


def terms_of(kind: int) -> NDArray[np.bool_]:
    """Return the terms of a shape, by its index into `SHAPES`."""
    return np.array([term.name in SHAPES[kind] or term.name not in _GROWTH for term in TERMS])
