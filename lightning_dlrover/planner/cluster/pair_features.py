"""Traits of jobs that share a device, and the coordinates in which their speeds are predicted.

The speeds of a pair, relative to alone, are `r_a` and `r_b`. Their coordinates are the share ``log(r_a / r_b)``, which changes
its sign when the jobs are exchanged, and the total ``log((r_a + r_b) / 2)``, which does not. A device that is always busy fixes
the total, while the lengths of kernels and the scheduler decide on the share, so they are learned apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.jobs import RESOURCES, Device, Job
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["Features", "Pair", "Traits", "coordinates", "expected_speeds", "speeds", "traits_of"]

_Key = TypeVar("_Key")

UNKNOWN_TOTAL = 1.1
"""Expected sum of the relative speeds of two jobs with an unknown use of resources."""


@dataclass(frozen=True)
class Traits:
    """Inputs of a prediction; jobs with equal traits are taken for equal.

    Args:
        shares: used fraction of each limit, in the order of `RESOURCES`; 0 where either is unknown.
        other_kinds: log2 of the speed here over the geometric mean of those on other kinds of device; 0 where unknown.
    """

    family: str
    batch_size: float
    log_speed: float  # log2 of steps/s alone
    shares: tuple[float, ...]
    other_kinds: float


def traits_of(job: Job, device: Device) -> Traits:
    """Return the traits of a job on a kind of device; a job without a family is one of its own."""
    profile = job.profiles[device.kind]
    here = float(np.log2(profile.steps_per_s))
    others = [float(np.log2(p.steps_per_s)) for kind, p in sorted(job.profiles.items()) if kind != device.kind]
    shares = (profile.use.get(r, 0.0) / device.limits[r] if device.limits.get(r) else 0.0 for r in RESOURCES)
    return Traits(job.family or job.name, job.batch_size, here, tuple(shares), here - float(np.mean(others)) if others else 0.0)


@dataclass(frozen=True)
class Pair:
    """Relative speeds of two jobs beside each other."""

    one: Traits
    other: Traits
    speed_one: float
    speed_other: float


class Features:
    """Numbers for the traits of all known jobs: identities, families, and standardised columns.

    Traits of unknown jobs get identities, and families, that no known job has.
    """

    def __init__(self, known: Sequence[Traits]) -> None:
        self._families = {family: i for i, family in enumerate(sorted({t.family for t in known}))}
        self._identities = {key: i for i, key in enumerate(sorted({(t.family, t.batch_size) for t in known}))}
        sizes: dict[str, dict[float, None]] = {}
        for traits in known:
            sizes.setdefault(traits.family, {})[traits.batch_size] = None
        self._usual_size = {family: float(np.mean([_log_size(s) for s in of])) for family, of in sizes.items()}
        raw = self._raw(known)
        self._center, self._scale = raw.mean(0), raw.std(0)
        self.columns: NDArray[np.intp] = np.flatnonzero(self._scale > 1e-9)  # those that differ between the jobs

    @property
    def num_families(self) -> int:
        return len(self._families)

    def table(self, jobs: Sequence[Traits]) -> Floats:
        """Return the standardised columns, shape ``(len(jobs), num_columns)``."""
        relative = self._usual_sizes(jobs)
        return np.asarray(((self._raw(jobs, relative) - self._center) / np.maximum(self._scale, 1e-9))[:, self.columns])

    def families(self, jobs: Sequence[Traits]) -> NDArray[np.intp]:
        """Return the number of each job's family, shape ``(len(jobs),)``; unknown ones get numbers of their own."""
        return _numbers([t.family for t in jobs], self._families)

    def identities(self, jobs: Sequence[Traits]) -> NDArray[np.intp]:
        """Return the number of each job among those with its family and batch size, shape ``(len(jobs),)``."""
        return _numbers([(t.family, t.batch_size) for t in jobs], self._identities)

    def _usual_sizes(self, jobs: Sequence[Traits]) -> dict[str, float]:
        """Mean log2 of the batch sizes of each family; of a family not known, those that are asked for."""
        asked: dict[str, set[float]] = {}
        for traits in jobs:
            if traits.family not in self._usual_size:
                asked.setdefault(traits.family, set()).add(traits.batch_size)
        return {**self._usual_size, **{f: float(np.mean([_log_size(s) for s in sorted(of)])) for f, of in asked.items()}}

    def _raw(self, jobs: Sequence[Traits], usual: dict[str, float] | None = None) -> Floats:
        usual = self._usual_size if usual is None else usual
        rows = [(t.log_speed, _log_size(t.batch_size) - usual[t.family], t.other_kinds, *t.shares) for t in jobs]
        return np.array(rows, dtype=np.float64).reshape(len(jobs), 3 + len(RESOURCES))


def coordinates(speed_one: Floats, speed_other: Floats) -> tuple[Floats, Floats]:
    """Return share and total of pairs; all arrays have one shape."""
    return np.log(speed_one / speed_other), np.log((speed_one + speed_other) / 2)


def speeds(share: Floats, total: Floats) -> tuple[Floats, Floats]:
    """Return the relative speeds of pairs, the inverse of `coordinates`."""
    both = 2 * np.exp(total)
    return both / (1 + np.exp(-share)), both / (1 + np.exp(share))


def expected_speeds(one: Traits, other: Traits) -> tuple[float, float]:
    """Return the relative speeds to expect before any pair was observed.

    A resource asked for beyond its limit stretches the part of a step that uses it by the excess.
    """
    if not any(one.shares) or not any(other.shares):
        return UNKNOWN_TOTAL / 2, UNKNOWN_TOTAL / 2
    excess = [max(a + b - 1.0, 0.0) for a, b in zip(one.shares, other.shares, strict=True)]
    stretch = [1 + sum(min(share, 1.0) * e for share, e in zip(t.shares, excess, strict=True)) for t in (one, other)]
    return 1 / stretch[0], 1 / stretch[1]


def _log_size(batch_size: float) -> float:
    return float(np.log2(batch_size)) if batch_size > 0 else 0.0


def _numbers(keys: Sequence[_Key], known: Mapping[_Key, int]) -> NDArray[np.intp]:
    numbers = dict(known)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)
