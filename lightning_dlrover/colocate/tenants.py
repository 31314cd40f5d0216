"""The jobs that have processes, and the actions of a dispatcher on them: data only.

    waiting -> starting -> asks -> running <-> paused -> ending -> done | failed | waiting (evicted)

| phase | the job | its memory |
| --- | --- | --- |
| starting | imports, builds its model; or a command that reports nothing, in its probe | a starting allowance |
| asks | stands before its first step, with an estimate of its peak | its present memory |
| running, paused | trains; its processes are stopped (SIGSTOP) | its charge: estimate and margin, or more if it has more |
| ending | got SIGTERM | its present memory |

Only `dispatcher.py` changes a phase, each by one action below. The job itself changes its reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Action", "Admit", "Charge", "End", "Pause", "Phase", "Resume", "Shrink", "Start", "Tenant", "Waiting"]

Phase: TypeAlias = Literal["starting", "asks", "running", "paused", "ending"]


@dataclass(frozen=True)
class Waiting:
    """A job that has no processes.

    Args:
        expected_bytes: peak with its margin, from earlier runs of its kind or from its owner; 0: unknown.
        not_before_s: moment before which it is not started again, on the dispatcher's clock.
    """

    name: str
    kind: str
    priority: int
    submitted_s: float
    expected_bytes: int = 0
    owner: str = ""
    not_before_s: float = 0.0


@dataclass(frozen=True)
class Tenant:
    """A job with processes.

    Args:
        charge_bytes: memory that is set aside for it.
        resident_bytes: memory that it has now.
        need_bytes: estimated peak with its margin; 0: unknown.
        paused_for_memory: it outgrew its charge, and waits for room.
        is_admitted: it may train, though it may be paused.
        num_processes: processes that train, for each of which it has memory.
        min_processes: fewest with which it can go on; 0: as many as it has.
        is_shrinking: it was asked to go on with fewer a moment ago, and has not done so yet.
        since_s: moment since which it has been in its phase.
        started_s: moment of its start on the dispatcher's clock.
    """

    name: str
    kind: str
    phase: Phase
    device: str
    priority: int
    submitted_s: float
    started_s: float
    charge_bytes: int
    resident_bytes: int = 0
    need_bytes: int = 0
    paused_for_memory: bool = False
    is_admitted: bool = False
    since_s: float = 0.0
    owner: str = ""
    num_processes: int = 1
    min_processes: int = 0
    is_shrinking: bool = False

    @property
    def can_shrink(self) -> bool:
        """Whether it is an elastic job that may be asked to go on with fewer processes."""
        return self.phase == "running" and 0 < self.min_processes < self.num_processes

    @property
    def held_bytes(self) -> int:
        """Memory of the device that no other job can have."""
        return max(self.charge_bytes, self.resident_bytes)


@dataclass(frozen=True)
class Start:
    """Start a job's command on a device."""

    job: str
    device: str
    charge_bytes: int


@dataclass(frozen=True)
class Admit:
    """Let a job that asks make its first step."""

    job: str
    charge_bytes: int


@dataclass(frozen=True)
class Charge:
    """Set aside another amount of memory for a job."""

    job: str
    charge_bytes: int


@dataclass(frozen=True)
class Pause:
    """Stop a job's processes for a while."""

    job: str
    reason: str
    for_memory: bool = False


@dataclass(frozen=True)
class Resume:
    """Continue a job's processes."""

    job: str


@dataclass(frozen=True)
class Shrink:
    """Ask an elastic job to go on with fewer processes."""

    job: str
    num_processes: int
    reason: str


@dataclass(frozen=True)
class End:
    """End a job's processes: it has failed, or goes back to the queue with a larger expectation."""

    job: str
    result: Literal["failed", "evicted"]
    reason: str


Action: TypeAlias = Start | Admit | Charge | Pause | Resume | Shrink | End
