"""Decide when elastic agents form a round, and of whom: TorchElastic's contract as pure functions.

An agent that waits for a round says in its record which round it has left (`round_number`), so a round is
over exactly when each of its members is gone or waits for a later one. Clocks and etcd stay in `handler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dlrover.rdzv.records import AgentRecord, AgentRound, JobRecord

__all__ = [
    "AgentView",
    "Limits",
    "SeenAgent",
    "candidates",
    "members_of_next_round",
    "num_waiting",
    "participants",
    "waits",
]


@dataclass(frozen=True)
class Limits:
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class SeenAgent:
    record: AgentRecord
    since_revision: int  # when it first registered; agents that came earlier are admitted earlier


@dataclass(frozen=True)
class AgentView:
    """What one agent knows about the others and the job, all of the same revision."""

    agents: Mapping[str, SeenAgent]
    round: AgentRound | None
    round_revision: int  # when the round was written; 0: there is none
    job: JobRecord | None

    @property
    def round_number(self) -> int:
        return self.round.number if self.round is not None else 0


def participants(view: AgentView) -> list[str]:
    """Members of the current round that are alive and have not left it, in rank order."""
    if view.round is None:
        return []
    return [agent for agent in view.round.agents if agent in view.agents and not _has_left(view, agent)]


def _has_left(view: AgentView, agent_id: str) -> bool:
    record = view.agents[agent_id].record
    # A member that still waits for an *earlier* round to end has not seen yet that it was admitted.
    return record.state == "waiting" and record.round_number >= view.round_number


def candidates(view: AgentView) -> list[str]:
    """Living agents that wait for the next round, those of the current round first, in rank order, then by
    arrival."""
    inside = set(participants(view))
    waiting = [a for a, seen in view.agents.items() if seen.record.state == "waiting" and a not in inside]
    ranks = {agent: rank for rank, agent in enumerate(view.round.agents)} if view.round is not None else {}
    return sorted(waiting, key=lambda a: (ranks.get(a, len(ranks)), view.agents[a].since_revision, a))


def members_of_next_round(view: AgentView, limits: Limits, last_call_is_over: bool) -> list[str]:
    """Agents of the next round in rank order; empty while it cannot be formed."""
    if participants(view) or (view.round is not None and view.round.state == "closed"):
        return []
    waiting = candidates(view)
    if len(waiting) < limits.min_nodes:
        return []
    if len(waiting) < limits.max_nodes and not last_call_is_over:
        return []
    return waiting[: limits.max_nodes]


def num_waiting(view: AgentView, limits: Limits) -> int:
    """Agents that the running ones should restart for: none when the round is full."""
    running = participants(view)
    return len(candidates(view)) if len(running) < limits.max_nodes else 0


def waits(view: AgentView) -> dict[str, str]:
    """What each agent waits for, as half a sentence for people; empty for one whose workers run."""
    waiting, running = candidates(view), participants(view)
    found = {}
    for agent, seen in view.agents.items():
        record = seen.record
        if record.state == "running":
            found[agent] = ""
        elif view.round is not None and view.round.state == "closed":
            found[agent] = "the run is closed: about to end"
        elif running:
            found[agent] = f"waits for {len(running)} running node{'s' * (len(running) > 1)} to make room"
        elif (missing := record.min_nodes - len(waiting)) > 0:
            found[agent] = f"waits for {missing} more node{'s' * (missing > 1)} of at least {record.min_nodes}"
        else:
            found[agent] = "last call: waits whether more nodes come"
    return found
