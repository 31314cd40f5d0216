"""Leases: what etcd deletes when the process that refreshes it is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import random
import threading
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
"""Seconds that threads have to end in."""


class Lease:
    """A lease in etcd: keys bound to it are deleted when it ends. Made by `EtcdClient.lease`.

    `lost` is set when etcd itself says that the lease is gone. An etcd that cannot be reached is asked until
    it can: when it comes back it gives every lease its full time again.
    """

    def __init__(self, leases: Leases, lease_id: int, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = threading.Event()
        self._leases = leases
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def keep_alive(self, times_per_ttl: int = 2) -> Lease:
        """Refresh the lease from a background thread until it is closed, revoked or lost; returns itself."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._run, args=(times_per_ttl,), name=f"etcd-lease-{self.id:x}", daemon=True
                )
                self._thread.start()
        return self

    def has_ended(self) -> bool:
        """Whether the lease is gone; asks etcd, and refreshes it if not."""
        return self.lost.is_set() or self._leases.refresh(self.id, self._leases.timeout_s) <= 0

    def revoke(self) -> None:
        """End the lease now: its keys are deleted at once."""
        self.close()
        self._leases.revoke(self.id)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> None:
        """Stop refreshing and join the thread; the lease ends by itself within `ttl_s`."""
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
                pause_s = RETRY_PAUSE_S  # the call itself took its time; every attempt counts now
                continue
            if remaining_s <= 0:
                self.lost.set()
                logger.warning(
                    "lease %x was lost: etcd did not hear from this process for %g s, or it was revoked",
                    self.id,
                    self.ttl_s,
                )
                return
            pause_s = self.ttl_s / times_per_ttl


class Leases:
    """Makes, refreshes and revokes leases.

    Args:
        adopt: receives each lease that is made, to close it with its client.
    """

    def __init__(self, caller: Caller, adopt: Callable[[Lease], None]) -> None:
        self._caller = caller
        self._adopt = adopt

    @property
    def timeout_s(self) -> float:
        return self._caller.config.timeout_s

    def grant(self, ttl_s: float) -> Lease:
        """A new lease; unless kept alive it ends after `ttl_s` (etcd: whole seconds, at least 2)."""
        # A number of our own makes the request repeatable: a second grant of the same number is refused, not
        # added.
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
        """The lease that all clients of a prefix share, kept alive from here, too."""
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
        """Seconds the lease has left now; 0 when etcd no longer knows it."""
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease_id)
        return int(self._caller.call("refresh a lease", "Lease", "LeaseKeepAlive", request, timeout_s=timeout_s).TTL)

    def revoke(self, lease_id: int) -> None:
        with contextlib.suppress(LeaseLostError):  # gone already, which is what was asked for
            self._caller.call("revoke a lease", "Lease", "LeaseRevoke", etcdrpc.LeaseRevokeRequest(ID=lease_id))


class SharedLease:
    """The lease that ends all that several clients wrote under a prefix; see `EtcdClient.share_lifetime`."""

    def __init__(self, leases: Leases) -> None:
        self.prefix = ""  # nothing is bound to it
        self.ttl_s = 0.0
        self._leases = leases
        self._lease: Lease | None = None
        self._lock = threading.Lock()

    def use(self, prefix: str, ttl_s: float) -> None:
        self.prefix, self.ttl_s = prefix, ttl_s

    def bound(self, op: OpT) -> OpT:
        """`op`, with the shared lease if it is a put that has none."""
        if not self.prefix or not isinstance(op, Put) or op.lease_id or not op.key.startswith(self.prefix):
            return op
        with self._lock:
            if self._lease is None or self._lease.lost.is_set():
                self._lease = self._leases.join(self.prefix, self.ttl_s)
            return dataclasses.replace(op, lease_id=self._lease.id)

    def keep(self, ops: Sequence[Op], write: Callable[[], T]) -> T:
        """What `write` returns; tried once more if the shared lease has ended meanwhile, and it alone can have."""
        try:
            return write()
        except LeaseLostError:
            if self._lease is None or any(isinstance(op, Put) and op.lease_id for op in ops):
                raise
            self._lease.close()
            self._lease.lost.set()
        return write()
