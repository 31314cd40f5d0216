"""Warn about releases of etcd with known faults."""

from __future__ import annotations

import re

__all__ = ["FIXED_VERSIONS", "may_lose_writes", "version_warning"]

# Oldest release of each line in which a user's permissions on a prefix hold (CVE-2026-33413, -33343, -44283).
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
