"""RMixer's rule for CPU and GPU together (Tian et al., IEEE TPDS 2024; policy "dyMix" of the published code).

Jobs are sorted by their utilisation of a GPU, the largest first. The GPU with the least used memory takes the first that fits.
When no GPU has room, cores take the first job that fits of the list's tail: those behind the fraction of all workers that are
GPU workers. None goes to the cores near the end, while no more than `BETA` jobs for each GPU worker are left: it would run on
when all others have ended.

Differences from the published code: utilisation comes from profiles, not from a table by the name of the model; it is 1 where
it was not measured. The list holds the jobs that wait, as a policy does not see those that have ended, and jobs that are left
are those that wait or run. Jobs that can use no GPU go to the cores, and those that cannot use cores stay away from them. Where
the cluster has devices of one type, or a job several workers, jobs start in the order of the list.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.packing import Packing
from lightning_dlrover.planner.cluster.policy import PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule, start_spread

__all__ = ["BETA", "rmixer_mixed"]

BETA = 2.0
"""Jobs for each GPU worker that must be left for another to start on cores. The published scripts have 2 to 4."""


def rmixer_mixed(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""
    together = settings.most_together

    def place(packing: Packing, jobs: Sequence[Job], now_s: float) -> None:
        devices = list(packing.devices.values())
        num_gpu_workers = sum(min(device.places, together) for device in devices if not device.is_host)
        num_workers = sum(min(device.places, together) for device in devices)
        num_running = sum(len(packing.members(device)) for device in devices)
        waiting = sorted(jobs, key=lambda job: (-_utilisation(job, devices), job.submitted_s, job.name))
        num_left = len(waiting) + num_running
        first_of_tail = len(waiting) * num_gpu_workers / max(1, num_workers)
        tail = {job.name for number, job in enumerate(waiting) if number >= first_of_tail}
        waiting = start_spread(packing, waiting)
        while found := _next(packing, waiting, together, tail, num_left > BETA * num_gpu_workers):
            job, device = found
            packing.start(job, [device])
            waiting.remove(job)

    return place


def _next(packing: Packing, waiting: Sequence[Job], together: int, tail: set[str], is_early: bool) -> tuple[Job, Device] | None:
    """Return the next job to start, and its device."""
    free = [device for device in packing.open_devices() if len(packing.members(device)) < together]
    has_gpus = any(not device.is_host for device in packing.devices.values())
    for device in sorted(free, key=lambda device: (device.is_host, -packing.free_bytes(device), device.name)):
        for job in waiting:
            may = not device.is_host or not has_gpus or _only_cores(job, packing) or (is_early and job.name in tail)
            if may and packing.fits(job, device):
                return job, device
    return None


def _only_cores(job: Job, packing: Packing) -> bool:
    return not any(device.kind in job.profiles for device in packing.devices.values() if not device.is_host)


def _utilisation(job: Job, devices: Sequence[Device]) -> float:
    """Return the largest fraction of a GPU that a job uses; 0 if it runs on none."""
    kinds = {device.kind for device in devices if not device.is_host and device.kind in job.profiles}
    return max((job.profiles[kind].use.get("gpu", 1.0) for kind in kinds), default=0.0)
