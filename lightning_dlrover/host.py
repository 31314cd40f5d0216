"""This host and its processes: addresses and free ports, control groups, stacks, children, and what `/proc` shows."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from lightning_dlrover import variables


def address_of_name(name: str) -> str | None:
    """Return the first address that a host name resolves to; None if it does not."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    return str(found[0][4][0]) if found else None


def route_address(host: str, port: int) -> str | None:
    """Return this host's address on the route to another one; None if there is no route. Sends nothing."""
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # connecting a UDP socket only chooses the route
            return str(probe.getsockname()[0])
    return None


def own_address() -> str:
    """Return this host's address for other hosts: the address of its name, else of the outgoing interface."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    return route_address("10.255.255.255", 1) or "127.0.0.1"


def free_port(host: str) -> int:
    """Return a free port of an address of this host. An empty address stands for all of IPv4, `::` for all of IPv6."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address of this host."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


# Linux control groups that this process belongs to, version 1 and 2.

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

GROUP_NAME = re.compile(r"dlrover-(\d+)-(.+)")  # of our groups: the id of the process that created it, and its owner
CONTROLLER = "controller"  # last part of the name of the controller's own group


def cgroup_folders(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield this process's control group and its ancestors, version 2 and 1; the limits of all of them hold."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        roots = [cgroups / controllers, cgroups / controller] if controllers else [cgroups, cgroups / "unified"]
        for root in roots:
            # In a container the path may be the host's, while only its root is visible here.
            folder = root / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def is_of_one_node(folder: Path, environ: Mapping[str, str]) -> bool:
    """Return whether a control group holds processes of only one of the job's nodes: ours, or that of a node's Slurm job."""
    # Only a Slurm job that our controller submitted is certain to be one node. Other ones may hold several nodes.
    is_slurms = variables.NODE in environ and variables.STARTED_BY not in environ
    slurm_job = f"job_{variables.slurm_job(environ)}" if is_slurms else ""
    names = ((name, GROUP_NAME.fullmatch(name)) for name in folder.parts)
    return any(name == slurm_job or (ours is not None and ours[2] != CONTROLLER) for name, ours in names)


def current_frames() -> dict[int, FrameType]:
    """Return the topmost frame of each thread by its identifier.

    Python before 3.11.8 and 3.12.2 collects garbage in this call while it holds the lock of all threads, and a finalizer that
    waits for another thread then stops the process for good (CPython issue 106883). So garbage is not collected here.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def main_thread_frame() -> FrameType | None:
    """Return the main thread's topmost frame."""
    return current_frames().get(threading.main_thread().ident or 0)


# What /proc shows of processes, and children of this one that `subprocess` has not started.

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37

_STAT_ADDRESSES = slice(45, 49)
"""Fields of /proc/self/stat, after the command's name, with the limits of the arguments and of the environment in memory."""


def pss_bytes(pid: int) -> int:
    """Return a process's memory, where a page that n processes share counts as 1 / n; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def own_children() -> list[int]:
    """Return the process ids of this process's children, where the kernel shows them."""
    with contextlib.suppress(OSError):
        return [int(text) for text in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def memory_regions() -> tuple[int, int, int, int]:
    """Return the addresses in memory of the arguments and the variables that `/proc` shows: start and end of each."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        start, end, first, last = map(int, file.read().rpartition(")")[2].split()[_STAT_ADDRESSES])
    return start, end, first, last


def fits_in_proc(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    start, end, first, last = memory_regions()
    return len(_joined(arguments)) <= end - start and len(_joined(_lines(environ))) <= last - first


def show_in_proc(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Take over the environment, and let `/proc` show it and the arguments.

    Other processes find a job's processes by them.
    """
    start, end, first, last = memory_regions()
    os.environ.clear()  # the C library must not point into the memory that is written next
    for begin, limit, texts in ((start, end, arguments), (first, last, _lines(environ))):
        ctypes.memmove(begin, _joined(texts).ljust(limit - begin, b"\0"), limit - begin)
    os.environ.update(environ)


def _lines(environ: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environ.items()]


def _joined(texts: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Return the next `length` bytes from another process.

    Raises:
        EOFError: it has ended before.
    """
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise EOFError("the other process has ended")
        data += more
    return data


@contextlib.contextmanager
def as_subreaper() -> Iterator[None]:
    """Make orphans below this process its children for a while."""
    library = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    library.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) is refused")
    try:
        yield
    finally:
        library.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class ForkedProcess:
    """A forked child of this process, with the methods of `subprocess.Popen` that its users call."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(args)
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has reaped it
                self.returncode = 255
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = 0.0005
        while (code := self.poll()) is None:
            left_s = float("inf") if deadline is None else deadline - time.monotonic()
            if timeout is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            pause_s = min(2 * pause_s, left_s, 0.05)
            time.sleep(pause_s)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def why_no_orphans() -> str:
    """Return why a process here cannot adopt orphans and show its arguments in `/proc`; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"the system is {sys.platform}, not Linux"
    try:
        start, end, first, last = memory_regions()
        if not (0 < start < end and 0 < first < last):
            return "/proc/self/stat hides the addresses of arguments, as some sandboxes do"
        os.listdir("/proc/self/task")
        with as_subreaper():
            return ""
    except (OSError, ValueError) as error:
        return str(error)
