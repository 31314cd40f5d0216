"""The membership protocol as pure functions: the next round of a job, decided from a view of its records.

`next_round` decides from a `JobView`; `notice_of` gives what the other workers need of it. Probing ports is the only
input or output here. `next_round` is level triggered: the same view always gives the same round, whichever events led there and
whichever worker computes it. docs/internals/rounds.md has the states and their changes.

A worker takes part while its record exists. The record is removed when the worker's lease expires, when its agent reports that
the process has ended, or when its port is found to refuse connections. Only the last two prove that the process is gone, and
remove the worker's address as well. A member without a record but with an address is missing: it may be cut off from etcd, hold
the job's state, and come back. `may_return` decides which of them the coordinator waits for.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from lightning_dlrover.codec import RecordError
from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.etcd.types import KeyValue
from lightning_dlrover.rdzv.job.records import (
    AddressRecord,
    AgentRecord,
    DrainRecord,
    EndNotice,
    JobRecord,
    Keys,
    Notice,
    PlanRecord,
    RoundRecord,
    WorkerRecord,
    decode,
)

Answer = Literal["accepts", "refuses", "silent"]
"""Response of a worker's port to a connection."""


def dead_beside(
    me: str,
    workers: Sequence[str],
    probers: Collection[str],
    knock: Callable[[list[str]], Mapping[str, Answer]],
    num_answers: int = 1,
) -> list[str]:
    """Probe the workers after `me` in a ring until some of them answer; return the dead ones among those probed.

    If every living worker of the ring does this, all dead ones are found: each by the nearest living worker before it. A worker
    probes two others as a rule, however long the ring is. If many have died at once, it probes twice as many each time.

    Args:
        me: this worker; need not be in the ring.
        workers: the ring.
        probers: workers that probe this ring, too. Only their answers count.
        knock: connects to workers; skips those with an answer that proves nothing to this worker.
        num_answers: answers after which to stop; more of them make up for probers that cannot decide whether others are dead.
    """
    first = workers.index(me) + 1 if me in workers else 0
    ring = [w for w in (*workers[first:], *workers[:first]) if w != me]
    dead: list[str] = []
    num_probed, num_next = 0, num_answers
    while num_answers > 0 and num_probed < len(ring):
        found = knock(ring[num_probed : num_probed + num_next])
        num_probed, num_next = num_probed + num_next, 2 * num_next
        dead += [w for w, answer in found.items() if answer == "refuses"]
        num_answers -= sum(answer == "accepts" and w in probers for w, answer in found.items())
    return dead


def dead_workers(records: Iterable[WorkerRecord]) -> list[str]:
    """Return the ids of workers that are certainly dead: their host refuses connections to their port.

    A worker that does not answer at all (host gone, process stopped) is not in the list. Its lease decides.
    """
    return [worker_id for worker_id, answer in answers(records, 0.3).items() if answer == "refuses"]


def silent_workers(records: Iterable[WorkerRecord]) -> list[str]:
    """Return the ids of workers that neither accept nor refuse a connection: they are cut off, or their host is gone."""
    return [worker_id for worker_id, answer in answers(records, 1.0).items() if answer == "silent"]


def answers(records: Iterable[WorkerRecord | AddressRecord], timeout_s: float) -> dict[str, Answer]:
    """Connect to each worker's port, and return the responses within `timeout_s` by worker id.

    Workers are skipped if this process cannot open a socket for them.
    """
    codes: dict[str, int] = {}  # 0 or the error number, by worker id
    with selectors.DefaultSelector() as selector:
        for record in records:
            try:
                family, _, _, _, target = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
            except OSError:
                codes[record.worker_id] = errno.EHOSTUNREACH
                continue
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # this process is at its limit of open files, which proves nothing about the worker
            sock.setblocking(False)
            codes[record.worker_id] = sock.connect_ex(target)
            if codes[record.worker_id] in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                selector.register(sock, selectors.EVENT_WRITE, record.worker_id)
            else:
                sock.close()
        deadline = time.monotonic() + timeout_s
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]
                codes[key.data] = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                selector.unregister(sock)
                sock.close()
        for key in list((selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
    named: dict[int, Answer] = {0: "accepts", errno.ECONNREFUSED: "refuses"}
    return {worker_id: named.get(code, "silent") for worker_id, code in codes.items()}


MORE = "waits for more workers"

MAX_STARTS = 64  # groups of workers that reach each other; the largest one is chosen


@dataclass(frozen=True)
class JobView:
    """State of a job in etcd at one revision."""

    job: JobRecord | None = None
    round: RoundRecord | None = None
    plan: PlanRecord | None = None
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)  # living workers, oldest first
    agents: Mapping[str, AgentRecord] = field(default_factory=dict)
    drains: Set[str] = frozenset()  # ids of workers asked to leave
    replacements: Set[str] = frozenset()  # ids of workers asked to leave once another worker can replace them
    # Members of `drains` that made a step fail, and the round of that step: no further round includes them.
    dismissals: Mapping[str, int] = field(default_factory=dict)
    addresses: Mapping[str, AddressRecord] = field(default_factory=dict)  # also of workers with an expired lease
    notices: Mapping[str, EndNotice] = field(default_factory=dict)  # workers on nodes that will be taken away

    # In a job of a thousand workers the coordinator reads these after each change, so they are computed once.

    @cached_property
    def survivors(self) -> list[str]:
        """Members of the current round that are alive, in rank order."""
        return [w for w in self.round.members if w in self.workers] if self.round else []

    @cached_property
    def lost(self) -> list[str]:
        """Members of the current round that are gone."""
        return [w for w in self.round.members if w not in self.workers] if self.round else []

    @cached_property
    def missing(self) -> list[str]:
        """Members with an expired lease, but without proof that their process has ended."""
        return [w for w in self.lost if w in self.addresses]

    @cached_property
    def members(self) -> Set[str]:
        """Members of the current round."""
        return frozenset(self.round.members) if self.round else frozenset()

    @cached_property
    def forming(self) -> list[str]:
        """Survivors that have not entered the current round yet, in rank order."""
        number = self.round.number if self.round else 0
        records = ((w, self.workers[w]) for w in self.survivors)
        return [w for w, record in records if record.state != "active" or record.round_number != number]

    @cached_property
    def handing_over(self) -> list[str]:
        """Workers that the current, planned round has left out, and that still hand over to its members."""
        if self.round is None or not self.round.planned:
            return []
        return [w for w in self.in_state("active") if self.workers[w].round_number == self.round.number - 1]

    def in_state(self, *states: str) -> list[str]:
        """Workers outside the current round that are in one of `states`, oldest first."""
        return [w for w, record in self.workers.items() if record.state in states and w not in self.members]

    @cached_property
    def failed(self) -> list[str]:
        """Survivors that report the current round as not formed or broken."""
        if self.round is None:
            return []
        number = self.round.number
        records = {w: self.workers[w] for w in self.survivors}
        return [w for w, r in records.items() if r.state in ("reforming", "ready") and r.round_number == number]

    @cached_property
    def holders(self) -> list[str]:
        """Survivors that may hold the job's state: all except joiners that have not entered the round yet."""
        joiners = {*self.arriving, *self.stepped_back}
        return [w for w in self.survivors if w not in joiners]

    @cached_property
    def arriving(self) -> list[str]:
        """Joiners among the survivors that are on their way into the current round."""
        failed = set(self.failed)
        return [w for w in self._joining if w not in failed]

    @cached_property
    def stepped_back(self) -> list[str]:
        """Joiners among the survivors that could not receive the state in the current round."""
        failed = set(self.failed)
        return [w for w in self._joining if w in failed]

    @cached_property
    def apart(self) -> dict[str, int]:
        """Survivors that cannot reach each other, by one's report, which kept the round from forming.

        Each one with all those that are apart from it, as the bits of a number: bit i is the i-th survivor. In a job of a
        thousand workers there may be a hundred thousand pairs.
        """
        bits = {worker: 1 << i for i, worker in enumerate(self.survivors)}
        found: dict[str, int] = {}
        for worker in self.failed:
            own, reported = bits[worker], 0
            for other in self.workers[worker].unreachable:
                if (bit := bits.get(other, 0)) and bit != own:
                    reported |= bit
                    found[other] = found.get(other, 0) | own
            if reported:
                found[worker] = found.get(worker, 0) | reported
        return found

    @property
    def _joining(self) -> list[str]:
        if self.round is None or self.round.kind == "start":
            return []  # such a round has no joiners: all members start together
        return [w for w in self.survivors if self.workers[w].state == "ready"]

    @property
    def cap(self) -> int:
        """Maximum number of workers that a round may have now."""
        if self.job is None:
            return 1
        limit = self.job.max_workers
        if self.plan is not None and self.plan.binding:
            limit = min(limit, max(self.plan.num_workers, self.job.min_workers))
        return self.job.world_sizes.at_most(limit)

    @cached_property
    def nodes(self) -> Mapping[str, str]:
        """Node of each worker; a worker that comes and goes alone is a node of its own."""
        if self.job is None or self.job.workers_per_node == 1:
            return {worker: worker for worker in self.workers}
        labels = {agent.agent_id: agent.labels.get("node", "") for agent in self.agents.values()}
        return {worker: labels.get(record.agent_id) or worker for worker, record in self.workers.items()}

    def by_node(self, workers: Iterable[str]) -> list[list[str]]:
        """Group workers by node, in the order of the first worker of each."""
        groups: dict[str, list[str]] = {}
        for worker in workers:
            groups.setdefault(self.nodes.get(worker, worker), []).append(worker)
        return list(groups.values())

    def with_requests_to_nodes(self) -> JobView:
        """Return the view with each request to one worker, to leave or to be replaced, applied to all workers of its node.

        A node gives nothing back before its last worker has left. A dismissal holds for one worker alone: it has failed a step.
        """
        if self.job is None or self.job.workers_per_node == 1:
            return self
        left = {self.nodes[w] for w in self.drains if w in self.nodes and w not in self.dismissals}
        replaced = {self.nodes[w] for w in self.replacements if w in self.nodes}
        drains = self.drains | {worker for worker, node in self.nodes.items() if node in left}
        replacements = {worker for worker, node in self.nodes.items() if node in replaced}
        noticed = {self.nodes[w]: notice for w, notice in self.notices.items() if w in self.nodes}
        notices = {worker: noticed[node] for worker, node in self.nodes.items() if node in noticed}
        return replace(
            self, drains=frozenset(drains), replacements=frozenset(replacements - drains), notices={**notices, **self.notices}
        )


@dataclass(frozen=True)
class RoundTimeouts:
    """Seconds to wait for missing workers before the round continues without them."""

    # Wait until all announced workers have registered or are ready, and for missing members if no other worker holds the state.
    start_s: float = 60.0
    regroup_s: float = 120.0  # wait until all survivors have detected the broken round; they may be saving a checkpoint
    leave_s: float = 120.0  # wait until workers that a round has left out have handed over and ended
    # Wait until living members with expired leases have registered again. Two leases suffice for cuts that short.
    return_s: float = 10.0
    apart_attempts: int = 2  # consecutive rounds that may fail because members cannot reach each other; then some are excluded


def awaited(view: JobView) -> list[str]:
    """Return the ids of workers or agents that the next round waits for, empty when there are none."""
    if not view.survivors:
        pending = view.in_state("standby")
        if pending or view.in_state("ready"):
            return pending + _keepers_of_state(view)
        starting = view.in_state("starting")
        registered = {view.workers[w].agent_id for w in starting}
        agents = [a.agent_id for a in view.agents.values() if a.state == "running" and a.agent_id not in registered]
        return agents + [agent for agent in _keepers_of_state(view) if agent not in agents]
    if view.failed and not view.lost:
        answered = {*view.failed, *view.dismissals}
        return [w for w in view.holders if w not in answered]
    return [] if view.lost or view.failed else view.handing_over


def may_return(view: JobView, answers: Mapping[str, Answer]) -> list[str]:
    """Return the missing members that the next round waits for a while for, because they may hold the state that it needs.

    While others hold it, a member with an unresponsive host is not worth their time. If no other holds it, the next round
    throws the state away.

    Args:
        answers: known responses of the missing members' ports.
    """
    if view.holders:
        return [w for w in view.missing if answers.get(w, "accepts") == "accepts"]
    return [w for w in view.missing if answers.get(w) != "refuses"]


def _keepers_of_state(view: JobView) -> list[str]:
    """Return agents that may keep the state of a stopped job in their host's memory for workers that are not there yet.

    A round without these workers would restart the job from scratch: the state is read only in a round in which no worker has
    one.
    """
    if view.round is None or view.round.kind != "stop":
        return []
    # Workers that start while others are further on become `standby` first.
    new = view.in_state("standby", "ready") or view.in_state("starting")
    here = {view.workers[w].agent_id for w in new}
    # An agent is `waiting` for a moment only: it joins a live job at once.
    return [a.agent_id for a in view.agents.values() if a.num_workers > 1 and a.state != "finished" and a.agent_id not in here]


def lacks_workers(view: JobView) -> bool:
    """Whether the present workers cannot form a further round, however long they wait."""
    if view.job is None or view.job.phase in ("finished", "failed"):
        return False
    needs_another = bool(not view.survivors or view.lost or view.failed)
    return needs_another and next_round(view, float("inf")) is None


def cause(view: JobView, successor: RoundRecord) -> dict[str, list[str]]:
    """Return the workers that caused `successor` to follow the round of `view`, grouped by the kind of change."""
    before, after = view.round.members if view.round is not None else [], set(successor.members)
    gone = losses(view, successor)
    stay = after.union(gone)
    left = [w for w in before if w not in stay]
    return {
        "joined": [w for w in successor.members if w not in view.members],
        "lost": [w for w in gone if w not in view.workers],
        "left_out": [w for w in gone if w in view.workers],  # they live, but did not answer or cannot be reached
        "drained": [w for w in left if w in view.drains or w in view.replacements],
        "not_in_plan": [w for w in left if w not in view.drains and w not in view.replacements],
    }


def waits(view: JobView) -> dict[str, str]:
    """Describe each worker's wait in words; empty for a worker that trains."""
    is_about_to = next_round(view, 0.0) is not None
    return {worker: _wait_of(view, worker, is_about_to) for worker in view.workers}


def _wait_of(view: JobView, worker: str, is_about_to: bool) -> str:
    record, round_, limits = view.workers[worker], view.round, view.job
    state, is_member = record.state, worker in view.members
    missing = awaited(view)
    if limits is None:
        return "waits for the job's record"
    if limits.is_over:
        return f"the job has {limits.phase}: about to end"
    if state == "standby":
        return "builds its model and data" + (", asked to leave" if worker in view.drains else "")
    if not view.survivors:
        # Workers are `starting` at the very start, and `ready` when all holders of the state are gone.
        if view.missing:
            return _may_live(view.missing)
        here = len(view.in_state("ready", "starting"))
        few = _too_few(here, limits)
        return few or (f"waits for {', '.join(missing)} to come" if missing else "about to start" if is_about_to else MORE)
    assert round_ is not None
    forming = view.forming
    if state == "starting":
        return "about to join the training workers"
    if view.lost or view.failed:
        broken = f"round {round_.number} lost {', '.join(view.lost)}" if view.lost else f"round {round_.number} broke"
        if worker in missing:
            return f"{broken}: has not answered"
        here = len(view.survivors) + len(view.in_state("ready"))
        few = "" if is_about_to else _too_few(here, limits)
        if view.missing:
            return f"{broken}: {_may_live(view.missing)}"
        if not few and missing:
            few = f"waits for {', '.join(missing)} to answer"
        return f"{broken}: {few or ('about to form the next one' if is_about_to else MORE)}"
    if is_member and worker in forming:
        return f"enters round {round_.number}" + _with(w for w in forming if w != worker)
    if is_member and forming:
        return f"waits for {', '.join(forming)} to enter round {round_.number}"
    if is_member:
        notice = f", its node {view.notices[worker]}" if worker in view.notices else ""
        if worker in view.drains:
            stays = notice and not is_about_to and not view.handing_over
            when = f"stays until it is replaced, as the job needs {limits.min_workers} workers" if stays else ""
            return f"asked to leave{notice}: {when or 'leaves at one of the next steps'}"
        return f"to be replaced{notice}: leaves when another worker is ready" if worker in view.replacements else ""
    if worker in view.drains:
        return "asked to leave"
    if forming:
        return f"waits for {', '.join(forming)} to enter round {round_.number}"
    if _is_cut_off(view, worker):
        return f"cannot reach {', '.join(w for w in record.unreachable if w in round_.members)}"
    if view.handing_over:
        return f"waits for {', '.join(view.handing_over)} to hand over and end"
    if limits.workers_per_node > 1:
        neighbours = [w for w in view.in_state("ready") if w != worker and view.nodes[w] == view.nodes[worker]]
        if _lacks_neighbours(view, [worker, *neighbours]):
            return "waits for the other workers of its node"
    if len([w for w in round_.members if w not in view.drains]) >= view.cap:
        wanted = f"the plan wants {view.cap}" if view.plan and view.plan.binding else f"at most {view.cap} are allowed"
        return f"spare: waits for a plan that admits it, {wanted}"
    if failed := limits.failed_sizes.get(str(len(round_.members) + 1)):
        return f"spare: {failed}"
    if (num_more := _num_to_next_size(view)) > 0:
        return f"waits for {counted(num_more, 'more worker')}: the job's sizes are {limits.world_sizes.text}"
    return "about to be admitted" if is_about_to else MORE


def _num_to_next_size(view: JobView) -> int:
    """Return how many workers besides those that are ready the job needs for the next of its sizes; 0 or less: none."""
    assert view.job is not None
    sizes, present = view.job.world_sizes, len(view.members)
    if not sizes.lists(present) or sizes.at_least(present + 1) <= present:
        return 0
    return sizes.at_least(present + 1) - present - len([w for w in view.in_state("ready") if w not in view.drains])


def _too_few(here: int, job: JobRecord) -> str:
    missing = job.min_workers - here
    return f"waits for {missing} more worker{'s' * (missing > 1)} of at least {job.min_workers}" if missing > 0 else ""


def _may_live(missing: Sequence[str]) -> str:
    return f"waits for a while for {', '.join(missing)}: cut off from etcd, and not known to be dead"


def _with(workers: Iterable[str]) -> str:
    others = ", ".join(workers)
    return f", as do {others}" if others else ""


def next_round(view: JobView, waited_s: float, timeouts: RoundTimeouts = RoundTimeouts()) -> RoundRecord | None:
    """Return the round that should follow the current one, or None if it should stay or others are awaited.

    Args:
        waited_s: seconds since `awaited(view)` last changed.
        timeouts: limits on `waited_s`.
    """
    if view.job is None or view.job.is_over:
        return None
    if view.job.unfinished_fit:  # no worker can join any more: a joiner would be in the script's first `fit`
        # The job cannot return to its minimum number of workers either, so the survivors continue.
        job = replace(view.job, min_workers=1)
        view = replace(view, job=job, workers={w: view.workers[w] for w in view.survivors})
        if not view.survivors:
            return None
    if not view.survivors:
        return _first(view, waited_s, timeouts)
    if view.lost or view.failed:
        return _after_failure(view, waited_s, timeouts)
    return _planned(view, waited_s, timeouts)


def losses(view: JobView, successor: RoundRecord) -> list[str]:
    """Return members of the current round that `successor` leaves out although they were not asked to leave."""
    if view.round is None or (successor.planned and view.survivors):
        return []
    not_lost = {*successor.members, *view.stepped_back, *(view.dismissals.keys() & view.workers.keys())}
    return [w for w in view.round.members if w not in not_lost]


def _first(view: JobView, waited_s: float, timeouts: RoundTimeouts) -> RoundRecord | None:
    """No worker holds state: start (again) with those at the training loop's entrance, else with those starting up."""
    assert view.job is not None
    # The two groups are at different places in the user's script and cannot form one round. Workers in `starting` become
    # `standby` as soon as they see a worker past the start, so the job waits for the group that is further on.
    further_on = view.in_state("standby", "ready")
    group = [w for w in (view.in_state("ready") if further_on else view.in_state("starting")) if w not in view.drains]
    if awaited(view) and waited_s < timeouts.start_s:
        return None
    if len(group) < view.job.min_workers or not group:
        return None
    most = min(len(group), view.cap)
    # With fewer than the smallest size, the job starts with what it has: its minimum may be below.
    size = next((n for n in range(most, 0, -1) if view.job.world_sizes.lists(n)), most)
    return _round(view, group[:size], "start", planned=True, reason=f"start with {counted(size, 'worker')}")


def _after_failure(view: JobView, waited_s: float, timeouts: RoundTimeouts) -> RoundRecord | None:
    """The step in flight cannot complete: continue with all survivors.

    Spares are not admitted here. They can receive the state only between two steps, in the planned round that follows.
    """
    assert view.job is not None
    if not view.holders:
        stay, kind, reason = view.survivors, "start", f"lost all that held the state: {', '.join(view.lost)}"
    elif view.lost:
        # Arriving joiners may have received the state since their last report. If not, they step back.
        stepped_back = set(view.stepped_back)
        stay = [w for w in view.survivors if w not in stepped_back]
        kind, reason = "loss", f"lost {', '.join(view.lost)}"
    else:
        if awaited(view) and waited_s < timeouts.regroup_s:
            return None
        failed = set(view.failed)
        left_out = [w for w in view.holders if w not in failed and w not in view.dismissals]
        not_in = {*left_out, *view.stepped_back}
        stay = [w for w in view.survivors if w not in not_in]
        kind = "loss" if left_out else "retry"
        reason = f"no answer from {', '.join(left_out)}" if left_out else "the round did not form or a collective failed"
        together = _reaching_each_other(view, stay)
        if view.round and view.round.apart_attempts >= timeouts.apart_attempts and _are_enough(view, together):
            reached = set(together)
            cut_off = [w for w in stay if w not in reached]
            if cut_off:
                stay, kind, reason = together, "loss", f"{', '.join(cut_off)} cannot be reached by the others"
        if not set(view.holders).intersection(stay):
            stay = view.holders  # only joiners report a failure; for the holders of the state the round works
    kept = [w for w in stay if w not in view.dismissals]
    if len(kept) < len(stay) and set(view.holders).intersection(kept) and _are_enough(view, kept):
        dismissed = ", ".join(w for w in stay if w not in kept)
        reason = f"{reason}; without {dismissed}" if kind == "loss" else f"a step failed after {dismissed} joined"
        stay, kind = kept, "loss" if kind == "loss" else "undo"
    if not _are_enough(view, stay):
        return None
    attempts = view.round.apart_attempts + 1 if view.round and view.apart else 0
    return replace(_round(view, stay, kind, planned=False, reason=reason), apart_attempts=attempts)


def _are_enough(view: JobView, stay: list[str]) -> bool:
    """Whether the job can continue with `stay` and the spares that the planned round after that will admit.

    The minimum does not apply if all of them leave: they finish the step in flight, so that the state can be kept for their
    successors.
    """
    assert view.job is not None
    if view.holders and stay and view.drains >= {*stay, *view.holders}:
        return True
    spares = {*view.in_state("ready"), *view.stepped_back} - view.drains - set(stay)
    return bool(stay) and len(stay) + len(spares) >= view.job.min_workers


def _reaching_each_other(view: JobView, workers: list[str]) -> list[str]:
    """Return the largest group of survivors among `workers` without two that are apart, found greedily in rank order.

    The search starts once from each worker, in large jobs from those that reach the most others. In a network split into two
    the result is the larger side, or the side with rank 0 if both are equal. If one worker cannot be reached by any other, the
    result is all others.
    """
    if not view.apart or not workers:
        return workers
    bits = {worker: 1 << i for i, worker in enumerate(view.survivors)}
    masks = [view.apart.get(worker, 0) for worker in view.survivors]
    everyone = sum(bits[worker] for worker in workers)
    # Workers that reach the same others lead to the same group.
    starts = list(dict.fromkeys(view.apart.get(w, 0) & everyone for w in workers if w == workers[0] or w in view.apart))
    if len(starts) > MAX_STARTS:
        starts = sorted(starts, key=int.bit_count)[:MAX_STARTS]
    best = 0
    for start in starts:
        group, left = 0, everyone & ~start
        while left:
            lowest = left & -left
            group |= lowest
            left &= ~(lowest | masks[lowest.bit_length() - 1])
        if group.bit_count() > best.bit_count():
            best = group
    return [worker for worker in workers if best & bits[worker]]


def _planned(view: JobView, waited_s: float, timeouts: RoundTimeouts) -> RoundRecord | None:
    assert view.job is not None
    assert view.round is not None
    number = view.round.number
    if any(view.workers[w].state != "active" or view.workers[w].round_number != number for w in view.round.members):
        return None  # the current round is still being formed
    if view.handing_over and waited_s < timeouts.leave_s:
        return None  # they must not see a newer round, unless the script keeps them for good
    members = view.round.members
    if any(view.dismissals.get(worker) == number for worker in members):
        return None  # the worker that dismissed them is about to report this round as broken, or to die
    joiners = _joiners(view)
    leaving = _leaving(view, len(joiners))
    staying = [w for w in members if w not in leaving]
    if not staying and not joiners:
        if any(w not in view.drains for w in view.in_state("standby")):
            return None  # a replacement is starting; the leaving workers train until they can hand over
        return _round(view, [], "stop", planned=True, reason="every worker was asked to leave")
    # If only leaving workers hold the state, one round includes them and the joiners, and the next one leaves them out.
    most = _most(view, len(staying), len(joiners)) if staying else view.cap
    chosen = _arranged(view, staying, joiners, most) if staying else [*members, *joiners[:most]]
    if chosen == members or len(chosen) < view.job.min_workers:
        return None
    before, after = set(members), set(chosen)
    added, gone = [w for w in chosen if w not in before], [w for w in members if w not in after]
    kind = "replace" if added and gone else "grow" if added else "shrink"
    return _round(view, chosen, kind, planned=True, reason=_why(view, added, gone))


def _joiners(view: JobView) -> list[str]:
    """Return the workers that may join now. Those of one node join together, so the first of them waits for the others."""
    ready = view.by_node(w for w in view.in_state("ready") if w not in view.drains and not _is_cut_off(view, w))
    if view.drains >= {*view.survivors}:
        return [worker for group in ready for worker in group]  # the state must be handed over now
    return [worker for group in ready if not _lacks_neighbours(view, group) for worker in group]


def _lacks_neighbours(view: JobView, joiners: Sequence[str]) -> bool:
    """Whether a joiner's node, none of its workers training yet, still has workers to come."""
    if view.job is None or len(joiners) >= view.job.workers_per_node:
        return False
    return view.nodes[joiners[0]] not in {view.nodes[w] for w in view.survivors}


def _most(view: JobView, num_staying: int, num_joiners: int) -> int:
    """Return the most workers that the next round may have.

    It does not grow to a size at which a step has failed, nor from a size of `--sizes` to another number: joiners wait until
    there are enough. After a loss, a job of any number takes each worker that comes.
    """
    assert view.job is not None
    assert view.round is not None
    sizes, present = view.job.world_sizes, len(view.round.members)
    for size in range(min(view.cap, num_staying + num_joiners), num_staying, -1):
        is_able = str(size) not in view.job.failed_sizes and (sizes.lists(size) or not sizes.lists(present))
        if size <= present or is_able:
            return size
    return min(view.cap, num_staying)


def _why(view: JobView, added: list[str], gone: list[str]) -> str:
    """Describe in words why a planned round follows. The plan's own reason is given only for changes that the plan caused."""
    asked = [w for w in gone if w in view.drains or (added and w in view.replacements)]
    others = [w for w in gone if w not in asked]
    texts = [f"{', '.join(added)} joined" if added else "", f"{', '.join(others)} left" if others else ""]
    by_plan = "; ".join(text for text in texts if text)
    if by_plan and view.plan and view.plan.binding:
        by_plan += f" ({view.plan.stated_reason})"
    by_request = f"{', '.join(asked)} left when asked to" if asked else ""
    return "; ".join(text for text in (by_plan, by_request) if text)


def _leaving(view: JobView, num_joiners: int) -> set[str]:
    """Return the members that leave now: the drained ones, and as many of those to be replaced as joiners can replace."""
    assert view.round is not None
    assert view.job is not None
    others = [w for w in view.round.members if w not in view.drains]
    too_many = len(others) - view.cap  # happens after the only worker's replacement has joined to receive the state
    can_go = len(others) + num_joiners - view.job.min_workers
    most = max(0, min(can_go, max(num_joiners, too_many)))
    leaving = {*view.drains} - _staying_for_now(view, -can_go)
    replaced = view.by_node(w for w in others if w in view.replacements)
    for group in sorted(replaced, key=lambda group: _deadline(view, group[0])):
        if len(group) > most:
            break
        leaving.update(group)
        most -= len(group)
    return leaving


def _deadline(view: JobView, worker: str) -> tuple[bool, float]:
    """Return a key that sorts workers by the end of their nodes: known times, unknown ones, nodes that stay."""
    notice = view.notices.get(worker)
    return notice is None, (notice.taken_at if notice is not None else 0.0) or float("inf")


def _staying_for_now(view: JobView, too_few: int) -> set[str]:
    """Return the members that train on although their nodes will be taken away, because `too_few` others would remain.

    Those with the latest deadlines. If all members leave, none does: they keep the state for their successors.
    """
    assert view.round is not None
    asked = [w for w in view.round.members if w in view.drains]
    staying: set[str] = set()
    if len(asked) == len(view.round.members):
        return staying
    noticed = view.by_node(w for w in asked if w in view.notices and w not in view.dismissals)
    for group in sorted(noticed, key=lambda group: _deadline(view, group[0]), reverse=True):
        if len(staying) >= too_few:
            break
        staying.update(group)
    return staying if len(staying) >= too_few else set()


def _arranged(view: JobView, staying: list[str], joiners: list[str], cap: int) -> list[str]:
    """Return the next round's members in rank order, so that the fewest rows move if ranks hold consecutive blocks of rows.

    A joiner takes the place of a leaving worker. Further joiners are inserted in the middle, and surplus members are removed
    from there, with all workers of their nodes. The first member is never a joiner, because the others copy shared decisions
    from it.
    """
    assert view.round is not None
    members = view.round.members
    staying = _without_surplus(view, staying, len(staying) - cap)
    spare = joiners[: cap - len(staying)]
    chosen: list[str] = []
    stays = set(staying)
    places = 0  # vacant places that the next joiners take
    for worker in members:
        if worker in stays:
            chosen.append(worker)
        else:
            places += 1
        if chosen:
            chosen += spare[:places]
            spare, places = spare[places:], 0
    middle = (len(chosen) + 1) // 2
    return chosen[:middle] + spare + chosen[middle:]


def _without_surplus(view: JobView, staying: list[str], too_many: int) -> list[str]:
    """Return `staying` without at least `too_many` workers: those of the fewest nodes in the middle."""
    nodes = view.by_node(staying)
    for num_out in range(len(nodes) + 1):
        first_out = (len(nodes) - num_out + 1) // 2
        out = {worker for group in nodes[first_out : first_out + num_out] for worker in group}
        if len(out) >= too_many:
            return [worker for worker in staying if worker not in out]
    return []


def _is_cut_off(view: JobView, joiner: str) -> bool:
    """Whether a joiner reports a member as unreachable: admitting it would only interrupt the others."""
    unreachable = view.workers[joiner].unreachable
    return bool(unreachable and view.round and set(unreachable) & set(view.round.members))


def _round(view: JobView, members: list[str], kind: str, planned: bool, reason: str) -> RoundRecord:
    number = view.round.number + 1 if view.round else 1
    first = view.workers[members[0]] if members else None
    hosts = [view.workers[w].host for w in members]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return RoundRecord(
        number=number,
        members=members,
        reason=reason,
        kind=kind,  # type: ignore[arg-type]
        planned=planned,
        store_address=first.address if first else "",
        store_port=first.port if first else 0,
        hosts=[numbers[host] for host in hosts],
    )


MAX_NAMED = 2  # number of workers that a notice names where readers only need to find one other than themselves


@dataclass(frozen=True)
class WorkerView:
    """One worker's view of its job: the shared records, and the coordinator's notice about the other workers.

    Only the coordinator follows the records of all workers. It publishes the facts that the others need in one notice: with
    each round, and whenever the notice would change.
    """

    job: JobRecord | None = None
    round: RoundRecord | None = None
    plan: PlanRecord | None = None
    notice: Notice | None = None
    term: int = 0  # create revision of the election key; 0: no coordinator
    leaver: str = ""  # id of the worker that looks, once it has asked to leave itself

    @property
    def is_told(self) -> bool:
        """Whether the coordinator in office has written the notice. The notice of an earlier one may be long out of date."""
        return self.notice is not None and self.notice.term == self.term

    @property
    def is_past_start(self) -> bool:
        """Whether a worker is past the start: it trains, or builds its model to join or start later."""
        return self.notice is not None and self.is_told and self.notice.is_past_start

    @property
    def given_up(self) -> Sequence[str]:
        """Members that report the current round as not formed or broken: all, or some of them."""
        return self._of_round.given_up

    @property
    def keepers(self) -> Sequence[str]:
        """Those of `given_up` that have the job's state and were not asked to leave: all, or some of them."""
        return self._of_round.keepers

    @property
    def lost(self) -> Sequence[str]:
        """Members of the current round that are gone."""
        return self._of_round.lost

    @property
    def leavers(self) -> Sequence[str]:
        """Workers outside of the current round that still take part in a hand-over to it."""
        return self._of_round.leavers

    @cached_property
    def drains(self) -> Set[str]:
        """Workers that were asked to leave."""
        asked = self.notice.drains if self.notice is not None else ()
        return frozenset((*asked, self.leaver) if self.leaver else asked)

    @cached_property
    def replacements(self) -> Set[str]:
        """Workers that were asked to leave once another worker can replace them."""
        return frozenset(self.notice.replacements) if self.notice is not None else frozenset()

    @property
    def taken_at(self) -> Mapping[str, float]:
        """Workers on nodes that will be taken away, and when, in seconds since the epoch."""
        return self.notice.taken_at if self.notice is not None else {}

    @property
    def lacks_workers(self) -> bool:
        """Whether the present workers cannot form a further round, however long they wait."""
        return self.notice is not None and self.is_told and self.notice.lacks_workers

    @property
    def _of_round(self) -> Notice:
        """The notice, if it refers to the current round; else an empty one."""
        if self.notice is not None and self.round is not None and self.notice.round_number == self.round.number:
            return self.notice
        return Notice(self.term)


def notice_of(view: JobView, term: int) -> Notice:
    """Return the notice for the other workers about `view`.

    Args:
        term: create revision of the coordinator's election key.
    """
    failed, holders = view.failed, set(view.holders)
    return Notice(
        term=term,
        round_number=view.round.number if view.round is not None else 0,
        is_past_start=bool(view.survivors or view.in_state("standby", "ready")),
        given_up=failed[:MAX_NAMED],
        keepers=[w for w in failed if w in holders and w not in view.drains][:MAX_NAMED],
        lost=[w for w in view.lost if w not in view.addresses],  # the others may come back
        leavers=view.in_state("active"),
        drains=sorted(view.drains),
        replacements=sorted(view.replacements),
        lacks_workers=lacks_workers(view),
        taken_at={worker: notice.taken_at for worker, notice in sorted(view.notices.items()) if notice.taken_at},
    )


R = TypeVar("R")


class Decoder:
    """Decode the records of one job, each version once. For use by one thread.

    A record that cannot be read is reported to `bad`, and its last readable version stays in force. Garbage under the prefix
    therefore cannot stop a running job.
    """

    def __init__(self, keys: Keys, bad: Callable[[str, RecordError], None]) -> None:
        self._keys = keys
        self._bad = bad
        self._read: dict[str, tuple[int, Any]] = {}  # revision and last readable record of each key
        # The last view and the snapshot that gave it. A mirror's is the same object until a key changes, and is read-only.
        self._last_view: tuple[Mapping[str, KeyValue], JobView] | None = None

    def view(self, entries: Mapping[str, KeyValue]) -> JobView:
        """Decode a snapshot of `keys.live`."""
        if self._last_view is not None and self._last_view[0] is entries and isinstance(entries, MappingProxyType):
            return self._last_view[1]
        self._last_view = entries, self._decoded_view(entries)
        return self._last_view[1]

    def _decoded_view(self, entries: Mapping[str, KeyValue]) -> JobView:
        keys = self._keys
        workers = self._folder(entries, keys.workers, WorkerRecord)
        drains = self._folder(entries, keys.drains, DrainRecord)
        view = JobView(
            job=self._record(entries, keys.job, JobRecord),
            round=self._record(entries, keys.round, RoundRecord),
            plan=self._record(entries, keys.plan, PlanRecord),
            workers=workers,
            addresses=self._folder(entries, keys.addresses, AddressRecord),
            agents=self._folder(entries, keys.agents, AgentRecord),
            drains=frozenset(worker for worker, record in drains.items() if not record.once_replaced),
            dismissals={worker: record.failed_round for worker, record in drains.items() if record.failed_round},
            # A request by others outlasts the worker's lease. After its expiry the worker's place is free already.
            replacements=frozenset(w for w, record in drains.items() if record.once_replaced and w in workers),
            notices={w: notice for w, record in drains.items() if w in workers and (notice := record.notice) is not None},
        )
        return view.with_requests_to_nodes()

    def worker_view(self, entries: Mapping[str, KeyValue]) -> WorkerView:
        """Decode a snapshot of `keys.shared`."""
        keys = self._keys
        return WorkerView(
            job=self._record(entries, keys.job, JobRecord),
            round=self._record(entries, keys.round, RoundRecord),
            plan=self._record(entries, keys.plan, PlanRecord),
            notice=self._record(entries, keys.notice, Notice),
            term=entries[keys.coordinator].create_revision if keys.coordinator in entries else 0,
        )

    def _record(self, entries: Mapping[str, KeyValue], key: str, record_type: type[R]) -> R | None:
        entry = entries.get(key)
        if entry is None:
            self._read.pop(key, None)
            return None
        revision, record = self._read.get(key, (0, None))
        if revision != entry.mod_revision:
            try:
                record = decode(record_type, entry.value, key)
            except RecordError as error:
                self._bad(key, error)
            self._read[key] = (entry.mod_revision, record)
        found: R | None = record
        return found

    def _folder(self, entries: Mapping[str, KeyValue], prefix: str, record_type: type[R]) -> dict[str, R]:
        found = sorted((e.create_revision, k) for k, e in entries.items() if k.startswith(prefix))
        if len(self._read) > 2 * len(entries) + 16:  # records of workers that have left
            self._read = {k: read for k, read in self._read.items() if k in entries}
        loaded = {k.removeprefix(prefix): self._record(entries, k, record_type) for _, k in found}
        return {name: record for name, record in loaded.items() if record is not None}


def read_view(
    entries: Mapping[str, KeyValue], keys: Keys, bad: Callable[[str, RecordError], None] = lambda *_: None
) -> JobView:
    """Decode one snapshot of `keys.live`. Records that cannot be read are reported to `bad` and left out."""
    return Decoder(keys, bad).view(entries)
