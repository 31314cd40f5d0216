"""The controller's view of a job's nodes: their records, and what is observed.

`ControllerTenure` is the right to act, `NodeRegistry` keeps the nodes in memory and in
etcd, and `Observer` brings the registry up to date.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from lightning_dlrover.codec import RecordError
from lightning_dlrover.components.control.post_mortem import PostMortem, examine
from lightning_dlrover.components.control.reconcile import (
    ControllerView,
    FailurePolicy,
    Limits,
    Node,
    nodes_of_agents,
    num_refusals,
    refusals,
)
from lightning_dlrover.components.targets.target import (
    ANY_SIZE,
    App,
    AppStatus,
    NodeSize,
    Target,
    TargetError,
    read_tail,
)
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import Delete, EtcdError, KeyValue, absent, modified
from lightning_dlrover.rdzv.job.events import Event, record_of
from lightning_dlrover.rdzv.job.journal import Journal, Tenure, holder_text, readable, readable_folder
from lightning_dlrover.rdzv.job.records import (
    CheckpointRecord,
    ControllerRecord,
    EndNotice,
    Keys,
    NodeRecord,
    NodesRecord,
    decode,
)
from lightning_dlrover.rdzv.membership.rounds import Decoder, JobView
from lightning_dlrover.spares import Spares

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


class ControllerTenure(Tenure[ControllerRecord]):
    """The right to act for one job, held by a lease on the job's `controller` key.

    The key's create revision fences every write, so a controller with an expired lease cannot change anything.

    Raises:
        ControllerBusyError: another controller holds the key.
        EtcdError: the holder is unknown.
    """

    def __init__(self, client: EtcdClient, keys: Keys, record: ControllerRecord) -> None:
        self._keys = keys
        super().__init__(Journal(client, keys), keys.controller, lambda: record, self._is_taken, LEASE_TTL_S)

    def write(self, key: str, record: NodesRecord | NodeRecord, revision: int | None = None) -> None:
        """Write a record if this controller still acts and, with `revision`, if the record has not changed since.

        Raises:
            EtcdError: the record was not written, or that is unknown.
        """
        unchanged = [modified(key) == revision] if revision is not None else []
        if not self._journal.fenced_write({key: record}, [self.is_ours, *unchanged]):
            raise EtcdError(f"run {self._keys.run_id}: {key!r} was not written: another controller acts, or has written it")

    def delete(self, key: str) -> None:
        """Delete a key if this controller still acts and etcd answers."""
        with contextlib.suppress(EtcdError):  # the next controller repeats it
            self._client.txn([self.is_ours], [Delete(key)])

    def add_event(self, event: Event, text: str) -> bool:
        """Append to the job's history if this controller still acts."""
        return self._journal.append(record_of(event, text[:2000]), "controller", [self.is_ours])

    def publish_nodes(self, apps: Mapping[str, str], held_up: str, spares: Spares | None, resizes: Mapping[str, str]) -> bool:
        """Update the controller's record. Return whether it has changed."""
        spare, spare_bytes = (spares.state, spares.memory_bytes) if spares is not None else ("", 0)
        record = replace(self.record, apps=dict(apps), held_up=held_up[:2000], spare=spare, spare_bytes=spare_bytes)
        record = replace(record, resizes=dict(resizes))
        if record == self.record:
            return False
        try:
            self.publish(record)
        except EtcdError as error:
            log.info("run %s: the list of nodes is written later: %s", self._keys.run_id, error)
            return False
        return True

    def _is_taken(self, holder: ControllerRecord | None) -> ControllerBusyError:
        who = holder_text(holder, "another controller")
        return ControllerBusyError(
            f"job {self._keys.run_id!r} is already run by {who}; choose another --rdzv-id, or use `dlrover scale` to resize it "
            f"(if that process was killed a moment ago: try again in {LEASE_TTL_S:.0f} s)"
        )


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
    round_number: int = 0  # newest round that was seen with it as a member; 0: none
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
    has_left: bool = False  # others trained on without its workers
    stopped_job: bool = False
    left_too_few: bool = False
    after_training: bool = False
    warned: bool = False
    cancelled: bool = False
    cancel_failures: int = 0  # consecutive cancellation requests that the scheduler has refused
    refusals_in_a_row: int = 1  # refused nodes: refusals in a row, this one included
    refusal_kind: str = ""  # refused nodes: text that all refusals for this reason share
    is_released: bool = False  # its scheduler may have forgotten it
    all_shown: bool = False
    notice: EndNotice | None = None  # the scheduler will end it, and a worker of it is a member
    whole_at: float | None = None  # last time at which all of its agents were registered; None: it has one, or they never were
    lacks_memory: bool = False  # killed for lack of memory; the plan does not account for it yet
    is_enlarged: bool = False  # killed for lack of memory; the plan accounts for it
    wanted: NodeSize | None = None  # size that was requested in place; None: no change is under way
    resize: Literal["", "asked", "waiting"] = ""
    resize_why: str = ""  # reason for the wait
    resize_at: float = 0.0  # time of that request
    refused_size: NodeSize = ANY_SIZE  # values that it could not get in place
    oversized_at: float | None = None  # time at which the plan was first seen to ask for a smaller size
    has_let_go: bool = False  # its workers use no more than the smaller size
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

    def start_again(self, now: float) -> None:
        """Note that a node which has run waits for its start, because its scheduler has requeued it."""
        self.started_at, self.running_since, self.agent_seen = now, None, False
        self.worker_seen_at = self.member_seen_at = self.whole_at = None

    def record(self, now: float) -> NodeRecord:
        """Return the record that etcd should hold."""
        living = NodeRecord(
            "started" if self.handle else "asked",
            self.handle or "",
            self.asked_at,
            cancelled=self.cancelled,
            had_worker=self.worker_seen_at is not None,
            cpus=self.size.cpus,
            memory_mb=self.size.memory_mb,
            resize=self.resize,
            wanted_cpus=self.wanted.cpus if self.wanted else 0,
            wanted_memory_mb=self.wanted.memory_mb if self.wanted else 0,
            refused_cpus=self.refused_size.cpus,
            refused_memory_mb=self.refused_size.memory_mb,
        )
        if not self.has_ended:
            return living
        ended_at = self.saved.ended_at if self.saved and self.saved.ended_at else time.time() - (now - (self.ended_at or now))
        found = self.post_mortem or PostMortem("", "")
        return replace(
            living,
            state="ended",
            ended_at=ended_at,
            outcome=self.status,  # type: ignore[arg-type]
            error=found.error[:2000],
            place=found.place[:500],
            stopped_job=self.stopped_job,
            left_too_few=self.left_too_few,
            after_training=self.after_training,
            trained_s=round(self.trained_s, 1),
            checkpoint_step=self.checkpoint_step,
        )

    def node(self, name: str, now: float, forgiven_at: float) -> Node:
        """Return the facts for decisions. Failures up to `forgiven_at` are forgiven."""

        def since_s(at: float | None) -> float:
            return now - at if at is not None else 0.0

        found = self.post_mortem or PostMortem("", "")
        return Node(
            name=name,
            status="cancelled" if self.cancelled else self.status,
            workerless_s=since_s(self.worker_seen_at),
            idle_s=now - (self.member_seen_at or self.started_at),
            age_s=since_s(self.running_since),
            asked_s=now - self.started_at,
            ended_s=since_s(self.ended_at),
            resize_s=now - self.resize_at if self.wanted else 0.0,
            oversized_s=since_s(self.oversized_at),
            agentless_s=since_s(self.whole_at),
            refused=self.is_refused,
            forgiven=self.ended_at is not None and self.ended_at <= forgiven_at,
            error=found.error,
            could_not_start=found.could_not_start,
            place=found.place,
            is_accepted=bool(self.handle),
            **{name: getattr(self, name) for name in _UNCHANGED},
        )


_UNCHANGED = {each.name for each in fields(Node)} & {each.name for each in fields(NodeEntry)} - {"status"}
"""Fields that `Node` copies from a `NodeEntry`, such as `workers`."""


class NodeRegistry:
    """Nodes of one job: `entries` in memory, oldest first, and a record of each in etcd for the next controller.

    A node's name is written before its request to the scheduler, and its cancellation before the call that cancels it.
    """

    def __init__(self, client: EtcdClient, keys: Keys, tenure: ControllerTenure, target: Target, limits: Limits) -> None:
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._tenure = tenure
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
        nodes = written.record
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
            self._tenure.write(self._keys.nodes, nodes, written.revision)
        if nodes.target != self._target.name:
            has_gained_volcano = self._target.name == f"{nodes.target}/volcano"
            there = nodes.target.partition("/")[0] + " --plain-jobs" * has_gained_volcano
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
                self._tenure.delete(self._keys.each_node + name)

    def ask(self, size: NodeSize) -> tuple[str, NodeEntry]:
        """Record a new node, under a name that no other node has had.

        Raises:
            EtcdError: the record was not written, or that is unknown.
            RecordError: the existing record of the nodes is unreadable.
        """
        found = self._journal.get(NodesRecord, self._keys.nodes)
        nodes = found.record or self.nodes  # the job's keys may have been deleted
        assert nodes is not None
        number = max(nodes.num_started, self._num_taken) + 1
        record = NodeRecord("asked", asked_at=time.time(), cpus=size.cpus, memory_mb=size.memory_mb)
        name = f"node{number}"
        written = replace(nodes, num_started=number)
        key, own_key = self._keys.nodes, self._keys.each_node + name
        guard = [self._tenure.is_ours, modified(key) == found.revision, absent(own_key)]
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
                    self._tenure.write(self._keys.each_node + name, record)
                    entry.saved = record
        except EtcdError as error:
            log.info("run %s: the outcome of the nodes is written later: %s", self._keys.run_id, error)
            self._has_given_up_etcd = self.is_ending
            return
        ended = sorted((e.ended_at or now, name) for name, e in self.entries.items() if e.has_ended and e.all_shown)
        for _, name in ended[: max(0, len(ended) - MAX_ENDED)]:
            self.forget(name)

    def release_ended(self) -> None:
        """Have the scheduler forget nodes whose end etcd holds, because ended ones may count against a quota."""
        for entry in self.entries.values():
            is_written = entry.saved is not None and entry.saved.state == "ended" and entry.all_shown
            is_needed = entry.lacks_memory and not entry.is_enlarged
            if is_written and entry.handle is not None and not entry.is_released and not is_needed:
                entry.is_released = self._target.release(entry.handle)

    def forget(self, name: str) -> None:
        """Remove a node from memory and from etcd."""
        self._tenure.delete(self._keys.each_node + name)
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

    @property
    def resizes_in_place(self) -> bool:
        """Whether the sizes of running nodes may change, and their scheduler changes them in place."""
        return self._limits.min_size != self._limits.max_size and self._target.resizes_in_place

    def publish_limits(self) -> None:
        """Bring the record of the nodes' limits up to date. The next step repeats a failed write."""
        if self.nodes is not None and self.nodes.in_place != self.resizes_in_place:
            with contextlib.suppress(EtcdError, RecordError):
                self.nodes = self._with_limits(self.nodes)

    def _with_limits(self, nodes: NodesRecord) -> NodesRecord:
        """Record the limits of node sizes unless the record has them already. Return the record."""
        low, high = self._limits.min_size, self._limits.max_size
        limits = {"min_cpus": low.cpus, "max_cpus": high.cpus, "min_memory_mb": low.memory_mb, "max_memory_mb": high.memory_mb}
        limits["in_place"] = self.resizes_in_place
        if replace(nodes, **limits) != nodes:  # type: ignore[arg-type]
            # `dlrover cancel` may have written since.
            found = self._journal.get(NodesRecord, self._keys.nodes)
            nodes = replace(found.record or nodes, **limits)  # type: ignore[arg-type]
            self._tenure.write(self._keys.nodes, nodes, found.revision)
        return nodes

    def _checked_handle(self, name: str, record: NodeRecord) -> str | None:
        """Return the handle in a node's record if it can belong to this node. Any writer to etcd could change it."""
        if not record.handle or self._target.owns(name, record.handle):
            return record.handle or None
        log.error(
            "run %s: ignored %r, the handle in %s: it names no node of this job on %s. Another program may have written the "
            "record; the node itself is looked up by its name",
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
    """Return the entry of an earlier controller's node. Its idle time starts again at zero."""
    size = NodeSize(record.cpus, record.memory_mb)
    entry = NodeEntry(handle, now, record.asked_at, size, cancelled=record.cancelled, was_adopted=True, saved=record)
    entry.ended_at = now if record.cancelled else None
    entry.worker_seen_at = now if record.had_worker else None
    if record.resize:
        entry.wanted, entry.resize = NodeSize(record.wanted_cpus, record.wanted_memory_mb), record.resize
    entry.resize_at, entry.refused_size = now, NodeSize(record.refused_cpus, record.refused_memory_mb)
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


PROFILES_S = 1.0
"""Minimum seconds between two looks at the settings of the workers of shrinking nodes."""

MAX_REFUSED = 8
"""Maximum number of refused nodes to remember; the oldest go first. A full quota must not push out other failures."""


@dataclass
class _Streak:
    """Consecutive failures of nodes without a new round between them."""

    count: int = 0
    failed_at: float = 0.0
    round_number: int = 0  # newest round that had started

    def add(self, now: float) -> None:
        self.count, self.failed_at = self.count + 1, now


class Observer:
    """Observes one job: through a mirror of its keys and through the target that runs its nodes."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        mirror: Mirror,
        target: Target,
        registry: NodeRegistry,
        limits: Limits,
        policy: FailurePolicy,
    ) -> None:
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._target = target
        self._registry = registry
        self._limits = limits
        self._policy = policy
        self._decoder = Decoder(keys, self._report_garbage)
        self._streak = _Streak()
        self._had_member = False
        self._starved_round = 0  # newest round that lost too many members to train
        self._finished_at: float | None = None  # time at which the end of training was first observed
        self._looked_at = time.monotonic()
        self._profiles_at = -float("inf")  # time of the newest look at the workers' settings
        self._plan_by_hand = 0  # revision of the newest plan set by a user
        self._forgiven_at = time.monotonic()  # earlier failures do not prevent new nodes
        self._scheduler_away_since: float | None = None

    def view(self) -> JobView:
        """Return the job's state in etcd."""
        return self._decoder.view(self._mirror.snapshot())

    def _report_garbage(self, key: str, error: RecordError) -> None:
        log.error("run %s: ignored a record: %s", self._keys.run_id, error)

    def nodes(self, now: float) -> list[Node]:
        """Return the facts about each node that decisions rest on."""
        return [entry.node(name, now, self._forgiven_at) for name, entry in self._registry.entries.items()]

    def job_view(self, view: JobView) -> ControllerView:
        """Return the facts about the job that decisions rest on, apart from the right to act."""
        now = time.monotonic()
        return replace(
            ControllerView.of(view, self._limits, self.nodes(now)),
            target=self._target.name,
            failures_in_a_row=self._streak.count,
            since_failure_s=now - self._streak.failed_at,
            checkpoint_step=self._checkpoint_step(),
            stop=self._stop_reason(),
            in_place=self._registry.resizes_in_place,
        )

    def compare(self) -> Sequence[App] | None:
        """Settle the fate of nodes that the scheduler may have taken on.

        Returns:
            The nodes that the scheduler lists, or None while it does not answer.
        """
        now = time.monotonic()
        try:
            listed = self._target.apps()
        except TargetError as error:
            if self._scheduler_away_since is None:
                self._scheduler_away_since = now
                log.warning("run %s: nodes keep their last states: %s", self._keys.run_id, error)
            return None
        if self._scheduler_away_since is not None:
            log.warning("run %s: %s answers again", self._keys.run_id, self._target.name)
            self._scheduler_away_since = None
        for seen in listed:
            entry = self._registry.entries.get(seen.node)
            if entry is not None and entry.handle is None and not entry.has_ended:
                log.info("run %s: %s has accepted %s", self._keys.run_id, self._target.name, seen.node)
                entry.handle = seen.handle
        for name, entry in self._registry.entries.items():
            if entry.handle is not None or entry.has_ended:
                continue
            entry.missing_since = entry.missing_since if entry.missing_since is not None else now
            if now - entry.missing_since > self._policy.submit_s:
                log.warning("run %s: %s was requested, but the scheduler does not list it", self._keys.run_id, name)
                entry.status, entry.ended_at, entry.all_shown = "failed", now, True
                self._streak.add(now)
        return listed

    def look(self, view: JobView) -> None:
        """Update the registry from the job's state."""
        now = time.monotonic()
        names = nodes_of_agents(view)
        num_agents = Counter(names.values())
        workers: dict[str, list[str]] = {}
        for worker, record in view.workers.items():
            workers.setdefault(names.get(record.agent_id, ""), []).append(worker)
        num_members = Counter(names.get(view.workers[worker].agent_id, "") for worker in view.survivors)
        if self._had_member and not num_members:
            # Failures next to training members do not predict a start without them: they may have held the missing resources.
            self._streak.count = 0
        self._had_member = bool(num_members)
        if self._finished_at is None and view.job is not None and view.job.phase == "finished":
            self._finished_at = now
        since_look_s, self._looked_at = now - self._looked_at, now
        can_train = num_members.total() >= self._limits.min_workers
        for name, entry in self._registry.entries.items():
            entry.trained_s += since_look_s if can_train and entry.is_member and num_members[name] else 0.0
            entry.agent_seen = entry.agent_seen or num_agents[name] > 0
            entry.workers, entry.num_members = tuple(workers.get(name, ())), num_members[name]
            if 1 < self._limits.workers_per_node <= num_agents[name]:
                entry.whole_at = now
            entry.worker_seen_at = now if entry.workers else entry.worker_seen_at
            if not entry.is_member and entry.member_seen_at is not None and self._finished_at is None and num_members:
                entry.has_left = True
            if entry.is_member:
                entry.has_left = False
                entry.member_seen_at = now
                if view.round is not None and entry.round_number != view.round.number:
                    entry.round_number, entry.members = view.round.number, frozenset(num_members)
            if not entry.has_ended and entry.handle:
                status = self._target.status(entry.handle)
                if status == "running" and entry.running_since is None:
                    entry.running_since = now
                if status == entry.status:
                    continue
                ended = status not in ("pending", "running")
                if status == "pending":
                    entry.start_again(now)
                entry.status = "cancelled" if ended and entry.cancelled else status
                if ended and not entry.cancelled:
                    others = Counter({other: number for other, number in num_members.items() if other != name})
                    self._note_end(name, entry, entry.handle, view, now, others)

    def look_at_shrinking(self, view: JobView) -> None:
        """Note which nodes are larger than planned, and whether their workers already use less."""
        now, size = time.monotonic(), self._limits.chosen_size(view.plan)
        holding = []
        for entry in self._registry.entries.values():
            is_larger = 0 < size.cpus < entry.size.cpus or 0 < size.memory_mb < entry.size.memory_mb
            if not (is_larger and entry.is_living and self._registry.resizes_in_place):
                entry.oversized_at, entry.has_let_go = None, False
                continue
            entry.oversized_at = entry.oversized_at if entry.oversized_at is not None else now
            if not entry.has_let_go and now - entry.oversized_at <= self._policy.let_go_s:
                holding.append(entry)
        if not holding or now - self._profiles_at < PROFILES_S:
            return
        self._profiles_at = now
        with contextlib.suppress(EtcdError):  # the next look, or the end of the time for it
            settings = self._worker_settings()
            for entry in holding:
                used = [settings.get(worker) for worker in entry.workers]
                entry.has_let_go = bool(used) and all(each is not None and self._fits(each, view, size) for each in used)

    def _worker_settings(self) -> dict[str, tuple[int, int]]:
        """Return the threads and loader workers of each worker in its newest profile."""
        from lightning_dlrover.tuning.samples import StepProfile  # only where nodes shrink: NumPy takes memory

        found = readable_folder(self._client, StepProfile, self._keys.profiles)
        return {worker: (profile.intra_op_threads, profile.loader_workers) for worker, profile in found.items()}

    def _fits(self, used: tuple[int, int], view: JobView, size: NodeSize) -> bool:
        threads, loader_workers = used
        most = view.plan.loader_workers if view.plan is not None else None
        fits_cores = not size.cpus or threads <= max(1, size.cpus // self._limits.workers_per_node)
        return fits_cores and (most is None or loader_workers <= most)

    def query_scheduler(self) -> None:
        """Ask the scheduler which nodes it will take away and which were killed for lack of memory.

        Slurm's target answers `notice` once for each new list of jobs, so call this only when the answer can be acted on.
        """
        now = time.monotonic()
        for entry in self._registry.entries.values():
            trains = entry.is_member and not entry.cancelled and not entry.has_ended
            entry.notice = self._target.notice(entry.handle) if trains and entry.handle is not None else None
            has_just_failed = entry.status == "failed" and now - (entry.ended_at or now) < SAME_FAILURE_S
            may_lack = has_just_failed and not entry.is_enlarged
            entry.lacks_memory = may_lack and entry.handle is not None and self._target.ran_out_of_memory(entry.handle)

    def note_refusal(self, name: str, problem: str, kind: str, now: float) -> None:
        """Record that the scheduler refused a node, for a reason of this kind. Only the newest refusals are kept."""
        log.debug("run %s: %s could not be started: %s", self._keys.run_id, name, problem)
        entries = self._registry.entries
        # Carried over because the oldest are forgotten: the pause before the next attempt grows with the total.
        earlier = refusals([node for node in self.nodes(now) if node.name != name])
        entry = entries[name]
        entry.refusals_in_a_row, entry.refusal_kind = 1 + num_refusals(earlier), kind
        entry.post_mortem = PostMortem(f"it could not be started: {problem}", "")
        entry.status, entry.ended_at, entry.all_shown = "failed", now, True
        refused = [other for other, each in entries.items() if each.is_refused]
        for other in refused[:-MAX_REFUSED]:
            self._registry.forget(other)

    def note_plan_by_hand(self, view: JobView) -> None:
        """Forgive failures that prevent new nodes once a user requests another plan, because their cause may be fixed."""
        entry = self._mirror.get(self._keys.plan)
        is_by_hand = view.plan is not None and view.plan.owner == "user"
        if entry is not None and is_by_hand and entry.mod_revision > self._plan_by_hand:
            self._plan_by_hand, self._forgiven_at = entry.mod_revision, time.monotonic()

    def _note_end(self, name: str, entry: NodeEntry, handle: str, view: JobView, now: float, others: Counter[str]) -> None:
        """Record that a node has ended and, if it failed, why. `others`: members of the current round on each other node."""
        entry.ended_at, is_last = now, not others
        log.info("run %s: %s has %s", self._keys.run_id, name, entry.status)
        if entry.status != "failed":
            return
        entry.post_mortem = examine("\n".join(_read(file) for file in self._target.logs(handle)))
        if self._target.ran_out_of_memory(handle):
            # Not the script's fault while the next node may have more memory.
            can_grow = entry.size.memory_mb < self._limits.max_size.memory_mb
            entry.post_mortem = replace(entry.post_mortem, error="" if can_grow else "out of memory")
        # Without an error, the node may have been killed in its last step, which the others finished without it.
        has_finished_s = now - self._finished_at if self._finished_at is not None else -1.0
        is_late = has_finished_s >= (0.0 if entry.post_mortem.error else self._policy.settle_s)
        trains_again = view.job is not None and bool(view.job.unfinished_fit) and not entry.post_mortem.error
        was_there = entry.member_seen_at is not None and not entry.has_left
        entry.after_training = is_late and was_there and not trains_again
        entry.stopped_job, entry.checkpoint_step = is_last, self._checkpoint_step()
        round_number = view.round.number if view.round else 0
        # Of the round that it was in: a replacement may have come by chance, and hides that it was needed.
        left = {node: number for node, number in others.items() if node in entry.members or not entry.members}
        own_round = entry.round_number if entry.members else round_number
        if sum(left.values()) < self._limits.min_workers:
            # The first to leave a round too small. Those that fail after it have the same cause, or are its consequence.
            entry.left_too_few = not is_last and own_round != self._starved_round
            self._starved_round = own_round
        # A round formed since the last failure is progress, so the two failures are unrelated. The last member's failure is not
        # related to starts that failed at the same time either; the scheduler may report it before etcd does.
        is_new = round_number != self._streak.round_number or (is_last and entry.is_member)
        self._streak = _Streak(1 if is_new else self._streak.count + 1, now, round_number)

    def newest_checkpoint(self) -> CheckpointRecord | None:
        """Return the job's newest checkpoint; None: none is known."""
        # An unreadable record is reported by workers that resume from it.
        return readable(CheckpointRecord, self._mirror.get(self._keys.checkpoint))

    def _checkpoint_step(self) -> int:
        """Return the step of the job's newest checkpoint; 0: none is known."""
        record = self.newest_checkpoint()
        return record.global_step if record is not None else 0

    def _stop_reason(self) -> str:
        # An unreadable record is reported when it is read for the next write.
        record = readable(NodesRecord, self._mirror.get(self._keys.nodes))
        return record.stop if record is not None else ""


def _read(file: Path) -> str:
    try:
        return read_tail(file)
    except OSError as error:
        log.warning("the last output of a node cannot be read: %s", error)
        return ""
