"""Decide what of an etcd server's condition is trouble, and name the next move."""

from __future__ import annotations

from lightning_dlrover.finding import Finding, error, ok, warning
from lightning_dlrover.rdzv.etcd.config import is_loopback, parse_endpoints
from lightning_dlrover.rdzv.etcd.inspection import DEFAULT_QUOTA_BYTES, EtcdCondition
from lightning_dlrover.rdzv.etcd.release import may_lose_writes, version_warning

__all__ = ["MANY_REVISIONS", "judge", "judge_server"]

MANY_REVISIONS = 200_000
"""Number of writes after which to warn about an etcd that was never compacted: it then holds some hundred MiB, and grows."""

NEARLY_FULL, FULL = 0.8, 0.95
"""Fractions of its quota at which etcd's database is a warning, and an error."""

SLOW_S = 0.1
"""Seconds for a read above which changes of a job's workers, which take a dozen requests, are felt."""


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
    """Return the findings about release, size and compaction, which are alike for all users; see `judge`."""
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
