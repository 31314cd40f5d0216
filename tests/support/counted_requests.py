"""Count the requests of a client to etcd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dlrover.rdzv.etcd.client import EtcdClient


@contextmanager
def counted(client: EtcdClient) -> Iterator[list[str]]:
    """Yield a list that grows by the method of each request to etcd."""
    methods: list[str] = []
    call = client.caller.call

    def noted(action: str, service: str, method: str, *arguments: Any, **options: Any) -> Any:
        methods.append(method)
        return call(action, service, method, *arguments, **options)

    client.caller.call = noted  # type: ignore[method-assign]
    try:
        yield methods
    finally:
        client.caller.call = call  # type: ignore[method-assign]
