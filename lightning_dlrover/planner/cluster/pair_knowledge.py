"""Knowledge of the speed of elastic jobs that share devices: learned from noisy windows of the simulated run, or all of it.

What a policy knows before the run comes from other pairs: those of the measured file in which at most one of the models is one
of the workload's. `SlowdownModel` learns from these and from windows of jobs that ran beside each other. A window shows the
parts of a step, so it is compared with the job's expected step alone, without the synchronisation.

Whether two jobs fit in memory together is known before, from their peaks alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.beside import BesideSpeeds
from lightning_dlrover.planner.cluster.elastic_jobs import KIND, Cluster, Family, placement_of
from lightning_dlrover.planner.cluster.jobs import Device, Job, Profile
from lightning_dlrover.planner.cluster.knowledge import KEPT_WINDOWS, NOISE, AloneTime
from lightning_dlrover.planner.cluster.measured_pairs import SHARED_LINKS, MeasuredPairs, Partner
from lightning_dlrover.planner.cluster.measured_speeds import Placement
from lightning_dlrover.planner.cluster.slowdown import Observation, SlowdownModel

__all__ = ["LearnedPairs", "PerfectPairs"]

FEW_PAIRS = 2
"""Number of observed pairs up to which each new one is a reason to fit again. With more, it takes twice as many."""

DEVICE = Device("any", KIND, "any", memory_bytes=1, places=2)

Alone: TypeAlias = Callable[[str, Placement], AloneTime]
"""Returns the known time of a family on devices of its own, by its name and the placement."""

_Pair: TypeAlias = tuple[Partner, Partner]


class _Families:
    """Families of a workload, and which of them can share how many devices."""

    def __init__(self, families: Mapping[str, Family], cluster: Cluster, pairs: MeasuredPairs) -> None:
        self.of, self.cluster, self.pairs = families, cluster, pairs
        self._can: dict[tuple[str, str, int], _Pair | None] = {}

    def models(self) -> set[str]:
        return {model for family in self.of.values() if (model := self.pairs.model(family.application.name)) is not None}

    def may_share(self, job: Job) -> bool:
        return job.family in self._sharing

    @cached_property
    def _sharing(self) -> frozenset[str]:
        """Families that can share some number of devices with another one, or among themselves."""
        sizes = {name: range(1, family.max_devices + 1) for name, family in self.of.items()}
        return frozenset(
            one for one in self.of if any(self.pair(one, other, size) is not None for other in self.of for size in sizes[one])
        )

    def pair(self, one: str, other: str, num_devices: int) -> _Pair | None:
        """Return the measured jobs that are like each device's part of two families; None: they cannot share so many."""
        key = one, other, num_devices
        if key not in self._can:
            self._can[key] = self._pair(self.of[one], self.of[other], num_devices)
        return self._can[key]

    def _pair(self, one: Family, other: Family, num_devices: int) -> _Pair | None:
        if num_devices > min(one.max_devices, other.max_devices):
            return None
        first, second = one.partner(num_devices, self.pairs), other.partner(num_devices, self.pairs)
        if first is None or second is None:
            return None
        both = self.pairs.relative_speed(first, second), self.pairs.relative_speed(second, first)
        return None if None in both else (first, second)


class PerfectPairs:
    """Knows the real speeds: an oracle. A `PairKnowledge`, and a `Beside`."""

    def __init__(self, families: Mapping[str, Family], cluster: Cluster, pairs: MeasuredPairs) -> None:
        self._families = _Families(families, cluster, pairs)

    def ran_beside(self, job: Job, other: Job, devices: Sequence[Device], steps_per_s: float) -> None:
        """Nothing is left to learn."""

    def beside(self) -> PerfectPairs:
        return self

    def may_share(self, job: Job) -> bool:
        return self._families.may_share(job)

    def speeds(self, one: Job, other: Job, num_devices: NDArray[np.integer[Any]]) -> BesideSpeeds:
        """Return the real speeds; see `Beside`."""
        found = np.zeros((2, len(num_devices)))
        first, second = self._families.of[one.family], self._families.of[other.family]
        for column, devices in enumerate(num_devices.tolist()):
            if self._families.pair(one.family, other.family, devices) is not None:
                placement = self._families.cluster.packed(devices)
                for row, (family, beside) in enumerate(((first, second), (second, first))):
                    found[row, column] = family.speed_beside(placement, beside, self._families.pairs) or 0.0
        return BesideSpeeds(found, np.zeros_like(found))


class LearnedPairs:
    """Learns from windows of jobs beside each other. Equal seeds and windows give equal knowledge. A `PairKnowledge`."""

    def __init__(
        self, families: Mapping[str, Family], cluster: Cluster, pairs: MeasuredPairs, alone: Alone, seed: int = 0
    ) -> None:
        self._families, self._alone, self._rng = _Families(families, cluster, pairs), alone, random.Random(f"pairs/{seed}")
        self._prior = _other_pairs(pairs, self._families.models())
        self._windows: dict[_Pair, list[float]] = {}  # relative speeds of the first beside the second, on a device
        self._model: SlowdownModel | None = None
        self._fitted = 0
        self._present: _Predictions | None = None

    def ran_beside(self, job: Job, other: Job, devices: Sequence[Device], steps_per_s: float) -> None:
        """Observe a window of a job beside the other one."""
        placement = placement_of(devices)
        pair = self._families.pair(job.family, other.family, len(devices))
        assert pair is not None, "the simulator's truth refuses pairs that cannot share"
        alone = self._alone(job.family, placement)
        seen = steps_per_s * self._rng.lognormvariate(0, NOISE) / alone.steps_per_s
        # The expected parts of a step may err: a window that synchronised all the time would say nothing of the devices.
        computing = max(1 / seen - SHARED_LINKS * alone.sync_share, 0.1 / seen)
        speed = (1 - alone.sync_share) / computing
        self._windows[pair] = [*self._windows.get(pair, ()), min(max(speed, 0.05), 1.2)][-KEPT_WINDOWS:]
        self._present = None

    def beside(self) -> _Predictions:
        if self._present is None:
            both = sorted((one, other) for one, other in self._windows if (other, one) in self._windows and one <= other)
            if self._model is None or len(both) >= self._fitted + (1 if self._fitted < FEW_PAIRS else self._fitted):
                seen = [_observation(self._families.pairs, pair, *map(self._mean, (pair, pair[::-1]))) for pair in both]
                self._model, self._fitted = SlowdownModel.fit([*self._prior, *seen]), len(both)
            means = {pair: (self._mean(pair), len(windows)) for pair, windows in self._windows.items()}
            self._present = _Predictions(self._families, self._alone, self._model, means)
        return self._present

    def _mean(self, pair: _Pair) -> float:
        windows = self._windows[pair]
        return math.exp(sum(map(math.log, windows)) / len(windows))


class _Predictions:
    """What is known at one moment; a `Beside`."""

    def __init__(
        self, families: _Families, alone: Alone, model: SlowdownModel, measured: Mapping[_Pair, tuple[float, int]]
    ) -> None:
        self._families, self._alone, self._model, self._measured = families, alone, model, measured
        self._on_device: dict[_Pair, tuple[list[float], list[float]]] = {}

    def may_share(self, job: Job) -> bool:
        return self._families.may_share(job)

    def speeds(self, one: Job, other: Job, num_devices: NDArray[np.integer[Any]]) -> BesideSpeeds:
        """Return the expected speeds; see `Beside`."""
        found, spreads = np.zeros((2, len(num_devices))), np.zeros((2, len(num_devices)))
        for column, devices in enumerate(num_devices.tolist()):
            pair = self._families.pair(one.family, other.family, devices)
            if pair is None:
                continue
            placement = self._families.cluster.packed(devices)
            on_device, deviations = self._of(pair)
            for row, (family, speed) in enumerate(zip((one.family, other.family), on_device, strict=True)):
                share = self._alone(family, placement).sync_share
                found[row, column] = 1 / ((1 - share) / speed + SHARED_LINKS * share)
                spreads[row, column] = deviations[row]
        return BesideSpeeds(found, spreads)

    def _of(self, pair: _Pair) -> tuple[list[float], list[float]]:
        """Speeds of both on one device over those alone, and their deviations: by windows of the pair, or predicted."""
        if pair not in self._on_device:
            jobs = [_job(self._families.pairs, partner) for partner in pair]
            predicted = self._model.predict(jobs, DEVICE)
            speeds, deviations = [p.mean for p in predicted], [math.log(p.high / p.mean) / 1.645 for p in predicted]
            for row, direction in enumerate((pair, pair[::-1])):
                if direction in self._measured:
                    mean, windows = self._measured[direction]
                    speeds[row], deviations[row] = mean, NOISE * math.sqrt(2 / windows)
            self._on_device[pair] = speeds, deviations
        return self._on_device[pair]


def _other_pairs(pairs: MeasuredPairs, models: set[str]) -> list[Observation]:
    """Return the measured pairs of which at most one is a model of the workload."""
    return [
        _observation(pairs, (one, other), speed, pairs.speeds[other, one])
        for (one, other), speed in sorted(pairs.speeds.items())
        if one <= other and speed > 0 and pairs.speeds[other, one] > 0 and not {one[0], other[0]} <= models
    ]


def _observation(pairs: MeasuredPairs, pair: _Pair, speed_one: float, speed_other: float) -> Observation:
    return Observation(DEVICE, (_job(pairs, pair[0]), _job(pairs, pair[1])), (speed_one, speed_other))


def _job(pairs: MeasuredPairs, partner: Partner) -> Job:
    """Return one device's part of a job, with its speed alone in the file of pairs."""
    model, batch = partner
    return Job(f"{model}/{batch:g}", {KIND: Profile(0, pairs.alone_per_s(partner))}, family=model, batch_size=batch)
