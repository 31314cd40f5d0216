"""Predict the time of a training step in a configuration, with its uncertainty. Pure.

Two layers work in logs: the physical prior extrapolates to world sizes that were never tried, and boosted trees bend it where
samples show that they may. Measurements in the very same configuration take precedence over both. The planner decides on the
use of a prediction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.tuning.population import (
    PARTS,
    SHAPES,
    TERMS,
    JobScale,
    Population,
    Ratios,
    ResidualGP,
    Residuals,
    amounts_of,
    job_units,
    shortest,
    variances_of,
)
from lightning_dlrover.tuning.prior import PhysicalPrior, PriorPrediction
from lightning_dlrover.tuning.samples import (
    MIN_SIGMA,
    NORMAL_WIDTH,
    Columns,
    Configuration,
    Floats,
    Measured,
    StepProfile,
    impossible_figure,
    measurements,
    noise_of,
    one_blas_thread,
    one_openmp_thread,
    windows_by_configuration,
)

T = TypeVar("T")

COVERAGE = 0.9  # fraction of measured windows that an interval should hold
UNTESTED_SIGMA = 0.1  # minimum uncertainty of a prior fitted to too few configurations to hold any out
MIN_SHARE_SIGMA = 0.02  # minimum deviation of a part's share of the step
UNTESTED_SHARE_SIGMA = 0.1  # the same minimum where no measured parts were held out
MIN_TESTED_CONFIGURATIONS = 5

MIN_CONFORMAL_CONFIGURATIONS = 20

# Trees are tried from these numbers on, and used if they have the smallest cross-validated error. With fewer
# configurations they memorise, and the folds are too small to show it.
MIN_TREE_SAMPLES = 24
MIN_TREE_CONFIGURATIONS = 12
NUM_FOLDS = 4

MAX_SIZES_THAT_REASSURE = 4
EARLIER_WEIGHT = 0.3  # weight of a configuration of an earlier job, relative to one of this job

MAX_CORRECTION = math.log(2.0)  # trees may halve or double the prior at most


@dataclass(frozen=True)
class Prediction:
    """A step time and its parts, each with an interval that should contain 90 % of measured windows, and the job's rate.

    Example:
        >>> prediction = Prediction(step_time_s=0.1, low_s=0.08, high_s=0.16, samples_per_s=512.0)
        >>> prediction.low_s <= prediction.step_time_s <= prediction.high_s
        True
    """

    step_time_s: float
    low_s: float
    high_s: float
    samples_per_s: float  # throughput of the whole job
    parts_s: Mapping[str, float] = field(default_factory=dict)  # compute, data and communication, which add up to the step
    parts_interval_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Predictions:
    """Many predictions: arrays of shape ``(num_configurations,)``, parts of shape ``(num_configurations, 3)`` as `PARTS`."""

    step_time_s: Floats
    low_s: Floats
    high_s: Floats
    samples_per_s: Floats
    parts_s: Floats
    parts_low_s: Floats
    parts_high_s: Floats


@dataclass(frozen=True)
class _Observed:
    """Measurements, one row for each configuration."""

    columns: Columns
    measured: Measured
    counts: Floats  # number of windows
    noise: float  # deviation of the log of one window's step time between windows

    def rows(self, index: NDArray[np.intp]) -> _Observed:
        return _Observed(self.columns.rows(index), self.measured.rows(index), self.counts[index], self.noise)


@dataclass(frozen=True)
class _Layers:
    """Prior and trees, and how measured configurations deviate from both."""

    prior: PhysicalPrior
    trees: Any  # None: samples do not justify trees
    places: _Places  # coordinates of measured configurations
    residuals: Floats  # log of measured over predicted by prior and trees, at these places
    trust: Floats  # part of each residual that noise does not explain, from 0 to 1

    @classmethod
    def fit(cls, observed: _Observed, prior: PhysicalPrior, *, with_trees: bool) -> _Layers:
        columns, measured = observed.columns, observed.measured
        trees = None
        if with_trees:
            plain = replace(prior, own=None)
            trees = _fit_trees(columns, np.log(measured.step_s) - plain.predict(columns).log_s, measured.weight)
            if prior.own is not None:
                # Trees and `own` explain the same residuals in different ways, so their mean has a smaller error than each.
                prior, trees = replace(prior, own=prior.own.scaled(0.5)), _Scaled(trees, 0.5)
        residuals = np.log(measured.step_s) - prior.predict(columns).log_s - _bent(trees, columns)
        from_noise = observed.noise**2 / observed.counts
        least = MIN_SIGMA if len(residuals) >= MIN_TESTED_CONFIGURATIONS else UNTESTED_SIGMA
        # The residual variance that noise does not explain (method of moments).
        wrong = max(least**2, float((residuals**2 - from_noise).mean())) * measured.weight**2
        trust = wrong / (wrong + from_noise)
        return cls(prior, trees, _Places.of(columns), residuals, trust)

    def predict(self, columns: Columns) -> _Raw:
        prior = self.prior.predict(columns)
        distance, nearest = self.places.nearest(columns)
        return _Raw(prior.log_s + _bent(self.trees, columns), prior, distance, nearest)


@dataclass(frozen=True)
class _Scaled:
    """Trees with a part of their correction."""

    trees: Any
    factor: float

    def predict(self, features: Floats) -> Floats:
        found: Floats = self.factor * self.trees.predict(features)
        return found


@dataclass(frozen=True)
class _Places:
    """Coordinates of measured configurations, see `_places`."""

    tree: Any  # search tree over the coordinates in which they differ
    varies: NDArray[np.bool_]
    common: Floats  # the other coordinates

    @classmethod
    def of(cls, columns: Columns) -> _Places:
        from scipy.spatial import KDTree

        points = _places(columns)
        varies = np.ptp(points, axis=0) > 0
        return cls(KDTree(points[:, varies]) if varies.any() else None, varies, points[0, ~varies])

    def nearest(self, columns: Columns) -> tuple[Floats, NDArray[np.intp]]:
        """Return the distance and the index of the nearest place of each row."""
        points = _places(columns)
        # The largest difference counts, so common coordinates set a floor and change no order above it.
        floor = np.abs(points[:, ~self.varies] - self.common).max(axis=1, initial=0.0)
        if self.tree is None:
            return floor, np.zeros(len(points), dtype=np.intp)
        distance, index = self.tree.query(points[:, self.varies], p=np.inf)
        return np.maximum(distance, floor), index


@dataclass(frozen=True)
class _Raw:
    """Predictions before measurements in the very same configuration take precedence; arrays of one shape."""

    log_s: Floats
    prior: PriorPrediction
    distance: Floats  # distance to the nearest measured configuration
    nearest: NDArray[np.intp]  # index of that configuration


@dataclass(frozen=True)
class _HeldOut:
    """Predictions of configurations by layers fitted without them."""

    errors: Floats  # log of measured over predicted
    share_errors: Floats  # measured minus predicted shares of the parts; nan where they were not measured
    distance: float  # distance of nearly all of them to the nearest configuration in the fit

    @property
    def badness(self) -> float:
        return float(np.abs(self.errors).mean())

    @property
    def width(self) -> float:
        """Return the half width that held `COVERAGE` of the errors, corrected for their number.

        Cross-conformal prediction (Vovk, Annals of Mathematics and AI 74, 2015). With too few errors for that quantile, it is
        the width of a normal error with the same root mean square: the fewer errors, the weaker the evidence of small ones.
        """
        n = len(self.errors)
        if n < MIN_CONFORMAL_CONFIGURATIONS:
            return NORMAL_WIDTH * math.sqrt((self.errors**2).mean() * (1 + 2 / n))
        return float(np.sort(np.abs(self.errors))[math.ceil(COVERAGE * (n + 1)) - 1])

    @property
    def share_sigma(self) -> Floats:
        """Return the root mean square of `share_errors` for each part."""
        known = self.share_errors[np.isfinite(self.share_errors).all(axis=1)]
        if len(known) < MIN_TESTED_CONFIGURATIONS:
            return np.full(len(PARTS), UNTESTED_SHARE_SIGMA)
        sigma: Floats = np.maximum(MIN_SHARE_SIGMA, np.sqrt((known**2).mean(axis=0) * (1 + 2 / len(known))))
        return sigma


@dataclass(frozen=True)
class StepTimeModel:
    """Step time of one job on one kind of device; create it with `fit`.

    Example:
        >>> from dataclasses import replace
        >>> from lightning_dlrover.tuning import configuration_of
        >>> model = StepTimeModel.fit(windows)  # step profiles of one job, here with one and two workers
        >>> four = replace(configuration_of(windows[-1]), num_workers=4, local_batch=128)
        >>> prediction = model.predict(four)
        >>> prediction.low_s < prediction.step_time_s < prediction.high_s
        True
    """

    node_cores: float
    evidence: Sequence[Configuration]  # configurations of this job, newest last
    width: float  # half width of the log interval in a configuration that was not measured, at a size that was
    tested_distance: float  # distance from measurements up to which that width was tested
    share_sigma: Floats  # deviation of the parts' shares in a configuration that was not measured, in the order of `PARTS`
    noise: float  # deviation of the log of one window's step time between windows
    num_sizes: int  # measured world sizes, including those of earlier jobs
    num_node_numbers: int  # measured numbers of nodes, likewise
    leaving_width: float  # width that intervals off the node need, see `Population`
    layers: _Layers = field(repr=False)
    seen: Columns = field(repr=False)  # measured configurations: those in `evidence`, then those of earlier jobs
    seen_s: Floats = field(repr=False)  # predicted step times in `seen`
    seen_shares: Floats = field(repr=False)  # measured shares of the parts in `seen`; nan where they were not measured
    seen_counts: Floats = field(repr=False)  # number of windows in `seen`

    @classmethod
    def fit(
        cls,
        samples: Sequence[StepProfile],
        *,
        node_cores: float = 0.0,
        earlier: Sequence[StepProfile] = (),
        population: Population | None = None,
    ) -> StepTimeModel:
        """Fit a model to `samples`, which may all come from one world size, or be empty if there are `earlier` ones.

        With one world size, the model assumes that forward and backward split over the workers. It also assumes that
        communication costs as much as the default link figures of `population.py`; `predict` then allows for no gain at all.
        Deterministic.

        Args:
            samples: windows of one model on one kind of device, oldest first.
            node_cores: cores of one node, all its workers together; 0 if workers never share cores.
            earlier: windows of earlier jobs with the same or similar models. They are a start, and weigh less than this job's
                own. Those of another device are left out, as are those without the model's FLOPs, bytes or tables where this
                job has them.
            population: common properties of other jobs on the same hardware, see `population_of`.
        Raises:
            ValueError: there is no sample, or one holds a figure that is impossible for a training step.
        """
        for index, sample in enumerate((*samples, *earlier)):
            _check(index, sample)
        if samples:
            earlier = [sample for sample in earlier if _comparable(sample, samples[-1])]
        if not samples and not earlier:
            raise ValueError("cannot fit a step-time model to no samples; wait for the first profile window of the job")
        own, observed = _observed(samples, earlier, node_cores)
        prior = PhysicalPrior.fit(observed.columns, observed.measured, population=population)
        kinds = [False]
        if observed.counts.sum() >= MIN_TREE_SAMPLES and len(observed.counts) >= MIN_TREE_CONFIGURATIONS:
            kinds = [True, False]
        held_out = _hold_out(observed, prior, kinds, population) if len(observed.counts) >= MIN_TESTED_CONFIGURATIONS else {}
        with_trees = min(kinds, key=lambda kind: held_out[kind].badness) if held_out else False
        layers = _Layers.fit(observed, prior, with_trees=with_trees)
        tested = held_out.get(with_trees)
        width = tested.width if tested else NORMAL_WIDTH * max(UNTESTED_SIGMA, float(np.sqrt((layers.residuals**2).mean())))
        # In configurations measured often the held-out figure is a mean, and a single window differs from it.
        width = math.hypot(width, NORMAL_WIDTH * observed.noise * math.sqrt(1 - 1 / observed.counts.mean()))
        there = layers.prior.predict(observed.columns).log_s + _bent(layers.trees, observed.columns)
        return cls(
            node_cores=node_cores,
            evidence=own,
            width=max(width, NORMAL_WIDTH * MIN_SIGMA),
            tested_distance=tested.distance if tested else 0.0,
            share_sigma=tested.share_sigma if tested else np.full(len(PARTS), UNTESTED_SHARE_SIGMA),
            noise=observed.noise,
            num_sizes=len(np.unique(observed.columns.num_workers)),
            num_node_numbers=len(np.unique(observed.columns.num_nodes)),
            leaving_width=population.leaving_width if population else 1.0,
            layers=layers,
            seen=observed.columns,
            seen_s=np.exp(there + layers.trust * layers.residuals),
            seen_shares=observed.measured.shares,
            seen_counts=observed.counts,
        )

    def predict(self, configuration: Configuration) -> Prediction:
        """Predict the step time in `configuration`; its interval widens with the distance from the measurements."""
        return self.predict_many([configuration])[0]

    def predict_many(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        """Return `predict` of each configuration; many at once cost little more than one."""
        if not configurations:
            return []
        predicted = self.predict_columns(Columns.of(configurations))
        figures = (predicted.step_time_s, predicted.low_s, predicted.high_s, predicted.samples_per_s)
        parts = (predicted.parts_s, predicted.parts_low_s, predicted.parts_high_s)
        rows = zip(*(figure.tolist() for figure in (*figures, *parts)), strict=True)
        return [
            Prediction(step_s, low_s, high_s, rate, _by_part(parts_s), _by_part(zip(lows_s, highs_s, strict=True)))
            for step_s, low_s, high_s, rate, parts_s, lows_s, highs_s in rows
        ]

    def predict_columns(self, columns: Columns) -> Predictions:
        """Return `predict` of each row, as arrays."""
        raw = self.layers.predict(columns)
        log_s, near_s, near = raw.log_s, self.seen_s[raw.nearest], self.seen.rows(raw.nearest)
        # From one world size, the model may miss all of the gain, and as much in the other direction. Further sizes test the
        # shape, but no number of small ones confirms a far larger one.
        nodes_apart, apart = _apart(columns, near)
        doubt = np.maximum(0.0, apart - self.tested_distance) / min(self.num_sizes, MAX_SIZES_THAT_REASSURE)
        of_nodes = np.maximum(0.0, nodes_apart - self.tested_distance) / min(self.num_node_numbers, MAX_SIZES_THAT_REASSURE)
        # The range of an unknown network takes the place of the distance in nodes.
        leaves = (self.num_node_numbers == 1) & (near.num_nodes == 1) & (columns.num_nodes > 1)
        doubt = np.maximum(doubt, np.where(leaves, 0.0, of_nodes))
        width = np.where(leaves, max(self.width, NORMAL_WIDTH * UNTESTED_SIGMA), self.width)
        around = width**2 + doubt**2 + (NORMAL_WIDTH * raw.prior.spread) ** 2
        scale = np.where(leaves, self.leaving_width, 1.0)
        low, high = (scale * np.sqrt(around + network**2) for network in (raw.prior.faster, raw.prior.slower))
        # Additional workers are no faster than perfect scaling of the measurements.
        floor = np.log(near_s * np.minimum(1.0, columns.local_batch / near.local_batch)) - self.width
        slower = (columns.num_workers > near.num_workers) & (columns.core_share <= near.core_share)
        low = np.where(slower, np.maximum(np.minimum(low, log_s - floor), NORMAL_WIDTH * self.noise), low)
        own = (raw.distance == 0) & (raw.nearest < len(self.evidence))
        repeated = NORMAL_WIDTH * self.noise * np.sqrt(1 + 1 / self.seen_counts[raw.nearest])
        step_s = np.where(own, near_s, np.exp(log_s))
        low, high = np.where(own, repeated, low), np.where(own, repeated, high)
        measured = own[:, None] & np.isfinite(self.seen_shares[raw.nearest])
        shares = np.where(measured, self.seen_shares[raw.nearest], raw.prior.shares)
        sigma = np.where(measured, MIN_SHARE_SIGMA, np.hypot(self.share_sigma, raw.prior.shares_spread))
        parts_s = shares * step_s[:, None]
        of_shares_s = NORMAL_WIDTH * sigma * step_s[:, None]
        return Predictions(
            step_time_s=step_s,
            low_s=step_s * np.exp(-low),
            high_s=step_s * np.exp(high),
            samples_per_s=columns.num_workers * columns.local_batch / step_s,
            parts_s=parts_s,
            # A part inherits the error of the step time, and has that of its share.
            parts_low_s=np.maximum(0.0, parts_s - np.hypot(parts_s * -np.expm1(-low)[:, None], of_shares_s)),
            parts_high_s=parts_s + np.hypot(parts_s * np.expm1(high)[:, None], of_shares_s),
        )


def _by_part(values: Iterable[T]) -> dict[str, T]:
    return dict(zip(PARTS, values, strict=True))


def _check(index: int, sample: StepProfile) -> None:
    """Raise a ValueError that names the first figure in `sample` that is impossible for a training step."""
    if problem := impossible_figure(sample):
        name, rule = problem
        raise ValueError(
            f"cannot fit a step-time model: sample {index} (worker {sample.worker_id!r}, "
            f"round {sample.round_number}, first step {sample.first_step}) has "
            f"{name}={getattr(sample, name)!r}, which {rule}; "
            "leave this window out, or look for the clock that produced it"
        )


def _comparable(earlier: StepProfile, now: StepProfile) -> bool:
    """Return whether coefficients learnt from one window hold for the other: same device, and the same known figures."""
    described = ("dense_bytes", "dense_flops", "embedding_bytes")
    return earlier.device == now.device and all((getattr(earlier, d) > 0) == (getattr(now, d) > 0) for d in described)


def _observed(
    samples: Sequence[StepProfile], earlier: Sequence[StepProfile], node_cores: float
) -> tuple[list[Configuration], _Observed]:
    """Return the job's own configurations, and the measurements in these and in those of earlier jobs."""
    own = windows_by_configuration(samples, node_cores)
    before = {c: group for c, group in windows_by_configuration(earlier, node_cores).items() if c not in own}
    groups = [*own.values(), *before.values()]
    observed = _Observed(
        columns=Columns.of([*own, *before]),
        measured=Measured.of(groups, [1.0] * len(own) + [EARLIER_WEIGHT] * len(before)),
        counts=np.array([len(group) for group in groups], dtype=np.float64),
        noise=noise_of([np.log([sample.step_time_s for sample in group]) for group in groups]),
    )
    return list(own), observed


_PLACE = (
    *(("num_workers", 0, 1), ("num_nodes", 0, 1), ("fullest", 0, 2), ("emptiest", 0, 2), ("local_batch", 0, 2)),
    *(("core_share", 0, 2), ("threads", 0, 2), ("loader_workers", 1, 2), ("prefetch_factor", 1, 8)),
    *(("dense_flops", 1, 2), ("dense_bytes", 1, 2), ("embedding_bytes", 1, 2)),
)
"""Coordinates of `_places`: column, amount added before the log, and divisor of the log."""

_OF_NODES = 1  # the coordinate of nodes


def _places(columns: Columns) -> Floats:
    """Return points; the largest difference of two measures how well one configuration predicts the other.

    The points are logs, so that a difference is a factor of the step time. World size counts in full. A batch, cores and loader
    workers change the time of one worker, which the prior models better, and count half. Under a constant global batch they
    change along with the world size, so the largest counts.
    """
    return np.stack([np.log(added + getattr(columns, name)) / divisor for name, added, divisor in _PLACE], axis=1)


def _apart(columns: Columns, near: Columns) -> tuple[Floats, Floats]:
    """Return the distances of configurations from others, in nodes and in all else."""
    apart = np.abs(_places(columns) - _places(near))
    return apart[:, _OF_NODES], np.delete(apart, _OF_NODES, axis=1).max(axis=1)


# Features of the trees with the direction in which each may move a step time: -1 shorter, 0 either way. The batch is left
# free: the straight line of the prior is too steep for batches that do not fill a device.
_DIRECTIONS = {
    **dict.fromkeys(("num_workers", "num_nodes", "fullest", "emptiest", "local_batch"), 0),
    "core_share": -1,
    "threads": 0,
    "loader_workers": -1,
}


def _features(columns: Columns) -> Floats:
    return np.stack([getattr(columns, name) for name in _DIRECTIONS], axis=1)


def _bent(trees: Any, columns: Columns) -> Floats:
    """Return the log correction by `trees`; zero without trees."""
    if trees is None:
        return np.zeros(len(columns))
    with one_openmp_thread():
        bent: Floats = np.clip(trees.predict(_features(columns)), -MAX_CORRECTION, MAX_CORRECTION)
    return bent


def _fit_trees(columns: Columns, log_residuals: Floats, weights: Floats) -> Any:
    """Fit small trees to the residuals of the prior."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # import takes 1 s, and most jobs never have enough samples

    trees = HistGradientBoostingRegressor(
        learning_rate=0.08,
        max_iter=80,
        max_leaf_nodes=4,  # few interactions: larger trees memorise single placements and are worse on larger worlds
        min_samples_leaf=8,
        monotonic_cst=list(_DIRECTIONS.values()),
        early_stopping=False,
        random_state=0,
    )
    uneven = weights if np.ptp(weights) > 0 else None  # equal weights triple the time of a fit
    with one_openmp_thread():
        return trees.fit(_features(columns), log_residuals, sample_weight=uneven)


def _hold_out(
    observed: _Observed, prior: PhysicalPrior, kinds: Sequence[bool], population: Population | None
) -> dict[bool, _HeldOut]:
    """Predict each configuration by layers fitted without it, with and without trees."""
    errors: dict[bool, list[Floats]] = {with_trees: [] for with_trees in kinds}
    share_errors, distances = [], []
    order = np.random.default_rng(0).permutation(len(observed.counts))
    for fold in range(min(NUM_FOLDS, len(order))):
        seen = observed.rows(np.delete(order, np.s_[fold::NUM_FOLDS]))
        unseen = observed.rows(order[fold::NUM_FOLDS])
        fold_prior = PhysicalPrior.fit(seen.columns, seen.measured, prior, population)
        for with_trees in kinds:
            raw = _Layers.fit(seen, fold_prior, with_trees=with_trees).predict(unseen.columns)
            errors[with_trees].append(np.log(unseen.measured.step_s) - raw.log_s)
        share_errors.append(unseen.measured.shares - raw.prior.shares)
        distances.append(raw.distance)
    distance = float(np.quantile(np.concatenate(distances), COVERAGE))
    return {kind: _HeldOut(np.concatenate(found), np.concatenate(share_errors), distance) for kind, found in errors.items()}


# Estimate the common properties of jobs on the same hardware: partial pooling over jobs.
#
# Each job's prior is fitted alone. The coefficients of communication, relative to the job's own scale, then have a mean and
# a deviation between jobs (Gelman, Hill, Data Analysis Using Regression and Multilevel/Hierarchical Models, 2007, chapter
# 12). A new job is pulled to the means in proportion to their agreement. Only windows of other jobs are used, not their names.

MIN_CONFIGURATIONS = 6  # fewer do not determine the terms of a job
POOLED_TERMS = frozenset({"ring_inside_node", "ring_between_nodes", "network", "stages", "latency_of_workers", "pair_of_nodes"})

ASSUMED_DEVIATION = 0.3
"""Relative deviation of one imagined job, which keeps two jobs that agree by chance from being trusted blindly."""

MIN_DEVIATION_S = 0.02  # minimum deviation of a term between jobs, as a share of their communication
MIN_SCALE_DEVIATION = 0.1

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
        columns, measured = measurements(windows, node_cores)
        if len(columns) >= MIN_CONFIGURATIONS:
            used.append(windows)
            known.append(_Job(columns, measured, PhysicalPrior.fit(columns, measured)))
    if not known:
        return None
    noise = max(MIN_SIGMA, float(np.sqrt(np.mean([(job.residuals.step**2).mean() for job in known]))))
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
        columns, measured = measurements(outside, node_cores)
        found = model.predict_columns(columns)
        error = np.log(measured.step_s / found.step_time_s)
        width = np.where(error > 0, np.log(found.high_s / found.step_time_s), np.log(found.step_time_s / found.low_s))
        scores.append(np.abs(error) / width)
    if len(scores) < MIN_JOBS_COMPARED:
        return 1.0
    # Every job counts the same, however many configurations it has.
    levels = np.linspace(0, 1, 101)
    of_jobs = np.concatenate([np.quantile(score, levels) for score in scores])
    return max(MIN_LEAVING_WIDTH, float(np.quantile(of_jobs, COVERAGE)))


def _some(residuals: Residuals) -> Residuals:
    """Return random configurations of a job, as many as the variances need."""
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
