"""Records of a pool in etcd, and the reading of them and of the pool's jobs. Decides nothing.

members/{run_id}   a job that has, or waits for, a place. Written by its `dlrover run`, bound to that process's lease.
grants/{run_id}    the size that the job has, or its place in the queue. Written by the brain, fenced on `brain`.
                   Removed by the run when it ends in order, or by the brain once the job has disappeared.
../.gpus/{gpu}/holder  the run that uses a GPU of its machine, whatever its pool. Written by that run, bound to the lease of
                   its place, and fenced on it.
others             jobs in no pool that the brain counts. Written by the brain, bound to its lease; for commands only.
events/            what has happened to the pool's jobs. Written by a brain with --notify, fenced on `brain`; the newest 1,000.
notified           the event up to which notifications were sent. Written by that brain.
brain              the process that decides. Rewritten with each of its decisions, so that a decision which arrives late,
                   after its answer was lost, is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, TypeVar

from lightning_dlrover.codec import RecordError
from lightning_dlrover.pool.budget import PoolJob, Rate, Resources
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import KeyValue
from lightning_dlrover.rdzv.job.events import DecisionMade, MemoryShort, TrainingStalled, content_of
from lightning_dlrover.rdzv.job.journal import read_events, readable
from lightning_dlrover.rdzv.job.records import (
    DEFAULT_PREFIX,
    AgentRecord,
    ControllerRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodesRecord,
    PlanRecord,
)
from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.rdzv.membership.rounds import read_view
from lightning_dlrover.tuning.memory import least_workers
from lightning_dlrover.tuning.plan import Candidate, Decision

POOLS_FOLDER = ".pools"
"""Folder of all pools below the prefix of all jobs. No job has this name: names of jobs begin with a letter, digit or `_`."""


class PoolKeys:
    """Every key of one pool.

    Raises:
        ValueError: the pool cannot have this name.
    """

    def __init__(self, pool: str, prefix: str = DEFAULT_PREFIX) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", pool):
            raise ValueError(f"{pool!r} cannot name a pool: use letters, digits, '.', '_' and '-', such as team-a")
        self.pool, self.prefix = pool, prefix
        self.jobs = f"{prefix.rstrip('/')}/"  # folder of all jobs
        self.pools = f"{self.jobs}{POOLS_FOLDER}/"  # folder of all pools
        self.root = f"{self.pools}{pool}/"
        self.brain, self.others = f"{self.root}brain", f"{self.root}others"
        self.members, self.grants = f"{self.root}members/", f"{self.root}grants/"
        self.events, self.notified = f"{self.root}events/", f"{self.root}notified"

    def gpu(self, name: str) -> str:
        """The key of a GPU, the same for all pools. No pool has a name that begins with a dot."""
        return f"{self.pools}.gpus/{name}/holder"


@dataclass(frozen=True)
class GpuRecord:
    """The run that uses a GPU of its machine."""

    run_id: str
    host: str
    pid: int


@dataclass(frozen=True)
class MemberRecord:
    """A job of the pool, as it was started. Times are seconds since the epoch."""

    host: str
    pid: int
    min_workers: int
    max_workers: int
    submitted_at: float
    cores: float = 1.0  # per worker
    gpus: int = 0
    memory_mb: int = 0  # 0: its memory is not counted
    priority: int = 0  # higher ones start first
    weight: float = 1.0
    owner: str = ""  # user or team
    deadline_at: float = 0.0  # 0: any time
    sizes: list[int] = field(default_factory=list)  # numbers of workers that it may have, ascending; empty: any

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers or not self.weight > 0 or self.cores < 0:
            raise ValueError(
                f"a job of {self.min_workers} to {self.max_workers} workers with {self.cores} cores each and weight "
                f"{self.weight} can have no place: give at least one worker, and a weight above 0"
            )


@dataclass(frozen=True)
class GrantRecord:
    """The place of a job in a pool. Times are seconds since the epoch."""

    state: Literal["waiting", "granted", "refused"]
    num_workers: int = 0  # 0: it waits
    reason: str = ""  # one readable sentence
    place: int = 0  # waiting: its number in the queue, from 1
    queued: int = 0  # waiting: jobs in the queue
    expected_at: float = 0.0  # waiting: expected start; 0: unknown
    since: float = 0.0  # start of this state, or of this size
    submitted_at: float = 0.0
    served_worker_s: float = 0.0  # seconds times workers that it had before `since`
    # The owner, and the needs of a worker, for as long as the job has processes though its `dlrover run` is gone.
    owner: str = ""
    cores: float = 1.0
    gpus: int = 0
    memory_mb: int = 0


@dataclass(frozen=True)
class BrainRecord:
    """The process that decides on a pool. Key `brain`, bound to its lease."""

    host: str
    pid: int
    policy: str = ""
    budget: dict[str, float] = field(default_factory=dict)  # cores, gpus, memory_mb; a resource that is absent is unlimited
    max_wait_s: float = 3600.0
    owner_weights: dict[str, float] = field(default_factory=dict)
    quotas: dict[str, dict[str, float]] = field(default_factory=dict)  # keyed by owner, each in the form of `budget`
    number: int = 0  # decisions of this process so far


@dataclass(frozen=True)
class OthersRecord:
    """Jobs in no pool that the brain counts. Key `others`, bound to the brain's lease."""

    jobs: list[str] = field(default_factory=list)


DEFAULT_CHANGE_S = 0.5
"""Assumed seconds of a change of workers until the job has measured one."""


@dataclass
class Learned:
    """A job's newest decision, its minimum of workers due to memory, and its own changes so far."""

    decision: Decision | None = None
    least_workers: int = 0
    stalls_s: list[float] = field(default_factory=list)
    revision: int = 0  # events up to this revision have been read

    @staticmethod
    def update_all(client: EtcdClient, learned: Mapping[Keys, Learned]) -> None:
        """Read the new events of jobs, in few requests. If etcd does not answer, nothing has changed."""
        found = client.read_prefixes({keys.events: each.revision for keys, each in learned.items()})
        for keys, each in learned.items():
            revision, entries = found[keys.events]
            each.add(read_events(entries))
            each.revision = revision

    def add(self, records: Iterable[EventRecord]) -> None:
        for record in records:
            try:
                event = content_of(record)
                if isinstance(event, DecisionMade):
                    self.decision = Decision.from_data(event.document)
            except (RecordError, ValueError):
                continue  # an event of another release, or foreign
            if isinstance(event, MemoryShort):
                self.least_workers = max(self.least_workers, least_workers([(event.act, event.num_workers)]))
            elif isinstance(event, TrainingStalled) and event.seconds >= 0:
                self.stalls_s.append(event.seconds)

    @property
    def change_s(self) -> float:
        return median(self.stalls_s) if self.stalls_s else DEFAULT_CHANGE_S

    def samples_left(self, num_workers: int, now: float) -> float | None:
        """Return the samples that remain by now, if the job has run with `num_workers` since its decision; None: unknown."""
        decision = self.decision
        if decision is None or decision.left_s is None:
            return None
        by_size = {rate.num_workers: rate.samples_per_s for rate in rates_of(decision)}
        if (then := by_size.get(decision.current.num_workers)) is None:
            return None
        return max(0.0, decision.left_s * then - max(0.0, now - decision.at) * by_size.get(num_workers, then))

    def as_job(self, name: str, now: float) -> PoolJob:
        """Return a job outside of any pool as one of a pool, with the size of its newest decision."""
        size = self.decision.current_workers if self.decision is not None else 1
        left, rates = self.samples_left(size, now), rates_of(self.decision)
        made = PoolJob(name, Resources(1.0), 1, max(size, 1), granted=size, alive=size, rates=rates)
        return replace(made, samples_left=left, change_s=self.change_s)


def rates_of(decision: Decision | None) -> tuple[Rate, ...]:
    """Return the best throughput that a decision knows for each number of workers, ascending."""
    best: dict[int, Candidate] = {}
    for candidate in decision.candidates if decision is not None else ():
        known = best.get(candidate.num_workers)
        if candidate.feasible and (known is None or candidate.samples_per_s > known.samples_per_s):
            best[candidate.num_workers] = candidate
    return tuple(_rate(best[size]) for size in sorted(best) if best[size].samples_per_s > 0)


def _rate(candidate: Candidate) -> Rate:
    samples = candidate.samples_per_s * candidate.step_time_s
    return Rate(
        candidate.num_workers,
        candidate.samples_per_s,
        samples / candidate.high_s if candidate.high_s > 0 else candidate.samples_per_s,
        samples / candidate.low_s if candidate.low_s > 0 else candidate.samples_per_s,
        candidate.measured,
    )


@dataclass(frozen=True)
class SeenJob:
    """A job as it was last read from etcd: its records, and the facts for decisions.

    Args:
        is_outside: it is in no pool, and its size is not the brain's.
        phase: that of its training; empty before its first worker has started.
    """

    job: PoolJob
    keys: Keys
    grant: GrantRecord | None
    grant_revision: int
    plan: PlanRecord | None
    plan_entry: KeyValue | None
    learned: Learned
    is_outside: bool = False
    phase: str = ""


def live_entries(client: EtcdClient, keys: Mapping[str, Keys]) -> dict[str, dict[str, KeyValue]]:
    """Return the entries of `keys.live` by key, for each job, in few requests."""
    found = client.read_prefixes({each.live: 0 for each in keys.values()})
    return {name: {entry.key: entry for entry in found[each.live][1]} for name, each in keys.items()}


def num_alive(live: Mapping[str, KeyValue], keys: Keys) -> int:
    """Return the workers of a job that run, start or end: agents, workers, or nodes of its controller, whichever is largest."""
    view = read_view(live, keys)
    controller = readable(ControllerRecord, live.get(keys.controller))
    workers_of_agents = sum(agent.num_workers for agent in view.agents.values())
    return max(workers_of_agents, len(view.workers), len(controller.apps) if controller is not None else 0)


FOLDERS_PER_LOOK = 64
"""Maximum number of jobs, ended ones among them, that a look walks over. Each costs a request at most."""


class Outsiders:
    """Finds jobs under the same prefix that are in no pool: they are charged to the budget but never resized.

    Keys of jobs that have ended stay in etcd for days, so there may be thousands. Each look walks over a limited number of
    folders and continues where the last one stopped. Jobs that were found are read in every look. The first look walks over
    all of them. The brain publishes the names that it knows, so that commands need not walk.
    """

    def __init__(self, client: EtcdClient, pool: PoolKeys) -> None:
        self._client = client
        self._pool = pool
        self._after: str | None = None  # the last folder of the last look
        self._has_seen_all = False
        self._learned: dict[str, Learned] = {}  # speeds of the jobs that were there

    def look(self, in_pools: Collection[str], now: float) -> dict[str, SeenJob]:
        """Return the jobs that have processes, without those `in_pools`."""
        most = FOLDERS_PER_LOOK if self._has_seen_all else None
        names = self._client.folders(self._pool.jobs, self._after, most)
        found = self.read({*names, *self._learned} - {*in_pools, POOLS_FOLDER}, now)
        is_end = most is None or len(names) < most
        self._after = None if is_end else names[-1]
        self._has_seen_all |= is_end
        return found

    def read(self, names: Collection[str], now: float) -> dict[str, SeenJob]:
        """Return those of some jobs that have processes."""
        keys: dict[str, Keys] = {}
        for name in sorted(names):
            with contextlib.suppress(ValueError):  # a foreign key below the jobs' prefix
                keys[name] = Keys(name, self._pool.prefix)
        lives = live_entries(self._client, keys)
        running = [name for name, live in lives.items() if num_alive(live, keys[name])]
        learned = {name: self._learned.get(name) or Learned() for name in running}
        Learned.update_all(self._client, {keys[name]: each for name, each in learned.items()})
        self._learned = learned
        return {name: _seen(keys[name], lives[name], learned[name], now) for name in running}


def _seen(keys: Keys, live: Mapping[str, KeyValue], learned: Learned, now: float) -> SeenJob:
    alive = num_alive(live, keys)
    plan_entry = live.get(keys.plan)
    plan = readable(PlanRecord, plan_entry)
    held = max(alive, plan.num_workers if plan is not None and plan.binding else 0)
    job = PoolJob(
        name=keys.run_id,
        needs=_needs(live, keys, plan),
        min_workers=held,
        max_workers=held,
        granted=held,
        planned=held,
        alive=alive,
        is_by_hand=True,
        rates=rates_of(learned.decision),
        samples_left=learned.samples_left(alive, now),
        change_s=learned.change_s,
    )
    return SeenJob(job, keys, None, 0, plan, plan_entry, learned, is_outside=True)


def _needs(live: Mapping[str, KeyValue], keys: Keys, plan: PlanRecord | None) -> Resources:
    """Return the needs of a worker: its part of a node's recorded cores and memory, else one core. GPUs are not recorded."""
    nodes = readable(NodesRecord, live.get(keys.nodes)) or NodesRecord("", "")
    cores = (plan.node_cpus if plan is not None else None) or nodes.max_cpus
    memory_mb = (plan.node_memory_mb if plan is not None else None) or nodes.max_memory_mb
    agents = [readable(AgentRecord, entry) for key, entry in live.items() if key.startswith(keys.agents)]
    per_node = max((agent.num_workers for agent in agents if agent is not None), default=1) or 1
    return Resources(cores / per_node if cores else 1.0, 0, memory_mb / per_node)


R = TypeVar("R")


@dataclass(frozen=True)
class PoolView:
    """A pool, and jobs outside of all pools, at one moment."""

    jobs: Mapping[str, SeenJob]
    brain_entry: KeyValue | None  # key of the process that decides

    @property
    def brain(self) -> BrainRecord | None:
        return readable(BrainRecord, self.brain_entry)

    @property
    def pool_jobs(self) -> list[PoolJob]:
        return [seen.job for seen in self.jobs.values()]


class Watch:
    """Reads a pool and its jobs from etcd, again and again.

    The pool's own keys are read first, in one request, the key `brain` among them. Whatever is read afterwards is at least as
    new. So a write that requires `brain` to be unchanged is based on a state that includes every earlier decision. The keys
    of all jobs are read in transactions of many ranges, two requests for as many jobs as one transaction holds.

    Args:
        counts_others: whether to look for jobs that are in no pool; None: those that the brain has found are seen.
    """

    def __init__(self, client: EtcdClient, pool: PoolKeys, counts_others: bool | None = None) -> None:
        self._client = client
        self._pool = pool
        self._counts_others = counts_others
        self._outsiders = Outsiders(client, pool)
        self._learned: dict[str, Learned] = {}

    def look(self, now: float) -> PoolView:
        """Return the pool as it is `now`, in seconds since the epoch. Raise EtcdError if etcd does not answer."""
        pool = self._pool
        entries = self._client.entries(pool.pools)
        members = _folder(entries, pool.members, MemberRecord)
        grants = _folder(entries, pool.grants, GrantRecord)
        names = sorted({*members, *grants})
        lives = self._read({name: Keys(name, pool.prefix) for name in names})
        jobs = {}
        for name in names:
            entry = entries.get(pool.grants + name)
            revision = entry.mod_revision if entry is not None else 0
            jobs[name] = self._job(name, lives[name], members.get(name), grants.get(name), revision, now)
        places = [key.split("/")[-2:] for key in entries]
        in_pools = {name for folder, name in places if folder in ("members", "grants")}
        if self._counts_others:
            jobs |= self._outsiders.look(in_pools, now)
        elif self._counts_others is None and (others := readable(OthersRecord, entries.get(pool.others))) is not None:
            jobs |= self._outsiders.read({*others.jobs} - in_pools, now)
        self._learned = {name: learned for name, learned in self._learned.items() if name in jobs}
        return PoolView(jobs, entries.get(pool.brain))

    def _read(self, keys: Mapping[str, Keys]) -> dict[str, dict[str, KeyValue]]:
        """Return the live entries of jobs, and read the new events of those that have some."""
        lives = live_entries(self._client, keys)
        learned = {keys[name]: self._learned.setdefault(name, Learned()) for name, live in lives.items() if live}
        Learned.update_all(self._client, learned)
        return lives

    def _job(
        self,
        name: str,
        live: Mapping[str, KeyValue],
        member: MemberRecord | None,
        grant: GrantRecord | None,
        revision: int,
        now: float,
    ) -> SeenJob:
        keys = Keys(name, self._pool.prefix)
        plan_entry = live.get(keys.plan)
        plan, alive = readable(PlanRecord, plan_entry), num_alive(live, keys)
        learned = self._learned.setdefault(name, Learned())
        given = grant or GrantRecord("waiting")
        size = max(1, given.num_workers, alive)
        needs = (given.cores, given.gpus, given.memory_mb)
        asked = member or MemberRecord("", 0, size, size, given.submitted_at, *needs, owner=given.owner)
        record = readable(JobRecord, live.get(keys.job))
        # The policies choose from a range, so it ends before a world size at which a step has failed.
        most = max(record.most_workers(alive), asked.min_workers) if record is not None else asked.max_workers
        sizes = WorldSizes(tuple(asked.sizes))
        most = sizes.at_most(min(most, asked.max_workers))
        fewest = min(most, sizes.at_least(max(asked.min_workers, learned.least_workers)))
        is_over = member is None and not alive
        job = PoolJob(
            name=name,
            needs=Resources(asked.cores, asked.gpus, asked.memory_mb),
            min_workers=fewest,
            max_workers=most,
            sizes=sizes,
            granted=given.num_workers,
            # The plan of a job without processes starts no others.
            planned=plan.num_workers if plan is not None and plan.binding and not is_over else 0,
            alive=alive,
            is_present=member is not None,
            is_by_hand=plan is not None and plan.source == "user",
            rates=rates_of(learned.decision),
            samples_left=learned.samples_left(alive or given.num_workers, now),
            change_s=learned.change_s,
            submitted_s=asked.submitted_at,
            since_s=given.since,
            served_worker_s=given.served_worker_s,
            priority=asked.priority,
            weight=asked.weight,
            owner=asked.owner,
            deadline_s=asked.deadline_at or None,
        )
        phase = record.phase if record is not None else ""
        return SeenJob(job, keys, grant, revision, plan, plan_entry, learned, phase=phase)


def _folder(entries: Mapping[str, KeyValue], folder: str, kind: type[R]) -> dict[str, R]:
    found = {key.removeprefix(folder): readable(kind, entry) for key, entry in entries.items() if key.startswith(folder)}
    return {name: record for name, record in found.items() if record is not None}
