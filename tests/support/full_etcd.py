"""Make an etcd refuse writes as if its database had reached its quota."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.stubs import etcdrpc


@contextmanager
def full(client: EtcdClient) -> Iterator[None]:
    """Raise etcd's own alarm: for its clients a full database has no other effect."""
    _alarm(client, etcdrpc.AlarmRequest.ACTIVATE)
    try:
        yield
    finally:
        _alarm(client, etcdrpc.AlarmRequest.DEACTIVATE)


def _alarm(client: EtcdClient, action: int) -> None:
    status = client.caller.call("read the status", "Maintenance", "Status", etcdrpc.StatusRequest())
    request = etcdrpc.AlarmRequest(action=action, memberID=status.header.member_id, alarm=etcdrpc.NOSPACE)
    client.caller.call("change an alarm", "Maintenance", "Alarm", request)
