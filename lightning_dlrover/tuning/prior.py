"""The physical prior of a step's time: the mean of several shapes, each a sum of named causes. Pure.

Every cause of time is a named term with a non-negative coefficient. Terms add up to the seconds of computing C, of
synchronising S and of loading data D, which overlap:

    step = ((C / 3 + ((2 C / 3)^g + S^g)^(1/g))^h + D^h)^(1/h)

Only the backward pass, two thirds of computing, hides synchronisation. g = 1 is no overlap and g = inf a perfect one
(Pollux, Qiao et al., OSDI 2021, section 3.2). h is 1 without loader workers and large with them, because they prepare
batches during the step. `step_time.py` adds the effects that terms cannot express, and estimates how far terms can be
trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.tuning.population import (
    MAX_LATENCY_S,
    OF_PARTS,
    SHAPES,
    TERMS,
    JobResidualGP,
    PooledPulls,
    Population,
    Residuals,
    amounts_of,
    job_units,
    shortest,
    terms_of,
)
from lightning_dlrover.tuning.samples import NORMAL_WIDTH, Columns, Floats, Measured, StepProfile, measurements, one_blas_thread

PART_WEIGHT = 0.3  # weight of a measured part relative to the whole step: parts separate terms, but only the whole is predicted
LOADER_OVERLAP = 8.0  # value of h, close to the longer of the two
ITERATIONS = 6
POOLED_ITERATIONS = 8  # the job's scale of communication needs two more to settle
ITERATIONS_OF_OVERLAP = 3  # the fit starts at the coefficients of the overlap before
ITERATIONS_NEARBY = 2  # the fit starts at those of nearly the same measurements

MIN_CONFIGURATIONS_FOR_OVERLAP = 6
LINK_FACTOR = 2.0  # a link may be so many times slower or faster than the default of `population.py`
UNKNOWN_BYTES_SHARE = 3.0  # synchronisation between nodes, relative to computing, that a job of unknown bytes may have
MIN_EVIDENCE = 0.01  # weight of a shape, relative to the best one, below which it is left out
OVERLAPS = (1.0, 1.5, 2.0, 3.0, 5.0)  # values of g: how completely computing and synchronisation overlap
EXPOSED = 1 / 3  # share of computing during which nothing is synchronised: the forward pass, half as long as the backward pass


@dataclass(frozen=True)
class Overlapped:
    """Seconds of the three parts, alone and combined."""

    compute_s: Floats
    sync_s: Floats
    data_s: Floats
    busy_s: Floats  # compute and synchronisation together
    step_s: Floats


@dataclass(frozen=True)
class Shape:
    """Fitted coefficients of `TERMS`, in their order; 0 for those that the shape leaves out."""

    coefficients: Floats
    overlap: float
    communication_s: float = 0.0  # the job's own scale of communication, see `PooledPulls`

    def overlapped(
        self, amounts: Floats, loader_overlap: Floats, sync_factor: float = 1.0, more_sync_s: float = 0.0
    ) -> Overlapped:
        """Return the parts of each step, with synchronisation so many times as long, and so many seconds longer."""
        tiny = 1e-9
        compute_s, data_s, sync_s = (np.maximum(amounts[:, of] @ self.coefficients[of], tiny) for of in OF_PARTS)
        sync_s = sync_factor * sync_s + more_sync_s
        busy_s = EXPOSED * compute_s + _norm((1 - EXPOSED) * compute_s, sync_s, np.full(len(amounts), self.overlap))
        return Overlapped(compute_s, sync_s, data_s, busy_s, _norm(busy_s, data_s, loader_overlap))


class Fit(NamedTuple):
    """A fitted shape."""

    objective: float
    kind: int  # index into `SHAPES`
    shape: Shape


def fit_all(
    tried: Sequence[tuple[int, float]],
    columns: Columns,
    measured: Measured,
    population: Population | None = None,
    starts: Sequence[Shape] = (),
) -> list[Fit]:
    """Return the fit of each shape and overlap.

    Args:
        tried: indices into `SHAPES`, and overlaps.
        columns: measured configurations, each once.
        measured: the measurements in them.
        population: properties of the hardware.
        starts: earlier fits of the same shapes to nearly the same measurements, from which a few iterations suffice.
    """
    amounts, loader_overlap = amounts_of(columns), loader_overlap_of(columns)
    found: list[Fit] = []
    for place, (kind, overlap) in enumerate(tried):
        start, iterations = (starts[place], ITERATIONS_NEARBY) if starts else (None, ITERATIONS)
        pooled = None
        if population is not None:
            pooled = PooledPulls(population, kind, job_units(columns), amounts, measured)
            if start is None:
                iterations = POOLED_ITERATIONS
                if found and found[-1].kind == kind:  # the same terms with another overlap
                    start, iterations = found[-1].shape, ITERATIONS_OF_OVERLAP
        problem = _Problem.of(amounts, loader_overlap, measured, terms_of(kind), pooled)
        objective, shape = _fit_shape(problem, overlap, pooled, start, iterations)
        found.append(Fit(objective, kind, shape))
    return found


def loader_overlap_of(columns: Columns) -> Floats:
    return np.where(columns.loader_workers > 0, LOADER_OVERLAP, 1.0)


def _norm(a: Floats, b: Floats, power: Floats) -> Floats:
    """(a^p + b^p)^(1/p), without overflow."""
    most = np.maximum(a, b)
    total: Floats = most * (1 + (np.minimum(a, b) / most) ** power) ** (1 / power)
    return total


@dataclass(frozen=True)
class _Problem:
    """Least squares in scaled coefficients, each about the share of the step that its term takes."""

    amounts: Floats
    loader_overlap: Floats
    measured: Measured
    used: NDArray[np.bool_]  # terms that some measurement involves
    unmeasured: NDArray[np.bool_]  # the other terms of the shape
    lengths: Floats  # factors of the coefficients of all terms
    unit: Floats  # amounts of the used terms, scaled
    defaults: Floats  # coefficients in the absence of measurements
    fixed_rows: Floats  # rows of measured parts, and pulls to the defaults
    fixed_targets: Floats

    @classmethod
    def of(
        cls, amounts: Floats, loader_overlap: Floats, measured: Measured, terms: NDArray[np.bool_], pooled: PooledPulls | None
    ) -> _Problem:
        # Columns of equal length: a coefficient then is about the share of the step time that its term takes.
        lengths = np.sqrt(((amounts / measured.step_s[:, None]) ** 2).mean(axis=0))
        defaults = np.array([term.default for term in TERMS]) * terms
        unmeasured, used = terms & (lengths == 0), terms & (lengths > 0)
        pull = _doubts(lengths)
        unit = amounts[:, used] / lengths[used]
        target = defaults[used] * lengths[used]
        # A default beyond the measured steps is wrong. It must pull no harder for being very wrong.
        pull[used] /= np.maximum(1.0, target)
        if pooled is not None:
            pull = pooled.free(pull)
        part_rows, part_targets = _rows_of_parts(unit, used, measured, loader_overlap)
        fixed_rows = np.vstack([part_rows, np.diag(pull[used])])
        fixed_targets = np.concatenate([part_targets, pull[used] * target])
        return cls(*(amounts, loader_overlap, measured, used, unmeasured, lengths, unit, defaults), fixed_rows, fixed_targets)

    def solved(self, rows: Floats, goal: Floats, pooled_rows: Floats | None, pooled_targets: Floats | None) -> Floats:
        """Return the non-negative unknowns with the smallest squared error: coefficients, and the job's scale if it is one."""
        from scipy.optimize import nnls  # import takes 0.3 s, which a reader of profiles need not pay

        weight = self.measured.weight
        stacked = np.vstack([rows * weight[:, None], self.fixed_rows])
        goals = np.concatenate([goal * weight, self.fixed_targets])
        if pooled_rows is not None and pooled_targets is not None:
            stacked = np.vstack([np.column_stack([stacked, np.zeros(len(stacked))]), pooled_rows])
            goals = np.concatenate([goals, pooled_targets])
        # The triangle holds the same information in 20 rows instead of thousands.
        triangle: Any = np.linalg.qr(np.column_stack([stacked, goals]), mode="r")
        solution: Floats = nnls(triangle[:, :-1], triangle[:, -1])[0]
        return solution

    def linearized(self, o: Overlapped, overlap: float) -> tuple[Floats, Floats]:
        """Return the rows and targets of the next Gauss-Newton step."""
        slopes = zip(OF_PARTS, slopes_of(o, overlap, self.loader_overlap), strict=True)
        compute, data, sync = (of[self.used] * slope[:, None] for of, slope in slopes)
        return self.unit * (compute + data + sync) / o.step_s[:, None], 1 + np.log(self.measured.step_s / o.step_s)

    def objective(self, o: Overlapped, coefficients: Floats) -> float:
        error = np.log(self.measured.step_s / o.step_s)
        fixed_error = self.fixed_rows @ (coefficients[self.used] * self.lengths[self.used]) - self.fixed_targets
        return float(((self.measured.weight * error) ** 2).sum() + (fixed_error**2).sum())


def _fit_shape(
    problem: _Problem, overlap: float, pooled: PooledPulls | None, start: Shape | None, iterations: int
) -> tuple[float, Shape]:
    """Return the fit's objective and the shape."""
    used, lengths, measured = problem.used, problem.lengths, problem.measured
    coefficients = problem.defaults.copy()  # defaults remain where no measurement involves the term
    # The first iteration treats the step as a sum.
    rows, goal = problem.unit / measured.step_s[:, None], np.ones(len(measured.step_s))
    if start is not None:
        coefficients[used] = start.coefficients[used]
        o = Shape(coefficients, overlap).overlapped(problem.amounts, problem.loader_overlap)
        rows, goal = problem.linearized(o, overlap)
        if pooled is not None:
            pooled.scale = start.communication_s
    best: tuple[float, Shape] | None = None
    for iteration in range(iterations):
        pooled_rows, pooled_targets = (None, None) if pooled is None else pooled.rows(used, lengths)
        solution = problem.solved(rows, goal, pooled_rows, pooled_targets)
        found = solution[: problem.unit.shape[1]] / lengths[used]
        coefficients[used] = found if iteration == 0 else (coefficients[used] + found) / 2
        shape = Shape(coefficients.copy(), overlap)
        o = shape.overlapped(problem.amounts, problem.loader_overlap)
        objective = problem.objective(o, coefficients)
        if pooled is not None and pooled_rows is not None and pooled_targets is not None:
            change = solution[-1] if iteration == 0 else (1 + solution[-1]) / 2
            objective += pooled.error(pooled_rows, pooled_targets, coefficients[used] * lengths[used], change)
            pooled.rescale(change)
            shape = Shape(pooled.filled(coefficients, problem.unmeasured), overlap, pooled.scale)
            if start is None and iteration < ITERATIONS // 2:
                objective = np.inf  # another scale makes another objective
        if best is None or objective < best[0]:
            best = objective, shape
        rows, goal = problem.linearized(o, overlap)
    assert best is not None
    return best


def _doubts(scale: Floats) -> Floats:
    """Return how strongly each scaled coefficient is pulled to its default."""
    pull = np.array([1e-3 + term.doubt for term in TERMS])
    latency = [term.name for term in TERMS].index("latency_of_workers")
    pull[latency] = 1 / (MAX_LATENCY_S * scale[latency]) if scale[latency] > 0 else 0.0
    return pull


def slopes_of(o: Overlapped, overlap: float, loader_overlap: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the derivatives of the step by the seconds of each part."""
    by_busy = (o.busy_s / o.step_s) ** (loader_overlap - 1)
    hidden_s = (1 - EXPOSED) * o.compute_s
    both_s = o.busy_s - EXPOSED * o.compute_s
    by_compute = EXPOSED + (1 - EXPOSED) * (hidden_s / both_s) ** (overlap - 1)
    by_data = (o.data_s / o.step_s) ** (loader_overlap - 1)
    return by_busy * by_compute, by_data, by_busy * (o.sync_s / both_s) ** (overlap - 1)


def _rows_of_parts(unit: Floats, used: NDArray[np.bool_], measured: Measured, loader_overlap: Floats) -> tuple[Floats, Floats]:
    """Return rows that the measured seconds of compute and of data should fulfil, in relative error, and their targets."""
    weight = PART_WEIGHT * measured.weight
    has_compute = measured.compute_s > 1e-3 * measured.step_s  # false where it is nan
    seconds = np.where(has_compute, measured.compute_s, 1.0)
    compute = unit * OF_PARTS[0][used] * (weight / seconds)[:, None]
    # A step waits for loader workers only where they need longer than the step, so the whole step then belongs to them.
    waits = (measured.data_s > 0.05 * measured.step_s) | (loader_overlap == 1)
    has_data = waits & np.isfinite(measured.data_s)
    load_s = np.where(loader_overlap == 1, measured.data_s, measured.step_s)
    data = unit * OF_PARTS[1][used] * (weight / measured.step_s)[:, None]
    rows = np.vstack([compute[has_compute], data[has_data]])
    targets = np.concatenate([weight[has_compute], (weight * load_s / measured.step_s)[has_data]])
    return rows, targets


@dataclass(frozen=True)
class PriorPrediction:
    """Predictions for some configurations, with the standard deviations of the shapes about their means."""

    log_s: Floats  # log of seconds; of shape ``(num_configurations,)``, like its spread
    spread: Floats
    shares: Floats  # shares of the step as `PARTS`, ``(num_configurations, 3)``; overlapping time counts as compute
    shares_spread: Floats
    faster: Floats  # log of the step time over that with the fastest plausible network; 0 where the network was measured
    slower: Floats  # log of the step time with the slowest plausible network over it, likewise


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
    """Growth of the step in percent with one percent of a part, and the log of computing, by which it is measured."""

    log_compute_s: Floats
    by_compute: Floats
    by_sync: Floats


@dataclass(frozen=True)
class PhysicalPrior:
    """Step time by `TERMS`: the mean of the logs of `SHAPES`. Create it with `fit`.

    Example:
        >>> from lightning_dlrover.tuning import Columns, configuration_of
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
        return cls.fit(*measurements(samples, node_cores), population=population)

    @classmethod
    def fit(
        cls, columns: Columns, measured: Measured, like: PhysicalPrior | None = None, population: Population | None = None
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
        if like:
            tried = [(kind, shape.overlap) for kind, shape in zip(like.kinds, like.shapes, strict=True)]
        else:
            overlaps = OVERLAPS if len(columns) >= MIN_CONFIGURATIONS_FOR_OVERLAP else OVERLAPS[:1]
            tried = [(kind, overlap) for kind in range(len(SHAPES)) for overlap in overlaps]
        with one_blas_thread():
            if population is None:
                prior = cls._best_of_each(fit_all(tried, columns, measured))
            else:
                starts = like.shapes if like else ()
                prior = cls._by_evidence(fit_all(tried, columns, measured, population, starts), population.noise)
        own = None
        if population is not None and population.residual_gp is not None:
            own = JobResidualGP.of(population.residual_gp, prior.residuals(columns, measured))
        return replace(prior, own=own, network=network)

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
        return replace(predicted, faster=faster, slower=slower)

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
