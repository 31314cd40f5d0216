"""Errors between a process and etcd."""

from __future__ import annotations

__all__ = [
    "EtcdError",
    "EtcdFullError",
    "EtcdUnavailableError",
    "LeaseLostError",
    "PermissionDeniedError",
    "UnreadablePasswordError",
]


class EtcdError(RuntimeError):
    """etcd refused a request, or cannot be used as configured."""


class PermissionDeniedError(EtcdError):
    """etcd refuses this to the authenticated user."""


class EtcdUnavailableError(EtcdError):
    """No endpoint responded within the timeout. A write may or may not have been applied."""


class EtcdFullError(EtcdUnavailableError):
    """etcd refuses writes because its database has reached its quota.

    It still serves reads and single deletions, and refreshes, revokes and expires leases. It refuses new leases and, before
    3.4.20 and 3.5.7, every transaction, also one that only reads or deletes.
    """


class LeaseLostError(EtcdError):
    """The lease of a key to be written no longer exists in etcd."""


class UnreadablePasswordError(EtcdUnavailableError):
    """The password file cannot be read at this moment."""
