"""Decide when elastic agents form a round, and with which members: TorchElastic's contract as pure functions.

The record of a waiting agent names the round that it has left (`round_number`). So a round is over exactly when each of its
members is gone or waits for a later one. A round is written first, and confirmed once all its members have entered it. Before
that no member has started workers, so if one dies the round is void and another takes its place. Both decisions are level
triggered and use only the records: the next coordinator continues where the last one stopped. Clocks and etcd stay in
`agent_coordinator.py` and `handler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from lightning_dlrover.rdzv.job.records import AgentNotice, AgentRecord, AgentRound, JobRecord

__all__ = [
    "AgentView",
    "Limits",
    "SeenAgent",
    "candidates",
    "is_urgent",
    "members_of_next_round",
    "next_notice",
    "participants",
    "waits",
    "why_over",
]


@dataclass(frozen=True)
class Limits:
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class SeenAgent:
    record: AgentRecord
    since_revision: int  # revision of its first registration; agents are admitted in this order


@dataclass(frozen=True)
class AgentView:
    """The coordinator's view of the agents and the job at one revision."""

    agents: Mapping[str, SeenAgent]
    round: AgentRound | None = None
    notice: AgentNotice | None = None
    job: JobRecord | None = None
    signed_off: Set[str] = frozenset()  # agents that have signed off recently
    returning: Set[str] = frozenset()  # those of `missing` that may be cut off from etcd, and are given time to come back

    @property
    def round_number(self) -> int:
        return self.round.number if self.round is not None else 0

    @property
    def is_confirmed(self) -> bool:
        return self.notice is not None and self.notice.confirmed_round == self.round_number

    @property
    def missing(self) -> Set[str]:
        """Members of the current round without a record that have not signed off: their leases have ended."""
        members = set(self.round.agents) if self.round is not None else set()
        return members - self.agents.keys() - self.all_signed_off

    @property
    def all_signed_off(self) -> Set[str]:
        # Copied from notice to notice, because a sign-off expires with its lease.
        return {*self.signed_off, *(self.notice.signed_off if self.notice is not None else ())}


def why_over(round_: AgentRound | None, job: JobRecord | None) -> str:
    """Return the reason why no agent can join the run any more, empty if agents can join."""
    if job is not None and job.phase == "finished":
        return "has finished"
    if job is not None and job.phase == "failed":
        return f"has failed ({job.message or 'no reason was recorded'})"
    if round_ is not None and round_.state == "closed":
        return f"is closed ({round_.reason or 'no reason was recorded'})"
    return ""


def participants(view: AgentView) -> list[str]:
    """Return members of the current round that are alive and have not left it, in rank order; none if the round is void."""
    if view.round is None:
        return []
    inside = [agent for agent in view.round.agents if agent in view.agents and not _has_left(view, agent)]
    return inside if view.is_confirmed or len(inside) == len(view.round.agents) else []


def _has_left(view: AgentView, agent_id: str) -> bool:
    record = view.agents[agent_id].record
    # A member that still waits for the end of an *earlier* round has not seen its admission yet.
    return record.state == "waiting" and record.round_number >= view.round_number


def candidates(view: AgentView) -> list[str]:
    """Return living agents that wait for the next round: those of the current round in rank order, then others by arrival."""
    inside = set(participants(view))
    ranks = {agent: rank for rank, agent in enumerate(view.round.agents)} if view.round is not None else {}

    def waits(agent: str, record: AgentRecord) -> bool:
        # A member that has entered a void round has not started workers, and waits like the others.
        is_in_void_round = agent in ranks and not view.is_confirmed and record.round_number == view.round_number
        return agent not in inside and (record.state == "waiting" or is_in_void_round)

    waiting = [agent for agent, seen in view.agents.items() if waits(agent, seen.record)]
    return sorted(waiting, key=lambda a: (ranks.get(a, len(ranks)), view.agents[a].since_revision, a))


def members_of_next_round(view: AgentView, limits: Limits, last_call_is_over: bool) -> list[str]:
    """Return the agents of the next round in rank order, empty while it cannot be formed."""
    if participants(view) or why_over(view.round, view.job) or (view.job is not None and view.job.live):
        return []
    waiting = candidates(view)
    if len(waiting) < limits.min_nodes:
        return []
    if view.returning and view.is_confirmed and view.round is not None and not set(waiting) & set(view.round.agents):
        return []  # all may be cut off while their workers train; a member that waits itself would show that these do not
    # If only members of the round before go on, there are no newcomers to hold the round open for.
    has_newcomers = view.round is None or not set(waiting) <= set(view.round.agents)
    if len(waiting) < limits.max_nodes and has_newcomers and not last_call_is_over:
        return []
    return waiting[: limits.max_nodes]


def next_notice(view: AgentView, term: int) -> AgentNotice:
    """Return the notice that the coordinator of this term should have published; equal to `view.notice` if it has."""
    inside, waiting = participants(view), candidates(view)
    confirmed, address, port = 0, "", 0
    if view.notice is not None:
        confirmed, address, port = view.notice.confirmed_round, view.notice.master_address, view.notice.master_port
    if not view.is_confirmed and inside and all(_has_entered(view, agent) for agent in inside):
        first = view.agents[inside[0]].record
        confirmed, address, port = view.round_number, first.address, first.port
    members = set(view.round.agents) if view.round is not None else set()
    over = why_over(view.round, view.job)
    signed_off = members & view.all_signed_off
    return AgentNotice(
        term=term,
        confirmed_round=confirmed,
        master_address=address,
        master_port=port,
        round_number=view.round_number,
        num_agents=len(view.agents),
        num_inside=len(inside) + len(view.returning),  # there is no room for others while these may come back
        # Those that may come back may not have finished: the last agent to finish would close the run, and remove its store.
        num_unfinished=sum(view.agents[agent].record.state != "finished" for agent in inside) + len(view.returning),
        num_waiting=len(waiting),
        num_members_waiting=len(set(waiting).intersection(view.round.agents)) if view.round is not None else 0,
        live=view.job is not None and view.job.live,
        signed_off=[] if over else sorted(signed_off),
        num_lost=0 if over else len(view.missing - view.returning),  # in a run that is over no agent counts as lost
        over=over,
    )


def is_urgent(notice: AgentNotice, told: AgentNotice | None) -> bool:
    """Whether agents act on the changes since the last notice. Changes of mere counts can be published together, and later."""
    return (
        told is None
        or notice.confirmed_round != told.confirmed_round
        or notice.over != told.over
        or (notice.num_waiting > 0 and not told.num_waiting)
        or (notice.num_lost > 0 and not told.num_lost)
    )


def _has_entered(view: AgentView, agent_id: str) -> bool:
    record = view.agents[agent_id].record
    return record.state != "waiting" and record.round_number == view.round_number


def waits(view: AgentView) -> dict[str, str]:
    """Describe each agent's wait for people; empty while its workers run."""
    waiting, running = candidates(view), participants(view)
    found = {}
    for agent, seen in view.agents.items():
        record = seen.record
        if agent in running and record.state == "finished":
            found[agent] = "has finished: waits for the other nodes to finish"
        elif record.state != "waiting" and agent not in waiting:
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
