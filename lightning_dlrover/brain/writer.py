"""Write a brain's decisions to etcd: each one whole, and only if no other decision was made since the look it is based on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from lightning_dlrover.brain.seen import SeenJob
from lightning_dlrover.planner.cluster.pool.moves import Move
from lightning_dlrover.planner.cluster.pool.waits import Wait
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, KeyValue, Op, Put, modified
from lightning_dlrover.rdzv.job.events import SizeGiven, record_of
from lightning_dlrover.rdzv.job.pool_records import BrainRecord, GrantRecord, OthersRecord, PoolKeys
from lightning_dlrover.rdzv.job.records import PlanRecord, encode
from lightning_dlrover.rdzv.job.tenure import Tenure

__all__ = ["OutdatedError", "Writer"]

SAME_WAIT_S = 5.0
"""Seconds by which the expected start of a waiting job may shift before it is written again."""


class OutdatedError(Exception):
    """The pool has changed since the look that a decision is based on. Look again."""


class Writer:
    """Writes for one brain. Each write replaces the key `brain`, under the condition that it is as it was last seen."""

    def __init__(self, client: EtcdClient, pool: PoolKeys, tenure: Tenure[BrainRecord]) -> None:
        self._client = client
        self._pool = pool
        self._tenure = tenure
        self._revision = 0

    def based_on(self, brain_entry: KeyValue) -> None:
        """Base the next writes on a look at the pool, of which this is the key `brain`."""
        self._revision = brain_entry.mod_revision

    def resize(self, seen: SeenJob, move: Move, event: SizeGiven, reason: str, now: float) -> None:
        """Give a job another size: its grant, its plan if there is one, and a line of its history.

        A job that starts has no plan yet. Its run writes the first one.

        Raises:
            OutdatedError: nothing was written.
            EtcdError: the fate of the write is unknown.
        """
        grant = GrantRecord(
            "granted",
            move.after,
            reason,
            since=now,
            submitted_at=seen.job.submitted_s,
            served_worker_s=seen.job.served_by(now),
            owner=seen.job.owner,
            cores=seen.job.needs.cores,
            gpus=int(seen.job.needs.gpus),
            memory_mb=int(seen.job.needs.memory_mb),
        )
        ops: list[Op] = [Put(self._pool.grants + seen.job.name, encode(grant))]
        if seen.plan_entry is not None:
            lease = seen.plan_entry.lease_id
            if not seen.job.is_by_hand:
                ops.append(Put(seen.keys.plan, encode(self._plan(seen, move.after, reason, now)), lease))
            if move.before:
                key = f"{seen.keys.events}{time.time_ns():020d}-brain"
                ops.append(Put(key, encode(record_of(event, reason)), lease))
        self._write(ops, [*_as_seen(self._pool, seen), modified(seen.keys.plan) == _revision(seen.plan_entry)])

    def correct_plan(self, seen: SeenJob, now: float) -> None:
        """Let a job's plan ask for the granted workers."""
        assert seen.plan_entry is not None
        assert seen.grant is not None
        plan = self._plan(seen, seen.grant.num_workers, seen.grant.reason, now)
        ops: list[Op] = [Put(seen.keys.plan, encode(plan), seen.plan_entry.lease_id)]
        self._write(ops, [*_as_seen(self._pool, seen), modified(seen.keys.plan) == _revision(seen.plan_entry)])

    def wait(self, seen: SeenJob, wait: Wait, queued: int, now: float) -> bool:
        """Publish a job's place in the queue, unless it is published already. Return whether it was written."""
        expected_at = now + wait.expected_s if wait.expected_s is not None else 0.0
        grant = GrantRecord(
            "waiting",
            0,
            wait.reason,
            place=wait.place,
            queued=queued,
            expected_at=expected_at,
            since=now,
            submitted_at=seen.job.submitted_s,
        )
        last, shown = seen.grant, (grant.state, grant.place, grant.queued, grant.reason)
        if last is not None and (last.state, last.place, last.queued, last.reason) == shown:
            shift_s = abs(last.expected_at - expected_at)
            if shift_s <= max(SAME_WAIT_S, 0.2 * (wait.expected_s or 0.0)):
                return False
        self._write([Put(self._pool.grants + seen.job.name, encode(grant))], _as_seen(self._pool, seen))
        return True

    def refuse(self, seen: SeenJob, reason: str, now: float) -> bool:
        """Publish that a job can never start. Return whether it was written."""
        if seen.grant is not None and (seen.grant.state, seen.grant.reason) == ("refused", reason):
            return False
        grant = GrantRecord("refused", 0, reason, since=now, submitted_at=seen.job.submitted_s)
        self._write([Put(self._pool.grants + seen.job.name, encode(grant))], _as_seen(self._pool, seen))
        return True

    def forget(self, seen: SeenJob) -> None:
        """Delete the grant of a job of which nothing is left, unless its run has come back."""
        key = self._pool.members + seen.job.name
        self._write([Delete(self._pool.grants + seen.job.name)], [*_as_seen(self._pool, seen), modified(key) == 0])

    def publish_others(self, names: Sequence[str]) -> None:
        """Publish the jobs in no pool that are counted. Nothing is decided by this."""
        self._client.put(self._pool.others, encode(OthersRecord(list(names))), self._tenure.lease)

    def _plan(self, seen: SeenJob, num_workers: int, reason: str, now: float) -> PlanRecord:
        assert seen.plan is not None
        text = f"pool {self._pool.pool}: {reason}"
        return dataclasses.replace(
            seen.plan, num_workers=num_workers, source="brain", reason=text, binding=True, decision_id=0, created_at=now
        )

    def _write(self, ops: Sequence[Op], conditions: Sequence[Compare]) -> None:
        number = self._tenure.record.number + 1
        record = dataclasses.replace(self._tenure.record, number=number)
        mine = [self._tenure.is_ours, modified(self._pool.brain) == self._revision]
        done = self._client.txn([*mine, *conditions], [Put(self._pool.brain, encode(record), self._tenure.lease.id), *ops])
        if not done.succeeded:
            raise OutdatedError
        self._tenure.record = record
        self._revision = done.revision


def _as_seen(pool: PoolKeys, seen: SeenJob) -> list[Compare]:
    return [modified(pool.grants + seen.job.name) == seen.grant_revision]


def _revision(entry: KeyValue | None) -> int:
    return entry.mod_revision if entry is not None else 0
