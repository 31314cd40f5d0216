"""The budget of a pool: its resources, jobs and owners, the sizes of the jobs, and who waits. Pure.

`queue_in_order` orders waiting jobs, `wanted_sizes` chooses sizes within the budget, and `next_moves` turns them into safe
changes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightning_dlrover.rdzv.job.sizes import ANY_NUMBER, WorldSizes
from lightning_dlrover.tuning.cluster import is_overdue

TOLERANCE = 1e-9
"""Relative excess of a budget that is rounding."""


@dataclass(frozen=True)
class Resources:
    """Cores, GPUs and memory: of a budget, of one worker, or of a job."""

    cores: float = 0.0
    gpus: float = 0.0
    memory_mb: float = 0.0

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.cores + other.cores, self.gpus + other.gpus, self.memory_mb + other.memory_mb)

    def __sub__(self, other: Resources) -> Resources:
        return self + other.times(-1)

    def times(self, number: float) -> Resources:
        return Resources(*(each * number if each else 0.0 for each in (self.cores, self.gpus, self.memory_mb)))

    def pairs(self, other: Resources) -> tuple[tuple[float, float], ...]:
        """Return the amounts of each resource here and in `other`."""
        return (self.cores, other.cores), (self.gpus, other.gpus), (self.memory_mb, other.memory_mb)

    def fits(self, into: Resources) -> bool:
        """Whether `into` has at least this much of each resource that is needed."""
        return all(need <= 0 or need <= has + TOLERANCE * max(1.0, abs(need)) for need, has in self.pairs(into))

    @property
    def limits(self) -> dict[str, float]:
        """The amounts by name, without unlimited ones. `within` is the reverse."""
        return {name: amount for name, amount in vars(self).items() if math.isfinite(amount)}

    @staticmethod
    def within(limits: Mapping[str, float]) -> Resources:
        """Return a budget of these amounts by name; those that are absent are unlimited."""
        return Resources(**{name: limits.get(name, math.inf) for name in ("cores", "gpus", "memory_mb")})

    @property
    def text(self) -> str:
        """Readable form, without absent or unlimited resources: `2 cores, 1 GPU, 4 GiB`."""
        parts = []
        for amount, one, several in ((self.cores, "core", "cores"), (self.gpus, "GPU", "GPUs")):
            if amount and math.isfinite(amount):
                parts.append(f"{amount:g} {one if amount == 1 else several}")
        if self.memory_mb and math.isfinite(self.memory_mb):
            parts.append(f"{self.memory_mb / 1024:.3g} GiB")
        return ", ".join(parts) or "nothing"


UNLIMITED = Resources(math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Rate:
    """Throughput with a number of workers, with the best settings known for it."""

    num_workers: int
    samples_per_s: float
    low_per_s: float  # interval of 90 %
    high_per_s: float
    is_measured: bool = False


@dataclass(frozen=True)
class PoolJob:
    """A job that has a place in the pool, or waits for one. All times are on the clock of decisions."""

    name: str
    needs: Resources  # of one worker
    min_workers: int
    max_workers: int
    granted: int = 0  # workers that it was given; 0: it waits
    planned: int = 0  # workers in its plan; 0: it has no plan yet
    alive: int = 0  # workers that run, start or end
    is_present: bool = True  # its `dlrover run` lives
    is_by_hand: bool = False  # a user has set its size, so it is counted but not changed
    rates: tuple[Rate, ...] = ()  # by number of workers, ascending; empty before its planner has decided
    samples_left: float | None = None  # None: its end is unknown
    change_s: float = 0.5  # expected pause of the job when its size changes
    submitted_s: float = 0.0
    since_s: float = 0.0
    served_worker_s: float = 0.0  # seconds times workers that it had before `since_s`
    priority: int = 0
    weight: float = 1.0
    owner: str = ""
    deadline_s: float | None = None  # None: any
    sizes: WorldSizes = ANY_NUMBER  # numbers of workers that it may be given; its limits are among them

    @property
    def held(self) -> int:
        """Workers with resources that no other job may have."""
        if self.is_by_hand:
            return max(self.planned, self.alive)  # a user may also make it smaller than it was granted
        return max(self.granted, self.planned, self.alive)

    @property
    def present(self) -> int:
        """Workers that it holds, kept within its limits and rounded down to a size."""
        return self.within_limits(self.held)

    def within_limits(self, num_workers: int) -> int:
        """Return the most workers up to `num_workers` that it may be given."""
        return max(self.min_workers, min(self.sizes.at_most(num_workers), self.max_workers))

    def served_by(self, now_s: float) -> float:
        """Return the seconds times workers that it has had by now."""
        return self.served_worker_s + max(0.0, now_s - self.since_s) * self.held

    @property
    def is_waiting(self) -> bool:
        return self.is_present and not self.held

    @property
    def is_flexible(self) -> bool:
        """Whether a decision may change its size: it runs, its speed by size is known, and no user has set it."""
        return self.is_present and bool(self.held and self.rates) and not self.is_by_hand

    @property
    def least_held(self) -> int:
        """Workers that it cannot be made to give back."""
        return self.min_workers if self.is_flexible else self.held

    def rate(self, num_workers: int) -> Rate | None:
        """Return the throughput with a number of workers, in a straight line between known ones; None if it is unknown."""
        below = max((r for r in self.rates if r.num_workers <= num_workers), key=lambda r: r.num_workers, default=None)
        above = min((r for r in self.rates if r.num_workers >= num_workers), key=lambda r: r.num_workers, default=None)
        if below is None or above is None or below is above:
            return below if above is not None else None
        part = (num_workers - below.num_workers) / (above.num_workers - below.num_workers)
        ends = [(getattr(below, name), getattr(above, name)) for name in ("samples_per_s", "low_per_s", "high_per_s")]
        return Rate(num_workers, *(low + part * (high - low) for low, high in ends))

    def seconds_left(self, num_workers: int) -> float | None:
        """Return the seconds that the rest of the job takes with a number of workers; None if that is unknown."""
        rate = self.rate(num_workers)
        return self.samples_left / rate.samples_per_s if rate is not None and self.samples_left is not None else None


def held_by(jobs: Iterable[PoolJob]) -> Resources:
    """Return the resources that these jobs hold together."""
    return sum((job.needs.times(job.held) for job in jobs), Resources())


@dataclass(frozen=True)
class Owners:
    """Weights and quotas by owner. The weight of an owner that is absent is 1, and its quota has no limit."""

    weights: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, Resources] = field(default_factory=dict)

    def weight(self, owner: str) -> float:
        return self.weights.get(owner, 1.0)

    def quota(self, owner: str) -> Resources:
        return self.quotas.get(owner, UNLIMITED)

    def exceeded(self, held: Mapping[str, Resources]) -> list[str]:
        """Return the owners that hold more than their quotas."""
        return [owner for owner in self.quotas if owner in held and not held[owner].fits(self.quota(owner))]


# Fairness among the owners of a pool's jobs: the order of starts, quotas, and the weights of running jobs.
#
# An owner's share is that of its dominant resource: the largest part of the budget that it has of any resource (dominant
# resource fairness, Ghodsi et al., NSDI 2011). A running job counts with the workers that it cannot be made to give back.
#
# The next start goes to the owner that would then have the smallest share over its weight. Jobs of one owner start by
# priority, then by submission; one that waits longer than the bound goes before the others of its owner. If it is larger
# than its owner's part, the weight over that of all owners with jobs, it then counts as if it needed nothing: so it has its
# turn, too.
@dataclass(frozen=True)
class Queue:
    """Waiting jobs."""

    jobs: Sequence[PoolJob]  # in their order of starting
    beyond_quota: Sequence[PoolJob]  # would exceed their owner's quota if those before them had started


def held_by_owner(jobs: Collection[PoolJob]) -> dict[str, Resources]:
    """Return the resources of each owner that its running jobs cannot be made to give back."""
    held: dict[str, Resources] = {}
    for job in jobs:
        held[job.owner] = held.get(job.owner, Resources()) + job.needs.times(job.least_held)
    return held


def queue_in_order(jobs: Collection[PoolJob], budget: Resources, owners: Owners, now_s: float, max_wait_s: float) -> Queue:
    """Sort the waiting ones among a pool's jobs by their turns."""

    def turn(job: PoolJob) -> tuple[bool, int, float, str]:
        late = is_overdue(job.submitted_s, now_s, max_wait_s)
        return not late, 0 if late else -job.priority, job.submitted_s, job.name

    held = held_by_owner(jobs)
    waiting = {owner: sorted((job for job in of if job.is_waiting), key=turn) for owner, of in _by_owner(jobs).items()}
    total = math.fsum(map(owners.weight, waiting))

    def counted(job: PoolJob) -> Resources:
        fewest = _fewest(job)
        is_too_large = _dominant(fewest, budget) * total > owners.weight(job.owner)
        return Resources() if is_too_large and is_overdue(job.submitted_s, now_s, max_wait_s) else fewest

    def next_of(owner: str) -> tuple[float, tuple[bool, int, float, str], str]:
        job = waiting[owner][0]
        return _dominant(held[owner] + counted(job), budget) / owners.weight(owner), turn(job), owner

    heads = [next_of(owner) for owner, of in waiting.items() if of]
    heapq.heapify(heads)
    order, beyond = [], []
    while heads:
        *_, owner = heapq.heappop(heads)
        job = waiting[owner].pop(0)
        then = held[owner] + _fewest(job)
        if then.fits(owners.quota(owner)):
            order.append(job)
            held[owner] = then
        else:
            beyond.append(job)
            if is_overdue(job.submitted_s, now_s, max_wait_s):  # its owner's later jobs would take the part that it waits for
                beyond += waiting[owner]
                waiting[owner] = []
        if waiting[owner]:
            heapq.heappush(heads, next_of(owner))
    return Queue(order, beyond)


def weighed(jobs: Sequence[PoolJob], owners: Owners) -> list[PoolJob]:
    """Return jobs as a size policy should see them, so that no owner gains by more jobs or higher priorities.

    The weights of an owner's jobs add up to that of the owner, on a scale on which the mean weight of a job is 1.
    Priorities count among the jobs of one owner: the highest of each owner becomes 0, its next one -1.
    """
    of_owner = _by_owner(jobs)
    total = math.fsum(map(owners.weight, of_owner))
    found: dict[str, PoolJob] = {}
    for owner, of in of_owner.items():
        levels = sorted({job.priority for job in of}, reverse=True)
        scale = owners.weight(owner) * len(jobs) / (total * math.fsum(job.weight for job in of))
        found |= {job.name: replace(job, priority=-levels.index(job.priority), weight=job.weight * scale) for job in of}
    return [found[job.name] for job in jobs]


def _by_owner(jobs: Collection[PoolJob]) -> dict[str, list[PoolJob]]:
    found: dict[str, list[PoolJob]] = {}
    for job in jobs:
        found.setdefault(job.owner, []).append(job)
    return found


def _fewest(job: PoolJob) -> Resources:
    return job.needs.times(job.min_workers)


def _dominant(held: Resources, budget: Resources) -> float:
    return max((has / of for has, of in held.pairs(budget) if has and of and math.isfinite(of)), default=0.0)


@dataclass(frozen=True)
class Move:
    """A change of a job's grant."""

    name: str
    before: int
    after: int


def next_moves(jobs: Sequence[PoolJob], budget: Resources, wanted: Mapping[str, int], may_grow: bool = True) -> list[Move]:
    """Return the changes to make now, towards wanted sizes: all that shrink, then those that grow or start and fit.

    The budget is never exceeded, however late processes end. A job is charged the maximum of its grant, the workers of its
    plan, and its running workers. So a smaller grant alone frees nothing: another job grows only when the job's workers have
    ended. Changes that do not fit yet wait for a later decision.

    Args:
        jobs: in their order of growing.
        wanted: number of workers of each job by name; jobs that are absent stay.
        may_grow: whether the state is known well enough to give resources away.
    """
    sizes = {job.name: wanted.get(job.name, job.granted) for job in jobs}
    moves = [Move(job.name, job.granted, sizes[job.name]) for job in jobs if 0 < sizes[job.name] < job.granted]
    if not may_grow:
        return moves
    left = budget - held_by(jobs)
    for job in jobs:
        size = sizes[job.name]
        if size <= job.granted or not job.is_present:
            continue
        more = job.needs.times(max(0, size - job.held))
        # Its present workers do not justify a refusal: in that case others have too much.
        if size <= job.held or more.fits(left):
            moves.append(Move(job.name, job.granted, size))
            left -= more
    return moves


# Decide the size that each job of a pool should have, within the budget. Rules that hold for every policy:
#
# - A job keeps its own limits. Once it runs it is never stopped: it keeps its minimum number of workers, whatever the
#   priority of a waiting job.
# - A job with a size set by hand, or with a planner that has not decided yet, keeps its size and is counted.
# - Waiting jobs start in the order of `queue_in_order`. One that does not fit holds back the jobs of other owners. Smaller
#   jobs of its own owner pass it, until it has waited longer than the bound: from then on no job does.
# - An owner has no more than its quota.

NO_RULES = Owners()

STAY_S = 30.0
"""Seconds that a job keeps a new size though another running job would gain more: predictions change with each size."""


class Divider(Protocol):
    """Divides resources among jobs. Pure."""

    def __call__(self, jobs: Sequence[PoolJob], free: Resources, now_s: float) -> Mapping[str, int]:
        """Return the number of workers of each job by name; a job that is absent, or has 0, waits.

        `jobs` are running ones of variable size, then waiting ones in turn. The fewest workers of all fit into `free`.
        """
        ...


def why_never(job: PoolJob, budget: Resources, owners: Owners = NO_RULES) -> str:
    """Return a readable reason why a job can never start in a pool of this budget; empty if it can."""
    fewest = job.needs.times(job.min_workers)
    if not fewest.fits(budget):
        return f"its {job.min_workers} workers need {fewest.text}, and the whole pool has {budget.text}"
    if not fewest.fits(quota := owners.quota(job.owner)):
        return f"its {job.min_workers} workers need {fewest.text}, and the quota of owner {job.owner} is {quota.text}"
    return ""


def wanted_sizes(
    jobs: Sequence[PoolJob],
    budget: Resources,
    divide: Divider,
    now_s: float,
    max_wait_s: float = 3600.0,
    owners: Owners = NO_RULES,
) -> dict[str, int]:
    """Return the number of workers that each job should have; 0 for one that waits.

    The sizes fit into the budget together, unless jobs that must not be changed, and the fewest workers of running ones, exceed
    it by themselves. The same holds for each owner and its quota.
    """
    running = _steady([job for job in jobs if job.is_flexible], now_s)
    queue = queue_in_order(jobs, budget, owners, now_s, max_wait_s)
    kept = [job for job in jobs if not job.is_flexible and not job.is_waiting]
    wanted = {job.name: job.held if not job.is_waiting else 0 for job in jobs if not job.is_flexible}
    free = budget - held_by(kept)
    if queue.jobs or not held_by(running).fits(free):
        running = [job for job in jobs if job.is_flexible]  # they have to make room
    by_hand = held_by(job for job in kept if job.is_by_hand)
    admitted, overdue = _admitted(running, queue.jobs, free, budget - by_hand, now_s, max_wait_s)
    movable = weighed([*running, *admitted], owners)
    if movable:
        wanted |= _divided(movable, free, held_by_owner(kept), divide, overdue, owners, now_s)
    return wanted


def _divided(
    movable: Sequence[PoolJob],
    free: Resources,
    kept: Mapping[str, Resources],
    divide: Divider,
    overdue: set[str],
    owners: Owners,
    now_s: float,
) -> dict[str, int]:
    """Return a policy's sizes, within quotas. `kept` holds the resources of each owner's other jobs.

    Policies ignore quotas. So the jobs of an owner that would get too much are cut to its quota, and the rest is divided again.
    """
    for _ in range(1 + len(owners.quotas)):
        sizes = _kept_within(movable, divide(movable, free, now_s), overdue, free)
        held = {job.owner: kept.get(job.owner, Resources()) for job in movable}
        for job in movable:
            held[job.owner] += job.needs.times(sizes[job.name])
        exceeded = owners.exceeded(held)
        if not exceeded:
            break
        for owner in exceeded:
            of = [job for job in movable if job.owner == owner]
            cut = _kept_within(of, sizes, overdue, owners.quota(owner) - kept.get(owner, Resources()))
            most = {job.name: max(job.min_workers, cut[job.name]) for job in of}
            movable = [replace(job, max_workers=most.get(job.name, job.max_workers)) for job in movable]
    return sizes


def _steady(running: Sequence[PoolJob], now_s: float) -> list[PoolJob]:
    """Return running jobs, with their present sizes as the minimum where these are new."""
    return [replace(job, min_workers=job.present) if now_s - job.since_s < STAY_S else job for job in running]


def _admitted(
    running: Sequence[PoolJob],
    queue: Sequence[PoolJob],
    free: Resources,
    in_the_end: Resources,
    now_s: float,
    max_wait_s: float,
) -> tuple[list[PoolJob], set[str]]:
    """Return the waiting jobs that fit, all with their fewest workers, and those of them that are overdue.

    `in_the_end` is free once all jobs without a size set by hand have ended.
    """
    left = free
    for job in running:
        left -= job.needs.times(job.min_workers)
    admitted: list[PoolJob] = []
    overdue: set[str] = set()
    only: str | None = None  # the only owner allowed to start jobs, while the others are held back
    for job in queue:
        if only is not None and job.owner != only:
            continue
        is_late = is_overdue(job.submitted_s, now_s, max_wait_s)
        fewest = job.needs.times(job.min_workers)
        if fewest.fits(left):
            admitted.append(job)
            overdue |= {job.name} if is_late else set()
            left -= fewest
        elif not fewest.fits(in_the_end):
            continue  # a user has given away what it waits for
        elif is_late:
            break
        else:
            only = job.owner
    return admitted, overdue


def _kept_within(jobs: Sequence[PoolJob], chosen: Mapping[str, int], overdue: set[str], free: Resources) -> dict[str, int]:
    """Return a policy's sizes, corrected to the rules and to all resources: policies divide one of them."""
    sizes = {}
    for job in jobs:
        asked = chosen.get(job.name, 0)
        must_run = not job.is_waiting or job.name in overdue
        sizes[job.name] = job.within_limits(asked) if asked or must_run else 0
    by_name = {job.name: job for job in jobs}
    while not _fit(by_name, sizes, free):
        larger = [job for job in jobs if sizes[job.name] > job.min_workers]
        starting = [job for job in jobs if job.is_waiting and sizes[job.name]]
        if larger:
            least = min(larger, key=lambda job: (job.priority, _loss(job, sizes[job.name]), job.name))
            sizes[least.name] = least.within_limits(sizes[least.name] - 1)
        elif starting:
            sizes[min(reversed(starting), key=lambda job: job.name in overdue).name] = 0  # the last in turn
        else:
            break  # all run with their fewest workers
    return sizes


def _fit(jobs: Mapping[str, PoolJob], sizes: Mapping[str, int], free: Resources) -> bool:
    return held_by(replace(jobs[name], granted=size, planned=0, alive=0) for name, size in sizes.items()).fits(free)


def _loss(job: PoolJob, num_workers: int) -> float:
    """Return the weighted share of a job's best throughput that it loses with its last worker."""
    now, less = job.rate(num_workers), job.rate(job.within_limits(num_workers - 1))
    if now is None or less is None:
        return 0.0
    return job.weight * (now.samples_per_s - less.samples_per_s) / max(r.samples_per_s for r in job.rates)


@dataclass(frozen=True)
class Wait:
    """A job's predicted wait."""

    name: str
    place: int  # number in the queue, from 1
    expected_s: float | None  # seconds until it starts, if no other job is submitted before; None: unknown
    reason: str  # a readable sentence


def queue_of(jobs: Sequence[PoolJob], budget: Resources, now_s: float, max_wait_s: float, owners: Owners) -> list[Wait]:
    """Predict the waits of all waiting jobs, in order.

    Each job starts once enough of those before it have ended. Running jobs can go down to their fewest workers for it, so they
    are counted with these, and end as late as with their present sizes.
    """
    queue = queue_in_order(jobs, budget, owners, now_s, max_wait_s)
    holders = [job for job in jobs if job.held]
    ends = [_End(job.name, job.seconds_left(job.held), job.needs.times(job.least_held)) for job in holders]
    free = budget - sum((end.gives for end in ends), Resources())
    waits: list[Wait] = []
    for place, job in enumerate(queue.jobs, start=1):
        need = job.needs.times(job.min_workers)
        wait, free, ends = _wait_of(job, place, need, free, ends)
        waits.append(_behind(waits, wait, {each.name: each.owner for each in queue.jobs}))
    for place, job in enumerate(queue.beyond_quota, start=len(waits) + 1):
        need, quota = job.needs.times(job.min_workers), owners.quota(job.owner)
        reason = f"it needs {need.text}, and with the jobs before it owner {job.owner} has its quota of {quota.text}"
        waits.append(Wait(job.name, place, None, reason))
    return waits


def _behind(before: Sequence[Wait], wait: Wait, owner_of: Mapping[str, str]) -> Wait:
    """Return a wait that ends no sooner than those of other owners' jobs with an earlier turn: no job passes these."""
    if wait.expected_s is None:
        return wait
    for other in reversed(before):
        is_later = other.expected_s is None or other.expected_s > wait.expected_s
        if is_later and owner_of[other.name] != owner_of[wait.name]:
            reason = f"owner {owner_of[other.name]} has its turn first, with {other.name}"
            return replace(wait, expected_s=other.expected_s, reason=reason)
    return wait


@dataclass(frozen=True)
class _End:
    """The expected end of a job, in seconds from now, and the resources that it gives back."""

    name: str
    at_s: float | None
    gives: Resources


def _wait_of(
    job: PoolJob, place: int, need: Resources, free: Resources, ends: list[_End]
) -> tuple[Wait, Resources, list[_End]]:
    """Return the wait of one job, and the free resources and later ends after its start."""
    left = Resources(*(max(0.0, amount) for amount in (free.cores, free.gpus, free.memory_mb)))
    missing = f"it needs {need.text}, and the other jobs leave it {left.text}"
    waited_s = 0.0
    known = sorted((end for end in ends if end.at_s is not None), key=lambda end: (end.at_s or 0.0, end.name))
    unknown = [end for end in ends if end.at_s is None]
    last = ""
    while not need.fits(free) and known:
        end, *known = known
        free, waited_s, last = free + end.gives, end.at_s or 0.0, end.name
    rest = [*known, *unknown]
    if not need.fits(free):
        names = ", ".join(sorted(end.name for end in unknown)) or "other jobs"
        reason = f"{missing}; when it starts depends on {names}, whose end is not known"
        return Wait(job.name, place, None, reason), free - need, rest
    reason = f"{missing}; it starts when {last} has ended" if last else "running jobs make room for it"
    own_s = job.seconds_left(job.min_workers)
    end = _End(job.name, waited_s + own_s if own_s is not None else None, need)
    return Wait(job.name, place, waited_s, reason), free - need, [*rest, end]
