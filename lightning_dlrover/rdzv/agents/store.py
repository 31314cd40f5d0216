"""c10d's key-value store on etcd, usable from Python and from the C++ of gloo and NCCL.

Decides nothing about the job. The creator of a store chooses a prefix for it and deletes that prefix later.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, Get, KeyValue, Op, Put, absent, created, modified

if TYPE_CHECKING:  # the same class; torch.distributed does not re-export it for type checkers
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

__all__ = ["MAX_VALUE_BYTES", "EtcdStore", "is_in_use"]

MAX_VALUE_BYTES = 1 << 20  # etcd refuses requests above 1.5 MiB
_MAX_OPS_PER_TXN = 100  # etcd refuses more than 128

# Names in etcd are text here, but keys are bytes. NUL, which begins an escape, and bytes that are not UTF-8 are escaped.
_ESCAPED_NUL, _ESCAPED_BYTE, _QUEUED = "\0\1", "\0\2", "\0\3"

# pybind11 calls our methods only while the *Python* object lives, but C++ (a PrefixStore, a process group) keeps only its own
# half alive. Without this reference `PrefixStore("x", EtcdStore(...))` would lose every override.
_open_stores: set[EtcdStore] = set()


def is_in_use(client: EtcdClient) -> bool:
    """Whether a store that is not closed uses this client."""
    return any(store._client is client for store in list(_open_stores))


class EtcdStore(Store):
    """A `torch.distributed.Store` that keeps its keys under one prefix in etcd.

    The semantics are those of TCPStore: `get` and `wait` block until the keys exist or the timeout is over (`DistStoreError`).
    An unreachable etcd raises `DistNetworkError`. Values have at most `MAX_VALUE_BYTES`. Closing does not delete the keys.

    torch's bridge from C++ to stores written in Python does not support `list_keys`, queues, or keys that are not UTF-8. For
    these, a `PrefixStore` around this store raises `NotImplementedError` or `UnicodeDecodeError`.
    """

    def __init__(self, client: EtcdClient, prefix: str, timeout: timedelta = timedelta(seconds=300)) -> None:
        """
        Args:
            client: shared client; this store does not close it.
            prefix: folder of keys for this store alone, such as ``/dlrover/run/store/7/``.
        """
        super().__init__()
        self._client = client
        self.prefix = prefix.rstrip("/") + "/"
        self.set_timeout(timeout)  # kept in C++, where a PrefixStore around this store also sets it
        self._writer = _Writer(client, self.prefix)
        _open_stores.add(self)

    def close(self) -> None:
        """Allow the object to be garbage-collected. Not needed at the end of a process."""
        _open_stores.discard(self)

    # -- plain reads and writes

    def set(self, key: str, value: str | bytes) -> None:
        with _torch_errors():
            self._client.put(self._path(key), self._payload(key, value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:
        with _torch_errors():
            found = self._get([self._path(key) for key in keys])
            return all(self._path(key) in found or self._queued(key) for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for(keys, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        with _torch_errors():
            return self._client.delete(self._path(key))

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        with _torch_errors():
            _, found = self._client.get_prefix(self._path(""))
        return [_unescaped(kv.key.removeprefix(self._path(""))) for kv in found if _QUEUED not in kv.key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._wait_for(keys, self.timeout)
        try:
            return [found[self._path(key)].value for key in keys]
        except KeyError:
            raise DistStoreError(f"{keys} were awaited to be read, and one of them is a queue; use queue_pop") from None

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise DistStoreError(f"multi_set got {len(keys)} keys and {len(values)} values")
        puts: list[Op] = [Put(self._path(key), self._payload(key, value)) for key, value in zip(keys, values, strict=True)]
        with _torch_errors():
            for chunk in _chunks_of(puts, MAX_VALUE_BYTES):
                self._client.txn([], chunk)

    # -- read, modify, write

    def add(self, key: str, value: int) -> int:
        """Add to a value and return the sum. A missing key counts as 0."""

        def increase(current: bytes | None) -> bytes:
            try:
                return str(int(current or b"0") + value).encode()
            except ValueError as error:
                raise DistStoreError(f"{self._path(key)!r} holds {current!r:.80}, which is no number to add to") from error

        return int(self._modify(key, increase) or b"0")

    def append(self, key: str, value: str | bytes) -> None:
        self._modify(key, lambda current: (current or b"") + _as_bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Return the value afterwards, or `expected_value` itself if it is not empty and the key is missing."""
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)

        def exchange(current: bytes | None) -> bytes | None:
            return desired if (b"" if current is None else current) == expected else None

        after = self._modify(key, exchange)
        return expected if after is None else after

    def _modify(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Change a value atomically and return the result; `change` returns None to keep the value."""
        path = self._path(key)
        with _torch_errors():
            while True:
                current = self._client.get(path)
                value = change(current.value if current else None)
                if value is None:
                    return current.value if current else None
                payload = self._payload(key, value)
                unchanged = modified(path) == (current.mod_revision if current else 0)
                if self._writer.write(unchanged, Put(path, payload)):
                    return payload

    # -- queues

    def queue_push(self, key: str, value: str | bytes) -> None:
        path = f"{self._path(key)}{_QUEUED}{uuid.uuid4().hex}"
        with _torch_errors():
            self._writer.write(absent(path), Put(path, self._payload(key, value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the oldest value.

        Raises:
            QueueEmptyError: `block` is False and the queue is empty.
            DistStoreError: the queue stayed empty until the timeout.
        """
        while True:
            with _torch_errors():
                for kv in self._queued(key):  # the oldest, unless other consumers are faster
                    if self._writer.write(created(kv.key) == kv.create_revision, Delete(kv.key)):
                        return kv.value
                if not block:
                    raise QueueEmptyError(f"queue {self._path(key)!r} is empty")
                self._wait_for([key], self.timeout)

    def queue_len(self, key: str) -> int:
        with _torch_errors():
            return len(self._queued(key))

    def _queued(self, key: str) -> list[KeyValue]:
        """Return the entries of a queue, oldest first."""
        _, found = self._client.get_prefix(self._path(key) + _QUEUED)
        return sorted(found, key=lambda kv: kv.create_revision)

    # -- the rest of the interface

    @property
    def timeout(self) -> timedelta:
        kept: timedelta = super().timeout  # type: ignore[misc]
        return kept

    def clone(self) -> EtcdStore:
        other = EtcdStore(self._client, self.prefix, self.timeout)
        other._writer = self._writer
        return other

    def has_extended_api(self) -> bool:
        return True

    # C++ looks for overrides of these two under its own names.
    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    # -- helpers

    def _path(self, key: str | bytes) -> str:
        return f"{self.prefix}key/{_escaped(_as_bytes(key))}"

    def _get(self, paths: Sequence[str]) -> dict[str, KeyValue]:
        """Return the entries of the names that exist."""
        found: dict[str, KeyValue] = {}
        for begin in range(0, len(paths), _MAX_OPS_PER_TXN):
            chunk = [Get(path) for path in paths[begin : begin + _MAX_OPS_PER_TXN]]
            found |= {kv.key: kv for kv in self._client.txn([], chunk).values}
        return found

    def _payload(self, key: str, value: str | bytes) -> bytes:
        payload = _as_bytes(value)
        if len(payload) > MAX_VALUE_BYTES:
            raise ValueError(
                f"the value of {key!r} has {len(payload)} bytes, a store on etcd accepts at most {MAX_VALUE_BYTES}. "
                "Send large data through a collective, or use a TCPStore for it"
            )
        return payload

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> Mapping[str, KeyValue]:
        """Wait until each of `keys` has a value or a queued entry, and return all their entries."""
        paths = [self._path(key) for key in keys]
        with _torch_errors():
            found = self._get(paths)
            if len(found) == len(set(paths)):
                return found

            def missing(present: Mapping[str, KeyValue]) -> list[str]:
                queues = {name.partition(_QUEUED)[0] for name in present if _QUEUED in name}
                return [path for path in paths if path not in present and path not in queues]

            shared_start = os.path.commonprefix(paths)  # noqa: RUF071 - by character is what etcd does
            with Mirror(self._client, shared_start) as mirror:
                try:
                    return mirror.wait_for(lambda present: None if missing(present) else present, timeout.total_seconds())
                except TimeoutError as error:
                    if not mirror.healthy:
                        endpoints = self._client.config.endpoints
                        raise DistNetworkError(
                            f"etcd at {endpoints} cannot be reached while waiting for {paths[:3]}"
                        ) from error
                    late = missing(mirror.snapshot())
                    raise DistStoreError(
                        f"wait timeout after {timeout.total_seconds():g} s for {len(late)} of {len(paths)} keys: "
                        f"{', '.join(late[:3])}{', ...' if len(late) > 3 else ''}; "
                        "the process that should have written them is late or dead"
                    ) from error


class _Writer:
    """Conditional writes of a store and its clones, each applied exactly once even if its response is lost.

    Every write also stores its number under one key of this writer. A retry recognises the write by that number.
    """

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self._client = client
        self._key = f"{prefix}op/{uuid.uuid4().hex}"
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # one write at a time: the next number would hide the last one

    def write(self, condition: Compare, op: Op) -> bool:
        """Write if the condition holds; return whether it did."""
        with self._lock:
            number = Put(self._key, str(next(self._numbers)).encode())
            return self._client.txn([condition], [number, op]).succeeded


class _torch_errors:
    """Convert errors of an unreachable etcd into the exception that callers of a c10d store expect."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, EtcdUnavailableError):
            raise DistNetworkError(str(error)) from error


def _as_bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogateescape")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a store takes str and bytes, not {type(value).__name__} ({value!r:.80})")


def _escaped(name: bytes) -> str:
    text = name.decode(errors="surrogateescape").replace("\0", _ESCAPED_NUL)
    return re.sub("[\udc80-\udcff]", lambda found: f"{_ESCAPED_BYTE}{ord(found[0]) - 0xDC00:02x}", text)


def _unescaped(name: str) -> str:
    text = re.sub(f"{_ESCAPED_BYTE}(..)", lambda found: chr(0xDC00 + int(found[1], 16)), name)
    return text.replace(_ESCAPED_NUL, "\0")


def _chunks_of(puts: Sequence[Op], max_bytes: int) -> list[list[Op]]:
    """Split the puts in order into pieces that fit into one transaction each."""
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
