"""Make a policy of a way to choose sizes: sizes decide, one shared placement turns them into devices.

Devices of one kind, with equal memory, are divided by themselves. A running job with limits for one size only stays where it
is. A device has one worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_dlrover.planner.cluster.elastic.bounds import floors_of, turns, within_limits
from lightning_dlrover.planner.cluster.elastic.placement import place
from lightning_dlrover.planner.cluster.elastic.share import Share, SizePolicy
from lightning_dlrover.planner.cluster.elastic.speeds import Ints, SpeedTables
from lightning_dlrover.planner.cluster.jobs import Allocation, Device, Job, Running, State
from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings
from lightning_dlrover.planner.space import sizes_to_consider

__all__ = ["with_placement"]


def with_placement(sizes: SizePolicy, settings: PolicySettings) -> Policy:
    """Return the policy that gives jobs the sizes that `sizes` chooses, within the bounds that all policies keep."""
    tables = SpeedTables()

    def decide(state: State) -> Allocation:
        fixed = [run for run in state.running if _is_fixed(run.job)]
        allocation = {run.job.name: run.devices for run in fixed}
        for pool in _pools(state, fixed):
            numbers = _divide(pool, state.now_s, sizes, settings, tables) if pool.jobs else {}
            running = {name: run.devices for name, run in pool.running.items()}
            jobs = {job.name: job for job in pool.jobs}
            allocation.update(place(pool.devices, pool.per_node, jobs, numbers, running))
        return allocation

    return decide


def _is_fixed(job: Job) -> bool:
    return job.fewest_devices == job.most_devices


@dataclass(frozen=True)
class _Pool:
    """Devices of one kind and memory that no fixed job has, and the jobs that may have them."""

    kind: str
    devices: tuple[Device, ...]
    num_in_cluster: int  # those of fixed jobs included
    per_node: int
    jobs: tuple[Job, ...]
    running: Mapping[str, Running]


def _pools(state: State, fixed: Sequence[Running]) -> list[_Pool]:
    keys = {device.name: (device.kind, device.memory_bytes) for device in state.devices}
    alike: dict[tuple[str, int], list[Device]] = {}
    for device in state.devices:
        alike.setdefault(keys[device.name], []).append(device)
    running: dict[tuple[str, int], list[Running]] = {key: [] for key in alike}
    for run in state.running:
        if not _is_fixed(run.job):
            running[keys[run.devices[0]]].append(run)
    waiting = _places_to_wait(state.waiting, alike, running)
    taken = {name for run in fixed for name in run.devices}
    pools = []
    for key, devices in sorted(alike.items()):
        jobs = sorted([*waiting[key], *(run.job for run in running[key])], key=lambda job: (job.submitted_s, job.name))
        free = tuple(device for device in devices if device.name not in taken)
        per_node = max(Counter(device.node for device in devices).values())
        runs = {run.job.name: run for run in running[key]}
        pools.append(_Pool(key[0], free, len(devices), per_node, tuple(jobs), runs))
    return pools


def _places_to_wait(
    waiting: Sequence[Job],
    alike: Mapping[tuple[str, int], Sequence[Device]],
    running: Mapping[tuple[str, int], Sequence[Running]],
) -> dict[tuple[str, int], list[Job]]:
    """Waiting jobs by the devices that each waits for: the fastest, by its speed there and by how many others want them."""
    found: dict[tuple[str, int], list[Job]] = {key: [] for key in alike}
    wanted = {key: sum(len(run.devices) for run in runs) for key, runs in running.items()}
    for job in sorted(waiting, key=lambda job: (job.submitted_s, job.name)):
        able = [key for key in sorted(alike) if _can_run(job, *key) and job.fewest_devices <= len(alike[key])]
        if not able:
            continue  # it could never start, see `packing.why_never`

        def worth(key: tuple[str, int], job: Job = job) -> float:
            load = (wanted[key] + job.num_devices) / len(alike[key])
            return job.profiles[key[0]].steps_per_s / max(load, 1.0)

        best = max(able, key=worth)
        found[best].append(job)
        wanted[best] += job.num_devices
    return found


def _can_run(job: Job, kind: str, memory_bytes: int) -> bool:
    return kind in job.profiles and job.profiles[kind].memory_bytes <= memory_bytes


def _divide(pool: _Pool, now_s: float, sizes: SizePolicy, settings: PolicySettings, tables: SpeedTables) -> dict[str, int]:
    """Devices of each job of a pool. Jobs that wait are absent."""
    share = _share(pool, now_s, settings, tables)
    share = share.rows(turns(share), share.num_devices)
    numbers = np.zeros(len(share.jobs), dtype=np.int64)
    if not sizes.preempts:
        numbers = within_limits(share, sizes.choose(share))
    else:
        floors = floors_of(share, sizes.rigid)
        share = replace(share, floors=floors.devices)
        held = _held(share, sizes.every_s)
        numbers[held] = share.present[held]
        left, owed = share.num_devices - int(numbers.sum()), int(floors.devices.sum() - floors.devices[held].sum())
        for rows in _by_priority(share, floors.is_short, held):
            owed -= int(floors.devices[rows].sum())
            some = share.rows(rows, left - owed)
            numbers[rows] = within_limits(some, sizes.choose(some))
            left -= int(numbers[rows].sum())
    return {job.name: number for job, number in zip(share.jobs, numbers.tolist(), strict=True) if number}


def _held(share: Share, every_s: float | None) -> list[int]:
    """Rows of running jobs that keep their sizes, as they have changed within the policy's interval."""
    if every_s is None:
        return []
    is_held = (share.present >= np.maximum(share.floors, 1)) & (share.now_s - share.since_s < every_s)
    if share.present[is_held].sum() + share.floors[~is_held].sum() > share.num_devices:
        return []
    return [int(index) for index in np.flatnonzero(is_held)]


def _by_priority(share: Share, is_short: bool, held: Sequence[int]) -> list[list[int]]:
    """Rows of the jobs that take part, the highest priority first.

    While devices are too few for a floor, no job takes part that could not be paused later.
    """
    kept = set(held)
    rows = [
        index
        for index, job in enumerate(share.jobs)
        if index not in kept
        and (
            not is_short
            or share.present[index]
            or share.floors[index]
            or (share.settings.may_pause and job.fewest_devices < job.most_devices)
        )
    ]
    levels = sorted({share.jobs[index].priority for index in rows}, reverse=True)
    return [[index for index in rows if share.jobs[index].priority == level] for level in levels]


def _share(pool: _Pool, now_s: float, settings: PolicySettings, tables: SpeedTables) -> Share:
    weights = settings.owner_weights
    jobs = tuple(
        replace(job, weight=job.weight * weights[job.owner]) if weights and job.owner in weights else job for job in pool.jobs
    )
    running = [pool.running.get(job.name) for job in jobs]
    present = np.array([len(run.devices) if run else 0 for run in running], dtype=np.int64)
    also = {*present.tolist(), *(job.num_devices for job in jobs), *(job.fewest_devices for job in jobs)}
    most = min(pool.num_in_cluster, max(job.most_devices for job in jobs))
    sizes = np.array(sizes_to_consider(most, pool.per_node, sorted(also - {0})), dtype=np.int64)
    speeds, spreads = tables.of(jobs, pool.kind, sizes, pool.per_node)
    since_s = np.array([run.since_s if run else now_s for run in running])
    floors: Ints = np.zeros(len(jobs), dtype=np.int64)
    return Share(
        now_s,
        jobs,
        len(pool.devices),
        pool.num_in_cluster,
        pool.per_node,
        present,
        since_s,
        floors,
        sizes,
        speeds,
        spreads,
        settings,
    )
