"""Decide a worker's writes on behalf of the job: elections, rounds and burials.

Each write is one transaction, and the decisions need no clock, thread or connection. `Convener.next_write` reads one copy of
the job's records and returns this worker's next write, if any. The caller runs it and reads again. A copy must show etcd at a
single revision. The number of the next round and the revision that guards it must come from the same moment, or an old decision
could overwrite a new round.

Three things keep rounds unique even if messages are lost, late or repeated:
  - the fence: a round is written only while the election key is the one under which it was decided;
  - the guard: a round replaces only the very revision of the round that it follows;
  - a worker decides only on a copy that shows its own election, and hence every round of the conveners before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_dlrover.rdzv.etcd.operations import Compare, Delete, KeyValue, Op, Put, absent, created, modified
from lightning_dlrover.rdzv.job.records import Keys, RoundRecord, encode
from lightning_dlrover.rdzv.live.rounds import Patience, View, awaited, next_round

__all__ = ["Convener", "Write", "burial"]

Entries = Mapping[str, KeyValue]


@dataclass(frozen=True)
class Write:
    """One transaction and its purpose."""

    purpose: Literal["elect", "unseat", "round", "bury"]
    compare: tuple[Compare, ...]
    ops: tuple[Op, ...]
    round: RoundRecord | None = None  # the new round, if the purpose is `round`

    def may_succeed(self, entries: Entries) -> bool:
        """Whether its conditions hold in this copy of the records."""
        return all(compare.holds(entries.get(compare.key)) for compare in self.compare)


class Convener:
    """One worker's part in the election, and its decisions while it holds office."""

    def __init__(self, keys: Keys, worker_id: str, lease_id: int, patience: Patience) -> None:
        self._keys = keys
        self._worker_id = worker_id
        self._lease_id = lease_id
        self._patience = patience
        self._situation: tuple[object, float] | None = None  # workers or agents that are awaited, and since when
        self._cut_off_s: float | None = None  # time at which etcd was last unreachable

    def next_write(self, entries: Entries, view: View, now_s: float, created_at: float = 0.0) -> Write | None:
        """Return this worker's next write, or None.

        Args:
            entries: all records of the job at one revision of etcd.
            view: the view that `entries` give.
            now_s: time of a monotonic clock; only differences count.
            created_at: time for the round record, seconds since the epoch; only people read it.
        """
        election = entries.get(self._keys.convener)
        if election is None or election.value != self._worker_id.encode():
            self.interrupt()
            return self._stand() if election is None else self._unseat(election, entries)
        situation = (view.round.number if view.round else 0, tuple(awaited(view)))
        if self._situation is None or situation != self._situation[0]:
            self._situation = (situation, now_s)
        if view.lost and self._cut_off_s is not None and now_s - self._cut_off_s < self._patience.return_s:
            return None  # the outage that separated us from etcd may still separate them
        proposal = next_round(view, now_s - self._situation[1], self._patience)
        if proposal is None:
            return None
        proposal = dataclasses.replace(proposal, convener=self._worker_id, created_at=created_at)
        current = entries.get(self._keys.round)
        guard = modified(self._keys.round) == (current.mod_revision if current else 0)
        fence = created(self._keys.convener) == election.create_revision
        return Write("round", (fence, guard), (Put(self._keys.round, encode(proposal)),), proposal)

    def interrupt(self) -> None:
        """Restart the patience timer because no record could arrive for a while."""
        self._situation = None

    def was_cut_off(self, now_s: float) -> None:
        """Note that etcd is, or was until now, unreachable. Leases of healthy workers may have expired meanwhile."""
        self.interrupt()
        self._cut_off_s = now_s

    def came_back(self, lease_id: int, now_s: float) -> None:
        """Note that this worker has registered again, under another lease."""
        self._lease_id = lease_id
        self.was_cut_off(now_s)

    def _stand(self) -> Write:
        key = self._keys.convener
        return Write("elect", (absent(key),), (Put(key, self._worker_id.encode(), self._lease_id),))

    def _unseat(self, election: KeyValue, entries: Entries) -> Write | None:
        # The key may belong to a worker that is gone while its lease lasts, or to no worker at all. The job would then have no
        # convener.
        if self._keys.workers + election.value.decode(errors="replace") in entries:
            return None
        return Write("unseat", (modified(election.key) == election.mod_revision,), (Delete(election.key),))


def burial(entries: Entries, keys: Keys, worker_id: str) -> list[Write]:
    """Return the writes that remove a dead worker's records before its lease expires, and last its election key.

    They apply only to the registration in `entries`, and not to a worker that has since registered again under the same name.
    """
    record = entries.get(keys.workers + worker_id)
    if record is None:
        return []
    ops = (Delete(record.key), Delete(keys.drains + worker_id))
    writes = [Write("bury", (created(record.key) == record.create_revision,), ops)]
    election = entries.get(keys.convener)
    if election is not None and election.value == worker_id.encode():
        writes.append(Write("unseat", (created(election.key) == election.create_revision,), (Delete(election.key),)))
    return writes
