"""Run the membership protocol of `rounds.py` and `convener.py` against etcd, as one worker of a job.

Holds the worker's own record, mirrors the records of the others, and takes part in the election of the convener. It is
independent of process groups: `world.py` forms them for the rounds that appear here.

One thread per worker (`_run`) does all background work. It decodes the mirror's changes, notifies the listener, convenes while
it holds the election key, and writes queued events. The calling thread writes only the worker's own record and burials.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.errors import EtcdError, EtcdFullError, EtcdUnavailableError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.events import Event, RecordIgnored, record_of
from lightning_dlrover.rdzv.job.journal import Journal, read, readable
from lightning_dlrover.rdzv.job.records import (
    CheckpointRecord,
    CheckpointRequest,
    EventRecord,
    JobRecord,
    Keys,
    NodesRecord,
    PlanRecord,
    RecordError,
    RoundRecord,
    SearchRecord,
    StacksRecord,
    StacksRequest,
    WorkerRecord,
    WorkerState,
    encode,
)
from lightning_dlrover.rdzv.live.admission import MembershipConfig, enter_job, refuse_loopback
from lightning_dlrover.rdzv.live.announcement import announce
from lightning_dlrover.rdzv.live.convener import Convener, burial
from lightning_dlrover.rdzv.live.member import EvictedError, MembershipError
from lightning_dlrover.rdzv.live.outbox import Outbox
from lightning_dlrover.rdzv.live.own_record import OwnRecord
from lightning_dlrover.rdzv.live.probe import dead_workers
from lightning_dlrover.rdzv.live.requests import ask_for_replacement, ask_for_stacks, read_stacks
from lightning_dlrover.rdzv.live.rounds import View, awaited, lacks_workers
from lightning_dlrover.rdzv.live.view import Decoded, read_view

__all__ = ["Membership"]

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class Membership:
    """One worker's record, its view of the job, and its turn as convener.

    Args:
        client: a connected client; its owner closes it.
        on_view: called from the background thread after every change, with the new view. Must return quickly.
        on_tick: called from the background thread about every 100 ms, even without a change.
    """

    def __init__(
        self,
        client: EtcdClient,
        config: MembershipConfig,
        on_view: Callable[[View], None] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.keys = Keys(config.run_id, config.prefix)
        self.worker_id = f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.reached: set[str] = set()  # workers that this one has formed a round with
        self._config = config
        self._client = client
        client.share_lifetime(self.keys.root, config.history_ttl_s)
        self._on_view = on_view
        self._on_tick = on_tick
        self._cache: dict[str, Decoded] = {}
        self._changed = threading.Condition()
        self._dirty = False
        self._view = View()
        self._view_since = time.monotonic()
        self._buried: set[str] = set()  # workers that this one has buried
        self._seen: tuple[dict[str, KeyValue], View] = ({}, View())  # one copy of the records and its view
        self._journal = Journal(client, self.keys)
        self._outbox = Outbox(self._journal, self.worker_id)
        self._closing = False
        self._own = OwnRecord(client, self.keys, config.run_id, self.worker_id, config.lease_ttl_s, self._on_new_lease)
        self._convener = Convener(self.keys, self.worker_id, self._own.lease.id, config.patience)
        self._mirror = Mirror(client, self.keys.live, self._on_mirror)
        self._refresh()
        self._thread = threading.Thread(target=self._run, name="dlrover-membership", daemon=True)

    # --- the worker's own record -------------------------------------------------------------------------------------

    def register(self) -> WorkerState:
        """Enter the job, as `starting` if no worker is past the start yet, else as `standby`.

        Raises:
            JobClosedError: the job has ended.
            MembershipError: the job is run by another release of this package, or a record of the job cannot be read.
        """
        enter_job(self._journal, self._config)
        self._refresh()
        refuse_loopback(self._config, self._view.workers.values())
        state: WorkerState = "standby" if self._someone_is_past_the_start() else "starting"
        record = WorkerRecord(
            worker_id=self.worker_id,
            agent_id=self._config.agent_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            local_rank=self._config.local_rank,
            address=self._config.address,
            port=self._config.port,
            state=state,
            version=self._config.version,
            since=time.time(),
        )
        self._own.create(record)
        try:
            self._mirror.wait_for(lambda entries: entries.get(self._own.key), 10.0)
        except TimeoutError as error:
            raise EvictedError(self._own.evicted_text) from error  # the lease may have expired, as while the process is stopped
        self._thread.start()
        return state

    def update(
        self, state: WorkerState, round_number: int = 0, fingerprint: str | None = None, unreachable: Sequence[str] = ()
    ) -> None:
        """Write this worker's state.

        Args:
            unreachable: workers that this one could not reach, see `WorkerRecord.unreachable`.

        Raises:
            EvictedError: the record is gone because the job went on without this worker.
        """
        self._own.update(state, round_number, fingerprint, unreachable)

    def leave(self) -> None:
        """Remove this worker's records. From then on the others treat it as gone."""
        self._own.leave()

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave if still registered and end the background thread."""
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        try:
            for step in (self._outbox.write, self.leave, self._tidy_up):
                with contextlib.suppress(EtcdFullError):  # a full etcd still ends leases, and thereby removes our record
                    step()
            self._own.lease.revoke()
        except EtcdError as error:
            # The lease expires by itself. An error at the worker's exit would turn a finished job into a failed one.
            log.warning("run %s: could not sign off: %s", self._config.run_id, error)
        self._mirror.close()

    def deliver(self, timeout_s: float) -> None:
        """Wait until etcd holds the queued changes of records, for at most `timeout_s`; at once if there are none."""
        deadline = time.monotonic() + timeout_s
        if names := self._outbox.waiting:
            log.warning(
                "run %s: worker %s waits for up to %.0f s until etcd takes what is not recorded yet: %s",
                *(self._config.run_id, self.worker_id, timeout_s, ", ".join(names)),
            )
        with self._changed:
            while self._outbox.waiting and self._thread.is_alive() and time.monotonic() < deadline and not self.evicted:
                self._changed.wait(0.05)

    def _tidy_up(self) -> None:
        """Remove the records that a job needs no more once it has ended, and keep its history.

        Every worker does this as it closes, possibly several at once. If all were killed, the records expire with their common
        lifetime.
        """
        job = self._journal.get(JobRecord, self.keys.job, readable).record
        if job is not None and job.phase in ("finished", "failed"):
            self._client.delete(self.keys.plan)
            self._client.delete_prefix(self.keys.drains)

    # --- views and waiting ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        return self._view

    def wait_for(
        self,
        found: Callable[[View], T | None],
        timeout_s: float,
        what: str,
        tick: Callable[[], None] | None = None,
        is_excused: Callable[[], bool] | None = None,
    ) -> T:
        """Wait until `found` of the view is not None, and return it.

        Args:
            tick: called between two checks, at least every 50 ms.
            is_excused: called between two checks; the timeout restarts while it returns True.

        Raises:
            TimeoutError: the wait for `what` timed out; the message names the workers or agents that are missing.
            EvictedError: the job went on without this worker meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._own.evicted:
                    raise EvictedError(self._own.evicted_text)
                result = found(self._view)
                if result is not None:
                    return result
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = awaited(self._view)
                    raise TimeoutError(
                        f"run {self._config.run_id!r}, worker {self.worker_id}: waited {timeout_s:.0f} s for {what}"
                        + (f"; missing: {', '.join(missing)}" if missing else "")
                        + ("" if self._mirror.healthy else "; etcd does not answer")
                    )
                self._changed.wait(min(left, 0.05))
            if is_excused is not None and is_excused():
                deadline = time.monotonic() + timeout_s
            if tick is not None:
                tick()

    def bury(self, worker_ids: Sequence[str]) -> None:
        """Remove the records of workers that are certainly dead, before their leases expire.

        A mistake is safe: a living worker that was buried detects that its record is gone and stops taking part.
        """
        entries = self._mirror.snapshot()
        for worker_id in worker_ids:
            writes = burial(entries, self.keys, worker_id)
            if writes:
                self._buried.add(worker_id)
                log.info("run %s: worker %s is gone (its port refuses connections)", self._config.run_id, worker_id)
            for write in writes:
                self._client.txn(write.compare, write.ops)

    def bury_the_dead(self, worker_ids: Iterable[str]) -> None:
        """Probe workers and bury those that are certainly dead."""
        records = [self._view.workers[w] for w in worker_ids if w != self.worker_id and w in self._view.workers]
        # A refusal from another host proves nothing until that address was reached once: it may come from a firewall.
        records = [r for r in records if r.host == socket.gethostname() or r.worker_id in self.reached]
        if dead := dead_workers(records):
            try:
                self.bury(dead)
            except EtcdUnavailableError as error:
                # A dead worker stays dead: the next probe or its lease expiry removes the record.
                log.debug("run %s: could not bury %s: %s", self._config.run_id, dead, error)

    # --- records for others ---------------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """Ask to leave the job: the next planned round is formed without this worker.

        Raises:
            LeaseLostError: this worker's lease has expired; the request is repeated if the worker registers again.
        """
        self._own.drain(reason)

    def event(self, event: Event, text: str) -> None:
        """Queue one line for the job's history; never blocks."""
        self._outbox.add(record_of(event, text))

    def flush(self) -> None:
        """Write queued events now."""
        self._outbox.write()

    def update_job(self, change: Callable[[JobRecord], JobRecord]) -> None:
        """Compare-and-swap the job record until `change` of its newest version is stored."""
        self._swap(JobRecord, self.keys.job, lambda job: change(job) if job else None)

    def record(self, name: str, change: Callable[[JobRecord], JobRecord]) -> bool:
        """Update the job record now, or once etcd is available. Return whether it was done.

        Args:
            name: what is recorded, for people. A change that waits under the same name is replaced.
        """
        return self._outbox.change(name, lambda: self.update_job(change))

    def update_plan(self, change: Callable[[PlanRecord | None], PlanRecord | None]) -> None:
        """Compare-and-swap the plan; `change` returns None to leave it unchanged."""
        self._swap(PlanRecord, self.keys.plan, change)

    def put_checkpoint(self, record: CheckpointRecord) -> None:
        """Record the newest checkpoint now, or once etcd is available."""
        self._outbox.change(
            f"run {self._config.run_id}: the newest checkpoint",
            lambda: self._swap(CheckpointRecord, self.keys.checkpoint, lambda _: record),
        )

    def checkpoint_request(self) -> int:
        """Return the number of the newest checkpoint request, 0 if there is none."""
        request = readable(CheckpointRequest, self._mirror.get(self.keys.checkpoint_request))
        return request.number if request is not None else 0

    def ask_for_checkpoint(self, reason: str) -> None:
        """Ask all workers to save a checkpoint between two steps."""
        self._swap(
            CheckpointRequest,
            self.keys.checkpoint_request,
            lambda now: CheckpointRequest(now.number + 1 if now is not None else 1, reason),
        )

    def newest_job(self) -> JobRecord | None:
        """Read the job's record from etcd, bypassing the view."""
        return self._journal.get(JobRecord, self.keys.job).record

    def was_cancelled(self) -> bool:
        """Read from etcd whether the whole job was asked to end for good, as by `dlrover cancel`."""
        nodes = self._journal.get(NodesRecord, self.keys.nodes).record
        return nodes is not None and bool(nodes.stop)

    def newest_checkpoint(self) -> CheckpointRecord | None:
        return self._journal.get(CheckpointRecord, self.keys.checkpoint).record

    def put_search(self, number: int, record: SearchRecord) -> None:
        """Queue a search's result until etcd accepts it. Joiners wait for it; the workers that found it train on."""
        key, payload = f"{self.keys.searches}{number}", encode(record)
        self._outbox.add_change(f"run {self._config.run_id}: result of search {number}", lambda: self._client.put(key, payload))
        with self._changed:
            self._changed.notify_all()

    def search(self, number: int) -> SearchRecord | None:
        """Return the result of the script's search with this number, None before there is one."""
        return read(SearchRecord, self._mirror.get(f"{self.keys.searches}{number}"))

    def has_controller(self) -> bool:
        return self._mirror.get(self.keys.controller) is not None

    def is_being_staffed(self) -> bool:
        """Whether the job has too few workers, and a live controller to start more.

        That may take long in a full cluster, but the state in the survivors' memory is worth the wait.
        """
        return self.has_controller() and lacks_workers(self._view)

    @property
    def nodes(self) -> NodesRecord | None:
        """A controller's record of the job's nodes; None if there is none or it cannot be read."""
        return readable(NodesRecord, self._mirror.get(self.keys.nodes))

    def past_events(self) -> list[EventRecord]:
        """Return the job's history so far, oldest first. Lines that cannot be read are left out."""
        return self._journal.events()

    def replace(self, worker_id: str, reason: str) -> bool:
        """Request a worker's replacement; False if it is gone or was drained already."""
        return ask_for_replacement(self._journal, worker_id, reason)

    def stacks_request(self) -> StacksRequest | None:
        """Return the newest request for stack traces, None if there is none."""
        return readable(StacksRequest, self._mirror.get(self.keys.stacks_request))

    def ask_for_stacks(self, after: int, reason: str) -> StacksRequest | None:
        """Request a stack trace from every worker; see `ask_for_stacks`."""
        return ask_for_stacks(self._journal, self.worker_id, reason, after)

    def put_stacks(self, record: StacksRecord) -> None:
        """Publish this worker's stack traces, bound to its lease."""
        self._client.put(self.keys.stacks + self.worker_id, encode(record), self._own.lease)

    def stacks(self, request: int) -> dict[str, StacksRecord]:
        """Return the responses to a request so far, by worker."""
        answers = read_stacks(self._journal)
        return {worker: answer for worker, answer in answers.items() if answer.request == request}

    def put_profile(self, payload: bytes) -> None:
        """Publish this worker's newest step profile, bound to its lease."""
        self._client.put(self.keys.profiles + self.worker_id, payload, self._own.lease)

    # --- background ------------------------------------------------------------------------------------------------------

    def _someone_is_past_the_start(self) -> bool:
        view = self._view
        return bool(view.survivors or view.in_state("standby", "ready"))

    def _on_mirror(self) -> None:
        with self._changed:
            self._dirty = True
            self._changed.notify_all()

    def _on_new_lease(self, lease_id: int) -> None:
        self._convener.came_back(lease_id, time.monotonic())

    def _refresh(self) -> None:
        def bad(key: str, error: RecordError) -> None:
            log.error("run %s: ignored a record: %s", self._config.run_id, error)
            self.event(RecordIgnored(key), f"ignored a record: {error}")

        self._dirty = False
        entries = self._mirror.snapshot()
        view = read_view(entries, self.keys, self._cache, bad)
        with self._changed:
            if view != self._view:
                self._view_since = time.monotonic()
            self._view = view
            self._seen = (entries, view)
        with contextlib.suppress(EtcdFullError):  # it registers again once there is room, and follows the others meanwhile
            self._own.check(entries)
        with self._changed:
            self._changed.notify_all()
        if self._on_view is not None:
            self._on_view(view)

    def _run(self) -> None:
        while not self._closing:
            with self._changed:
                if not self._dirty:
                    self._changed.wait(0.1)
            try:
                # Run even when nothing has changed: patience runs out without an event.
                self._refresh()
                if self._on_tick is not None:
                    self._on_tick()
                self._convene()
                self._outbox.write()
            except EtcdError as error:
                log.debug("run %s: etcd is away: %s", self._config.run_id, error)
            except Exception:
                # Without its membership thread a worker would never detect another round.
                log.error("run %s: membership thread: %s", self._config.run_id, traceback.format_exc())

    @property
    def evicted(self) -> bool:
        return self._own.evicted

    def _convene(self) -> None:
        # Read both together: the view must come from the revision that guards the next round.
        entries, view = self._seen
        if not self._own.is_in_force:
            return
        if not self._mirror.healthy:
            self._convener.was_cut_off(time.monotonic())
        write = self._convener.next_write(entries, view, time.monotonic(), time.time())
        if write is None:
            return
        try:
            done = self._client.txn(write.compare, write.ops)
        except EtcdFullError:
            # A healthy worker whose lease expired meanwhile can register again only when there is room.
            self._convener.was_cut_off(time.monotonic())
            raise
        if done.succeeded:
            if write.round is not None:
                self._announce(view, write.round)
            # The next decision must see this write, or it would be repeated in vain.
            with contextlib.suppress(TimeoutError):
                self._mirror.wait_for(lambda now: None if write.may_succeed(now) else True, 5.0)

    def _announce(self, view: View, round_: RoundRecord) -> None:
        log.info("run %s: round %d: %s, %d workers", self._config.run_id, round_.number, round_.reason, len(round_.members))
        decided_s = round(time.monotonic() - self._view_since, 3)
        announce(view, round_, decided_s, self._buried, self.event)

    def _swap(self, record_type: type[R], key: str, change: Callable[[R | None], R | None]) -> None:
        if self._journal.swap(record_type, key, change).record is None:
            raise MembershipError(f"run {self._config.run_id!r}: {key!r} does not exist")
