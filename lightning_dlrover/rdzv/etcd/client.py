"""A small typed client for etcd v3: keys, transactions, leases and a live mirror of a prefix.

It speaks through the gRPC stubs of `pyetcd` (package etcd-sdk-python), not through that package's client
class, whose transactions do not return a revision, whose failover is not thread-safe and whose tokens are
never renewed. Decides when to retry and when to give up; what the keys mean is decided in `records.py` and
above.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import ipaddress
import logging
import math
import os
import queue
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

# Read by gRPC when it is loaded. A training process forks its data-loader workers, which never use etcd:
# gRPC's fork handlers would only print a line for each of them, or disturb the watch in the parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc  # type: ignore[import-untyped]

__all__ = [
    "ACCESS_VARIABLES",
    "Compare",
    "Delete",
    "EtcdClient",
    "EtcdConfig",
    "EtcdError",
    "EtcdFullError",
    "EtcdUnavailableError",
    "Get",
    "KeyValue",
    "Lease",
    "LeaseLostError",
    "Mirror",
    "Op",
    "Put",
    "Txn",
    "absent",
    "created",
    "exists",
    "modified",
    "parse_endpoints",
    "version_warning",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

# By name, because its type stub (rpc_pb2.pyi of 0.0.7) is not valid Python and would stop mypy for everybody.
etcdrpc: Any = importlib.import_module("pyetcd.etcdrpc")

# Oldest release of each line in which a user's permissions on a prefix hold (CVE-2026-33413, -33343, -44283).
FIXED_VERSIONS = ((3, 4, 44), (3, 5, 30), (3, 6, 11))

MANY_REVISIONS = 200_000
"""Writes after which an etcd that was never compacted is worth a warning: some hundred MiB, and many to come."""

_RETRY_PAUSE_S = 0.05
_LATE_S = 1.5  # without an answer for so long, another connection is asked, too
_CLOSE_DEADLINE_S = 2.0
_SUSPECT_S = 1.0  # a watch may be late by so much when many clients are told of the same change
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # an http_proxy of the user's environment is not meant for etcd
    ("grpc.use_local_subchannel_pool", 1),  # a replaced channel must not inherit a half-open connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long one attempt to connect may take, despite its name
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses clients that ping more often than every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 << 20),
)


_open_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
_is_cut_off_by_fork = False


def _note_fork() -> None:
    global _is_cut_off_by_fork
    with_support = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower() not in ("0", "false")
    _is_cut_off_by_fork |= len(_open_connections) > 0 and not with_support


os.register_at_fork(after_in_child=_note_fork)


class EtcdError(RuntimeError):
    """etcd refused a request, or cannot be used the way it is configured."""


class EtcdUnavailableError(EtcdError):
    """No answer from any endpoint within the timeout. Whether a write was carried out is unknown."""


class EtcdFullError(EtcdUnavailableError):
    """Etcd takes no writes, as its database has reached its quota. It still answers reads and refreshes leases."""


class LeaseLostError(EtcdError):
    """A key was to be bound to a lease that etcd no longer knows."""


def parse_endpoints(text: str) -> list[tuple[str, int]]:
    """Host and port of each endpoint in ``host:port,host:port``; ``http://`` and ``https://`` are allowed in
    front.

    Raises:
        ValueError: a part has no host or no port between 1 and 65535; an IPv6 address stands without
            brackets.
    """
    endpoints = []
    for part in text.split(","):
        stripped = part.strip()
        match = re.fullmatch(r"(?:https?://)?(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@?#]+):([0-9]{1,5})/?", stripped)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError(
                f"etcd endpoint {stripped!r} in {text!r} is not host:port; give for example "
                "--rdzv-endpoint=10.0.0.7:2379 (several separated by commas, IPv6 in brackets: [::1]:2379)"
            )
        endpoints.append((match[1].strip("[]"), int(match[2])))
    return endpoints


ACCESS_VARIABLES = {
    "user": "DLROVER_USER",
    "password_file": "DLROVER_PASSWORD_FILE",
    "ca_cert": "DLROVER_CA_CERT",
    "cert": "DLROVER_CERT",
    "cert_key": "DLROVER_CERT_KEY",
}
"""Fields of `EtcdConfig` that say who a client is, and the environment variables that agents hand them to workers in."""


@dataclass(frozen=True)
class EtcdConfig:
    """How etcd is reached. TLS is used when `ca_cert` is given or the endpoints start with https://."""

    endpoints: str  # host:port,host:port
    user: str | None = None
    password_file: str | None = None  # its first line is the password, which itself is kept nowhere
    ca_cert: str | None = None  # paths of PEM files
    cert: str | None = None
    cert_key: str | None = None
    timeout_s: float = 5.0  # for one operation, retries included

    def __post_init__(self) -> None:
        parse_endpoints(self.endpoints)
        if (self.user is None) != (self.password_file is None):
            raise ValueError("etcd needs both user and password_file, or neither")
        if (self.cert is None) != (self.cert_key is None):
            raise ValueError("a TLS client certificate needs both cert and cert_key")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}, must be above 0")

    @classmethod
    def from_environment(cls, endpoints: str, environ: Mapping[str, str], timeout_s: float = 5.0) -> EtcdConfig:
        """With the user and the files that `to_environment` names."""
        return cls(endpoints, timeout_s=timeout_s, **{f: environ[v] for f, v in ACCESS_VARIABLES.items() if environ.get(v)})

    def to_environment(self) -> dict[str, str | None]:
        """What `from_environment` reads; None: not to be set."""
        return {variable: getattr(self, name) for name, variable in ACCESS_VARIABLES.items()}

    @property
    def access(self) -> dict[str, str]:
        """The user and the files that are set, by field."""
        return {name: value for name in ACCESS_VARIABLES if (value := getattr(self, name)) is not None}

    @property
    def uses_tls(self) -> bool:
        return self.ca_cert is not None or self.cert is not None or "https://" in self.endpoints


@dataclass(frozen=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int  # 1 when created, one more per put
    lease_id: int  # 0: not bound to a lease


@dataclass(frozen=True)
class Compare:
    """One condition of a transaction; build it with `created`, `modified`, `absent` or `exists`."""

    key: str
    target: Literal["create", "mod"]
    result: Literal["equal", "greater"]
    revision: int


@dataclass(frozen=True)
class _RevisionOf:
    key: str
    target: Literal["create", "mod"]

    def __eq__(self, revision: object) -> Compare:  # type: ignore[override]
        if not isinstance(revision, int):
            raise TypeError(f"a revision is an int, not {type(revision).__name__}")
        return Compare(self.key, self.target, "equal", revision)


def created(key: str) -> _RevisionOf:
    """``created(key) == revision``: the key exists since exactly this revision (0: it does not exist)."""
    return _RevisionOf(key, "create")


def modified(key: str) -> _RevisionOf:
    """``modified(key) == revision``: nobody wrote the key since it was read so (0: it does not exist)."""
    return _RevisionOf(key, "mod")


def absent(key: str) -> Compare:
    return Compare(key, "create", "equal", 0)


def exists(key: str) -> Compare:
    return Compare(key, "create", "greater", 0)


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Get:
    key: str


Op = Put | Delete | Get
OpT = TypeVar("OpT", bound=Op)


@dataclass(frozen=True)
class Txn:
    succeeded: bool
    revision: int
    values: list[KeyValue]  # of every Get that found its key, in order


def version_warning(version: str) -> str | None:
    """What is wrong with this release of etcd, or None."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return None
    found = (int(match[1]), int(match[2]), int(match[3]))
    fixed = next((f for f in FIXED_VERSIONS if f[:2] == found[:2]), None)
    if fixed is None and found > FIXED_VERSIONS[0]:
        return None
    if fixed is not None and found >= fixed:
        return None
    target = ".".join(map(str, fixed or FIXED_VERSIONS[-1]))
    losses = "may lose an acknowledged write when a node crashes and " if (3, 5, 0) <= found < (3, 5, 5) else ""
    return (
        f"etcd {version} {losses}does not confine users to their prefix (CVE-2026-33413, -33343, -44283); "
        f"upgrade to {target} or newer"
    )


class EtcdClient:
    """Thread-safe client of one etcd cluster.

    Every operation is repeated through lost connections and elections, on the next endpoint, until
    `timeout_s` is over; then it raises `EtcdUnavailableError`. What repeating means for the result:

    - `get`, `get_prefix`, `put`, `lease` may safely be repeated. A repeated `put` may overwrite what somebody
      else wrote in between: keys with several writers need `txn`.
    - `delete` and `delete_prefix` report what the last attempt removed, so after a lost answer they may say
      "nothing".
    - `txn` never reports a false failure as long as its `success` puts are its own: see there.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        scheme = re.compile(r"^https?://")
        self._targets = [scheme.sub("", part.strip()).rstrip("/") for part in config.endpoints.split(",")]
        self._lock = threading.Lock()
        self._credentials = _tls_credentials(config)  # as last read; see `_open`
        _password(config)  # an unreadable file is an error at once, not when the first token is asked for
        self._is_full = False  # etcd, as its last answer to a write showed
        self._target_index = random.randrange(len(self._targets))
        self._connection: _Connection | None = None
        self._spare: _Connection | None = None  # asked, too, while the connection in use is late
        self._token: str | None = None
        self._last_revision = 0
        self._answered_at = 0.0  # monotonic clock
        self._closed = threading.Event()
        self._children: weakref.WeakSet[Lease | Mirror] = weakref.WeakSet()
        self._lifetime = ("", 0.0)  # see `share_lifetime`: prefix, seconds
        self._shared_lease: Lease | None = None
        self._shared_lease_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"EtcdClient({self.config!r})"

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> str:
        """The server's version, after a round trip.

        Raises:
            EtcdUnavailableError: nothing that answers as etcd v3 was found within `timeout_s`.
            EtcdError: the server refuses us (user, password, certificate).
        """
        status = self._call("check the connection", "Maintenance", "Status", etcdrpc.StatusRequest())
        warning = version_warning(status.version)
        if warning is not None:
            # A loopback etcd is nobody else's: its users and its data are the job's own.
            shared = not all(_is_loopback(host) for host, _ in parse_endpoints(self.config.endpoints))
            logger.log(logging.WARNING if shared else logging.DEBUG, "%s: %s", self.config.endpoints, warning)
        if self._lifetime[0] and self._keeps_all_revisions(int(status.header.revision)):
            logger.warning(
                "%s: etcd has kept each of its %d revisions, %d MiB by now: at its quota (2 GiB unless set) writes fail. "
                "Start it with --auto-compaction-retention=1h",
                self.config.endpoints,
                status.header.revision,
                status.dbSize >> 20,
            )
        return str(status.version)

    def _keeps_all_revisions(self, revision: int) -> bool:
        """Whether nothing was compacted though there have been many writes; also when it merely cannot be asked: False."""
        if revision < MANY_REVISIONS:
            return False
        request = etcdrpc.RangeRequest(key=self._lifetime[0].encode(), revision=2, keys_only=True, limit=1)
        try:
            self._call("read an old revision", "KV", "Range", request)
        except EtcdError:  # it was compacted, as it should be
            return False
        return True

    def get(self, key: str) -> KeyValue | None:
        response = self._call(f"read {key!r}", "KV", "Range", etcdrpc.RangeRequest(key=key.encode()))
        return _key_value(response.kvs[0]) if response.kvs else None

    def get_prefix(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """The revision at which the prefix was read, and its keys in order."""
        request = etcdrpc.RangeRequest(key=prefix.encode(), range_end=_range_end(prefix))
        response = self._call(f"read prefix {prefix!r}", "KV", "Range", request)
        return response.header.revision, [_key_value(kv) for kv in response.kvs]

    def count(self, prefix: str) -> int:
        """How many keys a prefix has."""
        request = etcdrpc.RangeRequest(key=prefix.encode(), range_end=_range_end(prefix), count_only=True)
        return int(self._call(f"count prefix {prefix!r}", "KV", "Range", request).count)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """The revision of the write.

        Raises:
            LeaseLostError: etcd no longer knows the lease.
        """
        op = Put(key, value, lease.id if lease else 0)

        def write() -> int:
            request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=self._bound(op).lease_id)
            return int(self._call(f"write {key!r}", "KV", "Put", request).header.revision)

        return self._with_shared_lease([op], write)

    def delete(self, key: str) -> bool:
        """Whether the key was there."""
        request = etcdrpc.DeleteRangeRequest(key=key.encode())
        return bool(self._call(f"delete {key!r}", "KV", "DeleteRange", request).deleted)

    def delete_prefix(self, prefix: str) -> int:
        """How many keys were deleted."""
        request = etcdrpc.DeleteRangeRequest(key=prefix.encode(), range_end=_range_end(prefix))
        return int(self._call(f"delete prefix {prefix!r}", "KV", "DeleteRange", request).deleted)

    def trim_prefix(self, prefix: str, most: int) -> int:
        """Delete the first keys of a prefix beyond `most`; returns how many were deleted. Reads no values."""
        excess = self.count(prefix) - most
        if excess <= 0:
            return 0
        request = etcdrpc.RangeRequest(key=prefix.encode(), range_end=_range_end(prefix), keys_only=True, limit=excess)
        oldest = self._call(f"list prefix {prefix!r}", "KV", "Range", request).kvs
        if not oldest:
            return 0
        cut = etcdrpc.DeleteRangeRequest(key=prefix.encode(), range_end=oldest[-1].key + b"\0")
        return int(self._call(f"trim prefix {prefix!r}", "KV", "DeleteRange", cut).deleted)

    def txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> Txn:
        """Carry out `success` if every condition holds, else `failure`, atomically.

        When an answer got lost, the transaction is repeated, and its conditions may then be false because of
        its own first attempt. So a repeated one that failed still counts as succeeded if one of its `success`
        puts stands in etcd with the same bytes and lease, written since we began; with no puts, if all keys
        to delete are gone. This is exact when the bytes or the lease can only come from this call (a name, a
        nonce); two callers that write identical bytes cannot be told apart. `values` is then empty.

        Raises:
            LeaseLostError: etcd no longer knows the lease of a put.
            EtcdUnavailableError: no answer; the transaction may or may not have been carried out.
        """
        return self._with_shared_lease(
            [*success, *failure],
            lambda: self._txn(compare, [self._bound(op) for op in success], [self._bound(op) for op in failure]),
        )

    def _txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> Txn:
        request = etcdrpc.TxnRequest(
            compare=[_compare_message(c) for c in compare],
            success=[_op_message(op) for op in success],
            failure=[_op_message(op) for op in failure],
        )
        keys = ", ".join(sorted({repr(c.key) for c in compare} | {repr(op.key) for op in success}))
        before = self._last_revision
        attempts: list[None] = []
        response = self._call(f"run a transaction on {keys}", "KV", "Txn", request, attempts)
        revision = int(response.header.revision)
        if not response.succeeded and len(attempts) > 1 and (applied := self._was_applied(success, before)):
            return Txn(True, applied, [])
        ranges = [r.response_range for r in response.responses if r.WhichOneof("response") == "response_range"]
        values = [_key_value(kv) for found in ranges for kv in found.kvs]
        return Txn(bool(response.succeeded), revision, values)

    def _was_applied(self, ops: Sequence[Op], before: int) -> int:
        """The revision at which an earlier attempt carried out `ops`; 0 when none did."""
        puts = [op for op in ops if isinstance(op, Put)]
        for put in puts:
            found = self.get(put.key)
            if found is not None and found.mod_revision > before and (found.value, found.lease_id) == (put.value, put.lease_id):
                return found.mod_revision
        deletes = [op for op in ops if isinstance(op, Delete)]
        are_gone = not puts and bool(deletes) and all(self.get(op.key) is None for op in deletes)
        return self._last_revision if are_gone else 0

    def lease(self, ttl_s: float) -> Lease:
        """A new lease; unless kept alive it ends after `ttl_s` (etcd: whole seconds, at least 2)."""
        # A number of our own makes the request repeatable: a second grant of the same number is refused, not
        # added.
        lease_id = random.SystemRandom().randrange(1, 1 << 62)
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)), ID=lease_id)
        attempts: list[None] = []
        try:
            granted = float(self._call("create a lease", "Lease", "LeaseGrant", request, attempts).TTL)
        except EtcdError as error:
            if len(attempts) < 2 or "already exists" not in str(error):
                raise
            granted = float(request.TTL)
        lease = Lease(self, lease_id, granted)
        self._children.add(lease)
        return lease

    def share_lifetime(self, prefix: str, ttl_s: float) -> None:
        """Let what is written under `prefix` without a lease of its own end together, `ttl_s` after the last one who writes.

        All clients that were told so about a prefix share one lease, whose number follows from the prefix: nobody has to be
        the one who makes it, or who cleans up. It is made with the first write, and refreshed while any of these clients
        lives, so at least two thirds of `ttl_s` (as the first one said it) are left when the last of them ends.
        """
        self._lifetime = (prefix, ttl_s)

    def _bound(self, op: OpT) -> OpT:
        """`op`, with the shared lease if it is a put that has none."""
        prefix, _ = self._lifetime
        if not prefix or not isinstance(op, Put) or op.lease_id or not op.key.startswith(prefix):
            return op
        with self._shared_lease_lock:
            if self._shared_lease is None or self._shared_lease.lost.is_set():
                self._shared_lease = self._join_shared_lease()
            return dataclasses.replace(op, lease_id=self._shared_lease.id)

    def _join_shared_lease(self) -> Lease:
        prefix, ttl_s = self._lifetime
        number = int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:7], "big") | 1
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)), ID=number)
        try:
            granted = float(self._call("create a lease", "Lease", "LeaseGrant", request).TTL)
        except EtcdError as error:
            if "already exists" not in str(error):
                raise
            granted = float(self._keep_alive_once(number, self.config.timeout_s))
        lease = Lease(self, number, granted or ttl_s)
        self._children.add(lease)
        return lease.keep_alive(times_per_ttl=3)

    def _with_shared_lease(self, ops: Sequence[Op], write: Callable[[], T]) -> T:
        """What `write` returns; tried once more if the shared lease has ended meanwhile, and it alone can have."""
        try:
            return write()
        except LeaseLostError:
            if self._shared_lease is None or any(isinstance(op, Put) and op.lease_id for op in ops):
                raise
            self._shared_lease.close()
            self._shared_lease.lost.set()
        return write()

    def close(self, timeout_s: float = _CLOSE_DEADLINE_S) -> None:
        """End all threads of this client, its leases (which are not revoked) and its mirrors."""
        self._closed.set()
        self.end_children(timeout_s)
        with self._lock:
            connections = [self._connection, self._spare]
            self._connection = self._spare = None
        for connection in connections:
            if connection is not None:
                connection.close()

    def end_children(self, timeout_s: float = _CLOSE_DEADLINE_S) -> None:
        """End the threads of all leases and mirrors of this client, which itself stays open."""
        deadline = time.monotonic() + timeout_s
        for child in list(self._children):
            child.close(max(0.1, deadline - time.monotonic()))

    def _call(
        self,
        action: str,
        service: str,
        method: str,
        request: Any,
        attempts: list[None] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Answer to one request, repeated until the timeout; each try adds an entry to `attempts`.

        A connection that is late is half open, perhaps, or this process or etcd is busy. Cutting it off would cost its watches,
        and a busy etcd a storm of connections, so it is asked on while the next endpoint is asked too: whichever answers first
        is kept.
        """
        if _is_cut_off_by_fork:
            # gRPC's threads are in the parent; a call would wait for them in vain, or for a lock that one of them held.
            raise EtcdError(
                f"cannot {action} in etcd at {self.config.endpoints}: process {os.getpid()} was forked while its parent was "
                "connected to etcd, and gRPC does not survive that. Start it with the method 'spawn' or 'forkserver', or shut "
                "the parent's rendezvous handler down first; or set GRPC_ENABLE_FORK_SUPPORT=1: a fork may then take a second"
            )
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        late_s = min(max(limit_s / (2 * len(self._targets)), _LATE_S), 0.6 * limit_s)
        last_error: grpc.RpcError | None = None
        answers: queue.SimpleQueue[tuple[_Connection, Any]] = queue.SimpleQueue()
        pending: dict[_Connection, Any] = {}
        try:
            while True:
                remaining_s = deadline - time.monotonic()
                if self._closed.is_set():
                    raise EtcdUnavailableError(f"cannot {action} in etcd at {self.config.endpoints}: the client was closed")
                if remaining_s <= 0:
                    raise self._unavailable(action, limit_s, last_error) from last_error
                wait_s = min(late_s, remaining_s)
                connection = self._connect()
                try:
                    for connection in self._connections():
                        if connection not in pending:
                            metadata = self._metadata(connection, wait_s)
                            if attempts is not None:
                                attempts.append(None)
                            # The deadline is ours to keep: gRPC's own comes after it.
                            future = connection.method(service, method).future(
                                request, timeout=remaining_s + 1.0, metadata=metadata
                            )
                            pending[connection] = future
                            future.add_done_callback(functools.partial(_put_answer, answers, connection))
                    connection, future = answers.get(timeout=wait_s)
                    pending.pop(connection, None)
                    response = future.result()
                except queue.Empty:
                    self._doubt(pending, late_s)
                    continue
                except grpc.RpcError as error:
                    self._judge(action, connection, error, pending, late_s)
                    last_error = error
                except _UnreadablePasswordError as error:
                    if time.monotonic() + _RETRY_PAUSE_S >= deadline:
                        raise EtcdUnavailableError(f"cannot {action}: {error}") from error
                except (ValueError, grpc.FutureCancelledError):
                    # "Cannot invoke RPC on closed channel": another thread replaced the connection.
                    self._drop(connection)
                else:
                    revision = response.header.revision
                    if self._is_full and service == "KV" and method in ("Put", "Txn"):
                        self._is_full = False
                    with self._lock:
                        self._last_revision = max(self._last_revision, revision)
                        self._answered_at = time.monotonic()
                        connection.heard_at = self._answered_at
                    self._prefer(connection)
                    return response
                self._closed.wait(min(_RETRY_PAUSE_S, max(0.0, deadline - time.monotonic())))
        finally:
            for future in pending.values():
                future.cancel()

    def _judge(
        self, action: str, connection: _Connection, error: grpc.RpcError, asked: Collection[_Connection], late_s: float
    ) -> None:
        """Return when the request may be repeated, else raise."""
        code, details = error.code(), error.details() or ""
        where = f"cannot {action} in etcd at {connection.target}"
        if code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in details:
            with self._lock:
                self._token = None
            if self.config.user is not None and "authentication failed" not in details:
                return
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._doubt([connection, *asked], late_s)
            return
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            self._drop(connection)
            return
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too many requests" in details:
            return
        if code is grpc.StatusCode.NOT_FOUND and "lease not found" in details:
            raise LeaseLostError(f"{where}: its lease has expired or was revoked; create a new lease") from error
        if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN):
            raise EtcdUnavailableError(
                f"{where}: what listens there answers, but not as etcd v3 ({code.name}: {details}); check the endpoint"
            ) from error
        advice = {
            grpc.StatusCode.PERMISSION_DENIED: "; grant the user readwrite there, or change key_prefix"
            if self.config.user is not None
            else "; this etcd wants a user and a password (--rdzv-conf user=...,password_file=...)",
            grpc.StatusCode.UNAUTHENTICATED: "; check user and password",
        }.get(code, "")
        if "user name is empty" in details:
            advice = "; this etcd wants a user and a password (--rdzv-conf user=...,password_file=...)"
        elif "authentication failed" in details:
            advice = "; check user and password"
        elif "too large" in details:
            advice = "; values are limited to about 1 MB"
        elif "database space exceeded" in details:
            raise self._full(action, connection) from error
        raise EtcdError(f"{where}: {code.name}: {details}{advice}") from error

    def _full(self, action: str, connection: _Connection) -> EtcdFullError:
        problem = (
            f"etcd at {connection.target} is full: its database has reached its quota (NOSPACE), so it takes no writes. "
            "Make room: etcdctl compact REVISION, etcdctl defrag, etcdctl alarm disarm; "
            "then start etcd with --auto-compaction-retention=1h, or a larger --quota-backend-bytes"
        )
        if not self._is_full:
            self._is_full = True
            logger.warning("%s. Training goes on; changes of the job's workers wait until then", problem)
        return EtcdFullError(f"cannot {action}: {problem}")

    def _unavailable(self, action: str, limit_s: float, error: grpc.RpcError | None) -> EtcdUnavailableError:
        cause = f"{error.code().name}: {error.details()}" if error is not None else "no answer"
        tls = "" if self.config.uses_tls else " and whether it asks for TLS (ca_cert)"
        if "handshake failed" in cause:
            tls = ", that ca_cert is of the authority that signed its certificate, and whether it asks for one of us (cert)"
        return EtcdUnavailableError(
            f"cannot {action}: no etcd v3 answered at {self.config.endpoints} within {limit_s:g} s "
            f"({cause}); check that etcd runs, that the endpoint is right and reachable from this host{tls}"
        )

    def _connect(self) -> _Connection:
        with self._lock:
            return self._connect_locked()

    def _connect_locked(self) -> _Connection:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _connections(self) -> list[_Connection]:
        """Whom to ask: the connection in use and, while that is in doubt, the spare."""
        with self._lock:
            connection = self._connect_locked()
            return [connection] if self._spare is None else [connection, self._spare]

    def _open(self) -> _Connection:
        # Certificates are renewed while a job runs, every few hours in some clusters.
        try:
            self._credentials = _tls_credentials(self.config)
        except EtcdError as error:
            logger.warning("%s; going on with the certificates as they were read before", error)
        self._target_index = (self._target_index + 1) % len(self._targets)
        return _Connection(self._targets[self._target_index], self._credentials)

    def _doubt(self, asked: Collection[_Connection], late_s: float) -> None:
        """None of those asked has answered in time: see to it that another connection is asked, too."""
        silent_since = time.monotonic() - late_s
        with self._lock:
            # Replaced by another thread, or the server talks on it, only not yet about this.
            if self._connection is None or self._connection not in asked or self._connection.heard_at > silent_since:
                return
            late = self._spare
            if late is not None and (late not in asked or late.heard_at > silent_since):
                return
            self._spare = self._open()
        if late is not None:
            late.close()

    def _prefer(self, connection: _Connection) -> None:
        """It has answered: use it, and give up the one that has not."""
        if self._spare is None:
            return
        with self._lock:
            if connection not in (self._connection, self._spare):
                return
            late = self._connection if connection is self._spare else self._spare
            self._connection, self._spare = connection, None
        if late is not None:
            late.close()

    def _drop(self, connection: _Connection) -> None:
        """Do without it from now on: with the spare, or a fresh connection to the next endpoint."""
        with self._lock:
            # With a refused connection gRPC's own back-off would be lost, but our pause between attempts is
            # longer.
            if connection is self._connection:
                self._connection, self._spare = self._spare, None
            elif connection is self._spare:
                self._spare = None
            else:
                return
        connection.close()

    def _metadata(self, connection: _Connection, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """The token of our user; asks for a new one where needed."""
        if self.config.user is None:
            return ()
        with self._lock:
            token = self._token
        if token is None:
            try:
                password = _password(self.config)
            except EtcdError as error:
                # It could be read at the start: it is being replaced, or its file system is away for a moment.
                raise _UnreadablePasswordError(str(error)) from error
            request = etcdrpc.AuthenticateRequest(name=self.config.user, password=password)
            token = str(connection.method("Auth", "Authenticate")(request, timeout=timeout_s).token)
            with self._lock:
                self._token = token
        return (("token", token),)

    def _keep_alive_once(self, lease_id: int, timeout_s: float) -> int:
        """Seconds the lease has left now; 0 when etcd no longer knows it."""
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease_id)
        return int(self._call("refresh a lease", "Lease", "LeaseKeepAlive", request, timeout_s=timeout_s).TTL)

    def _revoke(self, lease_id: int) -> None:
        with contextlib.suppress(LeaseLostError):  # gone already, which is what was asked for
            self._call("revoke a lease", "Lease", "LeaseRevoke", etcdrpc.LeaseRevokeRequest(ID=lease_id))

    def _newest_in(self, prefix: str, timeout_s: float) -> tuple[int, int, int]:
        """The revision of this look at a prefix, how many keys it has, and the newest `mod_revision` among them (0: no key)."""
        request = etcdrpc.RangeRequest(
            key=prefix.encode(),
            range_end=_range_end(prefix),
            limit=1,
            keys_only=True,
            sort_order=etcdrpc.RangeRequest.DESCEND,
            sort_target=etcdrpc.RangeRequest.MOD,
        )
        response = self._call(f"look at prefix {prefix!r}", "KV", "Range", request, timeout_s=timeout_s)
        newest = int(response.kvs[0].mod_revision) if response.kvs else 0
        return int(response.header.revision), int(response.count), newest

    def _has_stood_still(self, revision: int, since: float) -> bool:
        """Whether etcd has answered after `since` (monotonic clock), and had seen no write after `revision`."""
        with self._lock:
            return self._answered_at > since and self._last_revision == revision

    def _watch(self, prefix: str, start_revision: int) -> _WatchStream:
        connection = self._connect()
        metadata = self._metadata(connection, self.config.timeout_s)
        create = etcdrpc.WatchCreateRequest(key=prefix.encode(), range_end=_range_end(prefix), start_revision=start_revision)
        return _WatchStream(connection, etcdrpc.WatchRequest(create_request=create), metadata)


class Lease:
    """A lease in etcd: keys bound to it are deleted when it ends. Made by `EtcdClient.lease`.

    `lost` is set when etcd itself says that the lease is gone. An etcd that cannot be reached is asked until
    it can: when it comes back it gives every lease its full time again.
    """

    def __init__(self, client: EtcdClient, lease_id: int, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = threading.Event()
        self._client = client
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
        return self.lost.is_set() or self._client._keep_alive_once(self.id, self._client.config.timeout_s) <= 0

    def revoke(self) -> None:
        """End the lease now: its keys are deleted at once."""
        self.close()
        self._client._revoke(self.id)

    def close(self, timeout_s: float = _CLOSE_DEADLINE_S) -> None:
        """Stop refreshing and join the thread; the lease ends by itself within `ttl_s`."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self, times_per_ttl: int) -> None:
        pause_s = self.ttl_s / times_per_ttl
        limit_s = min(self.ttl_s - pause_s, self._client.config.timeout_s)
        while not self._stop.wait(pause_s):
            try:
                remaining_s = self._client._keep_alive_once(self.id, limit_s)
            except LeaseLostError:
                remaining_s = 0
            except EtcdError as error:
                if not self._stop.is_set() and pause_s != _RETRY_PAUSE_S:
                    logger.warning("lease %x is not being refreshed: %s", self.id, error)
                pause_s = _RETRY_PAUSE_S  # the call itself took its time; every attempt counts now
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


class Mirror:
    """A live copy of all keys under a prefix, kept by a watch.

    The copy is consistent: it is what etcd held at `revision`. A watch that ends, was compacted or died silently is
    replaced: every `check_interval_s` a small read (no values) compares the copy's size and newest revision, unless
    another answer, such as a lease's refresh, shows that nobody has written anything to etcd since.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        on_change: Callable[[], None] | None = None,
        check_interval_s: float = 2.0,
    ) -> None:
        """Load the prefix; raises what `EtcdClient.get_prefix` raises.

        Args:
            on_change: called from the mirror's own thread after each update of the copy; must not block for
                long.
        """
        self.prefix = prefix
        self._client = client
        self._on_change = on_change
        self._check_interval_s = check_interval_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._healthy = True
        self._stream: _WatchStream | None = None
        self._revision, found = client.get_prefix(prefix)
        self._keys = {kv.key: kv for kv in found}
        client._children.add(self)
        name = f"etcd-mirror-{prefix.rstrip('/').rsplit('/', 1)[-1]}"
        self._threads = [
            threading.Thread(target=self._follow, name=name, daemon=True),
            threading.Thread(target=self._check_regularly, name=f"{name}-check", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def healthy(self) -> bool:
        """False while etcd cannot be reached, so that the copy may be out of date."""
        return self._healthy

    @property
    def revision(self) -> int:
        with self._changed:
            return self._revision

    def snapshot(self) -> dict[str, KeyValue]:
        with self._changed:
            return dict(self._keys)

    def get(self, key: str) -> KeyValue | None:
        with self._changed:
            return self._keys.get(key)

    def wait_for(self, predicate: Callable[[dict[str, KeyValue]], T | None], timeout_s: float) -> T:
        """The first result of `predicate` that is not None; it is called for the present copy and after each
        change.

        Raises:
            TimeoutError: there was none within `timeout_s`.
            EtcdError: the mirror was closed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                seen, keys = self._revision, dict(self._keys)
            result = predicate(keys)
            if result is not None:
                return result
            with self._changed:
                while self._revision == seen and not self._closed.is_set():
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0:
                        state = "" if self._healthy else f"; etcd at {self._client.config.endpoints} cannot be reached"
                        raise TimeoutError(f"waited {timeout_s:g} s for a change under {self.prefix!r}, in vain{state}")
                    self._changed.wait(remaining_s)
                if self._closed.is_set():
                    raise EtcdError(f"the mirror of {self.prefix!r} was closed while somebody waited for a change")

    def close(self, timeout_s: float = _CLOSE_DEADLINE_S) -> None:
        """End and join the threads; `on_change` is not called afterwards."""
        self._closed.set()
        with self._changed:
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _follow(self) -> None:
        """Apply what the watch reports; the only thread that changes the copy."""
        while not self._closed.is_set():
            try:
                stream = self._client._watch(self.prefix, self._revision + 1)
                with self._changed:
                    self._stream = stream
                    # Closed in between: nobody else would cancel this stream.
                    if self._closed.is_set():
                        stream.cancel()
                for response in stream:
                    if response.canceled or response.compact_revision:
                        logger.debug("watch of %r ended: %s", self.prefix, response.cancel_reason or "compacted")
                        break
                    self._healthy = True
                    if response.events:
                        self._apply(response.events)
                stream.cancel()
            except (grpc.RpcError, ValueError, EtcdError) as error:
                logger.debug("watch of %r ended: %r", self.prefix, error)
            except Exception:  # without this thread nobody would notice that the copy grows old
                logger.exception("watch of %r ended; it is begun again", self.prefix)
            if not self._closed.is_set():
                self._reload()

    def _reload(self) -> None:
        """Read the prefix afresh, however long it takes until etcd answers."""
        reported = False
        while not self._closed.is_set():
            try:
                revision, found = self._client.get_prefix(self.prefix)
            except EtcdError as error:
                self._healthy = False
                if not reported:
                    logger.warning("the copy of %r may be out of date until etcd answers: %s", self.prefix, error)
                    reported = True
                self._closed.wait(0.2)
                continue
            self._healthy = True
            self._replace(revision, {kv.key: kv for kv in found})
            # A watch that is refused at once (permissions, a compaction loop) must not spin.
            self._closed.wait(_RETRY_PAUSE_S)
            return

    def _apply(self, events: Sequence[Any]) -> None:
        """Costs as much as there are events, however many keys the prefix has."""
        changed = False
        with self._changed:
            seen = self._revision
            for event in events:
                if event.kv.mod_revision <= seen:
                    continue
                self._revision = max(self._revision, event.kv.mod_revision)
                kv = _key_value(event.kv)
                if event.type != event.DELETE:
                    changed = True
                    self._keys[kv.key] = kv
                elif self._keys.pop(kv.key, None) is not None:
                    changed = True
            self._changed.notify_all()
        self._report(changed)

    def _replace(self, revision: int, keys: dict[str, KeyValue]) -> None:
        with self._changed:
            changed = keys != self._keys
            # etcd restarted from an older backup would be behind us; what it says counts all the same.
            self._revision, self._keys = revision, keys
            self._changed.notify_all()
        self._report(changed)

    def _report(self, changed: bool) -> None:
        if changed and self._on_change is not None and not self._closed.is_set():
            try:
                self._on_change()
            except Exception:  # a listener's bug must not end the mirror for everybody else
                logger.exception("on_change of the mirror of %r failed", self.prefix)

    def _check_regularly(self) -> None:
        suspect: tuple[int, int] | None = None
        checked_revision, checked_at = 0, 0.0
        while not self._closed.wait(self._check_interval_s if suspect is None else _SUSPECT_S):
            if suspect is None and self._client._has_stood_still(checked_revision, checked_at):
                checked_at = time.monotonic()
                continue
            checked_at = time.monotonic()
            try:
                checked_revision, *found = self._client._newest_in(self.prefix, self._check_interval_s)
            except EtcdError:
                # A watch whose connection turns out to be dead ends with it.
                self._healthy = False
                continue
            self._healthy = True
            with self._changed:
                copy = (len(self._keys), max((kv.mod_revision for kv in self._keys.values()), default=0))
            truth = (found[0], found[1])
            if truth == copy:
                suspect = None
            elif suspect == copy:
                # The copy has stood still although etcd differs: the watch is dead.
                logger.warning("the watch of %r missed a change; reading again", self.prefix)
                suspect = None
                self._resubscribe()
            else:
                suspect = copy

    def _resubscribe(self) -> None:
        with self._changed:
            stream = self._stream
        if stream is not None:
            stream.cancel()


class _Connection:
    """One gRPC channel to one endpoint."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self.heard_at = time.monotonic()  # or opened
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            self.channel = grpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        self._stubs = {
            "KV": etcdrpc.KVStub(self.channel),
            "Lease": etcdrpc.LeaseStub(self.channel),
            "Auth": etcdrpc.AuthStub(self.channel),
            "Maintenance": etcdrpc.MaintenanceStub(self.channel),
        }
        # A stream to etcd; with one message each way it is the same on the wire as a unary call, and that costs a
        # third in gRPC's Python and no thread per refresh.
        self._refresh = self.channel.unary_unary(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=etcdrpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=etcdrpc.LeaseKeepAliveResponse.FromString,
        )

        _open_connections.add(self)

    def close(self) -> None:
        _open_connections.discard(self)
        self.channel.close()

    def method(self, service: str, name: str) -> Any:
        """The unary call of this name."""
        return self._refresh if name == "LeaseKeepAlive" else getattr(self._stubs[service], name)

    @functools.cached_property
    def watch(self) -> Any:
        return etcdrpc.WatchStub(self.channel)


class _WatchStream:
    """Responses of one watch; `cancel` may be called from any thread and ends the iteration."""

    def __init__(self, connection: _Connection, request: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        # Kept open by the queue: a client that closes its half asks a strict server or proxy to end the
        # watch.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(request)
        self._connection = connection
        self._call = connection.watch.Watch(iter(self._requests.get, None), metadata=metadata)

    def __iter__(self) -> Iterator[Any]:
        for response in self._call:
            self._connection.heard_at = time.monotonic()
            yield response

    def cancel(self) -> None:
        self._requests.put(None)
        self._call.cancel()


class _UnreadablePasswordError(EtcdUnavailableError):
    """The password's file cannot be read at this moment."""


def _put_answer(answers: queue.SimpleQueue[tuple[_Connection, Any]], connection: _Connection, future: Any) -> None:
    answers.put((connection, future))


def _tls_credentials(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    if not config.uses_tls:
        return None

    def read(name: str, path: str | None) -> bytes | None:
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            raise EtcdError(f"cannot read {name} {path!r} for etcd at {config.endpoints}: {error.strerror}") from error

    return grpc.ssl_channel_credentials(
        read("ca_cert", config.ca_cert), read("cert_key", config.cert_key), read("cert", config.cert)
    )


def _password(config: EtcdConfig) -> str | None:
    """Read whenever it is needed: it may be changed while a job runs, and what is kept nowhere cannot leak."""
    if config.password_file is None:
        return None
    what = f"password_file {config.password_file!r} for etcd at {config.endpoints}"
    try:
        lines = Path(config.password_file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EtcdError(f"cannot read {what}: {error}") from error
    if not lines or not lines[0]:
        raise EtcdError(f"cannot use {what}: it has no first line")
    return lines[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _range_end(prefix: str) -> bytes:
    """First key after all keys with this prefix."""
    raw = prefix.encode()
    if not raw:
        raise ValueError("an empty prefix would mean every key in etcd")
    return raw[:-1] + bytes([raw[-1] + 1])  # UTF-8 never holds 0xff, so there is no carry


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(
        key=kv.key.decode(errors="replace"),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        lease_id=kv.lease,
    )


def _compare_message(compare: Compare) -> Any:
    result = etcdrpc.Compare.EQUAL if compare.result == "equal" else etcdrpc.Compare.GREATER
    if compare.target == "create":
        return etcdrpc.Compare(
            key=compare.key.encode(),
            target=etcdrpc.Compare.CREATE,
            result=result,
            create_revision=compare.revision,
        )
    return etcdrpc.Compare(key=compare.key.encode(), target=etcdrpc.Compare.MOD, result=result, mod_revision=compare.revision)


def _op_message(op: Op) -> Any:
    key = op.key.encode()
    if isinstance(op, Put):
        put = etcdrpc.PutRequest(key=key, value=op.value, lease=op.lease_id)
        return etcdrpc.RequestOp(request_put=put)
    if isinstance(op, Delete):
        return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key))
