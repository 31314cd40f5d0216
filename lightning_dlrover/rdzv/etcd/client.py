"""A small typed client for etcd v3: keys, transactions, leases and elections.

Decides when to retry and when to give up, not what a key means: `rdzv/job/records.py` defines the keys. `mirror.py` keeps a
live copy of a prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_dlrover.rdzv.etcd.connection import (
    RETRY_PAUSE_S,
    Caller,
    compare_message,
    etcdrpc,
    key_value,
    op_message,
    range_end,
)
from lightning_dlrover.rdzv.etcd.types import (
    Compare,
    Delete,
    DeletePrefix,
    EtcdConfig,
    EtcdError,
    KeyValue,
    LeaseLostError,
    Op,
    OpT,
    PermissionDeniedError,
    Put,
    Txn,
    absent,
    created,
    read_password,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_DEADLINE_S = 2.0  # seconds to wait for threads to end


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
                logger.warning("lease %x was lost: etcd received no refresh for %g s, or it was revoked", self.id, self.ttl_s)
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
        return self._granted(random.SystemRandom().randrange(1, 1 << 62), ttl_s, is_shared=False)

    def join(self, prefix: str, ttl_s: float) -> Lease:
        """Return the lease that all clients of a prefix share, and keep it alive from here as well."""
        lease_id = int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:7], "big") | 1
        return self._granted(lease_id, ttl_s, is_shared=True).keep_alive(times_per_ttl=3)

    def _granted(self, lease_id: int, ttl_s: float, is_shared: bool) -> Lease:
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)), ID=lease_id)
        attempts: list[None] = []
        try:
            granted_s = float(self._caller.call("create a lease", "Lease", "LeaseGrant", request, attempts).TTL)
        except EtcdError as error:
            if not (is_shared or len(attempts) > 1) or "already exists" not in str(error):
                raise
            granted_s = float(self.refresh(lease_id, self.timeout_s) if is_shared else request.TTL)
        lease = Lease(self, lease_id, granted_s or ttl_s)
        self._adopt(lease)
        return lease

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
            return replace(op, lease_id=self._lease.id)

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


MOST_RANGES = 128  # prefixes read in one transaction; etcd's default limit of operations (`--max-txn-ops`)
KEYS_PER_PAGE = 256  # keys in one answer of a list of folders


class _Child(Protocol):
    def close(self, timeout_s: float) -> None: ...


class EtcdClient:
    """Thread-safe client of one etcd cluster.

    Every operation is retried through lost connections and elections, on the next endpoint, until `timeout_s` is over. Then it
    raises `EtcdUnavailableError`. A retry affects the result as follows:

    - `get`, `get_prefix`, `put` and `lease` are safe to retry. A retried `put` may overwrite another client's write in between:
      keys with several writers need `txn`.
    - `delete` and `delete_prefix` report the removals of the last attempt. After a lost response they may report none.
    - `txn` never reports a false failure as long as its `success` puts are its own: see there.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.caller = Caller(config)
        self._children: weakref.WeakSet[_Child] = weakref.WeakSet()
        self.leases = Leases(self.caller, self._children.add)
        self._shared_lease = SharedLease(self.leases)

    def __repr__(self) -> str:
        return f"EtcdClient({self.config!r})"

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Contact the server.

        Raises:
            EtcdUnavailableError: no endpoint responded as etcd v3 within `timeout_s`.
            EtcdError: the server refused the user, the password or the certificate.
        """
        with contextlib.suppress(PermissionDeniedError):  # this user may not ask about the server itself
            self.caller.call("check the connection", "Maintenance", "Status", etcdrpc.StatusRequest())

    def _range(self, action: str, first: bytes, end: bytes = b"", timeout_s: float | None = None, **options: Any) -> Any:
        """Return the response to a read of the keys from `first` to before `end`, or of `first` alone."""
        request = etcdrpc.RangeRequest(key=first, range_end=end, **options)
        return self.caller.call(action, "KV", "Range", request, timeout_s=timeout_s)

    def get(self, key: str) -> KeyValue | None:
        response = self._range(f"read {key!r}", key.encode())
        return key_value(response.kvs[0]) if response.kvs else None

    def get_prefix(self, prefix: str, newer_than: int = 0, per_answer: int = 0) -> tuple[int, list[KeyValue]]:
        """Return the revision of the read, and all keys under a prefix that were written after another revision, in order.

        Args:
            per_answer: maximum number of keys in one answer. With several answers, keys that are written between them may be
                among them, and the revision is that of the first answer. 0: all keys in one.
        """
        first, revision, found = prefix.encode(), 0, []
        while True:
            since = newer_than + 1 if newer_than else 0  # given a condition, etcd reads all keys for each answer
            response = self._range(
                f"read prefix {prefix!r}", first, range_end(prefix), min_mod_revision=since, limit=per_answer
            )
            revision = revision or int(response.header.revision)
            found += [key_value(kv) for kv in response.kvs]
            if not response.more:
                return revision, found
            first = response.kvs[-1].key + b"\0"

    def entries(self, prefix: str) -> dict[str, KeyValue]:
        """Return the entries under a prefix by key, in order."""
        return {entry.key: entry for entry in self.get_prefix(prefix)[1]}

    def read_prefixes(self, newer_than: Mapping[str, int], most: int = 0) -> dict[str, tuple[int, list[KeyValue]]]:
        """Return, for each prefix, the revision of its read and its keys in order. Costs a request for `MOST_RANGES` of them.

        Args:
            newer_than: by prefix, the revision after which keys were written that shall be read; 0: all.
            most: maximum number of keys of each prefix, the last ones in order; 0: all.
        """
        descending = {"sort_order": etcdrpc.RangeRequest.DESCEND, "sort_target": etcdrpc.RangeRequest.KEY} if most else {}
        found: dict[str, tuple[int, list[KeyValue]]] = {}
        prefixes = list(newer_than)
        for first in range(0, len(prefixes), MOST_RANGES):
            some = prefixes[first : first + MOST_RANGES]
            bounds = {p: {"key": p.encode(), "range_end": range_end(p), "min_mod_revision": newer_than[p] + 1} for p in some}
            ranges = [etcdrpc.RangeRequest(**bounds[p], limit=most, **descending) for p in some]
            request = etcdrpc.TxnRequest(success=[etcdrpc.RequestOp(request_range=each) for each in ranges])
            action = f"read prefix {some[0]!r} and {len(some) - 1} others"
            response = self.caller.call(action, "KV", "Txn", request)
            for prefix, answer in zip(some, response.responses, strict=True):
                entries = [key_value(kv) for kv in answer.response_range.kvs]
                found[prefix] = int(response.header.revision), entries[::-1] if most else entries
        return found

    def oldest(self, prefix: str, most: int) -> list[KeyValue]:
        """Return the `most` keys under a prefix that were created first, oldest first."""
        order = {"sort_order": etcdrpc.RangeRequest.ASCEND, "sort_target": etcdrpc.RangeRequest.CREATE}
        response = self._range(f"read the oldest of {prefix!r}", prefix.encode(), range_end(prefix), limit=most, **order)
        return [key_value(kv) for kv in response.kvs]

    def count(self, prefix: str) -> int:
        """Return the number of keys under a prefix."""
        return int(self._range(f"count prefix {prefix!r}", prefix.encode(), range_end(prefix), count_only=True).count)

    def folders(self, prefix: str, after: str | None = None, most: int | None = None) -> list[str]:
        """Return the names of folders right below a prefix, which ends with `/`, in order.

        Costs a request for each of them at most, and one for many that hold few keys.

        Args:
            after: names up to this one are skipped.
            most: maximum number of names; None: all.
        """
        names: list[str] = []
        first, end = prefix.encode() if after is None else range_end(f"{prefix}{after}/"), range_end(prefix)
        while most is None or len(names) < most:
            found = self._range(f"list the folders below {prefix!r}", first, end, keys_only=True, limit=KEYS_PER_PAGE).kvs
            if not found:
                break
            for kv in found:
                name, slash, _ = kv.key.removeprefix(prefix.encode()).partition(b"/")
                if slash and (not names or names[-1] != name.decode()):
                    names.append(name.decode())
            first = range_end(f"{prefix}{name.decode()}/") if slash else found[-1].key + b"\0"
        return names[:most]

    def newest_in(self, prefix: str, timeout_s: float) -> tuple[int, int, int]:
        """Return the revision of this read, the number of keys under a prefix, and their newest `mod_revision` (0: no key)."""
        order = {"sort_order": etcdrpc.RangeRequest.DESCEND, "sort_target": etcdrpc.RangeRequest.MOD}
        response = self._range(
            f"check prefix {prefix!r}", prefix.encode(), range_end(prefix), timeout_s, limit=1, keys_only=True, **order
        )
        newest = int(response.kvs[0].mod_revision) if response.kvs else 0
        return int(response.header.revision), int(response.count), newest

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write a key and return the revision of the write. Raises `LeaseLostError` if the lease no longer exists in etcd."""
        op = Put(key, value, lease.id if lease else 0)

        def write() -> int:
            request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=self._shared_lease.bound(op).lease_id)
            return int(self.caller.call(f"write {key!r}", "KV", "Put", request).header.revision)

        return self._shared_lease.keep([op], write)

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        request = etcdrpc.DeleteRangeRequest(key=key.encode())
        return bool(self.caller.call(f"delete {key!r}", "KV", "DeleteRange", request).deleted)

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys under a prefix and return their number."""
        request = etcdrpc.DeleteRangeRequest(key=prefix.encode(), range_end=range_end(prefix))
        return int(self.caller.call(f"delete prefix {prefix!r}", "KV", "DeleteRange", request).deleted)

    def trim_prefix(self, prefix: str, most: int) -> int:
        """Delete the first keys under a prefix so that `most` remain; return the number deleted. Reads no values."""
        excess = self.count(prefix) - most
        if excess <= 0:
            return 0
        oldest = self._range(f"list prefix {prefix!r}", prefix.encode(), range_end(prefix), keys_only=True, limit=excess).kvs
        if not oldest:
            return 0
        cut = etcdrpc.DeleteRangeRequest(key=prefix.encode(), range_end=oldest[-1].key + b"\0")
        return int(self.caller.call(f"trim prefix {prefix!r}", "KV", "DeleteRange", cut).deleted)

    def txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> Txn:
        """Carry out `success` if every condition holds, else `failure`, atomically.

        After a lost response the transaction is retried. Its conditions may then be false because of its own first attempt. So
        a failed retry still counts as succeeded if one of its `success` puts, written since the first attempt, is in etcd with
        the same bytes and lease. Without puts it counts as succeeded if all keys to delete are gone. `values` is empty in both
        cases.

        This is exact if the bytes or the lease can only come from this call (a name, a nonce). Two callers that write identical
        bytes cannot be distinguished.

        Raises:
            LeaseLostError: the lease of a put no longer exists in etcd.
            EtcdUnavailableError: no response; the transaction may or may not have been applied.
        """
        bound = self._shared_lease.bound
        return self._shared_lease.keep(
            [*success, *failure],
            lambda: self._txn(compare, [bound(op) for op in success], [bound(op) for op in failure]),
        )

    def _txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> Txn:
        request = etcdrpc.TxnRequest(
            compare=[compare_message(c) for c in compare],
            success=[op_message(op) for op in success],
            failure=[op_message(op) for op in failure],
        )
        keys = ", ".join(sorted({repr(c.key) for c in compare} | {repr(op.key) for op in success}))
        before = self.caller.last_revision
        attempts: list[None] = []
        response = self.caller.call(f"run a transaction on {keys}", "KV", "Txn", request, attempts)
        revision = int(response.header.revision)
        if not response.succeeded and len(attempts) > 1 and (applied := self._was_applied(success, before)):
            return Txn(True, applied, [])
        ranges = [r.response_range for r in response.responses if r.WhichOneof("response") == "response_range"]
        values = [key_value(kv) for found in ranges for kv in found.kvs]
        return Txn(bool(response.succeeded), revision, values)

    def _was_applied(self, ops: Sequence[Op], before: int) -> int:
        """Return the revision at which an earlier attempt applied `ops`, 0 if none did."""
        puts = [op for op in ops if isinstance(op, Put)]
        for put in puts:
            found = self.get(put.key)
            if found is not None and found.mod_revision > before and (found.value, found.lease_id) == (put.value, put.lease_id):
                return found.mod_revision
        deletes = [op for op in ops if isinstance(op, Delete | DeletePrefix)]
        left = [self.count(op.key) if isinstance(op, DeletePrefix) else self.get(op.key) for op in deletes if not puts]
        are_gone = bool(left) and not any(left)
        return self.caller.last_revision if are_gone else 0

    def lease(self, ttl_s: float) -> Lease:
        """Create a lease, which expires after `ttl_s` unless kept alive (etcd: whole seconds, at least 2)."""
        return self.leases.grant(ttl_s)

    def share_lifetime(self, prefix: str, ttl_s: float) -> None:
        """Make keys written under `prefix` without a lease of their own expire together, `ttl_s` after the last writer ends.

        All clients that call this for a prefix share one lease. Its id is derived from the prefix, so no client is responsible
        for creating it or for cleaning up. The first write creates it, and every living client refreshes it. At least two
        thirds of `ttl_s`, as set by the first client, remain when the last one ends.
        """
        self._shared_lease.use(prefix, ttl_s)

    def adopt(self, child: _Child) -> None:
        """Close a lease or a mirror together with this client."""
        self._children.add(child)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> None:
        """End all threads of this client, of its leases (which are not revoked) and of its mirrors."""
        self.caller.stop()
        self.end_children(timeout_s)
        self.caller.close()

    def end_children(self, timeout_s: float = CLOSE_DEADLINE_S) -> None:
        """End the threads of all leases and mirrors of this client. The client itself stays open."""
        deadline = time.monotonic() + timeout_s
        for child in list(self._children):
            child.close(max(0.1, deadline - time.monotonic()))


PER_CANDIDATE_S = 0.0005
"""Seconds per candidate over which candidacies are spread after a holder's death: the first one spares the others theirs."""


def candidacy_delay_s(num_candidates: int) -> float:
    """Draw how long a candidate waits before it stands, so that not all do at once."""
    return random.SystemRandom().uniform(0.0, num_candidates * PER_CANDIDATE_S)


@dataclass(frozen=True)
class Election:
    """The election for one key: how to take it, and the proof that it is still held, which fences writes.

    The key is bound to its holder's lease. Its create revision is the holder's term: it changes with every loss of the key, so
    a late write that is fenced on it is refused.
    """

    key: str

    def candidacy(self, value: bytes, lease_id: int) -> tuple[Compare, Put]:
        """Return the transaction that takes the key if it is free: its condition and its write."""
        return absent(self.key), Put(self.key, value, lease_id)

    def claim(self, client: EtcdClient, value: bytes, lease_id: int) -> int:
        """Take the key if it is free. Return the term if that lease holds it now, else 0.

        Raises:
            EtcdError: etcd does not answer; the lease may or may not hold the key.
        """
        is_free, put = self.candidacy(value, lease_id)
        client.txn([is_free], [put])
        entry = client.get(self.key)  # the holder, even if the transaction's first answer was lost
        return entry.create_revision if entry is not None and entry.lease_id == lease_id else 0

    def fence(self, term: int) -> Compare:
        """Return the condition that holds for as long as this term lasts."""
        return created(self.key) == term

    def is_held(self, entry: KeyValue | None, term: int) -> bool:
        """Whether the key's entry shows that this term lasts."""
        return self.fence(term).holds(entry)


USER = "root"  # user of a job's own etcd; it has no other users, so none needs fewer permissions


def make_password(file: Path) -> None:
    """Write a random password into a file that only this user reads. A file that is there is kept.

    Raises:
        OSError: the file cannot be written.
    """
    # Written completely or not at all, because the next `dlrover run` keeps an existing file.
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    with open(unfinished, "w", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o600)) as written:
        written.write(secrets.token_hex(32) + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, file)
    finally:
        unfinished.unlink()


def require_password(endpoint: str, file: Path) -> None:
    """Let an etcd without users refuse everyone who does not know the password in a file.

    Raises:
        EtcdError: etcd does not answer, or has users already.
    """
    access = EtcdConfig(endpoint, USER, str(file))
    caller = Caller(EtcdConfig(endpoint))
    try:
        add = etcdrpc.AuthUserAddRequest(name=USER, password=read_password(access))
        caller.call("create a user", "Auth", "UserAdd", add)
        caller.call("create a role", "Auth", "RoleAdd", etcdrpc.AuthRoleAddRequest(name="root"))
        caller.call("grant a role", "Auth", "UserGrantRole", etcdrpc.AuthUserGrantRoleRequest(user=USER, role="root"))
        caller.call("require a password", "Auth", "AuthEnable", etcdrpc.AuthEnableRequest())
    finally:
        caller.close()
