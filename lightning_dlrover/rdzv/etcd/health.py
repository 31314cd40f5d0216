"""The condition of an etcd server: read it, judge it, warn about it when a job starts, and wait while it is full.

`inspect` reads an `EtcdCondition`, `judge` returns findings about it, and `warn_of_troubles` logs them at a job's start.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import re
import ssl
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

from lightning_dlrover.output import Finding, error, ok, warning
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import Caller, etcdrpc
from lightning_dlrover.rdzv.etcd.types import (
    EtcdConfig,
    EtcdError,
    EtcdFullError,
    HTTPOverSocket,
    Put,
    exists,
    is_loopback,
    parse_endpoints,
    socket_path,
)

# Oldest release of each line that enforces a user's permissions on a prefix (CVE-2026-33413, -33343, -44283).
FIXED_VERSIONS = ((3, 4, 44), (3, 5, 30), (3, 6, 11))


def version_warning(version: str) -> str | None:
    """Return the warning for this release of etcd, or None."""
    found = _parsed(version)
    if found is None:
        return None
    fixed = next((f for f in FIXED_VERSIONS if f[:2] == found[:2]), None)
    if fixed is None and found > FIXED_VERSIONS[0]:
        return None
    if fixed is not None and found >= fixed:
        return None
    target = ".".join(map(str, fixed or FIXED_VERSIONS[-1]))
    losses = "may lose an acknowledged write when a node crashes and " if may_lose_writes(version) else ""
    return (
        f"etcd {version} {losses}does not confine users to their prefix (CVE-2026-33413, -33343, -44283); "
        f"upgrade to {target} or newer"
    )


def may_lose_writes(version: str) -> bool:
    """Whether this release of etcd may lose an acknowledged write in a crash."""
    found = _parsed(version)
    return found is not None and (3, 5, 0) <= found < (3, 5, 5)


def _parsed(version: str) -> tuple[int, int, int] | None:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2]), int(match[3])) if match is not None else None


DEFAULT_QUOTA_BYTES = 2 << 30

_NUM_READS = 5
_ERRORS_FIELD = 8  # number of `errors` in StatusResponse, which the stubs of `pyetcd` lack


@dataclass(frozen=True)
class Clock:
    """A server's clock against ours."""

    ahead_s: float  # how far it is ahead; the middle of the interval that contains the difference
    uncertain_s: float  # half of that interval


@dataclass(frozen=True)
class EtcdCondition:
    """The condition of one server; None: unknown.

    Every user may read release, size and alarms through gRPC. The quota, the last compaction and the clock come from HTTP pages
    that etcd serves on the same port. They stay unknown where a proxy passes gRPC only.
    """

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


def size_of(caller: Caller) -> int:
    """Return the bytes of the database's file of the server in use. Raises `EtcdError` if it gives no answer."""
    return int(caller.call("read the size", "Maintenance", "Status", etcdrpc.StatusRequest()).dbSize)


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


MANY_REVISIONS = 200_000
"""Number of writes after which to warn about an etcd that was never compacted: it then holds some hundred MiB, and grows."""

NEARLY_FULL, FULL = 0.8, 0.95
"""Fractions of its quota at which etcd's database is a warning, and an error."""

SLOW_S = 0.1  # seconds for a read above which changes of a job's workers, which take a dozen requests, are felt


def judge(endpoint: str, condition: EtcdCondition, many_revisions: int = MANY_REVISIONS) -> list[Finding]:
    """Return the findings about one server and its answers to this user.

    Args:
        many_revisions: number of revisions, never compacted, that is a warning.
    """
    latency = f"{condition.latency_s * 1000:.0f} ms a read"
    if not condition.has_leader:
        answer = error("etcd", f"{endpoint} has no leader: it serves nothing", "bring a majority of its members back")
    elif condition.write_problem and not condition.alarms:
        move = "grant the user readwrite on --key-prefix, or give --user and --password-file (docs/reference/security.md)"
        answer = error("etcd", condition.write_problem, move)
    elif condition.latency_s > SLOW_S:
        answer = warning("etcd", f"{endpoint} takes {latency}", "give etcd a fast disk of its own and a near network")
    else:
        answer = ok("etcd", f"{endpoint} answers, {latency}")
    return [answer, *judge_server(endpoint, condition, many_revisions)]


def judge_server(endpoint: str, condition: EtcdCondition, many_revisions: int = MANY_REVISIONS) -> list[Finding]:
    """Return the findings about release, size and compaction, which are the same for all users; see `judge`."""
    [(host, _)] = parse_endpoints(endpoint)
    return [_release(host, condition.version), _size(condition), _compaction(condition, many_revisions)]


def _release(host: str, version: str) -> Finding:
    problem = version_warning(version)
    # Users of a loopback etcd are those of this machine, so their permissions matter less. A lost write matters everywhere.
    if problem is None or (is_loopback(host) and not may_lose_writes(version)):
        return ok("etcd release", version)
    text, _, move = problem.partition("; ")
    return warning("etcd release", text, move)


def _size(condition: EtcdCondition) -> Finding:
    check = "etcd size"
    quota = condition.quota_bytes or DEFAULT_QUOTA_BYTES
    part = condition.size_bytes / quota
    text = f"{_mib(condition.size_bytes)} of {_mib(quota)}" + ("" if condition.quota_bytes else " (the default quota)")
    if "CORRUPT" in condition.alarms:
        return error(
            check, f"{text}; alarm CORRUPT: members hold different data", "restore etcd from a snapshot of a good member"
        )
    free = condition.size_bytes - (condition.used_bytes if condition.used_bytes is not None else condition.size_bytes)
    room = "etcdctl defrag" if free > condition.size_bytes // 2 else "etcdctl compact REVISION, etcdctl defrag"
    room += ", then etcdctl alarm disarm" if condition.alarms else ""
    move = f"{room}; then --auto-compaction-retention=1h, or a larger --quota-backend-bytes, in etcd's command line"
    if condition.alarms:
        return error(check, f"{text}; alarm {', '.join(condition.alarms)}: it accepts no writes", move)
    if part >= NEARLY_FULL:
        return (error if part >= FULL else warning)(check, f"{text}, {part:.0%}: at its quota it accepts no writes", move)
    return ok(check, text)


def _compaction(condition: EtcdCondition, many: int) -> Finding:
    check, compacted = "etcd compaction", condition.compacted_revision
    move = "start etcd with --auto-compaction-retention=1h"
    if condition.compacts_by_itself:
        return ok(check, f"automatic; at revision {condition.revision}")
    if compacted:
        return ok(check, f"last at revision {compacted} of {condition.revision}")
    if compacted is None:
        return ok(check, f"unknown, as its metrics are not served; at revision {condition.revision}")
    if condition.revision >= many:
        return warning(check, f"none of {condition.revision} revisions was ever removed, so its database grows", move)
    off = " and switched off" if condition.compacts_by_itself is False else ""
    return ok(check, f"none yet{off}, at revision {condition.revision}; a shared etcd needs --auto-compaction-retention=1h")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB" if num_bytes < 100 << 20 else f"{num_bytes >> 20} MiB"


logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0  # seconds for each of a dozen requests; a server that is slower has troubles of its own


def warn_of_troubles(config: EtcdConfig, warn: Callable[[str], None]) -> threading.Thread:
    """Inspect each endpoint in a thread, and call `warn` at most once. Returns at once; an error here fails nothing."""

    def run() -> None:
        try:
            text = troubles_of(config)
        except Exception:  # an unforeseen answer must not disturb the job
            logger.debug("etcd at %s could not be inspected", config.endpoints, exc_info=True)
            return
        if text:
            warn(text)

    thread = threading.Thread(target=run, name="dlrover-etcd-check", daemon=True)
    thread.start()
    return thread


def troubles_of(config: EtcdConfig) -> str:
    """Return a line for each trouble of the servers, with the next move; empty if there is none, or none can be found."""
    found: dict[str, tuple[str, Finding]] = {}
    for one in config.of_each_endpoint():
        endpoint = one.endpoints.removeprefix("https://")
        try:
            condition = inspect(replace(one, timeout_s=min(_TIMEOUT_S, config.timeout_s)), prefix=None)
        except EtcdError as error:  # other code finds out that it does not answer; the user may not be allowed to ask
            logger.debug("etcd at %s could not be inspected: %s", endpoint, error)
            continue
        for finding in judge_server(endpoint, condition):
            if finding.verdict != "ok":
                found.setdefault(finding.check, (endpoint, finding))  # members of a cluster mostly have the same troubles
    return "\n".join(f"{each.check} ({endpoint}): {each.text} -> {each.next_move}" for endpoint, each in found.values())


T = TypeVar("T")


def when_there_is_room(write: Callable[[], T], timeout_s: float) -> T:
    """Return the result of `write`, which is repeated while etcd is full. The client paces and reports it.

    Args:
        write: must leave nothing behind where it raises `EtcdFullError`.

    Raises:
        EtcdFullError: etcd is still full after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return write()
        except EtcdFullError:
            if time.monotonic() > deadline:
                raise
