"""`dlrover run`: start a job's etcd and controller, show its progress, and end all of it in order."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal

from lightning_dlrover import variables
from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_LOST, EXIT_USAGE, Interrupted, UsageError, signals_as_exceptions
from lightning_dlrover.cli.lookup import etcd_access, notify_destinations
from lightning_dlrover.cli.options import NODE_OPTIONS, SLURM_OPTIONS, TIMEOUTS, flag
from lightning_dlrover.cli.plugins import requested_ticket
from lightning_dlrover.cli.run_options import (
    check_target,
    checked_command,
    checked_prefix,
    kubernetes_options,
    node_sizes,
    objective,
    pairs,
    settle_sizes,
    settle_spares,
    settle_workers,
    surrounding_target,
)
from lightning_dlrover.codec import RecordError
from lightning_dlrover.components.control.controller import Controller
from lightning_dlrover.components.control.nodes import ControllerBusyError
from lightning_dlrover.components.control.reconcile import FailurePolicy, FinishJob, Limits
from lightning_dlrover.components.targets.target import EventSink, NodeSpec, TargetError
from lightning_dlrover.host import own_address
from lightning_dlrover.output import complain, counted, has_terminal, lacks_matplotlib, printable, say, show_transient
from lightning_dlrover.rdzv.etcd.client import USER, make_password, require_password
from lightning_dlrover.rdzv.etcd.health import warn_of_troubles
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError
from lightning_dlrover.rdzv.etcd.types import EtcdError, parse_endpoints
from lightning_dlrover.rdzv.job import events as kinds
from lightning_dlrover.rdzv.job.folders import EtcdDefaults, remove_snapshots
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import HISTORY_TTL_S, CheckpointRecord, Keys, ProgressRecord
from lightning_dlrover.report.page import summary_text, write_report
from lightning_dlrover.report.status import (
    EVENTS_FILE,
    JOB_FILE,
    EventLog,
    JobNotFoundError,
    JobPlace,
    connect,
    first_traceback,
    progress_text,
    read_event_file,
    read_job,
    read_job_file,
)

if TYPE_CHECKING:
    from lightning_dlrover.cli.plugins import Ticket, TicketRequest
    from lightning_dlrover.components.targets.machine import Claims
    from lightning_dlrover.components.targets.target import Target
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.report.notify import Destination, EtcdNotifications


@contextlib.contextmanager
def run_folder(folder: Path, run_id: str, endpoint: str | None, target: str) -> Iterator[Path]:
    """Lock the run folder of a job, which one process uses at a time, and yield it.

    Raises:
        UsageError: a job runs in the folder, or it holds another job's files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise UsageError(f"folder {str(folder)!r} cannot be used: {error.strerror}; choose another --run-dir") from error
    with lock:
        deadline = time.monotonic() + 1.0
        try:
            while not (is_ours := _try_to_lock(lock)) and time.monotonic() < deadline:
                time.sleep(0.05)  # a check by `is_locked` holds the lock for a moment, too
        except OSError as error:
            _remove_if_unused(folder)
            raise UsageError(
                f"folder {str(folder)!r} is on a file system that cannot lock files (flock: {error.strerror}), so two runs "
                "could use it at once; choose a --run-dir elsewhere, such as in your home folder, or have it mounted with "
                "locks (Lustre: -o flock; NFS: lockd on the server)"
            ) from error
        if not is_ours:
            who = "another `dlrover run`"
            with contextlib.suppress(JobNotFoundError):
                who = f"process {read_job_file(folder / JOB_FILE).pid} on {socket.gethostname()}"
            raise UsageError(
                f"job {run_id!r} is already run by {who} (folder {folder}); choose another --rdzv-id, "
                "or use `dlrover scale` to resize it"
            )
        if any(each.name != ".lock" for each in folder.iterdir()):
            former = None
            with contextlib.suppress(JobNotFoundError):
                former = read_job_file(folder / JOB_FILE).place.endpoint
            # After its controller was killed, a job can continue with the same etcd, or with the data of its embedded one.
            has_data = target != "local" and former is not None and (folder / "etcd").is_dir()
            if former != endpoint if endpoint is not None else not has_data:
                raise UsageError(f"{folder} holds an earlier job's files; choose another --rdzv-id, or remove the folder")
        try:
            yield folder.resolve()
        finally:
            _remove_if_unused(folder)


def _remove_if_unused(folder: Path) -> None:
    """Remove the lock file of a refused job, which would make the folder look used to the next attempt."""
    with contextlib.suppress(OSError):  # the user may have removed the folder while the job ran
        if [each.name for each in folder.iterdir()] == [".lock"]:
            (folder / ".lock").unlink()
            folder.rmdir()


def _try_to_lock(lock: IO[str]) -> bool:
    """Lock the file for this process; return False if another process holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_SHOWN_EVENTS = (
    *(kinds.RoundFormed, kinds.DecisionMade, kinds.SizeRequested, kinds.WorkerLost, kinds.FitResumed),
    *(kinds.StragglerFound, kinds.MemoryShort, kinds.HangFound, kinds.StreamOpened, kinds.IterableOpened),
    *(kinds.RowsSkipped, kinds.ValuesLost, kinds.ReplicaDrifted),
)
SHOWN = {each.KIND for each in _SHOWN_EVENTS}
"""Kinds of events that `dlrover run` prints."""

PROGRESS_EVERY_S = 10.0
"""Seconds between two lines about the progress of training, where they cannot replace each other."""

BAR_WIDTH = 20
"""Characters of the bar of an epoch's batches."""


class Announcer:
    """Prints new events of the job. Repeated decisions to keep the same settings are printed once.

    Args:
        sink: where to show them, too.
    """

    def __init__(self, log: EventLog, sink: EventSink | None = None) -> None:
        self._log = log
        self._sink = sink
        self._stays_at: object = None

    def __call__(self) -> None:
        for event in self._log.new():
            if event.kind == kinds.DecisionMade.KIND:
                chosen, current = event.data.get("chosen"), event.data.get("current")
                if chosen == current == self._stays_at:
                    continue
                self._stays_at = chosen if chosen == current else None
            if event.kind in SHOWN and event.text:
                say(printable(f"[{event.kind}] {event.text}"))
                if self._sink is not None:
                    self._sink.publish(event)


class ProgressLine:
    """Shows how far the job has trained: a line at the bottom of a terminal, elsewhere a new line every ten seconds."""

    def __init__(self, progress: Mirror) -> None:
        self._progress = progress
        self._on_terminal = has_terminal()
        self._shown: ProgressRecord | None = None
        self._shown_at = -PROGRESS_EVERY_S

    def __call__(self) -> None:
        newest = next((readable(ProgressRecord, entry) for entry in self._progress.snapshot().values()), None)
        if newest is None:
            return
        if self._on_terminal:
            show_transient(_with_bar(newest))
        elif newest != self._shown and time.monotonic() - self._shown_at >= PROGRESS_EVERY_S:
            self._shown, self._shown_at = newest, time.monotonic()
            say(f"[progress] {printable(progress_text(newest))}")

    def end(self) -> None:
        """Remove the line."""
        if self._on_terminal:
            show_transient("")


def _with_bar(progress: ProgressRecord) -> str:
    if not progress.num_batches:
        return progress_text(progress)
    filled = min(BAR_WIDTH, BAR_WIDTH * progress.batch // progress.num_batches)
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {progress_text(progress, with_batch=False)}"


def write_final_report(run_id: str, folder: Path) -> None:
    """Write the report of a job that has ended into its run folder, unless nothing was trained."""
    file = folder / EVENTS_FILE
    events = read_event_file(file) if file.exists() else []
    if not any(event.kind == kinds.RoundFormed.KIND for event in events):
        return  # nothing was trained; an empty report would only hide the error
    report = f"\nreport: {folder / 'report.html'}"
    try:
        write_report(run_id, events, folder / "report.html")
    except Exception as error:  # the job has ended well, and matplotlib and the user's fonts may raise anything
        reason = lacks_matplotlib(error) or printable(str(error) or type(error).__name__)
        complain(f"no report was written: {reason}; then see `dlrover report {run_id}`")
        report = ""
    say(printable(summary_text(run_id, events)) + report)


# The etcd that `dlrover run` starts for its job alone. Access depends on the target:
#
# local       processes of this user on this host, through a Unix socket
# slurm       processes that can read the password file in the run folder: those of this user, on all hosts
# kubernetes  as with slurm, and pods through the Secret that the target creates from that file

_PASSWORD_FILE = "etcd.password"
"""File in the run folder, as nodes on other hosts must read it."""


class EtcdLostError(Exception):
    """The job's own etcd ended while the job ran."""


def without_etcd(server: EmbeddedEtcd, target: str) -> str:
    """Explain why the job's own etcd ended, what remains of the job, and how to continue."""
    left = "The same command continues from the newest checkpoint"
    if target == "local":
        left = (
            "The job's records are lost with it: the script's checkpoints are still there, but the job restarts from scratch "
            "unless you pass it one (ckpt_path). With an external etcd (--endpoint), the same command would continue"
        )
    return f"the embedded etcd has ended unexpectedly: {server.why_it_ended()}. {left}"


@contextlib.contextmanager
def own_etcd(options: argparse.Namespace, folder: Path) -> Iterator[tuple[EmbeddedEtcd, dict[str, Any]]]:
    """Run an etcd for this job alone. Yield the server and the access to it, see `EtcdConfig.access`.

    Nodes at a scheduler survive if this process is killed. The next `dlrover run` then finds etcd's data in the same folder,
    and the nodes find etcd at the same address. The data is removed when the job ends in order.

    Raises:
        EtcdServerError: etcd cannot be started.
        UsageError: the nodes look for etcd on another host.
    """
    if options.target == "local":
        with EmbeddedEtcd(private=True) as server:
            yield server, {}
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
        # A job of a release without passwords continues as its nodes expect it.
        if password.exists() or not data.exists():
            _protect(data, password)
            access = {"user": USER, "password_file": str(password)}
        with _started(data, host, port) as server:
            if not access and not host.startswith("127."):
                say(
                    f"etcd listens on {server.endpoint} without authentication, because the release that started this job had "
                    "none; a new job has a password of its own"
                )
            if "VC_TASK_INDEX" in os.environ:
                # TorchX requests Volcano's plugin `svc`. Its network policy admits only pods of the same Job.
                say(
                    "this pod is part of a Volcano Job, which may keep nodes away from this etcd: if none joins, use --endpoint"
                )
            yield server, access
        is_over = True
    finally:
        if is_over or not (folder / JOB_FILE).exists():
            shutil.rmtree(data, ignore_errors=True)
            password.unlink(missing_ok=True)


def _protect(data: Path, password: Path) -> None:
    """Make a new etcd, without data yet, require a password from its first moment on a network."""
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


POLL_S = 2.0
"""Seconds between two queries to a scheduler, unless --poll-interval sets others."""


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
    settle_sizes(options)
    settle_spares(options)
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts is {options.max_restarts}, it must be 0 or more")
    objective(options)
    notify = notify_destinations(options)
    pairs(options, "env", "NAME=VALUE")
    defaults = EtcdDefaults.of_this_process()
    endpoint = options.endpoint or defaults.endpoint
    if endpoint is None and (access := etcd_access(options)):
        raise UsageError(
            f"{', '.join(map(flag, access))}: only with --endpoint; the etcd started for this job alone makes its own password "
            "and has no TLS"
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
                    server, access = stack.enter_context(own_etcd(options, folder))
                    place = JobPlace(run_id, server.endpoint, prefix, access)
                else:
                    place = JobPlace(run_id, endpoint, prefix, etcd_access(options) or defaults.access)
                return _run_job(options, command, place, folder, server, hurry, asked, notify, course)
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
    """Return which nodes may still run, and the next move; empty if none do."""
    return f"{', '.join(course.left)} may still run: `dlrover cancel {run_id}` ends them" if course.left else ""


def _problem(error: BaseException) -> str:
    """Return the reason why a job that had begun could not continue, with a traceback if it may be our fault."""
    if isinstance(error, ControllerBusyError):
        return str(error).partition(";")[0]  # the rest is for a job that has not begun
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
    notify: Sequence[Destination],
    course: _Course,
) -> int:
    """Run the job to its end; all nodes but those in `course.left` have ended when this returns or raises."""
    end: FinishJob | None = None
    fewest, most = options.workers
    limits = Limits(fewest, most, *node_sizes(options), options.workers_per_node, options.sizes)
    spec = _node_spec(options, command, place, asked)
    # A node may be without a worker while one is restarted.
    policy = FailurePolicy(exit_s=180.0) if options.max_restarts or options.workers_per_node > 1 else FailurePolicy()
    if options.spares:  # a node costs little then
        policy = replace(policy, first_backoff_s=0.1)
    if asked is not None:
        policy = replace(policy, surplus_s=asked.surplus_s)
    if options.target != "local":
        policy = replace(policy, show_s=_poll_s(options))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect(place))
        is_resumed = (folder / JOB_FILE).exists()
        recorded = _refuse_unusable_job(client, place, is_resumed, options.workers_per_node, options.sizes)
        if options.metrics is not None:
            from lightning_dlrover.report.metrics import JobMetrics, serve_metrics

            metrics = stack.enter_context(contextlib.closing(JobMetrics(place)))
            say(f"metrics at {stack.enter_context(serve_metrics(options.metrics, metrics))}")
        notifications = stack.enter_context(_Notifications(client, place.keys, notify, hurry))
        # Before the target: its nodes end before the ticket is released.
        ticket = stack.enter_context(asked.wait(client, place.keys)) if asked is not None else None
        gpus = ticket.gpus if ticket is not None else None
        target = _make_target(options, spec, folder / "logs", hurry, server is not None, gpus, recorded)
        mirror = stack.enter_context(Mirror(client, place.keys.events))
        log = EventLog(mirror, folder / EVENTS_FILE)
        announce = Announcer(log, target if isinstance(target, EventSink) else None)
        progress = ProgressLine(stack.enter_context(Mirror(client, place.keys.progress)))
        if options.target == "local":
            stack.callback(_remove_snapshots, client, place, server)  # after the end of all nodes, and before that of etcd
        controller = Controller(client, place.keys, target, limits, str(folder), say, policy, hurry)
        stack.callback(lambda: course.left.extend(controller.left_nodes()))  # after the controller's end
        stack.enter_context(controller)
        if server is None:  # the embedded one compacts on its own, and has its own quota
            warn_of_troubles(client.config, complain)
        try:
            place.write(folder, target.name, controller.mark)
        except OSError as error:
            if not is_resumed:
                raise
            complain(f"{folder / JOB_FILE} keeps the former process's id ({error.strerror}); the job continues")
        course.has_begun = True
        workers = f"{limits.min_workers} to {limits.max_workers} workers"
        workers += f" (sizes {limits.world_sizes.text})" if limits.sizes else ""
        say(f"job {place.run_id}: {workers}, etcd at {place.endpoint}, files in {folder}")
        try:
            shows: list[Callable[[], None]] = [announce, progress, lambda: notifications.look(mirror)]
            end = _steer(controller, server, options.target, shows, ticket)
            notifications.end = end
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


class _Notifications:
    """The notifications of a job, if there are any destinations. Leaving the context sends how the job has ended."""

    def __init__(self, client: EtcdClient, keys: Keys, destinations: Sequence[Destination], hurry: threading.Event) -> None:
        self._run_id = keys.run_id
        self.end: FinishJob | None = None
        self._sent: EtcdNotifications | None = None
        if destinations:
            from lightning_dlrover.report.notify import EtcdNotifications, JobEvents

            client.share_lifetime(keys.root, HISTORY_TTL_S)
            made = JobEvents(keys.run_id)
            self._sent = EtcdNotifications(client, keys.events, keys.notified, destinations, made, hurry)

    def look(self, events: Mirror) -> None:
        """Queue the notifications of new events. Returns at once."""
        if self._sent is not None:
            self._sent.look_if_new(events)

    def __enter__(self) -> _Notifications:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._sent is None:
            return
        from lightning_dlrover.report.notify import ended

        if not isinstance(error, ControllerBusyError):  # another controller sends that job's events
            self._sent.look_once_more()
        if isinstance(error, Interrupted):
            name = signal.Signals(error.signal_number).name
            self._sent.put_last(ended(self._run_id, "stopped", f"it was ended by {name}", 128 + error.signal_number))
        elif isinstance(error, UsageError):
            self._sent.put_last(ended(self._run_id, "refused", str(error), EXIT_USAGE))
        elif error is not None and not isinstance(error, ControllerBusyError):  # another controller sends that job's end
            self._sent.put_last(ended(self._run_id, "failed", _problem(error).splitlines()[-1], EXIT_FAILED))
        elif error is None and self.end is not None:
            event: Literal["failed", "finished"] = "failed" if self.end.exit_code else "finished"
            self._sent.put_last(ended(self._run_id, event, self.end.reason, self.end.exit_code))
        self._sent.close()


def _how_to_continue(run_id: str, checkpoint: CheckpointRecord, same_command: bool) -> str:
    """Return the next move after the end of an unfinished job. `same_command`: it can continue under its name."""
    move = "the same command continues from it"
    if not same_command:
        script = f"trainer.fit(..., ckpt_path={checkpoint.path!r}), or --ckpt_path of LightningCLI"
        move = f"to continue from it, start a job under another --rdzv-id with {script}"
    return f"newest checkpoint of job {run_id}: {checkpoint.path} (step {checkpoint.global_step}); {move}"


def _node_spec(options: argparse.Namespace, command: Sequence[str], place: JobPlace, asked: TicketRequest | None) -> NodeSpec:
    # This command may run inside of another job, which may be in a pool.
    of_pool = {variables.POOL: "", **(asked.environment if asked is not None else {})}
    return NodeSpec(
        script=command[0],
        script_args=(*command[1:], *options.script_args),
        endpoint=place.endpoint,
        run_id=place.run_id,
        prefix=place.prefix,
        min_workers=options.workers[0],
        max_workers=options.workers[1],
        max_restarts=options.max_restarts,
        has_spares=bool(options.spares),
        notices=options.notices or "",
        workers_per_node=options.workers_per_node,
        sizes=options.sizes,
        access=place.access,
        environment={**objective(options), **of_pool, **pairs(options, "env", "NAME=VALUE")},
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

    Raises:
        EtcdLostError: the job's own etcd has ended before the job.
        Interrupted: a signal asked this process to end.
    """
    try:
        while (end := controller.step()) is None:
            if server is not None and not server.is_running():
                say("the embedded etcd has ended unexpectedly: ending all nodes, because the job cannot continue without it")
                raise EtcdLostError(without_etcd(server, target))
            for show in shows:
                show()
            if ticket is not None:
                ticket.keep()
            controller.wait(0.2)
    except (Interrupted, EtcdLostError) as error:
        if isinstance(error, Interrupted):
            name = signal.Signals(error.signal_number).name
            say(f"{name}: ending all nodes, which takes some seconds; press Ctrl-C again to exit without waiting for them")
        # Slurm signals all processes of a job at once, etcd included. Nodes can be ended without etcd, but nothing would
        # record the end of the job: restart etcd.
        if server is not None and (not server.is_running() or variables.slurm_job(os.environ)):
            controller.request_end_of_nodes()  # before the restart: there may be little time
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
    """Return the minimum seconds between two queries to a scheduler, or to a file system that it shares with this host."""
    return POLL_S if options.poll_interval is None else float(options.poll_interval)


def _make_target(
    options: argparse.Namespace,
    spec: NodeSpec,
    log_dir: Path,
    hurry: threading.Event,
    has_own_etcd: bool,
    claims: Claims | None = None,
    recorded: str = "",
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
        from lightning_dlrover.components.targets.kubernetes_offer import TRIAL_S

        return KubernetesTarget(
            spec,
            kubernetes_options(options),
            log_dir,
            _poll_s(options),
            has_own_etcd=has_own_etcd,
            recorded=recorded,
            trial_s=TRIAL_S,
        )
    from lightning_dlrover.components.targets.slurm import SlurmOptions, SlurmTarget

    asked = {name: getattr(options, name) for name in (*SLURM_OPTIONS, *NODE_OPTIONS)}
    asked |= {"notice_s": options.preemption_notice} if options.preemption_notice is not None else {}
    return SlurmTarget(spec, SlurmOptions(**asked, extra=tuple(options.sbatch_arg)), log_dir, _poll_s(options))


def _refuse_unusable_job(
    client: EtcdClient, place: JobPlace, is_resumed: bool, workers_per_node: int, sizes: tuple[int, ...]
) -> str:
    """Return the name of the target of a job to continue; empty for a new one.

    Raises:
        UsageError: etcd has a job of this name that this process can neither start nor continue.
    """
    try:
        found = read_job(client, place.keys)
    except JobNotFoundError:
        return ""  # the usual case: the name is unused
    if found.problems:
        raise UsageError(f"job {place.run_id!r} cannot be run under this name: {found.problems[0]}")
    recorded = found.nodes.target if found.nodes is not None else ""
    if (job := found.view.job) is None:
        return recorded
    # If a controller acts for the job, `Controller` refuses with an error that names it.
    is_others = found.view.workers and not is_resumed and client.get(place.keys.controller) is None
    if job.phase == "training" and is_others:
        workers = f"{counted(len(found.view.workers), 'worker')} of another launcher"
        move = "choose another --rdzv-id, or use `dlrover scale` to resize it"
        raise UsageError(f"job {place.run_id!r} is training already in the etcd at {place.endpoint}, with {workers}; {move}")
    if job.phase in ("finished", "failed"):
        raise UsageError(f"job {place.run_id!r} has {job.phase} in the etcd at {place.endpoint}; choose another --rdzv-id")
    if job.workers_per_node != workers_per_node:
        raise UsageError(
            f"job {place.run_id!r} has {job.workers_per_node} workers on each of its nodes, which cannot change; continue it "
            f"with --workers-per-node {job.workers_per_node}, or choose another --rdzv-id"
        )
    # The list may have been cut to this machine's cores.
    if tuple(size for size in job.sizes if size <= max(sizes, default=0)) != sizes or bool(job.sizes) != bool(sizes):
        listed = f"--sizes {','.join(map(str, job.sizes))}" if job.sizes else "without --sizes"
        raise UsageError(
            f"job {place.run_id!r} was started {'with ' * bool(job.sizes)}{listed}, which cannot change; continue it so, or "
            "choose another --rdzv-id"
        )
    return recorded


def _new_run_id(script: str) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", script).strip("-") or "job"
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
