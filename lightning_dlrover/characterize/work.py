"""Work of one step of a point, by arithmetic: FLOPs, bytes and the descriptor for the job history. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lightning_dlrover.characterize.point import Point
from lightning_dlrover.planner.warm_start import Descriptor

__all__ = ["dense_bytes", "descriptor", "layers", "lookup_bytes", "mlp_flops", "step_flops", "table_bytes"]

PASSES = 3
"""Ratio of the forward and the backward pass's FLOPs to those of the forward pass."""

TABLE_PASSES = 3
"""Times that a step moves each row that it looks up: read it, read it again for the update, write it."""


def layers(point: Point) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return inputs and outputs of each layer of the bottom and of the top MLP. Without tables there is no bottom MLP."""
    hidden = [point.width] * point.depth
    if not point.num_sparse:
        return [], list(_pairs([point.num_dense, *hidden, 1]))
    vectors = point.num_sparse + 1
    joined = point.dim + vectors * (vectors - 1) // 2
    return list(_pairs([point.num_dense, *hidden, point.dim])), list(_pairs([joined, *hidden, 1]))


def _pairs(sizes: list[int]) -> Iterator[tuple[int, int]]:
    yield from itertools.pairwise(sizes)


def mlp_flops(point: Point) -> float:
    """Return FLOPs per sample of both MLPs, forward and backward."""
    return float(PASSES * 2 * sum(i * o for part in layers(point) for i, o in part))


def step_flops(point: Point) -> float:
    """Return FLOPs per step, all workers together, the interaction's included."""
    vectors = point.num_sparse + 1 if point.num_sparse else 0
    return point.batch * (mlp_flops(point) + PASSES * 2 * vectors * vectors * point.dim)


def lookup_bytes(point: Point) -> float:
    """Return bytes of table rows that a step moves."""
    return float(TABLE_PASSES * point.batch * point.num_sparse * point.lookups * point.dim * 4)


def dense_bytes(point: Point) -> int:
    return 4 * sum(i * o + o for part in layers(point) for i, o in part)


def table_bytes(point: Point) -> int:
    return 4 * point.num_sparse * point.rows * point.dim


def descriptor(point: Point, node_cores: float) -> Descriptor:
    """Return what the planner compares jobs by."""
    return Descriptor(
        dense_flops=mlp_flops(point),
        dense_bytes=float(dense_bytes(point)),
        embedding_bytes=float(table_bytes(point)),
        lookups_per_sample=float(point.num_sparse * point.lookups),
        global_batch=float(point.batch),
        device="cpu",
        node_cores=node_cores,
    )
