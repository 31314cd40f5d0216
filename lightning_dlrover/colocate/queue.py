"""Run a queue of jobs: the Python side of `dlrover colocate`, and its live table."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK, Interrupted, signals_as_exceptions
from lightning_dlrover.cli.lookup import notify_destinations
from lightning_dlrover.colocate.devices import GpuWatch, find_gpus
from lightning_dlrover.colocate.dispatcher import Dispatcher, Rules, end_former
from lightning_dlrover.colocate.journal import (
    Added,
    Ended,
    JobSpec,
    Journal,
    JournalError,
    Record,
    Started,
    read_jobs,
    read_records,
)
from lightning_dlrover.colocate.report import Summary, summarize, summary_text, write_report
from lightning_dlrover.colocate.running import WatchedJob
from lightning_dlrover.colocate.scheduler import Knowledge, Scheduler, jobs_per_core
from lightning_dlrover.colocate.tenants import LocalDevice, Memory, gpus_of, local_devices
from lightning_dlrover.output import complain, counted, lacks_matplotlib, printable, say, show
from lightning_dlrover.report.metrics import Sample, serve_metrics
from lightning_dlrover.report.notify import WORDS, Destination, FileCursors, Kind, Notification, Notifier
from lightning_dlrover.tuning.nvml import load_nvml

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

log = logging.getLogger(__name__)

REPORT = "report.html"
NOTIFIED = "notified"
"""File with the number of records whose notifications were sent."""

DRAW_S = 0.5
MAX_ROWS = 30


class LiveTable:
    """Shows a dispatcher's jobs: as a table that changes on a terminal, else one line for each start and end.

    Use as a context manager.
    """

    def __init__(self) -> None:
        self._drawn_s = 0.0
        self._live: Live | None = None
        self._started: set[tuple[str, int]] = set()  # jobs and attempts that were shown
        self._num_ended = 0
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def shown(self, dispatcher: Dispatcher) -> None:
        """Draw the present state, or print the changes."""
        for line in self._changes(dispatcher):
            if self._live is not None:
                self._live.console.print(line, markup=False, highlight=False)
            else:
                say(printable(line))
        now = time.monotonic()
        if self._live is not None and now - self._drawn_s >= DRAW_S:
            self._drawn_s = now
            self._live.update(_table(dispatcher, now), refresh=True)

    def _changes(self, dispatcher: Dispatcher) -> list[str]:
        lines = []
        ended = dispatcher.past[self._num_ended :]
        self._num_ended = len(dispatcher.past)
        for job in [*ended, *dispatcher.running.values()]:
            if (key := (job.spec.name, job.attempt)) not in self._started:
                self._started.add(key)
                again = f" again, attempt {job.attempt}" if job.attempt > 1 else ""
                lines.append(f"{job.spec.name}: started on {job.device}{again}")
        # The end of a job is missing where it could not be written.
        ends = [dispatcher.ends.get((job.spec.name, job.attempt)) for job in ended]
        return lines + [_end_line(end) for end in ends if end is not None]


_OF_RESULTS: dict[str, Kind] = {"done": "finished", "failed": "failed"}
"""Events of the results of jobs; all others are `stopped`: the job will start again."""


class QueueNotifications:
    """Sends the notifications of a queue. Positions are numbers of records in its journal. Use as a context manager.

    Args:
        num_before: records that an earlier call has left.
    """

    def __init__(self, folder: Path, num_before: int, destinations: Sequence[Destination], hurry: threading.Event) -> None:
        self._folder = folder
        self._notifier = Notifier(destinations, FileCursors(folder / NOTIFIED), num_before, hurry)
        self._num_seen = self._notifier.begin

    def __enter__(self) -> QueueNotifications:
        return self

    def __exit__(self, *_: object) -> None:
        self._notifier.close()

    def look(self, queue: str, records: Sequence[Record]) -> None:
        """Queue the notifications of new records. Returns at once."""
        for number, record in enumerate(records[self._num_seen :], self._num_seen + 1):
            found = self._notification(f"{queue}/{number}", record)
            if found is not None:
                self._notifier.put(number, found)
        self._num_seen = max(self._num_seen, len(records))

    def put_last(self, event: Kind, reason: str) -> None:
        """Queue the notification of the whole queue's end."""
        text = f"queue {self._folder} {WORDS[event]}: {reason}"
        id_ = f"{self._folder.name}/{time.time_ns():020d}-end"
        self._notifier.put(self._num_seen, Notification(id_, event, "colocate", text, time.time(), reason=reason), is_last=True)

    def _notification(self, id_: str, record: Record) -> Notification | None:
        if isinstance(record, Started):
            text = f"job {record.job} has started on {record.device}"
            text += f" again, attempt {record.attempt}" if record.attempt > 1 else ""
            return Notification(id_, "started", "colocate", text, record.at, record.job)
        if isinstance(record, Ended):
            event = _OF_RESULTS.get(record.result, "stopped")
            text = f"job {record.job} {WORDS[event]} after {record.run_s:.1f} s"
            text += f": {record.reason}" if record.reason else ""
            return Notification(id_, event, "colocate", text, record.at, record.job, reason=record.reason or None)
        return None


def _end_line(ended: Ended) -> str:
    paused = f", paused {ended.paused_s:.1f} s" if ended.paused_s >= 0.05 else ""
    line = f"{ended.job}: {ended.result} after {ended.run_s:.1f} s{paused}, peak {ended.peak_bytes >> 20} MiB"
    if ended.gpu_peak_bytes:
        line += f", {ended.gpu_peak_bytes >> 20} MiB of the GPU"
    return f"{line}: {ended.reason}" if ended.reason else line


def _table(dispatcher: Dispatcher, now: float) -> Table:
    from rich.table import Table

    waiting = dispatcher.waiting()
    done = len(dispatcher.ended)
    table = Table(title=f"{len(dispatcher.running)} with processes, {len(waiting)} waiting, {done} ended", title_justify="left")
    for name in ("job", "state", "device"):
        table.add_column(name)
    for name in ("time", "steps", "memory / charge (MiB)", "cores"):
        table.add_column(name, justify="right")
    for job in sorted(dispatcher.running.values(), key=lambda job: job.at_s)[:MAX_ROWS]:
        table.add_row(*_cells(job, now))
    for each in waiting[: max(0, MAX_ROWS - len(dispatcher.running))]:
        sizes = each.expected.get("gpu") or each.expected.get("cpu", {})
        expected = ", ".join(_size(memory, f"{size >> 20}") for memory, size in sizes.items() if size) or "unknown"
        table.add_row(each.name, "waiting", "", f"{max(0.0, now - each.submitted_s):.0f} s", "", expected, "")
    return table


def _cells(job: WatchedJob, now: float) -> tuple[str, ...]:
    state = "paused for memory" if job.short_of else job.phase
    left = f" of {job.num_steps + job.steps_left:,}" if job.steps_left is not None else ""
    steps = f"{job.num_steps:,}{left}" if job.reports else ""
    cores = f"{job.cores:.1f}" if job.is_active else ""
    memory = ", ".join(
        _size(each, f"{job.resident_bytes(each) >> 20} / {charge >> 20}") for each, charge in job.charges.items()
    )
    return job.spec.name, state, job.device, f"{now - job.at_s:.0f} s", steps, memory, cores


def _size(memory: Memory, text: str) -> str:
    return f"GPU {text}" if memory == "gpu" else text


class QueueMetrics:
    """The samples of a queue for Prometheus, as of the dispatcher's last look: a scrape never waits for it, nor delays it."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._taken_s = 0.0

    def __call__(self) -> list[Sample]:
        return self._samples

    def shown(self, dispatcher: Dispatcher) -> None:
        """Note the present state, at most once a second."""
        now = time.monotonic()
        if now - self._taken_s >= 1.0:
            self._taken_s, self._samples = now, _samples(dispatcher)


def _samples(dispatcher: Dispatcher) -> list[Sample]:
    running = list(dispatcher.running.values())
    paused = sum(bool(job.short_of) for job in running)
    states = {"waiting": len(dispatcher.waiting()), "running": len(running) - paused, "paused": paused}
    found = [Sample("dlrover_colocate_jobs", count, (state,)) for state, count in states.items()]
    results = Counter(ended.result for ended in dispatcher.ends.values())
    for result in ("done", "failed", "evicted", "stopped"):
        found.append(Sample("dlrover_colocate_ended_total", results[result], (result,)))
    for name, device in dispatcher.devices.items():
        here = [job for job in running if job.device == name]
        figures = {
            "device_jobs": len(here),
            "memory_bytes": sum(job.resident_bytes("host") for job in here),
            "memory_charged_bytes": sum(job.charges.get("host", 0) for job in here),
            "memory_limit_bytes": device.memory_bytes,
        }
        found += [Sample(f"dlrover_colocate_{figure}", value, (name,)) for figure, value in figures.items()]
    return found


def run_queue(
    jobs: Sequence[JobSpec],
    folder: Path,
    *,
    policy: str = "complementary",
    devices: Sequence[str] = ("cpu",),
    memory_bytes: int = 0,
    max_parallel: int = 0,
    profiles: Sequence[Path] = (),
    max_wait_s: float = 3600.0,
    seed: int = 0,
    rules: Rules | None = None,
    shown: Callable[[Dispatcher], None] = lambda _: None,
    hurry: threading.Event | None = None,
) -> Summary:
    """Run jobs side by side to their ends, and write `report.html` into the folder.

    The queue of an earlier call's folder continues: finished jobs stay finished. Call it from the main thread: the jobs end
    with it.

    Args:
        jobs: commands with their working folders and variables.
        folder: for the journal, the jobs' output and the report.
        policy: a name in `colocate/policies.py`.
        devices: `cpu`, sets of cores such as `cpu:0-3`, or GPUs such as `gpu:0` or, with its cores, `gpu:0:0-7`.
        memory_bytes: host memory for all jobs; 0: most of the free memory.
        max_parallel: maximum number of concurrent jobs per device; 0: twice its cores, or four times with `complementary`; on
            a GPU no more than 8, or 16.
        profiles: folders of earlier queues; their measurements count, too.
        max_wait_s: a job that waits longer goes first.
        seed: for the policy `random_sets`.
        shown: called after each look at the jobs.
        hurry: when set, jobs that end get no more grace period.

    Raises:
        ValueError: a device, the policy, a folder of an earlier queue or a changed job cannot be used.
        OSError: the folder cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from lightning_dlrover.colocate import read_jobs
        >>> jobs = read_jobs(Path("jobs.yaml"))  # doctest: +SKIP
        >>> summary = run_queue(jobs, Path("queue"), devices=["cpu:0-3"])  # starts the jobs' processes  # doctest: +SKIP
    """
    wanted = gpus_of(devices)
    nvml = load_nvml() if wanted else None
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(folder))
        end_former(journal.queue)  # their memory is free for this queue
        gpus = find_gpus(nvml, wanted) if nvml is not None else {}
        devices = _used_devices(devices, [*jobs, *(record.spec for record in journal.records if isinstance(record, Added))])
        local = local_devices(devices, memory_bytes, max_parallel, jobs_per_core(policy), gpus=gpus)
        _refuse_too_large(jobs, local)
        knowledge = Knowledge(device_kinds={device.name: device.kind for device in local})
        for earlier in profiles:
            knowledge.recall(read_records(earlier))
        shared = [device.gpu for device in local if device.gpu is not None]
        watch = stack.enter_context(GpuWatch(nvml, shared)) if shared else None
        knowledge.recall(journal.records)
        scheduler = Scheduler(policy, knowledge, seed, max_wait_s, max(device.most_jobs for device in local))
        dispatcher = Dispatcher(folder, journal, local, scheduler, knowledge, rules, shown, hurry, gpu_watch=watch)
        dispatcher.add(jobs)
        try:
            dispatcher.run()
        finally:
            shown(dispatcher)
            try:
                write_report(folder / REPORT, journal.records)
            except ModuleNotFoundError as error:  # the jobs have run all the same
                log.warning("no report was written: %s", lacks_matplotlib(error) or error)
        return summarize(journal.records)


def _refuse_too_large(jobs: Sequence[JobSpec], devices: Sequence[LocalDevice]) -> None:
    """Refuse a job that states more memory than any device has.

    Raises:
        ValueError: with both figures.
    """
    for job in jobs:
        able = [device for device in devices if job.device in ("any", device.where)]
        for name, needed, has in (
            ("memory", job.memory_bytes, max((device.memory_bytes for device in able), default=0)),
            ("gpu_memory", job.gpu_memory_bytes, max((device.gpu_bytes for device in able), default=0)),
        ):
            if has and needed > has:
                raise ValueError(
                    f"job {job.name!r}: {name} is {needed >> 20} MiB, and the largest device has {has >> 20} MiB for jobs; "
                    "state the job's real peak, or run it elsewhere"
                )


def _used_devices(devices: Sequence[str], jobs: Sequence[JobSpec]) -> Sequence[str]:
    """Leave `cpu` out if all jobs ask for GPUs, which then get its share of the host."""
    if "cpu" not in devices or not gpus_of(devices) or any(job.device != "gpu" for job in jobs):
        return devices
    log.warning("all jobs have `device: gpu`: they get all cores")
    return [device for device in devices if device != "cpu"]


def colocate_command(options: argparse.Namespace) -> int:
    """Run all jobs of a file to their ends, and write the report."""
    jobs = read_jobs(options.jobs)
    notify = notify_destinations(options)
    hurry = threading.Event()
    exit_code = EXIT_OK
    num_starts = _num_starts(options.out)
    metrics = QueueMetrics()
    with LiveTable() as table, ExitStack() as stack:
        if options.metrics is not None:
            say(f"metrics at {stack.enter_context(serve_metrics(options.metrics, metrics))}")
        notifications = None
        if notify:
            options.out.mkdir(parents=True, exist_ok=True)
            notifications = QueueNotifications(options.out, _num_records(options.out), notify, hurry)
            stack.enter_context(notifications)

        def shown(dispatcher: Dispatcher) -> None:
            table.shown(dispatcher)
            metrics.shown(dispatcher)
            if notifications is not None:
                notifications.look(dispatcher.journal.queue, dispatcher.journal.records)

        try:
            with signals_as_exceptions(hurry):
                run_queue(
                    jobs,
                    options.out,
                    policy=options.policy,
                    devices=options.devices,
                    memory_bytes=(options.memory or 0) << 20,
                    max_parallel=options.max_parallel,
                    profiles=options.profiles,
                    max_wait_s=options.max_wait,
                    seed=options.seed,
                    rules=Rules(probe_s=options.probe, grace_s=options.grace, hang_s=options.hang_after),
                    shown=shown,
                    hurry=hurry,
                )
        except Interrupted as interrupted:
            exit_code = 128 + interrupted.signal_number
        summary = summarize(read_records(options.out))
        if notifications is not None and (exit_code != EXIT_OK or _num_starts(options.out) != num_starts):
            is_done = summary.num_done == len(summary.jobs)
            event: Kind = "stopped" if exit_code != EXIT_OK else "finished" if is_done else "failed"
            notifications.put_last(event, f"{summary.num_done} of {counted(len(summary.jobs), 'job')} done")
    if exit_code != EXIT_OK:
        left = sum(not job.result for job in summary.jobs)
        have = "has" if left == 1 else "have"
        complain(f"interrupted; the same command continues with {counted(left, 'job')} that {have} not ended")
    show(summary_text(summary))
    if exit_code == EXIT_OK and _num_starts(options.out) == num_starts:
        show("nothing was left to do: all jobs had ended before; another --out runs them again")
    show(f"report: {options.out / REPORT}")
    if exit_code == EXIT_OK and summary.num_done < len(summary.jobs):
        return EXIT_FAILED
    return exit_code


def _num_records(folder: Path) -> int:
    try:
        return len(read_records(folder))
    except JournalError:
        return 0


def _num_starts(folder: Path) -> int:
    try:
        return sum(isinstance(record, Started) for record in read_records(folder))
    except JournalError:
        return 0
