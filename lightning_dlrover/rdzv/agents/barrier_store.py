"""Stores for elastic agents that respond where an agent would otherwise wait in vain.

TorchElastic's agent exchanges ranks, and meets the others at its end, in the store of *its* round. In a live job the set of
nodes changes under a running agent. A late agent would wait 300 s for ranks that running agents do not write again, and a
leaving agent for agents that are gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from torch.distributed import DistStoreError

from lightning_dlrover.rdzv.agents.c10d_store import EtcdStore, _torch_errors
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import KeyValue

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

__all__ = ["LiveAgentStore", "RoundAgent", "RoundStore"]

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

    If no agent is left to assign ranks, provisional ones are used. Workers that start with them are restarted at once, in a
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
            DistStoreError: the round goes on, but a value is missing after the store's timeout.
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

    The workers find each other through etcd and agree on their own ranks, so nothing depends on these.
    """

    def __init__(self, num_workers_before: int, on_local_world_size: Callable[[int], None], timeout_s: float = 300.0) -> None:
        """
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
        pass  # no exit barrier: the job's other agents may go on for hours

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


def _local_world_size(role_info: str | bytes) -> int:
    return int(json.loads(role_info)["local_world_size"])
