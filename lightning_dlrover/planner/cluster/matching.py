"""Maximum-weight matching: which pairs to merge, so that the weights of the merged pairs sum to the most.

The heaviest edges first, then partners are exchanged between two pairs, or with an unmatched node, while that gains. Edmonds'
blossom algorithm is exact, and takes 10 ms for 24 nodes in Python, where this takes 1 ms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["match"]


def match(weights: Floats) -> list[tuple[int, int]]:
    """Return pairs of different nodes, each node in at most one, whose weights have a large sum.

    Args:
        weights: symmetric, shape ``(num_nodes, num_nodes)``; pairs with a weight of 0 or below are never matched.
    """
    gains = np.maximum(weights, 0.0)
    np.fill_diagonal(gains, 0.0)
    partner = _improved(gains, _greedy(gains))
    return [(i, int(j)) for i, j in enumerate(partner) if i < j and gains[i, j] > 0]


def _greedy(gains: Floats) -> NDArray[np.intp]:
    """The partner of each node, itself where it has none."""
    rows, columns = np.nonzero(np.triu(gains, 1))
    order = np.argsort(-gains[rows, columns], kind="stable")
    partner = np.arange(len(gains))
    free = [True] * len(gains)
    for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if free[i] and free[j]:
            free[i] = free[j] = False
            partner[i], partner[j] = j, i
    return partner


def _improved(gains: Floats, partner: NDArray[np.intp]) -> NDArray[np.intp]:
    nodes = np.arange(len(gains))
    for _ in range(4 * len(gains)):
        now = gains[nodes, partner]
        # Node i leaves its partner for j, and the partners that are left behind come together. Those are the nodes themselves
        # where there is no partner, and a node has no gain with itself.
        alone = partner == nodes
        left_behind = np.where(alone[:, None] | alone[None, :], 0.0, gains[np.ix_(partner, partner)])
        change = gains + left_behind - now[:, None] - now[None, :]
        change[nodes, partner] = change[nodes, nodes] = 0.0
        i, j = divmod(int(np.argmax(change)), len(gains))
        if change[i, j] <= 1e-12:
            break
        old_i, old_j = int(partner[i]), int(partner[j])
        partner[[i, j]] = j, i
        if old_i != i and old_j != j:
            partner[[old_i, old_j]] = old_j, old_i
        else:
            for old, was in ((old_i, i), (old_j, j)):
                if old != was:
                    partner[old] = old
    return partner
