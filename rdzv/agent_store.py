"""The stores that an elastic agent gets, which answer what nobody else would answer.

TorchElastic's agent exchanges ranks and meets at its end in the store of *its* round. In a live job the set
of nodes changes under a running agent: a late agent would wait 300 s for ranks that running agents do not
write again, and a leaving one for agents that have gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_dlrover.rdzv.client import EtcdClient
from lightning_dlrover.rdzv.store import EtcdStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

__all__ = ["LiveAgentStore", "RoundStore"]

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_EXIT_BARRIER = "torchelastic/agent/terminal_state"
_NUM_MEMBERS = _EXIT_BARRIER + "/num_members"
_LAST_MEMBER = _EXIT_BARRIER + "/last_member"


class RoundStore(EtcdStore):
    """The store of a normal round: etcd, except for an exit barrier that cannot be reached any more."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        on_local_world_size: Callable[[int], None],
        wait_at_exit: Callable[[Callable[[int], bool], float], None],
    ) -> None:
        """
        Args:
            on_local_world_size: told how many workers the agent starts, which no handler is told otherwise.
            wait_at_exit: called with the barrier, which says for a number of living agents whether they have
                all arrived, and with a timeout in seconds; returns when they have, or when waiting has no
                point.
        """
        super().__init__(client, prefix)
        self._on_local_world_size = on_local_world_size
        self._wait_at_exit = wait_at_exit

    def set(self, key: str, value: str | bytes) -> None:
        if key.startswith(_ROLE_INFO):
            self._on_local_world_size(_local_world_size(value))
        super().set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if all(key.startswith(_EXIT_BARRIER) for key in keys):
            self._wait_at_exit(self._all_arrived, (timeout or self.timeout).total_seconds())
        else:
            super().wait(keys, timeout)

    def clone(self) -> EtcdStore:
        return EtcdStore(self._client, self.prefix, self.timeout)

    def _all_arrived(self, num_living_agents: int) -> bool:
        # Counted, not awaited: the agent that should say "last member" may have died before it came here.
        return self.check([_LAST_MEMBER]) or self.add(_NUM_MEMBERS, 0) >= num_living_agents


class LiveAgentStore(Store):
    """Answers everything the agent asks by itself, at once; ranks are true at joining time.

    The workers find each other through etcd and agree on ranks of their own, so nothing depends on these.
    """

    def __init__(self, num_workers_before: int, on_local_world_size: Callable[[int], None], timeout_s: float = 300.0) -> None:
        """
        Args:
            num_workers_before: workers of the agents that are alive already; the first global rank of ours.
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
        pass  # the exit barrier: the others of the job may go on for hours

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


def _local_world_size(role_info: str | bytes) -> int:
    return int(json.loads(role_info)["local_world_size"])
