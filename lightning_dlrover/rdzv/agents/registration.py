"""The record that an agent writes about itself."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import LeaseLostError
from lightning_dlrover.rdzv.etcd.lease import Lease
from lightning_dlrover.rdzv.etcd.operations import Get, Put, modified
from lightning_dlrover.rdzv.job.records import AgentRecord, encode

__all__ = ["Registration"]


class Registration:
    """An agent's own record: written only by the agent, bound to its lease, and guarded against late writes."""

    def __init__(self, client: EtcdClient, key: str, record: AgentRecord, lease_ttl_s: float) -> None:
        self.key = key
        self.record = record
        self.lease: Lease | None = None
        self._client = client
        self._lease_ttl_s = lease_ttl_s
        self._revision = 0  # revision of our record's last write; 0: there is no record

    @property
    def is_lost(self) -> bool:
        return self.lease is not None and self.lease.lost.is_set()

    def write(self, **changes: Any) -> None:
        """Write our record, under a new lease when the old one is lost.

        Guarded by the revision of our last write: a write that etcd receives late must not restore an older state.
        """
        if "state" in changes:
            changes = {"since": time.time(), **changes}
        self.record = dataclasses.replace(self.record, **changes)
        while True:
            if self.lease is None or self.lease.lost.is_set():
                self.lease = self._client.lease(self._lease_ttl_s).keep_alive()
            unchanged = modified(self.key) == self._revision
            try:
                written = self._client.txn([unchanged], [Put(self.key, encode(self.record), self.lease.id)], [Get(self.key)])
            except LeaseLostError:
                self.lease.close()
                self.lease = None
                continue
            if written.succeeded:
                self._revision = written.revision
                break
            # The record expired with an earlier lease, or holds our own write with a lost response. No other process writes it.
            self._revision = written.values[0].mod_revision if written.values else 0
