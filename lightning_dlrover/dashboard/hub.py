"""What all viewers of the page see: made once for all of them, and sent as differences.

A `Hub` turns the pictures of one `Watcher` into encoded parts, each with the number of the change that made it. A viewer that
has seen the change n gets the parts with a higher number, so neither the number of viewers nor that of workers multiplies the
work. Without viewers nothing is computed. The hub reads only; it asks etcd for nothing that the watcher does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_dlrover.pool.budget import Resources
from lightning_dlrover.pool.view import POOLS_FOLDER, BrainRecord, GrantRecord, MemberRecord
from lightning_dlrover.rdzv.etcd.types import KeyValue
from lightning_dlrover.rdzv.job.journal import readable
from lightning_dlrover.report.view_model import ShownJob, ShownWorker, clean
from lightning_dlrover.report.watcher import SeenJob, SeenJobs, SourceState, Watcher

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Minimum seconds between two messages to a viewer."""

HEARTBEAT_S = 5.0
"""Seconds after which a viewer gets a message even if nothing has changed, so that it sees that the server lives."""

MAX_WORKERS = 200
"""Maximum number of a job's workers that are sent; those that need attention first, and the others by rank."""

MAX_SPARK = 40
"""Points of the small chart in the list of jobs."""

SLOW = 1.15
"""Time of a worker's own work, relative to the others, above which it needs attention."""

SINGLE_PARTS = ("run_id", "state", "message", "newest_at", "started_at", "num_workers", "wanted_workers", "min_workers")
MORE_PARTS = ("max_workers", "workers_per_node", "global_batch_size", "target", "controller", "held_up", "progress")
FIGURES = ("samples_per_s", "parts", "series", "joiners", "rounds", "events", "plan", "prediction", "sizes", "num_rounds")
LAST_PARTS = ("num_losses", "stall_s", "goodput", "snapshot", "streams", "problems")
JOB_PARTS = (*SINGLE_PARTS, *MORE_PARTS, *FIGURES, *LAST_PARTS)
"""Fields of `ShownJob` that the page of a job gets. Its workers are sent one by one."""


def encoded(value: Any) -> bytes:
    """Return compact JSON. The texts of pictures hold no characters that JSON or a stream of events could not carry."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass
class Parts:
    """Encoded parts by name, each with the number of the change that made it, and the names that are gone."""

    parts: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)

    def replace(self, values: Mapping[str, Any], number: int) -> bool:
        """Note the present values. Return whether any has changed."""
        has_changed = False
        for name, value in values.items():
            content = encoded(value)
            if name not in self.parts or self.parts[name][1] != content:
                self.parts[name] = number, content
                has_changed = True
        for name in self.parts.keys() - values.keys():
            del self.parts[name]
            self.gone[name] = number
            has_changed = True
        self.gone = {name: at for name, at in self.gone.items() if name not in values}
        return has_changed

    def since(self, seen: int) -> tuple[list[tuple[str, bytes]], list[str]]:
        """Return the parts that changed after the change `seen`, and the names that have gone since."""
        changed = [(name, content) for name, (number, content) in self.parts.items() if number > seen]
        return changed, [name for name, number in self.gone.items() if number > seen]


@dataclass
class _Page:
    """What one page shows: fields, and items that change one by one: the jobs of the list, or the workers of a job."""

    fields: Parts = field(default_factory=Parts)
    items: Parts = field(default_factory=Parts)
    num_items: int = 0  # those that are not sent included
    source: bytes = b"null"
    _source_number: int = 0
    _source_state: tuple[object, object] = (None, None)

    def note_source(self, source: Mapping[str, Any], number: int) -> None:
        """Note the state of etcd. Its time alone is no news: a heartbeat carries it."""
        self.source = encoded(source)
        if (state := (source["is_connected"], source["problem"])) != self._source_state:
            self._source_state, self._source_number = state, number

    def has_news(self, seen: int) -> bool:
        """Return whether anything has changed after the change `seen`."""
        return self._source_number > seen or any(self.fields.since(seen)) or any(self.items.since(seen))


def job_row(job: ShownJob) -> dict[str, Any]:
    """Return the line of a job in the list of all jobs."""
    step = max(1, -(-len(job.series) // MAX_SPARK))
    names = ("run_id", "state", "num_workers", "wanted_workers", "min_workers", "max_workers", "samples_per_s", "goodput")
    return {
        **{name: getattr(job, name) for name in names},
        "progress": _progress(job),
        "spark": [[round(point.at, 1), round(point.samples_per_s, 2)] for point in job.series[::step]],
        "last_event": job.last_event,
    }


def _progress(job: ShownJob) -> dict[str, Any] | None:
    """Return the progress of a job. The time left is rounded: a figure that changes every second would be sent every second."""
    if job.progress is None:
        return None
    left_s = job.progress.seconds_left
    return asdict(job.progress) | {"seconds_left": float(f"{left_s:.3g}") if left_s is not None else None}


def shown_workers(job: ShownJob) -> list[ShownWorker]:
    """Return the workers to show: all, or in a large job those that need attention and the first of the others."""
    if len(job.workers) <= MAX_WORKERS:
        return list(job.workers)
    return sorted(job.workers, key=lambda worker: not _needs_attention(worker))[:MAX_WORKERS]


def _needs_attention(worker: ShownWorker) -> bool:
    is_slow = worker.slow_factor is not None and worker.slow_factor > SLOW
    return is_slow or worker.rank is None or worker.state != "active" or worker.full_at is not None


def pool_rows(entries: Mapping[str, KeyValue]) -> list[dict[str, Any]]:
    """Return all pools, from the records below `.pools/`: the budget, the jobs that run, and the queue in order.

    Args:
        entries: by key.
    """
    by_pool: dict[str, dict[str, KeyValue]] = {}
    for key, entry in entries.items():
        pool, slash, path = key.partition(f"/{POOLS_FOLDER}/")[2].partition("/")
        if slash and not pool.startswith("."):
            by_pool.setdefault(pool, {})[path] = entry
    return [_pool(name, found) for name, found in sorted(by_pool.items())]


def _pool(name: str, entries: Mapping[str, KeyValue]) -> dict[str, Any]:
    brain = readable(BrainRecord, entries.get("brain"))
    members = _folder(entries, "members/", MemberRecord)
    grants = _folder(entries, "grants/", GrantRecord)
    used = Resources()
    rows = []
    for job in sorted({*members, *grants}):
        member, grant = members.get(job), grants.get(job) or GrantRecord("waiting")
        needs = Resources(member.cores, member.gpus, member.memory_mb) if member is not None else None
        used += (needs or Resources(grant.cores, grant.gpus, grant.memory_mb)).times(grant.num_workers)
        rows.append(
            {
                "job": clean(job, 200),
                "state": {"granted": "running"}.get(grant.state, grant.state) if member is not None else "ending",
                "workers": grant.num_workers,
                "min_workers": member.min_workers if member is not None else grant.num_workers,
                "max_workers": member.max_workers if member is not None else grant.num_workers,
                "owner": clean(member.owner if member is not None else grant.owner, 80),
                "place": grant.place if grant.state == "waiting" else 0,
                "expected_at": grant.expected_at,
                "reason": clean(grant.reason),
            }
        )
    limits = Resources.within(brain.budget).limits if brain is not None else {}
    return {
        "pool": clean(name, 100),
        "decider": clean(f"process {brain.pid} on {brain.host}", 200) if brain is not None else "",
        "policy": clean(brain.policy, 40) if brain is not None else "",
        "budget": limits,
        "used": {resource: amount for resource, amount in vars(used).items() if resource in limits},
        "jobs": sorted(rows, key=lambda row: (not row["workers"], row["place"], row["job"])),
    }


def _folder(entries: Mapping[str, KeyValue], folder: str, kind: type[Any]) -> dict[str, Any]:
    found = {path.removeprefix(folder): readable(kind, entry) for path, entry in entries.items() if path.startswith(folder)}
    return {name: record for name, record in found.items() if record is not None}


class Hub:
    """The parts of all pages, and the streams of the viewers. For use in one event loop.

    Args:
        watcher: outlives the hub.
        extra: further fields of each message, such as whether viewers may change jobs.
    """

    def __init__(self, watcher: Watcher, extra: Mapping[str, Any] | None = None) -> None:
        self._watcher = watcher
        self._extra = encoded(dict(extra or {}))[1:-1]
        self._number = 0  # number of the newest change
        self._viewers: Counter[str | None] = Counter()  # by job; None: the list of all jobs
        self._pages: dict[str | None, _Page] = {}  # pages that have viewers
        self._looked = asyncio.Condition()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()  # held by the thread that changes pages, and by streams that read them
        self._is_closed = False
        self.num_looks = 0

    @property
    def num_viewers(self) -> int:
        return self._viewers.total()

    async def run(self) -> None:
        """Look at the watcher again and again, while there are viewers, until cancelled."""
        version = -1
        while True:
            await self._arrived.wait()
            if not self._viewers.total():
                self._arrived.clear()
                continue
            try:
                await asyncio.to_thread(self._look)
            except Exception:
                log.exception("the pages were not brought up to date; trying again")
            async with self._looked:
                self._looked.notify_all()
            began = time.monotonic()
            version = await asyncio.to_thread(self._watcher.wait_for_change, version, LOOK_EVERY_S)
            await asyncio.sleep(max(0.0, LOOK_EVERY_S - (time.monotonic() - began)))

    async def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        async with self._looked:
            self._looked.notify_all()

    async def stream(self, job: str | None) -> AsyncIterator[bytes]:
        """Yield the messages of one viewer, each as an event of a stream, until the hub is closed.

        Args:
            job: name; None: the list of all jobs.
        """
        self._viewers[job] += 1
        try:
            yield b"retry: 2000\n\n"
            self._arrived.set()
            seen, sent_at = -1, 0.0
            while not self._is_closed:
                # The first look for a viewer that is alone on its page may not have been made yet.
                message = b""
                with self._lock:
                    page = self._pages.get(job)
                    if page is not None and (page.has_news(seen) or time.monotonic() - sent_at >= HEARTBEAT_S):
                        message = self._message(page, seen)
                        seen, sent_at = self._number, time.monotonic()
                if message:
                    yield b"data: " + message + b"\n\n"
                async with self._looked:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._looked.wait(), HEARTBEAT_S)
        finally:
            self._viewers[job] -= 1
            if not self._viewers[job]:
                del self._viewers[job]
                self._pages.pop(job, None)

    def _look(self) -> None:
        """Bring the parts up to date. Called in a thread, never twice at a time."""
        self.num_looks += 1
        number = self._number + 1
        for name in list(self._viewers):
            try:
                seen = self._watcher.jobs() if name is None else self._watcher.job(name)
                pools = pool_rows(self._watcher.entries_below(f"{POOLS_FOLDER}/")) if name is None else []
                with self._lock:
                    page = self._pages.get(name) or _Page()
                    if isinstance(seen, SeenJobs):
                        self._show_all(seen, pools, page, number)
                    else:
                        self._show_job(seen, page, number)
                    self._pages[name] = page
            except Exception:  # one picture that cannot be made must not end the pages of all others
                log.exception("the page of %r was not brought up to date; trying again", name)
        with self._lock:
            self._number = number

    def _show_all(self, found: SeenJobs, pools: list[dict[str, Any]], page: _Page, number: int) -> None:
        page.items.replace({job.run_id: job_row(job) for job in found.jobs}, number)
        page.fields.replace({"pools": pools}, number)
        page.note_source(_source_of(found.sources, self._watcher.place), number)

    def _show_job(self, seen: SeenJob, page: _Page, number: int) -> None:
        job = seen.job
        page.fields.replace(job_fields(job) if job is not None else {}, number)
        page.items.replace({w.worker_id: asdict(w) for w in shown_workers(job)} if job is not None else {}, number)
        page.num_items = len(job.workers) if job is not None else 0
        page.note_source(asdict(seen.source), number)

    def _message(self, page: _Page, seen: int) -> bytes:
        """Join the parts that a viewer lacks. They are encoded already."""
        fields, gone_fields = page.fields.since(seen)
        items, gone = page.items.since(seen)
        members = [
            b'"now":%.3f' % time.time(),
            b'"full":' + (b"true" if seen < 0 or gone_fields else b"false"),
            b'"source":' + page.source,
            b'"set":{' + b",".join(encoded(name) + b":" + content for name, content in fields) + b"}",
            b'"items":[' + b",".join(content for _, content in items) + b"]",
            b'"gone":' + encoded(gone),
            b'"num_items":%d' % page.num_items,
        ]
        return b"{" + b",".join([*members, self._extra] if self._extra else members) + b"}"


def job_fields(job: ShownJob) -> dict[str, Any]:
    """Return the fields of a job that its page gets, as plain data."""
    return {name: _plain(getattr(job, name)) for name in JOB_PARTS} | {"progress": _progress(job)}


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _source_of(sources: Iterable[SourceState], place: str) -> dict[str, Any]:
    """Describe the state of all etcds: connected if each answers."""
    listed = list(sources)
    away = [each for each in listed if not each.is_connected]
    problem = "; ".join(f"{each.place}: {each.problem}" if len(listed) > 1 else each.problem for each in away)
    return {
        "place": place,
        "is_connected": not away,
        "as_of": min((each.as_of for each in away), default=time.time()),
        "problem": clean(problem),
    }
