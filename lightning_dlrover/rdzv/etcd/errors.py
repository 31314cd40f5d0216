"""What can go wrong between a process and etcd."""

from __future__ import annotations

__all__ = ["EtcdError", "EtcdFullError", "EtcdUnavailableError", "LeaseLostError", "UnreadablePasswordError"]


class EtcdError(RuntimeError):
    """etcd refused a request, or cannot be used the way it is configured."""


class EtcdUnavailableError(EtcdError):
    """No answer from any endpoint within the timeout. Whether a write was carried out is unknown."""


class EtcdFullError(EtcdUnavailableError):
    """Etcd takes no writes, as its database has reached its quota. It still answers reads and refreshes leases."""


class LeaseLostError(EtcdError):
    """A key was to be bound to a lease that etcd no longer knows."""


class UnreadablePasswordError(EtcdUnavailableError):
    """The password's file cannot be read at this moment."""
