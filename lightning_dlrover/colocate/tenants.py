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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

__all__ = [
    "Action",
    "Admit",
    "Charge",
    "End",
    "Holding",
    "Memory",
    "Pause",
    "Phase",
    "Resume",
    "Shrink",
    "Sizes",
    "Start",
    "Tenant",
    "Waiting",
    "Where",
    "after",
]

Phase: TypeAlias = Literal["starting", "asks", "running", "paused", "ending"]
Memory: TypeAlias = Literal["host", "gpu"]
"""A job on cores has host memory; one on a GPU has both."""
Sizes: TypeAlias = Mapping[Memory, int]
"""Bytes of each memory of a device."""
Where: TypeAlias = Literal["cpu", "gpu"]
"""A device's type: cores alone, or a GPU with cores for its jobs' own code."""


@dataclass(frozen=True)
class Waiting:
    """A job that has no processes.

    Args:
        expected: for each type of device that it may run on, its peaks there with their margins, from earlier runs of its kind
            or from its owner; absent or 0: unknown.
        not_before_s: moment before which it is not started again, on the dispatcher's clock.
    """

    name: str
    kind: str
    priority: int
    submitted_s: float
    expected: Mapping[Where, Sizes] = field(default_factory=lambda: {"cpu": {}})
    owner: str = ""
    not_before_s: float = 0.0


@dataclass(frozen=True)
class Holding:
    """A job's part of one memory.

    Args:
        charge_bytes: set aside for it.
        resident_bytes: what it has now.
        need_bytes: estimated peak with its margin; 0: unknown.
        is_guess: the need is a guess. The job gets all that is free for its first steps, and its peak then shows the need.
        is_short: it outgrew its charge, and is paused until there is room.
    """

    charge_bytes: int = 0
    resident_bytes: int = 0
    need_bytes: int = 0
    is_short: bool = False
    is_guess: bool = False

    @property
    def held_bytes(self) -> int:
        """Memory that no other job can have."""
        return max(self.charge_bytes, self.resident_bytes)


@dataclass(frozen=True)
class Tenant:
    """A job with processes.

    Args:
        holdings: its part of each memory of its device.
        is_admitted: it may train, though it may be paused.
        num_processes: processes that train, for each of which it has memory.
        min_processes: fewest with which it can go on; 0: as many as it has.
        is_shrinking: it was asked to go on with fewer a moment ago, and has not done so yet.
        steps_left: None where its end is unknown.
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
    holdings: Mapping[Memory, Holding]
    is_admitted: bool = False
    since_s: float = 0.0
    owner: str = ""
    num_processes: int = 1
    min_processes: int = 0
    is_shrinking: bool = False
    steps_left: int | None = None
    num_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether it is an elastic job that may be asked to go on with fewer processes."""
        return self.phase == "running" and 0 < self.min_processes < self.num_processes

    @property
    def paused_for_memory(self) -> bool:
        """Whether it outgrew a charge, and waits for room."""
        return any(holding.is_short for holding in self.holdings.values())


@dataclass(frozen=True)
class Start:
    """Start a job's command on a device."""

    job: str
    device: str
    charges: Sizes


@dataclass(frozen=True)
class Admit:
    """Let a job that asks make its first step."""

    job: str
    charges: Sizes


@dataclass(frozen=True)
class Charge:
    """Set aside another amount of memory for a job."""

    job: str
    memory: Memory
    charge_bytes: int


@dataclass(frozen=True)
class Pause:
    """Stop a job's processes for a while.

    Args:
        memory: the one whose charge it has outgrown; None: others run.
    """

    job: str
    reason: str
    memory: Memory | None = None


@dataclass(frozen=True)
class Resume:
    """Continue a job's processes. It is short of no memory any more."""

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


def after(tenant: Tenant, action: Admit | Charge | Pause | Resume | Shrink | End) -> Tenant:
    """Return a job as it is after an action on it, but for the time."""
    if isinstance(action, Admit):
        return replace(_charged(tenant, action.charges), phase="running", is_admitted=True)
    if isinstance(action, Charge):
        return _charged(tenant, {action.memory: action.charge_bytes})
    if isinstance(action, Pause):
        if action.memory is None:
            return replace(tenant, phase="paused")
        holding = tenant.holdings[action.memory]
        short = replace(holding, charge_bytes=holding.resident_bytes, is_short=True)
        return replace(tenant, phase="paused", holdings={**tenant.holdings, action.memory: short})
    if isinstance(action, Resume):
        enough = {memory: replace(holding, is_short=False) for memory, holding in tenant.holdings.items()}
        return replace(tenant, phase="running" if tenant.is_admitted else "starting", holdings=enough)
    if isinstance(action, Shrink):
        return replace(tenant, is_shrinking=True)
    return replace(tenant, phase="ending")


def _charged(tenant: Tenant, charges: Sizes) -> Tenant:
    changed = {memory: replace(tenant.holdings[memory], charge_bytes=charge) for memory, charge in charges.items()}
    return replace(tenant, holdings={**tenant.holdings, **changed})
