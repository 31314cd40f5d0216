"""Sets of jobs that can be paused take turns, the one that makes most progress first."""

from __future__ import annotations

import pytest

from lightning_dlrover.colocate.packing import with_bounded_wait
from lightning_dlrover.colocate.policies import turns
from lightning_dlrover.colocate.slowdown import CoreSpeeds, Observation
from lightning_dlrover.tuning.cluster import Device, Job, PolicySettings, Profile, Running, State

CPU = Device("cpu", "cpu", "node", 16 * 10**9, {"cores": 2.0}, 8)
WAIT_S = 100.0


def job(
    name: str, cores: float, wait: float = 0.0, priority: int = 0, since_s: float = 0.0, paused_s: float | None = None
) -> Job:
    return Job(
        name,
        {"cpu": Profile(0, 10.0, {"cores": cores, "input": wait})},
        submitted_s=since_s,
        waiting_since_s=paused_s,
        priority=priority,
        family=name.split("-")[0],
    )


def chosen(
    *jobs: Job, now_s: float = 0.0, are_last: bool = False, num_starting: int = 0, speeds: CoreSpeeds | None = None
) -> set[str]:
    """Return the names of the jobs that run next to some that start."""
    policy = with_bounded_wait(turns(PolicySettings(speeds or CoreSpeeds(), most_together=8), are_last), WAIT_S)
    starting = tuple(Running(job(f"start-{number}", 1.0), ("cpu",), 0.0) for number in range(num_starting))
    return set(policy(State(now_s, (CPU,), jobs, starting))) - {each.job.name for each in starting}


def test_jobs_that_wait_for_data_run_with_those_that_compute() -> None:
    waiting = [job(f"input-{number}", 0.25, 0.8) for number in range(3)]
    names = chosen(job("compute-0", 1.0), *waiting, job("compute-1", 1.0), job("compute-2", 1.0))
    assert {"input-0", "input-1", "input-2"} <= names
    assert names & {"compute-0", "compute-1", "compute-2"}


def test_more_jobs_that_wait_for_data_than_twice_the_cores_run_at_once() -> None:
    assert len(chosen(*(job(f"input-{number}", 0.25, 0.8) for number in range(7)))) == 7


@pytest.mark.parametrize("number", range(1, 8))
def test_first_of_equal_jobs_always_runs(number: int) -> None:
    assert "compute-0" in chosen(*(job(f"compute-{each}", 1.0) for each in range(number)))
    assert "mixed-0" in chosen(job("mixed-0", 0.7), *(job(f"mixed-{each}", 0.7) for each in range(1, number)))


def test_jobs_run_on_a_core_each_and_one_more_where_they_wait_at_times() -> None:
    assert len(chosen(*(job(f"compute-{number}", 1.0) for number in range(7)))) == 2
    # While three jobs wait for 0.3 of the time, a core is idle for 0.24 of it.
    assert len(chosen(*(job(f"mixed-{number}", 0.7) for number in range(7)))) == 4


@pytest.mark.parametrize(("num_starting", "cores"), [(1, 1.2), (2, 0.2), (3, 0.0)])
def test_jobs_that_start_leave_fewer_cores_to_the_others(num_starting: int, cores: float) -> None:
    waiting = [job("compute-0", 1.0), job("input-0", 0.1, 0.9), job("compute-1", 1.0), job("input-1", 0.1, 0.9)]
    found = chosen(*waiting, num_starting=num_starting)
    used = sum(each.profiles["cpu"].use["cores"] for each in waiting if each.name in found)
    assert used <= cores + 1e-9
    assert bool(found) == (cores > 0.1)


def test_jobs_are_added_until_the_cores_are_busy_next_to_one_that_starts() -> None:
    waiting = (job("mixed-0", 0.75, 0.3), job("compute-0", 1.0), job("compute-1", 1.0))
    found = chosen(*waiting, num_starting=1)
    assert 2.0 <= 1.0 + sum(each.profiles["cpu"].use["cores"] for each in waiting if each.name in found) <= 3.0


@pytest.mark.parametrize(("number", "together"), [(1, 1), (2, 2), (3, 3), (4, 2), (7, 2)])
def test_last_jobs_all_run_where_they_nearly_fit(number: int, together: int) -> None:
    assert len(chosen(*(job(f"compute-{each}", 1.0) for each in range(number)), are_last=True)) == together


def test_last_jobs_take_turns() -> None:
    jobs = [job(f"compute-{number}", 1.0, paused_s=paused_s) for number, paused_s in enumerate((9.0, 10.0, 8.0, 10.0))]
    assert chosen(*jobs, now_s=10.0, are_last=True) == {"compute-0", "compute-2"}
    assert chosen(*jobs, now_s=10.0) == {"compute-0", "compute-1"}


def test_last_job_of_a_low_priority_waits_where_others_keep_the_cores_busy() -> None:
    low = job("compute-9", 1.0)
    high = [job(f"compute-{number}", 1.0, priority=1) for number in range(3)]
    assert "compute-9" not in chosen(low, *high, are_last=True)
    assert "compute-9" in chosen(low, *high[:1], are_last=True)


def test_job_that_would_take_more_from_the_others_than_it_makes_is_left_out() -> None:
    jobs = [job("compute-0", 1.0), job("compute-1", 1.0), job("greedy-0", 1.0)]
    seen = [Observation(CPU, (jobs[0], jobs[2]), (0.3, 0.9)), Observation(CPU, (jobs[0], jobs[1]), (1.0, 1.0))] * 20
    assert chosen(*jobs, speeds=CoreSpeeds.fit(seen)) == {"compute-0", "compute-1"}


def test_higher_priority_runs_and_lower_ones_only_next_to_it() -> None:
    low = [job(f"compute-{number}", 1.0) for number in range(4)]
    high = [job(f"other-{number}", 1.0, priority=1) for number in range(4)]
    assert chosen(*low, *high) < {each.name for each in high}
    assert "other-0" in chosen(*low, high[0])


def test_job_that_has_waited_too_long_runs() -> None:
    late = job("compute-9", 1.0, since_s=-WAIT_S - 1)
    others = [job(f"input-{number}", 0.25, 0.8, priority=1) for number in range(8)]
    assert "compute-9" in chosen(*others, late)
