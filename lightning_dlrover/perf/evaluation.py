"""Accuracy of the model's predictions, compared with its prior and with boosted trees alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.perf.columns import Columns, Floats, configuration_of
from lightning_dlrover.perf.model import StepTimeModel
from lightning_dlrover.perf.population import Population
from lightning_dlrover.perf.prior import PhysicalPrior
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.threads import one_openmp_thread

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Errors in percent over the test samples."""

    mape: float  # mean absolute percentage error of the step time
    prior_mape: float
    trees_mape: float
    coverage: float  # share of samples within the 90 % interval
    absolute_percentage_errors: Floats  # errors of the model, shape ``(num_test_samples,)``

    def __str__(self) -> str:
        values = {"mape": self.mape, "prior_mape": self.prior_mape, "trees_mape": self.trees_mape, "coverage": self.coverage}
        return " ".join(f"{name}={value:.2f}" for name, value in values.items())


def evaluate(train: Sequence[StepProfile], test: Sequence[StepProfile], population: Population | None = None) -> Evaluation:
    """Return the errors on `test` of a model, of its prior and of trees, all fitted to `train` alone.

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
        coverage=100 * float(np.mean(inside)),
        absolute_percentage_errors=errors,
    )


def _percent(predicted_s: Sequence[float] | Floats, measured_s: Floats) -> Floats:
    errors: Floats = 100 * np.abs(np.asarray(predicted_s) / measured_s - 1)
    return errors


def _trees_alone(train: Sequence[StepProfile], test: Sequence[StepProfile]) -> Floats:
    """Predict step times by scikit-learn's boosted trees with default settings."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    def columns(samples: Sequence[StepProfile]) -> list[tuple[float, ...]]:
        return [
            (s.num_nodes, s.num_workers, s.local_batch, s.cores, s.intra_op_threads, s.loader_workers, s.prefetch_factor)
            for s in samples
        ]

    with one_openmp_thread():
        trees = HistGradientBoostingRegressor(random_state=0).fit(columns(train), [s.step_time_s for s in train])
        predicted: Floats = trees.predict(columns(test))
    return predicted
