"""Decide when to look at a pool, and in which order to act. See the package for the states and their owners."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_dlrover.brain.decisions import Choice, Rules, choose, reason_of
from lightning_dlrover.brain.watch import PoolView, Watch
from lightning_dlrover.brain.writer import OutdatedError, Writer
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.moves import Move
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.events import SizeGiven
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.pool_records import BrainRecord, PoolKeys
from lightning_dlrover.rdzv.job.records import HISTORY_TTL_S, Keys
from lightning_dlrover.rdzv.job.tenure import Tenure, holder_text

__all__ = ["Brain", "BrainBusyError", "PoolTimeouts", "run_brain"]

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
    """Seconds that a brain grants others.

    Args:
        lease_s: the brain's lease. A successor takes over after this time.
        settle_s: after an outage of etcd, for all processes to register again.
        gone_s: a job without any process on record counts until then.
    """

    lease_s: float = LEASE_S
    settle_s: float = LEASE_S * SETTLING_LEASES
    gone_s: float = LEASE_S * SETTLING_LEASES

    @staticmethod
    def of_lease(lease_s: float) -> PoolTimeouts:
        """Return the timeouts of a pool in which each process counts as lost after this silence."""
        return PoolTimeouts(lease_s, lease_s * SETTLING_LEASES, lease_s * SETTLING_LEASES)


class Brain:
    """The process that decides on a pool. Use as a context manager: leaving it lets another one take over at once.

    Args:
        show: called with one line for each decision.

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
    ) -> None:
        self._pool = pool
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
        self._writer = Writer(client, pool, self._tenure)
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
            self._absent_since.clear()  # this process stood still, and has missed changes
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
        try:
            has_written = self._act(view, choice, now, is_sure)
        except OutdatedError:
            return False
        return is_sure and not has_written and choice.is_settled(view.pool_jobs) and not choice.gone

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
            event = self._event(seen.job, move, jobs, choice.wanted)
            self._writer.resize(seen, move, event, reason, now)
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
        """Forget jobs of which nothing has been left for a while."""
        now = time.monotonic()
        self._absent_since = {name: self._absent_since.get(name, now) for name in choice.gone}
        has_written = False
        for name, since in self._absent_since.items():
            if is_sure and now - since >= self._timeouts.gone_s and view.jobs[name].grant is not None:
                self._writer.forget(view.jobs[name])
                self._show(f"pool {self._pool.pool}: {name} is gone, its place is free")
                has_written = True
        return has_written

    def _event(self, job: PoolJob, move: Move, jobs: list[PoolJob], wanted: Mapping[str, int]) -> SizeGiven:
        before, after = job.rate(move.before), job.rate(move.after)
        others = [other for other in jobs if other.name != job.name and wanted.get(other.name, other.held) != other.held]
        return SizeGiven(
            pool=self._pool.pool,
            policy=self._rules.policy,
            workers_before=move.before,
            workers_after=move.after,
            samples_per_s_before=before.samples_per_s if before is not None else 0.0,
            samples_per_s_after=after.samples_per_s if after is not None else 0.0,
            low_per_s=after.low_per_s if after is not None else 0.0,
            high_per_s=after.high_per_s if after is not None else 0.0,
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
) -> None:
    """Decide on a pool, or stand by while another process does, until `stop` is set or a signal raises an exception.

    Args:
        every_s: seconds between two looks at a pool in which nothing changes.

    Raises:
        EtcdError: etcd does not answer at the start.
    """
    stop = stop or threading.Event()
    with Mirror(client, pool.root) as mirror:
        while not stop.is_set():
            try:
                with Brain(client, pool, rules, show, timeouts) as brain:
                    show(f"pool {pool.pool}: this process decides, by policy {rules.policy}, on {rules.budget.text}")
                    _decide(brain, mirror, every_s, stop, pool, show)
            except BrainBusyError as error:
                show(f"pool {pool.pool}: {error}; this one stands by")
                _wait_for_vacancy(mirror, pool.brain, stop)
            except EtcdError as error:
                log.warning("pool %s: nothing is decided until etcd is back: %s", pool.pool, error)
                stop.wait(SOON_S)


def _decide(
    brain: Brain, mirror: Mirror, every_s: float, stop: threading.Event, pool: PoolKeys, show: Callable[[str], None]
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
        with contextlib.suppress(TimeoutError, EtcdError):
            timeout_s = every_s if is_settled else min(SOON_S, every_s)
            mirror.wait_for(lambda _, seen=revision: True if mirror.revision != seen or stop.is_set() else None, timeout_s)  # type: ignore[misc]


def _wait_for_vacancy(mirror: Mirror, key: str, stop: threading.Event) -> None:
    """Return once no process holds the key. Standing by has no deadline: the process exists for it."""

    def is_vacant(keys: Mapping[str, KeyValue]) -> bool | None:
        return True if key not in keys or stop.is_set() else None

    while not stop.is_set():
        try:
            mirror.wait_for(is_vacant, 1.0)
            return
        except TimeoutError:
            continue
