"""Estimate the common properties of jobs on the same hardware: partial pooling over jobs.

Each job's prior is fitted alone. The coefficients of communication, relative to the job's own scale, then have a mean and a
deviation between jobs, and so has the error that the fitted priors share (Gelman, Hill, Data Analysis Using Regression and
Multilevel/Hierarchical Models, 2007, chapter 12). A new job is pulled to the means as far as jobs agree. Only windows of other
jobs are used, never their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.perf.columns import Columns, Floats, windows_by_configuration
from lightning_dlrover.perf.population import Bend, Population, Ratios, features
from lightning_dlrover.perf.prior import SHAPES, TERMS, Measured, PhysicalPrior, amounts_of, job_units
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.threads import one_blas_thread

__all__ = ["population_of"]

MIN_CONFIGURATIONS = 6  # fewer do not determine the terms of a job
MIN_JOBS_TO_BEND = 3  # an error of two jobs may be a coincidence
MAX_SHARED_ERROR = 0.25  # larger log residuals are outliers: a busy neighbour, not the hardware
POOLED_TERMS = frozenset({"ring_inside_node", "ring_between_nodes", "network", "stages", "latency_of_workers", "pair_of_nodes"})

ASSUMED_DEVIATION = 0.3
"""Relative deviation of one imagined job, which keeps two jobs that agree by chance from being trusted blindly."""

MIN_DEVIATION_S = 0.02  # minimum deviation of a term between jobs, as a share of their communication
MIN_BYTE_DEVIATION = 0.1
MIN_NOISE = 0.02

CONFIGURATIONS_OF_A_JOB = (10.0, 30.0, 100.0, 300.0)
"""Tried numbers of independent errors in one job's residuals. Errors of one job resemble each other, so more would overstate
the evidence. Leaving out one job at a time selects the number."""

EM_ITERATIONS = 40


@dataclass(frozen=True)
class _Job:
    columns: Columns
    measured: Measured
    prior: PhysicalPrior

    @property
    def residuals(self) -> Floats:
        found: Floats = np.log(self.measured.step_s) - self.prior.predict(self.columns).log_s
        return found


def population_of(jobs: Sequence[Sequence[StepProfile]], node_cores: float = 0.0) -> Population | None:
    """Return the common properties of jobs on the same hardware; None if no job has enough configurations.

    Args:
        jobs: windows of each job.
        node_cores: as in `StepTimeModel.fit`.
    """
    known = []
    for windows in jobs:
        groups = windows_by_configuration(windows, node_cores)
        if len(groups) >= MIN_CONFIGURATIONS:
            columns, measured = Columns.of([*groups]), Measured.of([*groups.values()], [1.0] * len(groups))
            known.append(_Job(columns, measured, PhysicalPrior.fit(columns, measured)))
    if not known:
        return None
    noise = float(np.sqrt(np.mean([(job.residuals**2).mean() for job in known])))
    ratios = tuple(_ratios(known, kind) for kind in range(len(SHAPES)))
    return Population(ratios, max(MIN_NOISE, noise), _bend(known))


def _ratios(jobs: Sequence[_Job], kind: int) -> Ratios:
    """Return the mean and deviation over jobs of each pooled coefficient, relative to the job's scale."""
    pooled = np.array([term.name in POOLED_TERMS for term in TERMS])
    units = np.array([job_units(job.columns) for job in jobs])
    coefficients = np.array([job.prior.shapes[kind].coefficients for job in jobs]) * units * pooled
    typical = np.mean([amounts_of(job.columns).mean(axis=0) / unit for job, unit in zip(jobs, units, strict=True)], axis=0)
    scales = coefficients @ typical  # seconds of communication in a typical placement
    talking = scales > 0
    relative = coefficients[talking] / scales[talking, None]
    num_jobs = len(relative)
    if num_jobs == 0:  # no job had several workers
        return Ratios(np.zeros(len(TERMS), dtype=bool), np.zeros(len(TERMS)), np.ones(len(TERMS)), 0.0, 1.0)
    mean = relative.mean(axis=0)
    squares = ((relative - mean) ** 2).sum(axis=0) + (ASSUMED_DEVIATION * mean) ** 2
    deviation = np.sqrt(squares / num_jobs * (1 + 1 / num_jobs))
    deviation = np.maximum(deviation, MIN_DEVIATION_S / np.maximum(typical, 1e-3))
    by_bytes, byte_deviation = 0.0, 1.0
    if (num_bytes := units.max(axis=1)[talking]).min() > 1:
        logs = np.log(scales[talking] / num_bytes)
        by_bytes = float(np.exp(logs.mean()))
        spread = ((logs - logs.mean()) ** 2).sum() + ASSUMED_DEVIATION**2
        byte_deviation = max(MIN_BYTE_DEVIATION, float(np.sqrt(spread / num_jobs * (1 + 1 / num_jobs))))
    return Ratios(pooled, mean, deviation, by_bytes, byte_deviation)


@dataclass(frozen=True)
class _Moments:
    """Sums of one job's residuals over its configurations, per configuration."""

    of_features: Floats
    with_residuals: Floats
    of_residuals: float


def _bend(jobs: Sequence[_Job]) -> Bend | None:
    """Return the error that the jobs' priors share; None if it does not help jobs that were left out."""
    if len(jobs) < MIN_JOBS_TO_BEND:
        return None
    found = []
    for job in jobs:
        groups = features(job.columns, job.prior.predict(job.columns).shares[:, -1])
        residuals = job.residuals
        found.append((groups, np.clip(residuals - np.median(residuals), -MAX_SHARED_ERROR, MAX_SHARED_ERROR)))
    sizes = [group.shape[1] for group in found[0][0]]
    rows = [(np.hstack(groups), residuals) for groups, residuals in found]
    moments = [_Moments(z.T @ z / len(r), z.T @ r / len(r), float((r**2).mean())) for z, r in rows]
    with one_blas_thread():
        left: dict[float, float] = {}  # mean over the jobs of error left by the others' bend, relative to none
        for count in CONFIGURATIONS_OF_A_JOB:
            shares = []
            for out, (z, r) in enumerate(rows):
                weights = _weights([m for i, m in enumerate(moments) if i != out], count, sizes)
                shares.append(float(np.abs(r - z @ weights).mean() / max(1e-12, np.abs(r).mean())))
            left[count] = float(np.mean(shares))
        best = min(left, key=lambda count: left[count])
        return Bend(_weights(moments, best, sizes)) if left[best] < 1 else None


def _weights(moments: Sequence[_Moments], count: float, sizes: Sequence[int]) -> Floats:
    """Return the weights of features, whose groups have variances found by expectation maximisation."""
    squares = count * sum(m.of_features for m in moments)
    products = count * sum(m.with_residuals for m in moments)
    total = count * sum(m.of_residuals for m in moments)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    variances, noise = np.full(len(sizes), 0.03**2), 0.05**2
    weights = np.zeros(int(bounds[-1]))
    for _ in range(EM_ITERATIONS):
        covariance = np.linalg.inv(squares / noise + np.diag(np.repeat(1 / variances, sizes)))
        weights = covariance @ products / noise
        spread = weights**2 + np.diag(covariance)
        variances = np.array([max(1e-9, spread[a:b].mean()) for a, b in itertools.pairwise(bounds)])
        unexplained = total - 2 * weights @ products + weights @ squares @ weights + np.trace(squares @ covariance)
        noise = max(1e-5, float(unexplained) / (count * len(moments)))
    return weights
