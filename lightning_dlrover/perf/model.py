"""How long a training step takes in a configuration, and how sure that is.

The physical prior carries the shape to world sizes nobody has tried; boosted trees bend it where samples show
that they may; what was measured in the very same configuration has the last word. What to do with a
prediction is the planner's business.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.prior import Configuration, PhysicalPrior, configuration_of
from lightning_dlrover.perf.samples import STEP_PARTS, StepProfile

__all__ = ["Configuration", "Prediction", "StepTimeModel", "configuration_of"]

Floats = NDArray[np.float64]

INTERVAL_SIGMAS = 1.645  # nine of ten steps of a normal error lie inside
MIN_SIGMA = 0.02  # two means over a window of the same steps differ by about this much
UNTESTED_SIGMA = 0.1  # at least, of a prior fitted to so few configurations that none can be held out to test it
MIN_TESTED_CONFIGURATIONS = 5

# Trees are tried from here on, and used if they cut the cross-validated error by `MIN_TREE_GAIN`: with fewer
# configurations they memorise, and the folds are too small to notice.
MIN_TREE_SAMPLES = 24
MIN_TREE_CONFIGURATIONS = 12
MIN_TREE_GAIN = 0.05
NUM_FOLDS = 4

REACH = 0.3  # distance over which a correction measured in one configuration fades to a third in others

MAX_SIZES_THAT_REASSURE = 4
EARLIER_WEIGHT = 0.3  # of a configuration of an earlier job beside one of this job

MAX_CORRECTION = math.log(2.0)  # trees may halve or double the prior, nothing beyond


@dataclass(frozen=True)
class Prediction:
    """A step time with the interval that should hold nine of ten measured windows."""

    step_time_s: float
    low_s: float
    high_s: float
    samples_per_s: float  # of the whole job
    parts_s: Mapping[str, float] = field(default_factory=dict)  # compute, data, communication; they add up to the step


@dataclass(frozen=True)
class Evidence:
    """What was measured in one configuration."""

    num_samples: int
    log_residual: float  # mean log of measured over predicted, before it is taken into account


@dataclass(frozen=True)
class StepTimeModel:
    """Step time of one job on one kind of device; make it with `fit`."""

    prior: PhysicalPrior
    node_cores: float
    evidence: Mapping[Configuration, Evidence]  # newest configuration last
    sigma: float  # of the log error in a configuration that was not measured, at a world size that was
    noise: float  # of the log of one window's step time, from window to window
    trees: Any = field(default=None, repr=False)  # None: samples do not justify them

    @classmethod
    def fit(
        cls, samples: Sequence[StepProfile], *, node_cores: float = 0.0, earlier: Sequence[StepProfile] = ()
    ) -> StepTimeModel:
        """The model of `samples`, which may all come from one world size.

        From one world size, the assumption is that forward and backward split over the workers and that
        communication costs what the default link figures of `prior.py` say; `predict` then allows for no gain
        at all. Deterministic.

        Args:
            samples: windows of one model on one kind of device, oldest first.
            node_cores: cores of one node, all its workers together; 0 if workers never share cores.
            earlier: windows of earlier jobs of similar models; they shape the prior, and weigh less than this job's own.
        Raises:
            ValueError: there is no sample, or one holds a figure that no training step has.
        """
        if not samples:
            raise ValueError("cannot fit a step-time model to no samples; wait for the first profile window of the job")
        for index, sample in enumerate((*samples, *earlier)):
            _check(index, sample)
        configurations = [configuration_of(sample, node_cores) for sample in samples]
        groups: dict[Configuration, list[int]] = {}
        for index, configuration in enumerate(configurations):
            groups.setdefault(configuration, []).append(index)
        log_s = np.log([sample.step_time_s for sample in samples])

        earlier_at = [configuration_of(sample, node_cores) for sample in earlier]
        weights = [1.0] * len(samples) + [EARLIER_WEIGHT] * len(earlier)
        prior = PhysicalPrior.fit([*configurations, *earlier_at], [*samples, *earlier], weights)
        trees = None
        errors = _cross_validated_errors(configurations, samples, list(groups.values()), with_trees=False)
        if len(samples) >= MIN_TREE_SAMPLES and len(groups) >= MIN_TREE_CONFIGURATIONS:
            with_trees = _cross_validated_errors(configurations, samples, list(groups.values()), with_trees=True)
            if np.abs(with_trees).mean() < (1 - MIN_TREE_GAIN) * np.abs(errors).mean():
                errors = with_trees
                trees = _fit_trees(configurations, log_s - _log_prior(prior, configurations))

        residuals = log_s - _log_model(prior, trees, configurations)
        newest_last = sorted(groups.items(), key=lambda item: item[1][-1])
        deviations = np.concatenate([residuals[at] - residuals[at].mean() for at in groups.values()])
        # One imagined repetition that differs by 5 % keeps a single window from looking free of noise.
        noise = math.sqrt(((deviations**2).sum() + 0.05**2) / (len(samples) - len(groups) + 1))
        sigma = max(UNTESTED_SIGMA, float(np.sqrt((residuals**2).mean())))
        if len(groups) >= MIN_TESTED_CONFIGURATIONS:  # the fewer, the less a small error says
            sigma = math.sqrt((errors**2).mean() * (1 + 2 / len(groups)))
        return cls(
            prior=prior,
            node_cores=node_cores,
            evidence={c: Evidence(len(at), float(residuals[at].mean())) for c, at in newest_last},
            sigma=max(sigma, MIN_SIGMA),
            noise=max(noise, MIN_SIGMA),
            trees=trees,
        )

    def predict(self, configuration: Configuration) -> Prediction:
        """Step time in `configuration`; its interval widens with the distance from what was measured."""
        log_s = float(_log_model(self.prior, self.trees, [configuration])[0])
        measured = self.evidence.get(configuration)
        if measured is not None:
            sigma = self.noise * math.sqrt(1 + 1 / measured.num_samples)
            low = high = INTERVAL_SIGMAS * sigma
            step_time_s = math.exp(log_s + self._carried(configuration))
        else:
            near, distance = self._nearest(configuration)
            log_s += self._carried(near) * math.exp(-distance / REACH)
            step_time_s = math.exp(log_s)
            # From one world size, the model may miss all of the gain, and as much the other way. Further
            # sizes test the shape, but no number of small ones vouches for a far larger one.
            doubt = distance / min(len(self.num_workers_seen), MAX_SIZES_THAT_REASSURE)
            known = INTERVAL_SIGMAS * math.hypot(self.sigma, self.noise)
            low = high = math.hypot(known, doubt)
            if configuration.num_workers > near.num_workers and configuration.cores <= near.cores:
                # Adding workers is no faster than perfect scaling of what was measured.
                share = min(1.0, configuration.local_batch / near.local_batch)
                floor = math.log(self.predict(near).step_time_s * share) - known
                low = max(min(low, log_s - floor), INTERVAL_SIGMAS * self.noise)
        return Prediction(
            step_time_s=step_time_s,
            low_s=step_time_s * math.exp(-low),
            high_s=step_time_s * math.exp(high),
            samples_per_s=_global_batch(configuration) / step_time_s,
            parts_s=self.prior.parts_s(configuration, step_time_s),
        )

    def predict_many(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        """`predict` of each."""
        return [self.predict(configuration) for configuration in configurations]

    @property
    def num_workers_seen(self) -> tuple[int, ...]:
        """World sizes with at least one sample, ascending."""
        return tuple(sorted({configuration.num_workers for configuration in self.evidence}))

    def measured(self, num_workers: int, local_batch: int) -> Configuration | None:
        """The newest configuration in which this size was measured with this batch, None if it never was."""
        for configuration in reversed(list(self.evidence)):
            if configuration.num_workers == num_workers and configuration.local_batch == local_batch:
                return configuration
        return None

    def _carried(self, seen: Configuration) -> float:
        """Log correction learnt in `seen`: what was measured and what the model says, weighed by precision."""
        evidence = self.evidence[seen]
        return evidence.log_residual * self.sigma**2 / (self.sigma**2 + self.noise**2 / evidence.num_samples)

    def _nearest(self, configuration: Configuration) -> tuple[Configuration, float]:
        """The measured configuration nearest by, and how far off it is in log space."""
        return min(((seen, _distance(seen, configuration)) for seen in self.evidence), key=lambda pair: pair[1])


def _check(index: int, sample: StepProfile) -> None:
    """Raise a ValueError that names the first figure in `sample` that no training step has."""
    times = {f"{part}_s": float(getattr(sample, f"{part}_s")) for part in STEP_PARTS}
    counts = ("num_workers", "num_nodes", "global_batch", "local_batch")
    not_negative = ("loader_workers", "intra_op_threads", "dense_bytes")
    problems = [
        *((n, "must be a finite time above 0") for n in ("step_time_s",) if not 0 < sample.step_time_s < math.inf),
        *((n, "must be a finite time, 0 or more") for n, value in times.items() if not 0 <= value < math.inf),
        *((n, "must be 1 or more") for n in counts if not getattr(sample, n) >= 1),
        *((n, "must be 0 or more") for n in not_negative if not getattr(sample, n) >= 0),
        *((n, "must be finite and above 0") for n in ("cores",) if not 0 < sample.cores < math.inf),
    ]
    if problems:
        name, rule = problems[0]
        raise ValueError(
            f"cannot fit a step-time model: sample {index} (worker {sample.worker_id!r}, "
            f"round {sample.round_number}, first step {sample.first_step}) has "
            f"{name}={getattr(sample, name)!r}, which {rule}; "
            "leave this window out, or look for the clock that produced it"
        )


def _global_batch(configuration: Configuration) -> int:
    return configuration.num_workers * configuration.local_batch


def _distance(seen: Configuration, asked: Configuration) -> float:
    """How far it is from one configuration to conclude on another, as a log factor of the step time.

    World size counts in full. A batch, cores and loader workers change the time of one worker in a way that
    the prior knows better, and count half; under a constant global batch they change along with the world
    size, so the largest counts.
    """
    ratios = (
        abs(math.log(asked.num_workers / seen.num_workers)),
        abs(math.log(asked.num_nodes / seen.num_nodes)),
        abs(math.log(asked.local_batch / seen.local_batch)) / 2,
        abs(math.log(asked.core_share / seen.core_share)) / 2,
        abs(math.log(asked.threads / seen.threads)) / 2,
        abs(math.log((1 + asked.loader_workers) / (1 + seen.loader_workers))) / 2,
    )
    return max(ratios)


# Where each of `_features` may move a step time: +1 longer, -1 shorter, 0 either way. The residual in the
# batch is left free: the straight line of the prior is too steep for batches that do not fill a device, and
# holding the residual to +1 raised the error on six measured traces from 5.5 to 6.8 %.
_DIRECTIONS = (0, 0, 0, 0, -1, 0, -1)


def _features(configurations: Sequence[Configuration]) -> Floats:
    return np.array(
        [
            (
                c.num_workers,
                c.num_nodes,
                c.workers_on_node,
                c.local_batch,
                c.core_share,
                c.threads,
                c.loader_workers,
            )
            for c in configurations
        ],
        dtype=np.float64,
    )


def _log_prior(prior: PhysicalPrior, configurations: Sequence[Configuration]) -> Floats:
    return np.log([max(prior.step_time_s(c), 1e-9) for c in configurations])


def _log_model(prior: PhysicalPrior, trees: Any, configurations: Sequence[Configuration]) -> Floats:
    log_s = _log_prior(prior, configurations)
    if trees is not None:
        with _one_thread():
            log_s += np.clip(trees.predict(_features(configurations)), -MAX_CORRECTION, MAX_CORRECTION)
    return log_s


def _one_thread() -> AbstractContextManager[Any]:
    """Keeps OpenMP to the calling thread, whose own setting for training comes back afterwards.

    Beside a training job every core is busy, and threads that wait for each other at the barrier of each tree node
    made a fit of 0.4 s last half a minute.
    """
    limits: AbstractContextManager[Any] = _thread_pools().limit(limits=1, user_api="openmp")
    return limits


@functools.cache  # finding the loaded libraries takes 5 ms, and there is one for each prediction otherwise
def _thread_pools() -> Any:
    # Installed with scikit-learn, which limits itself in this way.
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


def _fit_trees(configurations: Sequence[Configuration], log_residuals: Floats) -> Any:
    """Small trees on what the prior leaves over."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # 1 s, and most jobs never have enough samples

    trees = HistGradientBoostingRegressor(
        learning_rate=0.1,
        max_iter=60,
        max_leaf_nodes=16,
        min_samples_leaf=5,
        monotonic_cst=_DIRECTIONS,
        early_stopping=False,
        random_state=0,
    )
    with _one_thread():
        return trees.fit(_features(configurations), log_residuals)


def _folds(groups: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Training and test indices; no configuration is in both, or repetitions would count as foresight."""
    num_folds = min(NUM_FOLDS, len(groups))
    order = np.random.default_rng(0).permutation(len(groups))
    for fold in range(num_folds):
        test = [i for k in order[fold::num_folds] for i in groups[k]]
        held_out = set(order[fold::num_folds].tolist())
        yield [i for k, group in enumerate(groups) if k not in held_out for i in group], test


def _cross_validated_errors(
    configurations: Sequence[Configuration],
    samples: Sequence[StepProfile],
    groups: Sequence[Sequence[int]],
    *,
    with_trees: bool,
) -> Floats:
    """Log of measured over predicted, each sample predicted by a model that never saw its configuration."""
    errors = []
    for train, test in _folds(groups) if len(groups) > 1 else ():
        train_at, test_at = [configurations[i] for i in train], [configurations[i] for i in test]
        prior = PhysicalPrior.fit(train_at, [samples[i] for i in train])
        trees = None
        if with_trees:
            log_s = np.log([samples[i].step_time_s for i in train])
            trees = _fit_trees(train_at, log_s - _log_prior(prior, train_at))
        errors.append(np.log([samples[i].step_time_s for i in test]) - _log_model(prior, trees, test_at))
    return np.concatenate(errors) if errors else np.zeros(0)
