"""Requests to a job's workers: leave, make room for a replacement, report stack traces."""

from __future__ import annotations

import time

from lightning_dlrover.rdzv.etcd.operations import Compare, absent, exists, modified
from lightning_dlrover.rdzv.job.journal import Journal, readable, readable_folder
from lightning_dlrover.rdzv.job.records import DrainRecord, StacksRecord, StacksRequest

__all__ = ["ask_for_replacement", "ask_for_stacks", "dismiss", "read_stacks"]


def ask_for_replacement(journal: Journal, worker_id: str, reason: str, *guard: Compare) -> bool:
    """Request a worker's replacement; False if it is gone or was drained already, or if a guard fails."""
    drain = journal.keys.drains + worker_id
    # A worker that must leave at once, because its host is taken away, cannot wait for its replacement.
    may_ask = (*guard, exists(journal.keys.workers + worker_id), absent(drain))
    return journal.fenced_write({drain: DrainRecord(worker_id, reason, once_replaced=True)}, may_ask)


def dismiss(journal: Journal, worker_id: str, failed_round: int, reason: str) -> bool:
    """Request that a worker is in no round after `failed_round`, which the caller is about to report as broken.

    Returns:
        False if it is gone.
    """
    request = DrainRecord(worker_id, reason, failed_round=failed_round)
    return journal.fenced_write({journal.keys.drains + worker_id: request}, [exists(journal.keys.workers + worker_id)])


def ask_for_stacks(journal: Journal, asked_by: str, reason: str, after: int | None = None) -> StacksRequest | None:
    """Request a stack trace from every worker of a job; None if another process has just done so.

    Args:
        after: number of the newest request that the caller has seen, 0 if there is none; None: always write a new request.
    """
    key = journal.keys.stacks_request
    found = journal.get(StacksRequest, key, readable)
    newest = found.record.number if found.record is not None else 0
    if after is not None and newest > after:
        return None
    request = StacksRequest(newest + 1, asked_by, reason, time.time())
    return request if journal.fenced_write({key: request}, [modified(key) == found.revision]) else None


def read_stacks(journal: Journal) -> dict[str, StacksRecord]:
    """Return each worker's newest stack trace. Records that cannot be read are left out."""
    return readable_folder(journal.client, StacksRecord, journal.keys.stacks)
