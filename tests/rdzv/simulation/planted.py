"""Bugs that the simulation must find: each replaces a small piece of the code under test.

Each bug names the invariant that shows it, and a first seed shortly before it is found. From seed 0, rare ones take some
hundred runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lightning_dlrover.rdzv.etcd.types import KeyValue, Put, exists
from lightning_dlrover.rdzv.job.records import RoundRecord, encode
from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.rdzv.membership import coordinator as coordinator_module
from lightning_dlrover.rdzv.membership import rounds as rounds_module
from lightning_dlrover.rdzv.membership.coordinator import Coordinator, Write
from lightning_dlrover.rdzv.membership.member import Member
from lightning_dlrover.rdzv.membership.rounds import JobView, RoundTimeouts, WorkerView

from . import process as process_module
from .etcd import Client, Etcd
from .process import Worker

Patch = contextlib.AbstractContextManager[Any]
BUGS: dict[str, Bug] = {}


@dataclass(frozen=True)
class Bug:
    plant: Callable[[], list[Patch]]
    invariant: str
    near: int  # seed from which the bug is found soon


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in BUGS[name].plant():
            stack.enter_context(patch)
        yield


def bug(name: str, invariant: str, near: int = 0) -> Callable[[Callable[[], list[Patch]]], None]:
    def keep(plant: Callable[[], list[Patch]]) -> None:
        BUGS[name] = Bug(plant, invariant, near)

    return keep


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Patch an attribute: `make` receives the current value and returns the replacement."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _timeouts(**changes: float) -> Patch:
    return mock.patch.object(process_module, "TIMEOUTS", dataclasses.replace(process_module.TIMEOUTS, **changes))  # type: ignore[arg-type]


def _awaiting(may_return: Callable[[JobView, Mapping[str, Any]], list[str]]) -> Patch:
    return mock.patch.object(coordinator_module, "may_return", may_return)


def _changed_round(function: str, change: Callable[[JobView, RoundRecord], RoundRecord]) -> Patch:
    """Change each round that a function of `rounds.py` returns."""

    def make(original: Any) -> Any:
        def decide(view: JobView, *args: Any, **kwargs: Any) -> RoundRecord | None:
            round_: RoundRecord | None = original(view, *args, **kwargs)
            return change(view, round_) if round_ is not None else None

        return decide

    return _replace(rounds_module, function, make)


def _changed_view(function: str, **changes: Any) -> Patch:
    """Let a function of `rounds.py` see another view."""

    def make(original: Any) -> Any:
        return lambda view, *rest: original(dataclasses.replace(view, **changes), *rest)

    return _replace(rounds_module, function, make)


def _view_property(name: str, found: Callable[[JobView], Any]) -> Patch:
    return mock.patch.object(JobView, name, property(found))


# --- the coordinator -------------------------------------------------------------------------------------------------------


def _changed_write(change: Callable[[Coordinator, Mapping[str, KeyValue], JobView, Write], Write]) -> Patch:
    def make(original: Any) -> Any:
        def next_write(self: Coordinator, entries: Any, view: JobView, *rest: Any) -> Write | None:
            write: Write | None = original(self, entries, view, *rest)
            return write if write is None or write.round is None else change(self, entries, view, write)

        return next_write

    return _replace(Coordinator, "next_write", make)


@bug("fence removed", "one-number")
def _() -> list[Patch]:
    """A round has no guard: neither the election nor its predecessor is compared."""
    return [_changed_write(lambda self, entries, view, write: dataclasses.replace(write, compare=()))]


@bug("fence without the election", "fence", near=270)
def _() -> list[Patch]:
    """Only the previous round is compared, so any worker that believes it is in office may write."""
    return [_changed_write(lambda self, entries, view, write: dataclasses.replace(write, compare=write.compare[1:]))]


@bug("round not guarded", "one-number")
def _() -> list[Patch]:
    """The election is compared, the previous round is not: after a lost answer a number occurs twice."""
    return [_changed_write(lambda self, entries, view, write: dataclasses.replace(write, compare=write.compare[:1]))]


@bug("election key without lease", "progress")
def _() -> list[Patch]:
    """A coordinator that vanished stays in office for ever, because no worker unseats it either."""

    def candidacy(self: Coordinator, entries: Any, is_vacant: bool = False) -> Write | None:
        write: Write | None = original(self, entries)
        if write is None:
            return None
        (put,) = write.ops
        assert isinstance(put, Put)
        return dataclasses.replace(write, ops=(dataclasses.replace(put, lease_id=0),))

    original = Coordinator.candidacy
    return [mock.patch.object(Coordinator, "candidacy", candidacy)]


@bug("the others are not told", "told")
def _() -> list[Patch]:
    """The coordinator writes a notice only together with a round."""

    def make(original: Any) -> Any:
        def next_write(self: Coordinator, *args: Any) -> Write | None:
            write: Write | None = original(self, *args)
            return None if write is not None and write.purpose == "notice" else write

        return next_write

    return [_replace(Coordinator, "next_write", make)]


@bug("a lost office is not noticed", "fence", near=11600)
def _() -> list[Patch]:
    """Once elected, a worker coordinates regardless of the election key, under the fence of the current holder."""

    def make(original: Any) -> Any:
        def next_write(self: Coordinator, entries: Any, view: JobView, *rest: Any) -> Write | None:
            election = entries.get(self._keys.coordinator)
            if election is not None and election.value == self._worker_id.encode():
                self._was_elected = True  # type: ignore[attr-defined]
            elif election is not None and getattr(self, "_was_elected", False):
                entries = {**entries, election.key: dataclasses.replace(election, value=self._worker_id.encode())}
            write: Write | None = original(self, entries, view, *rest)
            return write

        return next_write

    return [_replace(Coordinator, "next_write", make)]


@bug("an unknown outcome is taken for a failure", "one-number", near=830)
def _() -> list[Patch]:
    """A write without an answer is repeated with the next number, over any existing round."""

    def change(self: Coordinator, entries: Mapping[str, KeyValue], view: JobView, write: Write) -> Write:
        assert write.round is not None
        tried = getattr(self, "_tried", 0)
        self._tried = max(tried, write.round.number)  # type: ignore[attr-defined]
        if tried < write.round.number:
            return write
        again = dataclasses.replace(write.round, number=tried + 1)
        return dataclasses.replace(write, round=again, ops=(Put(self._keys.round, encode(again)),))

    return [_changed_write(change)]


@bug("a number is skipped after a loss", "one-number")
def _() -> list[Patch]:
    def skip(view: JobView, round_: RoundRecord) -> RoundRecord:
        return dataclasses.replace(round_, number=round_.number + (round_.kind == "loss"))

    return [_changed_round("_round", skip)]


@bug("patience ignored", "patience")
def _() -> list[Patch]:
    """A member that has not answered yet is left out at once."""
    return [_timeouts(regroup_s=0.0)]


@bug("the end of a lease is taken for death", "return")
def _() -> list[Patch]:
    """A member that was cut off from etcd for a moment is left out at once, though its port accepts connections."""
    return [_awaiting(lambda view, answers: [] if view.holders else rounds_module.may_return(view, answers))]


@bug("a job starts over before its members could return", "return")
def _() -> list[Patch]:
    """Members that were all cut off, and hold the state, are given up for a spare that was not."""
    return [_awaiting(lambda view, answers: rounds_module.may_return(view, answers) if view.holders else [])]


@bug("a job starts over without members that cannot be reached", "return")
def _() -> list[Patch]:
    """Only members whose ports accept connections are awaited, though no other has the state."""
    return [_awaiting(lambda view, answers: [w for w in view.missing if answers.get(w, "accepts") == "accepts"])]


@bug("one wait counts towards the next", "patience", near=90)
def _() -> list[Patch]:
    """The waiting time is counted from the job's first wait of all."""

    def make(original: Any) -> Any:
        def next_write(self: Coordinator, entries: Any, view: JobView, now_s: float, *rest: Any) -> Write | None:
            first = self.__dict__.setdefault("_first", now_s)

            def impatient(view: JobView, waited_s: float, timeouts: RoundTimeouts) -> RoundRecord | None:
                return next_round(view, now_s - first, timeouts)

            with mock.patch.object(coordinator_module, "next_round", impatient):
                write: Write | None = original(self, entries, view, now_s, *rest)
            return write

        return next_write

    next_round = rounds_module.next_round
    return [_replace(Coordinator, "next_write", make)]


@bug("patience never ends", "patience", near=130)
def _() -> list[Patch]:
    """A survivor with a valid lease that does not answer is awaited without end."""

    def make(original: Any) -> Any:
        return lambda view, waited_s, timeouts: original(view, 0.0, timeouts)

    return [_replace(coordinator_module, "next_round", make)]


# --- members of a round -------------------------------------------------------------------------------------------------------


@bug("a joiner counts as a holder", "progress")
def _() -> list[Patch]:
    """A worker that reported that it did not receive the state is treated as an owner of it."""
    return [_view_property("arriving", lambda view: []), _view_property("stepped_back", lambda view: [])]


@bug("a worker that is not ready is admitted", "members")
def _() -> list[Patch]:
    """A worker that still builds its model is admitted to a round."""

    def make(original: Any) -> Any:
        return lambda self, *states: original(self, *states, *(["standby"] if states == ("ready",) else []))

    return [_replace(JobView, "in_state", make)]


@bug("drain ignored", "progress")
def _() -> list[Patch]:
    return [_changed_view("_planned", drains=frozenset())]


@bug("dismissals ignored", "dismissed", near=0)
def _() -> list[Patch]:
    """Workers that were sent away after a failed step come along when the others make it again."""
    return [_changed_view("_after_failure", dismissals={})]


@bug("cap ignored", "cap")
def _() -> list[Patch]:
    def make(original: Any) -> Any:
        def planned_round(view: JobView, *rest: Any) -> RoundRecord | None:
            with mock.patch.object(JobView, "cap", 99):
                round_: RoundRecord | None = original(view, *rest)
            return round_

        return planned_round

    return [_replace(rounds_module, "_planned", make)]


@bug("joiners come first", "rank-order")
def _() -> list[Patch]:
    def reorder(view: JobView, round_: RoundRecord) -> RoundRecord:
        is_growth = round_.kind == "grow"
        return dataclasses.replace(round_, members=sorted(round_.members, key=lambda w: is_growth and w in view.members))

    return [_changed_round("_planned", reorder)]


@bug("joiners do not wait for a size", "sizes")
def _() -> list[Patch]:
    """A planned round takes each joiner as it comes, whatever the sizes that may be requested."""
    return [mock.patch.object(WorldSizes, "lists", return_value=True)]


@bug("a retry forgets somebody", "patience")
def _() -> list[Patch]:
    """A living member of the round is left out of the retry, possibly the one that has the state."""

    def forget(view: JobView, round_: RoundRecord) -> RoundRecord:
        is_retry = round_.kind == "retry" and len(round_.members) > 1
        return dataclasses.replace(round_, members=round_.members[is_retry:])

    return [_changed_round("_after_failure", forget)]


@bug("ready before state", "patience")
def _() -> list[Patch]:
    """When joiners step back without the state, the job continues with them instead of with the owners of the state."""

    def start(view: JobView, round_: RoundRecord) -> RoundRecord:
        return dataclasses.replace(round_, members=view.stepped_back, kind="start") if view.stepped_back else round_

    return [_changed_round("_after_failure", start)]


@bug("a network that fell into two is not noticed", "patience", near=480)
def _() -> list[Patch]:
    """Members that do not reach each other retry for ever, and so do members that were left out."""
    return [_timeouts(apart_attempts=10**9)]


# --- a worker's own side ------------------------------------------------------------------------------------------------------


@bug("lease ignored", "progress")
def _() -> list[Patch]:
    """Leases never expire: dead members with a port that no peer can reach stay members."""
    return [mock.patch.object(Etcd, "_expire")]


@bug("the evicted continue", "progress")
def _() -> list[Patch]:
    """A worker does not check whether its record still exists."""

    def make(original: Any) -> Any:
        async def refresh(self: Worker) -> None:
            await original(self)
            self.evicted = False

        return refresh

    return [_replace(Worker, "_refresh", make)]


@bug("stale round accepted", "progress", near=60)
def _() -> list[Patch]:
    """A worker that meets the others again takes the failed round for the next one."""

    def make(original: Any) -> Any:
        async def next_after(self: Member, broken: RoundRecord, *args: Any) -> RoundRecord:
            await self._backend.write("reforming", broken.number)  # The real member does so before it looks for the next round.
            older = dataclasses.replace(broken, number=broken.number - 1)
            return await original(self, older, *args)  # type: ignore[no-any-return]

        return next_after

    return [_replace(Member, "_next_after", make)]


@bug("a void round is not noticed", "given-up", near=1200)
def _() -> list[Patch]:
    """Members that form a round, or have formed it, do not see that another member gave it up."""

    def is_void(self: Member, view: WorkerView, number: int) -> bool:
        return view.round is not None and view.round.number > number

    return [mock.patch.object(Member, "is_void", is_void)]


@bug("the end of a round is not noticed", "no-ghosts")
def _() -> list[Patch]:
    """A group is severed neither when its round has ended nor when its worker was removed."""
    return [mock.patch.object(Member, "must_cut_off", return_value=False)]


@bug("a late repetition brings an old state back", "progress", near=590)
def _() -> list[Patch]:
    """A worker's record is written over any existing one, also by a late attempt."""

    def make(original: Any) -> Any:
        async def txn(self: Client, compare: Any, ops: Any) -> Any:
            own = self.etcd.keys.workers + self.name
            if any(isinstance(op, Put) and op.key == own for op in ops):
                compare = [exists(own)] if own in self.etcd.entries else []
            return await original(self, compare, ops)

        return txn

    return [_replace(Client, "txn", make)]
