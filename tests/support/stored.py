"""Read records of etcd that a test expects to exist."""

from __future__ import annotations

from typing import TypeVar

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import KeyValue
from lightning_dlrover.rdzv.job.records import decode

R = TypeVar("R")


def entry_at(client: EtcdClient, key: str) -> KeyValue:
    entry = client.get(key)
    assert entry is not None, f"{key} does not exist"
    return entry


def stored(client: EtcdClient, kind: type[R], key: str) -> R:
    return decode(kind, entry_at(client, key).value, key)
