"""Read a pool and its jobs from etcd. Decides nothing.

The pool's own keys are read first, in one request, the key `brain` among them. Whatever is read afterwards is at least as new.
So a write that requires `brain` to be unchanged is based on a state in which no other decision is missing. The keys of all jobs
are read in transactions of many ranges, two requests for as many jobs as one transaction holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from lightning_dlrover.brain.learned import Learned, rates_of
from lightning_dlrover.brain.outsiders import Outsiders
from lightning_dlrover.brain.seen import SeenJob, live_entries, num_alive
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.pool_records import BrainRecord, GrantRecord, MemberRecord, OthersRecord, PoolKeys
from lightning_dlrover.rdzv.job.records import JobRecord, Keys, PlanRecord

__all__ = ["PoolView", "Watch"]

R = TypeVar("R")


@dataclass(frozen=True)
class PoolView:
    """A pool, and jobs outside of all pools, at one moment.

    `brain_entry` is the key of the process that decides, None if there is none.
    """

    jobs: Mapping[str, SeenJob]
    brain_entry: KeyValue | None

    @property
    def brain(self) -> BrainRecord | None:
        return readable(BrainRecord, self.brain_entry)

    @property
    def pool_jobs(self) -> list[PoolJob]:
        return [seen.job for seen in self.jobs.values()]


class Watch:
    """Looks at one pool, again and again.

    Args:
        counts_others: whether to look for jobs that are in no pool; None: those that the brain has found are seen.
    """

    def __init__(
        self,
        client: EtcdClient,
        pool: PoolKeys,
        counts_others: bool | None = None,
    ) -> None:
        self._client = client
        self._pool = pool
        self._counts_others = counts_others
        self._outsiders = Outsiders(client, pool)
        self._learned: dict[str, Learned] = {}

    def look(self, now: float) -> PoolView:
        """Return the pool as it is.

        Args:
            now: seconds since the epoch.

        Raises:
            EtcdError: etcd does not answer.
        """
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
        brain_entry = entries.get(pool.brain)
        places = [key.split("/")[-2:] for key in entries]
        in_pools = {name for folder, name in places if folder in ("members", "grants")}
        if self._counts_others:
            jobs |= self._outsiders.look(in_pools, now)
        elif self._counts_others is None and (others := readable(OthersRecord, entries.get(pool.others))) is not None:
            jobs |= self._outsiders.read({*others.jobs} - in_pools, now)
        self._learned = {name: learned for name, learned in self._learned.items() if name in jobs}
        return PoolView(jobs, brain_entry)

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
        # The policies choose from a range, so it ends before a number of workers with which a step has failed.
        most = max(record.most_workers(alive), asked.min_workers) if record is not None else asked.max_workers
        most = min(most, asked.max_workers)
        fewest = min(most, max(asked.min_workers, learned.least_workers))
        is_over = member is None and not alive
        job = PoolJob(
            name=name,
            needs=Resources(asked.cores, asked.gpus, asked.memory_mb),
            min_workers=fewest,
            max_workers=most,
            granted=given.num_workers,
            # A plan that is left of a job without processes starts no others.
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
