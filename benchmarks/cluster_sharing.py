"""What sharing devices gains under `ours`, where pairs of jobs were measured: JCT with and without it, by seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from cluster_policies import CHOSEN_ON, EQUAL_S, OURS, first_jobs, workload_files

from lightning_dlrover.planner.cluster import Allocation, Policy, State
from lightning_dlrover.planner.cluster.elastic import make_elastic
from lightning_dlrover.planner.cluster.elastic_jobs import Cluster
from lightning_dlrover.planner.cluster.measured_pairs import MEASURED_AS, MeasuredPairs, read_pairs
from lightning_dlrover.simulate.study import Inputs, Question, Trace, answer, questions, read_inputs

__all__ = ["sharing"]


def sharing(
    traces: Path, speeds: Path, pairs_file: Path, *, num_seeds: int, quick: bool, workloads: Collection[int] = ()
) -> dict[str, float | int]:
    """Simulate `ours` with and without sharing, as it learns and as an oracle, and return the figures of the last line.

    Raises:
        ValueError: a trace, a file of step times or that of pairs cannot be used.
    """
    pairs = read_pairs(pairs_file)
    inputs, read = read_inputs(workload_files(traces, workloads), speeds, Cluster(16, 4), pairs=pairs)
    if quick:
        num_seeds, read = 1, [first_jobs(trace) for trace in (read[0], read[-1])]
    print(_counterparts(read, pairs))
    print("mean JCT in hours of ours, and jobs that share devices in a decision, mean over decisions")
    print(f"{'workload':14}{'alone':>9}{'sharing':>9}{'':>7}{'known: alone':>15}{'sharing':>9}")
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    guests: list[float] = []
    for asked in questions(read, [OURS], [EQUAL_S], range(num_seeds)):
        found = [
            _mean_and_guests(inputs, asked, pairs if shares else None, oracle) for oracle in (False, True) for shares in (0, 1)
        ]
        rows.setdefault(asked.trace.name, []).append((found[0][0], found[1][0], found[2][0], found[3][0]))
        guests.append(found[1][1])
        (alone, _), (shared, learned), (known, _), (best, sure) = found
        print(f"{asked.trace.name:14}{alone:9.3f}{shared:9.3f}{learned:7.3f}{known:15.3f}{best:9.3f}{sure:7.3f}", flush=True)
    chosen = [name for name in rows if name in CHOSEN_ON]
    others = [name for name in rows if name not in CHOSEN_ON]
    for title, names in (("those of the constants", chosen), ("the others", others), ("all", list(rows))):
        if names:
            print(f"{title}: gain {_gain(rows, names, 0):.4f}, with all speeds known {_gain(rows, names, 2):.4f}")
    return {
        "sharing_gain": _gain(rows, list(rows), 0),
        "sharing_gain_known": _gain(rows, list(rows), 2),
        "guests": statistics.fmean(guests),
        "of": len(rows),
    }


def _mean_and_guests(inputs: Inputs, asked: Question, pairs: MeasuredPairs | None, oracle: bool) -> tuple[float, float]:
    """Return the mean JCT in hours, and how many jobs shared the devices of another one, mean over decisions."""
    counts: list[int] = []

    def watched(name: str, seed: int) -> Policy:
        return _counting(make_elastic(name), counts.append)

    simulated = answer(replace(inputs, pairs=pairs, oracle=oracle), asked, watched)
    return simulated.mean_completion_s / 3600, statistics.fmean(counts)


def _counting(policy: Policy, count: Callable[[int], None]) -> Policy:
    def decide(state: State) -> Allocation:
        found = policy(state)
        count(len(found) - len(set(found.values())))
        return found

    return decide


def _gain(rows: dict[str, list[tuple[float, float, float, float]]], names: Sequence[str], column: int) -> float:
    """Return by how much sharing lowers the mean JCT, as a fraction."""
    alone = sum(row[column] for name in names for row in rows[name])
    return 1 - sum(row[column + 1] for name in names for row in rows[name]) / alone


def _counterparts(traces: Sequence[Trace], pairs: MeasuredPairs) -> str:
    jobs = [job for trace in traces for job in trace.submissions]
    paired = sum(pairs.model(job.application) is not None for job in jobs)
    names = ", ".join(f"{application} as {model}" for application, model in MEASURED_AS.items())
    return f"pairs on {pairs.device}: {paired} of {len(jobs)} jobs train a model with measured pairs ({names})"
