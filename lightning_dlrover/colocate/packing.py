"""Pack jobs onto devices: check what fits, group jobs that share a device, and bound the waiting. Pure.

Policies (`policies.py`) build on `with_bounded_wait`, `group_and_start`, `match` and `best_partition`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.tuning.cluster import (
    HOST_RESOURCES,
    RESOURCES,
    Allocation,
    Device,
    Floats,
    Job,
    Policy,
    State,
    is_overdue,
    turn_of,
)


class Packing:
    """An allocation while a policy builds it: the running jobs, which stay where they are, and those that it starts.

    Memory and places are hard: `start` refuses to exceed them. The limits of other resources are only asked for.
    """

    def __init__(self, state: State) -> None:
        self.devices = {device.name: device for device in state.devices}
        if len(self.devices) != len(state.devices):
            raise ValueError(f"two of the devices {sorted(d.name for d in state.devices)} have one name")
        self.allocation: dict[str, tuple[str, ...]] = {}
        self._workers: dict[str, list[Job]] = {name: [] for name in self.devices}
        self._used = dict.fromkeys(self.devices, 0)
        self._host_used: Counter[str] = Counter()  # host memory of workers on GPUs, by node
        self._use: defaultdict[tuple[str, str], float] = defaultdict(float)  # amounts by node or device, and resource
        self._hosts = {device.node: device for device in state.devices if device.is_host}
        self._host_limits = {
            (device.node, resource): device.limits[resource]
            for device in state.devices
            for resource in HOST_RESOURCES
            if resource in device.limits
        }
        self._closed: set[str] = set()
        for running in state.running:
            self._enter(running.job, running.devices)

    def members(self, device: Device) -> tuple[Job, ...]:
        """Return the workers on a device."""
        return tuple(self._workers[device.name])

    def free_bytes(self, device: Device) -> int:
        """Return the memory of a device that no worker has."""
        on_gpus = self._host_used[device.node] if device.is_host else 0
        return device.memory_bytes - on_gpus - self._used[device.name]

    def open_devices(self) -> list[Device]:
        """Return the devices with a free place that are not kept free for another job, in the order of the state."""
        return [d for d in self.devices.values() if d.name not in self._closed and len(self._workers[d.name]) < d.places]

    def close(self, devices: Iterable[Device]) -> None:
        """Let no more jobs start on these devices."""
        self._closed.update(device.name for device in devices)

    def fits(self, job: Job, device: Device, others: Sequence[Job] = ()) -> bool:
        """Whether the device has memory and a slot for one more worker, given those present and `others`."""
        workers = self._workers[device.name]
        if device.name in self._closed or len(workers) + len(others) >= device.places:
            return False
        if device.kind not in job.profiles:
            return False
        profiles = [each.profiles[device.kind] for each in (job, *others)]
        if sum(p.memory_bytes for p in profiles) > self.free_bytes(device):
            return False
        host = self._hosts.get(device.node)
        host_bytes = sum(p.host_memory_bytes for p in profiles)
        return host is None or host is device or not host_bytes or host_bytes <= self.free_bytes(host)

    def use_of_limits(self, jobs: Sequence[Job], device: Device, with_present: bool) -> Floats:
        """Return the fraction of each limit that jobs would use, in the order of `RESOURCES`; 0 where nothing is limited.

        Args:
            with_present: count the use of the workers on the device and its node.
        """
        used = np.zeros(len(RESOURCES))
        for index, resource in enumerate(RESOURCES):
            is_host = resource in HOST_RESOURCES
            limit = self._host_limits.get((device.node, resource)) if is_host else device.limits.get(resource)
            if limit:
                present = self._use[device.node if is_host else device.name, resource] if with_present else 0.0
                used[index] = (present + sum(job.profiles[device.kind].use.get(resource, 0.0) for job in jobs)) / limit
        return used

    def present_use(self, device: Device) -> float:
        """Return the largest fraction of a limit that the workers on a device use; 0 on an empty one."""
        return float(self.use_of_limits((), device, with_present=True).max()) if self.members(device) else 0.0

    def start(self, job: Job, device: Device) -> None:
        """Give a waiting job of one device that device.

        Raises:
            ValueError: the job runs already or asks for several devices, or the device has no room for it.
        """
        if job.name in self.allocation:
            raise ValueError(f"job {job.name!r} runs on {self.allocation[job.name]} already")
        if job.num_devices > 1 or not self.fits(job, device):
            raise ValueError(f"job {job.name!r} of {job.num_devices} devices does not fit on device {device.name!r}")
        self._enter(job, (device.name,))

    def _enter(self, job: Job, names: Sequence[str]) -> None:
        self.allocation[job.name] = tuple(names)
        for name in names:
            device = self.devices.get(name)
            if device is None:
                raise ValueError(f"job {job.name!r} runs on device {name!r}, which is not among {sorted(self.devices)}")
            if device.kind not in job.profiles:
                raise ValueError(f"job {job.name!r} has no profile for {device.kind!r}, the kind of device {name!r}")
            profile = job.profiles[device.kind]
            self._workers[name].append(job)
            self._used[name] += profile.memory_bytes
            self._host_used[device.node] += profile.host_memory_bytes
            for resource, amount in profile.use.items():
                self._use[device.node if resource in HOST_RESOURCES else name, resource] += amount


def why_never(job: Job, devices: Sequence[Device]) -> str | None:
    """Return why a job could not start even if all devices were free; None if it could."""
    kinds = sorted({device.kind for device in devices})
    suitable = [device for device in devices if device.kind in job.profiles]
    if not suitable:
        return (
            f"job {job.name!r} runs on {', '.join(sorted(job.profiles))}, and there are only {', '.join(kinds) or 'no devices'}"
        )
    large = [d for d in suitable if job.profiles[d.kind].memory_bytes <= d.memory_bytes]
    if not large:
        need, most = min(p.memory_bytes for p in job.profiles.values()), max(d.memory_bytes for d in suitable)
        return f"a worker of job {job.name!r} needs {need / 1e9:.2f} GB, and the largest device has {most / 1e9:.2f} GB"
    most_of_kind = max(Counter(device.kind for device in large).values())
    if most_of_kind < job.fewest_devices:
        return f"job {job.name!r} needs {job.fewest_devices} devices of one kind, and {most_of_kind} are large enough"
    return None


WINDOW = 64
"""Maximum number of waiting jobs that one decision considers, in their order. Bounds the time of a decision."""

PlacementRule = Callable[[Packing, Sequence[Job]], None]
"""Starts some of these jobs, which have one priority and are in order of submission, in a packing."""


# The bound on waiting that every policy keeps, and the order of priorities.
#
# Jobs that have waited longer than `max_wait_s` go first, in the order of their waits. Where such a job does not fit, the
# device with the fewest workers is closed for all others until it does. It loses workers and gains none, so the job starts
# as soon as they have ended. Below that, no job of a lower priority is considered before those of a higher one.
def with_bounded_wait(place: PlacementRule, max_wait_s: float) -> Policy:
    """Return the policy that places jobs with `place`, priority by priority, after those that have waited too long."""

    def decide(state: State) -> Allocation:
        packing = Packing(state)
        overdue = [job for job in state.waiting if is_overdue(job.waits_since_s, state.now_s, max_wait_s)]
        for job in sorted(overdue, key=lambda job: (job.waits_since_s, job.name)):
            if not packing.open_devices():
                break
            _start_or_reserve(packing, job)
        others = sorted((j for j in state.waiting if not is_overdue(j.waits_since_s, state.now_s, max_wait_s)), key=turn_of)
        for _, jobs in groupby(islice(others, WINDOW), lambda job: job.priority):
            if not packing.open_devices():
                break
            place(packing, list(jobs))
        return packing.allocation

    return decide


def emptiest(packing: Packing, job: Job) -> Device | None:
    """Return the device with the fewest workers that fits a job, of its fastest possible kind; None: it fits on none."""
    open_devices = packing.open_devices()
    for kind in sorted(job.profiles, key=lambda kind: (-job.profiles[kind].steps_per_s, kind)):
        fitting = [device for device in open_devices if device.kind == kind and packing.fits(job, device)]
        if fitting:
            return min(fitting, key=lambda device: (len(packing.members(device)), device.name))
    return None


def _start_or_reserve(packing: Packing, job: Job) -> None:
    if (device := emptiest(packing, job)) is not None:
        packing.start(job, device)
        return
    large = [
        device
        for device in packing.devices.values()
        if device.kind in job.profiles and job.profiles[device.kind].memory_bytes <= device.memory_bytes
    ]
    if large:
        # The device with the fewest workers to wait for, on the faster kind if they are equal.
        packing.close([min(large, key=lambda d: (len(packing.members(d)), -job.profiles[d.kind].steps_per_s, d.kind, d.name))])


# Maximum-weight matching, and the best partition into sets.
#
# Both are exact for few nodes, by dynamic programming over subsets. Beyond, a matching takes the heaviest edges first, then
# partners are exchanged between two pairs, or with an unmatched node, while that gains. Edmonds' blossom algorithm would be
# exact there, and takes ten times as long in Python.

EXACT_NODES = 8
"""Largest number of nodes with an exhaustive search of partitions; eight have 162 sets of up to four."""


def match(weights: Floats) -> list[tuple[int, int]]:
    """Return pairs of different nodes, each node in at most one, with a large sum of weights.

    Args:
        weights: symmetric, shape ``(num_nodes, num_nodes)``; pairs with a weight of 0 or below are never matched.
    """
    gains = np.maximum(weights, 0.0)
    np.fill_diagonal(gains, 0.0)
    if len(gains) <= EXACT_NODES:
        rows, columns = np.nonzero(np.triu(gains, 1))
        savings = {1 << i | 1 << j: -float(gains[i, j]) for i, j in zip(rows.tolist(), columns.tolist(), strict=True)}
        masks = best_partition({**{1 << i: 0.0 for i in range(len(gains))}, **savings}, len(gains))
        return sorted(((mask & -mask).bit_length() - 1, mask.bit_length() - 1) for mask in masks if mask in savings)
    partner = _improved(gains, _greedy(gains))
    return [(i, int(j)) for i, j in enumerate(partner) if i < j and gains[i, j] > 0]


def best_partition(set_costs: dict[int, float], num_items: int) -> list[int]:
    """Return the sets, as bit masks, that hold each item once and cost least together.

    Args:
        set_costs: by mask; holds each item alone. Sets that are absent are not allowed.
    """
    least, choice = [math.inf] * (1 << num_items), [0] * (1 << num_items)
    least[0] = 0.0
    by_lowest: list[list[int]] = [[mask for mask in set_costs if mask & -mask == 1 << item] for item in range(num_items)]
    for whole in range(1, 1 << num_items):
        lowest = (whole & -whole).bit_length() - 1
        for mask in by_lowest[lowest]:
            if mask & whole == mask and least[whole ^ mask] + set_costs[mask] < least[whole]:
                least[whole], choice[whole] = least[whole ^ mask] + set_costs[mask], mask
    sets, left = [], (1 << num_items) - 1
    while left:
        sets.append(choice[left])
        left ^= choice[left]
    return sets


def _greedy(gains: Floats) -> NDArray[np.intp]:
    """Match the heaviest edges first. Return the partner of each node, itself where it has none."""
    rows, columns = np.nonzero(np.triu(gains, 1))
    order = np.argsort(-gains[rows, columns], kind="stable")
    partner = np.arange(len(gains))
    free = [True] * len(gains)
    for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if free[i] and free[j]:
            free[i] = free[j] = False
            partner[i], partner[j] = j, i
    return partner


def _improved(gains: Floats, partner: NDArray[np.intp]) -> NDArray[np.intp]:
    """Exchange partners while that gains."""
    nodes = np.arange(len(gains))
    for _ in range(4 * len(gains)):
        now = gains[nodes, partner]
        # Node i leaves its partner for j, and the two former partners are matched. A node without a partner counts as its own,
        # and has no gain with itself.
        alone = partner == nodes
        left_behind = np.where(alone[:, None] | alone[None, :], 0.0, gains[np.ix_(partner, partner)])
        change = gains + left_behind - now[:, None] - now[None, :]
        change[nodes, partner] = change[nodes, nodes] = 0.0
        i, j = divmod(int(np.argmax(change)), len(gains))
        if change[i, j] <= 1e-12:
            break
        old_i, old_j = int(partner[i]), int(partner[j])
        partner[[i, j]] = j, i
        if old_i != i and old_j != j:
            partner[[old_i, old_j]] = old_j, old_i
        else:
            for old, was in ((old_i, i), (old_j, j)):
                if old != was:
                    partner[old] = old
    return partner


FEW = 24
"""Minimum number of jobs to choose from, even where only one place is free."""


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
        fit &= (self._bytes[i] + self._bytes[j] <= free) & (self._use[i] + self._use[j] <= self._most_use).all(axis=1)
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
            and (self._use[some].sum(axis=0) <= self._most_use).all()
        )


# Put waiting jobs into sets that share a device, merging pairs of sets in rounds.
#
# Rounds of maximum-weight matching are Muri's way (Zhao et al., SIGCOMM 2022): the first round makes pairs, the next merges
# pairs of those, so a device's four places are filled after two. A policy supplies the weight of a merger. A device with
# running jobs is a set, too, which waiting jobs can join.
def group_and_start(packing: Packing, jobs: Sequence[Job], merge: Merge, most_together: int) -> None:
    """Start jobs in sets that `merge` makes, kind by kind, the kind with the fastest jobs first."""
    waiting = list(jobs)
    kinds = sorted({device.kind for device in packing.open_devices()}, key=lambda kind: (-_speed(waiting, kind), kind))
    for kind in kinds:
        rivals = Counter(_best_kind(job) for job in waiting)
        suited = [job for job in waiting if kind in job.profiles and _is_worth(job, kind, rivals, packing)]
        # A set that has not had its turn may hold the best neighbour of a job that has just started, so look again.
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
    """Merge matched pairs, round after round, until no merger gains or at most `num_enough` groups remain."""
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
    """Start jobs on the devices of one kind; return their names."""
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
    changed = [group for group in groups if group.waiting]
    for group in sorted(changed, key=lambda group: (group.device is None, min(map(turn_of, group.waiting)))):
        able = free if group.device is None else [group.device]
        device = next((d for d in able if packing.fits(group.waiting[-1], d, group.waiting[:-1])), None)
        if device is None:
            continue
        if group.device is None:
            free.remove(device)
        for job in group.waiting:
            packing.start(job, device)
            started.add(job.name)
    return started


def _speed(jobs: Sequence[Job], kind: str) -> float:
    """Return the mean speed of jobs on a kind of device, relative to their fastest kinds."""
    shares = [_share(job, kind) for job in jobs if kind in job.profiles]
    return sum(shares) / len(shares) if shares else 0.0


def _share(job: Job, kind: str) -> float:
    """Return a job's speed on a kind of device over that on its fastest kind."""
    return job.profiles[kind].steps_per_s / max(profile.steps_per_s for profile in job.profiles.values())


def _best_kind(job: Job) -> str:
    return max(job.profiles, key=lambda kind: (job.profiles[kind].steps_per_s, kind))


def _is_worth(job: Job, kind: str, rivals: Mapping[str, int], packing: Packing) -> bool:
    """Whether a job ends earlier here than if it waited for its fastest kind of device, by the length of that queue."""
    best = _best_kind(job)
    if best == kind:
        return True
    places = sum(device.places for device in packing.devices.values() if device.kind == best)
    return places == 0 or _share(job, kind) * (1 + rivals[best] / places) >= 1
