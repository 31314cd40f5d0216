"""What a controller asks of a place where nodes run.

One class per kind of place carries it out: in `targets.py`, `slurm.py` and `kubernetes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["ANY_SIZE", "App", "AppStatus", "NodeSize", "NodeSpec", "NotTakenError", "Target", "TargetError"]


AppStatus = Literal["pending", "running", "succeeded", "failed", "cancelled", "gone"]


@dataclass(frozen=True)
class NodeSize:
    """What one node may use; 0: as its scheduler has it."""

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
    """What every node of a job runs."""

    script: str
    script_args: tuple[str, ...]
    endpoint: str
    run_id: str
    prefix: str
    min_workers: int
    max_workers: int
    max_restarts: int = 0
    access: Mapping[str, str] = field(default_factory=dict)  # user and paths of files for etcd
    environment: Mapping[str, str] = field(default_factory=dict)  # of the nodes, beside their own
    timeouts: Mapping[str, float] = field(default_factory=dict)  # seconds, by the keys of --rdzv-conf; others have defaults


class TargetError(RuntimeError):
    """A place's scheduler could not be asked, or its answer makes no sense. It may have done what it was asked to do."""


class NotTakenError(TargetError):
    """A scheduler has certainly not taken a node on."""


@dataclass(frozen=True)
class App:
    """One node as its scheduler shows it."""

    node: str
    handle: str
    is_living: bool


class Target(Protocol):
    """A place that runs one-node apps."""

    name: str
    outlives_controller: bool  # nodes live on when the process that has started them is gone

    def open(self, mark: str) -> None:
        """Say whose nodes are meant: `mark` is in the name of each, and in no other job's. Called before anything else."""

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        """Start a node of that size and return its app's handle.

        Raises:
            NotTakenError: it was refused.
            TargetError: it may have been taken on: `apps` will show it then.
        """

    def owns(self, node: str, handle: str) -> bool:
        """Whether `handle`, read from a record, has the form that `start` gives this job's node. Called after `open`."""

    def apps(self) -> Sequence[App]:
        """What the scheduler knows of the job's nodes, those of earlier controllers too; the ended ones it may have forgotten.

        Raises:
            TargetError: it does not say.
        """

    def status(self, handle: str) -> AppStatus:
        """The newest that is known, as long as the scheduler cannot be asked."""

    def cancel(self, handles: Iterable[str]) -> None:
        """End apps, all at once. They may take a while longer where `outlives_controller`; `status` tells.

        Raises:
            TargetError: the scheduler could not be told.
        """

    def ran_out_of_memory(self, handle: str) -> bool:
        """Whether a node that has failed was killed because it wanted more memory than it has."""

    def wants_back(self, handle: str) -> bool:
        """Whether the scheduler is going to end this node soon, and has said so."""

    def logs(self, handle: str) -> list[Path]:
        """Files that hold the node's output, those of errors last."""

    def close(self) -> None:
        """Give back what this process holds; end everything that was started, unless it outlives the controller."""
