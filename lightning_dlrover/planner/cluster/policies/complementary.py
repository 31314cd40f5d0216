"""Ours: sets of jobs that lose least to each other, by learned slowdowns, under every limit.

The cost of a set is the time that its device needs for its work if each job had one unit: 1 over the weighted mean of the
relative speeds. A job alone costs 1, so two jobs should share a device if that costs less than 2. The sets are those whose
costs have the smallest sum. A job that goes well with a difficult one is thus kept for it; a greedy choice would give it away.

At most `EXACT_NODES` jobs and occupied devices are searched exactly: all partitions into sets, by dynamic programming over
subsets. More are merged in rounds of matching, see `grouping`; the weight of a merger is the cost that it saves. No device is
left empty while jobs share another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from lightning_dlrover.planner.cluster.grouping import Group, Room, group_and_start, merge_in_rounds, merged
from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.matching import EXACT_NODES, best_partition
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import Floats, PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule

__all__ = ["best_sets", "complementary", "costs"]


def complementary(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        def merge(groups: list[Group], sample: Device, num_devices: int) -> list[Group]:
            return groups if len(groups) <= num_devices else best_sets(packing, groups, sample, settings, num_devices)

        group_and_start(packing, jobs, merge, settings.most_together)

    return place


def best_sets(
    packing: Packing,
    groups: list[Group],
    sample: Device,
    settings: PolicySettings,
    num_devices: int = 0,
    most_use: float = 1.0,
) -> list[Group]:
    """Merge groups into the sets whose costs have the smallest sum.

    Args:
        num_devices: merge no further than to this number of sets.
        most_use: the combined use of a set stays under this times every limit.
    """
    if len(groups) <= EXACT_NODES:
        found = _exact(packing, groups, sample, settings, most_use)
        if len(found) >= num_devices:
            return found

    def weigh(pairs: Sequence[tuple[Group, Group]], device: Device) -> Floats:
        return _savings(pairs, device, settings)

    most = settings.most_together
    return merge_in_rounds(packing, groups, sample, weigh, most, under_limits=True, num_enough=num_devices, most_use=most_use)


def costs(sets: Sequence[Sequence[Job]], device: Device, settings: PolicySettings) -> Floats:
    """Return the device time per unit of work of each set, shape ``(len(sets),)``; 1 for a job alone."""
    speeds = settings.speeds.relative_speeds(sets, device)
    found = np.empty(len(sets))
    for index, (jobs, relative) in enumerate(zip(sets, speeds, strict=True)):
        weights = [job.weight for job in jobs]
        found[index] = sum(weights) / sum(w * s for w, s in zip(weights, relative.tolist(), strict=True))
    return found


def _exact(packing: Packing, groups: list[Group], sample: Device, settings: PolicySettings, most_use: float) -> list[Group]:
    room = Room(packing, groups, sample, settings.most_together, True, most_use)
    unions: dict[int, Group] = {1 << index: group for index, group in enumerate(groups)}
    for size in range(2, settings.most_together + 1):
        for indices in combinations(range(len(groups)), size):
            if room.fits(indices):
                unions[sum(1 << index for index in indices)] = merged([groups[index] for index in indices])
    cost = costs([union.members for union in unions.values()], sample, settings)
    chosen = best_partition(dict(zip(unions, cost.tolist(), strict=True)), len(groups))
    return [unions[mask] for mask in chosen]


def _savings(pairs: Sequence[tuple[Group, Group]], sample: Device, settings: PolicySettings) -> Floats:
    parts = {id(group): group for pair in pairs for group in pair}
    sets = [group.members for group in parts.values()] + [one.members + other.members for one, other in pairs]
    cost = costs(sets, sample, settings).tolist()
    apart = dict(zip(parts, cost, strict=False))
    together = cost[len(parts) :]
    return np.array([apart[id(a)] + apart[id(b)] - both for (a, b), both in zip(pairs, together, strict=True)])
