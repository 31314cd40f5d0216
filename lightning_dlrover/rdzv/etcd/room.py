"""Wait for a full etcd to take writes again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lightning_dlrover.rdzv.etcd.errors import EtcdFullError

__all__ = ["when_there_is_room"]

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
