"""The c10d process groups of a round: connect their communicators, sever, abort and end them.

`Traits` describe a backend, `Communicators` connect ahead of a round, `DeviceWait` checks results, and `RoundEnd` ends groups.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_dlrover.host import interface_of
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError, parse_endpoints
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.membership.member import Member, WorldError
from lightning_dlrover.rdzv.membership.rounds import WorkerView
from lightning_dlrover.rdzv.transport import torch_names
from lightning_dlrover.rdzv.transport.torch_names import PrefixStore, Store, TCPStore
from lightning_dlrover.rdzv.transport.waits import AWAKE_S


@dataclass(frozen=True)
class Traits:
    """Behaviour of a c10d backend that decides how its groups are used and ended.

    Attributes:
        is_asynchronous: collectives return before their results exist, and raise no error when a peer is lost.
        is_abortable: a group is ended by an abort, because its connections cannot be shut down from outside.
    """

    is_asynchronous: bool
    is_abortable: bool


_KNOWN = {"gloo": Traits(False, False), "nccl": Traits(True, True)}


def register(name: str, traits: Traits) -> None:
    """Declare the behaviour of a further backend, one that `torch.distributed.Backend.register_backend` knows."""
    _KNOWN[name.lower()] = traits


def with_gloo(backend: str) -> str:
    """Return the backend of a round's group as torch takes it: `nccl` gets gloo for the script's own tensors on the CPU.

    Raises:
        ValueError: the behaviour of a backend is not known.
    """
    backend = backend.lower()  # torch's own spelling
    for name in _names(backend):
        if name not in _KNOWN:
            raise ValueError(
                f"process groups of the backend {backend!r} cannot be used in a live job, as nothing is known of {name!r}: "
                f"use one of {', '.join(sorted(_KNOWN))}, or register it with "
                "lightning_dlrover.rdzv.transport.process_groups.register first"
            )
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def traits_of(backend: str) -> Traits:
    """Return the behaviour of a group: that of its backends together."""
    parts = [_KNOWN[name] for name in _names(backend)]
    return Traits(any(part.is_asynchronous for part in parts), any(part.is_abortable for part in parts))


def has_gloo_for_cpu(backend: str) -> bool:
    """Whether tensors on the CPU travel through gloo."""
    return backend == "gloo" or "cpu:gloo" in backend.split(",")


def names_by_device(backend: str) -> dict[str, str]:
    """Return the backend of each device type; `""` means all devices."""
    pairs = [part.rpartition(":") for part in backend.split(",")]
    return {device: name for device, _, name in pairs}


def _names(backend: str) -> list[str]:
    return [name.lower() for name in names_by_device(backend).values()]


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Disable NCCL's watchdog, which would end each survivor before the membership has detected a loss.

    torch's agent sets `TORCH_NCCL_ASYNC_ERROR_HANDLING=1` in every worker, so that value does not show the user's choice.

    Raises:
        ValueError: the user has chosen a value that would end survivors.
    """
    for name, harmless in _HARMLESS.items():
        value = environ.get(name)
        if value is not None and value.strip().lower() not in harmless:
            raise ValueError(
                f"{name}={value} makes NCCL end this process when another worker is lost, so the job would not survive a loss: "
                f"remove {name} from the environment"
            )
    environ.update(_NEEDED)
    environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # channels are opened while a communicator connects, not at its first use


_OFF = frozenset(("0", "n", "no", "f", "false", ""))

_HARMLESS: Mapping[str, frozenset[str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _OFF | {"1"},
    "NCCL_ASYNC_ERROR_HANDLING": _OFF,
    "TORCH_NCCL_ENABLE_MONITORING": _OFF,
    "TORCH_NCCL_PROPAGATE_ERROR": _OFF,
    "TORCH_NCCL_DESYNC_DEBUG": _OFF,  # it and the next one switch the watchdog on, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING is
    "TORCH_DISTRIBUTED_DEBUG": frozenset(("", "off", "info")),
}
"""Values of torch's variables that let a worker survive the loss of another (torch/csrc/distributed/c10d, NCCLUtils)."""

_NEEDED: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog neither aborts groups nor throws
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nothing ends the process while the watchdog waits for an abort
    # After an error the watchdog gives this monitor time to write a dump: four times as long, 60 s by default, for each
    # collective in flight. The thread that drops the group waits for that.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # After each error the watchdog writes to the store of rank 0, so that all write a dump. After a loss of rank 0 each attempt
    # fails, and the watchdog collects a C++ traceback for each collective in flight.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


log = logging.getLogger(__name__)

STUCK_S = 30.0  # seconds for an abort; if its device does not return from one, a worker cannot take part in any further round
CLOSE_S = 10.0  # seconds for a planned shutdown, which waits for the other members; the groups are aborted after that
EXIT_STUCK = 70  # exit code of a worker if its device does not let go of a lost round


_ended_last: list[Sequence[Any]] = []
"""The groups that were ended last: one list at most."""


class GroupStuckError(WorldError):
    """The communicators of an ended round could not be aborted."""


class RoundEnd:
    """The end of one round's groups, without waiting for workers that are gone.

    Groups of an abortable backend, such as NCCL's, are open, then aborting or closing, then ended. Each change is made once. An
    abort or shutdown may block inside the driver while a kernel is stuck, so it runs in a thread of its own.

    The groups of the round that ended last are kept until the next one ends. The destructor of NCCL's waits for its watchdog,
    which needs the interpreter's lock to free a tensor. DDP's reducer drops its group while it holds that lock, so it must
    never be the last one that does.

    Args:
        groups: returns the groups of the round, the newest first. Called once, by the thread that ends them.
        what: name of the round in messages.
        report: publishes the error that ends this worker, if an abort is stuck. None: such an abort is left behind, as no
            kernel of these groups can hold up another round.
    """

    def __init__(self, groups: Callable[[], Sequence[Any]], what: str, report: Callable[[BaseException], None] | None) -> None:
        self._groups = groups
        self._what = what
        self._report = report
        self._lock = threading.Lock()
        self._is_open = True
        self._ended = threading.Event()

    def abort(self) -> None:
        """Begin to abort the groups, unless they are ending already. Never blocks."""
        self._begin(self._abort, STUCK_S, self._give_up)

    def close(self) -> None:
        """Begin to shut the groups down after all members have agreed to leave them. Never blocks."""
        self._begin(self._shut_down, CLOSE_S, self._abort_instead)

    def wait(self, timeout_s: float = STUCK_S) -> None:
        """Wait until the groups are gone, so that their memory is free and no kernel of theirs remains.

        Raises:
            GroupStuckError: they are not gone in time.
        """
        if not self._is_open and not self._ended.wait(timeout_s):
            raise self._stuck(timeout_s)

    def _begin(self, end: Callable[[Sequence[Any]], None], limit_s: float, too_late: Callable[[Sequence[Any]], None]) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            groups = list(self._groups())

        def run() -> None:
            try:
                end(groups)
            finally:
                self._ended.set()
                before, _ended_last[:] = list(_ended_last), [groups]
                del before  # in this thread: the destructors release the interpreter's lock

        def watch() -> None:
            if not self._ended.wait(limit_s):
                too_late(groups)

        threading.Thread(target=run, name="dlrover-end-round", daemon=True).start()
        threading.Thread(target=watch, name="dlrover-watch-end", daemon=True).start()

    def _abort(self, groups: Sequence[Any]) -> None:
        began = time.monotonic()
        try:
            torch_names.abort(groups)
        except Exception as error:
            log.warning("%s: its groups were aborted with an error, which changes nothing: %s", self._what, error)
        log.debug("%s: aborted in %.3f s", self._what, time.monotonic() - began)

    def _shut_down(self, groups: Sequence[Any]) -> None:
        try:
            for group in groups:
                group.shutdown()
        except Exception as error:
            log.warning("%s: its groups are aborted, because their shutdown failed: %s", self._what, error)
            self._abort(groups)

    def _abort_instead(self, groups: Sequence[Any]) -> None:
        log.warning("%s: a member did not take part in its shutdown for %.0f s; its groups are aborted", self._what, CLOSE_S)
        self._abort(groups)

    def _give_up(self, groups: Sequence[Any]) -> None:
        if self._report is None:
            log.warning(
                "%s: its communicators have not connected, and their abort waits for that; they are left behind", self._what
            )
            return
        error = self._stuck(STUCK_S)
        log.critical("%s", error)
        with contextlib.suppress(Exception):
            self._report(error)
        os._exit(EXIT_STUCK)  # the main thread may wait for a kernel that will never end

    def _stuck(self, waited_s: float) -> GroupStuckError:
        return GroupStuckError(
            f"{self._what}: the device has not returned from the abort of its communicators for {waited_s:.0f} s, so this "
            "worker cannot take part in another round; its agent has to start it again. Look for messages of the driver (Xid), "
            "and set NCCL_DEBUG=INFO to see what NCCL waits for"
        )


DEVICE_TICK_S = 1.0  # seconds between two looks at a wait for the device


def wait_for_device(device: torch.device) -> None:
    """Wait until the current stream of a device has completed its work. A CPU has none."""
    if device.type == "cpu":
        torch.cpu.synchronize()
    else:
        torch.get_device_module(device).current_stream(device).synchronize()


class DeviceWait:
    """Wait for a device, and end the round if the wait lasts longer than a collective may.

    The host does not wait for a collective of an asynchronous backend, such as NCCL. Only the stream does, and it continues
    after an abort as after a success, with arbitrary gradients in the buffers. So the host waits for the stream before results
    are used, and checks whether the round has ended. Nothing else limits this wait: NCCL's watchdog is off.

    Args:
        end_round: ends the round's collectives, so that the stream continues. Called from another thread.
    """

    def __init__(self, limit_s: float, end_round: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._end_round = end_round
        self._since = float("inf")
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def wait(self, device: torch.device) -> None:
        """Wait until the device's current stream has completed its work. The caller checks whether the round has ended."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="dlrover-device-wait", daemon=True)
            self._watcher.start()
        self._since = time.monotonic()
        try:
            wait_for_device(device)
        finally:
            self._since = float("inf")

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(min(DEVICE_TICK_S, self._limit_s / 4)):
            since = self._since
            if time.monotonic() - since > self._limit_s:
                log.error(
                    "this worker has waited %.0f s for its device, because another worker has not joined a collective; ending "
                    "the round. DLRoverStrategy(timeout=...) sets the limit",
                    time.monotonic() - since,
                )
                self._since = float("inf")
                self._end_round()


@contextlib.contextmanager
def checked_updates(check: Callable[[torch.device], None]) -> Iterator[None]:
    """Call `check` with each device before any step of a PyTorch optimizer of this process.

    If `check` raises an error, the step changes no parameter.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for device in {p.device for group in optimizer.param_groups for p in group["params"]}:
            check(device)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


class CommunicatorError(WorldError):
    """The communicators of a round could not be connected."""


class Communicators:
    """One worker's communicators of one round, for backends that are slow to connect.

    torch lets NCCL connect at the first collective, in the backward pass of the first step, without a time limit. Here a thread
    connects as soon as the round is known: for a planned round while the former one still trains.

    That thread starts no collective. Members may begin collectives of two communicators in different orders, and wait for each
    other forever on a device that cannot run both at once (NCCL's user guide, "Using multiple NCCL communicators
    concurrently"). One small reduction follows once the former round's groups are out of use.

    The thread connects or fails; the round may be abandoned at any time. A thread that hangs in the driver is left behind: it
    holds nothing that another round needs.

    Args:
        names: backends to connect, by device type.
        open_store: connects to the round's store; may wait.
        former: end of the previous groups. Their abort is awaited first: its kernels would hold up the reduction.
        timeout: limit of a collective.
    """

    def __init__(
        self,
        target: RoundRecord,
        rank: int,
        device: torch.device,
        names: Mapping[str, str],
        open_store: Callable[[], Store],
        former: RoundEnd | None,
        timeout: timedelta,
    ) -> None:
        self.round = target
        self._rank, self._device = rank, device
        self._names = names
        self._open_store = open_store
        self._former = former
        self._timeout = timeout
        self._backends: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.is_abandoned = False
        self.end: RoundEnd | None = None  # end of the abandoned communicators
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dlrover-communicators", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether they are connected, or have failed to."""
        return self._is_done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether they could not be connected, or were abandoned."""
        return self._error is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until they are connected, or have failed to; return whether they have. Without a limit the caller sets one."""
        return self._is_done.wait(timeout_s)

    def connected(self) -> dict[str, Any]:
        """Return the backends by name. Raises `CommunicatorError` if they could not be connected."""
        assert self.is_done
        with self._lock:  # another thread may abandon them now
            if self._error is not None:
                raise CommunicatorError(f"round {self.round.number}: {self._error}") from self._error
            backends, self._backends = self._backends, {}
        return backends

    def warm_up(self) -> None:
        """Run one small reduction in each communicator. The caller limits the wait, and abandons them after an error.

        Raises:
            CommunicatorError: a result is wrong.
        """
        self._use_device()
        with self._lock:
            backends = dict(self._backends)
        for name, backend in backends.items():
            ones = torch.ones(1, device=self._device)
            backend.allreduce([ones]).wait()
            wait_for_device(self._device)
            if int(ones) != len(self.round.members):
                raise CommunicatorError(
                    f"round {self.round.number}: the first reduction over {name} gave {float(ones)} among "
                    f"{len(self.round.members)} workers"
                )

    def abandon(self, reason: str = "the round was given up") -> None:
        """Abort connected and connecting communicators, and end all waits for them with an error. Never blocks."""
        with self._lock:
            self.is_abandoned = True
            self._error = self._error or CommunicatorError(reason)
            backends, self._backends = self._backends, {}
        self._is_done.set()
        if backends:
            # No abort reaches a communicator that still connects (pytorch issue 103264), and in non-blocking mode it may wait
            # for that. So a stuck abort proves nothing about the device, and the thread is left behind.
            self.end = RoundEnd(lambda: list(backends.values()), f"round {self.round.number}", None)
            self.end.abort()

    def _run(self) -> None:
        try:
            if self._former is not None:
                self._former.wait()
            self._use_device()
            store = self._open_store()
            for name in dict.fromkeys(self._names.values()):
                self._connect(name, PrefixStore(name, store))
        except BaseException as error:
            log.info("round %d: its communicators did not connect: %s", self.round.number, error)
            self._error = error
        else:
            log.debug("round %d: communicators after %.3f s", self.round.number, time.monotonic() - self._began)
        finally:
            self._is_done.set()

    def _use_device(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_device(self._device)  # a thread begins with the first device

    def _connect(self, name: str, store: Store) -> None:
        size = len(self.round.members)
        backend = torch_names.backend_beside_gloo(name, store, self._rank, size, self._timeout)
        with self._lock:
            if self.is_abandoned:
                raise CommunicatorError("the round was given up")
            self._backends[name] = backend  # it can be aborted after this line
        backend.eager_connect_single_device(self._device)


def slow_to_connect(backend: str) -> dict[str, str]:
    """Return the backends of a group, by device type, that are worth connecting early: all but gloo."""
    return {device: name for device, name in names_by_device(backend).items() if name != "gloo"}


class StoreServer:
    """The store that this worker serves in rounds where it is rank 0.

    Every worker runs one from the start, so that a new rank 0 can serve a round at once. The port has a second use: it refuses
    connections as soon as this process is dead.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=512)
        port = listener.getsockname()[1]
        listener_fd = listener.detach()
        self._store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener_fd,
        )
        self.port: int = self._store.port
        self.listener = (listener_fd, os.stat(listener_fd).st_ino)  # (fd, inode)


class RoundSockets:
    """The connections of a worker's round, which another thread may shut down.

    The main thread forms rounds. The membership thread only severs them, so that a collective in which the main thread is
    blocked raises at once.

    Args:
        member: holds the round that is formed or being formed; this class changes it under the lock.
        server: this worker's store. Others may be connected to it for a newer round than the severed one.
        timeout_s: timeout of the groups, which identifies gloo's sockets.
    """

    def __init__(self, member: Member, server: StoreServer, timeout_s: float) -> None:
        self.are_severed = False
        self.end: RoundEnd | None = None  # end of the round's groups, if their backend is abortable; set while they are in use
        self._member = member
        self._server = server
        self._timeout_s = timeout_s
        self._store_port = 0  # port of the round's store
        self._connects_late = False  # gloo opens sockets during the round, too
        self._lock = threading.Lock()
        self._sockets: list[tuple[int, int]] = []  # (fd, inode) of the group's connections
        self._known_inodes: set[int] = set()  # inodes of sockets that are older than the group
        self.severed: list[tuple[int, int]] = []  # (fd, inode) of connections that are down; another list in each round
        self._severed_at = 0.0

    @property
    def owned(self) -> list[tuple[int, int]]:
        """(fd, inode) of the sockets that forked children must not keep: their copies would hide our death from the peers."""
        with self._lock:
            return [self._server.listener, *self._sockets, *self._opened_late()]

    @property
    def are_severed_for_good(self) -> bool:
        """Whether the sockets were severed so long ago that gloo has woken every waiter that it will wake."""
        return self.are_severed and time.monotonic() - self._severed_at > AWAKE_S

    def begin_forming(self, number: int, store_port: int) -> None:
        """Begin to form round `number`, which owns all connections of gloo and to its store that are opened from here on."""
        with self._lock:
            self._member.number = number
            self._store_port = store_port
            self._known_inodes = set(inet_sockets().values())
            self._sockets = []
            self.severed = []
            self._connects_late = False
            self.are_severed = False
            self._member.forming = True

    def end_forming(self, connects_late: bool = False) -> None:
        """Note that the round is formed, or was given up.

        Args:
            connects_late: whether gloo connects some workers only when they exchange their first message.
        """
        with self._lock:
            self._connects_late = connects_late
            # Both change together: a thread that severs the group in between would find no sockets, and not try again.
            self._sockets = self._opened_since(self._known_inodes)
            self._member.forming = False

    def add_beside(self, known_inodes: set[int]) -> None:
        """Add sockets opened since all inodes were `known_inodes` to the round."""
        with self._lock:
            self._sockets += self._opened_since(known_inodes)

    def follow(self, view: WorkerView, evicted: bool) -> None:
        """Sever the group if it cannot complete any more collectives.

        Called by the membership thread, and by the main thread after it has formed a round.
        """
        with self._lock:
            number, forming = self._member.number, self._member.forming
        if number == 0:
            return
        self._member.note(view)
        must_cut_off = self._member.must_cut_off(view, number, forming, evicted)
        # Repeated while the round is being formed: the main thread may wait on a socket that was opened after the last time.
        if must_cut_off and (forming or not self.are_severed):
            self.sever(number)

    def sever(self, number: int, quietly: bool = False) -> None:
        """Shut down the connections of round `number`, unless the main thread has already moved to another round."""
        with self._lock:
            if number != self._member.number:
                return
            end = self.end
            if not quietly and not self.are_severed:
                self.are_severed, self._severed_at = True, time.monotonic()
            if self._member.forming:
                doomed = self._opened_since(self._known_inodes)
            else:
                doomed, self._sockets = [*self._sockets, *self._opened_late()], []
            for fd, inode in doomed:
                if shut_down(fd, inode):
                    self.severed.append((fd, inode))
        if end is not None and not quietly:
            end.abort()

    def sever_current(self) -> None:
        """Shut down the connections of the round that this worker is in."""
        self.sever(self._member.number)

    def _opened_late(self) -> list[tuple[int, int]]:
        if not self._connects_late:
            return []
        return self._opened_since(self._known_inodes.union(inode for _, inode in self._sockets))

    def _opened_since(self, known_inodes: set[int]) -> list[tuple[int, int]]:
        """Return the round's sockets, but those with `known_inodes`. Other threads open sockets while a round forms."""
        return [(fd, inode) for fd, inode in inet_sockets().items() if inode not in known_inodes and self._is_of_round(fd)]

    def _is_of_round(self, fd: int) -> bool:
        """Whether a socket is one of gloo's, or leads to the round's store. One that still connects is neither."""
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    return False
                seconds: int = struct.unpack("ll", sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))[0]
                return seconds == int(self._timeout_s) or sock.getpeername()[1] == self._store_port
        except OSError:
            return False  # closed, or not connected to anything

    def destroy_group(self, is_agreed: bool) -> RoundEnd | None:
        """Leave the default group, if there is one, without waiting for its end.

        Args:
            is_agreed: whether all members leave it now, after their last collective. An abortable group is aborted otherwise.

        Returns:
            The end of an abortable group.
        """
        if not dist.is_initialized():
            return None
        # Other processes, such as forked loader workers, may hold copies of the sockets. Peers would then not notice that ours
        # are closed, but they notice the shutdown.
        self.sever(self._member.number, quietly=True)
        with self._lock:
            end, self.end = self.end, None
        if end is None:
            dist.destroy_process_group()
            return None
        if is_agreed and not self.are_severed:
            end.close()
        else:
            end.abort()
        torch_names.forget_groups()
        return end


@functools.cache
def protect_forks() -> None:
    """Prevent forked children, such as loader workers, from collecting process groups that their parent has abandoned.

    A group's destructor waits for its threads, which do not exist in the child, so it would hang forever.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def own_address(endpoints: str) -> str:
    """Return the address of this host on the route to etcd, which the other workers use as well.

    Raises:
        EtcdUnavailableError: none of the endpoints can be reached.
    """
    problems = []
    for host, port in parse_endpoints(endpoints):
        if port == 0:  # etcd's Unix socket, so all workers are on this host
            return host
        try:
            with socket.create_connection((host, port), timeout=5.0) as probe:
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            problems.append(f"{host}:{port}: {error}")
    raise EtcdUnavailableError(f"no endpoint of etcd can be reached from this host ({'; '.join(problems)})")


def use_interface_of(address: str) -> None:
    """Make gloo use the interface of `address`, unless the user chose one."""
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def inet_sockets() -> dict[int, int]:
    """Return the connected or listening sockets of this process: inode by file descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the socket was closed concurrently
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def shut_down(fd: int, inode: int) -> bool:
    """Shut down a connection, if it still is the one with this inode. Return whether it is down."""
    try:
        if os.stat(fd).st_ino != inode:
            return False  # the descriptor belongs to something else by now
        with socket.socket(fileno=os.dup(fd)) as sock:
            with contextlib.suppress(OSError):  # the peer is gone
                sock.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # closed concurrently
