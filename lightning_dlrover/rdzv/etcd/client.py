"""A small typed client for etcd v3: keys, transactions and leases.

Decides when to retry and when to give up. The meaning of the keys is defined in `job/records.py` and above. A live copy of a
prefix is in `mirror.py`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from lightning_dlrover.rdzv.etcd.caller import Caller
from lightning_dlrover.rdzv.etcd.config import EtcdConfig
from lightning_dlrover.rdzv.etcd.errors import PermissionDeniedError
from lightning_dlrover.rdzv.etcd.lease import CLOSE_DEADLINE_S, Lease, Leases, SharedLease
from lightning_dlrover.rdzv.etcd.messages import compare_message, key_value, op_message, range_end
from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, DeletePrefix, KeyValue, Op, Put, Txn
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc

__all__ = ["EtcdClient"]


MOST_RANGES = 128
"""Prefixes read in one transaction. etcd's default limit of operations (`--max-txn-ops`)."""

KEYS_PER_PAGE = 256
"""Keys in one answer of a list of folders."""


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

    def get(self, key: str) -> KeyValue | None:
        response = self.caller.call(f"read {key!r}", "KV", "Range", etcdrpc.RangeRequest(key=key.encode()))
        return key_value(response.kvs[0]) if response.kvs else None

    def get_prefix(self, prefix: str, newer_than: int = 0, per_answer: int = 0) -> tuple[int, list[KeyValue]]:
        """Return the revision of the read, and all keys under a prefix that were written after another revision, in order.

        Args:
            per_answer: maximum number of keys in one answer. With several answers, keys that are written meanwhile may be
                among them, and the revision is that of the first answer. 0: all keys in one.
        """
        first, revision, found = prefix.encode(), 0, []
        while True:
            request = etcdrpc.RangeRequest(
                key=first,
                range_end=range_end(prefix),
                min_mod_revision=newer_than + 1 if newer_than else 0,  # with a condition etcd reads all keys for each answer
                limit=per_answer,
            )
            response = self.caller.call(f"read prefix {prefix!r}", "KV", "Range", request)
            revision = revision or int(response.header.revision)
            found += [key_value(kv) for kv in response.kvs]
            if not response.more:
                return revision, found
            first = response.kvs[-1].key + b"\0"

    def entries(self, prefix: str) -> dict[str, KeyValue]:
        """Return the entries under a prefix by key, in order."""
        return {entry.key: entry for entry in self.get_prefix(prefix)[1]}

    def read_prefixes(self, newer_than: Mapping[str, int]) -> dict[str, tuple[int, list[KeyValue]]]:
        """Return, for each prefix, the revision of its read and its keys in order. Costs a request for `MOST_RANGES` of them.

        Args:
            newer_than: by prefix, the revision after which keys were written that shall be read; 0: all.
        """
        found: dict[str, tuple[int, list[KeyValue]]] = {}
        prefixes = list(newer_than)
        for first in range(0, len(prefixes), MOST_RANGES):
            some = prefixes[first : first + MOST_RANGES]
            ranges = [
                etcdrpc.RangeRequest(key=p.encode(), range_end=range_end(p), min_mod_revision=newer_than[p] + 1) for p in some
            ]
            request = etcdrpc.TxnRequest(success=[etcdrpc.RequestOp(request_range=each) for each in ranges])
            action = f"read prefix {some[0]!r} and {len(some) - 1} others"
            response = self.caller.call(action, "KV", "Txn", request)
            for prefix, answer in zip(some, response.responses, strict=True):
                found[prefix] = int(response.header.revision), [key_value(kv) for kv in answer.response_range.kvs]
        return found

    def oldest(self, prefix: str, most: int) -> list[KeyValue]:
        """Return the `most` keys under a prefix that were created first, oldest first."""
        request = etcdrpc.RangeRequest(
            key=prefix.encode(),
            range_end=range_end(prefix),
            limit=most,
            sort_order=etcdrpc.RangeRequest.ASCEND,
            sort_target=etcdrpc.RangeRequest.CREATE,
        )
        return [key_value(kv) for kv in self.caller.call(f"read the oldest of {prefix!r}", "KV", "Range", request).kvs]

    def count(self, prefix: str) -> int:
        """Return the number of keys under a prefix."""
        request = etcdrpc.RangeRequest(key=prefix.encode(), range_end=range_end(prefix), count_only=True)
        return int(self.caller.call(f"count prefix {prefix!r}", "KV", "Range", request).count)

    def folders(self, prefix: str, after: str | None = None, most: int | None = None) -> list[str]:
        """Return the names of folders right below a prefix, which ends with `/`, in order.

        Costs a request for each of them at most, and one for many that hold few keys.

        Args:
            after: the first ones up to this name are left out.
            most: maximum number of names; None: all.
        """
        names: list[str] = []
        first, end = prefix.encode() if after is None else range_end(f"{prefix}{after}/"), range_end(prefix)
        while most is None or len(names) < most:
            request = etcdrpc.RangeRequest(key=first, range_end=end, keys_only=True, limit=KEYS_PER_PAGE)
            found = self.caller.call(f"list the folders below {prefix!r}", "KV", "Range", request).kvs
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
        request = etcdrpc.RangeRequest(
            key=prefix.encode(),
            range_end=range_end(prefix),
            limit=1,
            keys_only=True,
            sort_order=etcdrpc.RangeRequest.DESCEND,
            sort_target=etcdrpc.RangeRequest.MOD,
        )
        response = self.caller.call(f"look at prefix {prefix!r}", "KV", "Range", request, timeout_s=timeout_s)
        newest = int(response.kvs[0].mod_revision) if response.kvs else 0
        return int(response.header.revision), int(response.count), newest

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write a key and return the revision of the write.

        Raises:
            LeaseLostError: the lease no longer exists in etcd.
        """
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
        """Delete the first keys under a prefix so that `most` are left; return the number deleted. Reads no values."""
        excess = self.count(prefix) - most
        if excess <= 0:
            return 0
        request = etcdrpc.RangeRequest(key=prefix.encode(), range_end=range_end(prefix), keys_only=True, limit=excess)
        oldest = self.caller.call(f"list prefix {prefix!r}", "KV", "Range", request).kvs
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
        thirds of `ttl_s`, as set by the first client, are left when the last one ends.
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
