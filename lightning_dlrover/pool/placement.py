"""Place the workers of elastic jobs on nodes, within bounds on waiting, deadlines and limits. Pure.

`with_placement` makes a policy of a way to choose sizes; `place` and `consolidate` keep jobs on few nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_dlrover.pool.allocation import Ints, Share, SizePolicy, SpeedTables
from lightning_dlrover.tuning.cluster import Allocation, Device, Floats, Job, Policy, PolicySettings, Running, State, is_overdue
from lightning_dlrover.tuning.plan import sizes_to_consider

# Rules of every size policy: turns, the bound on waiting, deadlines, and which jobs are not paused.
#
# Jobs take turns. A job that has waited longer than `max_wait_s` comes before all others, the longest wait first. Then come
# those that can still meet their deadlines, the earliest first, then priorities, then the time of submission.
#
# A policy that preempts receives floors: the devices that it must give at least.
# - A job that was started because of its wait keeps its fewest devices for `max_wait_s`, or it would be paused again at once.
# - A job that waits longer than the bound receives its minimum.
# - A job with a deadline receives as few devices as meet it, from now to its end.
# - With `may_pause` off, a running job keeps its fewest devices.
# Where devices are too few for a floor, no job starts that could not be paused again, until they suffice.

DEADLINE_MARGIN = 1.1
"""Factor on the predicted time to a job's end, as predictions are uncertain."""


def turns(share: Share) -> list[int]:
    """Return the indices of jobs in the order of their turns."""
    needed = _needed_for_deadline(share)
    max_wait_s = share.settings.max_wait_s

    def key(index: int) -> tuple[float, ...]:
        job = share.jobs[index]
        if share.present[index] == 0 and is_overdue(job.waits_since_s, share.now_s, max_wait_s):
            return (0.0, job.waits_since_s)
        if needed[index] > 0 and job.deadline_s is not None:
            return (1.0, job.deadline_s)
        return (2.0, -job.priority, job.submitted_s)

    return sorted(range(len(share.jobs)), key=lambda index: (key(index), share.jobs[index].name))


@dataclass(frozen=True)
class Floors:
    """Devices that each job must get, shape ``(num_jobs,)``, and whether some job waits for a floor."""

    devices: Ints
    is_short: bool


def floors_of(share: Share, rigid: bool) -> Floors:
    """Return the floors of jobs of all priorities, until the devices are used up.

    Args:
        share: with floors of 0.
        rigid: a job receives as many devices as requested, or none.
    """
    needed = _needed_for_deadline(share)
    wanted = np.where(share.asked > 0, share.asked, 0) if rigid else share.fewest
    needed = np.where(needed > 0, wanted, 0) if rigid else needed
    max_wait_s = share.settings.max_wait_s
    claims: list[tuple[tuple[float, float, str], int, int, bool]] = []  # order, job, devices, whether others wait for it
    for index, job in enumerate(share.jobs):
        since_s, runs = float(share.since_s[index]), bool(share.present[index])
        if runs and not share.settings.may_pause:
            claims.append(((0, since_s, job.name), index, int(min(wanted[index], share.present[index])), True))
        elif runs and since_s - job.waits_since_s > max_wait_s and share.now_s - since_s < max_wait_s:
            claims.append(((1, since_s, job.name), index, int(wanted[index]), False))
        elif not runs and is_overdue(job.waits_since_s, share.now_s, max_wait_s):
            claims.append(((2, job.waits_since_s, job.name), index, int(wanted[index]), True))
        if needed[index] > 0 and job.deadline_s is not None:
            claims.append(((3, job.deadline_s, job.name), index, int(needed[index]), not runs))
    floors, left, is_short = np.zeros(len(share.jobs), dtype=np.int64), share.num_devices, False
    for _, index, devices, others_wait in sorted(claims):
        more = devices - int(floors[index])
        if 0 < more <= left:
            floors[index] = devices
            left -= more
        elif more > left:
            is_short = is_short or others_wait
    return Floors(floors, is_short)


def within_limits(share: Share, numbers: Ints) -> Ints:
    """Return sizes within all limits, as near to the given ones as possible.

    Policies choose allowed sizes; this guarantees it. Sizes that no job may have are rounded down, floors are given, and where
    devices do not suffice the last ones in turn get less.
    """
    columns = share.columns_of(numbers)
    exact = (share.sizes[columns] == numbers) & share.allowed[np.arange(len(share.jobs)), columns]
    if exact.all() and numbers.sum() <= share.num_devices:
        return numbers
    found = np.zeros(len(share.jobs), dtype=np.int64)
    least = np.zeros(len(share.jobs), dtype=np.int64)
    for index, column in enumerate(columns.tolist()):
        allowed = np.flatnonzero(share.allowed[index])
        if len(allowed):
            least[index] = share.sizes[allowed[0]]
            below = allowed[allowed <= column]
            found[index] = share.sizes[below[-1]] if len(below) else least[index]
    excess = int(found.sum()) - share.num_devices
    for smallest in (np.maximum(share.fewest, least), least):  # first less of each job, then the last ones wait
        for index in range(len(share.jobs) - 1, -1, -1):
            if excess > 0 and found[index] > smallest[index]:
                lower = max(int(smallest[index]), int(found[index]) - excess)
                column = int(share.columns_of(np.array([lower]))[0])
                allowed = np.flatnonzero(share.allowed[index])
                below = allowed[allowed <= column]
                new = int(share.sizes[below[-1]]) if len(below) else int(smallest[index])
                excess -= int(found[index]) - new
                found[index] = new
    return found


def _needed_for_deadline(share: Share) -> Ints:
    """Return the minimum devices for each job to end by its deadline; 0 without a deadline, or if it cannot be met."""
    needed = np.zeros(len(share.jobs), dtype=np.int64)
    for index, job in enumerate(share.jobs):
        if job.deadline_s is None or job.steps_left is None:
            continue
        seconds = _seconds_to_end(share, index)
        meets = np.flatnonzero(seconds * DEADLINE_MARGIN <= job.deadline_s - share.now_s)
        if len(meets):
            needed[index] = share.sizes[meets[0]]
    return needed


def _seconds_to_end(share: Share, index: int) -> Floats:
    """Return the predicted seconds to a job's end with each size, shape ``(num_sizes,)``; infinite where it cannot run."""
    job = share.jobs[index]
    speeds = np.where(share.sizes >= share.fewest[index], share.speeds[index], 0.0)
    speeds = np.where(share.sizes <= share.most[index], speeds, 0.0)
    with np.errstate(divide="ignore"):
        seconds = np.where(speeds > 0, share.steps_left[index] / np.where(speeds > 0, speeds, 1.0), np.inf)
    cost_s = job.change_s + job.join_s if share.present[index] else job.start_s
    return np.asarray(seconds + np.where(share.sizes == share.present[index], 0.0, cost_s))


class Nodes:
    """Free devices by node, and nodes by the number of their free devices.

    Orders are those of the state, so equal states give equal placements.
    """

    def __init__(self, devices: Sequence[Device], per_node: int) -> None:
        self._per_node = per_node
        self._node_of = {device.name: device.node for device in devices}
        self._free: dict[str, dict[str, None]] = {}
        for device in devices:
            self._free.setdefault(device.node, {})[device.name] = None
        self._by_count: dict[int, dict[str, None]] = {}
        for node, free in self._free.items():
            self._by_count.setdefault(len(free), {})[node] = None

    def are_free(self, names: Sequence[str]) -> bool:
        """Return whether devices exist, differ, and have no worker yet."""
        return len(set(names)) == len(names) and all(
            name in self._node_of and name in self._free[self._node_of[name]] for name in names
        )

    def take(self, names: Sequence[str]) -> None:
        """Take devices that are free."""
        for name in names:
            node = self._node_of[name]
            self._count(node, -1)
            del self._free[node][name]

    def release(self, names: Sequence[str]) -> None:
        """Give devices back."""
        for name in names:
            node = self._node_of[name]
            self._count(node, 1)
            self._free[node][name] = None

    def free_on(self, node: str) -> list[str]:
        """Return the free devices of a node."""
        return list(self._free[node])

    def of(self, names: Sequence[str]) -> list[str]:
        """Return the nodes of devices, each once."""
        return list(dict.fromkeys(self._node_of[name] for name in names))

    def fullest_with(self, number: int, without: Collection[str] = ()) -> str | None:
        """Return the node with the fewest free devices that suffice."""
        counts = sorted(count for count in self._by_count if count >= number)
        return next((node for count in counts for node in self._by_count[count] if node not in without), None)

    def _count(self, node: str, change: int) -> None:
        count = len(self._free[node])
        del self._by_count[count][node]
        self._by_count.setdefault(count + change, {})[node] = None

    def find(self, number: int, own: Sequence[str]) -> tuple[str, ...]:
        """Return this many free devices on few nodes, preferably those that the job already has.

        Raises:
            ValueError: fewer are free.
        """
        own_nodes = Counter(on for name in own if (on := self._node_of.get(name, "")) and name in self._free[on])
        found: list[str] = []
        used: dict[str, None] = {}
        while len(found) < number:
            node = self._best_node(number - len(found), own_nodes, used)
            if node is None:
                raise ValueError(f"{number} devices are needed, and only {len(found)} are free")
            used[node] = None
            free = self._free[node]
            mine = [name for name in own if self._node_of.get(name) == node and name in free]
            others = [name for name in free if name not in mine]
            found += [*mine, *others][: number - len(found)]
        return tuple(found)

    def _best_node(self, number: int, own: Mapping[str, int], used: Mapping[str, None]) -> str | None:
        """Return a node with room for a whole node's part or all that is missing, preferably the job's; else the emptiest."""
        wanted = min(number, self._per_node)
        mine = [node for node in own if node not in used and len(self._free[node]) >= wanted]
        if mine:
            return min(mine, key=lambda node: (-own[node], len(self._free[node])))
        counts = sorted(filter(None, self._by_count))
        ordered = [*(c for c in counts if c >= wanted), *(c for c in reversed(counts) if c < wanted)]
        return next((node for count in ordered for node in self._by_count[count] if node not in used), None)


LASTS_S = 600.0
"""Seconds that a placement is expected to last."""

MAX_MENDED = 32
"""Split jobs that one decision considers, the largest first. Bounds its time."""

MAX_NODES = 16
"""Nodes that are tried to make room for a part of a split job, those with the fewest devices to move first."""


def consolidate(
    nodes: Nodes,
    per_node: int,
    jobs: Mapping[str, Job],
    placed: dict[str, tuple[str, ...]],
    running: Mapping[str, Sequence[str]],
) -> None:
    """Bring jobs together that are split over more nodes than they need. Change `placed`, and the free devices of `nodes`.

    A split job takes whole nodes and the smallest sufficient rest. Where no node has the room, small jobs of one node move
    elsewhere, with as few devices as possible. A move is worth its cost if the device seconds that the split job saves until
    its end, or in `LASTS_S`, exceed those that all moved jobs lose.

    Args:
        placed: devices of each job, which are not free in `nodes`.
        running: devices that jobs have now. A job that is to get others pays for a change anyway.
    """

    def is_split(name: str) -> bool:
        return len(nodes.of(placed[name])) > -(-len(placed[name]) // per_node)

    for name in sorted(filter(is_split, placed), key=lambda name: (-len(placed[name]), name))[:MAX_MENDED]:
        if not is_split(name):
            continue  # it was mended with another
        moves = _moves(nodes, per_node, name, placed)
        if moves is not None and not _is_worth(nodes, jobs, moves, name, placed, running):
            _take_back(nodes, moves, placed)
        elif moves is not None:
            placed.update(moves)


def _moves(nodes: Nodes, per_node: int, name: str, placed: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]] | None:
    """Return the new devices of a split job and of those that make room, taken in `nodes`; None: none, and nothing changes."""
    moves: dict[str, tuple[str, ...]] = {}
    nodes.release(placed[name])
    found: list[str] = []
    number = len(placed[name])
    while len(found) < number:
        part = min(per_node, number - len(found))
        node = nodes.fullest_with(part) or _make_room(nodes, part, name, placed, moves)
        if node is None:
            nodes.release(found)
            moves[name] = ()
            _take_back(nodes, moves, placed)
            return None
        free = sorted(nodes.free_on(node), key=lambda device: device not in placed[name])[:part]
        nodes.take(free)
        found += free
    moves[name] = tuple(found)
    return moves


def _make_room(
    nodes: Nodes, number: int, name: str, placed: Mapping[str, tuple[str, ...]], moves: dict[str, tuple[str, ...]]
) -> str | None:
    """Move small jobs away from the node where that takes the fewest devices; None: no such node exists."""
    tenants: dict[str, list[str]] = {}
    for other, devices in placed.items():
        on = nodes.of(moves.get(other, devices))
        if other != name and other not in moves and len(on) == 1:
            tenants.setdefault(on[0], []).append(other)
    options = []
    for node, others in tenants.items():
        missing, leave = number - len(nodes.free_on(node)), []
        for other in sorted(others, key=lambda other: (len(placed[other]), other)):
            if missing > 0:
                leave.append(other)
                missing -= len(placed[other])
        if missing <= 0:
            options.append((sum(len(placed[other]) for other in leave), node, leave))
    return next((node for _, node, leave in sorted(options)[:MAX_NODES] if _leave(nodes, node, leave, placed, moves)), None)


def _leave(
    nodes: Nodes, node: str, leave: Sequence[str], placed: Mapping[str, tuple[str, ...]], moves: dict[str, tuple[str, ...]]
) -> bool:
    """Move all of these jobs to other nodes, each to one; False, and nothing changes, if one finds no room."""
    done: list[str] = []
    for other in sorted(leave, key=lambda other: (-len(placed[other]), other)):
        target = nodes.fullest_with(len(placed[other]), without=(node,))
        if target is None:
            for moved in done:
                nodes.release(moves.pop(moved))
                nodes.take(placed[moved])
            return False
        devices = tuple(nodes.free_on(target)[: len(placed[other])])
        nodes.take(devices)
        nodes.release(placed[other])
        moves[other] = devices
        done.append(other)
    return True


def _take_back(nodes: Nodes, moves: Mapping[str, Sequence[str]], placed: Mapping[str, tuple[str, ...]]) -> None:
    for devices in moves.values():
        nodes.release(devices)
    for name in moves:
        nodes.take(placed[name])


def _is_worth(
    nodes: Nodes,
    jobs: Mapping[str, Job],
    moves: Mapping[str, tuple[str, ...]],
    name: str,
    placed: Mapping[str, tuple[str, ...]],
    running: Mapping[str, Sequence[str]],
) -> bool:
    job, size = jobs[name], len(placed[name])
    if job.scaling is None:
        return False
    counts = np.array([len(nodes.of(placed[name])), len(nodes.of(moves[name]))])
    before, after = job.scaling.speeds(np.array([size, size]), counts).steps_per_s.tolist()
    if not after > before:
        return False
    seconds = LASTS_S if job.steps_left is None else min(LASTS_S, job.steps_left / after)
    lost = sum(
        (jobs[other].change_s + jobs[other].join_s) * len(devices)
        for other, devices in moves.items()
        if set(placed[other]) == set(running.get(other, ())) and set(devices) != set(placed[other])
    )
    return bool(size * seconds * (1 - before / after) > lost)


def place(
    devices: Sequence[Device],
    per_node: int,
    jobs: Mapping[str, Job],
    numbers: Mapping[str, int],
    running: Mapping[str, Sequence[str]],
) -> dict[str, tuple[str, ...]]:
    """Return the devices of each job that receives any, on as few nodes as possible.

    A running job of the same size keeps its devices. All other devices are free; jobs that start or change take them, the
    largest first: whole nodes, then the node with the smallest sufficient rest. `consolidate` then mends split jobs.

    Args:
        devices: identical devices, each for one worker.
        per_node: devices of a whole node.
        jobs: at least those of `numbers`.
        numbers: devices of each job; their sum does not exceed the number of devices.
        running: the present devices of jobs that have some.
    """
    nodes = Nodes(devices, per_node)
    placed: dict[str, tuple[str, ...]] = {}
    for name, number in numbers.items():
        present = running.get(name, ())
        if len(present) == number and nodes.are_free(present):
            nodes.take(present)
            placed[name] = tuple(present)
    for name in sorted(numbers, key=lambda name: (-numbers[name], name)):
        if name not in placed:
            placed[name] = nodes.find(numbers[name], running.get(name, ()))
            nodes.take(placed[name])
    consolidate(nodes, per_node, jobs, placed, running)
    return placed


def with_placement(sizes: SizePolicy, settings: PolicySettings) -> Policy:
    """Return the policy that gives jobs the sizes that `sizes` chooses, within the bounds that all policies keep.

    Devices of one kind, with equal memory, are divided separately. A running job with limits for one size only stays where it
    is. A device has one worker.
    """
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
    by_kind: dict[tuple[str, int], list[Device]] = {}
    for device in state.devices:
        by_kind.setdefault(keys[device.name], []).append(device)
    running: dict[tuple[str, int], list[Running]] = {key: [] for key in by_kind}
    for run in state.running:
        if not _is_fixed(run.job):
            running[keys[run.devices[0]]].append(run)
    waiting = _places_to_wait(state.waiting, by_kind, running)
    taken = {name for run in fixed for name in run.devices}
    pools = []
    for key, devices in sorted(by_kind.items()):
        jobs = sorted([*waiting[key], *(run.job for run in running[key])], key=lambda job: (job.submitted_s, job.name))
        free = tuple(device for device in devices if device.name not in taken)
        per_node = max(Counter(device.node for device in devices).values())
        runs = {run.job.name: run for run in running[key]}
        pools.append(_Pool(key[0], free, len(devices), per_node, tuple(jobs), runs))
    return pools


def _places_to_wait(
    waiting: Sequence[Job],
    by_kind: Mapping[tuple[str, int], Sequence[Device]],
    running: Mapping[tuple[str, int], Sequence[Running]],
) -> dict[tuple[str, int], list[Job]]:
    """Return waiting jobs by the devices that each waits for: the fastest, by its speed there and the demand for them."""
    found: dict[tuple[str, int], list[Job]] = {key: [] for key in by_kind}
    wanted = {key: sum(len(run.devices) for run in runs) for key, runs in running.items()}
    for job in sorted(waiting, key=lambda job: (job.submitted_s, job.name)):
        able = [key for key in sorted(by_kind) if _can_run(job, *key) and job.fewest_devices <= len(by_kind[key])]
        if not able:
            continue  # it could never start, see `packing.why_never`

        def worth(key: tuple[str, int], job: Job = job) -> float:
            load = (wanted[key] + job.num_devices) / len(by_kind[key])
            return job.profiles[key[0]].steps_per_s / max(load, 1.0)

        best = max(able, key=worth)
        found[best].append(job)
        wanted[best] += job.num_devices
    return found


def _can_run(job: Job, kind: str, memory_bytes: int) -> bool:
    return kind in job.profiles and job.profiles[kind].memory_bytes <= memory_bytes


def _divide(pool: _Pool, now_s: float, sizes: SizePolicy, settings: PolicySettings, tables: SpeedTables) -> dict[str, int]:
    """Return the number of devices of each job of a pool. Jobs that wait are absent."""
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
    """Return the rows of running jobs that keep their sizes, because they have changed within the policy's interval."""
    if every_s is None:
        return []
    is_held = (share.present >= np.maximum(share.floors, 1)) & (share.now_s - share.since_s < every_s)
    if share.present[is_held].sum() + share.floors[~is_held].sum() > share.num_devices:
        return []
    return [int(index) for index in np.flatnonzero(is_held)]


def _by_priority(share: Share, is_short: bool, held: Sequence[int]) -> list[list[int]]:
    """Return the rows of the jobs that take part, the highest priority first.

    While devices are too few for a floor, no job takes part that could not be paused later.
    """

    def takes_part(index: int, job: Job) -> bool:
        may_pause = share.settings.may_pause and job.fewest_devices < job.most_devices
        return not is_short or bool(share.present[index] or share.floors[index]) or may_pause

    kept = set(held)
    rows = [index for index, job in enumerate(share.jobs) if index not in kept and takes_part(index, job)]
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
    also.update(size for job in jobs for size in job.sizes)
    most = min(pool.num_in_cluster, max(job.most_devices for job in jobs))
    sizes = np.array(sizes_to_consider(most, pool.per_node, sorted(also - {0})), dtype=np.int64)
    speeds, spreads = tables.of(jobs, pool.kind, sizes, pool.per_node)
    since_s = np.array([run.since_s if run else now_s for run in running])
    floors: Ints = np.zeros(len(jobs), dtype=np.int64)
    numbers = len(pool.devices), pool.num_in_cluster, pool.per_node
    return Share(now_s, jobs, *numbers, present, since_s, floors, sizes, speeds, spreads, settings)
