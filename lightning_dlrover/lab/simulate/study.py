"""A study's simulations: run them in parallel, store each result at once, and summarize them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover._version import __version__
from lightning_dlrover.files import RecordFile, RecordForm
from lightning_dlrover.lab.simulate.baselines import make_elastic
from lightning_dlrover.lab.simulate.knowledge import fairness_ratios, run_elastic
from lightning_dlrover.lab.simulate.simulator import Cluster, Lengths, elastic_workload
from lightning_dlrover.lab.simulate.traces import (
    RESTART_S,
    SAMPLES,
    MeasuredApplication,
    Submission,
    WorkloadError,
    read_applications,
    read_submissions,
    shaken,
)
from lightning_dlrover.tuning.cluster import Policy, PolicySettings

FILE_NAME = "simulations.jsonl"
BY_MODEL: Literal["by-model"] = "by-model"
LIVE: Literal["live"] = "live"
"""Costs of a resize that are not a number of seconds."""
FORMAT = 1


class ResultsError(ValueError):
    """A folder of simulations that cannot be continued."""


@dataclass(frozen=True)
class Header:
    """First line of the file."""

    format: int


@dataclass(frozen=True)
class Simulated:
    """One finished simulation. Lists of jobs are in the order of their ends; times are seconds of the simulation.

    Args:
        key: of all inputs.
        cost: seconds of a resize, `by-model`, or `live`.
        fairness: JCT of each job over its JCT alone with a fair share.
        spans: number of a job in the lists, begin, end, number of devices; for each stretch on the same devices.
    """

    key: str
    trace: str
    policy: str
    cost: str
    seed: int
    num_devices: int
    busy_device_s: float
    decisions: int
    jobs: list[str]
    applications: list[str]
    submitted: list[float]
    started: list[float]
    ended: list[float]
    resizes: list[int]
    fairness: list[float]
    spans: list[list[float]]

    @property
    def shown_cost(self) -> str:
        """The cost with its unit, if it has one."""
        return self.cost if self.cost in (BY_MODEL, LIVE) else f"{self.cost} s"

    @property
    def completions_s(self) -> NDArray[np.float64]:
        """JCT of each job, shape ``(num_jobs,)``."""
        completions: NDArray[np.float64] = np.array(self.ended) - np.array(self.submitted)
        return completions

    @property
    def mean_completion_s(self) -> float:
        return float(self.completions_s.mean())

    @property
    def median_completion_s(self) -> float:
        return float(np.median(self.completions_s))

    @property
    def p99_completion_s(self) -> float:
        return float(np.quantile(self.completions_s, 0.99))

    @property
    def makespan_s(self) -> float:
        return max(self.ended) - min(self.submitted)

    @property
    def utilisation(self) -> float:
        """Fraction of the devices' time that jobs held them."""
        return self.busy_device_s / (self.num_devices * self.makespan_s) if self.makespan_s else 0.0

    @property
    def resizes_per_job(self) -> float:
        return sum(self.resizes) / len(self.resizes)

    @property
    def unfairness(self) -> float:
        """Largest ratio of a job's JCT to its JCT alone with a fair share."""
        return max(self.fairness)


FORM: RecordForm[Header] = RecordForm(
    header=Header,
    records={"simulated": Simulated},
    format=FORMAT,
    file_of="simulations",
    line_of="a record of a simulation",
    user="dlrover lab simulate",
    error=ResultsError,
)


class Results(RecordFile[Header]):
    """The finished simulations of a folder by key. Use as a context manager.

    Raises:
        ResultsError: another process adds to the folder, or its file has another form.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE_NAME, FORM, Header(FORMAT))
        self.by_key: dict[str, Simulated] = {record.key: record for record in self.records}

    def add(self, record: Simulated) -> None:
        super().add(record)
        self.by_key[record.key] = record


LIVE_S = 0.5
"""Seconds without a step at a live resize; `live_resize.py` measures less."""

Cost: TypeAlias = float | Literal["by-model", "live"]
"""Seconds without a step when a running job's devices change.

`by-model`: those of a restart, by application. `live`: `LIVE_S`, after the workers on new devices have started while the others
train; new devices idle for as long as a start takes.
"""

StartCost: TypeAlias = float | Literal["by-model"]
"""Seconds without a step when a job starts, the same under every policy."""

PolicyMaker: TypeAlias = Callable[[str, int], Policy]
"""Returns the policy of a name, with a seed for those that choose at random."""


@dataclass(frozen=True)
class Trace:
    """The jobs of one file."""

    name: str
    submissions: tuple[Submission, ...]
    digest: str  # hash of the file's content


@dataclass(frozen=True)
class Inputs:
    """Everything that all simulations of a study have in common.

    Args:
        samples: work by application.
        start_cost: of every job, at its first start and after a pause.
        lengths: the policies' knowledge of them.
        digest: of everything that decides the results and is not in a question.
    """

    applications: Mapping[str, MeasuredApplication] = field(repr=False)
    cluster: Cluster
    samples: Mapping[str, int]
    every_s: float
    oracle: bool
    start_cost: StartCost
    lengths: Lengths
    digest: str


@dataclass(frozen=True)
class Question:
    """One simulation."""

    trace: Trace = field(repr=False)
    policy: str
    cost: Cost
    seed: int

    @property
    def cost_text(self) -> str:
        return self.cost if isinstance(self.cost, str) else f"{self.cost:g}"

    def key(self, inputs: Inputs) -> str:
        """Return a text that differs if any input does."""
        of_all = (inputs.digest, self.trace.name, self.trace.digest, self.policy, self.cost_text, self.seed)
        return hashlib.sha256(json.dumps(of_all).encode()).hexdigest()[:32]


def read_inputs(
    traces: Sequence[Path],
    speeds: Path,
    cluster: Cluster,
    *,
    samples: Mapping[str, int] = SAMPLES,
    every_s: float = 60.0,
    oracle: bool = False,
    start_cost: StartCost = 30.0,
    lengths: Lengths = "known",
) -> tuple[Inputs, list[Trace]]:
    """Read measured speeds and traces.

    Raises:
        ValueError: a file holds a line that cannot be used; the message names it.
        OSError: a file cannot be read.
    """
    applications = read_applications(speeds)
    of_files = hashlib.sha256()
    for path in sorted(speeds.glob("*.csv")):
        of_files.update(path.name.encode() + path.read_bytes())
    nodes, work = (cluster.num_nodes, cluster.per_node), sorted(samples.items())
    settings: tuple[object, ...] = (__version__, *nodes, work, every_s, oracle, start_cost, lengths)
    digest = hashlib.sha256(f"{of_files.hexdigest()} {settings}".encode()).hexdigest()
    found = [_trace(path, applications, cluster) for path in traces]
    names = [trace.name for trace in found]
    if len(set(names)) < len(names):
        raise WorkloadError(f"two traces are called {next(n for n in names if names.count(n) > 1)!r}; rename one of the files")
    inputs = Inputs(applications, cluster, samples, every_s, oracle, start_cost, lengths, digest)
    for trace in found:
        # Jobs that cannot run are refused here, before the first simulation.
        elastic_workload(trace.submissions, applications, cluster, samples=samples)
    return inputs, found


def questions(traces: Sequence[Trace], policies: Sequence[str], costs: Sequence[Cost], seeds: Sequence[int]) -> list[Question]:
    """Return every combination, those of one trace and seed together."""
    order = itertools.product(traces, seeds, costs, policies)
    return [Question(trace, policy, cost, seed) for trace, seed, cost, policy in order]


def answer(inputs: Inputs, question: Question, make_policy: PolicyMaker) -> Simulated:
    """Run one simulation.

    Raises:
        SimulationError: the policy exceeds a limit, or leaves jobs waiting forever.
        WorkloadError: an application's cost is not known.
    """
    workload = elastic_workload(
        shaken(question.trace.submissions, question.seed),
        inputs.applications,
        inputs.cluster,
        start_s=_seconds(inputs.start_cost),
        change_s=_seconds(question.cost),
        joins=question.cost == LIVE,
        lengths=inputs.lengths,
        samples=inputs.samples,
        seed=question.seed,
    )
    policy = make_policy(question.policy, question.seed)
    outcome = run_elastic(workload, policy, every_s=inputs.every_s, seed=question.seed, oracle=inputs.oracle)
    numbers = {job.job.name: number for number, job in enumerate(outcome.finished)}
    return Simulated(
        key=question.key(inputs),
        trace=question.trace.name,
        policy=question.policy,
        cost=question.cost_text,
        seed=question.seed,
        num_devices=outcome.num_devices,
        busy_device_s=outcome.busy_device_s,
        decisions=outcome.decisions,
        jobs=list(numbers),
        applications=[job.job.family.partition("/")[0] for job in outcome.finished],
        submitted=[job.job.submitted_s for job in outcome.finished],
        started=[job.started_s for job in outcome.finished],
        ended=[job.ended_s for job in outcome.finished],
        resizes=[job.changes + job.starts - 1 for job in outcome.finished],
        fairness=fairness_ratios(outcome, workload).tolist(),
        spans=[[numbers[s.job], s.began_s, s.ended_s, s.num_devices] for s in outcome.spans],
    )


def _seconds(cost: Cost) -> float | Mapping[str, float]:
    if cost == LIVE:
        return LIVE_S
    return RESTART_S if cost == BY_MODEL else float(cost)


def _trace(path: Path, applications: Mapping[str, MeasuredApplication], cluster: Cluster) -> Trace:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not UTF-8, so it is not a CSV file of jobs: {error.reason}") from error
    submissions = read_submissions(text.splitlines(), str(path), applications, cluster.num_devices)
    if not submissions:
        raise WorkloadError(f"{path} holds no job; give a trace with one job for each line after the header")
    return Trace(path.stem, tuple(submissions), hashlib.sha256(text.encode()).hexdigest())


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


FIGURES: Mapping[str, tuple[Callable[[Simulated], float], Callable[[float], str]]] = {
    "mean JCT": (lambda s: s.mean_completion_s, _hours),
    "median": (lambda s: s.median_completion_s, _hours),
    "p99": (lambda s: s.p99_completion_s, _hours),
    "makespan": (lambda s: s.makespan_s, _hours),
    "utilisation": (lambda s: s.utilisation, _percent),
    "resizes/job": (lambda s: s.resizes_per_job, "{:.1f}".format),
    "unfairness": (lambda s: s.unfairness, "{:.2f}".format),
    "unfair jobs": (lambda s: float(np.mean(np.array(s.fairness) > 1)), _percent),  # with a ratio above 1
}
"""Figures of a simulation by their titles, each with its form as text."""

COLUMNS = ("policy", "resize cost", *FIGURES)
"""Titles of `Row.cells`."""


@dataclass(frozen=True)
class Row:
    """Means of `FIGURES` over the simulations with one policy and one cost; all simulations have the same weight."""

    policy: str
    cost: str
    means: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Mean JCT."""
        return self.means[0]

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        return (self.policy, self.cost, *(text(mean) for (_, text), mean in zip(FIGURES.values(), self.means, strict=True)))


def summarize(simulations: Sequence[Simulated]) -> list[Row]:
    """Return a row for each cost and policy, in their order of first appearance."""
    groups: defaultdict[tuple[str, str], list[Simulated]] = defaultdict(list)
    for simulated in simulations:
        groups[simulated.shown_cost, simulated.policy].append(simulated)
    return [
        Row(policy, cost, tuple(float(np.mean([figure(each) for each in found])) for figure, _ in FIGURES.values()))
        for (cost, policy), found in groups.items()
    ]


def by_trace(simulations: Sequence[Simulated]) -> list[tuple[str, str, list[str]]]:
    """Return cost, trace and the mean JCT of each policy as text, and policies in their order of first appearance."""
    policies = list(dict.fromkeys(s.policy for s in simulations))
    groups: defaultdict[tuple[str, str], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for simulated in simulations:
        groups[simulated.shown_cost, simulated.trace][simulated.policy].append(simulated.mean_completion_s)
    return [
        (cost, trace, [_hours(float(np.mean(found[policy]))) if found[policy] else "-" for policy in policies])
        for (cost, trace), found in groups.items()
    ]


def table_text(rows: Sequence[Row], width: int) -> str:
    """Return the rows as a table of limited width, in columns of text."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(COLUMNS):
        table.add_column(title, justify="left" if number == 0 else "right", overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row.cells)
    text = io.StringIO()
    Console(file=text, width=width, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


END_WITHIN_S = 60.0
"""Seconds for an idle process to end, or one that was asked to. It needs a few milliseconds."""


def registered_policy(name: str, seed: int) -> Policy:
    """Return a policy of the registry without a bound on waiting. That is a rule of ours for pools, which no paper has.

    Raises:
        ValueError: the policy is unknown.
    """
    return make_elastic(name, PolicySettings(max_wait_s=math.inf, seed=seed))


def run_study(
    inputs: Inputs,
    asked: Sequence[Question],
    results: Results,
    *,
    make_policy: PolicyMaker = registered_policy,
    processes: int = 1,
    ended: Callable[[Simulated], None] | None = None,
) -> list[Simulated]:
    """Run the simulations that have no stored result, and return all results in order. Each is stored as soon as it is known.

    Args:
        results: those of earlier runs are taken from there.
        make_policy: a function of a module, as other processes import it.
        processes: simulations at a time.
        ended: called after each new one.
    Raises:
        SimulationError: a policy exceeds a limit.
    """
    keys = [question.key(inputs) for question in asked]
    missing = [question for question, key in zip(asked, keys, strict=True) if key not in results.by_key]
    for simulated in _answers(inputs, missing, make_policy, processes):
        results.add(simulated)
        if ended is not None:
            ended(simulated)
    return [results.by_key[key] for key in keys]


def _answers(inputs: Inputs, asked: Sequence[Question], make_policy: PolicyMaker, processes: int) -> Iterator[Simulated]:
    if processes <= 1 or len(asked) <= 1:
        yield from (answer(inputs, question, make_policy) for question in asked)
        return
    # Not forked: the threads of a progress bar may hold a lock at that moment. Each process has a pipe of its own, so that it
    # can be ended at any time; a pool shares queues with locks, which a process that was ended in a write never releases.
    context = multiprocessing.get_context("spawn")
    left = deque(asked)
    workers: dict[Connection, SpawnProcess] = {}
    started: list[SpawnProcess] = []
    try:
        for _ in range(min(processes, len(asked))):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(inputs, make_policy, there), daemon=True)
            process.start()
            started.append(process)
            workers[here] = process
            there.close()
            here.send(left.popleft())
        while workers:
            for ready in wait(list(workers)):
                connection = cast("Connection", ready)
                found = _received(connection, workers[connection])
                if left:
                    connection.send(left.popleft())
                else:
                    connection.send(None)
                    del workers[connection]
                yield found
    finally:
        for process in workers.values():
            process.terminate()
        _join(started)


def _join(processes: Sequence[SpawnProcess]) -> None:
    """Wait until processes have ended that are idle or were asked to end.

    Raises:
        RuntimeError: some did not end in time, and were killed.
    """
    killed = []
    for process in processes:
        process.join(END_WITHIN_S)
        if process.exitcode is None:
            process.kill()
            process.join(END_WITHIN_S)
            killed.append(f"{process.name} (pid {process.pid})")
    if killed:
        raise RuntimeError(
            f"simulating processes did not end within {END_WITHIN_S:g} s of a request, and were killed: "
            f"{', '.join(killed)}; perhaps something has stopped them, or the machine is short of memory. "
            "All finished simulations are stored: run the same command again"
        )


def _received(connection: Connection, process: SpawnProcess) -> Simulated:
    try:
        found = connection.recv()
    except EOFError:
        _join([process])
        raise RuntimeError(
            f"a simulating process has ended with exit code {process.exitcode}; if memory is short, use fewer processes"
        ) from None
    if isinstance(found, Exception):
        raise found
    return cast("Simulated", found)


def _work(inputs: Inputs, make_policy: PolicyMaker, connection: Connection) -> None:
    """Answer the questions of a connection until one is None, or the first process is gone."""
    # A terminal sends Ctrl-C to all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        while (question := connection.recv()) is not None:
            try:
                found: Simulated | Exception = answer(inputs, question, make_policy)
            except Exception as error:
                found = error
            connection.send(found)
