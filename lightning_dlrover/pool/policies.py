"""Pollux: the generalised mean of goodputs, by genetic search (Qiao et al., OSDI 2021).

The fitness of sizes a_j is the power mean of the speedups over a fair share of the cluster,

    fitness = (1/n sum_j (r_j speedup_j(a_j))^p)^(1/p)        p = -1

with a restart factor r_j where the size of a running job changes. A population of `POPULATION` evolves for `GENERATIONS`:
tournaments, one-point crossover over the jobs, mutation and repair. A job grows to at most twice the largest size that was
profiled. The interval is `INTERVAL_S`.

Differences: Pollux adapts each job's batch size, and goodput is throughput times statistical efficiency. Here the global batch
never changes, so that efficiency is 1, and goodput is speed. Individuals are numbers of devices, which the shared placement
puts on few nodes, so sizes are those that fill nodes; the artefact's are devices on each node. The artefact begins a search
with the population of the last one. This function keeps nothing. It begins with the present sizes, a fair share, their
mutants, and a climb of concave hulls, and ends when `PATIENCE` generations have found nothing better. The artefact takes
devices that are not there from jobs in the order of their attained service, and charges the restart factor to waiting jobs,
too. Here that order is random, and a waiting job that starts pays nothing.
"""

from __future__ import annotations

import numpy as np

from lightning_dlrover.planner.cluster.elastic.goodput import growth_limits, restart_factors
from lightning_dlrover.planner.cluster.elastic.knapsack import by_hulls
from lightning_dlrover.planner.cluster.elastic.share import Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["GENERATIONS", "INTERVAL_S", "POPULATION", "costs", "pollux"]

INTERVAL_S = 60.0
"""Seconds between decisions."""

POPULATION = 100
"""Individuals of a generation."""

GENERATIONS = 100
"""Generations of a search."""

PATIENCE = 25
"""Generations without a better individual after which a search ends early."""

POWER = -1.0
"""Exponent p of the mean. The lower, the fairer."""

LEAST = 1e-3
"""Added to each speedup, so that a waiting job has a finite cost."""


def pollux(share: Share) -> Ints:
    """Return the sizes."""
    if not len(share.jobs):
        return np.zeros(0, dtype=np.int64)
    cost = costs(share)
    least = cost.min(axis=1)
    cheapest = cost.argmin(axis=1)
    if share.sizes[cheapest].sum() <= share.num_devices and ((cost == least[:, None]).sum(axis=1) == 1).all():
        return np.asarray(share.sizes[cheapest])  # each job's best size, which the search begins with and would not leave
    rng = np.random.default_rng((share.settings.seed, int(share.now_s * 1e3)))
    search = _Search(share, cost, rng)
    people = search.first()
    fitness = search.costs_of(people)
    unchanged = 0
    for _ in range(GENERATIONS):
        before = fitness.min()
        children = search.children(people, fitness)
        people = np.concatenate([people, children])
        fitness = np.concatenate([fitness, search.costs_of(children)])
        best = np.argsort(fitness, kind="stable")[:POPULATION]
        people, fitness = people[best], fitness[best]
        unchanged = 0 if fitness[0] < before else unchanged + 1
        if unchanged == PATIENCE:
            break
    return np.asarray(share.sizes[people[0]])


def costs(share: Share) -> Floats:
    """Return (r_j speedup_j)^p of each job at each size, the sum of which is to be small; infinite where it is not allowed."""
    fair = np.clip(-(-share.num_devices // max(len(share.jobs), 1)), share.fewest, share.most)
    base = share.speeds_at(fair)
    speedups = share.speeds / np.where(base > 0, base, 1.0)[:, None]
    stays = (share.sizes == share.present[:, None]) | (share.present[:, None] == 0)
    speedups = speedups * np.where(stays, 1.0, restart_factors(share)[:, None])
    allowed = share.filling & (share.sizes <= growth_limits(share)[:, None])
    cost = share.weights[:, None] * (speedups / share.per_node + LEAST) ** POWER
    return np.where(allowed, cost, np.inf)


class _Search:
    """Individuals are arrays of columns of sizes, shape ``(num_individuals, num_jobs)``.

    A gene is looked up in tables with a row for each job, by its place in the flattened table.
    """

    def __init__(self, share: Share, cost: Floats, rng: np.random.Generator) -> None:
        self._share, self._costs, self._rng = share, cost, rng
        allowed = np.isfinite(self._costs)
        num_jobs, num_sizes = allowed.shape
        least = allowed.argmax(axis=1)
        self._least = share.sizes[least]
        self._spare = share.num_devices - int(self._least.sum())
        # The nearest allowed column at or below each number of devices, so that mutants can be rounded.
        columns = np.arange(num_sizes)
        nearest = np.maximum(np.maximum.accumulate(np.where(allowed, columns, -1), axis=1), least[:, None])
        most = int(max(share.sizes[-1], share.most.max()))
        self._column_of = nearest[:, share.columns_of(np.arange(most + 1))].ravel()
        self._jobs = np.arange(num_jobs)
        self._in_costs, self._in_columns = self._jobs * num_sizes, self._jobs * (most + 1)
        self._present, self._runs = self._rounded(share.present), share.present > 0

    def first(self) -> Ints:
        share = self._share
        fair = np.full(len(share.jobs), max(share.num_devices // len(share.jobs), 1), dtype=np.int64)
        people = np.repeat(np.stack([self._present, self._rounded(np.minimum(fair, share.sizes[-1]))]), POPULATION // 2, axis=0)
        mutants = self._mutated(people)
        mutants[0], mutants[POPULATION // 2] = people[0], people[POPULATION // 2]
        mutants[-1] = by_hulls(-self._costs, share.sizes, share.num_devices)
        return self._repaired(mutants)

    def costs_of(self, people: Ints) -> Floats:
        return np.asarray(self._costs.ravel().take(people + self._in_costs).sum(axis=1))

    def children(self, people: Ints, fitness: Floats) -> Ints:
        count = len(people)
        rivals = self._rng.integers(0, count, size=(2, 2, count))
        winners = np.where(fitness[rivals[0]] <= fitness[rivals[1]], rivals[0], rivals[1])
        cut = self._rng.integers(0, len(self._jobs) + 1, size=(count, 1))
        crossed = np.where(self._jobs < cut, people[winners[0]], people[winners[1]])
        return self._repaired(self._mutated(crossed))

    def _rounded(self, numbers: Ints) -> Ints:
        """Return the columns of the largest allowed sizes up to these numbers of devices, at least those of the smallest."""
        return np.asarray(self._column_of.take(numbers + self._in_columns))

    def _mutated(self, people: Ints) -> Ints:
        """Some genes of running jobs go back to the present size; others lose or gain the devices of up to a node."""
        rng, shape, per_node = self._rng, people.shape, self._share.per_node
        people = np.where((rng.random(shape) < 0.1) & self._runs, self._present, people)
        change = rng.integers(1, per_node + 1, size=shape)
        loses, gains = rng.random(shape) < 1.0 / shape[1], rng.random(shape) < 2.0 / shape[1]
        numbers = self._share.sizes.take(people) + np.where(gains, change, np.where(loses, -change, 0))
        return self._rounded(np.minimum(np.maximum(numbers, 0), self._share.most))

    def _repaired(self, people: Ints) -> Ints:
        """Take devices that are not there from jobs in a random order, down to their least, until the rest suffices."""
        draws = self._rng.random(people.shape)
        more = self._share.sizes.take(people) - self._least
        is_over = more.sum(axis=1) > self._spare
        more = more[is_over]
        order = np.argsort(draws[is_over], axis=1)
        order += np.arange(len(more))[:, None] * more.shape[1]
        given = np.minimum(more.take(order).cumsum(axis=1), self._spare)
        given[:, 1:] -= given[:, :-1].copy()
        numbers = np.empty_like(more)
        numbers.put(order, given)
        people[is_over] = self._rounded(numbers + self._least)
        return people
