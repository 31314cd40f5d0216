"""`dlrover logs`: show the output of all nodes, or follow it."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK, UsageError
from lightning_dlrover.cli.lookup import find_place
from lightning_dlrover.components.control.tracebacks import SignalFilter
from lightning_dlrover.components.targets.logs import LogFile, log_files
from lightning_dlrover.components.targets.target import NodeSpec, TargetError
from lightning_dlrover.output import complain
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.report.event_log import JobNotFoundError
from lightning_dlrover.report.status import connect, is_locked, read_job

if TYPE_CHECKING:
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.report.status import JobPlace

_OUTPUT_S = 60.0
"""Seconds for which followed output may be unreadable before the command fails."""


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
    lines, signals = LogFile(file).new_lines(whole=True), SignalFilter()
    while True:
        try:
            line = next(lines, None)
        except OSError as error:
            complain(f"{file} cannot be read: {error.strerror}")
            return EXIT_FAILED
        for shown in signals.lines(line) if line is not None else signals.rest():
            print(f"[{node}] {shown}")
        if line is None:
            return EXIT_OK


@dataclass(frozen=True)
class _Output:
    """Folder with the nodes' output, and functions that fill it if no `dlrover run` does; both may raise TargetError."""

    folder: Path
    fetch: Callable[[], None] = lambda: None  # copies new output in the background
    fetch_all: Callable[[], None] = lambda: None  # copies all output before it returns


def _output(options: argparse.Namespace, stack: contextlib.ExitStack) -> _Output:
    """Find a job's output: in a folder of this machine or a shared one, else at its scheduler.

    Raises:
        UsageError: the output is on another machine.
    """
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
    theirs = Path(job.controller.run_dir) / "logs" if job.controller and job.controller.run_dir else None
    if theirs is not None and job.controller is not None:
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
        self._files: dict[Path, LogFile] = {}
        self._filters: dict[Path, SignalFilter] = {}
        for files in log_files(output.folder).values():
            for file in files:
                self._files[file] = LogFile(file)
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
                    lines = list(self._files.setdefault(file, LogFile(file)).new_lines(whole=is_over))
                except OSError as error:
                    lines, problem = [], error  # lines of other files are still shown
                signals = self._filters.setdefault(file, SignalFilter())
                shown = [each for line in lines for each in signals.lines(line)]
                for line in [*shown, *(signals.rest() if is_over else ())]:
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
        nobody = view.job is None and not view.agents and controller is None
        return {}, None if nobody else is_over
    ranks: dict[str, list[int]] = {}
    for global_rank, worker in enumerate(view.round.members):
        record = view.workers.get(worker)
        agent = view.agents.get(record.agent_id) if record else None
        if agent is not None:
            ranks.setdefault(agent.labels.get("node", ""), []).append(global_rank)
    number = view.round.number
    return {node: f" rank {', '.join(map(str, its))} round {number}" for node, its in ranks.items()}, is_over
