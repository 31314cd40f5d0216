"""A simulated etcd and a worker's connection to it: requests and answers that are late, lost or duplicated, leases, watches.

Every write of the job is kept with its revision and writer. The invariants are checked over this log.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import Compare, Delete, EtcdUnavailableError, KeyValue, LeaseLostError, Op, Put, Txn
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.rdzv.membership.rounds import Decoder, JobView, WorkerView

from .kernel import Kernel, Process, Wake

ATTEMPT_S = 1.0
TIMEOUT_S = 3.0
PAUSE_S = 0.05
UNHEALTHY_AFTER_S = 2.0


@dataclass(frozen=True)
class Written:
    """One key of one revision."""

    revision: int
    at: float
    writer: str  # worker id; "lease" or "outside" for others
    key: str
    value: bytes | None  # None: deleted


class Etcd:
    """Keys, revisions and leases. `up` is false during an outage."""

    def __init__(self, kernel: Kernel, keys: Keys) -> None:
        self.kernel = kernel
        self.keys = keys
        self.up = True
        self.back_since = 0.0  # end of the last outage that was long enough to be noticed
        self._down_since = 0.0
        self.loss = 0.0  # share of requests, and of answers, that get lost
        self.delay_s = 0.02
        self.entries: dict[str, KeyValue] = {}
        self.copies: list[dict[str, KeyValue]] = [{}]  # snapshots by revision
        self.views: list[JobView] = [JobView()]
        self.worker_views: list[WorkerView] = [WorkerView()]
        self.history: list[Written] = []
        self.clients: list[Client] = []
        self.on_write: Callable[[Written], None] = lambda written: None
        self._leases: dict[int, tuple[float, float]] = {}  # time to live and expiry time by lease
        self._decoder = Decoder(keys, lambda key, error: None)
        self._num_leases = 0

    @property
    def revision(self) -> int:
        return len(self.copies) - 1

    def set_up(self, up: bool) -> None:
        if self.up == up:
            return
        self.up = up
        if not up:
            self._down_since = self.kernel.now
        else:
            if self.kernel.now - self._down_since > UNHEALTHY_AFTER_S + 1.0:
                self.back_since = self.kernel.now
            for lease_id, (ttl_s, _) in list(self._leases.items()):
                self.refresh(lease_id, ttl_s)  # etcd extends leases when it has elected a leader
        for client in self.clients:
            client.contact_changed()

    def txn(self, compare: Sequence[Compare], ops: Sequence[Op], writer: str = "outside") -> Txn:
        if not all(condition.holds(self.entries.get(condition.key)) for condition in compare):
            return Txn(False, self.revision, [])
        for op in ops:
            if isinstance(op, Put) and op.lease_id and op.lease_id not in self._leases:
                raise LeaseLostError("the lease has expired")
        revision = self.revision + 1
        changed: list[tuple[str, bytes | None]] = []
        for op in ops:
            if isinstance(op, Put):
                old = self.entries.get(op.key)
                first = old.create_revision if old else revision
                version = old.version + 1 if old else 1
                self.entries[op.key] = KeyValue(op.key, op.value, first, revision, version, op.lease_id)
                changed.append((op.key, op.value))
            elif isinstance(op, Delete) and self.entries.pop(op.key, None) is not None:
                changed.append((op.key, None))
        if changed:
            self._commit(writer, changed)
        return Txn(True, self.revision, [])

    def _commit(self, writer: str, changed: list[tuple[str, bytes | None]]) -> None:
        copy = dict(self.entries)
        self.copies.append(copy)
        self.views.append(self._decoder.view(copy))
        self.worker_views.append(self._decoder.worker_view(copy))
        for key, value in changed:
            written = Written(self.revision, self.kernel.now, writer, key, value)
            self.history.append(written)
            self.on_write(written)
        for client in self.clients:
            client.follow()

    # --- leases

    def grant(self, ttl_s: float) -> int:
        self._num_leases += 1
        self._leases[self._num_leases] = (ttl_s, 0.0)
        self.refresh(self._num_leases, ttl_s)
        return self._num_leases

    def refresh(self, lease_id: int, ttl_s: float) -> bool:
        if lease_id not in self._leases:
            return False
        end = self.kernel.now + ttl_s
        self._leases[lease_id] = (ttl_s, end)
        self.kernel.after(ttl_s, lambda: self._expire(lease_id, end))
        return True

    def revoke(self, lease_id: int) -> None:
        if self._leases.pop(lease_id, None) is not None:
            gone = [key for key, entry in self.entries.items() if entry.lease_id == lease_id]
            for key in gone:
                del self.entries[key]
            if gone:
                self._commit("lease", [(key, None) for key in gone])

    def _expire(self, lease_id: int, end: float) -> None:
        if self.up and self._leases.get(lease_id, (0.0, 0.0))[1] == end:
            self.revoke(lease_id)


class Client:
    """One worker's requests, and its copy of the job's records as of revision `seen`."""

    def __init__(self, etcd: Etcd, process: Process, name: str, on_change: Callable[[], None]) -> None:
        self.etcd = etcd
        self.name = name
        self.kernel = etcd.kernel
        self.seen = etcd.revision
        self.cut = False
        self.watch_delay_s = 0.02
        self.lost_contact_at = -1e9
        self.clean_since = 0.0  # start of the current time without disturbances of the copy
        self.before_write: Callable[[], None] = lambda: None
        self.after_write: Callable[[], None] = lambda: None
        self._process = process
        self._on_change = on_change
        self._delivering = False
        self._is_late = False  # True while a message of the watch takes long
        self._last_revision = 0
        etcd.clients.append(self)

    @property
    def in_contact(self) -> bool:
        return self.etcd.up and not self.cut and self._process.alive

    @property
    def is_fresh(self) -> bool:
        """Return whether writes reach this worker within a fraction of a second."""
        return self.in_contact and self.watch_delay_s < 0.1 and not self._is_late

    @property
    def healthy(self) -> bool:
        return self.in_contact or self.kernel.now - self.lost_contact_at < UNHEALTHY_AFTER_S

    def set_cut(self, cut: bool) -> None:
        self.cut = cut
        self.contact_changed()

    def contact_changed(self) -> None:
        if not self.in_contact:
            self.lost_contact_at = self.kernel.now
        self.disturbed()
        self.follow()

    def disturbed(self) -> None:
        self.clean_since = self.kernel.now

    def copy(self) -> tuple[dict[str, KeyValue], JobView]:
        """All records, as the coordinator sees them."""
        return self.etcd.copies[self.seen], self.etcd.views[self.seen]

    def shared(self) -> tuple[dict[str, KeyValue], WorkerView]:
        """The shared records, and what they tell every worker."""
        prefix = self.etcd.keys.shared
        entries = {key: entry for key, entry in self.etcd.copies[self.seen].items() if key.startswith(prefix)}
        return entries, self.etcd.worker_views[self.seen]

    def follow(self) -> None:
        """Simulate the watch: one message at a time, each showing all writes until it was sent."""
        if self._delivering or not self.in_contact or self.seen >= self.etcd.revision:
            return
        self._delivering = True
        target = self.etcd.revision
        delay_s = self.watch_delay_s * self.kernel.rng.random() * 2
        self._is_late = delay_s > 0.1

        def deliver() -> None:
            self._delivering = self._is_late = False
            if self.in_contact:
                self.seen = max(self.seen, target)
                if delay_s > 0.1:
                    self.disturbed()  # its copy was stale until now
                self._on_change()
                self.follow()

        self.kernel.after(delay_s, deliver)

    async def request(self, run: Callable[[], Any], timeout_s: float = TIMEOUT_S, attempts: list[None] | None = None) -> Any:
        """Send a request as `EtcdClient._call` does: repeat it until it is answered or the time is up."""
        deadline = self.kernel.now + timeout_s
        while True:
            if attempts is not None:
                attempts.append(None)
            answer = self._attempt(run)
            if await answer is not None:
                result = answer.value[0]
                if isinstance(result, BaseException):
                    raise result
                self._last_revision = max(self._last_revision, self.etcd.revision)
                return result
            if self.kernel.now >= deadline:
                raise EtcdUnavailableError("no answer")
            await self._process.sleep(PAUSE_S)

    def _attempt(self, run: Callable[[], Any]) -> Wake:
        kernel, etcd, answer = self.kernel, self.etcd, Wake()
        kernel.after(ATTEMPT_S, answer.set)

        def arrive() -> None:
            if not etcd.up or self.cut:
                return
            try:
                result = run()
            except LeaseLostError as error:
                result = error
            if kernel.rng.random() >= etcd.loss:
                kernel.after(self._delay(), lambda: answer.set((result,)) if not self.cut and etcd.up else None)

        if kernel.rng.random() >= etcd.loss:
            kernel.after(self._delay(), arrive)
        return answer

    def _delay(self) -> float:
        rng = self.kernel.rng
        slow = self.etcd.loss and rng.random() < 0.1
        return rng.random() * (3.0 if slow else self.etcd.delay_s)

    async def get(self, key: str) -> KeyValue | None:
        found: KeyValue | None = await self.request(lambda: self.etcd.entries.get(key))
        return found

    async def txn(self, compare: Sequence[Compare], ops: Sequence[Op]) -> Txn:
        """Run a transaction as `EtcdClient.txn` does, with its rule for one that was repeated and then failed."""
        before = self._last_revision
        attempts: list[None] = []
        self.before_write()
        if self._process.stopped or not self._process.alive:
            await self._process.sleep(0.0)  # the process may have died here

        def run() -> Txn:
            done = self.etcd.txn(compare, ops, self.name)
            if done.succeeded:
                self.after_write()
            return done

        done: Txn = await self.request(run, attempts=attempts)
        if not done.succeeded and len(attempts) > 1:
            now = {op.key: await self.get(op.key) for op in ops}
            caller = types.SimpleNamespace(last_revision=self._last_revision)
            reader: Any = types.SimpleNamespace(get=now.get, caller=caller)
            if applied := EtcdClient._was_applied(reader, ops, before):
                return Txn(True, applied, [])
        return done
