"""Means of the measurements in each configuration, on which models are fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.columns import Floats
from lightning_dlrover.perf.samples import StepProfile

__all__ = ["Measured"]


@dataclass(frozen=True)
class Measured:
    """Means of the measurements in each of some configurations; arrays of shape ``(num_configurations,)``."""

    step_s: Floats  # geometric mean
    compute_s: Floats  # nan where parts were not measured
    data_s: Floats
    weight: Floats

    @classmethod
    def of(cls, groups: Sequence[Sequence[StepProfile]], weights: Sequence[float]) -> Measured:
        """Return one row for each group of windows of one configuration.

        A hundred windows of one size show no more of the shape than ten, so every configuration counts alike.
        """
        parts = [np.mean([_shares(sample) for sample in group], axis=0) for group in groups]
        step_s = np.array([np.exp(np.mean(np.log([sample.step_time_s for sample in group]))) for group in groups])
        shares = np.array(parts).reshape(-1, 2)
        return cls(step_s, shares[:, 0] * step_s, shares[:, 1] * step_s, np.asarray(weights, dtype=np.float64))

    @property
    def shares(self) -> Floats:
        """Shares of the step, as `PARTS`; of shape ``(num_configurations, 3)``, nan where parts were not measured."""
        compute, data = self.compute_s / self.step_s, self.data_s / self.step_s
        return np.stack([compute, data, np.maximum(0.0, 1 - compute - data)], axis=1)

    @property
    def work_s(self) -> Floats:
        """Seconds of computing, and the whole step where that was not measured."""
        return np.where(np.isfinite(self.compute_s), self.compute_s, self.step_s)

    def rows(self, index: NDArray[Any]) -> Measured:
        return Measured(self.step_s[index], self.compute_s[index], self.data_s[index], self.weight[index])


def _shares(sample: StepProfile) -> tuple[float, float]:
    """Return compute and data as shares of the step; nan where the parts do not add up to it."""
    compute_s = sample.forward_s + sample.backward_s + sample.optimizer_s + sample.other_s
    whole_s = compute_s + sample.data_wait_s + sample.communication_s
    if abs(whole_s - sample.step_time_s) > 0.05 * sample.step_time_s:
        return np.nan, np.nan
    return compute_s / whole_s, sample.data_wait_s / whole_s
