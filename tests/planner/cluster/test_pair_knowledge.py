"""Simulated jobs that share devices: their real speed, what policies know of it, and what sharing gains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from measured_clusters import write_pairs, write_speeds

from lightning_dlrover.planner.cluster import Allocation, State
from lightning_dlrover.planner.cluster.elastic import make_elastic
from lightning_dlrover.planner.cluster.elastic_jobs import Cluster, ElasticTruth, ElasticWorkload, elastic_workload
from lightning_dlrover.planner.cluster.elastic_run import run_elastic
from lightning_dlrover.planner.cluster.knowledge import AloneTime, LearnedKnowledge
from lightning_dlrover.planner.cluster.measured_pairs import MeasuredPairs, read_pairs
from lightning_dlrover.planner.cluster.measured_speeds import Placement, read_applications
from lightning_dlrover.planner.cluster.outcome import SimulationOutcome
from lightning_dlrover.planner.cluster.pair_knowledge import LearnedPairs
from lightning_dlrover.planner.cluster.simulator import SimulationError, simulate
from lightning_dlrover.planner.cluster.workloads import Submission

FAMILY = "toy/64"
CLUSTER = Cluster(2, 2)


def workload(folder: Path, pairs: MeasuredPairs | None, num_jobs: int = 2, change_s: float = 1.0) -> ElasticWorkload:
    jobs = [Submission(name, "toy", 5.0 * n, 2, 64, where="t.csv:2") for n, name in enumerate("abcdef"[:num_jobs])]
    applications = read_applications(write_speeds(folder / "speeds"))
    return elastic_workload(jobs, applications, CLUSTER, change_s=change_s, samples={"toy": 64 * 4000}, pairs=pairs)


def outcome_of(folder: Path, speed: float | None, oracle: bool = False, others: float = 0.9) -> tuple[SimulationOutcome, int]:
    """Run under `ours`; return the largest number of jobs that shared devices, too."""
    pairs = read_pairs(write_pairs(folder, speed, others=others)) if speed is not None else None
    policy, most = make_elastic("ours"), 0

    def watched(state: State) -> Allocation:
        nonlocal most
        found = policy(state)
        most = max(most, len(found) - len(set(found.values())))
        return found

    return run_elastic(workload(folder, pairs), watched, oracle=oracle), most


def together(state: State) -> Allocation:
    """All jobs on all devices."""
    jobs = [*state.waiting, *(running.job for running in state.running)]
    return {job.name: tuple(device.name for device in state.devices) for job in jobs}


def alone_of(load: ElasticWorkload, sync_share: float = 0.0) -> AloneTime:
    return AloneTime(load.families[FAMILY].steps_per_s((2, 2)), sync_share)


def learned(load: ElasticWorkload) -> LearnedPairs:
    assert load.pairs is not None

    def alone(family: str, placement: Placement) -> AloneTime:
        return alone_of(load)

    return LearnedPairs(load.families, load.cluster, load.pairs, alone)


def expected(known: LearnedPairs, load: ElasticWorkload) -> tuple[float, float]:
    """Expected speed of a job beside another one on four devices, and its deviation."""
    job, other = (arrival.job for arrival in load.arrivals)
    found = known.beside().speeds(job, other, np.array([4]))
    return float(found.speeds[0, 0]), float(found.spreads[0, 0])


def test_real_speed_beside_another_job_counts_synchronisation_twice(tmp_path: Path) -> None:
    load = workload(tmp_path, read_pairs(write_pairs(tmp_path, 0.8)))
    outcome = simulate(load.arrivals, load.devices(), together, ElasticTruth(load.families, load.pairs))
    time = load.families[FAMILY].application.step_time((2, 2), 64)
    shared_s = (time.step_s - time.sync_s) / 0.8 + 2 * time.sync_s
    first = outcome.finished[0]
    # It starts within 1 s, and is alone until the other one comes after 5 s.
    assert first.completion_s == pytest.approx(5 + (4000 - 4 / time.step_s) * shared_s)


def test_pair_that_was_not_measured_is_refused_by_the_truth(tmp_path: Path) -> None:
    load = workload(tmp_path, read_pairs(write_pairs(tmp_path, 0.0)))
    with pytest.raises(SimulationError, match="'a' shares 4 devices with 'b'; such a pair was not measured, or does not fit"):
        simulate(load.arrivals, load.devices(), together, ElasticTruth(load.families, load.pairs))


def test_jobs_that_share_only_some_devices_are_refused(tmp_path: Path) -> None:
    load = workload(tmp_path, read_pairs(write_pairs(tmp_path, 0.8)))

    def partly(state: State) -> Allocation:
        return {name: names[: 2 if name == "a" else 4] for name, names in together(state).items()}

    with pytest.raises(SimulationError, match="two jobs share all of them, or none"):
        simulate(load.arrivals, load.devices(), partly, ElasticTruth(load.families, load.pairs))


def test_jobs_that_hardly_slow_each_other_end_sooner_where_they_may_share(tmp_path: Path) -> None:
    without, _ = outcome_of(tmp_path, None, oracle=True)
    shared, most = outcome_of(tmp_path, 0.98, oracle=True)
    assert most == 1
    assert shared.mean_completion_s < 0.95 * without.mean_completion_s


@pytest.mark.parametrize("speed", [0.0, 0.5])
def test_file_of_pairs_that_gain_nothing_changes_nothing(tmp_path: Path, speed: float) -> None:
    without, _ = outcome_of(tmp_path, None)
    with_pairs, most = outcome_of(tmp_path, speed, others=0.5)
    assert most == 0
    assert with_pairs.finished[0].ended_s == without.finished[0].ended_s
    assert with_pairs.spans == without.spans


def test_before_the_first_window_knowledge_is_that_of_other_pairs(tmp_path: Path) -> None:
    """The measured speed of the pair itself is the truth of the simulation: no policy may see it."""
    found = []
    for speed in (0.55, 0.98):
        load = workload(tmp_path, read_pairs(write_pairs(tmp_path, speed)))
        found.append(expected(learned(load), load))
    assert found[0] == found[1]
    load = workload(tmp_path, read_pairs(write_pairs(tmp_path, 0.98, others=0.6)))
    assert expected(learned(load), load)[0] < found[0][0] - 0.1


def test_windows_of_both_jobs_replace_what_was_expected(tmp_path: Path) -> None:
    load = workload(tmp_path, read_pairs(write_pairs(tmp_path, 0.6)))
    known, (job, other) = learned(load), (arrival.job for arrival in load.arrivals)
    before, doubt = expected(known, load)
    assert before > 0.75
    for _ in range(4):
        known.ran_beside(job, other, load.devices(), 0.6 * alone_of(load).steps_per_s)
        known.ran_beside(other, job, load.devices(), 0.6 * alone_of(load).steps_per_s)
    after, less_doubt = expected(known, load)
    assert after == pytest.approx(0.6, rel=0.05)
    assert less_doubt < 0.5 * doubt


def test_window_beside_another_job_teaches_nothing_of_the_speed_alone(tmp_path: Path) -> None:
    load = workload(tmp_path, read_pairs(write_pairs(tmp_path, 0.6)), change_s=0.0)
    knowledge = LearnedKnowledge(load.families, load.cluster)
    pairs = learned(load)
    arrivals = [replace(arrival, job=replace(arrival.job, submitted_s=0.0)) for arrival in load.arrivals]
    simulate(
        arrivals,
        load.devices(),
        together,
        ElasticTruth(load.families, load.pairs),
        every_s=30.0,
        knowledge=knowledge,
        pair_knowledge=pairs,
    )
    # Both end at the same time, so no window was one of a job alone.
    assert knowledge.alone(FAMILY, (2, 2)).sync_share == 0.0
    assert expected(pairs, load)[1] < 0.05
