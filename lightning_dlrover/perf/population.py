"""Properties of the hardware as all its jobs show them: data that `hardware.py` estimates and `prior.py` uses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Columns, Floats
from lightning_dlrover.perf.errors import Errors
from lightning_dlrover.perf.measured import Measured
from lightning_dlrover.perf.terms import BETWEEN_NODES

__all__ = ["Bend", "JobScale", "PooledPulls", "Population", "Ratios", "features", "shortest"]

FIRST_COMMUNICATION_SHARE = 0.3  # share of communication in a step from which the search for a job's scale starts

_LOG_WORKERS = np.log2([1, 2, 3, 4, 6, 8, 12, 16, 32, 64])
_LOG_ON_NODE = np.log2([1, 2, 3, 4, 8])
_MAX_NODES_APART = 4  # number of nodes beyond which placements count alike


class JobScale(NamedTuple):
    """A job's scale of communication as other jobs have it, per unit of some figure."""

    mean: float  # geometric mean; 0: unknown
    deviation: float  # standard deviation of the log between jobs


@dataclass(frozen=True)
class Ratios:
    """Coefficients of pooled terms relative to the job's own scale of communication; arrays of one row per term.

    A term of bytes counts with the seconds of the job's bytes, so that all terms have one unit.
    """

    pooled: NDArray[np.bool_]  # terms that belong to the hardware, and that some job involves
    mean: Floats
    deviation: Floats  # between jobs, with the error of the mean
    by_bytes: JobScale  # scale of a job by its gradient bytes
    by_work: JobScale  # scale of a job by its shortest seconds of computing

    @property
    def of_network(self) -> bool:
        """Whether some job was measured on several nodes."""
        return bool(self.pooled[BETWEEN_NODES].any())

    def expected(self, num_bytes: float, work_s: float) -> JobScale:
        """Return the scale that a job has by its gradient bytes; in seconds.

        A job of unknown bytes has one by its computing as long as it was measured on one node only: computing hints at what a
        model sends, but less than any measurement on several nodes does.
        Args:
            num_bytes: at most 1 if unknown.
            work_s: the job's shortest seconds of computing; 0 once it was measured on several nodes.
        """
        scale, amount = (self.by_bytes, num_bytes) if num_bytes > 1 and self.by_bytes.mean > 0 else (self.by_work, work_s)
        return JobScale(scale.mean * amount if self.of_network or scale is self.by_bytes else 0.0, scale.deviation)


@dataclass(frozen=True)
class Bend:
    """Log correction of the prior that all jobs of the hardware share, by placement and elasticity by communication."""

    weights: Floats

    def at(self, columns: Columns, by_sync: Floats) -> Floats:
        bent: Floats = np.hstack(features(columns, by_sync)) @ self.weights
        return bent


@dataclass(frozen=True)
class Population:
    """Common properties of jobs on one kind of hardware."""

    ratios: tuple[Ratios, ...]  # one for each of the prior's shapes
    noise: float  # deviation of the log of a configuration's step time about a job's fitted prior
    bend: Bend | None  # None: the prior has no error that helps other jobs
    part_weight: float  # weight of measured computing relative to the whole step
    errors: Errors | None  # None: too few jobs to know how errors of one job resemble each other
    resemblance: float = 0.0  # mean correlation of a prior's errors in two configurations of one job
    leaving_width: float = 1.0  # width that intervals off the node need, relative to the one computed for them

    def noise_of(self, num_configurations: int) -> float:
        """Return the noise that as many independent errors need to hold as much evidence as these, which resemble each other.

        The variance of a mean of correlated errors grows by the design effect (Kish, Survey Sampling, 1965, section 8.2).
        """
        return self.noise * math.sqrt(1 + self.resemblance * (num_configurations - 1))


def features(columns: Columns, by_sync: Floats) -> list[Floats]:
    """Return groups of features, each of which has a variance of its own; zero effect is the default of all."""
    nodes = np.minimum(columns.num_nodes, _MAX_NODES_APART).astype(int)
    by_nodes = np.eye(_MAX_NODES_APART)[nodes - 1]
    by_workers = _hats(np.log2(columns.num_workers), _LOG_WORKERS)
    by_fullest = _hats(np.log2(columns.fullest), _LOG_ON_NODE)
    share = by_sync[:, None]
    return [
        share * by_nodes,
        share * by_workers,
        share * _products(by_nodes, by_workers),
        share * _products(by_nodes, by_fullest),
        by_workers,
    ]


def shortest(seconds: Floats) -> float:
    """Return the time of the quickest configurations; a single one may be an outlier."""
    return float(np.quantile(seconds, 0.05))


def _hats(values: Floats, knots: Floats) -> Floats:
    """Return weights of linear interpolation between knots; constant beyond them."""
    return np.stack([np.interp(values, knots, unit) for unit in np.eye(len(knots))], axis=1)


def _products(one: Floats, other: Floats) -> Floats:
    found: Floats = (one[:, :, None] * other[:, None, :]).reshape(len(one), -1)
    return found


class PooledPulls:
    """Pull of one job's coefficients to the ratios of a population: c_k ~ N(s m_k, s d_k), with the job's own scale s.

    The scale is one more unknown of the least squares, and appears in these rows alone.
    """

    def __init__(
        self, ratios: Ratios, noise: float, units: Floats, expected: JobScale, scale: float, part_weight: float
    ) -> None:
        self.part_weight = part_weight
        self._ratios = ratios
        self._expected = expected
        self._noise = noise
        self._units = units
        self._scale = scale

    @classmethod
    def of(cls, population: Population, kind: int, units: Floats, amounts: Floats, measured: Measured) -> PooledPulls:
        ratios, step_s = population.ratios[kind], measured.step_s
        on_one_node = not amounts[:, BETWEEN_NODES].any()
        expected = ratios.expected(float(units.max()), shortest(measured.work_s) if on_one_node else 0.0)
        typical = float((ratios.mean / units * amounts.mean(axis=0)).sum())
        some_s = FIRST_COMMUNICATION_SHARE * float(np.median(step_s))
        start = some_s / typical if typical > 0 else expected.mean  # 0: no measurement has several workers
        return cls(ratios, population.noise_of(len(step_s)), units, expected, start, population.part_weight)

    def free(self, pull: Floats) -> Floats:
        """Return the pulls to defaults, without those that the population replaces."""
        return np.where(self._ratios.pooled, 0.0, pull)

    def rows(self, used: NDArray[np.bool_], lengths: Floats) -> tuple[Floats, Floats]:
        """Return rows over the used terms and the job's scale, relative to its present value, and their targets.

        Args:
            lengths: of the columns of all terms, by which coefficients are multiplied.
        """
        ratios = self._ratios
        terms = np.flatnonzero(used & ratios.pooled & (self._scale > 0))
        rows = np.zeros((len(terms) + (self._expected.mean > 0), int(used.sum()) + 1))
        expected = ratios.mean[terms] / self._units[terms] * self._scale
        weight = self._noise / (ratios.deviation[terms] / self._units[terms] * self._scale)
        places = np.cumsum(used)[terms] - 1
        rows[np.arange(len(terms)), places] = weight / lengths[terms]
        rows[np.arange(len(terms)), -1] = -weight * expected
        targets = np.zeros(len(rows))
        if self._expected.mean > 0:
            targets[-1] = self._noise / self._expected.deviation
            rows[-1, -1] = targets[-1] * self._scale / self._expected.mean
        return rows, targets

    def error(self, rows: Floats, targets: Floats, coefficients: Floats, change: float) -> float:
        """Return the sum of squares of the rows."""
        return float(((rows @ np.append(coefficients, change) - targets) ** 2).sum())

    def filled(self, coefficients: Floats, unmeasured: NDArray[np.bool_]) -> Floats:
        """Return the coefficients, with those of unmeasured terms as in other jobs of the same scale, if that is known."""
        expected = self._ratios.mean / self._units * self._scale
        found: Floats = np.where(unmeasured & self._ratios.pooled & (self._scale > 0), expected, coefficients)
        return found

    @property
    def scale(self) -> float:
        """Return the job's present scale of communication, in seconds."""
        return self._scale

    def start_at(self, scale: float) -> None:
        self._scale = scale

    def rescale(self, change: float) -> None:
        self._scale *= max(0.1, change)
