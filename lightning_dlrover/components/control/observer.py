"""Observe a job's nodes through etcd and the scheduler, and bring the registry up to date."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dlrover.components.control.failures import Node, num_refusals, refusals
from lightning_dlrover.components.control.node_registry import SAME_FAILURE_S, NodeEntry, NodeRegistry
from lightning_dlrover.components.control.post_mortem import PostMortem, examine
from lightning_dlrover.components.control.reconcile import ControllerView, FailurePolicy, Limits, nodes_of_agents
from lightning_dlrover.components.targets.logs import read_tail
from lightning_dlrover.components.targets.target import App, Target, TargetError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.rdzv.job.records import CheckpointRecord, Keys, NodesRecord, RecordError
from lightning_dlrover.rdzv.live.rounds import JobView
from lightning_dlrover.rdzv.live.view import Decoder

__all__ = ["MAX_REFUSED", "Observer"]

log = logging.getLogger(__name__)

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
        self, keys: Keys, mirror: Mirror, target: Target, registry: NodeRegistry, limits: Limits, policy: FailurePolicy
    ) -> None:
        self._keys = keys
        self._mirror = mirror
        self._target = target
        self._registry = registry
        self._limits = limits
        self._policy = policy
        self._decoder = Decoder(keys, self._report_garbage)
        self._streak = _Streak()
        self._had_member = False
        self._starved_round = 0  # newest round whose members became too few to train
        self._finished_at: float | None = None  # time at which the end of training was first observed
        self._looked_at = time.monotonic()
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
                log.warning("run %s: nodes are taken to be as they were: %s", self._keys.run_id, error)
            return None
        if self._scheduler_away_since is not None:
            log.warning("run %s: %s answers again", self._keys.run_id, self._target.name)
            self._scheduler_away_since = None
        for seen in listed:
            entry = self._registry.entries.get(seen.node)
            if entry is not None and entry.handle is None and not entry.has_ended:
                log.info("run %s: %s has taken %s on", self._keys.run_id, self._target.name, seen.node)
                entry.handle = seen.handle
        for name, entry in self._registry.entries.items():
            if entry.handle is not None or entry.has_ended:
                continue
            entry.missing_since = entry.missing_since if entry.missing_since is not None else now
            if now - entry.missing_since > self._policy.submit_s:
                log.warning("run %s: %s was asked for, but never came", self._keys.run_id, name)
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
            # Failures beside training members do not predict a start without them: they may have held the missing resources.
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
            if entry.is_member:
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
                entry.status = "cancelled" if ended and entry.cancelled else status
                if ended and not entry.cancelled:
                    others = Counter({other: number for other, number in num_members.items() if other != name})
                    self._note_end(name, entry, entry.handle, view, now, others)

    def look_for_wishes(self) -> None:
        """Ask the scheduler which nodes it wants back and which were killed for lack of memory.

        Slurm's target answers `wants_back` once for each new list of jobs, so call this only when the answer can be acted on.
        """
        now = time.monotonic()
        for entry in self._registry.entries.values():
            trains = entry.is_member and not entry.cancelled and not entry.has_ended
            entry.wanted_back = trains and entry.handle is not None and self._target.wants_back(entry.handle)
            has_just_failed = entry.status == "failed" and now - (entry.ended_at or now) < SAME_FAILURE_S
            may_lack = has_just_failed and not entry.is_enlarged
            entry.lacks_memory = may_lack and entry.handle is not None and self._target.ran_out_of_memory(entry.handle)

    def note_refusal(self, name: str, problem: str, now: float) -> None:
        """Record that the scheduler refused a node. Only the newest refusals are kept."""
        log.error("run %s: %s could not be started: %s", self._keys.run_id, name, problem)
        entries = self._registry.entries
        # Carried over because the oldest are forgotten: the pause before the next attempt grows with the total.
        earlier = refusals([node for node in self.nodes(now) if node.name != name])
        entry = entries[name]
        entry.refusals_in_a_row = 1 + num_refusals(earlier)
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
        """
        Args:
            others: members of the current round on each other node.
        """
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
        entry.after_training = is_late and entry.member_seen_at is not None and not trains_again
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
        # related to starts that failed beside it either; the scheduler may report it before etcd does.
        is_news = round_number != self._streak.round_number or (is_last and entry.is_member)
        self._streak = _Streak(1 if is_news else self._streak.count + 1, now, round_number)

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
