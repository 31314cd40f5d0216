"""The worker's side of the membership protocol.

`Member` decides when its worker enters a round, gives one up, regroups with its peers, waits, leaves, or must stop because the
others continued without it. Its `MemberBackend` forms and severs process groups and transports the records. The methods are
coroutines so that the same code runs in two places. In a process each await blocks until it is done (`run_blocking`). In the
simulation of tests/rdzv/simulation an await lets time pass for all workers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lightning_dlrover.rdzv.job.records import RoundRecord, WorkerState
from lightning_dlrover.rdzv.membership.rounds import WorkerView

T = TypeVar("T")

EXIT_ALL_DRAINED = 143  # exit code after the job was stopped before it was done, the same as of a process ended by SIGTERM
REACH_AGAIN_S = 5.0  # seconds between two attempts of a joiner to reach a member that it is cut off from


class MembershipError(RuntimeError):
    """The worker cannot take part in the job.

    Example:
        >>> from lightning_dlrover.rdzv import EvictedError, JobClosedError
        >>> [issubclass(error, MembershipError) for error in (EvictedError, JobClosedError)]
        [True, True]
    """


class EvictedError(MembershipError):
    """The job continues without this worker: its record is gone, or a round left it out.

    Example:
        >>> def explain(error):
        ...     return "start a new worker" if isinstance(error, EvictedError) else "look into the log"
        >>> explain(EvictedError("round 7 has no worker-b"))
        'start a new worker'
    """


class WorldError(RuntimeError):
    """The job's workers could not be brought together.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> from lightning_dlrover.rdzv import World
        >>> with mock.patch.dict(os.environ, WORLD_SIZE="2"):  # another launcher has started two workers
        ...     World.from_environment()
        Traceback (most recent call last):
        lightning_dlrover.rdzv.membership.member.WorldError: this worker is one of 2 (WORLD_SIZE), started without ...
    """


class LeftOutError(WorldError):
    """The round continues without this worker, which was drained or not needed.

    Example:
        >>> from lightning_dlrover.rdzv.job.records import RoundRecord
        >>> error = LeftOutError(RoundRecord(3, ["worker-a"], "worker-b was drained", "shrink", planned=True))
        >>> str(error), error.exit_code
        ('round 3 continues without this worker: worker-b was drained', 0)
    """

    def __init__(self, round_: RoundRecord) -> None:
        super().__init__(f"round {round_.number} continues without this worker: {round_.reason}")
        self.round = round_

    @property
    def exit_code(self) -> int:
        """Exit code for the worker's process: 0, unless the whole job was stopped before it was done."""
        return EXIT_ALL_DRAINED if self.round.kind == "stop" and self.round.number else 0


class UnreachableError(WorldError):
    """A round did not form because this worker could not reach other members, without evidence that they are gone."""

    def __init__(self, text: str, workers: Sequence[str]) -> None:
        super().__init__(text)
        self.workers = list(workers)


class RoundEndedError(WorldError):
    """The round ended while a further group was being connected. Recoverable."""


class TooLateError(WorldError):
    """A wait timed out."""


class VoidRoundError(Exception):
    """A newer round exists, or a member has given up on this one: it will never be complete."""


class CannotMeetError(Exception):
    """The members of a round are at places in the script that do not allow them to continue together."""


@dataclass(frozen=True)
class Formation:
    """A round with its process group in place.

    Example:
        >>> from lightning_dlrover.rdzv.job.records import RoundRecord
        >>> round_ = RoundRecord(2, ["worker-a", "worker-b"], "worker-b joined", "grow", planned=True)
        >>> formation = Formation(round_, hellos={}, rank=0)
        >>> formation.size, formation.rank_of("worker-b")
        (2, 1)
    """

    round: RoundRecord
    hellos: Mapping[str, bytes]  # hello of every member, by worker id
    rank: int

    @property
    def size(self) -> int:
        return len(self.round.members)

    def rank_of(self, worker_id: str) -> int:
        return self.round.members.index(worker_id)

    @property
    def workers_by_host(self) -> Mapping[int, int]:
        """Number of workers on each host, by the host's number in the round."""
        return Counter(self.round.hosts or [0])

    @property
    def num_workers_here(self) -> int:
        """Number of workers on this worker's host."""
        return self.workers_by_host[self.round.hosts[self.rank] if self.round.hosts else 0]


class HasFormation(Protocol):
    """A worker with its newest round."""

    @property
    def formation(self) -> Formation | None:
        """The round that this worker formed last."""


class MemberBackend(Protocol):
    """Operations that a member needs from its process."""

    @property
    def worker_id(self) -> str: ...

    @property
    def view(self) -> WorkerView:
        """This worker's view of the job."""

    async def until(
        self, found: Callable[[WorkerView], T | None], what: str, timeout_s: float | None = None, probe: Sequence[str] = ()
    ) -> T:
        """Return `found` of the view as soon as it is not None. Until then, remove the dead among `probe`.

        Raises:
            TooLateError: the wait for `what` timed out.
            EvictedError: this worker's record is gone.
        """

    async def write(
        self, state: WorkerState, number: int, fingerprint: str | None = None, unreachable: Sequence[str] = ()
    ) -> None:
        """Write this worker's record, retrying while etcd is unavailable; raises `EvictedError` if the record is gone."""

    async def evict_dead(self, workers: Sequence[str]) -> None:
        """Remove the records of workers that are certainly dead."""

    async def out_of_reach(self, workers: Sequence[str]) -> list[str]:
        """Return the workers that neither accept nor refuse a connection from here."""

    async def form(self, target: RoundRecord, hello: bytes) -> Formation:
        """Form the process group of a round that this worker is a member of.

        Raises:
            VoidRoundError, CannotMeetError, UnreachableError, RuntimeError: it did not form.
            EvictedError: this worker's record is gone.
        """

    async def destroy(self) -> None:
        """Leave the process group, if any."""


class Member:
    """One worker's path through the rounds.

    Two threads use it. The worker's own thread runs the coroutines, and the membership thread calls `must_cut_off` and `note`.
    Only the worker's thread changes the fields `number` and `forming`.
    """

    def __init__(self, backend: MemberBackend) -> None:
        self.formation: Formation | None = None
        self.number = 0  # round that is formed or being formed
        self.forming = False
        self.admitting = False  # waits at the training loop's entrance, without the job's state
        self.dismissed = False  # a planned round continues without this worker
        self._backend = backend
        self._fingerprint = ""

    @property
    def worker_id(self) -> str:
        return self._backend.worker_id

    # --- entering and leaving ----------------------------------------------------------------------------------------

    async def start(self, state: WorkerState) -> Formation | None:
        """Enter the job, registered as `state`. Return the first round, or None if others train and this worker joins later."""
        if state != "starting":
            return None

        def look(view: WorkerView) -> RoundRecord | str | None:
            if view.round is not None and self.worker_id in view.round.members:
                return view.round
            if self.worker_id in view.drains:
                raise LeftOutError(RoundRecord(0, [], "asked to leave before the first round", "stop", planned=True))
            return "standby" if view.is_past_start else None

        found = await self._backend.until(look, "the first round")
        if isinstance(found, RoundRecord):
            return await self._enter(found, b"")
        await self._backend.write("standby", 0)
        return None

    async def admit(self, hello: bytes, fingerprint: str) -> Formation:
        """Wait until a round admits this worker; raises `LeftOutError` when none will."""
        await self._backend.destroy()
        self.admitting = True
        self.formation = None
        self._fingerprint = fingerprint
        return await self._enter(await self._await_admission(), hello)

    async def switch(self, number: int, hello: bytes) -> Formation:
        """Form round `number`, agreed on by all members of the current one, or a newer one that replaced it."""
        target = await self._backend.until(
            lambda view: view.round if view.round and view.round.number >= number else None, f"round {number}"
        )
        await self._backend.destroy()
        return await self._enter(target, hello)

    async def regroup(self, hello: bytes) -> Formation:
        """Form the next round with the survivors; an empty `hello` means that this worker lacks the job's state."""
        assert self.formation is not None
        broken = self.formation.round
        self.admitting = not hello
        await self._backend.destroy()
        return await self._enter(await self._next_after(broken), hello)

    async def _await_admission(self) -> RoundRecord:
        def look(view: WorkerView) -> RoundRecord | None:
            if view.round is not None and self.worker_id in view.round.members and view.round.number > self.number:
                return view.round
            if (view.job is not None and view.job.phase in ("finished", "failed")) or self.worker_id in view.drains:
                raise LeftOutError(view.round or RoundRecord(0, [], "the job ended", "stop", planned=True))
            return None

        while True:
            round_ = self._backend.view.round
            cut_off = await self._backend.out_of_reach(round_.members if round_ else [])
            await self._backend.write("ready", self.number, self._fingerprint, cut_off)
            # A spare may wait as long as the job runs.
            patience_s = REACH_AGAIN_S if cut_off else float("inf")
            with contextlib.suppress(TooLateError):
                return await self._backend.until(look, "a round that needs this worker", patience_s)

    async def _enter(self, target: RoundRecord, hello: bytes) -> Formation:
        while True:
            if self.worker_id not in target.members and self.admitting:
                target = await self._await_admission()
            if self.worker_id not in target.members:
                if _sends_away(target) or self.dismissed or self.worker_id in self._backend.view.drains:
                    # The round that was planned without this worker may have been followed by one after a loss.
                    raise LeftOutError(target)
                raise EvictedError(f"round {target.number} continues without worker {self.worker_id}: {target.reason}")
            unreachable: list[str] = []
            try:
                formation = await self._backend.form(target, hello)
            except EvictedError:
                raise
            except (VoidRoundError, CannotMeetError, RuntimeError) as error:
                if isinstance(error, UnreachableError):
                    unreachable = error.workers
            else:
                self.formation = formation
                self.admitting = False
                await self._backend.write("active", target.number)
                return formation
            await self._backend.destroy()
            target = await self._next_after(target, unreachable)

    async def _next_after(self, broken: RoundRecord, unreachable: Sequence[str] = ()) -> RoundRecord:
        # A worker that left the job hands over its tables to this round. If it dies, it may have been the coordinator.
        suspects = list(dict.fromkeys([*broken.members, *self._backend.view.leavers]))
        newest = self._backend.view.round
        if newest is None or newest.number <= broken.number:  # else a coordinator has seen the outcome of the round
            await self._backend.evict_dead(suspects)
            if self.worker_id in broken.members:
                await self._backend.write("ready" if self.admitting else "reforming", broken.number, unreachable=unreachable)

        def look(view: WorkerView) -> RoundRecord | None:
            if view.job is not None and view.job.is_over:
                if self.admitting or view.job.phase == "finished":
                    # The others ended before the switch that was to admit this worker, or made the last step although this
                    # worker lost a peer in it. Nothing remains to be done.
                    raise LeftOutError(RoundRecord(0, [], f"the job has {view.job.phase}", "stop", planned=True))
                raise WorldError(f"round {broken.number} broke after the job has {view.job.phase}: no other will be formed")
            if view.round and view.round.number > broken.number:
                return view.round
            # Workers that have not answered are not counted: they may be as dead as the one that was lost.
            others = [w for w in view.keepers if w != self.worker_id]
            if self.worker_id in view.drains and others and view.lacks_workers:
                # Some workers, such as those that this worker's agent starts, come only after it has ended. The others keep
                # the state.
                reason = f"this worker leaves, while {', '.join(others)} wait for more workers"
                raise LeftOutError(RoundRecord(broken.number, others, reason, "shrink", planned=True))
            return None

        # A peer may die, or close its port, a moment after the collective failed.
        return await self._backend.until(look, f"the round after round {broken.number}", probe=suspects)

    # --- while a round is formed or lasts ------------------------------------------------------------------------------

    def is_void(self, view: WorkerView, number: int) -> bool:
        """Whether a newer round than `number` exists, or another member has given up `number`."""
        newest = view.round
        if newest is None or newest.number < number:
            return False
        return newest.number > number or any(w != self.worker_id for w in view.given_up)

    def will_never_form(self, view: WorkerView, number: int) -> bool:
        """Whether waiting for round `number` is useless: it is void, or members have ended with the job."""
        is_over = view.job is not None and view.job.is_over
        return self.is_void(view, number) or (is_over and bool(view.lost))

    def note(self, view: WorkerView) -> None:
        """Record facts that a later view may not show any more."""
        newest = view.round
        if newest is not None and 0 < self.number < newest.number:
            self.dismissed = self.worker_id not in newest.members and (_sends_away(newest) or self.dismissed)

    def must_cut_off(self, view: WorkerView, number: int, forming: bool, evicted: bool) -> bool:
        """Whether the group of round `number` cannot complete any more collectives, so that no thread may wait for one.

        The round has ended without an agreement, another member has given it up, or the others continue without this worker.
        """
        newest = view.round
        if newest is None or number == 0:
            return False
        # A group that is up stays until its members agree on a planned round.
        is_over = self.is_void(view, number) and (forming or newest.number == number or not newest.planned)
        return is_over or evicted


def _sends_away(round_: RoundRecord) -> bool:
    """Whether former members that a round leaves out have left the job. A start takes those that it leaves out for dead."""
    return (round_.planned and round_.kind != "start") or round_.kind == "undo"


def run_blocking(course: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine in which every await blocks until it is done."""
    try:
        course.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    course.close()
    raise AssertionError("a step of a member's course was left waiting for an event loop")
