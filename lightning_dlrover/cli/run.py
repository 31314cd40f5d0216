"""`dlrover run`: one job from its start to its end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dlrover import variables
from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_LOST, UsageError
from lightning_dlrover.cli.lookup import etcd_access
from lightning_dlrover.cli.options import NODE_OPTIONS, SLURM_OPTIONS, TIMEOUTS, flag
from lightning_dlrover.cli.own_etcd import EtcdLostError, own_etcd, without_etcd
from lightning_dlrover.cli.run_folder import run_folder
from lightning_dlrover.cli.run_hooks import requested_ticket
from lightning_dlrover.cli.run_options import (
    check_target,
    checked_command,
    checked_prefix,
    kubernetes_options,
    node_sizes,
    objective,
    pairs,
    settle_workers,
    surrounding_target,
)
from lightning_dlrover.cli.run_output import Announcer, ProgressLine, write_final_report
from lightning_dlrover.cli.signals import Interrupted, signals_as_exceptions
from lightning_dlrover.components.control.controller import Controller
from lightning_dlrover.components.control.office import ControllerBusyError
from lightning_dlrover.components.control.reconcile import FailurePolicy, FinishJob, Limits
from lightning_dlrover.components.targets.target import NodeSpec, TargetError
from lightning_dlrover.output import complain, counted, say
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError
from lightning_dlrover.rdzv.etcd.start_check import warn_of_troubles
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import CheckpointRecord, RecordError
from lightning_dlrover.rdzv.job.snapshot_folders import remove_snapshots
from lightning_dlrover.report.discovery import EtcdDefaults
from lightning_dlrover.report.event_log import EVENTS_FILE, EventLog, JobNotFoundError, first_traceback
from lightning_dlrover.report.status import JOB_FILE, JobPlace, connect, read_job

if TYPE_CHECKING:
    from lightning_dlrover.cli.run_hooks import Ticket, TicketRequest
    from lightning_dlrover.components.targets.machine.shares import Claims
    from lightning_dlrover.components.targets.target import Target
    from lightning_dlrover.rdzv.etcd.client import EtcdClient

POLL_S = 2.0
"""Seconds between two questions to a scheduler, unless --poll-interval sets others."""


@dataclass
class _Course:
    """How far a job has come, to explain its end."""

    has_begun: bool = False  # nodes may have been started
    left: list[str] = field(default_factory=list)  # nodes that may still run
    last_words: list[str] = field(default_factory=list)  # lines that end the command's output


def run_command(options: argparse.Namespace) -> int:
    """Run a script as a live elastic job; return once all of its nodes have ended."""
    if options.target == "auto":
        options.target = surrounding_target(options)
    command = checked_command(options)
    run_id = options.rdzv_id or _new_run_id(Path(options.script).stem if not options.module else options.script)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run_id):
        raise UsageError(f"--rdzv-id {run_id!r} cannot name a folder: use letters, digits, '.', '_' and '-'")
    settle_workers(options)
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts is {options.max_restarts}, it must be 0 or more")
    objective(options)
    pairs(options, "env", "NAME=VALUE")
    defaults = EtcdDefaults.of_this_process()
    endpoint = options.endpoint or defaults.endpoint
    if endpoint is None and (access := etcd_access(options)):
        raise UsageError(
            f"{', '.join(map(flag, access))}: only with --endpoint; the etcd that is started for this job alone makes its own "
            "password, and has no TLS"
        )
    check_target(options, endpoint)
    prefix = checked_prefix(options.key_prefix or defaults.prefix)
    asked = requested_ticket(options, endpoint, prefix)
    hurry = threading.Event()
    course = _Course()
    with signals_as_exceptions(hurry):
        try:
            with (
                run_folder(options.run_dir / run_id, run_id, endpoint, options.target) as folder,
                contextlib.ExitStack() as stack,
            ):
                server = None
                if endpoint is None:
                    own = stack.enter_context(own_etcd(options, folder))
                    server = own.server
                    place = JobPlace(run_id, server.endpoint, prefix, own.access)
                else:
                    place = JobPlace(run_id, endpoint, prefix, etcd_access(options) or defaults.access)
                return _run_job(options, command, place, folder, server, hurry, asked, course)
        except Interrupted as interrupted:
            name = signal.Signals(interrupted.signal_number).name
            complain(f"job {run_id} was ended by {name}; {_what_is_left(run_id, course) or 'nothing it started is left'}")
            return 128 + interrupted.signal_number
        except Exception as error:
            if not course.has_begun:
                raise
            is_lost = isinstance(error, ControllerBusyError)
            complain(f"job {run_id} {'was lost' if is_lost else 'failed'}: {_problem(error)}")
            if left := _what_is_left(run_id, course):
                complain(f"job {run_id}: {left}")
            return EXIT_LOST if is_lost else EXIT_FAILED
        finally:
            for line in course.last_words:
                complain(line)


def _what_is_left(run_id: str, course: _Course) -> str:
    """Return which nodes may still run, and the next move; empty if there are none."""
    return f"{', '.join(course.left)} may still run: `dlrover cancel {run_id}` ends them" if course.left else ""


def _problem(error: Exception) -> str:
    """Return the reason why a job that had begun could not go on: with a traceback if it may be a fault of ours."""
    if isinstance(error, ControllerBusyError):
        return str(error).partition(";")[0]  # what follows is for a job that has not begun
    if isinstance(error, EtcdLostError | EtcdError | EtcdServerError | RecordError | TargetError | OSError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _run_job(
    options: argparse.Namespace,
    command: Sequence[str],
    place: JobPlace,
    folder: Path,
    server: EmbeddedEtcd | None,
    hurry: threading.Event,
    asked: TicketRequest | None,
    course: _Course,
) -> int:
    """Run the job to its end; all nodes but those that `course` names have ended when this returns or raises."""
    end: FinishJob | None = None
    fewest, most = options.workers
    limits = Limits(fewest, most, *node_sizes(options), options.workers_per_node)
    spec = _node_spec(options, command, place, asked)
    # A node may be without a worker while one is restarted.
    policy = FailurePolicy(exit_s=180.0) if options.max_restarts or options.workers_per_node > 1 else FailurePolicy()
    if asked is not None:
        policy = dataclasses.replace(policy, surplus_s=asked.surplus_s)
    if options.target != "local":
        policy = dataclasses.replace(policy, show_s=_poll_s(options))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect(place))
        is_resumed = (folder / JOB_FILE).exists()
        _refuse_unusable_job(client, place, is_resumed, options.workers_per_node)
        # Before the target: its nodes end before the ticket is given back.
        ticket = stack.enter_context(asked.wait(client, place.keys)) if asked is not None else None
        gpus = ticket.gpus if ticket is not None else None
        target = _make_target(options, spec, folder / "logs", hurry, has_own_etcd=server is not None, claims=gpus)
        mirror = stack.enter_context(Mirror(client, place.keys.events))
        log = EventLog(mirror, folder / EVENTS_FILE)
        announce = Announcer(log)
        progress = ProgressLine(stack.enter_context(Mirror(client, place.keys.progress)))
        if options.target == "local":
            stack.callback(_remove_snapshots, client, place, server)  # after the end of all nodes, and before that of etcd
        controller = Controller(client, place.keys, target, limits, str(folder), say, policy, hurry)
        stack.callback(lambda: course.left.extend(controller.left_nodes()))  # after the controller's end
        stack.enter_context(controller)
        if server is None:  # the embedded one compacts by itself, and has a quota of its own
            warn_of_troubles(client.config, complain)
        try:
            place.write(folder, target.name, controller.mark)
        except OSError as error:
            if not is_resumed:
                raise
            complain(f"{folder / JOB_FILE} keeps the former process's number ({error.strerror}); the job goes on")
        course.has_begun = True
        say(
            f"job {place.run_id}: {limits.min_workers} to {limits.max_workers} workers, etcd at {place.endpoint}, "
            f"files in {folder}"
        )
        try:
            end = _steer(controller, server, options.target, [announce, progress], ticket)
        finally:
            progress.end()
            controller.end_nodes()
            announce()
            log.complete(client)
            if not hurry.is_set():
                write_final_report(place.run_id, folder)
            checkpoint = controller.newest_checkpoint()
            if checkpoint is not None and (end is None or (end.exit_code and not end.is_trained)):
                keeps_records = end is None and (server is None or options.target != "local")
                course.last_words.append(_how_to_continue(place.run_id, checkpoint, keeps_records))
        failure = controller.failure_text()
    if end.exit_code:
        complain(f"job {place.run_id} failed: {end.reason}")
        # Workers report errors of the training only; a later failure shows up in the output of a node.
        reported = None if end.is_trained else first_traceback(folder / EVENTS_FILE)
        if not controller.has_shown(reported or failure):
            complain(reported or failure, prefix="")
    elif not end.is_trained:
        complain(f"job {place.run_id}: {end.reason}")
    return end.exit_code


def _how_to_continue(run_id: str, checkpoint: CheckpointRecord, same_command: bool) -> str:
    """Return the next move after the end of a job that is not done.

    Args:
        same_command: whether the job can continue under its name.
    """
    move = "the same command continues from it"
    if not same_command:
        script = f"trainer.fit(..., ckpt_path={checkpoint.path!r}), or --ckpt_path of LightningCLI"
        move = f"to continue from it, start a job under another --rdzv-id with {script}"
    return f"newest checkpoint of job {run_id}: {checkpoint.path} (step {checkpoint.global_step}); {move}"


def _node_spec(options: argparse.Namespace, command: Sequence[str], place: JobPlace, asked: TicketRequest | None) -> NodeSpec:
    fewest, most = options.workers
    # This command may run inside of another job, which others decide on.
    decided = {variables.POOL: "", **(asked.environment if asked is not None else {})}
    return NodeSpec(
        script=command[0],
        script_args=(*command[1:], *options.script_args),
        endpoint=place.endpoint,
        run_id=place.run_id,
        prefix=place.prefix,
        min_workers=fewest,
        max_workers=most,
        max_restarts=options.max_restarts,
        workers_per_node=options.workers_per_node,
        access=place.access,
        environment={**objective(options), **decided, **pairs(options, "env", "NAME=VALUE")},
        timeouts={name: value for name in TIMEOUTS if (value := getattr(options, name)) is not None},
    )


def _steer(
    controller: Controller,
    server: EmbeddedEtcd | None,
    target: str,
    shows: Sequence[Callable[[], None]],
    ticket: Ticket | None = None,
) -> FinishJob:
    """Let the controller act until the job is over; return how it has ended.

    Args:
        shows: print what is new about the job.

    Raises:
        EtcdLostError: the job's own etcd has ended before the job.
        Interrupted: a signal asked this process to end.
    """
    try:
        while (end := controller.step()) is None:
            if server is not None and not server.is_running():
                say("the embedded etcd has ended unasked: ending all nodes, as the job cannot continue without it")
                raise EtcdLostError(without_etcd(server, target))
            for show in shows:
                show()
            if ticket is not None:
                ticket.keep()
            controller.wait(0.2)
    except (Interrupted, EtcdLostError) as error:
        if isinstance(error, Interrupted):
            name = signal.Signals(error.signal_number).name
            say(f"{name}: ending all nodes, which takes some seconds; a second Ctrl-C does not wait for them")
        # Slurm signals all processes of a job at once, etcd included. Nodes can be ended without etcd, but nothing would
        # record the end of the job: restart etcd.
        if server is not None and (not server.is_running() or variables.slurm_job(os.environ)):
            controller.tell_scheduler_to_end_nodes()  # before the restart: there may be little time
            with contextlib.suppress(EtcdServerError):
                server.restart()
        raise
    return end


def _remove_snapshots(client: EtcdClient, place: JobPlace, server: EmbeddedEtcd | None) -> None:
    """Remove the snapshots that killed workers have left on this machine, if no worker will ever continue the job."""
    # A job cannot continue without its records, which end with its own server.
    with contextlib.suppress(EtcdError, RecordError):
        if server is not None or Journal(client, place.keys).is_over():
            remove_snapshots(place.keys)


def _poll_s(options: argparse.Namespace) -> float:
    """Return the minimum seconds between two questions to a scheduler, or to a file system that it shares with this host."""
    return POLL_S if options.poll_interval is None else float(options.poll_interval)


def _make_target(
    options: argparse.Namespace,
    spec: NodeSpec,
    log_dir: Path,
    hurry: threading.Event,
    has_own_etcd: bool,
    claims: Claims | None = None,
) -> Target:
    if options.log_dir is not None:
        # TorchX gives each run a folder of its own. At a scheduler, nodes of several jobs would overwrite each other's files.
        log_dir = options.log_dir if options.target == "local" else options.log_dir / spec.run_id
    log_dir = log_dir.resolve()
    if options.target == "local":
        from lightning_dlrover.components.targets.local import LocalTarget

        return LocalTarget(spec, log_dir, int(options.gpus or 0), claims, hurry=hurry)
    if options.target == "kubernetes":
        from lightning_dlrover.components.targets.kubernetes import KubernetesTarget

        return KubernetesTarget(spec, kubernetes_options(options), log_dir, _poll_s(options), has_own_etcd=has_own_etcd)
    from lightning_dlrover.components.targets.slurm import SlurmOptions, SlurmTarget

    asked = {name: getattr(options, name) for name in (*SLURM_OPTIONS, *NODE_OPTIONS)}
    asked |= {"notice_s": options.preemption_notice} if options.preemption_notice is not None else {}
    return SlurmTarget(spec, SlurmOptions(**asked, extra=tuple(options.sbatch_arg)), log_dir, _poll_s(options))


def _refuse_unusable_job(client: EtcdClient, place: JobPlace, is_resumed: bool, workers_per_node: int) -> None:
    """Refuse a name whose job in etcd can be neither started nor continued by this process.

    Raises:
        UsageError: the job has ended, another launcher's workers train it, its nodes have another number of workers, or its
            records cannot be read.
    """
    try:
        found = read_job(client, place.keys)
    except JobNotFoundError:
        return  # the usual case: the name is unused
    if found.problems:
        raise UsageError(f"job {place.run_id!r} cannot be run under this name: {found.problems[0]}")
    job = found.view.job
    # If a controller acts for the job, `Controller` refuses with an error that names it.
    is_others = found.view.workers and not is_resumed and client.get(place.keys.controller) is None
    if job is not None and job.phase == "training" and is_others:
        raise UsageError(
            f"job {place.run_id!r} is training already in the etcd at {place.endpoint}, with "
            f"{counted(len(found.view.workers), 'worker')} that others have started; choose another --rdzv-id, or use "
            "`dlrover scale` to resize it"
        )
    if job is not None and job.phase in ("finished", "failed"):
        raise UsageError(f"job {place.run_id!r} has {job.phase} in the etcd at {place.endpoint}; choose another --rdzv-id")
    if job is not None and job.workers_per_node != workers_per_node:
        raise UsageError(
            f"job {place.run_id!r} has {job.workers_per_node} workers on each of its nodes, which cannot change; continue it "
            f"with --workers-per-node {job.workers_per_node}, or choose another --rdzv-id"
        )


def _new_run_id(script: str) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", script).strip("-") or "job"
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
