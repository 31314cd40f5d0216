"""Requests to etcd, retried through lost connections and elections until they time out."""

from __future__ import annotations

import functools
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Collection
from typing import Any

from lightning_dlrover.rdzv.etcd.config import EtcdConfig, read_password
from lightning_dlrover.rdzv.etcd.connection import Connection, Connections, WatchStream, is_cut_off_by_fork
from lightning_dlrover.rdzv.etcd.errors import (
    EtcdError,
    EtcdFullError,
    EtcdUnavailableError,
    LeaseLostError,
    PermissionDeniedError,
    UnreadablePasswordError,
)
from lightning_dlrover.rdzv.etcd.messages import range_end
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc, grpc

__all__ = ["RETRY_PAUSE_S", "Caller", "full_text"]

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.05
"""Seconds between two attempts of a request."""

# Seconds between two writes to a full etcd, at first and at most. Each one makes etcd agree on its alarm anew.
_FULL_PAUSES_S = (0.1, 1.0)
_NEEDS_ROOM = ("Put", "Txn", "LeaseGrant")
_LONGEST_PAUSE_S = 0.4  # between two attempts; the threads of a thousand workers would overrun an etcd that is coming back
_LATE_S = 1.5  # seconds without a response after which a second connection is tried as well


class Caller:
    """Send requests: chooses the connection and the user, and limits retries and time. Thread-safe."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.connections = Connections(config)
        read_password(config)  # fail early on an unreadable file, not at the first request for a token
        self._num_refused = 0  # writes that a full etcd has refused since it took one
        self._may_write_at = 0.0  # monotonic clock; a full etcd is asked no earlier
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
        late_s = min(max(limit_s / (2 * self.connections.num_targets), _LATE_S), 0.6 * limit_s)
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
        if is_cut_off_by_fork():
            # gRPC's threads are in the parent. A call would wait in vain for them, or for a lock that one of them held.
            raise EtcdError(
                f"cannot {action} in etcd at {self.config.endpoints}: process {os.getpid()} was forked while its parent was "
                "connected to etcd, and gRPC does not survive that. Start it with the method 'spawn' or 'forkserver', or shut "
                "the parent's rendezvous handler down first; or set GRPC_ENABLE_FORK_SUPPORT=1: a fork may then take a second"
            )

    def _note_answer(self, connection: Connection, response: Any, method: str) -> None:
        if self._num_refused and method in _NEEDS_ROOM:
            if self._num_refused > 1:
                logger.warning("etcd at %s has room again and takes writes", connection.target)
            self._num_refused, self._may_write_at = 0, 0.0
        with self._lock:
            self._last_revision = max(self._last_revision, response.header.revision)
            self._answered_at = connection.heard_at = time.monotonic()
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
        if code is grpc.StatusCode.PERMISSION_DENIED:
            raise PermissionDeniedError(f"{where}: {code.name}: {details}{advice}") from error
        raise EtcdError(f"{where}: {code.name}: {details}{advice}") from error

    def _full(self, action: str, connection: Connection) -> EtcdFullError:
        problem = full_text(connection.target)
        self._num_refused += 1
        first_s, longest_s = _FULL_PAUSES_S
        pause_s = min(longest_s, first_s * 2.0 ** min(20, self._num_refused - 1))
        self._may_write_at = time.monotonic() + pause_s * random.SystemRandom().uniform(0.8, 1.0)
        if self._num_refused == 2:  # a command ends with its first refusal, and this line would only repeat its error
            logger.warning("%s. Until then workers train on, and changes of the job wait", problem)
        return EtcdFullError(f"cannot {action}: {problem}")

    def _unavailable(self, action: str, limit_s: float, error: grpc.RpcError | None) -> EtcdUnavailableError:
        cause = f"{error.code().name}: {error.details()}" if error is not None else "no answer"
        tls = " and whether it asks for TLS (ca_cert)"
        if self.config.uses_tls:
            # etcd refuses a client without a certificate after the handshake, so on a busy machine there is only no answer.
            tls = ", that ca_cert is of the authority that signed its certificate, and whether it asks for one of us (cert)"
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
    """Describe a full etcd for people, with the next move."""
    return (
        f"etcd at {endpoint} is full: its database has reached its quota (NOSPACE), so it takes no writes. "
        "Make room: etcdctl compact REVISION, etcdctl defrag, etcdctl alarm disarm; "
        "then start etcd with --auto-compaction-retention=1h, or a larger --quota-backend-bytes"
    )


def _put_answer(answers: queue.SimpleQueue[tuple[Connection, Any]], connection: Connection, future: Any) -> None:
    answers.put((connection, future))


def _pause_s(num_failed: int) -> float:
    """Return the seconds until the next attempt of a request that has failed `num_failed` times before this one."""
    longest_s = min(_LONGEST_PAUSE_S, RETRY_PAUSE_S * 2.0 ** min(num_failed, 8))
    return random.SystemRandom().uniform(0.5, 1.0) * longest_s
