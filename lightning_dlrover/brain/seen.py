"""A job as it was last read from etcd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dlrover.brain.learned import Learned
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.pool_records import GrantRecord
from lightning_dlrover.rdzv.job.records import ControllerRecord, Keys, PlanRecord
from lightning_dlrover.rdzv.live.view import read_view

__all__ = ["SeenJob", "live_entries", "num_alive"]


@dataclass(frozen=True)
class SeenJob:
    """One job: its records, and the facts for decisions.

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
    """Return the entries of `keys.live` by key, for each job, in few requests.

    Raises:
        EtcdError: etcd does not answer.
    """
    found = client.read_prefixes({each.live: 0 for each in keys.values()})
    return {name: {entry.key: entry for entry in found[each.live][1]} for name, each in keys.items()}


def num_alive(live: Mapping[str, KeyValue], keys: Keys) -> int:
    """Return the workers of a job that run, start or end: agents, workers, or nodes of its controller, whichever are the most.

    Args:
        live: entries of `keys.live`, by key.
    """
    view = read_view(live, keys)
    controller = readable(ControllerRecord, live.get(keys.controller))
    workers_of_agents = sum(agent.num_workers for agent in view.agents.values())
    return max(workers_of_agents, len(view.workers), len(controller.apps) if controller is not None else 0)
