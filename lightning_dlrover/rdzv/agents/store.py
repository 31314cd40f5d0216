"""c10d's key-value store on etcd, for agents, gloo and NCCL; and stores that keep an agent from waiting forever.

`EtcdStore` serves any run. `RoundStore` and `LiveAgentStore` answer requests for which an agent would wait forever.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import (
    Compare,
    Delete,
    EtcdUnavailableError,
    Get,
    KeyValue,
    Op,
    Put,
    absent,
    created,
    modified,
)

if TYPE_CHECKING:  # the same class; torch.distributed does not re-export it for type checkers
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store


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
    """A `torch.distributed.Store` that keeps its keys under one prefix in etcd, for Python and the C++ of gloo and NCCL.

    The semantics are those of TCPStore: `get` and `wait` block until the keys exist or the timeout is over (`DistStoreError`).
    An unreachable etcd raises `DistNetworkError`. Values have at most `MAX_VALUE_BYTES`. Closing does not delete the keys: the
    creator of a store chooses its prefix, and deletes it later.

    torch's bridge from C++ to stores written in Python does not support `list_keys`, queues, or keys that are not UTF-8. For
    these, a `PrefixStore` around this store raises `NotImplementedError` or `UnicodeDecodeError`.
    """

    def __init__(self, client: EtcdClient, prefix: str, timeout: timedelta = timedelta(seconds=300)) -> None:
        """Open a store under one prefix.

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
                raise DistStoreError(f"{self._path(key)!r} holds {current!r:.80}, not a number that can be added to") from error

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


_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_EXIT_BARRIER = "torchelastic/agent/terminal_state"
_NUM_MEMBERS = _EXIT_BARRIER + "/num_members"

_LOOK_S = 0.2  # seconds between an agent's checks for a broken round while it waits for ranks; local, without a request
_CHECK_S = 20.0


class RoundAgent(Protocol):
    """Interface of an agent for its round's store."""

    def starts(self, num_workers: int) -> None: ...

    def round_has_broken_up(self) -> bool:
        """Whether a member of this round is gone, so that a common operation may never complete."""

    def must_restart(self) -> None:
        """Note that the workers started next have provisional ranks."""

    def has_finished(self) -> None: ...

    def wait_for_others(self, timeout_s: float) -> None:
        """Wait until all living members have finished, or until waiting has no point."""


class RoundStore(EtcdStore):
    """The store of a normal round: etcd, except where an agent would wait for a dead one.

    If no remaining agent can assign ranks, provisional ones are used. Workers that start with them are restarted at once, in a
    round without the dead. The exit barrier uses the agents' records, and dead agents have none.
    """

    def __init__(self, client: EtcdClient, prefix: str, node_rank: int, num_nodes: int, agent: RoundAgent) -> None:
        super().__init__(client, prefix)
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._agent = agent
        self._num_workers = 1

    def set(self, key: str, value: str | bytes) -> None:
        if key.startswith(_ROLE_INFO):
            self._num_workers = _local_world_size(value)
            self._agent.starts(self._num_workers)
        super().set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if keys and all(key.startswith((_ROLE_INFO, _ASSIGNED_RANKS)) for key in keys):
            found = self._exchanged([self._path(key) for key in keys])
            return [found[self._path(key)].value if self._path(key) in found else self._made_up(key) for key in keys]
        return super().multi_get(keys)

    def add(self, key: str, value: int) -> int:
        if key != _NUM_MEMBERS:
            return super().add(key, value)
        with _torch_errors():
            self._agent.has_finished()
        return 0  # never the last one: waiting agents read the records instead

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if all(key.startswith(_EXIT_BARRIER) for key in keys):
            self._agent.wait_for_others((self.timeout if timeout is None else timeout).total_seconds())
        else:
            super().wait(keys, timeout)

    def clone(self) -> EtcdStore:
        return EtcdStore(self._client, self.prefix, self.timeout)

    def _exchanged(self, paths: list[str]) -> Mapping[str, KeyValue]:
        """Wait for the values of all paths and return them; only the present ones if the round has broken up.

        Raises:
            DistStoreError: the round continues, but a value is missing after the store's timeout.
        """
        awaited = set(paths)
        deadline = time.monotonic() + self.timeout.total_seconds()
        shared_start = os.path.commonprefix(paths)  # noqa: RUF071 - by character is what etcd does
        with _torch_errors():
            found: Mapping[str, KeyValue] = self._get(paths)
            if len(found) == len(awaited):
                return found
            with Mirror(self._client, shared_start, check_interval_s=_CHECK_S) as mirror:
                while time.monotonic() < deadline:
                    with contextlib.suppress(TimeoutError):
                        return mirror.wait_for(lambda now: now if awaited <= now.keys() else None, _LOOK_S)
                    if self._agent.round_has_broken_up():
                        found = self._get(paths)
                        if len(found) < len(awaited):
                            self._agent.must_restart()
                        return found
                missing = sorted(awaited - mirror.snapshot().keys())
        raise DistStoreError(
            f"wait timeout after {self.timeout.total_seconds():g} s for {len(missing)} of {len(awaited)} keys: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; their agents live, but are late to assign ranks"
        )

    def _made_up(self, key: str) -> bytes:
        if key.startswith(_ROLE_INFO):
            rank = int(key.removeprefix(_ROLE_INFO))
            return json.dumps({"role": "", "rank": rank, "local_world_size": self._num_workers}).encode()
        first, total = self._node_rank * self._num_workers, self._num_nodes * self._num_workers
        return json.dumps([first, total, first, total]).encode()


class LiveAgentStore(Store):
    """Respond to all of the agent's requests locally and at once; ranks are true at joining time.

    TorchElastic's agent exchanges ranks, and waits at its end, in the store of its own round. In a live job a late agent would
    wait 300 s for ranks that running agents do not write again, and a leaving agent for agents that are gone. The workers find
    each other through etcd and agree on their own ranks, so nothing depends on these.
    """

    def __init__(self, num_workers_before: int, on_local_world_size: Callable[[int], None], timeout_s: float = 300.0) -> None:
        """Create the store of an agent that joins a live job.

        Args:
            num_workers_before: number of workers of agents that are already alive, and first global rank of ours.
        """
        super().__init__()
        self._num_workers_before = num_workers_before
        self._on_local_world_size = on_local_world_size
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        if key.startswith(_ROLE_INFO):
            num_workers = _local_world_size(value)
            self._on_local_world_size(num_workers)
            group_rank = key.removeprefix(_ROLE_INFO)
            first, total = self._num_workers_before, self._num_workers_before + num_workers
            self._values[_ASSIGNED_RANKS + group_rank] = json.dumps([first, total, first, total]).encode()

    def get(self, key: str) -> bytes:
        if key not in self._values:
            raise KeyError(f"the agent asked its live store for {key!r}, which it never wrote")
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pass  # no exit barrier: the job's other agents may continue for hours

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


def _local_world_size(role_info: str | bytes) -> int:
    return int(json.loads(role_info)["local_world_size"])
