"""Gaussian process over pairs of jobs: every job has a pressure and a sensitivity, and pairs have affinities.

One coordinate of a pair (see `pair_features`) is ``f(a) +- f(b) + h(a, b)`` beside its expectation, with the sign of the
coordinate's symmetry. Jobs of one family have similar effects `f`, more so with similar columns, and every job has a part of
its own. So observations of one batch size carry over to others, and a job with many observations is hardly pulled. The
affinity `h` is a product of two such effects. This is Bayesian completion of a symmetric (or antisymmetric) matrix.

    cov(f) = w1 [same family] + w2 [same job] + w3 [same family] exp(-d^2 / 2) + w4 <x, x'>
    cov(pair, pair') = k(a, a') + k(b, b') +- (k(a, b') + k(b, a')) + g(a, a') g(b, b') +- g(a, b') g(b, a')

Weights and the length are the most probable ones given the pairs, under wide priors (Rasmussen and Williams, "Gaussian
Processes for Machine Learning", 2006, chapters 2 and 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.pair_features import Features, Traits
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["PairEffects"]

MOST_FOR_WEIGHTS = 120
"""Pairs that weights and the length are chosen on, evenly taken from all. Bounds the time of a fit."""

_NUM_MAIN, _NUM_AFFINITY = 4, 4


class _Jobs:
    """Inputs of kernels: identities, families and columns of some jobs."""

    def __init__(self, features: Features, jobs: Sequence[Traits]) -> None:
        self.families, self.identities, self.table = features.families(jobs), features.identities(jobs), features.table(jobs)


class PairEffects:
    """One coordinate of pairs, as a function of the two jobs.

    Args:
        sign: 1 for a coordinate that stays when the jobs are exchanged, -1 for one that changes its sign.
        spread: standard deviation of the coordinate that is expected before anything was seen.
    """

    def __init__(self, features: Features, sign: int, spread: float) -> None:
        self._features, self._sign = features, sign
        variance = np.log(spread**2 / 4)
        effects, affinities = (0.0, -1.0, -0.5, -2.0), [variance / 2 - 0.3] * _NUM_AFFINITY
        self._start = np.array([*(variance + e for e in effects), *affinities, 0.7, variance - 2.5])
        self._freedom = np.array([*[1.5] * (_NUM_MAIN + _NUM_AFFINITY), 1.0, 1.0])
        self._mean = 0.0

    def fit(self, ones: Sequence[Traits], others: Sequence[Traits], values: Floats, most_steps: int = 30) -> PairEffects:
        """Fit to the coordinate of pairs, less its expectation; `values` has shape ``(num_pairs,)``."""
        from scipy.linalg import cho_factor, cho_solve
        from scipy.optimize import minimize

        both = list(dict.fromkeys([*ones, *others]))
        at = {traits: index for index, traits in enumerate(both)}
        a, b = np.array([at[t] for t in ones]), np.array([at[t] for t in others])
        # A constant would change the sign of an antisymmetric coordinate; half an observation pulls the other to 0.
        self._mean = float(values.sum() / (len(values) + 0.5)) if self._sign > 0 else 0.0
        self._jobs, self._at, self._a, self._b = _Jobs(self._features, both), at, a, b
        some = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_FOR_WEIGHTS)).astype(int))
        target = values - self._mean

        def loss(parameters: Floats) -> tuple[float, Floats]:
            """The negative log posterior, and its gradient (Rasmussen and Williams, 5.9)."""
            pull = (parameters - self._start) / self._freedom
            covariance = self._between(parameters, a[some], b[some], a[some], b[some])
            factor = cho_factor(covariance + _noise(parameters, len(some)), lower=True)
            inverse = cho_solve(factor, np.eye(len(some)))
            solved = inverse @ target[some]
            outer = inverse - np.outer(solved, solved)
            gradient = pull / self._freedom
            for index in range(len(parameters) - 1):
                moved = parameters.copy()
                moved[index] += 1e-5
                change = self._between(moved, a[some], b[some], a[some], b[some]) - covariance
                gradient[index] += (outer * change).sum() / 2e-5
            gradient[-1] += np.trace(outer) * np.exp(parameters[-1]) / 2
            value = target[some] @ solved / 2 + np.log(np.diag(factor[0])).sum() + (pull**2).sum() / 2
            return float(value), gradient

        found = minimize(loss, self._start, jac=True, method="L-BFGS-B", options={"maxiter": most_steps})
        self._parameters = found.x
        covariance = self._between(self._parameters, a, b, a, b) + _noise(self._parameters, len(values))
        self._inverse = np.linalg.inv(covariance)
        self._solved = self._inverse @ target
        # Leave-one-out residuals in units of their own deviation (Rasmussen and Williams, 5.10 to 5.12).
        left_out = np.abs(self._solved) / np.sqrt(np.diag(self._inverse))
        self.calibration = float(np.quantile(left_out, 0.9) / 1.645) if len(values) >= 20 else 1.5
        return self

    def predict(self, ones: Sequence[Traits], others: Sequence[Traits]) -> tuple[Floats, Floats, Floats]:
        """Return the coordinate less its expectation, its standard deviation, and the part of its variance that was learned.

        Each has shape ``(num_pairs,)``. The learned part is between 0, nothing known of either job, and 1.
        """
        asked = list(dict.fromkeys([*ones, *others]))
        jobs = _Jobs(self._features, asked)
        at = {traits: index for index, traits in enumerate(asked)}
        a, b = np.array([at[t] for t in ones], dtype=np.intp), np.array([at[t] for t in others], dtype=np.intp)
        known = self._kernels(self._parameters, jobs, self._jobs)
        cross = _of_pairs(known, self._sign, a, b, self._a, self._b)
        before = _own_variance(self._kernels(self._parameters, jobs, jobs), self._sign, a, b)
        left = np.maximum(before - ((cross @ self._inverse) * cross).sum(axis=1), 1e-9)
        noise = float(np.exp(self._parameters[-1]))
        return self._mean + cross @ self._solved, np.sqrt(left + noise), np.clip(1 - left / np.maximum(before, 1e-9), 0.0, 1.0)

    def _between(
        self, parameters: Floats, a: NDArray[np.intp], b: NDArray[np.intp], c: NDArray[np.intp], d: NDArray[np.intp]
    ) -> Floats:
        return _of_pairs(self._kernels(parameters, self._jobs, self._jobs), self._sign, a, b, c, d)

    def _kernels(self, parameters: Floats, some: _Jobs, others: _Jobs) -> tuple[Floats, Floats]:
        """Covariances of effects and of affinities, each of shape ``(num_some, num_others)``."""
        weights = np.exp(parameters[: _NUM_MAIN + _NUM_AFFINITY])
        length = np.exp(parameters[-2])
        x, y = some.table / length, others.table / length
        products = x @ y.T
        squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None, :] - 2 * products
        near = np.exp(-np.maximum(squares, 0.0) / 2)
        family = (some.families[:, None] == others.families[None, :]).astype(np.float64)
        identity = (some.identities[:, None] == others.identities[None, :]).astype(np.float64)
        effect = weights[0] * family + weights[1] * identity + weights[2] * family * near + weights[3] * products
        affinity = weights[4] * family + weights[5] * identity + weights[6] * family * near + weights[7] * near
        return effect, affinity


def _of_pairs(
    kernels: tuple[Floats, Floats],
    sign: int,
    a: NDArray[np.intp],
    b: NDArray[np.intp],
    c: NDArray[np.intp],
    d: NDArray[np.intp],
) -> Floats:
    """Covariance of the pairs (a, b) with the pairs (c, d), shape ``(len(a), len(c))``."""
    effect, affinity = kernels
    straight = effect[np.ix_(a, c)] + effect[np.ix_(b, d)] + affinity[np.ix_(a, c)] * affinity[np.ix_(b, d)]
    crossed = effect[np.ix_(a, d)] + effect[np.ix_(b, c)] + affinity[np.ix_(a, d)] * affinity[np.ix_(b, c)]
    return np.asarray(straight + sign * crossed)


def _own_variance(kernels: tuple[Floats, Floats], sign: int, a: NDArray[np.intp], b: NDArray[np.intp]) -> Floats:
    effect, affinity = kernels
    straight = effect[a, a] + effect[b, b] + affinity[a, a] * affinity[b, b]
    return np.asarray(straight + sign * (2 * effect[a, b] + affinity[a, b] ** 2))


def _noise(parameters: Floats, size: int) -> Floats:
    return np.eye(size) * (float(np.exp(parameters[-1])) + 1e-9)
