"""Coordinate the elastic agents: one of them watches all others, forms their rounds and publishes a notice for them.

`agent_rounds.py` decides the content of a write; this module decides which agent may write it. The coordinator is the agent
that created the election key. The key expires with its agent's lease, and then another agent takes over. Each write is fenced
on the key and on the value that it replaces, so a coordinator that was declared dead cannot change anything. All other agents
watch three small keys. A change therefore costs a job of n agents one write and n notifications, and only one agent reads all
records.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.agents.rounds import AgentView, Limits, SeenAgent, is_urgent, members_of_next_round, next_notice
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.election import Election, candidacy_delay_s
from lightning_dlrover.rdzv.etcd.errors import EtcdError, EtcdFullError
from lightning_dlrover.rdzv.etcd.lease import Lease
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import Compare, KeyValue, modified
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import AgentNotice, AgentRecord, AgentRound, JobRecord, Keys, RecordError, decode

__all__ = ["AgentCoordinator", "RecordReader"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_IDLE_S = 5.0  # seconds between looks; changes wake the coordinator, so this only bounds the cost of a missed wake-up
_RETRY_S = 0.2
# Minimum seconds between two notices of changed counts, per agent to notify: at most 1000 notifications per second.
_REST_PER_AGENT_S = 0.001
_RETURN_LEASES = 2.0  # lifetimes of a lease for which a member that is cut off from etcd is given time to come back


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
    """An agent's candidacy for the office, and its term in it. A thread of its own runs only during these."""

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
        """
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
        self._told_at = 0.0
        # Members whose lease has ended, and when this agent first saw that in office.
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
            return_s: seconds that a member whose lease has ended gets to come back.
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
                        if not must_wait and not isinstance(error, EtcdFullError):  # its client reports a full etcd
                            logger.warning("agents' coordinator %s must wait: %s", self._agent_id, error)
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
        view = dataclasses.replace(view, returning={agent for agent, left in left_s.items() if left > 0})
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
            rest_s = 0.0 if is_urgent(notice, view.notice) else self._told_at + _REST_PER_AGENT_S * len(view.agents) - now
            if rest_s > 0:
                return min(pause_s, rest_s)
            self._told_at = now
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
