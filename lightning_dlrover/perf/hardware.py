"""Estimate the common properties of jobs on the same hardware: partial pooling over jobs.

Each job's prior is fitted alone. The coefficients of communication, relative to the job's own scale, then have a mean and a
deviation between jobs (Gelman, Hill, Data Analysis Using Regression and Multilevel/Hierarchical Models, 2007, chapter 12). A
new job is pulled to the means as far as jobs agree. Only windows of other jobs are used, never their names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.perf.columns import Columns, Floats, windows_by_configuration
from lightning_dlrover.perf.measured import Measured
from lightning_dlrover.perf.model import COVERAGE, StepTimeModel
from lightning_dlrover.perf.population import JobScale, Population, Ratios, shortest
from lightning_dlrover.perf.prior import PhysicalPrior
from lightning_dlrover.perf.residual_gp import ResidualGP, Residuals, variances_of
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.terms import SHAPES, TERMS, amounts_of, job_units
from lightning_dlrover.perf.threads import one_blas_thread

__all__ = ["population_of"]

MIN_CONFIGURATIONS = 6  # fewer do not determine the terms of a job
POOLED_TERMS = frozenset({"ring_inside_node", "ring_between_nodes", "network", "stages", "latency_of_workers", "pair_of_nodes"})

ASSUMED_DEVIATION = 0.3
"""Relative deviation of one imagined job, which keeps two jobs that agree by chance from being trusted blindly."""

MIN_DEVIATION_S = 0.02  # minimum deviation of a term between jobs, as a share of their communication
MIN_SCALE_DEVIATION = 0.1
MIN_NOISE = 0.02

CONFIGURATIONS_FOR_VARIANCES = 100  # configurations of each job that show how its errors resemble each other
MAX_JOBS_LEAVING = 8  # newest jobs that show how wide intervals off the node have to be
MIN_JOBS_COMPARED = 3  # an error of two jobs may be a coincidence
MIN_LEAVING_WIDTH = 0.3


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

    Example:
        >>> population_of([windows]) is None  # two configurations are too few
        True
    """
    known, used = [], []
    for windows in jobs:
        groups = windows_by_configuration(windows, node_cores)
        if len(groups) >= MIN_CONFIGURATIONS:
            columns, measured = Columns.of([*groups]), Measured.of([*groups.values()], [1.0] * len(groups))
            used.append(windows)
            known.append(_Job(columns, measured, PhysicalPrior.fit(columns, measured)))
    if not known:
        return None
    noise = max(MIN_NOISE, float(np.sqrt(np.mean([(job.residuals.step**2).mean() for job in known]))))
    ratios = tuple(_ratios(known, kind) for kind in range(len(SHAPES)))
    gp = None
    if len(known) >= MIN_JOBS_COMPARED:
        with one_blas_thread():
            gp = ResidualGP(variances_of([_some(job.residuals) for job in known]))
    return Population(ratios, noise, gp, _leaving_width(used, known, noise, node_cores))


def _leaving_width(jobs: Sequence[Sequence[StepProfile]], known: Sequence[_Job], noise: float, node_cores: float) -> float:
    """Return the width that intervals of jobs leaving their node need, relative to the one that the model computes.

    Each job is predicted on several nodes from its windows on one node and the ratios of the other jobs. The result is
    the quantile of the errors relative to the intervals (Lei et al., Journal of the American Statistical Association
    113(523), 2018, section 5.2); 1 where fewer than three jobs show it.
    """
    scores = []
    for out, windows in enumerate(jobs[:MAX_JOBS_LEAVING]):
        inside, outside = ([w for w in windows if (w.num_nodes > 1) == several] for several in (False, True))
        if len(windows_by_configuration(inside, node_cores)) < MIN_CONFIGURATIONS or not outside:
            continue
        others = [*known[:out], *known[out + 1 :]]
        population = Population(tuple(_ratios(others, kind) for kind in range(len(SHAPES))), noise)
        model = StepTimeModel.fit(inside, node_cores=node_cores, population=population)
        groups = windows_by_configuration(outside, node_cores)
        found = model.predict_columns(Columns.of([*groups]))
        error = np.log(Measured.of([*groups.values()], [1.0] * len(groups)).step_s / found.step_time_s)
        width = np.where(error > 0, np.log(found.high_s / found.step_time_s), np.log(found.step_time_s / found.low_s))
        scores.append(np.abs(error) / width)
    if len(scores) < MIN_JOBS_COMPARED:
        return 1.0
    # Every job counts the same, however many configurations it has.
    levels = np.linspace(0, 1, 101)
    of_jobs = np.concatenate([np.quantile(score, levels) for score in scores])
    return max(MIN_LEAVING_WIDTH, float(np.quantile(of_jobs, COVERAGE)))


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
