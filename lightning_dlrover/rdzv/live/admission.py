"""Decide whether a worker may join a job."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_dlrover.rdzv.etcd.config import is_loopback
from lightning_dlrover.rdzv.etcd.operations import absent
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import HISTORY_TTL_S, JobRecord, RecordError, RoundRecord, WorkerRecord
from lightning_dlrover.rdzv.live.member import MembershipError
from lightning_dlrover.rdzv.live.rounds import RoundTimeouts

__all__ = ["JobClosedError", "MembershipConfig", "enter_job", "refuse_loopback"]


class JobClosedError(MembershipError):
    """The job has finished or failed; there is nothing to join.

    Example:
        >>> def exit_code(error):
        ...     return 0 if isinstance(error, JobClosedError) else 1
        >>> exit_code(JobClosedError("job 'ctr' has finished"))
        0
    """


@dataclass(frozen=True)
class MembershipConfig:
    run_id: str
    prefix: str
    agent_id: str
    local_rank: int
    min_workers: int
    max_workers: int
    version: str
    address: str  # address at which other workers reach this one
    port: int  # port of this worker's TCPStore
    workers_per_node: int = 1  # workers that come and go together
    lease_ttl_s: float = 5.0
    history_ttl_s: float = HISTORY_TTL_S
    timeouts: RoundTimeouts = field(default_factory=RoundTimeouts)


def enter_job(journal: Journal, config: MembershipConfig) -> None:
    """Create the job's record if there is none, and check that this worker may join.

    Raises:
        JobClosedError: the job has ended.
        MembershipError: the job is run by another release of this package, or a record of the job cannot be read.
    """
    keys = journal.keys
    try:
        job = journal.get(JobRecord, keys.job).record
        if job is None:
            first = JobRecord(
                phase="starting",
                live=True,
                min_workers=config.min_workers,
                max_workers=config.max_workers,
                version=config.version,
                workers_per_node=config.workers_per_node,
                created_at=time.time(),
            )
            journal.fenced_write({keys.job: first}, [absent(keys.job)])
            job = journal.get(JobRecord, keys.job).record
        if job is None:
            raise MembershipError(f"run {config.run_id!r}: {keys.job!r} vanished while joining; start the worker again")
        journal.get(RoundRecord, keys.round)
    except RecordError as error:
        raise MembershipError(f"run {config.run_id!r} cannot be joined: {error}") from error
    if job.unfinished_fit and not journal.client.get_prefix(keys.workers)[1]:
        raise MembershipError(
            f"run {config.run_id!r}: all workers were lost in fit number {job.unfinished_fit} of the script, and "
            "only the first can be resumed; start a new run with another --rdzv-id"
        )
    if job.phase in ("finished", "failed"):
        raise JobClosedError(
            f"run {config.run_id!r} has {job.phase}{': ' + job.message if job.message else ''}; "
            "start a new run with another --rdzv-id"
        )
    if job.version != config.version:
        raise MembershipError(
            f"run {config.run_id!r} is run by lightning-dlrover {job.version}, this worker has "
            f"{config.version}: install the same release on every node"
        )


def refuse_loopback(config: MembershipConfig, workers: Iterable[WorkerRecord]) -> None:
    """
    Raises:
        MembershipError: the workers run on several hosts, and one of them has an address that others cannot reach.
    """
    own = config.address
    for worker in workers:
        if worker.host == socket.gethostname():
            continue
        for host, address in ((worker.host, worker.address), (socket.gethostname(), own)):
            if is_loopback(address):
                raise MembershipError(
                    f"run {config.run_id!r}: workers on host {host} are known by the loopback address {address}, "
                    "which other hosts cannot reach; start every node of the job with --rdzv-endpoint=ADDRESS:PORT where "
                    "ADDRESS is that of etcd on the network, not localhost nor a name that /etc/hosts maps to 127.0.x.x"
                )
