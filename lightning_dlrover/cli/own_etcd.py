"""The etcd that `dlrover run` starts for its job alone."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_dlrover.addresses import own_address
from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.output import say
from lightning_dlrover.rdzv.etcd.config import parse_endpoints
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError
from lightning_dlrover.report.event_log import JobNotFoundError
from lightning_dlrover.report.status import JOB_FILE, read_job_file


class EtcdLostError(Exception):
    """The job's own etcd ended while the job ran."""


def without_etcd(server: EmbeddedEtcd, target: str) -> str:
    """Explain why the job's own etcd ended, how much of the job is left, and how to continue."""
    left = (
        "The job's records are lost with it: the script's checkpoints are still there, but the job begins anew unless "
        "the script is given one of them (ckpt_path). Where --endpoint names an etcd that stays, the same command goes on"
        if target == "local"
        else "The same command goes on from the newest checkpoint"
    )
    return f"the embedded etcd has ended unasked: {server.why_it_ended()}. {left}"


@contextlib.contextmanager
def own_etcd(options: argparse.Namespace, folder: Path) -> Iterator[EmbeddedEtcd]:
    """Run an etcd for this job alone.

    Nodes at a scheduler survive if this process is killed. The next `dlrover run` then finds etcd's data in the same folder,
    and the nodes find etcd at the same address. The data is removed when the job ends in order.

    Raises:
        EtcdServerError: etcd cannot be started.
        UsageError: the nodes look for etcd on another host.
    """
    if options.target == "local":
        with EmbeddedEtcd() as server:
            yield server
        return
    host, port = options.etcd_host or own_address(), None
    with contextlib.suppress(JobNotFoundError):
        [(host, port)] = parse_endpoints(read_job_file(folder / JOB_FILE).place.endpoint)
        if not _is_own_address(host):
            raise UsageError(
                f"job {folder.name!r} used an etcd on {host}, and its nodes still look for it there: resume the job on that "
                f"host, not on {socket.gethostname()}; if that host is gone, end the remaining nodes with `dlrover cancel "
                f"{folder.name}`, and name an etcd that outlasts its hosts with --endpoint next time"
            )
    data = folder / "etcd"
    is_over = False
    try:
        with _started(data, host, port) as server:
            if not host.startswith("127."):
                say(
                    f"etcd listens on {server.endpoint} without authentication, and ends with this process; --endpoint names "
                    "a permanent one, and docs/security.md describes authentication"
                )
            if "VC_TASK_INDEX" in os.environ:
                # TorchX requests Volcano's plugin `svc`, whose network policy admits only pods of the same Job.
                say(
                    "this pod is of a Job of Volcano's, which may keep nodes away from this etcd: if none comes, use --endpoint"
                )
            yield server
        is_over = True
    finally:
        if is_over or not (folder / JOB_FILE).exists():
            shutil.rmtree(data, ignore_errors=True)


def _started(data: Path, host: str, port: int | None) -> EmbeddedEtcd:
    deadline = time.monotonic() + 10.0
    while True:
        server = EmbeddedEtcd(data, host=host, port=port, durable=True)  # nodes outlast a crash of this host
        try:
            server.start()
            return server
        except EtcdServerError:
            # The etcd of a `dlrover run` that was just killed may still be shutting down.
            if port is None or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _is_own_address(host: str) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
