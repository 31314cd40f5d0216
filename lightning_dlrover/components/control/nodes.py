"""Record a job's nodes in memory and in etcd, so that the next controller can continue with them.

A node's name is written before its request to the scheduler, and its cancellation before the call that cancels it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_dlrover.components.control.failures import Node
from lightning_dlrover.components.control.office import Office
from lightning_dlrover.components.control.post_mortem import PostMortem
from lightning_dlrover.components.control.reconcile import Limits, nodes_of_agents
from lightning_dlrover.components.targets.target import AppStatus, NodeSize, Target
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.operations import KeyValue, absent, modified
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import Keys, NodeRecord, NodesRecord, RecordError, decode
from lightning_dlrover.rdzv.live.rounds import JobView

__all__ = ["SAME_FAILURE_S", "NodeEntry", "NodeRegistry"]

log = logging.getLogger(__name__)

MAX_ENDED = 64
"""Maximum number of ended nodes to remember; the oldest go first. Recurring errors are counted among them."""

SAME_FAILURE_S = 30.0
"""Seconds within which nodes that fail share one cause: the first one's."""


@dataclass
class NodeEntry:
    """State of one node."""

    handle: str | None  # None: refused, or not known yet whether the scheduler accepted it
    started_at: float
    asked_at: float  # seconds since the epoch
    size: NodeSize
    status: AppStatus = "pending"
    agent_seen: bool = False
    workers: tuple[str, ...] = ()  # ids of its registered workers
    num_members: int = 0  # those of its workers that are members of the current round
    round_number: int = 0  # newest round in which it was seen as a member; 0: none
    members: frozenset[str] = frozenset()  # nodes of that round
    running_since: float | None = None
    worker_seen_at: float | None = None
    member_seen_at: float | None = None
    trained_s: float = 0.0  # seconds as a member
    checkpoint_step: int = 0  # step of the job's newest checkpoint at the node's end
    ended_at: float | None = None
    missing_since: float | None = None  # start of its absence from the scheduler's list
    cancel_at: float = 0.0  # time of the next cancellation request
    post_mortem: PostMortem | None = None
    stopped_job: bool = False
    left_too_few: bool = False
    after_training: bool = False
    warned: bool = False
    cancelled: bool = False
    cancel_failures: int = 0  # consecutive cancellation requests that the scheduler has refused
    refusals_in_a_row: int = 1  # refused nodes: refusals in a row, this one included
    all_shown: bool = False
    wanted_back: bool = False  # the scheduler will end it soon
    whole_at: float | None = None  # last time at which all of its agents were registered; None: it has one, or they never were
    lacks_memory: bool = False  # killed for lack of memory; the plan does not account for it yet
    is_enlarged: bool = False  # killed for lack of memory; the plan accounts for it
    was_adopted: bool = False  # taken over from an earlier controller, which has already shown its output
    saved: NodeRecord | None = None  # record in etcd

    @property
    def is_refused(self) -> bool:
        """Whether the scheduler has certainly not accepted it."""
        return self.handle is None and self.status == "failed" and self.post_mortem is not None and bool(self.post_mortem.error)

    @property
    def is_living(self) -> bool:
        """Whether it counts towards the plan. A cancelled node is only expected to end."""
        return self.status in ("pending", "running") and not self.cancelled

    @property
    def is_member(self) -> bool:
        return self.num_members > 0

    @property
    def has_ended(self) -> bool:
        return self.status not in ("pending", "running")

    def record(self, now: float) -> NodeRecord:
        """Return the record that etcd should hold."""
        state: Literal["asked", "started"] = "started" if self.handle else "asked"
        living = NodeRecord(
            state,
            self.handle or "",
            self.asked_at,
            cancelled=self.cancelled,
            had_worker=self.worker_seen_at is not None,
            cpus=self.size.cpus,
            memory_mb=self.size.memory_mb,
        )
        if not self.has_ended:
            return living
        ended_at = self.saved.ended_at if self.saved and self.saved.ended_at else time.time() - (now - (self.ended_at or now))
        return dataclasses.replace(
            living,
            state="ended",
            ended_at=ended_at,
            outcome=self.status,  # type: ignore[arg-type]
            error=self.post_mortem.error[:2000] if self.post_mortem else "",
            place=self.post_mortem.place[:500] if self.post_mortem else "",
            stopped_job=self.stopped_job,
            left_too_few=self.left_too_few,
            after_training=self.after_training,
            trained_s=round(self.trained_s, 1),
            checkpoint_step=self.checkpoint_step,
        )

    def node(self, name: str, now: float, forgiven_at: float) -> Node:
        """Return the facts for decisions. Failures up to `forgiven_at` are forgiven."""
        return Node(
            name=name,
            status="cancelled" if self.cancelled else self.status,
            agent_seen=self.agent_seen,
            has_worker=bool(self.workers),
            num_members=self.num_members,
            workerless_s=now - self.worker_seen_at if self.worker_seen_at is not None else 0.0,
            idle_s=now - (self.member_seen_at or self.started_at),
            age_s=now - self.running_since if self.running_since is not None else 0.0,
            asked_s=now - self.started_at,
            trained_s=self.trained_s,
            refused=self.is_refused,
            refusals_in_a_row=self.refusals_in_a_row,
            checkpoint_step=self.checkpoint_step,
            forgiven=self.ended_at is not None and self.ended_at <= forgiven_at,
            ended_s=now - self.ended_at if self.ended_at is not None else 0.0,
            error=self.post_mortem.error if self.post_mortem else "",
            place=self.post_mortem.place if self.post_mortem else "",
            stopped_job=self.stopped_job,
            left_too_few=self.left_too_few,
            after_training=self.after_training,
            warned=self.warned,
            size=self.size,
            is_taken_on=bool(self.handle),
            workers=self.workers,
            wanted_back=self.wanted_back,
            agentless_s=now - self.whole_at if self.whole_at is not None else 0.0,
            lacks_memory=self.lacks_memory,
        )


class NodeRegistry:
    """Nodes of one job: `entries` in memory, oldest first, and a record of each in etcd."""

    def __init__(self, client: EtcdClient, keys: Keys, office: Office, target: Target, limits: Limits) -> None:
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._office = office
        self._target = target
        self._limits = limits
        self.entries: dict[str, NodeEntry] = {}
        self.nodes: NodesRecord | None = None
        self.is_ending = False
        self._num_taken = 0  # highest number in the name of a recorded node
        self._has_given_up_etcd = False  # while ending: each request to an unreachable etcd takes seconds

    def adopt(self, view: Callable[[], JobView]) -> None:
        """Take over the records of earlier controllers.

        Raises:
            ValueError: their nodes run on another kind of target, and may still be alive.
        """
        written = self._journal.get(NodesRecord, self._keys.nodes)
        nodes, revision = written.record, written.revision
        _, entries = self._client.get_prefix(self._keys.each_node)
        records = {entry.key.removeprefix(self._keys.each_node): entry for entry in entries}
        self._num_taken = _highest_number(records)
        found = {name: record for name, entry in records.items() if (record := self._decoded(entry)) is not None}
        living = [name for name, record in found.items() if record.state != "ended"]
        outlived = nodes is not None and nodes.target != "local"
        if nodes is None or (nodes.target != self._target.name and not (living and outlived)):
            # A node registered without a record predates such records. Its name is taken.
            names = nodes_of_agents(view()).values()
            newest = max(self._num_taken, _highest_number(names), nodes.num_started if nodes else 0)
            mark = self.nodes.mark if self.nodes else uuid.uuid4().hex[:10]
            nodes = NodesRecord(self._target.name, mark, newest, nodes.stop if nodes else "")
            self._office.write(self._keys.nodes, nodes, revision)
        if nodes.target != self._target.name:
            there = nodes.target.partition("/")[0] + _kind_of_jobs(nodes.target, self._target.name)
            raise ValueError(
                f"job {self._keys.run_id!r} has nodes on {nodes.target} ({', '.join(living)}); continue it there "
                f"(--target {there}, and what else it was started with), or end it with `dlrover cancel {self._keys.run_id}`"
            )
        self.nodes = self._with_limits(nodes)
        self._target.open(self.nodes.mark)
        now = time.monotonic()
        for name, record in found.items():
            if name in self.entries:
                self.entries[name].saved = record
            elif self._target.outlives_controller:
                self.entries[name] = _restored(record, self._checked_handle(name, record), now)
            else:  # it has ended with the controller that started it
                self._office.delete(self._keys.each_node + name)

    def ask(self, size: NodeSize) -> tuple[str, NodeEntry]:
        """Record a new node, under a name that no other node has had.

        Raises:
            EtcdError: the record was not written, or its fate is unknown.
            RecordError: the existing record of the nodes is unreadable.
        """
        found = self._journal.get(NodesRecord, self._keys.nodes)
        nodes, revision = found.record, found.revision
        if nodes is None:  # the job's keys were deleted
            assert self.nodes is not None
            nodes = self.nodes
        number = max(nodes.num_started, self._num_taken) + 1
        record = NodeRecord("asked", asked_at=time.time(), cpus=size.cpus, memory_mb=size.memory_mb)
        name = f"node{number}"
        written = dataclasses.replace(nodes, num_started=number)
        key, own_key = self._keys.nodes, self._keys.each_node + name
        guard = [self._office.is_ours, modified(key) == revision, absent(own_key)]
        if not self._journal.fenced_write({key: written, own_key: record}, guard):
            raise EtcdError(f"{key!r} was changed by another writer")
        self.nodes = written
        self.entries[name] = NodeEntry(None, time.monotonic(), record.asked_at, size, saved=record)
        return name, self.entries[name]

    def save(self) -> None:
        """Bring etcd up to date. The next step repeats failed writes."""
        if self._has_given_up_etcd:
            return
        now = time.monotonic()
        try:
            for name, entry in self.entries.items():
                record = entry.record(now)
                if record != entry.saved:
                    self._office.write(self._keys.each_node + name, record)
                    entry.saved = record
        except EtcdError as error:
            log.info("run %s: the outcome of the nodes is written later: %s", self._keys.run_id, error)
            self._has_given_up_etcd = self.is_ending
            return
        ended = sorted((e.ended_at or now, name) for name, e in self.entries.items() if e.has_ended and e.all_shown)
        for _, name in ended[: max(0, len(ended) - MAX_ENDED)]:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Remove a node from memory and from etcd."""
        self._office.delete(self._keys.each_node + name)
        del self.entries[name]

    def failure_text(self) -> str:
        """Return the traceback of the first node in the newest group of failures, else why it was ended; empty if unknown."""
        faults = [(entry.ended_at or 0.0, entry.post_mortem) for entry in self.entries.values()]
        known = [(ended_at, found) for ended_at, found in faults if found is not None and (found.error or found.cause)]
        if not known:
            return ""
        last = max(ended_at for ended_at, _ in known)
        _, first = min((f for f in known if f[0] >= last - SAME_FAILURE_S), key=lambda f: f[0])
        return first.traceback or first.error or first.cause

    def _with_limits(self, nodes: NodesRecord) -> NodesRecord:
        """Record the limits of node sizes unless the record has them already. Return the record."""
        low, high = self._limits.min_size, self._limits.max_size
        limits = {"min_cpus": low.cpus, "max_cpus": high.cpus, "min_memory_mb": low.memory_mb, "max_memory_mb": high.memory_mb}
        if dataclasses.replace(nodes, **limits) != nodes:  # type: ignore[arg-type]
            # `dlrover cancel` may have written meanwhile.
            found = self._journal.get(NodesRecord, self._keys.nodes)
            newest_nodes, revision = found.record, found.revision
            nodes = dataclasses.replace(newest_nodes or nodes, **limits)  # type: ignore[arg-type]
            self._office.write(self._keys.nodes, nodes, revision)
        return nodes

    def _checked_handle(self, name: str, record: NodeRecord) -> str | None:
        """Return the handle in a node's record if it can belong to this node. Any writer to etcd could change it."""
        if not record.handle or self._target.owns(name, record.handle):
            return record.handle or None
        log.error(
            "run %s: ignored %r, the handle that %s holds: no node of this job is called so on %s. Another program may have "
            "written the record; the node itself is looked for by its name",
            *(self._keys.run_id, record.handle[:100], self._keys.each_node + name, self._target.name),
        )
        return None

    def _decoded(self, entry: KeyValue) -> NodeRecord | None:
        name = entry.key.removeprefix(self._keys.each_node)
        if not re.fullmatch(r"node\d{1,18}", name):
            log.error("run %s: ignored a record: %r names no node, such as node1", self._keys.run_id, entry.key)
            return None
        try:
            return decode(NodeRecord, entry.value, entry.key)
        except RecordError as error:
            log.error("run %s: ignored a record: %s", self._keys.run_id, error)
            return None


def _restored(record: NodeRecord, handle: str | None, now: float) -> NodeEntry:
    """Return the entry of an earlier controller's node. Its idle time starts anew."""
    size = NodeSize(record.cpus, record.memory_mb)
    entry = NodeEntry(handle, now, record.asked_at, size, cancelled=record.cancelled, was_adopted=True, saved=record)
    entry.ended_at = now if record.cancelled else None
    entry.worker_seen_at = now if record.had_worker else None
    if record.state == "ended":
        entry.status = record.outcome or "gone"
        entry.ended_at = now - max(0.0, time.time() - record.ended_at)
        entry.post_mortem = PostMortem(record.error, "", place=record.place) if record.outcome == "failed" else None
        entry.stopped_job, entry.left_too_few, entry.all_shown = record.stopped_job, record.left_too_few, True
        entry.after_training = record.after_training
        entry.trained_s, entry.checkpoint_step = record.trained_s, record.checkpoint_step
    return entry


def _highest_number(names: Iterable[str]) -> int:
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"node(\d{1,18})", name))), default=0)


def _kind_of_jobs(then: str, now: str) -> str:
    """Return the option for a Kubernetes cluster that has since gained Volcano."""
    return " --plain-jobs" if now == f"{then}/volcano" else ""
