"""ResidualGP of a fitted prior in alike configurations, which are alike: a Gaussian process over configurations.

The logs of computing and of synchronisation deviate from the prior, and the step follows by its elasticities. A window shows
both: its whole step, and its computing where that was measured (Rasmussen, Williams, Gaussian Processes for Machine Learning,
2006, section 2.2). How large the deviations are, and how far they reach, is a property of several jobs: the variances of the
kernels maximise the likelihood of the errors of all of them (Zhou et al., MM Algorithms for Variance Components Models, Journal
of Computational and Graphical Statistics 28(2), 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Columns, Floats

__all__ = ["JobResidualGP", "ResidualGP", "Residuals", "variances_of"]

ITERATIONS = 40
FIRST_DEVIATION = 0.02  # the search for each kernel's variance starts from it
MIN_VARIANCE = 1e-8
MAX_CONFIGURATIONS = 200  # newest configurations of a job that count, which bounds the time of a fit
CHUNK = 4096  # rows of a prediction at a time, which bounds its memory

_OF_COMPUTE, _OF_SYNC, _OF_STEP, _OF_MEASURED = slice(0, 3), slice(3, 5), slice(5, 6), slice(6, 7)
_NUM_KERNELS = 7  # two variances of noise follow those of the kernels: of steps, and of measured computing


@dataclass(frozen=True)
class Residuals:
    """Deviations of one job's measurements from its prior, one row for each configuration."""

    columns: Columns
    by_compute: Floats  # growth of the step in percent with one percent of compute
    by_sync: Floats
    step: Floats  # log of measured over predicted
    compute: Floats  # nan where it was not measured
    weight: Floats

    def rows(self, index: NDArray[np.intp]) -> Residuals:
        figures = (self.by_compute, self.by_sync, self.step, self.compute, self.weight)
        return Residuals(self.columns.rows(index), *(values[index] for values in figures))


class _Kernels(NamedTuple):
    """Covariances of four deviations, between configurations."""

    compute: Floats
    sync: Floats
    step: Floats  # deviations of the step, beside compute and synchronisation
    measured: Floats  # deviations of measured compute, which the step does not follow


@dataclass(frozen=True)
class ResidualGP:
    """Variances of the kernels between jobs of one kind of hardware, then those of noise in steps and in computing."""

    variances: Floats

    def sums(self, some: Columns, others: Columns) -> _Kernels:
        """Return the covariances of the deviations."""
        weighted = [v * kernel for v, kernel in zip(self.variances, _kernels(some, others), strict=False)]
        return _Kernels(*(sum(weighted[part]) for part in (_OF_COMPUTE, _OF_SYNC, _OF_STEP, _OF_MEASURED)))


@dataclass(frozen=True)
class JobResidualGP:
    """Deviations of one job, as far as its measurements show them."""

    gp: ResidualGP
    columns: Columns  # measured configurations
    of_compute: Floats  # weights of the measured configurations in each of the three deviations
    of_sync: Floats
    of_step: Floats

    @classmethod
    def of(cls, gp: ResidualGP, residuals: Residuals) -> JobResidualGP:
        # The job's own come before those of earlier jobs, the newest of them last.
        newest = residuals.rows(np.argsort(residuals.weight, kind="stable")[-MAX_CONFIGURATIONS:])
        known = np.isfinite(newest.compute)
        kept = np.concatenate([np.ones(len(known), dtype=bool), known])
        *_, of_step_noise, of_compute_noise = gp.variances
        kernels = gp.sums(newest.columns, newest.columns)
        covariance = _covariance(newest, kernels, of_step_noise, of_compute_noise)
        values = np.concatenate([newest.step, newest.compute])
        solved = np.zeros(len(values))
        solved[kept] = np.linalg.solve(covariance[np.ix_(kept, kept)] + 1e-9 * np.eye(kept.sum()), values[kept])
        step, compute = np.split(solved, 2)
        return cls(gp, newest.columns, newest.by_compute * step + compute, newest.by_sync * step, step)

    def scaled(self, factor: float) -> JobResidualGP:
        weights = (self.of_compute, self.of_sync, self.of_step)
        return JobResidualGP(self.gp, self.columns, *(factor * values for values in weights))

    def at(self, columns: Columns, by_compute: Floats, by_sync: Floats) -> Floats:
        """Return the expected deviation of the log of the step time."""
        found = np.empty(len(columns))
        for start in range(0, len(columns), CHUNK):
            rows = np.arange(start, min(start + CHUNK, len(columns)))
            near = self.gp.sums(columns.rows(rows), self.columns)
            own = by_compute[rows] * (near.compute @ self.of_compute) + by_sync[rows] * (near.sync @ self.of_sync)
            found[rows] = own + near.step @ self.of_step
        return found


def variances_of(jobs: Sequence[Residuals]) -> Floats:
    """Return the variances of the kernels and of noise with the largest likelihood over all jobs."""
    tables = []
    for job in jobs:
        kept = np.concatenate([np.ones(len(job.step), dtype=bool), np.isfinite(job.compute)])
        components = np.array([part[np.ix_(kept, kept)] for part in _components(job)])
        tables.append((components, np.concatenate([job.step, job.compute])[kept]))
    variances = np.full(_NUM_KERNELS + 2, FIRST_DEVIATION**2)
    for _ in range(ITERATIONS):
        explained, expected = np.zeros(len(variances)), np.zeros(len(variances))
        for components, values in tables:
            covariance = np.tensordot(variances, components, axes=1)
            inverse = np.linalg.inv(covariance + 1e-9 * np.eye(len(values)))
            weights = inverse @ values
            explained += components @ weights @ weights
            expected += np.tensordot(components, inverse, axes=2)
        variances = np.maximum(MIN_VARIANCE, variances * np.sqrt(explained / np.maximum(expected, 1e-12)))
    return variances


def _components(job: Residuals) -> list[Floats]:
    """Return the covariances for a variance of 1 of each kernel and of each noise."""
    nothing = np.zeros((len(job.step), len(job.step)))
    none = _Kernels(nothing, nothing, nothing, nothing)
    kernels = _kernels(job.columns, job.columns)
    found = [_covariance(job, none._replace(compute=kernel)) for kernel in kernels[_OF_COMPUTE]]
    found += [_covariance(job, none._replace(sync=kernel)) for kernel in kernels[_OF_SYNC]]
    found += [_covariance(job, none._replace(step=kernel)) for kernel in kernels[_OF_STEP]]
    found += [_covariance(job, none._replace(measured=kernel)) for kernel in kernels[_OF_MEASURED]]
    return [*found, _covariance(job, none, of_step_noise=1.0), _covariance(job, none, of_compute_noise=1.0)]


def _covariance(job: Residuals, kernels: _Kernels, of_step_noise: float = 0.0, of_compute_noise: float = 0.0) -> Floats:
    """Return the covariance of all steps, followed by all of measured compute."""
    of_compute, of_sync, of_step, of_measured = kernels
    count = len(job.step)
    found = np.empty((2 * count, 2 * count))
    found[count:, count:] = of_compute + of_measured
    found[:count, count:] = job.by_compute[:, None] * of_compute
    found[count:, :count] = found[:count, count:].T
    found[:count, :count] = job.by_compute * found[:count, count:] + np.outer(job.by_sync, job.by_sync) * of_sync + of_step
    found[np.diag_indices(2 * count)] += np.repeat([of_step_noise, of_compute_noise], count) / np.tile(job.weight, 2) ** 2
    return found


def _kernels(some: Columns, others: Columns) -> list[Floats]:
    """Return the similarities from 0 to 1 by each kernel, ``(len(some), len(others))``; distances are factors of 2."""

    def distance(name: str) -> Floats:
        one, other = (np.log2(np.maximum(1.0, getattr(columns, name))) for columns in (some, others))
        found: Floats = np.abs(one[:, None] - other[None, :])
        return found

    settings = ("threads", "core_share", "loader_workers", "prefetch_factor", "dense_flops", "dense_bytes", "embedding_bytes")
    differing = [name for name in settings if np.ptp(np.concatenate([getattr(some, name), getattr(others, name)])) > 0]
    setting = sum((distance(name) for name in differing), np.zeros((len(some), len(others))))
    fullest, batch = distance("fullest"), distance("local_batch")
    place = distance("num_workers") + distance("num_nodes") + fullest + distance("emptiest") / 2
    same_setting, near = np.exp(-setting), np.exp(-(place + batch + setting) / 2)
    return [
        same_setting * (batch == 0),
        np.exp(-setting - fullest / 2),
        np.exp(-setting - place),
        same_setting * (place == 0),
        near,
        near,
        near,
    ]
