"""Requests to etcd over gRPC: the channels, and retries through lost connections and elections until they time out.

It holds the stubs of etcd's services, the conversion of keys, conditions and operations, and the channels. `client.py` builds
the typed client on top.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import queue
import random
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lightning_dlrover.rdzv.etcd.types import (
    Compare,
    Delete,
    DeletePrefix,
    EtcdConfig,
    EtcdError,
    EtcdFullError,
    EtcdUnavailableError,
    KeyValue,
    LeaseLostError,
    Op,
    PermissionDeniedError,
    Put,
    UnreadablePasswordError,
    read_password,
)

# gRPC reads both variables only while it is imported, and ignores later changes, even before the first channel is made. A
# training process forks its data-loader workers, which never use etcd. gRPC's fork handlers would only print a line for each of
# them, or disturb the watch in the parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc as grpc  # type: ignore[import-untyped]

# The stubs of etcd's services, for all modules of this package that use etcd. They are those of `pyetcd` (package
# etcd-sdk-python). Its client class is not used: its transactions do not return a revision, its failover is not thread-safe
# and its tokens are never renewed.
#
# Imported by name, because its type stub (rpc_pb2.pyi of 0.0.7) is not valid Python and would stop mypy for every user.
etcdrpc: Any = importlib.import_module("pyetcd.etcdrpc")


def range_end(prefix: str) -> bytes:
    """Return the first key after all keys with this prefix."""
    raw = prefix.encode()
    if not raw:
        raise ValueError("an empty prefix would mean every key in etcd")
    return raw[:-1] + bytes([raw[-1] + 1])  # UTF-8 never contains 0xff, so no carry occurs


def key_value(kv: Any) -> KeyValue:
    return KeyValue(
        key=kv.key.decode(errors="replace"),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        lease_id=kv.lease,
    )


def compare_message(compare: Compare) -> Any:
    message = etcdrpc.Compare(
        key=compare.key.encode(),
        range_end=range_end(compare.key) if compare.is_prefix else b"",
        result=etcdrpc.Compare.EQUAL if compare.result == "equal" else etcdrpc.Compare.GREATER,
    )
    if compare.target == "create":
        message.target, message.create_revision = etcdrpc.Compare.CREATE, compare.revision
    else:
        message.target, message.mod_revision = etcdrpc.Compare.MOD, compare.revision
    return message


def op_message(op: Op) -> Any:
    key = op.key.encode()
    if isinstance(op, Put):
        put = etcdrpc.PutRequest(key=key, value=op.value, lease=op.lease_id)
        return etcdrpc.RequestOp(request_put=put)
    if isinstance(op, Delete | DeletePrefix):
        end = range_end(op.key) if isinstance(op, DeletePrefix) else b""
        return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key, range_end=end))
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key))


logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # an http_proxy of the user's environment is not meant for etcd
    ("grpc.use_local_subchannel_pool", 1),  # a replaced channel must not inherit a half-open connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # limit on one attempt to connect, despite its name
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses clients that ping more often than every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 << 20),
)

_WATCH_WAIT_S = 60.0  # seconds after which a watch's reader wakes up without a reason


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_is_cut_off_by_fork = False  # this process was forked while its parent was connected: gRPC's threads are in the parent


def _note_fork() -> None:
    global _is_cut_off_by_fork
    with_support = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower() not in ("0", "false")
    _is_cut_off_by_fork |= len(_open_connections) > 0 and not with_support


os.register_at_fork(after_in_child=_note_fork)


class Connection:
    """One gRPC channel to one endpoint."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self.responded_at = time.monotonic()  # time of the newest response, or of opening
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
        # A stream for etcd. With one message each way it equals a unary call on the wire, which costs a third as much in gRPC's
        # Python and needs no thread per refresh.
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
        """Return the unary call of this name."""
        return self._refresh if name == "LeaseKeepAlive" else getattr(self._stubs[service], name)

    @functools.cached_property
    def watch(self) -> Any:
        return etcdrpc.WatchStub(self.channel)


class WatchStream:
    """Responses of one watch, for one reader; `cancel` may be called from any thread and ends the iteration."""

    def __init__(self, connection: Connection, request: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        # The queue keeps the stream open: if a client closes its half, a strict server or proxy ends the watch.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(request)
        self._connection = connection
        self._is_patient = False
        self._call = connection.watch.Watch(iter(self._requests.get, None), metadata=metadata)

    def __iter__(self) -> Iterator[Any]:
        try:
            for response in self._call:
                self._connection.responded_at = time.monotonic()
                if not self._is_patient:  # the request has arrived, so only this thread waits for the call from now on
                    self._is_patient = True
                    _wait_without_polling(self._call)
                yield response
        finally:
            self.cancel()  # else a thread of gRPC's waits for a further request forever

    def cancel(self) -> None:
        self._requests.put(None)
        self._call.cancel()


def _wait_without_polling(call: Any) -> None:
    """Let the reader of a call sleep until gRPC wakes it.

    gRPC's Python wakes a waiting reader ten times a second, so that signal handlers run in time if it is the main thread. A
    worker reads several watches for as long as it trains, in other threads, and each wake-up interrupts its training. A release
    of gRPC without the private names behaves as before.
    """
    condition = getattr(getattr(call, "_state", None), "condition", None)
    if isinstance(condition, threading.Condition):
        wait = condition.wait
        condition.wait = lambda timeout=None: wait(_WATCH_WAIT_S)  # type: ignore[method-assign]


class Connections:
    """The connection in use to one of the endpoints and, while it is late, a spare one to the next endpoint.

    A late connection may be half open, or this process or etcd is busy. Closing it would lose its watches, and would flood a
    busy etcd with connections. So requests go to both it and the next endpoint, and the first to respond is kept. Thread-safe.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        scheme = re.compile(r"^https?://")
        self.targets = [scheme.sub("", part.strip()).rstrip("/") for part in config.endpoints.split(",")]
        self._lock = threading.Lock()
        self._credentials = _tls_credentials(config)  # credentials of the last read; see `_open`
        self._target_index = random.SystemRandom().randrange(len(self.targets))
        self._connection: Connection | None = None
        self._spare: Connection | None = None  # also used while the connection in use is late

    def current(self) -> Connection:
        with self._lock:
            return self._current_locked()

    def _current_locked(self) -> Connection:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def to_ask(self) -> list[Connection]:
        """Return the connections for a request: the one in use and, while it is in doubt, the spare."""
        with self._lock:
            connection = self._current_locked()
            return [connection] if self._spare is None else [connection, self._spare]

    def _open(self) -> Connection:
        # Certificates are renewed while a job runs, every few hours in some clusters.
        try:
            self._credentials = _tls_credentials(self._config)
        except EtcdError as error:
            logger.warning("%s; using the certificates that were read before", error)
        self._target_index = (self._target_index + 1) % len(self.targets)
        return Connection(self.targets[self._target_index], self._credentials)

    def doubt(self, asked: Collection[Connection], late_s: float) -> None:
        """Add another connection because none of those asked has responded in time."""
        silent_since = time.monotonic() - late_s
        with self._lock:
            # Another thread has replaced the connection, or the server responds on it, but not yet to this request.
            if self._connection is None or self._connection not in asked or self._connection.responded_at > silent_since:
                return
            late = self._spare
            if late is not None and (late not in asked or late.responded_at > silent_since):
                return
            self._spare = self._open()
        if late is not None:
            late.close()

    def prefer(self, connection: Connection) -> None:
        """Use a connection that has responded, and give up the other one."""
        if self._spare is None:
            return
        with self._lock:
            if connection not in (self._connection, self._spare):
                return
            late = self._connection if connection is self._spare else self._spare
            self._connection, self._spare = connection, None
        if late is not None:
            late.close()

    def drop(self, connection: Connection) -> None:
        """Replace a connection with the spare, or with a fresh one to the next endpoint."""
        with self._lock:
            # After a refused connection this loses gRPC's own backoff, but our pause between attempts is longer.
            if connection is self._connection:
                self._connection, self._spare = self._spare, None
            elif connection is self._spare:
                self._spare = None
            else:
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            connections = [self._connection, self._spare]
            self._connection = self._spare = None
        for connection in connections:
            if connection is not None:
                connection.close()


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


RETRY_PAUSE_S = 0.05  # seconds between two attempts of a request

# Seconds between two writes to a full etcd, at first and at most. Each one makes etcd agree on its alarm again.
_FULL_PAUSES_S = (0.1, 1.0)
_NEEDS_ROOM = ("Put", "Txn", "LeaseGrant")
_LONGEST_PAUSE_S = 0.4  # between two attempts; the threads of a thousand workers would overrun an etcd that is coming back
_LATE_S = 1.5  # seconds without a response after which a second connection is tried as well


class Caller:
    """Send requests, retried through lost connections and elections until they time out. Thread-safe."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.connections = Connections(config)
        read_password(config)  # fail early on an unreadable file, not at the first request for a token
        self._num_refused = 0  # writes that a full etcd has refused since it accepted one
        self._may_write_at = 0.0  # monotonic clock; no write is sent to a full etcd earlier
        self._lock = threading.Lock()
        self._token: str | None = None
        self._was_authenticated = False
        self._last_revision = 0
        self._answered_at = 0.0  # monotonic clock
        self._closed = threading.Event()

    @property
    def last_revision(self) -> int:
        """The newest revision in all responses so far."""
        return self._last_revision

    def call(
        self,
        action: str,
        service: str,
        method: str,
        request: Any,
        attempts: list[None] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the response to one request, retried until the timeout. Each try adds an entry to `attempts`."""
        self._refuse_after_fork(action)
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        if method in _NEEDS_ROOM and (pause_s := self._may_write_at - time.monotonic()) > 0:
            self._closed.wait(min(pause_s, 0.5 * limit_s))
        late_s = min(max(limit_s / (2 * len(self.connections.targets)), _LATE_S), 0.6 * limit_s)
        last_error: grpc.RpcError | None = None
        num_failed = 0
        answers: queue.SimpleQueue[tuple[Connection, Any]] = queue.SimpleQueue()
        pending: dict[Connection, Any] = {}
        try:
            while True:
                remaining_s = deadline - time.monotonic()
                if self._closed.is_set():
                    raise EtcdUnavailableError(f"cannot {action} in etcd at {self.config.endpoints}: the client was closed")
                if remaining_s <= 0:
                    raise self._unavailable(action, limit_s, last_error) from last_error
                wait_s = min(late_s, remaining_s)
                connection = self.connections.current()
                try:
                    for connection in self.connections.to_ask():
                        if connection not in pending:
                            metadata = self._metadata(connection, wait_s)
                            if attempts is not None:
                                attempts.append(None)
                            # We enforce the deadline ourselves; gRPC's own comes after it.
                            send = connection.method(service, method).future
                            pending[connection] = future = send(request, timeout=remaining_s + 1.0, metadata=metadata)
                            future.add_done_callback(functools.partial(_put_answer, answers, connection))
                    connection, future = answers.get(timeout=wait_s)
                    pending.pop(connection, None)
                    response = future.result()
                except queue.Empty:
                    self.connections.doubt(pending, late_s)
                    continue
                except grpc.RpcError as error:
                    self._judge(action, connection, error, pending, late_s)
                    last_error = error
                except UnreadablePasswordError as error:
                    if time.monotonic() + RETRY_PAUSE_S >= deadline:
                        raise EtcdUnavailableError(f"cannot {action}: {error}") from error
                except (ValueError, grpc.FutureCancelledError):
                    # "Cannot invoke RPC on closed channel": another thread replaced the connection.
                    self.connections.drop(connection)
                else:
                    self._note_answer(connection, response, method)
                    return response
                self._closed.wait(min(_pause_s(num_failed), max(0.0, deadline - time.monotonic())))
                num_failed += 1
        finally:
            for future in pending.values():
                future.cancel()

    def _refuse_after_fork(self, action: str) -> None:
        if _is_cut_off_by_fork:
            # gRPC's threads exist only in the parent. A call would wait forever for them, or for a lock that one of them held.
            raise EtcdError(
                f"cannot {action} in etcd at {self.config.endpoints}: process {os.getpid()} was forked while its parent was "
                "connected to etcd, and gRPC does not survive that. Start it with the method 'spawn' or 'forkserver', or shut "
                "the parent's rendezvous handler down first; or set GRPC_ENABLE_FORK_SUPPORT=1: a fork may then take a second"
            )

    def _note_answer(self, connection: Connection, response: Any, method: str) -> None:
        if self._num_refused and method in _NEEDS_ROOM:
            if self._num_refused > 1:
                logger.warning("etcd at %s has room again and accepts writes", connection.target)
            self._num_refused, self._may_write_at = 0, 0.0
        with self._lock:
            self._last_revision = max(self._last_revision, response.header.revision)
            self._answered_at = connection.responded_at = time.monotonic()
        self.connections.prefer(connection)

    def _judge(
        self, action: str, connection: Connection, error: grpc.RpcError, asked: Collection[Connection], late_s: float
    ) -> None:
        """Return if the request may be retried, else raise."""
        code, details = error.code(), error.details() or ""
        where = f"cannot {action} in etcd at {connection.target}"
        if code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in details:
            with self._lock:
                self._token = None
            if self.config.user is not None and "authentication failed" not in details:
                return
        if "authentication failed" in details and self._was_authenticated:
            with self._lock:
                self._token = None
            return  # the password was changed in etcd, and its file follows: a Secret of Kubernetes takes a minute
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.connections.doubt([connection, *asked], late_s)
            return
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            self.connections.drop(connection)
            return
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too many requests" in details:
            return
        if code is grpc.StatusCode.NOT_FOUND and "lease not found" in details:
            raise LeaseLostError(f"{where}: its lease has expired or was revoked; create a new lease") from error
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL) and self._answered_at:
            return  # it is etcd: a leader hands over ("raft proposal dropped"), or a proxy has reset the stream
        if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN):
            raise EtcdUnavailableError(
                f"{where}: the server there answers, but not as etcd v3 ({code.name}: {details}); check the endpoint"
            ) from error
        if "database space exceeded" in details:
            raise self._full(action, connection) from error
        is_denied = code is grpc.StatusCode.PERMISSION_DENIED
        advice = ""
        if "user name is empty" in details or (is_denied and self.config.user is None):
            advice = "; this etcd has authentication enabled: give a user (--rdzv-conf user=...,password_file=...)"
        elif "authentication failed" in details or code is grpc.StatusCode.UNAUTHENTICATED:
            advice = "; check user and password"
        elif is_denied:
            advice = "; grant the user readwrite there, or change key_prefix"
        elif "too large" in details:
            advice = "; values are limited to about 1 MB"
        raise (PermissionDeniedError if is_denied else EtcdError)(f"{where}: {code.name}: {details}{advice}") from error

    def _full(self, action: str, connection: Connection) -> EtcdFullError:
        problem = full_text(connection.target)
        self._num_refused += 1
        first_s, longest_s = _FULL_PAUSES_S
        pause_s = min(longest_s, first_s * 2.0 ** min(20, self._num_refused - 1))
        self._may_write_at = time.monotonic() + pause_s * random.SystemRandom().uniform(0.8, 1.0)
        if self._num_refused == 2:  # a command ends with its first refusal, and this line would only repeat its error
            logger.warning("%s. Until then workers continue to train, and changes of the job wait", problem)
        return EtcdFullError(f"cannot {action}: {problem}")

    def _unavailable(self, action: str, limit_s: float, error: grpc.RpcError | None) -> EtcdUnavailableError:
        cause = f"{error.code().name}: {error.details()}" if error is not None else "no answer"
        tls = " and whether etcd requires TLS (ca_cert)"
        if self.config.uses_tls:
            # etcd refuses a client without a certificate after the handshake, so a busy machine may only see a timeout.
            tls = ", that ca_cert belongs to the authority that signed etcd's certificate, and whether etcd requires one (cert)"
        return EtcdUnavailableError(
            f"cannot {action}: no etcd v3 answered at {self.config.endpoints} within {limit_s:g} s "
            f"({cause}); check that etcd runs, that the endpoint is right and reachable from this host{tls}"
        )

    def _metadata(self, connection: Connection, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """Return our user's token, requesting a new one if necessary."""
        if self.config.user is None:
            return ()
        with self._lock:
            token = self._token
        if token is None:
            try:
                password = read_password(self.config)
            except EtcdError as error:
                # The file was readable at the start. It is being replaced, or its file system is briefly unavailable.
                raise UnreadablePasswordError(str(error)) from error
            request = etcdrpc.AuthenticateRequest(name=self.config.user, password=password)
            token = str(connection.method("Auth", "Authenticate")(request, timeout=timeout_s).token)
            with self._lock:
                self._token, self._was_authenticated = token, True
        return (("token", token),)

    def has_stood_still(self, revision: int, since: float) -> bool:
        """Whether etcd has responded after `since` (monotonic clock) without a write newer than `revision`."""
        with self._lock:
            return self._answered_at > since and self._last_revision == revision

    def watch(self, prefix: str, start_revision: int) -> WatchStream:
        connection = self.connections.current()
        metadata = self._metadata(connection, self.config.timeout_s)
        create = etcdrpc.WatchCreateRequest(key=prefix.encode(), range_end=range_end(prefix), start_revision=start_revision)
        return WatchStream(connection, etcdrpc.WatchRequest(create_request=create), metadata)

    def stop(self) -> None:
        """End the requests that are being retried."""
        self._closed.set()

    def close(self) -> None:
        """Close the connections. Requests that still use them fail."""
        self.connections.close()


def full_text(endpoint: str) -> str:
    """Describe a full etcd in one sentence, with the next move."""
    return (
        f"etcd at {endpoint} is full: its database has reached its quota (NOSPACE), so it accepts no writes. "
        "Make room: etcdctl compact REVISION, etcdctl defrag, etcdctl alarm disarm; "
        "then start etcd with --auto-compaction-retention=1h, or a larger --quota-backend-bytes"
    )


def _put_answer(answers: queue.SimpleQueue[tuple[Connection, Any]], connection: Connection, future: Any) -> None:
    answers.put((connection, future))


def _pause_s(num_failed: int) -> float:
    """Return the seconds until the next attempt of a request that has failed `num_failed` times before this one."""
    longest_s = min(_LONGEST_PAUSE_S, RETRY_PAUSE_S * 2.0 ** min(num_failed, 8))
    return random.SystemRandom().uniform(0.5, 1.0) * longest_s
