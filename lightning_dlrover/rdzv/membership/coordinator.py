"""Coordinate a job's rounds, as the worker that was elected to: read the job's records, decide writes, announce changes.

`Coordinator` decides, without clocks, threads or connections. The rest of the file reads the records and carries the decisions
out.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.etcd.client import Election, EtcdClient, Lease, candidacy_delay_s
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import (
    Compare,
    Delete,
    EtcdFullError,
    EtcdUnavailableError,
    Get,
    KeyValue,
    Op,
    Put,
    created,
    exists,
    modified,
)
from lightning_dlrover.rdzv.job.events import RoundFormed, WorkerLost, record_of
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, RoundRecord, WorkerRecord, encode
from lightning_dlrover.rdzv.membership.rounds import (
    Answer,
    Decoder,
    JobView,
    RoundTimeouts,
    answers,
    awaited,
    cause,
    losses,
    may_return,
    next_round,
    notice_of,
)
from lightning_dlrover.rdzv.membership.worker_records import Outbox

Entries = Mapping[str, KeyValue]

MAX_FORGOTTEN = 50  # addresses removed in one transaction; etcd allows 128 conditions and 128 operations (--max-txn-ops)
MAX_GUARDED = 100  # missing members that a round requires to be absent


@dataclass(frozen=True)
class Write:
    """One transaction and its purpose."""

    purpose: Literal["elect", "unseat", "round", "notice", "evict"]
    compare: tuple[Compare, ...]
    ops: tuple[Op, ...]
    round: RoundRecord | None = None  # the new round, if the purpose is `round`

    def may_succeed(self, entries: Entries) -> bool:
        """Whether its conditions hold in this copy of the records."""
        return all(compare.holds(entries.get(compare.key)) for compare in self.compare)


class Coordinator:
    """One worker's writes on behalf of the job: elections, and rounds, notices and removals while it is the coordinator.

    Each write is one transaction, and the decisions need no clock, thread or connection. `Coordinator.candidacy` reads the
    shared records. In office, `Coordinator.next_write` reads one copy of all the job's records and returns this worker's next
    write, if any. The caller knocks at the ports of missing members before, runs the write and reads again. A copy must show
    etcd at a single revision. The number of the next round and the revision that guards it must come from the same moment, or
    an old decision could overwrite a new round.

    Three things keep rounds unique even if messages are lost, late or repeated:
      - the fence: a round is written only while the election key is the one under which it was decided;
      - the guard: a round replaces only the very revision of the round that it follows;
      - a worker decides only on a copy that shows its own election, and hence every round of the coordinators before it.

    A round that leaves missing members out is written only while none of them has registered again.
    """

    def __init__(self, keys: Keys, worker_id: str, lease_id: int, timeouts: RoundTimeouts) -> None:
        self._keys = keys
        self._election = Election(keys.coordinator)
        self._worker_id = worker_id
        self._lease_id = lease_id
        self._timeouts = timeouts
        self._situation: tuple[object, float] | None = None  # workers or agents that are awaited, and since when
        self._cut_off_s: float | None = None  # time at which etcd was last unreachable
        self._missing_since: dict[str, float] = {}  # missing members, and when this worker first saw in office that they are
        self._renewed: set[str] = set()  # members whose wait began again because another one has returned
        self._answers: dict[str, Answer] = {}  # the last responses of their ports
        self._noted: tuple[JobView, int, bytes] | None = None  # last notice with the view and the term that it follows from

    def is_in_office(self, entries: Entries) -> bool:
        """Whether a copy of the shared records shows this worker as the coordinator."""
        election = entries.get(self._keys.coordinator)
        return election is not None and election.value == self._worker_id.encode()

    def candidacy(self, entries: Entries, is_vacant: bool = False) -> Write | None:
        """Return this worker's next write for an election while it is not in office, or None.

        Args:
            entries: the shared records.
            is_vacant: True if the holder of the election key has no record.
        """
        self.interrupt()
        election = entries.get(self._election.key)
        if election is None:
            # A worker that is just leaving must not leave the office to its lease.
            is_free, take = self._election.candidacy(self._worker_id.encode(), self._lease_id)
            return Write("elect", (is_free, exists(self._keys.workers + self._worker_id)), (take,))
        if is_vacant:
            # The key may belong to a worker that is gone while its lease lasts, or to no worker at all.
            return Write("unseat", (modified(election.key) == election.mod_revision,), (Delete(election.key),))
        return None

    def next_write(self, entries: Entries, view: JobView, now_s: float, created_at: float = 0.0) -> Write | None:
        """Return the coordinator's next write, or None; always None for a worker that is not in office.

        Args:
            entries: all records of the job at one revision of etcd.
            view: the view that `entries` give.
            now_s: time of a monotonic clock; only differences count.
            created_at: time for the round record, seconds since the epoch; only displayed.
        """
        if not self.is_in_office(entries):
            self.interrupt()
            return None
        if any(w in view.workers for w in self._missing_since):
            # A cut is over: those that come back a moment later than the first get their time, too. They get it once: members
            # that are cut off again and again would keep the job waiting for one that hangs.
            self._missing_since = {w: since for w, since in self._missing_since.items() if w in self._renewed}
            self._renewed.update(view.missing)
        self._missing_since = {w: self._missing_since.get(w, now_s) for w in view.missing}
        self._renewed &= self._missing_since.keys()
        self._answers = {w: answer for w, answer in self._answers.items() if w in self._missing_since}
        if dead := [w for w, answer in self._answers.items() if answer == "refuses"]:
            return self._forget(dead, entries)
        term = entries[self._keys.coordinator].create_revision
        situation = (view.round.number if view.round else 0, tuple(awaited(view)))
        if self._situation is None or situation != self._situation[0]:
            self._situation = (situation, now_s)
        # The outage that separated us from etcd may still separate those that seem to be lost. And a round that cannot be read
        # does not justify beginning with another first one.
        is_back = self._cut_off_s is None or now_s - self._cut_off_s >= self._timeouts.return_s
        may_decide = (is_back or not view.lost) and (view.round is not None or self._keys.round not in entries)
        may_decide = may_decide and not self.awaits_return(view, now_s)
        proposal = next_round(view, now_s - self._situation[1], self._timeouts) if may_decide else None
        if proposal is not None:
            proposal = replace(proposal, convener=self._worker_id, created_at=created_at)
        notice = self._notice(replace(view, round=proposal) if proposal is not None else view, term)
        fence = self._election.fence(term)
        if proposal is not None:
            # Workers that a round leaves out must see in the same moment whether they were asked to leave.
            puts = (Put(self._keys.round, encode(proposal)), Put(self._keys.notice, notice))
            # No worker has returned without showing in this copy, not even to be cut off again: returning writes the address.
            away = (self._unchanged(entries, self._keys.addresses + worker) for worker in view.missing[:MAX_GUARDED])
            return Write("round", (fence, self._unchanged(entries, self._keys.round), *away), puts, proposal)
        last = entries.get(self._keys.notice)
        if last is None or last.value != notice:
            return Write("notice", (fence, self._unchanged(entries, self._keys.notice)), (Put(self._keys.notice, notice),))
        left = [w for w in view.addresses if w not in view.workers and w not in self._missing_since]
        return self._forget(left, entries) if left else None

    def awaits_return(self, view: JobView, now_s: float) -> list[str]:
        """Return the missing members that the next round still waits for."""
        timeouts = self._timeouts
        limit_s = timeouts.return_s if view.holders else max(timeouts.return_s, timeouts.start_s)
        waiting = may_return(view, self._answers)
        return [w for w in waiting if now_s - self._missing_since.get(w, now_s) < limit_s]

    def note_answers(self, answers: Mapping[str, Answer]) -> None:
        """Note the responses of missing members' ports. `refuses` counts as the end of the process."""
        self._answers.update(answers)

    def _forget(self, workers: Sequence[str], entries: Entries) -> Write:
        """Remove addresses of workers that are not registered and will not come back."""
        chosen = workers[:MAX_FORGOTTEN]
        gone = tuple(self._unchanged(entries, self._keys.workers + worker) for worker in chosen)
        same = tuple(self._unchanged(entries, self._keys.addresses + worker) for worker in chosen)
        return Write("evict", (*gone, *same), tuple(Delete(self._keys.addresses + worker) for worker in chosen))

    def _notice(self, view: JobView, term: int) -> bytes:
        if self._noted is None or self._noted[0] is not view or self._noted[1] != term:
            self._noted = view, term, encode(notice_of(view, term))
        return self._noted[2]

    @staticmethod
    def _unchanged(entries: Entries, key: str) -> Compare:
        entry = entries.get(key)
        return modified(key) == (entry.mod_revision if entry is not None else 0)

    def interrupt(self) -> None:
        """Restart the timers because no record could arrive for a while."""
        self._situation = None
        self._missing_since = {}
        self._renewed = set()

    def was_cut_off(self, now_s: float) -> None:
        """Note that etcd is, or was until now, unreachable. Leases of healthy workers may have expired."""
        self.interrupt()
        self._cut_off_s = now_s

    def came_back(self, lease_id: int, now_s: float) -> None:
        """Note that this worker has registered again, under another lease."""
        self._lease_id = lease_id
        self.was_cut_off(now_s)


def eviction(record: KeyValue, election: KeyValue | None, keys: Keys) -> list[Write]:
    """Return the writes that remove a dead worker's records before its lease expires, and last its election key.

    They apply only to this registration, and not to a worker that has since registered again under the same name.

    Args:
        record: entry of the worker's record.
        election: entry of the election key, if there is one.
    """
    worker_id = record.key.removeprefix(keys.workers)
    ops = (Delete(record.key), Delete(keys.addresses + worker_id), Delete(keys.drains + worker_id))
    writes = [Write("evict", (created(record.key) == record.create_revision,), ops)]
    if election is not None and election.value == worker_id.encode():
        writes.append(Write("unseat", (created(election.key) == election.create_revision,), (Delete(election.key),)))
    return writes


log = logging.getLogger(__name__)

T = TypeVar("T")

GETS_PER_REQUEST = 100  # records read in one transaction: etcd refuses more than 128 operations
MAX_KNOWN = 2000  # number of records that a worker remembers, in addition to those that it asks for
ABSENT_S = 1.0  # seconds until a worker without a record is asked for again; it may register again after an outage of etcd


class JobMirror:
    """A mirror of all records, open while this worker coordinates the job. For use by one thread.

    Args:
        decoder: also decodes the shared records while the mirror is closed, and so knows their last readable versions.
    """

    def __init__(self, client: EtcdClient, keys: Keys, on_change: Callable[[], None], decoder: Decoder) -> None:
        self._client = client
        self._keys = keys
        self._on_change = on_change
        self._mirror: Mirror | None = None
        self._decoder = decoder
        self._view = JobView()
        self._view_since = 0.0

    def look(self) -> tuple[Mapping[str, KeyValue], JobView, float]:
        """Return all records at one revision, the view that they give, and the seconds since it last changed.

        Opens the mirror if it is closed.

        Raises:
            EtcdError: the records cannot be read.
        """
        if self._mirror is None:
            self._mirror = Mirror(self._client, self._keys.live, self._on_change)
            self._view = JobView()
        entries = self._mirror.snapshot()
        view = self._decoder.view(entries)
        if view is not self._view and view != self._view:
            self._view, self._view_since = view, time.monotonic()
        return entries, self._view, time.monotonic() - self._view_since

    @property
    def is_healthy(self) -> bool:
        """False while etcd cannot be reached, so that the records may be out of date."""
        return self._mirror is None or self._mirror.healthy

    def wait_for(self, found: Callable[[dict[str, KeyValue]], T | None], timeout_s: float) -> T:
        """See `Mirror.wait_for`."""
        assert self._mirror is not None
        return self._mirror.wait_for(found, timeout_s)

    def close(self, timeout_s: float = 0.0) -> None:
        """Stop following the records. `look` starts again."""
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            mirror.close(timeout_s)


class WorkerRecords:
    """Records of single workers. Their constant parts are read once: address, host and agent.

    Args:
        mirror: knows whether etcd answers. If not, nothing waits for it.
    """

    def __init__(self, client: EtcdClient, keys: Keys, mirror: Mirror) -> None:
        self._client = client
        self._keys = keys
        self._mirror = mirror
        self._known: dict[str, tuple[KeyValue, WorkerRecord | None]] = {}  # decoded once, as probes need the records often
        self._absent: dict[str, float] = {}  # workers without a record, and when this was found

    def entries(self, worker_ids: Iterable[str]) -> dict[str, KeyValue]:
        """Return entries of workers that were registered when they were read. Their state may be out of date.

        While etcd does not answer, these are the workers that were read before.
        """
        return {worker: entry for worker, (entry, _) in self._found(worker_ids).items()}

    def of(self, worker_ids: Iterable[str]) -> dict[str, WorkerRecord]:
        """Return the constant parts of the readable records in `entries`."""
        return {worker: record for worker, (_, record) in self._found(worker_ids).items() if record is not None}

    def _found(self, worker_ids: Iterable[str]) -> dict[str, tuple[KeyValue, WorkerRecord | None]]:
        wanted, now = list(worker_ids), time.monotonic()
        unknown = [w for w in wanted if w not in self._known and now - self._absent.get(w, -ABSENT_S) >= ABSENT_S]
        if len(self._known) + len(self._absent) > MAX_KNOWN + len(wanted):  # most of them have left
            self._known.clear()
            self._absent.clear()
            unknown = wanted
        if unknown and self._mirror.healthy:
            try:
                found = self.present(unknown)
            except EtcdUnavailableError as error:
                log.debug("could not read the records of workers: %s", error)
            else:
                self._absent.update({worker: now for worker in unknown if worker not in found})
        # Several threads read and forget records.
        known = ((worker, self._known.get(worker)) for worker in wanted)
        return {worker: found for worker, found in known if found is not None}

    def present(self, worker_ids: Iterable[str]) -> dict[str, KeyValue]:
        """Read which workers are registered now, and return their entries. Raises `EtcdError` if etcd does not answer."""
        wanted = list(worker_ids)
        found: dict[str, KeyValue] = {}
        for first in range(0, len(wanted), GETS_PER_REQUEST):
            values = self._read([self._keys.workers + worker for worker in wanted[first : first + GETS_PER_REQUEST]])
            found |= {entry.key.removeprefix(self._keys.workers): entry for entry in values}
        self._known.update({worker: (entry, readable(WorkerRecord, entry)) for worker, entry in found.items()})
        for worker in wanted:
            if worker not in found:
                self._known.pop(worker, None)
        return found

    def _read(self, keys: list[str]) -> list[KeyValue]:
        if len(keys) > 1:
            with contextlib.suppress(EtcdFullError):  # a full etcd takes no transactions, not even of reads alone
                return self._client.txn([], [Get(key) for key in keys]).values
        return [entry for key in keys if (entry := self._client.get(key)) is not None]

    def forget(self, worker_id: str) -> None:
        """Read a worker's record again when it is needed the next time."""
        self._known.pop(worker_id, None)


MANY = 100  # members of a round above which its line in the history names only those that came or went
MAX_LINES = 100
"""Maximum number of lines in one transaction. etcd allows 128 operations (--max-txn-ops), and a round needs two of them."""


class Announcer:
    """Report rounds in the transactions that write them.

    Written later, the lines would be missing if the coordinator were killed before, or if etcd's answer were lost.

    Args:
        outbox: takes lines that a transaction has no room for.
        worker_id: the coordinator.
        evicted: workers that the coordinator itself has evicted.
    """

    def __init__(self, journal: Journal, outbox: Outbox, worker_id: str, evicted: Collection[str]) -> None:
        self._journal = journal
        self._outbox = outbox
        self._worker_id = worker_id
        self._evicted = evicted

    def lines(self, view: JobView, round_: RoundRecord, decided_s: float) -> list[EventRecord]:
        """Return the lines about a round that is about to be written."""
        return lines_about(view, round_, round(decided_s, 3), self._evicted)

    def puts(self, lines: Sequence[EventRecord]) -> list[Put]:
        """Return writes for the round's own transaction, which has no room for losses beyond `MAX_LINES`."""
        return self._journal.puts(lines[-MAX_LINES:], self._worker_id)

    def made(self, round_: RoundRecord, lines: Sequence[EventRecord]) -> None:
        """Note that the round was written."""
        run_id, num_members = self._journal.keys.run_id, len(round_.members)
        log.info("run %s: round %d: %s, %d workers", run_id, round_.number, round_.reason, num_members)
        for line in lines[:-MAX_LINES]:
            self._outbox.add(line)
        self._journal.note_appended(min(len(lines), MAX_LINES))


def lines_about(view: JobView, round_: RoundRecord, decided_s: float, evicted: Collection[str]) -> list[EventRecord]:
    """Return the lines about the workers lost before a round, and last the one about the round.

    Args:
        view: the view on which the round was decided.
        decided_s: seconds from the last change of the records to this decision.
        evicted: workers that the coordinator itself has evicted.
    """
    lines = []
    for worker_id in losses(view, round_):
        how = _evidence(view, worker_id, evicted)
        lost = WorkerLost(worker_id, round_.number - 1, how, decided_s)
        lines.append(record_of(lost, f"worker {worker_id} is gone: {how}"))
    formed = RoundFormed(
        number=round_.number,
        members=round_.members if len(round_.members) <= MANY else [],
        num_members=len(round_.members),
        kind=round_.kind,
        planned=round_.planned,
        reason=round_.reason,
        cause=cause(view, round_),
        decided_s=decided_s,
    )
    text = f"round {round_.number}: {counted(len(round_.members), 'worker')}, {round_.reason}"
    return [*lines, record_of(formed, text)]


def _evidence(view: JobView, worker_id: str, evicted: Collection[str]) -> str:
    """Describe the coordinator's evidence that a worker is lost."""
    if worker_id in view.workers:
        return "it did not answer, or cannot be reached"
    if worker_id in evicted:
        return "its port refuses connections"
    if worker_id in view.addresses:
        return "its lease ended, and it did not come back in time"
    return "its agent or another worker found its process gone"


CHECK_S = 10.0  # approximate seconds between two checks that the election key's holder is registered
MAX_SILENCE = 0.8
"""Share of a lease's time without a refresh after which etcd counts as away. Refreshes are due after half of it."""

KNOCK_S = 1.0  # seconds between two knocks at the ports of missing members
MAX_KNOCKS = 200
"""Ports of missing members at which this worker knocks at once. Each takes an open file, and the script may need many."""

ANSWER_S = 0.3  # maximum seconds to wait for an answer of a missing member's port
SIGHT_S = 5.0  # maximum seconds until a write of this worker shows up in its copy of the records


class Office:
    """One worker's candidacy for coordinator, and its term: runs the decisions of `Coordinator` against etcd.

    For use by one thread.

    Args:
        shared: mirror of `keys.shared`.
        on_change: called when the records of other workers have changed, while this worker is in office.
        decoder: decodes the shared records, in the same thread.
        announcer: adds the lines of the job's history about a round to its transaction.
        reached: workers that this one has formed a round with.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        worker_id: str,
        lease: Lease,
        timeouts: RoundTimeouts,
        shared: Mirror,
        on_change: Callable[[], None],
        decoder: Decoder,
        announcer: Announcer,
        reached: Collection[str],
    ) -> None:
        self._client = client
        self._keys = keys
        self._coordinator = Coordinator(keys, worker_id, lease.id, timeouts)
        self._shared = shared
        self._lease = lease
        self._announcer = announcer
        self._reached = reached
        self._knocked_at = -KNOCK_S
        self._num_knocks = 0
        self._logged: list[str] = []  # missing members that the log names as awaited
        self._job_mirror = JobMirror(client, keys, on_change, decoder)
        self._stands_at: float | None = None  # time of this worker's candidacy, while the job has no coordinator
        self._holder_is_checked_at = time.monotonic() + CHECK_S
        self._is_refused = False  # whether etcd was full at this worker's last write

    def act(self, num_members: int) -> None:
        """Make this worker's next write on behalf of the job, if there is one.

        Args:
            num_members: approximate number of candidates.

        Raises:
            EtcdError: etcd does not answer.
        """
        is_late = self._lease.silent_s > MAX_SILENCE * self._lease.ttl_s
        if is_late or not (self._shared.healthy and self._job_mirror.is_healthy):
            self._coordinator.was_cut_off(time.monotonic())  # also as a candidate: in office it must know of the outage
        try:
            self._act(self._shared.snapshot(), num_members)
        except EtcdFullError:
            self._is_refused = True
            raise

    def _act(self, shared: Entries, num_members: int) -> None:
        if not self._coordinator.is_in_office(shared):
            self.step_down()
            self._campaign(shared, num_members)
            return
        self._stands_at = None
        if self._is_refused:
            self._find_room(shared)
        # Read both together: the view must come from the revision that guards the next round.
        entries, view, age_s = self._job_mirror.look()
        self._knock(view)
        write = self._coordinator.next_write(entries, view, time.monotonic(), time.time())
        if write is None:
            return
        lines = self._announcer.lines(view, write.round, age_s) if write.round is not None else []
        if not self._client.txn(write.compare, [*write.ops, *self._announcer.puts(lines)]).succeeded:
            return
        if write.round is not None:
            self._announcer.made(write.round, lines)
        # The next decision must see this write, or it would repeat it without effect.
        with contextlib.suppress(TimeoutError):
            self._job_mirror.wait_for(lambda now: None if write.may_succeed(now) else True, SIGHT_S)

    def _knock(self, view: JobView) -> None:
        """Detect which missing members are alive, and log that the next round waits for them."""
        if view.missing and time.monotonic() - self._knocked_at >= KNOCK_S:
            first = self._num_knocks % len(view.missing) if len(view.missing) > MAX_KNOCKS else 0
            turn = [*view.missing[first:], *view.missing[:first]][:MAX_KNOCKS]
            found = answers([view.addresses[w] for w in turn], ANSWER_S)
            self._knocked_at = time.monotonic()
            self._num_knocks = first + len(turn)
            self._coordinator.note_answers({w: self._judged(view, w, answer) for w, answer in found.items()})
        awaited = self._coordinator.awaits_return(view, time.monotonic())
        if not set(awaited) <= set(self._logged):
            log.warning("waiting for the return of workers %s: cut off from etcd, and not known to be dead", ", ".join(awaited))
        self._logged = awaited

    def _judged(self, view: JobView, worker_id: str, answer: Answer) -> Answer:
        # A refusal from another host may come from a firewall as long as that address was never reached. If no other holds
        # the state, such a network could not carry the job anyway.
        is_proof = not view.holders or worker_id in self._reached or view.addresses[worker_id].host == socket.gethostname()
        return answer if answer != "refuses" or is_proof else "silent"

    def _find_room(self, shared: Entries) -> None:
        """Write the notice again as it is, until etcd takes it.

        Healthy workers with leases that expired while etcd was full can register again from then on, and need time for it. A
        round would come too early for them if it were the first write.
        """
        last = shared.get(self._keys.notice)
        if last is not None:
            self._client.txn([modified(last.key) == last.mod_revision], [Put(last.key, last.value)])
        self._is_refused = False
        self._coordinator.was_cut_off(time.monotonic())

    @property
    def is_about_to_stand(self) -> bool:
        """Whether this worker pauses before it stands for coordinator. Without the pause all would stand at once."""
        return self._stands_at is not None

    def step_down(self, timeout_s: float = 0.0) -> None:
        """Stop following the records of other workers."""
        self._job_mirror.close(timeout_s)

    def came_back(self, lease: Lease) -> None:
        """Note that this worker has registered again, under another lease."""
        self._lease = lease
        self._coordinator.came_back(lease.id, time.monotonic())

    def _campaign(self, shared: Entries, num_members: int) -> None:
        if self._keys.coordinator in shared:
            self._stands_at, self._is_refused = None, False
        elif self._stands_at is None:
            self._stands_at = time.monotonic() + candidacy_delay_s(num_members)
        if self._stands_at is not None and time.monotonic() < self._stands_at:
            return
        write = self._coordinator.candidacy(shared, self._is_vacant(shared))
        if write is not None and self._client.txn(write.compare, write.ops).succeeded:
            before = shared.get(self._keys.coordinator)
            with contextlib.suppress(TimeoutError):
                self._shared.wait_for(lambda now: True if now.get(self._keys.coordinator) != before else None, SIGHT_S)

    def _is_vacant(self, shared: Entries) -> bool:
        """Whether the election key's holder has no record. Checked rarely: removing its record also unseats it."""
        election = shared.get(self._keys.coordinator)
        if election is None or time.monotonic() < self._holder_is_checked_at:
            return False
        self._holder_is_checked_at = time.monotonic() + CHECK_S * random.SystemRandom().uniform(0.8, 1.2)
        return self._client.get(self._keys.workers + election.value.decode(errors="replace")) is None
