"""Keep the nodes of one job as its plan says.

`Controller` holds the job's `controller` key, looks at etcd and at the scheduler, lets `reconcile.py` decide and carries that
out. What it knows is in etcd, so it may be started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dlrover.components.post_mortem import PostMortem, examine
from lightning_dlrover.components.reconcile import (
    Action,
    AddNode,
    AppStatus,
    CancelNode,
    Give,
    JobView,
    Node,
    Patience,
    Warn,
    reconcile,
)
from lightning_dlrover.rdzv.client import EtcdClient, EtcdError, Lease, Mirror, Put, absent, modified
from lightning_dlrover.rdzv.membership import read_view
from lightning_dlrover.rdzv.records import (
    HISTORY_TTL_S,
    ControllerRecord,
    EventRecord,
    JobRecord,
    Keys,
    PlanRecord,
    RecordError,
    decode,
    encode,
)
from lightning_dlrover.rdzv.rounds import View

if TYPE_CHECKING:
    from lightning_dlrover.components.targets import Target

__all__ = ["Controller", "ControllerBusyError", "Limits"]

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0
SAME_FAILURE_S = 30.0
"""Nodes that fail within so many seconds of each other fail for one reason: the first one's."""


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


@dataclass(frozen=True)
class Limits:
    """How many workers the job may have."""

    min_workers: int
    max_workers: int


@dataclass
class _App:
    """What we remember of one node."""

    handle: str
    started_at: float
    status: AppStatus = "pending"
    agent_seen: bool = False
    has_worker: bool = False
    is_member: bool = False
    worker_seen_at: float | None = None
    member_seen_at: float | None = None
    ended_at: float | None = None
    post_mortem: PostMortem | None = None
    stopped_job: bool = False
    warned: bool = False
    cancelled: bool = False
    all_shown: bool = False
    shown: dict[Path, int] = field(default_factory=dict)  # bytes of each file

    @property
    def is_living(self) -> bool:
        return self.status in ("pending", "running")


class Controller:
    """Carries out a job's plan on one target. Use as a context manager: leaving it ends all nodes that it started.

    Args:
        client: connected.
        keys: the job.
        target: where nodes run.
        limits: the plan is kept within these; the lower one is the first plan.
        show: called with every line of the nodes' output, the node's name in front.

    Raises:
        ControllerBusyError: another controller acts for the job.
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
    ) -> None:
        self._client = client
        self._keys = keys
        self._target = target
        self._limits = limits
        self._show = show
        self._patience = patience or Patience()
        self._apps: dict[str, _App] = {}
        self._failures_in_a_row = 0
        self._failed_at = 0.0
        self._round_at_failure = 0
        self._cache: dict[str, Any] = {}
        self._is_closed = False
        self._etcd_away_since: float | None = None
        self._record = ControllerRecord(socket.gethostname(), os.getpid(), target.name, {}, run_dir)
        client.share_lifetime(keys.root, HISTORY_TTL_S)
        self._lease = self._take_over()
        self._mirror = Mirror(client, keys.live)
        # Nodes of a controller before us may still be ending; their names must not be taken for ours.
        labels = [agent.labels.get("node", "") for agent in self._view().agents.values()]
        self._num_started = max((int(m[1]) for label in labels if (m := re.fullmatch(r"node(\d+)", label))), default=0)
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
        view = self._view()
        self._look(view)
        end = self._act(reconcile(self._job_view(view, may_act), self._patience))
        self._show_output()
        if may_act:
            self._publish_apps()
        return end

    def wait(self, timeout_s: float) -> None:
        """Return when something in etcd has changed, or after `timeout_s`."""
        revision = self._mirror.revision
        with contextlib.suppress(TimeoutError):
            self._mirror.wait_for(lambda _: True if self._mirror.revision != revision else None, timeout_s)

    def failure_text(self) -> str:
        """The traceback that the first of the nodes that failed last has printed; empty if there is none."""
        faults = [(app.ended_at or 0.0, app.post_mortem) for app in self._apps.values()]
        known = [(ended_at, found) for ended_at, found in faults if found is not None and found.error]
        if not known:
            return ""
        last = max(ended_at for ended_at, _ in known)
        _, first = min((f for f in known if f[0] >= last - SAME_FAILURE_S), key=lambda f: f[0])
        return first.traceback or first.error

    def end_nodes(self) -> None:
        """End all nodes that are still running."""
        self._cancel([name for name, app in self._apps.items() if app.is_living])
        self._show_output()

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

    def _take_over(self) -> Lease:
        """A lease that holds the controller key.

        Raises:
            ControllerBusyError: another one holds it.
        """
        lease = self._client.lease(LEASE_TTL_S)
        key = self._keys.controller
        if not self._client.txn([absent(key)], [Put(key, encode(self._record), lease.id)]).succeeded:
            lease.revoke()
            raise ControllerBusyError(_busy_text(self._client, self._keys))
        return lease.keep_alive()

    def _holds_key(self) -> bool:
        """Whether etcd answers and we are the one who acts. Comes back by itself after both have been lost."""
        try:
            if self._lease.lost.is_set():
                self._lease.close()
                self._lease = self._take_over()
        except EtcdError:
            return False
        healthy = self._mirror.healthy
        if healthy != (self._etcd_away_since is None):
            self._etcd_away_since = None if healthy else time.monotonic()
            state = "is back" if healthy else "cannot be reached, nodes are left as they are"
            log.warning("run %s: etcd %s", self._keys.run_id, state)
        return healthy

    # --- looking -------------------------------------------------------------------------------------------------------

    def _view(self) -> View:
        def bad(key: str, error: RecordError) -> None:
            log.error("run %s: ignored a record: %s", self._keys.run_id, error)

        return read_view(self._mirror.snapshot(), self._keys, self._cache, bad)

    def _look(self, view: View) -> None:
        """Bring what we remember of the nodes up to date."""
        now = time.monotonic()
        names = {agent.agent_id: agent.labels.get("node", "") for agent in view.agents.values()}
        with_agent = set(names.values())
        with_worker = {names.get(worker.agent_id, "") for worker in view.workers.values()}
        with_member = {names.get(view.workers[worker].agent_id, "") for worker in view.survivors}
        for name, app in self._apps.items():
            app.agent_seen = app.agent_seen or name in with_agent
            app.has_worker, app.is_member = name in with_worker, name in with_member
            app.worker_seen_at = now if app.has_worker else app.worker_seen_at
            app.member_seen_at = now if app.is_member else app.member_seen_at
            if app.is_living and (status := self._target.status(app.handle)) != app.status:
                app.status = status
                if status not in ("pending", "running"):
                    self._note_end(name, app, view, now, is_last=not with_member - {name})

    def _note_end(self, name: str, app: _App, view: View, now: float, is_last: bool) -> None:
        app.ended_at = now
        log.info("run %s: %s has %s", self._keys.run_id, name, app.status)
        if app.status != "failed":
            return
        app.post_mortem = examine("\n".join(_read(file) for file in self._target.logs(app.handle)))
        app.stopped_job = is_last
        round_number = view.round.number if view.round else 0
        # A round formed since the last failure is progress: the two have nothing to do with each other.
        self._failures_in_a_row = self._failures_in_a_row + 1 if round_number == self._round_at_failure else 1
        self._failed_at, self._round_at_failure = now, round_number

    def _job_view(self, view: View, may_act: bool) -> JobView:
        now = time.monotonic()
        plan = view.plan.num_workers if view.plan is not None and view.plan.binding else self._limits.min_workers
        nodes = [
            Node(
                name=name,
                status=app.status,
                agent_seen=app.agent_seen,
                has_worker=app.has_worker,
                is_member=app.is_member,
                workerless_s=now - app.worker_seen_at if app.worker_seen_at is not None else 0.0,
                idle_s=now - (app.member_seen_at or app.started_at),
                age_s=now - app.started_at,
                ended_s=now - app.ended_at if app.ended_at is not None else 0.0,
                error=app.post_mortem.error if app.post_mortem else "",
                stopped_job=app.stopped_job,
                warned=app.warned,
            )
            for name, app in self._apps.items()
        ]
        # Those to be replaced train on until others have started.
        replacements = len(view.replacements & set(view.survivors))
        return JobView(
            phase=view.job.phase if view.job is not None else "none",
            wanted=min(self._limits.max_workers, max(self._limits.min_workers, plan)) + replacements,
            nodes=nodes,
            may_act=may_act,
            etcd_away_s=now - self._etcd_away_since if self._etcd_away_since is not None else 0.0,
            failures_in_a_row=self._failures_in_a_row,
            since_failure_s=now - self._failed_at,
        )

    # --- acting --------------------------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> Give | None:
        end = None
        cancelled = []
        for action in actions:
            match action:
                case AddNode():
                    self._add()
                case CancelNode():
                    log.info("run %s: ending %s: %s", self._keys.run_id, action.name, action.reason)
                    cancelled.append(action.name)
                case Warn():
                    self._apps[action.name].warned = True
                    log.warning("run %s: %s", self._keys.run_id, action.text)
                case Give():
                    end = action
        self._cancel(cancelled)
        if end is not None and end.exit_code:
            self._declare_failed(end.reason)
        return end

    def _add(self) -> None:
        self._num_started += 1
        name = f"node{self._num_started}"
        now = time.monotonic()
        try:
            self._apps[name] = _App(self._target.start(name), now)
        except Exception as error:  # schedulers raise what they like
            log.error("run %s: %s could not be started: %s", self._keys.run_id, name, error)
            problem = PostMortem(f"it could not be started: {type(error).__name__}: {error}", "")
            self._apps[name] = _App("", now, "failed", ended_at=now, post_mortem=problem, all_shown=True)
            self._failures_in_a_row += 1
            self._failed_at = now
            return
        log.info("run %s: started %s", self._keys.run_id, name)

    def _cancel(self, names: Sequence[str]) -> None:
        """End nodes, all at once."""
        for name in names:
            self._apps[name].cancelled = True
        self._target.cancel([self._apps[name].handle for name in names])
        for name in names:
            self._apps[name].status, self._apps[name].ended_at = "cancelled", time.monotonic()

    def _publish_apps(self) -> None:
        apps = {name: app.handle for name, app in self._apps.items() if app.is_living}
        if apps == self._record.apps:
            return
        record = dataclasses.replace(self._record, apps=apps)
        try:
            self._client.put(self._keys.controller, encode(record), self._lease)
            self._record = record
        except EtcdError as error:
            log.info("run %s: the list of nodes is written later: %s", self._keys.run_id, error)

    def _declare_failed(self, reason: str) -> None:
        """Tell nodes that others have started, and whoever asks later."""
        event = EventRecord("error", time.time(), f"the job has failed: {reason}"[:2000])
        key = self._keys.job
        try:
            self._client.put(f"{self._keys.events}{time.time_ns():020d}-controller", encode(event))
            while (entry := self._client.get(key)) is not None:
                job = decode(JobRecord, entry.value, key)
                if job.phase in ("finished", "failed"):
                    return
                failed = encode(dataclasses.replace(job, phase="failed", message=reason[:2000]))
                if self._client.txn([modified(key) == entry.mod_revision], [Put(key, failed)]).succeeded:
                    return
        except (EtcdError, RecordError) as error:
            log.warning("run %s: could not be marked as failed: %s", self._keys.run_id, error)

    # --- output --------------------------------------------------------------------------------------------------------

    def _show_output(self) -> None:
        for name, app in self._apps.items():
            if app.all_shown:
                continue
            # Only what a node that still lives writes may end in the middle of a line.
            app.all_shown = not app.is_living
            for file in self._target.logs(app.handle):
                if app.cancelled and file.name.startswith("stderr"):
                    continue  # the agent's traceback for a signal that came from us
                for line in _new_lines(file, app.shown, whole=not app.is_living):
                    self._show(f"[{name}] {line}")


def _new_lines(file: Path, shown: dict[Path, int], whole: bool) -> list[str]:
    with file.open("rb") as stream:
        stream.seek(shown.get(file, 0))
        chunk = stream.read()
    if not whole:
        chunk = chunk[: chunk.rfind(b"\n") + 1]
    shown[file] = shown.get(file, 0) + len(chunk)
    lines = chunk.decode(errors="replace").removesuffix("\n").split("\n") if chunk else []
    # A progress bar writes over its line: its last state is enough.
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines]


def _read(file: Path) -> str:
    return file.read_text(errors="replace")


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
