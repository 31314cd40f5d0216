"""Rounds of elastic agents: TorchElastic's contract as pure functions, and the agent that carries out their decisions.

`next_notice` and `members_of_next_round` decide from an `AgentView`, without a clock or etcd. `AgentCoordinator` runs the
election and writes their decisions.

The record of a waiting agent names the round that it has left (`round_number`). So a round is over exactly when each of its
members is gone or waits for a later one. A round is written first, and confirmed once all its members have entered it. Before
that no member has started workers, so if one dies the round is void and another takes its place. Both decisions are level
triggered and use only the records: the next coordinator continues where the last one stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lightning_dlrover.codec import RecordError
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.etcd.client import Election, EtcdClient, Lease, candidacy_delay_s
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import Compare, EtcdError, EtcdFullError, KeyValue, modified
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import AgentNotice, AgentRecord, AgentRound, JobRecord, Keys, decode


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
        return self.members - self.agents.keys() - self.all_signed_off

    @property
    def all_signed_off(self) -> Set[str]:
        # Copied from notice to notice, because a sign-off expires with its lease.
        return {*self.signed_off, *(self.notice.signed_off if self.notice is not None else ())}

    @property
    def members(self) -> Set[str]:
        """Members of the current round."""
        return set(self.round.agents) if self.round is not None else set()


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
    if view.returning and view.is_confirmed and not view.members & set(waiting):
        return []  # all may be cut off while their workers train; a member that waits itself would show that these do not
    # If only members of the previous round continue, no newcomer needs the round to be held open.
    has_newcomers = not set(waiting) <= view.members
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
    over = why_over(view.round, view.job)
    return AgentNotice(
        term=term,
        confirmed_round=confirmed,
        master_address=address,
        master_port=port,
        round_number=view.round_number,
        num_agents=len(view.agents),
        num_inside=len(inside) + len(view.returning),  # their places stay reserved while they may come back
        # Those that may come back may not have finished: the last agent to finish would close the run, and remove its store.
        num_unfinished=sum(view.agents[agent].record.state != "finished" for agent in inside) + len(view.returning),
        num_waiting=len(waiting),
        num_members_waiting=len(view.members & set(waiting)),
        live=view.job is not None and view.job.live,
        signed_off=[] if over else sorted(view.members & view.all_signed_off),
        num_lost=0 if over else len(view.missing - view.returning),  # once the run is over, no agent counts as lost
        over=over,
    )


def is_urgent(notice: AgentNotice, last: AgentNotice | None) -> bool:
    """Whether agents act on the changes since the last notice. Changes of mere counts can be published together, and later."""
    return (
        last is None
        or notice.confirmed_round != last.confirmed_round
        or notice.over != last.over
        or (notice.num_waiting > 0 and not last.num_waiting)
        or (notice.num_lost > 0 and not last.num_lost)
    )


def _has_entered(view: AgentView, agent_id: str) -> bool:
    record = view.agents[agent_id].record
    return record.state != "waiting" and record.round_number == view.round_number


def waits(view: AgentView) -> dict[str, str]:
    """Describe each agent's wait in words; empty while its workers run."""
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
            found[agent] = "last call: waits for more nodes"
    return found


logger = logging.getLogger(__name__)
T = TypeVar("T")

_IDLE_S = 5.0  # seconds between looks; changes wake the coordinator, so this only bounds the cost of a missed wake-up
_RETRY_S = 0.2
# Minimum seconds between two notices of changed counts, per agent to notify: at most 1000 notifications per second.
_REST_PER_AGENT_S = 0.001
_RETURN_LEASES = 2.0  # lifetimes of a lease that a member cut off from etcd has to come back


class RecordReader:
    """Decode each version of a record once. For use by one thread.

    An agent that is still joining stops at garbage. An agent that has joined ignores it and uses the last readable version.
    """

    def __init__(self, run_id: str, is_joining: Callable[[], bool]) -> None:
        self._run_id = run_id
        self._is_joining = is_joining
        self._read: dict[str, tuple[int, Any]] = {}  # revision and record of each key

    def read(self, record_type: type[T], entry: KeyValue | None) -> T | None:
        """Return the record of an entry, None if no version of it is usable.

        Raises:
            RecordError: the entry is garbage, and this agent is still joining.
        """
        if entry is None:
            return None
        revision, last = self._read.get(entry.key, (0, None))
        record: T | None = last
        if revision == entry.mod_revision:
            return record
        try:
            record = decode(record_type, entry.value, entry.key)
        except RecordError as error:
            if self._is_joining():
                raise
            logger.error("run %r: ignored a record: %s", self._run_id, error)
        self._read[entry.key] = (entry.mod_revision, record)
        return record

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Drop the cached records of deleted keys, once they make up most of the cache."""
        if len(self._read) > 2 * len(keys) + 16:
            self._read = {key: kept for key, kept in self._read.items() if key in keys}


class AgentCoordinator:
    """An agent's candidacy for coordinator, and its term. Its thread runs only during these.

    The coordinator watches all other agents, forms their rounds and publishes a notice for them. It is the agent that created
    the election key, which expires with the agent's lease. Each write is fenced on the key and on the value that it replaces,
    so a coordinator that was declared dead cannot change anything. All other agents watch three small keys. A change therefore
    costs a job of n agents one write and n notifications, and only one agent reads all records.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        agent_id: str,
        limits: Limits,
        last_call_s: float,
        reader: RecordReader,
        on_error: Callable[[RecordError], None],
        on_begin: Callable[[], object],
    ) -> None:
        """Create a coordinator that is not in office yet. `campaign` starts its candidacy.

        Args:
            last_call_s: seconds that a round with enough agents waits for more.
            on_begin: called by the first coordinator of a run without a controller.
            reader: raises for a record that must not be ignored, which ends the term and calls `on_error`.
        """
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._election = Election(keys.agent_coordinator)
        self._agent_id = agent_id
        self._limits = limits
        self._last_call_s = last_call_s
        self._reader = reader
        self._on_error = on_error
        self._on_begin = on_begin
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._enough_since: float | None = None
        self._published_at = 0.0
        # Members with an expired lease, and when this agent, in office, first saw it.
        self._missing_since: dict[str, float] = {}

    def campaign(self, watched: Mirror, lease: Lease, num_agents: int) -> None:
        """Stand for coordinator unless there is one. Returns at once.

        Args:
            watched: mirror that includes the election key.
            num_agents: approximate number of candidates.
        """
        with self._lock:
            if self._stopped.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(
                target=self._run, args=(watched, lease, num_agents), name="agent-coordinator", daemon=True
            )
            self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        self._stopped.set()
        self._wake.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self, watched: Mirror, lease: Lease, num_agents: int) -> None:
        pause_s = candidacy_delay_s(num_agents)
        while not self._stopped.wait(pause_s) and not lease.lost.is_set():
            pause_s = _RETRY_S
            try:
                term = self._win(watched, lease)
                if term:
                    self._coordinate(term, _RETURN_LEASES * lease.ttl_s)
                return
            except EtcdError as error:
                logger.debug("agent %s does not coordinate: %s", self._agent_id, error)
            except RecordError as error:
                self._on_error(error)
                return

    def _win(self, watched: Mirror, lease: Lease) -> int:
        """Return the term that we have won, or 0."""
        entry = watched.get(self._election.key)
        if entry is not None and entry.lease_id != lease.id:
            return 0
        return self._election.claim(self._client, self._agent_id.encode(), lease.id)

    def _coordinate(self, term: int, return_s: float) -> None:
        """Coordinate for as long as the election key is ours.

        Args:
            return_s: seconds in which a member may come back after its lease has expired.
        """
        logger.debug("agent %s coordinates", self._agent_id)
        self._enough_since = None
        self._missing_since = {}
        must_wait = False
        with Mirror(self._client, self._keys.live, self._wake.set) as mirror:
            if mirror.get(self._keys.agent_notice) is None and mirror.get(self._keys.controller) is None:
                self._on_begin()
            while not self._stopped.is_set():
                self._wake.clear()
                began = time.monotonic()
                entries = mirror.snapshot()
                if not self._election.is_held(entries.get(self._election.key), term):
                    if mirror.revision >= term:
                        return
                    pause_s = _RETRY_S
                else:
                    try:
                        if not mirror.healthy:
                            self._missing_since = {}  # an outage may have ended the leases of all
                        pause_s = self._act(entries, term, return_s)
                        must_wait = False
                    except EtcdError as error:
                        if not must_wait and not isinstance(error, EtcdFullError):  # the client reports a full etcd itself
                            logger.warning("the coordinator of the agents, %s, waits for etcd: %s", self._agent_id, error)
                        must_wait = True
                        pause_s = _RETRY_S
                # Use at most half of a core. Changes during a look are then handled together in the next one.
                self._stopped.wait(min(0.2, time.monotonic() - began))
                self._wake.wait(pause_s)

    def _act(self, entries: Mapping[str, KeyValue], term: int, return_s: float) -> float:
        """Write what is due; return the seconds after which to look again even without a change."""
        view = self._view(entries)
        now = time.monotonic()
        self._missing_since = {agent: self._missing_since.get(agent, now) for agent in view.missing}
        left_s = {agent: since + return_s - now for agent, since in self._missing_since.items()}
        view = replace(view, returning={agent for agent, left in left_s.items() if left > 0})
        pause_s = min([_IDLE_S, *(left_s[agent] + 0.001 for agent in view.returning)])
        if members_of_next_round(view, self._limits, last_call_is_over=True):
            self._enough_since = now if self._enough_since is None else self._enough_since
            remaining_s = self._enough_since + self._last_call_s - now
            members = members_of_next_round(view, self._limits, last_call_is_over=remaining_s <= 0)
            if members:
                self._form(view, members, entries, term)
                return _RETRY_S
            pause_s = min(pause_s, max(0.001, remaining_s))
        else:
            self._enough_since = None
        notice = next_notice(view, term)
        if notice != view.notice:
            rest_s = self._published_at + _REST_PER_AGENT_S * len(view.agents) - now
            if rest_s > 0 and not is_urgent(notice, view.notice):
                return min(pause_s, rest_s)
            self._published_at = now
            self._write(self._keys.agent_notice, notice, entries, term)
            return min(pause_s, _RETRY_S)
        return pause_s

    def _form(self, view: AgentView, members: list[str], entries: Mapping[str, KeyValue], term: int) -> None:
        round_ = AgentRound(
            number=view.round_number + 1,
            agents=members,
            state="complete",
            written_by=self._agent_id,
            reason=f"{counted(len(members), 'node')} {'was' if len(members) == 1 else 'were'} waiting",
            created_at=time.time(),
        )
        if self._write(self._keys.agent_round, round_, entries, term):
            logger.info("round %d of %d nodes", round_.number, len(members))

    def _write(self, key: str, record: AgentNotice | AgentRound, entries: Mapping[str, KeyValue], term: int) -> bool:
        keys = self._keys
        # A round and its confirmation depend on each other, so each write is conditional on both.
        seen: list[Compare] = [
            modified(name) == (entries[name].mod_revision if name in entries else 0)
            for name in (keys.agent_round, keys.agent_notice)
        ]
        return self._journal.fenced_write({key: record}, [self._election.fence(term), *seen])

    def _view(self, entries: Mapping[str, KeyValue]) -> AgentView:
        keys, read = self._keys, self._reader.read
        self._reader.forget_all_but(entries)
        agents = {}
        for key, entry in entries.items():
            if key.startswith(keys.agents) and (record := read(AgentRecord, entry)) is not None:
                agents[record.agent_id] = SeenAgent(record, entry.create_revision)
        return AgentView(
            agents=agents,
            round=read(AgentRound, entries.get(keys.agent_round)),
            notice=read(AgentNotice, entries.get(keys.agent_notice)),
            job=read(JobRecord, entries.get(keys.job)),
            signed_off={key.removeprefix(keys.agents_left) for key in entries if key.startswith(keys.agents_left)},
        )
