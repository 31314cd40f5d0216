"""The history of jobs on this host, and the earlier measurements with which a job starts."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import psutil

from lightning_dlrover import variables
from lightning_dlrover.codec import RecordError, from_fields
from lightning_dlrover.files import home
from lightning_dlrover.rdzv.job.events import DecisionMade, OutcomeJudged, PlannerEvent, WindowMeasured, events_of, record_of
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.tuning.candidates import Descriptor, PastJob, descriptor_of, nearest
from lightning_dlrover.tuning.plan import Decision, Objective, Outcome, Settings, resources_of, settings_of
from lightning_dlrover.tuning.population import Population
from lightning_dlrover.tuning.profile_log import LOG_EVERY_S
from lightning_dlrover.tuning.samples import StepProfile, configuration_of, impossible_figure
from lightning_dlrover.tuning.step_time import population_of

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, MetaData, Table

# History of jobs: their descriptors, measurements, plans and outcomes.
#
# The history is a SQLite file unless another database is configured. Several jobs may write it concurrently. Each write updates
# one job in one transaction.

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 10.0
MAX_WINDOWS_PER_SETTINGS = 30  # newest ones: further windows add no information, and the file should stay small
MAX_JOBS_COMPARED = 2000  # newest first
MAX_JOBS_OF_HARDWARE = 20  # each one takes a fit, and further jobs change the means little
LOCAL_FILE_SYSTEMS = frozenset(
    ("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs")
)
"""File systems that no other host writes. Write-ahead logs of SQLite need shared memory between all writers, and corrupt a
database that several hosts write."""

WRITES = "dlrover_writes"  # execution option of our transactions
_SETTINGS = tuple(f.name for f in fields(Settings))


class HistoryError(Exception):
    """The history cannot be read or written; the message gives the remedy."""


@dataclass(frozen=True)
class JobEntry:
    """One job, without its windows."""

    key: str  # unique among all jobs; two jobs may have had one name
    run_id: str
    started_at: float  # seconds since the epoch
    updated_at: float
    outcome: Literal["running", "finished", "failed"]
    descriptor: Descriptor
    num_settings: int = 0  # number of measured settings


def history_url(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the history's location as a SQLAlchemy URL; None if the history is off.

    Args:
        given: a path, a URL, or `off`. None: the variable DLROVER_HISTORY applies. Without it, the location is
            `dlrover/history.sqlite` in XDG_DATA_HOME or ~/.local/share.
    """
    place = given if given is not None else environ.get(variables.HISTORY, "")
    if place.lower() in ("off", "none", "0", "no"):
        return None
    if "://" in place:
        return place
    if not place:
        data = environ.get("XDG_DATA_HOME") or os.path.join(home(environ), ".local", "share")
        place = os.path.join(data, "dlrover", "history.sqlite")
    return f"sqlite:///{os.path.abspath(os.path.expanduser(place))}"


class JobHistory:
    """A history, opened on first use.

    Args:
        url: URL as returned by `history_url`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine: Engine | None = None
        self._tables: _Tables | None = None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def __enter__(self) -> JobHistory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing -----------------------------------------------------------------------------------------------------------

    def record(
        self,
        job: JobEntry,
        windows: Sequence[StepProfile] = (),
        decisions: Sequence[Decision] = (),
        outcomes: Sequence[Outcome] = (),
    ) -> None:
        """Update one job's history, all of it or nothing. Known records may be passed again.

        Raises:
            HistoryError: the database cannot be written.
        """
        with self._transaction(writes=True) as (connection, tables):
            self._put_windows(connection, tables, job.key, windows)
            self._put_decisions(connection, tables, job.key, decisions, outcomes)
            row = {name: getattr(job, name) for name in ("run_id", "started_at", "updated_at", "outcome")}
            row |= {**asdict(job.descriptor), "num_settings": _count_settings(connection, tables, job.key)}
            _upsert(connection, tables.jobs, {"key": job.key}, row)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove jobs with all their measurements, all of them or none. One that still trains is recorded again.

        Raises:
            HistoryError: the database cannot be written.
        """
        from sqlalchemy import delete

        with self._transaction(writes=True) as (connection, tables):
            for table in (tables.windows, tables.decisions, tables.outcomes):
                connection.execute(delete(table).where(table.c.job.in_(keys)))
            connection.execute(delete(tables.jobs).where(tables.jobs.c.key.in_(keys)))

    def _put_windows(self, connection: Connection, tables: _Tables, key: str, windows: Sequence[StepProfile]) -> None:
        """Add windows, and remove those beyond the newest of their settings: a machine changes, and a job's start is cold."""
        from sqlalchemy import delete, insert, select

        table = tables.windows
        places = [table.c[name] for name in (*_SETTINGS, "global_batch")]
        stored: dict[tuple[Any, ...], set[float]] = {}
        for row in connection.execute(select(table.c.at, *places).where(table.c.job == key)):
            stored.setdefault(tuple(row)[1:], set()).add(row[0])
        places_at = {at: place for place, times in stored.items() for at in times}  # windows of a job have different times
        given: dict[tuple[Any, ...], dict[float, StepProfile]] = {}
        for window in windows:
            place = (*astuple(settings_of(window)), window.global_batch)
            if places_at.setdefault(window.at, place) == place:
                given.setdefault(place, {}).setdefault(window.at, window)
        new, outdated = [], []
        for place, found in given.items():
            before = stored.get(place, set())
            newest = set(sorted(before | found.keys())[-MAX_WINDOWS_PER_SETTINGS:])
            outdated += sorted(before - newest)
            new += [_row_of_window(key, found[at]) for at in sorted(newest & found.keys() - before)]
        if outdated:
            connection.execute(delete(table).where(table.c.job == key, table.c.at.in_(outdated)))
        if new:
            connection.execute(insert(table), new)

    def _put_decisions(
        self, connection: Connection, tables: _Tables, key: str, decisions: Sequence[Decision], outcomes: Sequence[Outcome]
    ) -> None:
        from sqlalchemy import insert, select

        # Both are immutable once written, and a week-long job has thousands of them.
        def new(table: Table, records: Mapping[int, Any]) -> list[Any]:
            known = set(connection.execute(select(table.c.decision_id).where(table.c.job == key)).scalars())
            return [record for number, record in records.items() if number not in known]

        made = [
            {"job": key, "decision_id": d.decision_id, "at": d.at, "is_change": d.is_change, "data": _json(d.to_data())}
            for d in new(tables.decisions, {d.decision_id: d for d in decisions})
        ]
        judged = [
            {"job": key, "decision_id": o.decision_id, "data": _json(asdict(o))}
            for o in new(tables.outcomes, {o.decision_id: o for o in outcomes})
        ]
        for table, rows in ((tables.decisions, made), (tables.outcomes, judged)):
            if rows:
                connection.execute(insert(table), rows)

    # --- reading -----------------------------------------------------------------------------------------------------------

    def jobs(self, run_id: str | None = None, limit: int = MAX_JOBS_COMPARED) -> list[JobEntry]:
        """Return jobs, the newest first. Unreadable ones are left out.

        Args:
            run_id: only jobs of this name.
        """
        from sqlalchemy import select

        with self._transaction(writes=False) as (connection, tables):
            wanted = select(tables.jobs).order_by(tables.jobs.c.updated_at.desc()).limit(limit)
            if run_id is not None:
                wanted = wanted.where(tables.jobs.c.run_id == run_id)
            rows = connection.execute(wanted).mappings().all()
        return [entry for row in rows if (entry := _entry_of(row)) is not None]

    def windows(self, key: str) -> tuple[StepProfile, ...]:
        """Return the windows of a job, oldest first."""
        found = _readable(StepProfile, self._data("windows", key, "at"))
        return tuple(window for window in found if impossible_figure(window) is None)

    def decisions(self, key: str) -> list[Decision]:
        found = []
        for data in self._data("decisions", key, "decision_id"):
            with contextlib.suppress(ValueError):
                found.append(Decision.from_data(data))
        return found

    def outcomes(self, key: str) -> list[Outcome]:
        return list(_readable(Outcome, self._data("outcomes", key, "decision_id")))

    def events(self, key: str) -> list[EventRecord]:
        """Return a job's history as the events from which a report is built, oldest first."""
        found = [record_of(WindowMeasured(asdict(window)), "", window.at) for window in self.windows(key)]
        found += [record_of(DecisionMade(each.to_data()), each.reason, each.at) for each in self.decisions(key)]
        return sorted(found, key=lambda event: event.at)

    def similar(self, descriptor: Descriptor, *, but: str = "") -> list[PastJob]:
        """Return the most similar past jobs that tried more than one settings, with their windows, the most similar first.

        Args:
            but: key of the current job, which is left out.
        """
        tried = self._tried(but)
        near = nearest(descriptor, [PastJob(job.key, job.updated_at, job.descriptor, ()) for job in tried])
        found = [replace(job, windows=self.windows(job.job)) for job in near]
        return [job for job in found if job.windows]

    def on_hardware_of(self, descriptor: Descriptor, *, but: str = "") -> list[tuple[StepProfile, ...]]:
        """Return the windows of the newest jobs on the same hardware: the same device, and as many cores in a node.

        Args:
            but: key of the current job, which is left out.
        """
        place = descriptor.device, descriptor.node_cores
        jobs = [job for job in self._tried(but) if (job.descriptor.device, job.descriptor.node_cores) == place]
        return [windows for job in jobs[:MAX_JOBS_OF_HARDWARE] if (windows := self.windows(job.key))]

    def _tried(self, but: str) -> list[JobEntry]:
        """Return the jobs, but one, that tried more than one settings."""
        return [job for job in self.jobs() if job.key != but and job.num_settings > 1]

    def _data(self, name: str, key: str, order: str) -> list[dict[str, Any]]:
        from sqlalchemy import select

        with self._transaction(writes=False) as (connection, tables):
            table: Table = getattr(tables, name)
            found = connection.execute(select(table.c.data).where(table.c.job == key).order_by(table.c[order])).scalars().all()
        read = []
        for text in found:
            with contextlib.suppress(ValueError, TypeError):
                read.append(json.loads(text))
        return [data for data in read if isinstance(data, dict)]

    # --- connection --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self, writes: bool) -> Iterator[tuple[Connection, _Tables]]:
        try:
            from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
        except ImportError as error:
            raise HistoryError("the job history needs SQLAlchemy: pip install 'sqlalchemy>=2'") from error
        try:
            if self._engine is None or self._tables is None:
                self._engine = _connect(self.url)
                self._tables = _Tables.prepare(self._engine)
            with _begin(self._engine, writes) as connection:
                yield connection, self._tables
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise HistoryError(
                f"{self._place} cannot be used as a database: {error}; "
                f"give a path or a SQLAlchemy URL whose driver is installed, in history= or {variables.HISTORY}"
            ) from error
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            cause = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise HistoryError(
                f"the job history {self._place} cannot be used: {cause}; repair or move it away, name another place in "
                f"{variables.HISTORY}, or switch it off with {variables.HISTORY}=off"
            ) from error

    @property
    def _place(self) -> str:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            url = make_url(self.url)
        except ArgumentError:
            return "the named place"  # the URL may contain a password
        return url.database or "" if url.drivername == "sqlite" else url.render_as_string(hide_password=True)


def export_windows(history: JobHistory, jobs: Sequence[JobEntry], form: Literal["csv", "jsonl"], output: IO[str]) -> int:
    """Write the windows of `jobs` in the format of `dlrover lab evaluate`. Return their number."""
    table = csv.DictWriter(output, [f.name for f in fields(StepProfile)], lineterminator="\n")
    if form == "csv":
        table.writeheader()
    count = 0
    for window in (window for job in jobs for window in history.windows(job.key)):
        row = asdict(window)
        if form == "csv":
            table.writerow(row)
        else:
            output.write(json.dumps(row) + "\n")
        count += 1
    return count


def _connect(url: str) -> Engine:
    from sqlalchemy import create_engine, event, make_url
    from sqlalchemy.pool import NullPool

    parsed = make_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_sqlite and parsed.database and not parsed.database.startswith("file:"):  # a URI names an existing file
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"connect_args": {"timeout": BUSY_TIMEOUT_S}} if is_sqlite else {}
    # A pooled connection would be shared by a worker and the loader workers forked from it.
    engine = create_engine(parsed, poolclass=NullPool, **options)
    if is_sqlite:
        is_local = not parsed.database or parsed.database.startswith((":memory:", "file:")) or _is_local(parsed.database)

        @event.listens_for(engine, "connect")
        def prepare(connection: sqlite3.Connection, _: object) -> None:
            connection.isolation_level = None  # otherwise the driver begins a transaction of its own, later than ours
            # With a write-ahead log readers do not wait for a writer.
            connection.execute(f"PRAGMA journal_mode={'WAL' if is_local else 'DELETE'}")
            connection.execute(f"PRAGMA synchronous={'NORMAL' if is_local else 'FULL'}")

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            # A transaction that reads first and then meets another writer fails at once, whatever the timeout.
            writes = connection.get_execution_options().get(WRITES, True)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _is_local(file: str) -> bool:
    """Return whether a file is certainly on a file system of this host alone."""
    place = os.path.realpath(file)
    mounts = [m for m in psutil.disk_partitions(all=True) if os.path.commonpath([m.mountpoint, place]) == m.mountpoint]
    longest = max(map(len, (mount.mountpoint for mount in mounts)), default=0)
    # Of several at one place, the last one is visible.
    return bool(mounts) and [m for m in mounts if len(m.mountpoint) == longest][-1].fstype in LOCAL_FILE_SYSTEMS


@contextlib.contextmanager
def _begin(engine: Engine, writes: bool) -> Iterator[Connection]:
    with engine.connect().execution_options(**{WRITES: writes}) as connection, connection.begin():
        yield connection


@dataclass(frozen=True)
class _Tables:
    jobs: Table
    windows: Table
    decisions: Table
    outcomes: Table

    @classmethod
    def prepare(cls, engine: Engine) -> _Tables:
        """Return the tables, creating missing ones.

        Raises:
            HistoryError: a newer release created them.
        """
        from sqlalchemy import Boolean, Column, Float, Integer, MetaData, String, Text
        from sqlalchemy import Table as NewTable

        metadata: MetaData = MetaData()

        def table(name: str, *columns: Column[Any]) -> Table:
            return NewTable(f"dlrover_{name}", metadata, *columns)

        def job_column() -> Column[str]:
            return Column("job", String(300), primary_key=True)

        def id_column() -> Column[int]:
            return Column("decision_id", Integer, primary_key=True, autoincrement=False)

        version = table("schema", Column("version", Integer, primary_key=True, autoincrement=False))
        jobs = table(
            "jobs",
            Column("key", String(300), primary_key=True),
            Column("run_id", String(250), index=True),
            Column("started_at", Float),
            Column("updated_at", Float, index=True),
            Column("outcome", String(20)),
            Column("device", String(100)),
            *(Column(f.name, Float) for f in fields(Descriptor) if f.name != "device"),
            Column("num_settings", Integer),
        )
        windows = table(
            "windows",
            job_column(),
            Column("at", Float(53), primary_key=True),
            *(Column(name, Integer) for name in (*_SETTINGS, "global_batch")),
            Column("step_time_s", Float),
            Column("data", Text),
        )
        details = (Column("at", Float), Column("is_change", Boolean), Column("data", Text))
        decisions = table("decisions", job_column(), id_column(), *details)
        outcomes = table("outcomes", job_column(), id_column(), Column("data", Text))
        _make_missing(engine, metadata, version)
        return cls(jobs, windows, decisions, outcomes)


def _make_missing(engine: Engine, metadata: MetaData, version: Table) -> None:
    """Create all tables in an empty database. Raise `HistoryError` if a newer release created them."""
    from sqlalchemy import inspect, select

    found: Sequence[int] = ()
    with _begin(engine, writes=False) as connection:
        if inspect(connection).has_table(version.name):
            found = connection.execute(select(version.c.version)).scalars().all()
    if not found:
        with _begin(engine, writes=True) as connection:
            metadata.create_all(connection)
            _upsert(connection, version, {"version": SCHEMA_VERSION}, {})
    elif max(found) > SCHEMA_VERSION:
        raise HistoryError(
            f"the job history has format {max(found)}, this release of lightning-dlrover supports up to {SCHEMA_VERSION}: "
            f"update it, or name another place in {variables.HISTORY}"
        )


def _upsert(connection: Connection, table: Table, key: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """Insert or update a row. Every database supports upserts, but each with its own syntax."""
    from sqlalchemy import and_, insert, select, update

    here = and_(*(table.c[name] == value for name, value in key.items()))
    if connection.execute(select(*(table.c[name] for name in key)).where(here)).first() is None:
        connection.execute(insert(table).values(**key, **row))
    elif row:
        connection.execute(update(table).where(here).values(**row))


def _count_settings(connection: Connection, tables: _Tables, key: str) -> int:
    from sqlalchemy import select

    names = [tables.windows.c[name] for name in _SETTINGS]
    return len(connection.execute(select(*names).where(tables.windows.c.job == key).distinct()).all())


def _row_of_window(key: str, window: StepProfile) -> dict[str, Any]:
    figures = {**asdict(settings_of(window)), "global_batch": window.global_batch}
    data = _json(asdict(window))
    return {"job": key, "at": window.at, **figures, "step_time_s": window.step_time_s, "data": data}


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)


def _entry_of(row: Mapping[Any, Any]) -> JobEntry | None:
    figures = {f.name: row[f.name] for f in fields(Descriptor)}
    numbers = [row["started_at"], row["updated_at"], *(v for k, v in figures.items() if k != "device")]
    known = all(isinstance(v, int | float) and math.isfinite(v) for v in numbers) and isinstance(figures["device"], str)
    known = known and isinstance(row["num_settings"], int | None)
    if not known or row["outcome"] not in ("running", "finished", "failed"):
        return None
    descriptor = Descriptor(**figures)
    return JobEntry(
        row["key"], row["run_id"], row["started_at"], row["updated_at"], row["outcome"], descriptor, row["num_settings"] or 0
    )


def _readable(record_type: Any, found: Sequence[Any]) -> Iterator[Any]:
    for data in found:
        with contextlib.suppress(RecordError, ValueError, TypeError):
            yield from_fields(record_type, data, "the job history")


MAX_STAYS = 50  # decisions without a change to keep in memory; each is soon recorded elsewhere

# Maximum seconds between the last logged window of one rank 0 and the first of the next, unless the job was stopped in between.
LONGEST_HANDOVER_S = LOG_EVERY_S + 60.0


class JobMemory:
    """Windows, decisions and outcomes of one job, on its rank 0."""

    def __init__(self) -> None:
        self.windows: list[StepProfile] = []  # oldest first, the newest few of each settings
        self.decisions: list[Decision] = []
        self.outcomes: list[Outcome] = []
        self._spans: list[tuple[StepProfile, float]] = []  # one window for each stretch of equal settings, seconds

    @classmethod
    def of(
        cls,
        events: Sequence[EventRecord],
        known_windows: Sequence[StepProfile] = (),
        known_decisions: Sequence[Decision] = (),
        known_outcomes: Sequence[Outcome] = (),
    ) -> JobMemory:
        """Return what a job's events hold, together with what is known from its history."""
        memory = cls()
        windows = {window.at: window for window in known_windows}
        decisions = {decision.decision_id: decision for decision in known_decisions}
        outcomes = {found.decision_id: found for found in known_outcomes}
        for _, event in events_of(events, PlannerEvent):
            try:
                if isinstance(event, WindowMeasured):
                    window = from_fields(StepProfile, event.document, "a profile")
                    if problem := impossible_figure(window):
                        raise ValueError(f"{problem[0]} of a profile {problem[1]}")
                    windows[window.at] = window
                elif isinstance(event, DecisionMade):
                    decision = Decision.from_data(event.document)
                    decisions[decision.decision_id] = decision
                elif isinstance(event, OutcomeJudged):
                    found = from_fields(Outcome, event.document, "an outcome")
                    outcomes[found.decision_id] = found
            except (TypeError, ValueError, KeyError) as error:
                log.warning("an event of the job's past cannot be read: %s", error)
        for window in sorted(windows.values(), key=lambda w: w.at):
            memory.add(window)
        for decision in sorted(decisions.values(), key=lambda d: d.decision_id):
            memory.decide(decision)
        memory.outcomes += outcomes.values()
        return memory

    @property
    def next_id(self) -> int:
        return max((d.decision_id for d in self.decisions), default=0) + 1

    @property
    def trial(self) -> Decision | None:
        """The newest decision, if it is a trial without an outcome yet."""
        last = self.decisions[-1] if self.decisions else None
        if last is None or not last.explored or not last.is_change:
            return None
        return last if all(o.decision_id != last.decision_id for o in self.outcomes) else None

    def add(self, window: StepProfile) -> None:
        def place(of: StepProfile) -> tuple[Settings, int]:
            return settings_of(of), of.global_batch

        last = self.windows[-1] if self.windows else None
        own_s = window.num_steps * window.step_time_s
        passed_s = max(own_s, window.at - last.at) if last is not None and window.at else own_s
        if last is not None and last.worker_id != window.worker_id:
            # A job that was ended and resumed days later has cost nothing in between.
            passed_s = min(passed_s, own_s + LONGEST_HANDOVER_S)
        if self._spans and place(self._spans[-1][0]) == place(window):
            self._spans[-1] = window, self._spans[-1][1] + passed_s
        else:
            self._spans.append((window, passed_s))
        self.windows = [*self.windows, window]
        same = [i for i, each in enumerate(self.windows) if place(each) == place(window)]
        if len(same) > MAX_WINDOWS_PER_SETTINGS:
            del self.windows[same[0]]

    def decide(self, decision: Decision) -> None:
        """Keep a decision. Of those without a change, only the newest stay."""
        self.decisions.append(decision)
        stays = [i for i, each in enumerate(self.decisions) if not each.is_change]
        if len(stays) > MAX_STAYS:
            del self.decisions[stays[0]]

    def spent(self, objective: Objective, node_cores: float) -> float | None:
        """Return the money spent so far; None: unknown."""
        total = 0.0
        for window, seconds in self._spans:
            used = resources_of(configuration_of(window, node_cores), max(window.peak_memory_bytes, window.memory_bytes))
            price = objective.prices.per_hour(used)
            if price is None:
                return None
            total += price * seconds / 3600
        return total


HISTORY_EVERY_S = 30.0


class HistoryAccess:
    """Access to the history for a running job. A failure is logged once, and training continues without the history.

    Args:
        url: the history's database; None: nothing is read or written.
    """

    def __init__(self, url: str | None, node_cores: float) -> None:
        self._history = JobHistory(url) if url else None
        self._node_cores = node_cores
        self._has_failed = False
        self._written_at = time.monotonic()
        self._similar: dict[str, Sequence[PastJob]] = {}
        self._populations: dict[str, Population | None] = {}

    @property
    def is_due(self) -> bool:
        return self._history is not None and time.monotonic() - self._written_at >= HISTORY_EVERY_S

    def record(self, key: str, began_at: float, end: Literal["running", "finished", "failed"], memory: JobMemory) -> None:
        if self._history is None or not memory.windows:
            return
        self._written_at = time.monotonic()
        descriptor = descriptor_of(memory.windows[-1], self._node_cores)
        entry = JobEntry(key, key.rpartition("@")[0], began_at, time.time(), end, descriptor)
        with self._surviving("nothing of this job is remembered"):
            self._history.record(entry, memory.windows, memory.decisions, memory.outcomes)

    def past(self, key: str) -> tuple[Sequence[StepProfile], Sequence[Decision], Sequence[Outcome]]:
        """Return the windows, decisions and outcomes of a job."""
        if self._history is not None:
            with self._surviving("the job's earlier results are read from its events only"):
                return self._history.windows(key), self._history.decisions(key), self._history.outcomes(key)
        return (), (), ()

    def similar(self, profile: StepProfile, key: str) -> Sequence[PastJob]:
        """Return similar past jobs. The query runs once a job because its model does not change."""
        if self._history is not None and key not in self._similar:
            self._similar[key] = ()
            with self._surviving("this job starts without the results of earlier jobs"):
                self._similar[key] = self._history.similar(descriptor_of(profile, self._node_cores), but=key)
        return self._similar.get(key, ())

    def population(self, profile: StepProfile, key: str) -> Population | None:
        """Return the common properties of other jobs on this hardware. The query and the fits run once a job."""
        if self._history is not None and key not in self._populations:
            self._populations[key] = None
            with self._surviving("this job starts without the results of earlier jobs"):
                others = self._history.on_hardware_of(descriptor_of(profile, self._node_cores), but=key)
                self._populations[key] = population_of(others, self._node_cores)
        return self._populations.get(key)

    @contextlib.contextmanager
    def _surviving(self, consequence: str) -> Iterator[None]:
        try:
            yield
        except HistoryError as error:
            if not self._has_failed:
                log.warning("%s, training continues: %s", consequence, error)
            self._has_failed = True
