"""Sever a round from outside: shut down the sockets of gloo, which has no abort, and begin the abort of other groups."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_dlrover.addresses import interface_of
from lightning_dlrover.rdzv.etcd.config import parse_endpoints
from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.group.ending import RoundEnd
from lightning_dlrover.rdzv.group.torch_names import TCPStore
from lightning_dlrover.rdzv.group.waits import AWAKE_S
from lightning_dlrover.rdzv.live.member import Member
from lightning_dlrover.rdzv.live.worker_view import WorkerView

__all__ = [
    "RoundSockets",
    "StoreServer",
    "inet_sockets",
    "num_begun_in",
    "own_address",
    "protect_forks",
    "shut_down",
    "use_interface_of",
]


def num_begun_in(backends: Sequence[Any]) -> int:
    """Return the number of collectives that any code of this worker has begun in the backends of its round's group."""
    return sum(torch_names.num_begun(backend) for backend in backends)


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
        timeout_s: timeout of the groups, by which gloo's sockets are recognised.
    """

    def __init__(self, member: Member, server: StoreServer, timeout_s: float) -> None:
        self.are_severed = False
        self.end: RoundEnd | None = None  # of the round's groups, if their backend is abortable; set while they are in use
        self._member = member
        self._server = server
        self._timeout_s = timeout_s
        self._store_port = 0  # of the round's store
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
        """Shut down the connections of round `number`, unless the main thread has gone on to another round meanwhile."""
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

    A group's destructor waits for its threads, which do not exist in the child, so it would hang for ever.
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
        with contextlib.suppress(OSError):  # the socket was closed meanwhile
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
        return False  # closed meanwhile
