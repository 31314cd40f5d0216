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
    from lightning_dlrover.report.notify import Destination


def find_place(run_id: str, options: argparse.Namespace) -> JobPlace:
    """Find a job's place in etcd from the options or its run folder. Raise JobNotFoundError if neither names the job."""
    return find_job(run_id, options.endpoint, options.key_prefix, options.run_dir, etcd_access(options))


@contextlib.contextmanager
def connected_job(options: argparse.Namespace) -> Iterator[tuple[JobPlace, EtcdClient]]:
    """Yield the place of the command's job, and a client of its etcd."""
    place = find_place(options.job, options)
    with connect_to_job(place, options.run_dir) as client:
        yield place, client


def etcd_access(options: argparse.Namespace) -> dict[str, str]:
    """Return the options for authentication, keyed by the field names of `EtcdConfig`. UsageError: a file cannot be read."""
    access = {name: getattr(options, name) for name in ("user", "password_file", "ca_cert", "cert", "cert_key")}
    for name in set(access) - {"user"}:
        if access[name] is not None:
            access[name] = os.path.abspath(access[name])  # nodes may run in another folder
            if not os.access(access[name], os.R_OK):
                raise UsageError(f"{flag(name)} {access[name]!r} does not exist or cannot be read")
    return {name: value for name, value in access.items() if value is not None}


def report_problems(problems: list[str]) -> None:
    """Report the records of a job that could not be read."""
    for problem in problems:
        complain(f"ignored a record: {problem}")


def notify_destinations(options: argparse.Namespace) -> list[Destination]:
    """Return the destinations of --notify. Raise UsageError for one that cannot be used, without quoting it."""
    if not options.notify:
        return []
    from lightning_dlrover.report.notify import destination

    try:
        return [destination(text) for text in options.notify]
    except ValueError as error:
        raise UsageError(f"--notify: {error}") from None
