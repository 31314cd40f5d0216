"""Form a round's process groups: reach the round's store, exchange hellos, connect all members."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.gloo import RoundSockets, as_gloo, inet_sockets, num_begun
from lightning_dlrover.rdzv.group.groups import RoundGroups
from lightning_dlrover.rdzv.group.hellos import missing_hellos, publish_hello, read_hellos
from lightning_dlrover.rdzv.group.meeting import Meeting
from lightning_dlrover.rdzv.group.reach import FEW, Patrol, Reach
from lightning_dlrover.rdzv.group.torch_names import PrefixStore, Store, TCPStore
from lightning_dlrover.rdzv.group.tree import Tree, edges, join_tree
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import CannotMeetError, EvictedError, Formation, Member, RoundEndedError, VoidRoundError
from lightning_dlrover.rdzv.live.membership import Membership

__all__ = ["Forming"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 0.5
"""Seconds for one attempt to reach the store of a round."""

VOTE_ROOM = 32, 8
"""Numbers in one message of a vote: a constant part, and a part for each worker of the round."""

TREE_VOTE_ROOM = 60
"""Numbers in the first message of a vote among more than `FEW` workers. Few votes have more."""

PROBE_INTERVAL_S = 0.1
"""Seconds between two looks for dead workers while a round is formed."""

LOOK_S = 0.003
"""Minimum seconds between two looks for the hellos of all members."""

LOOK_S_PER_WORKER = 0.0005
"""The same for each member: the store of rank 0 serves a limited number of looks per second."""

CHECK_S = 0.02
"""Seconds between two checks whether a round of up to `FEW` workers is void while gloo connects; longer for more."""


class Forming:
    """Connect one worker to the other members of a round.

    Args:
        sockets: sockets of the round, which are shut down if it does not form.
    """

    def __init__(
        self,
        config: WorldConfig,
        backend: str,
        can_meet: Callable[[Mapping[str, bytes]], bool],
        membership: Membership,
        member: Member,
        sockets: RoundSockets,
        groups: RoundGroups,
        reach: Reach,
    ) -> None:
        self._config = config
        self._backend = backend
        self._can_meet = can_meet
        self._membership = membership
        self._member = member
        self._sockets = sockets
        self._groups = groups
        self._reach = reach
        self._timeout = timedelta(seconds=config.collective_timeout_s)
        self._gloo_devices: list[Any] = []  # gloo's, of all groups that do not connect late

    def form(
        self, target: RoundRecord, hello: bytes, activity: Callable[[], str], is_in_step: Callable[[], bool]
    ) -> tuple[Formation, Meeting | None]:
        """Connect to the other members of a round, and create its default group; see `Means.form` and `Meeting`."""
        me = self._membership.worker_id
        rank = target.members.index(me)
        self._sockets.begin_forming(target.number)
        try:
            deadline = time.monotonic() + self._config.form_timeout_s
            self._reach.begin()
            # Even rank 0 connects to its own server, because a connection can be severed while a thread waits on it.
            check = functools.partial(self._raise_if_void, target)
            store = self._connect(target, deadline, check)
            rendezvous = PrefixStore(f"round/{target.number}", store)
            publish_hello(rendezvous, target.members, me, hello)
            hellos = self._await_hellos(target, rendezvous, deadline)
            # Checked before any member connects: the others would wait for a member that has left again.
            if not self._can_all_meet(target, hellos):
                raise CannotMeetError
            is_large = len(target.members) > FEW
            names = ["gloo", "meeting"] if 1 < len(target.members) <= FEW else ["gloo"]
            stores = [PrefixStore(name, rendezvous) for name in names]
            gloo, *control = self._connect_gloo(target, stores, deadline, target.members, check, is_large)
            for group in (gloo, *control):
                self._groups.add(group)
            with as_gloo(gloo):
                dist.init_process_group(
                    self._backend,
                    store=PrefixStore("group", rendezvous),
                    rank=rank,
                    world_size=len(target.members),
                    timeout=self._timeout,
                )
        except BaseException:
            # Others may have formed the round already. They must detect that this worker has not.
            self._sockets.sever(target.number, quietly=True)
            raise
        finally:
            self._sockets.end_forming(connects_late=len(target.members) > FEW)
        # The round may have ended before its sockets were recorded.
        self._sockets.follow(self._membership.view, self._membership.own.evicted)
        formation = Formation(target, hellos, rank)
        if formation.size == 1:
            return formation, None
        meeting = Meeting(
            gloo if is_large else control[0],
            rank,
            formation.size,
            TREE_VOTE_ROOM if is_large else VOTE_ROOM[0] + VOTE_ROOM[1] * formation.size,
            begun=functools.partial(num_begun, gloo, "nccl" in self._backend),
            connect=functools.partial(_connect_briefly, target),
            activity=activity,
            is_in_step=is_in_step,
            sever=functools.partial(self._sockets.sever, target.number),
            tree=Tree(gloo, rank, formation.size, self._timeout) if is_large else None,
        )
        return formation, meeting

    def connect(self, target: RoundRecord, name: str, workers: Sequence[str]) -> dist.ProcessGroupGloo:
        """See `World.connect`."""
        deadline = time.monotonic() + self._config.form_timeout_s
        self._reach.begin()
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

        store = PrefixStore(f"round/{target.number}/{name}", self._connect(target, deadline, raise_if_over))
        [group] = self._connect_gloo(target, [store], deadline, workers, raise_if_over, connects_late=False)
        self._groups.add(group)
        self._sockets.add_beside(known)
        raise_if_over()  # the round may have ended before the sockets were recorded
        return group

    def _connect(self, target: RoundRecord, deadline: float, check: Callable[[], None]) -> TCPStore:
        suspects = target.members if len(target.members) > FEW else target.members[:1]  # not all of many bury rank 0 at once
        patrol = Patrol(self._membership, suspects, interval_s=0.0)
        contacts = target.members[:1]
        while True:
            check()
            # torch's own connect cannot be interrupted. So it is tried only against a port that responds, and only briefly,
            # because the process may die just then.
            with contextlib.suppress(OSError, dist.DistError):
                # Rank 0 serves all workers, which connect in one moment.
                store = _store_at(target, 1.0, CONNECT_TIMEOUT_S * max(1.0, len(target.members) / FEW))
                store.set_timeout(timedelta(seconds=self._config.form_timeout_s))
                return store
            patrol.look()
            self._reach.raise_if_silent(target, contacts)
            if time.monotonic() > deadline:
                raise self._reach.too_late(
                    contacts,
                    f"rank 0 of round {target.number} ({target.members[0]}) does not answer at "
                    f"{target.store_address}:{target.store_port}",
                )
            self._pause(0.02 * max(1.0, len(target.members) / FEW))

    def _can_all_meet(self, target: RoundRecord, hellos: Mapping[str, bytes]) -> bool:
        try:
            return self._can_meet(hellos)
        except ValueError as error:
            # A round's store accepts writes from any process that reaches its port. The next round has another store.
            log.warning("run %s: round %d is given up: %s", self._config.run_id, target.number, error)
            return False

    def _await_hellos(self, target: RoundRecord, store: Store, deadline: float) -> dict[str, bytes]:
        patrol = Patrol(self._membership, target.members, PROBE_INTERVAL_S).pause()
        contacts = _contacts(target.members, self._membership.worker_id)
        while True:
            try:
                if (hellos := read_hellos(store, target.members)) is not None:
                    return hellos
            except ValueError as error:
                log.warning("run %s: round %d is given up: %s", self._config.run_id, target.number, error)
                raise CannotMeetError from error
            self._raise_if_void(target)
            patrol.look()
            self._reach.raise_if_silent(target, contacts)
            if time.monotonic() > deadline:
                missing = missing_hellos(store, target.members)
                raise self._reach.too_late(
                    contacts,
                    f"round {target.number}: waited {self._config.form_timeout_s:.0f} s for {', '.join(missing)} to arrive",
                )
            # The store's own wait cannot be interrupted, and prints every timeout to stderr.
            time.sleep(max(LOOK_S, LOOK_S_PER_WORKER * len(target.members)))

    def _connect_gloo(
        self,
        target: RoundRecord,
        stores: Sequence[Store],
        deadline: float,
        workers: Sequence[str],
        check: Callable[[], None],
        connects_late: bool,
    ) -> list[dist.ProcessGroupGloo]:
        """Connect gloo among the members of a round, or other workers: one group for each store.

        Groups that connect late have connected each worker with its neighbours in the ring and in the tree. Collectives that
        carry a message around would otherwise connect the pairs one after the other. Most need no other connection.

        Gloo waits for a dead member as long as for a slow one, several times the timeout of a collective. While it waits for
        the other side to connect there is no socket to shut down. So it waits in a thread of its own, which is abandoned if the
        round becomes void.
        """
        connected: Future[list[dist.ProcessGroupGloo]] = Future()
        rank, size = workers.index(self._membership.worker_id), len(workers)

        def connect() -> None:
            try:
                groups: list[Any] = []
                for store in stores:
                    late = torch_names.gloo_devices(is_late=True) if connects_late else []
                    groups.append(torch_names.gloo(store, rank, size, self._timeout, late or self._shared_devices()))
                    if late:
                        _join_ring(groups[-1], rank, size, self._timeout)
                        join_tree(groups[-1], rank, size, self._timeout)
                connected.set_result(groups)
            except BaseException as error:
                connected.set_exception(error)

        threading.Thread(target=connect, name="dlrover-connect", daemon=True).start()
        patrol = Patrol(self._membership, workers, PROBE_INTERVAL_S).pause()
        contacts = _contacts(workers, self._membership.worker_id) if connects_late else workers
        while not wait([connected], timeout=CHECK_S * max(1.0, size / FEW)).done:
            check()
            patrol.look()
            self._reach.raise_if_silent(target, contacts)
            if time.monotonic() > deadline:
                raise self._reach.too_late(contacts, f"round {target.number}: the workers could not connect to each other")
        return connected.result()

    def _shared_devices(self) -> list[Any]:
        if not self._gloo_devices:
            self._gloo_devices = torch_names.gloo_devices(is_late=False)
        return self._gloo_devices

    def _raise_if_void(self, target: RoundRecord) -> None:
        if self._member.will_never_form(self._membership.view, target.number):
            raise VoidRoundError
        if self._membership.own.evicted:
            me = self._membership.worker_id
            raise EvictedError(f"worker {me} was removed from the job while forming round {target.number}")

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            self._membership.wait_for(lambda view: None, seconds, "nothing")


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


def _connect_briefly(target: RoundRecord) -> Store | None:
    """Open a further connection to a round's store, which survives severing the round; None without a response."""
    with contextlib.suppress(OSError, dist.DistError):
        return PrefixStore(f"round/{target.number}/meeting", _store_at(target, CONNECT_TIMEOUT_S))
    return None


def _store_at(target: RoundRecord, answer_s: float, connect_s: float = CONNECT_TIMEOUT_S) -> TCPStore:
    """Connect to a round's store within `connect_s`; its port must respond within `answer_s`."""
    socket.create_connection((target.store_address, target.store_port), timeout=answer_s).close()
    return TCPStore(
        target.store_address,
        target.store_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=connect_s),
    )
