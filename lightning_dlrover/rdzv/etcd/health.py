"""Read the condition of an etcd server: release, size, quota, compaction, alarms, latency and clock.

Release, size and alarms come from gRPC, and every user may read them. The quota, the last compaction and the clock come from
the HTTP pages that etcd serves on the same port; they stay unknown where a proxy passes gRPC alone.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import re
import ssl
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

from lightning_dlrover.rdzv.etcd.caller import Caller
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.config import EtcdConfig, parse_endpoints
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.operations import Put, exists
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc
from lightning_dlrover.rdzv.etcd.unix_socket import HTTPOverSocket, socket_path

__all__ = ["DEFAULT_QUOTA_BYTES", "Clock", "EtcdCondition", "alarms_of", "inspect"]

DEFAULT_QUOTA_BYTES = 2 << 30

_NUM_READS = 5
_ERRORS_FIELD = 8  # number of `errors` in StatusResponse, which the stubs of `pyetcd` lack


@dataclass(frozen=True)
class Clock:
    """A server's clock against ours."""

    ahead_s: float  # how far it is ahead; the middle of the interval in which the difference lies
    uncertain_s: float  # half of that interval


@dataclass(frozen=True)
class EtcdCondition:
    """The condition of one server; None: unknown."""

    version: str
    has_leader: bool
    size_bytes: int  # the database's file
    used_bytes: int | None  # without free pages, which only `etcdctl defrag` gives back
    quota_bytes: int | None
    revision: int
    compacted_revision: int | None  # 0: never
    compacts_by_itself: bool | None  # whether its command line sets that; None: it may be set elsewhere
    alarms: tuple[str, ...]
    write_problem: str  # why a write below the prefix is refused; empty if it is not
    latency_s: float  # median of a few linearized reads
    clock: Clock | None


def alarms_of(caller: Caller) -> tuple[str, ...]:
    """Return the alarms of the server in use, such as NOSPACE; none if it gives no answer, or this user may not ask."""
    try:
        return _alarms(caller.call("read the alarms", "Maintenance", "Status", etcdrpc.StatusRequest()))
    except EtcdError:
        return ()


def _alarms(status: Any) -> tuple[str, ...]:
    unknown = [bytes(each.data) for each in UnknownFieldSet(status) if each.field_number == _ERRORS_FIELD]
    lines = [*getattr(status, "errors", ()), *(line.decode(errors="replace") for line in unknown)]
    return tuple(sorted({found for line in lines for found in re.findall(r"alarm:([A-Z]\w+)", line)}))


def inspect(config: EtcdConfig, prefix: str | None, wall_clock: Callable[[], float] = time.time) -> EtcdCondition:
    """Return the condition of the server at the only endpoint of `config`. Writes nothing.

    Args:
        prefix: folder of all jobs' keys, to try how the server answers this user; None: `write_problem` and `latency_s` stay
            empty.
        wall_clock: our clock, to compare with the server's.

    Raises:
        EtcdError: no server answers there as etcd v3, or it refuses user or certificate.
    """
    metrics = _metrics(config)
    quota_bytes = _whole(metrics.get("etcd_server_quota_backend_bytes"))
    with EtcdClient(config) as client:
        status = client.caller.call("check the connection", "Maintenance", "Status", etcdrpc.StatusRequest())
        alarms = _alarms(status)
        # At its quota any request to write would raise the alarm.
        has_room = not alarms and status.dbSize < 0.9 * (quota_bytes or DEFAULT_QUOTA_BYTES)
        seconds, write_problem = _try(client, f"{prefix}/doctor", has_room) if prefix is not None else ([], "")
    compacted = metrics.get("etcd_debugging_mvcc_compact_revision")
    return EtcdCondition(
        version=str(status.version),
        has_leader=bool(status.leader),
        size_bytes=int(status.dbSize),
        used_bytes=_whole(metrics.get("etcd_mvcc_db_total_size_in_use_in_bytes")),
        quota_bytes=quota_bytes,
        revision=int(status.header.revision),
        compacted_revision=None if compacted is None else max(0, int(compacted)),
        compacts_by_itself=_compacts_by_itself(config),
        alarms=alarms,
        write_problem=write_problem,
        latency_s=statistics.median(seconds) if seconds else 0.0,
        clock=_clock(config, wall_clock),
    )


def _try(client: EtcdClient, key: str, has_room: bool) -> tuple[list[float], str]:
    """Return the seconds of a few reads, and why a read or a write is refused. The key never exists."""
    seconds: list[float] = []
    try:
        for _ in range(_NUM_READS):
            began = time.perf_counter()
            client.get(key)
            seconds.append(time.perf_counter() - began)
        if has_room:
            # etcd checks the permissions of all branches. This one is never taken.
            client.txn([exists(key)], [Put(key, b"")])
    except EtcdError as error:
        return seconds, str(error)
    return seconds, ""


def _whole(value: float | None) -> int | None:
    return int(value) if value else None


def _metrics(config: EtcdConfig) -> dict[str, float]:
    """Return the server's metrics without labels by name; empty if it serves none."""
    page, _ = _page(config, "/metrics")
    return {name: float(value) for name, value in re.findall(r"^(etcd\w+) ([-+.\deE]+)$", page, re.MULTILINE)}


def _compacts_by_itself(config: EtcdConfig) -> bool | None:
    """Return whether the command line of the server sets automatic compaction; None if it is set elsewhere, or unknown."""
    page, _ = _page(config, "/debug/vars")
    try:
        command = " ".join(map(str, json.loads(page)["cmdline"]))
    except (ValueError, KeyError, TypeError):
        return None
    given = re.findall(r"--?auto-compaction-retention[= ](\S+)", command)
    if not given:
        return None  # perhaps in its environment or configuration file
    return given[-1] not in ("0", "0s", "0m", "0h")


def _clock(config: EtcdConfig, wall_clock: Callable[[], float]) -> Clock | None:
    """Compare the server's clock with ours: HTTP responses bear its time in whole seconds."""
    before = wall_clock()
    _, date = _page(config, "/version")
    after = wall_clock()
    parsed = email.utils.parsedate_tz(date)
    if parsed is None:
        return None
    # Its clock read between `stamp` and `stamp` + 1 s at some moment between `before` and `after`.
    stamp = email.utils.mktime_tz(parsed)
    low, high = stamp - after, stamp + 1.0 - before
    return Clock((low + high) / 2, (high - low) / 2)


def _page(config: EtcdConfig, path: str) -> tuple[str, str]:
    """Return a page of the server's HTTP interface and the response's date; empty if there is none."""
    [(host, port)] = parse_endpoints(config.endpoints)
    socket = socket_path(config.endpoints)
    try:
        connection: http.client.HTTPConnection
        if socket is not None:
            connection = HTTPOverSocket(socket, config.timeout_s)
        elif config.uses_tls:
            context = ssl.create_default_context(cafile=config.ca_cert)
            if config.cert is not None:
                context.load_cert_chain(config.cert, config.cert_key)
            connection = http.client.HTTPSConnection(host, port, timeout=config.timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=config.timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(16 << 20).decode(errors="replace")
            return (body if response.status == 200 else ""), response.getheader("Date", "")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return "", ""
