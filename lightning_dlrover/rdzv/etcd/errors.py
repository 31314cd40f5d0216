"""Errors between a process and etcd."""

from __future__ import annotations

__all__ = ["EtcdError", "EtcdFullError", "EtcdUnavailableError", "LeaseLostError", "UnreadablePasswordError"]


class EtcdError(RuntimeError):
    """etcd refused a request, or cannot be used as configured."""


class EtcdUnavailableError(EtcdError):
    """No endpoint responded within the timeout. A write may or may not have been applied."""


class EtcdFullError(EtcdUnavailableError):
    """Etcd refuses writes because its database has reached its quota. It still serves reads and refreshes leases."""


class LeaseLostError(EtcdError):
    """The lease of a key to be written no longer exists in etcd."""


class UnreadablePasswordError(EtcdUnavailableError):
    """The password file cannot be read at this moment."""
