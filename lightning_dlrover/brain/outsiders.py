"""Jobs under the same prefix that are in no pool: they use a part of the budget, and are left alone.

Keys of jobs that have ended stay in etcd for days, so there may be thousands. Each look walks over a limited number of folders
and goes on where the last one stopped. Jobs that were found are read in every look. The first look walks over all of them.
The brain publishes the names that it knows, so that commands need not walk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from lightning_dlrover.brain.learned import Learned, rates_of
from lightning_dlrover.brain.seen import SeenJob, live_entries, num_alive
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.pool_records import POOLS_FOLDER, PoolKeys
from lightning_dlrover.rdzv.job.records import AgentRecord, Keys, NodesRecord, PlanRecord

__all__ = ["Outsiders"]

FOLDERS_PER_LOOK = 64
"""Maximum number of jobs, ended ones among them, that a look walks over. Each costs a request at most."""


class Outsiders:
    """Looks for jobs that are in no pool, again and again."""

    def __init__(self, client: EtcdClient, pool: PoolKeys) -> None:
        self._client = client
        self._pool = pool
        self._after: str | None = None  # the last folder of the last look
        self._has_seen_all = False
        self._learned: dict[str, Learned] = {}  # speeds of the jobs that were there

    def look(self, in_pools: Collection[str], now: float) -> dict[str, SeenJob]:
        """Return the jobs that have processes.

        Args:
            in_pools: jobs of any pool.
            now: seconds since the epoch.

        Raises:
            EtcdError: etcd does not answer.
        """
        most = FOLDERS_PER_LOOK if self._has_seen_all else None
        names = self._client.folders(self._pool.jobs, self._after, most)
        found = self.read({*names, *self._learned} - {*in_pools, POOLS_FOLDER}, now)
        is_end = most is None or len(names) < most
        self._after = None if is_end else names[-1]
        self._has_seen_all |= is_end
        return found

    def read(self, names: Collection[str], now: float) -> dict[str, SeenJob]:
        """Return those of some jobs that have processes.

        Raises:
            EtcdError: etcd does not answer.
        """
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
    """Return the needs of a worker: its part of a node's cores and memory, as far as they are on record, else one core.

    GPUs are not on record.
    """
    nodes = readable(NodesRecord, live.get(keys.nodes)) or NodesRecord("", "")
    cores = (plan.node_cpus if plan is not None else None) or nodes.max_cpus
    memory_mb = (plan.node_memory_mb if plan is not None else None) or nodes.max_memory_mb
    agents = [readable(AgentRecord, entry) for key, entry in live.items() if key.startswith(keys.agents)]
    per_node = max((agent.num_workers for agent in agents if agent is not None), default=1) or 1
    return Resources(cores / per_node if cores else 1.0, 0, memory_mb / per_node)
