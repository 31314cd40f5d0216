"""`dlrover scale` and `drain`: change the workers of a job and their settings by hand."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import connected_job, tell_problems
from lightning_dlrover.cli.options import COUNTED, counted_field, option_of
from lightning_dlrover.output import counted, show
from lightning_dlrover.rdzv.job.events import SizeRequested, record_of
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import DrainRecord, JobRecord, PlanRecord, encode
from lightning_dlrover.report.status import read_job

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.rdzv.job.records import Keys, NodesRecord
    from lightning_dlrover.rdzv.live.rounds import JobView
    from lightning_dlrover.report.status import JobPlace


def scale_command(options: argparse.Namespace) -> int:
    """Set the number of workers of a job, and the settings of each, by hand."""
    with connected_job(options) as (place, client):
        found = read_job(client, place.keys)
        tell_problems(found.problems)
        check_can_be_planned(place, found.view, options.num_workers)
        settings = {name: value for name in COUNTED if (value := getattr(options, name)) is not None}
        if options.auto:
            return _leave_to_planner(client, place, asks_for_more=bool(settings) or options.num_workers is not None)
        if options.num_workers is None and not settings:
            asked = ", ".join(f"--{option_of(name)}" for name in COUNTED)
            raise UsageError(f"nothing was asked for: give a number of workers, or one of {asked}")
        _check_node_size(place, found.nodes, settings)
        wanted = wanted_text(options.num_workers, settings)
        if options.num_workers is not None and (why := _forgive(client, place.keys, options.num_workers)):
            show(f"job {place.run_id}: tried again by hand, after {why}")
        plan_by_hand(client, place, found.view, options.num_workers, settings, f"set to {wanted} by hand")
    show(f"job {place.run_id}: {wanted} wanted; `dlrover status {place.run_id}` shows how far they are")
    return EXIT_OK


def _leave_to_planner(client: EtcdClient, place: JobPlace, asks_for_more: bool) -> int:
    """Let the job's planner, or its pool, decide again on settings by hand."""
    if asks_for_more:
        raise UsageError("--auto leaves everything to the planner; give it alone")

    def automatic(plan: PlanRecord | None) -> PlanRecord | None:
        if plan is None or plan.source != "user":
            return None
        return replace(plan, source="planner", reason="left to the planner again, by hand", created_at=time.time())

    Journal(client, place.keys).swap(PlanRecord, place.keys.plan, automatic, read=readable)
    show(f"job {place.run_id}: its planner, or its pool, decides on its size again")
    return EXIT_OK


def drain_command(options: argparse.Namespace) -> int:
    """Ask one worker of a job, and all others of its node, to hand over and leave."""
    with connected_job(options) as (place, client):
        view = read_job(client, place.keys).view
        leaving = _workers_of(view, options.worker)
        if not leaving:
            known = ", ".join(view.workers) or "none"
            raise UsageError(f"job {place.run_id!r} has no worker or node {options.worker!r}; its workers are: {known}")
        if options.replace and client.get(place.keys.controller) is None:
            raise UsageError(
                f"job {place.run_id!r} has no controller that would start another worker; start one by hand, and when "
                f"`dlrover status {place.run_id}` shows it ready, drain {options.worker!r} without --replace"
            )
        if options.replace and not view.drains.isdisjoint(leaving):
            raise UsageError(
                f"{options.worker!r} of job {place.run_id!r} has been asked to leave at once, and may not be able to wait"
            )
        is_last = not {*view.survivors}.isdisjoint(leaving) and not {*view.survivors} - {*leaving, *view.drains}
        if is_last and not options.replace:
            found = f"{leaving[0]!r} is the only worker" if len(leaving) == 1 else f"{', '.join(leaving)} are the only workers"
            raise UsageError(
                f"{found} of job {place.run_id!r} that would stay, and without them the job would stop; "
                f"`dlrover scale {place.run_id} {2 * len(leaving)}` first"
            )
        for worker in leaving:
            request = DrainRecord(worker, "asked for by `dlrover drain`", once_replaced=options.replace)
            client.put(place.keys.drains + worker, encode(request))
    when = f" when {'another worker is' if len(leaving) == 1 else 'other workers are'} ready" if options.replace else ""
    show(f"job {place.run_id}: {', '.join(leaving)} will hand over and leave{when}")
    return EXIT_OK


def _workers_of(view: JobView, name: str) -> list[str]:
    """Return the workers that leave together when a worker or a node, such as node1, is named; none if there is none."""
    agents = {agent.agent_id for agent in view.agents.values() if agent.labels.get("node") == name}
    of_node = [worker for worker, record in view.workers.items() if record.agent_id in agents]
    if of_node or name not in view.workers:
        return of_node
    return [worker for worker in view.workers if view.nodes[worker] == view.nodes[name]]


def wanted_text(num_workers: int | None, settings: Mapping[str, int]) -> str:
    wanted = ", ".join(counted_field(name, value) for name, value in settings.items())
    return wanted if num_workers is None else counted(num_workers, "worker") + (f", {wanted} each" if wanted else "")


def _check_node_size(place: JobPlace, nodes: NodesRecord | None, asked: Mapping[str, int]) -> None:
    """Refuse a node size outside of the job's limits.

    Raises:
        UsageError: nodes of the job may not be of that size.
    """
    limits = {"node_cpus": (0, 0), "node_memory_mb": (0, 0)}
    if nodes is not None:
        limits = {
            "node_cpus": (nodes.min_cpus, nodes.max_cpus),
            "node_memory_mb": (nodes.min_memory_mb, nodes.max_memory_mb),
        }
    for name, (low, high) in limits.items():
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
    """Refuse a plan that no worker would carry out.

    Raises:
        UsageError: the job does not train, or the number of workers is outside of its limits.
    """
    if view.job is None:
        raise UsageError(f"job {place.run_id!r} has not started training yet; try again in a moment")
    if view.job.phase in ("finished", "failed"):
        raise UsageError(f"job {place.run_id!r} has {view.job.phase}; there is nothing to scale")
    low, high = view.job.min_workers, view.job.max_workers
    if num_workers is not None and not low <= num_workers <= high:
        raise UsageError(f"job {place.run_id!r} was started for {low} to {high} workers, {num_workers} is outside of that")
    if num_workers is not None and num_workers in view.job.sizes_not_planned - view.job.sizes_not_tried:
        below = view.job.on_whole_nodes(num_workers)
        raise UsageError(
            f"job {place.run_id!r} has {view.job.workers_per_node} workers on each node, and {num_workers} would not fill "
            f"theirs: use {below} or {below + view.job.workers_per_node}"
        )


def _forgive(client: EtcdClient, keys: Keys, num_workers: int) -> str:
    """Let a job grow to a number of workers with which a step has failed. Return why it did not until now; "" if it did."""
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
