"""Keep the pictures of jobs current: of one etcd by one watch, and of a folder of run folders.

A `Watcher` serves all screens of its process. The number of workers does not change its requests to etcd: one watch, and a
small read every few seconds to see whether the watch is alive. While etcd is away, the last pictures stay, with the time that
they were current at, and the watch begins again by itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, EtcdUnavailableError, KeyValue
from lightning_dlrover.rdzv.job.folders import EtcdDefaults
from lightning_dlrover.rdzv.job.journal import LINES_PER_ANSWER
from lightning_dlrover.rdzv.job.records import Keys, StacksRecord
from lightning_dlrover.report.status import (
    EVENTS_FILE,
    JOB_FILE,
    JobFile,
    JobNotFoundError,
    JobPlace,
    is_locked,
    read_event_file,
    read_job_file,
)
from lightning_dlrover.report.view_model import JobRecords, Shown, ShownJob, clean

log = logging.getLogger(__name__)

RETRY_S = 1.0  # seconds between two attempts to reach an etcd that does not answer
GATHER_S = 0.2  # seconds in which changes are gathered before they are decoded together
CHECK_S = 2.0  # seconds between two checks of the watch of one job
CHECK_ALL_S = 10.0  # the same for a watch of all jobs: etcd reads the names of all their keys for it
LISTED_EVENTS = 30  # newest events that are read of each job, until a screen asks for the job
COMPLETE_S = 2.0  # seconds between two reads of older events for a list: one job each
TIMEOUT_S = 2.0  # seconds for one operation of etcd
SCAN_S = 2.0  # seconds between two looks at a folder of run folders
AGES_S = 1.0  # age of a picture after which it is made again even though no record has changed
AGES_LISTED_S = 10.0  # the same in a list: the pictures of a hundred jobs would take a tenth of a core each second

_WANTED = ("live/", "nodes/", "profiles/", "stacks/", "events/")  # folders of a job that pictures are made of
_WANTED_KEYS = ("progress", "snapshot")


@dataclass(frozen=True)
class SourceState(Shown):
    """Whether an etcd answers."""

    place: str
    is_connected: bool
    as_of: float  # pictures show the records of this time, seconds since the epoch; 0: none were read yet
    problem: str = ""  # one sentence; empty while connected


@dataclass(frozen=True)
class SeenJob:
    """The last picture of a job, and the state of its source."""

    job: ShownJob | None  # None: not found, or not read yet
    source: SourceState
    place: JobPlace | None = None  # None: only its run folder is left


@dataclass(frozen=True)
class SeenJobs:
    """The last pictures of all jobs, by name."""

    jobs: tuple[ShownJob, ...]
    sources: tuple[SourceState, ...]


class _JobsOf:
    """The keys of jobs under a prefix that pictures are made of, and the folders that add-ons keep there.

    Args:
        only: names of the jobs; None: all.
    """

    def __init__(self, prefix: str, only: Collection[str] | None) -> None:
        self.folder = prefix.rstrip("/") + "/"
        self.only = only

    @property
    def root(self) -> str:
        """The prefix to watch."""
        return f"{self.folder}{next(iter(self.only))}/" if self.only is not None and len(self.only) == 1 else self.folder

    def split(self, key: str) -> tuple[str, str]:
        """Return the job, or the add-on's folder, and the path in it."""
        name, _, path = key.removeprefix(self.folder).partition("/")
        return name, path

    def wants(self, key: str) -> bool:
        name, path = self.split(key)
        if name.startswith("."):
            return self.only is None
        if not name or name != name.strip() or (self.only is not None and name not in self.only):
            return False  # no job of the screen, or a foreign key: names of jobs have no spaces around them
        return path.startswith(_WANTED) or path in _WANTED_KEYS

    def read(self, client: EtcdClient) -> tuple[int, list[KeyValue]]:
        names = client.folders(self.folder) if self.only is None else [*self.only]
        jobs = [name for name in names if name and not name.startswith(".")]
        parts = [f"{self.folder}{name}/{part}" for name in jobs for part in (*_WANTED[:-1], *_WANTED_KEYS)]
        parts += [f"{self.folder}{name}/" for name in names if name.startswith(".")]
        found = client.read_prefixes(dict.fromkeys(parts, 0))
        found |= client.read_prefixes({f"{self.folder}{name}/events/": 0 for name in jobs}, LISTED_EVENTS)
        revision = min((revision for revision, _ in found.values()), default=0) or client.newest_in(self.folder, TIMEOUT_S)[0]
        return revision, [entry for _, entries in found.values() for entry in entries if self.wants(entry.key)]


class EtcdJobs:
    """The jobs of an etcd, or some of them, kept current by one watch. Thread-safe.

    Args:
        place: the etcd, its prefix and its access; the job's name counts only for errors.
        only: names of jobs; None: all jobs under the prefix.
        on_change: called from a thread of this object after each change; must return quickly.
    """

    def __init__(self, place: JobPlace, only: Collection[str] | None, on_change: Callable[[], None]) -> None:
        self.place = place
        self._selection = _JobsOf(place.prefix, only)
        self._check_s = CHECK_ALL_S if self._selection.root == self._selection.folder else CHECK_S
        self._on_change = on_change
        self._lock = threading.Lock()
        self._jobs: dict[str, JobRecords] = {}
        self._complete: set[str] = set()  # jobs with all their events
        self._pictures: dict[str, tuple[int, ShownJob]] = {}  # version and picture
        self._others: dict[str, KeyValue] = {}  # entries of add-ons
        self._client = EtcdClient(EtcdConfig(place.endpoint, timeout_s=TIMEOUT_S, **place.access))
        self._mirror: Mirror | None = None
        self._as_of, self._problem = 0.0, "not read yet"
        self._dirty, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-jobs", daemon=True)
        self._thread.start()

    @property
    def client(self) -> EtcdClient:
        return self._client

    def covers(self, names: Collection[str]) -> bool:
        """Whether the jobs of these names are among those that it watches."""
        return self._selection.only is None or set(names) <= set(self._selection.only)

    @property
    def _silence(self) -> str:
        return f"etcd at {self.place.endpoint} does not answer; it is asked again until it does"

    def state(self) -> SourceState:
        mirror = self._mirror
        is_connected = mirror is not None and mirror.healthy
        problem = "" if is_connected else self._problem or self._silence
        return SourceState(self.place.endpoint, is_connected, time.time() if is_connected else self._as_of, problem)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(name for name, records in self._jobs.items() if not records.is_empty)

    def job(self, name: str, in_full: bool = True) -> ShownJob | None:
        """Return the last picture of a job; None if etcd has none of this name.

        Args:
            in_full: with all events that etcd has. They are read once for each job.
        """
        if in_full:
            self._complete_events(name)
        now = self.state().as_of
        with self._lock:
            records = self._jobs.get(name)
            if records is None or records.is_empty:
                return None
            known = self._pictures.get(name)
            if known is None or known[0] != records.version or now - known[1].at >= (AGES_S if in_full else AGES_LISTED_S):
                known = self._pictures[name] = records.version, records.shown(now)
            return known[1]

    def stacks(self, name: str, worker_id: str) -> StacksRecord | None:
        """Return the newest stack traces of a worker. Ask for new ones with `ask_for_stacks`."""
        with self._lock:
            records = self._jobs.get(name)
            return records.stacks(worker_id) if records is not None else None

    def entries_below(self, folder: str) -> dict[str, KeyValue]:
        """Return the entries of an add-on, such as `.pools/`, by key."""
        root = self._selection.folder + folder
        with self._lock:
            return {key: entry for key, entry in self._others.items() if key.startswith(root)}

    def close(self) -> None:
        self._closed.set()
        self._dirty.set()
        self._thread.join(2 * TIMEOUT_S)  # it may be about to create the mirror
        if self._mirror is not None:
            self._mirror.close()
        self._client.close()

    def _complete_events(self, name: str) -> None:
        with self._lock:
            records = self._jobs.get(name)
            if records is None or name in self._complete or not self.state().is_connected:
                return
            self._complete.add(name)
            if not records.is_partial:
                return
        keys = Keys(name, self._selection.folder)
        try:
            _, entries = self._client.get_prefix(keys.events, per_answer=LINES_PER_ANSWER)
        except EtcdError as error:
            log.info("the older events of job %r were not read: %s", name, error)
            self._complete.discard(name)
            return
        except BaseException:
            self._complete.discard(name)
            raise
        with self._lock:
            for entry in entries:
                records.put(entry.key.removeprefix(keys.root), entry.value)
            records.is_partial = False

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if self._mirror is None:
                    self._mirror = Mirror(
                        self._client, self._selection.root, self._dirty.set, self._check_s, selection=self._selection
                    )
                    self._dirty.set()
                self._follow(self._mirror)
            except EtcdUnavailableError:
                self._problem = self._silence
                self._on_change()
                self._closed.wait(RETRY_S)
            except EtcdError as error:  # such as a refused password
                self._problem = clean(str(error))
                self._on_change()
                self._closed.wait(RETRY_S)
            except Exception:  # a picture that cannot be made must not end all others
                log.exception("the jobs of etcd at %s could not be read; trying again", self.place.endpoint)
                self._closed.wait(RETRY_S)

    def _follow(self, mirror: Mirror) -> None:
        was_healthy, completed_at = None, time.monotonic()
        while not self._closed.is_set():
            if time.monotonic() - completed_at >= COMPLETE_S:
                completed_at = time.monotonic()
                self._complete_one()
            changed = self._dirty.wait(RETRY_S)
            if mirror.healthy:
                self._as_of, self._problem = time.time(), ""
            if changed:
                self._dirty.clear()
                self._take(mirror.take_changes())
            if changed or mirror.healthy != was_healthy:
                if mirror.healthy and was_healthy is False:
                    self._read_events_again()
                was_healthy = mirror.healthy
                self._on_change()
            self._closed.wait(GATHER_S)

    def _read_events_again(self) -> None:
        """Note that events may be missing: after an outage of etcd, the mirror has read the newest ones only."""
        with self._lock:
            self._complete.clear()
            for records in self._jobs.values():
                records.is_partial = records.num_events >= LISTED_EVENTS

    def _complete_one(self) -> None:
        """Read the older events of one job that has some, so that a list is complete after a while."""
        with self._lock:
            partial = [name for name, records in self._jobs.items() if records.is_partial]
        if partial:
            self._complete_events(partial[0])
            self._on_change()

    def _take(self, changes: Mapping[str, KeyValue | None]) -> None:
        with self._lock:
            for key, entry in changes.items():
                try:
                    self._take_one(key, entry)
                except Exception:  # the mirror reports a change once: the others must be taken
                    log.exception("%r cannot be shown", key)

    def _take_one(self, key: str, entry: KeyValue | None) -> None:
        name, path = self._selection.split(key)
        if name.startswith("."):
            if entry is None:
                self._others.pop(key, None)
            else:
                self._others[key] = entry
        elif entry is not None:
            records = self._jobs.setdefault(name, JobRecords(name))
            records.put(path, entry.value)
            records.is_partial = name not in self._complete and records.num_events >= LISTED_EVENTS
        elif name in self._jobs:
            self._jobs[name].remove(path)
            if self._jobs[name].has_no_key:
                del self._jobs[name]
                self._pictures.pop(name, None)
                self._complete.discard(name)


@dataclass
class _EndedJob:
    """A job of which only the run folder is left."""

    file: Path
    mtime: float = -1.0
    picture: ShownJob | None = None

    def shown(self, run_id: str) -> ShownJob | None:
        with contextlib.suppress(OSError, JobNotFoundError):
            mtime = self.file.stat().st_mtime
            if mtime != self.mtime or self.picture is None:
                records = JobRecords(run_id)
                records.add_events(read_event_file(self.file))
                made = records.shown(time.time())
                self.mtime, self.picture = mtime, replace(made, at=made.newest_at)
        return self.picture


@dataclass
class Watcher:
    """The jobs of an etcd or, without an endpoint, those of a folder of run folders.

    Args:
        endpoint: None: that of the environment, else the etcds that the run folders name.
        only: one job, whose records alone are read.
    """

    endpoint: str | None = None
    prefix: str | None = None
    run_dir: Path = Path("runs")
    access: Mapping[str, str] = field(default_factory=dict)
    only: str | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._etcds: dict[tuple[str, str], EtcdJobs] = {}
        self._ended: dict[str, _EndedJob] = {}
        self._files: dict[str, JobFile] = {}
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._scanner: threading.Thread | None = None
        defaults = EtcdDefaults.of_this_process()
        has_folder = self.only is not None and (self.run_dir / self.only / JOB_FILE).exists()
        endpoint = self.endpoint or (None if has_folder else defaults.endpoint)
        if endpoint is not None:
            place = JobPlace("", endpoint, self.prefix or defaults.prefix, self.access or defaults.access)
            only = None if self.only is None else (self.only,)
            self._etcds[place.endpoint, place.prefix] = EtcdJobs(place, only, self._note_change)
            return
        self._scan()
        self._scanner = threading.Thread(target=self._scan_regularly, name="run-folders", daemon=True)
        self._scanner.start()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def place(self) -> str:
        """The place of the jobs, in words."""
        endpoints = [jobs.place.endpoint for jobs in self._all_etcds()]
        return f"folder {clean(str(self.run_dir))}" if self._scanner is not None else f"etcd at {clean(endpoints[0])}"

    @property
    def version(self) -> int:
        """Number that grows with each change of any job."""
        return self._version

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Wait until the version differs from the one seen, for `timeout_s` at most. Return the present one."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != seen or self._closed.is_set(), timeout_s)
            return self._version

    def jobs(self) -> SeenJobs:
        """Return all jobs: those that run first, then the others, each group by name."""
        found: dict[str, ShownJob] = {}
        for etcd in self._all_etcds():
            for name in etcd.names():
                try:
                    job = etcd.job(name, in_full=False)
                except Exception:  # one picture that cannot be made must not hide the others
                    log.exception("job %r cannot be shown", name)
                    continue
                if job is not None:
                    found[name] = job
        for name in self._folders():
            if name not in found and (job := self._ended_job(name)) is not None:
                found[name] = job
        ordered = sorted(found.values(), key=lambda job: (job.is_over, job.run_id))
        return SeenJobs(tuple(ordered), tuple(each.state() for each in self._all_etcds()))

    def job(self, run_id: str) -> SeenJob:
        """Return the last picture of one job, with all its events."""
        etcd = self._etcd_of(run_id)
        if etcd is None:
            job = self._ended_job(run_id)
            text = "" if job is not None else f"{self.place} has no job {run_id!r}"
            return SeenJob(job, SourceState(self.place, True, time.time(), clean(text)))
        state, job = etcd.state(), etcd.job(run_id)
        place = JobPlace(run_id, etcd.place.endpoint, etcd.place.prefix, etcd.place.access)
        if (job is None or not state.is_connected) and self._has_ended(run_id):
            ended = self._ended_job(run_id)
            if ended is not None:
                return SeenJob(ended, SourceState(self.place, True, time.time()))
        if job is None and state.is_connected:
            text = f"etcd at {etcd.place.endpoint} has no job {run_id!r} under {etcd.place.prefix!r}"
            state = replace(state, problem=clean(text))
        return SeenJob(job, state, place)

    def stacks(self, run_id: str, worker_id: str) -> StacksRecord | None:
        """Return the newest stack traces of a worker."""
        etcd = self._etcd_of(run_id)
        return etcd.stacks(run_id, worker_id) if etcd is not None else None

    def client_of(self, run_id: str) -> EtcdClient | None:
        """Return a client of the job's etcd; None if the job has none any more."""
        etcd = self._etcd_of(run_id)
        return etcd.client if etcd is not None else None

    def entries_below(self, folder: str) -> dict[str, KeyValue]:
        """Return the entries of an add-on in all etcds, such as those of `.pools/`, by key."""
        return {key: entry for etcd in self._all_etcds() for key, entry in etcd.entries_below(folder).items()}

    @property
    def etcds(self) -> list[EtcdJobs]:
        """The etcds that it watches now."""
        return self._all_etcds()

    def close(self) -> None:
        self._closed.set()
        self._note_change()
        for etcd in self._all_etcds():
            etcd.close()
        if self._scanner is not None:
            self._scanner.join(SCAN_S)

    def _note_change(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def _all_etcds(self) -> list[EtcdJobs]:
        with self._lock:
            return list(self._etcds.values())

    def _etcd_of(self, run_id: str) -> EtcdJobs | None:
        with self._lock:
            if self._scanner is None:
                return next(iter(self._etcds.values()), None)
            file = self._files.get(run_id)
            return self._etcds.get((file.place.endpoint, file.place.prefix)) if file is not None else None

    def _folders(self) -> Iterable[str]:
        return list(self._files) if self._scanner is not None else []

    def _has_ended(self, run_id: str) -> bool:
        return is_locked(self.run_dir / run_id) is False and (self.run_dir / run_id / EVENTS_FILE).exists()

    def _has_recorded_end(self, run_id: str) -> bool:
        job = self._ended_job(run_id)
        return job is not None and job.state != "ended"  # as a job without a recorded end is called

    def _ended_job(self, run_id: str) -> ShownJob | None:
        file = self.run_dir / run_id / EVENTS_FILE
        if not run_id or len(run_id) > 255 or "/" in run_id or run_id.startswith(".") or not run_id.isprintable():
            return None
        with self._lock:
            if run_id not in self._ended and not file.exists():
                return None  # whoever asks for unknown names must not fill the memory
            ended = self._ended.setdefault(run_id, _EndedJob(file))
            return ended.shown(run_id)

    def _scan_regularly(self) -> None:
        while not self._closed.wait(SCAN_S):
            try:
                self._scan()
            except OSError as error:
                log.info("folder %s was not read: %s", self.run_dir, error)

    def _scan(self) -> None:
        """Look at the run folders: watch the etcds of jobs that run, and close those that no job uses any more."""
        pattern = f"{self.only or '*'}/{JOB_FILE}"
        files: dict[str, JobFile] = {}
        for file in self.run_dir.glob(pattern):
            with contextlib.suppress(JobNotFoundError):
                files[file.parent.name] = read_job_file(file)
        used: dict[tuple[str, str], list[JobFile]] = {}
        for name, job in files.items():
            # Nodes on this machine end with their `dlrover run`, and so does its etcd.
            may_run = job.target != "local" and not self._has_recorded_end(name)
            if may_run or is_locked(self.run_dir / name) is not False:
                used.setdefault((job.place.endpoint, job.place.prefix), []).append(job)
        with self._lock:
            has_changed = files.keys() != self._files.keys() or used.keys() != self._etcds.keys()
            self._files = files
            names = {key: {job.place.run_id for job in jobs} for key, jobs in used.items()}
            unused = [
                self._etcds.pop(key) for key, etcd in [*self._etcds.items()] if key not in used or not etcd.covers(names[key])
            ]
            for key, jobs in used.items():
                if key not in self._etcds and not self._closed.is_set():
                    self._etcds[key] = EtcdJobs(jobs[0].place, names[key], self._note_change)
        for etcd in unused:
            etcd.close()
        if has_changed:
            self._note_change()
