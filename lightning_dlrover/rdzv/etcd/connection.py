"""gRPC channels to etcd: the one in use, and a spare one while the first is in doubt."""

from __future__ import annotations

import functools
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

from lightning_dlrover.rdzv.etcd.config import EtcdConfig
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc, grpc

__all__ = ["Connection", "Connections", "WatchStream", "is_cut_off_by_fork"]

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
_is_cut_off_by_fork = False


def _note_fork() -> None:
    global _is_cut_off_by_fork
    with_support = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower() not in ("0", "false")
    _is_cut_off_by_fork |= len(_open_connections) > 0 and not with_support


os.register_at_fork(after_in_child=_note_fork)


def is_cut_off_by_fork() -> bool:
    """Whether this process was forked while its parent was connected: gRPC's threads are in the parent."""
    return _is_cut_off_by_fork


class Connection:
    """One gRPC channel to one endpoint."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self.heard_at = time.monotonic()  # time of the newest response, or of opening
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
                self._connection.heard_at = time.monotonic()
                if not self._is_patient:  # the request has arrived, so only this thread waits for the call from now on
                    self._is_patient = True
                    _wait_without_polling(self._call)
                yield response
        finally:
            self.cancel()  # else a thread of gRPC's waits for a further request for ever

    def cancel(self) -> None:
        self._requests.put(None)
        self._call.cancel()


def _wait_without_polling(call: Any) -> None:
    """Let the reader of a call sleep until gRPC wakes it.

    gRPC's Python wakes a waiting reader ten times a second, so that signal handlers run in time if it is the main thread. A
    worker reads several watches for as long as it trains, in other threads, and each wake-up interrupts its training. A release
    of gRPC without the private names goes on as before.
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
        self._targets = [scheme.sub("", part.strip()).rstrip("/") for part in config.endpoints.split(",")]
        self._lock = threading.Lock()
        self._credentials = _tls_credentials(config)  # credentials of the last read; see `_open`
        self._target_index = random.SystemRandom().randrange(len(self._targets))
        self._connection: Connection | None = None
        self._spare: Connection | None = None  # also used while the connection in use is late

    @property
    def num_targets(self) -> int:
        return len(self._targets)

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
            logger.warning("%s; going on with the certificates as they were read before", error)
        self._target_index = (self._target_index + 1) % len(self._targets)
        return Connection(self._targets[self._target_index], self._credentials)

    def doubt(self, asked: Collection[Connection], late_s: float) -> None:
        """Add another connection because none of those asked has responded in time."""
        silent_since = time.monotonic() - late_s
        with self._lock:
            # Another thread has replaced the connection, or the server responds on it, but not yet to this request.
            if self._connection is None or self._connection not in asked or self._connection.heard_at > silent_since:
                return
            late = self._spare
            if late is not None and (late not in asked or late.heard_at > silent_since):
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
