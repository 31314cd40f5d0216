"""Add and end nodes so that the job has as many workers as its plan says.

`reconcile` decides, as a pure function of what etcd and the scheduler say. `Controller` holds the job's `controller` key,
carries the actions out and looks again. Which worker leaves when there are too many is not decided here: the workers'
convener drops the highest rank, whose worker hands over and exits, and its app ends by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lightning_dlrover.components.targets import Target
from lightning_dlrover.components.torchx_api import AppStatus
from lightning_dlrover.rdzv.client import EtcdClient, EtcdError, KeyValue, Mirror, Put, absent
from lightning_dlrover.rdzv.membership import read_view
from lightning_dlrover.rdzv.records import ControllerRecord, Keys, PlanRecord, RecordError, decode, encode
from lightning_dlrover.rdzv.rounds import View

__all__ = ["AddNode", "CancelNode", "Controller", "ControllerBusyError", "Give", "JobView", "Node", "Patience", "reconcile"]

log = logging.getLogger(__name__)


class ControllerBusyError(RuntimeError):
    """Another controller acts for this job."""


@dataclass(frozen=True)
class Patience:
    """Limits of what the controller waits for, seconds and counts."""

    max_failures: int = 20  # node failures in a row without progress
    first_backoff_s: float = 0.5  # before a failed node is replaced; doubles with every failure in a row
    max_backoff_s: float = 30.0
    drain_s: float = 60.0  # a node that no round needs ends by itself
    finish_s: float = 60.0  # nodes end after the job has finished


@dataclass(frozen=True)
class Node:
    """One one-node app."""

    name: str
    status: AppStatus
    has_member: bool  # a worker of it is a member of the current round
    surplus_s: float  # for how long it has had no member while there were too many nodes
    failed_by_signal: bool = False

    @property
    def is_living(self) -> bool:
        return self.status in ("pending", "running")


@dataclass(frozen=True)
class JobView:
    """What the controller decides on."""

    phase: Literal["none", "starting", "training", "finished", "failed"]
    wanted: int
    nodes: Sequence[Node]
    failures_in_a_row: int
    since_failure_s: float
    since_end_s: float  # since the job's phase became finished or failed


@dataclass(frozen=True)
class AddNode:
    pass


@dataclass(frozen=True)
class CancelNode:
    name: str


@dataclass(frozen=True)
class Give:
    """Nothing is left to do: the job is over."""

    exit_code: int
    reason: str


Action = AddNode | CancelNode | Give


def reconcile(view: JobView, patience: Patience = Patience()) -> list[Action]:
    """What to do next; nothing when all is as the plan says."""
    living = [node for node in view.nodes if node.is_living]
    if view.phase in ("finished", "failed"):
        if not living:
            return [Give(0 if view.phase == "finished" else 1, f"the job has {view.phase}")]
        return [CancelNode(node.name) for node in living] if view.since_end_s > patience.finish_s else []
    failed = [node for node in view.nodes if node.status == "failed"]
    if view.phase == "none" and view.nodes and not living and not failed:
        return [Give(0, "the script has ended on all nodes")]
    own_fault = [node for node in failed if not node.failed_by_signal]
    if view.phase in ("none", "starting") and own_fault:
        # Nothing was ever trained, so starting it again would fail again.
        return [CancelNode(n.name) for n in living] or [Give(1, f"node {own_fault[0].name} failed before training began")]
    if view.failures_in_a_row >= patience.max_failures:
        return [CancelNode(n.name) for n in living] or [Give(1, f"{view.failures_in_a_row} nodes failed in a row")]
    actions: list[Action] = []
    backoff_s = min(patience.max_backoff_s, patience.first_backoff_s * 2 ** max(0, view.failures_in_a_row - 1))
    if view.failures_in_a_row == 0 or view.since_failure_s >= backoff_s:
        actions += [AddNode()] * max(0, view.wanted - len(living))
    excess = len(living) - view.wanted
    surplus = [node for node in living if not node.has_member and node.surplus_s > patience.drain_s]
    actions += [CancelNode(node.name) for node in surplus[: max(0, excess)]]
    return actions


@dataclass
class _App:
    handle: str
    status: AppStatus = "pending"
    surplus_since: float | None = None
    counted: bool = False
    read: dict[Path, int] = field(default_factory=dict)  # bytes of its output shown so far


class Controller:
    """Carries out a job's plan on one target. Use as a context manager: leaving it ends all nodes it started.

    Args:
        client: connected.
        keys: the job.
        target: where nodes run.
        min_workers: the first plan, when there is none yet.
        max_workers: never more nodes than this, whatever the plan says.
        show: called with every line of the nodes' output, prefixed by the node.

    Raises:
        ControllerBusyError: another controller acts for the job.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        target: Target,
        min_workers: int,
        max_workers: int,
        run_dir: str = "",
        show: Callable[[str], None] = print,
        patience: Patience | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._target = target
        self._limits = (min_workers, max_workers)
        self._show = show
        self._patience = patience or Patience()
        self._apps: dict[str, _App] = {}
        self._num_started = 0
        self._failures_in_a_row = 0
        self._failed_at = 0.0
        self._ended_at: float | None = None
        self._round_at_failure = 0
        self._cache: dict[str, object] = {}
        self._record = ControllerRecord(socket.gethostname(), os.getpid(), target.name, {}, run_dir)
        self._lease = client.lease(10)
        won = client.txn([absent(keys.controller)], [Put(keys.controller, encode(self._record), self._lease.id)])
        if not won.succeeded:
            self._lease.revoke()
            raise ControllerBusyError(_busy_text(client, keys))
        self._lease.keep_alive()
        plan = PlanRecord(
            min_workers, "initial", f"start with the fewest workers, {min_workers}", binding=True, created_at=time.time()
        )
        client.txn([absent(keys.plan)], [Put(keys.plan, encode(plan))])
        self._mirror = Mirror(client, keys.live)

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> Give | None:
        """Look, act, and show new output. Returns what ended the job, or None while it goes on."""
        if self._lease.lost.is_set():
            raise ControllerBusyError(f"run {self._keys.run_id!r}: this controller's lease was lost; another one may act now")
        view = self._view()
        for action in reconcile(self._look(view), self._patience):
            if isinstance(action, Give):
                self._show_output()
                return action
            if isinstance(action, AddNode):
                self._add()
            else:
                log.info("run %s: ending node %s", self._keys.run_id, action.name)
                self._target.cancel(self._apps[action.name].handle)
        self._show_output()
        return None

    def wait(self, timeout_s: float) -> None:
        """Return when something in etcd may have changed, or after `timeout_s`."""
        revision = self._mirror.revision
        try:
            self._mirror.wait_for(lambda _: True if self._mirror.revision != revision else None, timeout_s)
        except TimeoutError:
            return

    def failure_text(self) -> str | None:
        """The first traceback that a node of this job printed, for people; None if there is none."""
        for app in self._apps.values():
            if app.status != "failed":
                continue
            for file in self._target.logs(app.handle):
                if (text := first_traceback(file.read_text(errors="replace"))) is not None:
                    return text
        return None

    def close_nodes(self) -> None:
        """End all nodes that are still running."""
        for name, app in self._apps.items():
            if app.status in ("pending", "running"):
                log.info("run %s: ending node %s", self._keys.run_id, name)
                self._target.cancel(app.handle)
                app.status = "cancelled"
        self._show_output()

    def close(self) -> None:
        """End all nodes that are still running, and give the job's controller key back."""
        self.close_nodes()
        self._target.close()
        self._mirror.close()
        try:
            self._lease.revoke()
        except EtcdError as error:
            log.info("run %s: the controller's lease ends by itself: %s", self._keys.run_id, error)

    # --- looking ------------------------------------------------------------------------------------------------------

    def _view(self) -> View:
        def bad(key: str, error: RecordError) -> None:
            log.error("run %s: ignored a record: %s", self._keys.run_id, error)

        entries: dict[str, KeyValue] = self._mirror.snapshot()
        return read_view(entries, self._keys, self._cache, bad)  # type: ignore[arg-type]

    def _look(self, view: View) -> JobView:
        now = time.monotonic()
        round_number = view.round.number if view.round else 0
        agents = {agent.agent_id: agent.labels.get("node", "") for agent in view.agents.values()}
        members = {agents.get(view.workers[w].agent_id, "") for w in view.survivors}
        plan = view.plan.num_workers if view.plan is not None and view.plan.binding else self._limits[0]
        wanted = min(self._limits[1], max(self._limits[0], plan))
        nodes = []
        for name, app in self._apps.items():
            if app.status in ("pending", "running"):
                app.status = self._target.status(app.handle)
            if app.status == "failed" and not app.counted:
                app.counted = True
                # Progress between two failures means that they have nothing to do with each other.
                self._failures_in_a_row = self._failures_in_a_row + 1 if round_number == self._round_at_failure else 1
                self._failed_at, self._round_at_failure = now, round_number
            has_member = name in members
            app.surplus_since = None if has_member else app.surplus_since or now
            signalled = app.status == "failed" and self._was_signalled(app)
            nodes.append(Node(name, app.status, has_member, now - (app.surplus_since or now), signalled))
        phase = view.job.phase if view.job is not None else "none"
        if phase in ("finished", "failed"):
            self._ended_at = self._ended_at or now
        return JobView(
            phase=phase,
            wanted=wanted,
            nodes=nodes,
            failures_in_a_row=self._failures_in_a_row,
            since_failure_s=now - self._failed_at,
            since_end_s=now - self._ended_at if self._ended_at is not None else 0.0,
        )

    def _was_signalled(self, app: _App) -> bool:
        """Whether the node failed because a process was killed, and not by an error of the script."""
        texts = [file.read_text(errors="replace") for file in self._target.logs(app.handle)]
        codes = [int(code) for text in texts for code in re.findall(r"exitcode\s*:\s*(-?\d+)", text)]
        return not any(code > 0 for code in codes)

    # --- acting -------------------------------------------------------------------------------------------------------

    def _add(self) -> None:
        self._num_started += 1
        name = f"node{self._num_started}"
        self._apps[name] = _App(self._target.start(name))
        apps = {n: a.handle for n, a in self._apps.items() if a.status in ("pending", "running")}
        self._record = dataclasses.replace(self._record, apps=apps)
        self._client.put(self._keys.controller, encode(self._record), self._lease)
        log.info("run %s: started %s", self._keys.run_id, name)

    def _show_output(self) -> None:
        for name, app in self._apps.items():
            for file in self._target.logs(app.handle):
                with file.open("rb") as stream:
                    stream.seek(app.read.get(file, 0))
                    chunk = stream.read()
                complete, _, rest = chunk.rpartition(b"\n")
                if app.status not in ("pending", "running"):
                    complete, _, rest = chunk, b"", b""
                app.read[file] = app.read.get(file, 0) + len(chunk) - len(rest)
                for line in complete.decode(errors="replace").splitlines():
                    self._show(f"[{name}] {line}")


def first_traceback(text: str) -> str | None:
    """The first Python traceback in a process's output that is not the elastic agent's own."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        # Workers may print a prefix before each line.
        column = line.find("Traceback (most recent call last):")
        if column < 0:
            continue
        end = start + 1
        while end < len(lines) and (lines[end][column : column + 1] in (" ", "") and end + 1 < len(lines)):
            end += 1
        block = [each[column:] for each in lines[start : end + 1]]
        if "torch/distributed/run.py" not in "\n".join(block):
            return "\n".join(block)
    return None


def _busy_text(client: EtcdClient, keys: Keys) -> str:
    entry = client.get(keys.controller)
    text = f"job {keys.run_id!r} is already run by another controller"
    if entry is not None:
        try:
            record = decode(ControllerRecord, entry.value, entry.key)
        except RecordError:
            return text
        text = f"job {keys.run_id!r} is already run by process {record.pid} on {record.host}"
    return f"{text}; choose another --rdzv-id, or use `dlrover scale` to resize it"


def living_controller(entries: Mapping[str, KeyValue], keys: Keys) -> ControllerRecord | None:
    """The controller that acts for a job, if one does."""
    entry = entries.get(keys.controller)
    return decode(ControllerRecord, entry.value, entry.key) if entry is not None else None
