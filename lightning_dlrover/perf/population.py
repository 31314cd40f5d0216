"""Properties of the hardware as all its jobs show them: data that `hardware.py` estimates and `prior.py` uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Columns, Floats
from lightning_dlrover.perf.errors import Errors

__all__ = ["Bend", "PooledPulls", "Population", "Ratios", "features"]

FIRST_COMMUNICATION_SHARE = 0.3  # share of communication in a step from which the search for a job's scale starts

_LOG_WORKERS = np.log2([1, 2, 3, 4, 6, 8, 12, 16, 32, 64])
_LOG_ON_NODE = np.log2([1, 2, 3, 4, 8])
_MAX_NODES_APART = 4  # number of nodes beyond which placements count alike


@dataclass(frozen=True)
class Ratios:
    """Coefficients of pooled terms relative to the job's own scale of communication; arrays of one row per term.

    A term of bytes counts with the seconds of the job's bytes, so that all terms have one unit.
    """

    pooled: NDArray[np.bool_]  # terms that belong to the hardware
    mean: Floats
    deviation: Floats  # between jobs, with the error of the mean
    seconds_per_byte: float  # scale of a job by its gradient bytes; 0: bytes are not known for all jobs
    byte_deviation: float  # standard deviation of the log of that figure between jobs


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


def _hats(values: Floats, knots: Floats) -> Floats:
    """Return weights of linear interpolation between knots; constant beyond them."""
    return np.stack([np.interp(values, knots, unit) for unit in np.eye(len(knots))], axis=1)


def _products(one: Floats, other: Floats) -> Floats:
    found: Floats = (one[:, :, None] * other[:, None, :]).reshape(len(one), -1)
    return found


def _by_bytes_s(ratios: Ratios, units: Floats) -> float:
    """Return the scale of a job by its gradient bytes; 0 where they are unknown."""
    num_bytes = float(units.max())
    return ratios.seconds_per_byte * num_bytes if num_bytes > 1 else 0.0


class PooledPulls:
    """Pull of one job's coefficients to the ratios of a population: c_k ~ N(s m_k, s d_k), with the job's own scale s.

    The scale is one more unknown of the least squares, and appears in these rows alone.
    """

    def __init__(self, ratios: Ratios, noise: float, units: Floats, scale: float, part_weight: float) -> None:
        self.part_weight = part_weight
        self._ratios = ratios
        self._noise = noise
        self._units = units
        self._scale = scale

    @classmethod
    def of(cls, population: Population, kind: int, units: Floats, amounts: Floats, step_s: Floats) -> PooledPulls:
        ratios = population.ratios[kind]
        typical = float((ratios.mean / units * amounts.mean(axis=0)).sum())
        some_s = FIRST_COMMUNICATION_SHARE * float(np.median(step_s))
        start = some_s / typical if typical > 0 else _by_bytes_s(ratios, units)  # 0: no measurement has several workers
        return cls(ratios, population.noise_of(len(step_s)), units, start, population.part_weight)

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
        by_bytes_s = _by_bytes_s(ratios, self._units)
        rows = np.zeros((len(terms) + (by_bytes_s > 0), int(used.sum()) + 1))
        expected = ratios.mean[terms] / self._units[terms] * self._scale
        weight = self._noise / (ratios.deviation[terms] / self._units[terms] * self._scale)
        places = np.cumsum(used)[terms] - 1
        rows[np.arange(len(terms)), places] = weight / lengths[terms]
        rows[np.arange(len(terms)), -1] = -weight * expected
        targets = np.zeros(len(rows))
        if by_bytes_s > 0:
            targets[-1] = self._noise / ratios.byte_deviation
            rows[-1, -1] = targets[-1] * self._scale / by_bytes_s
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
