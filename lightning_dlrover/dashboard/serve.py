"""`dlrover serve`: its options, without slow imports, and the parts that its server is made of."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dlrover.cli import options
from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.cli.options import add_place_options

if TYPE_CHECKING:
    from lightning_dlrover.dashboard.recommend import JobEvidence
    from lightning_dlrover.dashboard.server import Action
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.report.metrics import Sample
    from lightning_dlrover.report.status import JobPlace
    from lightning_dlrover.report.watcher import Watcher

DEFAULT_PORT = 8700


class ServeCommand:
    """`dlrover serve`."""

    summary = "show all jobs as a live web page, with metrics and recommendations"

    def add_options(self, command: argparse.ArgumentParser) -> None:
        add = command.add_argument
        command.description = (
            "Serve a live page of all jobs of an etcd, or of a folder of run folders, on this host. It only shows; with "
            "--token-file, whoever has the token may also change jobs. Also answers Prometheus at /metrics, and "
            "POST /v1/recommend (see /openapi.json). Ends with Ctrl-C."
        )
        text = f"port, or ADDRESS:PORT to be reached from other hosts (default {DEFAULT_PORT} on loopback; 0: any free port)"
        default = ("127.0.0.1", DEFAULT_PORT)
        add("--port", type=options.listen_address, default=default, metavar="[ADDRESS:]PORT", help=text)
        text = "further name of this server in requests, such as that of a proxy before it; repeatable"
        add("--allow-host", action="append", default=[], type=options.given, metavar="NAME", help=text)
        text = "file with the token that allows changes; made, with a random token, if it is missing (default: no changes)"
        add("--token-file", type=Path, metavar="FILE", help=text)
        add("--pool", type=options.given, default="default", metavar="NAME", help="pool of the predictions (default default)")
        add("--history", metavar="PLACE", help="job history for recommendations: a path, a SQLAlchemy URL, or off")
        add_place_options(command)

    def run(self, options: argparse.Namespace) -> int:
        return serve(options)


SERVE = ServeCommand()


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends this process."""
    try:
        from lightning_dlrover.dashboard import server
    except ImportError as error:
        raise UsageError(
            f"the page needs packages that cannot be imported ({error}); install them with: "
            "pip install 'lightning-dlrover[web]'"
        ) from error
    from lightning_dlrover.cli.lookup import etcd_access
    from lightning_dlrover.dashboard.recommend import openapi, recommendation
    from lightning_dlrover.output import say
    from lightning_dlrover.report.watcher import Watcher

    host, port = options.port
    try:
        token = server.read_token(options.token_file) if options.token_file is not None else ""
        listening = server.listening_socket(host, port)
    except server.Refused as error:
        raise UsageError(str(error)) from error
    with (
        contextlib.closing(listening),
        Watcher(options.endpoint, options.key_prefix, options.run_dir, etcd_access(options)) as watcher,
    ):
        app = server.create_app(
            watcher,
            server.Access(server.names_of(host, options.allow_host), token),
            _actions(watcher, options.pool) if token else {},
            _scrape(watcher),
            lambda given: recommendation(given, lambda job: _evidence(watcher, job, options)),
            openapi(),
        )
        shown = f"[{host}]" if ":" in host else host
        changes = f"changes need the token in {options.token_file}" if token else "read-only"
        say(f"jobs of {watcher.place} at http://{shown}:{listening.getsockname()[1]}/ ({changes})")
        server.PageServer(app).run(sockets=[listening])
    return EXIT_OK


def _scrape(watcher: Watcher) -> Any:
    """Return a function that makes the page of metrics; None without prometheus-client."""
    from lightning_dlrover.report.metrics import Exporter, MetricsError, page_of, registry_of

    try:
        registry = registry_of(Exporter(WatchedMetrics(watcher)))
    except MetricsError:
        return None
    return lambda: page_of(registry)


class WatchedMetrics:
    """The samples of all jobs that a watcher sees, up to a limit: jobs that run first."""

    def __init__(self, watcher: Watcher) -> None:
        from lightning_dlrover.report.metrics import JobsReader

        self._watcher = watcher
        self._readers: dict[tuple[str, str], JobsReader] = {}

    def __call__(self) -> list[Sample]:
        """Read the jobs. Raise EtcdError if an etcd does not answer."""
        from lightning_dlrover.rdzv.etcd.health import size_of
        from lightning_dlrover.rdzv.job.records import Keys
        from lightning_dlrover.report.metrics import MAX_JOBS, JobsReader, Sample

        now, samples, num_left, num_omitted = time.time(), [], MAX_JOBS, 0
        over = {job.run_id: job.is_over for job in self._watcher.jobs().jobs}
        etcds = self._watcher.etcds
        for etcd in etcds:
            place = etcd.place
            names = sorted(etcd.names(), key=lambda name: (over.get(name, False), name))
            reader = self._readers.setdefault((place.endpoint, place.prefix), JobsReader())
            figures = reader.read(etcd.client, [Keys(name, place.prefix) for name in names[:num_left]])
            samples += [sample for each in figures for sample in each.samples(now)]
            num_left -= len(names[:num_left])
            num_omitted += len(names) - len(figures)
        if len(etcds) == 1:
            samples.append(Sample("dlrover_etcd_size_bytes", size_of(etcds[0].client.caller)))
        return [*samples, Sample("dlrover_jobs_omitted", num_omitted)]


def _evidence(watcher: Watcher, run_id: str, options: argparse.Namespace) -> JobEvidence:
    """Return what is known about a job: from etcd, its run folder, or the job history.

    Raises:
        ValueError: none of them knows the job.
    """
    from lightning_dlrover.dashboard.recommend import JobEvidence, evidence_of
    from lightning_dlrover.rdzv.job.journal import Journal, readable
    from lightning_dlrover.rdzv.job.records import JobRecord
    from lightning_dlrover.report.status import EVENTS_FILE, JobNotFoundError, read_event_file
    from lightning_dlrover.tuning.history import JobHistory, history_url

    seen, client, now = watcher.job(run_id), watcher.client_of(run_id), time.time()
    if seen.job is not None and seen.place is not None and client is not None:
        journal = Journal(client, seen.place.keys)
        record = journal.get(JobRecord, seen.place.keys.job, readable).record
        return evidence_of(journal.events(), record, now, seen.job.target == "local")
    if seen.job is not None:
        with contextlib.suppress(JobNotFoundError):
            return evidence_of(read_event_file(options.run_dir / run_id / EVENTS_FILE), None, now)
    if (url := history_url(options.history)) is not None:
        with JobHistory(url) as history:
            for job in history.jobs(run_id):
                return JobEvidence(history.windows(job.key))
    raise ValueError(f"no job {run_id!r} is known here, nor in the job history; send its windows as `samples`")


def _actions(watcher: Watcher, pool: str) -> dict[str, Action]:
    """Return the changes that the page offers: those of `dlrover scale` and `drain`. Each connects to etcd on its own."""
    from lightning_dlrover.cli.control import drain_worker, leave_to_planner, scale_job
    from lightning_dlrover.codec import RecordError
    from lightning_dlrover.dashboard.server import Refused
    from lightning_dlrover.output import counted
    from lightning_dlrover.pool.commands import what_if_lines
    from lightning_dlrover.rdzv.etcd.types import EtcdError
    from lightning_dlrover.report.status import JobNotFoundError, connect

    refusals = (UsageError, EtcdError, RecordError, JobNotFoundError, ValueError)

    def act(run_id: str, change: Callable[[EtcdClient, JobPlace], str]) -> str:
        seen = watcher.job(run_id)
        if seen.job is None or seen.place is None:
            raise Refused(seen.source.problem or f"job {run_id!r} has ended; nothing can be changed", 404)
        try:
            with connect(seen.place) as client:
                return change(client, seen.place)
        except refusals as error:
            raise Refused(str(error)) from error

    def expected(client: EtcdClient, place: JobPlace, num_workers: int) -> str:
        try:
            return "\n".join(line for line in what_if_lines(client, place, pool, num_workers) if line)
        except refusals as error:
            return f"No prediction: {error}"

    def scale(run_id: str, body: Mapping[str, Any], is_dry: bool) -> str:
        number = _field(body, "num_workers", int)
        if is_dry:
            question = f"Set job {run_id} to {counted(number, 'worker')}?"
            return act(run_id, lambda client, place: f"{question}\n\n{expected(client, place, number)}")
        return act(run_id, lambda client, place: scale_job(client, place, number, {})[-1])

    def hold(run_id: str, body: Mapping[str, Any], is_dry: bool) -> str:
        size = _field(body, "num_workers", int)  # as the viewer saw it: the job may have changed since
        if is_dry:
            return (
                f"Hold job {run_id} at {counted(size, 'worker')}?\n\nNeither its planner nor its pool changes the number of "
                "workers until it is left to them again."
            )
        return act(run_id, lambda client, place: scale_job(client, place, size, {})[-1])

    def auto(run_id: str, body: Mapping[str, Any], is_dry: bool) -> str:
        if is_dry:
            return f"Leave the size of job {run_id} to its planner, or its pool?\n\nSettings by hand end."
        return act(run_id, leave_to_planner)

    def drain(run_id: str, body: Mapping[str, Any], is_dry: bool) -> str:
        return leave(run_id, _field(body, "worker", str), False, is_dry)

    def replace(run_id: str, body: Mapping[str, Any], is_dry: bool) -> str:
        return leave(run_id, _field(body, "worker", str), True, is_dry)

    def leave(run_id: str, worker: str, once_replaced: bool, is_dry: bool) -> str:
        if not is_dry:
            return act(run_id, lambda client, place: drain_worker(client, place, worker, once_replaced, "`dlrover serve`"))
        if once_replaced:
            return (
                f"Replace worker {worker} of job {run_id}?\n\nIt leaves once another worker is ready. The size stays the same."
            )
        job = watcher.job(run_id).job
        rest = max(1, job.num_workers - job.workers_per_node) if job is not None else 1
        question = (
            f"Drain worker {worker} of job {run_id}?\n\nIt hands over and leaves; {counted(rest, 'worker')} would train on."
        )
        return act(run_id, lambda client, place: f"{question}\n{expected(client, place, rest)}")

    return {"scale": scale, "hold": hold, "auto": auto, "drain": drain, "replace": replace}


def _field(body: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of a request. Raise ValueError if it is missing, or of another type."""
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"the field {name!r} is {value!r:.80}; give {'a whole number' if kind is int else 'a text'}")
    return value
