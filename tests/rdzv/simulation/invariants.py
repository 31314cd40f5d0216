"""Invariants of every run under every fault; `Checks` raises `Violation` as soon as one is violated.

- one-number: The numbers of rounds grow by one; no two rounds with one number ever exist in etcd's history.
- fence: Each round is written by the holder of the election key at that revision.
- members: A round's members are distinct. Every added worker is at the training loop's entrance (never `standby`). A worker
  that had the state and was left out never returns under its id.
- cap: A planned round is not larger than the plan and the job allow when it is decided, unless drained workers hand over in
  it. No drained worker is added.
- sizes: A planned round does not grow from a size that may be requested to one that may not, unless workers hand over in it.
- rank-order: Survivors keep their order, and the first of them is rank 0.
- alone: A step is made by exactly the members of one round, in that round, all with the same state.
- no-ghosts: A group whose round ended without an agreement makes no step once one of its members has had undisturbed contact
  with etcd for `NOTICE_S`. The same holds for a worker whose record is gone. No two groups continue for longer.
- one-boundary: All workers that leave one round for another by a vote do so at the same step.
- state-kept: Workers that meet are within one update of each other, and have the same state where at the same step. The job
  starts over only if no living member of the previous round, whose record exists, has the state.
- return: A round leaves out no living member whose lease alone has ended, before it had the time to come back. Nor does the job
  start over before each living member had that time, reachable or not. Where nothing happens but short cuts from etcd, no
  worker is evicted.
- samples: The shares of a step are disjoint and together the whole batch, so each sample of the surviving history counts once.
- patience: An unplanned round leaves out only the dead, workers that stepped back without the state, workers that have not
  answered for `REGROUP_S` while etcd could be reached, and workers that others cannot reach. A worker that does not answer for
  longer is left out. Members that do not reach each other do not retry forever.
- dismissed: A worker that was sent away after a failed step is in no round that follows a failure, if the others can continue.
- told: A coordinator in undisturbed contact with etcd publishes what the others need within half of `NOTICE_S`.
- given-up: No worker waits for a round that another member gave up longer than half of `NOTICE_S` after it could know.
- progress: After the last fault, every worker that can train does within `SETTLE_S`, and steps are made. No drained worker, and
  none without a record, still trains. A job below its minimum waits, and continues when there are enough workers again. No
  worker ends with an error other than that the job continues without it.
- sound: No assertion of the code under test fails.

A clock that jumps has no effect: wall time is written into records (`created_at`) and never compared. Each worker's own clock
has a different zero and its own rate.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from lightning_dlrover.rdzv.etcd.types import KeyValue
from lightning_dlrover.rdzv.job.records import RoundRecord, decode
from lightning_dlrover.rdzv.membership.member import Formation
from lightning_dlrover.rdzv.membership.rounds import JobView, awaited, next_round, notice_of

from .etcd import Written
from .process import BATCH, HANG_S, TIMEOUTS, Hello, Meeting, Worker

if TYPE_CHECKING:
    from .job import Job

NOTICE_S = 10.0
REGROUP_S = 8.0
SETTLE_S = 240.0
MAX_ATTEMPTS = 3

INVARIANTS = [line[2:].split(":")[0] for line in (__doc__ or "").splitlines() if line.startswith("- ")]


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        assert invariant in INVARIANTS
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Checks:
    """Watches one run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rounds: dict[int, tuple[RoundRecord, float]] = {}  # each round and the time of its write
        self.num_steps = 0
        self.last_step_at = 0.0
        # Per round: members of the previous one that had the state when it was written.
        self._holders: dict[int, list[str]] = {}
        self._left_out: dict[str, int] = {}
        self._boundaries: dict[tuple[int, int], int] = {}
        self._gone_since: dict[str, float] = {}
        # Per round: times of the first and the last member's report of its failure.
        self._reports: dict[int, tuple[float, float]] = {}
        self._elected_at = 0.0
        self._untold_since: float | None = None  # time since which the notice differs from the records
        self._given_up_told: dict[int, float] = {}  # per round: time of the first notice that a member gave it up

    # --- writes

    def wrote(self, written: Written) -> None:
        keys = self.job.keys
        self._follow_notice(written)
        if written.key == keys.round and written.value is not None:
            before = self.job.etcd.copies[written.revision - 1]
            round_ = decode(RoundRecord, written.value, written.key)
            self._wrote_round(written, round_, before, self.job.etcd.views[written.revision - 1])
        elif written.key == keys.coordinator:
            self._elected_at = written.at
        elif written.key.startswith(keys.workers):
            worker_id = written.key.removeprefix(keys.workers)
            if written.value is None:
                self._gone_since[worker_id] = written.at
            else:
                self._gone_since.pop(worker_id, None)  # a registration that was repeated after the first one was evicted
            view = self.job.etcd.views[-1]
            if view.round is not None:
                first = self._reports.get(view.round.number, (written.at, 0.0))[0]
                if view.failed:
                    self._reports[view.round.number] = (first, written.at)

    def _wrote_round(self, written: Written, new: RoundRecord, before: dict[str, KeyValue], seen: JobView) -> None:
        old = seen.round
        self.job.kernel.log(written.writer, "writes round", new.number, new.kind, *new.members)
        expected = old.number + 1 if old else 1
        if new.number != expected or new.number in self.rounds:
            raise Violation("one-number", f"{written.writer} wrote round {new.number} where {expected} was next")
        election = before.get(self.job.keys.coordinator)
        if election is None or election.value.decode() != written.writer:
            raise Violation("fence", f"round {new.number} was written by {written.writer}, elected is {election}")
        if len(set(new.members)) != len(new.members):
            raise Violation("members", f"{new} names a worker twice")
        members = old.members if old else []
        for worker_id in new.members:
            if worker_id in self._left_out:
                raise Violation("members", f"{new}: {worker_id} was left out in round {self._left_out[worker_id]}")
        kept = [w for w in members if w in new.members]
        if kept != [w for w in new.members if w in kept] or kept[:1] != new.members[: len(kept[:1])]:
            raise Violation("rank-order", f"{new} follows {old}")
        for worker_id in members:
            if worker_id not in new.members and self.job.workers[worker_id].state is not None:
                self._left_out[worker_id] = new.number
        self._may_have_returned(written, new, before, [w for w in members if w not in seen.dismissals])
        self._holders[new.number] = [] if new.kind == "stop" else [w for w in members if self._holds(w)]
        self.rounds[new.number] = (new, written.at)

    def evicted(self, worker: Worker) -> None:
        if self.job.has_only_cuts:
            raise Violation("return", f"{worker.id} was evicted, though it was cut off for less than two leases")

    def _may_have_returned(self, written: Written, new: RoundRecord, before: dict[str, KeyValue], members: list[str]) -> None:
        job, now = self.job, self.job.kernel.now
        starts_over = new.kind == "start"
        if new.planned and not starts_over:
            return  # it was decided when they all were there
        limit_s = max(TIMEOUTS.start_s, TIMEOUTS.return_s) if starts_over else TIMEOUTS.return_s
        for worker_id in members:
            worker = job.workers[worker_id]
            if worker.state is None and not starts_over:
                continue  # a joiner that stepped back is left out even if it is there, and loses nothing
            is_reachable = job.connected(written.writer, worker_id) and now - job.network_changed_at > HANG_S
            has_no_record = worker.own_key not in before and job.keys.addresses + worker_id in before
            if not (worker.process.alive and has_no_record and worker_id not in new.members and (is_reachable or starts_over)):
                continue
            if (gone_s := now - self._gone_since[worker_id]) < 0.9 * limit_s:
                raise Violation("return", f"{new} leaves out {worker_id}, whose lease ended {gone_s:.1f} s ago")

    def _holds(self, worker_id: str) -> bool:
        worker = self.job.workers[worker_id]
        return worker.state is not None and worker.process.alive and worker.own_key in self.job.etcd.entries

    def decided(self, coordinator: Worker, seen: JobView, new: RoundRecord) -> None:
        """Judge a coordinator's next write by the view that it was based on."""
        members = seen.round.members if seen.round else []
        added = [w for w in new.members if w not in members]
        for worker_id in added:
            if worker_id not in seen.workers or seen.workers[worker_id].state == "standby":
                raise Violation("members", f"{new} admits {worker_id}, which is {seen.workers.get(worker_id)}")
            if worker_id in seen.drains:
                raise Violation("cap", f"{new} admits {worker_id}, which was asked to leave")
        if new.planned and len(new.members) > seen.cap and not set(new.members) & (seen.drains | seen.replacements):
            raise Violation("cap", f"{new} has more than {seen.cap} members")

        hands_over = set(new.members) & (seen.drains | seen.replacements)
        sizes = seen.job.sizes if seen.job is not None and new.planned and not hands_over else []
        if len(members) in sizes and len(new.members) > len(members) and len(new.members) not in sizes:
            raise Violation("sizes", f"{new} grows from {len(members)} members, and the sizes are {sizes}")
        if not new.planned and seen.survivors:
            self._is_patient(seen, new)

    def _is_patient(self, seen: JobView, new: RoundRecord) -> None:
        assert seen.round is not None
        now = self.job.kernel.now
        may_go = {*seen.stepped_back, *seen.dismissals}
        left_out = [w for w in seen.survivors if w not in new.members and w not in may_go]
        kept, others = [w for w in new.members if w in seen.dismissals], set(new.members) - seen.dismissals.keys()
        if kept and others.intersection(seen.holders) and seen.job is not None and len(others) >= seen.job.min_workers:
            raise Violation("dismissed", f"{new} keeps {kept}")
        if left_out and seen.apart:
            return
        first = max(self._reports.get(seen.round.number, (now, now))[0], self.job.etcd.back_since)
        for worker_id in left_out:
            if worker_id in seen.failed:
                raise Violation("patience", f"{new} leaves out {worker_id}, which has answered")
            if now - first < 0.9 * REGROUP_S:
                raise Violation("patience", f"{new} leaves out {worker_id} after {now - first:.1f} s")
        if new.kind == "retry" and seen.round.apart_attempts > MAX_ATTEMPTS:
            assert seen.job is not None
            for size in range(len(seen.survivors), seen.job.min_workers - 1, -1):
                for group in itertools.combinations(seen.survivors, size):
                    if seen.apart and all(_reaches(seen, *pair) for pair in itertools.combinations(group, 2)):
                        raise Violation("patience", f"{new} tries again although {group} reach each other: {seen.apart}")

    def _follow_notice(self, written: Written) -> None:
        etcd = self.job.etcd
        notice, view = etcd.worker_views[-1].notice, etcd.views[-1]
        if notice is not None and notice == notice_of(view, notice.term):
            self._untold_since = None
        elif self._untold_since is None:
            self._untold_since = written.at
        if notice is not None and notice.given_up:
            self._given_up_told.setdefault(notice.round_number, written.at)

    def coordinates(self, worker: Worker, entries: dict[str, KeyValue], seen: JobView) -> None:
        number = seen.round.number if seen.round else 0
        election = entries.get(self.job.keys.coordinator)
        if election is None or election.value.decode() != worker.id:
            return
        if self._untold_since is not None and election == self.job.etcd.entries.get(self.job.keys.coordinator):
            since = max(self._untold_since, self._elected_at)
            if self._should_know([worker.id], since, NOTICE_S / 2):
                raise Violation("told", f"{worker.id} has not published its notice since {since:.1f} s")
        if number not in self._reports:
            return
        since = max(self._reports[number][1], self._elected_at, worker.client.clean_since, self.job.etcd.back_since)
        if self.job.kernel.now - since > REGROUP_S + 4.0 and awaited(seen) and next_round(seen, 1e9) is not None:
            raise Violation("patience", f"{worker.id} still waits for {awaited(seen)} of round {number}")

    def waits(self, worker: Worker, target: RoundRecord) -> None:
        view = self.job.etcd.views[-1]
        if view.round is None or view.round.number != target.number or not any(w != worker.id for w in view.failed):
            return
        told_at = self._given_up_told.get(target.number)
        if told_at is not None and self._should_know([worker.id], told_at, NOTICE_S / 2):
            raise Violation("given-up", f"{worker.id} still waits for {target}, given up by {view.failed}")

    # --- groups

    def formed(self, worker: Worker, meeting: Meeting) -> None:
        self.job.kernel.log(worker.id, "has formed", meeting.round.number)

    def settles(self, worker: Worker, formation: Formation) -> None:
        hellos = {w: Hello.decode(h) for w, h in formation.hellos.items()}
        standing = {w: h for w, h in hellos.items() if h is not None}
        if standing:
            steps = [h.step for h in standing.values()]
            if max(steps) - min(steps) > 1:
                raise Violation("state-kept", f"round {formation.round.number} brings {standing} together")
            tokens: dict[int, int] = {}
            for w, h in standing.items():
                if tokens.setdefault(h.step, h.token) != h.token:
                    raise Violation(
                        "state-kept", f"{w} of round {formation.round.number} stands on another history: {standing}"
                    )
            return
        for w in self._holders.get(formation.round.number, []):
            if self._holds(w):
                raise Violation("state-kept", f"round {formation.round.number} starts over although {w} has the state")

    def completed(self, meeting: Meeting, key: object, values: dict[str, Any]) -> None:
        if not isinstance(key, tuple) or key[0] != "step":
            return
        round_ = meeting.round
        shares = [share for share, _ in values.values()]
        if list(values) and sorted(values) != sorted(round_.members):
            raise Violation("alone", f"a step of {round_} was made by {sorted(values)}")
        if len({token for _, token in values.values()}) > 1:
            raise Violation("alone", f"a step of {round_} was made on different states")
        for worker_id in values:
            formation = self.job.workers[worker_id].member.formation
            if formation is None or formation.round.number != round_.number:
                raise Violation("alone", f"{worker_id} makes a step of {round_} while it is in {formation}")
        if sum(map(len, shares)) != BATCH or frozenset().union(*shares) != frozenset(range(BATCH)):
            raise Violation("samples", f"the shares of a step of {round_} are {[sorted(s) for s in shares]}")
        self._no_ghosts(round_, values)
        self.num_steps += 1
        self.last_step_at = self.job.kernel.now

    def _no_ghosts(self, round_: RoundRecord, values: dict[str, Any]) -> None:
        now = self.job.kernel.now
        following = self.rounds.get(round_.number + 1)
        if following is not None:
            ends = [at for n, (new, at) in self.rounds.items() if n > round_.number and not new.planned]
            if ends and self._should_know(values, min(ends)):
                raise Violation("no-ghosts", f"round {round_.number} still makes steps {now - min(ends):.1f} s after its end")
        for worker_id in values:
            since = self._gone_since.get(worker_id)
            if since is not None and self._should_know([worker_id], since):
                raise Violation("no-ghosts", f"{worker_id} makes a step {now - since:.1f} s after its record went")

    def _should_know(self, workers: Any, since: float, notice_s: float = NOTICE_S) -> bool:
        """Return whether one of `workers` has had undisturbed contact with etcd for `notice_s` after `since`."""
        clients = [self.job.workers[w].client for w in workers]
        if self.job.etcd.loss > 0.0:
            notice_s = 4 * NOTICE_S  # every request may take several attempts
        return any(c.is_fresh and self.job.kernel.now - max(since, c.clean_since) > notice_s for c in clients)

    def switches(self, worker: Worker, number: int) -> None:
        assert worker.meeting is not None
        assert worker.state is not None
        step = worker.state.step
        if self._boundaries.setdefault((worker.meeting.round.number, number), step) != step:
            raise Violation("one-boundary", f"{worker.id} switches to round {number} at step {step}, others at another")

    def failed(self, worker: Worker, error: BaseException) -> None:
        raise Violation("progress", f"{worker.id} ended with {error!r}")

    # --- the end

    def missing(self) -> str:
        """Return the first difference from a healthy job; empty when there is none."""
        job, view = self.job, self.job.etcd.views[-1]
        if any(node.side for node in job.nodes):
            return "the network is still parted"
        processes = [w for w in job.workers.values() if w.process.alive]
        staying = [w.id for w in processes if w.id not in view.drains]
        if job.restarting:
            return "nodes are starting workers"
        if any(w.id in view.drains for w in processes):
            return f"asked to leave, but still there: {[w.id for w in processes if w.id in view.drains]}"
        round_ = view.round
        most = min(len(staying), view.cap)
        size, sizes = len(round_.members) if round_ is not None else 0, set(job.sizes)
        waits_for_others = size in sizes and size < most and sizes.isdisjoint(range(size + 1, most + 1))
        if round_ is None or not (size == most or waits_for_others):
            return f"{len(staying)} workers, cap {view.cap}, but {round_}"
        for worker_id in round_.members:
            record = view.workers.get(worker_id)
            if not job.workers[worker_id].process.alive:
                return f"{worker_id} of {round_} is dead"
            if record is None or record.state != "active" or record.round_number != round_.number:
                return f"{worker_id} of {round_} is {record}"
        unknown = [w.id for w in processes if w.own_key not in job.etcd.entries]
        if unknown:
            return f"alive without a record: {unknown}"
        return "" if job.kernel.now - self.last_step_at < 3.0 else f"no step since {self.last_step_at:.1f} s: {round_}"


def _reaches(seen: JobView, one: str, other: str) -> bool:
    reports = {worker: seen.workers[worker].unreachable for worker in seen.failed}
    return other not in reports.get(one, ()) and one not in reports.get(other, ())
