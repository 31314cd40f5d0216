"""Predict how fast jobs are beside each other on one device, relative to their speed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["Observation", "RelativeSpeed", "SlowdownModel"]


@dataclass(frozen=True)
class Observation:
    """Speeds measured while a group of jobs shared a device.

    Args:
        group: the jobs, each with a profile for the device's kind.
        relative_speeds: speed of each over its speed alone, in the order of `group`.
    """

    device: Device
    group: tuple[Job, ...]
    relative_speeds: tuple[float, ...]


@dataclass(frozen=True)
class RelativeSpeed:
    """A job's predicted speed beside others, over its speed alone, with a 90 % interval."""

    mean: float
    low: float
    high: float


class SlowdownModel:
    """Learned from observed groups; a `SpeedPredictor`. Without observations it predicts from limits and uses alone."""

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> SlowdownModel:
        """Fit to everything observed so far."""
        raise NotImplementedError

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the mean predictions; see `SpeedPredictor`."""
        raise NotImplementedError

    def predict(self, group: Sequence[Job], device: Device) -> list[RelativeSpeed]:
        """Return the prediction for each job of one group, with its interval."""
        raise NotImplementedError
