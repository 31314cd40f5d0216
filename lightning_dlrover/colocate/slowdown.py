"""Predict how fast jobs are beside each other on one device, relative to their speed alone.

Everything is reduced to pairs. A resource that two jobs want beyond its limit stretches the part of a step that uses it by the
excess. That expectation is corrected by the mean of what was observed of the pair, and of pairs of the same families. A job's
excess beside a group, its slowdown less 1, is the sum of its excesses beside each member.

A Gaussian process and trees over pairs predict single pairs better, but jobs in a simulated cluster ended no sooner with them
(docs/colocate/policies.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.planner.cluster.jobs import RESOURCES, Device, Job
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["LEAST_SPEED", "Observation", "SlowdownModel"]

UNKNOWN_TOTAL = 1.1
"""Expected sum of the relative speeds of two jobs with an unknown use of resources."""
LEAST_SPEED, MOST_SPEED = 0.01, 1.5
"""Lowest and highest relative speed that is predicted."""
PRIOR = 1.0
"""Observations that an expectation counts for."""
MOST_KEPT = 10_000
"""Number of jobs with a use that is kept from one decision to the next."""


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

    def __post_init__(self) -> None:
        if len(self.group) != len(self.relative_speeds):
            raise ValueError(f"{len(self.group)} jobs on {self.device.name!r} have {len(self.relative_speeds)} speeds")
        if any(not speed > 0 for speed in self.relative_speeds):
            raise ValueError(
                f"the speeds {self.relative_speeds} on {self.device.name!r} are not all above 0; "
                "leave out groups with a job that made no step"
            )


@dataclass(frozen=True)
class _Use:
    """Inputs of a prediction; jobs with equal ones are taken for equal.

    Args:
        shares: used fraction of each limit, in the order of `RESOURCES`; 0 where either is unknown.
    """

    device_kind: str
    family: str
    batch_size: float
    shares: tuple[float, ...]


@dataclass
class _Seen:
    """Sum of the logs of observed speeds over expected ones, and their number."""

    total: float = 0.0
    number: int = 0

    def mean(self, prior: float) -> float:
        return (self.total + PRIOR * prior) / (self.number + PRIOR)


class SlowdownModel:
    """Learned from observed groups; a `SpeedPredictor`. Without observations it predicts from uses and limits alone.

        model = SlowdownModel.fit([Observation(gpu, (dlrm, bert), (0.71, 0.62))])
        model.relative_speeds([(dlrm, resnet)], gpu)

    Args:
        seen: by the two jobs' kind of device, families and batch sizes, and by their kind of device and families.
    """

    def __init__(self, seen: Mapping[tuple[object, ...], _Seen] | None = None) -> None:
        self._seen = dict(seen or {})
        # Uses by their sources. The objects are kept, so that their ids are not used again.
        self._uses: dict[tuple[str, str, float, int, int], tuple[_Use, object, object]] = {}
        self._excess: dict[tuple[_Use, _Use], float] = {}

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> SlowdownModel:
        """Fit to everything observed so far."""
        seen: defaultdict[tuple[object, ...], _Seen] = defaultdict(_Seen)
        for observation in observations:
            uses = [_use_of(job, observation.device) for job in observation.group]
            for i, (use, speed) in enumerate(zip(uses, observation.relative_speeds, strict=True)):
                others = [other for j, other in enumerate(uses) if j != i]
                expected = [1 / _expected_speed(use, other) - 1 for other in others]
                # Each neighbour has a part of the excess, in proportion to the expectations.
                weights = np.array(expected) + 0.05
                for other, before, part in zip(others, expected, (weights / weights.sum()).tolist(), strict=True):
                    change = float(np.log((1 + before) / max(1 + (1 / speed - 1) * part, 1 / MOST_SPEED)))
                    for key in _keys(use, other):
                        seen[key].total += change
                        seen[key].number += 1
        return cls(seen)

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the predictions; see `SpeedPredictor`."""
        found = []
        for group in groups:
            uses = [self._use(job, device) for job in group]
            excess = [sum(self._beside(use, other) for j, other in enumerate(uses) if j != i) for i, use in enumerate(uses)]
            found.append(1 / (1 + np.maximum(np.array(excess, dtype=np.float64), -0.5)))
        return found

    def _use(self, job: Job, device: Device) -> _Use:
        key = (job.name, job.family, job.batch_size, id(job.profiles), id(device.limits))
        known = self._uses.get(key)
        if known is None:
            if len(self._uses) >= MOST_KEPT:
                self._uses.clear()
                self._excess.clear()
            known = self._uses[key] = _use_of(job, device), job.profiles, device.limits
        return known[0]

    def _beside(self, one: _Use, other: _Use) -> float:
        """Return the excess of a job beside another."""
        excess = self._excess.get((one, other))
        if excess is None:
            pair, families = (self._seen.get(key, _Seen()) for key in _keys(one, other))
            speed = _expected_speed(one, other) * float(np.exp(pair.mean(families.mean(0.0))))
            excess = self._excess[one, other] = 1 / min(max(speed, LEAST_SPEED), MOST_SPEED) - 1
        return excess


def _keys(one: _Use, other: _Use) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return the keys of a pair of jobs, and of their families."""
    families = (one.device_kind, one.family, other.family)
    return (*families, one.batch_size, other.batch_size), families


def _use_of(job: Job, device: Device) -> _Use:
    """Return the use of a job on a kind of device; a job without a family is one of its own."""
    use, limits = job.profiles[device.kind].use, device.limits
    shares = tuple(use.get(r, 0.0) / limits[r] if limits.get(r) else 0.0 for r in RESOURCES)
    return _Use(device.kind, job.family or job.name, job.batch_size, shares)


def _expected_speed(one: _Use, other: _Use) -> float:
    """Return the relative speed to expect of the first job before the pair was observed."""
    if not any(one.shares) or not any(other.shares):
        return UNKNOWN_TOTAL / 2
    excess = [max(a + b - 1.0, 0.0) for a, b in zip(one.shares, other.shares, strict=True)]
    return 1 / (1 + sum(min(share, 1.0) * e for share, e in zip(one.shares, excess, strict=True)))
