"""Estimate the common properties of jobs on the same hardware: partial pooling over jobs.

Each job's prior is fitted alone. The coefficients of communication, relative to the job's own scale, then have a mean and a
deviation between jobs, and so has the error that the fitted priors share (Gelman, Hill, Data Analysis Using Regression and
Multilevel/Hierarchical Models, 2007, chapter 12). A new job is pulled to the means as far as jobs agree. Only windows of other
jobs are used, never their names.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.perf.columns import Columns, Floats, windows_by_configuration
from lightning_dlrover.perf.errors import Errors, Residuals, resemblance_of, variances_of
from lightning_dlrover.perf.measured import Measured
from lightning_dlrover.perf.model import COVERAGE, StepTimeModel
from lightning_dlrover.perf.population import Bend, JobScale, Population, Ratios, features, shortest
from lightning_dlrover.perf.prior import PhysicalPrior
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.shapes import PART_WEIGHT
from lightning_dlrover.perf.terms import SHAPES, TERMS, amounts_of, job_units
from lightning_dlrover.perf.threads import one_blas_thread

__all__ = ["population_of"]

MIN_CONFIGURATIONS = 6  # fewer do not determine the terms of a job
MIN_JOBS_TO_BEND = 3  # an error of two jobs may be a coincidence
MAX_SHARED_ERROR = 0.25  # larger log residuals are outliers: a busy neighbour, not the hardware
POOLED_TERMS = frozenset({"ring_inside_node", "ring_between_nodes", "network", "stages", "latency_of_workers", "pair_of_nodes"})

ASSUMED_DEVIATION = 0.3
"""Relative deviation of one imagined job, which keeps two jobs that agree by chance from being trusted blindly."""

MIN_DEVIATION_S = 0.02  # minimum deviation of a term between jobs, as a share of their communication
MIN_SCALE_DEVIATION = 0.1
MIN_NOISE = 0.02

CONFIGURATIONS_OF_A_JOB = (10.0, 30.0, 100.0, 300.0)
"""Tried numbers of independent errors in one job's residuals. Errors of one job resemble each other, so more would overstate
the evidence. Leaving out one job at a time selects the number."""

EM_ITERATIONS = 40

MAX_JOBS_LEAVING = 8  # newest jobs that show how wide intervals off the node have to be
MIN_LEAVING_WIDTH = 0.3

CONFIGURATIONS_FOR_VARIANCES = 100  # configurations of each job that show how its errors resemble each other


@dataclass(frozen=True)
class _Job:
    columns: Columns
    measured: Measured
    prior: PhysicalPrior

    @functools.cached_property
    def residuals(self) -> Residuals:
        return self.prior.residuals(self.columns, self.measured)


def population_of(jobs: Sequence[Sequence[StepProfile]], node_cores: float = 0.0) -> Population | None:
    """Return the common properties of jobs on the same hardware; None if no job has enough configurations.

    Args:
        jobs: windows of each job.
        node_cores: as in `StepTimeModel.fit`.
    """
    known, used = [], []
    for windows in jobs:
        groups = windows_by_configuration(windows, node_cores)
        if len(groups) >= MIN_CONFIGURATIONS:
            columns, measured = Columns.of([*groups]), Measured.of([*groups.values()], [1.0] * len(groups))
            used.append(windows)
            known.append(_Job(columns, measured, PhysicalPrior.of_hardware(columns, measured)))
    if not known:
        return None
    noise = max(MIN_NOISE, float(np.sqrt(np.mean([(job.residuals.step**2).mean() for job in known]))))
    ratios = tuple(_ratios(known, kind) for kind in range(len(SHAPES)))
    bend, left = _bend(known)
    part_weight = _part_weight(known, noise)
    if len(left) < MIN_JOBS_TO_BEND:
        return Population(ratios, noise, bend, part_weight, errors=None)
    leaving = _leaving_width([(windows, job) for windows, job in zip(used, known, strict=True)], noise, part_weight, node_cores)
    some = [_some(job) for job in left]
    with one_blas_thread():
        errors = Errors(variances_of(some))
    return Population(ratios, noise, bend, part_weight, errors, resemblance_of(errors, some), leaving)


def _leaving_width(
    jobs: Sequence[tuple[Sequence[StepProfile], _Job]], noise: float, part_weight: float, node_cores: float
) -> float:
    """Return the width that intervals of jobs leaving their node need, relative to the one that the model computes.

    Each job is predicted on several nodes from its windows on one node and the ratios of the other jobs. The result is
    the quantile of the errors relative to the intervals (Lei et al., Journal of the American Statistical Association
    113(523), 2018, section 5.2); 1 where fewer than three jobs show it.
    """
    scores = []
    for out, (windows, _) in enumerate(jobs[-MAX_JOBS_LEAVING:], start=max(0, len(jobs) - MAX_JOBS_LEAVING)):
        inside, outside = ([w for w in windows if (w.num_nodes > 1) == several] for several in (False, True))
        if len(windows_by_configuration(inside, node_cores)) < MIN_CONFIGURATIONS or not outside:
            continue
        others = [job for place, (_, job) in enumerate(jobs) if place != out]
        ratios = tuple(_ratios(others, kind) for kind in range(len(SHAPES)))
        population = Population(ratios, noise, _bend(others)[0], part_weight, errors=None)
        model = StepTimeModel.fit(inside, node_cores=node_cores, population=population)
        groups = windows_by_configuration(outside, node_cores)
        found = model.predict_columns(Columns.of([*groups]))
        error = np.log(Measured.of([*groups.values()], [1.0] * len(groups)).step_s / found.step_time_s)
        width = np.where(error > 0, np.log(found.high_s / found.step_time_s), np.log(found.step_time_s / found.low_s))
        scores.append(np.abs(error) / width)
    if len(scores) < MIN_JOBS_TO_BEND:
        return 1.0
    # Every job counts the same, however many configurations it has.
    levels = np.linspace(0, 1, 101)
    of_jobs = np.concatenate([np.quantile(score, levels) for score in scores])
    return max(MIN_LEAVING_WIDTH, float(np.quantile(of_jobs, COVERAGE)))


def _part_weight(jobs: Sequence[_Job], noise: float) -> float:
    """Return the weight of measured computing, which deviates from a fitted prior by another amount than the step does."""
    squares = [float(np.nanmean(r**2)) for r in (job.residuals.compute for job in jobs) if np.isfinite(r).any()]
    return min(1.0, noise / max(MIN_NOISE, float(np.sqrt(np.mean(squares))))) if squares else PART_WEIGHT


def _some(residuals: Residuals) -> Residuals:
    """Return configurations of a job in no order, as many as the variances need."""
    mixed = np.random.default_rng(0).permutation(len(residuals.step))
    return residuals.rows(np.sort(mixed[:CONFIGURATIONS_FOR_VARIANCES]))


def _ratios(jobs: Sequence[_Job], kind: int) -> Ratios:
    """Return the mean and deviation over jobs of each pooled coefficient, relative to the job's scale."""
    involved = sum(amounts_of(job.columns).any(axis=0) for job in jobs) > 0
    pooled = np.array([term.name in POOLED_TERMS for term in TERMS]) & involved
    units = np.array([job_units(job.columns) for job in jobs])
    coefficients = np.array([job.prior.shapes[kind].coefficients for job in jobs]) * units * pooled
    typical = np.mean([amounts_of(job.columns).mean(axis=0) / unit for job, unit in zip(jobs, units, strict=True)], axis=0)
    scales = coefficients @ typical  # seconds of communication in a typical placement
    talking = scales > 0
    relative = coefficients[talking] / scales[talking, None]
    num_jobs = len(relative)
    if num_jobs == 0:  # no job had several workers
        unknown = JobScale(0.0, 1.0)
        return Ratios(np.zeros(len(TERMS), dtype=bool), np.zeros(len(TERMS)), np.ones(len(TERMS)), unknown, unknown)
    mean = relative.mean(axis=0)
    squares = ((relative - mean) ** 2).sum(axis=0) + (ASSUMED_DEVIATION * mean) ** 2
    deviation = np.sqrt(squares / num_jobs * (1 + 1 / num_jobs))
    deviation = np.maximum(deviation, MIN_DEVIATION_S / np.maximum(typical, 1e-3))
    num_bytes = units.max(axis=1)[talking]
    work_s = np.array([shortest(job.measured.work_s) for job in jobs])[talking]
    by_bytes = _scale(scales[talking] / num_bytes) if num_bytes.min() > 1 else JobScale(0.0, 1.0)
    return Ratios(pooled, mean, deviation, by_bytes, _scale(scales[talking] / work_s))


def _scale(relative: Floats) -> JobScale:
    """Return the mean and the deviation of the jobs' scales, relative to a figure of each."""
    logs, num_jobs = np.log(relative), len(relative)
    spread = ((logs - logs.mean()) ** 2).sum() + ASSUMED_DEVIATION**2
    deviation = max(MIN_SCALE_DEVIATION, float(np.sqrt(spread / num_jobs * (1 + 1 / num_jobs))))
    return JobScale(float(np.exp(logs.mean())), deviation)


@dataclass(frozen=True)
class _Moments:
    """Sums of one job's residuals over its configurations, per configuration."""

    of_features: Floats
    with_residuals: Floats
    of_residuals: float


def _bend(jobs: Sequence[_Job]) -> tuple[Bend | None, list[Residuals]]:
    """Return the error that the jobs' priors share, and the residuals that the other jobs' shared error leaves of each job.

    The shared error is None if it does not help jobs that were left out.
    """
    residuals = [job.residuals for job in jobs]
    if len(jobs) < MIN_JOBS_TO_BEND:
        return None, residuals
    rows = [(np.hstack(features(r.columns, r.by_sync)), _without_outliers(r.step)) for r in residuals]
    sizes = [group.shape[1] for group in features(residuals[0].columns, residuals[0].by_sync)]
    moments = [_Moments(z.T @ z / len(r), z.T @ r / len(r), float((r**2).mean())) for z, r in rows]
    with one_blas_thread():
        of_others = {
            count: [_weights([*moments[:out], *moments[out + 1 :]], count, sizes) for out in range(len(jobs))]
            for count in CONFIGURATIONS_OF_A_JOB
        }
        left = {count: _left(rows, weights) for count, weights in of_others.items()}
        best = min(left, key=lambda count: left[count])
        if left[best] >= 1:
            return None, residuals
        bent = [z @ weights for (z, _), weights in zip(rows, of_others[best], strict=True)]
        straight = [dataclasses.replace(r, step=r.step - b) for r, b in zip(residuals, bent, strict=True)]
        return Bend(_weights(moments, best, sizes)), straight


def _without_outliers(residuals: Floats) -> Floats:
    return np.clip(residuals - np.median(residuals), -MAX_SHARED_ERROR, MAX_SHARED_ERROR)


def _left(rows: Sequence[tuple[Floats, Floats]], weights: Sequence[Floats]) -> float:
    """Return the mean over jobs of the error that is left by the others' weights, relative to none."""
    left = [np.abs(r - z @ w).mean() / max(1e-12, np.abs(r).mean()) for (z, r), w in zip(rows, weights, strict=True)]
    return float(np.mean(left))


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
