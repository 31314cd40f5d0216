"""This host and this process: addresses and free ports, control groups, and the stack of a thread."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
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
