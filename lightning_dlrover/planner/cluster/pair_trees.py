"""Trees over pairs of jobs, for jobs of families that were never observed.

Extremely randomised trees (Geurts, Ernst and Wehenkel, Machine Learning 63(1), 2006) on the columns of both jobs, their
differences, and the family of each known one. A family that was not observed has no mark, and falls to where all are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_dlrover.planner.cluster.pair_features import Features, Traits
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["PairTrees"]

NUM_TREES = 100
MIN_LEAF = 6
"""Fewest observed directions of pairs in a leaf."""


class PairTrees:
    """Both coordinates of pairs at once, each less its expectation."""

    def __init__(self, features: Features) -> None:
        from sklearn.ensemble import ExtraTreesRegressor  # takes a second to import, and only a fit needs it

        self._features = features
        self._trees = ExtraTreesRegressor(NUM_TREES, min_samples_leaf=MIN_LEAF, random_state=0, max_features=1.0)

    def fit(self, ones: Sequence[Traits], others: Sequence[Traits], share: Floats, total: Floats) -> PairTrees:
        """Fit to pairs, in both directions; `share` and `total` have shape ``(num_pairs,)``."""
        columns = np.concatenate([self._columns(ones, others), self._columns(others, ones)])
        self._trees.fit(columns, np.concatenate([np.column_stack([share, total]), np.column_stack([-share, total])]))
        return self

    def predict(self, ones: Sequence[Traits], others: Sequence[Traits]) -> tuple[Floats, Floats]:
        """Return share and total, each of shape ``(num_pairs,)``; exchanging the jobs changes only the sign of the share."""
        num_pairs = len(ones)
        both = self._trees.predict(np.concatenate([self._columns(ones, others), self._columns(others, ones)]))
        straight, crossed = both[:num_pairs], both[num_pairs:]
        return (straight[:, 0] - crossed[:, 0]) / 2, (straight[:, 1] + crossed[:, 1]) / 2

    def _columns(self, ones: Sequence[Traits], others: Sequence[Traits]) -> Floats:
        together = self._features.table([*ones, *others])
        a, b = together[: len(ones)], together[len(ones) :]
        numbers = self._features.families([*ones, *others])
        marks = np.zeros((len(numbers), self._features.num_families))
        known = numbers < self._features.num_families
        marks[np.flatnonzero(known), numbers[known]] = 1.0
        same = numbers[: len(ones)] == numbers[len(ones) :]
        return np.concatenate([a, b, a - b, same[:, None], marks[: len(ones)], marks[len(ones) :]], axis=1)
