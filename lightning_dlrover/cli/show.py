"""`dlrover status`, `list`, `stacks` and `logs`: show one job, its workers' stacks, its output, or all jobs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import connected_job, etcd_access, find_place, report_problems
from lightning_dlrover.cli.options import COUNTED, counted_field
from lightning_dlrover.components.control.post_mortem import ShownLog, SignalFilter
from lightning_dlrover.components.targets.target import LogFile, NodeSpec, TargetError, log_files
from lightning_dlrover.output import complain, counted, has_terminal, show, text_table
from lightning_dlrover.rdzv.etcd.connection import full_text
from lightning_dlrover.rdzv.etcd.health import alarms_of
from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.job.folders import EtcdDefaults
from lightning_dlrover.rdzv.job.journal import Journal, readable_folder
from lightning_dlrover.rdzv.job.records import ProgressRecord
from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.rdzv.membership.worker_records import ask_for_stacks, read_stacks
from lightning_dlrover.report.status import (
    EVENTS_FILE,
    JOB_FILE,
    JobEndedError,
    JobNotFoundError,
    connect,
    ended_status,
    is_locked,
    list_jobs,
    progress_text,
    read_event_file,
    read_job,
    read_nodes,
    show_status,
)
from lightning_dlrover.tuning.samples import StepProfile

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.report.status import JobPlace

WATCH_S = 2.0
"""Seconds between two queries of `dlrover status --watch`."""

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
    """Return the only job that a `dlrover run` of this machine runs in the folder of run folders."""
    running = [file.parent.name for file in sorted(options.run_dir.glob(f"*/{JOB_FILE}")) if is_locked(file.parent)]
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
    report_problems(problems)


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
    limits += f", sizes {WorldSizes(tuple(status['sizes'])).text}" if status["sizes"] else ""
    lines = [f"job {status['run_id']}: {status['phase']}, {limits}, etcd at {status['endpoint']}"]
    if status["closed"]:
        lines.append(f"no worker can join: {status['closed']}")
    if "NOSPACE" in status["etcd_alarms"]:
        lines.append(f"changes wait: {full_text(status['endpoint'])}")
    if status["round"]:
        lines.append(f"round {status['round']['number']} ({status['round']['kind']}): {status['round']['reason']}")
    if status["progress"]:
        lines.append(progress_text(ProgressRecord(**status["progress"])))
    rate = status["samples_per_s"]
    measured = f"{rate:.0f} samples/s, global batch {status['global_batch_size']}" if rate else "not measured yet"
    lines.append(f"rate: {measured}")
    lines += [f"reads {text}" for text in status["streams"]]
    lines += _snapshot_lines(status["snapshot"])
    lines += status["values_lost"]
    if plan := status["plan"]:
        binding = "" if plan["binding"] else " (a recommendation)"
        each = ", ".join(counted_field(name, plan[name]) for name in COUNTED if name in plan)
        binding += f", {each} each" if each else ""
        by = plan["reason"] if plan["source"] == "pool" else f"{plan['source']}: {plan['reason']}"  # names the pool itself
        lines.append(f"plan: {counted(plan['num_workers'], 'worker')}{binding}, by {by}")
    again = f"`dlrover scale {status['run_id']}"
    lines += [f"not tried again: {why}; {again} {size}` does" for size, why in status["failed_sizes"].items()]
    if controller := status["controller"]:
        line = f"controller: process {controller['pid']} on {controller['host']}, target {controller['target']}"
        nodes = ", ".join(controller["awaited_nodes"])
        lines.append(line + (f"; waits for {nodes}" if nodes else ""))
        lines += [f"nodes: {controller['held_up']}"] if controller["held_up"] else []
        lines += [f"size of {node}: {state}" for node, state in controller["resizes"].items()]
    elif status["target"] not in (None, "local") and (status["phase"] in ("starting", "training") or status["agents"]):
        lines.append(
            f"controller: none; nodes on {status['target']} train on, the same `dlrover run` adopts them, "
            f"`dlrover cancel {status['run_id']}` ends them"
        )
    for spare in status["spares"]:
        memory = f", {spare['memory_bytes'] / 2**20:.0f} MiB" if spare["memory_bytes"] else ""
        lines.append(f"spare process of {spare['owner']}: {spare['state']}{memory}")
    for agent in status["agents"]:
        if agent["waits"]:
            left_s = agent["gives_up_in_s"]
            end = f", gives up in {max(0.0, left_s):.0f} s" if left_s is not None else ""
            lines.append(f"node {agent['host']}:{agent['pid']} {agent['waits']}, for {agent['for_s']:.0f} s{end}")
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
        if worker["samples"] is not None:
            lines.append(f"      share by speed: {worker['samples']} of {status['global_batch_size']} samples")
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
        show(json.dumps([asdict(job) for job in jobs], indent=2))
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


def stacks_command(options: argparse.Namespace) -> int:
    """Show the stack traces of all workers of a job."""
    with connected_job(options) as (place, client):
        view = read_job(client, place.keys).view
        if not view.survivors:
            raise UsageError(f"job {place.run_id!r} has no workers that train; `dlrover status {place.run_id}` shows why")
        journal = Journal(client, place.keys)
        deadline = time.monotonic() + options.timeout
        while (request := ask_for_stacks(journal, "dlrover stacks", "asked for by `dlrover stacks`")) is None:
            if time.monotonic() > deadline:
                raise UsageError(f"other processes keep asking the workers of job {place.run_id!r}; try again in a moment")
        while True:
            answers = {w: a for w, a in read_stacks(journal).items() if a.request >= request.number}
            missing = [w for w in view.survivors if w not in answers]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    for answer in sorted(answers.values(), key=lambda a: a.global_rank):
        waits = ", waits for others in a collective" if answer.in_collective else ""
        show(
            f"{answer.worker_id} (rank {answer.global_rank}, {answer.host}:{answer.pid}, in {answer.phase} "
            f"since {answer.since_s:.1f} s{waits}) is at {answer.place}\n{answer.stacks}\n"
        )
    for worker in missing:
        show(f"{worker} has not answered within {options.timeout:g} s: it has no DLRoverCallback, was stopped, or runs C code")
    return EXIT_FAILED if missing else EXIT_OK


_OUTPUT_S = 60.0
"""Seconds that followed output may be unreadable before the command fails."""


def logs_command(options: argparse.Namespace) -> int:
    """Show the output of all nodes, or follow it."""
    with contextlib.ExitStack() as stack:
        output = _output(options, stack)
        if options.follow:
            _Follower(options, output, stack).run()
            return EXIT_OK
        output.fetch_all()
        result = EXIT_OK
        for node, files in log_files(output.folder).items():
            for file in files:
                result = max(result, _print_file(node, file))
    return result


def _print_file(node: str, file: Path) -> int:
    """Print all lines of a file. One that cannot be read, such as another user's, hides no other."""
    lines = SignalFilter().shown(LogFile(file).new_lines(whole=True), is_complete=True)
    while True:
        try:
            line = next(lines, None)
        except OSError as error:
            complain(f"{file} cannot be read: {error.strerror}")
            return EXIT_FAILED
        if line is None:
            return EXIT_OK
        print(f"[{node}] {line}")


@dataclass(frozen=True)
class _Output:
    """Folder with the nodes' output, and functions that fill it if no `dlrover run` does; both may raise TargetError."""

    folder: Path
    fetch: Callable[[], None] = lambda: None  # copies new output in the background
    fetch_all: Callable[[], None] = lambda: None  # copies all output before it returns


def _output(options: argparse.Namespace, stack: contextlib.ExitStack) -> _Output:
    """Find a job's output: in a folder of this machine or a shared one, else at its scheduler."""
    folder = options.log_dir or options.run_dir / options.job / "logs"
    if options.log_dir is not None and os.path.isdir(options.log_dir / options.job):
        folder = options.log_dir / options.job  # schedulers' targets append the job's name
    if os.path.isdir(folder):  # Path.is_dir() would raise an error in a folder that this user may not enter
        return _Output(folder)
    missing = f"folder {str(folder)!r} does not exist; name the one of the job's output with --log-dir, or --run-dir"
    if options.log_dir is not None:
        raise UsageError(missing)
    try:
        place = find_place(options.job, options)
        with connect(place) as client:
            job = read_job(client, place.keys)
    except (EtcdError, JobNotFoundError) as error:
        raise UsageError(f"{missing}, or the etcd of a job on Kubernetes with --endpoint ({error})") from error
    if job.nodes is not None and job.nodes.target.startswith("kubernetes"):
        from lightning_dlrover.components.targets.kubernetes import known_target

        copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrover-logs-")))
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if options.follow else ""
        spec = NodeSpec("", (), place.endpoint, place.run_id, place.prefix, 1, 1)
        target = known_target(spec, job.nodes.target, copies, output_since=since)
        stack.callback(target.close)
        target.open(job.nodes.mark)
        return _Output(copies, lambda: target.copy_output(timeout_s=0.0), lambda: target.copy_output(timeout_s=60.0))
    if job.controller is None:
        missing += "; torchrun keeps the output of a job without `dlrover run`: on its terminal, or in its --log-dir"
    elif job.controller.run_dir:
        theirs = Path(job.controller.run_dir) / "logs"
        if os.path.isdir(theirs):
            return _Output(theirs)  # a shared folder
        missing += f"; its `dlrover run` on {job.controller.host} writes to {theirs}, unless it was given a --log-dir"
    raise UsageError(missing)


class _Follower:
    """Follows the output of all nodes of a job."""

    def __init__(self, options: argparse.Namespace, output: _Output, stack: contextlib.ExitStack) -> None:
        self._options = options
        self._output = output
        self._stack = stack
        self._place: JobPlace | None = None
        self._client: EtcdClient | None = None
        self._files: dict[Path, ShownLog] = {}
        for files in log_files(output.folder).values():
            for file in files:
                self._files[file] = ShownLog(file, SignalFilter())
                self._files[file].skip()

    def run(self) -> None:
        """Print until the job is over.

        Raises:
            UsageError: output has been unreadable for a minute, in a file or from the scheduler.
        """
        is_over = False
        failing_since: float | None = None
        while not is_over or failing_since is not None:
            # Query the state before reading files: the job's last lines are then read, too.
            ranks, is_over, problem = self._ask()
            problem = self._print_new_lines(ranks, is_over) or problem
            if problem is None:
                failing_since = None
            elif failing_since is None:
                failing_since = time.monotonic()
                complain(f"output cannot be read now ({problem}); trying again for {_OUTPUT_S:.0f} s")
            elif time.monotonic() - failing_since > _OUTPUT_S:
                raise UsageError(f"output cannot be read for {_OUTPUT_S:.0f} s: {problem}") from problem
            if not is_over or problem is not None:
                time.sleep(0.5)

    def _ask(self) -> tuple[dict[str, str], bool, Exception | None]:
        """Return a label for each node, whether the job is over, and the reason if that is unknown."""
        if self._client is None:
            with contextlib.suppress(EtcdError, JobNotFoundError):
                self._place = find_place(self._options.job, self._options)
                self._client = self._stack.enter_context(connect(self._place, timeout_s=2.0))
        ranks, is_over = _ranks(self._client, self._place) if self._client and self._place else ({}, None)
        if is_over is not None:
            return ranks, is_over, None
        # An unreachable etcd does not end a job. The loss of its `dlrover run` does, and the run folder's lock shows that loss.
        folder = self._options.run_dir / self._options.job
        locked = is_locked(folder)
        if os.path.exists(folder) and locked is not None:
            return ranks, not locked, None
        return ranks, False, UsageError(f"no etcd shows whether job {self._options.job!r} is over")

    def _print_new_lines(self, ranks: dict[str, str], is_over: bool) -> Exception | None:
        """Print all new lines; return why some of them could not be read."""
        problem: Exception | None = None
        found: dict[str, list[Path]] = {}
        try:
            (self._output.fetch_all if is_over else self._output.fetch)()
            found = log_files(self._output.folder)
        except (OSError, TargetError) as error:
            problem = error
        for node, files in found.items():
            for file in files:
                try:
                    lines = self._files.setdefault(file, ShownLog(file, SignalFilter())).new_lines(whole=is_over)
                except OSError as error:
                    lines, problem = [], error  # lines of other files are still shown
                for line in lines:
                    print(f"[{node}{ranks.get(node, '')}] {line}", flush=True)
        return problem


def _ranks(client: EtcdClient, place: JobPlace) -> tuple[dict[str, str], bool | None]:
    """Return a label for each node of the current round, and whether the job is over; None if etcd does not show that."""
    try:
        view = read_job(client, place.keys).view
        controller = client.get(place.keys.controller)
    except (EtcdError, JobNotFoundError):
        return {}, None
    is_over = view.job is not None and view.job.phase in ("finished", "failed") and not view.agents
    if view.round is None:
        # Nodes that end before they register leave no record, so an empty job may not have started, or may be over.
        is_empty = view.job is None and not view.agents and controller is None
        return {}, None if is_empty else is_over
    ranks: dict[str, list[int]] = {}
    for global_rank, worker in enumerate(view.round.members):
        record = view.workers.get(worker)
        agent = view.agents.get(record.agent_id) if record else None
        if agent is not None:
            ranks.setdefault(agent.labels.get("node", ""), []).append(global_rank)
    number = view.round.number
    return {node: f" rank {', '.join(map(str, its))} round {number}" for node, its in ranks.items()}, is_over
