"""Time to change the members of a gloo group: torch's own `_reconfigure` against a new default group, as our package makes it.

    python benchmarks/reconfigure.py [--rounds N] [--quick]

Three processes on loopback share one store, which survives all of them. Two form a group, and the third one waits in a group of
its own. Each round makes these changes with every way, in turn:

    grow      from two workers to three
    shrink    from three to two; the one that leaves is not timed
    kill      one of three gets SIGKILL while the other two wait for it in an all-reduce of 1 MiB of gradients
    small     one of three gets SIGKILL while the other two wait for it in an all-reduce of one number
    vanish    one of three gets SIGSTOP, as if its host had lost power, while the others wait as for `kill`

The clock starts when the change is decided, and stops when the last worker has made its first all-reduce in the new group. The
ways are:

    reconfigure    the workers exchange handles, and call `torch.distributed._reconfigure`
    severed        the same, after they have shut down the sockets of the former group
    ours           the workers shut down these sockets and destroy the former group, connect to the store, exchange hellos,
                   connect gloo, and create the default group around it

The time of a loss includes the wait for the end of the pending all-reduce, which is printed as well. Torch has no call that
ends one of gloo from outside. It raises at once where it waits for the dead worker itself, and at the timeout of the group
where it waits for another survivor, or for a host that is silent.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from jobs import START_TIMEOUT_S, BenchmarkError, describe_machine, result_line

from lightning_dlrover.rdzv.group.forming import await_hellos, publish_hello
from lightning_dlrover.rdzv.transport import torch_names
from lightning_dlrover.rdzv.transport.process_groups import inet_sockets, shut_down
from lightning_dlrover.rdzv.transport.torch_names import PrefixStore, Store, TCPStore

Way = Literal["reconfigure", "severed", "ours"]
WAYS: tuple[Way, ...] = ("reconfigure", "severed", "ours")
NUM_GRADIENTS = 2**18  # 1 MiB
LOSSES = {  # signal, and numbers in the pending all-reduce
    "kill": (signal.SIGKILL, NUM_GRADIENTS),
    "small": (signal.SIGKILL, 1),
    "vanish": (signal.SIGSTOP, NUM_GRADIENTS),
}
CHANGES = ("grow", "shrink", *LOSSES)

GROUP_TIMEOUT = timedelta(seconds=5)
STORE_TIMEOUT = timedelta(seconds=60)
BLOCKED_S = 0.2
"""Seconds that the survivors of a loss have to enter the all-reduce in which they wait."""


@dataclass(frozen=True)
class Form:
    """A round to form: its members by name, in the order of their ranks."""

    number: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Formed:
    """Times of the monotonic clock, which all processes of a machine share."""

    exchanged_s: float  # all hellos or handles are there
    reduced_s: float
    num_reduced: float  # workers in the first all-reduce


# --- a worker -----------------------------------------------------------------------------------------------------------------


class Worker:
    """One of the processes: forms a round whenever it receives one, or waits in an all-reduce that cannot end well."""

    def __init__(self, name: str, way: Way, store_port: int) -> None:
        self._name = name
        self._way = way
        self._store_port = store_port
        self._store = self._connect()
        self._former: list[tuple[int, int]] = []  # (fd, inode) of gloo's sockets
        self._devices: list[Any] = []
        if way == "ours":
            self._devices = torch_names.gloo_devices(is_late=False)
        else:
            # The rank is part of the first handle, and handles must differ. It has no other meaning before the first round.
            rank = int(name)
            c10d: Any = dist
            c10d.init_process_group(
                "gloo", store=self._store, rank=rank, world_size=rank + 1, timeout=GROUP_TIMEOUT, enable_reconfigure=True
            )

    def serve(self, orders: Connection, decisions: Connection) -> None:
        """Carry out orders until the other end is closed."""
        if self._way != "reconfigure":
            threading.Thread(target=self._sever_when_decided, args=(decisions,), daemon=True).start()
        with contextlib.suppress(EOFError):
            while True:
                order = orders.recv()
                orders.send(self._form(order) if isinstance(order, Form) else self._block(order))

    def _connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self._store_port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)

    def _form(self, order: Form) -> Formed:
        if self._way != "reconfigure":
            self._sever()
        if self._way == "ours" and dist.is_initialized():
            dist.destroy_process_group()
        known = set(inet_sockets().values())
        folder = f"round/{order.number}"
        if self._way == "ours":
            rendezvous = PrefixStore(folder, self._connect())
            self._exchange(rendezvous, order.members, b"")
            exchanged_s = time.monotonic()
            self._create_group(rendezvous, order.members)
        else:
            c10d: Any = dist
            handles = self._exchange(PrefixStore(folder, self._store), order.members, c10d._get_reconfigure_handle().encode())
            exchanged_s = time.monotonic()
            c10d._reconfigure(order.number, [handles[member].decode() for member in order.members]).wait()
        total = torch.ones(1)
        dist.all_reduce(total)
        reduced_s = time.monotonic()
        self._former = [
            (fd, inode) for fd, inode in inet_sockets().items() if inode not in known and not self._leads_to_store(fd)
        ]
        return Formed(exchanged_s, reduced_s, total.item())

    def _exchange(self, store: Store, members: Sequence[str], hello: bytes) -> dict[str, bytes]:
        publish_hello(store, members, self._name, hello)
        return await_hellos(store, members, STORE_TIMEOUT.total_seconds())

    def _create_group(self, store: Store, members: Sequence[str]) -> None:
        rank, size = members.index(self._name), len(members)
        connected = torch_names.gloo(PrefixStore("gloo", store), rank, size, GROUP_TIMEOUT, self._devices)
        with torch_names.as_connected({"gloo": connected}):
            dist.init_process_group(
                "gloo", store=PrefixStore("group", store), rank=rank, world_size=size, timeout=GROUP_TIMEOUT
            )

    def _block(self, num_numbers: int) -> float:
        """Wait for a lost worker, and return the time when the wait ended."""
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(num_numbers))
        return time.monotonic()

    def _sever_when_decided(self, decisions: Connection) -> None:
        with contextlib.suppress(EOFError):
            while True:
                decisions.recv()
                self._sever()

    def _sever(self) -> None:
        former, self._former = self._former, []
        for fd, inode in former:
            shut_down(fd, inode)

    def _leads_to_store(self, fd: int) -> bool:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            return bool(sock.getpeername()[1] == self._store_port)
        return False


def _run(name: str, way: Way, store_port: int, orders: Connection, decisions: Connection) -> None:
    torch.set_num_threads(1)
    Worker(name, way, store_port).serve(orders, decisions)


# --- all of them --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Seconds since a change was decided."""

    exchange_s: float
    total_s: float
    pending_s: float = 0.0  # until the last survivor's pending all-reduce had ended


class Workers:
    """Three workers, `0` to `2`, of which the last one comes and goes."""

    def __init__(self, way: Way, store_port: int) -> None:
        self._way = way
        self._store_port = store_port
        # A fork of a process that has imported torch starts at once, and it has no threads yet.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lightning_dlrover.rdzv.transport.process_groups"])
        self._processes: dict[str, Any] = {}
        self._orders: dict[str, Connection] = {}
        self._decisions: dict[str, Connection] = {}

    def __enter__(self) -> Workers:
        for name in "012":
            self._start(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def form(self, members: str) -> Change:
        """Order a round of some workers, and wait until it has formed."""
        decided_s = time.monotonic()
        return self._formed(members, decided_s, self._order(members))

    def lose(self, loss: signal.Signals, num_numbers: int) -> Change:
        """Take the last one of three away while the others wait for it in an all-reduce."""
        for name in "01":
            self._orders[name].send(num_numbers)
        time.sleep(BLOCKED_S)
        os.kill(self._processes["2"].pid, loss)
        decided_s = time.monotonic()
        for name in "01":
            self._decisions[name].send(None)
        order = self._order("01")
        pending_s = max(self._receive(name, "the end of its all-reduce") for name in "01") - decided_s
        formed = self._formed("01", decided_s, order)
        return Change(formed.exchange_s, formed.total_s, pending_s)

    def replace_lost(self) -> None:
        self._processes["2"].kill()
        self._processes["2"].join()
        self._start("2")
        self.form("2")

    def _start(self, name: str) -> None:
        (self._orders[name], orders), (self._decisions[name], decisions) = self._context.Pipe(), self._context.Pipe()
        arguments = (name, self._way, self._store_port, orders, decisions)
        self._processes[name] = self._context.Process(target=_run, args=arguments, daemon=True)
        self._processes[name].start()
        orders.close()
        decisions.close()

    def _order(self, members: str) -> Form:
        # Torch accepts a number once, and all groups share the store. So the number is a time.
        order = Form(time.monotonic_ns(), tuple(members))
        for name in members:
            self._orders[name].send(order)
        return order

    def _formed(self, members: str, decided_s: float, order: Form) -> Change:
        found: list[Formed] = [self._receive(name, f"round {order.number}") for name in members]
        if any(formed.num_reduced != len(members) for formed in found):
            raise BenchmarkError(f"{self._way}: an all-reduce of {len(members)} workers returned the sums {found}")
        return Change(max(f.exchanged_s for f in found) - decided_s, max(f.reduced_s for f in found) - decided_s)

    def _receive(self, name: str, what: str) -> Any:
        if not self._orders[name].poll(START_TIMEOUT_S):
            raise BenchmarkError(f"{self._way}: worker {name} did not report {what} within {START_TIMEOUT_S:.0f} s")
        try:
            return self._orders[name].recv()
        except EOFError as error:
            raise BenchmarkError(f"{self._way}: worker {name} ended before it reported {what}; see its error above") from error


def run(way: Way, store_port: int) -> dict[str, Change]:
    """Make all changes once with one way."""
    with Workers(way, store_port) as workers:
        workers.form("2")
        workers.form("01")
        found = {"grow": workers.form("012"), "shrink": workers.form("01")}
        for name, (loss, num_numbers) in LOSSES.items():
            workers.form("012")
            found[name] = workers.lose(loss, num_numbers)
            workers.replace_lost()
        return found


# --- the figures --------------------------------------------------------------------------------------------------------------


def report(name: str, way: Way, changes: Sequence[Change]) -> float:
    """Print one line, and return the median seconds."""
    totals = [change.total_s for change in changes]
    exchange_s = statistics.median(change.exchange_s for change in changes)
    detail = f"pending all-reduce until {statistics.median(c.pending_s for c in changes):.4f}, " if name in LOSSES else ""
    print(
        f"{name:7} {way:12} median {statistics.median(totals):.4f} s, from {min(totals):.4f} to {max(totals):.4f} "
        f"({detail}all hellos after {exchange_s:.4f})"
    )
    return statistics.median(totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="number of times that each change is made, default: 9")
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    if not hasattr(dist, "_reconfigure"):
        print(f"torch {torch.__version__} is too old: it has no torch.distributed._reconfigure, which 2.14 introduces")
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    num_rounds = 1 if options.quick else options.rounds
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    found: defaultdict[tuple[str, Way], list[Change]] = defaultdict(list)
    for number in range(num_rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            for name, change in run(way, store.port).items():
                found[name, way].append(change)
    print(f"{num_rounds} rounds, 3 workers on loopback, timeout of the groups {GROUP_TIMEOUT.total_seconds():.0f} s")
    median_s = {(name, way): report(name, way, found[name, way]) for name in CHANGES for way in WAYS}
    planned_s: dict[Way, float] = {
        way: statistics.median(change.total_s for name in ("grow", "shrink") for change in found[name, way]) for way in WAYS
    }
    print(
        result_line(
            {
                "reconfigure": planned_s["reconfigure"],
                "ours": planned_s["ours"],
                "loss_reconfigure": median_s["kill", "reconfigure"],
                "loss_ours": median_s["kill", "ours"],
            }
        )
    )


if __name__ == "__main__":
    main()
