"""`dlrover cancel`: end a job and all of its nodes."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import find_place
from lightning_dlrover.cli.run_hooks import ticket_key
from lightning_dlrover.components.targets.kubernetes_api import ApiError
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.output import counted, show
from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import DrainRecord, JobRecord, NodesRecord, encode
from lightning_dlrover.report.event_log import CANCELLED, JobNotFoundError
from lightning_dlrover.report.status import JOB_FILE, connect, has_ended_here, is_locked, read_job, read_job_file

if TYPE_CHECKING:
    from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
    from lightning_dlrover.components.targets.target import Target
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.report.status import JobPlace


def cancel_command(options: argparse.Namespace) -> int:
    """End a job and all of its nodes, with its controller where it has one."""
    place = find_place(options.job, options)
    deadline = time.monotonic() + options.timeout
    over = f"job {place.run_id}: had ended already; no node of it is left"
    has_own_etcd = place.endpoint.startswith("unix:")
    has_ended = has_own_etcd and has_ended_here(place, options.run_dir / options.job)
    try:
        client = connect(place, timeout_s=1.0 if has_ended else 5.0)
    except EtcdUnavailableError:
        if has_ended:  # its etcd and its nodes, with their `dlrover run`
            show(over)
            return EXIT_OK
        count = _cancel_without_etcd(place, options.run_dir / options.job, deadline)
        were = "was still there and has" if count == 1 else "were still there and have"
        show(f"job {place.run_id}: its etcd does not answer; {counted(count, 'node')} {were} ended now")
        return EXIT_OK
    with client:
        journal = Journal(client, place.keys)
        if (ticket := ticket_key(client, place.keys)) and client.get(place.keys.job) is None:
            return _cancel_waiting(journal, client, ticket, deadline)
        view = read_job(client, place.keys).view  # raises an error if there is no such job
        is_over = view.job is not None and view.job.phase in ("finished", "failed")
        nodes = _ask_all_to_end(journal, CANCELLED)
        has_etcd = _wait_for_controller(client, place, options, deadline, nodes.target)
        _cancel_by_name(place, nodes.target, nodes.mark, deadline)
        if has_etcd and not is_over:
            _let_workers_leave(client, place, deadline)
            _mark_as_cancelled(journal)
            client.delete(place.keys.plan)
            client.delete_prefix(place.keys.drains)
    show(over if is_over else f"job {place.run_id}: cancelled, all its nodes have ended")
    return EXIT_OK


def _cancel_waiting(journal: Journal, client: EtcdClient, ticket: str, deadline: float) -> int:
    """End a `dlrover run` that waits until its job may run, or may do so since a moment ago.

    Args:
        ticket: key in etcd that exists until it has ended.

    Raises:
        UsageError: it has not ended in time.
    """
    run_id = journal.keys.run_id
    _ask_all_to_end(journal, CANCELLED)
    while client.get(ticket) is not None:
        if time.monotonic() > deadline:
            raise UsageError(
                f"job {run_id!r} was asked to end, but its `dlrover run` still waits for its permission to run, or has it; see "
                "its output, or kill it"
            )
        time.sleep(0.2)
    client.delete(journal.keys.nodes)  # where the run was killed; a later job of this name is another one
    show(f"job {run_id}: cancelled before it has begun")
    return EXIT_OK


def _cancel_without_etcd(place: JobPlace, folder: Path, deadline: float) -> int:
    """End the nodes that a scheduler lists for a job whose etcd does not answer; return their number.

    An embedded etcd ends with its `dlrover run`; nodes at a scheduler do not.

    Raises:
        UsageError: the run folder has no record of the job, a live `dlrover run` manages the job, or its nodes are local.
    """
    silent = f"the etcd of job {place.run_id!r} at {place.endpoint} does not answer"
    try:
        job = read_job_file(folder / JOB_FILE)
    except JobNotFoundError:
        raise UsageError(f"{silent}; start it first") from None
    if is_locked(folder) is not False:
        raise UsageError(
            f"{silent}, and `dlrover run` (process {job.pid}) looks after the job: it would start again what is cancelled; "
            "end it with Ctrl-C"
        )
    if job.target == "local":
        raise UsageError(
            f"{silent}, so no process can end it on request; its nodes end with the `dlrover run` that has started them, "
            f"process {job.pid}"
        )
    return _cancel_by_name(place, job.target, job.mark, deadline)


def _wait_for_controller(
    client: EtcdClient, place: JobPlace, options: argparse.Namespace, deadline: float, target: str
) -> bool:
    """Wait until the job has no controller; return False if its etcd has ended with the controller.

    Raises:
        UsageError: the controller has not ended in time.
        EtcdUnavailableError: etcd does not answer, and the controller may still live.
    """
    folder = options.run_dir / options.job
    was_locked = is_locked(folder) is True
    try:
        while client.get(place.keys.controller) is not None:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"job {place.run_id!r} was asked to end, but its controller has not ended within {options.timeout:g} s; "
                    "see its output, or kill it and cancel once more"
                )
            time.sleep(0.2)
    except EtcdUnavailableError:
        # A scheduler can list the remaining nodes. Local nodes of another machine cannot be checked from here.
        if is_locked(folder) is not False or not (was_locked or target != "local"):
            raise
        return False
    return True


def _ask_all_to_end(journal: Journal, reason: str) -> NodesRecord:
    """Ask the job's controller, present or future, to end all nodes; return the updated record."""

    def ending(nodes: NodesRecord | None) -> NodesRecord:
        nodes = nodes or NodesRecord("local", "")  # a job started by torchrun has no nodes of ours
        return replace(nodes, stop=nodes.stop or reason)

    nodes = journal.swap(NodesRecord, journal.keys.nodes, ending).record
    assert nodes is not None
    return nodes


def _cancel_by_name(place: JobPlace, kind: str, mark: str, deadline: float) -> int:
    """End the nodes that a scheduler lists for a job; return their number.

    Raises:
        UsageError: some nodes have not ended in time.
    """
    spec = NodeSpec("", (), place.endpoint, place.run_id, place.prefix, 1, 1)
    target: Target
    cluster: KubernetesTarget | None = None
    if kind == "slurm":
        from lightning_dlrover.components.targets.slurm import SlurmOptions, SlurmTarget

        target = SlurmTarget(spec, SlurmOptions(), Path(), poll_s=0.5)
    elif kind.startswith("kubernetes"):
        from lightning_dlrover.components.targets.kubernetes import known_target

        target = cluster = known_target(spec, kind, None, poll_s=0.5)
    else:
        return 0  # nodes on this machine end with their `dlrover run`
    target.open(mark)
    cancelled: dict[str, float] = {}  # time of the last request for each node
    while living := [app.handle for app in target.apps() if app.is_living]:
        if time.monotonic() > deadline:
            raise UsageError(f"job {place.run_id!r}: {kind} was asked to end {', '.join(living)}, but still lists them")
        if due := [handle for handle in living if time.monotonic() - cancelled.get(handle, -60.0) >= 30.0]:
            target.cancel(due)
            cancelled |= dict.fromkeys(due, time.monotonic())
        time.sleep(0.1)
    if cluster is not None:
        # Its `dlrover run` may have been killed. Who may not remove Secrets has no job that made one.
        try:
            cluster.remove_secret()
        except ApiError as error:
            if error.status != 403:
                raise
    return len(cancelled)


def _let_workers_leave(client: EtcdClient, place: JobPlace, deadline: float) -> None:
    """Drain the live workers of a job that no controller has started.

    Raises:
        UsageError: some workers have not ended in time.
    """
    # The records of workers that were just killed disappear when their leases expire.
    while workers := read_job(client, place.keys).view.workers:
        for worker in workers:
            if client.get(place.keys.drains + worker) is None:
                client.put(place.keys.drains + worker, encode(DrainRecord(worker, CANCELLED)))
        if time.monotonic() > deadline:
            raise UsageError(f"job {place.run_id!r}: its workers were asked to leave and have not: {', '.join(workers)}")
        time.sleep(0.2)


def _mark_as_cancelled(journal: Journal) -> None:
    """Mark the job as failed, so that later queries and joiners find it cancelled."""

    def cancelled(job: JobRecord | None) -> JobRecord | None:
        if job is None or job.phase in ("finished", "failed"):
            return None
        return replace(job, phase="failed", message=CANCELLED)

    journal.swap(JobRecord, journal.keys.job, cancelled)
