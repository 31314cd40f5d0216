"""Evaluate the step-time model on recorded traces: `dlrover lab evaluate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.lab.simulate.traces import TraceError, read_trace
from lightning_dlrover.tuning.population import Population
from lightning_dlrover.tuning.prior import PhysicalPrior
from lightning_dlrover.tuning.samples import Columns, Floats, StepProfile, configuration_of, one_openmp_thread
from lightning_dlrover.tuning.step_time import StepTimeModel, population_of

# Accuracy of the model's predictions, compared with its prior, with boosted trees, and with a line through the logs.


@dataclass(frozen=True)
class Evaluation:
    """Errors in percent over the test samples."""

    mape: float  # mean absolute percentage error of the step time
    prior_mape: float
    trees_mape: float
    ridge_mape: float
    coverage: float  # share of samples within the 90 % interval

    def __str__(self) -> str:
        names = ("mape", "prior_mape", "trees_mape", "coverage")
        return " ".join(f"{name}={getattr(self, name):.2f}" for name in names)


def evaluate(train: Sequence[StepProfile], test: Sequence[StepProfile], population: Population | None = None) -> Evaluation:
    """Return the errors on `test` of a model, of its prior, of trees and of a ridge regression, all fitted to `train` alone.

    The `population` of other jobs on the same hardware helps the model and its prior.

    Raises:
        ValueError: either is empty, or holds a figure that is impossible for a training step.
    """
    if not test:
        raise ValueError("no sample is left to test with")
    measured_s = np.array([sample.step_time_s for sample in test])
    configurations = [configuration_of(sample) for sample in test]
    predictions = StepTimeModel.fit(train, population=population).predict_many(configurations)
    errors = _percent([p.step_time_s for p in predictions], measured_s)
    inside = [p.low_s <= s <= p.high_s for p, s in zip(predictions, measured_s, strict=True)]
    prior_s = PhysicalPrior.of(train, population=population).step_time_s(Columns.of(configurations))
    return Evaluation(
        mape=float(errors.mean()),
        prior_mape=float(_percent(prior_s, measured_s).mean()),
        trees_mape=float(_percent(_trees_alone(train, test), measured_s).mean()),
        ridge_mape=float(_percent(_ridge_alone(train, test), measured_s).mean()),
        coverage=100 * float(np.mean(inside)),
    )


def _percent(predicted_s: Sequence[float] | Floats, measured_s: Floats) -> Floats:
    errors: Floats = 100 * np.abs(np.asarray(predicted_s) / measured_s - 1)
    return errors


def _logs(samples: Sequence[StepProfile]) -> Floats:
    """Return the logs of all that a configuration consists of."""
    c = Columns.of([configuration_of(sample) for sample in samples])
    figures = (c.num_nodes, c.num_workers, c.fullest, c.emptiest, c.local_batch, c.threads, c.core_share)
    return np.log(np.stack([*figures, 1 + c.loader_workers, 1 + c.prefetch_factor], axis=1))


def _trees_alone(train: Sequence[StepProfile], test: Sequence[StepProfile]) -> Floats:
    """Predict step times by scikit-learn's boosted trees on logs, with leaves that a dozen samples can fill."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    with one_openmp_thread():
        trees = HistGradientBoostingRegressor(min_samples_leaf=2, early_stopping=False, random_state=0)
        trees.fit(_logs(train), np.log([s.step_time_s for s in train]))
        predicted: Floats = np.exp(trees.predict(_logs(test)))
    return predicted


def _ridge_alone(train: Sequence[StepProfile], test: Sequence[StepProfile]) -> Floats:
    """Predict step times by a linear model of logs, with the ridge of the smallest leave-one-out error."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    line = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 2, 11)))
    line.fit(_logs(train), np.log([s.step_time_s for s in train]))
    predicted: Floats = np.exp(line.predict(_logs(test)))
    return predicted


# The command: `dlrover lab evaluate --train A.csv --test B.csv`.

MAX_REMARKS = 20


def evaluate_command(options: argparse.Namespace) -> int:
    """Fit to some files, predict others, and print the errors."""
    try:
        train, test = _read(options.train), _read(options.test)
        history = [_read([path]) for path in options.history]
    except TraceError as error:
        raise UsageError(str(error)) from error
    print(f"{len(train)} samples to learn from, {len(test)} to predict")
    population = population_of(history)
    if history:
        print(f"{len(history)} other jobs with {sum(map(len, history))} samples", end="")
        print("" if population else ": none has enough configurations, so they are not used")
    print(evaluate(train, test, population))
    return EXIT_OK


def _read(paths: Sequence[Path]) -> list[StepProfile]:
    samples: list[StepProfile] = []
    for path in paths:
        trace = read_trace(path)
        for remark in trace.remarks[:MAX_REMARKS]:
            print(f"warning: {remark}", file=sys.stderr)
        if len(trace.remarks) > MAX_REMARKS:
            print(f"warning: {path}: {len(trace.remarks) - MAX_REMARKS} more remarks like these", file=sys.stderr)
        samples.extend(trace.samples)
    return samples
