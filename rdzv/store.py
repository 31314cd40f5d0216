"""c10d's key-value store on etcd, usable from Python and from the C++ of gloo and NCCL.

Decides nothing about the job: whoever makes the store gives it a prefix of its own and deletes that prefix.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistNetworkError, DistStoreError

from lightning_dlrover.rdzv.client import (
    EtcdClient,
    EtcdUnavailableError,
    KeyValue,
    Mirror,
    Op,
    Put,
    modified,
)

if TYPE_CHECKING:  # the same class; torch.distributed does not re-export it for type checkers
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

__all__ = ["MAX_VALUE_BYTES", "EtcdStore"]

MAX_VALUE_BYTES = 1 << 20  # etcd refuses requests above 1.5 MiB
_MAX_OPS_PER_TXN = 100  # etcd refuses more than 128
_WAIT_SLICE_S = 3600.0

# pybind11 calls our methods only while the *Python* object lives, but C++ (a PrefixStore, a process group)
# keeps just its own half alive: without this reference `PrefixStore("x", EtcdStore(...))` would lose every
# override.
_open_stores: set[EtcdStore] = set()


class EtcdStore(Store):
    """A `torch.distributed.Store` whose keys lie under one prefix in etcd.

    Semantics are TCPStore's: `get` and `wait` block until the keys exist or the timeout is over
    (`DistStoreError`), an etcd that cannot be reached raises `DistNetworkError`. Closing does not delete the
    keys.
    """

    def __init__(self, client: EtcdClient, prefix: str, timeout: timedelta = timedelta(seconds=300)) -> None:
        """
        Args:
            client: shared, not closed by this store.
            prefix: folder of keys for this store alone, such as ``/dlrover/run/store/7/``.
        """
        super().__init__()
        self._client = client
        self.prefix = prefix.rstrip("/") + "/"
        self._timeout = timeout
        # Names this store's latest addition, so that one whose answer got lost is recognised and not made
        # twice.
        self._marker_key = f"{self.prefix}op/{uuid.uuid4().hex}"
        self._operations = itertools.count(1)
        self._read_modify_write = threading.Lock()
        _open_stores.add(self)

    def close(self) -> None:
        """Let the object be collected; needs no call at the end of a process."""
        _open_stores.discard(self)

    # -- plain reads and writes

    def set(self, key: str, value: str | bytes) -> None:
        with _torch_errors():
            self._client.put(self._path(key), self._payload(key, value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:
        with _torch_errors():
            return all(self._client.get(self._path(key)) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for(keys, timeout or self._timeout)

    def delete_key(self, key: str) -> bool:
        with _torch_errors():
            return self._client.delete(self._path(key))

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        with _torch_errors():
            _, found = self._client.get_prefix(self._path(""))
        return [kv.key.removeprefix(self._path("")) for kv in found]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._wait_for(keys, self._timeout)
        return [found[self._path(key)].value for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values")
        puts: list[Op] = [Put(self._path(key), self._payload(key, value)) for key, value in zip(keys, values, strict=True)]
        with _torch_errors():
            for chunk in _chunks_of(puts, MAX_VALUE_BYTES):
                self._client.txn([], chunk)

    # -- read, modify, write

    def add(self, key: str, value: int) -> int:
        """The sum after adding; a missing key counts as 0."""

        def increase(current: bytes | None) -> bytes:
            try:
                return str(int(current or b"0") + value).encode()
            except ValueError as error:
                raise DistStoreError(f"{self._path(key)!r} holds {current!r:.80}, which is no number to add to") from error

        return int(self._modify(key, increase) or b"0")

    def append(self, key: str, value: str | bytes) -> None:
        self._modify(key, lambda current: (current or b"") + _as_bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """The value afterwards; `expected_value` itself when the key is missing and something was
        expected."""
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)

        def exchange(current: bytes | None) -> bytes | None:
            return desired if (b"" if current is None else current) == expected else None

        after = self._modify(key, exchange)
        return expected if after is None else after

    def _modify(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """The value after an atomic change; `change` returns None to leave it as it is."""
        path = self._path(key)
        with self._read_modify_write, _torch_errors():
            while True:
                current = self._client.get(path)
                value = change(current.value if current else None)
                if value is None:
                    return current.value if current else None
                payload = self._payload(key, value)
                marker = Put(self._marker_key, str(next(self._operations)).encode())
                unchanged = modified(path) == (current.mod_revision if current else 0)
                if self._client.txn([unchanged], [marker, Put(path, payload)]).succeeded:
                    return payload

    # -- the rest of the interface

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> EtcdStore:
        return type(self)(self._client, self.prefix, self._timeout)

    def has_extended_api(self) -> bool:
        return True

    # C++ looks for overrides of these two under its own names.
    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    # -- helpers

    def _path(self, key: str) -> str:
        return f"{self.prefix}key/{key}"

    def _payload(self, key: str, value: str | bytes) -> bytes:
        payload = _as_bytes(value)
        if len(payload) > MAX_VALUE_BYTES:
            raise ValueError(
                f"the value of {key!r} has {len(payload)} bytes, a store on etcd takes {MAX_VALUE_BYTES}. "
                "Send large data through a collective, or use a TCPStore for it"
            )
        return payload

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> dict[str, KeyValue]:
        """All the keys, once they exist."""
        paths = [self._path(key) for key in keys]
        with _torch_errors():
            found = {path: kv for path in paths if (kv := self._client.get(path)) is not None}
            if len(found) == len(set(paths)):
                return found

            def complete(present: dict[str, KeyValue]) -> dict[str, KeyValue] | None:
                return {p: present[p] for p in paths} if all(p in present for p in paths) else None

            timeout_s = timeout.total_seconds() if timeout else _WAIT_SLICE_S
            shared_start = os.path.commonprefix(paths)  # noqa: RUF071 - by character is what etcd does
            with Mirror(self._client, shared_start) as mirror:
                try:
                    return mirror.wait_for(complete, timeout_s)
                except TimeoutError as error:
                    missing = [path for path in paths if path not in mirror.snapshot()]
                    raise DistStoreError(
                        f"wait timeout after {timeout_s:g} s for {len(missing)} of {len(paths)} keys: "
                        f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; "
                        "the process that should have written them is late or dead"
                    ) from error


class _torch_errors:
    """Turns an unreachable etcd into the exception that callers of a c10d store expect."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, EtcdUnavailableError):
            raise DistNetworkError(str(error)) from error


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _chunks_of(puts: Sequence[Op], max_bytes: int) -> list[list[Op]]:
    """The puts in order, in pieces that fit into one transaction each."""
    chunks: list[list[Op]] = [[]]
    size = 0
    for put in puts:
        assert isinstance(put, Put)
        if len(chunks[-1]) == _MAX_OPS_PER_TXN or (chunks[-1] and size + len(put.value) > max_bytes):
            chunks.append([])
            size = 0
        chunks[-1].append(put)
        size += len(put.value)
    return [chunk for chunk in chunks if chunk]
