"""Check this host: shared memory, limits, names and addresses, ports, clock.

Thresholds are chosen so that an ordinary laptop passes. Every check takes the figures that it judges as parameters.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from lightning_dlrover.addresses import address_of_name, interface_of, own_address, route_address
from lightning_dlrover.finding import Finding, error, ok, warning
from lightning_dlrover.observe.cgroups import CGROUPS, PROC, cgroup_folders
from lightning_dlrover.observe.resources import available_bytes, available_cores
from lightning_dlrover.rdzv.etcd.config import is_loopback

__all__ = [
    "check_clock",
    "check_files",
    "check_interfaces",
    "check_memory",
    "check_name",
    "check_name_server",
    "check_port",
    "check_processes",
    "check_shared_memory",
    "is_here",
    "port_holder",
]

MIB, GIB = 1 << 20, 1 << 30

SHARED_BYTES = GIB
"""Size of /dev/shm below which loader workers, snapshots and NCCL soon lack room. Containers have 64 MiB by default."""

FREE_SHARED_BYTES = 256 * MIB
FILES, FEWEST_FILES = 1024, 256
"""Open files below which large jobs, and even small ones, run out of them. Linux allows 1,024 by default, macOS 256."""

THREADS = 512
"""Further threads and processes below which a few workers with their loader workers run out of them."""

WORKER_BYTES = GIB
"""Memory that an agent and a worker with torch and Lightning take, before the model."""

NAME_S = 1.0
"""Seconds for the name of an address, above which each round of a job is slow to form."""

CLOCK_S = 2.0
"""Difference of two clocks above which the times of events and ages mislead."""


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Check the size of shared memory: loader workers, snapshots of tables, several workers per agent, and NCCL use it."""
    check, more = "shared memory", "docker run --shm-size=8g; Kubernetes: an emptyDir with medium Memory; else mount -o remount"
    if not folder.is_dir():
        return error(check, f"{folder} is missing: loader workers and snapshots need it", f"mount a tmpfs there ({more})")
    if not os.access(folder, os.W_OK | os.X_OK):
        return error(check, f"{folder} cannot be written by user {os.getuid()}", f"chmod 1777 {folder}")
    usage = shutil.disk_usage(folder)
    text = f"{_size(usage.free)} of {_size(usage.total)} are free in {folder}"
    if usage.total < SHARED_BYTES:
        return warning(check, f"{text}: loader workers end with a bus error once it is full", more)
    if usage.free < FREE_SHARED_BYTES:
        return warning(check, text, f"remove files of processes that have ended: ls -la {folder}; or more: {more}")
    return ok(check, text)


def check_files(soft: int | None = None, hard: int | None = None) -> Finding:
    """Check the limit of open files; None: that of this process."""
    own_soft, own_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = own_soft if soft is None else soft, own_hard if hard is None else hard
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft} per process")
    may_raise = hard == resource.RLIM_INFINITY or hard >= FILES
    move = "ulimit -n 65536" if may_raise and (hard == resource.RLIM_INFINITY or hard >= 65536) else f"ulimit -n {hard}"
    if not may_raise:
        move = (
            f"raise the hard limit of {hard}: nofile in /etc/security/limits.conf, LimitNOFILE of a service, --ulimit of docker"
        )
    text = f"up to {soft} per process: each worker needs some for every other one, for loader workers and for etcd"
    return error("open files", text, move) if soft < FEWEST_FILES else warning("open files", text, move)


def check_processes(left: int | None = None, source: str = "") -> Finding:
    """Check how many processes and threads may be started; None: by this process."""
    if left is None:
        left, source = _processes_left()
    if left is None:
        return ok("processes", "no limit")
    text = f"{max(0, left)} more processes and threads may be started ({source})"
    if left >= THREADS:
        return ok("processes", text)
    move = "raise the limit of the control group (docker --pids-limit)" if "group" in source else "ulimit -u 65536"
    return (error if left < THREADS // 4 else warning)("processes", f"{text}; a worker takes about a hundred", move)


def _processes_left(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int | None, str]:
    """Return how many processes and threads may still be started, and by which limit; None: there is none."""
    limits: list[tuple[int, str]] = []
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.getuid() != 0:  # root is not limited by it
        limits.append((most - _num_threads_of(os.getuid()), "ulimit -u"))
    for folder in cgroup_folders("pids", proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # no limit
            allowed, used = (int((folder / name).read_text()) for name in ("pids.max", "pids.current"))
            limits.append((allowed - used, f"control group {folder}"))
    return min(limits) if limits else (None, "")


def _num_threads_of(user: int) -> int:
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == user:
                total += process.num_threads()
    return total


def check_memory(available: int | None = None, cores: float | None = None, addresses: int | None = None) -> list[Finding]:
    """Check memory and cores within control groups, and the limit of addresses; None: those of this process.

    Args:
        available: bytes.
        addresses: bytes of virtual memory; `resource.RLIM_INFINITY`: no limit.
    """
    available = available_bytes() if available is None else available
    cores = available_cores() if cores is None else cores
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0] if addresses is None else addresses
    text = f"{_size(available)} are available, with {cores:g} cores"
    move = "end other programs, give the container or Slurm job more memory, or use a larger host"
    findings = [ok("memory", text)]
    if available < WORKER_BYTES:
        worst = error if available < WORKER_BYTES // 2 else warning
        findings = [worst("memory", f"{text}: an agent and a worker take {_size(WORKER_BYTES)} before the model", move)]
    if addresses != resource.RLIM_INFINITY and addresses < 16 * GIB:
        text = f"addresses are limited to {_size(addresses)}, which programs with many threads reserve without using them"
        findings.append(warning("addresses", text, "ulimit -v unlimited; limit memory with a control group instead (--mem)"))
    return findings


def check_name(
    endpoint: tuple[str, int] | None,
    name: str | None = None,
    resolve: Callable[[str], str | None] = address_of_name,
) -> Finding:
    """Check that this host's name resolves, and show the address that other hosts get.

    Args:
        endpoint: host and port of etcd; None: none is given.
        resolve: returns the address of a name, None if it has none.
    """
    name = socket.gethostname() if name is None else name
    used = _address_for_others(endpoint)
    resolved = resolve(name)
    if resolved is None:
        return warning(
            "host name",
            f"{name!r} does not resolve; process groups that are formed outside of a job need it",
            f"add the line '{own_address()} {name}' to /etc/hosts, or fix the DNS entry",
        )
    loopback = is_loopback(resolved)
    return ok(
        "host name",
        f"{name} is {resolved}" + (" (loopback)" if loopback else "") + ("" if used == resolved else f"; workers use {used}"),
    )


def check_name_server(endpoint: tuple[str, int] | None, address: str | None = None) -> Finding:
    """Check that the name of this host's address is found soon, or found missing.

    Torch asks for the name of each store's address before it connects, as an IPv6 address, and waits for the answer.

    Args:
        endpoint: host and port of etcd; None: none is given.
        address: another address than the one that workers use.
    """
    address = _address_for_others(endpoint) if address is None else address
    asked_for = address if ":" in address else f"::ffff:{address}"

    def ask() -> None:
        with contextlib.suppress(OSError):  # an address without a name is no trouble
            socket.getnameinfo((asked_for, 0), socket.NI_NUMERICSERV)

    asking = threading.Thread(target=ask, daemon=True)
    began = time.monotonic()
    asking.start()
    asking.join(NAME_S)
    if asking.is_alive():
        return warning(
            "name server",
            f"no answer for the name of {asked_for} within {NAME_S:g} s; workers wait for it before they connect",
            f"add a line '{asked_for} NAME' to /etc/hosts, or correct the name servers in /etc/resolv.conf",
        )
    return ok("name server", f"the name of {asked_for} took {1000 * (time.monotonic() - began):.0f} ms")


def check_interfaces(
    endpoint: tuple[str, int] | None,
    environ: Mapping[str, str] = os.environ,
    present: Mapping[str, object] | None = None,
    reach_s: float = 2.0,
) -> list[Finding]:
    """Check the interface that gloo and NCCL will choose, and that this host reaches its own address there.

    Args:
        endpoint: host and port of etcd; None: none is given.
        present: interfaces of this host by name; None: to be listed.
    """
    present = psutil.net_if_addrs() if present is None else present
    address = _address_for_others(endpoint)
    findings = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if wanted := environ.get(variable, ""):
            if not _names_interface(variable, wanted, present):
                findings.append(
                    error(
                        "interface",
                        f"{variable} is {wanted!r}, this host has {', '.join(sorted(present))}",
                        f"unset {variable}, or set it to {interface_of(address) or 'one of these'}",
                    )
                )
            else:
                findings.append(ok("interface", f"{variable} chooses {wanted}"))
    if problem := _problem_of_reaching(address, reach_s):
        move = "correct this host's entry in /etc/hosts or DNS, and check its firewall"
        findings.append(error("interface", f"this host does not reach its own address {address}: {problem}", move))
    elif not findings:
        reason = "no etcd is given" if endpoint is None else f"on the route to {endpoint[0]}"
        findings.append(ok("interface", f"{interface_of(address) or 'unknown'} with {address} ({reason})"))
    return findings


def _address_for_others(endpoint: tuple[str, int] | None) -> str:
    """Return the address that workers of a job give to each other: it is on the route to etcd."""
    if endpoint is None:
        return own_address()
    return route_address(*endpoint) or own_address()


def _names_interface(variable: str, wanted: str, present: Mapping[str, object]) -> bool:
    names = [name.strip() for name in wanted.split(",")]
    if variable == "GLOO_SOCKET_IFNAME":
        return all(name in present for name in names)
    if wanted.startswith("^"):
        return True  # all but these
    exact = wanted.startswith("=")
    names = [name.lstrip("=") for name in names]
    return any(each == name if exact else each.startswith(name) for name in names for each in present)


def _problem_of_reaching(address: str, timeout_s: float) -> str:
    """Return why a connection from this host to its own address fails; empty if it does not."""
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            socket.create_connection(server.getsockname()[:2], timeout=timeout_s).close()
    except OSError as problem:
        return str(problem)
    return ""


def check_port(environ: Mapping[str, str] = os.environ) -> Finding:
    """Check that the port in MASTER_PORT is free, if this host is to serve it. Ports of jobs are chosen among free ones."""
    text = environ.get("MASTER_PORT", "")
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    if not text or "TORCHELASTIC_RUN_ID" in environ:  # an agent serves the port of its workers
        return ok("ports", "jobs take free ones")
    if not text.isdecimal() or not 0 < int(text) < 65536:
        return warning("ports", f"MASTER_PORT is {text!r}, not a port", "unset MASTER_PORT")
    address = address_of_name(host)
    if address is None or not is_here(address):
        return ok("ports", f"MASTER_PORT {text} is served by {host}; jobs take free ports")
    if holder := port_holder(int(text)):
        return warning(
            "ports",
            f"MASTER_PORT {text} is in use by {holder}; scripts that torchrun does not start would fail there",
            "unset MASTER_PORT, choose another one, or end that program",
        )
    return ok("ports", f"MASTER_PORT {text} is free")


def port_holder(port: int) -> str:
    """Return the program that listens on a port of this host; empty if it is free."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do not count
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError as problem:
                if problem.errno == 98:  # EADDRINUSE
                    return _listener(port)
    return ""


def _listener(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another program"


def is_here(address: str) -> bool:
    """Return whether an address is one of this host's."""
    return is_loopback(address) or interface_of(address) is not None


def check_clock(etcd_ahead_s: float | None, uncertain_s: float = 0.0, now: float | None = None) -> Finding:
    """Check this host's clock against etcd's.

    Args:
        etcd_ahead_s: how far etcd's clock is ahead of ours; None: etcd's is not known.
        uncertain_s: half of the interval in which the difference lies.
        now: our clock's reading; None: as of now.
    """
    now = time.time() if now is None else now
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    built = Path(__file__).stat().st_mtime
    move = "synchronize the clocks: timedatectl set-ntp true, chronyc makestep"
    if now < built - 86400.0:
        text = f"{shown} is before the installation of this package: certificates may seem to be not yet valid"
        return error("clock", text, move)
    if etcd_ahead_s is None:
        return ok("clock", f"{shown}; compared with etcd's only where one is given and answers HTTP")
    off_s = max(0.0, abs(etcd_ahead_s) - uncertain_s)
    if off_s > CLOCK_S:
        side = "behind" if etcd_ahead_s > 0 else "ahead of"
        return warning("clock", f"{shown} is {abs(etcd_ahead_s):.0f} s {side} etcd's clock: times of events mislead", move)
    return ok("clock", f"{shown}, equal to etcd's within {uncertain_s + off_s:.1f} s")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
