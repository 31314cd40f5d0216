"""What jobs have in common: the terms of a step's time, and how their errors resemble each other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.tuning.samples import Columns, Floats, Measured

# Gaussian process over the prior's residuals; similar configurations have correlated residuals.
#
# The logs of computing and of synchronisation deviate from the prior, and the step follows by its elasticities. A window
# shows both: its whole step, and its computing where that was measured (Rasmussen, Williams, Gaussian Processes for Machine
# Learning, 2006, section 2.2). How large the deviations are, and how far they reach, is a property of several jobs: the
# variances of the kernels maximise the likelihood of the errors of all of them (Zhou et al., MM Algorithms for Variance
# Components Models, Journal of Computational and Graphical Statistics 28(2), 2019).

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
    step: Floats  # deviations of the step that neither compute nor synchronisation explains
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
    """Deviations of one job that its measurements show."""

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
    parts = zip(_Kernels._fields, (_OF_COMPUTE, _OF_SYNC, _OF_STEP, _OF_MEASURED), strict=True)
    kernels = _kernels(job.columns, job.columns)
    found = [_covariance(job, none._replace(**{name: kernel})) for name, part in parts for kernel in kernels[part]]
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
    of_compute = [same_setting * (batch == 0), np.exp(-setting - fullest / 2), np.exp(-setting - place)]
    return [*of_compute, same_setting * (place == 0), near, near, near]


# Physical causes of a step's time, as terms with non-negative coefficients, and the shapes that combine them.

Part = Literal["compute", "data", "communication"]
PARTS: tuple[Part, ...] = ("compute", "data", "communication")

INTER_NODE_BYTES_PER_S = 1e9  # 10 Gbit/s Ethernet less its protocols; assumed until a link was measured
INTRA_NODE_BYTES_PER_S = 2e9  # gloo through one machine's loopback
LATENCY_S = 2e-4  # latency that one more participant adds to a collective over TCP
MAX_LATENCY_S = 1e-2  # order of magnitude of the longest latency of a hop, however much a model sends


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
        "the same ring, but its slowest link is the network; nothing where bytes are unknown, as `network` covers it then",
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
        "two nodes have one path between them, which all workers share, while three and more have several: measured on "
        "clusters, doubted by one of the shapes",
        lambda c: (c.num_nodes == 2) * np.log2(c.num_workers),
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

BYTE_TERMS = ("ring_inside_node", "ring_between_nodes")  # terms with coefficients per byte

BETWEEN_NODES: NDArray[np.bool_] = np.array([term.name in ("ring_between_nodes", "network", "pair_of_nodes") for term in TERMS])
"""Terms of synchronisation that need several nodes, apart from those of tables."""

_GROWTH = frozenset(name for shape in SHAPES for name in shape)
OF_PARTS: tuple[NDArray[np.bool_], ...] = tuple(np.array([term.part == part for term in TERMS]) for part in PARTS)


def amounts_of(columns: Columns) -> Floats:
    return np.stack([term.amount(columns) for term in TERMS], axis=1)


def job_units(columns: Columns) -> Floats:
    """Return the factor of each term that turns its coefficient into seconds of the job's gradient bytes."""
    num_bytes = float(np.maximum(columns.dense_bytes, 1.0).mean())
    return np.array([num_bytes if term.name in BYTE_TERMS else 1.0 for term in TERMS])


def terms_of(kind: int) -> NDArray[np.bool_]:
    """Return the terms of a shape, by its index into `SHAPES`."""
    return np.array([term.name in SHAPES[kind] or term.name not in _GROWTH for term in TERMS])


# Properties of the hardware as all its jobs show them: data that `step_time.py` estimates and `prior.py` uses.

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
        >>> from lightning_dlrover.tuning import StepTimeModel, population_of
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

    Attributes:
        scale: the job's present scale of communication, seconds.
    """

    def __init__(self, population: Population, kind: int, units: Floats, amounts: Floats, measured: Measured) -> None:
        self._ratios = ratios = population.ratios[kind]
        self._noise, self._units = population.noise, units
        on_one_node = not amounts[:, BETWEEN_NODES].any()
        self._expected = ratios.expected(float(units.max()), shortest(measured.work_s) if on_one_node else 0.0)
        typical = float((ratios.mean / units * amounts.mean(axis=0)).sum())
        some_s = FIRST_COMMUNICATION_SHARE * float(np.median(measured.step_s))
        self.scale = some_s / typical if typical > 0 else self._expected.mean  # 0: no measurement has several workers

    def free(self, pull: Floats) -> Floats:
        """Return the pulls to defaults, without those that the population replaces."""
        return np.where(self._ratios.pooled, 0.0, pull)

    def rows(self, used: NDArray[np.bool_], lengths: Floats) -> tuple[Floats, Floats]:
        """Return rows over the used terms and the job's scale, relative to its present value, and their targets.

        Args:
            lengths: of the columns of all terms, by which coefficients are multiplied.
        """
        ratios = self._ratios
        terms = np.flatnonzero(used & ratios.pooled & (self.scale > 0))
        rows = np.zeros((len(terms) + (self._expected.mean > 0), int(used.sum()) + 1))
        expected = ratios.mean[terms] / self._units[terms] * self.scale
        weight = self._noise / (ratios.deviation[terms] / self._units[terms] * self.scale)
        places = np.cumsum(used)[terms] - 1
        rows[np.arange(len(terms)), places] = weight / lengths[terms]
        rows[np.arange(len(terms)), -1] = -weight * expected
        targets = np.zeros(len(rows))
        if self._expected.mean > 0:
            targets[-1] = self._noise / self._expected.deviation
            rows[-1, -1] = targets[-1] * self.scale / self._expected.mean
        return rows, targets

    def error(self, rows: Floats, targets: Floats, coefficients: Floats, change: float) -> float:
        """Return the sum of squares of the rows."""
        return float(((rows @ np.append(coefficients, change) - targets) ** 2).sum())

    def filled(self, coefficients: Floats, unmeasured: NDArray[np.bool_]) -> Floats:
        """Return the coefficients, with those of unmeasured terms as in other jobs of the same scale, if that is known."""
        expected = self._ratios.mean / self._units * self.scale
        found: Floats = np.where(unmeasured & self._ratios.pooled & (self.scale > 0), expected, coefficients)
        return found

    def rescale(self, change: float) -> None:
        self.scale *= max(0.1, change)
