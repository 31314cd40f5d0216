"""The process group of a job's current round, formed and re-formed inside one worker process.

This is all that a training loop needs to be live-elastic: `World.start`, then `World.propose` and `World.agreed` at step
boundaries, `World.switch` when a new round was agreed, `World.recover` when a collective failed, `World.leave` at the end. What
is sent to joiners, and which survivor is ahead, is the loop's own business: every worker says a few bytes of `hello` when it
enters a round, and receives those of all others before the process group exists.

The main thread forms and destroys groups. The membership thread only ever calls `_sever`, which makes a collective that the
main thread is blocked in raise at once: gloo has no abort, but its sockets can be shut down from outside.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lightning_dlrover.rdzv.client import EtcdClient, EtcdConfig, EtcdUnavailableError, parse_endpoints
from lightning_dlrover.rdzv.membership import EvictedError, Membership, MembershipConfig
from lightning_dlrover.rdzv.records import DEFAULT_PREFIX, RoundRecord, WorkerState
from lightning_dlrover.rdzv.rounds import View

__all__ = ["Formation", "LeftOutError", "World", "WorldConfig", "WorldError", "is_group_failure"]

log = logging.getLogger(__name__)

T = TypeVar("T")


CONNECT_TIMEOUT_S = 0.5
"""How long one attempt to reach the store of a round may take."""

PROBE_INTERVAL_S = 0.3
"""How often a worker sees whether the next rank's process lives."""


class WorldError(RuntimeError):
    """The job's workers could not be brought together."""


class LeftOutError(WorldError):
    """The round goes on without this worker: it was asked to leave, or was not needed."""

    def __init__(self, round_: RoundRecord) -> None:
        super().__init__(f"round {round_.number} goes on without this worker: {round_.reason}")
        self.round = round_


class _VoidRoundError(Exception):
    """A newer round exists, or a member has given up on this one: it will never be complete."""


class _CannotMeetError(Exception):
    """The members of a round stand at places from which they cannot go on together."""


@dataclass(frozen=True)
class WorldConfig:
    """Where the job's records are and who this worker is; read once from the environment that the elastic agent exports."""

    etcd: EtcdConfig
    run_id: str
    prefix: str
    agent_id: str
    local_rank: int
    min_workers: int
    max_workers: int
    version: str
    lease_ttl_s: int = 5
    form_timeout_s: float = 120.0  # all members of a round have arrived; they may be saving a checkpoint
    wait_timeout_s: float = 600.0  # enough workers are there for a round
    collective_timeout_s: float = 1800.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], version: str) -> WorldConfig | None:
        """The configuration exported by the `etcd-v3` rendezvous handler, or None outside of such a job.

        Raises:
            ValueError: a variable is missing or malformed.
        """
        if "DLROVER_RUN_ID" not in environ:
            return None

        def number(name: str, default: int) -> int:
            text = environ.get(name, str(default))
            try:
                return int(text)
            except ValueError as error:
                raise ValueError(f"environment variable {name} is {text!r}, not a whole number") from error

        try:
            endpoints, agent_id = environ["DLROVER_ENDPOINT"], environ["DLROVER_AGENT_ID"]
        except KeyError as error:
            raise ValueError(
                f"environment variable {error} is missing though DLROVER_RUN_ID is set; "
                "both come from torchrun --rdzv-backend=etcd-v3: start the script with it"
            ) from error
        workers_per_node = number("LOCAL_WORLD_SIZE", 1)
        return cls(
            etcd=EtcdConfig(
                endpoints=endpoints,
                user=environ.get("DLROVER_USER"),
                password=environ.get("DLROVER_PASSWORD"),
                ca_cert=environ.get("DLROVER_CA_CERT"),
                cert=environ.get("DLROVER_CERT"),
                cert_key=environ.get("DLROVER_CERT_KEY"),
            ),
            run_id=environ["DLROVER_RUN_ID"],
            prefix=environ.get("DLROVER_PREFIX", DEFAULT_PREFIX),
            agent_id=agent_id,
            local_rank=number("LOCAL_RANK", 0),
            min_workers=number("DLROVER_MIN_NODES", 1) * workers_per_node,
            max_workers=number("DLROVER_MAX_NODES", 1) * workers_per_node,
            version=version,
            lease_ttl_s=number("DLROVER_LEASE_TTL_S", 5),
        )


@dataclass(frozen=True)
class Formation:
    """A round whose process group is up."""

    round: RoundRecord
    hellos: Mapping[str, bytes]  # what every member said on entering, by worker id
    rank: int

    @property
    def size(self) -> int:
        return len(self.round.members)

    def rank_of(self, worker_id: str) -> int:
        return self.round.members.index(worker_id)


def is_group_failure(error: BaseException) -> bool:
    """Whether `error` was raised by a collective whose peer went away, as opposed to by the user's own code."""
    text = str(error)
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        mark in text
        for mark in (
            "gloo/transport",
            "Connection closed by peer",
            "Connection reset by peer",
            "NCCL",
            "ncclRemoteError",
        )
    )


class World:
    """This worker's process groups, one round after the other.

    Args:
        config: the job and this worker's place in it.
        backend: of the process groups, `gloo` or `cpu:gloo,cuda:nccl`.
        can_meet: whether workers with these hellos can go on together; must answer alike on all of them. If not, those who
            were to be admitted wait for another round.
    """

    def __init__(
        self,
        config: WorldConfig,
        backend: str = "gloo",
        can_meet: Callable[[Mapping[str, bytes]], bool] = lambda hellos: True,
    ) -> None:
        self.config = config
        self._can_meet = can_meet
        self.backend = backend
        if "nccl" in backend:
            # NCCL's watchdog would end this process when a peer is lost; aborting the group is our watcher's business.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self.formation: Formation | None = None
        _protect_forks()
        self._client = EtcdClient(config.etcd)
        self._client.check()
        address = _own_address(config.etcd.endpoints)
        _use_interface_of(address)
        # Every worker holds a store server from the start, so that whoever becomes rank 0 can serve a round at once. The
        # port has a second use: it refuses connections as soon as this process is dead.
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=512)
        port = listener.getsockname()[1]
        listener_fd = listener.detach()
        self._server = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=config.form_timeout_s),
            master_listen_fd=listener_fd,
        )
        self._lock = threading.Lock()
        self._number = 0  # round that is formed or being formed
        self._sockets: list[tuple[int, int]] = []  # (fd, inode) of the group's connections
        self._known_inodes: set[int] = set()  # sockets that were there before the group
        self._listener = (listener_fd, os.stat(listener_fd).st_ino)
        self._forming = False
        self._severed = False
        self._dismissed = False  # a planned round goes on without this worker
        self._next_probe = 0.0
        self._admitting = False  # standing at the training loop's entrance, without the job's state
        self._fingerprint = ""
        self._vote: tuple[dist.Work, torch.Tensor] | None = None
        self.membership = Membership(
            self._client,
            MembershipConfig(
                run_id=config.run_id,
                prefix=config.prefix,
                agent_id=config.agent_id,
                local_rank=config.local_rank,
                min_workers=config.min_workers,
                max_workers=config.max_workers,
                version=config.version,
                address=address,
                port=self._server.port,
                lease_ttl_s=config.lease_ttl_s,
            ),
            on_view=self._on_view,
            on_tick=self._on_tick,
        )

    # --- entering and leaving ----------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self.membership.worker_id

    def start(self) -> Formation | None:
        """Enter the job: the first round, or None when others are already training and this worker joins them later.

        Raises:
            JobClosedError, MembershipError: the job cannot be joined.
            WorldError: too few workers came.
        """
        state = self.membership.register()
        while state == "starting":

            def look(view: View) -> RoundRecord | str | None:
                if view.round is not None and self.worker_id in view.round.members:
                    return view.round
                others = [w for w in (*view.survivors, *view.in_state("standby", "ready")) if w != self.worker_id]
                return "standby" if others else None

            found = self._wait(look, "the first round")
            if isinstance(found, RoundRecord):
                return self._enter(found, b"")
            self.membership.update("standby")
            state = "standby"
        return None

    def admit(self, hello: bytes, fingerprint: str) -> Formation:
        """Stand ready at the training loop's entrance until a round takes this worker in.

        Raises:
            LeftOutError: the job ended, or this worker was asked to leave, before a round needed it.
        """
        self._destroy()
        self._admitting = True
        self.formation = None
        self._fingerprint = fingerprint
        return self._enter(self._await_admission(), hello)

    def _await_admission(self) -> RoundRecord:
        self._write_state("ready", self._number, self._fingerprint)

        def look(view: View) -> RoundRecord | None:
            if view.round is not None and self.worker_id in view.round.members and view.round.number > self._number:
                return view.round
            if (view.job is not None and view.job.phase in ("finished", "failed")) or self.worker_id in view.drains:
                raise LeftOutError(view.round or RoundRecord(0, [], "the job ended", "stop", planned=True))
            return None

        # A spare may wait as long as the job runs.
        return self._wait(look, "a round that needs this worker", timeout_s=float("inf"))

    def switch(self, number: int, hello: bytes) -> Formation:
        """Leave the current group and form round `number` (or a newer one that replaced it).

        Raises:
            LeftOutError: the round goes on without this worker.
        """
        target = self._wait(lambda view: view.round if view.round and view.round.number >= number else None, f"round {number}")
        self._destroy()
        return self._enter(target, hello)

    def recover(self, hello: bytes) -> Formation:
        """Form the next round with those that are left after a collective of the current one failed.

        An empty `hello` says that this worker was not given the state yet; it may then have to wait to be admitted again.

        Raises:
            EvictedError: the others went on without this worker.
            WorldError: no round could be formed in time.
        """
        assert self.formation is not None
        broken = self.formation.round
        self._admitting = not hello
        self._destroy()
        return self._enter(self._next_after(broken), hello)

    def leave(self) -> None:
        """End this worker's part: leave the group and the job's records."""
        self._destroy()
        self.membership.close()
        self._client.close()

    # --- while a round lasts -----------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether the current group was cut off because its round has ended for good."""
        return self._severed

    def propose(self, check_every: int = 1) -> None:
        """Begin to agree on a round to switch to; a collective of all members that overlaps with the next step.

        Args:
            check_every: steps until this worker would like to agree again; the largest of all members' wishes holds.
        """
        assert self._vote is None
        assert self.formation is not None
        view = self.membership.view
        newest = view.round.number if view.round is not None else 0
        ballot = torch.tensor([newest, -check_every], dtype=torch.int64)
        if self.formation.size > 1:
            self._vote = (dist.all_reduce(ballot, op=dist.ReduceOp.MIN, async_op=True), ballot)
        else:
            self._vote = (_Done(), ballot)  # type: ignore[assignment]

    @property
    def owned_sockets(self) -> list[tuple[int, int]]:
        """(fd, inode) of the sockets that forked children must not keep: copies would hide our death from the others."""
        with self._lock:
            return [self._listener, *self._sockets]

    @property
    def is_voting(self) -> bool:
        return self._vote is not None

    def agreed(self) -> tuple[int | None, int]:
        """The round that all members have seen and shall switch to (None: stay), and the steps until the next vote."""
        assert self._vote is not None
        assert self.formation is not None
        work, ballot = self._vote
        self._vote = None
        work.wait()
        newest, check_every = int(ballot[0]), -int(ballot[1])
        return (newest if newest > self.formation.round.number else None), check_every

    # --- forming -----------------------------------------------------------------------------------------------------

    def _enter(self, target: RoundRecord, hello: bytes) -> Formation:
        while True:
            if self.worker_id not in target.members and self._admitting:
                target = self._await_admission()
            if self.worker_id not in target.members:
                if target.planned or self._dismissed or self.worker_id in self.membership.view.drains:
                    # The round that was planned without this worker may have been followed by one after a loss.
                    raise LeftOutError(target)
                raise EvictedError(f"round {target.number} goes on without worker {self.worker_id}: {target.reason}")
            try:
                formation = self._form(target, hello)
            except (_VoidRoundError, _CannotMeetError, RuntimeError) as error:
                if isinstance(error, EvictedError):
                    raise
                log.info(
                    "run %s: round %d did not form: %s",
                    self.config.run_id,
                    target.number,
                    error or type(error).__doc__,
                )
            else:
                self.formation = formation
                self.membership.reached.update(target.members)
                self._admitting = False
                self._write_state("active", target.number)
                return formation
            self._destroy()
            target = self._next_after(target)

    def _next_after(self, broken: RoundRecord) -> RoundRecord:
        self.membership.bury_the_dead(broken.members)
        if self.worker_id in broken.members:
            self._write_state("ready" if self._admitting else "reforming", broken.number)
        last_probe = time.monotonic()

        def probe() -> None:
            # A peer may die, or close its port, a moment after the collective failed.
            nonlocal last_probe
            if time.monotonic() - last_probe > 0.05:
                last_probe = time.monotonic()
                self.membership.bury_the_dead(broken.members)

        def look(view: View) -> RoundRecord | None:
            if view.job is not None and view.job.phase in ("finished", "failed"):
                if self._admitting:
                    # The others ended before they came by the switch that was to take this worker in.
                    raise LeftOutError(RoundRecord(0, [], f"the job has {view.job.phase}", "stop", planned=True))
                raise WorldError(f"round {broken.number} broke after the job has {view.job.phase}: no other will be formed")
            return view.round if view.round and view.round.number > broken.number else None

        return self._wait(look, f"the round after round {broken.number}", tick=probe)

    def _form(self, target: RoundRecord, hello: bytes) -> Formation:
        rank = target.members.index(self.worker_id)
        with self._lock:
            self._number = target.number
            self._known_inodes = set(_inet_sockets().values())
            self._sockets = []
            self._severed = False
            self._forming = True
        try:
            deadline = time.monotonic() + self.config.form_timeout_s
            # Rank 0 has a connection to its own server, too: one that can be cut off while something waits on it.
            store = self._connect(target, deadline)
            rendezvous = PrefixStore(f"round/{target.number}", store)
            rendezvous.set(f"hello/{self.worker_id}", hello.decode())
            hellos = self._await_hellos(target, rendezvous, deadline)
            if not self._can_meet(hellos):
                # Said before anyone connects: the others would wait for a member that has gone away again.
                raise _CannotMeetError
            gloo = self._connect_gloo(target, PrefixStore("gloo", rendezvous), deadline)
            with _as_gloo(gloo):
                dist.init_process_group(
                    self.backend,
                    store=PrefixStore("group", rendezvous),
                    rank=rank,
                    world_size=len(target.members),
                    timeout=timedelta(seconds=self.config.collective_timeout_s),
                )
        except BaseException:
            # Others may have formed the round already: they must notice that this worker has not.
            self._sever(target.number, quietly=True)
            raise
        finally:
            with self._lock:
                self._forming = False
        with self._lock:
            self._sockets = [(fd, inode) for fd, inode in _inet_sockets().items() if inode not in self._known_inodes]
        self._on_view(self.membership.view)  # the round may have ended while its sockets were not known yet
        return Formation(target, hellos, rank)

    def _connect(self, target: RoundRecord, deadline: float) -> TCPStore:
        while True:
            self._raise_if_void(target)
            # torch's own connect cannot be interrupted, so it is tried only against a port that answers, and not for long:
            # the process may die just then.
            with contextlib.suppress(OSError, dist.DistError):
                socket.create_connection((target.store_address, target.store_port), timeout=1.0).close()
                store = TCPStore(
                    target.store_address,
                    target.store_port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
                )
                store.set_timeout(timedelta(seconds=self.config.form_timeout_s))
                return store
            self.membership.bury_the_dead(target.members[:1])
            if time.monotonic() > deadline:
                raise WorldError(
                    f"rank 0 of round {target.number} ({target.members[0]}) does not answer at "
                    f"{target.store_address}:{target.store_port}"
                )
            self._pause(0.02)

    def _await_hellos(self, target: RoundRecord, store: Store, deadline: float) -> dict[str, bytes]:
        missing = list(target.members)
        next_probe = time.monotonic() + 0.1
        while True:
            missing = [w for w in missing if not store.check([f"hello/{w}"])]
            if not missing:
                return {w: store.get(f"hello/{w}") for w in target.members}
            self._raise_if_void(target)
            if time.monotonic() > next_probe:
                next_probe = time.monotonic() + 0.1
                self.membership.bury_the_dead(missing)
            if time.monotonic() > deadline:
                raise WorldError(
                    f"round {target.number}: waited {self.config.form_timeout_s:.0f} s for {', '.join(missing)} to arrive"
                )
            # Not the store's own wait: it cannot be interrupted, and says on stderr every time that it ran out.
            self._pause(0.003)

    def _write_state(self, state: WorkerState, number: int, fingerprint: str | None = None) -> None:
        """Write this worker's state; while etcd is away a change of membership waits."""
        deadline = time.monotonic() + self.config.wait_timeout_s
        while True:
            try:
                self.membership.update(state, number, fingerprint)
                return
            except EtcdUnavailableError as error:
                if time.monotonic() > deadline:
                    raise WorldError(f"worker {self.worker_id} could not say that it is {state}: {error}") from error

    def _connect_gloo(self, target: RoundRecord, store: Store, deadline: float) -> dist.ProcessGroupGloo:
        """Gloo's connections among the members of a round.

        Gloo waits for a member that has died meanwhile as long as for a slow one, several times the timeout of a collective,
        and where it waits for the other to connect there is no socket to shut down. So it waits in a thread of its own, which
        is left behind when the round has become void.
        """
        connected: Future[dist.ProcessGroupGloo] = Future()

        def connect() -> None:
            timeout = timedelta(seconds=self.config.collective_timeout_s)
            try:
                rank = target.members.index(self.worker_id)
                connected.set_result(dist.ProcessGroupGloo(store, rank, len(target.members), timeout))
            except BaseException as error:
                connected.set_exception(error)

        threading.Thread(target=connect, name="dlrover-connect", daemon=True).start()
        next_probe = time.monotonic() + 0.1
        while not wait([connected], timeout=0.02).done:
            self._raise_if_void(target)
            if time.monotonic() > next_probe:
                next_probe = time.monotonic() + 0.1
                self.membership.bury_the_dead(target.members)
            if time.monotonic() > deadline:
                raise WorldError(f"round {target.number}: the workers could not connect to each other")
        return connected.result()

    def _is_void(self, view: View, number: int) -> bool:
        """Whether a newer round than `number` exists, or another member has given `number` up."""
        newest = view.round
        if newest is None or newest.number < number:
            return False
        return newest.number > number or any(w != self.worker_id for w in view.failed)

    def _raise_if_void(self, target: RoundRecord) -> None:
        if self._is_void(self.membership.view, target.number):
            raise _VoidRoundError
        if self.membership.evicted:
            raise EvictedError(f"worker {self.worker_id} was removed from the job while forming round {target.number}")

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            self.membership.wait_for(lambda view: None, seconds, "nothing")

    def _wait(
        self,
        found: Callable[[View], T | None],
        what: str,
        timeout_s: float | None = None,
        tick: Callable[[], None] | None = None,
    ) -> T:
        try:
            return self.membership.wait_for(found, timeout_s or self.config.wait_timeout_s, what, tick)
        except TimeoutError as error:
            raise WorldError(str(error)) from error

    # --- tearing down ------------------------------------------------------------------------------------------------

    def _destroy(self) -> None:
        self._vote = None
        if not dist.is_initialized():
            return
        if "nccl" in self.backend and self._severed:
            dist.distributed_c10d._abort_process_group()
            return
        # Other processes, such as forked loader workers, may hold copies of the sockets; closing ours would then go
        # unnoticed by the peers, shutting them down does not.
        self._sever(self._number, quietly=True)
        dist.destroy_process_group()

    def _on_view(self, view: View) -> None:
        """Membership thread: cut the group off when it will complete no more collectives.

        Its round has ended without an agreement, or another member has given it up.
        """
        with self._lock:
            number, forming = self._number, self._forming
        newest = view.round
        if newest is None or number == 0:
            return
        if newest.number > number:
            self._dismissed = self.worker_id not in newest.members and (newest.planned or self._dismissed)
        # A group that is up stays until its members agree on a planned round.
        is_over = self._is_void(view, number) and (forming or newest.number == number or not newest.planned)
        # While it is being formed, again and again: what the main thread waits on may have been opened after the last time.
        if (is_over or self.membership.evicted) and (forming or not self._severed):
            self._sever(number)

    def _on_tick(self) -> None:
        """Membership thread: see that the next rank's process lives.

        Its death also breaks our collectives, but not while we compute or validate, and with NCCL not by itself.
        """
        formation = self.formation
        if formation is None or self._forming or formation.size == 1 or time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + PROBE_INTERVAL_S
        self.membership.bury_the_dead([formation.round.members[(formation.rank + 1) % formation.size]])

    def _sever(self, number: int, quietly: bool = False) -> None:
        """Shut down the connections of round `number`, unless the main thread has gone on to another round meanwhile."""
        with self._lock:
            if number != self._number:
                return
            if not quietly:
                self._severed = True
            if self._forming:
                doomed = [(fd, inode) for fd, inode in _inet_sockets().items() if inode not in self._known_inodes]
            else:
                doomed, self._sockets = self._sockets, []
            etcd_ports = {port for _, port in parse_endpoints(self.config.etcd.endpoints)}
            for fd, inode in doomed:
                _shut_down(fd, inode, etcd_ports, self._server.port)
            if not quietly and "nccl" in self.backend and dist.is_initialized():
                with contextlib.suppress(RuntimeError):
                    dist.distributed_c10d._abort_process_group()


@contextlib.contextmanager
def _as_gloo(connected: dist.ProcessGroupGloo) -> Iterator[None]:
    """Let `init_process_group` take a gloo backend that is connected already instead of making its own."""
    original = dist.distributed_c10d.ProcessGroupGloo
    handed_over = [connected]  # emptied: the classes below live until they are collected, the group must not

    class Meta(type):
        def __call__(cls, *args: object, **kwargs: object) -> dist.ProcessGroupGloo:
            return handed_over.pop()

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Connected(metaclass=Meta):
        pass

    dist.distributed_c10d.ProcessGroupGloo = Connected  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        handed_over.clear()
        dist.distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


class _Done:
    def wait(self) -> None:
        return None


@functools.cache
def _protect_forks() -> None:
    """Keep forked children, such as loader workers, from collecting process groups that their parent has left behind.

    A group's destructor waits for its threads, which do not exist in the child: it would hang there for good.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _own_address(endpoints: str) -> str:
    """The address of this host on the way to etcd: the other workers come the same way."""
    host, port = parse_endpoints(endpoints)[0]
    with socket.create_connection((host, port), timeout=5.0) as probe:
        address: str = probe.getsockname()[0]
    return address


def _use_interface_of(address: str) -> None:
    """Let gloo use the interface that `address` belongs to, unless the user chose one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _inet_sockets() -> dict[int, int]:
    """Connected or listening sockets of this process: inode by file descriptor."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(entry.name)] = status.st_ino
    return found


def _shut_down(fd: int, inode: int, spared_peer_ports: set[int], store_port: int) -> None:
    try:
        if os.stat(fd).st_ino != inode:
            return  # the descriptor belongs to something else by now
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return
            # A listening gloo socket must stay: shutting it down ends the process (uncaught in gloo's listener).
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return
            if sock.getpeername()[1] in spared_peer_ports:
                return
            # Others may be connected to our store already for a newer round than the one that is cut off.
            if sock.getsockname()[1] == store_port:
                return
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # not connected, or closed meanwhile
