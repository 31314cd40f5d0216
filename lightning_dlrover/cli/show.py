"""`dlrover status` and `dlrover list`: show one job, or all jobs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from typing import Any

from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import connected_job, etcd_access, find_place, tell_problems
from lightning_dlrover.cli.options import COUNTED, counted_field
from lightning_dlrover.output import counted, has_terminal, show
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.rdzv.etcd.caller import full_text
from lightning_dlrover.rdzv.etcd.inspection import alarms_of
from lightning_dlrover.rdzv.job.journal import Journal, readable_folder
from lightning_dlrover.rdzv.job.records import ProgressRecord
from lightning_dlrover.report.discovery import EtcdDefaults
from lightning_dlrover.report.event_log import EVENTS_FILE, JobEndedError, read_event_file
from lightning_dlrover.report.status import (
    JOB_FILE,
    ended_status,
    is_locked,
    list_jobs,
    progress_text,
    read_job,
    read_nodes,
    show_status,
)
from lightning_dlrover.report.text_table import text_table

WATCH_S = 2.0
"""Seconds between two looks of `dlrover status --watch`."""

_STAGES = {
    "requested": "was requested from the scheduler",
    "starting": "is being started",
    "importing": "imports what the script needs",
    "building": "builds model and data",
    "ready": "is ready to be admitted",
}


def status_command(options: argparse.Namespace) -> int:
    """Show rounds, workers, rates and the current plan of a job."""
    if options.job is None:
        options.job = _only_job(options)
    if not options.watch:
        return _show_once(options)
    with contextlib.suppress(JobEndedError):
        while True:
            status, problems = _status(options)
            if has_terminal() and not options.json:
                print("\x1b[H\x1b[2J", end="")
            _print(options, status, problems)
            if status["phase"] in ("finished", "failed", "stopped"):
                break
            time.sleep(WATCH_S)
    return EXIT_OK


def _only_job(options: argparse.Namespace) -> str:
    """Return the only job that a `dlrover run` of this machine runs in the folder of run folders.

    Raises:
        UsageError: there is none, or there are several.
    """
    folders = [file.parent for file in sorted(options.run_dir.glob(f"*/{JOB_FILE}"))]
    running = [folder.name for folder in folders if is_locked(folder)]
    if len(running) != 1:
        found = f"{', '.join(running)} run" if running else "no job runs"
        raise UsageError(f"{found} in folder {options.run_dir}: name the job, as in `dlrover status JOB`")
    return str(running[0])


def _show_once(options: argparse.Namespace) -> int:
    try:
        status, problems = _status(options)
    except JobEndedError:
        if not options.json:
            raise
        events = read_event_file(options.run_dir / options.job / EVENTS_FILE)
        status, problems = ended_status(find_place(options.job, options), events), []
    _print(options, status, problems)
    return EXIT_OK


def _print(options: argparse.Namespace, status: dict[str, Any], problems: list[str]) -> None:
    show(json.dumps(status, indent=2) if options.json else _status_text(status))
    tell_problems(problems)


def _status(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the status of a job, and its records that cannot be read."""
    with connected_job(options) as (place, client):
        found = read_job(client, place.keys)
        profiles = readable_folder(client, StepProfile, place.keys.profiles)
        events = Journal(client, place.keys).events()
        nodes = read_nodes(client, place.keys)
        alarms = alarms_of(client.caller)
    return show_status(place, found, profiles, events, nodes=nodes, alarms=alarms), found.problems


def _snapshot_lines(snapshot: dict[str, Any] | None) -> list[str]:
    """Return the age of the newest snapshot, as of a record that is written every few minutes, and the last failure."""
    if snapshot is None:
        return []
    age_s, failure = snapshot["age_s"], snapshot["failure"]
    lines = [f"snapshot: batch {snapshot['batch']} or later, {age_s:.0f} s old" if age_s is not None else "snapshot: none yet"]
    if failure is not None:
        lines.append(f"snapshots {'had failed' if failure['is_over'] else 'fail'}: {failure['text']}")
    return lines


def _status_text(status: dict[str, Any]) -> str:
    limits = f"{status['min_workers']} to {status['max_workers']} workers" if status["min_workers"] else "not known yet"
    has_several = (status["workers_per_node"] or 1) > 1
    limits += f" ({status['workers_per_node']} on each node)" if has_several else ""
    lines = [f"job {status['run_id']}: {status['phase']}, {limits}, etcd at {status['endpoint']}"]
    if "NOSPACE" in status["etcd_alarms"]:
        lines.append(f"changes wait: {full_text(status['endpoint'])}")
    if status["round"]:
        lines.append(f"round {status['round']['number']} ({status['round']['kind']}): {status['round']['reason']}")
    if status["progress"]:
        lines.append(progress_text(ProgressRecord(**status["progress"])))
    rate = status["samples_per_s"]
    lines.append(
        f"rate: {rate:.0f} samples/s, global batch {status['global_batch_size']}" if rate else "rate: not measured yet"
    )
    lines += [f"reads {text}" for text in status["streams"]]
    lines += _snapshot_lines(status["snapshot"])
    lines += status["values_lost"]
    plan = status["plan"]
    if plan:
        binding = "" if plan["binding"] else " (a recommendation)"
        each = ", ".join(counted_field(name, plan[name]) for name in COUNTED if name in plan)
        binding += f", {each} each" if each else ""
        lines.append(f"plan: {counted(plan['num_workers'], 'worker')}{binding}, by {plan['source']}: {plan['reason']}")
    again = f"`dlrover scale {status['run_id']}"
    lines += [f"not tried again: {why}; {again} {size}` does" for size, why in status["failed_sizes"].items()]
    if status["controller"]:
        controller = status["controller"]
        nodes = ", ".join(controller["awaited_nodes"])
        lines.append(
            f"controller: process {controller['pid']} on {controller['host']}, target {controller['target']}"
            + (f"; waits for {nodes} to come" if nodes else "")
        )
        lines += [f"nodes: {controller['held_up']}"] if controller["held_up"] else []
    elif status["target"] not in (None, "local") and (status["phase"] in ("starting", "training") or status["agents"]):
        lines.append(
            f"controller: none; nodes on {status['target']} train on, the same `dlrover run` adopts them, "
            f"`dlrover cancel {status['run_id']}` ends them"
        )
    for agent in status["agents"]:
        if agent["waits"]:
            gives_up = agent["gives_up_in_s"]
            lines.append(
                f"node {agent['host']}:{agent['pid']} {agent['waits']}, for {agent['for_s']:.0f} s"
                + (f", gives up in {max(0.0, gives_up):.0f} s" if gives_up is not None else "")
            )
    for node in status["joining"]:
        lines.append(f"joining: {node['node']} {_STAGES[node['stage']]}, for {node['for_s']:.0f} s")
    rows = [("rank", "state", "step", "process", "worker")]
    for worker in status["workers"]:
        rank = "-" if worker["rank"] is None else str(worker["rank"])
        step = f"{worker['step_time_s'] * 1000:.1f} ms" if worker["step_time_s"] else "-"
        place = f"{worker['node']} " * has_several + f"{worker['host']}:{worker['pid']}"
        rows.append((rank, worker["state"], step, place, worker["worker_id"]))
    head, *table = text_table("><><<", rows)
    lines.append(head)
    for worker, line in zip(status["workers"], table, strict=True):
        lines.append(line)
        if worker["waits"]:
            lines.append(f"      {worker['waits']}, for {worker['for_s']:.0f} s")
    if status["events"]:
        lines.append("last events:")
        lines += text_table("<<<", [(_clock(e["at"]), e["kind"], e["text"]) for e in status["events"]], indent=2)
    return "\n".join(lines)


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):  # a time beyond the calendar's range
        return "--:--:--"


def list_command(options: argparse.Namespace) -> int:
    """List the jobs of a folder, or of an etcd."""
    endpoint = options.endpoint or EtcdDefaults.of_this_process().endpoint
    jobs = list_jobs(endpoint, options.key_prefix, options.run_dir, etcd_access(options))
    if options.json:
        show(json.dumps([dataclasses.asdict(job) for job in jobs], indent=2))
        return EXIT_OK
    where = f"the etcd at {endpoint}" if endpoint else f"folder {options.run_dir}"
    if not jobs:
        show(f"no jobs in {where}")
        return EXIT_OK
    rows: list[tuple[str, ...]] = [("JOB", "STATE", "STARTED", "TARGET", "WORKERS", "NODES", "CONTROLLER")]
    for job in jobs:
        counts = ("-" if number is None else str(number) for number in (job.num_workers, job.num_nodes))
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started_at)) if job.started_at else "-"
        rows.append((job.run_id, job.state, started, job.target or "-", *counts, job.controller or "none"))
    show("\n".join(text_table("<<<<<<<", rows)))
    return EXIT_OK
