"""Keep a job's nodes in line with its plan: observe, let `reconcile.py` decide, act, and record each action first."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_dlrover.codec import RecordError
from lightning_dlrover.components.control.nodes import (
    ControllerTenure,
    NodeEntry,
    NodeRegistry,
    Observer,
)
from lightning_dlrover.components.control.post_mortem import ShownLog, ShownTracebacks, TracebackFilter
from lightning_dlrover.components.control.reconcile import (
    Action,
    AddNode,
    CancelNode,
    ControllerView,
    EnlargeNodes,
    FailurePolicy,
    FinishJob,
    KeepSize,
    Limits,
    ReplaceWorker,
    ResizeNode,
    Warn,
    WithdrawNode,
    enlargements,
    kind_of_delay,
    likeness,
    reconcile,
    why_none_is_added,
)
from lightning_dlrover.components.targets.target import App, NodeSize, NotTakenError, Resize, Target, TargetError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdError, KeyValue, absent
from lightning_dlrover.rdzv.job.events import JobFailed, NodeMemoryShort, NodeResized, NodesHeldUp
from lightning_dlrover.rdzv.job.journal import FenceLostError, Journal
from lightning_dlrover.rdzv.job.records import HISTORY_TTL_S, CheckpointRecord, ControllerRecord, JobRecord, Keys, PlanRecord
from lightning_dlrover.rdzv.membership.rounds import JobView
from lightning_dlrover.rdzv.membership.worker_records import ask_for_replacement, note_end

log = logging.getLogger(__name__)

_REPEATED = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode: ")
"""Line of torch's agent about a failed worker; `rdzv/agents/program.py` prints one of its own."""


class Output:
    """Forward new lines of every node's output, prefixed with the node's name. Each traceback is shown once.

    The files may be on a shared file system, and are read at most every `interval_s` seconds.
    """

    def __init__(self, run_id: str, target: Target, show: Callable[[str], None], interval_s: float = 0.0) -> None:
        self._run_id = run_id
        self._target = target
        self._show = show
        self._interval_s = interval_s
        self._next_at = -float("inf")
        self._files: dict[str, dict[Path, ShownLog]] = {}  # key: node
        self._unreadable: set[Path] = set()  # files with a logged warning
        self.tracebacks = ShownTracebacks()

    def show(self, registry: NodeRegistry, at_once: bool = False) -> None:
        """Show all new lines if a look at the files is due, or in any case with `at_once`."""
        now = time.monotonic()
        if now < self._next_at and not at_once:
            return
        self._next_at = now + self._interval_s
        for name, entry in registry.entries.items():
            if not entry.all_shown and entry.handle is not None:
                self._show_node(name, entry, entry.handle)
            if entry.all_shown:
                self._files.pop(name, None)

    def _show_node(self, name: str, entry: NodeEntry, handle: str) -> None:
        files = self._files.setdefault(name, {})
        # Only a node that still runs may leave an unfinished line.
        entry.all_shown = entry.has_ended
        was_adopted, entry.was_adopted = entry.was_adopted, False
        for file in self._target.logs(handle):
            if entry.cancelled and file.name.startswith("stderr"):
                continue  # the agent's traceback for our own signal
            try:
                if file not in files:
                    new = ShownLog(file, TracebackFilter(self.tracebacks))
                    if was_adopted:
                        new.skip()
                    files[file] = new
                lines = files[file].new_lines(whole=entry.has_ended)
            except OSError as error:
                # A shared file system may fail for a moment. The next step reads the rest.
                entry.all_shown, entry.was_adopted = False, was_adopted
                if file not in self._unreadable:
                    self._unreadable.add(file)
                    log.warning("run %s: the output of %s cannot be read for now: %s", self._run_id, name, error)
                continue
            for line in lines:
                if not _REPEATED.search(line):
                    self._show(f"[{name}] {line}")


class Cancellations:
    """End nodes of the registry, and strays: nodes of this job without a record. Repeat the requests while they live."""

    def __init__(
        self, run_id: str, tenure: ControllerTenure, target: Target, registry: NodeRegistry, policy: FailurePolicy
    ) -> None:
        self._run_id = run_id
        self._tenure = tenure
        self._target = target
        self._registry = registry
        self._policy = policy
        self._reported = ""  # kind of the newest refused cancellation in the log
        self._strays: dict[str, float] = {}  # handles of nodes without a record, and when they were last cancelled

    def cancel(self, names: Sequence[str]) -> None:
        """End nodes, all at once. Those of unknown fate are ended once the scheduler lists them."""
        for name in names:
            entry = self._registry.entries[name]
            entry.cancelled = True
            entry.ended_at = entry.ended_at or time.monotonic()
        if names and self._target.outlives_controller:
            self._registry.save()  # local nodes end with this process: their end must not wait for an unreachable etcd
        self.repeat()

    def repeat(self) -> None:
        """Have the scheduler end cancelled nodes that have not ended. Refused requests are repeated with a growing pause."""
        now = time.monotonic()
        due = {
            entry.handle: entry
            for entry in self._registry.entries.values()
            if entry.cancelled and not entry.has_ended and entry.handle is not None and now >= entry.cancel_at
        }
        if not due:
            return
        try:
            self._target.cancel(due)
        except TargetError as error:
            for entry in due.values():
                entry.cancel_failures += 1
            num_failures = max(entry.cancel_failures for entry in due.values())
            pause_s = min(self._policy.cancel_s, self._policy.first_cancel_s * 2.0 ** min(20, num_failures - 1))
            for entry in due.values():
                entry.cancel_at = now + pause_s
            text = "run %s: %s could not be ended; the next attempt follows in %.0f s: %s"
            level = logging.DEBUG if likeness(str(error)) == self._reported else logging.WARNING
            self._reported = likeness(str(error))
            log.log(level, text, self._run_id, ", ".join(due), pause_s, error)
            return
        self._reported = ""
        for entry in due.values():
            entry.cancel_at, entry.cancel_failures = now + self._policy.cancel_s / 2, 0
            if not self._target.outlives_controller:
                entry.status = "cancelled"

    def end_strays(self, listed: Sequence[App]) -> None:
        """End nodes that carry the job's mark without a record: an abandoned request was carried out after all."""
        now = time.monotonic()
        entries = self._registry.entries.values()
        known = {entry.handle for entry in entries if not entry.has_ended or entry.cancelled}
        strays = [a for a in listed if a.is_living and a.handle not in known]
        due = [a.handle for a in strays if now - self._strays.get(a.handle, -float("inf")) > self._policy.cancel_s]
        # A node that has ended may still be listed as alive for a moment.
        ended_at = {entry.handle: entry.ended_at or now for entry in entries}
        due = [handle for handle in due if now - ended_at.get(handle, -float("inf")) > self._policy.settle_s]
        if not due or not self._tenure.still_holds():
            return
        log.warning("run %s: ending %s: no request for it exists", self._run_id, ", ".join(due))
        self._strays |= dict.fromkeys(due, now)
        try:
            self._target.cancel(due)
        except TargetError as error:
            log.warning("run %s: %s", self._run_id, error)


class Resizes:
    """Change the sizes of running nodes in place.

    A request is written to etcd before it is made, and repeated until its scheduler has carried it out or refused it. So the
    next controller continues it, wherever this one was killed.
    """

    def __init__(
        self, run_id: str, tenure: ControllerTenure, target: Target, registry: NodeRegistry, policy: FailurePolicy
    ) -> None:
        self._run_id = run_id
        self._tenure = tenure
        self._target = target
        self._registry = registry
        self._policy = policy
        self._next_at = -float("inf")  # time of the next request; later while the scheduler does not answer
        self._num_failures = 0  # consecutive ones
        self._told_waits: dict[str, str] = {}  # by node: kind of the last reason for a wait in the job's history

    def ask(self, name: str, size: NodeSize) -> None:
        """Request a size. `carry_on` makes the request."""
        entry = self._registry.entries[name]
        log.info("run %s: %s is to have %s in place of %s", self._run_id, name, size, entry.size)
        entry.wanted, entry.resize, entry.resize_why, entry.resize_at = size, "asked", "", time.monotonic()

    def keep(self, name: str, reason: str) -> None:
        """Give up a change under way. The node keeps its size."""
        self._refuse(name, self._registry.entries[name], reason)

    def carry_on(self, plan: NodeSize) -> None:
        """Make the requests that etcd holds, and note their progress. A value that was refused may be planned again later."""
        entries = self._registry.entries
        for entry in entries.values():
            refused = entry.refused_size
            entry.refused_size = NodeSize(
                refused.cpus if refused.cpus == plan.cpus else 0,
                refused.memory_mb if refused.memory_mb == plan.memory_mb else 0,
            )
        changing = {name: e for name, e in entries.items() if e.wanted and e.handle and not e.has_ended and not e.cancelled}
        if not changing or time.monotonic() < self._next_at:
            return
        self._registry.save()
        for name, entry in changing.items():
            saved, wanted = entry.saved, entry.wanted
            if wanted is None or entry.handle is None or saved is None:
                continue
            if not saved.resize or NodeSize(saved.wanted_cpus, saved.wanted_memory_mb) != wanted:
                continue  # not written yet
            try:
                found = self._target.resize(entry.handle, wanted)
            except TargetError as error:
                self._note_failure(name, error)
                return
            self._num_failures = 0
            self._take(name, entry, wanted, found)

    def states(self) -> dict[str, str]:
        """Return a readable state of each node that changes its size, or keeps one that is not the planned one."""
        shown = {}
        for name, entry in self._registry.entries.items():
            if not entry.is_living:
                continue
            if entry.wanted is not None and entry.wanted != entry.size:
                state = f"waits for room: {entry.resize_why}" if entry.resize == "waiting" else "is under way"
                shown[name] = f"{entry.wanted} in place of {entry.size}: {state}"[:500]
            elif entry.resize_why:
                shown[name] = f"keeps {entry.size}: {entry.resize_why}"[:500]
        return shown

    def _take(self, name: str, entry: NodeEntry, wanted: NodeSize, found: Resize) -> None:
        """Note the scheduler's answer to a request."""
        now, before = time.monotonic(), entry.size
        match found.state:
            case "done":
                entry.size, entry.wanted, entry.resize = wanted, None, ""
                self._told_waits.pop(name, None)
                if wanted != before:
                    entry.resize_why = ""
                    text = f"{name} has {wanted} in place of {before}, without a new process"
                    self._tell(name, entry, "resized", wanted, text)
            case "refused":
                self._refuse(name, entry, found.why)
            case "asked" | "waiting" if wanted == before:
                entry.resize = "asked"  # a withdrawal: the reason for it stays
            case "asked" | "waiting":
                if found.state != entry.resize:
                    entry.resize, entry.resize_at = found.state, now
                entry.resize_why = found.why
                if found.state == "waiting" and likeness(found.why) != self._told_waits.get(name):
                    self._told_waits[name] = likeness(found.why)
                    self._tell(name, entry, "waits", wanted, f"{name} waits for {wanted} in place of {before}: {found.why}")

    def _refuse(self, name: str, entry: NodeEntry, why: str) -> None:
        """Note that a node cannot get the wanted size in place, and withdraw the request."""
        wanted, size = entry.wanted, entry.size
        entry.resize_at = time.monotonic()
        if wanted is None or wanted == size:  # the withdrawal itself
            entry.wanted, entry.resize = None, ""
            return
        refused = entry.refused_size
        cpus = wanted.cpus if wanted.cpus != size.cpus else refused.cpus
        memory_mb = wanted.memory_mb if wanted.memory_mb != size.memory_mb else refused.memory_mb
        entry.refused_size = NodeSize(cpus, memory_mb)
        grows = wanted.is_at_least(size)
        entry.resize_why = "" if grows else why
        then = "it is replaced by a larger one" if grows else "it keeps its size"
        self._tell(name, entry, "refused", wanted, f"{name} cannot have {wanted} in place of {size}: {why}; {then}")
        entry.wanted, entry.resize = size, "asked"
        self._told_waits.pop(name, None)

    def _tell(self, name: str, entry: NodeEntry, act: str, wanted: NodeSize, text: str) -> None:
        log.log(logging.INFO if act == "resized" else logging.WARNING, "run %s: %s", self._run_id, text)
        seconds = round(time.monotonic() - entry.resize_at, 2)
        sizes = (entry.size.cpus, entry.size.memory_mb, wanted.cpus, wanted.memory_mb)
        with contextlib.suppress(EtcdError):  # the node's record has it in any case
            self._tenure.add_event(NodeResized(name, act, *sizes, seconds), text)

    def _note_failure(self, name: str, error: TargetError) -> None:
        """Repeat an unanswered request later."""
        level = logging.DEBUG if self._num_failures else logging.WARNING
        self._num_failures += 1
        pause_s = min(self._policy.max_refusal_s, self._policy.first_refusal_s * 2.0 ** min(20, self._num_failures - 1))
        self._next_at = time.monotonic() + max(pause_s, error.retry_after_s)
        log.log(level, "run %s: whether %s gets another size is unknown, trying again: %s", self._run_id, name, error)


MIRROR_S = 5.0
"""Seconds to wait for our own write to show up in the mirror before continuing without it."""


class JobWriter:
    """Write the controller's decisions on the whole job: its first plan, requests to workers, larger nodes, its failure."""

    def __init__(self, client: EtcdClient, keys: Keys, tenure: ControllerTenure, mirror: Mirror, limits: Limits) -> None:
        self._client = client
        self._keys = keys
        self._journal = Journal(client, keys)
        self._tenure = tenure
        self._mirror = mirror
        self._limits = limits

    def begin(self) -> None:
        """Write the job's first plan, unless there is a plan already."""
        fewest = self._limits.num_workers(None)
        plan = PlanRecord(fewest, "initial", f"start with the minimum of {fewest}", binding=True, created_at=time.time())
        self._journal.fenced_write({self._keys.plan: plan}, [absent(self._keys.plan)])

    def ask_for_replacement(self, request: ReplaceWorker) -> None:
        """Request that a worker leave once it is replaced, unless it has gone or was asked to leave already."""
        worker, reason = request.worker, request.reason
        log.info("run %s: %s is to be replaced: %s", self._keys.run_id, worker, reason)
        with contextlib.suppress(EtcdError):  # the next step repeats it
            if request.notice is not None:
                note_end(self._journal, worker, request.notice, self._tenure.is_ours)
            else:
                ask_for_replacement(self._journal, worker, reason, self._tenure.is_ours)

    def enlarge_nodes(self, request: EnlargeNodes) -> None:
        """Plan larger nodes. The plan keeps the new size for later controllers.

        Raises:
            EtcdError: the plan was not written, or that is unknown.
            RecordError: the plan is unreadable.
        """
        had = request.size
        given = self._plan_memory(request.memory_mb)
        act, next_move = "none", f"they may have no more than that (--mem MIN:MAX): {had.memory_mb} MiB"
        if given > had.memory_mb:
            act, next_move = "enlarge", f"nodes have {given} MiB from now on"
        elif not had.memory_mb:
            next_move = "its limit is unknown here; start the job with --mem MIN:MAX, and nodes get more when they need it"
        text = f"{request.name} was killed for lack of memory ({had}); {next_move}"
        self._tenure.add_event(NodeMemoryShort(act, request.name, given), text)
        log.warning("run %s: %s", self._keys.run_id, text)

    def declare_failed(self, reason: str) -> bool:
        """Mark the job as failed, for nodes started by others and for later queries.

        Return False if another controller may act by now. That one decides whether the job has failed.
        """

        def failed(job: JobRecord | None) -> JobRecord | None:
            if job is None or job.phase in ("finished", "failed"):
                return None
            return dataclasses.replace(job, phase="failed", message=reason[:2000])

        try:
            if not self._tenure.add_event(JobFailed(), f"the job has failed: {reason}"):
                return False
            self._journal.swap(JobRecord, self._keys.job, failed, [self._tenure.is_ours])
            # Workers do the same when they leave an ended job; the last one may have left before.
            self._tenure.delete(self._keys.plan)
            self._client.delete_prefix(self._keys.drains)
        except FenceLostError:
            return False
        except (EtcdError, RecordError) as error:
            log.warning("run %s: could not be marked as failed: %s", self._keys.run_id, error)
        return True

    def _plan_memory(self, memory_mb: int) -> int:
        """Plan nodes with this much memory, within the limits. Return the resulting size in MiB."""

        def enlarged(plan: PlanRecord | None) -> PlanRecord | None:
            if plan is None:
                raise EtcdError(f"{self._keys.plan!r} was not written: it was deleted")
            wanted = dataclasses.replace(plan, node_memory_mb=min(memory_mb, self._limits.max_size.memory_mb))
            if self._limits.size(wanted).memory_mb <= self._limits.size(plan).memory_mb:
                return None
            return dataclasses.replace(wanted, created_at=time.time())

        written = self._journal.swap(PlanRecord, self._keys.plan, enlarged, [self._tenure.is_ours])
        with contextlib.suppress(TimeoutError):  # the next node's size comes from the mirror
            self._mirror.wait_for(functools.partial(_as_new_as, self._keys.plan, written.revision), MIRROR_S)
        return self._limits.size(written.record).memory_mb


def _as_new_as(key: str, revision: int, seen: Mapping[str, KeyValue]) -> KeyValue | None:
    """Return the key if it was written at `revision` or later."""
    return seen[key] if key in seen and seen[key].mod_revision >= revision else None


class Controller:
    """Carry out a job's plan on one target. Use as a context manager: leaving it ends all nodes of the job.

    It holds the job's `controller` key (`nodes.ControllerTenure`), observes etcd and the scheduler (`nodes.Observer`), lets
    `reconcile.py` decide, and carries the decision out. All state that must survive is written to etcd before each action
    (`nodes.NodeRegistry`): a node's name before its request to the scheduler, its cancellation before the call that cancels
    it. So the controller may be killed and restarted at any moment.

    A killed process leaves its nodes behind where they outlive it. The job's next controller takes them over.

    Args:
        limits: bounds of the plan; the lower one is the first plan.
        show: called with every line of the nodes' output, prefixed with the node's name.
        hurry: when set, do not wait for the end of cancelled nodes.

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
        policy: FailurePolicy | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        self._run_id = keys.run_id
        self._target = target
        self._policy = policy or FailurePolicy()
        self._hurry = hurry or threading.Event()
        self._held_up = ""  # why planned nodes are not added
        self._kind_of_delay = ""
        self._known_delays: set[str] = set()  # kinds of such reasons in the job's history, since nodes were last added freely
        self._is_closed = False
        self._warned = ""
        self._etcd_away_since: float | None = None
        client.share_lifetime(keys.root, HISTORY_TTL_S)
        self._tenure = ControllerTenure(
            client, keys, ControllerRecord(socket.gethostname(), os.getpid(), target.name, {}, run_dir)
        )
        self._mirror = Mirror(client, keys.live)
        self._seen_revision = 0
        self._registry = NodeRegistry(client, keys, self._tenure, target, limits)
        self._observer = Observer(client, keys, self._mirror, target, self._registry, limits, self._policy)
        self._cancellations = Cancellations(keys.run_id, self._tenure, target, self._registry, self._policy)
        self._resizes = Resizes(keys.run_id, self._tenure, target, self._registry, self._policy)
        self._job = JobWriter(client, keys, self._tenure, self._mirror, limits)
        self._output = Output(keys.run_id, target, show, self._policy.show_s)
        try:
            self._registry.adopt(self._observer.view)
        except BaseException:
            self._mirror.close()
            self._tenure.lease.revoke()
            raise
        self._job.begin()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> FinishJob | None:
        """Observe, act, and show new output. Return the job's end, or None while it continues.

        Raises:
            ControllerBusyError: another controller has taken over.
        """
        may_act = self._may_act()
        self._seen_revision = self._mirror.revision
        view = self._observer.view()
        self._compare(may_act)
        self._observer.look(view)
        if may_act:
            self._observer.query_scheduler()
            if self._enlarge_nodes():
                view = self._observer.view()
            self._observer.look_at_shrinking(view)
        self._observer.note_plan_by_hand(view)
        job_view = self._job_view(view, may_act)
        self._held_up = why_none_is_added(job_view, self._policy) if may_act else ""
        self._kind_of_delay = kind_of_delay(job_view, self._held_up)
        actions = reconcile(job_view, self._policy)
        if may_act and any(isinstance(action, AddNode | FinishJob) for action in actions):
            # The scheduler's list may be newer than our copy of etcd, where a leave or a smaller plan explains a missing node.
            if self._has_caught_up():
                view = self._observer.view()
                self._observer.look(view)
                self._observer.note_plan_by_hand(view)
                job_view = self._job_view(view, may_act)
                actions = reconcile(job_view, self._policy)
            else:
                actions = [action for action in actions if not isinstance(action, AddNode | FinishJob)]
        end = self._act(actions, job_view.size)
        if may_act and end is None:
            self._resizes.carry_on(job_view.size)
            self._registry.publish_limits()
        self._output.show(self._registry)
        if may_act:
            self._registry.save()
            self._publish()
            if end is None and job_view.phase not in ("finished", "failed"):
                # Those that ended with the job remain for a while, with their output, for `kubectl` and `dlrover logs`.
                self._registry.release_ended()
        return end

    def wait(self, timeout_s: float) -> None:
        """Return when etcd has changed since the last step's observation, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            self._mirror.wait_for(lambda _: True if self._mirror.revision != self._seen_revision else None, timeout_s)

    def failure_text(self) -> str:
        """Return the traceback of the first node in the newest group of failures, else why it was ended; empty if unknown."""
        return self._registry.failure_text()

    def newest_checkpoint(self) -> CheckpointRecord | None:
        """Return the job's newest checkpoint; None: none is known."""
        return self._observer.newest_checkpoint()

    def has_shown(self, traceback: str) -> bool:
        """Whether the output that was shown contains this traceback."""
        return traceback in self._output.tracebacks

    @property
    def mark(self) -> str:
        """Part of the name of each of the job's nodes at its scheduler."""
        return self._registry.nodes.mark if self._registry.nodes else ""

    def end_nodes(self) -> None:
        """End all running nodes and wait for their end, for at most `FailurePolicy.cancel_s`.

        If another controller has taken over, it is responsible for nodes that outlive this one.
        """
        self._registry.is_ending = True
        self._output.show(self._registry, at_once=True)  # stderr of cancelled nodes is not shown
        if self._target.outlives_controller and self._awaited() and self._tenure.still_holds() is False:
            text = "run %s: its nodes are left to the controller that acts for it now; `dlrover cancel %s` ends them"
            log.warning(text, self._run_id, self._run_id)
            return
        deadline = time.monotonic() + self._policy.cancel_s
        self._cancellations.cancel([name for name, entry in self._registry.entries.items() if not entry.has_ended])
        while left := self._awaited():
            if time.monotonic() > deadline or self._hurry.is_set():
                break
            time.sleep(0.1)
            self._compare(may_act=True)
            for entry in self._registry.entries.values():
                if entry.handle and self._target.status(entry.handle) not in ("pending", "running"):
                    entry.status = "cancelled" if entry.cancelled else entry.status
        if left:
            text = "run %s: %s were cancelled %.0f s ago and %s still lists them: end them by hand"
            log.error(text, self._run_id, ", ".join(left), self._policy.cancel_s, self._target.name)
        self._registry.save()
        self._output.show(self._registry, at_once=True)

    def left_nodes(self) -> list[str]:
        """Return the nodes that may outlive this controller: their scheduler has not confirmed their end."""
        return self._awaited() if self._target.outlives_controller else []

    def request_end_of_nodes(self) -> None:
        """Request the cancellation of all nodes, without writing to etcd and without waiting for their end."""
        entries = self._registry.entries.values()
        with contextlib.suppress(TargetError):
            self._target.cancel([entry.handle for entry in entries if entry.handle and not entry.has_ended])

    def close(self) -> None:
        """End all running nodes and release the job's controller key."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.end_nodes()
        finally:
            self._target.close()
            self._mirror.close()
            self._tenure.give_up()

    def _awaited(self) -> list[str]:
        """Return the nodes that are expected to end. One of unknown fate that does not outlive us ends with its target."""
        outlives = self._target.outlives_controller
        entries = self._registry.entries.items()
        return [name for name, entry in entries if not entry.has_ended and (entry.handle or outlives)]

    def _may_act(self) -> bool:
        """Whether etcd answers and this controller may act. It recovers without help after losing both."""
        try:
            if self._tenure.take_back():
                self._registry.adopt(self._observer.view)
        except EtcdError:
            return False
        healthy = self._mirror.healthy
        if healthy != (self._etcd_away_since is None):
            self._etcd_away_since = None if healthy else time.monotonic()
            state = "is back" if healthy else "cannot be reached; no node is started or ended"
            log.warning("run %s: etcd %s", self._run_id, state)
        return healthy

    def _has_caught_up(self) -> bool:
        """Whether our copy of the job's keys shows all that etcd had a moment ago."""
        try:
            self._mirror.catch_up(self._policy.settle_s)
        except (EtcdError, TimeoutError):
            return False
        return True

    def _compare(self, may_act: bool) -> None:
        """Reconcile the scheduler's list with the registry: nodes of unknown fate, and strays."""
        listed = self._observer.compare()
        if listed is not None and may_act:
            self._cancellations.repeat()
            self._cancellations.end_strays(listed)

    def _job_view(self, view: JobView, may_act: bool) -> ControllerView:
        away_s = time.monotonic() - self._etcd_away_since if self._etcd_away_since is not None else 0.0
        return dataclasses.replace(self._observer.job_view(view), may_act=may_act, etcd_away_s=away_s)

    def _enlarge_nodes(self) -> bool:
        """Plan larger nodes after one was killed for lack of memory. Return whether the plan may have changed."""
        requests: list[EnlargeNodes] = enlargements(self._observer.nodes(time.monotonic()))
        for request in requests:
            try:
                self._job.enlarge_nodes(request)
            except (EtcdError, RecordError) as error:
                self._warn_once(f"more memory for nodes is planned later: {error}")
                break
            self._registry.entries[request.name].is_enlarged = True
        return bool(requests)

    def _act(self, actions: Sequence[Action], size: NodeSize) -> FinishJob | None:
        end = None
        may_add = self._withdraw([action.name for action in actions if isinstance(action, WithdrawNode)])
        cancelled = []
        for action in actions:
            match action:
                case AddNode():
                    may_add = may_add and self._add(size)
                case CancelNode():
                    log.info("run %s: ending %s: %s", self._run_id, action.name, action.reason)
                    cancelled.append(action.name)
                case ReplaceWorker():
                    self._job.ask_for_replacement(action)
                case ResizeNode():
                    self._resizes.ask(action.name, action.size)
                case KeepSize():
                    self._resizes.keep(action.name, action.reason)
                case Warn():
                    self._registry.entries[action.name].warned = True
                    log.warning("run %s: %s", self._run_id, action.text)
                case FinishJob():
                    end = action
        if cancelled and self._target.outlives_controller and self._tenure.still_holds() is False:
            cancelled = []  # another controller owns them now
        if cancelled:
            self._output.show(self._registry, at_once=True)
        self._cancellations.cancel(cancelled)
        # A failed job forms no round, so its workers could not hand over and leave.
        leaving = [entry for entry in self._registry.entries.values() if entry.cancelled]
        if end is not None and any(not entry.has_ended for entry in leaving):
            waited_s = time.monotonic() - max(entry.ended_at or 0.0 for entry in leaving)
            if waited_s < self._policy.cancel_s:
                return None
        if end is not None and end.exit_code and not self._job.declare_failed(end.reason):
            return None  # the next step detects which controller may act
        return end

    def _withdraw(self, names: Sequence[str]) -> bool:
        """End waiting nodes that request too much, before others are added. Return whether others may be added."""
        if not names:
            return True
        if not self._tenure.still_holds():
            return False
        log.info("run %s: ending %s, which wait for more than the plan requests now", self._run_id, ", ".join(names))
        self._cancellations.cancel(names)
        return True

    def _add(self, size: NodeSize) -> bool:
        """Start one more node; False if no node should be started now."""
        try:
            name, entry = self._registry.ask(size)
        except (EtcdError, RecordError) as error:
            # A node without a record must not exist.
            self._warn_once(f"no node is started for now: {error}")
            return False
        self._warned = ""
        now = time.monotonic()
        try:
            entry.handle = self._target.start(name, size)
        except TargetError as error:
            if not isinstance(error, NotTakenError):
                log.warning("run %s: whether %s was started is unknown: %s", self._run_id, name, error)
                return False
            self._observer.note_refusal(name, str(error), error.kind, now)
        except Exception as error:  # schedulers may raise any type
            self._observer.note_refusal(name, f"{type(error).__name__}: {error}", "", now)
        else:
            log.info("run %s: started %s", self._run_id, name)
        self._registry.save()
        return not entry.has_ended

    def _warn_once(self, text: str) -> None:
        """Log trouble once that each step meets again, such as a full etcd."""
        if text != self._warned:
            self._warned = text
            log.warning("run %s: %s", self._run_id, text)

    def _publish(self) -> None:
        """Update the controller's record. Add a new kind of obstacle to the job's history."""
        apps = {name: entry.handle or "" for name, entry in self._registry.entries.items() if entry.is_living}
        if not self._tenure.publish_nodes(apps, self._held_up, self._target.spares, self._resizes.states()):
            return
        if not self._held_up:
            self._known_delays.clear()
        elif self._kind_of_delay not in self._known_delays:
            self._known_delays.add(self._kind_of_delay)
            log.warning("run %s: %s", self._run_id, self._held_up)
            with contextlib.suppress(EtcdError):  # the status shows it in any case
                self._tenure.add_event(NodesHeldUp(), self._held_up)
