"""A step's time by physical causes: the mean of several shapes.

Every cause of time is a named term with a non-negative coefficient. Terms add up to the seconds of computing C, of
synchronising S and of loading data D, which overlap:

    step = ((C / 3 + ((2 C / 3)^g + S^g)^(1/g))^h + D^h)^(1/h)

Only the backward pass, two thirds of computing, hides synchronisation. g = 1 is no overlap and g = inf a perfect one (Pollux,
Qiao et al., OSDI 2021, section 3.2). h is 1 without loader workers and large with them, because they prepare batches during
the step. `model.py` adds the effects that terms cannot express, and estimates how far terms can be trusted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_dlrover.perf.columns import Columns, Configuration, Floats, configuration_of, windows_by_configuration
from lightning_dlrover.perf.measured import Measured
from lightning_dlrover.perf.population import Population, shortest
from lightning_dlrover.perf.residual_gp import JobResidualGP, Residuals
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.shapes import (
    OVERLAPS,
    Fit,
    Overlapped,
    Shape,
    fit_all,
    loader_overlap_of,
    slopes_of,
)
from lightning_dlrover.perf.terms import PARTS, SHAPES, TERMS, amounts_of
from lightning_dlrover.perf.threads import one_blas_thread

__all__ = ["PARTS", "SHAPES", "TERMS", "Configuration", "PhysicalPrior", "PriorPrediction", "configuration_of"]

MIN_CONFIGURATIONS_FOR_OVERLAP = 6
NORMAL_WIDTH = 1.645  # standard deviations to either side that hold 90 % of a normal error
LINK_FACTOR = 2.0  # a link is so many times slower or faster than the default of `terms.py`
UNKNOWN_BYTES_SHARE = 3.0  # synchronisation between nodes, relative to computing, that a job of unknown bytes may have
MIN_EVIDENCE = 0.01  # weight of a shape, relative to the best one, below which it is left out


@dataclass(frozen=True)
class PriorPrediction:
    """Predictions for some configurations, with the standard deviations of the shapes about their means."""

    log_s: Floats  # log of seconds; of shape ``(num_configurations,)``, like its spread
    spread: Floats
    shares: Floats  # shares of the step as `PARTS`, ``(num_configurations, 3)``; overlapping time counts as compute
    shares_spread: Floats
    faster: (
        Floats  # log of the step time over that with the fastest and of that with the slowest plausible network; 0: measured
    )
    slower: Floats


class UnknownNetwork(NamedTuple):
    """Range of 90 % of the synchronisation between nodes, for a job that was measured on single nodes only."""

    factor: float  # it may take so many times as long as predicted, or so many times less
    more_s: float = 0.0  # seconds on top of the slow end, where nothing is known of what a job sends

    @classmethod
    def of(cls, columns: Columns, measured: Measured, population: Population | None, num_bytes: float) -> UnknownNetwork:
        work_s = shortest(measured.work_s)
        if population is not None:
            scales = [ratios.expected(num_bytes, work_s) for ratios in population.ratios]
            if all(ratios.of_network for ratios in population.ratios) and min(scale.mean for scale in scales) > 0:
                return cls(math.exp(NORMAL_WIDTH * max(scale.deviation for scale in scales)))
        return cls(LINK_FACTOR, 0.0 if num_bytes > 1 else UNKNOWN_BYTES_SHARE * work_s)


@dataclass(frozen=True)
class Elasticities:
    """Growth of the step in percent with one percent of a part, and the part from which it is reckoned."""

    log_compute_s: Floats
    by_compute: Floats
    by_sync: Floats


@dataclass(frozen=True)
class PhysicalPrior:
    """Step time by `TERMS`: the mean of the logs of `SHAPES`. Create it with `fit`.

    Example:
        >>> from lightning_dlrover.perf import Columns, configuration_of
        >>> prior = PhysicalPrior.of(windows)  # step profiles of one job
        >>> prior.predict(Columns.of([configuration_of(windows[0])])).log_s.shape
        (1,)
    """

    shapes: tuple[Shape, ...]
    weights: Floats  # weights of the shapes; they add up to 1
    kinds: tuple[int, ...]  # index into `SHAPES` of each shape
    own: JobResidualGP | None = None  # further deviations of this job
    network: UnknownNetwork | None = None  # None: placements on several nodes were measured

    @classmethod
    def of(cls, samples: Sequence[StepProfile], node_cores: float = 0.0, population: Population | None = None) -> PhysicalPrior:
        """Fit the prior alone to windows of one job."""
        groups = windows_by_configuration(samples, node_cores)
        measured = Measured.of([*groups.values()], [1.0] * len(groups))
        return cls.fit(Columns.of([*groups]), measured, population=population)

    @classmethod
    def fit(
        cls,
        columns: Columns,
        measured: Measured,
        like: PhysicalPrior | None = None,
        population: Population | None = None,
    ) -> PhysicalPrior:
        """Fit the non-negative coefficients with the smallest squared error of the log, for each shape.

        The step is homogeneous of degree 1 in the coefficients, so by Euler's theorem it equals its gradient times them. A
        Gauss-Newton step is therefore itself a problem of non-negative least squares (Lawson, Hanson, 1974). Measured parts add
        one row each for compute and data, which separates terms that one world size alone cannot separate. Where several terms
        still explain the samples equally well, defaults and doubts decide, or the `population`.

        Args:
            columns: measured configurations, each once.
            measured: the measurements in them.
            like: take overlaps from this prior instead of trying all, and with a `population` its coefficients as a start.
            population: properties of the hardware. All overlaps and shapes then count by their evidence.
        """
        network = None
        if columns.num_nodes.max() == 1:
            network = UnknownNetwork.of(columns, measured, population, float(columns.dense_bytes.mean()))
        tried = (
            [(kind, shape.overlap) for kind, shape in zip(like.kinds, like.shapes, strict=True)]
            if like
            else _tried(len(columns))
        )
        with one_blas_thread():
            if population is None:
                prior = cls._best_of_each(fit_all(tried, columns, measured))
            else:
                starts = like.shapes if like else ()
                prior = cls._by_evidence(fit_all(tried, columns, measured, population, starts), population.noise)
        own = None
        if population is not None and population.residual_gp is not None:
            own = JobResidualGP.of(population.residual_gp, prior.residuals(columns, measured))
        return dataclasses.replace(prior, own=own, network=network)

    @classmethod
    def _best_of_each(cls, fits: Sequence[Fit]) -> PhysicalPrior:
        """Return the shapes, each with its best overlap."""
        kinds = sorted({fit.kind for fit in fits})
        best = [min((fit for fit in fits if fit.kind == kind), key=lambda fit: fit.objective).shape for kind in kinds]
        return cls(tuple(best), np.full(len(kinds), 1 / len(kinds)), tuple(kinds))

    @classmethod
    def _by_evidence(cls, fits: Sequence[Fit], noise: float) -> PhysicalPrior:
        """Return all fits with their posterior weights, given the noise (Hoeting et al., 1999)."""
        costs = np.array([fit.objective for fit in fits]) / noise**2
        weights = np.exp((costs.min() - costs) / 2)
        kept = np.flatnonzero(weights >= MIN_EVIDENCE).tolist()
        return cls(tuple(fits[i].shape for i in kept), weights[kept] / weights[kept].sum(), tuple(fits[i].kind for i in kept))

    def predict(self, columns: Columns) -> PriorPrediction:
        """Return the means over the shapes, of the log of step time and of the shares."""
        found = self._overlapped(columns)
        predicted = self._predicted(columns, found)
        if self.network is None:
            return predicted
        factor, more_s = self.network
        near_s = np.array([o.step_s for o in found])
        with one_blas_thread():
            amounts, overlaps, several = amounts_of(columns), loader_overlap_of(columns), columns.num_nodes > 1
            fast_s = np.array([shape.overlapped(amounts, overlaps, 1 / factor).step_s for shape in self.shapes])
            slow_s = np.array([shape.overlapped(amounts, overlaps, factor, more_s).step_s for shape in self.shapes])
        faster, slower = (several * (self.weights @ np.log(ratios)) for ratios in (near_s / fast_s, slow_s / near_s))
        return dataclasses.replace(predicted, faster=faster, slower=slower)

    def residuals(self, columns: Columns, measured: Measured) -> Residuals:
        """Return how measurements deviate from the predictions."""
        found = self._overlapped(columns)
        elastic = self._elasticities(columns, found)
        known = measured.compute_s > 1e-3 * measured.step_s  # false where it is nan
        compute = np.where(known, np.log(np.where(known, measured.compute_s, 1.0)) - elastic.log_compute_s, np.nan)
        step = np.log(measured.step_s) - self._predicted(columns, found).log_s
        return Residuals(columns, elastic.by_compute, elastic.by_sync, step, compute, measured.weight)

    def _overlapped(self, columns: Columns) -> list[Overlapped]:
        """Return the parts of a step by each shape."""
        amounts, loader_overlap = amounts_of(columns), loader_overlap_of(columns)
        with one_blas_thread():
            return [shape.overlapped(amounts, loader_overlap) for shape in self.shapes]

    def _predicted(self, columns: Columns, found: Sequence[Overlapped]) -> PriorPrediction:
        logs = np.array([np.log(o.step_s) for o in found])
        parts_s = np.array([[o.compute_s, o.step_s - o.busy_s, o.busy_s - o.compute_s] for o in found])
        all_shares = parts_s.transpose(0, 2, 1) / np.array([o.step_s for o in found])[:, :, None]
        (log_s, spread), (shares, shares_spread) = (_mean_and_spread(values, self.weights) for values in (logs, all_shares))
        if self.own is not None:
            elastic = self._elasticities(columns, found)
            log_s = log_s + self.own.at(columns, elastic.by_compute, elastic.by_sync)
        nothing = np.zeros(len(columns))
        return PriorPrediction(log_s, spread, shares, shares_spread, nothing, nothing)

    def _elasticities(self, columns: Columns, found: Sequence[Overlapped]) -> Elasticities:
        loader_overlap = loader_overlap_of(columns)
        of_shapes = []
        for shape, o in zip(self.shapes, found, strict=True):
            by_compute, _, by_sync = slopes_of(o, shape.overlap, loader_overlap)
            of_shapes.append([np.log(o.compute_s), by_compute * o.compute_s / o.step_s, by_sync * o.sync_s / o.step_s])
        return Elasticities(*np.tensordot(self.weights, np.array(of_shapes), axes=1))

    def step_time_s(self, columns: Columns) -> Floats:
        seconds: Floats = np.exp(self.predict(columns).log_s)
        return seconds


def _mean_and_spread(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return the mean and the standard deviation over the first axis."""
    if np.ptp(weights) == 0:
        return values.mean(axis=0), values.std(axis=0)
    mean = np.tensordot(weights, values, axes=1)
    return mean, np.sqrt(np.tensordot(weights, (values - mean) ** 2, axes=1))


def _tried(num_configurations: int) -> list[tuple[int, float]]:
    """Return the shapes and overlaps to fit."""
    kept = OVERLAPS if num_configurations >= MIN_CONFIGURATIONS_FOR_OVERLAP else OVERLAPS[:1]
    return [(kind, overlap) for kind in range(len(SHAPES)) for overlap in kept]
