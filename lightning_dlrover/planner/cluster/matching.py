"""Maximum-weight matching, and the best partition into sets.

Both are exact for few nodes, by dynamic programming over subsets. Beyond, a matching takes the heaviest edges first, then
partners are exchanged between two pairs, or with an unmatched node, while that gains. Edmonds' blossom algorithm would be exact
there, and takes ten times as long in Python.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["EXACT_NODES", "best_partition", "match"]

EXACT_NODES = 8
"""Largest number of nodes with an exhaustive search of partitions; eight have 162 sets of up to four."""


def match(weights: Floats) -> list[tuple[int, int]]:
    """Return pairs of different nodes, each node in at most one, with a large sum of weights.

    Args:
        weights: symmetric, shape ``(num_nodes, num_nodes)``; pairs with a weight of 0 or below are never matched.
    """
    gains = np.maximum(weights, 0.0)
    np.fill_diagonal(gains, 0.0)
    if len(gains) <= EXACT_NODES:
        rows, columns = np.nonzero(np.triu(gains, 1))
        savings = {1 << i | 1 << j: -float(gains[i, j]) for i, j in zip(rows.tolist(), columns.tolist(), strict=True)}
        masks = best_partition({**{1 << i: 0.0 for i in range(len(gains))}, **savings}, len(gains))
        return sorted(((mask & -mask).bit_length() - 1, mask.bit_length() - 1) for mask in masks if mask in savings)
    partner = _improved(gains, _greedy(gains))
    return [(i, int(j)) for i, j in enumerate(partner) if i < j and gains[i, j] > 0]


def best_partition(set_costs: dict[int, float], num_items: int) -> list[int]:
    """Return the sets, as bit masks, that hold each item once and cost least together.

    Args:
        set_costs: by mask; holds each item alone. Sets that are absent are not allowed.
    """
    least, choice = [math.inf] * (1 << num_items), [0] * (1 << num_items)
    least[0] = 0.0
    by_lowest: list[list[int]] = [[mask for mask in set_costs if mask & -mask == 1 << item] for item in range(num_items)]
    for whole in range(1, 1 << num_items):
        lowest = (whole & -whole).bit_length() - 1
        for mask in by_lowest[lowest]:
            if mask & whole == mask and least[whole ^ mask] + set_costs[mask] < least[whole]:
                least[whole], choice[whole] = least[whole ^ mask] + set_costs[mask], mask
    sets, left = [], (1 << num_items) - 1
    while left:
        sets.append(choice[left])
        left ^= choice[left]
    return sets


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
