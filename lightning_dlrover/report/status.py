"""Read a job for the command line: from etcd while it runs, from its run folder afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_dlrover import variables
from lightning_dlrover.codec import RecordError
from lightning_dlrover.files import atomic_write
from lightning_dlrover.output import counted, time_text
from lightning_dlrover.rdzv.agents import rounds as agent_rounds
from lightning_dlrover.rdzv.agents.rounds import AgentView, SeenAgent
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, EtcdUnavailableError, KeyValue
from lightning_dlrover.rdzv.job.events import (
    FitFinished,
    JobFailed,
    RoundFormed,
    SharesChanged,
    SnapshotCompleted,
    SnapshotFailed,
    ValuesLost,
    WorkerFailed,
    events_of,
)
from lightning_dlrover.rdzv.job.folders import DEFAULT_RUN_DIR, EtcdDefaults
from lightning_dlrover.rdzv.job.journal import read, read_events, readable_folder
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
    ProgressRecord,
    RoundRecord,
    SnapshotRecord,
    decode,
    encode,
)
from lightning_dlrover.rdzv.membership import rounds
from lightning_dlrover.rdzv.membership.rounds import JobView, read_view
from lightning_dlrover.report.streams import (
    described,
    described_iterable,
    described_skipped,
    read_iterables,
    read_streams,
    skipped_rows,
)
from lightning_dlrover.tuning.samples import StepProfile

# Read the events of a job, and keep them in its run folder.

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"

CANCELLED = "cancelled by `dlrover cancel`"  # reason of a job's end, as `dlrover cancel` gives it


class JobNotFoundError(RuntimeError):
    """No job of this name was found in the given place."""


class JobEndedError(JobNotFoundError):
    """The job has ended, and its etcd with it; its run folder has its events."""


def read_event_file(file: Path) -> list[EventRecord]:
    """Read the events of a run folder.

    Raises:
        JobNotFoundError: the file does not exist.
    """
    if not file.is_file():
        raise JobNotFoundError(f"{file} does not exist: neither etcd nor the run folder has this job")
    return _decoded(file.read_bytes().splitlines(), file)


def _decoded(lines: Sequence[bytes], file: Path) -> list[EventRecord]:
    events = []
    for line in lines:
        with contextlib.suppress(RecordError):  # the last line of a killed job may be incomplete
            events.append(decode(EventRecord, line, str(file)))
    return events


def ended_how(events: Sequence[EventRecord]) -> str:
    """Return how a job has ended, by its events: finished, failed, cancelled or interrupted. Empty: they hold no end.

    The events of a job that runs may hold one, too: a worker that stops is replaced.
    """
    if failed := [record.text for record, _ in events_of(events, JobFailed)]:
        return "cancelled" if CANCELLED in failed[-1] else "failed"
    if any(events_of(events, FitFinished)):
        return "finished"
    kinds = [event.kind for _, event in events_of(events, RoundFormed)]
    return "interrupted" if kinds[-1:] == ["stop"] else ""


def last_events(file: Path, num_bytes: int = 1 << 17) -> list[EventRecord]:
    """Read the newest events of a run folder, from the last bytes of its file; none if it cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - num_bytes))
            lines = stream.read().splitlines()
    except OSError:
        return []
    return _decoded(lines, file)


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
    """Copy a job's events from etcd into its run folder, each once.

    The file is the only place with all of them, because etcd keeps a limited number. Events that an earlier process has copied
    there stay, and are not reported as new.
    """

    mirror: Mirror
    file: Path
    _seen: set[str] = field(default_factory=set)
    _revision: int = -1
    _has_looked: bool = False
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
        return self._add(self.mirror.snapshot().values())

    def _add(self, entries: Iterable[KeyValue]) -> list[EventRecord]:
        """Write the events among `entries` that are new, and return them."""
        fresh = [entry for entry in entries if entry.key not in self._seen]
        self._seen.update(entry.key for entry in fresh)
        events = self._without_former(read_events(fresh))
        self._unwritten += b"".join(encode(event) + b"\n" for event in events)
        self._write()
        return events

    def _without_former(self, events: list[EventRecord]) -> list[EventRecord]:
        """Return the events that no earlier process has copied. The file is read once."""
        if self._has_looked:
            return events
        self._has_looked = True
        try:
            content = self.file.read_bytes()
        except OSError:  # missing: all events are new
            return events
        if content and not content.endswith(b"\n"):
            self._unwritten = b"\n"  # ends the line that the earlier process left incomplete
        former = set(content.splitlines())
        return [event for event in events if encode(event) not in former]

    def _write(self) -> None:
        if self._began and not self._unwritten:
            return
        try:
            # Unbuffered, so that the number of bytes a full disk has accepted is exact.
            with self.file.open("ab", buffering=0) as stream:
                self._began = True
                while self._unwritten:
                    self._unwritten = self._unwritten[stream.write(self._unwritten) :]
            self._failed = False
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            log.warning("events are missing in %s for now, the job continues: %s", self.file, error.strerror)
        self._failed = True

    def complete(self, client: EtcdClient) -> None:
        """Complete the file from etcd. The watch may lag behind a job's last events.

        Workers write their events independently, so some arrive late. Here they are sorted by time.
        """
        entries: Sequence[KeyValue] = ()
        try:
            entries = client.get_prefix(self.mirror.prefix)[1]
        except EtcdError as error:
            log.warning("the last events may be missing in %s: %s", self.file, error)
        self._add(entries)
        if self._unwritten:
            return
        try:
            events = sorted(read_event_file(self.file), key=lambda event: event.at)
            atomic_write(self.file, b"".join(encode(event) + b"\n" for event in events))
        except JobNotFoundError as error:  # deleted by another process: the job's end must not depend on the file
            log.warning("the events of the job are not kept: %s", error)
        except OSError as error:
            self._complain(error)


T = TypeVar("T")

JOB_FILE = "job.json"

MAX_VALUES_LOST = 3  # maximum number of values to name that lack the contributions of lost workers


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
            mark: part of the nodes' names there.
        """
        content = {**asdict(self), "pid": os.getpid(), "target": target, "mark": mark}
        atomic_write(folder / JOB_FILE, json.dumps(content) + "\n")


@dataclass(frozen=True)
class JobFile:
    """Content of `job.json`."""

    place: JobPlace
    pid: int  # process id of the `dlrover run` that wrote it
    target: str = "local"
    mark: str = ""


def read_job_file(file: Path) -> JobFile:
    """Return the place, process and target of a job, as its run folder's job file records them.

    Raises:
        JobNotFoundError: the file is missing or unreadable.
    """
    try:
        content = json.loads(file.read_text())
        access = {name: str(content["access"][name]) for name in variables.ACCESS if name in content.get("access", {})}
        place = JobPlace(str(content["run_id"]), str(content["endpoint"]), str(content["prefix"]), access)
        return JobFile(place, int(content["pid"]), str(content.get("target", "local")), str(content.get("mark", "")))
    except FileNotFoundError as error:
        raise JobNotFoundError(
            f"{file} does not exist; name the job's etcd with --endpoint HOST:PORT, or the folder that `dlrover run` wrote "
            "with --run-dir"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobNotFoundError(f"{file} cannot be read ({error!r}); name the job's etcd with --endpoint HOST:PORT") from error


def find_job(
    run_id: str, endpoint: str | None, prefix: str | None, run_dir: Path, access: Mapping[str, str] | None = None
) -> JobPlace:
    """Locate a job: from the arguments, else from its run folder, else from the environment.

    Raises:
        JobNotFoundError: none of these names it.
    """
    file = run_dir / run_id / JOB_FILE
    defaults = EtcdDefaults.of_this_process()
    endpoint = endpoint or (defaults.endpoint if not os.path.exists(file) else None)
    if endpoint:
        return JobPlace(run_id, endpoint, prefix or defaults.prefix, access or defaults.access)
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
    started_at: float = 0.0  # seconds since the epoch; 0: unknown


def list_jobs(
    endpoint: str | None, prefix: str | None, run_dir: Path, access: Mapping[str, str] | None = None
) -> list[JobSummary]:
    """List every job in an etcd or, without an endpoint, in a folder of run folders."""
    if endpoint:
        defaults = EtcdDefaults.of_this_process()
        return _jobs_of_etcd(JobPlace("list", endpoint, prefix or defaults.prefix, access or defaults.access))
    jobs: list[JobSummary] = []
    etcds: dict[tuple[str, str], list[JobSummary] | None] = {}  # None: it does not answer
    for file in sorted(run_dir.glob(f"*/{JOB_FILE}")):
        name = file.parent.name
        try:
            job = read_job_file(file)
        except JobNotFoundError:
            jobs.append(JobSummary(name, "unreadable"))
            continue
        locked = is_locked(file.parent)
        started_at = file.stat().st_mtime  # start of the newest `dlrover run` of the job
        who = f"process {job.pid}" if locked else ""
        if locked is False and job.target == "local":
            how = ended_how(last_events(file.parent / EVENTS_FILE)) or "ended"
            jobs.append(JobSummary(name, how, "local", started_at=started_at))  # its nodes ended with it
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
        summary = next((each for each in found or () if each.run_id == job.place.run_id), unknown)
        jobs.append(replace(summary, started_at=started_at))
    return jobs


def _jobs_of_etcd(place: JobPlace, timeout_s: float = 5.0) -> list[JobSummary]:
    """Return a summary of each job under a prefix, sorted by run id.

    Raises:
        EtcdError: etcd does not answer.
    """
    folder = place.prefix.rstrip("/") + "/"
    with connect(replace(place, prefix=folder), timeout_s) as client:
        entries = client.get_prefix(folder)[1]
    by_job: dict[str, dict[str, KeyValue]] = {}
    for entry in entries:
        by_job.setdefault(entry.key.removeprefix(folder).partition("/")[0], {})[entry.key] = entry
    # Add-ons, such as pools, keep their records in folders with names that begin with a dot.
    for name in [name for name in by_job if name.startswith(".") and Keys(name, folder).job not in by_job[name]]:
        del by_job[name]
    return [_summary(run_id, folder, found) for run_id, found in sorted(by_job.items())]


def _summary(run_id: str, prefix: str, entries: Mapping[str, KeyValue]) -> JobSummary:
    """Summarize a job by its own records, without those of its workers."""
    try:
        keys = Keys(run_id, prefix)
    except ValueError:  # a foreign key under our prefix
        return JobSummary(run_id, "unreadable")
    problems: list[str] = []
    job = _record(JobRecord, entries.get(keys.job), problems)
    round_ = _record(RoundRecord, entries.get(keys.round), problems)
    nodes = _record(NodesRecord, entries.get(keys.nodes), problems)
    controller = _record(ControllerRecord, entries.get(keys.controller), problems)
    each = [_record(NodeRecord, entry, problems) for key, entry in entries.items() if key.startswith(keys.each_node)]
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
        job.created_at if job else 0.0,
    )


def _record(record_type: type[T], entry: KeyValue | None, problems: list[str]) -> T | None:
    """Return an entry's record; None if there is none, or if it is unreadable, which is added to the problems."""
    try:
        return read(record_type, entry)
    except RecordError as error:
        problems.append(str(error))
        return None


def is_locked(folder: Path) -> bool | None:
    """Whether a `dlrover run` uses this run folder; None if that cannot be seen, as in the folder of another user."""
    try:
        # Reading, and a shared lock, need no right to write. NFS demands that for an exclusive one.
        with (folder / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
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
        JobEndedError: the job has ended, and its etcd with it.
        EtcdError: etcd does not answer.
    """
    has_ended = has_ended_here(place, run_dir / place.run_id)
    try:
        return connect(place, timeout_s=1.0 if has_ended else 5.0)
    except EtcdUnavailableError as error:
        at = "" if run_dir == DEFAULT_RUN_DIR else f" --run-dir {run_dir}"
        report = f"`dlrover report {place.run_id}{at}` shows what happened"
        if has_ended:
            raise JobEndedError(
                f"job {place.run_id!r} has ended, and with it its nodes on this machine and its etcd at {place.endpoint}; "
                f"{report}"
            ) from error
        if not os.path.exists(run_dir / place.run_id / EVENTS_FILE):
            raise
        raise EtcdUnavailableError(
            f"{error}; if job {place.run_id!r} has ended, its etcd has ended with it: {report}"
        ) from error


def has_ended_here(place: JobPlace, folder: Path) -> bool:
    """Whether the run folder shows that a job at this place ran on this machine, and that its `dlrover run` has ended."""
    try:
        job = read_job_file(folder / JOB_FILE)
    except JobNotFoundError:
        return False
    return job.target == "local" and job.place.endpoint == place.endpoint and is_locked(folder) is False


@dataclass(frozen=True)
class FoundJob:
    """Records of a job in etcd."""

    view: JobView
    agents: AgentView
    controller: ControllerRecord | None
    nodes: NodesRecord | None
    snapshot: SnapshotRecord | None  # newest snapshot of sharded tables
    progress: ProgressRecord | None
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
    by_key = {entry.key: entry for entry in entries}
    view = read_view(by_key, keys, lambda _, error: problems.append(str(error)))
    agents = AgentView(
        agents={a: SeenAgent(agent, by_key[keys.agents + a].create_revision) for a, agent in view.agents.items()},
        round=_record(AgentRound, by_key.get(keys.agent_round), problems),
        notice=_record(AgentNotice, by_key.get(keys.agent_notice), problems),
        job=view.job,
    )
    return FoundJob(
        view,
        agents,
        _record(ControllerRecord, by_key.get(keys.controller), problems),
        _record(NodesRecord, by_key.get(keys.nodes), problems),
        _record(SnapshotRecord, client.get(keys.snapshot), problems),
        _record(ProgressRecord, client.get(keys.progress), problems),
        problems,
    )


def progress_text(progress: ProgressRecord, with_batch: bool = True) -> str:
    """Describe how far a job has trained, in one line."""
    parts = [f"epoch {progress.epoch + 1}" + (f" of {progress.max_epochs}" if progress.max_epochs else "")]
    parts += [f"batch {progress.batch}" + (f" of {progress.num_batches}" if progress.num_batches else "")] if with_batch else []
    parts += [f"{time_text(progress.seconds_left)} left"] if progress.seconds_left is not None else []
    parts += [f"loss {progress.loss}"] if progress.loss else []
    parts += [f"{progress.samples_per_s:,.0f} samples/s with {counted(progress.num_workers, 'worker')}"]
    return ", ".join(parts)


def show_status(
    place: JobPlace,
    found: FoundJob,
    profiles: dict[str, StepProfile],
    events: list[EventRecord],
    now: float | None = None,
    nodes: Mapping[str, NodeRecord] | None = None,
    alarms: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the output of `dlrover status` as plain data.

    Args:
        alarms: alarms of the job's etcd.
        nodes: known nodes that controllers have requested, by name.
        now: seconds since the epoch. Durations depend on the clocks of several hosts, so they are for display only.
    """
    now = time.time() if now is None else now
    view = found.view
    job, round_, plan = view.job, view.round, view.plan
    phase: str = job.phase if job else "not started"
    if phase in ("starting", "training") and not view.workers and not view.agents:
        phase = "stopped"  # ended from outside, with no process left to record it
    streams = read_streams(events)
    members = round_.members if round_ else []
    rates = [profile.samples_per_s for worker, profile in profiles.items() if worker in members]
    return {
        "run_id": place.run_id,
        "endpoint": place.endpoint,
        "etcd_alarms": list(alarms),
        "phase": phase,
        "closed": job.closed if job else "",
        "min_workers": job.min_workers if job else None,
        "max_workers": job.max_workers if job else None,
        "workers_per_node": job.workers_per_node if job else None,
        "sizes": job.sizes if job else [],
        "global_batch_size": job.global_batch_size if job else None,
        "failed_sizes": dict(sorted(job.failed_sizes.items(), key=lambda each: each[0].rjust(6))) if job else {},
        "round": {"number": round_.number, "kind": round_.kind, "reason": round_.reason} if round_ else None,
        "workers": _show_workers(view, profiles, events, now),
        "agents": _show_agents(found, now),
        "joining": [
            {"node": each.node, "stage": each.stage, "for_s": _elapsed(each.since, now)}
            for each in (
                joiners(view, found.controller, nodes or {}) if phase in ("not started", "starting", "training") else ()
            )
        ],
        "controller": _show_controller(found, nodes or {}),
        "spares": _show_spares(found),
        "target": found.nodes.target if found.nodes else None,
        "samples_per_s": rates[0] if rates else None,
        "progress": asdict(found.progress) if found.progress else None,
        "streams": [
            *(
                "; ".join(filter(None, (described(each), described_skipped(skipped_rows(events, each)))))
                for each in (streams.streams if streams is not None else ())
            ),
            *map(described_iterable, read_iterables(events)),
        ],
        "snapshot": _show_snapshot(found.snapshot, events, now),
        "values_lost": [record.text for record, _ in events_of(events, ValuesLost)][-MAX_VALUES_LOST:],
        "plan": _show_plan(plan) if plan else None,
        "events": [{"at": e.at, "kind": e.kind, "text": e.text} for e in events if e.text][-8:],
        "problems": found.problems,
    }


def ended_status(place: JobPlace, events: list[EventRecord]) -> dict[str, Any]:
    """Return `show_status` of a job that has ended together with its etcd, from its events alone."""
    nothing = FoundJob(read_view({}, place.keys), AgentView({}, None, None, None), None, None, None, None, [])
    return {**show_status(place, nothing, {}, events), "phase": ended_how(events) or "ended"}


def _show_snapshot(newest: SnapshotRecord | None, events: Sequence[EventRecord], now: float) -> dict[str, Any] | None:
    """Describe the newest recorded snapshot of sharded tables, and the failure since, if any."""
    failures, complete = list(events_of(events, SnapshotFailed)), list(events_of(events, SnapshotCompleted))
    if newest is None and not failures:
        return None
    is_open = bool(failures) and (not complete or complete[-1][0].at < failures[-1][0].at)
    return {
        "batch": newest.batch if newest else None,
        "age_s": max(0.0, now - newest.at) if newest else None,
        "failure": {"at": failures[-1][0].at, "text": failures[-1][0].text, "is_over": not is_open} if failures else None,
    }


def _show_workers(
    view: JobView, profiles: Mapping[str, StepProfile], events: Sequence[EventRecord], now: float
) -> list[dict[str, Any]]:
    """List workers: the round's members by rank, then the others."""
    waits = rounds.waits(view)
    changed = [each for _, each in events_of(events, SharesChanged) if view.round and each.round == view.round.number]
    samples = dict(enumerate(changed[-1].samples)) if changed else {}
    members = view.round.members if view.round else []
    ranks = {worker: rank for rank, worker in enumerate(members)}
    labels = {agent.agent_id: agent.labels.get("node", "") for agent in view.agents.values()}
    return [
        {
            "worker_id": worker,
            "rank": ranks.get(worker),
            "node": labels.get(record.agent_id, ""),
            "state": "leaving" if worker in view.drains or worker in view.replacements else record.state,
            "host": record.host,
            "pid": record.pid,
            "step_time_s": profiles[worker].step_time_s if worker in profiles else None,
            "samples": samples.get(ranks.get(worker, -1)),  # of a global batch; None: an equal share
            "waits": waits[worker],
            "for_s": _elapsed(record.since, now),
            "notice": asdict(view.notices[worker]) if worker in view.notices else None,
        }
        for worker, record in sorted(view.workers.items(), key=lambda w: ranks.get(w[0], len(ranks)))
    ]


def _show_agents(found: FoundJob, now: float) -> list[dict[str, Any]]:
    waits = agent_rounds.waits(found.agents)
    agents = []
    for agent, seen in found.agents.agents.items():
        record = seen.record
        for_s = _elapsed(record.since, now)
        # It waits while a controller exists, and `join_timeout` longer.
        gives_up = record.state == "waiting" and record.join_timeout_s and found.controller is None
        agents.append(
            {
                "agent_id": agent,
                "state": record.state,
                "host": record.host,
                "pid": record.pid,
                "waits": waits[agent],
                "for_s": for_s,
                "gives_up_in_s": record.join_timeout_s - for_s if gives_up else None,
            }
        )
    return agents


@dataclass(frozen=True)
class Joiner:
    """A node that does not train yet."""

    node: str
    stage: str  # requested, starting, importing, building or ready
    since: float  # seconds since the epoch; 0: unknown


def joiners(view: JobView, controller: ControllerRecord | None, nodes: Mapping[str, NodeRecord]) -> list[Joiner]:
    """Return the nodes that do not train yet, with their stages."""
    apps = controller.apps if controller is not None else {}
    leaving = _leaving(nodes)
    labels = {agent: record.labels.get("node", "") for agent, record in view.agents.items()}
    found = []
    for name in sorted({*apps} - {*labels.values()} - leaving):
        asked_at = nodes[name].asked_at if name in nodes else 0.0
        found.append(Joiner(name, "starting" if apps[name] else "requested", asked_at))
    registered = Counter(worker.agent_id for worker in view.workers.values())
    for agent, record in view.agents.items():
        if record.state == "running" and registered[agent] < record.num_workers and labels[agent] not in leaving:
            found.append(Joiner(labels[agent] or f"{record.host}:{record.pid}", "importing", record.since))
    stages = {"standby": "building", "ready": "ready"}
    for worker in view.workers.values():
        if worker.state in stages:
            name = labels.get(worker.agent_id) or f"{worker.host}:{worker.pid}"
            found.append(Joiner(name, stages[worker.state], worker.since))
    return found


def _leaving(nodes: Mapping[str, NodeRecord]) -> set[str]:
    """Return the nodes that have trained or were asked to end: without a worker they are ending, not starting."""
    return {name for name, node in nodes.items() if node.had_worker or node.cancelled or node.state == "ended"}


def read_nodes(client: EtcdClient, keys: Keys) -> dict[str, NodeRecord]:
    """Return nodes that controllers have requested, by name. Unreadable records are skipped."""
    return readable_folder(client, NodeRecord, keys.each_node)


def _show_plan(plan: PlanRecord) -> dict[str, Any]:
    settings = ("loader_workers", "intra_op_threads", "prefetch_factor", "node_cpus", "node_memory_mb")
    return {
        "num_workers": plan.num_workers,
        **{name: value for name in settings if (value := getattr(plan, name)) is not None},
        "source": "pool" if plan.owner == "pool" else plan.source,
        "reason": plan.reason,
        "binding": plan.binding,
    }


def _elapsed(since: float, now: float) -> float:
    return max(0.0, now - since) if since else 0.0


def _show_spares(found: FoundJob) -> list[dict[str, Any]]:
    """List the processes that workers are forked from, with their owners, states and memory."""
    owners = [(f"{record.host}:{record.pid}", record) for record in found.view.agents.values()]
    if found.controller is not None:
        owners.insert(0, (f"{found.controller.host}:{found.controller.pid}", found.controller))  # type: ignore[arg-type]
    return [{"owner": owner, "state": r.spare, "memory_bytes": r.spare_bytes} for owner, r in owners if r.spare]


def _show_controller(found: FoundJob, nodes: Mapping[str, NodeRecord]) -> dict[str, Any] | None:
    if found.controller is None:
        return None
    come = {agent.labels.get("node") for agent in found.view.agents.values()}
    return {
        "host": found.controller.host,
        "pid": found.controller.pid,
        "target": found.controller.target,
        "awaited_nodes": [node for node in found.controller.apps if node not in {*come, *_leaving(nodes)}],
        "held_up": found.controller.held_up,
        "resizes": dict(found.controller.resizes),
    }
