"""The `dlrover` command: parses, calls, prints. Anything slow to import is imported where it is used."""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import json
import logging
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning_dlrover._version import __version__

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.records import EventRecord

__all__ = ["main"]

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 130, 143


class UsageError(Exception):
    """Something the user asked for cannot be done; the message says what to do instead."""


class _Interrupted(BaseException):
    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    from lightning_dlrover.components.controller import ControllerBusyError
    from lightning_dlrover.job_view import JobNotFoundError
    from lightning_dlrover.rdzv.client import EtcdError
    from lightning_dlrover.rdzv.records import RecordError
    from lightning_dlrover.rdzv.server import EtcdServerError

    try:
        result: int = options.run(options)
        return result
    except (UsageError, JobNotFoundError, ControllerBusyError, EtcdError, EtcdServerError, RecordError, ValueError) as error:
        print(f"dlrover: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlrover", description="Live elastic training: start a job, watch it, resize it while it trains."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about what is done")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def job_command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("job", metavar="JOB", help="the job's --rdzv-id")
        command.set_defaults(run=run)
        _place_options(command)
        return command

    run = commands.add_parser("run", help="run a script as a live elastic job on this machine")
    run.add_argument("--workers", default="1:2", type=_workers, metavar="MIN:MAX", help="least and most workers (default 1:2)")
    run.add_argument("--rdzv-id", metavar="JOB", help="name of the job; default: made from the script's name")
    run.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restarts of a worker by its own agent (default 0)"
    )
    _place_options(run)
    run.add_argument("script", help="the training script")
    run.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    run.set_defaults(run=_run)

    scale = job_command("scale", _scale, "set the number of workers by hand")
    scale.add_argument("num_workers", type=int, metavar="N")
    status = job_command("status", _status, "show rounds, workers, rates and the current plan")
    status.add_argument("--json", action="store_true", help="for programs")
    report = job_command("report", _report, "write the job's report")
    report.add_argument("--output", type=Path, metavar="FILE", help="default: RUN_DIR/JOB/report.html")
    drain = job_command("drain", _drain, "ask one worker to hand over and leave")
    drain.add_argument("worker", metavar="WORKER", help="its id, as shown by `dlrover status`")
    return parser


def _place_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="etcd v3; default: DLROVER_ENDPOINT, else an embedded one")
    parser.add_argument("--key-prefix", metavar="PREFIX", help="folder of all jobs' keys in etcd (default /dlrover)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of run folders (default runs)"
    )


def _workers(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX, such as 1:3")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(
            f"{text!r}: MIN must be at least 1 and at most MAX, such as {min(low, high) or 1}:{max(low, high, 1)}"
        )
    return low, high


# --- run ---------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from lightning_dlrover.rdzv.records import DEFAULT_PREFIX, Keys

    script = _checked_script(options.script)
    run_id = (
        options.rdzv_id
        or f"{re.sub(r'[^A-Za-z0-9-]+', '-', script.stem)}-{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    )
    prefix = options.key_prefix or DEFAULT_PREFIX
    Keys(run_id, prefix)  # refuses a name that cannot be used
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts is {options.max_restarts}, it must be 0 or more")
    with _signals_as_exceptions():
        try:
            with _run_folder(options.run_dir / run_id, run_id) as folder:
                return _run_job(options, script, run_id, prefix, folder)
        except _Interrupted as interrupted:
            print(f"dlrover: ended by signal {interrupted.signal_number}; all nodes were ended", file=sys.stderr)
            return EXIT_INTERRUPTED if interrupted.signal_number == signal.SIGINT else EXIT_TERMINATED


def _run_job(options: argparse.Namespace, script: Path, run_id: str, prefix: str, folder: Path) -> int:
    from lightning_dlrover.components.controller import Controller
    from lightning_dlrover.components.targets import LocalTarget, NodeSpec
    from lightning_dlrover.job_view import EVENTS_FILE, EventLog, JobPlace, connect
    from lightning_dlrover.rdzv.client import Mirror
    from lightning_dlrover.rdzv.server import EmbeddedEtcd

    low, high = options.workers
    with contextlib.ExitStack() as stack:
        endpoint = options.endpoint or stack.enter_context(EmbeddedEtcd()).endpoint
        place = JobPlace(run_id, endpoint, prefix)
        client = stack.enter_context(connect(place))
        _refuse_ended_job(client, place)
        spec = NodeSpec(str(script), tuple(options.script_args), endpoint, run_id, prefix, low, high, options.max_restarts)
        target = LocalTarget(spec, folder / "logs")
        # TorchX's local scheduler has put its own handlers in place of ours.
        _install_handlers()
        mirror = stack.enter_context(Mirror(client, place.keys.events))
        log = EventLog(mirror, folder / EVENTS_FILE)
        controller = stack.enter_context(
            Controller(client, place.keys, target, low, high, run_dir=str(folder), show=lambda line: print(line, flush=True))
        )
        place.write(folder)
        print(f"job {run_id}: {low} to {high} workers, etcd at {endpoint}, files in {folder}", flush=True)
        try:
            while (end := controller.step()) is None:
                for event in log.new():
                    _announce(event)
                controller.wait(0.2)
            for event in log.new():
                _announce(event)
        finally:
            controller.close_nodes()
            _write_report(run_id, folder, log)
        failure = controller.failure_text() if end.exit_code else None
    if end.exit_code:
        print(f"dlrover: job {run_id} failed: {end.reason}", file=sys.stderr)
        if text := _first_error(folder) or failure:
            print(text, file=sys.stderr)
    return end.exit_code


def _refuse_ended_job(client: Any, place: Any) -> None:
    from lightning_dlrover.rdzv.records import JobRecord, decode

    entry = client.get(place.keys.job)
    if entry is None:
        return
    phase = decode(JobRecord, entry.value, entry.key).phase
    if phase in ("finished", "failed"):
        raise UsageError(f"job {place.run_id!r} has {phase} in the etcd at {place.endpoint}; choose another --rdzv-id")


def _announce(event: EventRecord) -> None:
    if event.kind in ("round", "decision", "scale", "loss", "resume") and event.text:
        print(f"[{event.kind}] {event.text}", flush=True)


def _write_report(run_id: str, folder: Path, log: Any) -> None:
    from lightning_dlrover.job_view import EVENTS_FILE, read_event_file
    from lightning_dlrover.report import summary_text, write_report

    log.new()
    file = folder / EVENTS_FILE
    events = read_event_file(file) if file.exists() else []
    write_report(run_id, events, folder / "report.html")
    print(summary_text(run_id, events))
    print(f"report: {folder / 'report.html'}", flush=True)


def _first_error(folder: Path) -> str | None:
    from lightning_dlrover.job_view import EVENTS_FILE, read_event_file

    file = folder / EVENTS_FILE
    errors = [e for e in (read_event_file(file) if file.exists() else []) if e.kind == "error" and "traceback" in e.data]
    errors.sort(key=lambda e: e.at)
    return str(errors[0].data["traceback"]).rstrip() if errors else None


def _checked_script(text: str) -> Path:
    script = Path(text)
    if not script.is_file():
        raise UsageError(f"script {text!r} does not exist or is not a file (looked in {Path.cwd()})")
    try:
        ast.parse(script.read_bytes(), filename=text)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"script {text!r} is not valid Python: {error}") from error
    return script.resolve()


@contextlib.contextmanager
def _run_folder(folder: Path, run_id: str) -> Iterator[Path]:
    """The run folder of a new job, locked while the job runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"job {run_id!r} is already run by another `dlrover run` (folder {folder}); choose another --rdzv-id, "
                "or use `dlrover scale` to resize it"
            ) from error
        if any(each.name != ".lock" for each in folder.iterdir()):
            raise UsageError(f"{folder} holds an earlier job's files; choose another --rdzv-id, or remove the folder")
        yield folder.resolve()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _install_handlers()
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _install_handlers() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        # Ending everything in order takes seconds; a second signal must not break it off half way.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupt)


# --- other commands ------------------------------------------------------------------------------------------------------


def _scale(options: argparse.Namespace) -> int:
    from lightning_dlrover.job_view import connect, find_job, read_job
    from lightning_dlrover.rdzv.client import Put, absent, modified
    from lightning_dlrover.rdzv.records import EventRecord, PlanRecord, encode

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir)
    with connect(place) as client:
        view = read_job(client, place.keys)
        if view.job is None:
            raise UsageError(f"job {place.run_id!r} has not started training yet; try again in a moment")
        if view.job.phase in ("finished", "failed"):
            raise UsageError(f"job {place.run_id!r} has {view.job.phase}; there is nothing to scale")
        low, high = view.job.min_workers, view.job.max_workers
        if not low <= options.num_workers <= high:
            raise UsageError(
                f"job {place.run_id!r} was started for {low} to {high} workers, {options.num_workers} is outside of that"
            )
        plan = PlanRecord(
            options.num_workers, "user", f"set to {options.num_workers} by hand", binding=True, created_at=time.time()
        )
        while True:
            entry = client.get(place.keys.plan)
            unchanged = modified(place.keys.plan) == entry.mod_revision if entry else absent(place.keys.plan)
            if client.txn([unchanged], [Put(place.keys.plan, encode(plan))]).succeeded:
                break
        event = EventRecord(
            "scale",
            time.time(),
            f"set to {options.num_workers} workers by hand",
            {"num_workers": options.num_workers, "source": "user"},
        )
        client.put(f"{place.keys.events}{time.time_ns():020d}-cli-{socket.gethostname()}", encode(event))
    print(
        f"job {place.run_id}: {options.num_workers} workers wanted; `dlrover status {place.run_id}` shows when they are there"
    )
    return EXIT_OK


def _drain(options: argparse.Namespace) -> int:
    from lightning_dlrover.job_view import connect, find_job, read_job
    from lightning_dlrover.rdzv.records import DrainRecord, encode

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir)
    with connect(place) as client:
        view = read_job(client, place.keys)
        if options.worker not in view.workers:
            known = ", ".join(view.workers) or "none"
            raise UsageError(f"job {place.run_id!r} has no worker {options.worker!r}; its workers are: {known}")
        client.put(place.keys.drains + options.worker, encode(DrainRecord(options.worker, "asked for by `dlrover drain`")))
    print(f"job {place.run_id}: {options.worker} will hand over and leave")
    return EXIT_OK


def _status(options: argparse.Namespace) -> int:
    from lightning_dlrover.job_view import connect, find_job, read_events, read_job, show_status
    from lightning_dlrover.perf.samples import StepProfile
    from lightning_dlrover.rdzv.records import RecordError, decode

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir)
    with connect(place) as client:
        view = read_job(client, place.keys)
        profiles: dict[str, StepProfile] = {}
        for entry in client.get_prefix(place.keys.profiles)[1]:
            with contextlib.suppress(RecordError):
                profiles[entry.key.removeprefix(place.keys.profiles)] = decode(StepProfile, entry.value, entry.key)
        events = read_events(client.get_prefix(place.keys.events)[1])
    status = show_status(place, view, profiles, events)
    print(json.dumps(status, indent=2) if options.json else _status_text(status))
    return EXIT_OK


def _status_text(status: dict[str, Any]) -> str:
    limits = f"{status['min_workers']} to {status['max_workers']} workers" if status["min_workers"] else "not known yet"
    lines = [f"job {status['run_id']}: {status['phase']}, {limits}, etcd at {status['endpoint']}"]
    if status["round"]:
        lines.append(f"round {status['round']['number']} ({status['round']['kind']}): {status['round']['reason']}")
    rate = status["samples_per_s"]
    lines.append(
        f"rate: {rate:.0f} samples/s, global batch {status['global_batch_size']}" if rate else "rate: not measured yet"
    )
    plan = status["plan"]
    if plan:
        binding = "" if plan["binding"] else " (a recommendation)"
        lines.append(f"plan: {plan['num_workers']} workers{binding}, by {plan['source']}: {plan['reason']}")
    lines.append(f"{'rank':>4}  {'state':<10} {'step':>9}  {'process':<24} worker")
    for worker in status["workers"]:
        rank = "-" if worker["rank"] is None else str(worker["rank"])
        step = f"{worker['step_time_s'] * 1000:.1f} ms" if worker["step_time_s"] else "-"
        process = f"{worker['host']}:{worker['pid']}"
        lines.append(f"{rank:>4}  {worker['state']:<10} {step:>9}  {process:<24} {worker['worker_id']}")
    if status["events"]:
        lines.append("last events:")
        lines += [
            f"  {time.strftime('%H:%M:%S', time.localtime(e['at']))}  {e['kind']:<9} {e['text']}" for e in status["events"]
        ]
    return "\n".join(lines)


def _report(options: argparse.Namespace) -> int:
    from lightning_dlrover.job_view import EVENTS_FILE, JobNotFoundError, connect, find_job, read_event_file, read_events
    from lightning_dlrover.rdzv.client import EtcdError
    from lightning_dlrover.report import summary_text, write_report

    events: list[EventRecord] = []
    folder = options.run_dir / options.job
    try:
        place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir)
        with connect(place, timeout_s=2.0) as client:
            events = read_events(client.get_prefix(place.keys.events)[1])
    except (EtcdError, JobNotFoundError):
        if options.endpoint:
            raise
    if not events:
        events = read_event_file(folder / EVENTS_FILE)
    output = options.output or folder / "report.html"
    write_report(options.job, events, output)
    print(summary_text(options.job, events))
    print(f"report: {output}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
