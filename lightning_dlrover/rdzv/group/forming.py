"""Form a round's process groups: detect dead and unreachable members, reach the round's store, connect the rest.

`Forming` makes one attempt to form a round. Deciding on the next round is the coordinator's task (`rdzv/membership`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.desync import CollectiveMonitor, Program
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.membership.member import (
    CannotMeetError,
    EvictedError,
    Formation,
    Member,
    RoundEndedError,
    UnreachableError,
    VoidRoundError,
)
from lightning_dlrover.rdzv.membership.membership import Membership
from lightning_dlrover.rdzv.membership.rounds import Answer, answers, dead_beside, silent_workers
from lightning_dlrover.rdzv.transport import torch_names, transfer
from lightning_dlrover.rdzv.transport.process_groups import (
    CommunicatorError,
    Communicators,
    GroupStuckError,
    RoundEnd,
    RoundSockets,
    has_gloo_for_cpu,
    inet_sockets,
    slow_to_connect,
    traits_of,
)
from lightning_dlrover.rdzv.transport.torch_names import PrefixStore, Store, TCPStore
from lightning_dlrover.rdzv.transport.waits import RoundGroups, Tree, edges, join_tree

# Each member writes its hello and counts itself. The one that is counted last writes the list of all hellos, and the others
# only wait for that list. If every member read every hello, the store would serve as many requests as members, squared.

LIST = "hellos"
COUNT = "num_hellos"


def publish_hello(store: Store, members: Sequence[str], me: str, hello: bytes) -> None:
    """Write this worker's hello, and the list of all if it is the last. Call it once in a round.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    store.set(_key(me), hello.decode())
    if store.add(COUNT, 1) == len(members):
        texts = [found.decode() for found in store.multi_get([_key(w) for w in members])]
        store.set(LIST, json.dumps(dict(zip(members, texts, strict=True))))


def await_hellos(store: Store, members: Sequence[str], timeout_s: float) -> dict[str, bytes]:
    """Wait until all members have written theirs, and return them.

    Raises:
        RuntimeError: the store cannot be reached, or `timeout_s` are over.
        ValueError: the list cannot be read; another program may write into the round's store.
    """
    store.wait([LIST], timedelta(seconds=timeout_s))
    texts = json.loads(store.get(LIST))
    if not isinstance(texts, dict) or set(texts) != set(members):
        raise ValueError(f"the list of hellos names {len(texts)} other workers than the round's {len(members)} members")
    return {worker: str(texts[worker]).encode() for worker in members}


def missing_hellos(store: Store, members: Sequence[str]) -> list[str]:
    """Return the members without a hello, for an error message: one request for each of them."""
    return [w for w in members if not store.check([_key(w)])]


def _key(worker_id: str) -> str:
    return f"hello/{worker_id}"


log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.3  # minimum seconds between two probes of more than `FEW` workers
CALM_INTERVAL_S = 1.0
"""Seconds between two probes of the next rank's process while a round lasts. Each takes time from both workers' training."""

OUT_OF_REACH_S = 5.0
"""Seconds without a response from another worker, not even a refusal, after which this worker counts as cut off from it."""

FEW = 16  # maximum number of workers that are all probed by each other, and connected before a round begins
DOUBLED_S = 3.0  # seconds of a wait after which a worker wants twice as many answers of others
DEAD_S = 0.3  # seconds to wait for a response of a worker that may be dead


class FailureDetector:
    """Look for dead workers during one wait, at a cost for each worker that does not grow with their number.

    Up to `FEW` workers are all probed every time. Of more, a worker probes those after it in the ring until one answers. The
    number of answers that it wants doubles every few seconds, because another worker may not probe yet, or may not know whether
    a firewall refuses. It probes the less often, so that the number of connections per second stays the same.

    Args:
        workers: the suspects, in an order that all who look for them share.
        interval_s: seconds between two looks at up to `FEW` workers; among more it is `PROBE_INTERVAL_S` or longer.
    """

    def __init__(self, membership: Membership, workers: Sequence[str], interval_s: float) -> None:
        self._membership = membership
        self._workers = workers
        self._interval_s = interval_s if len(workers) <= FEW else PROBE_INTERVAL_S
        self._began = time.monotonic()
        self._next_look = 0.0

    def pause(self) -> FailureDetector:
        """Let the first look wait for one interval, and return the detector."""
        self._next_look = time.monotonic() + self._interval_s
        return self

    def look(self) -> None:
        """Probe the workers and remove the dead, unless the last look was a moment ago."""
        now = time.monotonic()
        if now < self._next_look:
            return
        view, me = self._membership.view, self._membership.worker_id
        num_answers = len(self._workers)
        self._next_look = now + self._interval_s
        if num_answers > FEW:
            num_answers = min(num_answers, 2 ** min(int((now - self._began) / DOUBLED_S), 10))
            self._next_look = now + num_answers * self._interval_s
        probers = set(view.round.members) if view.round is not None else set()
        try:
            if dead := dead_beside(me, self._workers, probers, self._knock, num_answers):
                self._membership.evict(dead)
        except EtcdUnavailableError as error:
            # A dead worker stays dead: the next probe or its lease expiry removes the record.
            log.debug("could not evict the dead: %s", error)

    def _knock(self, workers: list[str]) -> Mapping[str, Answer]:
        return answers(self._membership.whose_refusal_counts(workers), DEAD_S)


class Reachability:
    """Detect members of a round that do not respond while it is formed."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._next_probe = 0.0

    def begin(self) -> None:
        """Restart the timer before connections are made, so that the others have time to respond."""
        self._next_probe = time.monotonic() + OUT_OF_REACH_S

    def raise_if_silent(self, target: RoundRecord, contacts: Sequence[str]) -> None:
        """Raise an error for silent workers within seconds, because the others also wait for the round to form.

        Args:
            contacts: workers that this one has to connect to.
        """
        if time.monotonic() > self._next_probe:
            self._next_probe = time.monotonic() + OUT_OF_REACH_S
            if silent := self.silent(contacts):
                raise UnreachableError(f"round {target.number}: {', '.join(silent)} cannot be reached from here", silent)

    def too_late(self, contacts: Sequence[str], text: str) -> UnreachableError:
        """Return an error that names the unreachable contacts, but not those that are merely late, as in a long validation."""
        return UnreachableError(text, self.silent(contacts))

    def silent(self, members: Sequence[str]) -> list[str]:
        """Return the members that neither accept nor refuse a connection from here."""
        me, lost = self._membership.worker_id, set(self._membership.view.lost)
        records = self._membership.workers.of(w for w in members if w != me and w not in lost)
        return silent_workers(records.values())


class PeerMonitor:
    """The next rank of the round, watched by the membership thread.

    Its death also breaks our collectives, but not while this worker computes or validates. With NCCL it does not break them at
    all by itself.

    Args:
        sockets: connections of the round.
    """

    def __init__(self, membership: Membership, member: Member, sockets: RoundSockets) -> None:
        self._membership = membership
        self._member = member
        self._sockets = sockets
        self._next_probe = 0.0
        self._silent_since: float | None = None  # start of a silence that leaves no other trace, as of a cut cable

    def probe(self) -> None:
        """Check that its process lives and can be reached, unless the last check was a moment ago."""
        formation = self._member.formation
        if formation is None or self._member.forming or formation.size == 1 or time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + CALM_INTERVAL_S
        neighbour = formation.round.members[(formation.rank + 1) % formation.size]
        answer: Answer = "accepts"
        with contextlib.suppress(EtcdUnavailableError):  # see `FailureDetector`
            if neighbour not in self._membership.view.lost:
                answer = answers(self._membership.workers.of([neighbour]).values(), DEAD_S).get(neighbour, answer)
            if answer == "refuses":
                self._membership.evict([neighbour])
        if answer != "silent":
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif time.monotonic() - self._silent_since > OUT_OF_REACH_S:
            # Collectives would wait until their timeout. In the next round both sides report the workers they cannot reach.
            self._silent_since = None
            self._sockets.sever(formation.round.number)


T = TypeVar("T")

CONNECT_TIMEOUT_S = 0.5  # seconds for the first attempt to reach the store of a round
MAX_CONNECT_TIMEOUT_S = 30.0
"""Seconds for an attempt after several that timed out. Each attempt has twice the time of the previous one.

Torch looks up the name of the store's address first, which takes 10 s or more if the name server does not answer.
"""

VOTE_ROOM = 32, 8  # numbers in one message of a vote: a constant part, and a part for each worker of the round
MAX_VOTE_ROOM = 8192
"""Maximum numbers in the first message of a vote: 64 kB, enough for a thousand workers.

Further ones follow in a second message, which does not overlap with a step.
"""

CONNECT_AGAIN_S = 0.02  # seconds between two attempts to reach the store of a round of up to `FEW` workers; longer for more
FORM_PROBE_S = 0.1  # seconds between two looks for dead workers while a round is formed
STORE_MARGIN_S = 10.0  # seconds that the store of a round waits for hellos beyond this worker's own wait
CHECK_S = 0.02
"""Seconds between two checks whether a round of up to `FEW` workers is void while others are awaited; longer for more."""


class ErrorReporter(Protocol):
    """Publishes errors of a worker."""

    def report_error(self, error: BaseException) -> None: ...


@dataclass(frozen=True)
class _Attempt:
    """One attempt to connect to other members of a round."""

    target: RoundRecord
    deadline: float
    check: Callable[[], None]  # raises an error if the round is void


class Forming:
    """Connect one worker to the other members of a round.

    Groups of gloo connect in a moment, after the hellos. `Communicators` of other backends take longer. They connect as soon
    as the round is known, for a planned round while the former one still trains.

    Args:
        device: device of the communicators that connect early; None: they connect at their first collective.
        sockets: sockets of the round, which are shut down if it does not form.
        reporter: publishes an error that ends this worker.
    """

    def __init__(
        self,
        config: WorldConfig,
        backend: str,
        device: torch.device | None,
        can_meet: Callable[[Mapping[str, bytes]], bool],
        membership: Membership,
        member: Member,
        sockets: RoundSockets,
        groups: RoundGroups,
        reach: Reachability,
        reporter: ErrorReporter,
    ) -> None:
        self._config = config
        self._backend = backend
        self._device = device
        self._early = slow_to_connect(backend) if device is not None else {}
        self._reporter = reporter
        self._communicators: Communicators | None = None  # those of the newest known round with this worker
        self._communicators_lock = threading.Lock()
        self._former: RoundEnd | None = None  # end of the groups before
        self._can_meet = can_meet
        self._membership = membership
        self._member = member
        self._sockets = sockets
        self._groups = groups
        self._reach = reach
        self._patience = timedelta(seconds=config.collective_timeout_s)

    def bring_up(self, target: RoundRecord, hello: bytes, program: Program) -> tuple[Formation, CollectiveMonitor | None]:
        """Connect to the other members of a round, and create its default group; see `MemberBackend.form`."""
        me = self._membership.worker_id
        rank = target.members.index(me)
        communicators = self.prepare(target)
        self._sockets.begin_forming(target.number, target.store_port)
        try:
            attempt = self._begin(target, functools.partial(self._raise_if_void, target))
            # Even rank 0 connects to its own server, because a connection can be severed while a thread waits on it.
            store = self._connect(attempt)
            rendezvous = PrefixStore(f"round/{target.number}", store)
            publish_hello(rendezvous, target.members, me, hello)
            hellos = self._await_hellos(attempt, rendezvous)
            # Checked before any member connects: the others would wait for a member that has left again.
            if not self._can_all_meet(target, hellos):
                raise CannotMeetError
            is_large = len(target.members) > FEW
            names = ["gloo", "monitor"] if 1 < len(target.members) <= FEW else ["gloo"]
            stores = [PrefixStore(name, rendezvous) for name in names]
            gloo, *control = self._connect_gloo(attempt, stores, target.members, is_large)
            for group in (gloo, *control):
                self._groups.add(group)
            early = self._await_communicators(attempt, communicators, gloo) if communicators is not None else {}
            self._create_default_group(rank, len(target.members), PrefixStore("group", rendezvous), {"gloo": gloo, **early})
            # The communicators of further groups exchange their addresses through this store, whenever the script creates them.
            store.set_timeout(self._patience)
        except BaseException:
            # Others may have formed the round already. They must detect that this worker has not.
            self._sockets.sever(target.number, quietly=True)
            self._abandon(target)
            raise
        finally:
            self._sockets.end_forming(connects_late=len(target.members) > FEW)
        if self._sockets.are_severed:
            raise VoidRoundError  # the groups are newer than the severing
        # The round may have ended before its sockets were recorded.
        self._sockets.follow(self._membership.view, self._membership.own.evicted)
        formation = Formation(target, hellos, rank)
        if formation.size == 1:
            return formation, None
        monitor = CollectiveMonitor(
            gloo if is_large else control[0],
            rank,
            formation.size,
            min(VOTE_ROOM[0] + VOTE_ROOM[1] * formation.size, MAX_VOTE_ROOM),
            begun=functools.partial(torch_names.num_begun, gloo, *self._other_backends()),
            connect=functools.partial(_connect_briefly, target, f"round/{target.number}/monitor"),
            program=program,
            sever=functools.partial(self._sockets.sever, target.number),
            tree=Tree(gloo, rank, formation.size, self._patience) if is_large else None,
            control=None if has_gloo_for_cpu(self._backend) else transfer.round_group(),
        )
        return formation, monitor

    def _begin(self, target: RoundRecord, check: Callable[[], None]) -> _Attempt:
        self._reach.begin()
        return _Attempt(target, time.monotonic() + self._config.form_timeout_s, check)

    # --- communicators -----------------------------------------------------------------------------------------------------

    def prepare(self, target: RoundRecord) -> Communicators | None:
        """Begin to connect the communicators of a round that this worker is a member of. Called from any thread; never blocks.

        Returns:
            The communicators on their way; None if the round needs none.
        """
        if not self._early or len(target.members) == 1:
            self.abandon()  # those of a round that this one has replaced
            return None
        with self._communicators_lock:
            former = self._communicators
            if former is not None and former.round.number == target.number:
                return former
            if former is not None:
                former.abandon()
            return self._begin_to_connect(target, "communicators")

    def _begin_to_connect(self, target: RoundRecord, folder: str) -> Communicators:
        assert self._device is not None
        self._communicators = Communicators(
            target,
            target.members.index(self._membership.worker_id),
            self._device,
            self._early,
            functools.partial(self._store_for_communicators, target, folder),
            self._former,
            self._patience,
        )
        watch = functools.partial(self._watch_members, self._communicators, folder)
        threading.Thread(target=watch, name="dlrover-watch-members", daemon=True).start()
        return self._communicators

    def _watch_members(self, communicators: Communicators, folder: str) -> None:
        """Look for members that have died, or that could not connect: the others train on, and would not notice."""
        target = communicators.round
        interval_s = FORM_PROBE_S * max(1.0, len(target.members) / FEW)
        detector = FailureDetector(self._membership, target.members, FORM_PROBE_S).pause()
        limit_s = self._config.form_timeout_s + STORE_MARGIN_S  # a member that waits for them in `form` gives up first
        began = time.monotonic()
        store: Store | None = None
        while not communicators.wait(interval_s):
            detector.look()
            try:
                store = store or _connect_briefly(target, f"round/{target.number}/{folder}")
                if store is not None and store.check(["failed"]):
                    communicators.abandon("another worker could not connect")
            except RuntimeError:  # rank 0 is gone
                store = None
            if time.monotonic() - began > limit_s:
                communicators.abandon(f"the communicators did not connect in {limit_s:.0f} s")
        if communicators.has_failed:
            with contextlib.suppress(RuntimeError):
                store = store or _connect_briefly(target, f"round/{target.number}/{folder}")
                if store is not None:
                    store.set("failed", "1")

    def is_prepared(self, target: RoundRecord) -> bool:
        """Whether this worker has done all that it can do for a round before the switch to it."""
        communicators = self._communicators
        if not self._early or len(target.members) == 1 or self._membership.worker_id not in target.members:
            return True
        return communicators is not None and communicators.round.number == target.number and communicators.is_done

    def abandon(self) -> None:
        """Drop the communicators of a round that this worker will not enter."""
        if self._communicators is not None:
            self._communicators.abandon()

    def _abandon(self, target: RoundRecord) -> None:
        with self._communicators_lock:  # another thread may prepare the next round
            if self._communicators is not None and self._communicators.round.number == target.number:
                self._communicators.abandon()

    def ended(self, end: RoundEnd | None) -> None:
        """Note the end of the groups before the next round."""
        self._former = end or self._former

    def join(self, timeout_s: float) -> None:
        """Wait for the threads that end groups: if one returns from torch while the process ends, it aborts the process."""
        abandoned = self._communicators.end if self._communicators is not None else None
        for end in filter(None, (self._former, abandoned)):
            with contextlib.suppress(GroupStuckError):  # it is reported where an abort is stuck
                end.wait(timeout_s)

    def _store_for_communicators(self, target: RoundRecord, folder: str) -> Store:
        deadline = time.monotonic() + self._config.form_timeout_s
        while True:
            if self._membership.view.round is not None and self._membership.view.round.number > target.number:
                raise VoidRoundError
            with contextlib.suppress(OSError, dist.DistError):
                store = _store_at(target, 1.0)
                store.set_timeout(timedelta(seconds=self._config.form_timeout_s))
                return PrefixStore(f"round/{target.number}/{folder}", store)
            if time.monotonic() > deadline:
                raise CommunicatorError(
                    f"the store of rank 0 ({target.members[0]}) at {target.store_address}:{target.store_port} did not answer "
                    f"for {self._config.form_timeout_s:.0f} s"
                )
            time.sleep(CONNECT_AGAIN_S * max(1.0, len(target.members) / FEW))

    def _await_communicators(self, attempt: _Attempt, communicators: Communicators, gloo: Any) -> dict[str, Any]:
        """Return the connected backends by name. If one member has failed, all connect once more.

        A device may lack the memory for two rounds' communicators. Those of the former round are gone by now.
        """
        names, limit_s = ", ".join(self._early.values()), self._config.form_timeout_s

        def beside(run: Callable[[], T]) -> T:
            too_late = f"the communicators of {names} did not connect in {limit_s:.0f} s"
            return self._run_beside(run, attempt, attempt.target.members, (), lambda: too_late)

        def have_all_connected() -> bool:
            number = torch.tensor([int(not communicators.has_failed)])
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
            gloo.allreduce([number], options).wait(self._patience)
            return bool(number)

        beside(communicators.wait)
        if not beside(have_all_connected):
            with self._communicators_lock:
                communicators.abandon()
                communicators = self._begin_to_connect(attempt.target, "communicators/again")
            beside(communicators.wait)
        if not communicators.has_failed:
            beside(communicators.warm_up)
        return communicators.connected()

    def _create_default_group(self, rank: int, size: int, store: Store, connected: Mapping[str, Any]) -> None:
        with torch_names.as_connected(connected):
            hook = sys.excepthook
            dist.init_process_group(self._backend, store=store, rank=rank, world_size=size, timeout=self._patience)
            sys.excepthook = hook  # torch's puts the rank of each round so far before each line of an error
        if traits_of(self._backend).is_abortable:
            what = f"round {self._member.number}"
            self._sockets.end = RoundEnd(torch_names.default_groups, what, self._reporter.report_error)
        of_cpu = has_gloo_for_cpu(self._backend)
        transfer.travel_in(dist.group.WORLD if of_cpu else torch_names.control_group(store, rank, size, connected["gloo"]))

    def _other_backends(self) -> list[Any]:
        """Return the backends of the default group except gloo."""
        group = dist.group.WORLD
        devices = [torch.device(device) if device else None for device in slow_to_connect(self._backend)]
        return [group if device is None else torch_names.backend_of(group, device) for device in devices]

    # --- further groups ------------------------------------------------------------------------------------------------------

    def connect(self, target: RoundRecord, name: str, workers: Sequence[str]) -> dist.ProcessGroupGloo:
        """See `World.connect`."""
        known = set(inet_sockets().values())

        def raise_if_over() -> None:
            view = self._membership.view
            if self._member.must_cut_off(view, target.number, False, self._membership.own.evicted):
                raise RoundEndedError(f"round {target.number} ended while {name} was being connected")
            members = set(target.members)
            if view.round is not None and view.round.number > target.number:
                members.intersection_update(view.round.members)  # the others must still be leavers, or they are gone
            if gone := [w for w in workers if w in view.lost or (w not in members and w not in view.leavers)]:
                raise RoundEndedError(f"round {target.number}: {', '.join(gone)} ended while {name} was being connected")

        attempt = self._begin(target, raise_if_over)
        store = PrefixStore(f"round/{target.number}/{name}", self._connect(attempt))
        [group] = self._connect_gloo(attempt, [store], workers, connects_late=False)
        self._groups.add(group)
        self._sockets.add_beside(known)
        raise_if_over()  # the round may have ended before the sockets were recorded
        return group

    def _connect(self, attempt: _Attempt) -> TCPStore:
        target = attempt.target
        # Among many workers not all may evict rank 0 at once.
        suspects = target.members if len(target.members) > FEW else target.members[:1]
        detector = FailureDetector(self._membership, suspects, interval_s=0.0)
        contacts = target.members[:1]
        limit_s = CONNECT_TIMEOUT_S * max(1.0, len(target.members) / FEW)  # rank 0 serves all workers at one moment
        while True:
            attempt.check()
            # torch's own connect cannot be interrupted. So it is tried only against a port that responds, and only briefly,
            # because the process may die just then.
            began = time.monotonic()
            with contextlib.suppress(OSError, dist.DistError):
                store = _store_at(target, 1.0, limit_s)
                store.set_timeout(timedelta(seconds=self._config.form_timeout_s))
                return store
            detector.look()
            self._reach.raise_if_silent(target, contacts)
            if time.monotonic() > attempt.deadline:
                raise self._reach.too_late(
                    contacts,
                    f"rank 0 of round {target.number} ({target.members[0]}) does not answer at "
                    f"{target.store_address}:{target.store_port}",
                )
            if time.monotonic() - began > limit_s:
                limit_s = min(2 * limit_s, MAX_CONNECT_TIMEOUT_S)
            time.sleep(CONNECT_AGAIN_S * max(1.0, len(target.members) / FEW))

    def _can_all_meet(self, target: RoundRecord, hellos: Mapping[str, bytes]) -> bool:
        try:
            return self._can_meet(hellos)
        except ValueError as error:
            # A round's store accepts writes from any process that reaches its port. The next round has another store.
            log.warning("run %s: round %d is given up: %s", self._config.run_id, target.number, error)
            return False

    def _await_hellos(self, attempt: _Attempt, store: Store) -> dict[str, bytes]:
        target = attempt.target

        def too_late() -> str:
            other = _connect_briefly(target, f"round/{target.number}")  # the store's own connection is blocked by the wait
            missing = missing_hellos(other, target.members) if other is not None else ["others"]
            return f"waited {self._config.form_timeout_s:.0f} s for {', '.join(missing)} to arrive"

        # The store prints every timeout to stderr, so this wait times out first.
        limit_s = attempt.deadline - time.monotonic() + STORE_MARGIN_S
        waiting = functools.partial(await_hellos, store, target.members, limit_s)
        contacts = _contacts(target.members, self._membership.worker_id)
        try:
            return self._run_beside(waiting, attempt, target.members, contacts, too_late)
        except ValueError as error:
            log.warning("run %s: round %d is given up: %s", self._config.run_id, target.number, error)
            raise CannotMeetError from error

    def _connect_gloo(
        self, attempt: _Attempt, stores: Sequence[Store], workers: Sequence[str], connects_late: bool
    ) -> list[dist.ProcessGroupGloo]:
        """Connect gloo among the members of a round, or other workers: one group for each store.

        Groups that connect late have connected each worker with its neighbours in the ring and in the tree. Collectives that
        carry a message around would otherwise connect the pairs one after the other. Most need no other connection.
        """
        rank, size = workers.index(self._membership.worker_id), len(workers)

        def connect() -> list[dist.ProcessGroupGloo]:
            groups: list[Any] = []
            for store in stores:
                late = torch_names.gloo_devices(is_late=True) if connects_late else []
                groups.append(torch_names.gloo(store, rank, size, self._patience, late or self._shared_devices))
                if late:
                    _join_ring(groups[-1], rank, size, self._patience)
                    join_tree(groups[-1], rank, size, self._patience)
            return groups

        contacts = _contacts(workers, self._membership.worker_id) if connects_late else workers
        too_late = "the workers could not connect to each other"
        return self._run_beside(connect, attempt, workers, contacts, lambda: too_late)

    def _run_beside(
        self,
        run: Callable[[], T],
        attempt: _Attempt,
        workers: Sequence[str],
        contacts: Sequence[str],
        too_late: Callable[[], str],
    ) -> T:
        """Return the result of `run`, which waits for other workers in a thread of its own.

        Torch waits for a dead member as long as for a slow one. Gloo does so for several times the timeout of a collective, and
        while it waits for the other side to connect, it has no socket to shut down. So the thread is abandoned if the round
        becomes void.

        Args:
            workers: awaited workers; this worker looks for dead ones among them.
            contacts: those of them that it has to connect to.
            too_late: describes the wait, once it has lasted until the deadline.
        """
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(run())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, name="dlrover-connect", daemon=True).start()
        detector = FailureDetector(self._membership, workers, FORM_PROBE_S).pause()
        while not wait([done], timeout=CHECK_S * max(1.0, len(workers) / FEW)).done:
            attempt.check()
            detector.look()
            self._reach.raise_if_silent(attempt.target, contacts)
            if time.monotonic() > attempt.deadline:
                raise self._reach.too_late(contacts, f"round {attempt.target.number}: {too_late()}")
        return done.result()

    @functools.cached_property
    def _shared_devices(self) -> list[Any]:
        """Devices of all groups of gloo that do not connect late."""
        return torch_names.gloo_devices(is_late=False)

    def _raise_if_void(self, target: RoundRecord) -> None:
        if self._member.will_never_form(self._membership.view, target.number):
            raise VoidRoundError
        if self._membership.own.evicted:
            me = self._membership.worker_id
            raise EvictedError(f"worker {me} was removed from the job while forming round {target.number}")


def _contacts(members: Sequence[str], me: str) -> Sequence[str]:
    """Return the members that a worker connects to while a round forms.

    They are all of a few. Among many they are rank 0, which serves the store, and the neighbours in the ring and in the tree.
    """
    size = len(members)
    if size <= FEW:
        return members
    rank = members.index(me)
    parent, children = edges(rank, size)
    ranks = {0, (rank - 1) % size, (rank + 1) % size, *children} | ({parent} if parent is not None else set())
    return [members[each] for each in sorted(ranks - {rank})]


def _join_ring(group: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Connect with both neighbours in the ring, in as long as a few connections take, however many workers there are.

    Gloo connects two workers in the thread that begins their message. One of both only waits for the other, so both begin with
    the same one of their connections.
    """
    message = torch.zeros(1)

    def send() -> None:
        group.send([message], (rank + 1) % size, 0).wait(timeout)  # a wait without a timeout would take another thread

    def receive() -> None:
        group.recv([message], (rank - 1) % size, 0).wait(timeout)

    for exchange in (receive, send) if rank % 2 else (send, receive):
        exchange()


def _connect_briefly(target: RoundRecord, folder: str) -> Store | None:
    """Open a further connection to a round's store, for keys in `folder`; None without a response.

    If the round has formed, the connection survives severing it.
    """
    with contextlib.suppress(OSError, dist.DistError):
        return PrefixStore(folder, _store_at(target, CONNECT_TIMEOUT_S))
    return None


def _store_at(target: RoundRecord, answer_s: float, connect_s: float = CONNECT_TIMEOUT_S) -> TCPStore:
    """Connect to a round's store within `connect_s`; its port must respond within `answer_s`."""
    socket.create_connection((target.store_address, target.store_port), timeout=answer_s).close()
    limit = timedelta(seconds=connect_s)
    return TCPStore(target.store_address, target.store_port, is_master=False, wait_for_workers=False, timeout=limit)
