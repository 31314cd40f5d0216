"""Properties of the hardware as all its jobs show them: data that `hardware.py` estimates and `prior.py` uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Floats
from lightning_dlrover.perf.measured import Measured
from lightning_dlrover.perf.residual_gp import ResidualGP
from lightning_dlrover.perf.terms import BETWEEN_NODES

__all__ = ["JobScale", "PooledPulls", "Population", "Ratios", "shortest"]

FIRST_COMMUNICATION_SHARE = 0.3  # share of communication in a step from which the search for a job's scale starts


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
class Population:
    """Common properties of jobs on one kind of hardware.

    Example:
        >>> from lightning_dlrover.perf import StepTimeModel, population_of
        >>> population = population_of([windows, windows])  # None: the two jobs have too few configurations
        >>> model = StepTimeModel.fit(windows, population=population)
    """

    ratios: tuple[Ratios, ...]  # one for each of the prior's shapes
    noise: float  # deviation of the log of a configuration's step time about a job's fitted prior
    residual_gp: ResidualGP | None = None  # None: too few jobs to know how residuals of one job correlate
    leaving_width: float = 1.0  # width that intervals off the node need, relative to the one computed for them


def shortest(seconds: Floats) -> float:
    """Return the time of the quickest configurations; a single one may be an outlier."""
    return float(np.quantile(seconds, 0.05))


class PooledPulls:
    """Pull of one job's coefficients to the ratios of a population: c_k ~ N(s m_k, s d_k), with the job's own scale s.

    The scale is one more unknown of the least squares, and appears in these rows alone.
    """

    def __init__(self, ratios: Ratios, noise: float, units: Floats, expected: JobScale, scale: float) -> None:
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
        return cls(ratios, population.noise, units, expected, start)

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
