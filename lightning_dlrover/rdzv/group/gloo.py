"""Connect gloo's process groups, and cut them off from outside: gloo has no abort, but its sockets can be shut down."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.etcd.config import parse_endpoints
from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.group.torch_names import TCPStore
from lightning_dlrover.rdzv.live.member import Member
from lightning_dlrover.rdzv.live.rounds import View

__all__ = [
    "RoundSockets",
    "StoreServer",
    "as_gloo",
    "inet_sockets",
    "num_begun",
    "own_address",
    "protect_forks",
    "shut_down",
    "use_interface_of",
    "with_gloo",
]

AWAKE_S = 0.5
"""After a group was cut off: all that gloo tells of it has failed by then."""


def with_gloo(backend: str) -> str:
    """The backend with gloo for tensors on the CPU: votes and the state of joiners travel through it."""
    if backend == "nccl":
        return "cpu:gloo,cuda:nccl"
    if backend != "gloo" and "cpu:gloo" not in backend.split(","):
        raise ValueError(
            f"process groups of the backend {backend!r} have no gloo for tensors on the CPU, through which workers vote and "
            "hand over their state: use 'gloo', 'nccl', or 'cpu:gloo' beside another one, such as 'cpu:gloo,cuda:nccl'"
        )
    return backend


@contextlib.contextmanager
def as_gloo(connected: dist.ProcessGroupGloo) -> Iterator[None]:
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


def num_begun(group: dist.ProcessGroupGloo, has_nccl: bool) -> int:
    """Collectives that this worker has begun in its round's group, whoever began them."""
    number = torch_names.num_begun(group)
    if has_nccl and (default := dist.group.WORLD) is not None:
        with contextlib.suppress(RuntimeError):  # not used yet
            number += torch_names.num_begun(torch_names.backend_of(default, torch.device("cuda")))
    return number


class StoreServer:
    """The store that this worker serves in rounds in which it is rank 0.

    Every worker holds one from the start, so that whoever becomes rank 0 can serve a round at once. The port has a second use:
    it refuses connections as soon as this process is dead.
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

    The main thread forms rounds; the membership thread only ever cuts them off, which makes a collective that the main thread
    is blocked in raise at once.

    Args:
        member: holds the round that is formed or being formed; changed here, under the lock.
        server: this worker's store, whose connections are spared.
        etcd: endpoints whose connections are spared.
        has_nccl: whether groups have to be aborted, too.
    """

    def __init__(self, member: Member, server: StoreServer, etcd: str, has_nccl: bool) -> None:
        self.are_severed = False
        self._member = member
        self._server = server
        self._etcd_ports = {port for _, port in parse_endpoints(etcd)}
        self._has_nccl = has_nccl
        self._lock = threading.Lock()
        self._sockets: list[tuple[int, int]] = []  # (fd, inode) of the group's connections
        self._known_inodes: set[int] = set()  # sockets that were there before the group
        self._severed_at = 0.0

    @property
    def owned(self) -> list[tuple[int, int]]:
        """(fd, inode) of the sockets that forked children must not keep: copies would hide our death from the others."""
        with self._lock:
            return [self._server.listener, *self._sockets]

    @property
    def are_severed_for_good(self) -> bool:
        """Whether they were cut off so long ago that whatever gloo wakes is awake."""
        return self.are_severed and time.monotonic() - self._severed_at > AWAKE_S

    def begin_forming(self, number: int) -> None:
        """Round `number` is being formed: sockets that are opened from here on are its own."""
        with self._lock:
            self._member.number = number
            self._known_inodes = set(inet_sockets().values())
            self._sockets = []
            self.are_severed = False
            self._member.forming = True

    def end_forming(self) -> None:
        """The round is formed, or was given up."""
        with self._lock:
            # Both at once: who cuts the group off in between would find nothing, and not come again.
            self._sockets = _sockets_beside(self._known_inodes)
            self._member.forming = False

    def add_beside(self, known_inodes: set[int]) -> None:
        """Sockets that were opened since the inodes of all were `known_inodes` belong to the round, too."""
        with self._lock:
            self._sockets += _sockets_beside(known_inodes)

    def follow(self, view: View, evicted: bool) -> None:
        """Cut the group off when it will complete no more collectives. The membership thread, and who has formed a round."""
        with self._lock:
            number, forming = self._member.number, self._member.forming
        if number == 0:
            return
        self._member.note(view)
        must_cut_off = self._member.must_cut_off(view, number, forming, evicted)
        # While it is being formed, again and again: what the main thread waits on may have been opened after the last time.
        if must_cut_off and (forming or not self.are_severed):
            self.sever(number)

    def sever(self, number: int, quietly: bool = False) -> None:
        """Shut down the connections of round `number`, unless the main thread has gone on to another round meanwhile."""
        with self._lock:
            if number != self._member.number:
                return
            if not quietly and not self.are_severed:
                self.are_severed, self._severed_at = True, time.monotonic()
            if self._member.forming:
                doomed = _sockets_beside(self._known_inodes)
            else:
                doomed, self._sockets = self._sockets, []
            for fd, inode in doomed:
                shut_down(fd, inode, self._etcd_ports, self._server.port)
            if not quietly and self._has_nccl and dist.is_initialized():
                with contextlib.suppress(RuntimeError):
                    torch_names.abort_process_group()

    def destroy_group(self) -> None:
        """Leave the default group, if there is one."""
        if not dist.is_initialized():
            return
        if self._has_nccl and self.are_severed:
            torch_names.abort_process_group()
            return
        # Other processes, such as forked loader workers, may hold copies of the sockets; closing ours would then go
        # unnoticed by the peers, shutting them down does not.
        self.sever(self._member.number, quietly=True)
        dist.destroy_process_group()


def _sockets_beside(known_inodes: set[int]) -> list[tuple[int, int]]:
    return [(fd, inode) for fd, inode in inet_sockets().items() if inode not in known_inodes]


@functools.cache
def protect_forks() -> None:
    """Keep forked children, such as loader workers, from collecting process groups that their parent has left behind.

    A group's destructor waits for its threads, which do not exist in the child: it would hang there for good.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def own_address(endpoints: str) -> str:
    """The address of this host on the way to etcd: the other workers come the same way.

    Raises:
        EtcdUnavailableError: none of the endpoints can be reached.
    """
    problems = []
    for host, port in parse_endpoints(endpoints):
        try:
            with socket.create_connection((host, port), timeout=5.0) as probe:
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            problems.append(f"{host}:{port}: {error}")
    raise EtcdUnavailableError(f"no endpoint of etcd can be reached from this host ({'; '.join(problems)})")


def use_interface_of(address: str) -> None:
    """Let gloo use the interface that `address` belongs to, unless the user chose one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def inet_sockets() -> dict[int, int]:
    """Connected or listening sockets of this process: inode by file descriptor."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(entry.name)] = status.st_ino
    return found


def shut_down(fd: int, inode: int, spared_peer_ports: set[int], store_port: int) -> None:
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
