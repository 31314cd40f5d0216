"""Interface between the controller and a place where nodes run.

One class per kind of place implements it: in `local.py`, `slurm.py` and `kubernetes.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["ANY_SIZE", "App", "AppStatus", "NodeSize", "NodeSpec", "NotTakenError", "Target", "TargetError", "thread_variables"]


AppStatus = Literal["pending", "running", "succeeded", "failed", "cancelled", "gone"]


@dataclass(frozen=True)
class NodeSize:
    """Resources of one node; 0 leaves a value to its scheduler."""

    cpus: int = 0
    memory_mb: int = 0  # MiB

    def is_at_least(self, other: NodeSize) -> bool:
        return self.cpus >= other.cpus and self.memory_mb >= other.memory_mb

    def __str__(self) -> str:
        parts = [f"{self.cpus} cores"] * bool(self.cpus) + [f"{self.memory_mb} MiB"] * bool(self.memory_mb)
        return ", ".join(parts) or "no size of its own"


ANY_SIZE = NodeSize()


@dataclass(frozen=True)
class NodeSpec:
    """Command and settings shared by every node of a job."""

    script: str  # `-m` if the first argument is the name of a module
    script_args: tuple[str, ...]
    endpoint: str
    run_id: str
    prefix: str
    min_workers: int
    max_workers: int
    max_restarts: int = 0
    workers_per_node: int = 1
    access: Mapping[str, str] = field(default_factory=dict)  # etcd user and paths of credential files
    environment: Mapping[str, str] = field(default_factory=dict)  # extra variables of the nodes
    # seconds, by the keys of --rdzv-conf; missing keys have defaults
    timeouts: Mapping[str, float] = field(default_factory=dict)


class TargetError(RuntimeError):
    """The place's scheduler could not be reached, or its answer is malformed. The request may have been carried out."""

    retry_after_s = 0.0  # seconds until the next request, as the scheduler demands


class NotTakenError(TargetError):
    """The scheduler has certainly not accepted a node."""


@dataclass(frozen=True)
class App:
    """One node as its scheduler lists it."""

    node: str
    handle: str
    is_living: bool


class Target(Protocol):
    """A place that runs one-node apps."""

    name: str
    outlives_controller: bool  # nodes survive the end of the process that started them

    def open(self, mark: str) -> None:
        """Select a job's nodes: `mark` is part of each one's name and of no other job's. Must be called first."""

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        """Start a node of that size and return its app's handle.

        Raises:
            NotTakenError: the scheduler refused it.
            TargetError: the scheduler may have accepted it; `apps` lists it in that case.
        """

    def owns(self, node: str, handle: str) -> bool:
        """Whether `handle`, read from a record, has the form that `start` gives this job's node. Call after `open`."""

    def apps(self) -> Sequence[App]:
        """Return the job's nodes that the scheduler lists, those of earlier controllers included. Ended ones may be missing.

        Raises:
            TargetError: the scheduler does not answer.
        """

    def status(self, handle: str) -> AppStatus:
        """Return the newest known state, also while the scheduler is unreachable."""

    def cancel(self, handles: Iterable[str]) -> None:
        """End all these apps. Where `outlives_controller`, the call may return before they have ended; see `status`.

        Raises:
            TargetError: the request did not reach the scheduler.
        """

    def ran_out_of_memory(self, handle: str) -> bool:
        """Whether a failed node was killed for exceeding its memory."""

    def wants_back(self, handle: str) -> bool:
        """Whether the scheduler has announced that it will end this node soon."""

    def logs(self, handle: str) -> list[Path]:
        """Return the files with the node's output, stderr last."""

    def close(self) -> None:
        """Release this process's resources. End everything it started, unless nodes outlive the controller."""


def thread_variables(num_cores: int, num_workers: int = 1) -> dict[str, str]:
    """Return the variables for the threads of a node's workers: as in this process, else one thread per core, or one.

    Args:
        num_cores: cores of the node, which its workers share.
    """
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores // num_workers)))}
