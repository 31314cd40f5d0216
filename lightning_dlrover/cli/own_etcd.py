"""The etcd that `dlrover run` starts for its job alone, and who may use it.

target        reachable by
local         processes of this user on this host, through a Unix socket
slurm         whoever reads the password file in the run folder, that is this user on all hosts
kubernetes    whoever reads that file, or the Secret that the target makes of it for the pods
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dlrover.addresses import own_address
from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.output import say
from lightning_dlrover.rdzv.etcd.config import parse_endpoints
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.password import USER, make_password, require_password
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError
from lightning_dlrover.report.event_log import JobNotFoundError
from lightning_dlrover.report.status import JOB_FILE, read_job_file

_PASSWORD_FILE = "etcd.password"
"""File in the run folder, as nodes on other hosts must read it."""


@dataclass(frozen=True)
class OwnEtcd:
    """A running server and the access to it."""

    server: EmbeddedEtcd
    access: dict[str, Any]  # see `EtcdConfig.access`


class EtcdLostError(Exception):
    """The job's own etcd ended while the job ran."""


def without_etcd(server: EmbeddedEtcd, target: str) -> str:
    """Explain why the job's own etcd ended, how much of the job is left, and how to continue."""
    left = (
        "The job's records are lost with it: the script's checkpoints are still there, but the job restarts from scratch "
        "unless the script is given one (ckpt_path). With an etcd of its own (--endpoint), the same command would continue"
        if target == "local"
        else "The same command continues from the newest checkpoint"
    )
    return f"the embedded etcd has ended unasked: {server.why_it_ended()}. {left}"


@contextlib.contextmanager
def own_etcd(options: argparse.Namespace, folder: Path) -> Iterator[OwnEtcd]:
    """Run an etcd for this job alone.

    Nodes at a scheduler survive if this process is killed. The next `dlrover run` then finds etcd's data in the same folder,
    and the nodes find etcd at the same address. The data is removed when the job ends in order.

    Raises:
        EtcdServerError: etcd cannot be started.
        UsageError: the nodes look for etcd on another host.
    """
    if options.target == "local":
        with EmbeddedEtcd(private=True) as server:
            yield OwnEtcd(server, {})
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
    data, password = folder / "etcd", folder / _PASSWORD_FILE
    is_over = False
    access: dict[str, Any] = {}
    try:
        # A job of a release without passwords goes on as its nodes expect it.
        if password.exists() or not data.exists():
            _protect(data, password)
            access = {"user": USER, "password_file": str(password)}
        with _started(data, host, port) as server:
            if not access and not host.startswith("127."):
                say(
                    f"etcd listens on {server.endpoint} without authentication, as the release that has started this job had "
                    "none; a new job has a password of its own"
                )
            if "VC_TASK_INDEX" in os.environ:
                # TorchX requests Volcano's plugin `svc`, whose network policy admits only pods of the same Job.
                say(
                    "this pod is of a Job of Volcano's, which may keep nodes away from this etcd: if none comes, use --endpoint"
                )
            yield OwnEtcd(server, access)
        is_over = True
    finally:
        if is_over or not (folder / JOB_FILE).exists():
            shutil.rmtree(data, ignore_errors=True)
            password.unlink(missing_ok=True)


def _protect(data: Path, password: Path) -> None:
    """Let an etcd whose data are still to be created require a password from its first moment on a network.

    Raises:
        EtcdServerError: the password cannot be written, or etcd refuses it.
    """
    if data.exists():
        return  # it does already
    unfinished = data.with_name(f"{data.name}.new")  # a killed process leaves all of it or nothing
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        make_password(password)
        with EmbeddedEtcd(unfinished, private=True) as server:
            require_password(server.endpoint, password)
        unfinished.rename(data)
    except (OSError, EtcdError) as error:
        raise EtcdServerError(f"the embedded etcd cannot be given a password in {password}: {error}") from error


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
