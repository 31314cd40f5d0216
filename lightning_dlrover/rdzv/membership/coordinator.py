"""Decide a worker's writes on behalf of the job: elections, rounds, notices and burials.

Each write is one transaction, and the decisions need no clock, thread or connection. `Coordinator.candidacy` reads the shared
records. In office, `Coordinator.next_write` reads one copy of all the job's records and returns this worker's next write, if
any. The caller knocks at the ports of missing members before, runs the write and reads again. A copy must show etcd at a
single revision. The number of the next round and the revision that guards it must come from the same moment, or an old decision
could overwrite a new round.

Three things keep rounds unique even if messages are lost, late or repeated:
  - the fence: a round is written only while the election key is the one under which it was decided;
  - the guard: a round replaces only the very revision of the round that it follows;
  - a worker decides only on a copy that shows its own election, and hence every round of the coordinators before it.

A round that leaves missing members out is written only while none of them has registered again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_dlrover.rdzv.etcd.election import Election
from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, KeyValue, Op, Put, created, exists, modified
from lightning_dlrover.rdzv.job.records import Keys, RoundRecord, encode
from lightning_dlrover.rdzv.live.probe import Answer
from lightning_dlrover.rdzv.live.rounds import JobView, RoundTimeouts, awaited, may_return, next_round
from lightning_dlrover.rdzv.live.worker_view import notice_of

__all__ = ["Coordinator", "Entries", "Write", "burial"]

Entries = Mapping[str, KeyValue]

MAX_BURIED = 50
"""Addresses removed in one transaction. etcd allows 128 conditions and 128 operations (--max-txn-ops)."""

MAX_GUARDED = 100
"""Missing members of whose absence a round makes sure."""


@dataclass(frozen=True)
class Write:
    """One transaction and its purpose."""

    purpose: Literal["elect", "unseat", "round", "notice", "bury"]
    compare: tuple[Compare, ...]
    ops: tuple[Op, ...]
    round: RoundRecord | None = None  # the new round, if the purpose is `round`

    def may_succeed(self, entries: Entries) -> bool:
        """Whether its conditions hold in this copy of the records."""
        return all(compare.holds(entries.get(compare.key)) for compare in self.compare)


class Coordinator:
    """One worker's part in the election, and its decisions while it holds office."""

    def __init__(self, keys: Keys, worker_id: str, lease_id: int, timeouts: RoundTimeouts) -> None:
        self._keys = keys
        self._election = Election(keys.coordinator)
        self._worker_id = worker_id
        self._lease_id = lease_id
        self._timeouts = timeouts
        self._situation: tuple[object, float] | None = None  # workers or agents that are awaited, and since when
        self._cut_off_s: float | None = None  # time at which etcd was last unreachable
        self._missing_since: dict[str, float] = {}  # missing members, and when this worker first saw in office that they are
        self._renewed: set[str] = set()  # those of them whose time began again because another one has returned
        self._answers: dict[str, Answer] = {}  # the last responses of their ports
        self._noted: tuple[JobView, int, bytes] | None = None  # last notice with the view and the term that it follows from

    def is_in_office(self, entries: Entries) -> bool:
        """Whether a copy of the shared records shows this worker as the coordinator."""
        election = entries.get(self._keys.coordinator)
        return election is not None and election.value == self._worker_id.encode()

    def candidacy(self, entries: Entries, is_vacant: bool = False) -> Write | None:
        """Return this worker's next write for an election in which it is not in office, or None.

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
            created_at: time for the round record, seconds since the epoch; only people read it.
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
        # is no reason to begin with another first one.
        is_back = self._cut_off_s is None or now_s - self._cut_off_s >= self._timeouts.return_s
        may_decide = (is_back or not view.lost) and (view.round is not None or self._keys.round not in entries)
        may_decide = may_decide and not self.awaits_return(view, now_s)
        proposal = next_round(view, now_s - self._situation[1], self._timeouts) if may_decide else None
        if proposal is not None:
            proposal = dataclasses.replace(proposal, convener=self._worker_id, created_at=created_at)
        told = self._notice(dataclasses.replace(view, round=proposal) if proposal is not None else view, term)
        fence = self._election.fence(term)
        if proposal is not None:
            # Workers that a round leaves out must see in the same moment whether they were asked to leave.
            puts = (Put(self._keys.round, encode(proposal)), Put(self._keys.notice, told))
            # Nobody has returned that this copy does not show yet, not even to be cut off again: that writes the address.
            away = (self._unchanged(entries, self._keys.addresses + worker) for worker in view.missing[:MAX_GUARDED])
            return Write("round", (fence, self._unchanged(entries, self._keys.round), *away), puts, proposal)
        last = entries.get(self._keys.notice)
        if last is None or last.value != told:
            return Write("notice", (fence, self._unchanged(entries, self._keys.notice)), (Put(self._keys.notice, told),))
        left = [w for w in view.addresses if w not in view.workers and w not in self._missing_since]
        return self._forget(left, entries) if left else None

    def awaits_return(self, view: JobView, now_s: float) -> list[str]:
        """Return the missing members for whom the next round still waits."""
        timeouts = self._timeouts
        limit_s = timeouts.return_s if view.holders else max(timeouts.return_s, timeouts.start_s)
        waiting = may_return(view, self._answers)
        return [w for w in waiting if now_s - self._missing_since.get(w, now_s) < limit_s]

    def hear(self, answers: Mapping[str, Answer]) -> None:
        """Note the responses of missing members' ports. `refuses` counts as the end of the process."""
        self._answers.update(answers)

    def _forget(self, workers: Sequence[str], entries: Entries) -> Write:
        """Remove addresses of workers that are not registered and will not come back."""
        chosen = workers[:MAX_BURIED]
        gone = tuple(self._unchanged(entries, self._keys.workers + worker) for worker in chosen)
        same = tuple(self._unchanged(entries, self._keys.addresses + worker) for worker in chosen)
        return Write("bury", (*gone, *same), tuple(Delete(self._keys.addresses + worker) for worker in chosen))

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
        """Note that etcd is, or was until now, unreachable. Leases of healthy workers may have expired meanwhile."""
        self.interrupt()
        self._cut_off_s = now_s

    def came_back(self, lease_id: int, now_s: float) -> None:
        """Note that this worker has registered again, under another lease."""
        self._lease_id = lease_id
        self.was_cut_off(now_s)


def burial(record: KeyValue, election: KeyValue | None, keys: Keys) -> list[Write]:
    """Return the writes that remove a dead worker's records before its lease expires, and last its election key.

    They apply only to this registration, and not to a worker that has since registered again under the same name.

    Args:
        record: entry of the worker's record.
        election: entry of the election key, if there is one.
    """
    worker_id = record.key.removeprefix(keys.workers)
    ops = (Delete(record.key), Delete(keys.addresses + worker_id), Delete(keys.drains + worker_id))
    writes = [Write("bury", (created(record.key) == record.create_revision,), ops)]
    if election is not None and election.value == worker_id.encode():
        writes.append(Write("unseat", (created(election.key) == election.create_revision,), (Delete(election.key),)))
    return writes
