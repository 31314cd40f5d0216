"""Write the controller's decisions on the whole job: its first plan, requests to workers, larger nodes, its failure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Mapping

from lightning_dlrover.components.control.office import Office
from lightning_dlrover.components.control.reconcile import EnlargeNodes, Limits
from lightning_dlrover.components.targets.target import NodeSize
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import KeyValue, absent
from lightning_dlrover.rdzv.job.events import JobFailed, NodeMemoryShort
from lightning_dlrover.rdzv.job.journal import FenceLostError, Journal
from lightning_dlrover.rdzv.job.records import JobRecord, Keys, PlanRecord, RecordError
from lightning_dlrover.rdzv.live.requests import ask_for_replacement

__all__ = ["JobWriter"]

log = logging.getLogger(__name__)

MIRROR_S = 5.0
"""Seconds to wait for our own write to show up in the mirror before continuing without it."""


class JobWriter:
    """Write the job's records that its controller shares with workers and users."""

    def __init__(self, client: EtcdClient, keys: Keys, office: Office, mirror: Mirror, limits: Limits) -> None:
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._office = office
        self._mirror = mirror
        self._limits = limits

    def begin(self) -> None:
        """Write the job's first plan, unless there is a plan already."""
        least = self._limits.min_workers
        reason = f"start with the fewest workers, {least}"
        plan = PlanRecord(least, "initial", reason, binding=True, created_at=time.time())
        self._journal.fenced_write({self._keys.plan: plan}, [absent(self._keys.plan)])

    def ask_for_replacement(self, worker: str, reason: str) -> None:
        """Request that a worker leave once it is replaced, unless it has gone or was asked to leave already."""
        log.info("run %s: %s is to be replaced: %s", self._keys.run_id, worker, reason)
        with contextlib.suppress(EtcdError):  # the next step repeats it
            ask_for_replacement(self._journal, worker, reason, self._office.is_ours)

    def enlarge_nodes(self, request: EnlargeNodes) -> None:
        """Plan larger nodes. The plan keeps the new size for later controllers.

        Raises:
            EtcdError: the plan was not written, or its fate is unknown.
            RecordError: the plan is unreadable.
        """
        had = request.size
        given = self._plan_memory(request.memory_mb)
        text = f"{request.name} was killed for want of memory ({had}); "
        text += f"nodes have {given} MiB from now on" if given > had.memory_mb else _why_no_more_memory(had)
        act = "enlarge" if given > had.memory_mb else "none"
        self._office.add_event(NodeMemoryShort(act, request.name, given), text)
        log.warning("run %s: %s", self._keys.run_id, text)

    def declare_failed(self, reason: str) -> bool:
        """Mark the job as failed, for nodes started by others and for later queries.

        Returns:
            False if another controller may act by now. That one decides whether the job has failed.
        """

        def failed(job: JobRecord | None) -> JobRecord | None:
            if job is None or job.phase in ("finished", "failed"):
                return None
            return dataclasses.replace(job, phase="failed", message=reason[:2000])

        try:
            if not self._office.add_event(JobFailed(), f"the job has failed: {reason}"):
                return False
            self._journal.swap(JobRecord, self._keys.job, failed, [self._office.is_ours])
            # Workers do the same when they leave an ended job; the last one may have left before.
            self._office.delete(self._keys.plan)
            self._client.delete_prefix(self._keys.drains)
        except FenceLostError:
            return False
        except (EtcdError, RecordError) as error:
            log.warning("run %s: could not be marked as failed: %s", self._keys.run_id, error)
        return True

    def _plan_memory(self, memory_mb: int) -> int:
        """Plan nodes with this much memory, within the limits. Return the resulting size in MiB."""

        def enlarged(plan: PlanRecord | None) -> PlanRecord | None:
            if plan is None:
                raise EtcdError(f"{self._keys.plan!r} was not written: it was deleted")
            wanted = dataclasses.replace(plan, node_memory_mb=min(memory_mb, self._limits.max_size.memory_mb))
            if self._limits.size(wanted).memory_mb <= self._limits.size(plan).memory_mb:
                return None
            return dataclasses.replace(wanted, created_at=time.time())

        written = self._journal.swap(PlanRecord, self._keys.plan, enlarged, [self._office.is_ours])
        with contextlib.suppress(TimeoutError):  # the next node's size comes from the mirror
            self._mirror.wait_for(functools.partial(_as_new_as, self._keys.plan, written.revision), MIRROR_S)
        return self._limits.size(written.record).memory_mb


def _why_no_more_memory(size: NodeSize) -> str:
    if not size.memory_mb:
        return "how much it had is not known here; start the job with --mem MIN:MAX, and nodes get more when they need it"
    return f"they may have no more than that (--mem MIN:MAX): {size.memory_mb} MiB"


def _as_new_as(key: str, revision: int, seen: Mapping[str, KeyValue]) -> KeyValue | None:
    """Return the key if it was written at `revision` or later."""
    return seen[key] if key in seen and seen[key].mod_revision >= revision else None
