"""Elastic jobs run to their ends, and policies learn their speeds from what has run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lightning_dlrover.lab.simulate.knowledge import GUESS_SPREAD, NOISE, fairness_ratios, run_elastic
from lightning_dlrover.lab.simulate.simulator import Cluster, ElasticWorkload, Lengths, elastic_workload
from lightning_dlrover.lab.simulate.traces import Submission, WorkloadError, read_applications
from lightning_dlrover.tuning.cluster import Allocation, Scaling, Speeds, State
from tests.support.measured_clusters import write_speeds

WORK = {"toy": 64 * 200}


def as_asked(state: State) -> Allocation:
    """Each job has the devices that its user asked for, first come first served."""
    allocation = dict(state.allocation)
    used = {name for names in allocation.values() for name in names}
    free = [device.name for device in state.devices if device.name not in used]
    for job in sorted(state.waiting, key=lambda job: job.submitted_s):
        if len(free) >= job.num_devices:
            allocation[job.name], free = tuple(free[: job.num_devices]), free[job.num_devices :]
    return allocation


def everything_to_the_oldest(state: State) -> Allocation:
    jobs = [*state.waiting, *(running.job for running in state.running)]
    if not jobs:
        return {}
    oldest = min(jobs, key=lambda job: job.submitted_s)
    return {oldest.name: tuple(device.name for device in state.devices[: oldest.most_devices])}


def known(state: State) -> list[Scaling]:
    """What is known of each job."""
    jobs = [*state.waiting, *(running.job for running in state.running)]
    return [job.scaling for job in jobs if job.scaling is not None]


def workload(folder: Path, *jobs: Submission, start_s: float | Mapping[str, float] = 10.0) -> ElasticWorkload:
    applications = read_applications(write_speeds(folder))
    return elastic_workload(jobs, applications, Cluster(2, 2), start_s=start_s, samples=WORK)


def job(name: str, at_s: float, num_devices: int = 1, batch_size: int = 64) -> Submission:
    return Submission(name, "toy", at_s, num_devices, batch_size, where="t.csv:2")


def test_a_job_alone_takes_its_start_and_its_steps(tmp_path: Path) -> None:
    load = workload(tmp_path, job("a", 5))
    outcome = run_elastic(load, as_asked)
    step_s = 1 / load.families["toy/64"].steps_per_s((1,))
    assert outcome.finished[0].completion_s == pytest.approx(10 + 200 * step_s)
    assert [(span.began_s, span.num_devices) for span in outcome.spans] == [(5, 1)]


def test_costs_may_differ_by_application(tmp_path: Path) -> None:
    load = workload(tmp_path, job("a", 0), start_s={"toy": 7.0})
    assert load.arrivals[0].job.start_s == 7
    with pytest.raises(WorkloadError, match=r"t.csv:2: the cost of a start of 'toy' is unknown"):
        workload(tmp_path, job("a", 0), start_s={"other": 7.0})


def test_a_batch_too_small_for_its_devices_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"t.csv:2: 4 devices share 12 samples; .* so that 3 devices are the most"):
        workload(tmp_path, job("a", 0, num_devices=4, batch_size=12))


def test_larger_nodes_than_measured_are_refused(tmp_path: Path) -> None:
    applications = read_applications(write_speeds(tmp_path))
    with pytest.raises(WorkloadError, match="toy was measured on at most 2 devices of a node, the cluster has 4"):
        elastic_workload([job("a", 0)], applications, Cluster(2, 4), samples=WORK)


def test_a_policy_first_guesses_and_then_knows_what_has_run(tmp_path: Path) -> None:
    seen: list[Speeds] = []

    def policy(state: State) -> Allocation:
        for scaling in known(state):
            seen.append(scaling.speeds(np.array([2, 4]), np.array([1, 2])))
        return as_asked(state)

    load = workload(tmp_path, job("a", 0, num_devices=2))
    run_elastic(load, policy, every_s=60)
    assert seen[0].spread.tolist() == [GUESS_SPREAD] * 2
    assert seen[1].steps_per_s[0] == pytest.approx(load.families["toy/64"].steps_per_s((2,)), rel=4 * NOISE)
    assert seen[1].spread[0] < seen[1].spread[1] < 3


def test_jobs_of_a_family_share_what_they_have_learned(tmp_path: Path) -> None:
    first: dict[str, float] = {}

    def policy(state: State) -> Allocation:
        for waiting in state.waiting:
            assert waiting.scaling is not None
            first.setdefault(waiting.name, float(waiting.scaling.speeds(np.array([1]), np.array([1])).spread[0]))
        return as_asked(state)

    run_elastic(workload(tmp_path, job("a", 0), job("b", 300)), policy)
    assert first["a"] == GUESS_SPREAD
    assert first["b"] < 0.1


def test_an_oracle_knows_all_speeds(tmp_path: Path) -> None:
    load = workload(tmp_path, job("a", 0))
    family = load.families["toy/64"]

    def policy(state: State) -> Allocation:
        for scaling in known(state):
            speeds = scaling.speeds(np.array([3, 4, 5]), np.array([2, 2, 2]))
            assert speeds.steps_per_s.tolist() == [family.steps_per_s((1, 2)), family.steps_per_s((2, 2)), 0.0]
            assert speeds.spread.tolist() == [0, 0, 0]
        return as_asked(state)

    run_elastic(load, policy, oracle=True)


def test_lengths_are_known_or_not_or_wrong_by_about_a_factor_of_two(tmp_path: Path) -> None:
    applications, jobs = read_applications(write_speeds(tmp_path)), [job(f"j{n}", 0) for n in range(200)]

    def told(lengths: Lengths, seed: int = 0) -> list[float | None]:
        load = elastic_workload(jobs, applications, Cluster(2, 2), samples=WORK, lengths=lengths, seed=seed)
        assert [arrival.steps for arrival in load.arrivals] == [200.0] * len(jobs)
        return [arrival.job.steps_left for arrival in load.arrivals]

    assert told("known") == [200.0] * len(jobs)
    assert told("unknown") == [None] * len(jobs)
    factors = np.log(np.array(told("wrong"), dtype=float) / 200)
    assert factors.std() == pytest.approx(np.log(2), rel=0.2)
    assert told("wrong") == told("wrong") != told("wrong", seed=1)


def test_equal_seeds_give_equal_outcomes(tmp_path: Path) -> None:
    jobs = [job(f"j{n}", 40.0 * n, 1 + n % 3) for n in range(8)]
    one = run_elastic(workload(tmp_path, *jobs), everything_to_the_oldest, seed=3)
    assert one == run_elastic(workload(tmp_path, *jobs), everything_to_the_oldest, seed=3)


def test_a_job_alone_is_treated_fairly_and_one_that_waits_is_not(tmp_path: Path) -> None:
    load = workload(tmp_path, job("a", 0, num_devices=4))
    assert fairness_ratios(run_elastic(load, as_asked), load) == pytest.approx([1.0])
    load = workload(tmp_path, job("a", 0, num_devices=4), job("b", 0, num_devices=4))
    ratios = fairness_ratios(run_elastic(load, as_asked), load)
    assert ratios.max() > 1


def test_a_trace_without_models_draws_them_by_name_and_keeps_durations(tmp_path: Path) -> None:
    applications = read_applications(write_speeds(tmp_path, "ncf", batches=(4, 16, 32768)))
    flow = Submission("x", "", 0.0, 2, 0, 1e4)
    load = elastic_workload([flow], applications, Cluster(2, 2), start_s=0.0)
    assert load.arrivals[0].job.family == "ncf/32768"
    assert run_elastic(load, as_asked).finished[0].completion_s == pytest.approx(1e4)
