"""Leases: etcd deletes their keys once the process that refreshes them is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_dlrover.rdzv.etcd.caller import RETRY_PAUSE_S, Caller
from lightning_dlrover.rdzv.etcd.errors import EtcdError, LeaseLostError
from lightning_dlrover.rdzv.etcd.operations import Op, OpT, Put
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc

__all__ = ["CLOSE_DEADLINE_S", "Lease", "Leases", "SharedLease"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_DEADLINE_S = 2.0
"""Seconds to wait for threads to end."""


class Lease:
    """A lease in etcd: keys bound to it are deleted when it ends. Created by `EtcdClient.lease`.

    `lost` is set only when etcd itself reports that the lease is gone. Refreshes of an unreachable etcd are retried without
    limit, because a recovered etcd gives every lease its full time again.
    """

    def __init__(self, leases: Leases, lease_id: int, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = threading.Event()
        self._refreshed_at = time.monotonic()
        self._leases = leases
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def keep_alive(self, times_per_ttl: int = 2) -> Lease:
        """Refresh the lease from a background thread until it is closed, revoked or lost; return the lease."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._run, args=(times_per_ttl,), name=f"etcd-lease-{self.id:x}", daemon=True
                )
                self._thread.start()
        return self

    @property
    def silent_s(self) -> float:
        """Seconds since etcd has granted or refreshed the lease."""
        return time.monotonic() - self._refreshed_at

    def has_ended(self) -> bool:
        """Check with etcd whether the lease is gone, and refresh it if not."""
        return self.lost.is_set() or self._leases.refresh(self.id, self._leases.timeout_s) <= 0

    def revoke(self) -> None:
        """End the lease now: its keys are deleted at once."""
        self.close()
        self._leases.revoke(self.id)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> None:
        """Stop refreshing and join the thread. The lease expires within `ttl_s`."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self, times_per_ttl: int) -> None:
        pause_s = self.ttl_s / times_per_ttl
        limit_s = min(self.ttl_s - pause_s, self._leases.timeout_s)
        while not self._stop.wait(pause_s):
            try:
                remaining_s = self._leases.refresh(self.id, limit_s)
            except LeaseLostError:
                remaining_s = 0
            except EtcdError as error:
                if not self._stop.is_set() and pause_s != RETRY_PAUSE_S:
                    logger.warning("lease %x is not being refreshed: %s", self.id, error)
                pause_s = RETRY_PAUSE_S  # short, because the call itself took long and every attempt counts now
                continue
            if remaining_s <= 0:
                self.lost.set()
                logger.warning(
                    "lease %x was lost: etcd did not hear from this process for %g s, or it was revoked",
                    self.id,
                    self.ttl_s,
                )
                return
            self._refreshed_at = time.monotonic()
            pause_s = self.ttl_s / times_per_ttl


class Leases:
    """Create, refresh and revoke leases.

    Args:
        adopt: called with each new lease, to close it with its client.
    """

    def __init__(self, caller: Caller, adopt: Callable[[Lease], None]) -> None:
        self._caller = caller
        self._adopt = adopt

    @property
    def timeout_s(self) -> float:
        return self._caller.config.timeout_s

    def grant(self, ttl_s: float) -> Lease:
        """Create a lease, which expires after `ttl_s` unless kept alive (etcd: whole seconds, at least 2)."""
        # An id of our own makes the request safe to retry: a second grant of the same id is refused, not added.
        lease_id = random.SystemRandom().randrange(1, 1 << 62)
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)), ID=lease_id)
        attempts: list[None] = []
        try:
            granted = float(self._caller.call("create a lease", "Lease", "LeaseGrant", request, attempts).TTL)
        except EtcdError as error:
            if len(attempts) < 2 or "already exists" not in str(error):
                raise
            granted = float(request.TTL)
        lease = Lease(self, lease_id, granted)
        self._adopt(lease)
        return lease

    def join(self, prefix: str, ttl_s: float) -> Lease:
        """Return the lease that all clients of a prefix share, and keep it alive from here as well."""
        number = int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:7], "big") | 1
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)), ID=number)
        try:
            granted = float(self._caller.call("create a lease", "Lease", "LeaseGrant", request).TTL)
        except EtcdError as error:
            if "already exists" not in str(error):
                raise
            granted = float(self.refresh(number, self.timeout_s))
        lease = Lease(self, number, granted or ttl_s)
        self._adopt(lease)
        return lease.keep_alive(times_per_ttl=3)

    def refresh(self, lease_id: int, timeout_s: float) -> int:
        """Refresh a lease; return the seconds that it has left, 0 if it no longer exists in etcd."""
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease_id)
        return int(self._caller.call("refresh a lease", "Lease", "LeaseKeepAlive", request, timeout_s=timeout_s).TTL)

    def revoke(self, lease_id: int) -> None:
        with contextlib.suppress(LeaseLostError):  # gone already, as intended
            self._caller.call("revoke a lease", "Lease", "LeaseRevoke", etcdrpc.LeaseRevokeRequest(ID=lease_id))


class SharedLease:
    """The common lease of all that several clients write under a prefix; see `EtcdClient.share_lifetime`."""

    def __init__(self, leases: Leases) -> None:
        self.prefix = ""  # empty: no key is bound to the shared lease
        self.ttl_s = 0.0
        self._leases = leases
        self._lease: Lease | None = None
        self._lock = threading.Lock()

    def use(self, prefix: str, ttl_s: float) -> None:
        self.prefix, self.ttl_s = prefix, ttl_s

    def bound(self, op: OpT) -> OpT:
        """Return `op`, with the shared lease added if it is a put without one."""
        if not self.prefix or not isinstance(op, Put) or op.lease_id or not op.key.startswith(self.prefix):
            return op
        with self._lock:
            if self._lease is None or self._lease.lost.is_set():
                self._lease = self._leases.join(self.prefix, self.ttl_s)
            return dataclasses.replace(op, lease_id=self._lease.id)

    def keep(self, ops: Sequence[Op], write: Callable[[], T]) -> T:
        """Return the result of `write`, retried once if the lease that has expired can only be the shared one."""
        try:
            return write()
        except LeaseLostError:
            if self._lease is None or any(isinstance(op, Put) and op.lease_id for op in ops):
                raise
            self._lease.close()
            self._lease.lost.set()
        return write()
