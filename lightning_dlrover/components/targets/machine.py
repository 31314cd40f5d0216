"""Assign each node its share of this machine (cores, memory, GPUs) and have the system enforce it.

Where the system does not allow memory limits, a warning is logged once and nodes run without a limit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_dlrover import variables
from lightning_dlrover.components.targets.machine.allocation import Allocation, NothingFreeError
from lightning_dlrover.components.targets.machine.control_groups import MemoryGroups, NoMemoryGroupsError
from lightning_dlrover.components.targets.machine.devices import DEVICES_VARIABLE, visible_devices
from lightning_dlrover.components.targets.target import NodeSize, NotTakenError, thread_variables

__all__ = ["Claims", "MachineShares"]

log = logging.getLogger(__name__)


class Claims(Protocol):
    """The GPUs that this job may use of those that it shares with other jobs."""

    def take(self, gpus: Sequence[str], number: int, /) -> list[str]:
        """Return the first ones that no other job has, `number` at most, and keep them from the others."""
        ...

    def give_back(self, gpus: Collection[str], /) -> None:
        """Let other jobs have them."""
        ...

    def holders(self, gpus: Sequence[str], /) -> str:
        """Name the jobs that have these GPUs."""
        ...


class MachineShares:
    """Give nodes cores, memory and GPUs, and take them back.

    Args:
        gpus: GPUs that each node owns exclusively; 0: all nodes share every GPU visible to this process.
        workers_per_node: workers that share a node's cores.
        claims: None: no other job uses the GPUs that this process sees.
    """

    def __init__(self, gpus: int, workers_per_node: int = 1, claims: Claims | None = None) -> None:
        self._gpus = gpus
        self._claims = claims
        self._workers_per_node = workers_per_node
        self._allocation = Allocation(sorted(os.sched_getaffinity(0)), visible_devices(os.environ) if gpus else ())
        self._groups: MemoryGroups | None = None
        self._limits_mb: dict[str, int] = {}  # MiB, of nodes with a control group
        self._ended: set[str] = set()  # nodes that still hold a part of their share
        self._told: set[str] = set()  # warnings already logged

    @property
    def awaits(self) -> bool:
        """Whether nodes that have ended still hold a part of their share."""
        return bool(self._ended)

    def take(self, node: str, size: NodeSize) -> tuple[tuple[int, ...], Mapping[str, str]]:
        """Return cores and environment variables for a node limited to a share of `size`. No cores: it may use any.

        Raises:
            NotTakenError: too few GPUs are free; the node gets nothing.
        """
        try:
            share = self._allocation.take(node, size.cpus, self._gpus, self._claimed(node))
        except NothingFreeError as error:
            raise NotTakenError(str(error)) from error
        try:
            group = self._memory_group(node, size.memory_mb)
        except OSError as error:
            self._give_back(node)
            raise NotTakenError(f"{node} cannot be given a control group with {size.memory_mb} MiB: {error}") from error
        if 0 < len(share.cores) < size.cpus:
            self._tell_once("size", f"nodes ask for {size.cpus} cores, and get the {len(share.cores)} that there are")
        if shared := self._allocation.shared_cores(node):
            cores = f"core{'s' if len(shared) > 1 else ''} {', '.join(map(str, shared))}"
            self._tell_once("cores", f"too few cores are free for {node}: it shares {cores} with other nodes until some are")
        # More threads than cores would slow each other down. Nodes without cores of their own compete, so each gets one thread.
        exported = thread_variables(len(share.cores), self._workers_per_node)
        if share.devices:
            exported[DEVICES_VARIABLE] = ",".join(share.devices)
        if group is not None:
            exported[variables.MEMORY_GROUP] = str(group)
        return share.cores, exported

    def end(self, node: str) -> None:
        """Record that a node has ended; some of its processes may still run."""
        self._ended.add(node)

    def settle(self, left: Collection[str]) -> Mapping[str, tuple[int, ...]]:
        """Take back the shares of ended nodes, except those in `left`, which still have running processes.

        Returns:
            New cores of each node that shared some and now moves to others, by node.
        """
        for node in self._ended - {*left}:
            if self._groups is None or self._groups.remove(node):
                self._give_back(node)
                self._limits_mb.pop(node, None)
                self._ended.discard(node)
        return {node: share.cores for node, share in self._allocation.spread().items()}

    def why_killed(self, node: str) -> str:
        """Return the reason why the kernel killed a process of a node; empty if it did not."""
        if self._groups is None or not self._groups.num_killed(node):
            return ""
        return f"out of memory (limit {self._limits_mb[node]} MiB)"

    def close(self) -> None:
        """Remove the control groups after all nodes have ended."""
        if self._groups is not None:
            self._groups.close()

    def _claimed(self, node: str) -> list[str] | None:
        """Return GPUs for a node that no other job has; None: any.

        Raises:
            NothingFreeError: too few.
        """
        if self._claims is None or not self._gpus:
            return None
        free = self._allocation.free_devices
        claimed = self._claims.take(free, self._gpus)
        if len(claimed) < self._gpus <= len(free):
            others = self._claims.holders([gpu for gpu in free if gpu not in claimed])
            self._claims.give_back(claimed)
            raise NothingFreeError(f"{node} needs {self._gpus} GPUs, and {len(claimed)} are free on this machine: {others}")
        return claimed

    def _give_back(self, node: str) -> None:
        share = self._allocation.give_back(node)
        if self._claims is not None:
            self._claims.give_back(share.devices)

    def _memory_group(self, node: str, limit_mb: int) -> Path | None:
        """
        Raises:
            OSError: the kernel refuses another control group.
        """
        if not limit_mb or "memory" in self._told:
            return None
        try:
            self._groups = self._groups or MemoryGroups()
        except NoMemoryGroupsError as error:
            self._tell_once("memory", f"nodes run without a limit of memory: {error}")
            return None
        self._limits_mb[node] = limit_mb
        return self._groups.create(node, limit_mb << 20)

    def _tell_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", text)
