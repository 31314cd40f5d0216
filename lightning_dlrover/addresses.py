"""This host's addresses, network interfaces and free ports."""

from __future__ import annotations

import contextlib
import socket

import psutil

__all__ = ["address_of_name", "free_port", "interface_of", "own_address", "route_address"]


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
