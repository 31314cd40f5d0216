"""Predict how fast jobs are beside each other on one device, relative to their speed alone.

Everything is reduced to pairs. A job's excess beside a group, its slowdown less 1, is the sum of its excesses beside each
member, times a factor for the size of the group, learned where such groups were observed. Speeds of pairs come from a Gaussian
process (`pair_effects`) for jobs that were observed, and the less was seen of a pair's jobs, from trees (`pair_trees`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.pair_effects import PairEffects
from lightning_dlrover.planner.cluster.pair_features import (
    Features,
    Pair,
    Traits,
    coordinates,
    expected_speeds,
    speeds,
    traits_of,
)
from lightning_dlrover.planner.cluster.pair_trees import PairTrees
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["Observation", "RelativeSpeed", "SlowdownModel"]

MIN_FOR_TREES = 20
"""Fewest observed pairs with which trees are asked."""

MOST_PAIRS = 400
"""Newest pairs of a kind of device that are learned from. Bounds the time of a fit."""

UNSEEN_DEVIATION = 0.25
"""Standard deviation of the log of a speed where no pair was observed on that kind of device."""

LEAST_SPEED = 0.01
"""Lowest relative speed that is predicted."""

MOST_KEPT = 10_000
"""Number of jobs with traits kept from one decision to the next."""


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
class RelativeSpeed:
    """A job's predicted speed beside others, over its speed alone, with a 90 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class _OfKind:
    """The two models of one kind of device."""

    share: PairEffects
    total: PairEffects
    trees: PairTrees | None


class SlowdownModel:
    """Learned from observed groups; a `SpeedPredictor`. Without observations it predicts from uses and limits alone.

    Equal observations give equal predictions. Predictions of pairs are kept, so asking again is cheap.

        model = SlowdownModel.fit([Observation(gpu, (dlrm, bert), (0.71, 0.62))])
        model.predict([dlrm, resnet], gpu)
    """

    def __init__(self, kinds: Mapping[str, _OfKind] | None = None, factors: Mapping[int, float] | None = None) -> None:
        self._kinds, self._factors = dict(kinds or {}), dict(factors or {})
        self._tables: dict[str, _Table] = {}

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> SlowdownModel:
        """Fit to everything observed so far, in order of time."""
        kinds: dict[str, _OfKind] = {}
        for kind in sorted({o.device.kind for o in observations}):
            pairs = [pair for o in observations if o.device.kind == kind for pair in _pairs_of(o)][-MOST_PAIRS:]
            if pairs:
                kinds[kind] = _learn(pairs)
        model = cls(kinds)
        ratios: dict[int, list[float]] = {}
        large = [o for o in observations if len(o.group) > 2]
        for name in sorted({o.device.name for o in large}):
            of_device = [o for o in large if o.device.name == name]
            for o, (excesses, _) in zip(
                of_device, model._excesses([o.group for o in of_device], of_device[-1].device), strict=True
            ):
                ratios.setdefault(len(o.group), []).extend(
                    (1 / speed - 1) / max(excess, 0.05) for speed, excess in zip(o.relative_speeds, excesses, strict=True)
                )
        # Three observations of the factor 1 are the prior.
        factors = {size: (float(np.median(seen)) * len(seen) + 3) / (len(seen) + 3) for size, seen in ratios.items()}
        return cls(kinds, {size: float(np.clip(factor, 0.2, 3.0)) for size, factor in factors.items()})

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the mean predictions; see `SpeedPredictor`."""
        return [
            1 / (1 + self._factors.get(len(group), 1.0) * excess)
            for group, (excess, _) in zip(groups, self._excesses(groups, device), strict=True)
        ]

    def predict(self, group: Sequence[Job], device: Device) -> list[RelativeSpeed]:
        """Return the prediction for each job of one group, with its interval."""
        (means,) = self.relative_speeds([group], device)
        ((_, deviations),) = self._excesses([group], device)
        spans = np.exp(1.645 * deviations)
        return [RelativeSpeed(float(m), float(m / span), float(m * span)) for m, span in zip(means, spans, strict=True)]

    def _excesses(self, groups: Sequence[Sequence[Job]], device: Device) -> list[tuple[Floats, Floats]]:
        """For each group, the summed excess of each job beside the others, and the deviation of the log of its speed."""
        table = self._tables.setdefault(device.kind, _Table(self._kinds.get(device.kind)))
        numbers = [[table.number(job, device) for job in group] for group in groups]
        result: list[tuple[Floats, Floats]] = [(np.zeros(0), np.zeros(0))] * len(groups)
        for size in sorted({len(group) for group in groups} - {0}):
            of_size = [index for index, group in enumerate(groups) if len(group) == size]
            rows = np.array([numbers[index] for index in of_size])
            excess, deviation = table.of_groups(rows)
            for index, one, other in zip(of_size, excess, deviation, strict=True):
                result[index] = one, other
        return result


class _Table:
    """Predictions of the pairs of one kind of device that were asked for, so that asking again is cheap."""

    def __init__(self, of_kind: _OfKind | None) -> None:
        self._of_kind = of_kind
        self._traits: dict[Traits, int] = {}
        # Numbers of traits by their sources. The objects are kept, so that their ids are not used again.
        self._numbers: dict[tuple[str, str, float, int, int], tuple[int, object, object]] = {}
        self._excess, self._deviation = np.full((0, 0), np.nan), np.full((0, 0), np.nan)

    def number(self, job: Job, device: Device) -> int:
        """Return the number of a job's traits."""
        key = (job.name, job.family, job.batch_size, id(job.profiles), id(device.limits))
        known = self._numbers.get(key)
        if known is None:
            if len(self._numbers) >= MOST_KEPT:
                self._numbers.clear()
            traits = traits_of(job, device)
            known = self._traits.setdefault(traits, len(self._traits)), job.profiles, device.limits
            self._numbers[key] = known
        return known[0]

    def of_groups(self, rows: NDArray[np.intp]) -> tuple[Floats, Floats]:
        """Return excesses and deviations, each of the shape of `rows`, which is ``(num_groups, size)``."""
        size = rows.shape[1]
        if size == 1:
            return np.zeros(rows.shape), np.zeros(rows.shape)
        ones, others = np.repeat(rows, size, axis=1).ravel(), np.tile(rows, (1, size)).ravel()
        self._predict(ones, others)
        beside = ~np.eye(size, dtype=bool)
        excess = self._excess[ones, others].reshape(len(rows), size, size)
        deviation = self._deviation[ones, others].reshape(len(rows), size, size)
        total = np.where(beside, excess, 0.0).sum(axis=2)
        mean_square = np.where(beside, deviation**2, 0.0).sum(axis=2) / (size - 1)
        return np.maximum(total, -0.5), np.sqrt(mean_square)

    def _predict(self, ones: NDArray[np.intp], others: NDArray[np.intp]) -> None:
        """Predict pairs that are asked for the first time, both directions at once."""
        short = len(self._traits) - len(self._excess)
        if short > 0:
            wider = ((0, max(short, len(self._excess))),) * 2
            self._excess, self._deviation = (np.pad(t, wider, constant_values=np.nan) for t in (self._excess, self._deviation))
        new = np.isnan(self._excess[ones, others])
        if not new.any():
            return
        pairs = np.unique(np.sort(np.column_stack([ones[new], others[new]]), axis=1), axis=0)
        traits = list(self._traits)
        first, second = [traits[i] for i in pairs[:, 0]], [traits[i] for i in pairs[:, 1]]
        expected = np.array([expected_speeds(a, b) for a, b in zip(first, second, strict=True)])
        share, total = coordinates(expected[:, 0], expected[:, 1])
        deviations = np.full((len(pairs), 2), UNSEEN_DEVIATION)
        if self._of_kind is not None:
            deviations, share, total = _corrected(self._of_kind, first, second, share, total)
        for (a, b), speed, column in zip((pairs.T, pairs.T[::-1]), speeds(share, total), (0, 1), strict=True):
            self._excess[a, b] = 1 / np.maximum(speed, LEAST_SPEED) - 1
            self._deviation[a, b] = deviations[:, column]


def _learn(pairs: Sequence[Pair]) -> _OfKind:
    ones, others = [p.one for p in pairs], [p.other for p in pairs]
    features = Features(list(dict.fromkeys([*ones, *others])))
    expected = np.array([expected_speeds(p.one, p.other) for p in pairs])
    share, total = coordinates(np.array([p.speed_one for p in pairs]), np.array([p.speed_other for p in pairs]))
    expected_share, expected_total = coordinates(expected[:, 0], expected[:, 1])
    share, total = share - expected_share, total - expected_total
    enough = len(pairs) >= MIN_FOR_TREES
    return _OfKind(
        PairEffects(features, -1, 0.4).fit(ones, others, share),
        PairEffects(features, 1, 0.1).fit(ones, others, total),
        PairTrees(features).fit(ones, others, share, total) if enough else None,
    )


def _corrected(
    of_kind: _OfKind, ones: Sequence[Traits], others: Sequence[Traits], share: Floats, total: Floats
) -> tuple[Floats, Floats, Floats]:
    """Deviations of the log of both speeds, shape ``(num_pairs, 2)``, and the corrected expectations."""
    share_change, share_deviation, share_learned = of_kind.share.predict(ones, others)
    total_change, total_deviation, _ = of_kind.total.predict(ones, others)
    if of_kind.trees is not None:
        by_trees = of_kind.trees.predict(ones, others)
        # The less was learned of a pair's jobs, the more weight the trees have.
        share_change = share_learned * share_change + (1 - share_learned) * by_trees[0]
        total_change = share_learned * total_change + (1 - share_learned) * by_trees[1]
    share, total = share + share_change, total + total_change
    part = 1 / (1 + np.exp(-share))  # share of the first job in the total
    wide, deep = of_kind.share.calibration * share_deviation, of_kind.total.calibration * total_deviation
    deviations = np.column_stack([np.hypot(deep, (1 - part) * wide), np.hypot(deep, part * wide)])
    return deviations, share, total


def _pairs_of(observation: Observation) -> list[Pair]:
    """The pairs of a group, each job's excess divided among the others in proportion to the expectations."""
    traits = [traits_of(job, observation.device) for job in observation.group]
    size = len(traits)
    excess = np.zeros((size, size))
    for i in range(size):
        expected = np.array([1 / expected_speeds(traits[i], traits[j])[0] - 1 + 0.05 if j != i else 0.0 for j in range(size)])
        if size > 1:
            excess[i] = (1 / observation.relative_speeds[i] - 1) * expected / expected.sum()
    speed = 1 / np.maximum(1 + excess, 0.2)
    return [Pair(traits[i], traits[j], speed[i, j], speed[j, i]) for i in range(size) for j in range(i + 1, size)]
