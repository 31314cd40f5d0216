"""`dlrover lab characterize`: run the studies, limits first, then the points that the budget of time allows."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_dlrover import variables
from lightning_dlrover.cli.errors import EXIT_OK, Interrupted, UsageError, signals_as_exceptions
from lightning_dlrover.codec import from_fields
from lightning_dlrover.lab.characterize.findings import Evidence, findings
from lightning_dlrover.lab.characterize.measure import GPU, LIMITS, NEEDS_WORKERS, Effort, Share, check_users_model
from lightning_dlrover.lab.characterize.page import compare_text, differences, write_comparison, write_page
from lightning_dlrover.lab.characterize.points import (
    STUDIES,
    Limit,
    Machine,
    Point,
    Scope,
    Study,
    Visit,
    all_studies,
    has,
    this_machine,
    whole_cores,
)
from lightning_dlrover.lab.characterize.results import (
    Store,
    limit_values,
    read_store,
    record_in_history,
    results_of,
    write_tables,
)
from lightning_dlrover.lab.characterize.worker import Request
from lightning_dlrover.output import complain, counted, show
from lightning_dlrover.tuning.history import HistoryError, JobHistory, history_url
from lightning_dlrover.tuning.resources import available_bytes

FIRST_ESTIMATE_S = 1.5
"""Seconds of a visit before any was made."""


@dataclass(frozen=True)
class Aim:
    """When a point has been measured well enough."""

    min_visits: int = 2  # minutes apart, so that the interval includes changes of the machine
    max_visits: int = 4
    spread: float = 0.08  # width of the interval over the median, below which `min_visits` are enough


def in_order(studies: Sequence[Study]) -> list[Point]:
    """Return all points, each once: the studies in turn, the ends of each sweep first, then its middles."""
    queues = [[study.points[i] for i in _coarse_to_fine(len(study.points))] for study in studies]
    found: dict[Point, None] = {}
    for turn in range(max(map(len, queues), default=0)):
        found |= dict.fromkeys(queue[turn] for queue in queues if turn < len(queue))
    return list(found)


# Which point to visit next within a budget of time, and how long the rest takes. Pure.
#
# Every point is visited once before any is visited again: first the ends of each sweep, then its middle. Visits after that
# go where the interval is widest for the time that a visit takes.
def next_point(ordered: Sequence[Point], visits: Sequence[Visit], left_s: float, aim: Aim) -> Point | None:
    """Return the point where the next visit is most informative; None if none is worth the time or fits into it.

    Args:
        ordered: all points, as `in_order` returns them.
        left_s: seconds left of the budget.
    """
    made = _by_point(visits)
    costs = {point: _cost_s(made.get(point, ()), visits) for point in ordered}
    able = [point for point in ordered if costs[point] <= left_s and not _is_hopeless(made.get(point, ()))]
    for count in range(aim.min_visits):
        for point in able:
            # The same seeds give the same loss.
            if len(made.get(point, ())) <= count and (count == 0 or not point.measures_loss):
                return point
    results = results_of(visits)
    again = [point for point in able if point in results and not point.measures_loss and len(made[point]) < aim.max_visits]
    wide = [point for point in again if results[point].spread > aim.spread]
    return max(wide, key=lambda point: results[point].spread / len(made[point]) / costs[point], default=None)


def seconds_left(ordered: Sequence[Point], visits: Sequence[Visit], budget_left_s: float, aim: Aim) -> float:
    """Return the estimated time until every point has its least visits, within the budget."""
    made = _by_point(visits)
    needed = sum(
        max(0, (1 if point.measures_loss else aim.min_visits) - len(made.get(point, ()))) * _cost_s(made.get(point, ()), visits)
        for point in ordered
        if not _is_hopeless(made.get(point, ()))
    )
    return min(needed, max(0.0, budget_left_s))


def _is_hopeless(visits: Sequence[Visit]) -> bool:
    """Whether a point has failed twice without any figures: a third attempt would end in the same way."""
    return sum(bool(visit.problem) for visit in visits) >= 2 and not any(visit.blocks for visit in visits)


def _by_point(visits: Sequence[Visit]) -> Mapping[Point, list[Visit]]:
    found: dict[Point, list[Visit]] = {}
    for visit in visits:
        found.setdefault(visit.point, []).append(visit)
    return found


def _cost_s(own: Sequence[Visit], visits: Sequence[Visit]) -> float:
    # The minimum, because the first visit of a kind also starts processes and imports libraries.
    if own:
        return min(visit.took_s for visit in own)
    return statistics.median(visit.took_s for visit in visits) if visits else FIRST_ESTIMATE_S


def _coarse_to_fine(count: int) -> list[int]:
    """Return 0 to `count` - 1: both ends, the middle, the middles of both halves, and so on."""
    found = dict.fromkeys([0, count - 1] if count else [])
    spans = [(0, count - 1)]
    while spans:
        low, high = spans.pop(0)
        middle = (low + high) // 2
        if high - low > 1:
            found[middle] = None
            spans += [(low, middle), (middle, high)]
    return list(found)


ANSWER_TIMEOUT_S = 120.0
"""Seconds for one visit before its workers are ended and the point is given up."""

END_TIMEOUT_S = 10.0
"""Seconds for a worker to end after it has closed its channel."""

SPIN_COUNT = "0"
"""Turns of OpenMP's threads in a barrier before they sleep. By default they spin for milliseconds. With a small program next to
two threads on two cores, steps then took five times as long, and no two runs agreed."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    unread: bytes = b""


class WorkerPoolError(Exception):
    """Workers gave no answer; they have been ended, and the next request starts others."""


class WorkerPool:
    """Worker processes on this machine. Use as a context manager.

    Args:
        folder: place for the files of a measurement; removed by the caller.
    """

    def __init__(self, folder: Path, effort: Effort) -> None:
        self._folder = folder
        self._effort = effort
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._number = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and their loader workers."""
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # a session of its own; nothing in it is worth saving
            worker.channel.close()
        for worker in self._workers:
            worker.process.wait()
        self._workers = []

    def visit(self, point: Point) -> Visit:
        """Measure a point once. A visit that fails has a problem in place of figures."""
        began, at = time.monotonic(), time.time()
        try:
            answers = self._ask(self._request(point.num_workers, point=point), point.num_workers)
            shares = [from_fields(Share, answer, "a worker's answer") for answer in answers]
        except WorkerPoolError as error:
            return Visit(point, at, time.monotonic() - began, (), {}, problem=str(error))
        first = shares[0]
        return Visit(
            point=point,
            at=at,
            took_s=time.monotonic() - began,
            blocks=first.blocks,
            part_s=first.part_s,
            forward_s=first.forward_s,
            peak_memory_bytes=sum(share.peak_memory_bytes for share in shares),
            cpu_percent=sum(share.cpu_percent for share in shares),
            gpu_memory_bytes=sum(share.gpu_memory_bytes for share in shares),
            joules_per_step=first.joules_per_step,  # energy of the whole machine
            reference_s=first.reference_s,
        )

    def limit(self, name: str, threads: int) -> Limit:
        """Measure a limit of the machine once."""
        began, at = time.monotonic(), time.time()
        num_workers = NEEDS_WORKERS.get(name, 1)
        request = replace(self._request(num_workers), limit=name, threads=threads)
        blocks: tuple[float, ...] = ()
        problem = ""
        try:
            blocks = tuple(float(value) for value in self._ask(request, num_workers)[0]["blocks"])
        except WorkerPoolError as error:
            problem = str(error)
        return Limit(name, LIMITS[name][1], threads, at, time.monotonic() - began, blocks, problem)

    def _request(self, num_workers: int, point: Point | None = None) -> Request:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._number += 1
        return Request(self._number, 0, num_workers, self._store.port, str(self._folder), self._effort, point)

    def _ask(self, request: Request, num_workers: int) -> list[dict[str, Any]]:
        """Send a request to the first workers, and return their answers by global rank.

        Raises:
            WorkerPoolError: a worker failed.
        """
        while len(self._workers) < num_workers:
            self._workers.append(_start(self._folder))
        asked = self._workers[:num_workers]
        answers: list[dict[str, Any]] = []
        try:
            for global_rank, worker in enumerate(asked):
                worker.channel.sendall(json.dumps(asdict(replace(request, global_rank=global_rank))).encode() + b"\n")
            answers = _answers(asked)
        except OSError as error:
            self.close()
            raise WorkerPoolError(f"a worker ended: {error}") from error
        except WorkerPoolError:
            self.close()
            raise
        if problems := [answer["problem"] for answer in answers if "problem" in answer]:
            if num_workers > 1:
                self.close()  # the others may wait in a collective
            raise WorkerPoolError(problems[0])
        return answers


def _start(folder: Path) -> _Worker:
    ours, theirs = socket.socketpair()
    cores = len(os.sched_getaffinity(0))
    environment = {
        "GOMP_SPINCOUNT": SPIN_COUNT,
        **os.environ,
        "OMP_NUM_THREADS": str(cores),  # upper bound for all points
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        variables.HISTORY: "off",  # a user's model may hold our callback
    }
    with (folder / "workers.log").open("ab") as log, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_dlrover.lab.characterize.worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the whole group
        )
    return _Worker(process, ours)


def _answers(workers: Sequence[_Worker]) -> list[dict[str, Any]]:
    """Wait for one line from each worker, or for the first problem.

    Raises:
        WorkerPoolError: a worker ended, or the time is over.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(workers):
        waiting = {worker.channel: i for i, worker in enumerate(workers) if i not in found}
        ready, _, _ = select.select([*waiting], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerPoolError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
        for channel in ready:
            worker = workers[waiting[channel]]
            data = channel.recv(1 << 16)
            if not data:
                try:
                    code = worker.process.wait(END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    raise WorkerPoolError(f"a worker gave no answer and did not end within {END_TIMEOUT_S:.0f} s") from None
                hint = ", perhaps killed for its memory" if code == -signal.SIGKILL else ""
                raise WorkerPoolError(f"a worker ended with exit code {code}{hint}")
            worker.unread += data
            if worker.unread.endswith(b"\n"):
                answer = found[waiting[channel]] = json.loads(worker.unread)
                worker.unread = b""
                if "problem" in answer and len(workers) > 1:
                    return [answer]
    return [found[i] for i in range(len(workers))]


BUDGETS_S = {"quick": 240.0, "full": 3600.0}
"""Seconds for measurements without --budget. The report takes a few more."""

AIMS = {"quick": Aim(), "full": Aim(min_visits=3, max_visits=8, spread=0.05)}
EFFORTS = {"quick": Effort(), "full": Effort(warm_s=0.5, block_s=0.3, num_blocks=5)}

LIMITS_SHARE = 0.2
"""Largest fraction of the budget for one visit to the machine's limits."""

WORK_PREFIX = ".work-"
"""Names of folders with input files and the workers' output; they last as long as their run."""


@dataclass
class Progress:
    """A bar with an estimate on a terminal, a line every ten measurements elsewhere."""

    total: int
    done: int = 0
    _last: int = -1

    def show(self, text: str, left_s: float) -> None:
        bar = "#" * round(24 * self.done / max(1, self.total))
        line = f"[{bar:24}] {self.done}/{self.total}, about {left_s / 60:.1f} min left: {text}"
        if sys.stderr.isatty():
            print(f"\r{line[:118]:118}", end="", file=sys.stderr, flush=True)
        elif self.done // 10 != self._last:
            self._last = self.done // 10
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)


def measure_studies(store: Store, studies: Sequence[Study], scope: Scope, budget_s: float) -> None:
    """Measure the points that are missing in the store, until the budget is used or nothing is worth another visit."""
    deadline = time.monotonic() + budget_s
    for left in store.path.parent.glob(f"{WORK_PREFIX}*"):  # left by a killed run: this one alone has the folder now
        shutil.rmtree(left, ignore_errors=True)
    aim, points = AIMS[scope.size], in_order(studies)
    progress = Progress(len(points))
    with (
        tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=store.path.parent) as work,
        WorkerPool(Path(work), EFFORTS[scope.size]) as pool,
    ):
        share_s = LIMITS_SHARE * budget_s
        later_s = seconds_left(points, store.found.visits, budget_s - share_s, aim)
        took_s = min(share_s, _measure_limits(store, scope, pool, progress, 1, deadline - budget_s + share_s, later_s))
        while True:
            left_s = deadline - time.monotonic() - took_s
            visits = store.found.visits
            point = next_point(points, visits, left_s, aim)
            if point is None:
                break
            progress.done = len({visit.point for visit in visits} & {*points})
            progress.show(f"{point.workload} {differences(point)}", seconds_left(points, visits, left_s, aim))
            store.add(pool.visit(point))
        _measure_limits(store, scope, pool, progress, 2, deadline, 0.0)  # minutes later: their better visit is the limit
        progress.end()


def _measure_limits(
    store: Store, scope: Scope, pool: WorkerPool, progress: Progress, visits: int, deadline: float, later_s: float
) -> float:
    """Measure the limits that have fewer visits. Return the seconds that it took.

    Args:
        later_s: estimate for the points that follow, which counts as time left.
    """
    began = time.monotonic()
    for name, threads in _missing_limits(store, scope, visits):
        if time.monotonic() >= deadline:
            break
        progress.show(LIMITS[name][0], deadline - time.monotonic() + later_s)
        store.add(pool.limit(name, threads))
    return time.monotonic() - began


def _missing_limits(store: Store, scope: Scope, visits: int) -> list[tuple[str, int]]:
    known = Counter((limit.name, limit.threads) for limit in store.found.limits)
    wanted = [(name, scope.cores) for name in LIMITS if scope.device == "cuda" or not name.startswith(GPU)]
    wanted += [(name, 1) for name in ("copy", "rows", "multiply", "multiply_torch")]
    return [each for each in dict.fromkeys(wanted) if known[each] < visits]


MIN_BUDGET_S, MAX_BUDGET_S = 10.0, 7 * 24 * 3600.0
COMPARISON = "comparison.html"


def characterize_command(options: argparse.Namespace) -> int:
    """Measure, write the report, and record the samples; or compare two folders."""
    if options.compare:
        one, other = (read_store(folder) for folder in options.compare)
        show(compare_text(one, other))
        write_comparison(options.out / COMPARISON, one, other)
        show(f"report: {options.out / COMPARISON}")
        return EXIT_OK
    names = options.study or list(STUDIES)
    if unknown := sorted({*names} - {*STUDIES}):
        raise UsageError(f"--study {' '.join(unknown)}: unknown; the studies are {', '.join(STUDIES)}")
    budget_s = BUDGETS_S[options.size] if options.budget is None else 60 * options.budget
    if not MIN_BUDGET_S <= budget_s <= MAX_BUDGET_S:
        raise UsageError(
            f"--budget {options.budget:g}: give between {MIN_BUDGET_S / 60:.2g} and {MAX_BUDGET_S / 60:.0f} minutes"
        )
    if options.model:
        check_users_model(options.model)
    machine = this_machine(options.device)
    scope = Scope(
        size=options.size,
        device=options.device,
        cores=whole_cores(),
        memory_bytes=available_bytes(),
        has_torchrec=has("torchrec") and has("fbgemm_gpu"),
        has_pyarrow=has("pyarrow"),
        users_model=options.model or "",
    )
    studies = all_studies(scope, names)
    began = time.monotonic()
    exit_code = EXIT_OK
    with Store(options.out, machine) as store:
        try:
            with signals_as_exceptions(threading.Event()):
                measure_studies(store, studies, scope, budget_s)
        except Interrupted as interrupted:
            exit_code = 128 + interrupted.signal_number
            complain(
                f"interrupted; the same command continues with {counted(len(store.found.visits), 'measurement')} in "
                f"{store.path}"
            )
        _write(options, store, studies, scope, machine, time.monotonic() - began)
    return exit_code


def _write(
    options: argparse.Namespace, store: Store, studies: list[Study], scope: Scope, machine: Machine, took_s: float
) -> None:
    """Write tables and report, record the samples, and show the findings."""
    results, limits = results_of(store.found.visits), limit_values(store.found.limits)
    if not results:
        return
    found = findings(Evidence(studies, results, limits, scope.cores))
    write_tables(options.out, studies, results)
    report = options.out / "report.html"
    write_page(report, store.found, studies, found, scope)
    for finding in found:
        show(f"- {finding.text}")
    for study in studies:
        for text in study.skipped:
            show(f"skipped in {study.name}: {text}")
    try:
        if (url := history_url(options.history)) is not None:
            with JobHistory(url) as history:
                count = record_in_history(history, machine, store.found.visits)
            show(f"history: {counted(count, 'reference model')} recorded, from which later jobs start")
    except HistoryError as error:  # the measurements are safe, and the history is a convenience
        complain(str(error))
    asked = {point for study in studies for point in study.points}
    if missing := len(asked - results.keys()):
        show(f"{missing} of {counted(len(asked), 'point')} not measured; the same command continues")
    show(f"{counted(len(asked) - missing, 'point')} in {took_s / 60:.1f} min; report: {report}")
