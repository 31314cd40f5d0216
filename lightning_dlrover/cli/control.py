"""`dlrover scale`, `drain` and `cancel`: change the workers of a job by hand, and end it with all of its nodes."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import connected_job, find_place, report_problems
from lightning_dlrover.cli.options import COUNTED, counted_field, option_of
from lightning_dlrover.cli.plugins import ticket_key
from lightning_dlrover.components.targets.kubernetes_api import ApiError
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.output import counted, show
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError
from lightning_dlrover.rdzv.job.events import SizeRequested, record_of
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import DrainRecord, EndNotice, JobRecord, NodesRecord, PlanRecord, encode
from lightning_dlrover.rdzv.membership.worker_records import note_end
from lightning_dlrover.report.status import (
    CANCELLED,
    JOB_FILE,
    JobNotFoundError,
    connect,
    has_ended_here,
    is_locked,
    read_job,
    read_job_file,
)

if TYPE_CHECKING:
    from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
    from lightning_dlrover.components.targets.target import Target
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.rdzv.job.records import Keys
    from lightning_dlrover.rdzv.membership.rounds import JobView
    from lightning_dlrover.report.status import JobPlace

MAX_END_AFTER_ETCD_S = 10.0
"""Longest time in seconds for which a `dlrover run` still ends its processes once its own etcd has ended."""


def cancel_command(options: argparse.Namespace) -> int:
    """End a job and all of its nodes, with its controller where it has one."""
    place = find_place(options.job, options)
    deadline = time.monotonic() + options.timeout
    over = f"job {place.run_id}: had ended already; no node of it is left"
    has_ended = place.endpoint.startswith("unix:") and has_ended_here(place, options.run_dir / options.job)
    try:
        client = connect(place, timeout_s=1.0 if has_ended else 5.0)
    except EtcdUnavailableError:
        if has_ended:  # its etcd and its nodes, with their `dlrover run`
            show(over)
            return EXIT_OK
        count = _cancel_without_etcd(place, options.run_dir / options.job, deadline)
        show(f"job {place.run_id}: its etcd does not answer; {counted(count, 'remaining node')} ended")
        return EXIT_OK
    with client:
        journal = Journal(client, place.keys)
        if (ticket := ticket_key(client, place.keys)) and client.get(place.keys.job) is None:
            return _cancel_waiting(journal, client, ticket, deadline)
        view = read_job(client, place.keys).view  # raises an error if the job does not exist
        is_over = view.job is not None and view.job.phase in ("finished", "failed")
        was_locked = is_locked(options.run_dir / options.job) is True
        nodes = _ask_all_to_end(journal, CANCELLED)
        has_etcd = _wait_for_controller(client, place, options, deadline, nodes.target, was_locked)
        _cancel_by_name(place, nodes.target, nodes.mark, deadline)
        if has_etcd and not is_over:
            try:
                _let_workers_leave(client, place, deadline)
                _mark_as_cancelled(journal)
                client.delete(place.keys.plan)
                client.delete_prefix(place.keys.drains)
            except EtcdUnavailableError:  # a job's own etcd ends a moment after the controller has left it
                if not _has_ended_with_its_etcd(options, was_locked, nodes.target, deadline):
                    raise
    show(over if is_over else f"job {place.run_id}: cancelled, all its nodes have ended")
    return EXIT_OK


def _cancel_waiting(journal: Journal, client: EtcdClient, ticket: str, deadline: float) -> int:
    """End a `dlrover run` that waits for its permission to run, or has just got it: until its key `ticket` is deleted."""
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
    show(f"job {run_id}: cancelled before its start")
    return EXIT_OK


def _cancel_without_etcd(place: JobPlace, folder: Path, deadline: float) -> int:
    """End the nodes that a scheduler lists for a job with an unreachable etcd; return their number.

    An embedded etcd ends with its `dlrover run`; nodes at a scheduler do not.
    """
    silent = f"the etcd of job {place.run_id!r} at {place.endpoint} does not answer"
    try:
        job = read_job_file(folder / JOB_FILE)
    except JobNotFoundError:
        raise UsageError(f"{silent}; start it first") from None
    if is_locked(folder) is not False:
        run = f"`dlrover run` (process {job.pid})"
        raise UsageError(f"{silent}, and {run} would start new nodes for those that are cancelled; end it with Ctrl-C")
    if job.target == "local":
        raise UsageError(f"{silent}; its nodes end only with the `dlrover run` that started them, process {job.pid}")
    return _cancel_by_name(place, job.target, job.mark, deadline)


def _wait_for_controller(
    client: EtcdClient, place: JobPlace, options: argparse.Namespace, deadline: float, target: str, was_locked: bool
) -> bool:
    """Wait until the job has no controller; return False if its etcd has ended with the controller.

    Args:
        was_locked: the job's `dlrover run` used the run folder before it was asked to end.
    """
    try:
        while client.get(place.keys.controller) is not None:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"job {place.run_id!r} was asked to end, but its controller has not ended within {options.timeout:g} s; "
                    "see its output, or kill it and cancel once more"
                )
            time.sleep(0.2)
    except EtcdUnavailableError:
        if not _has_ended_with_its_etcd(options, was_locked, target, deadline):
            raise
        return False
    return True


def _has_ended_with_its_etcd(options: argparse.Namespace, was_locked: bool, target: str, deadline: float) -> bool:
    """Return whether the `dlrover run` of a silent etcd has ended, too. Its own etcd ends a moment before it."""
    folder = options.run_dir / options.job
    until = min(deadline, time.monotonic() + MAX_END_AFTER_ETCD_S)
    while is_locked(folder) and time.monotonic() < until:
        time.sleep(0.1)
    # A scheduler can list the remaining nodes. Local nodes of another machine cannot be checked from here.
    return is_locked(folder) is False and (was_locked or target != "local")


def _ask_all_to_end(journal: Journal, reason: str) -> NodesRecord:
    """Ask the job's controller, present or future, to end all nodes; return the updated record."""

    def ending(nodes: NodesRecord | None) -> NodesRecord:
        nodes = nodes or NodesRecord("local", "")  # a job started by torchrun has no nodes of ours
        return replace(nodes, stop=nodes.stop or reason)

    nodes = journal.swap(NodesRecord, journal.keys.nodes, ending).record
    assert nodes is not None
    return nodes


def _cancel_by_name(place: JobPlace, kind: str, mark: str, deadline: float) -> int:
    """End the nodes that a scheduler lists for a job, by the deadline; return their number."""
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
        # Its `dlrover run` may have been killed. A user who may not remove such objects has no job that created one.
        for kind in ("budget", "secret"):
            try:
                cluster.remove_leftovers(secret=kind == "secret", budget=kind == "budget")
            except ApiError as error:
                if error.status != 403:
                    raise
    return len(cancelled)


def _let_workers_leave(client: EtcdClient, place: JobPlace, deadline: float) -> None:
    """Drain the live workers of a job that no controller has started, and wait for their end."""
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


def scale_command(options: argparse.Namespace) -> int:
    """Set the number of workers of a job, and the settings of each, by hand."""
    settings = {name: value for name in COUNTED if (value := getattr(options, name)) is not None}
    with connected_job(options) as (place, client):
        if not options.auto:
            lines = scale_job(client, place, options.num_workers, settings)
        elif settings or options.num_workers is not None:
            raise UsageError("--auto leaves every setting to the planner, so no other option may be given")
        else:
            lines = [leave_to_planner(client, place)]
    show("\n".join(lines))
    return EXIT_OK


def scale_job(client: EtcdClient, place: JobPlace, num_workers: int | None, settings: dict[str, int]) -> list[str]:
    """Set the number of workers of a job, and the settings of each, by hand. Return the result in words.

    Raises:
        UsageError: the job has ended, or cannot have these.
    """
    found = read_job(client, place.keys)
    report_problems(found.problems)
    check_can_be_planned(place, found.view, num_workers)
    if num_workers is None and not settings:
        known = ", ".join(f"--{option_of(name)}" for name in COUNTED)
        raise UsageError(f"nothing to change: give a number of workers, or one of {known}")
    _check_node_size(place, found.nodes, settings)
    wanted, lines = wanted_text(num_workers, settings), []
    if num_workers is not None and (why := _forgive(client, place.keys, num_workers)):
        lines.append(f"job {place.run_id}: this size is tried again, after {why}")
    plan_by_hand(client, place, found.view, num_workers, settings, f"set to {wanted} by hand")
    return [*lines, f"job {place.run_id}: {wanted} requested; `dlrover status {place.run_id}` shows the progress"]


def leave_to_planner(client: EtcdClient, place: JobPlace) -> str:
    """Let the job's planner, or its pool, decide again on settings by hand. Return the result in words."""
    check_can_be_planned(place, read_job(client, place.keys).view, None)

    def automatic(plan: PlanRecord | None) -> PlanRecord | None:
        if plan is None or plan.source != "user":
            return None
        return replace(plan, source="planner", reason="left to the planner again, by hand", created_at=time.time())

    Journal(client, place.keys).swap(PlanRecord, place.keys.plan, automatic, read=readable)
    return f"job {place.run_id}: its planner, or its pool, decides on its size again"


def drain_command(options: argparse.Namespace) -> int:
    """Ask one worker of a job, and all others of its node, to hand over and leave."""
    with connected_job(options) as (place, client):
        text = drain_worker(client, place, options.worker, options.replace, "`dlrover drain`", options.at or 0.0)
    show(text)
    return EXIT_OK


def drain_worker(
    client: EtcdClient, place: JobPlace, name: str, once_replaced: bool, asked_by: str, taken_at: float = 0.0
) -> str:
    """Ask a worker, or all workers of a node, to hand over and leave. Return the result in words.

    Args:
        name: a worker, with which all others of its node leave, or a node.
        once_replaced: it leaves only when another worker can take its place.
        taken_at: time at which its node will be taken away, seconds since the epoch: it leaves once replaced, or in time in any
            case; 0: the node stays.

    Raises:
        UsageError: there is none of that name, it is the last one, or nothing would replace it.
    """
    view = read_job(client, place.keys).view
    leaving = _workers_of(view, name)
    if not leaving:
        known = ", ".join(view.workers) or "none"
        raise UsageError(f"job {place.run_id!r} has no worker or node {name!r}; its workers are: {known}")
    has_controller = client.get(place.keys.controller) is not None
    if once_replaced and not has_controller:
        raise UsageError(
            f"job {place.run_id!r} has no controller that would start another worker; start one by hand, and when "
            f"`dlrover status {place.run_id}` shows it ready, drain {name!r} without --replace"
        )
    if once_replaced and not view.drains.isdisjoint(leaving):
        raise UsageError(f"{name!r} of job {place.run_id!r} has been asked to leave at once, and may not be able to wait")
    is_last = not {*view.survivors}.isdisjoint(leaving) and not {*view.survivors} - {*leaving, *view.drains}
    if is_last and not once_replaced and not (taken_at and has_controller):
        found = f"{leaving[0]!r} is the only worker" if len(leaving) == 1 else f"{', '.join(leaving)} are the only workers"
        raise UsageError(
            f"{found} of job {place.run_id!r} that would stay, and without them the job would stop; "
            f"`dlrover scale {place.run_id} {2 * len(leaving)}` first"
        )
    if taken_at:
        notice, journal = EndNotice(asked_by.strip("`"), taken_at), Journal(client, place.keys)
        if not sum(note_end(journal, worker, notice) for worker in leaving):
            known = ", ".join(str(view.notices[worker]) for worker in leaving if worker in view.notices)
            return f"job {place.run_id}: nothing changes, as the node of {', '.join(leaving)} {known or 'has just ended'}"
        others = "another one takes its place" if len(leaving) == 1 else "others take their places"
        instead = f"leave when {others}, or in time in any case" if has_controller else "leave in time"
        return f"job {place.run_id}: the node of {', '.join(leaving)} {notice}; will hand over and {instead}"
    for worker in leaving:
        client.put(place.keys.drains + worker, encode(DrainRecord(worker, f"asked for by {asked_by}", once_replaced)))
    when = f" when {'another worker is' if len(leaving) == 1 else 'other workers are'} ready" if once_replaced else ""
    return f"job {place.run_id}: {', '.join(leaving)} will hand over and leave{when}"


def _workers_of(view: JobView, name: str) -> list[str]:
    """Return the workers that leave together when a worker or a node, such as node1, is named; empty if none match."""
    agents = {agent.agent_id for agent in view.agents.values() if agent.labels.get("node") == name}
    of_node = [worker for worker, record in view.workers.items() if record.agent_id in agents]
    if of_node or name not in view.workers:
        return of_node
    return [worker for worker in view.workers if view.nodes[worker] == view.nodes[name]]


def wanted_text(num_workers: int | None, settings: Mapping[str, int]) -> str:
    wanted = ", ".join(counted_field(name, value) for name, value in settings.items())
    return wanted if num_workers is None else counted(num_workers, "worker") + (f", {wanted} each" if wanted else "")


def _check_node_size(place: JobPlace, nodes: NodesRecord | None, asked: Mapping[str, int]) -> None:
    """Raise UsageError for a node size outside of the job's limits."""
    nodes = nodes or NodesRecord("", "")
    cpus, memory_mb = (nodes.min_cpus, nodes.max_cpus), (nodes.min_memory_mb, nodes.max_memory_mb)
    for name, (low, high) in {"node_cpus": cpus, "node_memory_mb": memory_mb}.items():
        option = option_of(name)
        if name in asked and not high:
            raise UsageError(
                f"job {place.run_id!r} was started without --{option}, so the size of its nodes cannot change; "
                f"`dlrover run --{option} LOW:HIGH` sets limits for it"
            )
        if name in asked and not low <= asked[name] <= high:
            raise UsageError(
                f"job {place.run_id!r} was started for nodes of {low} to {high} {COUNTED[name]} (--{option} of `dlrover run`); "
                f"{asked[name]} {COUNTED[name]} are outside of that"
            )


def check_can_be_planned(place: JobPlace, view: JobView, num_workers: int | None) -> None:
    """Raise UsageError for a plan that no worker would carry out."""
    if view.job is None:
        raise UsageError(f"job {place.run_id!r} has not started training yet; try again in a moment")
    if view.job.unfinished_fit:
        raise UsageError(f"job {place.run_id!r} keeps its workers: {view.job.closed}. `dlrover drain` lets one leave")
    if view.job.phase in ("finished", "failed"):
        raise UsageError(f"job {place.run_id!r} has {view.job.phase}; there is nothing to scale")
    low, high = view.job.min_workers, view.job.max_workers
    if num_workers is not None and not low <= num_workers <= high:
        raise UsageError(f"job {place.run_id!r} was started for {low} to {high} workers, {num_workers} is outside of that")
    if num_workers is not None:
        check_size(place, view.job, num_workers)


def check_size(place: JobPlace, job: JobRecord, num_workers: int) -> None:
    """Raise UsageError for a number of workers that may not be requested."""
    sizes = job.world_sizes
    if sizes.allows(num_workers):
        return
    nearest = " or ".join(map(str, dict.fromkeys((sizes.at_most(num_workers), sizes.at_least(num_workers)))))
    if not sizes.lists(num_workers):
        listed = ",".join(map(str, sizes.listed))
        problem = f"{num_workers} is not one of the --sizes {listed} that job {place.run_id!r} was started with"
        raise UsageError(f"{problem}: use {nearest}")
    raise UsageError(
        f"job {place.run_id!r} has {sizes.per_node} workers on each node, and {num_workers} would not fill theirs: "
        f"use {nearest}"
    )


def _forgive(client: EtcdClient, keys: Keys, num_workers: int) -> str:
    """Allow a job to grow to a size at which a step has failed. Return the former reason against it; "" without one."""
    why = ""

    def forgiven(job: JobRecord | None) -> JobRecord | None:
        nonlocal why
        if job is None or not (why := job.failed_sizes.get(str(num_workers), "")):
            return None
        return job.trying_again([str(num_workers)])

    Journal(client, keys).swap(JobRecord, keys.job, forgiven)
    return why


def plan_by_hand(
    client: EtcdClient, place: JobPlace, view: JobView, num_workers: int | None, settings: dict[str, Any], reason: str
) -> None:
    """Write a plan that the job's own planner leaves alone; fields that are not given keep their planned values."""
    assert view.job is not None
    unplanned = PlanRecord(len(view.survivors) or view.job.min_workers, "user", reason, binding=False)
    by_hand = {**settings, "source": "user", "reason": reason, "decision_id": 0}
    if num_workers is not None:
        by_hand |= {"num_workers": num_workers, "binding": True}

    def planned(plan: PlanRecord | None) -> PlanRecord:
        return replace(plan or unplanned, **by_hand, created_at=time.time())

    journal = Journal(client, place.keys)
    plan = journal.swap(PlanRecord, place.keys.plan, planned, read=readable).record  # an unreadable plan is replaced
    assert plan is not None
    journal.append(record_of(SizeRequested(plan.num_workers, "user", **settings), reason), f"cli-{socket.gethostname()}")
