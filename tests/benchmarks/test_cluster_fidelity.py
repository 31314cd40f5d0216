"""The simulated side of the comparison with real jobs."""

from __future__ import annotations

import pytest
from cluster_fidelity import CORES, JOBS, Inputs, simulated_times

INPUTS = Inputs(start_s=10.0, steps_per_s=(30.0, 45.0))


def test_each_simulated_job_takes_at_least_its_start_and_its_steps_at_full_speed() -> None:
    times = simulated_times(INPUTS)
    assert sorted(times) == sorted(job.name for job in JOBS)
    for job in JOBS:
        assert times[job.name] >= 10.0 + job.steps / 45.0


def test_the_simulated_cores_are_busy_until_the_last_job() -> None:
    times = simulated_times(Inputs(start_s=10.0, steps_per_s=(30.0, 60.0)))
    ends = [job.at_s + times[job.name] for job in JOBS]
    core_s = sum(10.0 + job.steps / 30.0 for job in JOBS)
    assert max(ends) == pytest.approx(core_s / CORES, rel=0.2)


def test_a_faster_machine_ends_all_simulated_jobs_earlier() -> None:
    fast = simulated_times(Inputs(start_s=5.0, steps_per_s=(60.0, 90.0)))
    assert all(fast[name] < taken for name, taken in simulated_times(INPUTS).items())
