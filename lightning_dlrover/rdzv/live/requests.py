"""Requests to a job's workers: make room for a replacement, report stack traces."""

from __future__ import annotations

import contextlib
import time

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.operations import Compare, Put, absent, exists, modified
from lightning_dlrover.rdzv.job.records import DrainRecord, Keys, RecordError, StacksRecord, StacksRequest, decode, encode

__all__ = ["ask_for_replacement", "ask_for_stacks", "read_stacks"]


def ask_for_replacement(client: EtcdClient, keys: Keys, worker_id: str, reason: str, *guard: Compare) -> bool:
    """Request a worker's replacement; False if it is gone or was drained already, or if a guard fails."""
    request = DrainRecord(worker_id, reason, once_replaced=True)
    drain = keys.drains + worker_id
    # A worker that must leave at once, because its host is taken away, cannot wait for its replacement.
    guard = (*guard, exists(keys.workers + worker_id), absent(drain))
    return client.txn(guard, [Put(drain, encode(request))]).succeeded


def ask_for_stacks(
    client: EtcdClient, keys: Keys, asked_by: str, reason: str, after: int | None = None
) -> StacksRequest | None:
    """Request a stack trace from every worker of a job; None if another process has just done so.

    Args:
        after: number of the newest request that the caller has seen, 0 if there is none; None: always write a new request.
    """
    entry = client.get(keys.stacks_request)
    newest = 0
    if entry is not None:
        with contextlib.suppress(RecordError):
            newest = decode(StacksRequest, entry.value, entry.key).number
    if after is not None and newest > after:
        return None
    request = StacksRequest(newest + 1, asked_by, reason, time.time())
    unchanged = modified(keys.stacks_request) == entry.mod_revision if entry is not None else absent(keys.stacks_request)
    written = client.txn([unchanged], [Put(keys.stacks_request, encode(request))])
    return request if written.succeeded else None


def read_stacks(client: EtcdClient, keys: Keys) -> dict[str, StacksRecord]:
    """Return each worker's newest stack trace. Records that cannot be read are left out."""
    answers = {}
    for entry in client.get_prefix(keys.stacks)[1]:
        with contextlib.suppress(RecordError):
            answers[entry.key.removeprefix(keys.stacks)] = decode(StacksRecord, entry.value, entry.key)
    return answers
