"""Run the membership protocol against etcd, as one worker of a job: register, follow the records, campaign, leave."""

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
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdError, EtcdFullError, EtcdUnavailableError, absent, is_loopback
from lightning_dlrover.rdzv.job.events import RecordIgnored
from lightning_dlrover.rdzv.job.journal import Journal, readable, readable_folder
from lightning_dlrover.rdzv.job.records import (
    HISTORY_TTL_S,
    JobRecord,
    Keys,
    RoundRecord,
    WorkerRecord,
    WorkerState,
    worker_name_of,
)
from lightning_dlrover.rdzv.membership.coordinator import Announcer, Office, WorkerRecords, eviction
from lightning_dlrover.rdzv.membership.member import EvictedError, MembershipError
from lightning_dlrover.rdzv.membership.rounds import Decoder, JobView, RoundTimeouts, WorkerView, awaited, read_view
from lightning_dlrover.rdzv.membership.worker_records import BATCH, OwnRecord, SharedRecords

MAX_LEAVE_S = 30.0
"""Maximum seconds between a planned leave and the end of the node."""


def leaves_at(taken_at: float, now: float) -> float:
    """Return the time at which a worker leaves even if it is not replaced, because its node is taken away at `taken_at`.

    A third of the notice is reserved for the step in flight and the hand-over. Until then a replacement may come.

    Args:
        now: time at which the deadline becomes known.
    """
    return taken_at - min(MAX_LEAVE_S, max(0.0, taken_at - now) / 3)


class JobClosedError(MembershipError):
    """The job has finished or failed; there is nothing to join.

    Example:
        >>> def exit_code(error):
        ...     return 0 if isinstance(error, JobClosedError) else 1
        >>> exit_code(JobClosedError("job 'ctr' has finished"))
        0
    """


@dataclass(frozen=True)
class MembershipConfig:
    """Location of the job's records and identity of this worker."""

    run_id: str
    prefix: str
    agent_id: str
    local_rank: int
    min_workers: int
    max_workers: int
    version: str  # release of lightning_dlrover
    address: str = ""  # address at which other workers reach this one
    port: int = 0  # port of this worker's TCPStore
    node_workers: int = 1  # workers of each node of `dlrover run`, which starts an agent for each; they come and go together
    sizes: tuple[int, ...] = ()  # numbers of workers that may be requested, ascending; empty: any
    lease_ttl_s: float = 5.0
    history_ttl_s: float = HISTORY_TTL_S  # seconds that the job's records outlast its last process
    timeouts: RoundTimeouts = field(default_factory=RoundTimeouts)


def enter_job(journal: Journal, config: MembershipConfig) -> None:
    """Create the job's record if there is none, and check that this worker may join.

    Raises:
        JobClosedError: the job has ended.
        MembershipError: the job is run by another release of this package, or a record of the job cannot be read.
    """
    keys = journal.keys
    try:
        job = journal.get(JobRecord, keys.job).record
        if job is None:
            first = JobRecord(
                phase="starting",
                live=True,
                min_workers=config.min_workers,
                max_workers=config.max_workers,
                version=config.version,
                workers_per_node=config.node_workers,
                sizes=list(config.sizes),
                created_at=time.time(),
            )
            journal.fenced_write({keys.job: first}, [absent(keys.job)])
            job = journal.get(JobRecord, keys.job).record
        if job is None:
            raise MembershipError(f"run {config.run_id!r}: {keys.job!r} vanished while joining; start the worker again")
        journal.get(RoundRecord, keys.round)
    except RecordError as error:
        raise MembershipError(f"run {config.run_id!r} cannot be joined: {error}") from error
    if job.unfinished_fit and not journal.client.get_prefix(keys.workers)[1]:
        raise MembershipError(
            f"run {config.run_id!r}: all workers were lost in fit number {job.unfinished_fit} of the script, and "
            "only the first can be resumed; start a new run with another --rdzv-id"
        )
    if job.unfinished_fit:
        raise JobClosedError(f"run {config.run_id!r}: this worker ends, because no worker can join: {job.closed}")
    if job.phase in ("finished", "failed"):
        raise JobClosedError(
            f"run {config.run_id!r} has {job.phase}{': ' + job.message if job.message else ''}; "
            "start a new run with another --rdzv-id"
        )
    if job.version != config.version:
        raise MembershipError(
            f"run {config.run_id!r} is run by lightning-dlrover {job.version}, this worker has "
            f"{config.version}: install the same release on every node"
        )


def refuse_loopback(config: MembershipConfig, workers: Iterable[WorkerRecord]) -> None:
    """Refuse loopback addresses in a job whose workers run on several hosts.

    Raises:
        MembershipError: the workers run on several hosts, and one of them has an address that others cannot reach.
    """
    own = config.address
    for worker in workers:
        if worker.host == socket.gethostname():
            continue
        for host, address in ((worker.host, worker.address), (socket.gethostname(), own)):
            if is_loopback(address):
                raise MembershipError(
                    f"run {config.run_id!r}: workers on host {host} are known by the loopback address {address}, "
                    "which other hosts cannot reach; start every node of the job with --rdzv-endpoint=ADDRESS:PORT, where "
                    "ADDRESS is that of etcd on the network, neither localhost nor a name that /etc/hosts maps to 127.0.x.x"
                )


log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

CHECK_S = 5.0  # seconds between two checks that a mirror has missed no change; its watch reports changes at once
TICK_S = 0.5
"""Maximum seconds between two turns of the background thread, for timeouts. Each takes time from training on busy cores."""

STAND_S = 0.05  # seconds between two turns while this worker waits for its moment to stand for coordinator
GONE_CHECK_S = 0.3  # seconds between two checks whether a worker has ended that no notice will name
MAX_SILENT_LEASES = 2.5  # lifetimes of its lease for which a worker without an answer from etcd can rely on its place
MAX_EVICTED = 1000  # evicted workers that one worker remembers
NUM_SAMPLED = 8  # number of oldest workers that a new one compares its address with


class Membership:
    """One worker's view of the job, and its turn as coordinator: runs the protocol of `rounds.py` against etcd.

    One thread per worker (`_run`) does all background work. It decodes the mirror's changes, notifies the listener,
    coordinates while it holds the election key, and writes queued events. The calling thread writes only the worker's own
    record and removes those of dead workers.

    A worker mirrors the shared records and its own one. Only the coordinator mirrors the records of all workers
    (`coordinator.py`), so a change costs the others the same in a job of any size. Process groups are formed in `world.py`.

    Args:
        client: a connected client; its owner closes it.
        on_view: called from the background thread after every change, with the new view. Must return quickly.
        on_tick: called from the background thread at least every `TICK_S` seconds, even without a change.

    Attributes:
        own: this worker's own record.
        workers: the records of single workers.
        shared: the records that all workers share.
    """

    def __init__(
        self,
        client: EtcdClient,
        config: MembershipConfig,
        on_view: Callable[[WorkerView], None] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.keys = Keys(config.run_id, config.prefix)
        self.worker_id = f"{worker_name_of(socket.gethostname())}{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.reached: set[str] = set()  # workers that this one has formed its last two rounds with
        self._reached_last: set[str] = set()
        self._config = config
        self._client = client
        client.share_lifetime(self.keys.root, config.history_ttl_s)
        self._on_view = on_view
        self._on_tick = on_tick
        self._changed = threading.Condition()
        self._dirty = False
        self._view = WorkerView()
        self._evicted: set[str] = set()  # workers that this one has evicted
        self._journal = Journal(client, self.keys)
        self._closing = False
        self._taken_at = self._leaves_at = 0.0  # end of this worker's node, and when it leaves; seconds since the epoch
        self.own = OwnRecord(
            client, self.keys, config.run_id, self.worker_id, config.lease_ttl_s, lambda lease: self._office.came_back(lease)
        )
        self._decoder = Decoder(self.keys, self._report_garbage)
        self._mirror = Mirror(client, self.keys.shared, self._wake, CHECK_S)
        self.workers = WorkerRecords(client, self.keys, self._mirror)
        self.shared = SharedRecords(self._journal, self._mirror, self.worker_id, self.own, self._wake)
        self._office = Office(
            client,
            self.keys,
            self.worker_id,
            self.own.lease,
            config.timeouts,
            self._mirror,
            self._wake,
            self._decoder,
            Announcer(self._journal, self.shared.outbox, self.worker_id, self._evicted),
            self.reached,
        )
        self._own_mirror: Mirror | None = None  # None: not registered yet
        self._refresh()
        self._thread = threading.Thread(target=self._run, name="dlrover-membership", daemon=True)

    # --- entering and leaving -------------------------------------------------------------------------------------------

    def register(self) -> WorkerState:
        """Enter the job, as `starting` if no worker is past the start yet, else as `standby`.

        Raises:
            JobClosedError: the job has ended.
            MembershipError: the job is run by another release of this package, or a record of the job cannot be read.
        """
        enter_job(self._journal, self._config)
        oldest = self._client.oldest(self.keys.workers, NUM_SAMPLED)
        refuse_loopback(self._config, [worker for entry in oldest if (worker := readable(WorkerRecord, entry)) is not None])
        self._refresh()
        state: WorkerState = "standby" if self._is_past_the_start() else "starting"
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
        self.own.create(record)
        self._own_mirror = Mirror(self._client, self.own.key, self._wake, 2 * CHECK_S)
        if self._own_mirror.get(self.own.key) is None:
            raise EvictedError(self.own.evicted_text)  # the lease may have expired, as while the process is stopped
        self._thread.start()
        return state

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave if still registered and end the background thread."""
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        try:
            for step in (self.shared.outbox.write, self.own.leave, self._tidy_up):
                with contextlib.suppress(EtcdFullError):  # a full etcd still ends leases, and thereby removes our record
                    step()
            self.own.lease.revoke()
        except EtcdError as error:
            # The lease expires anyway. An error at the worker's exit would turn a finished job into a failed one.
            log.warning("run %s: could not sign off: %s", self._config.run_id, error)
        if not self._thread.is_alive():
            self._office.step_down(timeout_s)
        self._mirror.close()
        if self._own_mirror is not None:
            self._own_mirror.close()

    def deliver(self, timeout_s: float) -> None:
        """Wait until etcd holds the queued changes of records, for at most `timeout_s`; at once if there are none."""
        deadline, outbox = time.monotonic() + timeout_s, self.shared.outbox
        if names := outbox.waiting:
            log.warning(
                "run %s: worker %s waits up to %.0f s for etcd to accept what is not recorded yet: %s",
                *(self._config.run_id, self.worker_id, timeout_s, ", ".join(names)),
            )
        with self._changed:
            while outbox.waiting and self._thread.is_alive() and time.monotonic() < deadline and not self.own.evicted:
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
    def view(self) -> WorkerView:
        return self._view

    def all_records(self) -> JobView:
        """Read the records of all workers from etcd. For rare occasions: they are many in a large job.

        Raises:
            EtcdError: etcd does not answer.
        """
        return read_view(self._client.entries(self.keys.live), self.keys)

    def on_this_host(self) -> dict[str, WorkerRecord]:
        """Read from etcd the records of the workers on this host, by worker id. Raises `EtcdError` if etcd does not answer."""
        if not self._mirror.healthy:  # training must not wait for etcd here
            raise EtcdUnavailableError(f"run {self._config.run_id!r}: etcd does not answer")
        host = socket.gethostname()
        found = readable_folder(self._client, WorkerRecord, self.keys.workers, worker_name_of(host))
        return {worker: record for worker, record in found.items() if record.host == host}

    def wait_for(
        self,
        found: Callable[[WorkerView], T | None],
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
            EvictedError: the job has continued without this worker.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self.own.evicted:
                    raise EvictedError(self.own.evicted_text)
                result = found(self._view)
                if result is not None:
                    return result
                left = deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, 0.05))
            if is_excused is not None and is_excused():  # asked first: a tick may have taken longer than the timeout
                deadline = time.monotonic() + timeout_s
            elif left <= 0:
                text = f"run {self._config.run_id!r}, worker {self.worker_id}: waited {timeout_s:.0f} s for {what}"
                raise TimeoutError(text + self._missing())
            if tick is not None:
                tick()

    def wait_until_gone(self, worker_ids: Sequence[str], timeout_s: float, purpose: str) -> None:
        """Wait until none of these workers is registered.

        Args:
            purpose: their expected action before they end, for the error's text: "to ...".

        Raises:
            TimeoutError: one of them is still registered after `timeout_s`.
            EtcdError: etcd does not answer.
        """
        deadline = time.monotonic() + timeout_s
        while here := self.workers.present(worker_ids):
            last = next(w for w in reversed(worker_ids) if w in here)  # the others may be asked for when this one is gone
            while self.workers.present([last]):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"run {self._config.run_id!r}: waited {timeout_s:.0f} s for worker {last} {purpose}")
                with self._changed:
                    self._changed.wait(GONE_CHECK_S)

    def _missing(self) -> str:
        """Describe the missing workers in words."""
        if not self._mirror.healthy:
            return "; etcd does not answer"
        with contextlib.suppress(EtcdError):
            if missing := awaited(self.all_records()):
                return f"; missing: {', '.join(missing)}"
        return ""

    def evict(self, worker_ids: Iterable[str]) -> None:
        """Remove the records of workers that are certainly dead, before their leases expire.

        A mistake is safe: a living worker that was evicted detects that its record is gone and stops taking part.

        Raises:
            EtcdError: etcd does not answer.
        """
        for worker_id, entry in self.workers.entries(worker_ids).items():
            if len(self._evicted) >= MAX_EVICTED:
                self._evicted.clear()  # they differ only in the text of a round's line
            self._evicted.add(worker_id)
            log.info("run %s: worker %s is gone (its port refuses connections)", self._config.run_id, worker_id)
            for write in eviction(entry, self._client.get(self.keys.coordinator), self.keys):
                self._client.txn(write.compare, write.ops)
            self.workers.forget(worker_id)

    def has_reached(self, worker_ids: Iterable[str]) -> None:
        """Note that this worker has formed a round with others."""
        self.reached &= self._reached_last
        self._reached_last = set(worker_ids)
        self.reached |= self._reached_last

    def whose_refusal_counts(self, worker_ids: Iterable[str]) -> list[WorkerRecord]:
        """Return the records of those other workers that are certainly dead if their port refuses a connection.

        A refusal from another host proves nothing until that address was reached once: it may come from a firewall.
        """
        lost, host = set(self._view.lost), socket.gethostname()
        records = self.workers.of(w for w in worker_ids if w != self.worker_id and w not in lost).values()
        return [r for r in records if r.host == host or r.worker_id in self.reached]

    def is_still_in_force(self) -> bool:
        """Return whether no round can have begun without this worker, provided that its group of workers is intact.

        After the end of this worker's lease such a round waits for it for two leases or longer: `may_return` in `rounds.py`.
        Asks etcd only if etcd answers, and has reported that the lease has ended.
        """
        own = self.own
        if own.evicted or not own.lease.lost.is_set():
            return not own.evicted and own.lease.silent_s < MAX_SILENT_LEASES * own.lease.ttl_s
        try:
            round_ = readable(RoundRecord, self._client.get(self.keys.round))
        except EtcdError:
            return False
        return round_ is not None and self.worker_id in round_.members

    def is_being_staffed(self) -> bool:
        """Whether the job has too few workers, and a live controller to start more.

        That may take long in a full cluster, but the state in the survivors' memory is worth the wait.
        """
        # Until the next coordinator has written its first notice, nothing is known of the other workers.
        return self.shared.has_controller() and (self._view.lacks_workers or not self._view.is_told)

    # --- background ------------------------------------------------------------------------------------------------------

    def _is_past_the_start(self) -> bool:
        """Whether another worker is past the start."""
        if self._view.is_told:
            return self._view.is_past_start
        view = self.all_records()  # the notice is as old as the last coordinator
        return bool(view.survivors or view.in_state("standby", "ready"))

    def _report_garbage(self, key: str, error: RecordError) -> None:
        log.error("run %s: ignored a record: %s", self._config.run_id, error)
        self.shared.event(RecordIgnored(key), f"ignored a record: {error}")

    def _wake(self) -> None:
        """Let the background thread take a turn now. Also called by mirrors."""
        with self._changed:
            self._dirty = True
            self._changed.notify_all()

    def _refresh(self) -> None:
        self._dirty = False
        view = self._decoder.worker_view(self._mirror.snapshot())
        if self.own.has_asked_to_leave:
            view = replace(view, leaver=self.worker_id)
        self._view = view
        if self._own_mirror is not None:
            with contextlib.suppress(EtcdFullError):  # it registers again once etcd has room, and follows the others until then
                self.own.check(self._own_mirror.get(self.own.key))
        with self._changed:
            self._changed.notify_all()
        if self._on_view is not None:
            self._on_view(view)

    def _run(self) -> None:
        while not self._closing:
            with self._changed:
                if not self._dirty:
                    self._changed.wait(STAND_S if self._office.is_about_to_stand else TICK_S)
            try:
                # Run even when nothing has changed: timeouts expire without an event.
                self._refresh()
                self._leave_in_time()
                if self._on_tick is not None:
                    self._on_tick()
                self._coordinate()
                self.shared.outbox.write(BATCH)
            except EtcdError as error:
                log.debug("run %s: etcd is away: %s", self._config.run_id, error)
            except Exception:
                # Without its membership thread a worker would never detect another round.
                log.error("run %s: membership thread: %s", self._config.run_id, traceback.format_exc())

    def _leave_in_time(self) -> None:
        """Ask to leave before this worker's node is taken away, if no other worker has taken its place by then."""
        taken_at, now = self._view.taken_at.get(self.worker_id, 0.0), time.time()
        if taken_at != self._taken_at:
            self._taken_at, self._leaves_at = taken_at, leaves_at(taken_at, now)
        if taken_at and now >= self._leaves_at and not self.own.has_asked_to_leave and self.own.is_in_force:
            at = time.strftime("%H:%M:%S", time.localtime(taken_at))
            log.info("run %s: worker %s leaves, its node is taken away at %s", self._config.run_id, self.worker_id, at)
            self.own.drain(f"its node is taken away at {at}, and no other worker has come")

    def _coordinate(self) -> None:
        if self.own.is_in_force:
            self._office.act(len(self._view.round.members) if self._view.round is not None else 0)
        else:
            self._office.step_down()
