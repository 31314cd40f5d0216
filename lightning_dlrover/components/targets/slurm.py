"""Nodes as Slurm jobs: one independent job per node, all of which join one rendezvous.

Runs Slurm's own commands, as an ordinary user and without accounting. TorchX's Slurm scheduler would submit a heterogeneous
job. Such a job cannot grow or lose a part, takes its states from `sacct`, and allows no notice before the time limit.

A failed command never means that a node has ended. It is repeated with growing pauses, and the last known state holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dlrover import variables
from lightning_dlrover.components.node import notice_file
from lightning_dlrover.components.targets.local import node_app
from lightning_dlrover.components.targets.target import (
    ANY_SIZE,
    App,
    AppStatus,
    NodeSize,
    NodeSpec,
    NotTakenError,
    Polling,
    Resize,
    TargetError,
    existing_logs,
    read_tail,
    set_aside,
    thread_variables,
)
from lightning_dlrover.rdzv.job.records import EndNotice

log = logging.getLogger(__name__)

_COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")

_STATES: dict[str, AppStatus] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"), "pending"),
    **dict.fromkeys(("SPECIAL_EXIT", "POWER_UP_NODE", "EXPEDITING"), "pending"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), "running"),
    "COMPLETED": "succeeded",
    # Cancelled by another user: for the job, a killed node.
    **dict.fromkeys(("FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"), "failed"),
    **dict.fromkeys(("DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"), "failed"),
}

# The out-of-memory killer gives a process no chance to report. Slurm's step daemon logs it; this pattern finds that line.
_OUT_OF_MEMORY = re.compile(r"slurmstepd.*?: error: .*?(exceeded (?:job )?memory limit.*|oom[-_]kill.*)", re.I)

# The request has certainly not been carried out, so it may be repeated.
_NOT_SENT = re.compile(r"connect failure|Connection refused|No route to host|Unable to establish configuration source", re.I)
# The answer was lost, but the request may have been carried out.
_UNCERTAIN = re.compile(r"timed out|Zero Bytes|communication|Unable to contact|Connection reset", re.I)
_UNKNOWN_JOB = re.compile(r"Invalid job id", re.I)
_ENDED_ALREADY = re.compile(r"Invalid job id|already complet|Job/step", re.I)

_STEADY_POLLS = 5
"""Intervals between two calls of squeue while nothing changes: sites forbid frequent ones."""

_EXPEDITES_SINCE = (25, 11)
"""Release from which sbatch takes `--requeue=expedite`."""

_EXPEDITES = "enable_expedited_requeue"
"""Parameter of slurmctld without which that option is refused."""

_EPILOG_S = 10.0
"""Time for the epilog of a failed node, after which Slurm may hold its job, before this process ends."""

_NUM_ATTEMPTS = 3
_JOBS_PER_COMMAND = 200


@dataclass(frozen=True)
class SlurmOptions:
    """Settings of each node's job. An empty one keeps the cluster's default."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""  # time limit of one node in sbatch's format: MINUTES, HH:MM:SS or D-HH:MM
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    gres: str = ""
    gpus: str = ""  # GPUs of each node, [TYPE:]NUMBER
    notice_s: int = 120  # seconds of notice before the time limit or a preemption, to start a replacement; 0: none
    work_dir: str = ""  # working directory of the script; default: the current folder
    setup: str = ""  # shell line to run before the script, such as `module load cuda`
    extra: tuple[str, ...] = ()  # more sbatch arguments; they come last and override ours

    def arguments(self, size: NodeSize, expedites: bool = False) -> list[str]:
        """Return the arguments for sbatch.

        Args:
            expedites: a node whose host has failed is requeued before all other jobs, and its healthy hosts wait for it.
        """
        asked = ("partition", "account", "qos", "time", "constraint", "nodelist", "exclude", "gres", "gpus")
        given = [f"--{name}={value}" for name in asked if (value := getattr(self, name))]
        given += [f"--mem={size.memory_mb}M"] if size.memory_mb else []
        # The signal goes to the batch script only (`components/node.py`), which forwards it to the worker and no other process.
        notice = [f"--signal=B:USR1@{self.notice_s}"] if self.notice_s else []
        # A node that Slurm has requeued plainly waits behind other jobs, under a plan that may be outdated by then. The
        # controller starts a new one instead. Where Slurm requeues a node all the same, its earlier output is kept.
        requeue = "--requeue=expedite" if expedites else "--no-requeue"
        fixed = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={size.cpus or 1}", requeue, "--open-mode=append"]
        return [*fixed, *notice, *given, *self.extra]


@dataclass(frozen=True)
class SlurmFeatures:
    """Abilities of a site's Slurm that depend on its release and configuration."""

    expedites: bool = False  # requeues a job whose host has failed before all others

    @classmethod
    def of(cls, client: str, config: str) -> SlurmFeatures:
        """Return the abilities that both sides have.

        Args:
            client: output of `scontrol --version`.
            config: output of `scontrol show config`, which contains the controller's release.
        """
        found = re.search(r"^SLURM_VERSION\s*=\s*(.*)$", config, re.M)
        release = min(release_of(client), release_of(found[1] if found else ""))
        is_enabled = re.search(rf"^SlurmctldParameters\b.*\b{_EXPEDITES}\b", config, re.M) is not None
        return cls(expedites=release >= _EXPEDITES_SINCE and is_enabled)


def release_of(text: str) -> tuple[int, int]:
    """Return the release in a text such as `slurm 25.11.1`; (0, 0) if there is none."""
    found = re.search(r"\b(\d{2})\.(\d{2})\b", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True)
class _Row:
    """One line of squeue's output."""

    job_id: str
    state: str
    node: str


def check_commands() -> None:
    """Raise TargetError unless Slurm's commands are on PATH."""
    if missing := [command for command in _COMMANDS if shutil.which(command) is None]:
        raise TargetError(
            f"{', '.join(missing)} not found on PATH; --target slurm works on a host from which `sbatch` and `squeue` do, such "
            "as a login node"
        )


class SlurmTarget:
    """Submit, watch and cancel one-node jobs.

    Args:
        log_dir: folder of this job alone, shared by all hosts. Each node has a subfolder for its script, output and exit code.
        poll_s: minimum interval between calls of squeue, which cover all nodes. While nothing changes it is five times as long.
        clock: time of the calls of squeue.

    Raises:
        TargetError: Slurm's commands are not installed.
    """

    name = "slurm"
    outlives_controller = True
    resizes_in_place = False
    spares: None = None

    def __init__(
        self,
        spec: NodeSpec,
        options: SlurmOptions,
        log_dir: Path,
        poll_s: float = 2.0,
        command_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._options = options
        self._log_dir = log_dir
        self._poll_s = poll_s
        self._command_s = command_s
        self._name = re.compile("")  # matches our job names
        self._mark = ""
        no_rows: dict[str, _Row] = {}  # key: job id
        # A notice must be seen in a small part of its time.
        steady_s = min(_STEADY_POLLS * poll_s, options.notice_s / 8 if options.notice_s else float("inf"))
        self._polling = Polling(self._list, no_rows, poll_s, clock, steady_s)
        self._looked_up_at: dict[str, float] = {}  # key: job id; squeue call after which scontrol was last asked about it
        self._known: dict[str, AppStatus] = {}  # key: handle
        self._cancelled: set[str] = set()  # handles that this object has cancelled
        self._starved: set[str] = set()  # handles of nodes that ran out of memory according to their output
        self._unknown_states: set[str] = set()  # those that were logged
        self._looked_for_at: dict[str, float] = {}  # key: handle; squeue call at which its files were last checked
        self._features: SlurmFeatures | None = None  # None: not read yet
        self._expedited: set[str] = set()  # handles of nodes that Slurm starts again at once
        check_commands()

    @property
    def features(self) -> SlurmFeatures:
        """Abilities of this site's Slurm, read once. None are assumed if its commands fail."""
        if self._features is None:
            self._features = SlurmFeatures()
            with contextlib.suppress(OSError, TargetError):
                client = self._call("scontrol", "--version").stdout
                if release_of(client) >= _EXPEDITES_SINCE:
                    self._features = SlurmFeatures.of(client, self._call("scontrol", "show", "config").stdout)
        return self._features

    def open(self, mark: str) -> None:
        self._mark = mark
        self._name = re.compile(rf"{re.escape(self._spec.run_id)}\.(node\d+)\.{re.escape(mark)}")

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        folder = self._log_dir / node
        folder.mkdir(parents=True, exist_ok=True)
        # An earlier job of this name, already gone from etcd, may have had a node of this name.
        for former in (self._exit_file(node), notice_file(self._exit_file(node))):
            former.unlink(missing_ok=True)
        for former in (folder / "stdout.log", folder / "stderr.log"):  # sbatch appends to them
            set_aside(former)
        script = folder / "batch.sh"
        script.touch(mode=0o600)
        script.chmod(0o600)  # holds the job's variables; values given with `--env` may be secret
        script.write_bytes(os.fsencode(self._script(node, size)))  # paths are bytes, in whatever encoding they came
        arguments = [
            "--parsable",
            f"--job-name={self._job_name(node)}",
            # Slurm expands %x and similar patterns in these.
            f"--output={str(folder).replace('%', '%%')}/stdout.log",
            f"--error={str(folder).replace('%', '%%')}/stderr.log",
            f"--chdir={self._options.work_dir or os.getcwd()}",
            *self._options.arguments(size, self.features.expedites),
            str(script),
        ]
        for attempt in range(_NUM_ATTEMPTS):
            try:
                done = self._call("sbatch", *arguments)
            except OSError as error:
                raise NotTakenError(f"sbatch cannot be run: {error}") from error
            if done.returncode == 0:
                break
            message = _text(done.stderr.strip() or done.stdout)
            if self.features.expedites and re.search("requeue", message, re.I):  # refused by this site
                log.warning("run %s: nodes are not requeued by Slurm: %s", self._spec.run_id, message)
                self._features = replace(self.features, expedites=False)
                return self.start(node, size)
            if not _NOT_SENT.search(message):
                uncertain = _UNCERTAIN.search(message)
                raise (TargetError if uncertain else NotTakenError)(f"sbatch ended with {done.returncode}: {message}")
            if attempt == _NUM_ATTEMPTS - 1:
                raise NotTakenError(f"sbatch could not reach Slurm {_NUM_ATTEMPTS} times: {message}")
            time.sleep(2.0**attempt * min(1.0, self._poll_s))
        # A site's submit filter may print additional lines.
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        match = re.fullmatch(r"(\d+)(?:;\S+)?", lines[-1].strip()) if lines else None
        if match is None:
            raise TargetError(f"sbatch printed no job number, but {_text(done.stdout)!r}")
        self._polling.note_start(match[1])
        return f"{match[1]}/{node}"

    def owns(self, node: str, handle: str) -> bool:
        # The job id may belong to any job, so `cancel` and `status` compare the job's name, too.
        return re.fullmatch(rf"[1-9][0-9]{{0,17}}/{re.escape(node)}", handle) is not None

    def apps(self) -> Sequence[App]:
        self._polling.refresh()
        self._polling.raise_trouble()
        found = [(row, f"{row.job_id}/{row.node}") for row in self._polling.newest.values()]
        return [App(row.node, handle, self._status_of(row, handle) in ("pending", "running")) for row, handle in found]

    def status(self, handle: str) -> AppStatus:
        known = self._known.get(handle, "pending")
        if known not in ("pending", "running"):
            return known  # final
        self._polling.refresh()
        job_id, node = handle.split("/")
        row = self._polling.newest.get(job_id)
        if row is not None:
            status = self._status_of(row, handle)
        elif not self._polling.covers(job_id) or self._looked_up_at.get(job_id) == self._polling.asked_at:
            status = known  # scontrol may have run since the newest squeue call; its answer was unusable then
        else:
            self._looked_up_at[job_id] = self._polling.asked_at
            status = self._look_up(job_id, node) or known
        # `start` has removed the file of a former node with this name.
        waits = status == "pending"
        has_run = known == "running" or (waits and self._is_new_list_for(handle) and os.path.exists(self._exit_file(node)))
        comes_back = self._comes_back(handle, row.state if row is not None else "", status)
        if has_run and waits and not comes_back and handle not in self._cancelled:
            # The job was requeued: its worker has gone, and the job may wait for long under an outdated plan. To the controller
            # it has failed, and the entry that Slurm still lists is a stray.
            status = "failed"
        self._known[handle] = status
        if status == "failed" and handle not in self._cancelled:
            self._tell_why(handle, row.state if row is not None else "")
        return status

    def _comes_back(self, handle: str, state: str, status: AppStatus) -> bool:
        """Whether Slurm is about to start a node again, before all other jobs, because its host has failed."""
        if state == "EXPEDITING":
            self._expedited.add(handle)
        elif status != "pending" or state == "REQUEUE_HOLD":
            self._expedited.discard(handle)
        return handle in self._expedited

    def _status_of(self, row: _Row, handle: str) -> AppStatus:
        known = self._known.get(handle, "pending")
        if row.state in _STATES and row.state != "COMPLETING":
            return _STATES[row.state]
        if known not in ("pending", "running"):
            return known
        # The epilogue may take long, and a newer Slurm may have more states. The exit code written by the agent is final.
        return self._exit_status(row.node) or _STATES.get(row.state, known)

    def _tell_why(self, handle: str, state: str) -> None:
        """Log Slurm's reason for a node's failure, and append it to the node's output."""
        job_id, node = handle.split("/")
        file = self._log_dir / node / "stderr.log"
        found = None
        with contextlib.suppress(OSError):
            found = _OUT_OF_MEMORY.search(read_tail(file))
        if found:
            self._starved.add(handle)
        reported = "requeued" if _STATES.get(state) == "pending" else state if state not in ("FAILED", "COMPLETING") else ""
        if state == "REQUEUE_HOLD" and self.features.expedites:
            reported = ""  # so ends each job that has failed by itself
        why = ", ".join(each for each in (reported, f"out of memory: {found[1]}" if found else "") if each)
        if why:
            log.warning("run %s: %s, job %s, has failed: %s", self._spec.run_id, node, job_id, why)
            with contextlib.suppress(OSError), file.open("a", encoding="utf-8") as stream:
                stream.write(f"Slurm: {why}\n")

    def cancel(self, handles: Iterable[str]) -> None:
        doomed = list(handles)
        self._cancelled.update(doomed)
        ours, others = [], []
        for handle in doomed:
            job_id, node = handle.split("/")
            if job_id in self._polling.newest or self._polling.has_started(job_id):
                ours.append(job_id)
            else:
                # Unknown to Slurm, not looked up yet, or a record names a foreign job.
                others.append([f"--jobname={self._job_name(node)}", "--", job_id])
        batches = [["--", *ours[start : start + _JOBS_PER_COMMAND]] for start in range(0, len(ours), _JOBS_PER_COMMAND)]
        for arguments in [*batches, *others]:
            try:
                done = self._call("scancel", *arguments)
            except OSError as error:
                raise TargetError(f"scancel cannot be run: {error}") from error
            problems = [line for line in done.stderr.splitlines() if line.strip() and not _ENDED_ALREADY.search(line)]
            if done.returncode and (problems or not done.stderr.strip()):
                raise TargetError(f"scancel ended with {done.returncode}: {_text(done.stderr)}")
        self._polling.hasten()

    def resize(self, handle: str, size: NodeSize) -> Resize:
        return Resize("refused", "Slurm cannot enlarge a running job")

    def ran_out_of_memory(self, handle: str) -> bool:
        row = self._polling.newest.get(handle.split("/")[0])
        return handle in self._starved or (row is not None and row.state == "OUT_OF_MEMORY")

    def release(self, handle: str) -> bool:
        if self._known.get(handle) != "failed" or not self.features.expedites:
            return True  # Slurm forgets ended jobs by itself
        # A job that was not expedited, because its script has failed and its host has not, is requeued all the same, and held.
        row = self._polling.newest.get(handle.split("/")[0])
        if row is not None and row.state == "COMPLETING":
            return False
        if row is not None and _STATES.get(row.state) == "pending" and handle not in self._cancelled:
            try:
                self.cancel([handle])
            except TargetError as error:
                log.warning("run %s: a held job is cancelled later: %s", self._spec.run_id, error)
                return False
        return True

    def notice(self, handle: str) -> EndNotice | None:
        if not self._is_new_list_for(handle):
            return None
        try:
            text = notice_file(self._exit_file(handle.split("/")[1])).read_text()
        except OSError:
            return None
        match = re.fullmatch(r"(\d{1,11}(?:\.\d+)?)\n", text)  # an earlier release leaves an empty file
        return EndNotice("slurm", float(match[1]) if match else 0.0)

    def _is_new_list_for(self, handle: str) -> bool:
        """Whether squeue has run since the last check for this node. A shared file system must not be queried at every step."""
        is_new = self._looked_for_at.get(handle) != self._polling.asked_at
        self._looked_for_at[handle] = self._polling.asked_at
        return is_new

    def logs(self, handle: str) -> list[Path]:
        return existing_logs(self._log_dir / handle.split("/")[1])

    def close(self) -> None:
        """End held jobs, which this job's next controller would not find."""
        left, deadline = [handle for handle in self._known if not self.release(handle)], time.monotonic() + _EPILOG_S
        while left and time.monotonic() < deadline:
            time.sleep(min(0.5, max(0.05, self._poll_s)))
            self._polling.refresh()
            left = [handle for handle in left if not self.release(handle)]

    def _job_name(self, node: str) -> str:
        return f"{self._spec.run_id}.{node}.{self._mark}"

    def _script(self, node: str, size: NodeSize) -> str:
        # Only torchrun expands ${...} here.
        role = node_app(self._spec, node, dollar="$$").roles[0]
        exported = {
            **thread_variables(size.cpus, self._spec.workers_per_node),
            **role.env,
            **self._spec.environment,
            variables.EXIT_FILE: str(self._exit_file(node)),
            variables.NOTICE_S: str(self._options.notice_s),
        }
        lines = ["#!/bin/bash", f"# {node} of job {self._spec.run_id}, as `dlrover run --target slurm` has submitted it."]
        lines += [self._options.setup] if self._options.setup else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
        return "\n".join([*lines, f"exec {shlex.join([role.entrypoint, *role.args])}", ""])

    def _exit_file(self, node: str) -> Path:
        return self._log_dir / node / "exit_code"

    def _exit_status(self, node: str) -> AppStatus | None:
        """Return the agent's outcome from its exit file; None if it has not written one."""
        with contextlib.suppress(OSError, ValueError):
            return "succeeded" if int(self._exit_file(node).read_text()) == 0 else "failed"
        return None

    def _list(self) -> dict[str, _Row]:
        try:
            done = self._call("squeue", "--me", "--noheader", "--states=all", "--format=%A %T %j")
        except OSError as error:
            raise TargetError(f"squeue cannot be run: {error}") from error
        if done.returncode:
            raise TargetError(f"squeue ended with {done.returncode}: {_text(done.stderr)}")
        rows = {}
        for line in done.stdout.splitlines():
            match = re.fullmatch(r"(\d+) (\S+) (.*?)\s*", line)
            if match is None:
                raise TargetError(f"squeue did not print a list of jobs, but {line[:200]!r}")
            if ours := self._name.fullmatch(match[3]):
                if match[2] not in _STATES and match[2] not in self._unknown_states:
                    self._unknown_states.add(match[2])
                    log.warning(
                        "run %s: Slurm's state %s is unknown: %s keeps its last state", self._spec.run_id, match[2], ours[1]
                    )
                rows[match[1]] = _Row(match[1], match[2], ours[1])
        return rows

    def _look_up(self, job_id: str, node: str) -> AppStatus | None:
        """Return the state of a job that squeue does not list; None if it cannot be determined."""
        try:
            done = self._call("scontrol", "--oneliner", "show", "job", job_id)
        except (OSError, TargetError) as error:
            log.warning("job %s, %s: squeue does not list it, and scontrol has failed: %s", job_id, node, error)
            return None
        if done.returncode == 0:
            match = re.search(rf"\bJobId={job_id}\b(?: JobName=(.*?) UserId=)?.*?\bJobState=(\S+)", done.stdout)
            if match is None:
                return None
            if match[1] in (None, self._job_name(node)):
                return _STATES.get(match[2]) or self._exit_status(node)
            text = "job %s, %s: it is another job, %r: its record was changed, or Slurm has restarted its count"
            log.error(text, job_id, node, match[1])
        elif not _UNKNOWN_JOB.search(done.stderr + done.stdout):
            return None
        # Slurm forgets jobs `MinJobAge` seconds after their end. A killed agent has written no exit code.
        return self._exit_status(node) or "failed"

    def _call(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands; raise TargetError at the timeout, and OSError if it cannot be run."""
        with subprocess.Popen(
            [command, *arguments],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process only, and children of a site's wrapper end with it
        ) as process:
            try:
                output, errors = process.communicate(timeout=self._command_s)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise TargetError(f"{command} has not answered within {self._command_s:g} s") from error
                raise
        return subprocess.CompletedProcess([command, *arguments], process.returncode, output, errors)


def _environment() -> dict[str, str]:
    """Return our environment without variables that filter squeue, make scancel prompt, or describe our own job."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT")  # the last authenticates
    ours = ("SLURM_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(ours)}


def _text(output: str) -> str:
    """Return a command's output shortened to one line."""
    return " ".join(output.split())[:500] or "it printed nothing"
