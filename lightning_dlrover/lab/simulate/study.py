"""All simulations of a study, one for each trace, policy, cost of a resize and seed, and the answer to each of them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from lightning_dlrover._version import __version__
from lightning_dlrover.planner.cluster.elastic_jobs import Cluster, Lengths, elastic_workload
from lightning_dlrover.planner.cluster.elastic_run import fairness_ratios, run_elastic
from lightning_dlrover.planner.cluster.measured_speeds import MeasuredApplication, read_applications
from lightning_dlrover.planner.cluster.policy import Policy
from lightning_dlrover.planner.cluster.work import RESTART_S, SAMPLES
from lightning_dlrover.planner.cluster.workloads import Submission, WorkloadError, read_submissions, shaken
from lightning_dlrover.simulate.records import BY_MODEL, LIVE, Simulated

__all__ = ["Cost", "Inputs", "PolicyMaker", "Question", "StartCost", "Trace", "answer", "questions", "read_inputs"]

LIVE_S = 0.5
"""Seconds without a step at a live resize; `live_resize.py` measures less."""

Cost: TypeAlias = float | Literal["by-model", "live"]
"""Seconds without a step when a running job's devices change.

`by-model`: those of a restart, by application. `live`: `LIVE_S`, after the workers on new devices have started while the others
went on; new devices idle for as long as a start takes.
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
        lengths: what policies know of them.
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
    settings: tuple[object, ...] = (
        __version__,
        cluster.num_nodes,
        cluster.per_node,
        sorted(samples.items()),
        every_s,
        oracle,
        start_cost,
        lengths,
    )
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
        SimulationError: the policy exceeds a limit, or leaves jobs waiting for ever.
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
        raise WorkloadError(f"{path} is not UTF-8, so it is no CSV file of jobs: {error.reason}") from error
    submissions = read_submissions(text.splitlines(), str(path), applications, cluster.num_devices)
    if not submissions:
        raise WorkloadError(f"{path} holds no job; give a trace with one job for each line after the header")
    return Trace(path.stem, tuple(submissions), hashlib.sha256(text.encode()).hexdigest())
