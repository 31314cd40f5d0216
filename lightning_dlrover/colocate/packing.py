"""Put waiting jobs into sets that share a device, merging pairs of sets in rounds.

Rounds of maximum-weight matching are Muri's way (Zhao et al., SIGCOMM 2022): the first round makes pairs, the next merges pairs
of those, so a device's four places are filled after two. A policy supplies the weight of a merger. A device with running jobs
is a set, too, which waiting jobs can join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster.jobs import RESOURCES, Device, Job
from lightning_dlrover.planner.cluster.matching import match
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import Floats
from lightning_dlrover.planner.cluster.queue_order import turn_of
from lightning_dlrover.planner.cluster.waiting import start_spread

__all__ = ["FEW", "Group", "Merge", "Room", "Weigh", "group_and_start", "merge_in_rounds", "merged"]

FEW = 24
"""Jobs to choose from even where only one place is free."""


@dataclass(frozen=True)
class Group:
    """Jobs that share a device.

    Args:
        waiting: those that do not run yet.
        device: the device of the running ones; None: all wait, and any empty device of the kind will do.
    """

    waiting: tuple[Job, ...]
    running: tuple[Job, ...] = ()
    device: Device | None = None

    @property
    def members(self) -> tuple[Job, ...]:
        return (*self.running, *self.waiting)


Merge = Callable[[list[Group], Device, int], list[Group]]
"""Merges groups for devices like the given one; the result holds the same jobs.

The number is that of devices for them, so fewer groups would leave devices empty.
"""

Weigh = Callable[[Sequence[tuple[Group, Group]], Device], Floats]
"""The gain of merging each pair of groups on such a device, shape ``(num_pairs,)``; 0 or below: not to be merged."""


class Room:
    """Which of some groups fit together, on the device that one of them has, or on an empty one like `sample`.

    Args:
        under_limits: their combined use shall also stay under every limit.
        most_use: factor on the limits.
    """

    def __init__(
        self,
        packing: Packing,
        groups: Sequence[Group],
        sample: Device,
        most_together: int,
        under_limits: bool,
        most_use: float = 1.0,
    ) -> None:
        kind = sample.kind
        self._most_use = most_use + 1e-9
        self._has_device = np.array([group.device is not None for group in groups])
        self._sizes = np.array([len(group.members) for group in groups])
        self._bytes = np.array([float(sum(job.profiles[kind].memory_bytes for job in g.waiting)) for g in groups])
        on = [group.device or sample for group in groups]
        self._bytes_free = np.array(
            [packing.free_bytes(d) if g.device else d.memory_bytes for g, d in zip(groups, on, strict=True)], dtype=float
        )
        self._places = np.array([min(device.places, most_together) for device in on])
        self._exclusive = np.array([any(job.exclusive for job in group.members) for group in groups])
        self._use = np.zeros((len(groups), len(RESOURCES)))
        if under_limits:
            for row, (group, device) in enumerate(zip(groups, on, strict=True)):
                self._use[row] = packing.use_of_limits(group.waiting, device, with_present=group.device is not None)

    def pairs(self) -> NDArray[np.intp]:
        """Return the pairs that fit, shape ``(num_pairs, 2)``, the smaller index first."""
        i, j = np.triu_indices(len(self._sizes), 1)
        device_first = self._has_device[i]
        places = np.where(device_first, self._places[i], self._places[j])
        free = np.where(device_first, self._bytes_free[i], self._bytes_free[j])
        fit = ~(self._has_device[i] & self._has_device[j]) & (self._sizes[i] + self._sizes[j] <= places)
        fit &= (self._bytes[i] + self._bytes[j] <= free) & ~(self._exclusive[i] | self._exclusive[j])
        fit &= (self._use[i] + self._use[j] <= self._most_use).all(axis=1)
        return np.column_stack([i[fit], j[fit]])

    def fits(self, indices: Sequence[int]) -> bool:
        """Return whether two or more groups fit together."""
        some = list(indices)
        with_device = [index for index in some if self._has_device[index]]
        where = with_device[0] if with_device else some[0]
        return bool(
            len(with_device) < 2
            and self._sizes[some].sum() <= self._places[where]
            and self._bytes[some].sum() <= self._bytes_free[where]
            and not self._exclusive[some].any()
            and (self._use[some].sum(axis=0) <= self._most_use).all()
        )


def group_and_start(packing: Packing, jobs: Sequence[Job], merge: Merge, most_together: int) -> None:
    """Start jobs of one device each in sets that `merge` makes, kind by kind, the kind with the fastest jobs first.

    Jobs of several devices start first, on the devices with the fewest workers.
    """
    waiting = start_spread(packing, jobs)
    kinds = sorted({device.kind for device in packing.open_devices()}, key=lambda kind: (-_speed(waiting, kind), kind))
    for kind in kinds:
        rivals = Counter(_best_kind(job) for job in waiting)
        suited = [job for job in waiting if kind in job.profiles and _is_worth(job, kind, rivals, packing)]
        # A set whose turn has not come may hold the best neighbour of a job that has just started, so look again.
        while suited and (started := _on_kind(packing, kind, suited, merge, most_together)):
            suited = [job for job in suited if job.name not in started]
            waiting = [job for job in waiting if job.name not in started]


def merged(groups: Sequence[Group]) -> Group:
    """Return the union; at most one of the groups has a device."""
    return Group(
        tuple(job for group in groups for job in group.waiting),
        tuple(job for group in groups for job in group.running),
        next((group.device for group in groups if group.device is not None), None),
    )


def merge_in_rounds(
    packing: Packing,
    groups: list[Group],
    sample: Device,
    weigh: Weigh,
    most_together: int,
    *,
    under_limits: bool,
    num_enough: int = 0,
    most_use: float = 1.0,
) -> list[Group]:
    """Merge matched pairs, round after round, until no merger gains or at most `num_enough` groups are left."""
    while len(groups) > max(num_enough, 1):
        pairs = Room(packing, groups, sample, most_together, under_limits, most_use).pairs()
        if not len(pairs):
            break
        weights = np.zeros((len(groups), len(groups)))
        rows, columns = pairs.T
        found = weigh([(groups[i], groups[j]) for i, j in pairs.tolist()], sample)
        # Of equal mergers, those with running jobs come first: they start something now.
        at_once = np.array([groups[i].device is not None or groups[j].device is not None for i, j in pairs.tolist()])
        weights[rows, columns] = weights[columns, rows] = found * (1 + 1e-6 * at_once)
        chosen = sorted(match(weights), key=lambda pair: (-weights[pair], pair))[: len(groups) - num_enough]
        if not chosen:
            break
        joined = {index for pair in chosen for index in pair}
        groups = [g for i, g in enumerate(groups) if i not in joined] + [merged([groups[i], groups[j]]) for i, j in chosen]
    return groups


def _on_kind(packing: Packing, kind: str, jobs: Sequence[Job], merge: Merge, most_together: int) -> set[str]:
    devices = [device for device in packing.open_devices() if device.kind == kind]
    empty = [device for device in devices if not packing.members(device)]
    occupied = [Group((), packing.members(d), d) for d in devices if 0 < len(packing.members(d)) < most_together]
    # Enough jobs for every free place, and some to choose from.
    places = sum(max(min(d.places, most_together) - len(packing.members(d)), 0) for d in devices)
    if not places:
        return set()
    groups = [*occupied, *(Group((job,)) for job in jobs[: max(2 * places, FEW)])]
    return _start(packing, merge(groups, devices[0], len(occupied) + len(empty)), empty)


def _start(packing: Packing, groups: Sequence[Group], empty: list[Device]) -> set[str]:
    """Start jobs that join running ones, then the sets with the first jobs in order on empty devices."""
    started: set[str] = set()
    free = list(empty)
    for group in sorted(groups, key=lambda group: (group.device is None, _first(group))):
        device = group.device
        if device is None:
            device = next((d for d in free if packing.fits(group.waiting[-1], d, group.waiting[:-1])), None)
            if device is None:
                continue
            free.remove(device)
        elif group.waiting and not packing.fits(group.waiting[-1], device, group.waiting[:-1]):
            continue
        for job in group.waiting:
            packing.start(job, [device])
            started.add(job.name)
    return started


def _first(group: Group) -> tuple[int, float, str]:
    if not group.waiting:
        return (0, 0.0, "")
    return min(map(turn_of, group.waiting))


def _speed(jobs: Sequence[Job], kind: str) -> float:
    """Mean speed of jobs on a kind of device over their best."""
    shares = [_share(job, kind) for job in jobs if kind in job.profiles]
    return sum(shares) / len(shares) if shares else 0.0


def _share(job: Job, kind: str) -> float:
    return job.profiles[kind].steps_per_s / max(profile.steps_per_s for profile in job.profiles.values())


def _best_kind(job: Job) -> str:
    return max(job.profiles, key=lambda kind: (job.profiles[kind].steps_per_s, kind))


def _is_worth(job: Job, kind: str, rivals: Mapping[str, int], packing: Packing) -> bool:
    """Whether a job ends earlier here than if it waited for its fastest kind of device, judged by the length of that queue."""
    best = _best_kind(job)
    if best == kind:
        return True
    places = sum(device.places for device in packing.devices.values() if device.kind == best)
    return places == 0 or _share(job, kind) * (1 + rivals[best] / places) >= 1
