"""The shape of a step's time by physical causes.

Every cause of time is a named term with a non-negative coefficient. Terms add up to the seconds of computing C, of
synchronising S and of loading data D, which overlap:

    step = (((C^g + S^g)^(1/g))^h + D^h)^(1/h)

g = 1 is no overlap and g = inf a perfect one (Pollux, Qiao et al., OSDI 2021, section 3.2); h is 1 without loader workers
and large with them, because they prepare batches meanwhile. `model.py` adds the effects that terms cannot express, and
estimates how far terms can be trusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Columns, Configuration, Floats, configuration_of, windows_by_configuration
from lightning_dlrover.perf.errors import OwnErrors, Residuals
from lightning_dlrover.perf.measured import Measured
from lightning_dlrover.perf.population import Bend, PooledPulls, Population
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.threads import one_blas_thread

__all__ = [
    "PARTS",
    "SHAPES",
    "TERMS",
    "Configuration",
    "Elasticities",
    "Overlap",
    "PhysicalPrior",
    "PriorPrediction",
    "Term",
    "amounts_of",
    "configuration_of",
    "job_units",
]

Part = Literal["compute", "data", "communication"]
PARTS: tuple[Part, ...] = ("compute", "data", "communication")

INTER_NODE_BYTES_PER_S = 1e9  # 10 Gbit/s Ethernet less its protocols; assumed until a link was measured
INTRA_NODE_BYTES_PER_S = 2e9  # gloo through one machine's loopback
LATENCY_S = 2e-4  # latency of one more participant in a collective over TCP
MAX_LATENCY_S = 1e-2  # upper bound on a hop's latency by order of magnitude, however much a model sends

PART_WEIGHT = 0.3  # weight of a measured part relative to the whole step: parts separate terms, but only the whole is predicted
MIN_CONFIGURATIONS_FOR_OVERLAP = 6
LOADER_OVERLAP = 8.0  # value of h, close to the longer of the two
ITERATIONS = 6
POOLED_ITERATIONS = 8  # the job's scale of communication needs two more to settle
MIN_EVIDENCE = 0.01  # weight of a shape, relative to the best one, below which it is left out


class Overlap(NamedTuple):
    """How computing and synchronisation overlap."""

    power: float  # g
    exposed: float = 0.0  # share of computing beside which nothing is synchronised


OVERLAPS = tuple(Overlap(power) for power in (1.0, 1.5, 2.0, 3.0, 5.0))
BACKWARD_OVERLAPS = tuple(Overlap(overlap.power, 1 / 3) for overlap in OVERLAPS)
"""Overlaps with the backward pass alone, which takes twice as long as the forward pass."""


@dataclass(frozen=True)
class Term:
    """One cause of time: seconds = coefficient x `amount`; the coefficient is fitted and never negative."""

    name: str
    part: Part  # part of the step that it explains
    source: str
    amount: Callable[[Columns], Floats]
    doubt: float  # pull to the default: where several terms explain the samples, the one with the smallest doubt takes the time
    default: float = 0.0  # coefficient in the absence of samples


def _flops(c: Columns) -> Floats:
    """Return the FLOPs per step of one worker; samples if FLOPs are unknown, which changes only the coefficient's unit."""
    return c.local_batch * np.maximum(c.dense_flops, 1.0)


def _serially(c: Columns) -> Floats:
    return np.minimum(1.0, c.core_share)


def _ring(c: Columns) -> Floats:
    return 2 * (c.num_workers - 1) / c.num_workers


def _exchanged_rows(c: Columns) -> Floats:
    return c.local_batch * c.lookups_per_sample * (c.num_workers - 1) / c.num_workers


def _crowding(c: Columns) -> Floats:
    """Return by how much the threads of a node outnumber its cores; 0 where that is unknown."""
    known = c.node_cores > 0
    return np.where(known, np.maximum(0.0, c.fullest * c.threads / np.where(known, c.node_cores, 1.0) - 1), 0.0)


def _without_a_core(c: Columns) -> Floats:
    """Return the share of loading without a spare core during training, divided by the cores that do it then."""
    spare = np.maximum(0.0, c.core_share - c.threads)
    return np.where((c.loader_workers > 0) & (c.node_cores > 0), np.maximum(0.0, 1 - spare) / c.core_share, 0.0)


def _several(c: Columns) -> Floats:
    return (c.num_nodes > 1).astype(np.float64)


TERMS: tuple[Term, ...] = (
    Term(
        "parallel_compute",
        "compute",
        "data parallelism splits a global batch, and operators split theirs over threads; workers of one "
        "node share its cores, so three workers on two cores are not three times as fast",
        lambda c: _flops(c) / np.minimum(c.threads, c.core_share),
        doubt=0.0,
    ),
    Term(
        "serial_compute",
        "compute",
        "the share of a sample's work that more threads do not speed up (Amdahl, AFIPS 1967)",
        lambda c: _flops(c) / _serially(c),
        doubt=0.1,
    ),
    Term(
        "step_overhead",
        "compute",
        "interpreter, kernel launches and optimizer: once a step, whatever the batch, which is also what a batch costs "
        "that does not fill the device (roofline: Williams et al., CACM 52(4), 2009)",
        lambda c: 1.0 / _serially(c),
        doubt=0.2,
    ),
    Term(
        "lookups",
        "compute",
        "rows of the tables that are read and updated, bound by memory (DLRM, Naumov et al., arXiv 1906.00091)",
        lambda c: c.local_batch * c.lookups_per_sample / _serially(c),
        doubt=0.3,
    ),
    Term(
        "core_contention",
        "compute",
        "threads of a node beyond its cores switch, and wait for each other at every barrier",
        lambda c: _flops(c) * _crowding(c),
        doubt=0.2,
    ),
    Term(
        "loader_contention",
        "compute",
        "loader workers take core time from training where no core is left for them",
        lambda c: c.local_batch * _without_a_core(c),
        doubt=0.3,
    ),
    Term(
        "neighbours",
        "compute",
        "workers of one node share what the figures do not show: memory, PCIe, the power budget",
        lambda c: c.fullest - 1,
        doubt=0.2,
    ),
    Term(
        "neighbours_per_sample",
        "compute",
        "as before, for what grows with the batch",
        lambda c: (c.fullest - 1) * _flops(c),
        doubt=0.2,
    ),
    Term(
        "data_loading",
        "data",
        "loader workers prepare the samples of a batch side by side, as many as there are cores; without any, the worker "
        "does it itself",
        lambda c: c.local_batch / np.minimum(np.maximum(1.0, c.loader_workers), c.core_share),
        doubt=0.1,
    ),
    Term(
        "data_fetching",
        "data",
        "waiting for storage or a network takes no core: as many samples come at a time as there are loader workers",
        lambda c: c.local_batch / np.maximum(1.0, c.loader_workers),
        doubt=0.2,
    ),
    Term(
        "ring_inside_node",
        "communication",
        "ring all-reduce: 2 (W - 1) / W of the bytes on every link (Patarasuk, Yuan, JPDC 69(2), 2009)",
        lambda c: _ring(c) * np.maximum(c.dense_bytes, 1.0) * (1 - _several(c)),
        default=1 / INTRA_NODE_BYTES_PER_S,
        doubt=0.2,
    ),
    Term(
        "ring_between_nodes",
        "communication",
        "the same ring, but its slowest link is the network; nothing where bytes are unknown, for `network` says as much then",
        lambda c: _ring(c) * c.dense_bytes * _several(c),
        default=1 / INTER_NODE_BYTES_PER_S,
        doubt=0.2,
    ),
    Term(
        "exchange_inside_node",
        "communication",
        "all-to-all of looked-up rows: a worker sends (W - 1) / W of them (DLRM, Naumov et al., arXiv 1906.00091)",
        lambda c: _exchanged_rows(c) * (1 - _several(c)),
        doubt=0.3,
    ),
    Term(
        "exchange_between_nodes",
        "communication",
        "the same exchange over the network",
        lambda c: _exchanged_rows(c) * _several(c),
        doubt=0.3,
    ),
    Term(
        "network",
        "communication",
        "what it costs to leave a node at all (Pollux: alpha of several nodes)",
        _several,
        doubt=0.06,
    ),
    Term(
        "latency_of_workers",
        "communication",
        "a ring has W - 1 hops each way (Pollux: beta); a hop takes at most milliseconds, so steps of seconds hardly feel it",
        lambda c: c.num_workers - 1,
        default=LATENCY_S,
        doubt=0.0,  # see MAX_LATENCY_S
    ),
    Term(
        "stages",
        "communication",
        "a tree has log2 W stages (Sanders et al., Parallel Computing 35(12), 2009), and the slowest of W workers is later "
        "than the average by about log W (Dean, Barroso, CACM 56(2), 2013)",
        lambda c: np.log2(c.num_workers),
        default=LATENCY_S,
        doubt=0.06,
    ),
    Term(
        "pair_of_nodes",
        "communication",
        "two nodes have one path between them, three and more have several: measured on clusters, doubted by two of the shapes",
        lambda c: (c.num_nodes == 2).astype(np.float64),
        doubt=0.2,
    ),
)
"""All terms of the prior."""

SHAPES: tuple[frozenset[str], ...] = (
    frozenset({"stages", "pair_of_nodes"}),
    frozenset({"latency_of_workers"}),
    frozenset({"latency_of_workers", "stages", "pair_of_nodes"}),
)
"""Terms with combinations that differ far from the samples and hardly near them: how synchronisation grows with workers.

Samples of a small world cannot distinguish them. The prior is the mean of the logs of all shapes (model averaging, Hoeting et
al., Statistical Science 14(4), 1999), and their spread is part of the interval.
"""


@dataclass(frozen=True)
class PriorPrediction:
    """Predictions for some configurations, with the standard deviations of the shapes about their means."""

    log_s: Floats  # log of seconds; of shape ``(num_configurations,)``, like its spread
    spread: Floats
    shares: Floats  # shares of the step as `PARTS`, ``(num_configurations, 3)``; overlapping time counts as compute
    shares_spread: Floats


@dataclass(frozen=True)
class Elasticities:
    """Growth of the step in percent with one percent of a part, and the part from which it is reckoned."""

    log_compute_s: Floats
    by_compute: Floats
    by_sync: Floats


@dataclass(frozen=True)
class _Overlapped:
    """Seconds of the three parts, alone and combined."""

    compute_s: Floats
    sync_s: Floats
    data_s: Floats
    busy_s: Floats  # compute and synchronisation together
    step_s: Floats


@dataclass(frozen=True)
class _Shape:
    """Fitted coefficients of `TERMS`, in their order; 0 for those that the shape leaves out."""

    coefficients: Floats
    overlap: Overlap

    def overlapped(self, amounts: Floats, loader_overlap: Floats) -> _Overlapped:
        tiny = 1e-9
        compute_s, data_s, sync_s = (np.maximum(amounts[:, of] @ self.coefficients[of], tiny) for of in _OF_PARTS)
        exposed_s = self.overlap.exposed * compute_s
        hidden_s = (1 - self.overlap.exposed) * compute_s
        busy_s = exposed_s + _norm(hidden_s, sync_s, np.full(len(amounts), self.overlap.power))
        return _Overlapped(compute_s, sync_s, data_s, busy_s, _norm(busy_s, data_s, loader_overlap))


@dataclass(frozen=True)
class PhysicalPrior:
    """Step time by `TERMS`: the mean of the logs of `SHAPES`. Create it with `fit`."""

    shapes: tuple[_Shape, ...]
    weights: Floats  # weights of the shapes; they add up to 1
    kinds: tuple[int, ...]  # index into `SHAPES` of each shape
    bend: Bend | None = None  # correction that the jobs of a population share
    own: OwnErrors | None = None  # further deviations of this job

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
            like: take overlaps from this prior instead of trying all.
            population: properties of the hardware. All overlaps and shapes then count by their evidence.
        """
        if like is not None:
            tried = [(kind, shape.overlap) for kind, shape in zip(like.kinds, like.shapes, strict=True)]
        else:
            tried = _tried(len(columns), OVERLAPS if population is None else BACKWARD_OVERLAPS)
        with one_blas_thread():
            if population is None:
                return cls._best_of_each(tried, _fit_all(tried, columns, measured))
            prior = cls._by_evidence(tried, _fit_all(tried, columns, measured, population), population)
            if population.bend is not None:
                # The bend depends on the elasticity by communication, which takes a fit without it.
                bent = population.bend.at(columns, prior.elasticities(columns).by_sync)
                straight = measured.scaled(np.exp(-bent))
                tried = [(kind, shape.overlap) for kind, shape in zip(prior.kinds, prior.shapes, strict=True)]
                prior = cls._by_evidence(tried, _fit_all(tried, columns, straight, population), population)
                prior = dataclasses.replace(prior, bend=population.bend)
            own = OwnErrors.of(population.errors, prior.residuals(columns, measured)) if population.errors else None
            return dataclasses.replace(prior, own=own)

    @classmethod
    def of_hardware(cls, columns: Columns, measured: Measured) -> PhysicalPrior:
        """Fit the prior to one of several jobs that are compared."""
        tried = _tried(len(columns), BACKWARD_OVERLAPS)
        with one_blas_thread():
            return cls._best_of_each(tried, _fit_all(tried, columns, measured))

    @classmethod
    def _best_of_each(cls, tried: Sequence[tuple[int, Overlap]], fits: Sequence[tuple[float, _Shape]]) -> PhysicalPrior:
        """Return the shapes, each with its best overlap."""
        kinds = sorted({kind for kind, _ in tried})
        best = [min((f for (k, _), f in zip(tried, fits, strict=True) if k == kind), key=lambda f: f[0])[1] for kind in kinds]
        return cls(tuple(best), np.full(len(kinds), 1 / len(kinds)), tuple(kinds))

    @classmethod
    def _by_evidence(
        cls, tried: Sequence[tuple[int, Overlap]], fits: Sequence[tuple[float, _Shape]], population: Population
    ) -> PhysicalPrior:
        """Return all fits with their posterior weights, as the population's noise makes them (Hoeting et al., 1999)."""
        costs = np.array([cost for cost, _ in fits]) / population.noise**2
        weights = np.exp((costs.min() - costs) / 2)
        kept = np.flatnonzero(weights >= MIN_EVIDENCE).tolist()
        shapes = tuple(fits[i][1] for i in kept)
        return cls(shapes, weights[kept] / weights[kept].sum(), tuple(tried[i][0] for i in kept))

    def predict(self, columns: Columns) -> PriorPrediction:
        """Return the means over the shapes, of the log of step time and of the shares."""
        amounts, loader_overlap = amounts_of(columns), _loader_overlap(columns)
        with one_blas_thread():
            found = [shape.overlapped(amounts, loader_overlap) for shape in self.shapes]
        logs = np.array([np.log(o.step_s) for o in found])
        parts_s = np.array([[o.compute_s, o.step_s - o.busy_s, o.busy_s - o.compute_s] for o in found])
        all_shares = parts_s.transpose(0, 2, 1) / np.array([o.step_s for o in found])[:, :, None]
        (log_s, spread), (shares, shares_spread) = (_mean_and_spread(values, self.weights) for values in (logs, all_shares))
        if self.bend is not None or self.own is not None:
            elastic = self.elasticities(columns)
            if self.bend is not None:
                log_s = log_s + self.bend.at(columns, elastic.by_sync)
            if self.own is not None:
                log_s = log_s + self.own.at(columns, elastic.by_compute, elastic.by_sync)
        return PriorPrediction(log_s, spread, shares, shares_spread)

    def elasticities(self, columns: Columns) -> Elasticities:
        """Return the means over the shapes."""
        amounts, loader_overlap = amounts_of(columns), _loader_overlap(columns)
        found = []
        for shape in self.shapes:
            o = shape.overlapped(amounts, loader_overlap)
            by_compute, _, by_sync = _slopes(o, shape.overlap, loader_overlap)
            found.append([np.log(o.compute_s), by_compute * o.compute_s / o.step_s, by_sync * o.sync_s / o.step_s])
        return Elasticities(*np.tensordot(self.weights, np.array(found), axes=1))

    def residuals(self, columns: Columns, measured: Measured) -> Residuals:
        """Return how measurements deviate from the predictions."""
        elastic = self.elasticities(columns)
        known = measured.compute_s > 1e-3 * measured.step_s  # false where it is nan
        compute = np.where(known, np.log(np.where(known, measured.compute_s, 1.0)) - elastic.log_compute_s, np.nan)
        step = np.log(measured.step_s) - self.predict(columns).log_s
        return Residuals(columns, elastic.by_compute, elastic.by_sync, step, compute, measured.weight)

    def step_time_s(self, columns: Columns) -> Floats:
        seconds: Floats = np.exp(self.predict(columns).log_s)
        return seconds


BYTE_TERMS = ("ring_inside_node", "ring_between_nodes")
"""Terms with coefficients per byte."""

_GROWTH = frozenset(name for shape in SHAPES for name in shape)
_OF_PARTS: tuple[NDArray[np.bool_], ...] = tuple(np.array([term.part == part for term in TERMS]) for part in PARTS)


def amounts_of(columns: Columns) -> Floats:
    return np.stack([term.amount(columns) for term in TERMS], axis=1)


def _loader_overlap(columns: Columns) -> Floats:
    return np.where(columns.loader_workers > 0, LOADER_OVERLAP, 1.0)


def _norm(a: Floats, b: Floats, power: Floats) -> Floats:
    """(a^p + b^p)^(1/p), without overflow."""
    most = np.maximum(a, b)
    total: Floats = most * (1 + (np.minimum(a, b) / most) ** power) ** (1 / power)
    return total


def _mean_and_spread(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return the mean and the standard deviation over the first axis."""
    if np.ptp(weights) == 0:
        return values.mean(axis=0), values.std(axis=0)
    mean = np.tensordot(weights, values, axes=1)
    return mean, np.sqrt(np.tensordot(weights, (values - mean) ** 2, axes=1))


def _tried(num_configurations: int, overlaps: Sequence[Overlap]) -> list[tuple[int, Overlap]]:
    """Return the shapes and overlaps to fit."""
    kept = overlaps if num_configurations >= MIN_CONFIGURATIONS_FOR_OVERLAP else overlaps[:1]
    return [(kind, overlap) for kind in range(len(SHAPES)) for overlap in kept]


def _fit_all(
    tried: Sequence[tuple[int, Overlap]], columns: Columns, measured: Measured, population: Population | None = None
) -> list[tuple[float, _Shape]]:
    """Return the objective and the fit of each shape and overlap."""
    amounts, loader_overlap = amounts_of(columns), _loader_overlap(columns)
    found = []
    for kind, overlap in tried:
        used = np.array([term.name in SHAPES[kind] or term.name not in _GROWTH for term in TERMS])
        pooled = None
        if population is not None:
            pooled = PooledPulls.of(population, kind, job_units(columns), amounts, measured.step_s)
        found.append(_fit_shape(amounts, loader_overlap, measured, used, overlap, pooled))
    return found


def job_units(columns: Columns) -> Floats:
    """Return the factor of each term that turns its coefficient into seconds of the job's gradient bytes."""
    num_bytes = float(np.maximum(columns.dense_bytes, 1.0).mean())
    return np.array([num_bytes if term.name in BYTE_TERMS else 1.0 for term in TERMS])


def _fit_shape(
    amounts: Floats,
    loader_overlap: Floats,
    measured: Measured,
    used: NDArray[np.bool_],
    overlap: Overlap,
    pooled: PooledPulls | None = None,
) -> tuple[float, _Shape]:
    """Return the fit's objective and the shape."""
    from scipy.optimize import nnls  # import takes 0.3 s, which a reader of profiles need not pay

    step_s, weight = measured.step_s, measured.weight
    # Columns of equal length: a coefficient then is about the share of the step time that its term takes.
    scale = np.sqrt(((amounts / step_s[:, None]) ** 2).mean(axis=0))
    defaults = np.array([term.default for term in TERMS]) * used
    unmeasured = used & (scale == 0)
    used = used & (scale > 0)
    pull = _doubts(scale)
    unit = amounts[:, used] / scale[used]
    target = defaults[used] * scale[used]
    # A default beyond the measured steps is wrong. It must pull no harder for being very wrong.
    pull[used] /= np.maximum(1.0, target)
    if pooled is not None:
        pull = pooled.free(pull)

    part_weight = PART_WEIGHT if pooled is None else pooled.part_weight
    part_rows, part_targets = _rows_of_parts(unit, used, measured, loader_overlap, part_weight)
    fixed_rows = np.vstack([part_rows, np.diag(pull[used])])
    fixed_targets = np.concatenate([part_targets, pull[used] * target])
    best: tuple[float, _Shape] | None = None
    rows = unit / step_s[:, None]  # rows of the first iteration, which treats the step as a sum
    goal = np.ones(len(step_s))
    coefficients = defaults  # defaults remain where no measurement involves the term
    for iteration in range(ITERATIONS if pooled is None else POOLED_ITERATIONS):
        stacked = np.vstack([rows * weight[:, None], fixed_rows])
        goals = np.concatenate([goal * weight, fixed_targets])
        if pooled is not None:
            pooled_rows, pooled_targets = pooled.rows(used, scale)
            stacked = np.vstack([np.pad(stacked, ((0, 0), (0, 1))), pooled_rows])
            goals = np.concatenate([goals, pooled_targets])
        # The triangle holds the same information in 20 rows instead of thousands.
        triangle: Any = np.linalg.qr(np.column_stack([stacked, goals]), mode="r")
        solution = nnls(triangle[:, :-1], triangle[:, -1])[0]
        found = solution[: unit.shape[1]] / scale[used]
        coefficients[used] = found if iteration == 0 else (coefficients[used] + found) / 2
        shape = _Shape(coefficients.copy(), overlap)
        o = shape.overlapped(amounts, loader_overlap)
        error = np.log(step_s / o.step_s)
        fixed_error = fixed_rows @ (coefficients[used] * scale[used]) - fixed_targets
        objective = float(((weight * error) ** 2).sum() + (fixed_error**2).sum())
        if pooled is not None:
            change = solution[-1] if iteration == 0 else (1 + solution[-1]) / 2
            objective += pooled.error(pooled_rows, pooled_targets, coefficients[used] * scale[used], change)
            pooled.rescale(change)
            shape = _Shape(pooled.filled(coefficients, unmeasured), overlap)
            if iteration < ITERATIONS // 2:
                objective = np.inf  # another scale makes another objective
        if best is None or objective < best[0]:
            best = objective, shape
        gradient = _gradient(o, used, overlap, loader_overlap)
        rows, goal = unit * gradient / o.step_s[:, None], 1 + error
    assert best is not None
    return best


def _doubts(scale: Floats) -> Floats:
    """Return how strongly each scaled coefficient is pulled to its default."""
    pull = np.array([1e-3 + term.doubt for term in TERMS])
    latency = [term.name for term in TERMS].index("latency_of_workers")
    pull[latency] = 1 / (MAX_LATENCY_S * scale[latency]) if scale[latency] > 0 else 0.0
    return pull


def _slopes(o: _Overlapped, overlap: Overlap, loader_overlap: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the derivatives of the step by the seconds of each part."""
    by_busy = (o.busy_s / o.step_s) ** (loader_overlap - 1)
    hidden_s = (1 - overlap.exposed) * o.compute_s
    both_s = o.busy_s - overlap.exposed * o.compute_s
    by_compute = overlap.exposed + (1 - overlap.exposed) * (hidden_s / both_s) ** (overlap.power - 1)
    by_data = (o.data_s / o.step_s) ** (loader_overlap - 1)
    return by_busy * by_compute, by_data, by_busy * (o.sync_s / both_s) ** (overlap.power - 1)


def _gradient(o: _Overlapped, used: NDArray[np.bool_], overlap: Overlap, loader_overlap: Floats) -> Floats:
    """Return the derivatives of the step by the seconds of each used term."""
    slopes = zip(_OF_PARTS, _slopes(o, overlap, loader_overlap), strict=True)
    compute, data, sync = (of[used] * slope[:, None] for of, slope in slopes)
    found: Floats = compute + data + sync
    return found


def _rows_of_parts(
    unit: Floats, used: NDArray[np.bool_], measured: Measured, loader_overlap: Floats, part_weight: float
) -> tuple[Floats, Floats]:
    """Return rows that the measured seconds of compute and of data should fulfil, in relative error, and their targets."""
    weight = part_weight * measured.weight
    has_compute = measured.compute_s > 1e-3 * measured.step_s  # false where it is nan
    seconds = np.where(has_compute, measured.compute_s, 1.0)
    compute = unit * _OF_PARTS[0][used] * (weight / seconds)[:, None]
    # A step waits for loader workers only where they need longer than the step, so the whole step then belongs to them.
    waits = (measured.data_s > 0.05 * measured.step_s) | (loader_overlap == 1)
    has_data = waits & np.isfinite(measured.data_s)
    load_s = np.where(loader_overlap == 1, measured.data_s, measured.step_s)
    data = unit * _OF_PARTS[1][used] * (weight / measured.step_s)[:, None]
    rows = np.vstack([compute[has_compute], data[has_data]])
    targets = np.concatenate([weight[has_compute], (weight * load_s / measured.step_s)[has_data]])
    return rows, targets
