"""Simulated hosts on this machine, one of which can vanish as if it lost power: it neither refuses nor answers any more.

Each host is a network namespace on a bridge. Where namespaces are not permitted, a host is a name, and vanishing is a SIGSTOP
of its processes. They, too, neither refuse nor answer, but the kernel still acknowledges data sent to them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

INTERFACE = "eth0"


@dataclass(frozen=True)
class Host:
    name: str
    link: str  # bridge's end of its cable; empty: it has none

    @property
    def enter(self) -> list[str]:
        """Prefix of commands that run on the host."""
        return ["ip", "netns", "exec", self.name] if self.link else []

    @property
    def environment(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE} if self.link else {}


class Hosts:
    """A network of hosts; leaving it removes all."""

    def __init__(self) -> None:
        self._bridge = f"dlr{os.getpid()}"
        self._network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self._hosts: list[Host] = []
        self.are_real = _works("ip", "link", "add", self._bridge, "type", "bridge")
        if self.are_real:
            _run("ip", "address", "add", f"{self._network}.1/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for host in self._hosts:
            if host.link:
                _works("ip", "netns", "delete", host.name)  # deletes the cable, too
                _works("ip", "link", "delete", host.link)
        if self.are_real:
            _works("ip", "link", "delete", self._bridge)

    @property
    def address(self) -> str:
        """This machine's address, as the hosts see it."""
        return f"{self._network}.1" if self.are_real else "127.0.0.1"

    def add(self) -> Host:
        number = len(self._hosts) + 2
        host = Host(f"{self._bridge}h{number}", f"{self._bridge}v{number}" if self.are_real else "")
        self._hosts.append(host)
        if self.are_real:
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", INTERFACE, "netns", host.name)
            _run("ip", "link", "set", host.link, "master", self._bridge, "up")
            inside = ["ip", "-netns", host.name]
            _run(*inside, "address", "add", f"{self._network}.{number}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
            _run(*inside, "link", "set", "lo", "up")
        return host

    def let_vanish(self, host: Host, pids: Iterable[int]) -> None:
        """Cut a host off at once. `pids` are all its processes."""
        if host.link:
            _run("ip", "link", "set", host.link, "down")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if host.link else signal.SIGSTOP)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
