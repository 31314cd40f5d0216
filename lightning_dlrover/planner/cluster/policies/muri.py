"""Muri: interleave jobs with stages on different resources (Zhao et al., "Multi-resource interleaving for deep learning
training", SIGCOMM 2022).

A step is a sequence of stages, one for each resource, as long as the job keeps that resource busy. Jobs of a group rotate
through the resources, so a slot of the rotation lasts as long as its longest stage. The group's step is the sum of the slots,

    T = sum over slots s of max over jobs j of stage[j, (s + offset_j) mod num_resources]

with the best of all orders, and its efficiency is the mean utilisation: all stages over T times the number of resources. Groups
are found by maximum-weight matching on the efficiency, in rounds; a group slower than its jobs one by one has weight 0.
Merging ends when every group has a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from lightning_dlrover.planner.cluster.grouping import Group, group_and_start, merge_in_rounds
from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import Floats, PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule

__all__ = ["efficiencies", "muri", "stages"]

STAGES = ("input", "cores", "gpu", "pcie")
"""Resources with a stage of their own: Muri's storage, CPU, GPU and network."""

_OFFSETS = {n: np.array([(0, *rest) for rest in permutations(range(1, len(STAGES)), n - 1)]) for n in range(1, len(STAGES) + 1)}


def muri(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""
    together = min(settings.most_together, len(STAGES))

    def weigh(pairs: Sequence[tuple[Group, Group]], device: Device) -> Floats:
        return efficiencies([[*one.members, *other.members] for one, other in pairs], device)

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        def merge(groups: list[Group], sample: Device, num_devices: int) -> list[Group]:
            return merge_in_rounds(packing, groups, sample, weigh, together, under_limits=False, num_enough=num_devices)

        group_and_start(packing, jobs, merge, together)

    return place


def stages(job: Job, device: Device) -> Floats:
    """Seconds of a step in which a job keeps each resource of `STAGES` busy, shape ``(4,)``."""
    profile = job.profiles[device.kind]
    shares = [min(profile.use.get(r, 0.0) / device.limits[r], 1.0) if device.limits.get(r) else 0.0 for r in STAGES]
    if not any(shares):
        shares = [float(r == ("cores" if device.is_host else "gpu")) for r in STAGES]  # unknown: all in one stage
    return np.array(shares) / profile.steps_per_s


def efficiencies(groups: Sequence[Sequence[Job]], device: Device) -> Floats:
    """Return the mean utilisation by each group in its best order, shape ``(num_groups,)``.

    It is 0 where the group is slower than its first job would be if all took turns.
    """
    known = {id(job): stages(job, device) for group in groups for job in group}
    found = np.zeros(len(groups))
    for size in sorted({len(group) for group in groups}):
        of_size = [index for index, group in enumerate(groups) if len(group) == size]
        tables = np.array([[known[id(job)] for job in groups[index]] for index in of_size])  # (groups, jobs, stages)
        step_s = _step_s(tables)
        for index, table, step in zip(of_size, tables, step_s.tolist(), strict=True):
            first = max(groups[index], key=lambda job: (job.priority, -job.submitted_s))
            if step <= size / first.profiles[device.kind].steps_per_s:
                found[index] = table.sum() / (step * len(STAGES))
    return found


def _step_s(tables: Floats) -> Floats:
    """Seconds of a step of each group in its best order, shape ``(num_groups,)``."""
    num_jobs = tables.shape[1]
    slots = (_OFFSETS[num_jobs][:, :, None] + np.arange(len(STAGES))) % len(STAGES)  # (orders, jobs, slots)
    turned = tables[:, np.arange(num_jobs)[None, :, None], slots]  # (groups, orders, jobs, slots)
    return np.asarray(turned.max(axis=2).sum(axis=2).min(axis=1))
