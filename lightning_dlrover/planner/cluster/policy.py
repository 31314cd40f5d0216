"""The interface of a policy, and the settings of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.jobs import Allocation, Device, Job, State

__all__ = ["Floats", "Policy", "PolicySettings", "SpeedPredictor", "Undisturbed"]

Floats = NDArray[np.float64]


class Policy(Protocol):
    """A pure function: the same state gives the same allocation. It keeps nothing between calls."""

    def __call__(self, state: State) -> Allocation:
        """Return the devices of every job that shall run from now on."""
        ...


class SpeedPredictor(Protocol):
    """Predicts the speed of jobs beside each other. `slowdown.SlowdownModel` is one."""

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the speed of each job of each group, all on one device, over its speed alone there.

        Args:
            groups: jobs that have a profile for the device's kind; a job of several workers appears once for each.
        Returns:
            For each group an array of shape ``(len(group),)``; 1 is the speed alone.
        """
        ...


@dataclass(frozen=True)
class Undisturbed:
    """Predicts that no job disturbs another."""

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        return [np.ones(len(group)) for group in groups]


@dataclass(frozen=True)
class PolicySettings:
    """Settings of the policies in the registry; each uses those that it needs.

    Args:
        max_wait_s: a job that has waited longer goes before all others, and a device is kept free for it.
        seed: for policies that choose at random. Equal seeds choose alike.
        most_together: most workers of different jobs on one device, where its places allow more.
        owner_weights: importance of the jobs of each owner; 1 for an owner that is absent.
        may_pause: whether a running elastic job may be put back to wait. Its devices may change anyway.
        least_gain: a device that adds less than this fraction of a device's speed at its job's best efficiency stays free.
    """

    speeds: SpeedPredictor = Undisturbed()
    max_wait_s: float = 3600.0
    seed: int = 0
    most_together: int = 4
    owner_weights: Mapping[str, float] = field(default_factory=dict)
    may_pause: bool = True
    least_gain: float = 0.05
