"""Co-location policies by name: which jobs share a device. Pure.

`make_policy` returns a policy by name. `complementary` and `turns` are ours; the others are baselines.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations

import numpy as np

from lightning_dlrover.colocate.packing import (
    EXACT_NODES,
    Group,
    Packing,
    PlacementRule,
    Room,
    best_partition,
    emptiest,
    group_and_start,
    merge_in_rounds,
    merged,
    with_bounded_wait,
)
from lightning_dlrover.tuning.cluster import Device, Floats, Job, Policy, PolicySettings


def sequential(settings: PolicySettings) -> PlacementRule:
    """Run one job at a time on each device, in order. A job that finds no empty device stops those behind it."""

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
        for job in jobs:
            device = emptiest(packing, job)
            if device is None or packing.members(device):
                return
            packing.start(job, device)

    return place


def fifo(settings: PolicySettings) -> PlacementRule:
    """Run as many jobs at once as fit by memory and slots, first come first served; ignore interference.

    A job that does not fit stops those behind it on the kinds of device that it could use.
    """

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if (device := emptiest(packing, job)) is not None:
                packing.start(job, device)
            else:
                packing.close([device for device in packing.open_devices() if device.kind in job.profiles])

    return place


def random_sets(settings: PolicySettings) -> PlacementRule:
    """Run random jobs together, as many as fit: the chance level of choosing sets.

    A job's turn depends on the seed and its name alone, so equal states lead to equal decisions.
    """

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
        for job in sorted(jobs, key=lambda job: random.Random(f"{settings.seed}/{job.name}").random()):
            if (device := emptiest(packing, job)) is not None:
                packing.start(job, device)

    return place


# RMixer's rule of types (Tian et al., IEEE TPDS 2024; policy "dyType" of the published code).
#
# A job is of type "compute", "memory", or "low" in both. Jobs are sorted by memory, the largest first. The device with the
# most free memory takes the first job that fits and differs in type from the one most present there, else the first that
# fits.
#
# The published code takes types from a table by the name of the model. Here they follow from profiles: a job is of a type
# when it uses more than an equal share of the device, one of `most_together`.
def rmixer(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""
    together = settings.most_together

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
        waiting = list(jobs)
        while True:
            for device in sorted(_with_room(packing, together), key=lambda d: (-packing.free_bytes(d), d.name)):
                chosen = _next_job(packing, device, waiting, together)
                if chosen is not None:
                    break
            else:
                return
            packing.start(chosen, device)
            waiting.remove(chosen)

    return place


def _with_room(packing: Packing, together: int) -> list[Device]:
    return [device for device in packing.open_devices() if len(packing.members(device)) < together]


def type_of(job: Job, device: Device, together: int) -> str:
    """Return "compute", "memory" or "low"."""
    profile = job.profiles[device.kind]
    limits = device.limits
    compute = max((profile.use.get(r, 0.0) / limits[r] for r in ("gpu", "cores") if limits.get(r)), default=0.0)
    if compute > 1 / together:
        return "compute"
    return "memory" if profile.memory_bytes > device.memory_bytes / together else "low"


def _next_job(packing: Packing, device: Device, waiting: Sequence[Job], together: int) -> Job | None:
    present = Counter(type_of(job, device, together) for job in packing.members(device))
    most = max(sorted(present), key=present.__getitem__) if present else None
    fitting = sorted(
        (job for job in waiting if packing.fits(job, device)),
        key=lambda job: (-job.profiles[device.kind].memory_bytes, job.name),
    )
    return next((job for job in fitting if type_of(job, device, together) != most), fitting[0] if fitting else None)


BETA = 2.0
"""Jobs for each GPU worker that must be left for another to start on cores. The published scripts have 2 to 4."""


# RMixer's rule for CPU and GPU together (Tian et al., IEEE TPDS 2024; policy "dyMix" of the published code).
#
# Jobs are sorted by their utilisation of a GPU, the largest first. The GPU with the least used memory takes the first that
# fits. When no GPU has room, cores take the first job that fits of the list's tail: those behind the fraction of all
# workers that are GPU workers. None goes to the cores near the end, while no more than `BETA` jobs for each GPU worker are
# left: it would run on when all others have ended.
#
# Differences from the published code: utilisation comes from profiles, not from a table by the name of the model; it is 1
# where it was not measured. The list holds the jobs that wait, as a policy does not see those that have ended, and jobs
# that remain are those that wait or run. Jobs that can use no GPU go to the cores, and those that cannot use cores stay
# away from them. Where the cluster has devices of one type, jobs start in the order of the list.
def rmixer_mixed(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""
    together = settings.most_together

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
        devices = list(packing.devices.values())
        num_gpu_workers = sum(min(device.places, together) for device in devices if not device.is_host)
        num_workers = sum(min(device.places, together) for device in devices)
        num_running = sum(len(packing.members(device)) for device in devices)
        waiting = sorted(jobs, key=lambda job: (-_utilisation(job, devices), job.submitted_s, job.name))
        num_left = len(waiting) + num_running
        first_of_tail = len(waiting) * num_gpu_workers / max(1, num_workers)
        tail = {job.name for number, job in enumerate(waiting) if number >= first_of_tail}
        while found := _next(packing, waiting, together, tail, num_left > BETA * num_gpu_workers):
            packing.start(*found)
            waiting.remove(found[0])

    return place


def _next(packing: Packing, waiting: Sequence[Job], together: int, tail: set[str], is_early: bool) -> tuple[Job, Device] | None:
    """Return the next job to start, and its device."""
    gpu_kinds = {device.kind for device in packing.devices.values() if not device.is_host}
    free = _with_room(packing, together)
    for device in sorted(free, key=lambda device: (device.is_host, -packing.free_bytes(device), device.name)):
        for job in waiting:
            # Without GPUs, no job could use one.
            may = not device.is_host or gpu_kinds.isdisjoint(job.profiles) or (is_early and job.name in tail)
            if may and packing.fits(job, device):
                return job, device
    return None


def _utilisation(job: Job, devices: Sequence[Device]) -> float:
    """Return the largest fraction of a GPU that a job uses; 0 if it runs on none."""
    kinds = {device.kind for device in devices if not device.is_host and device.kind in job.profiles}
    return max((job.profiles[kind].use.get("gpu", 1.0) for kind in kinds), default=0.0)


STAGES = ("input", "cores", "gpu", "pcie")
"""Resources with a stage of their own: Muri's storage, CPU, GPU and network."""

_OFFSETS = {n: np.array([(0, *rest) for rest in permutations(range(1, len(STAGES)), n - 1)]) for n in range(1, len(STAGES) + 1)}


# Muri: interleave jobs with stages on different resources (Zhao et al., "Multi-resource interleaving for deep learning
# training", SIGCOMM 2022).
#
# A step is a sequence of stages, one for each resource, as long as the job keeps that resource busy. Jobs of a group rotate
# through the resources, so a slot of the rotation lasts as long as its longest stage. The group's step is the sum of the
# slots,
#
# T = sum over slots s of max over jobs j of stage[j, (s + offset_j) mod num_resources]
#
# with the best of all orders, and its efficiency is the mean utilisation: all stages over T times the number of resources.
# Groups are found by maximum-weight matching on the efficiency, in rounds; a group slower than its jobs one by one has
# weight 0. Merging ends when every group has a device.
def muri(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""
    together = min(settings.most_together, len(STAGES))

    def weigh(pairs: Sequence[tuple[Group, Group]], device: Device) -> Floats:
        return efficiencies([[*one.members, *other.members] for one, other in pairs], device)

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
        def merge(groups: list[Group], sample: Device, num_devices: int) -> list[Group]:
            return merge_in_rounds(packing, groups, sample, weigh, together, under_limits=False, num_enough=num_devices)

        group_and_start(packing, jobs, merge, together)

    return place


def stages(job: Job, device: Device) -> Floats:
    """Return the seconds of a step that a job keeps each resource of `STAGES` busy, shape ``(4,)``."""
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
    """Return the seconds of a step of each group in its best order, shape ``(num_groups,)``."""
    num_jobs = tables.shape[1]
    slots = (_OFFSETS[num_jobs][:, :, None] + np.arange(len(STAGES))) % len(STAGES)  # (orders, jobs, slots)
    turned = tables[:, np.arange(num_jobs)[None, :, None], slots]  # (groups, orders, jobs, slots)
    return np.asarray(turned.max(axis=2).sum(axis=2).min(axis=1))


# Our policy: sets of jobs with the smallest mutual slowdowns, as learned, within all limits.
#
# The cost of a set is the time that its device needs for its work if each job had one unit: 1 over the weighted mean of the
# relative speeds. A job alone costs 1, so two jobs should share a device if that costs less than 2. The sets are those
# with the smallest sum of costs. A job that runs well with a difficult one is thus reserved for it; a greedy choice would
# give it away.
#
# At most `EXACT_NODES` jobs and occupied devices are searched exactly: all partitions into sets, by dynamic programming
# over subsets. More are merged in rounds of matching, see `group_and_start`; the weight of a merger is the cost that it saves.
# No device stays empty while jobs share another one.
def complementary(settings: PolicySettings) -> PlacementRule:
    """Return the policy."""

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
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
    """Merge groups into the sets with the smallest sum of costs.

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


MOST_USE = 1.25
"""Jobs of a set may want this times a limit. Beyond it each finds less of its data in the caches: four copies of
`benchmarks/colocation_job.py` on two cores take 10 % more CPU time than two, and six 20 % more.
"""
FULL_USE = 1.6
"""Jobs may want this times a limit where cores would be idle otherwise: three that could each use a core, on two cores."""
BUSY = 0.95
"""Fraction of a limit above which no job is added to use the rest."""
WHOLE = ("cores", "gpu")
"""Resources that a job has or has not at any moment; it uses a part of the others."""
SAME = 0.02
"""Fraction that the progress of two sets must differ by for one to be better."""
SAME_END_S = 0.5
"""The last jobs run at once where their remaining times differ by less."""


# Our policy where pauses cost nothing: the sets of `complementary` take turns on each device, the best one first.
#
# The best set makes the most progress in a second: the sum of its weighted relative speeds. So jobs that leave a device
# idle run together with others while others exist, and jobs that keep it busy alone run at the end. Jobs that already run,
# such as starting ones, stay, and leave a set less of each limit. The policy is asked again whenever a job comes or ends,
# and a job that was left out for too long goes before all others (`with_bounded_wait`).
#
# The last jobs end together: those with the longest remaining time run first (McNaughton, Management Science 1959).
def turns(settings: PolicySettings, are_last: bool = False) -> PlacementRule:
    """Return the policy.

    Args:
        are_last: no other jobs will come. Those with the longest remaining time go first. If all have the same, they run at
            once where they nearly fit, and take turns otherwise. A leftover job would leave cores idle at the end.
    """

    def place(packing: Packing, jobs: Sequence[Job]) -> None:
        waiting = list(jobs)
        for device in packing.open_devices():
            able = [job for job in waiting if packing.fits(job, device)]
            if are_last:
                able.sort(key=functools.partial(_in_turn, device=device))
            if are_last and able and _end_together(able, device) and _fit(packing, device, able, settings, FULL_USE):
                chosen = tuple(able)
            else:
                chosen = _chosen(packing, device, able, settings)
            for job in chosen:
                if packing.fits(job, device):
                    packing.start(job, device)
                    waiting.remove(job)

    return place


def _in_turn(job: Job, device: Device) -> tuple[float, float]:
    left_s = _left_s(job, device)
    return -left_s if math.isinf(left_s) else -math.floor(left_s / SAME_END_S), job.waits_since_s


def _left_s(job: Job, device: Device) -> float:
    """Return the time that the rest of a job takes alone; infinite where its end is unknown."""
    return math.inf if job.steps_left is None else job.steps_left / job.profiles[device.kind].steps_per_s


def _end_together(jobs: Sequence[Job], device: Device) -> bool:
    """Whether jobs have about the same remaining time, where it is known."""
    known = [left_s for job in jobs if (left_s := _left_s(job, device)) < math.inf]
    return not known or max(known) - min(known) <= SAME_END_S


def _chosen(packing: Packing, device: Device, jobs: Sequence[Job], settings: PolicySettings) -> tuple[Job, ...]:
    """Return the jobs to run on a device, in addition to those present. On an empty one at least one runs."""
    present = packing.members(device)
    most_use = MOST_USE - packing.present_use(device)
    if present:
        jobs = [job for job in jobs if packing.use_of_limits((job,), device, with_present=False).max() <= most_use]
    if not jobs:
        return ()
    sets = best_sets(packing, [Group((job,)) for job in jobs], device, settings, most_use=most_use)
    progress = _progress([group.waiting for group in sets], device, settings)
    good = [group for group, amount in zip(sets, progress, strict=True) if amount >= (1 - SAME) * progress.max()]
    place_of = {job.name: number for number, job in enumerate(jobs)}
    best = min(good, key=lambda group: min(place_of[job.name] for job in group.waiting)).waiting
    first = _with_earlier(packing, device, best, jobs, settings)
    chosen = _filled(packing, device, first, jobs, settings)
    if not present:
        return chosen
    with_them, without = _progress([(*present, *chosen), present], device, settings)
    return chosen if with_them >= (1 - SAME) * without else ()


def _with_earlier(
    packing: Packing, device: Device, chosen: tuple[Job, ...], jobs: Sequence[Job], settings: PolicySettings
) -> tuple[Job, ...]:
    """Put earlier jobs of the order in the place of later ones that make no more progress there.

    Some of several equal jobs are left over. Without this, they would be the same ones each time.
    """
    (least,) = (1 - SAME) * _progress([chosen], device, settings)
    for number, job in enumerate(jobs):
        for leaver in [other for other in reversed(jobs[number + 1 :]) if other in chosen and job not in chosen]:
            others = (job, *(each for each in chosen if each is not leaver))
            if _fit(packing, device, others, settings, MOST_USE) and _progress([others], device, settings)[0] >= least:
                chosen = others
                break
    return chosen


def _filled(
    packing: Packing, device: Device, chosen: tuple[Job, ...], jobs: Sequence[Job], settings: PolicySettings
) -> tuple[Job, ...]:
    """Add jobs in order that take nothing from the progress, until the device is busy also while others begin and end."""
    (least,) = (1 - SAME) * _progress([chosen], device, settings)
    for job in [job for job in jobs if job not in chosen]:
        if _busy(device, (*packing.members(device), *chosen)) >= BUSY:
            break
        more = (*chosen, job)
        if _fit(packing, device, more, settings, FULL_USE) and _progress([more], device, settings)[0] >= least:
            chosen = more
    return chosen


def _busy(device: Device, jobs: Sequence[Job]) -> float:
    """Return the largest fraction of a limit that jobs keep busy.

    A job that uses a part of a core or of a GPU has a whole one for that part of the time. Those times are independent, so some
    are idle even where the sum exceeds the limit.
    """
    fractions = [0.0]
    for resource, limit in device.limits.items():
        uses = [job.profiles[device.kind].use.get(resource, 0.0) for job in jobs]
        parts = [use for use in uses if use < 1.0] if resource in WHOLE else []
        at_once = np.ones(1)  # chance of each number of them
        for part in parts:
            at_once = np.convolve(at_once, [1.0 - part, part])
        always = sum(uses) - sum(parts)
        fractions.append(float(at_once @ np.minimum(limit, always + np.arange(len(at_once)))) / limit)
    return max(fractions)


def _fit(packing: Packing, device: Device, jobs: Sequence[Job], settings: PolicySettings, most_use: float) -> bool:
    """Whether jobs that fit one by one also fit together. A single job on an empty device always does.

    Args:
        most_use: the jobs stay under this times every limit, together with those present.
    """
    if len(jobs) == 1 and not packing.members(device):
        return True
    left = most_use - packing.present_use(device)
    return Room(packing, [Group((job,)) for job in jobs], device, settings.most_together, True, left).fits(range(len(jobs)))


def _progress(sets: Sequence[Sequence[Job]], device: Device, settings: PolicySettings) -> Floats:
    """Return the sum of the weighted relative speeds of each set."""
    return np.array([sum(job.weight for job in jobs) for jobs in sets]) / costs(sets, device, settings)


POLICIES: Mapping[str, Callable[[PolicySettings], PlacementRule]] = {
    "sequential": sequential,
    "fifo": fifo,
    "random_sets": random_sets,
    "rmixer": rmixer,
    "rmixer_mixed": rmixer_mixed,
    "muri": muri,
    "complementary": complementary,
}


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Return the policy with that name.

    Raises:
        ValueError: the policy is unknown.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
    settings = settings or PolicySettings()
    return with_bounded_wait(POLICIES[name](settings), settings.max_wait_s)
