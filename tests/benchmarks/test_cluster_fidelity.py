"""The simulated side of the comparison with real jobs."""

from __future__ import annotations

from dataclasses import replace

from cluster_fidelity import CORES, JOBS, Inputs, simulated_times

INPUTS = Inputs(start_s=10.0, steps_per_s=(7.0, 11.0), join_s=6.0, leave_s=1.0, pause_s=0.5)


def test_each_simulated_job_takes_at_least_its_start_and_its_steps_at_full_speed() -> None:
    times, _ = simulated_times(INPUTS)
    assert sorted(times) == sorted(job.name for job in JOBS)
    for job in JOBS:
        assert times[job.name] >= 10.0 + job.steps / 11.0


def test_simulated_jobs_need_their_core_seconds() -> None:
    times, _ = simulated_times(replace(INPUTS, steps_per_s=(7.0, 14.0), join_s=0.0, leave_s=0.0, pause_s=0.0))
    core_s = sum(10.0 + job.steps / 7.0 for job in JOBS)
    assert max(job.at_s + times[job.name] for job in JOBS) >= core_s / CORES


def test_simulated_jobs_change_their_sizes_and_workers_that_join_later_delay_them() -> None:
    quick, num_changes = simulated_times(INPUTS)
    late, _ = simulated_times(replace(INPUTS, join_s=30.0))
    assert num_changes >= 4
    assert sum(late.values()) > sum(quick.values())


def test_a_faster_machine_ends_all_simulated_jobs_earlier() -> None:
    fast, _ = simulated_times(replace(INPUTS, start_s=5.0, steps_per_s=(14.0, 22.0)))
    assert all(fast[name] < taken for name, taken in simulated_times(INPUTS)[0].items())
