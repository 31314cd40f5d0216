"""Muri: interleave jobs whose stages use different resources (Zhao et al., "Multi-resource interleaving for deep learning
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
from lightning_dlrover.planner.cluster.waiting import Place

__all__ = ["efficiency", "muri", "stages"]

STAGES = ("input", "cores", "gpu", "pcie")
"""Resources with a stage of their own: Muri's storage, CPU, GPU and network."""

_OFFSETS = {n: np.array([(0, *rest) for rest in permutations(range(1, len(STAGES)), n - 1)]) for n in range(1, len(STAGES) + 1)}


def muri(settings: PolicySettings) -> Place:
    """Return the policy."""
    together = min(settings.most_together, len(STAGES))

    def weigh(pairs: Sequence[tuple[Group, Group]], device: Device) -> Floats:
        return np.array([efficiency([*one.members, *other.members], device) for one, other in pairs])

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        def merge(groups: list[Group], sample: Device) -> list[Group]:
            num_devices = sum(d.kind == sample.kind for d in packing.open_devices())
            return merge_in_rounds(packing, groups, sample, weigh, together, num_devices)

        group_and_start(packing, jobs, merge, together)

    return place


def stages(job: Job, device: Device) -> Floats:
    """Seconds of a step in which a job keeps each resource of `STAGES` busy, shape ``(4,)``."""
    profile = job.profiles[device.kind]
    shares = [min(profile.use.get(r, 0.0) / device.limits[r], 1.0) if device.limits.get(r) else 0.0 for r in STAGES]
    if not any(shares):
        shares = [float(r == ("cores" if device.is_host else "gpu")) for r in STAGES]  # unknown: all in one stage
    return np.array(shares) / profile.steps_per_s


def efficiency(jobs: Sequence[Job], device: Device) -> float:
    """Mean utilisation of the resources by a group that rotates in its best order; 0 if its jobs do better in turn."""
    table = np.array([stages(job, device) for job in jobs])  # shape (num_jobs, num_stages)
    slots = np.arange(len(STAGES))
    # Shape (num_orders, num_jobs, num_slots): the stage that each job has in each slot.
    turned = table[np.arange(len(jobs))[None, :, None], (_OFFSETS[len(jobs)][:, :, None] + slots) % len(STAGES)]
    step_s = float(turned.max(axis=1).sum(axis=1).min())
    alone_s = [1 / job.profiles[device.kind].steps_per_s for job in jobs]
    first = max(range(len(jobs)), key=lambda i: (jobs[i].priority, -jobs[i].submitted_s))
    if step_s > len(jobs) * alone_s[first]:
        return 0.0
    return float(table.sum() / (step_s * len(STAGES)))
