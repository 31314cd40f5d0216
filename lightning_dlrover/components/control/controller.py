"""Keep the nodes of one job as its plan says.

`Controller` holds the job's `controller` key, looks at etcd and at the scheduler, lets `reconcile.py` decide and carries that
out. Whatever it must not forget is in etcd before it acts, so it may be killed at any moment and started again: a node's name
is written down before the scheduler is asked for it, its cancellation before it is cancelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from lightning_dlrover.components.control.failures import (
    likeness,
    num_refusals,
    refusals,
)
from lightning_dlrover.components.control.post_mortem import (
    PostMortem,
    examine,
)
from lightning_dlrover.components.control.reconcile import (
    Action,
    AddNode,
    CancelNode,
    Give,
    JobView,
    Node,
    Patience,
    Warn,
    reconcile,
    why_none_is_added,
)
from lightning_dlrover.components.targets.logs import (
    LogFile,
    read_tail,
)
from lightning_dlrover.components.targets.target import (
    ANY_SIZE,
    App,
    AppStatus,
    NodeSize,
    NotTakenError,
    Target,
    TargetError,
)
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.lease import Lease
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import (
    Compare,
    Delete,
    KeyValue,
    Put,
    absent,
    created,
    modified,
)
from lightning_dlrover.rdzv.job.records import (
    HISTORY_TTL_S,
    CheckpointRecord,
    ControllerRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    PlanRecord,
    RecordError,
    decode,
    encode,
)
from lightning_dlrover.rdzv.live.requests import ask_for_replacement
from lightning_dlrover.rdzv.live.rounds import View
from lightning_dlrover.rdzv.live.view import read_view

__all__ = ["Controller", "ControllerBusyError", "Limits"]

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0
MAX_ENDED = 64
"""Nodes that have ended and are remembered, the newest: errors that come again and again are counted among them."""

MIRROR_S = 5.0
"""How long what was written may take to be seen; it is seen later otherwise."""

OUT_OF_MEMORY_FACTOR = 2
"""How much more memory nodes have once one was killed for want of it: how much it would have needed nobody knows."""

MAX_REFUSED = 8
"""Refused nodes that are remembered, the newest: a quota that stays full must not push out what has failed otherwise."""

SAME_FAILURE_S = 30.0
"""Nodes that fail within so many seconds of each other fail for one reason: the first one's."""


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


@dataclass(frozen=True)
class Limits:
    """How many workers the job may have, and how large each one's node may be."""

    min_workers: int
    max_workers: int
    min_size: NodeSize = ANY_SIZE
    max_size: NodeSize = ANY_SIZE

    def size(self, plan: PlanRecord | None) -> NodeSize:
        """Of nodes as `plan` wants them, as far as it may."""
        asked = (plan.node_cpus or 0, plan.node_memory_mb or 0) if plan is not None else (0, 0)
        low, high = self.min_size, self.max_size
        return NodeSize(min(high.cpus, max(low.cpus, asked[0])), min(high.memory_mb, max(low.memory_mb, asked[1])))


@dataclass
class _App:
    """What we remember of one node."""

    handle: str | None  # None: refused, or not known yet whether the scheduler has taken it on
    started_at: float
    asked_at: float  # seconds since the epoch
    size: NodeSize
    status: AppStatus = "pending"
    agent_seen: bool = False
    has_worker: bool = False
    is_member: bool = False
    running_since: float | None = None
    worker_seen_at: float | None = None
    member_seen_at: float | None = None
    trained_s: float = 0.0  # as a member
    checkpoint_step: int = 0  # of the job's newest checkpoint, when it ended
    ended_at: float | None = None
    missing_since: float | None = None  # that the scheduler does not show what it was asked for
    cancel_at: float = 0.0  # time of the next request to cancel it
    post_mortem: PostMortem | None = None
    stopped_job: bool = False
    after_training: bool = False
    warned: bool = False
    cancelled: bool = False
    cancel_failures: int = 0  # requests to cancel it that the scheduler has refused in a row
    refusals_in_a_row: int = 1  # of a refused one: how many there were up to it
    all_shown: bool = False
    lacked_memory: bool = False  # it was killed for that, and the plan says so
    was_adopted: bool = False  # from a controller before us, which has shown its output until then
    saved: NodeRecord | None = None  # what etcd holds
    files: dict[Path, LogFile] = field(default_factory=dict)
    unreadable: set[Path] = field(default_factory=set)  # of which it was said

    @property
    def is_refused(self) -> bool:
        """Whether the scheduler has certainly not taken it on."""
        return self.handle is None and self.status == "failed" and self.post_mortem is not None and bool(self.post_mortem.error)

    @property
    def is_living(self) -> bool:
        """Whether it counts: one that was cancelled has to end, and nothing else is expected of it."""
        return self.status in ("pending", "running") and not self.cancelled

    @property
    def has_ended(self) -> bool:
        return self.status not in ("pending", "running")

    def record(self, now: float) -> NodeRecord:
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
            stopped_job=self.stopped_job,
            after_training=self.after_training,
            trained_s=round(self.trained_s, 1),
            checkpoint_step=self.checkpoint_step,
        )


class Controller:
    """Carries out a job's plan on one target. Use as a context manager: leaving it ends all nodes of the job.

    A process that is killed leaves nodes behind where they outlive it; the next controller of the job goes on with them.

    Args:
        client: connected.
        keys: the job.
        target: where nodes run.
        limits: the plan is kept within these; the lower one is the first plan.
        show: called with every line of the nodes' output, the node's name in front.
        hurry: when set, the end of cancelled nodes is not waited for.

    Raises:
        ControllerBusyError: another controller acts for the job.
        ValueError: the job's nodes run on another kind of target.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        target: Target,
        limits: Limits,
        run_dir: str = "",
        show: Callable[[str], None] = print,
        patience: Patience | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._target = target
        self._limits = limits
        self._show = show
        self._patience = patience or Patience()
        self._hurry = hurry or threading.Event()
        self._apps: dict[str, _App] = {}
        self._strays: dict[str, float] = {}  # handles of nodes that nobody has asked for, and when they were last cancelled
        self._nodes: NodesRecord | None = None
        self._num_taken = 0  # highest number that a node's record has in its name
        self._failures_in_a_row = 0
        self._failed_at = 0.0
        self._had_member = False
        self._finished_at: float | None = None  # when the job's training was first seen to be done
        self._looked_at = time.monotonic()
        self._plan_by_hand = 0  # revision of the last plan that somebody has made by hand
        self._forgiven_at = time.monotonic()  # nodes that failed before do not keep others from being added
        self._held_up = ""  # why nodes that the plan wants are not added
        self._trouble = ""  # of these reasons, the kind that the job's history has been told
        self._round_at_failure = 0
        self._cache: dict[str, Any] = {}
        self._is_closed = False
        self._is_ending = False
        self._has_given_up_etcd = False  # while ending: each request to one that is away takes seconds
        self._claim: Lease | None = None  # whether it holds the controller key is not known
        self._etcd_away_since: float | None = None
        self._scheduler_away_since: float | None = None
        self._record = ControllerRecord(socket.gethostname(), os.getpid(), target.name, {}, run_dir)
        client.share_lifetime(keys.root, HISTORY_TTL_S)
        self._lease, self._fence = self._take_over()
        self._mirror = Mirror(client, keys.live)
        self._seen_revision = 0
        try:
            self._adopt()
        except BaseException:
            self._mirror.close()
            self._lease.revoke()
            raise
        plan = PlanRecord(
            limits.min_workers,
            "initial",
            f"start with the fewest workers, {limits.min_workers}",
            binding=True,
            created_at=time.time(),
        )
        client.txn([absent(keys.plan)], [Put(keys.plan, encode(plan))])

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> Give | None:
        """Look, act, and show new output. Returns what ended the job, or None while it goes on.

        Raises:
            ControllerBusyError: another controller has taken over.
        """
        may_act = self._holds_key()
        self._seen_revision = self._mirror.revision
        view = self._view()
        self._compare(may_act)
        self._look(view)
        if may_act:
            self._replace_what_is_wanted_back(view)
            if self._give_more_memory():
                view = self._view()
            self._withdraw_what_is_too_large(view)
            self._replace_what_is_too_small(view)
        self._note_plan_by_hand(view)
        job_view = self._job_view(view, may_act)
        self._held_up = why_none_is_added(job_view, self._patience) if may_act else ""
        end = self._act(reconcile(job_view, self._patience), self._limits.size(view.plan))
        self._show_output()
        if may_act:
            self._save()
            self._publish_apps()
        return end

    def wait(self, timeout_s: float) -> None:
        """Return when something in etcd has changed since the last step looked there, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            self._mirror.wait_for(lambda _: True if self._mirror.revision != self._seen_revision else None, timeout_s)

    def failure_text(self) -> str:
        """The traceback that the first of the nodes that failed last has printed, else why it was ended; empty: nobody says."""
        faults = [(app.ended_at or 0.0, app.post_mortem) for app in self._apps.values()]
        known = [(ended_at, found) for ended_at, found in faults if found is not None and (found.error or found.cause)]
        if not known:
            return ""
        last = max(ended_at for ended_at, _ in known)
        _, first = min((f for f in known if f[0] >= last - SAME_FAILURE_S), key=lambda f: f[0])
        return first.traceback or first.error or first.cause

    @property
    def mark(self) -> str:
        """What is in the name of each of the job's nodes at its scheduler."""
        return self._nodes.mark if self._nodes else ""

    def end_nodes(self) -> None:
        """End all nodes that are still running, and wait until they have ended, at most for `Patience.cancel_s`.

        Those that outlive us are left to another controller that has taken over meanwhile.
        """
        self._is_ending = True
        if self._target.outlives_controller and self._awaited() and self._still_acts() is False:
            log.warning(
                "run %s: its nodes are left to whoever acts for it now; `dlrover cancel %s` ends them",
                *(self._keys.run_id, self._keys.run_id),
            )
            return
        deadline = time.monotonic() + self._patience.cancel_s
        self._cancel([name for name, app in self._apps.items() if not app.has_ended])
        while left := self._awaited():
            if time.monotonic() > deadline or self._hurry.is_set():
                break
            time.sleep(0.1)
            self._compare(may_act=True)
            for app in self._apps.values():
                if app.handle and self._target.status(app.handle) not in ("pending", "running"):
                    app.status = "cancelled" if app.cancelled else app.status
        if left:
            log.error(
                "run %s: %s were cancelled %.0f s ago and %s still lists them: look after them yourself",
                *(self._keys.run_id, ", ".join(left), self._patience.cancel_s, self._target.name),
            )
        self._save()
        self._show_output()

    def tell_scheduler_to_end_nodes(self) -> None:
        """Have all nodes cancelled, without a word in etcd and without waiting for their end."""
        with contextlib.suppress(TargetError):
            self._target.cancel([app.handle for app in self._apps.values() if app.handle and not app.has_ended])

    def _awaited(self) -> list[str]:
        """Nodes whose end is waited for. One of unknown fate that does not outlive us ends with its target."""
        outlives = self._target.outlives_controller
        return [name for name, app in self._apps.items() if not app.has_ended and (app.handle or outlives)]

    def close(self) -> None:
        """End all nodes that are still running, and give the job's controller key back."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.end_nodes()
        finally:
            self._target.close()
            self._mirror.close()
            try:
                self._lease.revoke()
            except EtcdError as error:
                log.info("run %s: the controller's lease ends by itself: %s", self._keys.run_id, error)

    # --- the right to act ----------------------------------------------------------------------------------------------

    def _take_over(self) -> tuple[Lease, int]:
        """A lease that holds the controller key, and that key's create revision: the fence of all that we write.

        Raises:
            ControllerBusyError: another one holds it.
            EtcdError: nobody knows who does.
        """
        key = self._keys.controller
        self._drop_claim()
        deadline = time.monotonic() + 2 * LEASE_TTL_S
        # Only its lease says for certain that it is gone: another container of this host may have its name and other processes.
        while self._holder_seems_dead() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._claim = lease = self._client.lease(LEASE_TTL_S)
        self._record = dataclasses.replace(self._record, apps={}, held_up="")
        try:
            self._client.txn([absent(key)], [Put(key, encode(self._record), lease.id)])
            entry = self._client.get(key)  # who holds it now, whatever became of the transaction's first answer
        except EtcdError:
            with contextlib.suppress(EtcdError):  # before the next attempt: it would find the key taken, by us
                self._drop_claim()
            raise
        if entry is not None and entry.lease_id == lease.id:
            self._claim = None
            return lease.keep_alive(), entry.create_revision
        self._drop_claim()
        raise ControllerBusyError(_busy_text(self._client, self._keys))

    @property
    def _is_ours(self) -> Compare:
        """The controller key: what each of our writes is fenced with."""
        return created(self._keys.controller) == self._fence

    def _drop_claim(self) -> None:
        if self._claim is not None:
            self._claim.revoke()
            self._claim = None

    def _still_acts(self) -> bool | None:
        """Whether nobody has taken over; None: etcd does not tell. Asked before what none of etcd's fences can stop.

        A process that was stopped for a while does not know yet that its lease has ended.
        """
        if self._lease.lost.is_set():
            return False
        try:
            entry = self._client.get(self._keys.controller)
        except EtcdError:
            return None
        return entry is not None and entry.create_revision == self._fence

    def _holder_seems_dead(self) -> bool:
        """Whether the key is held by a process of this host that does not exist."""
        entry = self._client.get(self._keys.controller)
        if entry is None:
            return False
        try:
            record = decode(ControllerRecord, entry.value, entry.key)
        except RecordError:
            return False
        return record.host == self._record.host and record.pid > 0 and not psutil.pid_exists(record.pid)

    def _holds_key(self) -> bool:
        """Whether etcd answers and we are the one who acts. Comes back by itself after both have been lost."""
        try:
            if self._lease.lost.is_set():
                self._lease.close()
                self._lease, self._fence = self._take_over()
                self._adopt()  # another controller may have acted in between
        except EtcdError:
            return False
        healthy = self._mirror.healthy
        if healthy != (self._etcd_away_since is None):
            self._etcd_away_since = None if healthy else time.monotonic()
            state = "is back" if healthy else "cannot be reached, nodes are left as they are"
            log.warning("run %s: etcd %s", self._keys.run_id, state)
        return healthy

    # --- what outlives us -----------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take note of what controllers before us have done.

        Raises:
            ValueError: their nodes run on another kind of target, and may live.
        """
        revision, nodes = self._read_nodes()
        _, entries = self._client.get_prefix(self._keys.each_node)
        records = {entry.key.removeprefix(self._keys.each_node): entry for entry in entries}
        self._num_taken = _highest_number(records)
        found = {name: record for name, entry in records.items() if (record := self._decoded(entry)) is not None}
        living = [name for name, record in found.items() if record.state != "ended"]
        outlived = nodes is not None and nodes.target != "local"
        if nodes is None or (nodes.target != self._target.name and not (living and outlived)):
            # A node that has registered without a record is older than such records, and its name is taken.
            names = _nodes_of_agents(self._view()).values()
            newest = max(self._num_taken, _highest_number(names), nodes.num_started if nodes else 0)
            mark = self._nodes.mark if self._nodes else uuid.uuid4().hex[:10]
            nodes = NodesRecord(self._target.name, mark, newest, nodes.stop if nodes else "")
            self._write(self._keys.nodes, nodes, revision)
        if nodes.target != self._target.name:
            there = nodes.target.partition("/")[0] + _kind_of_jobs(nodes.target, self._target.name)
            raise ValueError(
                f"job {self._keys.run_id!r} has nodes on {nodes.target} ({', '.join(living)}); go on with it there "
                f"(--target {there}, and what else it was started with), or end it with `dlrover cancel {self._keys.run_id}`"
            )
        low, high = self._limits.min_size, self._limits.max_size
        limits = {"min_cpus": low.cpus, "max_cpus": high.cpus, "min_memory_mb": low.memory_mb, "max_memory_mb": high.memory_mb}
        if dataclasses.replace(nodes, **limits) != nodes:  # type: ignore[arg-type]
            revision, newest_nodes = self._read_nodes()  # `dlrover cancel` may have written meanwhile
            nodes = dataclasses.replace(newest_nodes or nodes, **limits)  # type: ignore[arg-type]
            self._write(self._keys.nodes, nodes, revision)
        self._nodes = nodes
        self._target.open(nodes.mark)
        now = time.monotonic()
        for name, record in found.items():
            if name in self._apps:
                self._apps[name].saved = record
            elif self._target.outlives_controller:
                self._apps[name] = _restored(record, self._checked_handle(name, record), now)
            else:  # it has ended with the controller that started it
                self._forget(name)

    def _read_nodes(self) -> tuple[int, NodesRecord | None]:
        """What we know of the nodes as a whole, and the revision that it was written at; 0: it was not."""
        entry = self._client.get(self._keys.nodes)
        if entry is None:
            return 0, None
        return entry.mod_revision, decode(NodesRecord, entry.value, entry.key)

    def _checked_handle(self, name: str, record: NodeRecord) -> str | None:
        """The handle in a node's record if it can be that of this node: whoever may write to etcd may write any other."""
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

    def _write(self, key: str, record: NodesRecord | NodeRecord, revision: int | None = None) -> None:
        """Write a record if we still are the one who acts and, if `revision` is given, nobody has written it since.

        Raises:
            EtcdError: it was not written, or nobody can tell.
        """
        unchanged = [modified(key) == revision] if revision is not None else []
        if not self._client.txn([self._is_ours, *unchanged], [Put(key, encode(record))]).succeeded:
            raise EtcdError(f"run {self._keys.run_id}: {key!r} was not written: another controller acts, or has written it")

    def _forget(self, name: str) -> None:
        with contextlib.suppress(EtcdError):  # it is tried again by whoever comes next
            self._client.txn([self._is_ours], [Delete(self._keys.each_node + name)])

    def _save(self) -> None:
        """Bring etcd up to what we know; what cannot be written now is written with the next step."""
        if self._has_given_up_etcd:
            return
        now = time.monotonic()
        try:
            for name, app in self._apps.items():
                record = app.record(now)
                if record != app.saved:
                    self._write(self._keys.each_node + name, record)
                    app.saved = record
        except EtcdError as error:
            log.info("run %s: what became of the nodes is written later: %s", self._keys.run_id, error)
            self._has_given_up_etcd = self._is_ending
            return
        ended = sorted((app.ended_at or now, name) for name, app in self._apps.items() if app.has_ended and app.all_shown)
        for _, name in ended[: max(0, len(ended) - MAX_ENDED)]:
            self._forget(name)
            del self._apps[name]

    # --- looking -------------------------------------------------------------------------------------------------------

    def _view(self) -> View:
        def bad(key: str, error: RecordError) -> None:
            log.error("run %s: ignored a record: %s", self._keys.run_id, error)

        return read_view(self._mirror.snapshot(), self._keys, self._cache, bad)

    def _compare(self, may_act: bool) -> None:
        """Settle what the scheduler and we know differently: nodes of unknown fate, and those that nobody has asked for."""
        now = time.monotonic()
        try:
            listed = self._target.apps()
        except TargetError as error:
            if self._scheduler_away_since is None:
                self._scheduler_away_since = now
                log.warning("run %s: nodes are taken to be as they were: %s", self._keys.run_id, error)
            return
        if self._scheduler_away_since is not None:
            log.warning("run %s: %s answers again", self._keys.run_id, self._target.name)
            self._scheduler_away_since = None
        for seen in listed:
            app = self._apps.get(seen.node)
            if app is not None and app.handle is None and not app.has_ended:
                log.info("run %s: %s has taken %s on", self._keys.run_id, self._target.name, seen.node)
                app.handle = seen.handle
        for name, app in self._apps.items():
            if app.handle is not None or app.has_ended:
                continue
            app.missing_since = app.missing_since if app.missing_since is not None else now
            if now - app.missing_since > self._patience.submit_s:
                log.warning("run %s: %s was asked for, but never came", self._keys.run_id, name)
                app.status, app.ended_at, app.all_shown = "failed", now, True
                self._failures_in_a_row, self._failed_at = self._failures_in_a_row + 1, now
        if may_act:
            self._cancel_again()
            self._cancel_strays(listed, now)

    def _cancel_strays(self, listed: Sequence[App], now: float) -> None:
        """End what runs in our name though no record says so: a request that was given up has been carried out after all."""
        known = {app.handle for app in self._apps.values() if not app.has_ended or app.cancelled}
        strays = [a for a in listed if a.is_living and a.handle not in known]
        due = [a for a in strays if now - self._strays.get(a.handle, -float("inf")) > self._patience.cancel_s]
        # A node whose end we know may be listed as living for a moment.
        ended_at = {app.handle: app.ended_at or now for app in self._apps.values()}
        due = [a for a in due if now - ended_at.get(a.handle, -float("inf")) > self._patience.settle_s]
        if not due or not self._still_acts():
            return
        log.warning("run %s: ending %s: nobody has asked for it", self._keys.run_id, ", ".join(a.handle for a in due))
        self._strays.update((a.handle, now) for a in due)
        try:
            self._target.cancel([a.handle for a in due])
        except TargetError as error:
            log.warning("run %s: %s", self._keys.run_id, error)

    def _look(self, view: View) -> None:
        """Bring what we remember of the nodes up to date."""
        now = time.monotonic()
        names = _nodes_of_agents(view)
        with_agent = set(names.values())
        with_worker = {names.get(worker.agent_id, "") for worker in view.workers.values()}
        with_member = {names.get(view.workers[worker].agent_id, "") for worker in view.survivors}
        if self._had_member and not with_member:
            # While others trained, failures said nothing about a start without them: they may have held what a new node needs.
            self._failures_in_a_row = 0
        self._had_member = bool(with_member)
        if self._finished_at is None and view.job is not None and view.job.phase == "finished":
            self._finished_at = now
        since_look_s, self._looked_at = now - self._looked_at, now
        for name, app in self._apps.items():
            app.trained_s += since_look_s if app.is_member and name in with_member else 0.0
            app.agent_seen = app.agent_seen or name in with_agent
            app.has_worker, app.is_member = name in with_worker, name in with_member
            app.worker_seen_at = now if app.has_worker else app.worker_seen_at
            app.member_seen_at = now if app.is_member else app.member_seen_at
            if not app.has_ended and app.handle:
                status = self._target.status(app.handle)
                if status == "running" and app.running_since is None:
                    app.running_since = now
                if status == app.status:
                    continue
                ended = status not in ("pending", "running")
                app.status = "cancelled" if ended and app.cancelled else status
                if ended and not app.cancelled:
                    self._note_end(name, app, app.handle, view, now, is_last=not with_member - {name})

    def _replace_what_is_wanted_back(self, view: View) -> None:
        """Start another node for each that the scheduler is going to end; its worker leaves once that one is ready."""
        nodes = _nodes_of_agents(view)
        workers = {nodes.get(record.agent_id, ""): worker for worker, record in view.workers.items()}
        for name, app in self._apps.items():
            if not app.is_member or app.cancelled or app.has_ended or app.handle is None:
                continue
            if not self._target.wants_back(app.handle):
                continue
            worker = workers[name]
            if worker not in view.drains | view.replacements:
                self._ask_for_replacement(worker, f"{self._target.name} wants {name} back")

    def _ask_for_replacement(self, worker: str, reason: str) -> None:
        """Let a worker leave once another one can take its place, unless it has gone or was asked to leave already."""
        log.info("run %s: %s is to be replaced: %s", self._keys.run_id, worker, reason)
        with contextlib.suppress(EtcdError):  # the next step tries it again
            ask_for_replacement(self._client, self._keys, worker, reason, self._is_ours)

    def _withdraw_what_is_too_large(self, view: View) -> None:
        """End nodes that wait for more than is planned any more, such as than any host has: nothing comes before them."""
        wanted = self._limits.size(view.plan)
        too_large = [
            name
            for name, app in self._apps.items()
            if app.is_living and app.status == "pending" and app.handle and not wanted.is_at_least(app.size)
        ]
        if too_large and self._still_acts():
            log.info("run %s: ending %s, which wait for more than is planned now", self._keys.run_id, ", ".join(too_large))
            self._cancel(too_large)

    def _replace_what_is_too_small(self, view: View) -> None:
        """Ask for the replacement of one node that is smaller than planned; the next one's turn is when that is done."""
        wanted = self._limits.size(view.plan)
        living = [app for app in self._apps.values() if app.is_living]
        small = {name: app for name, app in self._apps.items() if app.is_living and not app.size.is_at_least(wanted)}
        trains = view.job is not None and view.job.phase == "training"
        is_changing = view.replacements or view.drains & view.workers.keys() or not all(app.is_member for app in living)
        if not small or not trains or is_changing:
            return
        nodes = _nodes_of_agents(view)
        for worker in view.survivors:
            if (app := small.get(nodes.get(view.workers[worker].agent_id, ""))) is not None:
                self._ask_for_replacement(worker, f"a node of {wanted} instead of {app.size}")
                return

    def _give_more_memory(self) -> bool:
        """Plan larger nodes once one was killed for want of memory; as the plan says that, whoever comes next knows.

        Returns whether the plan may have changed.
        """
        may_have_changed = False
        now = time.monotonic()
        for name, app in self._apps.items():
            recent = app.status == "failed" and now - (app.ended_at or now) < SAME_FAILURE_S
            if not recent or app.lacked_memory or app.handle is None or not self._target.ran_out_of_memory(app.handle):
                continue
            app.lacked_memory = may_have_changed = True
            asked = OUT_OF_MEMORY_FACTOR * app.size.memory_mb
            try:
                given = self._plan_memory(asked)
                text = f"{name} was killed for want of memory ({app.size}); "
                text += f"nodes have {given} MiB from now on" if given > app.size.memory_mb else self._why_no_more_memory(app)
                act = "enlarge" if given > app.size.memory_mb else "none"
                self._tell("memory", text, {"act": act, "node": name, "node_memory_mb": given})
            except (EtcdError, RecordError) as error:
                app.lacked_memory = False
                log.warning("run %s: that nodes need more memory is planned later: %s", self._keys.run_id, error)
                break
            log.warning("run %s: %s", self._keys.run_id, text)
        return may_have_changed

    def _why_no_more_memory(self, app: _App) -> str:
        if not app.size.memory_mb:
            return "how much it had is not known here; start the job with --mem MIN:MAX, and nodes get more when they need it"
        return f"they may have no more than that (--mem MIN:MAX): {app.size.memory_mb} MiB"

    def _plan_memory(self, memory_mb: int) -> int:
        """Ask for nodes with so much memory, as far as the limits allow. Returns what they have then, in MiB."""
        key = self._keys.plan
        while (entry := self._client.get(key)) is not None:
            plan = decode(PlanRecord, entry.value, key)
            wanted = dataclasses.replace(plan, node_memory_mb=min(memory_mb, self._limits.max_size.memory_mb))
            larger, now = self._limits.size(wanted).memory_mb, self._limits.size(plan).memory_mb
            if larger <= now:
                return now
            wanted = dataclasses.replace(wanted, created_at=time.time())
            if self._client.txn([self._is_ours, modified(key) == entry.mod_revision], [Put(key, encode(wanted))]).succeeded:
                # The next node is started by what the mirror shows.
                with contextlib.suppress(TimeoutError):
                    self._mirror.wait_for(functools.partial(_newer, key, entry.mod_revision), MIRROR_S)
                return larger
            if not self._still_acts():
                break
        raise EtcdError(f"{key!r} was not written: it has gone, or another controller acts")

    def _tell(self, kind: str, text: str, data: dict[str, Any] | None = None) -> bool:
        """Add to the job's history, if we still are the one who acts."""
        event = EventRecord(kind, time.time(), text[:2000], data or {})
        key = f"{self._keys.events}{time.time_ns():020d}-controller"
        return self._client.txn([self._is_ours], [Put(key, encode(event))]).succeeded

    def _note_end(self, name: str, app: _App, handle: str, view: View, now: float, is_last: bool) -> None:
        app.ended_at = now
        log.info("run %s: %s has %s", self._keys.run_id, name, app.status)
        if app.status != "failed":
            return
        app.post_mortem = examine("\n".join(_read(file) for file in self._target.logs(handle)))
        if self._target.ran_out_of_memory(handle):
            # Not the script's fault as long as the next node may have more.
            can_grow = app.size.memory_mb < self._limits.max_size.memory_mb
            app.post_mortem = dataclasses.replace(app.post_mortem, error="" if can_grow else "out of memory")
        # Without an error of the script, the node may have been killed in its last step, which others finished without it.
        has_finished_s = now - self._finished_at if self._finished_at is not None else -1.0
        is_late = has_finished_s >= (0.0 if app.post_mortem.error else self._patience.settle_s)
        trains_again = view.job is not None and bool(view.job.unfinished_fit) and not app.post_mortem.error
        app.after_training = is_late and app.member_seen_at is not None and not trains_again
        app.stopped_job, app.checkpoint_step = is_last, self._checkpoint_step()
        round_number = view.round.number if view.round else 0
        # A round formed since the last failure is progress: the two have nothing to do with each other.
        # Nor has that of the last member, of which the scheduler may know before etcd does, with starts that failed beside it.
        is_news = round_number != self._round_at_failure or (is_last and app.is_member)
        self._failures_in_a_row = 1 if is_news else self._failures_in_a_row + 1
        self._failed_at, self._round_at_failure = now, round_number

    def _checkpoint_step(self) -> int:
        """Step of the job's newest checkpoint; 0: none is known of."""
        entry = self._mirror.get(self._keys.checkpoint)
        try:
            return max(0, decode(CheckpointRecord, entry.value, entry.key).global_step) if entry else 0
        except RecordError:
            return 0  # workers that want to go on from it report it

    def _note_plan_by_hand(self, view: View) -> None:
        """Forgive what kept nodes from being added once somebody asks for another plan: its cause may have been mended."""
        entry = self._mirror.get(self._keys.plan)
        is_by_hand = view.plan is not None and view.plan.source == "user"
        if entry is not None and is_by_hand and entry.mod_revision > self._plan_by_hand:
            self._plan_by_hand, self._forgiven_at = entry.mod_revision, time.monotonic()

    def _job_view(self, view: View, may_act: bool) -> JobView:
        now = time.monotonic()
        plan = view.plan.num_workers if view.plan is not None and view.plan.binding else self._limits.min_workers
        nodes = [self._node(name, app, now) for name, app in self._apps.items()]
        # Those to be replaced train on until others have started.
        replacements = len(view.replacements & set(view.survivors))
        return JobView(
            phase=view.job.phase if view.job is not None else "none",
            unfinished_fit=view.job.unfinished_fit if view.job is not None else 0,
            wanted=min(self._limits.max_workers, max(self._limits.min_workers, plan)) + replacements,
            nodes=nodes,
            may_act=may_act,
            etcd_away_s=now - self._etcd_away_since if self._etcd_away_since is not None else 0.0,
            failures_in_a_row=self._failures_in_a_row,
            since_failure_s=now - self._failed_at,
            fewest=self._limits.min_workers,
            checkpoint_step=self._checkpoint_step(),
            stop=self._stop_reason(),
        )

    def _node(self, name: str, app: _App, now: float) -> Node:
        return Node(
            name=name,
            status="cancelled" if app.cancelled else app.status,
            agent_seen=app.agent_seen,
            has_worker=app.has_worker,
            is_member=app.is_member,
            workerless_s=now - app.worker_seen_at if app.worker_seen_at is not None else 0.0,
            idle_s=now - (app.member_seen_at or app.started_at),
            age_s=now - app.running_since if app.running_since is not None else 0.0,
            asked_s=now - app.started_at,
            trained_s=app.trained_s,
            refused=app.is_refused,
            refusals_in_a_row=app.refusals_in_a_row,
            checkpoint_step=app.checkpoint_step,
            forgiven=app.ended_at is not None and app.ended_at <= self._forgiven_at,
            ended_s=now - app.ended_at if app.ended_at is not None else 0.0,
            error=app.post_mortem.error if app.post_mortem else "",
            stopped_job=app.stopped_job,
            after_training=app.after_training,
            warned=app.warned,
        )

    def _stop_reason(self) -> str:
        entry = self._mirror.get(self._keys.nodes)
        try:
            return decode(NodesRecord, entry.value, entry.key).stop if entry else ""
        except RecordError:
            return ""  # said when it is read to be written

    # --- acting --------------------------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[Action], size: NodeSize) -> Give | None:
        end = None
        may_add = True
        cancelled = []
        for action in actions:
            match action:
                case AddNode():
                    may_add = may_add and self._add(size)
                case CancelNode():
                    log.info("run %s: ending %s: %s", self._keys.run_id, action.name, action.reason)
                    cancelled.append(action.name)
                case Warn():
                    self._apps[action.name].warned = True
                    log.warning("run %s: %s", self._keys.run_id, action.text)
                case Give():
                    end = action
        if cancelled and self._target.outlives_controller and self._still_acts() is False:
            cancelled = []  # they are another controller's now
        self._cancel(cancelled)
        # No round is formed in a job that has failed, so its workers could not hand over and leave.
        if end is not None and any(app.cancelled and not app.has_ended for app in self._apps.values()):
            waited_s = time.monotonic() - max(app.ended_at or 0.0 for app in self._apps.values() if app.cancelled)
            if waited_s < self._patience.cancel_s:
                return None
        if end is not None and end.exit_code and not self._declare_failed(end.reason):
            return None  # the next step finds out who acts now
        return end

    def _add(self, size: NodeSize) -> bool:
        """Start one more node; False if this is not the time to start any."""
        try:
            name, app = self._ask(size)
        except (EtcdError, RecordError) as error:
            # What is not written down must not exist.
            log.warning("run %s: no node is started for now: %s", self._keys.run_id, error)
            return False
        self._apps[name] = app
        now = time.monotonic()
        try:
            app.handle = self._target.start(name, size)
        except TargetError as error:
            if not isinstance(error, NotTakenError):
                log.warning("run %s: whether %s was started is not known yet: %s", self._keys.run_id, name, error)
                return False
            self._note_refusal(name, app, now, str(error))
        except Exception as error:  # schedulers raise what they like
            self._note_refusal(name, app, now, f"{type(error).__name__}: {error}")
        else:
            log.info("run %s: started %s", self._keys.run_id, name)
        self._save()
        return not app.has_ended

    def _ask(self, size: NodeSize) -> tuple[str, _App]:
        """A new node's name, written down."""
        revision, nodes = self._read_nodes()
        if nodes is None:  # somebody has deleted the job's keys
            assert self._nodes is not None
            nodes = self._nodes
        number = max(nodes.num_started, self._num_taken) + 1
        record = NodeRecord("asked", asked_at=time.time(), cpus=size.cpus, memory_mb=size.memory_mb)
        name = f"node{number}"
        written = dataclasses.replace(nodes, num_started=number)
        key, own_key = self._keys.nodes, self._keys.each_node + f"node{number}"
        guard = [self._is_ours, modified(key) == revision, absent(own_key)]
        if not self._client.txn(guard, [Put(key, encode(written)), Put(own_key, encode(record))]).succeeded:
            raise EtcdError(f"{key!r} was written by somebody else meanwhile")
        self._nodes = written
        return name, _App(None, time.monotonic(), record.asked_at, size, saved=record)

    def _note_refusal(self, name: str, app: _App, now: float, problem: str) -> None:
        log.error("run %s: %s could not be started: %s", self._keys.run_id, name, problem)
        # Counted on, as the oldest are forgotten: the pause before the next attempt grows with their number.
        earlier = refusals([self._node(other, each, now) for other, each in self._apps.items() if each is not app])
        app.refusals_in_a_row = 1 + num_refusals(earlier)
        app.post_mortem = PostMortem(f"it could not be started: {problem}", "")
        app.status, app.ended_at, app.all_shown = "failed", now, True
        refused = [other for other, each in self._apps.items() if each.is_refused]
        for other in refused[:-MAX_REFUSED]:
            self._forget(other)
            del self._apps[other]

    def _cancel(self, names: Sequence[str]) -> None:
        """End nodes, all at once. Of those whose fate is unknown, what the scheduler shows later is ended then."""
        for name in names:
            self._apps[name].cancelled = True
            self._apps[name].ended_at = self._apps[name].ended_at or time.monotonic()
        if names and self._target.outlives_controller:
            self._save()  # the others end with us: that must not wait for an etcd that is away
        self._cancel_again()

    def _cancel_again(self) -> None:
        """Have the scheduler end what was cancelled and has not ended; what it refuses is asked for ever more rarely."""
        now = time.monotonic()
        due = {
            app.handle: app
            for app in self._apps.values()
            if app.cancelled and not app.has_ended and app.handle is not None and now >= app.cancel_at
        }
        if not due:
            return
        try:
            self._target.cancel(due)
        except TargetError as error:
            for app in due.values():
                app.cancel_failures += 1
            num_failures = max(app.cancel_failures for app in due.values())
            pause_s = min(self._patience.cancel_s, self._patience.first_cancel_s * 2.0 ** min(20, num_failures - 1))
            for app in due.values():
                app.cancel_at = now + pause_s
            log.warning(
                "run %s: %s could not be ended, which is tried again in %.0f s: %s",
                *(self._keys.run_id, ", ".join(due), pause_s, error),
            )
            return
        for app in due.values():
            app.cancel_at, app.cancel_failures = now + self._patience.cancel_s / 2, 0
            if not self._target.outlives_controller:
                app.status = "cancelled"

    def _publish_apps(self) -> None:
        apps = {name: app.handle or "" for name, app in self._apps.items() if app.is_living}
        record = dataclasses.replace(self._record, apps=apps, held_up=self._held_up[:2000])
        if record == self._record:
            return
        try:
            self._client.put(self._keys.controller, encode(record), self._lease)
            self._record = record
        except EtcdError as error:
            log.info("run %s: the list of nodes is written later: %s", self._keys.run_id, error)
            return
        kind = likeness(self._held_up)  # the same with other counts and pauses is no news
        if kind and kind != self._trouble:
            log.warning("run %s: %s", self._keys.run_id, self._held_up)
            with contextlib.suppress(EtcdError):  # status has it all the same
                self._tell("nodes", self._held_up)
        self._trouble = kind

    def _declare_failed(self, reason: str) -> bool:
        """Tell nodes that others have started, and whoever asks later.

        Returns:
            False if another controller may act by now: it is for that one to say whether the job has failed.
        """
        key = self._keys.job
        try:
            acts = self._tell("error", f"the job has failed: {reason}")
            while acts and (entry := self._client.get(key)) is not None:
                job = decode(JobRecord, entry.value, key)
                if job.phase in ("finished", "failed"):
                    break
                failed = encode(dataclasses.replace(job, phase="failed", message=reason[:2000]))
                if self._client.txn([self._is_ours, modified(key) == entry.mod_revision], [Put(key, failed)]).succeeded:
                    break
                acts = self._still_acts() is not False
            if acts:  # a worker that leaves a job that has ended does the same; the last one may have left before
                self._client.txn([self._is_ours], [Delete(self._keys.plan)])
                self._client.delete_prefix(self._keys.drains)
            return acts
        except (EtcdError, RecordError) as error:
            log.warning("run %s: could not be marked as failed: %s", self._keys.run_id, error)
            return True

    # --- output --------------------------------------------------------------------------------------------------------

    def _show_output(self) -> None:
        for name, app in self._apps.items():
            if app.all_shown or app.handle is None:
                continue
            # Only what a node that still lives writes may end in the middle of a line.
            app.all_shown = app.has_ended
            was_adopted, app.was_adopted = app.was_adopted, False
            for file in self._target.logs(app.handle):
                if app.cancelled and file.name.startswith("stderr"):
                    continue  # the agent's traceback for a signal that came from us
                try:
                    if file not in app.files:
                        log_file = LogFile(file)
                        if was_adopted:
                            log_file.skip()
                        app.files[file] = log_file
                    lines = list(app.files[file].new_lines(whole=app.has_ended))
                except OSError as error:
                    # A shared file system has its moments; what is not read now is read with the next step.
                    app.all_shown, app.was_adopted = False, was_adopted
                    if file not in app.unreadable:
                        app.unreadable.add(file)
                        log.warning("run %s: the output of %s cannot be read for now: %s", self._keys.run_id, name, error)
                    continue
                for line in lines:
                    self._show(f"[{name}] {line}")


def _restored(record: NodeRecord, handle: str | None, now: float) -> _App:
    """A node of an earlier controller. How long it has done nothing is counted anew."""
    size = NodeSize(record.cpus, record.memory_mb)
    app = _App(handle, now, record.asked_at, size, cancelled=record.cancelled, was_adopted=True, saved=record)
    app.ended_at = now if record.cancelled else None
    app.worker_seen_at = now if record.had_worker else None
    if record.state == "ended":
        app.status = record.outcome or "gone"
        app.ended_at = now - max(0.0, time.time() - record.ended_at)
        app.post_mortem = PostMortem(record.error, "") if record.outcome == "failed" else None
        app.stopped_job, app.all_shown = record.stopped_job, True
        app.after_training = record.after_training
        app.trained_s, app.checkpoint_step = record.trained_s, record.checkpoint_step
    return app


def _highest_number(names: Iterable[str]) -> int:
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"node(\d{1,18})", name))), default=0)


def _nodes_of_agents(view: View) -> dict[str, str]:
    """The name of each agent's node, by agent; empty for one that no controller has started."""
    return {agent.agent_id: agent.labels.get("node", "") for agent in view.agents.values()}


def _kind_of_jobs(then: str, now: str) -> str:
    """The option for a cluster of Kubernetes that has got Volcano since."""
    return " --plain-jobs" if now == f"{then}/volcano" else ""


def _newer(key: str, revision: int, seen: Mapping[str, KeyValue]) -> KeyValue | None:
    """The key as it was written after `revision`."""
    return seen[key] if key in seen and seen[key].mod_revision > revision else None


def _read(file: Path) -> str:
    try:
        return read_tail(file)
    except OSError as error:
        log.warning("what a node has said before its end cannot be read: %s", error)
        return ""


def _busy_text(client: EtcdClient, keys: Keys) -> str:
    entry = client.get(keys.controller)
    who = "another controller"
    if entry is not None:
        with contextlib.suppress(RecordError):
            record = decode(ControllerRecord, entry.value, entry.key)
            who = f"process {record.pid} on {record.host}"
    return (
        f"job {keys.run_id!r} is already run by {who}; choose another --rdzv-id, or use `dlrover scale` to resize it "
        f"(if that process was killed a moment ago: try again in {LEASE_TTL_S:.0f} s)"
    )
