"""Metrics of jobs for Prometheus: collected when they are scraped, from the jobs' records, and never by a training process.

`JobsReader` reads the records of jobs in few requests, and `JobMeter` turns a job's events into counters. `METRICS` names
everything that is exported, so that docs, the Grafana board and tests can be compared with it. `serve_metrics` answers scrapes
from threads of its own. Add-ons export theirs through the same functions.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lightning_dlrover.codec import RecordError, from_fields
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.health import size_of
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, KeyValue
from lightning_dlrover.rdzv.job.events import (
    DecisionMade,
    Event,
    FitFinished,
    JobFailed,
    RecordIgnored,
    RoundFormed,
    StreamOpened,
    TrainingStalled,
    WindowMeasured,
    WorkerFailed,
    WorkerLost,
    content_of,
)
from lightning_dlrover.rdzv.job.journal import LINES_PER_ANSWER, read_events, readable
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, ProgressRecord, SnapshotRecord
from lightning_dlrover.rdzv.membership.rounds import JobView, read_view
from lightning_dlrover.report.status import JobPlace
from lightning_dlrover.report.streams import read_streams, skipped_rows
from lightning_dlrover.report.timeline import TimeLedger
from lightning_dlrover.tuning.plan import Decision, Settings, settings_of
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

log = logging.getLogger(__name__)

ROUND_KINDS = ("start", "grow", "shrink", "replace", "loss", "retry", "undo", "stop", "other")
"""Values of the labels `kind` and `reason`. The kind of a newer release is counted as other."""

PHASES = ("not started", "starting", "training", "finished", "failed", "stopped")

MAX_JOBS = 200
"""Maximum number of jobs that one page of metrics describes; the newest ones."""

MAX_BEGUN = 20
"""Maximum number of jobs whose whole history is read for one scrape; the others follow with later ones."""

MAX_STREAMS = 16
"""Maximum number of a job's streams that are exported."""

READ_EVERY_S = 2.0
"""Minimum seconds between two reads of etcd, whatever the number of scrapes."""

TIMEOUT_S = 2.0
"""Seconds to wait for etcd. Prometheus itself gives up after ten, unless configured otherwise."""


@dataclass(frozen=True)
class MetricFamily:
    """A metric, with the text of its `# HELP` line."""

    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, MetricFamily] = {
    "dlrover_up": MetricFamily("gauge", "1 if the records could be read for this scrape, else 0"),
    "dlrover_etcd_size_bytes": MetricFamily("gauge", "size of etcd's database file"),
    "dlrover_jobs_omitted": MetricFamily("gauge", "jobs left out, because a page describes at most 200"),
    "dlrover_job_phase": MetricFamily("gauge", "1 for the job's present phase, 0 for the others", ("job", "phase")),
    "dlrover_workers": MetricFamily("gauge", "workers of the present round that are alive", ("job",)),
    "dlrover_workers_wanted": MetricFamily("gauge", "workers that the plan asks for", ("job",)),
    "dlrover_workers_joining": MetricFamily("gauge", "workers that have started and do not train yet", ("job",)),
    "dlrover_workers_min": MetricFamily("gauge", "minimum number of workers", ("job",)),
    "dlrover_workers_max": MetricFamily("gauge", "maximum number of workers", ("job",)),
    "dlrover_rounds_total": MetricFamily("counter", "rounds formed, by the kind of change", ("job", "kind")),
    "dlrover_workers_lost_total": MetricFamily("counter", "workers lost", ("job",)),
    "dlrover_worker_failures_total": MetricFamily("counter", "errors raised by the script in a worker", ("job",)),
    "dlrover_stalls_total": MetricFamily("counter", "pauses of training for a change of workers", ("job", "reason")),
    "dlrover_stall_seconds_total": MetricFamily("counter", "seconds of these pauses, the longest worker's", ("job", "reason")),
    "dlrover_lost_seconds_total": MetricFamily(
        "counter", "wall time without steps that count: startup, stall, repeated (steps done again)", ("job", "cause")
    ),
    "dlrover_productive_seconds": MetricFamily("gauge", "wall time in steps that counted", ("job",)),
    "dlrover_wall_seconds": MetricFamily("gauge", "wall time since the job's first round", ("job",)),
    "dlrover_goodput_ratio": MetricFamily("gauge", "time in steps that counted over wall time, 0 to 1", ("job",)),
    "dlrover_steps": MetricFamily("gauge", "optimizer steps so far; falls if the job returns to a checkpoint", ("job",)),
    "dlrover_samples_per_second": MetricFamily("gauge", "throughput of all workers together", ("job",)),
    "dlrover_step_seconds": MetricFamily("gauge", "parts of a step in rank 0's newest window; they add up", ("job", "part")),
    "dlrover_measured_step_seconds": MetricFamily("gauge", "step time in rank 0's newest window", ("job",)),
    "dlrover_predicted_step_seconds": MetricFamily("gauge", "step time predicted for the present settings", ("job",)),
    "dlrover_memory_limit_ratio": MetricFamily("gauge", "highest memory of a worker over its limit", ("job",)),
    "dlrover_data_rows": MetricFamily("gauge", "rows of a stream trained on since its fit began", ("job", "stream")),
    "dlrover_data_rows_skipped": MetricFamily("gauge", "unreadable rows of a stream, skipped", ("job", "stream")),
    "dlrover_last_step_timestamp_seconds": MetricFamily("gauge", "Unix time of the newest record of progress", ("job",)),
    "dlrover_last_snapshot_timestamp_seconds": MetricFamily("gauge", "Unix time of the newest snapshot of tables", ("job",)),
    "dlrover_pool_jobs": MetricFamily("gauge", "jobs of a pool by state", ("pool", "state")),
    "dlrover_pool_budget": MetricFamily("gauge", "budget of a pool: cores, GPUs, MiB of memory", ("pool", "resource")),
    "dlrover_pool_used": MetricFamily("gauge", "budget that jobs hold", ("pool", "resource")),
    "dlrover_pool_decisions_total": MetricFamily("counter", "decisions of the process that decides", ("pool",)),
    "dlrover_pool_longest_wait_seconds": MetricFamily("gauge", "longest time that a waiting job has waited", ("pool",)),
    "dlrover_colocate_jobs": MetricFamily("gauge", "jobs of a queue by state", ("state",)),
    "dlrover_colocate_ended_total": MetricFamily("counter", "ended jobs of a queue by result", ("result",)),
    "dlrover_colocate_device_jobs": MetricFamily("gauge", "jobs with processes on a device", ("device",)),
    "dlrover_colocate_memory_bytes": MetricFamily("gauge", "host memory that jobs use, by device", ("device",)),
    "dlrover_colocate_memory_charged_bytes": MetricFamily("gauge", "host memory reserved for jobs", ("device",)),
    "dlrover_colocate_memory_limit_bytes": MetricFamily("gauge", "host memory for jobs", ("device",)),
}
"""Every metric by its name. Labels are bounded: none names a worker or a host."""


@dataclass(frozen=True)
class Sample:
    """One value of a metric."""

    name: str  # key of `METRICS`
    value: float
    labels: tuple[str, ...] = ()  # values, in the order of the family's labels


class MetricsError(Exception):
    """Metrics cannot be served. The message names the cause and the next move."""


# --- counters of a job's events ---------------------------------------------------------------------------------------------


class JobMeter:
    """Counts a job's events. Each is added once, in any number of calls."""

    def __init__(self) -> None:
        self.time = TimeLedger()
        self.rounds: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self.stall_s: defaultdict[str, float] = defaultdict(float)
        self.num_failures = 0
        self.newest: StepProfile | None = None  # newest window of rank 0
        self.streams: list[EventRecord] = []  # events of streams
        self._lost: set[str] = set()
        self._longest: dict[int, float] = {}  # longest stall by round
        self._kinds: dict[int, str] = {}  # kind of each round
        self._predicted: dict[Settings, float] = {}

    @property
    def num_lost(self) -> int:
        return max(len(self._lost), self.rounds["loss"])

    @property
    def predicted_step_s(self) -> float | None:
        """Predicted step time with the settings of the newest window; None: nothing was predicted for them."""
        return self._predicted.get(settings_of(self.newest)) if self.newest is not None else None

    def add(self, records: Iterable[EventRecord]) -> None:
        """Count events. Unreadable ones are skipped."""
        for record in records:
            self.time.begin(record.at)
            with contextlib.suppress(RecordError, ValueError, KeyError, TypeError):
                self._count(record, content_of(record))

    def _count(self, record: EventRecord, event: Event) -> None:
        match event:
            case RoundFormed():
                if event.number not in self._kinds:
                    kind = self._kinds[event.number] = _known(event.kind)
                    self.rounds[kind] += 1
                if event.kind != "stop":
                    self.time.ended_at = 0.0
            case TrainingStalled():
                self._stalled(event, record.at)
            case WindowMeasured():
                window = from_fields(StepProfile, event.document, "a window")
                if window.global_rank == 0:
                    self.newest = window
                    self.time.measured(window)
            case DecisionMade():
                decision = Decision.from_data(event.document)
                self._predicted[decision.chosen] = decision.predicted_step_time_s
            case WorkerLost():
                self._lost.add(event.worker_id)
            case WorkerFailed():
                self.num_failures += 1
            case FitFinished():
                self.time.finished()
                self.time.ended_at = record.at
            case JobFailed() | RecordIgnored():
                if isinstance(event, JobFailed):
                    self.time.ended_at = record.at
            case StreamOpened():
                self.streams.append(record)
            case _ if record.kind == "skipped":
                self.streams.append(record)

    def _stalled(self, event: TrainingStalled, at: float) -> None:
        """Count a stall once: every survivor reports its own, and the longest counts."""
        if not 0 <= event.seconds < float("inf"):
            return
        kind = _known(event.kind or self._kinds.get(event.round, ""))
        if kind == "start":  # the wait for the first workers is part of the startup
            return
        before = self._longest.get(event.round)
        self.stalls[kind] += before is None
        self.stall_s[kind] += max(0.0, event.seconds - (before or 0.0))
        self._longest[event.round] = max(event.seconds, before or 0.0)
        self.time.stalled(event.round, event.seconds, at)


def _known(kind: str) -> str:
    return kind if kind in ROUND_KINDS else "other"


# --- one job ------------------------------------------------------------------------------------------------------------------


@dataclass
class JobFigures:
    """A job at one moment, as far as its metrics show it."""

    run_id: str
    view: JobView
    meter: JobMeter
    progress: ProgressRecord | None = None
    snapshot: SnapshotRecord | None = None
    profiles: Mapping[str, StepProfile] = field(default_factory=dict)  # newest window of each worker

    def samples(self, now: float) -> Iterator[Sample]:
        """Yield the values of the job's metrics. A figure that is unknown has none."""
        job, round_, plan = self.view.job, self.view.round, self.view.plan
        name = (self.run_id,)
        phase = self.phase
        for each in PHASES:
            yield Sample("dlrover_job_phase", float(each == phase), (*name, each))
        members = set(round_.members) if round_ is not None else set()
        present = members & self.view.workers.keys() if phase in ("starting", "training") else set()
        yield Sample("dlrover_workers", len(present), name)
        joining = [each for each in self.view.workers.values() if each.state in ("standby", "ready") or not members]
        yield Sample("dlrover_workers_joining", len(joining), name)
        if plan is not None:
            yield Sample("dlrover_workers_wanted", plan.num_workers, name)
        if job is not None:
            yield Sample("dlrover_workers_min", job.min_workers, name)
            yield Sample("dlrover_workers_max", job.max_workers, name)
        yield from self._counted(name)
        yield from self._time(name, now)
        yield from self._speed(name, members)
        yield from self._rows(name)
        if self.snapshot is not None:
            yield Sample("dlrover_last_snapshot_timestamp_seconds", self.snapshot.at, name)

    @property
    def phase(self) -> str:
        phase: str = self.view.job.phase if self.view.job is not None else "not started"
        is_there = self.view.workers or self.view.agents
        return "stopped" if phase in ("starting", "training") and not is_there else phase

    def _counted(self, name: tuple[str]) -> Iterator[Sample]:
        meter = self.meter
        for kind in ROUND_KINDS:
            yield Sample("dlrover_rounds_total", meter.rounds[kind], (*name, kind))
            if kind != "start":
                yield Sample("dlrover_stalls_total", meter.stalls[kind], (*name, kind))
                yield Sample("dlrover_stall_seconds_total", meter.stall_s[kind], (*name, kind))
        yield Sample("dlrover_workers_lost_total", meter.num_lost, name)
        yield Sample("dlrover_worker_failures_total", meter.num_failures, name)

    def _time(self, name: tuple[str], now: float) -> Iterator[Sample]:
        split = self.meter.time.split(now, self.progress.at if self.progress is not None else 0.0)
        lost = {"startup": split.startup_s, "stall": sum(self.meter.stall_s.values()), "repeated": split.repeated_s}
        for cause, seconds in lost.items():
            yield Sample("dlrover_lost_seconds_total", seconds, (*name, cause))
        yield Sample("dlrover_productive_seconds", split.productive_s, name)
        yield Sample("dlrover_wall_seconds", split.wall_s, name)
        yield Sample("dlrover_goodput_ratio", split.goodput, name)

    def _speed(self, name: tuple[str], members: set[str]) -> Iterator[Sample]:
        windows = [window for worker, window in self.profiles.items() if worker in members]
        newest = max([*(w for w in windows if w.global_rank == 0), self.meter.newest], key=_end_of)
        if newest is not None:
            yield Sample("dlrover_measured_step_seconds", newest.step_time_s, name)
            for part in STEP_PARTS:
                yield Sample("dlrover_step_seconds", getattr(newest, f"{part}_s"), (*name, part))
        if (predicted_s := self.meter.predicted_step_s) is not None:
            yield Sample("dlrover_predicted_step_seconds", predicted_s, name)
        ratios = [w.peak_memory_bytes / w.memory_limit_bytes for w in windows if w.memory_limit_bytes > 0]
        if ratios:
            yield Sample("dlrover_memory_limit_ratio", max(ratios), name)
        if self.progress is not None:
            rate = self.progress.samples_per_s if self.phase == "training" else 0.0
            yield Sample("dlrover_samples_per_second", rate, name)
            yield Sample("dlrover_steps", self.progress.step, name)
        at = max(self.progress.at if self.progress is not None else 0.0, _end_of(newest))
        if at:
            yield Sample("dlrover_last_step_timestamp_seconds", at, name)

    def _rows(self, name: tuple[str]) -> Iterator[Sample]:
        found = read_streams(self.meter.streams)
        if found is None:
            return
        for stream in found.streams[:MAX_STREAMS]:
            label = (*name, str(stream.number))
            yield Sample("dlrover_data_rows_skipped", skipped_rows(self.meter.streams, stream).num_rows, label)
            if self.progress is not None and self.progress.epoch >= stream.epoch:
                batches = (self.progress.epoch - stream.epoch) * stream.epoch_batches + self.progress.batch
                yield Sample("dlrover_data_rows", batches * stream.batch_size, label)


def _end_of(window: StepProfile | None) -> float:
    return window.at if window is not None else 0.0


class JobReader:
    """Decodes a job's records again and again, its events and windows once each."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._forget()

    def _forget(self) -> None:
        self._revision = self._events_until = 0
        self._meter = JobMeter()
        self._profiles: dict[str, StepProfile] = {}
        self._progress: ProgressRecord | None = None
        self._snapshot: SnapshotRecord | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the job's history has been read once."""
        return self._revision > 0

    def begin(self, client: EtcdClient) -> None:
        """Read the job's history so far, in parts. Raise EtcdError if etcd does not answer."""
        revision, entries = client.get_prefix(self.keys.events, per_answer=LINES_PER_ANSWER)
        self._meter.add(read_events([entry for entry in entries if entry.mod_revision <= revision]))  # the others follow
        self._events_until = revision
        self._revision = 1  # the other records are read from the beginning

    @property
    def ranges(self) -> dict[str, int]:
        """The prefixes to read next, and the revisions after which their keys were written."""
        keys, since = self.keys, self._revision
        return {keys.live: 0, keys.events: self._events_until, keys.profiles: since, keys.progress: since, keys.snapshot: since}

    def take(self, found: Mapping[str, tuple[int, list[KeyValue]]]) -> JobFigures | None:
        """Return the job's present figures, given the answer for its `ranges`; None if its history must be read again."""
        keys = self.keys
        revision = found[keys.live][0]
        if revision < self._revision:  # etcd was restored from a backup, and counts from there
            self._forget()
            return None
        self._revision, self._events_until = revision, found[keys.events][0]
        self._meter.add(read_events(found[keys.events][1]))
        for entry in found[keys.profiles][1]:
            if (window := readable(StepProfile, entry)) is not None:
                self._profiles[entry.key.removeprefix(keys.profiles)] = window
        self._progress = _of_key(ProgressRecord, found[keys.progress][1], keys.progress) or self._progress
        self._snapshot = _of_key(SnapshotRecord, found[keys.snapshot][1], keys.snapshot) or self._snapshot
        view = read_view({entry.key: entry for entry in found[keys.live][1]}, keys)
        self._profiles = {worker: window for worker, window in self._profiles.items() if worker in view.workers}
        return JobFigures(keys.run_id, view, self._meter, self._progress, self._snapshot, self._profiles)


def _of_key(record_type: type[Any], entries: Sequence[KeyValue], key: str) -> Any:
    return next((readable(record_type, entry) for entry in entries if entry.key == key), None)


class JobsReader:
    """Reads several jobs of one etcd, in few requests: one for `MOST_RANGES` of `EtcdClient.read_prefixes`."""

    def __init__(self) -> None:
        self._readers: dict[Keys, JobReader] = {}

    def read(self, client: EtcdClient, jobs: Sequence[Keys]) -> list[JobFigures]:
        """Return the figures of jobs. The histories of new jobs are read first, those of `MAX_BEGUN` jobs in each call.

        Raises:
            EtcdError: etcd does not answer.
        """
        self._readers = {keys: self._readers.get(keys) or JobReader(keys) for keys in jobs}
        for reader in [reader for reader in self._readers.values() if not reader.has_begun][:MAX_BEGUN]:
            reader.begin(client)
        readers = [reader for reader in self._readers.values() if reader.has_begun]
        found = client.read_prefixes({prefix: since for reader in readers for prefix, since in reader.ranges.items()})
        return [figures for reader in readers if (figures := reader.take(found)) is not None]


class JobMetrics:
    """The samples of one job, read from its etcd when they are asked for."""

    def __init__(self, place: JobPlace) -> None:
        self._place = place
        self._reader = JobsReader()
        self._client: EtcdClient | None = None

    def __call__(self) -> list[Sample]:
        """Read the job. Raise EtcdError if its etcd does not answer."""
        if self._client is None:
            self._client = EtcdClient(EtcdConfig(self._place.endpoint, timeout_s=TIMEOUT_S, **self._place.access))
        figures = self._reader.read(self._client, [self._place.keys])
        size, now = size_of(self._client.caller), time.time()
        return [Sample("dlrover_etcd_size_bytes", size), *(sample for each in figures for sample in each.samples(now))]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


# --- answers to scrapes -------------------------------------------------------------------------------------------------------


def families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """Yield samples as metrics of `prometheus_client`, in the order of `METRICS`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    for name, family in METRICS.items():
        if name not in by_name:
            continue
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(name, family.text, labels=family.labels)
        for sample in by_name[name]:
            metric.add_metric(sample.labels, sample.value)
        yield metric


class Exporter:
    """Collects samples on a scrape. Concurrent and frequent scrapes share one read.

    Args:
        read: returns all samples. Raises EtcdError if they cannot be read; the page then has `dlrover_up 0` alone.
        every_s: minimum seconds between two reads.
    """

    def __init__(self, read: Callable[[], list[Sample]], every_s: float = READ_EVERY_S) -> None:
        self._read = read
        self._every_s = every_s
        self._lock = threading.Lock()
        self._newest: list[Sample] = []
        self._read_at = -every_s

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; the interface of a collector of `prometheus_client`."""
        with self._lock:
            if time.monotonic() - self._read_at >= self._every_s:
                self._newest = self._samples()
                self._read_at = time.monotonic()
            samples = self._newest
        yield from families(samples)

    def _samples(self) -> list[Sample]:
        try:
            return [Sample("dlrover_up", 1.0), *self._read()]
        except EtcdError as error:
            log.info("nothing to scrape for now: %s", error)
        except Exception:  # a page without figures is found by an alert, a scrape that fails only by its absence
            log.exception("metrics cannot be read")
        return [Sample("dlrover_up", 0.0)]


def registry_of(exporter: Exporter) -> CollectorRegistry:
    """Return a registry with this exporter alone: metrics of the script, or of other packages, are not ours to publish.

    Raises:
        MetricsError: prometheus-client is not installed.
    """
    try:
        from prometheus_client.registry import CollectorRegistry
    except ImportError as error:
        raise MetricsError(
            f"metrics need the package prometheus-client, which cannot be imported ({error}); "
            "install it with: pip install 'lightning-dlrover[metrics]'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    return registry


def page_of(registry: CollectorRegistry) -> bytes:
    """Collect the metrics, and return the page of a scrape."""
    from prometheus_client import generate_latest

    return generate_latest(registry)


@contextlib.contextmanager
def serve_metrics(address: tuple[str, int], read: Callable[[], list[Sample]], every_s: float = READ_EVERY_S) -> Iterator[str]:
    """Answer scrapes at an address, and yield the URL of the page.

    Args:
        address: host and port; port 0: any free one.
        read: see `Exporter`; called in a thread of the server.
        every_s: minimum seconds between two reads.

    Raises:
        MetricsError: the address cannot be used, or prometheus-client is not installed.
    """
    registry = registry_of(Exporter(read, every_s))
    from prometheus_client import start_http_server

    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise MetricsError(f"--metrics {host}:{port} cannot be used: {error.strerror}; choose another port") from error
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(TIMEOUT_S)
