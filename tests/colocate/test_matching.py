"""Matchings are nearly as heavy as the heaviest ones, and partitions of small queues are the best ones."""

from __future__ import annotations

from functools import cache

import networkx
import numpy as np
import pytest

from lightning_dlrover.colocate.packing import EXACT_NODES, best_partition, match
from lightning_dlrover.tuning.cluster import Floats


def random_weights(rng: np.random.Generator, num_nodes: int) -> Floats:
    weights = rng.uniform(-0.5, 1.0, (num_nodes, num_nodes))
    return np.asarray((weights + weights.T) / 2)


def heaviest(weights: Floats) -> float:
    graph = networkx.Graph()
    for i, j in zip(*np.nonzero(np.triu(weights, 1) > 0), strict=True):
        graph.add_edge(int(i), int(j), weight=float(weights[i, j]))
    return float(sum(weights[i, j] for i, j in networkx.max_weight_matching(graph)))


@pytest.mark.parametrize("num_nodes", [2, 5, 12, 24])
def test_matching_has_nearly_the_weight_of_the_heaviest(num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    ratios = []
    for _ in range(8):
        weights = random_weights(rng, num_nodes)
        pairs = match(weights)
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
        assert all(weights[pair] > 0 for pair in pairs)
        best = heaviest(weights)
        ratios.append(sum(weights[pair] for pair in pairs) / best if best else 1.0)
    assert min(ratios) >= (1 - 1e-9 if num_nodes <= EXACT_NODES else 0.88)
    assert np.mean(ratios) >= 0.97


def test_an_exchange_leaves_a_greedy_choice() -> None:
    """The heaviest edge is in no heaviest matching here."""
    weights = np.zeros((4, 4))
    for i, j, weight in ((0, 1, 1.0), (1, 2, 1.1), (2, 3, 1.0)):
        weights[i, j] = weights[j, i] = weight
    assert match(weights) == [(0, 1), (2, 3)]


def test_no_nodes_and_no_gain_match_nothing() -> None:
    assert match(np.zeros((0, 0))) == []
    assert match(-np.ones((3, 3))) == []


@pytest.mark.parametrize("seed", range(5))
def test_partition_costs_as_little_as_any(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_items = 6
    costs = {mask: float(rng.uniform(0.5, 1) * mask.bit_count()) for mask in range(1, 1 << num_items) if mask.bit_count() <= 3}

    @cache
    def least(whole: int) -> float:
        return min((costs[mask] + least(whole ^ mask) for mask in costs if mask & whole == mask), default=0.0)

    sets = best_partition(costs, num_items)
    assert sum(sets) == (1 << num_items) - 1
    assert sum(costs[mask] for mask in sets) == pytest.approx(least((1 << num_items) - 1))
