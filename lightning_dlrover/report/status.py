"""Read a job for the command line: from etcd while it is alive, from its run folder afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.rdzv.agents import rounds as agent_rounds
from lightning_dlrover.rdzv.agents.rounds import (
    AgentView,
    SeenAgent,
)
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.config import (
    ACCESS_VARIABLES,
    EtcdConfig,
)
from lightning_dlrover.rdzv.etcd.errors import (
    EtcdError,
    EtcdUnavailableError,
)
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.operations import KeyValue
from lightning_dlrover.rdzv.job.events import RoundFormed, WorkerFailed, events_of
from lightning_dlrover.rdzv.job.journal import read_events
from lightning_dlrover.rdzv.job.records import (
    DEFAULT_PREFIX,
    HISTORY_TTL_S,
    AgentNotice,
    AgentRound,
    ControllerRecord,
    EventRecord,
    JobRecord,
    Keys,
    NodeRecord,
    NodesRecord,
    PlanRecord,
    RecordError,
    RoundRecord,
    decode,
    encode,
)
from lightning_dlrover.rdzv.live import rounds
from lightning_dlrover.rdzv.live.rounds import View
from lightning_dlrover.rdzv.live.view import read_view

__all__ = [
    "EVENTS_FILE",
    "JOB_FILE",
    "EventLog",
    "FoundJob",
    "JobFile",
    "JobNotFoundError",
    "JobPlace",
    "JobSummary",
    "access_from",
    "connect",
    "connect_to_job",
    "find_job",
    "first_traceback",
    "is_locked",
    "list_jobs",
    "read_event_file",
    "read_job",
    "read_job_file",
    "read_nodes",
    "show_status",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

JOB_FILE = "job.json"
EVENTS_FILE = "events.jsonl"


class JobNotFoundError(RuntimeError):
    """No job of this name was found in the given place."""


@dataclass(frozen=True)
class JobPlace:
    """Location of a job's records."""

    run_id: str
    endpoint: str
    prefix: str = DEFAULT_PREFIX
    # etcd user and paths of credential files, as in `EtcdConfig.access`
    access: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> Keys:
        return Keys(self.run_id, self.prefix)

    def write(self, folder: Path, target: str = "local", mark: str = "") -> None:
        """Write `job.json` into the job's run folder, whole or not at all.

        Args:
            target: place where the nodes run.
            mark: part of the nodes' names there.
        """
        content = {**dataclasses.asdict(self), "pid": os.getpid(), "target": target, "mark": mark}
        unfinished = folder / f".{JOB_FILE}.{os.getpid()}"
        unfinished.write_text(json.dumps(content) + "\n")
        unfinished.replace(folder / JOB_FILE)


@dataclass(frozen=True)
class JobFile:
    """Content of `job.json`."""

    place: JobPlace
    pid: int  # process id of the `dlrover run` that wrote it
    target: str = "local"
    mark: str = ""


def read_job_file(file: Path) -> JobFile:
    """
    Raises:
        JobNotFoundError: the file is missing or unreadable.
    """
    try:
        content = json.loads(file.read_text())
        access = {name: str(content["access"][name]) for name in ACCESS_VARIABLES if name in content.get("access", {})}
        place = JobPlace(str(content["run_id"]), str(content["endpoint"]), str(content["prefix"]), access)
        return JobFile(place, int(content["pid"]), str(content.get("target", "local")), str(content.get("mark", "")))
    except FileNotFoundError as error:
        raise JobNotFoundError(
            f"{file} does not exist; name the job's etcd with --endpoint HOST:PORT, or the folder that `dlrover run` wrote "
            "with --run-dir"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobNotFoundError(f"{file} cannot be read ({error!r}); name the job's etcd with --endpoint HOST:PORT") from error


def access_from(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the etcd user and credential files from the environment, as an agent exports them to its worker."""
    return {name: environ[variable] for name, variable in ACCESS_VARIABLES.items() if environ.get(variable)}


def find_job(
    run_id: str, endpoint: str | None, prefix: str | None, run_dir: Path, access: Mapping[str, str] | None = None
) -> JobPlace:
    """Locate a job: from the arguments, else from its run folder, else from the environment.

    Raises:
        JobNotFoundError: none of these names it.
    """
    file = run_dir / run_id / JOB_FILE
    endpoint = endpoint or (os.environ.get("DLROVER_ENDPOINT") if not file.exists() else None)
    if endpoint:
        folder = prefix or os.environ.get("DLROVER_PREFIX", DEFAULT_PREFIX)
        return JobPlace(run_id, endpoint, folder, access or access_from(os.environ))
    try:
        place = read_job_file(file).place
    except JobNotFoundError as error:
        raise JobNotFoundError(f"job {run_id!r} is not known: {error}") from error
    return JobPlace(run_id, place.endpoint, prefix or place.prefix, access or place.access)


@dataclass(frozen=True)
class JobSummary:
    """One job in a list. Unknown fields are empty."""

    run_id: str
    state: str
    target: str = ""  # place where its nodes run
    num_workers: int | None = None  # workers in its round
    num_nodes: int | None = None  # started nodes that its controllers have not seen end
    controller: str = ""  # process and, if known, host of its controller


def list_jobs(
    endpoint: str | None, prefix: str | None, run_dir: Path, access: Mapping[str, str] | None = None
) -> list[JobSummary]:
    """List every job in an etcd or, without an endpoint, in a folder of run folders."""
    if endpoint:
        folder = prefix or os.environ.get("DLROVER_PREFIX", DEFAULT_PREFIX)
        return _jobs_of_etcd(JobPlace("list", endpoint, folder, access or access_from(os.environ)))
    jobs: list[JobSummary] = []
    etcds: dict[tuple[str, str], list[JobSummary] | None] = {}  # None: it does not answer
    for file in sorted(run_dir.glob(f"*/{JOB_FILE}")):
        name = file.parent.name
        try:
            job = read_job_file(file)
        except JobNotFoundError:
            jobs.append(JobSummary(name, "unreadable"))
            continue
        who = f"process {job.pid}" if is_locked(file.parent) else ""
        if not who and job.target == "local":
            jobs.append(JobSummary(name, "ended", "local"))  # its nodes ended with it
            continue
        key = (job.place.endpoint, job.place.prefix)
        if key not in etcds:
            try:
                etcds[key] = _jobs_of_etcd(job.place, timeout_s=2.0)
            except EtcdError:
                etcds[key] = None
        found = etcds[key]
        silent = f"unknown: its etcd at {job.place.endpoint} does not answer"
        unknown = JobSummary(name, silent if found is None else "ended", job.target, controller=who)
        jobs.append(next((each for each in found or () if each.run_id == job.place.run_id), unknown))
    return jobs


def _jobs_of_etcd(place: JobPlace, timeout_s: float = 5.0) -> list[JobSummary]:
    """
    Raises:
        EtcdError: etcd does not answer.
    """
    folder = place.prefix.rstrip("/") + "/"
    with connect(dataclasses.replace(place, prefix=folder), timeout_s) as client:
        entries = client.get_prefix(folder)[1]
    by_job: dict[str, dict[str, KeyValue]] = {}
    for entry in entries:
        by_job.setdefault(entry.key.removeprefix(folder).partition("/")[0], {})[entry.key] = entry
    return [_summary(run_id, folder, found) for run_id, found in sorted(by_job.items())]


def _summary(run_id: str, prefix: str, entries: Mapping[str, KeyValue]) -> JobSummary:
    """Summarize a job by its own records, without those of its workers."""
    try:
        keys = Keys(run_id, prefix)
    except ValueError:  # a foreign key under our prefix
        return JobSummary(run_id, "unreadable")
    problems: list[RecordError] = []

    def record(key: str, kind: type[T]) -> T | None:
        try:
            return decode(kind, entries[key].value, key) if key in entries else None
        except RecordError as error:
            problems.append(error)
            return None

    job, round_, nodes = record(keys.job, JobRecord), record(keys.round, RoundRecord), record(keys.nodes, NodesRecord)
    controller = record(keys.controller, ControllerRecord)
    each = [record(key, NodeRecord) for key in entries if key.startswith(keys.each_node)]
    state: str = "unreadable" if problems else job.phase if job else "not started"
    is_there = controller is not None or any(key.startswith((keys.workers, keys.agents)) for key in entries)
    if state in ("starting", "training") and not is_there:
        state = "stopped"
    is_over = state in ("finished", "failed")
    return JobSummary(
        keys.run_id,
        state,
        nodes.target if nodes else "",
        len(round_.members) if round_ and not is_over else None,
        sum(node is not None and node.state != "ended" for node in each) if nodes and not is_over else None,
        f"process {controller.pid} on {controller.host}" if controller else "",
    )


def is_locked(folder: Path) -> bool:
    """Whether a `dlrover run` uses this run folder."""
    if not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def connect(place: JobPlace, timeout_s: float = 5.0) -> EtcdClient:
    """Return a client that has reached the job's etcd.

    Raises:
        EtcdError: etcd does not answer.
    """
    client = EtcdClient(EtcdConfig(place.endpoint, timeout_s=timeout_s, **place.access))
    client.share_lifetime(place.keys.root, HISTORY_TTL_S)
    try:
        client.check()
    except BaseException:
        client.close()
        raise
    return client


def connect_to_job(place: JobPlace, run_dir: Path) -> EtcdClient:
    """Return a client for a job that should be running.

    Raises:
        EtcdError: etcd does not answer.
    """
    try:
        return connect(place)
    except EtcdUnavailableError as error:
        if not (run_dir / place.run_id / EVENTS_FILE).exists():
            raise
        raise EtcdUnavailableError(
            f"{error}; if job {place.run_id!r} has ended, its etcd has ended with it: "
            f"`dlrover report {place.run_id}` tells what happened"
        ) from error


@dataclass(frozen=True)
class FoundJob:
    """Records of a job in etcd."""

    view: View
    agents: AgentView
    controller: ControllerRecord | None
    nodes: NodesRecord | None
    problems: list[str]  # unreadable records; a running job ignores them, but users should see them


def read_job(client: EtcdClient, keys: Keys) -> FoundJob:
    """Read the job's records.

    Raises:
        JobNotFoundError: etcd holds nothing of the job.
    """
    _, entries = client.get_prefix(keys.live)
    if not entries:
        raise JobNotFoundError(f"etcd holds no job {keys.run_id!r} under {keys.prefix!r}; is the name right, or has it ended?")
    problems: list[str] = []

    def bad(key: str, error: RecordError) -> None:
        problems.append(str(error))

    view = read_view({entry.key: entry for entry in entries}, keys, {}, bad)
    agent_round, notice, controller, nodes = None, None, None, None  # not used by workers
    since = {entry.key: entry.create_revision for entry in entries}
    for entry in entries:
        try:
            if entry.key == keys.agent_round:
                agent_round = decode(AgentRound, entry.value, entry.key)
            elif entry.key == keys.agent_notice:
                notice = decode(AgentNotice, entry.value, entry.key)
            elif entry.key == keys.controller:
                controller = decode(ControllerRecord, entry.value, entry.key)
            elif entry.key == keys.nodes:
                nodes = decode(NodesRecord, entry.value, entry.key)
        except RecordError as error:
            bad(entry.key, error)
    agents = AgentView(
        agents={a: SeenAgent(record, since[keys.agents + a]) for a, record in view.agents.items()},
        round=agent_round,
        notice=notice,
        job=view.job,
    )
    return FoundJob(view, agents, controller, nodes, problems)


def read_event_file(file: Path) -> list[EventRecord]:
    """Read the events of a run folder.

    Raises:
        JobNotFoundError: there is no such file.
    """
    if not file.is_file():
        raise JobNotFoundError(f"{file} does not exist: neither etcd nor the run folder knows this job")
    events = []
    for line in file.read_bytes().splitlines():
        try:
            events.append(decode(EventRecord, line, str(file)))
        except RecordError:
            continue  # the last line of a killed job may be incomplete
    return events


def first_traceback(file: Path) -> str | None:
    """Return the traceback of the first worker in the newest group of failures, as recorded in the events."""
    events = read_event_file(file) if file.exists() else []
    newest_round = max((record.at for record, _ in events_of(events, RoundFormed)), default=0.0)
    failures = [(record.at, failed.traceback) for record, failed in events_of(events, WorkerFailed) if failed.traceback]
    failures.sort(key=lambda failure: failure[0])
    recent = [failure for failure in failures if failure[0] >= newest_round] or failures[-1:]
    return recent[0][1].rstrip() if recent else None


@dataclass
class EventLog:
    """Copy a job's events from etcd into its run folder, each once. The file's former content is replaced.

    Events already copied there by an earlier process are not reported as new.
    """

    mirror: Mirror
    file: Path
    _seen: set[str] = field(default_factory=set)
    _revision: int = -1
    _began: bool = False
    _unwritten: bytes = b""
    _failed: bool = False

    def new(self) -> list[EventRecord]:
        """Return events since the last call, or since an earlier process wrote the file.

        They are in the file on return unless it cannot be written. A later call repeats failed writes: a full disk ends no job.
        """
        if self.mirror.revision == self._revision:
            self._write()
            return []
        self._revision = self.mirror.revision
        fresh = [entry for key, entry in self.mirror.snapshot().items() if key not in self._seen]
        self._seen.update(entry.key for entry in fresh)
        events = read_events(fresh)
        former: set[bytes] = set()
        if not self._began:
            with contextlib.suppress(OSError):  # missing or unreadable: all events are new
                former = set(self.file.read_bytes().splitlines())
        self._unwritten += b"".join(encode(event) + b"\n" for event in events)
        self._write()
        return [event for event in events if encode(event) not in former]

    def _write(self) -> None:
        if self._began and not self._unwritten:
            return
        try:
            # Unbuffered, so that the number of bytes a full disk has accepted is exact.
            with self.file.open("ab" if self._began else "wb", buffering=0) as stream:
                self._began = True
                while self._unwritten:
                    self._unwritten = self._unwritten[stream.write(self._unwritten) :]
            self._failed = False
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            log.warning("events are missing in %s for now, the job goes on: %s", self.file, error.strerror)
        self._failed = True

    def complete(self, client: EtcdClient) -> None:
        """Complete the file from etcd. The watch may lag behind a job's last events.

        Workers write their events independently, so some arrive late. Here they are sorted by time.
        """
        try:
            last = [entry for entry in client.get_prefix(self.mirror.prefix)[1] if entry.key not in self._seen]
        except EtcdError as error:
            log.warning("the last events may be missing in %s: %s", self.file, error)
            last = []
        self._seen.update(entry.key for entry in last)
        self._unwritten += b"".join(encode(event) + b"\n" for event in read_events(last))
        self._write()
        if self._unwritten:
            return
        unfinished = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        try:
            events = sorted(read_event_file(self.file), key=lambda event: event.at)
            unfinished.write_bytes(b"".join(encode(event) + b"\n" for event in events))
            unfinished.replace(self.file)
        except JobNotFoundError as error:  # deleted meanwhile: the job's end must not depend on the file
            log.warning("the events of the job are not kept: %s", error)
        except OSError as error:
            self._complain(error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


def show_status(
    place: JobPlace,
    found: FoundJob,
    profiles: dict[str, StepProfile],
    events: list[EventRecord],
    now: float | None = None,
    nodes: Mapping[str, NodeRecord] | None = None,
) -> dict[str, Any]:
    """Return the output of `dlrover status` as plain data.

    Args:
        nodes: nodes that controllers have requested, by name, as far as known.
        now: seconds since the epoch. Durations depend on the clocks of several hosts, so they are for display only.
    """
    now = time.time() if now is None else now
    worker_waits, agent_waits = rounds.waits(found.view), agent_rounds.waits(found.agents)
    view = found.view
    job, round_, plan = view.job, view.round, view.plan
    phase: str = job.phase if job else "not started"
    if phase in ("starting", "training") and not view.workers and not view.agents:
        phase = "stopped"  # ended from outside, with no process left to record it
    members = round_.members if round_ else []
    rates = [profile.samples_per_s for worker, profile in profiles.items() if worker in members]
    return {
        "run_id": place.run_id,
        "endpoint": place.endpoint,
        "phase": phase,
        "min_workers": job.min_workers if job else None,
        "max_workers": job.max_workers if job else None,
        "global_batch_size": job.global_batch_size if job else None,
        "round": {"number": round_.number, "kind": round_.kind, "reason": round_.reason} if round_ else None,
        "workers": [
            {
                "worker_id": worker,
                "rank": members.index(worker) if worker in members else None,
                "state": "leaving" if worker in view.drains or worker in view.replacements else record.state,
                "host": record.host,
                "pid": record.pid,
                "step_time_s": profiles[worker].step_time_s if worker in profiles else None,
                "waits": worker_waits[worker],
                "for_s": _elapsed(record.since, now),
            }
            for worker, record in sorted(
                view.workers.items(), key=lambda w: (w[0] not in members, members.index(w[0]) if w[0] in members else 0)
            )
        ],
        "agents": [
            {
                "agent_id": agent,
                "state": seen.record.state,
                "host": seen.record.host,
                "pid": seen.record.pid,
                "waits": agent_waits[agent],
                "for_s": _elapsed(seen.record.since, now),
                "gives_up_in_s": seen.record.join_timeout_s - _elapsed(seen.record.since, now)
                # It waits while there is a controller, and `join_timeout` longer.
                if seen.record.state == "waiting" and seen.record.join_timeout_s and found.controller is None
                else None,
            }
            for agent, seen in found.agents.agents.items()
        ],
        "joining": _show_joining(found, nodes or {}, now) if phase in ("not started", "starting", "training") else [],
        "controller": _show_controller(found),
        "target": found.nodes.target if found.nodes else None,
        "samples_per_s": rates[0] if rates else None,
        "plan": _show_plan(plan) if plan else None,
        "events": [{"at": e.at, "kind": e.kind, "text": e.text} for e in events if e.text][-8:],
        "problems": found.problems,
    }


def _show_joining(found: FoundJob, nodes: Mapping[str, NodeRecord], now: float) -> list[dict[str, Any]]:
    """List nodes that do not train yet, with their stage: requested, starting, importing, building or ready."""
    view = found.view
    apps = found.controller.apps if found.controller is not None else {}
    labels = {agent: record.labels.get("node", "") for agent, record in view.agents.items()}
    joining = []
    for name in sorted({*apps} - {*labels.values()}):
        asked_at = nodes[name].asked_at if name in nodes else 0.0
        joining.append({"node": name, "stage": "starting" if apps[name] else "requested", "for_s": _elapsed(asked_at, now)})
    for agent, record in view.agents.items():
        num_registered = sum(worker.agent_id == agent for worker in view.workers.values())
        if record.state == "running" and num_registered < record.num_workers:
            name = labels[agent] or f"{record.host}:{record.pid}"
            joining.append({"node": name, "stage": "importing", "for_s": _elapsed(record.since, now)})
    stages = {"standby": "building", "ready": "ready"}
    for worker in view.workers.values():
        if worker.state in stages:
            name = labels.get(worker.agent_id) or f"{worker.host}:{worker.pid}"
            joining.append({"node": name, "stage": stages[worker.state], "for_s": _elapsed(worker.since, now)})
    return joining


def read_nodes(client: EtcdClient, keys: Keys) -> dict[str, NodeRecord]:
    """Return nodes that controllers have requested, by name. Unreadable records are left out."""
    nodes = {}
    for entry in client.get_prefix(keys.each_node)[1]:
        with contextlib.suppress(RecordError):
            nodes[entry.key.removeprefix(keys.each_node)] = decode(NodeRecord, entry.value, entry.key)
    return nodes


def _show_plan(plan: PlanRecord) -> dict[str, Any]:
    settings = ("loader_workers", "intra_op_threads", "prefetch_factor", "node_cpus", "node_memory_mb")
    return {
        "num_workers": plan.num_workers,
        **{name: value for name in settings if (value := getattr(plan, name)) is not None},
        "source": plan.source,
        "reason": plan.reason,
        "binding": plan.binding,
    }


def _elapsed(since: float, now: float) -> float:
    return max(0.0, now - since) if since else 0.0


def _show_controller(found: FoundJob) -> dict[str, Any] | None:
    if found.controller is None:
        return None
    come = {agent.labels.get("node") for agent in found.view.agents.values()}
    return {
        "host": found.controller.host,
        "pid": found.controller.pid,
        "target": found.controller.target,
        "awaited_nodes": [node for node in found.controller.apps if node not in come],
        "held_up": found.controller.held_up,
    }
