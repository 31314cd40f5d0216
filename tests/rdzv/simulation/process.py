"""Simulated worker processes: the real `Member` and `Coordinator` amid simulated etcd, connections and collectives.

A `Worker` represents one process with its two important threads. The main one trains and forms groups. The membership one
follows the records, coordinates and severs groups (as `membership.py` and `world.py` do). Training is counting, but states of
different groups are distinguishable, and each sample is accounted for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_dlrover.rdzv.etcd.types import (
    Delete,
    EtcdError,
    EtcdUnavailableError,
    KeyValue,
    LeaseLostError,
    Put,
    Txn,
    absent,
    exists,
    modified,
)
from lightning_dlrover.rdzv.job.records import (
    AddressRecord,
    DrainRecord,
    JobRecord,
    RoundRecord,
    WorkerRecord,
    WorkerState,
    decode,
    encode,
)
from lightning_dlrover.rdzv.membership.coordinator import Coordinator, eviction
from lightning_dlrover.rdzv.membership.member import (
    CannotMeetError,
    EvictedError,
    Formation,
    LeftOutError,
    Member,
    MembershipError,
    TooLateError,
    UnreachableError,
    VoidRoundError,
    WorldError,
)
from lightning_dlrover.rdzv.membership.rounds import Answer, RoundTimeouts, WorkerView, dead_beside

from .etcd import Client
from .kernel import Process, Wake

if TYPE_CHECKING:
    from .job import Job

T = TypeVar("T")

LEASE_S = 3.0
TICK_S = 0.4
FORM_TIMEOUT_S = 12.0
COLLECTIVE_S = 5.0
VACANCY_S = 5.0  # seconds between two checks that the coordinator is registered
HANG_S = 2.0  # seconds until a connection to an unreachable peer is given up
BATCH = 12  # samples per step
TIMEOUTS = RoundTimeouts(start_s=8.0, regroup_s=8.0, return_s=2 * LEASE_S)


@dataclass(frozen=True)
class State:
    """Training state after `step` updates. A different group, or a different previous state, gives a different token."""

    step: int
    token: int


@dataclass(frozen=True)
class Hello:
    """A worker's message on entering: its position, or nothing (None) if it has no state."""

    step: int
    at_boundary: bool
    token: int

    def encode(self) -> bytes:
        return f"{self.step} {self.at_boundary:d} {self.token}".encode()

    @staticmethod
    def decode(hello: bytes) -> Hello | None:
        if not hello:
            return None
        step, at_boundary, token = hello.split()
        return Hello(int(step), at_boundary == b"1", int(token))


def can_meet(hellos: dict[str, bytes]) -> bool:
    """Return whether the positions fit, as in live/training.py: joiners can receive the state only between two steps."""
    positions = [Hello.decode(hello) for hello in hellos.values()]
    standing = [p for p in positions if p is not None]
    return len(standing) in (0, len(positions)) or all(p.at_boundary and p.step == standing[0].step for p in standing)


class StepError(Exception):
    """The script has failed in a step, soon after workers have joined."""


class GroupError(RuntimeError):
    """A collective failed."""


class Meeting:
    """The forming of one round, and its group: hellos in the store of rank 0, connections, collectives."""

    def __init__(self, job: Job, round_: RoundRecord) -> None:
        self.job = job
        self.round = round_
        self.hellos: dict[str, bytes] = {}
        self.connecting: list[str] = []
        self.members: dict[str, Worker] = {}
        self.broken = False
        self.states: dict[str, State | None] = {}
        self._pending: dict[object, dict[str, tuple[Any, Wake]]] = {}

    def break_up(self) -> None:
        """Shut down a member's sockets. Members that wait for a collective get an error, unless they cannot be reached."""
        if not self.broken:
            self.broken = True
            for waiting in list(self._pending.values()):
                for worker_id, (_, wake) in waiting.items():
                    self._fail(worker_id, wake)

    def _fail(self, worker_id: str, wake: Wake) -> None:
        kernel = self.job.kernel
        reachable = all(self.job.connected(worker_id, other) for other in self.round.members if other != worker_id)
        delay_s = kernel.rng.random() * 0.02 if reachable else HANG_S
        kernel.after(delay_s, lambda: wake.set(GroupError("connection closed by peer")))

    def collective(self, worker: Worker, key: object, value: Any) -> Wake:
        """Return all members' values by worker, once all have called it."""
        wake = Wake()
        if key not in self._pending:
            self.job.kernel.after(COLLECTIVE_S, lambda: self._time_out(key))
        waiting = self._pending.setdefault(key, {})
        waiting[worker.id] = (value, wake)
        if self.broken:
            self._fail(worker.id, wake)
        elif len(waiting) == len(self.round.members):
            self.job.kernel.after(self.job.kernel.rng.random() * 0.02, lambda: self._complete(key))
        return wake

    def _time_out(self, key: object) -> None:
        for _, wake in self._pending.get(key, {}).values():
            wake.set(GroupError("timed out"))

    def _complete(self, key: object) -> None:
        if self.broken:
            return
        waiting = self._pending.pop(key)
        values = {worker_id: value for worker_id, (value, _) in waiting.items()}
        kernel, first = self.job.kernel, True
        self.job.checks.completed(self, key, values)
        for _, wake in waiting.values():
            # Results arrive one by one. A member without its result when a neighbour goes away may never get it.
            delay_s = 0.0 if first or kernel.rng.random() < 0.7 else kernel.rng.random() * 0.03
            first = False
            kernel.after(delay_s, lambda wake=wake: wake.set(values if self._arrives() else GroupError("closed by peer")))  # type: ignore[misc]

    def _arrives(self) -> bool:
        return not self.broken or self.job.kernel.rng.random() < 0.8


class Worker:
    """One training process, and the `MemberBackend` of its member. It may be killed or stopped between any two of its steps."""

    def __init__(self, job: Job, worker_id: str, node: int) -> None:
        self.job = job
        self.id = worker_id
        self.node = node
        self.kernel = job.kernel
        self.process = Process(job.kernel)
        self.client = Client(job.etcd, self.process, worker_id, self._on_mirror)
        self.member = Member(self)
        self.state: State | None = None
        self.in_step = False
        self.outcome = ""  # how the worker ended
        self.registered = False
        self.evicted = False
        self.severed = False
        self.busy_until = 0.0  # end of the time in the user's code, without reaction to the job
        self.meeting: Meeting | None = None
        self.view = WorkerView()
        self.shared: dict[str, Any] = {}  # entries that `view` was decoded from
        self.overview_since = 0  # revision from which on this worker follows all records; 0: it is not in office
        self._known: dict[str, KeyValue] = {}  # records of other workers that were read once
        self._vacancy_checked_at = 0.0
        self.lease_id = 0
        self.clock_rate = 1.0 + (job.kernel.rng.random() - 0.5) * 0.02
        self.clock_start = job.kernel.rng.random() * 1e6
        self.decided_at = 0  # revision of the copy on which the current round was decided
        self._record: WorkerRecord | None = None
        self._is_locked = False  # one write of the own record at a time
        self._waiting_for_lock: list[Wake] = []
        self._created = self._modified = 0
        self._wakes: list[Wake] = []
        self._changed = Wake()
        self._dirty = False

    # --- the process ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.process.run(self._main())

    def kill(self) -> None:
        """SIGKILL: its connections close, its port refuses, its lease lasts a while."""
        if self.process.alive:
            self.kernel.log(self.id, "killed")
            self._end("killed")

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.process.kill()
        if self.meeting is not None:
            self.meeting.break_up()
        self.job.ended(self)

    async def _main(self) -> None:
        try:
            await self._train()
        except LeftOutError as left_out:
            self.kernel.log(self.id, "leaves", left_out.round.number)
            await self._leave()
            self._end("left")
        except (MembershipError, WorldError, EtcdError) as error:
            self.kernel.log(self.id, "fails", repr(error))
            self._end("evicted" if isinstance(error, EvictedError) else "failed")
            if isinstance(error, WorldError):
                self.job.checks.failed(self, error)
            if isinstance(error, EvictedError):
                self.job.checks.evicted(self)

    async def _leave(self) -> None:
        await self.destroy()
        self.registered = False
        try:
            own = (self.own_key, self.job.keys.addresses + self.id, self.job.keys.drains + self.id)
            await self.client.txn([], [Delete(key) for key in own])
            await self.client.request(lambda: self.job.etcd.revoke(self.lease_id))
        except EtcdError:
            pass  # the lease expires by itself

    @property
    def worker_id(self) -> str:
        return self.id

    @property
    def own_key(self) -> str:
        return self.job.keys.workers + self.id

    # --- training --------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        formation = await self.member.start(await self._register())
        if formation is None:
            await self.process.sleep(self.kernel.rng.random() * 0.5)  # builds its model
            formation = await self.member.admit(b"", "")
        while not await self._settle(formation):
            formation = await self.member.regroup(self.hello)
        while True:
            number = await self._steps()
            if number is not None:
                self.job.checks.switches(self, number)
                formation = await self.member.switch(number, self.hello)
            else:
                formation = await self.member.regroup(self.hello)
            while not await self._settle(formation):
                formation = await self.member.regroup(self.hello)

    async def _steps(self) -> int | None:
        """Train until all members have agreed on the next round, and return it. Return None when a collective fails."""
        meeting = self.meeting
        assert meeting is not None
        vote: Wake | None = None
        try:
            for count in itertools.count():
                await self._step()
                # As in World.propose and World.agreed: vote for the newest round that all had seen one step earlier.
                if vote is None:
                    newest = self.view.round.number if self.view.round else 0
                    vote = meeting.collective(self, ("vote", count), newest)
                elif (number := min((await vote).values())) > meeting.round.number:
                    return int(number)
                else:
                    vote = None
        except GroupError:
            pass
        except StepError:
            await self._dismiss_joiners()
        return None

    def _joiners(self) -> list[str]:
        assert self.meeting is not None
        grows = self.meeting.round.kind in ("grow", "replace")
        return [worker for worker, hello in self.meeting.hellos.items() if not hello] if grows else []

    async def _dismiss_joiners(self) -> None:
        """As `Growth.undo` does."""
        self.kernel.log(self.id, "dismisses", *self._joiners())
        for worker_id in self._joiners():
            request = DrainRecord(worker_id, "a step failed", failed_round=self.member.number)
            here = exists(self.job.keys.workers + worker_id)
            with contextlib.suppress(EtcdError):
                await self.client.txn([here], [Put(self.job.keys.drains + worker_id, encode(request))])

    @property
    def hello(self) -> bytes:
        if self.state is None:
            return b""
        return Hello(self.state.step, not self.in_step, self.state.token).encode()

    async def _settle(self, formation: Formation) -> bool:
        """Send or receive the state; return whether that succeeded."""
        assert self.meeting is not None
        self.job.checks.settles(self, formation)
        hellos = {w: Hello.decode(h) for w, h in formation.hellos.items()}
        standing = {w: h for w, h in hellos.items() if h is not None}
        if standing:
            furthest = max(standing, key=lambda w: (standing[w].step, -formation.rank_of(w)))
            newest = standing[furthest]
        else:
            furthest, newest = formation.round.members[0], None
        mine = self.state
        if newest is None:
            mine = self.job.start_over() if formation.rank == 0 else None
        alike = newest is not None and all(h == newest for h in hellos.values())
        if not alike:
            try:
                said = await self.meeting.collective(self, "settle", mine)
            except GroupError:
                return False
            taken: State = said[furthest]
            if self.state is not None and self.state.step == taken.step:
                taken = self.state
            if taken is not self.state:
                self.kernel.log(self.id, "takes the state", taken.step)
                if self.state is not None and self.in_step:
                    self.in_step = False  # the other members completed the step
                self.state = taken
        return True

    async def _step(self) -> None:
        """One update: every member adds its share of the batch."""
        assert self.state is not None
        assert self.meeting is not None
        self.in_step = True
        await self.process.sleep(self.job.step_s * (0.8 + 0.4 * self.kernel.rng.random()))
        if self.busy_until > self.kernel.now:
            await self.process.sleep(self.busy_until - self.kernel.now)
        meeting, rank = self.meeting, self.member.formation.rank  # type: ignore[union-attr]
        if len(meeting.round.members) in self.job.outgrown and self._joiners() and self.kernel.rng.random() < 0.5:
            raise StepError
        share = frozenset(range(rank, BATCH, len(meeting.round.members)))
        if self.severed or meeting.broken:
            raise GroupError("the round has ended")
        await meeting.collective(self, ("step", self.state.step + 1), (share, self.state.token))
        self.state = self.job.update(self.state, meeting)
        self.in_step = False

    # --- groups ----------------------------------------------------------------------------------------------------------

    async def form(self, target: RoundRecord, hello: bytes) -> Formation:
        self.member.number, self.member.forming, self.severed = target.number, True, False
        meeting = self.meeting = self.job.meeting(target)
        try:
            deadline = self.kernel.now + FORM_TIMEOUT_S
            store = self.job.workers[target.members[0]]
            while not (store.process.alive and not store.process.stopped and self.job.connected(self.id, store.id)):
                await self._wait_in(target, [store.id], deadline)
            meeting.hellos[self.id] = hello
            self._tell(meeting)
            while any(w not in meeting.hellos or not self._reaches_store(store) for w in target.members):
                await self._wait_in(target, target.members, deadline)
            hellos = {w: meeting.hellos[w] for w in target.members}
            if not can_meet(hellos):
                raise CannotMeetError
            meeting.connecting.append(self.id)
            self._tell(meeting)
            while not self._all_connected(meeting):
                await self._wait_in(target, target.members, deadline)
            if meeting.broken:
                raise GroupError("a member has gone away")
        except BaseException:
            meeting.break_up()
            self._tell(meeting)
            raise
        finally:
            self.member.forming = False
        meeting.members[self.id] = self
        self.job.checks.formed(self, meeting)
        self._on_view()
        return Formation(target, hellos, target.members.index(self.id))

    def _reaches_store(self, store: Worker) -> bool:
        return store.process.alive and not store.process.stopped and self.job.connected(self.id, store.id)

    def _all_connected(self, meeting: Meeting) -> bool:
        members = meeting.round.members
        if meeting.broken or any(w in meeting.members for w in members):
            return True  # the others were connected, so this worker was, too
        alive = all(self.job.workers[w].process.alive and w in meeting.connecting for w in members)
        return alive and all(self.job.connected(v, w) for i, v in enumerate(members) for w in members[:i])

    def _tell(self, meeting: Meeting) -> None:
        for worker_id in meeting.round.members:
            if worker_id != self.id and worker_id in self.job.workers:
                self.job.workers[worker_id].wake_up()

    async def _wait_in(self, target: RoundRecord, suspects: Sequence[str], deadline: float) -> None:
        self._raise_if_void(target)
        await self.evict_dead(suspects)
        self._raise_if_void(target)
        self.job.checks.waits(self, target)
        if self.kernel.now > deadline:
            apart = [w for w in target.members if not self.job.connected(self.id, w)]
            raise UnreachableError(f"round {target.number} did not form in time", apart)
        await self.pause(0.3)

    def _raise_if_void(self, target: RoundRecord) -> None:
        if self.member.is_void(self.view, target.number):
            raise VoidRoundError
        if self.evicted:
            raise EvictedError("removed from the job while forming a round")

    async def destroy(self) -> None:
        if self.meeting is not None:
            self.meeting.break_up()
            self.meeting = None

    def _sever(self) -> None:
        self.severed = True
        if self.meeting is not None and not self.member.forming:
            self.meeting.break_up()
        self.wake_up()

    # --- waiting ---------------------------------------------------------------------------------------------------------

    def wake_up(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake.set()

    async def pause(self, seconds: float) -> None:
        wake = self.process.sleep(seconds)
        self._wakes.append(wake)
        await wake

    async def until(
        self, found: Callable[[WorkerView], T | None], what: str, timeout_s: float | None = None, probe: Sequence[str] = ()
    ) -> T:
        end = self.kernel.now + timeout_s if timeout_s is not None else float("inf")
        while True:
            if self.evicted:
                raise EvictedError("removed from the job")
            result = found(self.view)
            if result is not None:
                return result
            if self.kernel.now >= end:
                raise TooLateError(what)
            if probe:
                await self.evict_dead(probe)
            await self.pause(min(0.5 if probe else 5.0, end - self.kernel.now))

    # --- records, as in membership.py -------------------------------------------------------------------------------------

    async def _register(self) -> WorkerState:
        etcd, keys, client = self.job.etcd, self.job.keys, self.client
        self.lease_id = await client.request(lambda: etcd.grant(LEASE_S))
        self.process.run(self._keep_alive())
        if await client.get(keys.job) is None:
            job = JobRecord("starting", True, self.job.min_workers, self.job.max_workers, "1", sizes=self.job.sizes)
            await client.txn([absent(keys.job)], [Put(keys.job, encode(job))])
        client.seen = max(client.seen, await client.request(lambda: etcd.revision))
        self.shared, self.view = client.shared()
        is_past_start = self.view.is_past_start
        if not self.view.is_told:
            view = await client.request(lambda: etcd.views[-1])
            is_past_start = bool(view.survivors or view.in_state("standby", "ready"))
        state: WorkerState = "standby" if is_past_start else "starting"
        self._record = WorkerRecord(self.id, f"agent-{self.node}", "host", 1, 0, self.id, 1, state)
        puts = [Put(self.own_key, encode(self._record), self.lease_id), self._put_address()]
        self._created = self._modified = (await client.txn([absent(self.own_key)], puts)).revision
        deadline = self.kernel.now + 10.0
        while self.own_key not in client.copy()[0]:
            if self.kernel.now > deadline:
                raise EvictedError("the record went before it was seen")
            await self.pause(0.5)
        self.registered = True
        self.kernel.log(self.id, "registers", state)
        self._coordinator = Coordinator(keys, self.id, self.lease_id, TIMEOUTS)
        self.process.run(self._membership_thread())
        return state

    def _put_address(self) -> Put:
        where = AddressRecord(self.id, f"agent-{self.node}", "host", self.id, 1)
        return Put(self.job.keys.addresses + self.id, encode(where))

    async def _come_back(self) -> bool:
        """As `OwnRecord._come_back` does."""
        assert self._record is not None
        etcd, client = self.job.etcd, self.client
        if await client.request(lambda: etcd.refresh(self.lease_id, LEASE_S)):
            return False
        entry = await client.get(self.job.keys.round)
        if entry is not None:
            is_member = self.id in decode(RoundRecord, entry.value, entry.key).members
            if not is_member and self._record.state not in ("standby", "ready"):
                return False
        lease_id = await client.request(lambda: etcd.grant(LEASE_S))
        is_newest = modified(self.job.keys.round) == (entry.mod_revision if entry else 0)
        puts = [Put(self.own_key, encode(self._record), lease_id), self._put_address()]
        made = await client.txn([absent(self.own_key), is_newest], puts)
        if not made.succeeded:
            return False
        self.kernel.log(self.id, "has registered again")
        self.lease_id, self._lease_lost = lease_id, False
        self.process.run(self._keep_alive())
        self._created = self._modified = made.revision
        self._coordinator.came_back(lease_id, self._clock)
        return True

    @property
    def _clock(self) -> float:
        return self.clock_start + self.kernel.now * self.clock_rate

    async def _lock(self) -> None:
        while self._is_locked:
            wake = Wake()
            self._waiting_for_lock.append(wake)
            await wake
        self._is_locked = True

    def _unlock(self) -> None:
        self._is_locked = False
        waiting, self._waiting_for_lock = self._waiting_for_lock, []
        for wake in waiting:
            wake.set()

    async def write(
        self, state: WorkerState, number: int, fingerprint: str | None = None, unreachable: Sequence[str] = ()
    ) -> None:
        await self._lock()
        try:
            await self._write(state, number, unreachable)
        finally:
            self._unlock()

    async def _write(self, state: WorkerState, number: int, unreachable: Sequence[str]) -> None:
        while True:
            if self._record is None or self.evicted:
                raise EvictedError("the record is gone")
            record = dataclasses.replace(self._record, state=state, round_number=number, unreachable=list(unreachable))
            put = Put(self.own_key, encode(record), self.lease_id)
            try:
                try:
                    done = await self.client.txn([modified(self.own_key) == self._modified], [put])
                except LeaseLostError:
                    done = Txn(False, 0, [])
                entry = None if done.succeeded else await self.client.get(self.own_key)
                if done.succeeded:
                    self._modified = done.revision
                elif entry is not None and entry.create_revision == self._created:
                    self._modified = entry.mod_revision
                    continue
                elif await self._come_back():
                    continue
                else:
                    self.evicted = True
                    raise EvictedError("the record is gone")
            except EtcdUnavailableError:
                continue
            self._record = record
            self.kernel.log(self.id, "is", state, number, *unreachable)
            return

    async def _keep_alive(self) -> None:
        pause_s = LEASE_S / 3
        while True:
            await self.process.sleep(pause_s)
            try:
                if not await self.client.request(lambda: self.job.etcd.refresh(self.lease_id, LEASE_S), 1.0):
                    self._dirty = self._lease_lost = True
                    self._changed.set()
                    return
                pause_s = LEASE_S / 3
            except EtcdUnavailableError:
                pause_s = 0.05

    _lease_lost = False

    def _on_mirror(self) -> None:
        self._dirty = True
        if not self.process.stopped:
            self._changed.set()

    async def _membership_thread(self) -> None:
        while True:
            if not self._dirty:
                self._changed = self.process.sleep(TICK_S)
                await self._changed
            try:
                await self._refresh()
                await self._see_that_the_next_rank_lives()
                await self._coordinate()
            except EtcdError:
                pass  # etcd is unavailable

    async def _refresh(self) -> None:
        self._dirty = False
        self.shared, self.view = self.client.shared()
        self.decided_at = self.client.seen
        if self.registered and not self.evicted and (self.own_key not in self.client.copy()[0] or self._lease_lost):
            await self._lock()
            try:
                if self.registered and not self.evicted and await self.client.get(self.own_key) is None:
                    self.evicted = not await self._come_back()
            finally:
                self._unlock()
            if self.evicted:
                self.kernel.log(self.id, "notices that its record is gone")
        self.wake_up()
        self._on_view()

    def _on_view(self) -> None:
        number = self.member.number
        if number == 0:
            return
        self.member.note(self.view)
        if self.member.must_cut_off(self.view, number, self.member.forming, self.evicted) and not self.severed:
            self.kernel.log(self.id, "cuts off round", number)
            self._sever()

    async def _see_that_the_next_rank_lives(self) -> None:
        formation = self.member.formation
        if formation is not None and not self.member.forming and formation.size > 1:
            await self.evict_dead([formation.round.members[(formation.rank + 1) % formation.size]])

    async def _coordinate(self) -> None:
        if not self.registered or self.evicted:
            return
        if not self.client.healthy:
            self._coordinator.was_cut_off(self._clock)
        if not self._coordinator.is_in_office(self.shared):
            self.overview_since = 0
            write = self._coordinator.candidacy(self.shared, await self._is_vacant())
        else:
            if not self.overview_since:
                self.overview_since = await self.client.request(lambda: self.job.etcd.revision)
            if self.client.seen < self.overview_since:
                return
            entries, view = self.client.copy()
            self.job.checks.coordinates(self, entries, view)
            self._coordinator.note_answers({w: self._answer(w) for w in view.missing})
            write = self._coordinator.next_write(entries, view, self._clock)
        if write is None:
            return
        if write.round is not None:
            self.job.checks.decided(self, view, write.round)
        done = await self.client.txn(write.compare, write.ops)
        if done.succeeded:
            deadline = self.kernel.now + 5.0
            while write.may_succeed(self.client.copy()[0]) and self.kernel.now < deadline:
                await self.pause(0.5)

    async def _is_vacant(self) -> bool:
        election = self.shared.get(self.job.keys.coordinator)
        if election is None or self.kernel.now < self._vacancy_checked_at + VACANCY_S:
            return False
        self._vacancy_checked_at = self.kernel.now
        return await self.client.get(self.job.keys.workers + election.value.decode()) is None

    async def out_of_reach(self, workers: Sequence[str]) -> list[str]:
        return [w for w in workers if w in self.job.workers and not self.job.connected(self.id, w)]

    def _knock(self, workers: list[str]) -> dict[str, Answer]:
        return {w: self._answer(w) for w in workers if w not in self.view.lost}

    def _answer(self, worker_id: str) -> Answer:
        """The response of a worker's port, which a stopped process gives, too."""
        if self.job.refuses(self.id, worker_id):
            return "refuses"
        worker = self.job.workers.get(worker_id)
        return "accepts" if worker is not None and worker.process.alive and self.job.connected(self.id, worker_id) else "silent"

    async def evict_dead(self, suspects: Sequence[str]) -> None:
        members = self.view.round.members if self.view.round is not None else []
        # As in a large world: each worker probes those after it until one answers.
        for worker_id in dead_beside(self.id, suspects, members, self._knock):
            try:
                key = self.job.keys.workers + worker_id
                record = self._known.pop(worker_id, None) or await self.client.get(key)
                if record is None:
                    continue
                for write in eviction(record, await self.client.get(self.job.keys.coordinator), self.job.keys):
                    self.kernel.log(self.id, "evicts", worker_id)
                    await self.client.txn(write.compare, write.ops)
            except EtcdUnavailableError:
                return  # the dead stay dead, so the next probe or the lease suffices
