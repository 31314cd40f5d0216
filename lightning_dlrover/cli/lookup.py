"""Find the job that a command is about, and connect to its etcd."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.cli.options import flag
from lightning_dlrover.output import complain
from lightning_dlrover.report.status import JobPlace, connect_to_job, find_job

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.etcd.client import EtcdClient


def find_place(run_id: str, options: argparse.Namespace) -> JobPlace:
    """The place of a job in etcd, as the options or its run folder name it.

    Raises:
        JobNotFoundError: neither does.
        UsageError: a file that the options name cannot be read.
    """
    return find_job(run_id, options.endpoint, options.key_prefix, options.run_dir, etcd_access(options))


@contextlib.contextmanager
def connected_job(options: argparse.Namespace) -> Iterator[tuple[JobPlace, EtcdClient]]:
    """The place of the job that a command is about, and a client of its etcd."""
    place = find_place(options.job, options)
    with connect_to_job(place, options.run_dir) as client:
        yield place, client


def etcd_access(options: argparse.Namespace) -> dict[str, str]:
    """The options that say who we are, by the names of `EtcdConfig`.

    Raises:
        UsageError: a file cannot be read, or its path cannot be handed to the agents.
    """
    access = {name: getattr(options, name) for name in ("user", "password_file", "ca_cert", "cert", "cert_key")}
    for name in set(access) - {"user"}:
        if access[name] is not None:
            access[name] = os.path.abspath(access[name])  # nodes may run in another folder
            if not os.access(access[name], os.R_OK):
                raise UsageError(f"{flag(name)} {access[name]!r} does not exist or cannot be read")
    return {name: value for name, value in access.items() if value is not None}


def tell_problems(problems: list[str]) -> None:
    """Report the records of a job that could not be read."""
    for problem in problems:
        complain(f"ignored a record: {problem}")
