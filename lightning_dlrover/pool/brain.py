"""The brain of a pool: look at the pool, act in a safe order, write decisions with fences, and show them.

It decides nothing about sizes: `budget.py` and `decisions.py` do, without clocks or etcd. The package's docstring describes the
states of jobs and their owners.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_dlrover.pool.budget import Move, Owners, PoolJob, Rate, Resources, Wait, held_by
from lightning_dlrover.pool.decisions import Choice, Rules, choose, reason_of
from lightning_dlrover.pool.view import BrainRecord, GrantRecord, OthersRecord, PoolKeys, PoolView, SeenJob, Watch
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import Compare, Delete, EtcdError, KeyValue, Op, Put, modified
from lightning_dlrover.rdzv.job.events import PoolJobChanged, SizeGiven, events_of, record_of
from lightning_dlrover.rdzv.job.journal import Journal, Tenure, holder_text, read_events, readable
from lightning_dlrover.rdzv.job.records import HISTORY_TTL_S, EventRecord, JobRecord, Keys, PlanRecord, encode
from lightning_dlrover.report.notify import WORDS, Destination, EtcdNotifications, Notification

SAME_WAIT_S = 5.0
"""Seconds that the expected start of a waiting job may shift before it is written again."""


MAX_LINES = 1000
"""Lines of a pool's history."""


class OutdatedError(Exception):
    """The pool has changed since the look that a decision is based on. Look again."""


class Writer:
    """Writes the decisions of one brain to etcd, each as a whole.

    Each write replaces the key `brain` under the condition that it is as last seen, or raises `OutdatedError`.

    Args:
        keeps_history: write a line of the pool's history with each change.
    """

    def __init__(self, client: EtcdClient, pool: PoolKeys, tenure: Tenure[BrainRecord], keeps_history: bool = False) -> None:
        self._client = client
        self._keeps_history = keeps_history
        self._pool = pool
        self._tenure = tenure
        self._revision = 0

    def based_on(self, brain_entry: KeyValue) -> None:
        """Base the next writes on a look at the pool, given its key `brain`."""
        self._revision = brain_entry.mod_revision

    def resize(self, seen: SeenJob, move: Move, event: SizeGiven, reason: str, now: float) -> None:
        """Give a job another size: its grant, its plan if it has one, and a line of its history.

        A job that starts has no plan yet. Its run writes the first one.
        """
        job, needs = seen.job, seen.job.needs
        grant = GrantRecord(
            "granted",
            move.after,
            reason,
            since=now,
            submitted_at=job.submitted_s,
            served_worker_s=job.served_by(now),
            owner=job.owner,
            cores=needs.cores,
            gpus=int(needs.gpus),
            memory_mb=int(needs.memory_mb),
        )
        ops: list[Op] = [self._grant(seen, grant)]
        if move.before != move.after:
            change = "started" if not move.before else "grown" if move.after > move.before else "shrunk"
            ops += self._line(PoolJobChanged(job.name, change, move.before, move.after), reason)
        if seen.plan_entry is not None:
            lease = seen.plan_entry.lease_id
            if not job.is_by_hand:
                ops.append(Put(seen.keys.plan, encode(self._plan(seen, move.after, reason, now)), lease))
            if move.before:
                key = f"{seen.keys.events}{time.time_ns():020d}-brain"
                ops.append(Put(key, encode(record_of(event, reason)), lease))
        self._write(seen, ops, _plan_as_seen(seen))

    def correct_plan(self, seen: SeenJob, now: float) -> None:
        """Let a job's plan ask for the granted workers."""
        assert seen.plan_entry is not None
        assert seen.grant is not None
        plan = self._plan(seen, seen.grant.num_workers, seen.grant.reason, now)
        self._write(seen, [Put(seen.keys.plan, encode(plan), seen.plan_entry.lease_id)], _plan_as_seen(seen))

    def wait(self, seen: SeenJob, wait: Wait, queued: int, now: float) -> bool:
        """Publish a job's place in the queue, unless it is published already. Return whether it was written."""
        at = now + wait.expected_s if wait.expected_s is not None else 0.0
        grant = GrantRecord("waiting", 0, wait.reason, wait.place, queued, at, now, seen.job.submitted_s)
        last, shown = seen.grant, (grant.state, grant.place, grant.queued, grant.reason)
        may_shift_s = max(SAME_WAIT_S, 0.2 * (wait.expected_s or 0.0))
        is_same = last is not None and (last.state, last.place, last.queued, last.reason) == shown
        if last is not None and is_same and abs(last.expected_at - at) <= may_shift_s:
            return False
        self._write(seen, [self._grant(seen, grant)])
        return True

    def refuse(self, seen: SeenJob, reason: str, now: float) -> bool:
        """Publish that a job can never start. Return whether it was written."""
        if seen.grant is not None and (seen.grant.state, seen.grant.reason) == ("refused", reason):
            return False
        grant = GrantRecord("refused", 0, reason, since=now, submitted_at=seen.job.submitted_s)
        self._write(seen, [self._grant(seen, grant), *self._line(PoolJobChanged(seen.job.name, "refused"), reason)])
        return True

    def note(self, event: PoolJobChanged, text: str) -> None:
        """Write a line of the pool's history, if there is one and this process still decides."""
        if ops := self._line(event, text):
            self._client.txn([self._tenure.is_ours], ops)
            self._client.trim_prefix(self._pool.events, MAX_LINES)

    def _line(self, event: PoolJobChanged, text: str) -> list[Put]:
        if not self._keeps_history:
            return []
        return [Put(f"{self._pool.events}{time.time_ns():020d}-brain", encode(record_of(event, text)))]

    def forget(self, seen: SeenJob) -> None:
        """Delete the grant of a job that has disappeared, unless its run has come back."""
        is_absent = modified(self._pool.members + seen.job.name) == 0
        self._write(seen, [Delete(self._pool.grants + seen.job.name)], is_absent)

    def publish_others(self, names: Sequence[str]) -> None:
        """Publish the jobs in no pool that are counted. Nothing is decided by this."""
        self._client.put(self._pool.others, encode(OthersRecord(list(names))), self._tenure.lease)

    def _plan(self, seen: SeenJob, num_workers: int, reason: str, now: float) -> PlanRecord:
        assert seen.plan is not None
        text = f"pool {self._pool.pool}: {reason}"
        return replace(
            seen.plan, num_workers=num_workers, source="brain", reason=text, binding=True, decision_id=0, created_at=now
        )

    def _grant(self, seen: SeenJob, grant: GrantRecord) -> Put:
        return Put(self._pool.grants + seen.job.name, encode(grant))

    def _write(self, seen: SeenJob, ops: Sequence[Op], *conditions: Compare) -> None:
        """Write if the grant of the job is as it was seen, no other decision was made since, and the conditions hold."""
        record = replace(self._tenure.record, number=self._tenure.record.number + 1)
        fence = [self._tenure.is_ours, modified(self._pool.brain) == self._revision]
        fence += [modified(self._pool.grants + seen.job.name) == seen.grant_revision, *conditions]
        done = self._client.txn(fence, [Put(self._pool.brain, encode(record), self._tenure.lease.id), *ops])
        if not done.succeeded:
            raise OutdatedError
        self._tenure.record = record
        self._revision = done.revision


def _plan_as_seen(seen: SeenJob) -> Compare:
    return modified(seen.keys.plan) == (seen.plan_entry.mod_revision if seen.plan_entry is not None else 0)


log = logging.getLogger(__name__)

SOON_S = 0.3
"""Seconds between two looks while a change is under way."""

LEASE_S = 5.0
"""Seconds of silence after which a brain, or a job's node or worker, counts as lost, unless `--lease-ttl` sets another time."""

SETTLING_LEASES = 2.4
"""Leases within which every process that lives has registered again. The longest lease of a pool is that of a `dlrover run`."""


class BrainBusyError(RuntimeError):
    """Another process decides on this pool."""


@dataclass(frozen=True)
class PoolTimeouts:
    """Deadlines of the processes of a pool, in seconds."""

    lease_s: float = LEASE_S  # the brain's lease; a successor takes over after this time
    settle_s: float = LEASE_S * SETTLING_LEASES  # after an outage of etcd, for all processes to register again
    gone_s: float = LEASE_S * SETTLING_LEASES  # for which a job without any recorded process still counts

    @staticmethod
    def of_lease(lease_s: float) -> PoolTimeouts:
        """Return the timeouts of a pool that considers a process lost after this silence."""
        return PoolTimeouts(lease_s, lease_s * SETTLING_LEASES, lease_s * SETTLING_LEASES)


class Brain:
    """The process that decides on a pool. Use as a context manager: leaving it lets another one take over at once.

    Args:
        show: called with one line for each decision.
        keeps_history: write the pool's history, from which notifications are made.

    Raises:
        BrainBusyError: another process decides on this pool.
        EtcdError: etcd does not answer.
    """

    def __init__(
        self,
        client: EtcdClient,
        pool: PoolKeys,
        rules: Rules,
        show: Callable[[str], None] = lambda _: None,
        timeouts: PoolTimeouts | None = None,
        keeps_history: bool = False,
    ) -> None:
        self._client, self._pool = client, pool
        self._rules = rules
        self._show = show
        self._timeouts = timeouts or PoolTimeouts()
        client.share_lifetime(pool.root, HISTORY_TTL_S)
        owners = rules.owners
        record = BrainRecord(
            socket.gethostname(),
            os.getpid(),
            rules.policy,
            rules.budget.limits,
            rules.max_wait_s,
            dict(owners.weights),
            {owner: quota.limits for owner, quota in owners.quotas.items()},
        )
        journal = Journal(client, Keys(pool.pool, pool.prefix))
        self._tenure = Tenure(journal, pool.brain, lambda: record, self._busy, self._timeouts.lease_s)
        self._watch = Watch(client, pool, rules.counts_others)
        self._writer = Writer(client, pool, self._tenure, keeps_history)
        self._keeps_history = keeps_history
        self._sizes: dict[str, int] | None = None  # workers of the jobs that had a place at the last look; None: before it
        self._others: list[str] = []  # jobs in no pool, as published
        self._absent_since: dict[str, float] = {}
        self._looked_at = time.monotonic()
        self._trusts_from: float | None = None  # None: not decided yet, before the first look

    def __enter__(self) -> Brain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the pool up. Its jobs keep their sizes."""
        self._tenure.give_up()

    def was_cut_off(self) -> None:
        """Note that etcd did not answer: leases of processes that live may have expired, and records be missing."""
        self._trusts_from = time.monotonic() + self._timeouts.settle_s
        self._absent_since.clear()

    def step(self) -> bool:
        """Look, decide and write. Return whether everything is as it should be.

        Raises:
            BrainBusyError: another process decides now.
            EtcdError: etcd does not answer.
        """
        if self._tenure.take_back():
            self._others = []  # gone with the former lease
            self.was_cut_off()
        began = time.monotonic()
        if began - self._looked_at > max(self._timeouts.lease_s, self._timeouts.gone_s / 2):
            self._absent_since.clear()  # this process was suspended, and has missed changes
        now = time.time()
        view = self._watch.look(now)
        self._looked_at = time.monotonic()
        if not self._tenure.holds(view.brain_entry):
            return False  # the lease's own thread will find it lost
        assert view.brain_entry is not None
        if self._trusts_from is None:
            # A predecessor may have been cut off together with the jobs.
            has_jobs = any(job.held for job in view.pool_jobs)
            self._trusts_from = began + (self._timeouts.settle_s if has_jobs else 0.0)
        is_sure = began >= self._trusts_from
        self._publish_others(view)
        choice = choose(view.pool_jobs, self._rules, now, may_grow=is_sure)
        self._writer.based_on(view.brain_entry)
        if self._keeps_history:
            self._note_ends(view)
        try:
            has_written = self._act(view, choice, now, is_sure)
        except OutdatedError:
            return False
        return is_sure and not has_written and choice.is_settled(view.pool_jobs) and not choice.gone

    def _note_ends(self, view: PoolView) -> None:
        """Write a line for each job that had a place at the last look, and whose run has released it since."""
        if self._sizes is None:  # a job may have ended while no process decided
            self._sizes = {}
            for _, changed in events_of(read_events(self._client.get_prefix(self._pool.events)[1]), PoolJobChanged):
                self._sizes[changed.job] = changed.workers_after
        sizes = {name: seen.grant.num_workers for name, seen in view.jobs.items() if seen.grant is not None}
        for name in [name for name, size in self._sizes.items() if size and name not in sizes]:
            job = Journal(self._client, Keys(name, self._pool.prefix)).get(
                JobRecord, Keys(name, self._pool.prefix).job, readable
            )
            change = job.record.phase if job.record is not None and job.record.is_over else "stopped"
            reason = job.record.message if job.record is not None else ""
            text = f"it {'has ' if change != 'stopped' else 'was '}{change}" + (f": {reason}" if reason else "")
            self._writer.note(PoolJobChanged(name, change, self._sizes[name], 0), text)
        self._sizes = sizes

    def _publish_others(self, view: PoolView) -> None:
        others = sorted(name for name, seen in view.jobs.items() if seen.is_outside)
        if others != self._others:
            self._writer.publish_others(others)
            self._others = others

    def _act(self, view: PoolView, choice: Choice, now: float, is_sure: bool) -> bool:
        """Write the choice, first the changes that free resources. Return whether anything was written."""
        has_written = False
        moved = set()
        jobs = view.pool_jobs
        for move in choice.moves:
            seen = view.jobs[move.name]
            reason = reason_of(seen.job, move, jobs, choice.wanted)
            self._writer.resize(seen, move, self._event(seen.job, move, jobs, choice.wanted), reason, now)
            moved.add(move.name)
            self._show(f"pool {self._pool.pool}: {move.name}: {reason}")
        for name, seen in view.jobs.items():
            is_off = seen.plan is not None and (seen.plan.source != "brain" or seen.plan.num_workers != seen.job.granted)
            if name not in moved and is_off and seen.job.granted and not seen.job.is_by_hand and seen.job.alive:
                self._writer.correct_plan(seen, now)
                has_written = True
        for wait in choice.waits:
            has_written |= self._writer.wait(view.jobs[wait.name], wait, len(choice.waits), now)
        for name, reason in choice.refused.items():
            if self._writer.refuse(view.jobs[name], reason, now):
                self._show(f"pool {self._pool.pool}: {name} is refused: {reason}")
        return self._forget(view, choice, is_sure) or has_written or bool(moved)

    def _forget(self, view: PoolView, choice: Choice, is_sure: bool) -> bool:
        """Forget jobs that have been gone for a while."""
        now = time.monotonic()
        self._absent_since = {name: self._absent_since.get(name, now) for name in choice.gone}
        has_written = False
        for name, since in self._absent_since.items():
            if is_sure and now - since >= self._timeouts.gone_s and view.jobs[name].grant is not None:
                self._writer.forget(view.jobs[name])
                text = "its `dlrover run` is gone, and its place is free"
                self._writer.note(PoolJobChanged(name, "lost", (self._sizes or {}).pop(name, 0), 0), text)
                self._show(f"pool {self._pool.pool}: {name} is gone, its place is free")
                has_written = True
        return has_written

    def _event(self, job: PoolJob, move: Move, jobs: list[PoolJob], wanted: Mapping[str, int]) -> SizeGiven:
        unknown = Rate(0, 0.0, 0.0, 0.0)
        before, after = job.rate(move.before) or unknown, job.rate(move.after) or unknown
        others = [other for other in jobs if other.name != job.name and wanted.get(other.name, other.held) != other.held]
        return SizeGiven(
            pool=self._pool.pool,
            policy=self._rules.policy,
            workers_before=move.before,
            workers_after=move.after,
            samples_per_s_before=before.samples_per_s,
            samples_per_s_after=after.samples_per_s,
            low_per_s=after.low_per_s,
            high_per_s=after.high_per_s,
            cost_s=job.change_s,
            others={other.name: [other.held, wanted[other.name]] for other in others[:16]},
        )

    def _busy(self, holder: BrainRecord | None) -> BrainBusyError:
        return BrainBusyError(f"{holder_text(holder)} decides on pool {self._pool.pool!r}")


def run_brain(
    client: EtcdClient,
    pool: PoolKeys,
    rules: Rules,
    every_s: float,
    show: Callable[[str], None],
    stop: threading.Event | None = None,
    timeouts: PoolTimeouts | None = None,
    notify: Sequence[Destination] = (),
) -> None:
    """Decide on a pool, or stand by while another process does, until `stop` is set or a signal raises an exception.

    Only a process that decides sends notifications to `notify`.

    It looks at an unchanged pool every `every_s` seconds. Raise EtcdError if etcd does not answer at the start.
    """
    stop = stop or threading.Event()
    with Mirror(client, pool.root) as mirror:
        while not stop.is_set():
            try:
                with Brain(client, pool, rules, show, timeouts, bool(notify)) as brain, contextlib.ExitStack() as stack:
                    show(f"pool {pool.pool}: this process decides, by policy {rules.policy}, on {rules.budget.text}")
                    look = _nothing
                    if notify:
                        sent = EtcdNotifications(client, pool.events, pool.notified, notify, PoolEvents(pool.pool))
                        look = partial(stack.enter_context(sent).look_if_new, stack.enter_context(Mirror(client, pool.events)))
                        stack.callback(sent.look_once_more)
                    _decide(brain, mirror, every_s, stop, pool, show, look)
            except BrainBusyError as error:
                show(f"pool {pool.pool}: {error}; this one stands by")
                _wait_for_vacancy(mirror, pool.brain, stop)
            except EtcdError as error:
                log.warning("pool %s: nothing is decided until etcd is back: %s", pool.pool, error)
                stop.wait(SOON_S)


class PoolEvents:
    """Turns the lines of a pool's history into notifications."""

    def __init__(self, pool: str) -> None:
        self._pool = pool

    def __call__(self, name: str, records: list[EventRecord]) -> Notification | None:
        for record, changed in events_of(records, PoolJobChanged):
            if changed.change not in WORDS:
                continue  # of a newer release
            return Notification(
                f"{self._pool}/{name}",
                changed.change,  # type: ignore[arg-type]
                "pool",
                f"pool {self._pool}: job {changed.job} {WORDS[changed.change]}: {record.text}",
                record.at,
                changed.job,
                self._pool,
                workers=changed.workers_after,
                workers_before=changed.workers_before,
                reason=record.text,
            )
        return None


def _nothing() -> None:
    pass


def _decide(
    brain: Brain,
    mirror: Mirror,
    every_s: float,
    stop: threading.Event,
    pool: PoolKeys,
    show: Callable[[str], None],
    look: Callable[[], None],
) -> None:
    """Step until another process decides, or `stop` is set."""
    is_away = False
    while not stop.is_set():
        revision = mirror.revision
        try:
            is_settled = brain.step()
        except EtcdError as error:
            if not is_away:
                show(f"pool {pool.pool}: nothing changes until etcd is back: {error}")
            is_away, is_settled = True, False
            brain.was_cut_off()
        else:
            if is_away:
                show(f"pool {pool.pool}: etcd is back")
            is_away = False
        look()
        with contextlib.suppress(TimeoutError, EtcdError):
            timeout_s = every_s if is_settled else min(SOON_S, every_s)
            mirror.wait_for(lambda _, seen=revision: True if mirror.revision != seen or stop.is_set() else None, timeout_s)  # type: ignore[misc]


def _wait_for_vacancy(mirror: Mirror, key: str, stop: threading.Event) -> None:
    """Return once no process holds the key. Standing by has no deadline: the process exists for it."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            mirror.wait_for(lambda keys: True if key not in keys or stop.is_set() else None, 1.0)
            return


_FORMER_POLICIES = {"ours": "jct"}
"""Names of policies in the records of earlier brains, and today's."""


def rules_of(view: PoolView) -> Rules | None:
    """Return the rules of the brain that decides, None if no process does."""
    brain = view.brain
    if brain is None:
        return None
    owners = Owners(brain.owner_weights, {owner: Resources.within(quota) for owner, quota in brain.quotas.items()})
    policy = _FORMER_POLICIES.get(brain.policy, brain.policy)
    return Rules(Resources.within(brain.budget), policy, brain.max_wait_s, owners)


def snapshot_of(view: PoolView, now: float) -> dict[str, Any]:
    """Return the pool as data for JSON: running jobs first, then the queue in order."""
    rules, brain = rules_of(view), view.brain

    def place(seen: SeenJob) -> tuple[bool, int, float, str]:
        job = seen.job
        return job.is_waiting, seen.grant.place if seen.grant is not None else 0, job.submitted_s, job.name

    return {
        "brain": {"host": brain.host, "pid": brain.pid, "policy": brain.policy, "decisions": brain.number} if brain else None,
        "budget": rules.budget.text if rules is not None else "",
        "used": held_by(view.pool_jobs).text,
        "jobs": [_job(seen, now) for seen in sorted(view.jobs.values(), key=place)],
    }


def _job(seen: SeenJob, now: float) -> dict[str, Any]:
    job, grant = seen.job, seen.grant
    return {
        "job": job.name,
        "owner": job.owner,
        "priority": job.priority,
        "weight": job.weight,
        "workers": job.held,
        "granted": job.granted,
        "alive": job.alive,
        "min_workers": job.min_workers,
        "max_workers": job.max_workers,
        "has": job.needs.times(job.held).text,
        "state": _state(seen),
        "place": grant.place if grant is not None else 0,
        "expected_s": max(0.0, grant.expected_at - now) if grant is not None and grant.expected_at else None,
        "waited_s": max(0.0, now - job.submitted_s) if job.is_waiting else None,
        "left_s": job.seconds_left(job.held) if job.held else None,
        "reason": grant.reason if grant is not None else "",
    }


def _state(seen: SeenJob) -> str:
    job, grant = seen.job, seen.grant
    if seen.is_outside:
        return "runs outside of all pools"
    if not job.is_present:
        return "its `dlrover run` is gone"
    if grant is not None and grant.state == "refused":
        return "refused"
    if job.is_waiting:
        return "waits"
    if seen.phase in ("finished", "failed"):
        return f"has {seen.phase}, its nodes end"
    if job.is_by_hand:
        return "runs, its size set by hand"
    if job.alive > job.granted:
        return "shrinks"
    if job.alive < job.granted:
        return "starts" if not job.alive else "grows"
    return "runs" if job.rates else "runs, its speed by size not known yet"
